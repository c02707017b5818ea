"""The attention kernels of training and inference on a GPU."""

import pytest
import torch

from tastemaker.config.schema import EngineConfig
from tastemaker.core.weights import NetworkTraits
from tastemaker.models.latent_dit.model import LatentDitBackbone
from tastemaker.models.nets.latent_dit import LatentDiT, LatentDiTConfig
from tastemaker.training.precision import attention_kernels, compute_settings, use_fast_attention

SHAPE = LatentDiTConfig(
    channels=4,
    side=16,
    patch_size=2,
    width=144,
    depth=2,
    heads=2,
    intermediate_size=288,
    num_classes=4,
    max_text_tokens=0,
)  # head of 72


def test_dit_supports_cudnn_backward():
    assert LatentDitBackbone.traits.cudnn_backward
    assert not NetworkTraits().cudnn_backward


@pytest.mark.skipif(not torch.cuda.is_available(), reason="both kernels are a GPU's")
@pytest.mark.parametrize("memory", ["keep", "checkpoint"])
def test_cudnn_gradients_match_flash_gradients(memory):
    torch.manual_seed(0)
    net = LatentDiT(SHAPE, zero_init=False).cuda()
    x, t, output = (
        torch.randn(3, 4, 16, 16, device="cuda"),
        torch.rand(3, device="cuda"),
        torch.arange(3, device="cuda"),
    )
    config, result = EngineConfig(precision="bf16", activation_memory=memory), []
    for quick in (False, True):
        if quick:
            use_fast_attention(net, config, NetworkTraits(cudnn_backward=True))
        with compute_settings(config, torch.device("cuda")), torch.autocast("cuda", torch.bfloat16):
            loss = net(x, t, output).square().mean()
        received = kernels(loss)
        loss.backward()
        result.append((received, [p.grad.clone() for p in net.parameters()]))
        net.zero_grad()
    (safe, wanted), (quick, got) = result
    assert not any("Cudnn" in name for name in safe)
    assert any("Cudnn" in name for name in quick) == (memory == "keep")
    scale = max(grad.abs().max() for grad in wanted)
    assert all(((a - b).abs().max() / scale) < 0.02 for a, b in zip(wanted, got, strict=True))


def kernels(loss: torch.Tensor) -> set[str]:
    """Return the names of the backward functions of a graph."""
    waiting, received = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in received:
            received.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in received}


@pytest.mark.parametrize(("attention", "gradient", "cudnn"), [("auto", True, False), ("flash", False, False)])
def test_other_networks_do_not_use_cudnn_backward(attention, gradient, cudnn):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_kernels(EngineConfig(attention_backend=attention), gradient=gradient):
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
