"""How a model maps to diffusers: pipeline class, trained component, and the original checkpoint keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.registry import ConfigError

Tensors = dict[str, Tensor]
TensorShapes = Mapping[str, torch.Size]  # of tensors, by diffusers' names
KeyRules = tuple[tuple[str, str], ...]  # beginnings of diffusers' names and what the authors have in their place


@dataclass(frozen=True)
class PipelineLayout:
    """Names of a model in diffusers, in ComfyUI and in its original checkpoint."""

    pipeline: str  # diffusers' class
    part: str  # of the pipeline, that trains
    adapters: str  # what ComfyUI wants before the names of adapters
    authors: Callable[[Tensors, Mapping[str, Any]], Tensors]  # from diffusers' names and configuration to theirs
    workflow: str = ""  # the kind of ComfyUI workflow that uses it, if one is known
    # If adapters are published under the authors' names of layers: those to our names, of some of the network's.
    layers: Callable[[Sequence[str], Any], dict[str, str]] | None = None
    alpha: float = 8.0  # of adapters in such files, which do not tell it: peft's own
    shared: tuple[tuple[str, str], ...] = ()  # if it is several parts that train: each, and how its names begin here

    @property
    def parts(self) -> dict[str, str]:
        """The parts that train, and how the names of their tensors begin in the network."""
        return dict(self.shared) or {self.part: ""}


@runtime_checkable
class HasPipelineLayout(Protocol):
    """A model spec that has a pipeline layout."""

    @property
    def weights(self) -> str: ...
    @property
    def layout(self) -> PipelineLayout: ...


@dataclass(frozen=True)
class DiffusersConversion:
    """A network converted to diffusers: class, config and renamed tensors."""

    kind: str  # diffusers' class
    part: str  # of a pipeline
    pipeline: str  # that it is part of, for noise in levels
    settings: Mapping[str, Any]
    tensors: Tensors
    index: Mapping[str, Any]  # what else the pipeline is told, such as names of classes
    reads: Mapping[str, Any]  # fields of the spec that reads it back
    differs: str  # what is computed otherwise there, a sentence; nothing if all is alike


@runtime_checkable
class ConvertibleToDiffusers(Protocol):
    """A spec whose network is not published, and yet one that diffusers has."""

    @property
    def codec(self) -> str | None: ...
    @property
    def scale(self) -> float: ...
    def moved(self, tensors: Mapping[str, Tensor]) -> DiffusersConversion:
        """Under diffusers' names; refused where it has none for what the network does."""


def rename_and_concat(tensors: Mapping[str, Tensor], rules: KeyRules) -> Tensors:
    """Tensors under other names; what gets one name is put end to end, in the order of the rules."""
    pieces: dict[str, dict[int, Tensor]] = {}
    for key, x in tensors.items():
        place, name = _renamed(key, rules)
        pieces.setdefault(name, {})[place] = x
    return {
        name: torch.cat([found[place] for place in sorted(found)]) if len(found) > 1 else next(iter(found.values()))
        for name, found in pieces.items()
    }


def split_and_rename(tensors: Mapping[str, Tensor], shapes: TensorShapes, rules: KeyRules) -> Tensors:
    """What `gathered` makes of tensors of those names and shapes, taken apart again; what is not of it stays as it is.

    Sizes are never assumed: diffusers' own converters know those of the published networks alone.
    """
    pieces: dict[str, dict[int, str]] = {}
    for key in shapes:
        place, name = _renamed(key, rules)
        pieces.setdefault(name, {})[place] = key
    made: Tensors = {}
    for name, x in tensors.items():
        keys = [key for _, key in sorted(pieces.get(name, {}).items())]
        sizes = [shapes[key][0] for key in keys]
        whole = bool(keys) and x.dim() > 0 and sum(sizes) == len(x)
        made |= dict(zip(keys, torch.split(x, sizes), strict=True)) if whole else {name: x}
    return made


def _renamed(key: str, rules: KeyRules) -> tuple[int, str]:
    for place, (ours, theirs) in enumerate(rules):
        name, count = re.subn(f"^{ours}", theirs, key)
        if count:
            return place, name
    raise ValueError(f"the authors of this network have no name for '{key}'; export it in diffusers' layout")


def swap_scale_shift(x: Tensor) -> Tensor:
    """Both halves the other way round: diffusers keeps scale before shift, the authors after it."""
    return torch.cat([*reversed(x.chunk(2))])


def keep_names(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """For authors who publish under diffusers' names."""
    return tensors


def reject_unknown_names(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """For authors whose names are not written down here."""
    raise ConfigError("--layout: the names the authors of this network use are not known here; give diffusers")


TIME_MLP_KEYS = (("linear_1", "in_layer"), ("linear_2", "out_layer"))
DOUBLE, SINGLE, JOINT = r"transformer_blocks\.(\d+)\.", r"single_transformer_blocks\.(\d+)\.", "joint_blocks"
FLUX_KEY_RULES: KeyRules = (
    *((rf"time_text_embed\.timestep_embedder\.{a}\.", f"time_in.{b}.") for a, b in TIME_MLP_KEYS),
    *((rf"time_text_embed\.text_embedder\.{a}\.", f"vector_in.{b}.") for a, b in TIME_MLP_KEYS),
    *((rf"time_text_embed\.guidance_embedder\.{a}\.", f"guidance_in.{b}.") for a, b in TIME_MLP_KEYS),
    (r"context_embedder\.", "txt_in."),
    (r"x_embedder\.", "img_in."),
    (rf"{DOUBLE}norm1\.linear\.", r"double_blocks.\1.img_mod.lin."),
    (rf"{DOUBLE}norm1_context\.linear\.", r"double_blocks.\1.txt_mod.lin."),
    *((rf"{DOUBLE}attn\.to_{x}\.", r"double_blocks.\1.img_attn.qkv.") for x in "qkv"),
    *((rf"{DOUBLE}attn\.add_{x}_proj\.", r"double_blocks.\1.txt_attn.qkv.") for x in "qkv"),
    (rf"{DOUBLE}attn\.norm_q\.weight", r"double_blocks.\1.img_attn.norm.query_norm.scale"),
    (rf"{DOUBLE}attn\.norm_k\.weight", r"double_blocks.\1.img_attn.norm.key_norm.scale"),
    (rf"{DOUBLE}attn\.norm_added_q\.weight", r"double_blocks.\1.txt_attn.norm.query_norm.scale"),
    (rf"{DOUBLE}attn\.norm_added_k\.weight", r"double_blocks.\1.txt_attn.norm.key_norm.scale"),
    (rf"{DOUBLE}attn\.to_out\.0\.", r"double_blocks.\1.img_attn.proj."),
    (rf"{DOUBLE}attn\.to_add_out\.", r"double_blocks.\1.txt_attn.proj."),
    (rf"{DOUBLE}ff\.net\.0\.proj\.", r"double_blocks.\1.img_mlp.0."),
    (rf"{DOUBLE}ff\.net\.2\.", r"double_blocks.\1.img_mlp.2."),
    (rf"{DOUBLE}ff_context\.net\.0\.proj\.", r"double_blocks.\1.txt_mlp.0."),
    (rf"{DOUBLE}ff_context\.net\.2\.", r"double_blocks.\1.txt_mlp.2."),
    (rf"{SINGLE}norm\.linear\.", r"single_blocks.\1.modulation.lin."),
    *((rf"{SINGLE}attn\.to_{x}\.", r"single_blocks.\1.linear1.") for x in "qkv"),
    (rf"{SINGLE}proj_mlp\.", r"single_blocks.\1.linear1."),
    (rf"{SINGLE}attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (rf"{SINGLE}attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    (rf"{SINGLE}proj_out\.", r"single_blocks.\1.linear2."),
    (r"proj_out\.", "final_layer.linear."),
    (r"norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
)
MLP_KEYS = (("linear_1", "mlp.0"), ("linear_2", "mlp.2"))
JOINT_BLOCK_KEYS = (("", "x_block"), ("_context", "context_block"))
SD3_KEY_RULES: KeyRules = (
    (r"pos_embed\.pos_embed", "pos_embed"),
    (r"pos_embed\.proj\.", "x_embedder.proj."),
    *((rf"time_text_embed\.timestep_embedder\.{a}\.", f"t_embedder.{b}.") for a, b in MLP_KEYS),
    *((rf"time_text_embed\.text_embedder\.{a}\.", f"y_embedder.{b}.") for a, b in MLP_KEYS),
    (r"context_embedder\.", "context_embedder."),
    *((rf"{DOUBLE}attn\.to_{x}\.", rf"{JOINT}.\1.x_block.attn.qkv.") for x in "qkv"),
    *((rf"{DOUBLE}attn\.add_{x}_proj\.", rf"{JOINT}.\1.context_block.attn.qkv.") for x in "qkv"),
    *((rf"{DOUBLE}attn2\.to_{x}\.", rf"{JOINT}.\1.x_block.attn2.qkv.") for x in "qkv"),
    *((rf"{DOUBLE}attn(2?)\.norm_{x}\.", rf"{JOINT}.\1.x_block.attn\2.ln_{x}.") for x in "qk"),
    *((rf"{DOUBLE}attn\.norm_added_{x}\.", rf"{JOINT}.\1.context_block.attn.ln_{x}.") for x in "qk"),
    (rf"{DOUBLE}attn(2?)\.to_out\.0\.", rf"{JOINT}.\1.x_block.attn\2.proj."),
    (rf"{DOUBLE}attn\.to_add_out\.", rf"{JOINT}.\1.context_block.attn.proj."),
    *((rf"{DOUBLE}norm1{a}\.linear\.", rf"{JOINT}.\1.{b}.adaLN_modulation.1.") for a, b in JOINT_BLOCK_KEYS),
    *((rf"{DOUBLE}ff{a}\.net\.0\.proj\.", rf"{JOINT}.\1.{b}.mlp.fc1.") for a, b in JOINT_BLOCK_KEYS),
    *((rf"{DOUBLE}ff{a}\.net\.2\.", rf"{JOINT}.\1.{b}.mlp.fc2.") for a, b in JOINT_BLOCK_KEYS),
    (r"proj_out\.", "final_layer.linear."),
    (r"norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
)
RESNET_KEYS = (
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
)  # of a residual block


def flux_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """As Black Forest Labs publish it."""
    ends = {key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith("norm_out.linear.")}
    return rename_and_concat({**tensors, **ends}, FLUX_KEY_RULES)


def flux_from_original(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Back from there, for a network of those shapes."""
    found = split_and_rename(tensors, shapes, FLUX_KEY_RULES)
    return {**found, **{key: swap_scale_shift(x) for key, x in found.items() if key.startswith("norm_out.linear.")}}


def sd3_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """As Stability AI publish it; the words leave the last block by a norm like the one at the end."""
    ends = _last(config["num_layers"])
    return rename_and_concat(
        {**tensors, **{key: swap_scale_shift(x) for key, x in tensors.items() if key.startswith(ends)}}, SD3_KEY_RULES
    )


def sd3_from_original(tensors: Tensors, shapes: TensorShapes) -> Tensors:
    """Back from there, for a network of those shapes."""
    found = split_and_rename(tensors, shapes, SD3_KEY_RULES)
    ends = _last(1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("transformer_blocks.")))
    return {**found, **{key: swap_scale_shift(x) for key, x in found.items() if key.startswith(ends)}}


def _last(layers: int) -> tuple[str, str]:
    return "norm_out.linear.", f"transformer_blocks.{layers - 1}.norm1_context.linear."


def sd_unet_to_original(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """As the authors of Stable Diffusion publish it: blocks counted through."""
    layers, attended = int(config["layers_per_block"]), [kind.startswith("Cross") for kind in config["up_block_types"]]
    rules = [
        *((rf"time_embedding\.linear_{n + 1}\.", f"time_embed.{2 * n}.") for n in (0, 1)),
        *((rf"add_embedding\.linear_{n + 1}\.", f"label_emb.0.{2 * n}.") for n in (0, 1)),
        (r"conv_in\.", "input_blocks.0.0."),
        (r"conv_norm_out\.", "out.0."),
        (r"conv_out\.", "out.2."),
        *_residual(r"mid_block\.resnets\.0", "middle_block.0"),
        (r"mid_block\.attentions\.0\.", "middle_block.1."),
        *_residual(r"mid_block\.resnets\.1", "middle_block.2"),
    ]
    for i, words in enumerate(attended):
        first, up = i * (layers + 1), f"output_blocks.{i * (layers + 1) + layers}"
        rules += [(rf"down_blocks\.{i}\.downsamplers\.0\.conv\.", f"input_blocks.{first + layers + 1}.0.op.")]
        rules += [(rf"up_blocks\.{i}\.upsamplers\.0\.conv\.", f"{up}.{2 if words else 1}.conv.")]
        for j in range(layers + 1):
            for ours, theirs in (("down", f"input_blocks.{first + j + 1}"), ("up", f"output_blocks.{first + j}")):
                rules += _residual(rf"{ours}_blocks\.{i}\.resnets\.{j}", f"{theirs}.0")
                rules += [(rf"{ours}_blocks\.{i}\.attentions\.{j}\.", f"{theirs}.1.")]
    return rename_and_concat(tensors, tuple(rules))


def _residual(ours: str, theirs: str) -> list[tuple[str, str]]:
    return [(rf"{ours}\.{a}\.", f"{theirs}.{b}.") for a, b in RESNET_KEYS]
