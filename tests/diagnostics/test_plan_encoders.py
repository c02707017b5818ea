"""Encoders that visit the GPU to embed prompts: their published sizes, and their place in the plan's peak."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.cli.diagnose import GIB
from tastemaker.config.load import load
from tastemaker.config.registries import MODELS
from tastemaker.core.types import Placement
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.diagnostics import plan
from tastemaker.diagnostics.fake_backbones import fake_modules, lent_encoders, uninitialized_encoders
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.models import flux, sana
from tastemaker.models.component_configs import MISTRAL_SMALL, QWEN3_VL_8B, QWEN25_VL_7B

PEAK = ResourceEstimate(
    weights=40.0,
    gradients=1.0,
    optimizer_state=2.0,
    snapshots=0.0,
    frozen=4.0,
    kv_cache=0.0,
    collect_activations=6.0,
    update_activations=8.0,
    collect_flops=0.0,
    update_flops=0.0,
)


def test_encoder_and_activations_are_not_in_memory_together() -> None:
    assert replace(PEAK, encoders=7.0).total == PEAK.total == 55
    assert replace(PEAK, encoders=16.0).total == 63


# Weights of the whole published checkpoints, vision towers and output layers included.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "Qwen/Qwen2.5-VL-7B-Instruct": ("Qwen2_5_VLForConditionalGeneration", QWEN25_VL_7B, 8_292_166_656),
    "Qwen/Qwen3-VL-8B-Instruct": ("Qwen3VLForConditionalGeneration", QWEN3_VL_8B, 8_767_123_696),
    "google/gemma-2-2b-it": ("Gemma2Model", sana.SANA_1600M["text_encoder"], 2_614_341_888),
    "mistralai/Mistral-Small-3.1-24B": (
        "Mistral3ForConditionalGeneration",
        {"text_config": MISTRAL_SMALL, "tie_word_embeddings": False},
        24_011_361_280,
    ),
}


@pytest.mark.parametrize("hub", [pytest.param(hub, marks=pytest.mark.slow) for hub in PUBLISHED])
def test_text_encoders_have_the_published_number_of_weights(hub: str) -> None:
    import transformers

    name, config, count = PUBLISHED[hub]
    network_class: Any = getattr(transformers, name)
    with torch.device("meta"), uninitialized_encoders():
        net = network_class(network_class.config_class(**config))
    assert sum(p.numel() for p in net.parameters()) == count


# In GB of bf16: what is moved, without the vision towers, output layers and last layers that nobody reads.
LENT = {
    "qwen_image": 14.1,
    "qwen_image_21": 15.1,
    "qwen_image_edit": 15.5,
    "sana": 5.2,
    "ltx2": 23.7,
    "flux2": 6.2,
    "wan": 11.4,
    "flux": 9.5,
    "hunyuanvideo": 15.0,
    "llamagen": 2.4,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "wan" else pytest.mark.slow) for name in LENT])
def test_largest_encoder_of_a_model(name: str, tmp_path: Path) -> None:
    spec: Any = MODELS.find(name, "model")()
    ShardedEmbeddingStore(tmp_path, {}).add([""], {"prompt_embeds": torch.zeros(1, 1)})
    with FakeTensorMode(allow_non_fake_inputs=True), fake_modules():
        if name == "llamagen":
            spec, backbone = replace(spec, conditioning="caption"), SimpleNamespace()
        else:
            random = replace(spec, weights=f"random:{spec.weights}", embeddings=tmp_path)
            components = random.components(Placement(torch.device("cpu"), torch.bfloat16))
            backbone = SimpleNamespace(prompt_encoder=random.cached_prompt_encoder(components))
        assert lent_encoders(replace(spec, embeddings=tmp_path), backbone, torch.bfloat16) == []
        nets = lent_encoders(spec, backbone, torch.bfloat16)
    assert max(bf16_gigabytes(net) for net in nets) == pytest.approx(LENT[name], abs=0.06)


def bf16_gigabytes(net: nn.Module) -> float:
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    return 2e-9 * sum(p.numel() for p in net.parameters())


@pytest.mark.slow
def test_plan_counts_encoders_unless_they_train_or_ran_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny, hub = flux.TINY_CONFIGS, flux.FLUX.releases[0].hub
    wide = {**tiny["text_encoder_2"], "vocab_size": 100_000}  # larger than the activations of the small network
    monkeypatch.setitem(flux.FLUX.configs, hub, {**tiny, "text_encoder_2": wide})
    small = ["model.height=64", "model.width=64", "model.max_text_tokens=16", "rewards.hps=null"]
    small += ["objective.relative=false", "batch.micro_batch_size=1", "batch.prompts=1", "engine.param_dtype=fp32"]

    def estimate(*overrides: str) -> ResourceEstimate:
        return estimate_resources(load("srpo-flux-hps", [*small, *overrides]))

    lent, before = estimate(), estimate(f"model.embeddings={tmp_path}")
    trained = estimate("tuning={type: lora, rank: 2, modules: [backbone, text_encoder]}")
    assert lent.encoders > 2 * 100_000 * wide["d_model"] and lent.peaks_at_embedding
    assert lent.total - before.total == lent.encoders - max(lent.collect_activations, lent.update_activations)
    assert before.encoders == trained.encoders == 0 and not before.peaks_at_embedding
    assert trained.frozen - before.frozen == pytest.approx(lent.encoders, rel=0.01)


def test_networks_are_initialized_again_after_a_plan() -> None:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(RuntimeError, match="stop"), uninitialized_encoders():
        raise RuntimeError("stop")
    scales = [p.std() for p in CLIPTextModel(config).parameters() if p.ndim == 2]
    assert all(0 < scale < 1 for scale in scales)


def test_embedding_beforehand_is_suggested_where_encoders_make_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = replace(PEAK, weights=40.0 * GIB, update_activations=8.0 * GIB, encoders=30.0 * GIB)
    monkeypatch.setattr(plan, "estimate_any", lambda config, world_size=1: lowest)
    result = CliRunner().invoke(app, ["plan", "flowgrpo-sd35", "--gpu-gib", "50", "--no-cache"])
    assert result.exit_code == 1 and "  model.embeddings=embeddings: 48.0 GiB" in result.stdout
    assert "next:\n  tastemaker embed flowgrpo-sd35\n" in result.stderr
    assert "tastemaker train flowgrpo-sd35 model.embeddings=embeddings" in result.stderr
    config = load("flowgrpo-sd35", ["model.embeddings=embeddings"])
    savings = dict(plan.suggest_savings(config, lowest, 1, 80.0, lambda config, world_size=1: lowest))
    assert plan.EMBED_BEFOREHAND not in savings
