"""Names of LoRA layers in ComfyUI files, against the layers that ComfyUI's loader knows for each network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tastemaker.core.lora import Lora
from tastemaker.core.model_spec import ModelSpec
from tastemaker.core.types import Placement
from tastemaker.export.lora import LoraFromFile, write_comfyui_lora
from tastemaker.models.flux2 import Flux2Spec
from tastemaker.models.z_image import ZImageSpec

# Per network: the prefix under which ComfyUI has diffusers' names with underscores, and the layers of each stack of
# blocks that it maps to its own (`flux_to_diffusers`, `z_image_to_diffusers`).
Z_IMAGE_BLOCK = "attention_to_q attention_to_k attention_to_v attention_to_out_0 feed_forward_w1 feed_forward_w2"
Z_IMAGE_BLOCK += " feed_forward_w3"
FLUX2_BLOCK = "attn_to_q attn_to_k attn_to_v attn_add_q_proj attn_add_k_proj attn_add_v_proj attn_to_out_0"
FLUX2_BLOCK += " attn_to_add_out ff_linear_in ff_linear_out ff_context_linear_in ff_context_linear_out"
PUBLISHED = {
    "z_image": (
        ZImageSpec(),
        "lycoris",
        {"layers": Z_IMAGE_BLOCK, "noise_refiner": Z_IMAGE_BLOCK, "context_refiner": Z_IMAGE_BLOCK},
    ),
    "flux2": (
        Flux2Spec(),
        "lora_transformer",
        {"transformer_blocks": FLUX2_BLOCK, "single_transformer_blocks": "attn_to_qkv_mlp_proj attn_to_out"},
    ),
}


@pytest.mark.parametrize("name", ["z_image", pytest.param("flux2", marks=pytest.mark.slow)])
def test_comfyui_file_has_the_names_that_its_loader_knows(name: str, tmp_path: Path) -> None:
    spec: ModelSpec
    spec, prefix, blocks = PUBLISHED[name]
    spec = spec.tiny()
    assert spec.layout is not None
    weights = Lora(rank=2).apply(spec.load(Placement()), ())
    with torch.no_grad():
        for number, p in enumerate(weights.trainable().values()):
            p.normal_(generator=torch.Generator().manual_seed(number))
    file = tmp_path / "lora.safetensors"
    write_comfyui_lora(weights, spec.layout, file, torch.float32)
    layers = {key.partition(".")[0] for key in load_file(file)}
    known = {f"{prefix}_{stack}_{i}_{layer}" for stack in blocks for i in range(9) for layer in blocks[stack].split()}
    assert layers and layers <= known, sorted(layers - known)
    assert {f"{prefix}_{stack}_0_{layer}" for stack in blocks for layer in blocks[stack].split()} <= layers
    read = LoraFromFile(file, spec.layout).apply(spec.load(Placement()), ())
    assert all(x.equal(read.trainable()[key]) for key, x in weights.trainable().items())
