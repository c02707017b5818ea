"""Adapters on the network, on the text encoders that read for it, or on both."""

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
from tastemaker.models.sd15 import Sd15
from tastemaker.training import checkpoint
from tastemaker.training.loop import train, train_step
from tastemaker.training.run import Run
from tastemaker.training.sample_grid import sampling_policy

SMALL = [
    "sample.every=0",
    "guard.every=0",
    "steps=2",
    "batch.prompts=2",
    "batch.microbatch=2",
    "process.steps=2",
    "rewards={bright: {type: brightness}}",
    "engine={precision: fp32, trainable: fp32}",
    "checkpoint.every=1",
    "optim.lr=1e-2",
]


def started(place: Path, *adapt: str, recipe: str = "draft-sd15", more: tuple[str, ...] = ()) -> Run:
    targets = () if recipe == "draft-sd15" else ("tuning={type: lora, rank: 2}",)
    named = f"tuning.adapt=[{','.join(adapt)}]"
    return build(make_tiny(load(recipe, [*SMALL, *targets, *more, named])), place)


def moved(before: dict[str, Tensor], run: Run) -> dict[str, bool]:
    return {key: not p.detach().equal(before[key]) for key, p in run.policy.weights.trainable().items()}


def copied(run: Run) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}


def words(run: Run, prompt: str = "a cat") -> Tensor:
    """What the encoders say of a prompt."""
    model: Any = run.policy.model
    model = getattr(model, "model", model)  # within guidance
    with torch.no_grad():
        cond = model.embed([prompt])
        read = model.read(cond) if isinstance(model, TrainableTextEncoderBackbone) else cond
    return torch.cat([x.flatten() for x in read.tensors.values() if x.is_floating_point()])


@pytest.mark.parametrize(
    "recipe", ["draft-sd15", "srpo-flux-hps", pytest.param("flowgrpo-sd35", marks=pytest.mark.slow)]
)
def test_text_adapters_get_a_gradient_and_move_what_is_read(recipe: str, tmp_path: Path) -> None:
    run = started(tmp_path, "net", "text", recipe=recipe)
    before, said = copied(run), words(run)
    train_step(run, 0)
    train_step(run, 1)
    changed = moved(before, run)
    texts = {key: told for key, told in changed.items() if key.startswith("text_encoder") and "lora_B" in key}
    assert texts and sum(texts.values()) > len(texts) / 2  # the last layers of some encoders are not read
    assert any(told for key, told in changed.items() if not key.startswith("text_encoder"))
    assert not words(run).equal(said)


def test_text_alone_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    run = started(tmp_path, "text")
    keys = set(run.policy.weights.trainable())
    assert keys and all(key.startswith("text_encoder.") for key in keys)
    before = {key: x.clone() for key, x in run.policy.weights.net.state_dict().items()}
    said = words(run)
    train_step(run, 0)
    assert all(before[key].equal(x) for key, x in run.policy.weights.net.state_dict().items())
    assert not words(run).equal(said)


def test_the_network_alone_reads_each_prompt_once(tmp_path: Path) -> None:
    run = started(tmp_path, "net")
    assert not any(key.startswith("text_encoder") for key in run.policy.weights.trainable())
    said = words(run)
    train_step(run, 0)
    assert words(run).equal(said)


def test_the_reference_reads_as_the_encoders_did_before(tmp_path: Path) -> None:
    run = started(tmp_path, "net", "text", more=("guidance=null",))
    said = words(run)
    train_step(run, 0)
    now = words(run)
    with run.policy.weights.use("reference"):
        assert words(run).equal(said)
    assert words(run).equal(now) and not now.equal(said)


CLIPS = [f"vader-{name}-hps" for name in ("opensora", "videocrafter2", "wan")]


@pytest.mark.parametrize("recipe", [*(pytest.param(each, marks=pytest.mark.slow) for each in CLIPS), "srpo-flux-hps"])
def test_before_anything_is_learned_samples_are_those_of_encoders_that_were_never_taught(
    recipe: str, tmp_path: Path
) -> None:
    made = []
    for adapt in (("net",), ("net", "text")):
        run = started(tmp_path, *adapt, recipe=recipe)
        policy = sampling_policy(run.policy)
        cond = policy.embed(["a cat", "a dog", "a cat"])
        made.append(policy.sample(select_rows(cond, torch.tensor([2, 1])), Randomness(0, 0, torch.arange(2))).final)
    torch.testing.assert_close(made[0], made[1], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", "net", "text")
    list(train(whole))
    list(train(started(tmp_path / "parts", "net", "text", more=("steps=1",))))
    later = started(tmp_path / "parts", "net", "text")
    found = checkpoint.latest(tmp_path / "parts")
    assert found is not None
    later.resume(found)
    list(train(later))
    assert not any(moved(copied(whole), later).values())


def test_files_name_the_encoder_as_diffusers_and_comfyui_do(tmp_path: Path) -> None:
    run = started(tmp_path, "net", "text")
    weights = run.policy.weights
    assert isinstance(weights, LoraWeights)
    write_diffusers_lora(weights, Sd15.layout, tmp_path / "d.safetensors", torch.float32)
    write_comfyui_lora(weights, Sd15.layout, tmp_path / "c.safetensors", torch.float32)
    with safe_open(tmp_path / "d.safetensors", "pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["unet.r"] == weights.config.r
    assert {key.split(".")[0] for key in load_file(tmp_path / "d.safetensors")} == {"unet", "text_encoder"}
    comfyui = load_file(tmp_path / "c.safetensors")
    assert {"_".join(key.split("_")[:2]) for key in comfyui} == {"lora_unet", "lora_te1"}
    with pytest.raises(ConfigError, match="merging would lose what text_encoder learned"):
        weights.merged()


def test_layers_that_are_not_there_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"ends with qqq; those of linear layers mostly end with .*to_q.* set tuning\.targets"
    ):
        started(tmp_path, "net", more=("tuning.targets=[qqq]",))


def test_a_model_without_text_encoder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no text encoder that could be trained"):
        started(tmp_path, "net", "text", recipe="grpo-lora-toy-flow")
    with pytest.raises(ConfigError, match="'adapt' is empty"):
        load("grpo-lora-toy-flow", ["tuning.adapt=[]"])


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_learn_what_one_learns_of_a_clip_and_of_its_words(tmp_path: Path) -> None:
    changes = ["steps=2", "process.steps=2", "batch.prompts=2", "tuning.adapt=[net,text]", "tuning.dropout=0.1"]
    changes += ["sample.every=0", "guard.every=0", "engine.precision=fp32", "checkpoint.every=2", "optim.lr=1e-3"]
    changes += ["optim.eps=1e-5"]  # gradients of 1e-8 would otherwise be steps whose sign is one of rounding
    found = []
    for count in (1, 2):
        place = f"output={tmp_path}", f"name=on{count}"
        on_ranks(count, "train", "vader-modelscope-hps", "--tiny", "--device", "cpu", *changes, *place)
        run = build(make_tiny(load("vader-modelscope-hps", [*changes, *place])), tmp_path / f"on{count}")
        last = checkpoint.latest(tmp_path / f"on{count}")
        assert last is not None
        run.resume(last)
        found.append(copied(run))
    one, two = found
    assert any(key.startswith("text_encoder") for key in one)
    assert all(torch.allclose(x, two[key], atol=2e-6) for key, x in one.items())


@pytest.mark.slow
@pytest.mark.ranks
def test_a_network_in_shards_and_text_beside_it_is_a_sentence(tmp_path: Path) -> None:
    changes = ["tuning.adapt=[net,text]", "engine.strategy=fsdp", f"output={tmp_path}"]
    with pytest.raises(AssertionError, match="shards the network alone, but 'text_encoder"):
        on_ranks(2, "train", "vader-modelscope-hps", "--tiny", "--device", "cpu", *changes)
