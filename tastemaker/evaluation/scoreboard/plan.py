"""The plan of a scoreboard as data: generator families, cells to train or search, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from ...config.check import find_problems
from ...config.load import find_recipe, load, read_recipe, read_yaml_mapping
from ...config.schema import RunConfig
from ...config.validate import build_component
from ...core.policy import Process
from ...core.registry import ConfigError, suggest_name
from ...rewards.wrappers import ShuffledReward

PLAN_FOLDER = Path(__file__).parent
Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class CellTarget:
    """Targets of a cell, set before measuring. All that are given must hold."""

    min_score: Fraction | None = None  # mean score afterwards
    min_gain: Fraction | None = None  # mean increase of the score
    improves: bool = False  # the score rises beyond its interval, and by more than in the control
    frechet_falls: bool = False
    reward_rises: bool = False
    no_regression: bool = False  # the score does not fall beyond its interval
    baseline: str = ""  # key of a row whose score must be reached, such as grpo-flow or best-of-masked-20
    max_cost_ratio: Fraction = 1.0  # samples, or network calls of a search, relative to the baseline's
    guard_warns: bool = False  # the guard reports reward hacking


@dataclass(frozen=True)
class SearchSettings:
    """Searches with a generator, one for each number of candidates."""

    type: Literal["best_of_n", "parm"]
    candidates: tuple[PositiveInt, ...]
    verifier: str = "playground_judge"
    start_progress: Annotated[float, Field(ge=0, le=1)] = 0.0  # PARM: previews are judged from this progress on
    top_k: PositiveInt | None = None  # PARM: candidates per prompt that continue after they were judged
    trained: bool = False  # train with the cell's recipe before searching

    @property
    def fingerprint_parts(self) -> list[str | float]:
        """Settings that identify a measurement. Defaults are left out, so that new settings change no fingerprint."""
        trained, top_k = ["trained"] if self.trained else [], [f"top_k {self.top_k}"] if self.top_k else []
        return [self.verifier, self.start_progress, *trained, *top_k]


@dataclass(frozen=True)
class ScoreboardCell:
    """One experiment of the scoreboard."""

    recipe: str
    family: str
    objective: str  # label in the table
    reward: str  # label in the table
    overrides: tuple[str, ...] = ()
    control: bool = False  # also run with shuffled rewards
    control_overrides: tuple[str, ...] = ()  # of the control in their place, if no reward trains
    search: SearchSettings | None = None  # instead of training, or after it
    seeds: PositiveInt | None = None  # upper limit on the number of seeds
    target: CellTarget | None = None


@dataclass(frozen=True)
class GeneratorFamily:
    """How samples of a family are generated for evaluation, whatever they were trained with."""

    process: str  # recipe whose process is used
    benchmark: str = "playeval"


@dataclass(frozen=True)
class ScoreboardPlan:
    """All families and cells of a bench."""

    families: dict[str, GeneratorFamily]
    cells: dict[str, ScoreboardCell]
    name: str = "bench"

    def process(self, family: str) -> Process:
        """Return the process that generates a family's samples for evaluation."""
        section = read_recipe(self.families[family].process).get("process")
        process: Process = build_component(Process, section, f"families.{family}.process")
        return process

    def config(self, cell: str, overrides: Sequence[str] = (), *, control: bool = False) -> RunConfig:
        """Return the checked configuration of a cell's run, or of its control. Errors name the cell."""
        chosen = self.cells[cell]
        own = [*chosen.overrides, *(chosen.control_overrides if control else ())]
        try:
            config = load(chosen.recipe, [*own, *overrides])
        except ConfigError as error:
            raise ConfigError(f"cells.{cell}: {error} [TM648]") from error
        problems = find_problems(config, 1)
        if problems:
            raise ConfigError("\n".join(f"cells.{cell}: {problem}" for problem in problems))
        return with_shuffled_rewards(config) if control and not chosen.control_overrides else config


@dataclass(frozen=True)
class ScoreboardJob:
    """One measurement: of a family before training, of a cell after training or search, or of its control."""

    cell: str
    kind: Literal["before", "after", "control"]
    seed: int = 0
    num_candidates: int | None = None  # of a search
    baseline: str = ""  # key of the measurement before training, which cells of a family may share

    @property
    def key(self) -> str:
        """Name of the job's files."""
        if self.kind == "before":
            return self.baseline
        candidates = [str(self.num_candidates)] if self.num_candidates else []
        control = ["shuffled"] if self.kind == "control" else []
        return "-".join([self.cell, *candidates, *control, str(self.seed)])


def load_plan(name: str) -> ScoreboardPlan:
    """Load a plan of the package by name, or from a YAML file."""
    known = sorted(path.stem for path in PLAN_FOLDER.glob("*.yaml"))
    if not name.endswith((".yaml", ".yml")) and name not in known:
        raise ConfigError(
            f"unknown bench '{name:.60}'{suggest_name(name, known)}; or give the path of a file that ends in "
            ".yaml [TM649]"
        )
    path = PLAN_FOLDER / f"{name}.yaml" if name in known else find_recipe(name, Path())
    plan: ScoreboardPlan = build_component(ScoreboardPlan, {"name": path.stem, **read_yaml_mapping(path)})
    rows: set[str] = set()  # keys: cells, and searches with their number of candidates
    for key, cell in plan.cells.items():
        rows |= {f"{key}-{n}" for n in cell.search.candidates} if cell.search else {key}
    for key, cell in plan.cells.items():
        if cell.family not in plan.families:
            raise ConfigError(f"cells.{key}.family: unknown family '{cell.family:.60}'; add it to families [TM650]")
        if cell.target and cell.target.baseline and cell.target.baseline not in rows:
            baseline = cell.target.baseline
            raise ConfigError(
                f"cells.{key}.target.baseline: unknown cell '{baseline:.60}'; give the name of another cell [TM651]"
            )
    return plan


def select_cells(plan: ScoreboardPlan, names: Sequence[str]) -> tuple[str, ...]:
    """Return the named cells in the order of the plan, or all of them if no names are given."""
    for name in names:
        if name not in plan.cells:
            raise ConfigError(f"--cells: unknown cell '{name:.60}'{suggest_name(name, list(plan.cells))} [TM652]")
    return tuple(name for name in plan.cells if not names or name in names)


def list_jobs(
    plan: ScoreboardPlan, cells: Sequence[str], seeds: Sequence[int], control_seeds: Sequence[int]
) -> list[ScoreboardJob]:
    """List all measurements: the first seed of every cell, then its controls, then the next seed."""
    jobs: list[ScoreboardJob] = []
    for number, seed in enumerate(seeds):
        names = [name for name in cells if number < (plan.cells[name].seeds or len(seeds))]
        for name in names:
            search = plan.cells[name].search
            jobs += [ScoreboardJob(name, "after", seed, n) for n in (search.candidates if search else (None,))]
        controlled = [name for name in names if plan.cells[name].control and seed in control_seeds]
        jobs += [ScoreboardJob(name, "control", seed) for name in controlled]
    return jobs


def with_shuffled_rewards(config: RunConfig) -> RunConfig:
    """Return the control of a run: samples get the rewards of other samples. Held-out rewards are not shuffled."""
    rewards = {
        name: replace(reward, spec=ShuffledReward(reward.spec)) if reward.weight else reward
        for name, reward in config.rewards.items()
    }
    return replace(config, rewards=rewards)


def describe_cell(cell: ScoreboardCell) -> dict[str, Any]:
    """Return the description of a cell that its results contain."""
    search: dict[str, Any] = {"search": cell.search.type, "judge": cell.search.verifier} if cell.search else {}
    search |= {"trained": True} if cell.search and cell.search.trained else {}
    labels = {"objective": cell.objective, "family": cell.family, "reward": cell.reward, "recipe": cell.recipe}
    return {**labels, "overrides": list(cell.overrides), **search}
