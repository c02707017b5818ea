"""Tiny pipelines of Qwen-Image-Edit-Plus, Qwen-Image 2.1, Sana and Sana-Sprint, as diffusers has them."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderDC,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)
from tiny_pipelines import byte_t5_tokenizer, random_network
from transformers import (
    Gemma2Config,
    Gemma2Model,
)

from tastemaker.models import sana
from tastemaker.verification.whole_pipelines import make_qwen_image_edit_pipeline, mark_image_tokens


def make_qwen_edit_pipeline(**transformer_settings: Any) -> Any:
    pipeline = make_qwen_image_edit_pipeline(**transformer_settings)
    mark_image_tokens(pipeline)
    return pipeline


def make_sana_pipeline(*, sprint: bool) -> Any:
    configs = sana.TINY_SPRINT if sprint else sana.TINY_SANA
    text_config = Gemma2Config(**{**sana.TINY_SANA["text_encoder"], "vocab_size": 128})
    parts = {
        "tokenizer": byte_t5_tokenizer(),
        "text_encoder": random_network(Gemma2Model, text_config, 1),
        "vae": random_network(AutoencoderDC, configs["vae"], 2),
        "transformer": random_network(SanaTransformer2DModel, configs["transformer"], 3),
    }
    if sprint:
        return SanaSprintPipeline(scheduler=SCMScheduler(), **parts)
    return SanaPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), **parts)
