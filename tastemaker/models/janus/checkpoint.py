"""Published folders of Janus-Pro: sizes from their config.json, and tensors under the names of our networks.

transformers' layout (deepseek-community) and that of the authors (deepseek-ai) are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.registry import ConfigError
from ...core.safe_files import read_json_object
from ..nets.janus import JanusSizes
from ..nets.vq import VQConfig
from ..pipeline_components import RANDOM, TINY
from ..pretrained import WeightsSource, find_weights, load_state_dict

LICENSE = "DeepSeek model license"
JANUS_1B = WeightsSource("deepseek-community/Janus-Pro-1B", size="4.2 GB", license=LICENSE)
JANUS_7B = WeightsSource("deepseek-community/Janus-Pro-7B", size="15 GB", license=LICENSE)
SIZES_1B = JanusSizes()
SIZES_7B = JanusSizes(width=4096, depth=30, heads=32, kv_heads=32, intermediate_size=11008, head_width=4096)
RELEASES: dict[WeightsSource, JanusSizes] = {
    JANUS_1B: SIZES_1B,
    JANUS_7B: SIZES_7B,
    WeightsSource("deepseek-ai/Janus-Pro-1B", size="4.2 GB", license=LICENSE): SIZES_1B,
    WeightsSource("deepseek-ai/Janus-Pro-7B", size="15 GB", license=LICENSE): SIZES_7B,
}
TINY_SIZES = JanusSizes(
    width=32,
    depth=2,
    heads=2,
    kv_heads=2,
    intermediate_size=64,
    text_vocab_size=64,
    max_positions=64,
    head_width=32,
    grid_size=4,
    vq=VQConfig(channels=8, channel_multipliers=(1, 1, 1, 1), num_res_blocks=1, z_channels=8, codebook_size=64,
                norm_num_groups=2),
)  # fmt: skip
VQ_PREFIX = "model.vqmodel."  # of the image tokenizer in transformers' layout
# Tensors of the authors' layout, under transformers' names; the image tokenizer has LlamaGen's names in it.
AUTHORS_RULES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^gen_embed\.", "model.generation_embeddings."),
    (r"^gen_aligner\.layers\.0\.", "model.generation_aligner.fc1."),
    (r"^gen_aligner\.layers\.2\.", "model.generation_aligner.hidden_layers.0."),
    (r"^gen_head\.output_mlp_projector\.", "model.generation_head.proj_out."),
    (r"^gen_head\.vision_head\.", "model.generation_head.vision_head."),
)
AUTHORS_VQ_PREFIX = "gen_vision_model."
# The image tokenizer of transformers' layout, under LlamaGen's names.
VQ_RULES = (
    (r"^(encoder)\.down\.", r"\1.conv_blocks."),
    (r"^(decoder)\.up\.", r"\1.conv_blocks."),
    (r"(conv_blocks\.\d+)\.block\.", r"\1.res."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
)
# Of the network that generates, in transformers' layout.
NETWORK_PREFIXES = (
    "model.language_model.",
    "model.generation_embeddings.",
    "model.generation_aligner.",
    "model.generation_head.",
)


def find_release(weights: str) -> WeightsSource:
    """The release of that hub id; a source of the name alone for anything else."""
    return next((source for source in RELEASES if source.hub == weights), WeightsSource(weights))


def find_sizes(weights: str) -> JanusSizes:
    """Sizes of a released model, of a folder, or of random weights; no weights are read.

    Weights that are not found have the sizes of the 1B model, so that `check` works without them; loading refuses them.
    """
    if weights == TINY:
        return TINY_SIZES
    kind, _, hub = weights.partition(":")
    if kind == RANDOM:
        weights = hub or JANUS_1B.hub
        if find_release(weights) not in RELEASES:
            known = ", ".join(source.hub for source in RELEASES)
            raise ConfigError(f"model.weights: the size of '{hub:.100}' is not known; use one of {known} [TM2550]")
    elif Path(weights).expanduser().is_dir():
        return read_sizes(Path(weights).expanduser())
    release = find_release(weights)
    if release in RELEASES:
        return RELEASES[release]
    try:
        return read_sizes(find_weights(weights, release))
    except ConfigError:
        return RELEASES[JANUS_1B]


@cache
def read_sizes(folder: Path) -> JanusSizes:
    """Sizes in the config.json of a folder, in transformers' or the authors' layout."""
    try:
        config = read_json_object(folder / "config.json")
        kind = config.get("model_type")
        if kind == "janus":
            return _sizes_from_transformers(folder)
        if kind == "multi_modality":
            return _sizes_from_authors(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        reason = f"its model_type is '{kind!s:.60}'"
    raise ConfigError(
        f"model.weights: {folder} has no config.json of Janus-Pro ({reason:.200}); give the folder of a Janus-Pro "
        f"model, such as a download of {JANUS_1B} [TM2551]"
    )


def _sizes_from_transformers(folder: Path) -> JanusSizes:
    from transformers import JanusConfig

    config: Any = JanusConfig.from_pretrained(folder, local_files_only=True)
    text, vq = config.text_config, config.vq_config
    return JanusSizes(
        width=text.hidden_size,
        depth=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        intermediate_size=text.intermediate_size,
        text_vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        rope_theta=text.rope_parameters["rope_theta"],
        head_width=vq.projection_dim,
        aligner_layers=vq.num_hidden_layers,
        grid_size=vq.num_patches,
        vq=VQConfig(
            channels=vq.base_channels,
            channel_multipliers=tuple(vq.channel_multiplier),
            num_res_blocks=vq.num_res_blocks,
            z_channels=vq.latent_channels,
            codebook_size=vq.num_embeddings,
            codebook_dim=vq.embed_dim,
        ),
    )


def _sizes_from_authors(config: Mapping[str, Any]) -> JanusSizes:
    """Sizes of the authors' config.json, which leaves out what is the default of Llama-7B."""
    text, gen = config["language_config"], config["gen_vision_config"]["params"]
    heads = text.get("num_attention_heads", 32)
    return JanusSizes(
        width=text.get("hidden_size", 4096),
        depth=text.get("num_hidden_layers", 32),
        heads=heads,
        kv_heads=text.get("num_key_value_heads", heads),
        intermediate_size=text.get("intermediate_size", 11008),
        text_vocab_size=text["vocab_size"],
        max_positions=text.get("max_position_embeddings", 2048),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta=text.get("rope_theta", 10000.0),
        head_width=config["gen_head_config"]["params"]["n_embed"],
        aligner_layers=config["gen_aligner_config"]["params"]["depth"],
        grid_size=config["vision_config"]["params"]["image_size"] // 16,
        vq=VQConfig(codebook_size=gen["image_token_size"], codebook_dim=gen["n_embed"]),
    )


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the network that generates, under transformers' names, and of the image tokenizer, under LlamaGen's.

    Vision encoder and text head are left out.
    """
    network: dict[str, Tensor] = {}
    tokenizer: dict[str, Tensor] = {}
    for name, x in load_state_dict(folder).items():
        if name.startswith(AUTHORS_VQ_PREFIX):
            tokenizer[name.removeprefix(AUTHORS_VQ_PREFIX)] = x
        elif name.startswith(VQ_PREFIX):
            tokenizer[_rename(name.removeprefix(VQ_PREFIX), VQ_RULES)] = x
        elif (renamed := _rename(name, AUTHORS_RULES)).startswith(NETWORK_PREFIXES):
            network[renamed] = x
    return network, tokenizer


def _rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
