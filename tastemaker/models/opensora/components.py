"""Load the network and the autoencoder of Open-Sora 1.2 from published files, or build them with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.model_spec import PipelineLayout
from ...core.types import Placement
from .. import loading
from ..checkpoint_keys import keep_names
from ..component_configs import SD_VAE, T5_XXL, TINY_T5, ComponentConfigs
from ..nets.opensora_vae import LATENT_SCALE, LATENT_SHIFT, OpenSoraVae, TemporalVae
from ..nets.stdit3 import RotaryFrequencies, STDiT3
from ..pipeline_components import RANDOM, TINY, load_tensors
from ..pretrained import WeightsSource, find_weights, load_state_dict

STDIT = WeightsSource("hpcai-tech/OpenSora-STDiT-v3", "", "4.8 GB", "Apache-2.0")
VAE = WeightsSource("hpcai-tech/OpenSora-VAE-v1.2", "", "1.6 GB", "Apache-2.0")
T5 = WeightsSource("PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers", "", "19 GB", "Apache-2.0")  # T5 v1.1 XXL
CONFIGS: dict[str, ComponentConfigs] = {T5.hub: {"text_encoder": T5_XXL}}
TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "net": {"width": 32, "depth": 1, "heads": 2, "caption_dim": 32, "max_text_tokens": 16},
    "temporal": {"filters": 4, "blocks": 1, "groups": 2},
    "spatial": {**SD_VAE, "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2},
    "text_encoder": TINY_T5,
}


def identity_layer_names(names: Sequence[str], net: nn.Module) -> dict[str, str]:
    """Layer names of the original LoRA files, which are those of our network."""
    return {name: name for name in names}


# diffusers has no pipeline of this model.
LAYOUT = PipelineLayout("", "transformer", "", keep_names, original_lora_layers=identity_layer_names)


def build_network(weights: str, seed: int, placement: Placement) -> nn.Module:
    """STDiT3 with the tensors of a file, whose shapes give its sizes, or with random weights."""
    dtype = loading.trainable_dtype(placement)
    if has_random_weights(weights):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return STDiT3(**(TINY_CONFIGS["net"] if weights == TINY else {})).to(placement.device, dtype)
    tensors = {key: x.to(dtype) for key, x in load_state_dict(find_weights(weights, STDIT)).items()}
    if "rope.freqs" in tensors:
        # Computed again, because the file's frequencies may be rounded.
        tensors["rope.freqs"] = RotaryFrequencies(2 * len(tensors["rope.freqs"])).freqs
    with torch.device("meta"):
        net = STDiT3(**infer_stdit3_config(tensors))
    loaded: nn.Module = load_tensors(net, tensors, "network")
    return loaded.to(placement.device)


def infer_stdit3_config(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes of the network that these tensors belong to; empty, for the published sizes, if they are of another."""
    keys = ("x_embedder.proj.weight", "spatial_blocks.0.attn.q_norm.weight", "y_embedder.y_embedding")
    if not all(key in tensors for key in keys):
        return {}
    (width, channels), (head_dim,), (max_text_tokens, caption_dim) = (tensors[key].shape[:2] for key in keys)
    depth = sum(key.startswith("spatial_blocks.") and key.endswith("attn.qkv.weight") for key in tensors)
    return {
        "channels": channels,
        "width": width,
        "depth": depth,
        "heads": width // head_dim,
        "caption_dim": caption_dim,
        "max_text_tokens": max_text_tokens,
    }


def load_opensora_vae(
    vae: str, seed: int, placement: Placement, *, decode_chunk_size: int, checkpoint_decoder: bool
) -> OpenSoraVae:
    """The frozen autoencoder from its published file, or with random weights."""
    from diffusers import AutoencoderKL

    tiny = vae == TINY
    spatial, temporal = (TINY_CONFIGS["spatial"], TINY_CONFIGS["temporal"]) if tiny else (SD_VAE, {})
    if has_random_weights(vae):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = OpenSoraVae(cast(Any, AutoencoderKL)(**spatial), TemporalVae(**temporal), decode_chunk_size)
    else:
        with torch.device("meta"):
            net = OpenSoraVae(cast(Any, AutoencoderKL)(**spatial), TemporalVae(**temporal), decode_chunk_size)
        statistics = {"scale": LATENT_SCALE, "shift": LATENT_SHIFT}
        defaults = {name: torch.tensor(x).view(1, -1, 1, 1, 1) for name, x in statistics.items()}
        net = load_tensors(net, {**defaults, **load_state_dict(find_weights(vae, VAE))}, "autoencoder")
    net.checkpoint_decoder = checkpoint_decoder
    if checkpoint_decoder:
        cast(Any, net.spatial_vae.module).enable_gradient_checkpointing()
    return net.to(placement.device, placement.dtype).eval().requires_grad_(False)


def has_random_weights(name: str) -> bool:
    return name in (TINY, RANDOM)
