"""On-policy distillation of one or several teachers into one student (DiffusionOPD, 2026)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from ..core.distributions import Categorical, ChunkedCategorical, Distribution
from ..core.guidance import GuidedBackbone, split_conditions
from ..core.objective import Context, Objective, WeightSource, require_settings
from ..core.policy import Backbone, Guidance, Process
from ..core.registry import ConfigError
from ..core.types import Condition, Loss, Metadata, PromptBatch, Segment, concatenate, select_rows
from ..processes.gaussian import GaussianProcess
from .ppo import count_actions, masked_mean

PREFIX = "teacher_"  # of the names of snapshots
TINY_GUIDANCE_SCALE = 2.0  # of a tiny teacher without weights, so that it differs from the student


@dataclass(frozen=True)
class Teacher:
    """Frozen weights of the student's architecture, with the guidance that they were trained for."""

    weights: Path | None = None  # a run, a checkpoint or an export; by default those that the student starts from
    ema: bool = False  # of a run or a checkpoint: the EMA of its weights
    guidance_scale: NonNegativeFloat | None = None  # of the teacher's predictions; by default as the student's
    negative_prompt: str = ""  # of that guidance
    tasks: tuple[str, ...] = ()  # that it teaches; by default its name


@dataclass(frozen=True)
class DistillationBatch:
    """States that the student visited, and the teacher of each sample."""

    cond: Condition
    teacher_cond: Condition  # with the embedding of the negative prompt, if a teacher is guided
    segments: tuple[Segment, ...]
    teacher: tuple[str, ...]  # names

    def __len__(self) -> int:
        return len(self.cond)


@dataclass(frozen=True)
class Distillation(Objective[Process, PromptBatch, DistillationBatch, int]):
    """Match the predictions of teachers on the states of the student's own rollouts.

    Specialists that were trained with different rewards merge into one model: every prompt has one teacher, by its task
    or in turn. A teacher without weights of its own is the student before training; with guidance, the student
    learns to do without.
    """

    teachers: dict[str, Teacher] = field(default_factory=dict)
    assign: Literal["round_robin", "task"] = "round_robin"  # the teacher of a prompt: in turn, or by its metadata
    task_key: str = "task"  # of the metadata
    # What a diffusion student matches: its next state by the ODE, the network's output (v), its clean sample (x0), or
    # the distribution of the next state (kl), for which the sampler has to be stochastic. Token models always use kl.
    target: Literal["ode", "v", "x0", "kl"] = "ode"
    needs_reward: ClassVar[bool] = False
    consumes: ClassVar[type] = PromptBatch

    def __post_init__(self) -> None:
        if not self.teachers:
            raise ValueError(
                "'teachers' is empty; name at least one, for example teachers: {color: {weights: runs/color}} [TM1605]"
            )
        for name, teacher in self.teachers.items():
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name):
                raise ValueError(
                    f"'teachers': {name!r:.60} is not a name; use letters, digits, - and _, and list other tasks in "
                    "its `tasks` [TM1606]"
                )
            if teacher.weights is None and teacher.guidance_scale is None:
                raise ValueError(
                    f"'teachers.{name}' is the student itself; set its weights to a run, a checkpoint or an export, or "
                    "its guidance_scale to distill guidance [TM1607]"
                )
        tasks = [task for name, teacher in self.teachers.items() for task in teacher.tasks or (name,)]
        repeated = sorted({task for task in tasks if tasks.count(task) > 1})
        if self.assign == "task" and repeated:
            raise ValueError(f"'teachers': the task '{repeated[0]:.60}' has several teachers; keep one [TM1608]")
        prompts = {teacher.negative_prompt for teacher in self.teachers.values() if teacher.guidance_scale is not None}
        require_settings(self, "teachers", len(prompts) <= 1, "the same negative_prompt for all guided teachers")

    def needs_log_probs(self) -> bool:
        return False

    def snapshots(self) -> tuple[str, ...]:
        return tuple(PREFIX + name for name in self.teachers)

    def snapshot_sources(self) -> Mapping[str, WeightSource]:
        return {
            PREFIX + name: WeightSource(teacher.weights, f"objective.teachers.{name}.weights", teacher.ema)
            for name, teacher in self.teachers.items()
            if teacher.weights is not None
        }

    def tiny(self) -> Self:
        teachers = {
            name: replace(
                teacher,
                weights=None,
                guidance_scale=TINY_GUIDANCE_SCALE if teacher.guidance_scale is None else teacher.guidance_scale,
            )
            if teacher.weights is not None
            else teacher
            for name, teacher in self.teachers.items()
        }
        return replace(self, teachers=teachers)

    @torch.no_grad()
    def collect(self, ctx: Context[Process], batch: PromptBatch) -> DistillationBatch:
        cond = ctx.policy.embed(batch.prompts, batch.metadata)
        teacher_cond, guided = cond, self._guidances()
        if guided:
            teacher_cond = GuidedBackbone(ctx.policy.model.unguided, guided[0]).embed(batch.prompts, batch.metadata)
        segments = concatenate([self._visit(ctx, rows, cond) for rows in ctx.chunks(len(cond))])
        return DistillationBatch(cond, teacher_cond, segments, self._choose_teachers(ctx, batch))

    def _guidances(self) -> list[Guidance]:
        return [
            Guidance(scale=teacher.guidance_scale, negative_prompt=teacher.negative_prompt)
            for teacher in self.teachers.values()
            if teacher.guidance_scale is not None
        ]

    def _visit(self, ctx: Context[Process], rows: Tensor, cond: Condition) -> tuple[Segment, ...]:
        """The states of a rollout of some rows: all denoising steps of a diffusion model, or all tokens."""
        process = ctx.policy.process.with_sampled_log_probs()
        policy = replace(ctx.policy, process=process)
        if not isinstance(process, GaussianProcess) or self.target == "kl":
            return policy.sample(select_rows(cond, rows), select_rows(ctx.rng, rows)).segments
        rollout = process.start(policy.model, select_rows(cond, rows), select_rows(ctx.rng, rows))
        segments: list[Segment] = []
        while rollout.progress < 1:
            state, i = rollout.x, rollout.steps_done
            rollout.step()
            t, s = (rollout.timesteps[j].expand(len(state)) for j in (i, i + 1))
            ones = torch.ones(len(state), 1, device=state.device)
            segments.append(Segment(t, s, state, rollout.x, 0 * ones, ones))
        return tuple(segments)

    def _choose_teachers(self, ctx: Context[Process], batch: PromptBatch) -> tuple[str, ...]:
        names = list(self.teachers)
        if self.assign == "round_robin":
            first = ctx.rng.step * len(batch) * ctx.comm.world_size
            return tuple(names[(first + row) % len(names)] for row in ctx.host_rng().rows.tolist())
        teachers = {task: name for name, teacher in self.teachers.items() for task in teacher.tasks or (name,)}
        return tuple(self._find_teacher(teachers, metadata) for metadata in batch.metadata)

    def _find_teacher(self, teachers: Mapping[str, str], metadata: Metadata) -> str:
        task = metadata.get(self.task_key)
        if task not in teachers:
            found = "no such key" if task is None else f"'{task!s:.60}'"
            raise ConfigError(
                f"objective.assign: a prompt has {found} as '{self.task_key:.60}' in its metadata, and the teachers "
                f"teach {', '.join(teachers)}; add the task to the `tasks` of a teacher, correct objective.task_key, "
                "or set objective.assign=round_robin [TM1609]"
            )
        return teachers[str(task)]

    def parts(self, experience: DistillationBatch) -> Sequence[int]:
        return range(len(experience.segments))

    def loss(self, ctx: Context[Process], experience: DistillationBatch, part: int) -> Loss:
        """1/2 mean (mu_S - mu_T)^2 of a step, over the number of steps; or KL(student || teacher), over all actions.

        On rectified flow mu = x + v dt, so that the first is 1/2 dt^2 mean (v_S - v_T)^2.
        """
        segments = experience.segments
        groups = self._group_by_teacher(ctx, experience)
        if not isinstance(ctx.policy.process, GaussianProcess) or self.target == "kl":
            distance = self._kl(ctx, experience, segments[part], groups)
            rows = (distance * segments[part].mask).sum(1) / count_actions(segments)
            return Loss(rows, {"kl": masked_mean(distance, segments[part].mask)})
        distance = self._squared_error(ctx, ctx.policy.process, experience, segments[part], groups)
        return Loss(distance / (2 * len(segments)), {"teacher_distance": distance.detach()})

    def _group_by_teacher(self, ctx: Context[Process], experience: DistillationBatch) -> dict[str, Tensor]:
        """Rows of each teacher that any rank needs: sharded networks have to be called on all ranks together."""
        groups = {}
        for name in self.teachers:
            rows = [i for i, teacher in enumerate(experience.teacher) if teacher == name]
            if ctx.comm.any(bool(rows)):
                groups[name] = torch.tensor(rows, dtype=torch.long)
        return groups

    def _teacher_model(self, ctx: Context[Process], name: str, cond: Condition) -> tuple[Backbone, Condition]:
        """The model as a teacher predicts, with its guidance, and the condition that this needs."""
        scale, model = self.teachers[name].guidance_scale, ctx.policy.model
        if scale is None:
            return model, cond
        if scale == 1:
            return model.unguided, split_conditions(cond)[0]
        return ctx.policy.process.wrap_guidance(model.unguided, Guidance(scale=scale)), cond

    def _squared_error(
        self,
        ctx: Context[Process],
        process: GaussianProcess,
        experience: DistillationBatch,
        segment: Segment,
        groups: Mapping[str, Tensor],
    ) -> Tensor:
        """Mean squared difference of student and teacher in the space of `target`: [B]."""
        expected = torch.empty_like(segment.state)
        for name, rows in groups.items():
            # A rank without samples of this teacher calls it for one, and drops the result.
            cond, some = self._select(experience, segment, name, rows if len(rows) else torch.zeros(1).long())
            model, cond = self._teacher_model(ctx, name, cond)
            with ctx.policy.weights.use(PREFIX + name):
                prediction = model.predict(some.state, some.t, cond).float()
            if len(rows):
                expected[rows.to(expected.device)] = self._to_target(process, some, prediction)
        output = ctx.policy.model.predict(segment.state, segment.t, experience.cond).float()
        return ((self._to_target(process, segment, output) - expected) ** 2).flatten(1).mean(1)

    def _to_target(self, process: GaussianProcess, segment: Segment, output: Tensor) -> Tensor:
        if self.target == "v":
            return output
        clean = process.path.clean(segment.state, segment.t, output)
        return clean if self.target == "x0" else process.ode_step(segment.state, segment.t, segment.s, clean)

    def _kl(
        self, ctx: Context[Process], experience: DistillationBatch, segment: Segment, groups: Mapping[str, Tensor]
    ) -> Tensor:
        """KL(student || teacher) of every action: [B, K]."""
        process, expected = ctx.policy.process, list[tuple[Tensor, Distribution]]()
        for name, rows in groups.items():
            cond, some = self._select(experience, segment, name, rows if len(rows) else torch.zeros(1).long())
            model, cond = self._teacher_model(ctx, name, cond)
            with ctx.policy.weights.use(PREFIX + name):
                expected.append((rows, process.action_distribution(model, cond, some)))
        kl = torch.zeros_like(segment.mask)
        for rows, teacher in expected:
            cond, some = select_rows((experience.cond, segment), rows if len(rows) else torch.zeros(1).long())
            each = distribution_kl(ctx.policy.action_distribution(cond, some), teacher)
            kl = kl.index_put((rows.to(kl.device),), each.to(kl.dtype)) if len(rows) else kl + 0 * each.sum()
        return kl

    def _select(
        self, experience: DistillationBatch, segment: Segment, name: str, rows: Tensor
    ) -> tuple[Condition, Segment]:
        cond = experience.cond if self.teachers[name].guidance_scale is None else experience.teacher_cond
        return select_rows((cond, segment), rows)


def distribution_kl(student: Distribution, teacher: Distribution) -> Tensor:
    """KL(student || teacher): [B, K]. Guidance doubles a batch, so that only one of both may be computed in chunks."""
    if isinstance(student, Categorical) and isinstance(teacher, ChunkedCategorical):
        return student.kl(Categorical(teacher.logits))
    if isinstance(student, ChunkedCategorical) and isinstance(teacher, Categorical):
        return Categorical(student.logits).kl(teacher)
    return student.kl(teacher)
