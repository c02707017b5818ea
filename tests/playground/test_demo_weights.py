"""The wheel holds the playground weights that `tastemaker demo` needs; the error for others says where they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.evaluation.playeval import HELD_OUT_DETECTOR
from tastemaker.models import weight_files
from tastemaker.playground.demo import RECIPE

ROOT = Path(__file__).parents[2]
WEIGHTS = "tastemaker/playground/weights/"


def wheel_weights() -> set[str]:
    """The names of the playground weights that hatchling packs into the wheel."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    files = [file.relative_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()]
    return {Path(file).stem for file in files if file.startswith(WEIGHTS) and file.endswith(".safetensors")}


def named_weights(value: Any) -> set[str]:
    """All names such as playground/vae in a configuration."""
    if isinstance(value, dict):
        return {name for item in value.values() for name in named_weights(item)}
    match = re.fullmatch(r"playground/(\w+)", value) if isinstance(value, str) else None
    return {match[1]} if match else set()


def test_wheel_holds_exactly_the_weights_of_the_demo() -> None:
    used = named_weights(config_to_dict(load(RECIPE))) | named_weights(HELD_OUT_DETECTOR)
    assert wheel_weights() == used == {"detector0", "detector1", "flow16", "taste", "vae"}


def test_wheel_suffices_for_the_recipe_that_the_demo_recommends() -> None:
    assert named_weights(config_to_dict(load("nft-playground"))) <= wheel_weights()


def test_missing_playground_weights_name_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "playground/weights").mkdir(parents=True)
    (tmp_path / "playground/weights/vae.safetensors").touch()
    monkeypatch.setattr(weight_files, "PACKAGE_ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"'playground/judge'.*repository.*playground/vae.*TM546"):
        weight_files.read_weights("playground/judge")
