"""The video UNet of ModelScope and VideoCrafter: diffusers' UNet3DConditionModel, optionally with an fps embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import UNet3DConditionModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.resnet import TemporalConvLayer
from torch import Tensor, nn

BaseUnet: Any = UNet3DConditionModel
DOWN_BLOCKS = ("CrossAttnDownBlock3D",) * 3 + ("DownBlock3D",)
UP_BLOCKS = ("UpBlock3D",) + ("CrossAttnUpBlock3D",) * 3


class TimeAndFpsEmbedding(nn.Module):
    """The timestep embedding plus an fps embedding; tensors keep the names of diffusers' timestep embedding."""

    def __init__(self, time_embedding: Any) -> None:
        super().__init__()
        self.linear_1, self.act = time_embedding.linear_1, time_embedding.act
        self.linear_2 = time_embedding.linear_2

    def forward(self, timestep: Tensor, fps_embedding: Tensor) -> Tensor:
        embedding: Tensor = self.linear_2(self.act(self.linear_1(timestep)))
        return embedding + fps_embedding


class VideoUnet(BaseUnet):  # type: ignore[misc]
    """Maps latents [B, F, C, h, w] to the same shape; with `fps_cond` conditioned on the frame rate [B]."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int | None = None,
        in_channels: int = 4,
        out_channels: int = 4,
        down_block_types: Sequence[str] = DOWN_BLOCKS,
        up_block_types: Sequence[str] = UP_BLOCKS,
        block_out_channels: Sequence[int] = (320, 640, 1280, 1280),
        layers_per_block: int = 2,
        downsample_padding: int = 1,
        mid_block_scale_factor: float = 1,
        act_fn: str = "silu",
        norm_num_groups: int = 32,
        norm_eps: float = 1e-5,
        cross_attention_dim: int = 1024,
        attention_head_dim: int = 64,
        fps_cond: bool = False,
    ) -> None:
        super().__init__(
            sample_size=sample_size,
            in_channels=in_channels,
            out_channels=out_channels,
            down_block_types=tuple(down_block_types),
            up_block_types=tuple(up_block_types),
            block_out_channels=tuple(block_out_channels),
            layers_per_block=layers_per_block,
            downsample_padding=downsample_padding,
            mid_block_scale_factor=mid_block_scale_factor,
            act_fn=act_fn,
            norm_num_groups=norm_num_groups,
            norm_eps=norm_eps,
            cross_attention_dim=cross_attention_dim,
            attention_head_dim=attention_head_dim,
        )
        for module in [module for module in self.modules() if isinstance(module, TemporalConvLayer)]:
            last: Any = module.conv4[-1]  # zero-initialized by diffusers, which would disable the whole layer
            last.reset_parameters()
        if fps_cond:
            width = block_out_channels[0]
            self.fps_embedding = TimestepEmbedding(width, 4 * width, act_fn=act_fn)
            self.add_module("time_embedding", TimeAndFpsEmbedding(self.get_submodule("time_embedding")))

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, fps: Tensor | None = None) -> Tensor:
        """Predict without the network's dropout, so that samples are scored by the network that made them."""
        fps_embedding = None if fps is None else self.fps_embedding(self.time_proj(fps).to(x.dtype))
        out: Tensor = super().forward(
            x.transpose(1, 2), timestep, text, timestep_cond=fps_embedding, return_dict=False
        )[0]
        return out.transpose(1, 2).clone(memory_format=torch.contiguous_format)
