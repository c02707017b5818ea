"""LoRA on the backbone, on the text encoders, or on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.config.build import build, make_tiny
from tastemaker.config.load import load
from tastemaker.core.lora import LoraWeights
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.trainable_text_encoder import TrainableTextEncoderBackbone
from tastemaker.core.types import select_rows
from tastemaker.export.lora import write_comfyui_lora, write_diffusers_lora
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.training import checkpoint
from tastemaker.training.loop import train, train_step
from tastemaker.training.run import Run
from tastemaker.training.samples import sampling_policy

SMALL = [
    "sample.every=0",
    "guard.every=0",
    "steps=2",
    "batch.prompts=2",
    "batch.micro_batch_size=2",
    "process.num_steps=2",
    "rewards={bright: {type: brightness}}",
    "engine={precision: fp32, param_dtype: fp32}",
    "checkpoint.every=1",
    "optim.lr=1e-2",
]


def build_run(directory: Path, *modules: str, recipe: str = "draft-sd15", overrides: tuple[str, ...] = ()) -> Run:
    targets = () if recipe == "draft-sd15" else ("tuning={type: lora, rank: 2}",)
    modules_setting = f"tuning.modules=[{','.join(modules)}]"
    return build(make_tiny(load(recipe, [*SMALL, *targets, *overrides, modules_setting])), directory)


def changed_parameters(before: dict[str, Tensor], run: Run) -> dict[str, bool]:
    return {key: not p.detach().equal(before[key]) for key, p in run.policy.weights.trainable().items()}


def copy_parameters(run: Run) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}


def text_embeddings(run: Run, prompt: str = "a cat") -> Tensor:
    """Return the text embeddings of a prompt."""
    model: Any = run.policy.model
    model = getattr(model, "model", model)  # within guidance
    with torch.no_grad():
        cond = model.embed([prompt])
        encoded = model.encode_prompts(cond) if isinstance(model, TrainableTextEncoderBackbone) else cond
    return torch.cat([x.flatten() for x in encoded.tensors.values() if x.is_floating_point()])


@pytest.mark.parametrize(
    "recipe", ["draft-sd15", "srpo-flux-hps", pytest.param("flowgrpo-sd35", marks=pytest.mark.slow)]
)
def test_text_encoder_lora_gets_gradients_and_changes_embeddings(recipe: str, tmp_path: Path) -> None:
    run = build_run(tmp_path, "backbone", "text_encoder", recipe=recipe)
    before, initial = copy_parameters(run), text_embeddings(run)
    train_step(run, 0)
    train_step(run, 1)
    changed = changed_parameters(before, run)
    text_encoder = {
        key: is_changed for key, is_changed in changed.items() if key.startswith("text_encoder") and "lora_B" in key
    }
    assert (
        text_encoder and sum(text_encoder.values()) > len(text_encoder) / 2
    )  # the last layers of some encoders are not read
    assert any(is_changed for key, is_changed in changed.items() if not key.startswith("text_encoder"))
    assert not text_embeddings(run).equal(initial)


def test_text_encoder_lora_leaves_the_backbone_unchanged(tmp_path: Path) -> None:
    run = build_run(tmp_path, "text_encoder")
    keys = set(run.policy.weights.trainable())
    assert keys and all(key.startswith("text_encoder.") for key in keys)
    before = {key: x.clone() for key, x in run.policy.weights.net.state_dict().items()}
    initial = text_embeddings(run)
    train_step(run, 0)
    assert all(before[key].equal(x) for key, x in run.policy.weights.net.state_dict().items())
    assert not text_embeddings(run).equal(initial)


def test_backbone_lora_caches_prompt_embeddings(tmp_path: Path) -> None:
    run = build_run(tmp_path, "backbone")
    assert not any(key.startswith("text_encoder") for key in run.policy.weights.trainable())
    initial = text_embeddings(run)
    train_step(run, 0)
    assert text_embeddings(run).equal(initial)


def test_reference_uses_the_initial_text_encoder(tmp_path: Path) -> None:
    run = build_run(tmp_path, "backbone", "text_encoder", overrides=("guidance=null",))
    initial = text_embeddings(run)
    train_step(run, 0)
    trained = text_embeddings(run)
    with run.policy.weights.use("reference"):
        assert text_embeddings(run).equal(initial)
    assert text_embeddings(run).equal(trained) and not trained.equal(initial)


VIDEO_RECIPES = [f"vader-{name}-hps" for name in ("opensora", "videocrafter2", "wan")]


@pytest.mark.parametrize(
    "recipe", [*(pytest.param(recipe, marks=pytest.mark.slow) for recipe in VIDEO_RECIPES), "srpo-flux-hps"]
)
def test_initial_samples_equal_those_of_a_frozen_text_encoder(recipe: str, tmp_path: Path) -> None:
    samples = []
    for modules in (("backbone",), ("backbone", "text_encoder")):
        run = build_run(tmp_path, *modules, recipe=recipe)
        policy = sampling_policy(run.policy)
        cond = policy.embed(["a cat", "a dog", "a cat"])
        samples.append(policy.sample(select_rows(cond, torch.tensor([2, 1])), Randomness(0, 0, torch.arange(2))).final)
    torch.testing.assert_close(samples[0], samples[1], rtol=1e-4, atol=1e-5)


def test_text_encoder_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = build_run(tmp_path / "uninterrupted", "backbone", "text_encoder")
    list(train(uninterrupted))
    list(train(build_run(tmp_path / "resumed", "backbone", "text_encoder", overrides=("steps=1",))))
    resumed = build_run(tmp_path / "resumed", "backbone", "text_encoder")
    latest = checkpoint.latest_checkpoint(tmp_path / "resumed")
    assert latest is not None
    resumed.resume(latest)
    list(train(resumed))
    assert not any(changed_parameters(copy_parameters(uninterrupted), resumed).values())


def test_exported_lora_has_the_keys_of_diffusers_and_comfyui(tmp_path: Path) -> None:
    run = build_run(tmp_path, "backbone", "text_encoder")
    weights = run.policy.weights
    assert isinstance(weights, LoraWeights)
    write_diffusers_lora(weights, Sd15Spec.layout, tmp_path / "d.safetensors", torch.float32)
    write_comfyui_lora(weights, Sd15Spec.layout, tmp_path / "c.safetensors", torch.float32)
    with safe_open(tmp_path / "d.safetensors", "pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["unet.r"] == weights.config.r
    assert {key.split(".")[0] for key in load_file(tmp_path / "d.safetensors")} == {"unet", "text_encoder"}
    comfyui = load_file(tmp_path / "c.safetensors")
    assert {"_".join(key.split("_")[:2]) for key in comfyui} == {"lora_unet", "lora_te1"}
    with pytest.raises(ConfigError, match=r"text_encoder.*TM080"):
        weights.merged()


def test_unknown_target_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qqq.*to_q.*TM081"):
        build_run(tmp_path, "backbone", overrides=("tuning.target_modules=[qqq]",))


def test_model_without_text_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tuning\.modules.*text_encoder.*TM085"):
        build_run(tmp_path, "backbone", "text_encoder", recipe="grpo-lora-toy-flow")
    with pytest.raises(ConfigError, match=r"'modules'.*TM084"):
        load("grpo-lora-toy-flow", ["tuning.modules=[]"])


@pytest.mark.slow
@pytest.mark.ranks
def test_text_encoder_training_on_two_ranks_equals_one(tmp_path: Path) -> None:
    settings = ["steps=2", "process.num_steps=2", "batch.prompts=2"]
    settings += ["tuning.modules=[backbone,text_encoder]", "tuning.dropout=0.1"]
    settings += ["sample.every=0", "guard.every=0", "engine.precision=fp32", "checkpoint.every=2", "optim.lr=1e-3"]
    settings += ["optim.eps=1e-5"]  # otherwise rounding decides the sign of steps for gradients of 1e-8
    weights = []
    for count in (1, 2):
        output = f"output_dir={tmp_path}", f"name=on{count}"
        on_ranks(count, "train", "vader-modelscope-hps", "--tiny", "--device", "cpu", *settings, *output)
        run = build(make_tiny(load("vader-modelscope-hps", [*settings, *output])), tmp_path / f"on{count}")
        last = checkpoint.latest_checkpoint(tmp_path / f"on{count}")
        assert last is not None
        run.resume(last)
        weights.append(copy_parameters(run))
    one, two = weights
    assert any(key.startswith("text_encoder") for key in one)
    assert all(torch.allclose(x, two[key], atol=2e-6) for key, x in one.items())


@pytest.mark.slow
@pytest.mark.ranks
def test_sharding_with_text_encoder_training_is_refused(tmp_path: Path) -> None:
    settings = ["tuning.modules=[backbone,text_encoder]", "engine.strategy=fsdp", f"output_dir={tmp_path}"]
    with pytest.raises(AssertionError, match=r"TM812"):
        on_ranks(2, "train", "vader-modelscope-hps", "--tiny", "--device", "cpu", *settings)
