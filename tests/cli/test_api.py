"""The handful of names for scripts: configurations, models by name, and a trainer on batches of one's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import tastemaker
from tastemaker import Policy, VAETrainer, build_model, list_models, load_config, register_model
from tastemaker.api import LoaderDataset
from tastemaker.config import catalog
from tastemaker.config.registries import MODELS
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.config.validate import validate_config
from tastemaker.core.autoencoder import AUTOENCODERS
from tastemaker.core.registry import ConfigError, Registry
from tastemaker.core.types import ImageBatch, Placement
from tastemaker.models.custom_autoencoder import NETWORKS
from tastemaker.models.nets.vae import Autoencoder

QUIET = Console(quiet=True)


class Copier(nn.Module):
    """The smallest autoencoder there can be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.back = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.back(self.into(pixels)), pixels.new_zeros(())

    @classmethod
    def from_config(cls, params: Mapping[str, Any]) -> Copier:
        return cls(params["width"])


@dataclass(frozen=True)
class CopierSpec:
    """A copier by its width."""

    width: int = 2

    def load(self, placement: Placement) -> Copier:
        return Copier(self.width).to(placement.device)

    def tiny(self) -> CopierSpec:
        return self


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test registers are forgotten after it."""
    for registry in (MODELS, AUTOENCODERS, NETWORKS):
        monkeypatch.setattr(registry, "_names", dict(vars(registry)["_names"]))


def config(tmp_path: Path, *more: str) -> Any:
    small = ["steps=3", "sample.every=0", "engine.device=cpu", "validation.every=0", f"output={tmp_path}", "name=small"]
    plain = ["autoencoder.width=8", "engine.precision=fp32", "ema=0", "sample.use=live", "checkpoint.every=2"]
    return load_config("playground-vae", [*small, *plain, *more])


def pictures(count: int = 2, channels: int = 3) -> list[Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.rand(4, channels, 16, 16, generator=chance) for _ in range(count)]


def test_a_recipe_becomes_a_model_of_its_kind(tmp_path: Path) -> None:
    assert isinstance(build_model(config(tmp_path), "cpu"), Autoencoder)
    assert isinstance(build_model(load_config("grpo-toy-flow"), "cpu"), Policy)
    assert isinstance(build_model({"type": "vae", "width": 8}, "cpu"), Autoencoder)
    with pytest.raises(ConfigError, match=r"model: no model is called 'vaee'"):
        build_model({"type": "vaee"}, "cpu")


def test_a_bare_name_is_looked_for_in_configs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name in ("vae", "vae-playground"):
        (tmp_path / "configs" / f"{name}.yaml").write_text("extends: playground-vae\nsteps: 7")
    assert load_config("vae", ["rows=3"]).steps == 7 and load_config("vae").name == "vae"
    assert load_config("vae-playground").steps == 4000  # the package's, for it has one
    with pytest.raises(ConfigError, match="no recipe is called 'vay'"):
        load_config("vay")


def test_batches_of_ones_own_train_an_autoencoder_and_leave_a_run(tmp_path: Path) -> None:
    settings = config(tmp_path)
    model = build_model(settings, "cpu")
    before = [p.clone() for p in model.parameters()]
    told = VAETrainer(model, settings, "cpu").train(pictures(), QUIET)
    assert told["loss"] > 0 and not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    place = tmp_path / "small"
    assert (place / "config.yaml").is_file() and len((place / "metrics.jsonl").read_text().splitlines()) >= 3
    assert (place / "checkpoints" / "step-000003").is_dir()


def test_training_goes_on_where_it_stopped_as_if_it_had_not(tmp_path: Path) -> None:
    once, twice = (config(tmp_path / folder, "steps=5") for folder in ("once", "twice"))
    whole, stopped, resumed = (build_model(settings, "cpu") for settings in (once, twice, twice))
    VAETrainer(whole, once, "cpu").train(pictures(3), QUIET)
    with pytest.raises(KeyboardInterrupt):
        VAETrainer(stopped, twice, "cpu").train(Halting(pictures(3), 3), QUIET)
    VAETrainer(resumed, twice, "cpu").train(pictures(3), QUIET)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


class Halting:
    """A loader that is interrupted after so many batches."""

    def __init__(self, batches: list[Tensor], most: int) -> None:
        self.batches, self.left = batches, most

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


def test_batches_come_again_and_are_looked_at_again() -> None:
    data = LoaderDataset([(x, "label") for x in pictures(2, channels=1)])
    first, second, third = (data.batch(step, 4, 0, 1).pixels for step in range(3))
    assert first.shape == (4, 1, 3, 16, 16) and torch.equal(first, third) and not torch.equal(first, second)
    assert torch.equal(data.batch(0, 6, 0, 1).pixels, torch.cat([first, second])[:6])
    ours = LoaderDataset([ImageBatch(("",) * 4, pictures(1)[0][:, None])])
    assert torch.equal(ours.batch(3, 4, 0, 1).pixels, pictures(1)[0][:, None])


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ([], "the loader has no batches"),
        (iter([torch.rand(2, 3, 8, 8)]), "the loader ended after 1 batches; give one that"),
        ([torch.rand(2, 3, 8, 8) * 2 - 1], "expected 0 to 1"),
        ([torch.rand(2, 4, 8, 8)], "is of shape"),
        (["a"], "is a str; expected pixels"),
    ],
)
def test_what_a_loader_must_not_give_is_a_sentence(loader: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        VAETrainer(Copier(2), config(tmp_path), "cpu").train(loader, QUIET)


def test_only_autoencoders_are_trained_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"VAETrainer trains autoencoders, found a RunConfig"):
        VAETrainer(Copier(2), load_config("grpo-toy-flow"), "cpu")
    with pytest.raises(ConfigError, match=r"engine.device"):
        build_model({"type": "vae"}, "gpu")
    with pytest.raises(ConfigError, match=r"engine.device"):
        VAETrainer(Copier(2), config(tmp_path), "gpu")


@pytest.mark.usefixtures("registries")
def test_a_class_is_registered_by_a_decorator_and_named_by_recipes(tmp_path: Path) -> None:
    assert register_model("copier")(CopierSpec) is CopierSpec and "copier" in list_models()
    assert {"name": "copier", "what": "A copier by its width."} in catalog.component_rows("autoencoders")
    built = build_model(
        validate_config({"autoencoder": {"type": "copier", "width": 3}, "data": {"type": "toy_pictures"}}), "cpu"
    )
    assert isinstance(built, Copier) and built.into.out_channels == 3
    with pytest.raises(ConfigError, match=r"'copier' is already registered as .*CopierSpec; choose another name"):
        register_model("copier")(CopierSpec)


@pytest.mark.usefixtures("registries")
def test_a_network_with_from_config_is_an_autoencoder_by_name_or_by_place(tmp_path: Path) -> None:
    register_model("my_copier")(Copier)
    for name in ("my_copier", f"{Copier.__module__}:Copier"):
        told = {"type": "from_config", "of": name, "params": {"width": 5}}
        settings = validate_config({"autoencoder": told, "data": {"type": "toy_pictures"}, "loss": {"lpips": 0.0}})
        assert isinstance(settings, AutoencoderRunConfig)
        net = build_model(settings, "cpu")
        assert isinstance(net, Copier) and net.into.out_channels == 5
    assert "my_copier" in list_models()
    with pytest.raises(ConfigError, match=r"no network is called 'my_copyer'; did you mean 'my_copier'"):
        build_model({"type": "from_config", "of": "my_copyer"}, "cpu")
    with pytest.raises(ConfigError, match=r"is no nn.Module with a classmethod from_config"):
        build_model({"type": "from_config", "of": f"{Copier.__module__}:CopierSpec"}, "cpu")


@pytest.mark.usefixtures("registries")
def test_what_cannot_be_registered_says_why() -> None:
    with pytest.raises(ConfigError, match=r"Console has no load and tiny, as a spec has"):
        register_model("console")(Console)

    class Inside(CopierSpec):
        """Nobody finds it here."""

    with pytest.raises(ConfigError, match=r"lies within test_what.*; move it to its module"):
        register_model("inside")(Inside)


def test_a_name_is_found_in_whatever_module_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somewhere")
    monkeypatch.setitem(sys.modules, "somewhere", module)
    registry = Registry("thing", {})
    cls = type("Thing", (), {"__module__": "somewhere"})
    module.__dict__["Thing"] = registry.register("thing")(cls)
    assert registry.find("thing") is cls and list(registry) == ["thing"]


def test_the_small_names_are_public() -> None:
    assert {"VAETrainer", "build_model", "list_models", "load_config", "register_model"} <= {*tastemaker.__all__}


class Told(Copier):
    """As nanoVLA-RL's are, which give back what the encoder said."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.back(self.into(pixels)), self.into(pixels)


def test_a_network_that_gives_back_something_else_than_a_loss_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(
        ConfigError, match=r"\[4, 3, 16, 16\] and \[4, 2, 16, 16\]; expected copies .* \[4\], of noughts"
    ):
        VAETrainer(Told(2), settings, "cpu").train(pictures(), QUIET)
    place = f"{__name__}:Copier"
    with pytest.raises(ConfigError, match=rf"is no dataclass; .* {{type: from_config, of: '{place}', params: ...}}"):
        config(tmp_path, f"autoencoder={{type: '{place}'}}")
