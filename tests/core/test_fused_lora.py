"""Fused LoRA layers: peft's results, fewer operations, and rollouts with merged weights."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tastemaker.config.build import build
from tastemaker.config.check import require_valid
from tastemaker.config.load import load
from tastemaker.core.fused_lora import FusedLoraFunction, FusedLoraLinear
from tastemaker.core.lora import LoraWeights
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.search.flops import count_flops
from tastemaker.training import activation_memory, low_precision_linear
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.training.low_precision_linear import RolloutLinear
from tastemaker.training.merged_rollouts import MergedCopies, MergedLoraLinear, use_merged_rollouts
from tastemaker.training.quantized_base import quantize_frozen_layers
from tastemaker.training.rollout_precision import use_low_precision_rollouts

CPU = torch.device("cpu")
TOKENS, FEATURES, RANK = 20, 64, 4
NAMES = ("to_q", "to_k", "to_v", "to_out")


class Attention(nn.Module):
    """Three layers that read the same input and one that reads their product, all but the last in a block."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.ModuleDict({name: nn.Linear(FEATURES, FEATURES) for name in NAMES[:3]})])
            self.to_out = nn.Linear(FEATURES, FEATURES, bias=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5  # as a norm in fp32: not a leaf, and one tensor for all three
        (block,) = self.blocks
        q, k, v = (block[name](x) for name in NAMES[:3])
        out: Tensor = self.to_out(q.tanh() * k + v)
        return out


def adapted(
    *, fused: bool = True, dtype: torch.dtype = torch.float32, snapshots: tuple[str, ...] = (), dropout: float = 0.0
) -> LoraWeights:
    """The network with adapters that differ from each other and change its output."""
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=list(NAMES), lora_dropout=dropout)
    weights = LoraWeights(Attention(dtype), config, snapshots, fused=fused)
    generator = torch.Generator().manual_seed(1)
    for values in (weights.trainable(), *weights.snapshot_tensors().values()):
        for p in values.values():
            p.data = 0.2 * torch.randn(p.shape, generator=generator)
    return weights


def inputs(rows: int = 2) -> Tensor:
    return torch.randn(rows, TOKENS, FEATURES, generator=torch.Generator().manual_seed(2)).requires_grad_()


def forward_and_gradients(weights: LoraWeights, *, bf16: bool = False, x: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of the input and of every adapter."""
    x = inputs() if x is None else x
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = weights.net(x)
    out.float().square().mean().backward()
    return [out.detach().float(), x.grad, *(p.grad for p in weights.trainable().values())]


def relative_difference(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal but for the order of sums."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * float(y.detach().abs().max()))


@torch.no_grad()
def rollout_call(net: nn.Module, x: Tensor) -> Tensor:
    with ROLLOUTS.calls():
        out: Tensor = net(x)
    return out


def test_function_has_the_gradients_of_its_formula() -> None:
    shapes = [(5, 6), (7, 6), (7,), (3, 6), (7, 3)]
    x, weight, bias, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    trained = [p.requires_grad_() for p in (x, a, b)]
    assert torch.autograd.gradcheck(lambda x, a, b: FusedLoraFunction.apply(x, weight, bias, a, b, 0.7), trained)
    torch.testing.assert_close(
        FusedLoraFunction.apply(x, weight, bias, a, b, 0.7), x @ weight.t() + bias + 0.7 * (x @ a.t()) @ b.t()
    )


def test_forward_and_gradients_are_those_of_peft() -> None:
    peft, fused = adapted(fused=False), adapted()
    kinds = [[isinstance(m, FusedLoraLinear) for m in w.net.modules() if isinstance(m, Linear)] for w in (peft, fused)]
    assert kinds == [[False] * 4, [True] * 4]
    assert list(peft.net.state_dict()) == list(fused.net.state_dict())
    assert_equal(forward_and_gradients(fused), forward_and_gradients(peft))
    for name, p in fused.merged().items():
        torch.testing.assert_close(p, peft.merged()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_as_close_to_fp32_as_peft(dtype: torch.dtype) -> None:
    """The error of each is that of rounding. CPUs may round a product once more before it is scaled."""
    exact, peft, fused = adapted(dtype=dtype), adapted(fused=False, dtype=dtype), adapted(dtype=dtype)
    exact.net.float()
    results = [forward_and_gradients(exact), *(forward_and_gradients(w, bf16=True) for w in (peft, fused))]
    for expected, theirs, ours in zip(*results, strict=True):
        assert 0 < relative_difference(ours, expected) < 2 * relative_difference(theirs, expected) < 0.03
        assert ours.dtype == theirs.dtype


class OperationCounter(TorchDispatchMode):
    """Counts operations that compute or copy; views and the like are free."""

    FREE = ("view", "t", "detach", "_unsafe_view", "new_empty", "alias", "transpose")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        self.counts[name] += name not in self.FREE
        return func(*args, **(kwargs or {}))


def count_layer(*, fused: bool, dtype: torch.dtype) -> tuple[Counter[str], Counter[str], list[Tensor]]:
    """Operations of one layer under bf16, forward and backward, and what it keeps."""
    weights, saved = adapted(fused=fused, dtype=torch.bfloat16), list[Tensor]()
    layer, x = weights.net.blocks[0]["to_q"], inputs().detach().to(dtype).requires_grad_()
    pack = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with torch.autocast("cpu", torch.bfloat16), OperationCounter() as forward, pack:
        out = layer(x)
    grad = torch.ones_like(out)
    with OperationCounter() as backward:
        out.backward(grad)
    return forward.counts, backward.counts, saved


def test_layer_takes_no_elementwise_pass() -> None:
    forward, backward, saved = count_layer(fused=True, dtype=torch.bfloat16)
    # Only the adapter's matrices are cast, and their gradients back.
    assert +forward == {"addmm": 1, "mm": 1, "addmm_": 1, "_to_copy": 2}
    assert +backward == {"mm": 2, "addmm": 2, "addmm_": 1, "_to_copy": 2}
    wide = [x for x in saved if x.numel() == 2 * TOKENS * FEATURES]
    assert len(wide) == 1 and wide[0].dtype == torch.bfloat16
    theirs = count_layer(fused=False, dtype=torch.bfloat16)
    assert forward.total() < theirs[0].total() and backward.total() < theirs[1].total()


def test_flops_are_those_of_peft() -> None:
    counts = [count_flops(lambda w=adapted(fused=fused): forward_and_gradients(w)) for fused in (False, True)]
    assert counts[0] == counts[1] > 0


def test_layers_that_read_one_tensor_share_its_cast() -> None:
    weights, x = adapted(dtype=torch.bfloat16), inputs()
    casts = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == x.shape:
                casts.append(args[0])
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Casts():
        weights.net(x)
    assert len(casts) == 1
    given = inputs() * 1.0
    leaf, constant = inputs(), inputs().detach()
    with torch.autocast("cpu", torch.bfloat16):
        kept = [weakref.ref(y) for y in (leaf, constant) if weights.net.blocks[0]["to_q"](y).requires_grad]
        del leaf, constant
        assert [ref() for ref in kept] == [None, None]  # without the help of the garbage collector
        layer = weights.net.blocks[0]["to_q"]
        before = layer(given).detach()
        given.mul_(2)  # the cast of the old value must not be used again
        assert relative_difference(layer(given).detach(), before) > 0.5


def test_empty_batches_and_single_rows_keep_their_shape() -> None:
    layer = adapted().net.blocks[0]["to_q"]
    for shape in ((0, 3, FEATURES), (FEATURES,), (2, 1, 3, FEATURES)):
        assert layer(torch.zeros(shape)).shape == shape
        with torch.no_grad():
            assert layer(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("bf16", [False, True])
def test_calls_with_and_without_gradient_are_equal_to_the_bit(bf16: bool) -> None:
    """GRPO's first ratio is exactly 1: samples come from calls without gradient."""
    weights = adapted(dtype=torch.bfloat16 if bf16 else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = weights.net(inputs())
        with torch.no_grad():
            assert weights.net(inputs()).equal(out)


def test_snapshots_and_reference_are_those_of_peft() -> None:
    results = []
    for fused in (False, True):
        weights = adapted(fused=fused, snapshots=("reference", "old"))
        outputs = [weights.net(inputs()).detach()]
        for name in ("old", "reference"):
            with weights.use(name):
                outputs.append(weights.net(inputs()))
        results.append(outputs)
    assert relative_difference(results[1][1], results[1][2]) > 0.1 < relative_difference(*results[1][:2])
    assert_equal(results[1], results[0])
    assert results[1][2].equal(Attention()(inputs()))


def test_dropout_is_that_of_peft() -> None:
    rng, results = Randomness(0, 1, torch.arange(2)), []
    for fused in (False, True):
        weights = adapted(fused=fused, dropout=0.5)
        with weights.dropout_masks(rng):
            results.append(forward_and_gradients(weights))
    without = forward_and_gradients(adapted())
    assert relative_difference(results[1][0], without[0]) > 0.1
    assert_equal(results[1], results[0])


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_linear, "MIN_WEIGHTS", 256)
    monkeypatch.setattr(low_precision_linear, "MIN_TOKENS", 4)


@pytest.mark.usefixtures("small_layers")
def test_quantized_base_is_that_of_peft() -> None:
    results = []
    for fused in (False, True):
        weights = adapted(fused=fused)
        (block,) = weights.net.blocks
        assert len(quantize_frozen_layers(weights.net, "int8")) == len(block)
        results.append(forward_and_gradients(weights))
    assert_equal(results[1], results[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch itself
def test_checkpointed_and_compiled_blocks_have_the_same_gradients() -> None:
    expected = forward_and_gradients(adapted(), x=inputs())
    counters.clear()
    for compiled in (False, True):
        weights = adapted()
        if compiled:
            weights.net.compile(backend="aot_eager", fullgraph=True)
        else:
            activation_memory.checkpoint_activations(weights.net)
        assert_equal(forward_and_gradients(weights), expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_layers_that_peft_computes_differently_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 1))
    weights = LoraWeights(net, LoraConfig(r=2, target_modules=["0"], use_dora=True))
    assert not any(isinstance(m, FusedLoraLinear) for m in weights.net.modules())
    weights = LoraWeights(nn.Sequential(nn.Linear(8, 8)), LoraConfig(r=2, target_modules=["0"], lora_bias=True))
    assert not any(isinstance(m, FusedLoraLinear) for m in weights.net.modules())


# Merged rollouts


def merged(kind: str = "same", snapshots: tuple[str, ...] = ()) -> tuple[LoraWeights, MergedCopies]:
    weights = adapted(snapshots=snapshots)
    return weights, use_merged_rollouts(weights.net, kind, CPU)  # type: ignore[arg-type]


def test_merged_rollouts_are_one_product_per_layer() -> None:
    weights, copies = merged()
    x, names = inputs().detach(), list(adapted().net.state_dict())
    exact = weights.net(x).detach()
    first = rollout_call(weights.net, x)
    with OperationCounter() as operations:
        assert rollout_call(weights.net, x).equal(first)
    assert operations.counts["addmm"] + operations.counts["mm"] == len(copies.layers) == 4
    assert not operations.counts["addmm_"] and list(weights.net.state_dict()) == names
    assert_equal([first], [exact])
    assert not first.equal(exact)  # it is another order of sums
    with torch.no_grad():
        assert weights.net(x).equal(exact)  # no rollout
    with ROLLOUTS.calls():
        assert weights.net(x).equal(exact)  # with gradients
    with ROLLOUTS.exact():
        assert rollout_call(weights.net, x).equal(exact)


def test_merged_weights_follow_updates_and_the_active_adapter() -> None:
    weights, copies = merged(snapshots=("reference", "old"))
    x = inputs().detach()
    rollout_call(weights.net, x)
    places = [layer.merged_weight.data_ptr() for layer in copies.layers]
    with torch.no_grad():
        for p in weights.trainable().values():
            p.add_(0.1)
    assert_equal([rollout_call(weights.net, x)], [weights.net(x).detach()])
    for name in ("old", "reference", "old"):
        with weights.use(name):
            assert_equal([rollout_call(weights.net, x)], [weights.net(x)])
    assert_equal([rollout_call(weights.net, x)], [weights.net(x).detach()])
    weights.scale(0.5)
    assert_equal([rollout_call(weights.net, x)], [weights.net(x).detach()])
    assert places == [layer.merged_weight.data_ptr() for layer in copies.layers]


@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize(("kind", "error"), [("fp8", 0.06), ("int8", 0.02), ("bf16", 0.01)])
def test_large_merged_layers_have_fewer_bits(kind: str, error: float) -> None:
    weights, copies = merged(kind)
    others = use_low_precision_rollouts(weights.net, kind, CPU, merge=True)  # type: ignore[arg-type]
    assert not others.layers and not any(isinstance(m, RolloutLinear) for m in weights.net.modules())
    x = inputs().detach()
    out, exact = rollout_call(weights.net, x), weights.net(x).detach()
    assert 1e-4 < relative_difference(out, exact) < error
    bits = [8 * layer.merged_weight.itemsize for layer in copies.layers]
    assert bits == [8 * (1 + (kind == "bf16"))] * 3 + [32]  # the last layer is outside of the blocks
    layer, few = weights.net.blocks[0]["to_q"], x[:, :3]
    assert rollout_call(layer, few).equal(layer(few).detach())


def test_merged_weights_are_rounded_once() -> None:
    """Whatever the precision of the call that renews them."""
    weights = adapted(dtype=torch.bfloat16)
    use_merged_rollouts(weights.net, "same", CPU)
    with torch.autocast("cpu", torch.bfloat16):
        rollout_call(weights.net, inputs().detach())
    layer = weights.net.blocks[0]["to_q"]
    a, b = (x.detach() for x in layer.matrices("live"))
    expected = (layer.base_layer.weight.double() + 1.5 * b.double() @ a.double()).bfloat16()
    assert (layer.merged_weight == expected).float().mean() > 0.99  # but for ties between two roundings
    assert relative_difference(layer.merged_weight.detach(), expected) < 1e-4


QUIET = ["sample.every=0", "guard.every=0", "checkpoint.every=1", "engine.precision=fp32"]


def test_runs_merge_only_where_no_ratio_needs_the_probabilities_of_rollouts(tmp_path: Path) -> None:
    merge = "tuning={type: lora, rank: 2, merge_rollouts: true}"
    for recipe, setting, code in (
        ("grpo-lora-toy-flow", "steps=1", "TM2750"),
        ("grpo-toy-causal", "objective.kl_coef=0.1", "TM2750"),
        ("nft-toy-flow", "engine.base_precision=int8", "TM2752"),
        ("nft-toy-flow", "engine.cuda_graphs=true", "TM2752"),
    ):
        with pytest.raises(ConfigError, match=rf"tuning\.merge_rollouts.*{code}"):
            require_valid(load(recipe, [merge, setting]))
    with pytest.raises(ConfigError, match="TM2753"):
        load("nft-toy-flow", ["tuning={type: lora, merge_rollouts: true, fused: false}"])
    config = load("nft-toy-flow", [merge, *QUIET, "steps=2"])
    require_valid(config)
    run = build(config, tmp_path)
    layers = [m for m in run.policy.weights.net.modules() if isinstance(m, MergedLoraLinear)]
    (losses,) = [[event.metrics["grad_norm"] for event in train(run) if isinstance(event, StepCompleted)]]
    assert layers and all(layer.merged_weight is not None for layer in layers) and min(losses) > 0
    resumed = build(config, tmp_path)
    resumed.resume(tmp_path / "checkpoints/step-000001")
    again = [event.metrics["grad_norm"] for event in train(resumed) if isinstance(event, StepCompleted)]
    assert again == losses[1:]
