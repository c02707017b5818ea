"""Which kernel of attention a network trains with on a GPU, and that it says the same."""

import pytest
import torch

from tastemaker.config.schema import EngineConfig
from tastemaker.models.nets.latent_dit import LatentDiT, LatentDiTConfig
from tastemaker.training.precision import SupportsCudnnBackward, attention_kernels, compute_settings, use_fast_attention

SHAPE = LatentDiTConfig(
    channels=4, side=16, patch=2, width=144, depth=2, heads=2, inner=288, classes=4, words=0
)  # head of 72


def test_a_dit_says_that_its_gradients_come_whole():
    assert isinstance(LatentDiT(SHAPE), SupportsCudnnBackward)
    assert not isinstance(torch.nn.Linear(2, 2), SupportsCudnnBackward)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="both kernels are a GPU's")
@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_gradients_by_the_faster_kernel_are_those_of_the_safe_one(memory):
    torch.manual_seed(0)
    net = LatentDiT(SHAPE, closed=False).cuda()
    x, t, said = torch.randn(3, 4, 16, 16, device="cuda"), torch.rand(3, device="cuda"), torch.arange(3, device="cuda")
    config, found = EngineConfig(precision="bf16", memory=memory), []
    for quick in (False, True):
        if quick:
            use_fast_attention(net, config)
        with compute_settings(config, torch.device("cuda")), torch.autocast("cuda", torch.bfloat16):
            loss = net(x, t, said).square().mean()
        seen = kernels(loss)
        loss.backward()
        found.append((seen, [p.grad.clone() for p in net.parameters()]))
        net.zero_grad()
    (safe, wanted), (quick, got) = found
    assert not any("Cudnn" in name for name in safe)
    assert any("Cudnn" in name for name in quick) == (memory == "keep")
    scale = max(grad.abs().max() for grad in wanted)
    assert all(((a - b).abs().max() / scale) < 0.02 for a, b in zip(wanted, got, strict=True))


def kernels(loss: torch.Tensor) -> set[str]:
    """Names of what a gradient will go through."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


@pytest.mark.parametrize(("attention", "gradient", "cudnn"), [("auto", True, False), ("flash", False, False)])
def test_no_other_network_trains_by_it(attention, gradient, cudnn):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_kernels(EngineConfig(attention=attention), gradient=gradient):
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
