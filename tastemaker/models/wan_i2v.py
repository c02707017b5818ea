"""Wan 2.1 and 2.2 image-to-video: Wan with a source image as the first frame of the clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.distributions import expand_dims_like
from ..core.model_spec import PipelineLayout
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Placement, Prompts
from ..rewards.backbones.preprocessing import CLIP_MEAN, CLIP_STD
from .component_configs import CLIP_H_VISION, ComponentConfigs
from .condition_images import ConditionImageEncoder, prompt_images
from .image_backbone import resize_and_center_crop
from .pipeline_components import ATTENTION_LAYERS, PipelineComponents, PublishedModel
from .pretrained import WeightsSource
from .sequential_offload import temporarily_on_device
from .text_encoders import disable_autocast
from .video_backbone import ConditioningTensors
from .wan import TEMPORAL_RATIO, TINY_CONFIGS, TINY_TRANSFORMER, WAN_5B, WAN_14B, WanBackbone, WanSpec

TEXT_TOKENS = 512  # diffusers' attention takes the last 512 tokens for the text, those before it for the image
ImageConditioning = Literal["clip", "latents", "first_frame"]
TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "projection_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
TINY_NETWORKS: dict[ImageConditioning, dict[str, Any]] = {
    "clip": {**TINY_TRANSFORMER, "in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 24},
    "latents": {**TINY_TRANSFORMER, "in_channels": 36},
    "first_frame": TINY_TRANSFORMER,
}
WAN_I2V_14B: ComponentConfigs = {
    **WAN_14B,
    "transformer": {**WAN_14B["transformer"], "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    "image_encoder": CLIP_H_VISION,
}
WAN_I2V_A14B: ComponentConfigs = {
    **WAN_14B,
    "transformer": {**WAN_14B["transformer"], "in_channels": 36},
    "transformer_2": {**WAN_14B["transformer"], "in_channels": 36},
}
WAN_I2V = PublishedModel(
    "wan",  # it has the text encoder of Wan
    (
        WeightsSource("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", size="91 GB", license="Apache-2.0"),
        WeightsSource("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", size="91 GB", license="Apache-2.0"),
        WeightsSource("Wan-AI/Wan2.2-I2V-A14B-Diffusers", size="126 GB", license="Apache-2.0"),
        WeightsSource("Wan-AI/Wan2.2-TI2V-5B-Diffusers", size="34 GB", license="Apache-2.0"),
    ),
    {**TINY_CONFIGS, "image_encoder": TINY_VISION},
    {
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": WAN_I2V_14B,
        "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": WAN_I2V_14B,
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": WAN_I2V_A14B,
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": WAN_5B,
    },
)


class WanI2VBackbone(WanBackbone):
    """Predicts the velocity noise - clean of latents of a clip that begins with a source image.

    Wan 2.1 and 2.2 A14B read the encoded image as further channels. Wan 2.2 TI2V-5B reads it in place of the first
    latent, at time zero. There the velocity of the first latent is the one that ends at the image, whatever the network
    says: samples begin with the image, and no log-probability depends on the network in that place.
    """

    spec: WanI2VSpec

    def __init__(self, spec: WanI2VSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.images = ConditionImageEncoder(self.encode_image, (spec.height, spec.width), placement.device)
        self.vision_encoder: Any = None
        if spec.image_conditioning == "clip":
            from transformers import CLIPVisionModel

            self.vision_encoder = spec.components(placement).load_encoder("image_encoder", CLIPVisionModel)
            # diffusers adds empty adapters of these layers to an adapter without them, and warns.
            self.traits = replace(self.traits, lora_targets=(*ATTENTION_LAYERS, "add_k_proj", "add_v_proj"))

    def load_network(self, components: PipelineComponents) -> nn.Module:
        """Load the transformers; refuse those that read the image in another way than the settings say."""
        net = super().load_network(components)
        config: Any = (net if self.spec.boundary_ratio is None else net.get_submodule("high")).config
        found: ImageConditioning = "clip" if config.image_dim else "latents"
        if config.in_channels == self.spec.latent_channels:
            found = "first_frame"
        if found != self.spec.image_conditioning:
            raise ConfigError(
                f"model.image_conditioning: the transformer of '{self.spec.weights:.200}' reads the image as "
                f"'{found}', but the setting is '{self.spec.image_conditioning}'; set "
                f"model.image_conditioning={found}, or for a text-to-video model model.type=wan [TM2501]"
            )
        return net

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        cond = super().embed(prompts, metadata)
        images = self.images(prompt_images(prompts, metadata, self.spec.image))
        return replace(cond, tensors={**cond.tensors, **images})

    def encode_image(self, image: Tensor) -> dict[str, Tensor]:
        """Encode pixels [1, 3, H, W]: image_latents [f, C, h, w], and image_embeds [257, D] by CLIP if it is read.

        The first latent alone, or the latents of a clip that is gray after the first frame.
        """
        clip = image[:, None]
        if self.spec.image_conditioning != "first_frame":
            clip = torch.cat([clip, torch.full_like(clip, 0.5).expand(-1, self.spec.frames - 1, -1, -1, -1)], 1)
        tensors = {"image_latents": self.autoencoder.encode(clip)[0]}
        if self.vision_encoder is None:
            return tensors
        side = self.vision_encoder.config.image_size
        mean, std = (torch.tensor(x, device=image.device).view(3, 1, 1) for x in (CLIP_MEAN, CLIP_STD))
        pixels = (resize_and_center_crop(image, side, side) - mean) / std
        with disable_autocast(image), temporarily_on_device(self.vision_encoder, image.device):
            states = self.vision_encoder(pixels.to(self.vision_encoder.dtype), output_hidden_states=True).hidden_states
        return {**tensors, "image_embeds": states[-2][0].float()}

    def call_network(self, x: Tensor, t: Tensor, conditioning: ConditioningTensors) -> Tensor:
        image, timestep = conditioning["image_latents"], 1000 * t
        named: dict[str, Tensor] = {"encoder_hidden_states": conditioning["prompt_embeds"]}
        if self.spec.image_conditioning == "first_frame":
            latents = torch.cat([image, x[:, 1:]], 1)
            tokens = x.shape[3] * x.shape[4] // 4  # of a frame
            timestep = torch.cat(
                [t.new_zeros(len(t), tokens), timestep[:, None].expand(-1, tokens * (len(x[0]) - 1))], 1
            )
        else:
            known = x.new_zeros(len(x), x.shape[1], TEMPORAL_RATIO, *x.shape[3:])
            known[:, 0] = 1
            latents = torch.cat([x, known, image], 2)
        if self.spec.image_conditioning == "clip":
            text = named["encoder_hidden_states"]  # zero at padding, so more padding changes nothing
            named["encoder_hidden_states"] = F.pad(text, (0, 0, 0, TEXT_TOKENS - text.shape[1]))
            named["encoder_hidden_states_image"] = conditioning["image_embeds"]
        velocity: Tensor = self.net(
            hidden_states=latents.transpose(1, 2), timestep=timestep, return_dict=False, **named
        )[0]
        return velocity.transpose(1, 2)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        velocity = super().predict(x, t, cond)
        if self.spec.image_conditioning != "first_frame":
            return velocity
        first = (x[:, :1] - cond.tensors["image_latents"]).float() / expand_dims_like(t, x).clamp(min=1e-6)
        return torch.cat([first, velocity[:, 1:].float()], 1)


@dataclass(frozen=True)
class WanI2VSpec(WanSpec):
    """Wan 2.1 or 2.2, image to video: continues the image in a prompt's metadata `image` (a path)."""

    weights: str = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"  # hub id, or folder in diffusers' layout
    boundary_ratio: float | None = None  # of 2.2: time below which the second transformer runs, 0.9 for I2V-A14B
    # How the network reads the image: 2.1 has CLIP beside latents, 2.2 I2V-A14B latents, 2.2 TI2V-5B the first frame.
    image_conditioning: ImageConditioning = "clip"
    image: Path | None = None  # image to continue for prompts that have none of their own
    reads_image: ClassVar[bool] = True
    published: ClassVar[PublishedModel] = WAN_I2V
    backbone_class = WanI2VBackbone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_conditioning == "clip" and self.max_text_tokens > TEXT_TOKENS:
            raise ValueError(
                f"'max_text_tokens': expected at most {TEXT_TOKENS}, which the attention of Wan 2.1 image-to-video "
                f"assumes, got {self.max_text_tokens}; set max_text_tokens={TEXT_TOKENS} [TM2502]"
            )

    @property
    def needs_initial_image(self) -> bool:
        return self.image is None

    @property
    def layout(self) -> PipelineLayout:
        return replace(super().layout, pipeline_class="WanImageToVideoPipeline")

    def components(self, placement: Placement) -> PipelineComponents:
        network = TINY_NETWORKS[self.image_conditioning]
        tiny_configs = {**self.published.tiny_configs, "transformer": network, "transformer_2": network}
        return replace(self.published, tiny_configs=tiny_configs).components(self.weights, placement, self.seed)
