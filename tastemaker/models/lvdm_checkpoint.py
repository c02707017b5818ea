"""VideoCrafter's checkpoints (LVDM): UNet, VAE and text encoder in one file, converted to diffusers' keys and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.model_spec import Tensors
from ..core.registry import ConfigError
from .checkpoint_keys import KeyRules, rename_and_concat
from .loading import abbreviate_keys
from .pretrained import silence_libraries, unwrap_state_dict
from .restricted_unpickler import load_trainer_pickle
from .sd15 import RESNET_KEYS

UNET_PREFIX, VAE_PREFIX, TEXT_ENCODER_PREFIX = "model.diffusion_model.", "first_stage_model.", "cond_stage_model.model."
WRAPPERS = ("state_dict", "module")  # of Lightning and of DeepSpeed
DEEPSPEED_PREFIX = "_forward_module."
POINTWISE_CONV = re.compile(r"init_attn\.0\.proj_(in|out)\.weight")  # 1x1 convolutions there, linear layers here
TIME_EMBEDDING_KEYS = (("time_embedding", "time_embed"), ("fps_embedding", "fps_embedding"))
UNUSED_TEXT_KEYS = ("text_projection", "logit_scale", "attn_mask")
TEXT_KEYS = {  # open_clip's names outside of the blocks, and transformers'
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
TEXT_BLOCK_KEYS = {  # open_clip's names in a block, and transformers'
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def read_lvdm_checkpoint(path: Path) -> Tensors:
    """Read a model.ckpt; its tensors stay mapped from the file until they are copied."""
    wrapped = unwrap_state_dict(load_trainer_pickle(path), path, WRAPPERS)
    tensors = {key.removeprefix(DEEPSPEED_PREFIX): x for key, x in wrapped.items()}
    for prefix in (UNET_PREFIX, VAE_PREFIX, TEXT_ENCODER_PREFIX):
        if not any(key.startswith(prefix) for key in tensors):
            raise ConfigError(
                f"{path} is not a checkpoint of VideoCrafter, because no key begins with '{prefix}'; give its "
                "model.ckpt, or a folder in diffusers' layout [TM466]"
            )
    return tensors


def select_component(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors of one component, without its prefix."""
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def unet_key_rules(config: Mapping[str, Any]) -> KeyRules:
    """Return rules from diffusers' UNet keys to the authors', for a UNet of these settings."""
    layers, attends = int(config["layers_per_block"]), [name.startswith("Cross") for name in config["up_block_types"]]
    rules = [
        *((rf"{ours}\.linear_{n + 1}\.", f"{theirs}.{2 * n}.") for ours, theirs in TIME_EMBEDDING_KEYS for n in (0, 1)),
        (r"conv_in\.", "input_blocks.0.0."),
        (r"transformer_in\.", "init_attn.0."),
        (r"conv_norm_out\.", "out.0."),
        (r"conv_out\.", "out.2."),
        *_resnet_rules(r"mid_block\.(?:resnets|temp_convs)\.1", "middle_block.3"),
        *_layer_rules("mid_block", 0, ("middle_block.0", "middle_block.1", "middle_block.2")),
    ]
    for i, has_attention in enumerate(attends):
        first, up = i * (layers + 1), f"output_blocks.{i * (layers + 1) + layers}"
        rules += [(rf"down_blocks\.{i}\.downsamplers\.0\.conv\.", f"input_blocks.{first + layers + 1}.0.op.")]
        rules += [(rf"up_blocks\.{i}\.upsamplers\.0\.conv\.", f"{up}.{3 if has_attention else 1}.conv.")]
        for j in range(layers + 1):
            for ours, theirs in (("down", f"input_blocks.{first + j + 1}"), ("up", f"output_blocks.{first + j}")):
                rules += _layer_rules(rf"{ours}_blocks\.{i}", j, (f"{theirs}.0", f"{theirs}.1", f"{theirs}.2"))
    return tuple(rules)


def _resnet_rules(ours: str, theirs: str) -> list[tuple[str, str]]:
    """Rules of a residual block; its temporal convolutions are inside it there, under a misspelt name."""
    convs = [pair for pair in RESNET_KEYS if pair[0] in ("conv1", "conv2")]
    others = [pair for pair in RESNET_KEYS if pair not in convs]
    return [
        *((rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in others),
        (rf"{ours}\.conv([1-4])\.(\d)\.", rf"{theirs}.temopral_conv.conv\1.\2."),
        *((rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in convs),
    ]


def _layer_rules(ours: str, j: int, theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Rules of a residual block, its spatial attention and its temporal attention."""
    return [
        *_resnet_rules(rf"{ours}\.(?:resnets|temp_convs)\.{j}", theirs[0]),
        (rf"{ours}\.attentions\.{j}\.", f"{theirs[1]}."),
        (rf"{ours}\.temp_attentions\.{j}\.", f"{theirs[2]}."),
    ]


def unet_to_original(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensors:
    """Rename a UNet's tensors from diffusers' keys to the authors'."""
    renamed = rename_and_concat(tensors, unet_key_rules(config))
    return {key: x[..., None] if POINTWISE_CONV.fullmatch(key) else x for key, x in renamed.items()}


def original_names(keys: Sequence[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return diffusers' keys (of tensors or layers) by the authors' keys."""
    rules = unet_key_rules(config)
    return {next(new for a, b in rules for new, hit in [re.subn(f"^{a}", b, key)] if hit): key for key in keys}


def original_lora_layers(layers: Sequence[str], net: Any) -> dict[str, str]:
    """Return layer names of the network by the names that LoRA files of VADER have for them."""
    names = original_names([f"{layer}." for layer in layers], net.config)
    return {UNET_PREFIX + theirs[:-1]: ours[:-1] for theirs, ours in names.items()}


def unet_to_diffusers(tensors: Mapping[str, Tensor], keys: Sequence[str], config: Mapping[str, Any]) -> Tensors:
    """Rename a UNet's tensors from the authors' keys to diffusers'; `keys` are those of the network."""
    names = original_names(keys, config)
    unknown = [key for key in tensors if key not in names]
    if unknown:
        raise ConfigError(
            f"the checkpoint contains {abbreviate_keys(unknown)}, which this network does not have; set "
            "model.type to the model of this checkpoint [TM467]"
        )
    return {names[key]: x[..., 0] if POINTWISE_CONV.fullmatch(key) else x for key, x in tensors.items()}


def convert_unet(tensors: Mapping[str, Tensor], net: Any) -> Tensors:
    """Return a UNet's tensors with diffusers' keys, from a file with either layout or a full checkpoint."""
    unet = select_component(tensors, UNET_PREFIX) or dict(tensors)
    if any(key.startswith("input_blocks.") for key in unet):
        return unet_to_diffusers(unet, list(net.state_dict()), net.config)
    return {key.removeprefix("unet."): x for key, x in unet.items()}


def vae_to_diffusers(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensors:
    """Rename the VAE's tensors to diffusers' keys, as those of Stable Diffusion's VAE."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    with silence_libraries():
        return dict(convert_ldm_vae_checkpoint(dict(tensors), dict(config)))  # type: ignore[no-untyped-call]


def text_encoder_to_transformers(tensors: Mapping[str, Tensor], num_layers: int) -> Tensors:
    """Rename open_clip's text encoder to transformers' keys, its first `num_layers` blocks: the last is not used."""
    renamed: Tensors = {}
    for key, x in tensors.items():
        block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", key)
        if block is not None and int(block[1]) < num_layers:
            renamed |= {f"encoder.layers.{block[1]}.{name}": y for name, y in _rename_text_block(block[2], x).items()}
        elif block is None and key not in UNUSED_TEXT_KEYS:
            renamed[TEXT_KEYS.get(key, key)] = x
    return renamed


def _rename_text_block(name: str, x: Tensor) -> Tensors:
    layer, _, kind = name.rpartition(".")
    if name.startswith("attn.in_proj_"):  # queries, keys and values in one tensor
        kind = name.removeprefix("attn.in_proj_")
        return {f"self_attn.{letter}_proj.{kind}": y for letter, y in zip("qkv", x.chunk(3), strict=True)}
    return {f"{TEXT_BLOCK_KEYS.get(layer, layer)}.{kind}": x}
