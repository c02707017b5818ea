"""Training of autoencoders: loss, exact resumes, export to generators and settings."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from tastemaker.autoencoders.training import AutoencoderRun, check_outputs, train, train_step, validate
from tastemaker.config.build import build, build_autoencoder, make_tiny_any
from tastemaker.config.check import find_problems
from tastemaker.config.dump import config_to_dict, config_to_yaml
from tastemaker.config.load import apply_overrides, load, load_any_config, read_recipe
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.config.validate import validate_config
from tastemaker.config.yaml_io import parse_yaml
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.weights import export_weights
from tastemaker.models import weight_files
from tastemaker.models.pretrained_autoencoder import load_vae
from tastemaker.training.events import CheckpointSaved, SamplesGenerated, StepCompleted, TrainingFinished
from tastemaker.training.loop import train_step as generator_train_step
from tastemaker.training.run_directory import write_run_config
from tastemaker.training.samples import generate_samples
from tastemaker.training.trainer import run_training

SMALL = ["engine.device=cpu", "engine.precision=fp32", "batch_size=16", "data.device=cpu", "sample.count=2"]


def make_config(*overrides: str) -> AutoencoderRunConfig:
    config = make_tiny_any(load_any_config("playground-vae", [*SMALL, *overrides]))
    assert isinstance(config, AutoencoderRunConfig)
    return config


def prepare_run(folder: Path, *overrides: str) -> AutoencoderRun:
    return build_autoencoder(make_config(*overrides), folder / "run")


def test_training_lowers_the_loss_and_reports_it(tmp_path: Path) -> None:
    run = prepare_run(tmp_path, "steps=20", "optim.warmup_steps=0", "sample.every=10", "data.pool_size=16")
    events = list(train(run))
    metrics = [event.metrics for event in events if isinstance(event, StepCompleted)]
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]
    assert metrics[-1]["psnr"] > metrics[0]["psnr"]
    samples = [event for event in events if isinstance(event, SamplesGenerated)]
    assert [event.step for event in samples] == [10, 20]
    assert samples[0].pixels.shape == (2, 1, 3, 128, 64)
    assert isinstance(events[-2], CheckpointSaved) and isinstance(events[-1], TrainingFinished)


def test_resume_is_exact(tmp_path: Path) -> None:
    run = prepare_run(tmp_path, "steps=4")
    for step in (0, 1):
        train_step(run, step)
    path = run.save(2)
    expected = [train_step(run, step).to_event().metrics for step in (2, 3)]
    resumed = prepare_run(tmp_path / "other", "steps=4")
    resumed.resume(path)
    assert resumed.start_step == 2
    assert [train_step(resumed, step).to_event().metrics for step in (2, 3)] == expected
    assert all(a.equal(b) for a, b in zip(run.net.parameters(), resumed.net.parameters(), strict=True))
    for name, snapshot in run.weights.snapshot_tensors().items():
        assert all(x.equal(resumed.weights.snapshot_tensors()[name][key]) for key, x in snapshot.items())


def test_exported_autoencoder_loads_in_a_generator(tmp_path: Path) -> None:
    config = make_config("steps=2", f"output_dir={tmp_path}", "sample.every=0")
    assert run_training(config, console=Console(quiet=True))
    folder, file = tmp_path / "playground-vae", tmp_path / "vae.safetensors"
    export_weights(folder, file, "", 32, Console(quiet=True))
    pixels = torch.rand(2, 3, 64, 64)
    exported, direct = load_vae(str(file), 16, 8, Placement()), load_vae(str(folder), 16, 8, Placement())
    assert exported.encode(pixels).equal(direct.encode(pixels))
    assert exported.encode(pixels).std() < 20  # standardized; raw latents have any scale
    ema_weights = weight_files.read_weights(folder)[0]
    assert not ema_weights["mean"].equal(torch.zeros(1, 16, 1, 1))
    with pytest.raises(ConfigError, match=r"model\.latent_channels=16.*model\.downsample_factor=8.*TM512"):
        load_vae(str(file), 8, 8, Placement())


def test_exported_generator_gives_the_same_samples(tmp_path: Path) -> None:
    model_override = "model={autoencoder: null, width: 32, depth: 1, heads: 2, patch_size: 4}"
    engine = ["engine.device=cpu", "engine.precision=fp32", "engine.compile=false", "data.device=cpu"]
    recipe = load(
        "playground-flow16",
        [model_override, *engine, "batch.prompts=8", "ema_decay=0.5", f"output_dir={tmp_path}", "name=run"],
    )
    run = build(recipe)
    generator_train_step(run, 0)
    run.save(1)
    write_run_config(recipe, run.directory)
    export_weights(run.directory, tmp_path / "flow.safetensors", "", 32, Console(quiet=True))
    model = replace(recipe.model, weights=str(tmp_path / "flow.safetensors"))  # type: ignore[type-var]
    exported = build(replace(recipe, model=model))
    # A new EMA equals the weights it starts from.
    assert generate_samples(exported, 0).pixels.equal(generate_samples(run, 0).pixels)


def test_config_is_strict_and_round_trips(tmp_path: Path) -> None:
    config = make_config()
    assert (
        validate_config(config_to_dict(config)) == config == validate_config(parse_yaml(config_to_yaml(config), "dump"))
    )
    data: dict[str, Any] = read_recipe("playground-vae")
    for change, fragments in {
        "autoencoder.widht=3": ("autoencoder: ", "'widht'", "'width'"),
        "autoencoder.type=vea": ("autoencoder: ", "'vea'", "'vae'"),
        "loss.l2=3": ("loss: ", "'l2'"),
        "tuning={type: full}": ("config: ", "'tuning'"),
        "objective={type: likelihood}": ("config: ", "'objective'", "'autoencoder'"),
    }.items():
        with pytest.raises(ConfigError) as raised:
            validate_config(apply_overrides(data, [change]))
        message = str(raised.value)
        assert message.startswith(fragments[0]) and all(fragment in message for fragment in fragments)


def test_inconsistent_autoencoder_settings_are_refused() -> None:
    prompts = "data={type: prompts, prompts: [a red]}"
    config = load_any_config("playground-vae", [prompts, "batch_size=7", "ema_decay=0"])
    assert [problem.split(":")[0] for problem in find_problems(config, world_size=2)] == [
        "data.type",
        "batch_size",
        "sample.weights",
    ]
    with pytest.raises(ConfigError, match=r"trains an autoencoder.*TM026"):
        load("playground-vae")


def test_resumed_command_continues(tmp_path: Path) -> None:
    for steps in (2, 3):
        config = make_config(f"steps={steps}", f"output_dir={tmp_path}", "sample.every=0")
        assert run_training(config, allow_change=["steps"], console=Console(quiet=True))
    assert len((tmp_path / "playground-vae" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("recipe", ["playground-vae", pytest.param("playground-vq", marks=pytest.mark.slow)])
def test_cast_weights_give_exact_updates(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, cast_counts = [], []
    for cast_once in (True, False):
        overrides = ["engine.precision=bf16", "micro_batch_size=8", "validation.every=0", "steps=3"]
        run = build_autoencoder(make_tiny_any(load_any_config(recipe, [*SMALL, *overrides])), tmp_path / recipe)  # type: ignore[arg-type]
        if not cast_once:
            monkeypatch.setattr(run.engine, "cast_weights", lambda net: nullcontext())
        counter = CastCounter()
        with counter:
            metrics = [train_step(run, step).to_event().metrics for step in range(2)]
        assert not any("weight" in vars(module) for module in run.net.modules())
        results.append((metrics, run.weights.trainable()))
        cast_counts.append(counter.count)
    assert results[0][0] == results[1][0]
    assert all(p.equal(results[1][1][key]) for key, p in results[0][1].items())
    assert cast_counts[0] < 0.6 * cast_counts[1]


class CastCounter(TorchDispatchMode):
    """Counts the casts of single tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("outputs", "shapes"),
    [
        (torch.zeros(2, 3, 8, 8), r"\[2, 3, 8, 8\];"),
        ((torch.zeros(2, 3, 8, 8),) * 2, r"\[2, 3, 8, 8\] and \[2, 3, 8, 8\];"),
        ((torch.zeros(2, 3, 8, 8), 0.0), r"\[2, 3, 8, 8\] and float;"),
        ((torch.zeros(2, 1, 8, 8), torch.zeros(2)), r"\[2, 1, 8, 8\] and \[2\];"),
    ],
)
def test_custom_network_with_other_outputs_is_refused(outputs: Any, shapes: str) -> None:
    with pytest.raises(ConfigError, match=shapes):
        check_outputs(outputs, torch.zeros(2, 3, 8, 8))
    for loss in (torch.zeros(()), torch.zeros(2)):
        assert check_outputs((torch.zeros(2, 3, 8, 8), loss), torch.zeros(2, 3, 8, 8))[1] is loss


@pytest.mark.parametrize("quantizer", ["codebook", "lfq"])
def test_quantizer_loss_is_logged_in_training_and_validation(quantizer: str, tmp_path: Path) -> None:
    settings = [f"autoencoder.quantizer={quantizer}", "autoencoder.codebook_size=64", "discriminator=null"]
    config = load_any_config(
        "playground-vq", [*SMALL, *settings, "data.pool_size=32", "validation={every: 1, split: 0.25}"]
    )
    tiny = make_tiny_any(replace(config, engine=replace(config.engine, compile=False)))
    assert isinstance(tiny, AutoencoderRunConfig)
    run = build_autoencoder(tiny, tmp_path)
    assert run.validation_data is not None
    images = run.pixels(0, run.batch_size)
    held_out = run.validation_data.batch(0, 8, 0, 1).pixels.flatten(0, 1)
    with torch.no_grad():
        expected, validated = (run.net(x)[1].item() for x in (images, held_out))
    metrics = validate(run, run.validation_data)
    assert metrics["validation/vq_loss"] == pytest.approx(validated, rel=1e-4)
    assert train_step(run, 0).to_event().metrics["vq_loss"] == pytest.approx(expected, rel=1e-4)
