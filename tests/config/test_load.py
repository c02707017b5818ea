"""Loading of recipes and files: `extends`, merging, overrides, custom components, and refusals."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tastemaker.config.dump import config_to_dict, config_to_yaml
from tastemaker.config.load import apply_overrides, list_recipes, load, read_recipe, read_yaml_mapping
from tastemaker.config.recipes import recipe_paths
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml
from tastemaker.core.registry import ConfigError
from tastemaker.core.reward import RewardCard, RewardSpec
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.processes.dynamics import DDIM


def write(folder: Path, **files: str) -> Path:
    """Write YAML files, given by name without suffix, and return the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def load_error(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    return str(error.value)


def test_recipe_name_is_the_default_run_name() -> None:
    config = load("grpo-toy-flow")
    assert isinstance(config.objective, GRPO)
    assert config.name == "grpo-toy-flow"


def test_file_extends_recipes_and_sibling_files(tmp_path: Path) -> None:
    path = write(tmp_path, own="extends: [grpo-toy-flow, local.yaml]\nsteps: 7", local="steps: 5\noptim: {lr: 2e-3}")
    config = load(path)
    assert (config.steps, config.optim.lr, config.name) == (7, 2e-3, "own")


def test_file_extends_the_config_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "runs" / "first"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(config_to_yaml(load("grpo-toy-flow", ["steps=7", "name=first"])))
    config = load(write(tmp_path, own="extends: [runs/first]\nobjective: {type: grpo, group_size: 3}"))
    assert (config.steps, config.name, config.objective.group_size) == (7, "own", 3)
    run_dir.rename(tmp_path / "grpo-toy-flow")
    assert load(write(tmp_path, own="extends: [grpo-toy-flow]")).steps != 7  # the recipe of that name
    (tmp_path / "grpo-toy-flow").rename(run_dir)
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)  # paths are relative to the current directory too
    assert load(write(tmp_path / "recipes", other="extends: [runs/first]")).name == "other"


def test_later_parents_override_earlier_ones(tmp_path: Path) -> None:
    path = write(tmp_path, own="extends: [one.yaml, two.yaml]", one="a: {x: 1, y: 1}", two="a: {y: 2}")
    assert read_recipe(path) == {"a": {"x": 1, "y": 2}}


def test_extends_accepts_a_single_name(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, own="extends: one.yaml\nb: 2", one="a: 1")) == {"a": 1, "b": 2}


def test_mappings_merge_unless_their_type_differs(tmp_path: Path) -> None:
    base = "objective: {type: grpo, group_size: 16, clip_range: 0.1}"
    assert read_recipe(write(tmp_path, own="extends: base.yaml\nobjective: {type: dpo}", base=base)) == {
        "objective": {"type": "dpo"}
    }
    same = read_recipe(write(tmp_path, own="extends: base.yaml\nobjective: {type: grpo, clip_range: 0.2}", base=base))
    assert same == {"objective": {"type": "grpo", "group_size": 16, "clip_range": 0.2}}


def test_null_removes_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, own="extends: dancegrpo-toy-flow\nrewards: {small: null}")
    assert list(load(path).rewards) == ["color"]


@pytest.mark.parametrize("section", ["guard", "sample"])
def test_null_disables_periodic_sections(section: str, tmp_path: Path) -> None:
    never = getattr(load("vader-wan-hps", [f"{section}.every=0"]), section)
    assert getattr(load("vader-wan-hps", [f"{section}=null"]), section) == never
    path = write(tmp_path, own=f"extends: vader-wan-hps\n{section}: null")
    assert getattr(load(path), section) == never
    assert getattr(load(path, [f"{section}.every=7"]), section).every == 7


def test_null_disables_missing_periodic_sections(tmp_path: Path) -> None:
    path = write(tmp_path, own="guard: null\nvalidation: null\nrewards: {guard: null}")
    assert read_recipe(path) == {"guard": {"every": 0}, "validation": {"every": 0}, "rewards": {"guard": None}}


def test_circular_extends_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, a="extends: b.yaml", b="extends: c.yaml", c="extends: b.yaml")
    error = load_error(path)
    assert error.startswith(f"{tmp_path}/b.yaml: 'extends'") and "b.yaml -> c.yaml -> b.yaml" in error


def test_diamond_extends_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, a="extends: [b.yaml, c.yaml]", b="extends: d.yaml", c="extends: d.yaml", d="x: 1")
    assert read_recipe(path) == {"x": 1}


def test_overrides_are_yaml_and_apply_last() -> None:
    overrides = [
        "optim.lr=3e-4",
        "objective.group_size=4",
        "sample.prompts=[a red, a blue]",
        "guidance.scale=2",
        "name=x=y",
    ]
    config = load("grpo-toy-flow", overrides)
    assert isinstance(config.objective, GRPO)
    assert (config.optim.lr, config.objective.group_size, config.sample.prompts) == (3e-4, 4, ("a red", "a blue"))
    assert config.guidance is not None and config.guidance.scale == 2.0
    assert config.name == "x=y"


def test_type_override_drops_old_settings() -> None:
    config = load("grpo-toy-flow", ["process.dynamics.type=ddim", "process.dynamics.eta=0.5"])
    assert (
        config.process
        == validate_config(read_recipe("grpo-toy-flow", ["process.dynamics={type: ddim, eta: 0.5}"])).process
    )
    assert DDIM(0.5) in vars(config.process).values()
    assert load("dpo-toy-flow", ["objective={type: dpo}"]).objective == DPO()


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "0.0003", "'3e-4'", "+3E-4", "30e-5"])
def test_exponents_are_numbers(text: str) -> None:
    assert load("grpo-toy-flow", [f"optim.lr={text}"]).optim.lr == pytest.approx(3e-4)


@pytest.mark.parametrize("shape", ["9:16", "3:4", "1:1", "50:27"])
def test_aspect_ratio_is_text(shape: str) -> None:
    model: Any = load("vader-opensora-hps", [f"model.aspect_ratio={shape}", "model.resolution=360p"]).model
    assert model.aspect_ratio == shape and parse_yaml(f"[{shape}, 12, 1_000, 1.5]", "here") == [shape, 12, 1000, 1.5]


@pytest.mark.parametrize(
    ("override", "start", "fragment"),
    [
        ("lr", "'lr' ", "key=value"),
        ("=3", "'=3' ", "key=value"),
        ("a..b=3", "'a..b=3' ", "key=value"),
        ("steps.x=3", "steps.x: ", "'steps' is 100"),
        ("steps=[", "steps, line 1: ", "'<stream end>'"),
        ("steps=2001-99-99", "steps: ", "month"),
        ("steps=" + "[" * 5000, "steps: ", "nested too deeply"),
    ],
)
def test_invalid_overrides_are_reported(override: str, start: str, fragment: str) -> None:
    error = load_error("grpo-toy-flow", override)
    assert error.startswith(start) and fragment in error and "\n" not in error


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ("a: [1, 2\nb: 3", 2, "',' or ']'"),
        ("a: 1\nb: 2\na: 3", 3, "duplicate key 'a'"),
        ("a: {x: 1, x: 2}", 1, "duplicate key 'x'"),
        ("a: &x 1\nb: *x", 2, "alias"),
        ("a: &x [*x]", 1, "alias"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(tmp_path: Path, text: str, line: int, fragment: str) -> None:
    path = write(tmp_path, bad=text)
    error = load_error(path)
    assert error.startswith(f"{path}, line {line}: ") and fragment in error


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("- 1", ["a mapping", "got a list"]),
        ("just words", ["a mapping", "got a str"]),
        ("extends: 3", ["'extends'", "TM045"]),
        ("extends: [base, 3]", ["'extends'", "TM045"]),
        ("extends: bose", ["'bose'", "'base'?", "config.yaml"]),
    ],
)
def test_invalid_recipes_are_reported(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = write(tmp_path, bad=text)
    error = load_error(path)
    assert error.startswith(f"{path}: ") and all(fragment in error for fragment in fragments), error


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    error = load_error(tmp_path / "latin.yaml")
    assert error.startswith(f"{tmp_path}/latin.yaml: byte 3 ") and "UTF-8" in error
    missing = tmp_path / "none.yaml"
    assert f"{missing}" in load_error(missing) and "TM039" in load_error(missing)
    error = load_error("grpo-toy-flwo")
    assert "'grpo-toy-flwo'" in error and "'grpo-toy-flow'?" in error


def test_part_of_a_recipe_suggests_a_complete_one() -> None:
    error = load_error("models/ltx")
    assert error.startswith("models/ltx: ") and error.endswith(" vader-ltx-hps [TM027]")
    assert load_error("models/modelscope").endswith(" vader-modelscope-actpred [TM027]")
    assert load_error("models/flux-schnell").endswith(" nft-flux-schnell [TM027]")
    assert "`extends: [data/playground-clips]`" in load_error("data/playground-clips")


def test_parsed_recipes_are_copied() -> None:
    before = load("grpo-toy-flow")
    data = read_recipe("grpo-toy-flow")
    data["optim"]["lr"], data["rewards"]["color"]["weight"] = 9.0, 9.0
    read_yaml_mapping(recipe_paths()["grpo-toy-flow"]).clear()
    list_recipes().clear()
    assert load("grpo-toy-flow") == before


def test_changed_files_are_reread(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, own="extends: one.yaml", one="a: 1")) == {"a": 1}
    assert read_recipe(write(tmp_path, own="extends: one.yaml", one="a: 2")) == {"a": 2}


def test_strings_that_look_like_numbers_round_trip() -> None:
    config = load("grpo-toy-flow", ["sample.prompts=['1e5', 'on', 'null', 'a: b']"])
    assert validate_config(parse_yaml(config_to_yaml(config), "dump")) == config


@dataclass(frozen=True)
class Sharpness(RewardSpec):
    """A user's own reward."""

    radius: int = 1
    batch_size: int = 4
    card = RewardCard("0 to 1", "noise")
    differentiable = False
    modality = "image"
    runs_on = "host"

    def load(self, placement: Any) -> Any: ...
    def tiny(self) -> Any: ...


@dataclass(frozen=True)
class IncompleteReward(RewardSpec):
    """A reward without the required members."""

    batch_size: int = 4


class NotADataclass:
    """A class without settings."""


MODULE_CONSTANT = 3  # neither a class nor a function


def class_path(name: str) -> str:
    return f"{__name__}:{name}"


def test_custom_component_by_module_and_class() -> None:
    data = apply_overrides(
        read_recipe("grpo-toy-flow"), [f"rewards.sharp.type={class_path('Sharpness')}", "rewards.sharp.radius=3"]
    )
    config = validate_config(data)
    spec: object = config.rewards["sharp"].spec
    assert spec == Sharpness(3)
    assert config_to_dict(config)["rewards"]["sharp"]["type"] == class_path("Sharpness")
    assert validate_config(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        (class_path("Sharpness"), ["'raduis'", "'radius'?"]),
        (class_path("IncompleteReward"), ["card, load"]),
        (class_path("NotADataclass"), ["dataclass"]),
        (class_path("Sharp"), [f"'{__name__}'", "'Sharp'"]),
        (class_path("MODULE_CONSTANT"), ["is a int"]),
        ("no.such:Thing", ["ModuleNotFoundError", "'no'"]),
        (":", ["ValueError"]),
    ],
)
def test_custom_component_is_validated(name: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^rewards\.sharp: ") as error:
        validate_config(apply_overrides(read_recipe("grpo-toy-flow"), [f"rewards.sharp={{type: '{name}', raduis: 3}}"]))
    assert all(fragment in str(error.value) for fragment in fragments), error.value


def test_component_of_another_kind_is_refused() -> None:
    data = apply_overrides(read_recipe("grpo-toy-flow"), ["process={type: 'tastemaker.objectives.dpo:DPO'}"])
    with pytest.raises(ConfigError, match=r"^process: 'tastemaker\.objectives\.dpo:DPO'.* Process.*TM060"):
        validate_config(data)


def test_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    assert read_yaml_mapping(write(tmp_path, empty="# only a comment")) == {}


def test_long_names_are_shortened_in_messages() -> None:
    for name in ("x" * 9000, "x" * 9000 + ".yaml", "\0.yaml"):
        assert len(load_error(name)) < 2000
    assert len(load_error("grpo-toy-flow", "x" * 9000)) < 200
