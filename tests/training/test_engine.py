"""One process: precision, memory, refusals, sentences."""

from __future__ import annotations

import errno

import pytest
import torch
from engine_toys import Recorder, data, equal, full_weights, learn, network, ready, rows_of, same, share, whole
from torch import nn

from tastemaker.config.schema import EngineConfig, OptimConfig
from tastemaker.core.weights import FullWeights
from tastemaker.models.flux import Flux
from tastemaker.training import activation_memory
from tastemaker.training.engine import Engine, TrainingError, explain_error
from tastemaker.training.optimizer import TorchAdamW
from tastemaker.training.precision import MAX_SKIPPED_UPDATES, LossScaler


def gradients(**settings: object) -> dict[str, torch.Tensor]:
    weights = full_weights()
    engine = ready(weights, OptimConfig(clip=0), **settings)
    recorder = Recorder(engine)
    learn(engine, weights, 0)
    return recorder.gradients


def test_the_gradient_is_that_of_the_mean_loss() -> None:
    net = network()
    (net(data()) - data()).square().mean().backward()
    same(gradients(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("kept", ["recompute", "offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_computed_again_or_kept_on_the_host_give_the_same_gradient(kept: str, precision: str) -> None:
    equal(gradients(memory=kept, precision=precision), gradients(precision=precision))


def test_recomputing_forgets_what_blocks_hold() -> None:
    weights = full_weights()
    engine = ready(weights, memory="recompute")
    calls: list[int] = []
    weights.net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        weights.net(data())
    assert len(calls) == 1
    engine.backward(share(engine, weights, data()), last=True)
    assert len(calls) == 3


def test_a_network_without_blocks_is_recomputed_whole() -> None:
    weights = FullWeights(nn.Linear(3, 3))
    engine = ready(weights, memory="recompute")
    learn(engine, weights, 0)


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([inner, nn.Identity(), nn.ModuleList([nn.Linear(2, 2)])]))
    assert activation_memory.repeated_blocks(net) == [inner, net[1][2][0]]


def test_tf32_and_fp32_are_restored_after_computing() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    engine = ready(full_weights(), precision="tf32")
    with engine.computing():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_borrowed_weights_do_not_linger_in_autocast(precision: str) -> None:
    weights = full_weights("old")
    engine = ready(weights, precision=precision)
    with engine.computing(), torch.no_grad():
        start = weights.net(data())
        for p in weights.trainable().values():
            p.add_(0.5)
    with engine.computing():
        before = weights.net(data())
        with weights.use("old"):
            old = weights.net(data())
        live = weights.net(data())
        assert torch.equal(old, start)
        assert torch.equal(live, before)
        live.sum().backward()
    assert all(p.grad is not None for p in weights.trainable().values())


def test_the_scaler_changes_no_gradient() -> None:
    weights = full_weights()
    engine = ready(weights, OptimConfig(clip=0), precision="fp16")
    assert engine.scaler is not None
    engine.scaler.scale = 1024.0
    recorder = Recorder(engine)
    learn(engine, weights, 0)
    same(recorder.gradients, gradients(), rtol=0.02, atol=0.005)


def test_an_overflow_under_fp16_skips_and_halves() -> None:
    weights = full_weights()
    engine = ready(weights, precision="fp16")
    assert engine.scaler is not None
    before = whole(weights.trainable())
    engine.scaler.scale = 1e30
    engine.backward(share(engine, weights, data()), last=True)
    assert engine.step(0).skipped
    assert engine.scaler.scale == 5e29
    equal(whole(weights.trainable()), before)
    engine.scaler.scale = 1024.0
    engine.backward(share(engine, weights, data()), last=True)
    assert not engine.step(0).skipped
    assert engine.scaler.skipped == 0


def test_twenty_skips_in_a_row_stop_the_run() -> None:
    weights = full_weights()
    engine = ready(weights, precision="fp16")
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.backward(share(engine, weights, data()) * float("inf"), last=True)
        assert engine.step(0).skipped
    engine.backward(share(engine, weights, data()) * float("inf"), last=True)
    with pytest.raises(TrainingError, match="20 updates in a row were skipped"):
        engine.step(0)


def test_the_scaler_doubles_after_peace() -> None:
    scaler = LossScaler(scale=2.0, patience=3)
    for _ in range(3):
        scaler.accept()
    assert scaler.state() == {"scale": 4.0, "good": 0, "skipped": 0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_before_the_update(value: float) -> None:
    weights = full_weights()
    engine = ready(weights)
    learn(engine, weights, 0)
    before = whole(weights.trainable()) | whole(engine.optimizer.state())
    engine.backward(share(engine, weights, rows_of(engine)) * value, last=True)
    with pytest.raises(TrainingError, match="step 7 came out as nan or infinite; the weights were not updated"):
        engine.step(7)
    equal(whole(weights.trainable()) | whole(engine.optimizer.state()), before)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_refused() -> None:
    weights = full_weights()
    engine = ready(weights)
    # The square root has an infinite slope at zero.
    engine.backward((weights.net(data()) * 0).sum().sqrt(), last=True)
    with pytest.raises(TrainingError, match="the gradient norm of step 0"):
        engine.step(0)


def fused(engine: Engine, *, waits: bool) -> TorchAdamW:
    """What updates on a GPU, which is told there what to refuse; it is waited for where it says that it is not."""
    engine.optimizer = TorchAdamW(engine.parameters, engine.optim, fused=True)
    engine.optimizer.fused = not waits
    return engine.optimizer


@pytest.mark.parametrize("clip", [0.0, 0.01, 100.0])
def test_an_update_that_nobody_waits_for_is_the_same_to_the_bit(clip: float) -> None:
    ends = []
    for waits in (True, False):
        weights = full_weights()
        engine = ready(weights, OptimConfig(lr=1e-2, clip=clip))
        fused(engine, waits=waits)
        norms = [learn(engine, weights, step) for step in range(3)]
        ends.append((norms, whole(weights.trainable()) | whole(engine.optimizer.state())))
    assert ends[0][0] == ends[1][0]
    equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_refused_on_the_device_is_told_when_it_is_asked_for(value: float) -> None:
    weights = full_weights()
    engine = ready(weights)
    fused(engine, waits=False)
    learn(engine, weights, 0)
    before = whole(weights.trainable()) | whole(engine.optimizer.state())
    engine.backward(share(engine, weights, rows_of(engine)) * value, last=True)
    told = engine.launch(7)
    equal(whole(weights.trainable()) | whole(engine.optimizer.state()), before)
    with pytest.raises(TrainingError, match="step 7 came out as nan or infinite; the weights were not updated"):
        told()
    learn(engine, weights, 8)
    assert not all(x.equal(before[key]) for key, x in whole(weights.trainable()).items())


def test_a_loss_without_a_graph_is_refused() -> None:
    engine = ready(full_weights())
    with pytest.raises(TrainingError, match="depends on no trainable weight"):
        engine.backward(torch.ones(()), last=True)


def test_clipping_bounds_the_norm_and_the_update_tells_of_it() -> None:
    weights = full_weights()
    engine = ready(weights, OptimConfig(lr=0.5, clip=0.01, warmup=2))
    recorder = Recorder(engine)
    engine.backward(share(engine, weights, data()), last=True)
    update = engine.step(0)
    assert update.grad_norm > 0.01
    assert update.lr == 0.25
    assert torch.stack([g.norm() for g in recorder.gradients.values()]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_frozen_parameters_keep_their_dtype_and_get_no_optimizer() -> None:
    net = network().to(torch.bfloat16)
    weights = FullWeights(net)
    engine = ready(weights)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert engine.placement().dtype == torch.float32
    assert set(engine.parameters) == {name for name, _ in net.named_parameters()}


def test_a_network_is_loaded_in_the_precision_it_is_trained_in() -> None:
    for trainable, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = Engine(EngineConfig(device="cpu", precision="bf16", trainable=trainable), OptimConfig(), 1, 0)  # type: ignore[arg-type]
        for adapts, expected in ((False, dtype), (True, torch.bfloat16)):
            placement = engine.placement(adapts=adapts)
            model = Flux().tiny().load(placement)
            assert {p.dtype for p in model.net.parameters()} == {expected}
            assert {p.dtype for p in model.codec.net.parameters()} == {torch.bfloat16}


def test_snapshots_that_move_are_fp32_where_weights_are_bf16() -> None:
    weights = full_weights("reference", "ema")
    ready(weights, precision="bf16", trainable="bf16")
    assert weights.stored()["ema"]["enter.weight"].dtype == torch.float32
    assert weights.stored()["reference"]["enter.weight"].dtype == torch.bfloat16
    with torch.no_grad():
        weights.net.enter.weight.fill_(1.0)
    start = weights.stored()["ema"]["enter.weight"].clone()
    weights.blend("ema", 0.999)
    assert torch.allclose(weights.stored()["ema"]["enter.weight"] - start, (1 - start) * 1e-3, atol=1e-6)


def test_snapshots_on_the_host_are_copies() -> None:
    weights = FullWeights(network(), ("old",), host=True)
    ready(weights)
    with torch.no_grad():
        weights.net.enter.weight.fill_(1.0)
    assert not torch.equal(weights.stored()["old"]["enter.weight"], weights.net.enter.weight)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "mps"}, "engine.device is mps, but PyTorch .* sees no such device here; use --device (cpu|cuda)"),
        ({"attention": "xformers"}, "xformers, which is not installed; run `pip install xformers` or set it to auto"),
        ({"attention": "flash", "precision": "bf16"}, "flash, which this PyTorch does not offer on cpu"),
        ({"attention": "cudnn", "precision": "bf16"}, "cudnn, which this PyTorch does not offer on cpu"),
        ({"trainable": "bf16", "precision": "fp32"}, "engine.trainable is bf16 but engine.precision is fp32"),
    ],
)
def test_what_this_machine_cannot_do_is_a_sentence(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(TrainingError, match=sentence):
        Engine(EngineConfig(**{"device": "cpu"} | settings), OptimConfig(), 1, 0)  # type: ignore[arg-type]


def test_full_memory_and_a_full_disk_are_explained() -> None:
    memory_ = explain_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert memory_ is not None
    assert "lower batch.microbatch" in memory_
    disk = explain_error(OSError(errno.ENOSPC, "No space left on device", "runs/a"))
    assert disk is not None
    assert "the disk is full while writing runs/a: free some space" in disk
    assert explain_error(ValueError("other")) is None
