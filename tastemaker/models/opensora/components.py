"""The parts of Open-Sora 1.2 as published: its network and its autoencoder, of files or random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.types import Placement
from ..component_configs import SD_VAE
from ..nets.opensora_vae import LATENT_SCALE, LATENT_SHIFT, OpenSoraVae, TemporalVae
from ..nets.stdit3 import RotaryFrequencies, STDiT3
from ..pipeline_components import RANDOM, TINY, load_tensors
from ..pipeline_layout import PipelineLayout, keep_names
from ..pretrained import WeightsSource, find_weights, load_state_dict
from ..video_backbone import SMALL_T5

STDIT = WeightsSource("hpcai-tech/OpenSora-STDiT-v3", "", "4.8 GB", "Apache-2.0")
VAE = WeightsSource("hpcai-tech/OpenSora-VAE-v1.2", "", "1.6 GB", "Apache-2.0")
T5 = WeightsSource(
    "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers", "", "19 GB", "Apache-2.0"
)  # T5 v1.1 XXL, as published
SMALL: dict[str, dict[str, Any]] = {
    "net": {"width": 32, "depth": 1, "heads": 2, "caption": 32, "words": 16},
    "temporal": {"filters": 4, "blocks": 1, "groups": 2},
    "still": {**SD_VAE, "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2},
    "text_encoder": SMALL_T5,
}


def identity_layer_names(names: Sequence[str], net: nn.Module) -> dict[str, str]:
    """The authors' names of layers, which are ours."""
    return {name: name for name in names}


LAYOUT = PipelineLayout(
    "", "transformer", "", keep_names, layers=identity_layer_names
)  # diffusers has no pipeline of it


def build_network(weights: str, seed: int, placement: Placement) -> nn.Module:
    """With the tensors of a file, whose shapes tell its size, or random ones."""
    dtype = placement.trained or (torch.bfloat16 if placement.dtype == torch.bfloat16 else torch.float32)
    if has_random_weights(weights):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return STDiT3(**(SMALL["net"] if weights == TINY else {})).to(placement.device, dtype)
    tensors = {key: x.to(dtype) for key, x in load_state_dict(find_weights(weights, STDIT)).items()}
    if "rope.freqs" in tensors:
        tensors["rope.freqs"] = RotaryFrequencies(
            2 * len(tensors["rope.freqs"])
        ).freqs  # as they were before any rounding
    with torch.device("meta"):
        net = STDiT3(**infer_stdit3_config(tensors))
    full: nn.Module = load_tensors(net, tensors, "network")
    return full.to(placement.device)


def infer_stdit3_config(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of the network that a file is of; of the usual one where it is of none."""
    needed = ("x_embedder.proj.weight", "spatial_blocks.0.attn.q_norm.weight", "y_embedder.y_embedding")
    if not all(key in tensors for key in needed):
        return {}
    (width, channels), (head,), (count, caption) = (tensors[key].shape[:2] for key in needed)
    depth = sum(key.startswith("spatial_blocks.") and key.endswith("attn.qkv.weight") for key in tensors)
    told = {"channels": channels, "width": width, "heads": width // head, "words": count, "caption": caption}
    return {**told, "depth": depth}


def load_opensora_vae(vae: str, seed: int, placement: Placement, *, together: int, recompute: bool) -> OpenSoraVae:
    """The frozen autoencoder, in one file as published, or random."""
    from diffusers import AutoencoderKL

    small = vae == TINY
    still, temporal = (SMALL["still"], SMALL["temporal"]) if small else (SD_VAE, {})
    if has_random_weights(vae):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = OpenSoraVae(cast(Any, AutoencoderKL)(**still), TemporalVae(**temporal), together)
    else:
        with torch.device("meta"):
            net = OpenSoraVae(cast(Any, AutoencoderKL)(**still), TemporalVae(**temporal), together)
        usual = {
            name: torch.tensor(x).view(1, -1, 1, 1, 1) for name, x in (("scale", LATENT_SCALE), ("shift", LATENT_SHIFT))
        }
        net = load_tensors(net, {**usual, **load_state_dict(find_weights(vae, VAE))}, "autoencoder")
    net.recompute = recompute
    if recompute:
        cast(Any, net.spatial_vae.module).enable_gradient_checkpointing()
    return net.to(placement.device, placement.dtype).eval().requires_grad_(False)


def has_random_weights(name: str) -> bool:
    return name in (TINY, RANDOM)
