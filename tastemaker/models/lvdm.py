"""Checkpoints of VideoCrafter, all parts in one file under its authors' names: read here, and written again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..registry import ConfigError
from .checkpoints import few, unwrapped
from .layouts import INNER, Rules, gathered
from .published import silence
from .unpickling import document

UNET, VAE, TEXT = "model.diffusion_model.", "first_stage_model.", "cond_stage_model.model."
WRAPPERS = ("state_dict", "module")  # of Lightning and of DeepSpeed
DEEPSPEED = "_forward_module."
POINTWISE = re.compile(r"init_attn\.0\.proj_(in|out)\.weight")  # convolutions over time there, matrices here
UNREAD = ("text_projection", "logit_scale", "attn_mask")  # of the text encoder, whose words alone are used
LAYERS = (
    ("ln_1", "layer_norm1"),
    ("ln_2", "layer_norm2"),
    ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"),
    ("mlp.c_proj", "mlp.fc2"),
)  # open_clip's names in a block, and transformers'
Tensors = dict[str, Tensor]


def read(path: Path) -> Tensors:
    """All tensors of a model.ckpt; they stay in the file until they are used."""
    found = unwrapped(document(path), path, WRAPPERS)
    found = {key.removeprefix(DEEPSPEED): x for key, x in found.items()}
    lost = [part for part in (UNET, VAE, TEXT) if not any(key.startswith(part) for key in found)]
    if lost:
        raise ConfigError(
            f"{path} is no checkpoint of VideoCrafter: nothing in it begins with '{lost[0]}'; "
            "name its model.ckpt, or a folder in diffusers' layout"
        )
    return found


def part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def rules(config: Mapping[str, Any]) -> Rules:
    """The names of a network of such settings, diffusers' and the authors', block by block."""
    layers, attended = int(config["layers_per_block"]), [kind.startswith("Cross") for kind in config["up_block_types"]]
    found = [
        *((rf"{ours}\.linear_{n + 1}\.", f"{theirs}.{2 * n}.") for ours, theirs in EMBEDDINGS for n in (0, 1)),
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


EMBEDDINGS = (("time_embedding", "time_embed"), ("fps_embedding", "fps_embedding"))


def _block(ours: str, theirs: str) -> list[tuple[str, str]]:
    """A residual block; the convolutions over time that follow it lie inside it, under a misspelt name."""
    return [
        *((rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in INNER if a not in ("conv1", "conv2")),
        (rf"{ours}\.conv([1-4])\.(\d)\.", rf"{theirs}.temopral_conv.conv\1.\2."),
        *((rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in INNER if a in ("conv1", "conv2")),
    ]


def _column(ours: str, j: int, theirs: Sequence[str]) -> list[tuple[str, str]]:
    """A residual block, attention within frames, attention over them."""
    return [
        *_block(rf"{ours}\.(?:resnets|temp_convs)\.{j}", theirs[0]),
        (rf"{ours}\.attentions\.{j}\.", f"{theirs[1]}."),
        (rf"{ours}\.temp_attentions\.{j}\.", f"{theirs[2]}."),
    ]


def authors(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensors:
    """The network under its authors' names, as they publish it."""
    theirs = gathered(tensors, rules(config))
    return {key: x[..., None] if POINTWISE.fullmatch(key) else x for key, x in theirs.items()}


def names(keys: Sequence[str], config: Mapping[str, Any]) -> dict[str, str]:
    """What the authors call tensors, or layers, of the network: by their names, ours."""
    found = rules(config)
    return {next(new for a, b in found for new, hit in [re.subn(f"^{a}", b, key)] if hit): key for key in keys}


def layers(own: Sequence[str], net: Any) -> dict[str, str]:
    """Layers of the network, as adapters trained by VADER name them."""
    found = names([f"{name}." for name in own], net.config)
    return {UNET + theirs[:-1]: ours[:-1] for theirs, ours in found.items()}


def unet(tensors: Mapping[str, Tensor], keys: Sequence[str], config: Mapping[str, Any]) -> Tensors:
    """The network under diffusers' names; `keys` are those it has."""
    known = names(keys, config)
    unknown = [key for key in tensors if key not in known]
    if unknown:
        raise ConfigError(f"the checkpoint has {few(unknown)}, unknown to this network; name the model it is of")
    return {known[key]: x[..., 0] if POINTWISE.fullmatch(key) else x for key, x in tensors.items()}


def translated(tensors: Mapping[str, Tensor], net: Any) -> Tensors:
    """The network under diffusers' names, whichever it has in its file."""
    found = part(tensors, UNET) or dict(tensors)
    if any(key.startswith("input_blocks.") for key in found):
        return unet(found, list(net.state_dict()), net.config)
    return {key.removeprefix("unet."): x for key, x in found.items()}


def vae(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensors:
    """The autoencoder under diffusers' names, which differ as Stable Diffusion's do."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    with silence():
        return dict(convert_ldm_vae_checkpoint(dict(tensors), dict(config)))  # type: ignore[no-untyped-call]


def text(tensors: Mapping[str, Tensor], layers: int) -> Tensors:
    """Open_clip's text encoder under transformers' names, its first `layers` blocks: the last one is not used."""
    ours: Tensors = {}
    for key, x in tensors.items():
        block = re.fullmatch(r"transformer\.resblocks\.(\d+)\.(.+)", key)
        if block is not None and int(block[1]) < layers:
            ours |= {f"encoder.layers.{block[1]}.{name}": y for name, y in _layer(block[2], x).items()}
        elif block is None and key not in UNREAD:
            ours[OUTER.get(key, key)] = x
    return ours


OUTER = {
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
    return {f"{dict(LAYERS).get(theirs, theirs)}.{kind}": x}
