"""The attention kernels of training and inference on a GPU."""

import pytest
import torch

from tastemaker.config.schema import EngineConfig
from tastemaker.core.weights import NetworkTraits
from tastemaker.models.latent_dit.model import LatentDitBackbone
from tastemaker.models.nets.latent_dit import LatentDiT, LatentDiTConfig
from tastemaker.objectives.dpo import DPO
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.nft import NFT
from tastemaker.training.precision import attention_kernels, compute_settings, use_fast_attention

CONFIG = LatentDiTConfig(
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


@pytest.mark.parametrize(
    ("backend", "cudnn_backward", "activation_memory", "same_kernels", "is_fast"),
    [
        ("auto", False, "keep", False, True),
        ("auto", False, "keep", True, False),  # a policy gradient: updates have no cuDNN kernel, so rollouts have none
        ("auto", True, "keep", True, True),  # both have it
        ("auto", True, "checkpoint", True, False),
        ("cudnn", False, "keep", True, True),  # as asked for
    ],
)
def test_rollouts_of_policy_gradients_use_the_kernels_of_their_updates(
    backend, cudnn_backward, activation_memory, same_kernels, is_fast
):
    net = torch.nn.Linear(2, 2)
    config = EngineConfig(attention_backend=backend, activation_memory=activation_memory)
    use_fast_attention(net, config, NetworkTraits(cudnn_backward=cudnn_backward), same_kernels=same_kernels)
    assert ("forward" in vars(net)) == is_fast


def test_objectives_with_ratios_ask_for_the_same_kernels():
    assert GRPO().uses_rollout_ratios() and not NFT().uses_rollout_ratios() and not DPO().uses_rollout_ratios()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation_memory", ["keep", "checkpoint"])
def test_cudnn_gradients_match_flash_gradients(activation_memory):
    torch.manual_seed(0)
    net = LatentDiT(CONFIG, zero_init=False).cuda()
    x, t, labels = (
        torch.randn(3, 4, 16, 16, device="cuda"),
        torch.rand(3, device="cuda"),
        torch.arange(3, device="cuda"),
    )
    config, results = EngineConfig(precision="bf16", activation_memory=activation_memory), []
    for allow_cudnn in (False, True):
        if allow_cudnn:
            use_fast_attention(net, config, NetworkTraits(cudnn_backward=True))
        with compute_settings(config, torch.device("cuda")), torch.autocast("cuda", torch.bfloat16):
            loss = net(x, t, labels).square().mean()
        backward_functions = backward_function_names(loss)
        loss.backward()
        results.append((backward_functions, [p.grad.clone() for p in net.parameters()]))
        net.zero_grad()
    (flash_functions, expected), (cudnn_functions, gradients) = results
    assert not any("Cudnn" in name for name in flash_functions)
    assert any("Cudnn" in name for name in cudnn_functions) == (activation_memory == "keep")
    scale = max(grad.abs().max() for grad in expected)
    assert all(((a - b).abs().max() / scale) < 0.02 for a, b in zip(expected, gradients, strict=True))


def backward_function_names(loss: torch.Tensor) -> set[str]:
    """Return the names of the backward functions of a graph."""
    pending, visited = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
    return {node.name() for node in visited}


@pytest.mark.parametrize(("attention", "gradient", "cudnn"), [("auto", True, False), ("flash", False, False)])
def test_other_networks_do_not_use_cudnn_backward(attention, gradient, cudnn):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_kernels(EngineConfig(attention_backend=attention), gradient=gradient):
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
