"""Attention of wide heads has the gradient of PyTorch's attention, in parts too, and is used by frozen decoders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.models import attention_processor

from tastemaker.models.nets import wide_head_attention as module
from tastemaker.models.nets.wide_head_attention import WideHeadProcessor, use_wide_head_attention, wide_head_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("max_scores", [1 << 25, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_gradient_is_that_of_attention(
    max_scores: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SCORES", max_scores)
    torch.manual_seed(0)
    *inputs, grad = (torch.randn(2, 3, 17, 24, device=DEVICE).to(dtype) for _ in range(4))
    exact = [x.double().requires_grad_() for x in inputs]
    F.scaled_dot_product_attention(*exact).backward(grad.double())
    leaves = [x.clone().requires_grad_() for x in inputs]
    wide_head_attention(*leaves).backward(grad)
    for leaf, expected in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and expected.grad is not None and leaf.grad.dtype == dtype
        assert (leaf.grad.double() - expected.grad).norm() < tolerance * expected.grad.norm()


def test_decoder_uses_it_for_wide_heads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, warnings = list[int](), list[str]()
    monkeypatch.setattr(attention_processor.logger, "warning", warnings.append)
    monkeypatch.setattr(module, "wide_head_attention", lambda *x: calls.append(1) or wide_head_attention(*x))
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, **blocks)
    vae.eval().requires_grad_(False)
    vae.enable_gradient_checkpointing()
    latents, grads = torch.randn(1, 4, 5, 6), []
    for limit in (256, 8):  # heads have 16 channels
        monkeypatch.setattr(module, "MAX_FUSED_HEAD", limit)
        use_wide_head_attention(vae)
        leaf = latents.clone().requires_grad_()
        vae.decode(leaf).sample.square().mean().backward()
        grads.append(leaf.grad)
    assert isinstance(vae.decoder.mid_block.attentions[0].processor, WideHeadProcessor)
    assert calls == [1, 1]  # the second one when the decoder is recomputed
    torch.testing.assert_close(grads[0], grads[1])
    with torch.no_grad():
        vae.decode(latents)
    assert calls == [1, 1]
    assert warnings == []  # diffusers warns of arguments that the signature of a processor does not name
