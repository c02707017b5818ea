"""Verify a model: samples beside those of diffusers' pipeline, the doctor's checks, and a few training steps."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..config.build import build, make_tiny
from ..config.load import load, read_recipe
from ..config.recipes import PARTS, recipe_paths
from ..config.registries import MODELS, PROCESSES
from ..config.schema import RunConfig
from ..config.validate import build_component
from ..core.cards import WeightsSource
from ..core.model_spec import ModelSpec
from ..diagnostics.doctor import run_doctor
from ..processes.gaussian import GaussianProcess
from ..training.loop import train_step
from ..training.precision import choose_placement
from .local_weights import with_local_weights
from .references import (
    REFERENCES,
    Comparison,
    find_reference,
    is_listed,
    prepare_comparison,
    why_not_compared,
)
from .report import NEEDS_DOWNLOAD, Check, Settings

# Largest difference of latents over the largest number of the reference, and of pixels. Large networks round more.
TOLERANCES = {"tiny": 5e-5, "fp32": 1e-3, "bf16": 5e-2}
COMPARED = ("samples",)  # checks that must pass for `matched`
TRAINED_PROMPTS = {  # of models that do not read free text
    "latent_dit": ("3", "7"),
    "llamagen": ("3", "7"),
    "toy_causal": ("a red", "a blue"),
    "toy_flow": ("a red", "a blue"),
    "toy_masked": ("a red", "a blue"),
    "dit": ("a photo of a dog", "a photo of a car"),
    "gpt": ("a photo of a dog", "a photo of a car"),
    "maskgit": ("a photo of a dog", "a photo of a car"),
}
DEFAULT_PROMPTS = ("a red cat on a mat", "two blue dogs")


def list_models() -> dict[str, str]:
    """Every model that can be verified: parts of recipes by name, and models without a part, with their types."""
    kinds = {}
    for name, path in recipe_paths().items():
        if PARTS in path.parents and name.startswith("models/"):
            kinds[name.removeprefix("models/")] = model_type(name)
    return {**kinds, **{kind: kind for kind in MODELS if kind not in kinds.values()}}


def model_type(part: str) -> str:
    """The registered name of the model in a part."""
    return str(read_recipe(part)["model"]["type"])


def default_part(kind: str) -> str:
    """The name under which a model's type is verified: the part with its name, or else the first one of its type."""
    same = [name for name, other in list_models().items() if other == kind]
    return next((name for name in same if name.replace("-", "_") == kind), same[0])


def find_part(name: str, spec: ModelSpec) -> str:
    """The part that a recipe's model belongs to: the one with the same weights, or else that of its type."""
    if name in list_models():
        return name
    kind = MODELS.name(type(spec))
    same = [part for part, other in list_models().items() if other == kind and load_spec(part).weights == spec.weights]
    return same[0] if same else default_part(kind) if kind in MODELS else kind


def load_config(name: str, settings: Settings, folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that verifies a model: LoRA with NFT or GRPO on brightness; recipes keep their objective and rewards."""
    common = [
        "sample.every=0",
        "guard.every=0",
        f"steps={settings.steps}",
        f"engine.device={settings.device}",
        f"output_dir={folder}",
        *overrides,
    ]
    tuning = [] if settings.full else ["tuning={type: lora}"]
    if name not in list_models():
        config = load(name, common)
        return config if config.tuning.is_adapter or settings.full else load(name, [*common, *tuning])
    recipe = folder / "verify.yaml"
    recipe.write_text(recipe_text(name, folder), encoding="utf-8")
    return load(str(recipe), [*common, *tuning])


def recipe_text(name: str, folder: Path) -> str:
    """A recipe that trains a model for a few steps, as YAML, which JSON is."""
    kind = list_models()[name]
    is_part = f"models/{name}" in recipe_paths()
    spec = load_spec(name)
    is_gaussian = PROCESSES.name(spec.process_type) == "gaussian"
    settings: dict[str, Any] = {
        "extends": ["base", *([f"models/{name}"] if is_part else [])],
        "objective": {"type": "nft" if is_gaussian else "grpo", "group_size": 2},
        "rewards": {"brightness": {"type": "brightness"}},
        "data": {"type": "prompts", "prompts": list(TRAINED_PROMPTS.get(kind, DEFAULT_PROMPTS))},
        "batch": {"prompts": 2, "micro_batch_size": 1, "rollout_batch_size": 2},
        "optim": {"lr": 1e-3},
        "steps": 2,
    }
    if not is_part:
        settings |= {"model": {"type": kind}, "process": {"type": PROCESSES.name(spec.process_type)}}
    if spec.reads_image:
        settings["data"] = {"type": "edit_file", "path": str(write_edits(folder))}
    return json.dumps(settings)


def load_spec(name: str) -> ModelSpec:
    """The spec of a part with its settings, or of a model's type with default settings."""
    part = f"models/{name}"
    data = read_recipe(part)["model"] if part in recipe_paths() else {"type": name}
    spec: ModelSpec = build_component(ModelSpec, data, "verify")
    return spec


def write_edits(folder: Path) -> Path:
    """Two instructions with an image each, as a file of prompts."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for number, prompt in enumerate(("make the cat red", "add a second dog")):
        pixels = torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"source-{number}.png")
        rows.append({"prompt": prompt, "image": f"source-{number}.png"})
    path = folder / "edits.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def verify_model(name: str, settings: Settings) -> Iterator[Check]:
    """Yield the checks of a model or of a recipe's model."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        config = load_config(name, settings, folder)
        part = find_part(name, config.model)
        if not settings.tiny:
            config = replace(config, model=with_local_weights(config.model, settings.weights))
        yield run_timed("samples", lambda: check_samples(part, config, settings, folder, is_recipe=part != name))
        if part == name and isinstance(config.process, GaussianProcess):  # a recipe may need its number of steps
            config = replace(config, process=config.process.with_num_steps(settings.sampling_steps))
        yield from doctor_checks(config, settings)
        yield run_timed("training", lambda: check_training(config, settings, folder / "run"))


def run_timed(name: str, check: Callable[[], Check]) -> Check:
    """Run a check, with its seconds; an error that users can cause is its failure."""
    started = time.perf_counter()
    try:
        result = check()
    except Exception as error:  # whatever a library raises is a result
        if NEEDS_DOWNLOAD in str(error):
            raise
        result = Check(name, "fail", reason=f"{type(error).__name__}: {error!s:.400}")
    return replace(result, seconds=round(time.perf_counter() - started, 2))


def check_samples(name: str, config: RunConfig, settings: Settings, folder: Path, *, is_recipe: bool = False) -> Check:
    """Sample the same prompts from the same noise with our sampler and with the library's pipeline."""
    kind = MODELS.name(type(config.model))
    reason = "" if name in REFERENCES else why_not_compared(kind, config.model)
    if reason:
        return Check("samples", "skip", reason=f"not compared: {reason}")
    precision = settings.precision
    tolerance = TOLERANCES["tiny" if settings.tiny and precision == "fp32" else precision]

    def compare_with_pipeline() -> Check:
        comparison = prepare_comparison(
            config,
            find_reference(name, kind),
            folder / "pipeline",
            tiny=settings.tiny,
            sampling_steps=settings.sampling_steps,
            placement=choose_placement(settings.device, precision),
            derive_shift=settings.tiny or is_recipe,  # the settings of parts are the published ones
        )
        return compare(comparison, tolerance)

    if is_listed(name, kind):
        return compare_with_pipeline()
    check = run_timed("samples", compare_with_pipeline)
    if check.verdict == "pass":
        return check
    found = check.number or check.reason
    return replace(check, verdict="skip", reason=f"not compared: no entry in references.py ({found:.200})")


def compare(comparison: Comparison, tolerance: float) -> Check:
    """The largest differences of latents and pixels."""
    start, latents, pixels = comparison.sample_ours()
    expected_latents, expected_pixels = comparison.sample_reference(start)
    difference = largest(pixels.reshape(expected_pixels.shape) - expected_pixels)
    number, values = f"pixels off by {difference:.1e}", {"pixels_max_abs": difference}
    if expected_latents is not None:
        own_latents = comparison.latents(latents)
        if own_latents.shape != expected_latents.shape:
            shapes = f"{list(own_latents.shape)} and {list(expected_latents.shape)}"
            return Check("samples", "fail", reason=f"latents have the shapes {shapes}; set `latents` in the entry")
        values["latents_max_abs"] = largest(own_latents - expected_latents)
        values["latents_relative"] = values["latents_max_abs"] / max(largest(expected_latents), 1e-12)
        number = f"latents off by {values['latents_relative']:.1e} of the largest, {number}"
        difference = max(difference, values["latents_relative"])
    values |= {"tolerance": tolerance, "sampling_steps": float(comparison.process.num_steps)}
    equal = math.isfinite(difference) and difference <= tolerance
    advice = "" if equal else "compare timesteps, guidance, embeddings and latents with the pipeline's, in this order"
    return Check("samples", "pass" if equal else "fail", f"{number}, tolerance {tolerance:.0e}", advice, values)


def largest(x: Tensor) -> float:
    return float(x.abs().max())


def doctor_checks(config: RunConfig, settings: Settings) -> Iterator[Check]:
    """The checks of `tastemaker doctor`, without that of two ranks, which does not depend on weights."""
    started = time.perf_counter()
    try:
        for result in run_doctor(config, tiny=settings.tiny, ranks=False):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            yield Check(result.name, result.verdict, result.number, result.advice, seconds=round(seconds, 2))
    except Exception as error:  # whatever a library raises is a result
        if NEEDS_DOWNLOAD in str(error):
            raise
        yield Check("doctor", "fail", reason=f"{type(error).__name__}: {error!s:.400}")


def check_training(config: RunConfig, settings: Settings, folder: Path) -> Check:
    """Train a few steps: the loss must be finite, and weights must change."""
    config = make_tiny(config) if settings.tiny else config
    with opened(config, folder) as run:
        parameters = run.policy.weights.trainable()
        before = {key: p.detach().clone() for key, p in parameters.items()}
        losses = [train_step(run, step).to_event().metrics["loss/policy"] for step in range(settings.steps)]
        changed = sum(not torch.equal(p, before[key]) for key, p in parameters.items())
        number = f"losses {', '.join(f'{loss:.4g}' for loss in losses)}; {changed} of {len(before)} tensors changed"
        values = {"changed": float(changed), "trained": float(len(before))}
        good = all(map(math.isfinite, losses)) and changed > 0
    return Check("training", "pass" if good else "fail", number, values=values)


@contextmanager
def opened(config: RunConfig, folder: Path) -> Iterator[Any]:
    """A run that is closed at the end of the block."""
    run = build(config, folder)
    try:
        yield run
    finally:
        run.engine.close()


def model_sources(name: str, settings: Settings) -> Sequence[WeightsSource]:
    """The published weights that a model needs."""
    spec = load_spec(name) if name in list_models() else load(name).model
    return with_local_weights(spec, settings.weights).sources
