"""The engine: devices, ranks, sharding, precision, memory and optimizer steps of a run."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from ..config.schema import EngineConfig, OptimConfig
from ..core.errors import TrainingError, explain_error
from ..core.lora import LoraWeights
from ..core.quantization import TokenNetwork
from ..core.types import Placement
from ..core.weights import FrozenCopyWeights, FullWeights, NetworkTraits, Weights
from . import (
    activation_memory,
    context_parallel,
    cuda_graphs,
    device_precision,
    distributed,
    inference_norms,
    merged_rollouts,
    optimizer,
    precision,
    quantized_base,
    rollout_precision,
    sharded_loading,
)

__all__ = ["Engine", "LaunchedUpdate", "TrainingError", "Update", "explain_error"]


@dataclass(frozen=True)
class Update:
    """The result of one optimizer step."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class LaunchedUpdate:
    """An optimizer step that was launched; its gradient norm may still be computed by the GPU."""

    step: int
    lr: float
    loss_scale: float | None  # of fp16 training, where an update that overflows is skipped without an error
    measured: Tensor  # [2] on the device: the squared gradient norm, and how many losses were not finite

    def result(self) -> Update:
        """Wait for the GPU and return the result; see `read`."""
        return self.read(self.measured.tolist())

    def read(self, measured: Sequence[float]) -> Update:
        """Return the result from a host copy of `measured`; raise TrainingError if the update was refused."""
        square, bad = measured
        norm = math.sqrt(square) / (self.loss_scale or 1.0) if square >= 0 else math.nan
        accepted = math.isfinite(norm) and not bad
        if not accepted and self.loss_scale is None:
            what = f"{int(bad)} loss value(s)" if bad else "the gradient norm"
            raise TrainingError(
                f"{what} of step {self.step} is NaN or infinite, so the weights were not updated. Lower optim.lr, "
                "look for extreme values in rewards or data, or set engine.precision to fp32 or bf16 [TM270]"
            )
        return Update(norm, self.lr, skipped=not accepted)


class Engine:
    """Place weights on devices and ranks, run backward passes and take optimizer steps."""

    def __init__(self, config: EngineConfig, optim: OptimConfig, steps: int, seed: int) -> None:
        self.optim, self.steps, self.seed = optim, steps, seed
        self.device = precision.select_device(config.device, distributed.get_local_rank())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if config.deterministic:  # or products on several streams share the workspace in which they add up
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # FSDP, which offloads parameters, needs a process group even for one process.
        self.comm, self._started = distributed.init_process_group(self.device, always=config.cpu_offload)
        self.config, self.precision_choice = device_precision.resolve_precision(config, self.device, self.comm)
        precision.check_engine_config(self.config, self.device, self.comm.world_size)
        self.scaler = precision.LossScaler() if self.config.precision == "fp16" else None
        self.mesh = self._mesh()
        self.data_parallel, self._context = context_parallel.split_data_parallel(
            self.comm, config.context_parallel, self.device
        )
        self._nonfinite_losses = torch.zeros((), device=self.device)  # since the last optimizer step

    def _mesh(self) -> DeviceMesh | None:
        """Return the mesh that parameters are sharded over; None if every rank holds all of them."""
        if not isinstance(self.comm, distributed.DistributedComm) or self.config.strategy == "replicated":
            return None
        shape = distributed.mesh_shape(self.config.strategy, self.config.hsdp_replicas, self.comm.world_size)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])

    @property
    def shard_info(self) -> tuple[int, int, bool]:
        """The index of this rank's shard, the number of shards, and whether this rank saves it."""
        if self.mesh is None:
            return 0, 1, self.comm.rank == 0
        count = self.mesh.size(self.mesh.ndim - 1)
        return self.comm.rank % count, count, self.comm.rank < count

    @property
    def asynchronous(self) -> bool:
        """Whether the device runs asynchronously, so that the host can continue before a step is done (CUDA)."""
        return self.device.type == "cuda"

    def placement(self, *, is_adapter: bool = True, is_prepared: bool = False) -> Placement:
        """Return device, dtype and attention backend for loading models.

        Frozen models load in `engine.precision`. The base model of an adapter (`is_adapter`) is frozen; any other
        trained network loads in `engine.param_dtype`: less would round its initial weights, more would need memory
        for two copies while they are cast.

        A network that `prepare` shards before anything uses it (`is_prepared`) need not be loaded as a whole: its
        weights stay in their files, or those of an adapter's base model in host memory if they end there.
        """
        trained_dtype = None if is_adapter else precision.DTYPES[self.config.param_dtype]
        dtype = precision.DTYPES[self.config.precision]
        device = None
        if is_prepared and self.mesh is not None and (self.config.cpu_offload or not is_adapter):
            device = torch.device("cpu" if is_adapter else "meta")
        if is_prepared and self.config.base_precision != "same":
            device = torch.device("cpu")  # where it is quantized: in full precision the device may not hold it
        return Placement(self.device, dtype, self.config.attention_backend, trained_dtype, device)

    def prepare(self, weights: Weights, *, same_kernels: bool = False) -> None:
        """Compile, checkpoint, move, cast and shard the network in place as configured, and build its optimizer.

        `same_kernels`: rollouts and updates should round alike, because a loss divides their probabilities.
        """
        self.config = activation_memory.resolve_without_plan(self.config, self.device)
        if self.config.compile and self.device.type == "cuda":
            activation_memory.disable_compile_cache()
        nets = [weights.net, *(weights.copies.values() if isinstance(weights, FrozenCopyWeights) else ())]
        dtype = precision.DTYPES[self.config.param_dtype]
        snapshots = weights.snapshot_tensors()
        moving = {id(p) for name, values in snapshots.items() if name != "reference" for p in values.values()}
        deferred = sharded_loading.find_deferred_parameters(nets, self.comm)
        for net in nets:
            self._check_shardable(net, weights.traits)
            if self._context is not None:
                context_parallel.enable_context_parallel(net, self._context)
            self._lower_precision(net, merge=isinstance(weights, LoraWeights) and weights.merge_rollouts)
            in_blocks = self.config.compile and activation_memory.should_compile_blocks(net)
            if in_blocks:
                activation_memory.compile_blocks(net)
            if self.config.activation_memory == "checkpoint":
                activation_memory.checkpoint_activations(net, self.config.checkpointed_blocks)
            if self.device.type == "cuda" and (in_blocks or not self.config.compile):  # not within one compiled graph
                precision.use_fast_attention(net, self.config, weights.traits, same_kernels=same_kernels)
            if self.device.type == "cuda" and self.config.cuda_graphs:
                self._capture_cuda_graphs(net, weights)
            for unit in [*(activation_memory.repeated_blocks(net) if self.mesh else ()), net]:
                # Block by block: the whole network may not fit on one device.
                self._move_to_device(unit, dtype, moving)
                if self.mesh is not None:
                    self._shard(unit, root=unit is net)
                    sharded_loading.read_shards(unit, deferred, self._parameter_device)
            if self.config.compile and not in_blocks:
                activation_memory.compile_whole(net, weights.traits)
        if isinstance(weights, FullWeights):
            _copy_snapshots(weights)
        self.net, self.parameters = weights.net, weights.trainable()
        self._check_all_sharded()
        self.optimizer = optimizer.build_optimizer(self.parameters, self.optim, dtype, self.seed, self.device)

    def _lower_precision(self, net: nn.Module, *, merge: bool) -> None:
        """Keep the frozen base in 8 bits, and let rollouts compute in fewer bits or without adapters, as configured."""
        base, rollouts = self.config.base_precision, self.config.rollout_precision
        rollouts = "same" if rollouts == self.config.precision else rollouts
        if base != "same":
            quantized_base.warn_of_small_layers(net, f"engine.base_precision: {base}")
            quantized_base.quantize_frozen_layers(net, base, self.device)
        if rollouts in ("int8", "fp8") and isinstance(net, TokenNetwork):
            rollout_precision.decode_in_8_bits(net, rollouts, self.device)
        elif rollouts != "same":
            quantized_base.warn_of_small_layers(net, f"engine.rollout_precision: {rollouts}")
            rollout_precision.use_low_precision_rollouts(net, rollouts, self.device, merge=merge)
        if merge:
            merged_rollouts.use_merged_rollouts(net, rollouts, self.device)

    def _capture_cuda_graphs(self, net: nn.Module, weights: Weights) -> None:
        """Capture calls without gradient in CUDA graphs, with norms in the compute dtype and channels_last weights."""
        inference_norms.convert_to_channels_last(net, weights.traits)
        if precision.DTYPES[self.config.precision] != torch.float32:
            inference_norms.use_inference_norms(net, precision.DTYPES[self.config.precision], weights.traits)
        cuda_graphs.use_cuda_graphs(net, weights.graph_key, capture=cuda_graphs.make_capture())

    def register_forward_methods(self, net: nn.Module, *methods: str) -> None:
        """Let methods of a sharded network gather its weights, as its `forward` does."""
        for name in methods if isinstance(net, FSDPModule) else ():
            register_fsdp_forward_method(net, name)

    def _check_shardable(self, net: nn.Module, traits: NetworkTraits) -> None:
        """Refuse networks that FSDP cannot shard."""
        if self.mesh is not None and traits.data_dependent_forward:
            raise TrainingError(
                f"engine.strategy: {self.config.strategy} needs all ranks to call the same layers, but this "
                "network selects layers by timestep, so ranks would deadlock; set engine.strategy=replicated "
                "[TM271]"
            )
        scalars = [name for name, p in net.named_parameters() if not p.ndim]
        if self.mesh is not None and scalars:
            raise TrainingError(
                f"engine.strategy: {self.config.strategy} cannot shard the scalar parameter '{scalars[0]}'; give "
                "it the shape [1], or set engine.strategy=replicated [TM272]"
            )

    def _check_all_sharded(self) -> None:
        """Refuse trained parameters outside the sharded network."""
        unsharded = [key for key, p in self.parameters.items() if not isinstance(p, DTensor)]
        if self.mesh is not None and unsharded:
            raise TrainingError(
                f"engine.strategy: {self.config.strategy} shards the backbone only, but '{unsharded[0]}' is "
                "trained too; set engine.strategy=replicated, or remove text_encoder from tuning.modules [TM273]"
            )

    @property
    def _parameter_device(self) -> torch.device:
        """Where the shards of parameters are kept."""
        return torch.device("cpu") if self.config.cpu_offload else self.device

    @torch.no_grad()
    def _move_to_device(self, unit: nn.Module, dtype: torch.dtype, moving: set[int]) -> None:
        """Move parameters and buffers to the device, cast trained ones to `dtype`, and make all ranks equal.

        Parameters in `moving` (ids) belong to snapshots such as the EMA and stay in fp32: they move by less than bf16
        can represent. Parameters on the meta device are cast only: every rank reads its shard itself.
        """
        local = [p for p in unit.parameters() if not isinstance(p, DTensor)]
        for p in local:
            device = p.device if p.is_meta else self.device
            p.data = p.data.to(device, torch.float32 if id(p) in moving else dtype if p.requires_grad else p.dtype)
        for buffer in unit.buffers():
            buffer.data = buffer.data.to(self.device)
        if isinstance(self.comm, distributed.DistributedComm):
            distributed.broadcast([*(p for p in local if not p.is_meta), *unit.buffers()])

    def _shard(self, unit: nn.Module, *, root: bool) -> None:
        """Shard a block, or the rest of the network (`root`), with FSDP2."""
        compute, reduce = precision.DTYPES[self.config.precision], precision.DTYPES[self.config.reduce_dtype]
        # Blocks are gathered in the dtype they compute in; embeddings and the like in the root stay as under autocast.
        gathered_dtype = None if root or compute == torch.float32 else compute
        policy = MixedPrecisionPolicy(param_dtype=gathered_dtype, reduce_dtype=reduce, cast_forward_inputs=False)
        # PyTorch warns of networks that return views, because in-place changes of those break FSDP; we make none.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
        offload = OffloadPolicy()
        if self.config.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        sharded = fully_shard(
            unit, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload
        )
        # The loss is already divided by the samples of all ranks, so gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if root and self.config.strategy == "sdp":
            unit.register_forward_pre_hook(_keep_gathered)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the block in the configured precision (autocast) and with the configured attention kernel."""
        with precision.compute_settings(self.config, self.device), precision.autocast(self.config, self.device):
            yield

    def cast_weights(self, net: nn.Module) -> AbstractContextManager[None]:
        """Cast all weights at once around one forward call, for a network that uses each weight once."""
        dtype, config = precision.DTYPES[self.config.precision], self.config
        supported = self.mesh is None and not config.compile and config.activation_memory == "keep"
        return precision.cast_weights(net, dtype) if supported and dtype != torch.float32 else nullcontext()

    @contextmanager
    def offload_activations(self) -> Iterator[None]:
        """Offload saved activations to the host within the block if `engine.activation_memory` is offload."""
        if self.config.activation_memory != "offload":
            yield
            return
        with activation_memory.offload_activations(self.device):
            yield

    def backward(self, value: Tensor, *, last: bool) -> None:
        """Accumulate gradients of this micro-batch's share of the loss; only the `last` one synchronizes the ranks.

        With `engine.cpu_offload` every one does, since gradients are added up in host memory.
        """
        if not value.requires_grad:
            raise TrainingError(
                "the loss does not depend on a trainable weight, so it has no gradient; check that the objective "
                "uses the policy with gradients enabled [TM274]"
            )
        self._nonfinite_losses += (~value.detach().isfinite()).float()
        if isinstance(self.net, FSDPModule):
            # Gradients that wait for the last micro-batch would wait on the GPU, those of the whole network.
            self.net.set_requires_gradient_sync(last or self.config.cpu_offload)
        with precision.compute_settings(self.config, self.device):
            (value.float() * self.scaler.scale if self.scaler else value).backward()  # type: ignore[no-untyped-call]

    def step(self, step: int) -> Update:
        """Take an optimizer step and wait for its result; see `launch_step`."""
        return self.launch_step(step).result()

    def launch_step(self, step: int) -> LaunchedUpdate:
        """All-reduce and clip the gradients, step the optimizer unless they are not finite, and zero them.

        With fused AdamW on a GPU, the GPU itself checks the gradients, and this returns without waiting for it.
        """
        parameters = list(self.parameters.values())
        if self.mesh is None and self.comm.world_size > 1:
            distributed.all_reduce_gradients(parameters, precision.DTYPES[self.config.reduce_dtype], self.comm)
        grads = [p.grad for p in parameters if p.grad is not None]
        lr = optimizer.learning_rate(self.optim, step, self.steps)
        scale = self.scaler.scale if self.scaler else None
        update = LaunchedUpdate(step, lr, scale, self._measure_gradients(grads))
        adam = self.optimizer
        if isinstance(adam, optimizer.TorchAdamW) and adam.fused and not self.scaler and not self.mesh:
            self._step_on_device(grads, update.measured, adam, lr)
            mark_changed(parameters)
            self._zero_grad(parameters)
            return update
        try:
            result = update.result()
            if not result.skipped:
                self._step_on_host(grads, result.grad_norm, lr)
                mark_changed(parameters)
            elif self.scaler:
                self.scaler.on_overflow()
        finally:
            self._zero_grad(parameters)
        return update

    def _measure_gradients(self, grads: list[Tensor]) -> Tensor:
        """Return the squared gradient norm and the number of non-finite losses over all ranks: [2]."""
        norms = torch._foreach_norm([distributed.local_shard(grad) for grad in grads], dtype=torch.float32)
        square = torch.stack(norms).square().sum().to(self.device) if norms else torch.zeros((), device=self.device)
        # Each shard is counted once for every rank that holds it.
        copies = self.comm.world_size // self.shard_info[1]
        return self.comm.sum(torch.stack([square / copies, self._nonfinite_losses]))

    def _step_on_device(self, grads: list[Tensor], measured: Tensor, adam: optimizer.TorchAdamW, lr: float) -> None:
        """Skip, or clip and step, depending on `measured`, which only the GPU knows yet."""
        square, bad = measured.unbind()
        shrink = None
        if self.optim.max_grad_norm and grads:
            norm = square.double().sqrt() + 1e-6
            shrink = (norm / torch.full_like(norm, self.optim.max_grad_norm)).clamp(min=1.0).float()
        adam.update(lr, (square - square + bad != 0).float(), shrink)  # inf - inf is nan

    def _step_on_host(self, grads: list[Tensor], norm: float, lr: float) -> None:
        """Unscale and clip the gradients by their norm, which the host knows, and step the optimizer."""
        scale = self.scaler.scale if self.scaler else 1.0
        shrink = scale * (max(1.0, (norm + 1e-6) / self.optim.max_grad_norm) if self.optim.max_grad_norm else 1.0)
        if shrink != 1:
            torch._foreach_div_([distributed.local_shard(grad) for grad in grads], shrink)
        self.optimizer.update(lr)
        if self.scaler:
            self.scaler.on_success()

    def _zero_grad(self, parameters: list[nn.Parameter]) -> None:
        self._nonfinite_losses.zero_()
        for p in parameters:
            p.grad = None

    def close(self) -> None:
        """Destroy the process group if this engine created it."""
        if self._started:
            distributed.destroy_process_group()


def mark_changed(parameters: Sequence[Tensor]) -> None:
    """Raise the versions of tensors, which fused and compiled optimizers do not do.

    Copies in 8 bits are made again when the version of a weight has changed.
    """
    torch.autograd.graph.increment_version(parameters)


def _keep_gathered(net: nn.Module, inputs: Any) -> None:
    # With gradients, parameters stay gathered for the backward pass. Without, they must not: `weights.use` changes the
    # shards in place, and a gathered network would keep the old values.
    if isinstance(net, FSDPModule):
        net.set_reshard_after_forward(not torch.is_grad_enabled())


@torch.no_grad()
def _copy_snapshots(weights: FullWeights) -> None:
    """Copy the initial weights into the snapshots again, now that they are sharded and on their device."""
    for name in weights.snapshots:
        weights.snapshots[name] = {
            key: p.detach().to(
                "cpu" if weights.snapshots_on_cpu else p.device,
                p.dtype if name == "reference" else torch.float32,
                copy=True,
            )
            for key, p in weights.net.named_parameters()
        }
