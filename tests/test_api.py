"""The public API: load, build, train, evaluate, generate, registered models and VAETrainer."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor, nn

import tastemaker
import tastemaker as tm
from tastemaker import Policy, VAETrainer, build_model, list_models, load, register_model
from tastemaker.api import LoaderDataset
from tastemaker.config import catalog
from tastemaker.config.registries import MODELS
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.config.validate import validate_config
from tastemaker.core.autoencoder import AUTOENCODERS, AutoencoderSpec
from tastemaker.core.registry import ConfigError, Registry
from tastemaker.core.types import ImageBatch, Placement
from tastemaker.models.nets.vae import ConvAutoencoder
from tastemaker.models.vae import NETWORKS
from tastemaker.training.events import Event, StepCompleted, TrainingFinished
from tastemaker.training.run_directory import diff_settings

QUIET = Console(quiet=True)


class ConvPair(nn.Module):
    """A minimal autoencoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(self.encoder(pixels)), pixels.new_zeros(())

    @classmethod
    def from_config(cls, params: Mapping[str, Any]) -> ConvPair:
        return cls(params["width"])


@dataclass(frozen=True)
class ConvPairSpec(AutoencoderSpec):
    """A minimal autoencoder with `width` channels."""

    width: int = 2

    def load(self, placement: Placement) -> ConvPair:
        return ConvPair(self.width).to(placement.device)

    def tiny(self) -> ConvPairSpec:
        return self


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registries after the test."""
    for registry in (MODELS, AUTOENCODERS, NETWORKS):
        monkeypatch.setattr(registry, "_names", dict(vars(registry)["_names"]))


def config(tmp_path: Path, *more: str) -> Any:
    overrides = [
        "steps=3",
        "sample.every=0",
        "engine.device=cpu",
        "validation.every=0",
        f"output_dir={tmp_path}",
        "name=small",
    ]
    plain = [
        "autoencoder.width=8",
        "engine.precision=fp32",
        "ema_decay=0",
        "sample.weights=live",
        "checkpoint.every=2",
    ]
    return load("playground-vae", [*overrides, *plain, *more])


def random_batches(count: int = 2, channels: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(4, channels, 16, 16, generator=generator) for _ in range(count)]


def test_build_model_builds_every_kind_of_model(tmp_path: Path) -> None:
    assert isinstance(build_model(config(tmp_path), "cpu"), ConvAutoencoder)
    assert isinstance(build_model(load("grpo-toy-flow"), "cpu"), Policy)
    assert isinstance(build_model({"type": "vae", "width": 8}, "cpu"), ConvAutoencoder)
    with pytest.raises(ConfigError, match=r"vaee.*TM107"):
        build_model({"type": "vaee"}, "cpu")


def test_bare_names_are_looked_up_in_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name in ("vae", "vae-playground"):
        (tmp_path / "configs" / f"{name}.yaml").write_text("extends: playground-vae\nsteps: 7")
    assert load("vae", ["batch_size=3"]).steps == 7 and load("vae").name == "vae"
    assert load("vae-playground").steps == 4000  # the package's own recipe comes first
    with pytest.raises(ConfigError, match=r"vay.*TM040"):
        load("vay")


def test_vae_trainer_trains_on_a_loader_and_writes_a_run(tmp_path: Path) -> None:
    settings = config(tmp_path)
    model = build_model(settings, "cpu")
    before = [p.clone() for p in model.parameters()]
    metrics = VAETrainer(model, settings, "cpu").train(random_batches(), QUIET)
    assert metrics["loss"] > 0 and not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    run_dir = tmp_path / "small"
    assert (run_dir / "config.yaml").is_file() and len((run_dir / "metrics.jsonl").read_text().splitlines()) >= 3
    assert (run_dir / "checkpoints" / "step-000003").is_dir()


def test_vae_trainer_validates_on_its_own_loader(tmp_path: Path) -> None:
    """The held-out loss and the KL divergence are logged with every checkpoint; training does not change."""
    settings = config(tmp_path, "autoencoder.kl_weight=0.1")
    plain, model = (build_model(settings, "cpu") for _ in range(2))
    held_out = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    expected = VAETrainer(plain, replace(settings, name="plain"), "cpu").train(random_batches(), QUIET)
    metrics = VAETrainer(model, settings, "cpu").train(
        random_batches(), QUIET, validation_loader=[held_out[:3], (held_out[3:], None)]
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert expected["loss"] == metrics["loss"] and not any(key.startswith("validation/") for key in expected)
    with torch.no_grad():
        mean, log_variance = model.encoder(held_out * 2 - 1).chunk(2, 1)
        output = model.eval()(held_out)[0]
    kl = (mean**2 + log_variance.exp() - 1 - log_variance).mean() / 2
    assert metrics["validation/kl_loss"] == pytest.approx(kl.item(), rel=1e-4) and metrics["kl_loss"] > 0
    psnr = -10 * (output.clamp(0, 1) - held_out).square().flatten(1).mean(1).log10().mean()
    assert metrics["validation/psnr"] == pytest.approx(psnr.item(), rel=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "small/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "validation/loss" in str(row)]
    assert steps == [2, 3]
    with pytest.raises(ConfigError, match="TM846"):
        VAETrainer(model, replace(settings, name="empty"), "cpu").train(random_batches(), QUIET, validation_loader=[])


def test_vae_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    once, twice = (config(tmp_path / folder, "steps=5") for folder in ("once", "twice"))
    uninterrupted, interrupted, resumed = (build_model(settings, "cpu") for settings in (once, twice, twice))
    VAETrainer(uninterrupted, once, "cpu").train(random_batches(3), QUIET)
    with pytest.raises(KeyboardInterrupt):
        VAETrainer(interrupted, twice, "cpu").train(InterruptedLoader(random_batches(3), 3), QUIET)
    VAETrainer(resumed, twice, "cpu").train(random_batches(3), QUIET)
    for a, b in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


class InterruptedLoader:
    """A loader that raises KeyboardInterrupt after `max_batches` batches."""

    def __init__(self, batches: list[Tensor], max_batches: int) -> None:
        self.batches, self.left = batches, max_batches

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


def test_loader_starts_over_and_caches_its_first_images() -> None:
    data = LoaderDataset([(x, "label") for x in random_batches(2, channels=1)])
    first, second, third = (data.batch(step, 4, 0, 1).pixels for step in range(3))
    assert first.shape == (4, 1, 3, 16, 16) and torch.equal(first, third) and not torch.equal(first, second)
    assert torch.equal(data.batch(0, 6, 0, 1).pixels, torch.cat([first, second])[:6])
    ours = LoaderDataset([ImageBatch(("",) * 4, random_batches(1)[0][:, None])])
    assert torch.equal(ours.batch(3, 4, 0, 1).pixels, random_batches(1)[0][:, None])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "no batches"),
        (iter([torch.rand(2, 3, 8, 8)]), "ended after 1 batches"),
        ([torch.rand(2, 3, 8, 8) * 2 - 1], "from 0 to 1.*TM777"),
        ([torch.rand(2, 4, 8, 8)], "of shape.*TM776"),
        (["a"], "a str.*TM776"),
    ],
)
def test_invalid_loader_is_refused(loader: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        VAETrainer(ConvPair(2), config(tmp_path), "cpu").train(loader, QUIET)


def test_vae_trainer_refuses_other_configurations_and_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RunConfig.*TM774"):
        VAETrainer(ConvPair(2), load("grpo-toy-flow"), "cpu")
    with pytest.raises(ConfigError, match=r"engine.device.*TM823"):
        build_model({"type": "vae"}, "gpu")
    with pytest.raises(ConfigError, match=r"engine.device.*TM823"):
        VAETrainer(ConvPair(2), config(tmp_path), "gpu")


@pytest.mark.usefixtures("registries")
def test_register_model_makes_a_spec_available_to_recipes(tmp_path: Path) -> None:
    assert register_model("copier")(ConvPairSpec) is ConvPairSpec and "copier" in list_models()
    assert "copier" in [row["name"] for row in catalog.component_rows("autoencoders")]
    built = build_model(
        validate_config({"autoencoder": {"type": "copier", "width": 3}, "data": {"type": "toy_images"}}), "cpu"
    )
    assert isinstance(built, ConvPair) and built.encoder.out_channels == 3
    with pytest.raises(ConfigError, match=r"'copier'.*TM104"):
        register_model("copier")(ConvPairSpec)


@pytest.mark.usefixtures("registries")
def test_from_config_network_is_resolved_by_name_or_import_path(tmp_path: Path) -> None:
    register_model("my_copier")(ConvPair)
    for name in ("my_copier", f"{ConvPair.__module__}:ConvPair"):
        autoencoder = {"type": "from_config", "class_path": name, "params": {"width": 5}}
        settings = validate_config({"autoencoder": autoencoder, "data": {"type": "toy_images"}, "loss": {"lpips": 0.0}})
        assert isinstance(settings, AutoencoderRunConfig)
        net = build_model(settings, "cpu")
        assert isinstance(net, ConvPair) and net.encoder.out_channels == 5
    assert "my_copier" in list_models()
    with pytest.raises(ConfigError, match=r"'my_copier'.*TM107"):
        build_model({"type": "from_config", "class_path": "my_copyer"}, "cpu")
    with pytest.raises(ConfigError, match=r"from_config.*TM538"):
        build_model({"type": "from_config", "class_path": f"{ConvPair.__module__}:ConvPairSpec"}, "cpu")


@pytest.mark.usefixtures("registries")
def test_register_model_refuses_other_classes() -> None:
    with pytest.raises(ConfigError, match=r"Console.*TM773"):
        register_model("console")(Console)

    class LocalSpec(ConvPairSpec):
        """A class that cannot be imported by name."""

    with pytest.raises(ConfigError, match=r"inside.*TM105"):
        register_model("inside")(LocalSpec)


def test_registered_class_is_resolved_in_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somewhere")
    monkeypatch.setitem(sys.modules, "somewhere", module)
    registry = Registry("thing", {})
    cls = type("Thing", (), {"__module__": "somewhere"})
    module.__dict__["Thing"] = registry.register("thing")(cls)
    assert registry.find("thing") is cls and list(registry) == ["thing"]


def test_public_functions_are_exported() -> None:
    functions = {"build", "build_model", "evaluate", "generate", "list_models", "load", "register_model", "train"}
    assert {"VAETrainer", "compare", "show", "training_events", *functions} <= {*tastemaker.__all__}


def test_train_evaluate_and_generate_do_what_the_commands_do(tmp_path: Path) -> None:
    quick = ["steps=2", "sample.every=0", "guard.every=0", "batch.prompts=4", f"output_dir={tmp_path}", "name=run"]
    events: list[Event] = []
    metrics = tm.train(load("grpo-toy-flow", quick), on_event=events.append, console=QUIET)
    assert isinstance(events[-1], TrainingFinished) and metrics["grad_norm"] > 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    files = tm.generate(tmp_path / "run", ["a red", "a blue"], out=tmp_path / "images", count=2, console=QUIET)
    assert len(files) == 4 and all(file.is_file() for file in files)
    report = tm.evaluate(
        "playeval", "grpo-playground-flow", num_prompts=6, count=1, out=tmp_path / "report", tiny=True, console=QUIET
    )
    assert report["scores"]


QUICK = ["steps=2", "sample.every=2", "guard.every=0", "batch.prompts=4", "checkpoint.every=1"]


def test_built_run_writes_what_the_command_writes(tmp_path: Path) -> None:
    """A run from `build` has the files of a run of the command; trained again, it resumes."""
    settings = load("grpo-toy-flow", [*QUICK, f"output_dir={tmp_path}", "name=run"])
    run = tm.build(settings)
    assert tm.train(run, console=QUIET)["lr"] > 0
    run.engine.close()
    tm.train(replace(settings, name="command"), console=QUIET)
    built, command = (
        {path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("run", "command")
    )
    assert built == command
    assert {Path("config.yaml"), Path("environment.json"), Path("metrics.jsonl"), Path("report.html")} <= built
    configs = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("run", "command")]
    assert not diff_settings(*configs)
    events: list[Event] = []
    again = tm.build(settings)
    tm.train(again, on_event=events.append, console=QUIET)
    again.engine.close()
    assert events[0].step == 2 and not any(isinstance(event, StepCompleted) for event in events)


def test_built_run_refuses_the_directory_of_another_run(tmp_path: Path) -> None:
    for overrides, message in ((["seed=0"], ""), (["seed=1"], "seed: 0 -> 1")):
        run = tm.build(load("grpo-toy-flow", [*QUICK, *overrides]), tmp_path)
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            tm.train(run, console=QUIET)
        run.engine.close()


def test_run_without_configuration_trains_without_loggers(tmp_path: Path) -> None:
    run = tm.build(load("grpo-toy-flow", QUICK), tmp_path)
    run.config = None  # as in a run that was put together by hand
    assert tm.train(run)["lr"] > 0 and not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match=r"tiny.*TM772"):
        tm.train(run, tiny=True)
    run.engine.close()


class EncoderOutputNet(ConvPair):
    """Returns the output of its encoder instead of a loss, as nanoVLA-RL's networks do."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(self.encoder(pixels)), self.encoder(pixels)


def test_network_output_must_include_a_scalar_loss(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(ConfigError, match=r"\[4, 3, 16, 16\] and \[4, 2, 16, 16\].*TM556"):
        VAETrainer(EncoderOutputNet(2), settings, "cpu").train(random_batches(), QUIET)
    class_path = f"{__name__}:ConvPair"
    with pytest.raises(ConfigError, match=r"from_config.*TM059"):
        config(tmp_path, f"autoencoder={{type: '{class_path}'}}")
