"""The engine: alone knows ranks, sharding, precision and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ..config.schema import EngineConfig, OptimConfig
from ..core.types import Placement
from ..core.weights import FrozenCopyWeights, FullWeights, HasDataDependentForward, Weights
from . import (
    activation_memory,
    context_parallel,
    cuda_graphs,
    device_precision,
    distributed,
    inference_norms,
    optimizer,
    precision,
)
from .async_metrics import copy_to_host_async
from .errors import TrainingError, explain_error

__all__ = ["Engine", "TrainingError", "Update", "explain_error"]


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float
    lr: float
    skipped: bool


class Engine:
    """Place weights on devices and ranks, run backward passes and take optimizer steps."""

    def __init__(self, config: EngineConfig, optim: OptimConfig, steps: int, seed: int) -> None:
        self.optim, self.steps, self.seed = optim, steps, seed
        self.device = precision.select_device(config.device, distributed.get_local_rank())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.comm, self._started = distributed.init_process_group(self.device)
        self.config, self.precision_choice = device_precision.resolve_precision(config, self.device, self.comm)
        precision.check_engine_config(self.config, self.device, self.comm.world)
        self.scaler = precision.LossScaler() if self.config.precision == "fp16" else None
        self.mesh = self._mesh()
        self.rows, self._context = context_parallel.split_data_parallel(
            self.comm, config.context, self.device
        )  # who has rows of its own
        self._bad = torch.zeros((), device=self.device)  # how many losses since the last update were not finite

    def _mesh(self) -> DeviceMesh | None:
        """The ranks tensors are sharded over; none where every rank holds everything."""
        if not isinstance(self.comm, distributed.DistributedComm) or self.config.strategy == "replicated":
            return None
        shape = distributed.mesh_shape(self.config.strategy, self.config.replicas, self.comm.world)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])

    @property
    def shard(self) -> tuple[int, int, bool]:
        """Which of how many shards this rank holds, and whether it is the first to hold it."""
        if self.mesh is None:
            return 0, 1, self.comm.rank == 0
        count = self.mesh.size(self.mesh.ndim - 1)
        return self.comm.rank % count, count, self.comm.rank < count

    @property
    def leads(self) -> bool:
        """Whether the device runs asynchronously, so that the host can continue before a step is done (CUDA)."""
        return self.device.type == "cuda"

    def placement(self, *, adapts: bool = True) -> Placement:
        """Where frozen parts go, and how; the network that trains in the precision of its weights, unless it `adapts`.

        Loaded in less, they would start out rounded; in more, two copies would lie on the device for a while.
        """
        trained = None if adapts else precision.DTYPES[self.config.trainable]
        return Placement(self.device, precision.DTYPES[self.config.precision], self.config.attention, trained)

    def prepare(self, weights: Weights) -> None:
        """Place, cast, recompute, shard or replicate the network in place, and make its optimizer."""
        if self.config.compile and self.device.type == "cuda":
            activation_memory.disable_compile_cache()
        nets = [weights.net, *(weights.twins.values() if isinstance(weights, FrozenCopyWeights) else ())]
        dtype = precision.DTYPES[self.config.trainable]
        kept = {id(p) for name, values in weights.stored().items() if name != "reference" for p in values.values()}
        for net in nets:
            self._check(net)
            if self._context is not None:
                context_parallel.enable_context_parallel(net, self._context)
            in_blocks = self.config.compile and activation_memory.should_compile_blocks(net)
            if in_blocks:
                activation_memory.compile_blocks(net)
            if self.config.memory == "recompute":
                activation_memory.checkpoint_activations(net)
            if self.device.type == "cuda" and (in_blocks or not self.config.compile):  # a whole graph has one kernel
                precision.use_fast_attention(net, self.config)
            if self.device.type == "cuda" and self.config.graphs:
                self._record(net, weights)
            for unit in [*(activation_memory.repeated_blocks(net) if self.mesh else ()), net]:
                # One block after the other, so that a network never lies whole on a device it would not fit on.
                self._place(unit, dtype, kept)
                if self.mesh is not None:
                    self._shard(unit, whole=unit is net)
            if self.config.compile and not in_blocks:
                activation_memory.compile_whole(net)
        if isinstance(weights, FullWeights):
            _copy_snapshots(weights)
        self.net, self.parameters = weights.net, weights.trainable()
        self._whole()
        self.optimizer = optimizer.build_optimizer(self.parameters, self.optim, dtype, self.seed)

    def _record(self, net: nn.Module, weights: Weights) -> None:
        """Capture calls without gradient in CUDA graphs, with norms in the compute dtype and channels_last weights."""
        inference_norms.convert_to_channels_last(net)
        if precision.DTYPES[self.config.precision] != torch.float32:
            inference_norms.use_inference_norms(net, precision.DTYPES[self.config.precision])
        cuda_graphs.use_cuda_graphs(net, weights.alike, record=cuda_graphs.make_capture())

    def enter(self, net: nn.Module, *methods: str) -> None:
        """Let methods of a network that is sharded gather its weights, as its `forward` does."""
        for name in methods if isinstance(net, FSDPModule) else ():
            register_fsdp_forward_method(net, name)

    def _check(self, net: nn.Module) -> None:
        if self.mesh is not None and any(isinstance(module, HasDataDependentForward) for module in net.modules()):
            raise TrainingError(
                f"engine.strategy {self.config.strategy} gathers what all ranks call at once, but this network calls "
                "one part or another by the noise of its rows, so ranks would wait for ever; set it to replicated"
            )
        scalars = [name for name, p in net.named_parameters() if not p.ndim]
        if self.mesh is not None and scalars:
            raise TrainingError(
                f"engine.strategy {self.config.strategy} cannot cut the scalar parameter '{scalars[0]}' into shards; "
                "give it one dimension of size 1, or set engine.strategy to replicated"
            )

    def _whole(self) -> None:
        whole = [key for key, p in self.parameters.items() if not isinstance(p, DTensor)]
        if self.mesh is not None and whole:
            raise TrainingError(
                f"engine.strategy {self.config.strategy} shards the network alone, but '{whole[0]}' trains beside it; "
                "set engine.strategy to replicated, or leave text out of tuning.adapt"
            )

    @torch.no_grad()
    def _place(self, unit: nn.Module, dtype: torch.dtype, kept: set[int]) -> None:
        plain = [p for p in unit.parameters() if not isinstance(p, DTensor)]
        for p in plain:
            # Snapshots that trail the live weights move by less than bf16 can hold.
            wanted = torch.float32 if id(p) in kept else dtype if p.requires_grad else p.dtype
            p.data = p.data.to(self.device, wanted)
        for buffer in unit.buffers():
            buffer.data = buffer.data.to(self.device)
        if isinstance(self.comm, distributed.DistributedComm):
            distributed.broadcast([*plain, *unit.buffers()])

    def _shard(self, unit: nn.Module, *, whole: bool) -> None:
        compute, reduce = precision.DTYPES[self.config.precision], precision.DTYPES[self.config.reduce]
        # Blocks are gathered in the dtype they compute in; the root keeps embeddings and such as autocast would.
        gathered = None if whole or compute == torch.float32 else compute
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduce, cast_forward_inputs=False)
        sharded = fully_shard(unit, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
        # The loss is divided by the rows of all ranks already: gradients add up, where FSDP2 would average.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if whole and self.config.strategy == "sdp":
            unit.register_forward_pre_hook(_keep_gathered)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run the block in the configured precision (autocast) and with the configured attention kernel."""
        with precision.compute_settings(self.config, self.device), precision.autocast(self.config, self.device):
            yield

    def lowering(self, net: nn.Module) -> AbstractContextManager[None]:
        """Cast all weights at once around one forward call, for a network that uses each weight once."""
        dtype, config = precision.DTYPES[self.config.precision], self.config
        alone = self.mesh is None and not config.compile and config.memory == "keep"
        return precision.cast_weights(net, dtype) if alone and dtype != torch.float32 else nullcontext()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Offload saved activations to the host within the block if `engine.memory` is offload."""
        if self.config.memory != "offload":
            yield
            return
        with activation_memory.offload_activations(self.device):
            yield

    def backward(self, value: Tensor, *, last: bool) -> None:
        """Add gradients of this rank's share of the loss; they are exchanged between ranks at the last share only."""
        if not value.requires_grad:
            raise TrainingError("the loss depends on no trainable weight, so nothing can be learned from it")
        self._bad += (~value.detach().isfinite()).float()
        if isinstance(self.net, FSDPModule):
            self.net.set_requires_gradient_sync(last)
        with precision.compute_settings(self.config, self.device):
            (value.float() * self.scaler.scale if self.scaler else value).backward()  # type: ignore[no-untyped-call]

    def step(self, step: int) -> Update:
        """All-reduce and clip the gradients, step the optimizer unless they are not finite, and zero them."""
        return self.launch(step)()

    def launch(self, step: int) -> Callable[[], Update]:
        """Launch the optimizer step without waiting for the GPU. Call the returned function to get the norm and lr."""
        parameters = list(self.parameters.values())
        if self.mesh is None and self.comm.world > 1:
            distributed.all_reduce_gradients(parameters, precision.DTYPES[self.config.reduce], self.comm)
        grads = [p.grad for p in parameters if p.grad is not None]
        measured, lr = self._measure(grads), optimizer.learning_rate(self.optim, step, self.steps)
        if (
            isinstance(self.optimizer, optimizer.TorchAdamW)
            and self.optimizer.fused
            and not self.scaler
            and not self.mesh
        ):
            numbers = copy_to_host_async(measured)
            self._decide(grads, measured, self.optimizer, lr)
            self._forget(parameters)
            return lambda: self._told(step, *self._read(numbers()), lr)
        norm, bad = self._read(measured.tolist())
        if math.isfinite(norm) and not bad:
            self._move(grads, norm, lr)
        self._forget(parameters)
        update = self._told(step, norm, bad, lr)
        return lambda: update

    def _told(self, step: int, norm: float, bad: int, lr: float) -> Update:
        accepted = math.isfinite(norm) and not bad
        if not accepted:
            self._refuse(step, norm, bad)
        return Update(norm, lr, skipped=not accepted)

    def _measure(self, grads: list[Tensor]) -> Tensor:
        """The square of the gradient norm over all ranks, and how many losses were not finite: [2], on every rank."""
        norms = torch._foreach_norm([distributed.local_shard(grad) for grad in grads], dtype=torch.float32)
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.device)
        # As many ranks hold the same piece of the gradient as there are ranks for each shard.
        copies = self.comm.world // self.shard[1]
        return self.comm.total(torch.stack([square / copies, self._bad]))

    def _read(self, measured: list[float]) -> tuple[float, int]:
        square, bad = measured
        return math.sqrt(square) / self._scale if square >= 0 else math.nan, int(bad)

    @property
    def _scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def _decide(self, grads: list[Tensor], measured: Tensor, adam: optimizer.TorchAdamW, lr: float) -> None:
        """Refuse or clip and update as below, by what the device has found, which the host does not know yet."""
        square, bad = measured.unbind()
        shrink = None
        if self.optim.clip and grads:
            norm = square.double().sqrt() + 1e-6
            shrink = (norm / torch.full_like(norm, self.optim.clip)).clamp(min=1.0).float()
        adam.update(lr, (square - square + bad != 0).float(), shrink)  # infinity less itself is no number

    def _move(self, grads: list[Tensor], norm: float, lr: float) -> None:
        shrink = self._scale * (max(1.0, (norm + 1e-6) / self.optim.clip) if self.optim.clip else 1.0)
        if shrink != 1:
            torch._foreach_div_([distributed.local_shard(grad) for grad in grads], shrink)
        self.optimizer.update(lr)
        if self.scaler:
            self.scaler.accept()

    def _forget(self, parameters: list[nn.Parameter]) -> None:
        self._bad.zero_()
        for p in parameters:
            p.grad = None

    def _refuse(self, step: int, norm: float, bad: int) -> None:
        if self.scaler:
            return self.scaler.refuse()
        what = f"{bad} loss value(s)" if bad else "the gradient norm"
        raise TrainingError(
            f"{what} of step {step} came out as nan or infinite; the weights were not updated. Lower optim.lr, "
            "look for extreme values in rewards or data, or set engine.precision to fp32 or bf16"
        )

    def close(self) -> None:
        """Leave the process group, if it was started here."""
        if self._started:
            distributed.destroy_process_group()


def _keep_gathered(net: nn.Module, inputs: Any) -> None:
    # What a graph needs stays gathered for its backward pass. Without a graph it must not: `weights.use` changes
    # shards in place, and a network still gathered would go on with the old values.
    if isinstance(net, FSDPModule):
        net.set_reshard_after_forward(not torch.is_grad_enabled())


@torch.no_grad()
def _copy_snapshots(weights: FullWeights) -> None:
    """Make the snapshots anew, sharded and placed like the live weights they are still equal to."""
    for name in weights.snapshots:
        weights.snapshots[name] = {
            key: p.detach().to(
                "cpu" if weights.host else p.device, p.dtype if name == "reference" else torch.float32, copy=True
            )
            for key, p in weights.net.named_parameters()
        }
