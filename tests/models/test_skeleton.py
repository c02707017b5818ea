"""`tastemaker new model` writes files from a pipeline of diffusers, whose parity test passes or says what is left."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.models.skeleton import read_pipeline, write_skeleton


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that writes the files of a pipeline and imports their tests."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = []

    def write(name: str, pipeline: str) -> Any:
        names.append(name)
        write_skeleton(name, f"diffusers:{pipeline}", tmp_path, force=False)
        return importlib.import_module(f"test_{name}")

    yield write
    for name in names:
        sys.modules.pop(name, None), sys.modules.pop(f"test_{name}", None)


def test_everything_but_the_text_encoder_of_z_image_is_inferred(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = written("written_z_image", "ZImagePipeline")
    tests.test_samples_equal_the_diffusers_pipeline(monkeypatch)
    monkeypatch.undo()
    with pytest.raises(pytest.fail.Exception, match="TODO: load the text encoders"):
        tests.test_text_encoders_are_loaded()


@pytest.mark.slow
def test_recipe_is_valid(written: Any) -> None:
    written("written_recipe", "ZImagePipeline")
    assert find_problems(load("written_recipe.yaml"), world_size=1) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "todo"),
    [
        ("StableDiffusion3Pipeline", "pooled_prompt_embeds"),
        ("QwenImagePipeline", "predict call the network"),
        ("Flux2KleinPipeline", "beside the embeddings"),
    ],
)
def test_parity_test_says_what_is_left(written: Any, pipeline: str, todo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = written(f"written_{pipeline.lower()}", pipeline)
    with pytest.raises((pytest.fail.Exception, AssertionError), match=rf"TODO[\s\S]*{todo}"):
        tests.test_samples_equal_the_diffusers_pipeline(monkeypatch)


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for source, code in (("ZImagePipeline", "TM2410"), ("diffusers:ZImagPipeline", "ZImagePipeline.*TM2411")):
        with pytest.raises(ConfigError, match=code):
            read_pipeline(source)
    with pytest.raises(ConfigError, match="TM2413"):
        write_skeleton("My-Model", "diffusers:ZImagePipeline", tmp_path, force=False)
    (tmp_path / "mine.yaml").write_text("", encoding="utf-8")
    arguments = ["new", "model", "mine", "--from", "diffusers:ZImagePipeline", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert "TM2414" in str(result.exception) and not (tmp_path / "mine.py").exists()
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "mine.yaml", "test_mine.py"}
