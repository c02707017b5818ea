"""What a run will take before it is begun: counted on tensors that hold nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from typer.testing import CliRunner

from tastemaker.cli import app
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.diagnostics.resource_plan import (
    CLIP_VISION_CONFIG,
    ResourceEstimate,
    estimate_resources,
    network_batch_sizes,
)
from tastemaker.diagnostics.tracing import count_flops, trace_peak_bytes
from tastemaker.models import flux, sd3
from tastemaker.models.component_configs import COMPONENT_CONFIGS, FLUX_DEV, SD35_MEDIUM

DEV, MEDIUM = "black-forest-labs/FLUX.1-dev", "stabilityai/stable-diffusion-3.5-medium"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of the published kinds whose sizes can be gone through in a moment."""
    monkeypatch.setitem(
        COMPONENT_CONFIGS, DEV, {**FLUX_DEV, "transformer": flux.SMALL["transformer"], "vae": flux.SMALL["vae"]}
    )
    monkeypatch.setitem(COMPONENT_CONFIGS, MEDIUM, {**SD35_MEDIUM, "transformer": sd3.SMALL["transformer"]})
    monkeypatch.setitem(CLIP_VISION_CONFIG, "num_hidden_layers", 2)


def test_what_is_held_at_the_peak_is_counted_and_what_is_dropped_is_not() -> None:
    with FakeTensorMode():
        x, kib = torch.empty(256), 1024

        def work() -> None:
            for _ in range(3):
                y = x + 1
                y = y * 2
                del y

        assert trace_peak_bytes(work, [x]) == 2 * kib
        net = nn.Linear(256, 256, bias=False)
        net.weight.grad = torch.empty_like(net.weight)
        found = trace_peak_bytes(
            lambda: net(x[None]).square().sum().backward(), [x, *net.parameters(), net.weight.grad]
        )
    assert 256 * kib < found < 260 * kib  # the gradient on its way to the one that is there


def test_attention_takes_no_matrix_of_queries_and_keys_and_its_work_is_counted() -> None:
    with FakeTensorMode():
        parts = [torch.empty(1, 2, 4096, 64, requires_grad=True) for _ in range(3)]

        def work() -> None:
            functional.scaled_dot_product_attention(*parts).sum().backward()

        assert trace_peak_bytes(work, parts) < 20 * 2**20
        with torch.no_grad():
            assert count_flops(lambda: functional.scaled_dot_product_attention(*parts)) == 4 * 2 * 4096**2 * 64


def planned(*overrides: str, world: int = 1) -> ResourceEstimate:
    """Of SRPO on a small Flux."""
    asked = ["model.height=64", "model.width=64", "model.words=16", "rewards.hps=null", "objective.relative=false"]
    return estimate_resources(load("srpo-flux-hps", [*asked, "batch.microbatch=8", *overrides]), world)


@pytest.mark.usefixtures("small")
def test_memory_follows_what_is_asked_for() -> None:
    plain = planned("optim.moments=fp32")
    assert plain.moments == 4 * plain.weights
    other = planned("optim.moments=int8", "engine.trainable=fp32", "ema=0.9")
    assert other.moments < 0.26 * plain.moments
    assert other.weights == 2 * plain.weights == other.snapshots
    assert planned("engine.memory=keep").training > plain.training
    assert planned("objective.merged=false").training < plain.training


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_adapters_have_smaller_gradients_and_shards_half_the_weights() -> None:
    plain = planned()
    assert planned("tuning={type: lora, rank: 4}").gradients < plain.gradients
    assert planned("engine.strategy=fsdp", world=2).weights == plain.weights / 2


def test_rows_at_once_count_branches_and_guidance() -> None:
    srpo = network_batch_sizes(load("srpo-flux-hps", ["batch.rollout=8", "batch.microbatch=4"]))
    assert (srpo.rollout, srpo.training) == (8, 8)
    assert network_batch_sizes(load("srpo-flux-hps", ["batch.microbatch=4", "objective.merged=false"])).training == 4
    guided = network_batch_sizes(load("flowgrpo-sd35", ["batch.rollout=3", "batch.microbatch=2"]))
    assert (guided.rollout, guided.training) == (6, 4)


@pytest.mark.usefixtures("small")
def test_the_command_says_what_to_change_when_it_will_not_fit() -> None:
    small = ["model.height=64", "model.width=64", "model.words=16", "optim.moments=fp32"]
    roomy = CliRunner().invoke(app, ["plan", "srpo-flux-hps", *small, "--gpu-gib", "80"])
    assert roomy.exit_code == 0 and "fits into 80 GiB" in roomy.output
    narrow = CliRunner().invoke(app, ["plan", "srpo-flux-hps", *small, "--gpu-gib", "1"])
    assert narrow.exit_code == 1
    assert "does not fit into 1 GiB" in narrow.output and "optim.moments=int8" in narrow.output


@pytest.mark.usefixtures("small")
def test_stable_diffusion_can_be_planned_too() -> None:
    assert estimate_resources(load("flowgrpo-sd35", ["model.height=64", "model.width=64", "model.words=16"])).total > 0


@pytest.mark.slow
def test_the_work_of_srpo_on_flux_is_that_counted_by_hand() -> None:
    found = estimate_resources(load("srpo-flux-hps", ["batch.prompts=1", "batch.microbatch=1", "batch.rollout=1"]))
    assert found.work == pytest.approx(1.23e15, rel=0.01)
    assert found.weights == 2 * 11_901_408_320


def test_generators_of_our_own_are_best_tried() -> None:
    with pytest.raises(ConfigError, match="plan knows published generators"):
        estimate_resources(load("grpo-toy-flow"))
