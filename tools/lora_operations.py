"""Count operations, bytes and kept activations of adapted layers: peft's, fused ones and merged ones.

    python tools/lora_operations.py                    # counts, on any machine
    python tools/lora_operations.py --device cuda      # with milliseconds, on a GPU

The layers are to_q, to_k and to_v of a block of FLUX's size, which read the same 4096 tokens, under bf16 autocast with
adapters in fp32. Their input is in fp32, as after a normalization layer, or in bf16.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tastemaker.core.lora import LoraWeights
from tastemaker.core.rollout_scope import ROLLOUTS
from tastemaker.diagnostics.fake_backbones import fake_modules
from tastemaker.training.merged_rollouts import use_merged_rollouts

TOKENS, WIDTH, RANK = 4096, 3072, 16
NAMES = ("to_q", "to_k", "to_v")
PRODUCTS = ("mm", "addmm", "addmm_")
FREE = ("view", "t", "detach", "_unsafe_view", "new_empty", "alias", "transpose", "expand", "device")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x.clone()  # what a norm returns
        return [getattr(self, name)(x) for name in NAMES]


class OperationCounter(TorchDispatchMode):
    """Counts matrix products, other operations, and the bytes that both read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.others, self.bytes = 0, Counter[str](), [0, 0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__.partition(".")[0]
        if name in FREE or name == "clone":
            return result  # neither views nor the operations of this script
        size = sum(x.numel() * x.itemsize for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        is_product = name in PRODUCTS
        self.products += is_product
        self.others[name] += not is_product
        self.bytes[is_product] += size
        return result

    def cells(self) -> str:
        return f"{self.products} | {self.others.total()} | {self.bytes[0] / 2**20:.0f} | {self.bytes[1] / 2**20:.0f}"


def build(kind: str, device: str) -> LoraWeights:
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(NAMES))
    with torch.device(device):
        weights = LoraWeights(Layers(), config, fused=kind != "peft")
    for layer in weights.net.modules():
        for key, p in layer._parameters.items():
            if p is not None and p.requires_grad:
                layer._parameters[key] = nn.Parameter(p.detach().float())
    if kind == "merged":
        use_merged_rollouts(weights.net, "same", torch.device(device))
    return weights


def measure(kind: str, dtype: torch.dtype, device: str, time: Callable[[Callable[[], Any]], float] | None) -> None:
    """Print the rows of a kind of layer, and of a dtype of the input."""
    weights = build(kind, device)
    x = torch.randn(1, TOKENS, WIDTH, dtype=dtype, device=device, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(y: Tensor) -> Tensor:
        storage = y.untyped_storage()
        kept[id(storage) if y.device.type == "meta" else storage._cdata] = storage.nbytes()
        return y

    def sample() -> Any:
        with torch.no_grad(), ROLLOUTS.calls(), torch.autocast(device, torch.bfloat16):
            return weights.net(x)

    def train() -> Any:
        with torch.autocast(device, torch.bfloat16):
            return weights.net(x)

    def report(name: str, counter: OperationCounter, work: Callable[[], Any], kept: str = "") -> None:
        milliseconds = f"{time(work):.3f}" if time else ""
        print(f"| {kind}, {name} | {str(dtype)[6:]} | {counter.cells()} | {kept} | {milliseconds} |")

    sample()
    with OperationCounter() as counter:
        sample()
    report("rollout", counter, sample)
    if kind == "merged":
        return
    pack = torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y)
    with OperationCounter() as forward, pack:
        outputs = train()
    weight_bytes = 2 * WIDTH * WIDTH
    activations = sum(size for size in kept.values() if size != weight_bytes)
    report("forward", forward, train, f"{activations / 2**20:.0f}")
    grads = [torch.ones_like(y) for y in outputs]
    with OperationCounter() as backward:
        torch.autograd.backward(outputs, grads)
    report("backward", backward, lambda: torch.autograd.backward(train(), grads))


def milliseconds_per_call(work: Callable[[], Any]) -> float:
    """Median time of a call on a GPU; a backward pass is timed with its forward pass."""
    times = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[10:])[10]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    print("| layers | input | matrix products | other operations | MiB of these | MiB of products | MiB kept | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("peft", "fused", "merged"):
            if device == "cuda":
                measure(kind, dtype, device, milliseconds_per_call)
            else:
                with FakeTensorMode(), fake_modules():
                    measure(kind, dtype, device, None)


if __name__ == "__main__":
    main()
