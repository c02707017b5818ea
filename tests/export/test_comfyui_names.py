"""Names of LoRA layers in ComfyUI files, against the layers that ComfyUI's loader knows for each network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file
from tiers import fast
from torch import Tensor

from tastemaker.config.registries import MODELS
from tastemaker.core.lora import Lora, LoraWeights
from tastemaker.core.model_spec import ModelSpec
from tastemaker.core.types import Placement
from tastemaker.export.lora import LORA_A, LORA_B, LoraFactors, LoraFromFile, join_fused_layers, write_comfyui_lora
from tastemaker.models.flux2 import Flux2Spec
from tastemaker.models.hunyuanvideo15 import HunyuanVideo15Spec
from tastemaker.models.video_checkpoint_keys import hunyuanvideo_comfyui_layer
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


def random_lora(model: Any, tuning: Lora) -> LoraWeights:
    weights = tuning.apply(model, ())
    assert isinstance(weights, LoraWeights)
    with torch.no_grad():
        for number, p in enumerate(weights.trainable().values()):
            p.normal_(generator=torch.Generator().manual_seed(number))
    return weights


@pytest.mark.parametrize("name", ["z_image", pytest.param("flux2", marks=pytest.mark.slow)])
def test_comfyui_file_has_the_names_that_its_loader_knows(name: str, tmp_path: Path) -> None:
    spec: ModelSpec
    spec, prefix, blocks = PUBLISHED[name]
    spec = spec.tiny()
    assert spec.layout is not None
    weights = random_lora(spec.load(Placement()), Lora(rank=2))
    file = tmp_path / "lora.safetensors"
    write_comfyui_lora(weights, spec.layout, file, torch.float32)
    layers = {key.partition(".")[0] for key in load_file(file)}
    known = {f"{prefix}_{stack}_{i}_{layer}" for stack in blocks for i in range(9) for layer in blocks[stack].split()}
    assert layers and layers <= known, sorted(layers - known)
    assert {f"{prefix}_{stack}_0_{layer}" for stack in blocks for layer in blocks[stack].split()} <= layers
    read = LoraFromFile(file, spec.layout).apply(spec.load(Placement()), ())
    assert all(x.equal(read.trainable()[key]) for key, x in weights.trainable().items())


# Networks of which ComfyUI's has the authors' layers: diffusers' reader of their files, and an adapted layer of each.
# None if diffusers reads files of the published size only; then the conversion of weights takes the reader's place.
# Qwen-Image is published with diffusers' names.
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
AUTHORS: dict[str, tuple[Convert | None, str]] = {
    "wan": (single_file_utils.convert_wan_transformer_to_diffusers, "blocks_0_cross_attn_o"),
    "wan_i2v": (single_file_utils.convert_wan_transformer_to_diffusers, "blocks_0_cross_attn_v_img"),
    "ltx": (single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers, "transformer_blocks_0_attn1_to_out_0"),
    "ltx2": (
        single_file_utils.convert_ltx2_transformer_to_diffusers,
        "transformer_blocks_1_audio_to_video_attn_to_q",
    ),
    "qwen_image": (dict, "transformer_blocks_0_attn_add_q_proj"),
    "qwen_image_21": (
        single_file_utils.convert_qwen_image21_transformer_checkpoint_to_diffusers,
        "transformer_blocks_0_img_mlp_gate_up",
    ),
    "mochi": (None, "blocks_0_attn_qkv_x"),
    "hunyuanvideo": (None, "single_blocks_0_linear1"),
    "hunyuanvideo15": (None, "double_blocks_0_txt_attn_qkv"),
}


@pytest.mark.parametrize("name", fast(AUTHORS, "mochi"))
def test_comfyui_adapters_change_the_authors_weights_as_ours_change_diffusers(name: str, tmp_path: Path) -> None:
    convert, example = AUTHORS[name]
    spec: Any = MODELS.find(name, "model")().tiny()
    layout, model = spec.layout, spec.load(Placement())
    zeros = {key: torch.zeros_like(x) for key, x in model.net.state_dict().items()}
    weights = random_lora(model, Lora(rank=2, alpha=6, target_modules="all-linear"))
    write_comfyui_lora(weights, layout, tmp_path / "lora.safetensors", torch.float32)
    ours, parameters = dict(zeros), weights.trainable()
    for layer in (key.removesuffix(LORA_A) for key in parameters if key.endswith(LORA_A)):
        ours[f"{layer}.weight"] = 3 * (parameters[layer + LORA_B] @ parameters[layer + LORA_A]).detach()

    authors, keys = layout.to_original(zeros, {}), {}
    for key in authors:
        layer = key.removesuffix(".weight")
        keys[f"lora_unet_{layout.comfyui_layer(layer) if layout.comfyui_layer else layer}".replace(".", "_")] = key
    tensors = load_file(tmp_path / "lora.safetensors")
    assert f"lora_unet_{example}.lora_up.weight" in tensors
    for layer in {key.partition(".")[0] for key in tensors}:
        up, down, alpha = (tensors[f"{layer}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
        authors[keys[layer]] = alpha / len(down) * (up @ down)
    actual, expected = (authors, layout.to_original(ours, {})) if convert is None else (convert(authors), ours)
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(actual[key], x, atol=1e-5, rtol=1e-5, msg=key)


def test_fused_layers_keep_the_product_of_each_adapter() -> None:
    layout = MODELS.find("mochi", "model")().layout
    generator = torch.Generator().manual_seed(0)
    names = [f"transformer_blocks.0.attn1.to_{x}" for x in "vq"]  # no adapter of the keys
    adapters = {
        name: LoraFactors(*(torch.randn(shape, generator=generator) for shape in ((2, 6), (5, 2))), alpha=3.0)
        for name in names
    }
    sizes = dict.fromkeys([*names, "transformer_blocks.0.attn1.to_k"], 5)
    ((name, joined),) = join_fused_layers(adapters, sizes, layout).items()
    assert name == "blocks.0.attn.qkv_x" and (joined.down.shape, joined.up.shape) == ((4, 6), (15, 4))
    v, q = (1.5 * adapters[name].up @ adapters[name].down for name in names)
    product = joined.alpha / 4 * joined.up @ joined.down
    torch.testing.assert_close(product, torch.cat([q, torch.zeros(5, 6), v]), atol=1e-6, rtol=0)


REFINER = "txt_in.individual_token_refiner.blocks"


@pytest.mark.parametrize(
    ("authors", "comfyui"),
    [
        ("double_blocks.3.img_attn_qkv", "double_blocks.3.img_attn.qkv"),
        ("double_blocks.3.txt_attn_proj", "double_blocks.3.txt_attn.proj"),
        ("double_blocks.3.txt_mod.linear", "double_blocks.3.txt_mod.lin"),
        ("double_blocks.3.img_mlp.fc2", "double_blocks.3.img_mlp.2"),
        ("single_blocks.3.modulation.linear", "single_blocks.3.modulation.lin"),
        ("single_blocks.3.linear1", "single_blocks.3.linear1"),
        ("time_in.mlp.0", "time_in.in_layer"),
        ("txt_in.t_embedder.mlp.2", "txt_in.t_embedder.out_layer"),
        ("txt_in.c_embedder.linear_1", "txt_in.c_embedder.in_layer"),
        (f"{REFINER}.0.self_attn_qkv", f"{REFINER}.0.self_attn.qkv"),
        ("final_layer.linear", "final_layer.linear"),
    ],
)  # fmt: skip
def test_names_of_hunyuanvideo_in_comfyui(authors: str, comfyui: str) -> None:
    assert hunyuanvideo_comfyui_layer(authors) == comfyui


# Layers of ComfyUI's network of HunyuanVideo 1.5, of which its loader makes the names of adapters, and their inputs
# and outputs in multiples of the network's width.
HUNYUANVIDEO15_BLOCK = {
    f"{stream}_{layer}": sizes
    for stream in ("img", "txt")
    for layer, sizes in {
        "attn.qkv": (1, 3),
        "attn.proj": (1, 1),
        "mlp.0": (1, 2),  # 4 in the published network
        "mlp.2": (2, 1),
        "mod.lin": (1, 6),
    }.items()
}
HUNYUANVIDEO15_REFINER = ("self_attn.qkv", "self_attn.proj", "mlp.0", "mlp.2", "adaLN_modulation.1")
HUNYUANVIDEO15_OTHERS = (
    *(
        f"{name}.{layer}_layer"
        for name in ("time_in", "txt_in.t_embedder", "txt_in.c_embedder")
        for layer in ("in", "out")
    ),
    *(f"byt5_in.fc{number}" for number in (1, 2, 3)),
    *("txt_in.input_embedder", "vision_in.proj.1", "vision_in.proj.3", "final_layer.linear"),
    "final_layer.adaLN_modulation.1",
)


def test_adapters_of_hunyuanvideo15_have_the_names_and_sizes_of_comfyuis_layers(tmp_path: Path) -> None:
    spec = HunyuanVideo15Spec().tiny()
    model: Any = spec.load(Placement())
    weights = random_lora(model, Lora(rank=2, target_modules="all-linear"))
    write_comfyui_lora(weights, spec.layout, tmp_path / "lora.safetensors", torch.float32)
    tensors = load_file(tmp_path / "lora.safetensors")
    blocks = len(model.net.transformer_blocks)
    refiners = len(model.net.context_embedder.token_refiner.refiner_blocks)
    known = {
        f"double_blocks.{i}.{layer}": sizes for i in range(blocks) for layer, sizes in HUNYUANVIDEO15_BLOCK.items()
    }
    others = {f"{REFINER}.{i}.{layer}" for i in range(refiners) for layer in HUNYUANVIDEO15_REFINER}
    names = {f"lora_unet_{layer}".replace(".", "_"): layer for layer in (*known, *others, *HUNYUANVIDEO15_OTHERS)}
    assert {key.partition(".")[0] for key in tensors} == names.keys()
    width = model.net.config.num_attention_heads * model.net.config.attention_head_dim
    for name, layer in names.items():
        if layer in known:
            shapes = (tensors[f"{name}.lora_down.weight"].shape[1], tensors[f"{name}.lora_up.weight"].shape[0])
            assert shapes == tuple(width * times for times in known[layer]), layer
    up, layer = tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"], "transformer_blocks.0.attn.to_"
    for number, part in enumerate("qkv"):  # block-diagonal, in this order
        own = up[width * number : width * (number + 1)]
        torch.testing.assert_close(own[:, 2 * number : 2 * number + 2], weights.trainable()[layer + part + LORA_B].data)
        assert own.count_nonzero() == 2 * width


def test_network_of_hunyuanvideo15_has_the_names_by_which_comfyui_recognizes_it() -> None:
    spec = HunyuanVideo15Spec().tiny()
    model: Any = spec.load(Placement())
    tensors = spec.layout.to_original(model.net.state_dict(), {})
    width = model.net.config.num_attention_heads * model.net.config.attention_head_dim
    assert tensors["double_blocks.0.img_attn_qkv.weight"].shape == (3 * width, width)
    recognized = {"img_in.proj.weight", "byt5_in.fc1.weight", "vision_in.proj.0.weight", "cond_type_embedding.weight"}
    recognized |= {f"{REFINER}.0.norm1.weight", "txt_in.input_embedder.weight", "final_layer.linear.weight"}
    renamed = {"double_blocks.0.txt_attn_k_norm.weight", "txt_in.t_embedder.mlp.2.bias", "time_in.mlp.0.weight"}
    assert recognized | renamed | {"byt5_in.layernorm.bias", "vision_in.proj.4.weight"} <= tensors.keys()
    assert not any(key.startswith(("vector_in.", "guidance_in.", "single_blocks.")) for key in tensors)  # those of 1
    swapped = tensors["final_layer.adaLN_modulation.1.bias"].chunk(2)
    torch.testing.assert_close(torch.cat(swapped[::-1]), model.net.norm_out.linear.bias.data)
