"""On-policy distillation: the loss by hand, how teachers are chosen and loaded, and two specialists in one student."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.config.build import build, make_tiny
from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load
from tastemaker.config.validate import validate_config
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import PromptBatch, select_rows
from tastemaker.core.weights import FrozenCopyFinetuning
from tastemaker.objectives.distill import Distillation, Teacher
from tastemaker.processes.dynamics import ODE
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.training.trainer import build_run

OTHER = Path("unused")  # weights that tests write into the snapshots themselves
TWO = {"red": Teacher(OTHER), "blue": Teacher(OTHER)}


def distinct_policy(objective: Distillation, name: str, guidance: Guidance | None = None) -> Policy[Any]:
    """A policy whose teachers are three different random networks."""
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots(), guidance)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensors in policy.weights.snapshot_tensors().values():
            for x in tensors.values():
                x.add_(0.1 * torch.randn(x.shape, generator=generator))
    return policy


@pytest.mark.parametrize("target", ["ode", "v", "x0"])
@pytest.mark.parametrize("name", ["flow", "epsilon"])
def test_loss_is_the_squared_difference_on_states_of_the_students_ode_rollout(name: str, target: Any) -> None:
    objective = Distillation(TWO, target=target)
    policy = distinct_policy(objective, name)
    policy = replace(policy, process=replace(policy.process, dynamics=ODE(), num_steps=4))
    ctx = toys.context(policy, 4)
    batch = objective.collect(ctx, toys.prompts(4))
    cond, path = policy.embed(toys.PROMPTS), policy.process.path
    levels = path.timesteps(4)
    x, expected = ctx.rng.normal("start", *policy.model.shape), torch.zeros(4)
    with torch.no_grad():
        for i in range(4):
            t, s = levels[i].expand(4), levels[i + 1].expand(4)
            student, teacher = policy.model.predict(x, t, cond), torch.empty_like(x)
            for row, name_of_teacher in enumerate(batch.teacher):
                with policy.weights.use(f"teacher_{name_of_teacher}"):
                    some = select_rows((x, t, cond), torch.tensor([row]))
                    teacher[row] = policy.model.predict(*some)[0]
            if target == "v":
                difference = student - teacher
            elif target == "x0":
                difference = path.clean(x, t, student) - path.clean(x, t, teacher)
            elif name == "flow":  # Euler's method: mu = x + v dt
                difference = (levels[i + 1] - levels[i]) * (student - teacher)
            else:
                both = [policy.process.ode_step(x, t, s, path.clean(x, t, each)) for each in (student, teacher)]
                difference = both[0] - both[1]
            expected += 0.5 * (difference**2).flatten(1).mean(1) / 4
            x = policy.process.ode_step(x, t, s, path.clean(x, t, student))
        losses = toys.total_loss(objective, ctx, batch)
    assert batch.teacher == ("red", "blue", "red", "blue") and (expected > 0).all()
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_token_students_minimize_the_kl_on_their_own_samples(name: str) -> None:
    objective = Distillation(TWO)
    policy = distinct_policy(objective, name)
    ctx = toys.context(policy, 4)
    batch = objective.collect(ctx, toys.prompts(4))
    samples = policy.sample(policy.embed(toys.PROMPTS), ctx.rng)
    expected, actions = torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for segment in samples.segments:
            p = policy.action_distribution(samples.cond, segment).logits.log_softmax(-1)
            q = torch.empty_like(p)
            for teacher in TWO:
                with policy.weights.use(f"teacher_{teacher}"):
                    logits = policy.action_distribution(samples.cond, segment).logits
                rows = [i for i, each in enumerate(batch.teacher) if each == teacher]
                q[rows] = logits.log_softmax(-1)[rows]
            expected += ((p.exp() * (p - q)).sum(-1) * segment.mask).sum(1)
            actions += segment.mask.sum(1)
        torch.testing.assert_close(toys.total_loss(objective, ctx, batch), expected / actions, rtol=1e-4, atol=1e-7)
    assert (expected > 0).all()


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_teacher_that_equals_the_student_has_no_loss(name: str) -> None:
    objective = Distillation({"same": Teacher(OTHER)})
    policy = toys.policy(name, FrozenCopyFinetuning(), objective.snapshots())
    ctx = toys.context(policy, 4)
    losses = toys.total_loss(objective, ctx, objective.collect(ctx, toys.prompts(4)))
    assert losses.abs().max() < 1e-10


def test_teacher_has_a_guidance_scale_of_its_own() -> None:
    """A student with guidance 2 and a teacher of the same weights with 2 agree; without guidance they do not."""
    for scale, equal in ((None, True), (2.0, True), (1.0, False), (3.0, False)):
        objective = Distillation({"same": Teacher(OTHER, guidance_scale=scale)})
        policy = toys.policy("flow", FrozenCopyFinetuning(), objective.snapshots(), Guidance(scale=2.0))
        ctx = toys.context(policy, 4)
        losses = toys.total_loss(objective, ctx, objective.collect(ctx, toys.prompts(4)))
        assert bool(losses.max() < 1e-10) == equal, scale


def test_sde_form_is_the_kl_of_stochastic_steps() -> None:
    objective = Distillation({"other": Teacher(OTHER)}, target="kl")
    policy = distinct_policy(objective, "flow")  # FlowSDE
    ctx = toys.context(policy, 4)
    batch = objective.collect(ctx, toys.prompts(4))
    segment = batch.segments[2]
    with torch.no_grad():
        student = policy.action_distribution(batch.cond, segment)
        with policy.weights.use("teacher_other"):
            teacher = policy.action_distribution(batch.cond, segment)
        squared = ((student.mean - teacher.mean) ** 2).flatten(1).mean(1)
        loss = objective.loss(ctx, batch, 2).rows
    torch.testing.assert_close(loss, squared / (2 * student.std**2) / len(batch.segments))


def test_teachers_are_chosen_by_task_or_in_turn() -> None:
    teachers = {"red": Teacher(OTHER, tasks=("warm", "red")), "blue": Teacher(OTHER)}
    policy = toys.policy("flow", snapshots=Distillation(teachers).snapshots())
    tasks = ("warm", "blue", "red", "warm")
    batch = PromptBatch(toys.PROMPTS, tuple({"tag": task} for task in tasks))
    by_task = Distillation(teachers, assign="task", task_key="tag").collect(toys.context(policy, 4), batch)
    assert by_task.teacher == ("red", "blue", "red", "red")
    in_turn = Distillation(teachers | {"green": Teacher(OTHER)})
    ranks = [replace(toys.context(policy, 4, step=1), rng=Randomness(0, 1, torch.arange(k, k + 2))) for k in (0, 2)]
    whole = in_turn._choose_teachers(toys.context(policy, 4, step=1), batch)
    two = [
        in_turn._choose_teachers(
            replace(c, comm=replace(c.comm, world_size=2)), select_rows(batch, torch.tensor([0, 1]))
        )
        for c in ranks
    ]
    assert whole == two[0] + two[1] == ("blue", "green", "red", "blue")
    with pytest.raises(ConfigError, match=r"'tag'.*TM1609"):
        Distillation({"red": Teacher(OTHER)}, assign="task", task_key="tag").collect(toys.context(policy, 4), batch)


# Specialists of real runs


def specialist(directory: Path, color: str, *overrides: str, steps: int = 30) -> Path:
    """A run that fits one color for every prompt."""
    data = f"data={{type: toy_images, colors: [{color}], num_samples: 64}}"
    settings = [data, f"steps={steps}", "batch.prompts=32", "optim.lr=3e-3", "sample.every=0", "seed=1", *overrides]
    run = build(load("likelihood-toy-flow", settings), directory)
    list(train(run))
    from tastemaker.training.run_directory import write_run_config

    write_run_config(load("likelihood-toy-flow", settings), directory)
    return directory


@pytest.fixture(scope="module")
def specialists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("specialists")
    return {color: specialist(folder / color, color) for color in ("red", "blue")}


def distill_settings(teachers: dict[str, Path], folder: Path, *overrides: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"a {name}", "task": name}) for name in teachers))
    listed = ", ".join(f"{name}: {{weights: {path}}}" for name, path in teachers.items())
    objective = f"objective={{type: distill, assign: task, teachers: {{{listed}}}}}"
    return [objective, f"data={{type: prompt_file, path: {prompts}}}", "batch.prompts=16", "sample.every=0", *overrides]


def colors_of(run: Any) -> dict[str, Tensor]:
    """Mean color of the samples of each prompt: [3]."""
    policy = run.policy
    colors = {}
    for name in ("red", "blue"):
        rng = Randomness(9, 0, torch.arange(32))
        with torch.no_grad():
            pixels = policy.decode(policy.sample(policy.embed((f"a {name}",) * 32), rng).final)
        colors[name] = pixels.mean((0, 1, 3, 4))
    return colors


def test_two_specialists_merge_into_one_student_that_matches_both(specialists: dict[str, Path], tmp_path: Path) -> None:
    settings = distill_settings(
        specialists, tmp_path, "steps=50", "process.num_steps=4", "optim.lr=5e-3", "optim.lr_schedule=linear"
    )
    run = build(load("distill-toy-flow", settings), tmp_path / "run")
    metrics = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    assert metrics[-1]["teacher_distance"] < 0.1 * metrics[0]["teacher_distance"]
    student = colors_of(run)
    for name, directory in specialists.items():
        teacher = build(load("likelihood-toy-flow", ["sample.every=0"]), directory)
        teacher.resume(directory / "checkpoints/step-000030")
        torch.testing.assert_close(student[name], colors_of(teacher)[name], atol=0.15, rtol=0)
    assert (student["red"] - student["blue"]).abs().max() > 0.5


@pytest.mark.parametrize("tuning", ["full", "frozen_copy"])
def test_resume_is_exact(tuning: str, specialists: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = ("steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", f"tuning.type={tuning}")
    config = load("distill-toy-flow", distill_settings(specialists, tmp_path, *checkpoints))
    uninterrupted, resumed = (build(config, tmp_path / name) for name in ("run", "other"))
    expected = [event.metrics for event in train(uninterrupted) if isinstance(event, StepCompleted)]
    resumed.resume(tmp_path / "run/checkpoints/step-000002")
    assert [event.metrics for event in train(resumed) if isinstance(event, StepCompleted)] == expected[2:]
    teacher = specialists["red"] / "checkpoints/step-000030"
    from safetensors.torch import load_file

    want, snapshot = (
        load_file(teacher / "weights.safetensors"),
        resumed.policy.weights.snapshot_tensors()["teacher_red"],
    )
    assert all(torch.equal(snapshot[key], x) for key, x in want.items())


LORA = "tuning={type: lora, rank: 2}"


@pytest.fixture(scope="module")
def lora_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return specialist(tmp_path_factory.mktemp("lora") / "red", "red", LORA, steps=4)


@pytest.mark.parametrize("tuning", ["{type: lora, rank: 2}", "{type: lora, rank: 2, alpha: 1}", "{type: full}"])
def test_adapters_teach_adapters_and_all_weights(tuning: str, lora_teacher: Path, tmp_path: Path) -> None:
    settings = distill_settings({"red": lora_teacher}, tmp_path, f"tuning={tuning}", "steps=1")
    run = build(load("distill-toy-flow", settings), tmp_path / "run")
    teacher = build(load("likelihood-toy-flow", [LORA, "sample.every=0"]), lora_teacher)
    teacher.resume(lora_teacher / "checkpoints/step-000004")
    x, t = torch.randn(2, *run.policy.model.shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.8])
    with torch.no_grad():
        expected, base = (each.policy.model.predict(x, t, each.policy.embed(["a red"] * 2)) for each in (teacher, run))
        with run.policy.weights.use("teacher_red"):
            found = run.policy.model.predict(x, t, run.policy.embed(["a red"] * 2))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - base).abs().max() > 1e-3


def test_teachers_of_another_shape_are_refused(
    specialists: dict[str, Path], lora_teacher: Path, tmp_path: Path
) -> None:
    full, adapters = {"red": specialists["red"]}, {"red": lora_teacher}
    for teachers, override, code in (
        (full, "model.width=32", "TM1612"),
        (full, LORA, "TM1613"),
        (adapters, "tuning={type: lora, rank: 4}", "TM1615"),
        ({"red": tmp_path / "missing"}, "steps=1", "TM1611"),
    ):
        config = load("distill-toy-flow", distill_settings(teachers, tmp_path, override))
        with pytest.raises(ConfigError, match=rf"objective\.teachers\.red\.weights.*{code}"):
            build(config, tmp_path / "run")


def test_exports_teach(specialists: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "red.safetensors"
    source = specialists["red"] / "checkpoints/step-000030/weights.safetensors"
    file.write_bytes(source.read_bytes())
    config = load("distill-toy-flow", distill_settings({"red": file}, tmp_path))
    run: Any = build_run(config, tmp_path / "run", None)
    from safetensors.torch import load_file

    snapshot = run.policy.weights.snapshot_tensors()["teacher_red"]
    assert all(torch.equal(snapshot[key], x) for key, x in load_file(file).items())


def test_configuration_survives_a_round_trip_and_tiny_teachers_need_no_weights(tmp_path: Path) -> None:
    config = load("distill-toy-flow", distill_settings({"red": tmp_path, "blue": tmp_path}, tmp_path))
    assert validate_config(config_to_dict(config)) == config
    tiny = make_tiny(config).objective
    assert (
        isinstance(tiny, Distillation)
        and not tiny.snapshot_sources()
        and tiny.snapshots() == config.objective.snapshots()
    )


@pytest.mark.parametrize(
    ("teachers", "code"),
    [
        ({}, "TM1605"),
        ({"a.b": Teacher(OTHER)}, "TM1606"),
        ({"same": Teacher()}, "TM1607"),
        ({"a": Teacher(OTHER, tasks=("x",)), "b": Teacher(OTHER, tasks=("x",))}, "TM1608"),
    ],
)
def test_invalid_teachers_are_refused(teachers: dict[str, Teacher], code: str) -> None:
    with pytest.raises(ValueError, match=code):
        Distillation(teachers, assign="task")
