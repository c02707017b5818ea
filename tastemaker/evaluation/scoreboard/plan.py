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
from ...rewards.shuffled import Shuffled

PLAN_FOLDER = Path(__file__).parent
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class CellTarget:
    """What was hoped for, written down before anything was measured; all that is given must hold."""

    score: Share | None = None  # on average at least, after
    gain: Share | None = None  # by so much the score rises on average
    learns: bool = False  # the score rises beyond its interval, and by more than the control's
    frechet: bool = False  # the distance to real scenes falls
    reward: bool = False  # rises
    keeps: bool = False  # the score does not fall beyond its interval
    like: str = ""  # at least the score of this cell, or of a search and so many candidates: best-of-masked-20
    share: Share = 1.0  # and at most so much of its samples, or of a search's calls
    warns: bool = False  # the guard says that the reward is being gamed


@dataclass(frozen=True)
class SearchSettings:
    """Searches of the generator, one for each number of candidates."""

    type: Literal["best_of_n", "parm"]
    n: tuple[PositiveInt, ...]
    judge: str = "playground_judge"
    first: Annotated[float, Field(ge=0, le=1)] = 0.0  # PARM's: progress before which nobody is judged
    keep: PositiveInt | None = None  # likewise: how many of a prompt go on once they were judged
    trained: bool = False  # by the cell's recipe before it is searched

    @property
    def told(self) -> list[str | float]:
        """What makes it another measurement; what is not asked for is not in it, so that a key added later is not."""
        trained, keep = ["trained"] if self.trained else [], [f"keep {self.keep}"] if self.keep else []
        return [self.judge, self.first, *trained, *keep]


@dataclass(frozen=True)
class ScoreboardCell:
    """One line of the scoreboard."""

    recipe: str
    family: str
    objective: str  # as the table calls it
    reward: str  # likewise
    overrides: tuple[str, ...] = ()
    control: bool = False  # whether it is run with shuffled rewards too
    search: SearchSettings | None = None  # instead of training, or after it
    seeds: PositiveInt | None = None  # at most so many of those asked for
    aim: CellTarget | None = None


@dataclass(frozen=True)
class GeneratorFamily:
    """How the pictures of a family are made when they are judged, whatever they were trained with."""

    process: str  # the recipe whose process it is
    benchmark: str = "playeval"


@dataclass(frozen=True)
class ScoreboardPlan:
    """A bench."""

    families: dict[str, GeneratorFamily]
    cells: dict[str, ScoreboardCell]
    name: str = "bench"

    def process(self, family: str) -> Process:
        """By which the family's pictures are made when they are judged."""
        section = read_recipe(self.families[family].process).get("process")
        found: Process = build_component(Process, section, f"families.{family}.process")
        return found

    def config(self, cell: str, overrides: Sequence[str] = ()) -> RunConfig:
        """A cell's run, every complaint a sentence that names the cell."""
        chosen = self.cells[cell]
        try:
            config = load(chosen.recipe, [*chosen.overrides, *overrides])
        except ConfigError as error:
            raise ConfigError(f"cells.{cell}: {error}") from error
        found = find_problems(config, 1)
        if found:
            raise ConfigError("\n".join(f"cells.{cell}: {sentence}" for sentence in found))
        return config


@dataclass(frozen=True)
class ScoreboardJob:
    """One measurement: of a family before, of a cell after training or search, or of its control."""

    cell: str
    kind: Literal["before", "after", "control"]
    seed: int = 0
    n: int | None = None  # candidates of a search
    base: str = ""  # the measurement before it, which cells of one family share

    @property
    def key(self) -> str:
        """What its files are called."""
        if self.kind == "before":
            return self.base
        candidates, control = [str(self.n)] if self.n else [], ["shuffled"] if self.kind == "control" else []
        return "-".join([self.cell, *candidates, *control, str(self.seed)])


def row_keys(plan: ScoreboardPlan) -> set[str]:
    """What lines of the table are called: cells, and searches with their number of candidates."""
    counts = {name: cell.search.n if cell.search else () for name, cell in plan.cells.items()}
    return {name for name, n in counts.items() if not n} | {f"{name}-{n}" for name in counts for n in counts[name]}


def load_plan(name: str) -> ScoreboardPlan:
    """A bench of the package, or of a YAML file."""
    known = sorted(path.stem for path in PLAN_FOLDER.glob("*.yaml"))
    if not name.endswith((".yaml", ".yml")) and name not in known:
        raise ConfigError(f"there is no bench '{name:.60}'{suggest_name(name, known)}; a file's path ends in .yaml")
    path = PLAN_FOLDER / f"{name}.yaml" if name in known else find_recipe(name, Path())
    found: ScoreboardPlan = build_component(ScoreboardPlan, {"name": path.stem, **read_yaml_mapping(path)})
    for key, cell in found.cells.items():
        if cell.family not in found.families:
            raise ConfigError(f"cells.{key}: there is no family '{cell.family:.60}'; add it to families")
        if cell.aim and cell.aim.like and cell.aim.like not in row_keys(found):
            raise ConfigError(f"cells.{key}.aim.like: there is no cell '{cell.aim.like:.60}'; name another")
    return found


def select_cells(found: ScoreboardPlan, names: Sequence[str]) -> tuple[str, ...]:
    """The cells asked for, or all of them."""
    for name in names:
        if name not in found.cells:
            raise ConfigError(f"--cells: there is no cell '{name:.60}'{suggest_name(name, list(found.cells))}")
    return tuple(name for name in found.cells if not names or name in names)


def list_jobs(
    found: ScoreboardPlan, cells: Sequence[str], seeds: Sequence[int], control_seeds: Sequence[int]
) -> list[ScoreboardJob]:
    """All there is to measure, the first seed of every cell first, each seed's controls after its cells."""
    listed: list[ScoreboardJob] = []
    for place, seed in enumerate(seeds):
        own = [name for name in cells if place < (found.cells[name].seeds or len(seeds))]
        for name in own:
            search = found.cells[name].search
            listed += [ScoreboardJob(name, "after", seed, n) for n in (search.n if search else (None,))]
        controlled = [name for name in own if found.cells[name].control and seed in control_seeds]
        listed += [ScoreboardJob(name, "control", seed) for name in controlled]
    return listed


def with_shuffled_rewards(config: RunConfig) -> RunConfig:
    """The same run, paid for what others did; rewards that are only watched stay true."""
    rewards = {
        name: replace(reward, spec=Shuffled(reward.spec)) if reward.weight else reward
        for name, reward in config.rewards.items()
    }
    return replace(config, rewards=rewards)


def describe_cell(cell: ScoreboardCell) -> dict[str, Any]:
    """What a result says of its cell."""
    search: dict[str, Any] = {"search": cell.search.type, "judge": cell.search.judge} if cell.search else {}
    search |= {"trained": True} if cell.search and cell.search.trained else {}
    told = {"objective": cell.objective, "family": cell.family, "reward": cell.reward, "recipe": cell.recipe}
    return {**told, "overrides": list(cell.overrides), **search}
