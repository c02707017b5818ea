"""8-bit rollouts: near the exact network, renewed after updates, and never part of what trains."""

from __future__ import annotations

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toys import build_engine
from peft import LoraConfig
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.config.schema import OptimConfig
from tastemaker.core.lora import LoraWeights
from tastemaker.core.objective import rollout_and_score
from tastemaker.core.quantization import DTYPES, Kind, quantize_rows
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.core.weights import FullWeights
from tastemaker.evaluation.benchmark_run import EvaluationOptions, build_sample_fn, load_benchmark
from tastemaker.objectives.nft import NFT
from tastemaker.search.base import Search
from tastemaker.search.best_of_n import BestOfN, SingleSample
from tastemaker.training import activation_memory, low_precision_linear
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.training.low_precision_linear import RolloutLinear
from tastemaker.training.optimizer import TorchAdamW
from tastemaker.training.quantized_base import quantize_frozen_layers
from tastemaker.training.rollout_precision import use_low_precision_rollouts
from tastemaker.training.run import Run

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize(("kind", "error"), [("fp8", 0.06), ("int8", 0.02)])
QUIET = ["sample.every=0", "guard.every=0", "checkpoint.every=100"]


class Blocks(nn.Module):
    """Two linear layers in blocks, and one outside of them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 256)])
            self.last = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.last(x)
        return out


def inputs() -> Tensor:
    return torch.randn(4, 32, 256, generator=torch.Generator().manual_seed(1))


def relative_difference(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@torch.no_grad()
def rollout_call(net: nn.Module, x: Tensor) -> Tensor:
    with ROLLOUTS.calls():
        out: Tensor = net(x)
    return out


@KINDS
def test_rows_are_rounded_to_8_bits(kind: Kind, error: float) -> None:
    x = inputs().view(-1, 256) * torch.logspace(-4, 4, 128)[:, None]  # rows of very different sizes
    numbers, scale = quantize_rows(x, kind)
    assert numbers.dtype.itemsize == 1 and scale.shape == (128, 1)
    rounded = numbers.float() * scale
    assert float(((rounded - x).norm(dim=1) / x.norm(dim=1)).max()) < error
    assert rounded.abs().amax() <= x.abs().amax() * 1.001
    assert quantize_rows(torch.zeros(2, 16), kind)[0].float().abs().max() == 0


@KINDS
def test_only_rollouts_compute_in_8_bits(kind: Kind, error: float) -> None:
    net, x = Blocks(), inputs()
    exact = net(x).detach()
    assert len(use_low_precision_rollouts(net, kind, CPU).layers) == 2  # not the layer outside of the blocks
    assert list(net.state_dict()) == list(Blocks().state_dict())
    with torch.no_grad():
        assert net(x).equal(exact)
    with ROLLOUTS.calls():
        assert net(x).equal(exact)  # with gradients
    difference = relative_difference(rollout_call(net, x), exact)
    assert 1e-4 < difference < error
    with ROLLOUTS.exact():
        assert rollout_call(net, x).equal(exact)


def test_samples_do_not_depend_on_the_size_of_their_batch() -> None:
    """Layers of one row per sample, such as those of modulation, keep their precision in every batch."""
    net, x = Blocks(), inputs()
    use_low_precision_rollouts(net, "int8", CPU)
    torch.testing.assert_close(rollout_call(net, x)[:1], rollout_call(net, x[:1]))
    for few in (x[0], x[:, 0], x[:, :16], x.reshape(8, 16, 256)):
        assert rollout_call(net, few).equal(net(few).detach())
    assert not rollout_call(net, x[:, :17]).equal(net(x[:, :17]).detach())


@KINDS
def test_rollouts_and_training_expand_the_same_weights(kind: Kind, error: float) -> None:
    """A unit matrix as the input shows the weights that the layer multiplies."""
    net = Blocks().requires_grad_(False)
    exact = net.blocks[0].weight.clone()
    (layer, _) = quantize_frozen_layers(net, kind)
    scale = layer.weight_scale
    use_low_precision_rollouts(net, kind, CPU)
    layer.bias = None
    unit = torch.eye(256)[None]
    with torch.autocast("cpu", torch.bfloat16):
        trained = layer(unit)
        with torch.no_grad(), ROLLOUTS.calls():
            sampled = layer(unit)
    assert trained.equal(sampled)
    assert trained[0].t().equal((layer.weight.float() * scale).bfloat16())  # rounded once
    assert relative_difference(trained[0].t().float(), exact) < error


def test_bf16_rollouts_of_a_network_that_trains_in_fp32() -> None:
    net, x = Blocks(), inputs()
    copies = use_low_precision_rollouts(net, "bf16", CPU)
    low, exact = rollout_call(net, x), net(x).detach()
    assert low.dtype == torch.float32 and 1e-4 < relative_difference(low, exact) < 0.01
    assert all(layer.rollout_weight.dtype == torch.bfloat16 for layer in copies.layers)
    with torch.no_grad():
        net.blocks[0].weight.mul_(2)
    assert relative_difference(rollout_call(net, x), net(x).detach()) < 0.01 < relative_difference(low, net(x).detach())


def test_settings_that_change_no_layer_are_reported() -> None:
    narrow = FullWeights(nn.Sequential(nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])))
    with pytest.warns(UserWarning, match=r"engine\.rollout_precision: int8 changes nothing.*1024.*TM2681"):
        build_engine(narrow, rollout_precision="int8")
    adapted = LoraWeights(nn.Sequential(nn.ModuleList([nn.Linear(32, 32)])), LoraConfig(r=4, target_modules=["0.0"]))
    with pytest.warns(UserWarning, match=r"engine\.base_precision: fp8 changes nothing.*TM2681"):
        build_engine(adapted, base_precision="fp8")
    weights = FullWeights(Blocks())
    build_engine(weights, precision="bf16", rollout_precision="bf16")  # as it is
    assert type(weights.net.blocks[0]) is nn.Linear


class Recorded(TorchDispatchMode):
    """Records the operators of matrix products, and the shape or dtype of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[object]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._scaled_mm.default, torch.ops.aten._int_mm.default):
            values = [*args, *(kwargs or {}).values()]
            self.calls[func.__name__] = [(x.dtype, *x.shape) if isinstance(x, Tensor) else x for x in values]
        return func(*args, **(kwargs or {}))


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_gpus_get_what_they_accept(kind: Kind, error: float, dtype: torch.dtype) -> None:
    """Without a GPU: the checks of PyTorch's shape functions, and a list of what the kernels got."""
    with FakeTensorMode(), Recorded() as recorded:
        weight, scale = quantize_rows(torch.empty(512, 256, device="cuda", dtype=torch.bfloat16), kind)
        x, bias = torch.empty(2, 32, 256, device="cuda", dtype=dtype), torch.empty(512, device="cuda")
        out = low_precision_linear.linear_8bit(x, weight, scale, bias)
    assert (out.shape, out.dtype, out.device.type) == ((2, 32, 512), dtype, "cuda")
    numbers = DTYPES[kind]
    operands: list[object] = [(numbers, 64, 256), (numbers, 256, 512)]
    if kind == "int8":
        assert recorded.calls == {"_int_mm.default": operands}
        return
    # A scale per row of both sides needs bf16 as the result, and the bias in its dtype.
    scales = [(torch.float32, 64, 1), (torch.float32, 1, 512)]
    ((name, arguments),) = recorded.calls.items()
    assert name == "_scaled_mm.default" and arguments[:4] == operands + scales
    assert (torch.bfloat16, 512) in arguments and torch.bfloat16 in arguments


def test_integer_kernel_multiplies_the_rounded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exact, as on GPUs: kernels of CPUs without VNNI instructions may saturate sums of products at 16 bits.
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())
    x, weight = inputs().view(-1, 256), Blocks().last.weight.detach()
    numbers, rows = quantize_rows(weight, "int8"), quantize_rows(x, "int8")
    product = low_precision_linear.multiply_int8(*rows, *numbers)
    torch.testing.assert_close(product, low_precision_linear.linear_8bit(x, *numbers, None), rtol=1e-5, atol=1e-5)
    assert relative_difference(product, x @ weight.t()) < 0.02


def test_changed_weights_are_copied_again() -> None:
    net, x = Blocks(), inputs()
    layers = use_low_precision_rollouts(net, "int8", CPU).layers
    before = rollout_call(net, x)
    copy = layers[0].rollout_weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(x).square().mean().backward()
    optimizer.step()
    after = rollout_call(net, x)
    assert layers[0].rollout_weight is copy  # compiled calls may keep its address
    assert relative_difference(after, before) > 0.05
    assert relative_difference(after, net(x).detach()) < 0.03


def test_adapters_keep_their_precision() -> None:
    net = Blocks()
    net.blocks[0].requires_grad_(False)
    assert use_low_precision_rollouts(net, "int8", CPU).layers == [net.blocks[0]]


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "int8"])
def test_updates_of_every_optimizer_renew_the_copies(optimizer: str) -> None:
    weights = FullWeights(Blocks())
    optim = OptimConfig(lr=1e-2, state_dtype="int8" if optimizer == "int8" else "fp32")
    engine = build_engine(weights, optim, rollout_precision="int8")
    if optimizer == "fused":  # as on a GPU
        engine.optimizer = TorchAdamW(engine.parameters, optim, fused=True)
    before = rollout_call(weights.net, inputs())
    engine.backward(weights.net(inputs()).square().mean(), last=True)
    engine.step(0)
    after = rollout_call(weights.net, inputs())
    assert relative_difference(after, before) > 0.05
    assert relative_difference(after, weights.net(inputs()).detach()) < 0.03


class ManyBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # from PyTorch itself
@pytest.mark.parametrize("base", ["same", "int8"])
def test_8_bit_blocks_share_graphs(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = (LoraWeights(ManyBlocks(), LoraConfig(r=4, target_modules=r"blocks\.\d\.0")) for _ in range(2))
    outputs = []
    for weights in (eager, compiled):
        if base != "same":
            quantize_frozen_layers(weights.net, "int8")
        use_low_precision_rollouts(weights.net, "int8", CPU)
        if weights is compiled:
            activation_memory.compile_blocks(weights.net)
        x = inputs()
        for _ in range(2):
            low = rollout_call(weights.net, x)
            with torch.no_grad():
                exact = weights.net(x)
            out = weights.net(x)
            out.square().mean().backward()
        outputs.append(torch.stack([low, exact, out.detach()]))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    assert relative_difference(outputs[1][0], outputs[1][1]) > 1e-4
    # Without gradients a graph for rollouts and one for other calls; with them one for the first block, whose input
    # needs no gradient, and one for the others.
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)
    monkeypatch.setattr(low_precision_linear, "MIN_TOKENS", 4)


def tiny_run(recipe: str, folder: Path, kind: str = "int8") -> Run:
    """A tiny run in fp32, whose rollouts compute in 8 bits if `kind` says so."""
    config = load(recipe, [*QUIET, "steps=1", "engine.precision=fp32", f"engine.rollout_precision={kind}"])
    require_valid(config)
    run = build(config, folder, tiny=True)
    weights, generator = run.policy.weights, torch.Generator().manual_seed(0)
    net = weights.net
    assert any(isinstance(module, RolloutLinear) for module in net.modules()) == (kind != "same")
    with torch.no_grad():  # new networks start with blocks whose output is multiplied by zero
        for p in (*net.parameters(), *chain.from_iterable(x.values() for x in weights.snapshot_tensors().values())):
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return run


@pytest.mark.usefixtures("small_layers")
def test_samples_kept_from_a_pool_are_made_in_the_precision_of_the_training(tmp_path: Path) -> None:
    run = tiny_run("nft-select-playground-flow", tmp_path)
    ctx, batch, objective = run.context(0, 2), run.data.batch(0, 2, 0, 1), run.objective
    assert isinstance(objective, NFT) and objective.keep
    trajectory, rng, scores = rollout_and_score(ctx, batch, objective.group_size, objective.keep)
    with torch.no_grad(), ROLLOUTS.exact():
        exact = ctx.policy.sample(trajectory.cond, rng).final
        rewards = ctx.rubric.score(ctx.policy.decode(exact), trajectory.cond.prompts).total
    with torch.no_grad():
        low = ctx.policy.sample(trajectory.cond, rng).final
    torch.testing.assert_close(trajectory.final, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.total, rewards)
    assert relative_difference(low, exact) > 1e-3


@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize("search", [SingleSample(), BestOfN(2)], ids=lambda search: type(search).__name__)
def test_evaluation_and_search_sample_in_8_bits(search: Search, tmp_path: Path) -> None:
    run = tiny_run("nft-playground-flow", tmp_path)
    benchmark = load_benchmark("playeval", 6, 1)
    sample = build_sample_fn(run, EvaluationOptions(benchmark, search), "live", tiny=True)
    batch, indices = run.data.batch(0, 2, 0, 1), torch.arange(2)
    low, _ = sample(batch, indices)
    with ROLLOUTS.exact():
        exact, _ = sample(batch, indices)
    assert relative_difference(low, exact) > 1e-4


TRAINED = [
    *("nft-playground-flow", "elbo-grpo-playground-flow", "reward-gradient-playground"),
    *("elbo-grpo-playground-masked", "srpo-playground-flow", "dpo-playground-flow"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize("recipe", TRAINED)
def test_objectives_train_on_8_bit_rollouts(recipe: str, tmp_path: Path) -> None:
    """Samples differ a little, so rewards and losses do; both runs train."""
    losses = {}
    for kind in ("same", "int8"):
        events = list(train(tiny_run(recipe, tmp_path / kind, kind)))
        (step,) = (event for event in events if isinstance(event, StepCompleted))
        losses[kind] = step.metrics["grad_norm"]
    assert losses["same"] != losses["int8"] > 0


@pytest.mark.parametrize(
    ("recipe", "setting", "code"),
    [
        ("grpo-toy-flow", "fp8", "TM2604"),
        ("ddpo-toy-epsilon", "int8", "TM2604"),
        ("nft-toy-flow", "int8", ""),
        ("dpo-toy-flow", "fp8", ""),
        ("grpo-toy-flow", "bf16", "TM2604"),
        ("nft-toy-flow", "bf16", ""),
    ],
)
def test_objectives_that_need_the_probabilities_of_rollouts_are_refused(recipe: str, setting: str, code: str) -> None:
    config = load(recipe, [f"engine.rollout_precision={setting}"])
    if not code:
        require_valid(config)
        return
    with pytest.raises(ConfigError, match=rf"engine\.rollout_precision.*{code}"):
        require_valid(config)
