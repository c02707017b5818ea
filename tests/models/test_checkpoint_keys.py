"""Conversion to the original checkpoint keys, inverted by diffusers' converters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.loaders import single_file_utils
from torch import Tensor

from tastemaker.core.model_spec import Tensors
from tastemaker.models import flux, sd3, sd15, sdxl

diffusers_converters: Any = single_file_utils


def random_state_dict(model_class: Any, config: Mapping[str, Any]) -> Tensors:
    """Random tensors with the keys and first dimensions of a network; other dimensions are 1 to save memory."""
    with torch.device("meta"):
        state_dict = model_class(**config).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(x.shape[0], *[1] * (x.ndim - 1), generator=generator) for key, x in state_dict.items()}


def are_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return set(actual) == set(expected) and all(x.equal(expected[key]) for key, x in actual.items())


@pytest.mark.parametrize("distilled", [True, False], ids=["dev", "schnell"])
def test_flux_original_keys_round_trip(distilled: bool) -> None:
    config = {"num_layers": 2, "num_single_layers": 3, "guidance_embeds": distilled}  # with full width
    tensors = random_state_dict(FluxTransformer2DModel, config)
    original = flux.flux_to_original(tensors, config)
    assert original["double_blocks.1.img_attn.qkv.weight"].shape[0] == 3 * 3072
    assert original["single_blocks.2.linear1.bias"].shape[0] == 7 * 3072
    assert are_equal(diffusers_converters.convert_flux_transformer_checkpoint_to_diffusers(dict(original)), tensors)


@pytest.mark.parametrize("changes", [{}, {"dual_attention_layers": (), "qk_norm": None}], ids=["3.5", "3"])
def test_sd3_original_keys_round_trip(changes: dict[str, Any]) -> None:
    config = {**sd3.TINY_CONFIGS["transformer"], "num_layers": 3, **changes}
    with torch.device("meta"):
        state_dict = SD3Transformer2DModel(**config).state_dict()
    generator = torch.Generator().manual_seed(0)
    tensors = {key: torch.randn(x.shape, generator=generator) for key, x in state_dict.items()}
    assert are_equal(
        diffusers_converters.convert_sd3_transformer_checkpoint_to_diffusers(sd3.sd3_to_original(tensors, config)),
        tensors,
    )


STAGES = {"block_out_channels": (32, 64, 64), "layers_per_block": 2, "norm_num_groups": 8}
LIKE_SD15 = {
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}
LIKE_SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 3),
    "use_linear_projection": True,
}


@pytest.mark.parametrize(
    "config",
    [
        sd15.TINY_CONFIGS["unet"],
        sdxl.TINY_CONFIGS["unet"],
        {**sd15.TINY_CONFIGS["unet"], **STAGES, **LIKE_SD15},
        {**sdxl.TINY_CONFIGS["unet"], **STAGES, **LIKE_SDXL},
    ],
    ids=["tiny sd15", "tiny sdxl", "sd15", "sdxl"],
)
def test_unet_original_keys_round_trip(config: dict[str, Any]) -> None:
    tensors = random_state_dict(UNet2DConditionModel, config)
    full_config = dict(UNet2DConditionModel(**config).config)
    original = {f"model.diffusion_model.{key}": x for key, x in sd15.sd_unet_to_original(tensors, full_config).items()}
    assert are_equal(diffusers_converters.convert_ldm_unet_checkpoint(original, full_config), tensors)


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'strange'.*TM420"):
        flux.flux_to_original({"strange": torch.zeros(1)}, {})
