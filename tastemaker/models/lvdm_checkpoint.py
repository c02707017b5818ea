"""Checkpoints of VideoCrafter, all parts in one file under its authors' names: read here, and written again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.registry import ConfigError
from .loading import abbreviate_keys, unwrap_state_dict
from .pipeline_components import silence_libraries
from .pipeline_layout import RESNET_KEYS, KeyRules, rename_and_concat
from .safe_unpickling import load_pickle

UNET_PREFIX, VAE_PREFIX, TEXT_ENCODER_PREFIX = "model.diffusion_model.", "first_stage_model.", "cond_stage_model.model."
WRAPPERS = ("state_dict", "module")  # of Lightning and of DeepSpeed
DEEPSPEED_PREFIX = "_forward_module."
POINTWISE = re.compile(r"init_attn\.0\.proj_(in|out)\.weight")  # convolutions over time there, matrices here
IGNORED_TEXT_KEYS = ("text_projection", "logit_scale", "attn_mask")  # of the text encoder, whose words alone are used
TEXT_LAYER_KEYS = (
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)  # open_clip's names in a block, and transformers'
Tensors = dict[str, Tensor]


def read_lvdm_checkpoint(path: Path) -> Tensors:
    """All tensors of a model.ckpt; they stay in the file until they are used."""
    found = unwrap_state_dict(load_pickle(path), path, WRAPPERS)
    found = {key.removeprefix(DEEPSPEED_PREFIX): x for key, x in found.items()}
    lost = [
        part
        for part in (UNET_PREFIX, VAE_PREFIX, TEXT_ENCODER_PREFIX)
        if not any(key.startswith(part) for key in found)
    ]
    if lost:
        raise ConfigError(
            f"{path} is no checkpoint of VideoCrafter: nothing in it begins with '{lost[0]}'; "
            "name its model.ckpt, or a folder in diffusers' layout"
        )
    return found


def select_component(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def unet_key_rules(config: Mapping[str, Any]) -> KeyRules:
    """The names of a network of such settings, diffusers' and the authors', block by block."""
    layers, attended = int(config["layers_per_block"]), [kind.startswith("Cross") for kind in config["up_block_types"]]
    found = [
        *((rf"{ours}\.linear_{n + 1}\.", f"{theirs}.{2 * n}.") for ours, theirs in TIME_EMBEDDING_KEYS for n in (0, 1)),
        (r"conv_in\.", "input_blocks.0.0."),
        (r"transformer_in\.", "init_attn.0."),
        (r"conv_norm_out\.", "out.0."),
        (r"conv_out\.", "out.2."),
        *_block(r"mid_block\.(?:resnets|temp_convs)\.1", "middle_block.3"),
        *_column("mid_block", 0, ("middle_block.0", "middle_block.1", "middle_block.2")),
    ]
    for i, words in enumerate(attended):
        first, up = i * (layers + 1), f"output_blocks.{i * (layers + 1) + layers}"
        found += [(rf"down_blocks\.{i}\.downsamplers\.0\.conv\.", f"input_blocks.{first + layers + 1}.0.op.")]
        found += [(rf"up_blocks\.{i}\.upsamplers\.0\.conv\.", f"{up}.{3 if words else 1}.conv.")]
        for j in range(layers + 1):
            for ours, theirs in (("down", f"input_blocks.{first + j + 1}"), ("up", f"output_blocks.{first + j}")):
                found += _column(rf"{ours}_blocks\.{i}", j, (f"{theirs}.0", f"{theirs}.1", f"{theirs}.2"))
    return tuple(found)


TIME_EMBEDDING_KEYS = (("time_embedding", "time_embed"), ("fps_embedding", "fps_embedding"))


def _block(ours: str, theirs: str) -> list[tuple[str, str]]:
    """A residual block; the convolutions over time that follow it lie inside it, under a misspelt name."""
    return [
        *((rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in RESNET_KEYS if a not in ("conv1", "conv2")),
        (rf"{ours}\.conv([1-4])\.(\d)\.", rf"{theirs}.temopral_conv.conv\1.\2."),
        *((rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in RESNET_KEYS if a in ("conv1", "conv2")),
    ]


def _column(ours: str, j: int, theirs: Sequence[str]) -> list[tuple[str, str]]:
    """A residual block, attention within frames, attention over them."""
    return [
        *_block(rf"{ours}\.(?:resnets|temp_convs)\.{j}", theirs[0]),
        (rf"{ours}\.attentions\.{j}\.", f"{theirs[1]}."),
        (rf"{ours}\.temp_attentions\.{j}\.", f"{theirs[2]}."),
    ]


def unet_to_original(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensors:
    """The network under its authors' names, as they publish it."""
    theirs = rename_and_concat(tensors, unet_key_rules(config))
    return {key: x[..., None] if POINTWISE.fullmatch(key) else x for key, x in theirs.items()}


def original_names(keys: Sequence[str], config: Mapping[str, Any]) -> dict[str, str]:
    """What the authors call tensors, or layers, of the network: by their names, ours."""
    found = unet_key_rules(config)
    return {next(new for a, b in found for new, hit in [re.subn(f"^{a}", b, key)] if hit): key for key in keys}


def original_lora_layers(own: Sequence[str], net: Any) -> dict[str, str]:
    """Layers of the network, as adapters trained by VADER name them."""
    found = original_names([f"{name}." for name in own], net.config)
    return {UNET_PREFIX + theirs[:-1]: ours[:-1] for theirs, ours in found.items()}


def unet_to_diffusers(tensors: Mapping[str, Tensor], keys: Sequence[str], config: Mapping[str, Any]) -> Tensors:
    """The network under diffusers' names; `keys` are those it has."""
    known = original_names(keys, config)
    unknown = [key for key in tensors if key not in known]
    if unknown:
        raise ConfigError(
            f"the checkpoint has {abbreviate_keys(unknown)}, unknown to this network; name the model it is of"
        )
    return {known[key]: x[..., 0] if POINTWISE.fullmatch(key) else x for key, x in tensors.items()}


def convert_unet(tensors: Mapping[str, Tensor], net: Any) -> Tensors:
    """The network under diffusers' names, whichever it has in its file."""
    found = select_component(tensors, UNET_PREFIX) or dict(tensors)
    if any(key.startswith("input_blocks.") for key in found):
        return unet_to_diffusers(found, list(net.state_dict()), net.config)
    return {key.removeprefix("unet."): x for key, x in found.items()}


def vae_to_diffusers(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensors:
    """The autoencoder under diffusers' names, which differ as Stable Diffusion's do."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    with silence_libraries():
        return dict(convert_ldm_vae_checkpoint(dict(tensors), dict(config)))  # type: ignore[no-untyped-call]


def text_encoder_to_transformers(tensors: Mapping[str, Tensor], layers: int) -> Tensors:
    """Open_clip's text encoder under transformers' names, its first `layers` blocks: the last one is not used."""
    ours: Tensors = {}
    for key, x in tensors.items():
        block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", key)
        if block is not None and int(block[1]) < layers:
            ours |= {f"encoder.layers.{block[1]}.{name}": y for name, y in _layer(block[2], x).items()}
        elif block is None and key not in IGNORED_TEXT_KEYS:
            ours[TEXT_OUTER_KEYS.get(key, key)] = x
    return ours


TEXT_OUTER_KEYS = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}


def _layer(name: str, x: Tensor) -> Tensors:
    if name.startswith("attn.in_proj_"):
        kind = name.removeprefix("attn.in_proj_")
        return {f"self_attn.{each}_proj.{kind}": y for each, y in zip("qkv", x.chunk(3), strict=True)}
    theirs, _, kind = name.rpartition(".")
    return {f"{dict(TEXT_LAYER_KEYS).get(theirs, theirs)}.{kind}": x}
