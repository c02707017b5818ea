"""Memory and FLOPs of a run, estimated on fake tensors before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from typer.testing import CliRunner, Result

from tastemaker.cli import app
from tastemaker.cli import diagnose as plan_command
from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.diagnostics import plan, plan_cache
from tastemaker.diagnostics.fake_memory import count_flops, trace_peak_bytes
from tastemaker.diagnostics.fake_run import CLIP_VISION_CONFIG
from tastemaker.diagnostics.gpu_presets import find_gpu
from tastemaker.diagnostics.plan import ResourceEstimate, estimate_resources
from tastemaker.diagnostics.plan_cache import CACHE_FILE, PlanCache
from tastemaker.models import flux, sd3
from tastemaker.training import low_precision_linear
from tastemaker.training.merged_rollouts import use_merged_rollouts
from tastemaker.training.rollout_precision import use_low_precision_rollouts

DEV, MEDIUM = "black-forest-labs/FLUX.1-dev", "stabilityai/stable-diffusion-3.5-medium"


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks in place of FLUX and Stable Diffusion 3.5."""
    monkeypatch.setitem(
        flux.FLUX.configs,
        DEV,
        {**flux.FLUX_DEV, "transformer": flux.TINY_CONFIGS["transformer"], "vae": flux.TINY_CONFIGS["vae"]},
    )
    monkeypatch.setitem(sd3.SD3.configs, MEDIUM, {**sd3.SD35_MEDIUM, "transformer": sd3.TINY_CONFIGS["transformer"]})
    monkeypatch.setitem(CLIP_VISION_CONFIG, "num_hidden_layers", 2)


def test_peak_counts_live_tensors_only() -> None:
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
        peak = trace_peak_bytes(lambda: net(x[None]).square().sum().backward(), [x, *net.parameters(), net.weight.grad])
    assert 256 * kib < peak < 260 * kib  # the new gradient before it is accumulated


def test_fused_attention_memory_and_flops() -> None:
    with FakeTensorMode():
        qkv = [torch.empty(1, 2, 4096, 64, requires_grad=True) for _ in range(3)]

        def work() -> None:
            functional.scaled_dot_product_attention(*qkv).sum().backward()

        assert trace_peak_bytes(work, qkv) < 20 * 2**20
        with torch.no_grad():
            assert count_flops(lambda: functional.scaled_dot_product_attention(*qkv)) == 4 * 2 * 4096**2 * 64


def estimate(*overrides: str, world_size: int = 1) -> ResourceEstimate:
    """Estimate the resources of SRPO on a small FLUX."""
    settings = [
        "model.height=64",
        "model.width=64",
        "model.max_text_tokens=16",
        "rewards.hps=null",
        "objective.relative=false",
    ]
    return estimate_resources(load("srpo-flux-hps", [*settings, "batch.micro_batch_size=8", *overrides]), world_size)


@pytest.mark.usefixtures("small_networks")
def test_memory_depends_on_dtypes_and_checkpointing() -> None:
    plain = estimate("optim.state_dtype=fp32")
    assert plain.optimizer_state == 4 * plain.weights
    other = estimate("optim.state_dtype=int8", "engine.param_dtype=fp32", "ema_decay=0.9")
    assert other.optimizer_state < 0.26 * plain.optimizer_state
    assert other.weights == 2 * plain.weights == other.snapshots
    assert estimate("engine.activation_memory=keep").update_activations > plain.update_activations
    assert estimate("objective.batch_branches=false").update_activations < plain.update_activations


@pytest.mark.slow
@pytest.mark.usefixtures("small_networks")
def test_copies_for_rollouts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)
    net = flux.FluxSpec().tiny().load(Placement()).net
    copies = use_low_precision_rollouts(net, "fp8", torch.device("cpu"))
    copies.refresh()
    kept = [x for layer in copies.layers for x in (layer.rollout_weight, layer.rollout_scale)]
    plain, low = estimate(), estimate("engine.rollout_precision=fp8")
    assert low.rollout_copies == sum(x.nbytes for x in kept if x is not None) > 0 == plain.rollout_copies
    assert low.total - plain.total == low.rollout_copies
    assert estimate("engine.rollout_precision=bf16").rollout_copies == 0  # this is the precision of the run
    model = flux.FluxSpec().tiny().load(Placement(dtype=torch.bfloat16))
    merged = use_merged_rollouts(Lora(target_modules="all-linear").apply(model, ()).net, "fp8", torch.device("cpu"))
    merged.refresh()
    kept = [x for layer in merged.layers for x in (layer.merged_weight, layer.merged_scale)]
    assert {x.itemsize for x in kept if x is not None} == {1, 2, 4}
    tuning = "tuning={type: lora, target_modules: all-linear, merge_rollouts: true}"
    planned = estimate(tuning, "engine.rollout_precision=fp8").rollout_copies
    assert planned == sum(x.nbytes for x in kept if x is not None)
    adapter = estimate("tuning={type: lora}", "engine.rollout_precision=fp8")
    base = estimate("tuning={type: lora}", "engine.rollout_precision=fp8", "engine.base_precision=fp8")
    assert adapter.rollout_copies == low.rollout_copies and base.rollout_copies == 0


@pytest.mark.usefixtures("small_networks")
def test_cpu_offload_leaves_blocks_on_the_gpu() -> None:
    settings = ["optim.state_dtype=fp32", "ema_decay=0.9", "engine.strategy=fsdp"]
    plain, offloaded = estimate(*settings), estimate(*settings, "engine.cpu_offload=true")
    on_host = plain.weights + plain.gradients + plain.optimizer_state + plain.snapshots
    assert offloaded.host_memory == on_host and plain.host_memory == 0
    assert offloaded.optimizer_state == offloaded.snapshots == 0
    assert offloaded.weights > 0 and offloaded.gradients > 0
    assert offloaded.update_activations == plain.update_activations
    sharded = estimate(*settings, "engine.cpu_offload=true", world_size=2)
    assert (sharded.weights, sharded.host_memory) == (offloaded.weights, on_host / 2)


@pytest.mark.slow
@pytest.mark.usefixtures("small_networks")
def test_lora_and_fsdp_save_memory() -> None:
    plain = estimate()
    assert estimate("tuning={type: lora, rank: 4}").gradients < plain.gradients
    assert estimate("engine.strategy=fsdp", world_size=2).weights == plain.weights / 2


@pytest.mark.slow
@pytest.mark.usefixtures("small_networks")
def test_context_parallel_ranks_divide_activations_and_work() -> None:
    overrides = ["model.height=80", "model.width=80", "model.max_text_tokens=16"]  # 25 image tokens, an odd number
    plain, shared = (
        estimate_resources(load("mixgrpo-flux", [*overrides, f"engine.context_parallel={ranks}"]), ranks)
        for ranks in (1, 2)
    )
    assert shared.update_flops == plain.update_flops / 2
    assert 0.45 * plain.update_activations < shared.update_activations < 0.7 * plain.update_activations


@pytest.mark.usefixtures("small_networks")
def test_batch_sizes_include_branches_and_guidance() -> None:
    srpo = estimate("batch.rollout_batch_size=8", "batch.micro_batch_size=4")
    assert (srpo.collect_batch, srpo.update_batch) == (8, 8)
    assert estimate("batch.micro_batch_size=4", "objective.batch_branches=false").update_batch == 4
    settings = [
        "model.height=64",
        "model.width=64",
        "model.max_text_tokens=16",
        "batch.rollout_batch_size=3",
        "batch.micro_batch_size=2",
    ]
    guided = estimate_resources(load("flowgrpo-sd35", settings))
    assert (guided.collect_batch, guided.update_batch) == (6, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_networks")
def test_objectives_on_whole_groups_and_leaps_are_planned() -> None:
    settings = ["model.height=64", "model.width=64", "model.max_text_tokens=16", "batch.micro_batch_size=2"]
    for objective, rows in (
        ("{type: dgpo, group_size: 4, reference_guidance_scale: 4.5}", 8),  # a row is a group, without guidance
        ("{type: crd, group_size: 4}", 8),
        ("{type: ram, group_size: 4}", 2),
    ):
        planned = estimate_resources(load("flowgrpo-sd35", [*settings, f"objective={objective}"]))
        assert planned.update_batch == rows, objective
    leap = "objective={type: reward_gradient, gradient_mode: leap}"
    few, many = (estimate(leap, f"process.num_steps={steps}").update_activations for steps in (2, 6))
    assert 0 < few <= many < few + 1024  # the levels of the sampler are four numbers more


@pytest.mark.usefixtures("small_networks")
def test_plan_suggests_savings() -> None:
    settings = ["model.height=64", "model.width=64", "model.max_text_tokens=16", "optim.state_dtype=fp32"]
    large = CliRunner().invoke(app, ["plan", "srpo-flux-hps", *settings, "--gpu-gib", "80"])
    assert large.exit_code == 0 and "fits into 80 GiB" in large.output
    small = CliRunner().invoke(app, ["plan", "srpo-flux-hps", *settings, "--gpu-gib", "1"])
    assert small.exit_code == 1
    assert "does not fit into 1 GiB" in small.output and "optim.state_dtype=int8" in small.output


def test_gpu_presets_have_memory_and_speed() -> None:
    assert find_gpu("H100-80g").gib == 79 and find_gpu("rtx4090-24g").gib < 24
    assert find_gpu("h200-141g").tflops == pytest.approx(540, rel=0.01)
    assert find_gpu("h200-141g").tbps == pytest.approx(4.3, rel=0.01)
    with pytest.raises(ConfigError, match=r"--gpu.*'h100-80g'.*TM661"):
        find_gpu("h100-80gb")


@pytest.mark.usefixtures("small_networks")
def test_plan_takes_a_gpu_by_name_and_shows_progress() -> None:
    settings = ["model.height=64", "model.width=64", "model.max_text_tokens=16"]
    result = CliRunner().invoke(app, ["plan", "srpo-flux-hps", *settings, "--gpu", "l40s-48g"])
    assert result.exit_code == 0 and "fits into 44 GiB" in result.stdout and "198 TFLOP/s" in result.stdout
    assert "planning srpo-flux-hps" in result.stderr and "planning" not in result.stdout


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tastemaker" / CACHE_FILE


def test_plan_is_cached_and_suggests_a_command_that_fits(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(config: RunConfig, world_size: int = 1) -> ResourceEstimate:
        measured.append(f"{config.engine.activation_memory} {config.batch.micro_batch_size} on {world_size}")
        kept = config.engine.activation_memory == "keep"
        return replace(ESTIMATE, weights=plan_command.GIB, update_activations=(50 if kept else 2) * plan_command.GIB)

    def plan_recipe(*options: str, gib: int = 24) -> Result:
        return CliRunner().invoke(app, ["plan", "flowgrpo-sd35", *options, "--gpu-gib", str(gib)])

    monkeypatch.setattr(plan, "estimate_any", measure)
    first, again = plan_recipe(), plan_recipe()
    assert measured == ["keep 8 on 1", "checkpoint 8 on 1"] and first.stdout == again.stdout
    assert "  engine.activation_memory=checkpoint: 3.0 GiB" in first.stdout
    assert "next:\n  tastemaker train flowgrpo-sd35 engine.activation_memory=checkpoint\n" in first.stderr
    assert "tracing" in first.stderr and "found in the cache" in again.stderr
    followed = plan_recipe("engine.activation_memory=checkpoint")  # the suggestion was measured before
    assert len(measured) == 2 and followed.exit_code == 0 and "fits into 24 GiB" in followed.stdout
    assert plan_recipe("--world-size", "2", gib=80).stderr.endswith("-m tastemaker train flowgrpo-sd35\n")
    assert measured[2:] == ["keep 8 on 2"]  # another number of GPUs is another plan
    assert plan_recipe("--no-cache", gib=80).exit_code == 0 and len(measured) == 4
    for damaged in ("{", "[]", json.dumps({key: {"weights": 1} for key in json.loads(cache_file.read_text())})):
        cache_file.write_text(damaged)
        assert plan_recipe(gib=80).exit_code == 0
    assert len(measured) == 7 and plan_recipe(gib=80).exit_code == 0 and len(measured) == 7


def test_plan_of_own_components_and_other_versions_is_not_cached(
    cache_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(plan, "estimate_any", lambda config, world_size=1: measured.append(config.name) or ESTIMATE)
    cache, config = PlanCache(), load("grpo-toy-flow")
    for version in ("1.0", "1.0", "1.1"):
        monkeypatch.setattr("tastemaker.__version__", version)
        cache.estimate(config)
    assert len(measured) == 2 and cache.knows(config) and not cache.knows(config, 2)
    monkeypatch.setattr(plan_cache, "config_to_yaml", lambda config: "objective: {type: my_file:RankGRPO}")
    assert not cache.knows(config) and cache.estimate(config) == cache.estimate(config) and len(measured) == 4


def test_command_of_savings_joins_them_and_starts_torchrun() -> None:
    savings = ["engine.activation_memory=checkpoint", "'tuning={type: lora}' optim.lr=1e-4 (approximate)"]
    command = plan_command.train_command("r", ["name=a b"], 1, savings)
    assert command == f"tastemaker train r 'name=a b' {savings[0]} 'tuning={{type: lora}}' optim.lr=1e-4"
    ranks = "engine.strategy=fsdp on 8 GPUs, with torchrun --nproc-per-node=8 (approximate)"
    expected = "torchrun --nproc-per-node=8 -m tastemaker train r engine.strategy=fsdp"
    assert plan_command.train_command("r", [], 1, [ranks]) == expected


ESTIMATE = ResourceEstimate(
    weights=40.0,
    gradients=40.0,
    optimizer_state=160.0,
    snapshots=0.0,
    frozen=4.0,
    kv_cache=0.0,
    collect_activations=6.0,
    update_activations=20.0,
    collect_flops=0.0,
    update_flops=0.0,
)


@pytest.fixture
def counted_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates whose activations are the number of frames, instead of traced ones."""
    monkeypatch.setattr(
        plan,
        "estimate_resources",
        lambda config, world_size=1: replace(ESTIMATE, update_activations=float(config.model.frames)),
    )


@pytest.mark.usefixtures("counted_frames")
def test_savings_end_with_lora_fewer_frames_and_fsdp() -> None:
    config = load("vader-wan-hps", ["tuning={type: full}"])
    savings = dict(plan.suggest_savings(config, ESTIMATE, 1, gpu_bytes=24.0))
    names = list(savings)
    assert [name.split(":")[0].split("=")[0] for name in names[-3:]] == ["'tuning", "model.frames", "engine.strategy"]
    assert "model.frames=17" in names and "fsdp on 8 GPUs" in names[-1] and "--nproc-per-node=8" in names[-1]
    assert savings[names[-1]] <= 24 < savings["model.frames=17"]


@pytest.mark.usefixtures("counted_frames")
def test_fsdp_comes_first_if_there_are_several_gpus() -> None:
    config = load("srpo-flux-hps", ["engine.strategy=replicated"])
    first, *others = plan.suggest_savings(config, ESTIMATE, 4, gpu_bytes=1.0)
    assert first == ("engine.strategy=fsdp", 240 / 4 + 24)
    assert not any("fsdp" in name or "frames" in name for name, _ in others)


@pytest.mark.usefixtures("small_networks")
def test_plan_stable_diffusion_3() -> None:
    assert (
        estimate_resources(
            load("flowgrpo-sd35", ["model.height=64", "model.width=64", "model.max_text_tokens=16"])
        ).total
        > 0
    )


@pytest.mark.slow
def test_srpo_flux_flops_match_hand_count() -> None:
    resources = estimate_resources(
        load("srpo-flux-hps", ["batch.prompts=1", "batch.micro_batch_size=1", "batch.rollout_batch_size=1"])
    )
    assert resources.flops == pytest.approx(1.23e15, rel=0.01)
    assert resources.weights == 2 * 11_901_408_320


def test_plan_refuses_toy_models() -> None:
    with pytest.raises(ConfigError, match=r"ToyFlowSpec.*TM659"):
        estimate_resources(load("grpo-toy-flow"))
