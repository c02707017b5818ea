"""The engine on one process: precision, memory, updates and refused settings."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from engine_toys import (
    Recorder,
    assert_close,
    assert_equal,
    build_engine,
    build_network,
    full_tensors,
    full_weights,
    local_loss,
    local_rows,
    make_inputs,
    train_step,
)
from torch import nn

from tastemaker.config.schema import CheckpointConfig, EngineConfig, OptimConfig
from tastemaker.core.weights import FullWeights
from tastemaker.models.flux import FluxSpec
from tastemaker.training import activation_memory, checkpoint
from tastemaker.training.distributed import is_sharded
from tastemaker.training.engine import Engine, TrainingError, explain_error
from tastemaker.training.optimizer import TorchAdamW
from tastemaker.training.precision import MAX_SKIPPED_UPDATES, LossScaler, check_engine_config


def record_gradients(**settings: object) -> dict[str, torch.Tensor]:
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(max_grad_norm=0), **settings)
    recorder = Recorder(engine)
    train_step(engine, weights, 0)
    return recorder.gradients


def test_gradient_equals_that_of_the_mean_loss() -> None:
    net = build_network()
    (net(make_inputs()) - make_inputs()).square().mean().backward()
    assert_close(record_gradients(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("activation_memory", ["checkpoint", "offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_and_offloading_keep_the_gradient(activation_memory: str, precision: str) -> None:
    assert_equal(
        record_gradients(activation_memory=activation_memory, precision=precision),
        record_gradients(precision=precision),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_number_of_checkpointed_blocks_keeps_the_gradient(precision: str) -> None:
    kept = record_gradients(precision=precision)
    for count in range(1, 5):  # of three blocks
        settings = {"activation_memory": "checkpoint", "checkpointed_blocks": count, "precision": precision}
        assert_equal(record_gradients(**settings), kept)


def test_only_the_first_blocks_are_recomputed() -> None:
    weights = full_weights()
    engine = build_engine(weights, activation_memory="checkpoint", checkpointed_blocks=2)
    calls: list[int] = []
    for index, block in enumerate(weights.net.blocks):
        block.up.register_forward_hook(lambda *_, index=index: calls.append(index))
    engine.backward(local_loss(engine, weights, make_inputs()), last=True)
    assert sorted(calls) == [0, 0, 1, 1, 2]


def test_checkpointing_frees_the_activations_of_blocks() -> None:
    weights = full_weights()
    engine = build_engine(weights, activation_memory="checkpoint")
    calls: list[int] = []
    weights.net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        weights.net(make_inputs())
    assert len(calls) == 1
    engine.backward(local_loss(engine, weights, make_inputs()), last=True)
    assert len(calls) == 3


def test_network_without_blocks_is_checkpointed_as_a_whole() -> None:
    weights = FullWeights(nn.Linear(3, 3))
    engine = build_engine(weights, activation_memory="checkpoint")
    train_step(engine, weights, 0)


def test_repeated_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2))
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([inner, nn.Identity(), nn.ModuleList([nn.Linear(2, 2)])]))
    assert activation_memory.repeated_blocks(net) == [inner, net[1][2][0]]


def test_fp32_precision_is_restored_after_autocast() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    engine = build_engine(full_weights(), precision="tf32")
    with engine.autocast():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_autocast_does_not_cache_swapped_weights(precision: str) -> None:
    weights = full_weights("old")
    engine = build_engine(weights, precision=precision)
    with engine.autocast(), torch.no_grad():
        start = weights.net(make_inputs())
        for p in weights.trainable().values():
            p.add_(0.5)
    with engine.autocast():
        before = weights.net(make_inputs())
        with weights.use("old"):
            old = weights.net(make_inputs())
        live = weights.net(make_inputs())
        assert torch.equal(old, start)
        assert torch.equal(live, before)
        live.sum().backward()
    assert all(p.grad is not None for p in weights.trainable().values())


def test_loss_scale_does_not_change_the_update() -> None:
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(max_grad_norm=0), precision="fp16")
    assert engine.scaler is not None
    engine.scaler.scale = 1024.0
    recorder = Recorder(engine)
    train_step(engine, weights, 0)
    assert_close(recorder.gradients, record_gradients(), rtol=0.02, atol=0.005)


def test_fp16_overflow_skips_the_update_and_halves_the_scale() -> None:
    weights = full_weights()
    engine = build_engine(weights, precision="fp16")
    assert engine.scaler is not None
    initial = full_tensors(weights.trainable())
    engine.scaler.scale = 1e30
    engine.backward(local_loss(engine, weights, make_inputs()), last=True)
    assert engine.step(0).skipped
    assert engine.scaler.scale == 5e29
    assert_equal(full_tensors(weights.trainable()), initial)
    engine.scaler.scale = 1024.0
    engine.backward(local_loss(engine, weights, make_inputs()), last=True)
    assert not engine.step(0).skipped
    assert engine.scaler.skipped == 0


def test_twenty_skipped_updates_stop_the_run() -> None:
    weights = full_weights()
    engine = build_engine(weights, precision="fp16")
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.backward(local_loss(engine, weights, make_inputs()) * float("inf"), last=True)
        assert engine.step(0).skipped
    engine.backward(local_loss(engine, weights, make_inputs()) * float("inf"), last=True)
    with pytest.raises(TrainingError, match=r"20 updates.*TM289"):
        engine.step(0)


def test_loss_scale_doubles_after_patience() -> None:
    scaler = LossScaler(scale=2.0, patience=3)
    for _ in range(3):
        scaler.on_success()
    assert scaler.state_dict() == {"scale": 4.0, "good": 0, "skipped": 0}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_loss_is_refused_before_the_update(value: float) -> None:
    weights = full_weights()
    engine = build_engine(weights)
    train_step(engine, weights, 0)
    before = full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict())
    engine.backward(local_loss(engine, weights, local_rows(engine)) * value, last=True)
    with pytest.raises(TrainingError, match=r"step 7 .*TM270"):
        engine.step(7)
    assert_equal(full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict()), before)


def test_non_finite_gradient_is_refused() -> None:
    weights = full_weights()
    engine = build_engine(weights)
    # The square root has an infinite derivative at zero.
    engine.backward((weights.net(make_inputs()) * 0).sum().sqrt(), last=True)
    with pytest.raises(TrainingError, match=r"gradient norm.* step 0.*TM270"):
        engine.step(0)


def use_fused_adamw(engine: Engine, *, synchronous: bool) -> TorchAdamW:
    """Use the fused AdamW of GPUs; if `synchronous`, the host decides whether to update."""
    engine.optimizer = TorchAdamW(engine.parameters, engine.optim, fused=True)
    engine.optimizer.fused = not synchronous
    return engine.optimizer


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01, 100.0])
def test_update_decided_on_the_device_is_bit_identical(max_grad_norm: float) -> None:
    results = []
    for synchronous in (True, False):
        weights = full_weights()
        engine = build_engine(weights, OptimConfig(lr=1e-2, max_grad_norm=max_grad_norm))
        use_fused_adamw(engine, synchronous=synchronous)
        losses = [train_step(engine, weights, step) for step in range(3)]
        results.append((losses, full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict())))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_update_refused_on_the_device_raises_when_its_result_is_read(value: float) -> None:
    weights = full_weights()
    engine = build_engine(weights)
    use_fused_adamw(engine, synchronous=False)
    train_step(engine, weights, 0)
    before = full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict())
    engine.backward(local_loss(engine, weights, local_rows(engine)) * value, last=True)
    launched = engine.launch_step(7)
    assert_equal(full_tensors(weights.trainable()) | full_tensors(engine.optimizer.state_dict()), before)
    with pytest.raises(TrainingError, match=r"step 7 .*TM270"):
        launched.result()
    train_step(engine, weights, 8)
    assert not all(x.equal(before[key]) for key, x in full_tensors(weights.trainable()).items())


def test_loss_without_gradient_is_refused() -> None:
    engine = build_engine(full_weights())
    with pytest.raises(TrainingError, match=r"trainable.*TM274"):
        engine.backward(torch.ones(()), last=True)


def test_gradient_clipping_bounds_the_norm() -> None:
    weights = full_weights()
    engine = build_engine(weights, OptimConfig(lr=0.5, max_grad_norm=0.01, warmup_steps=2))
    recorder = Recorder(engine)
    engine.backward(local_loss(engine, weights, make_inputs()), last=True)
    update = engine.step(0)
    assert update.grad_norm > 0.01
    assert update.lr == 0.25
    assert torch.stack([g.norm() for g in recorder.gradients.values()]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_trainable_parameters_are_converted_to_fp32() -> None:
    net = build_network().to(torch.bfloat16)
    weights = FullWeights(net)
    engine = build_engine(weights)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert engine.placement().dtype == torch.float32
    assert set(engine.parameters) == {name for name, _ in net.named_parameters()}


def test_network_is_loaded_in_its_param_dtype() -> None:
    for param_dtype, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        engine = Engine(EngineConfig(device="cpu", precision="bf16", param_dtype=param_dtype), OptimConfig(), 1, 0)  # type: ignore[arg-type]
        for is_adapter, expected in ((False, dtype), (True, torch.bfloat16)):
            placement = engine.placement(is_adapter=is_adapter)
            model = FluxSpec().tiny().load(placement)
            assert {p.dtype for p in model.net.parameters()} == {expected}
            assert {p.dtype for p in model.autoencoder.net.parameters()} == {torch.bfloat16}


def test_ema_is_fp32_if_weights_are_bf16() -> None:
    weights = full_weights("reference", "ema")
    build_engine(weights, precision="bf16", param_dtype="bf16")
    assert weights.snapshot_tensors()["ema"]["proj_in.weight"].dtype == torch.float32
    assert weights.snapshot_tensors()["reference"]["proj_in.weight"].dtype == torch.bfloat16
    with torch.no_grad():
        weights.net.proj_in.weight.fill_(1.0)
    start = weights.snapshot_tensors()["ema"]["proj_in.weight"].clone()
    weights.update_snapshot("ema", 0.999)
    assert torch.allclose(weights.snapshot_tensors()["ema"]["proj_in.weight"] - start, (1 - start) * 1e-3, atol=1e-6)


def test_snapshots_on_the_cpu_are_copies() -> None:
    weights = FullWeights(build_network(), ("old",), True)
    build_engine(weights)
    with torch.no_grad():
        weights.net.proj_in.weight.fill_(1.0)
    assert not torch.equal(weights.snapshot_tensors()["old"]["proj_in.weight"], weights.net.proj_in.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "mps"}, r"engine\.device.* mps\b.*--device (cpu|cuda)"),
        (
            {"attention_backend": "xformers"},
            r"xformers.*`pip install xformers`.*\bauto\b",
        ),
        ({"attention_backend": "flash", "precision": "bf16"}, r"\bflash\b.*\bcpu\b"),
        ({"attention_backend": "cudnn", "precision": "bf16"}, r"\bcudnn\b.*\bcpu\b"),
        ({"param_dtype": "bf16", "precision": "fp32"}, r"engine\.param_dtype.*bf16.*engine\.precision.*fp32"),
    ],
)
def test_unsupported_engine_settings_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        Engine(EngineConfig(**{"device": "cpu"} | settings), OptimConfig(), 1, 0)  # type: ignore[arg-type]


def test_cpu_offload_on_one_process_equals_training_without(tmp_path: Path) -> None:
    """A process without torchrun gets a group of its own; it also resumes from a checkpoint without offload."""
    plain, offloaded = full_weights("ema"), full_weights("ema")
    engine, offload_engine = build_engine(plain), build_engine(offloaded, strategy="cpu_offload")
    try:
        assert offload_engine.comm.world_size == 1
        assert all(is_sharded(p) for p in offloaded.trainable().values())
        for step in range(2):
            assert train_step(engine, plain, step) == train_step(offload_engine, offloaded, step)
            plain.update_snapshot("ema", 0.9)
            offloaded.update_snapshot("ema", 0.9)
        saved = checkpoint.save(tmp_path, 2, engine, plain, {}, CheckpointConfig())
        groups = [(plain, engine), (offloaded, offload_engine)]
        states = [full_state(*group) for group in groups]
        assert_equal(*states)
        train_step(offload_engine, offloaded, 2)
        checkpoint.load(saved, offload_engine, offloaded)
        assert_equal(full_state(offloaded, offload_engine), states[0])
    finally:
        offload_engine.close()
    assert not torch.distributed.is_initialized()


def full_state(weights: FullWeights, engine: Engine) -> dict[str, torch.Tensor]:
    """Return weights, EMA and optimizer state."""
    ema = {f"ema/{name}": x for name, x in weights.snapshot_tensors()["ema"].items()}
    return full_tensors({**weights.trainable(), **ema, **engine.optimizer.state_dict()})


def test_cpu_offload_is_refused_on_mps() -> None:
    config = EngineConfig(strategy="fsdp", precision="fp32", cpu_offload=True)
    with pytest.raises(TrainingError, match=r"engine\.cpu_offload.*TM932"):
        check_engine_config(config, torch.device("mps"), 1)


def test_out_of_memory_and_full_disk_are_explained() -> None:
    memory = explain_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert memory is not None
    assert "batch.micro_batch_size" in memory
    disk = explain_error(OSError(errno.ENOSPC, "No space left on device", "runs/a"))
    assert disk is not None
    assert "disk is full" in disk and "runs/a" in disk
    locked = explain_error(OSError(errno.EROFS, "Read-only file system", "runs/a/report.html"))
    assert locked is not None and "runs/a/report.html" in locked and "TM1250" in locked
    assert explain_error(ValueError("other")) is None
