"""Tiny pipelines of Qwen-Image-Edit-Plus, Qwen-Image 2.1, Sana and Sana-Sprint, as diffusers has them."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)
from tiny_pipelines import byte_t5_tokenizer, random_network
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLProcessor,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from tastemaker.models import qwen_image_edit, sana
from tastemaker.models.qwen_image_edit import IMAGE_PAD
from tastemaker.verification.whole_pipelines import QWEN_SCHEDULER

VIDEO_PAD = "<|video_pad|>"


class EncoderWithTokenTypes(Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL that finds out which tokens are images, as it did before transformers 5; the pipeline does not say."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        types = (input_ids == self.config.image_token_id).int()
        return super().forward(input_ids=input_ids, mm_token_type_ids=types, **inputs)


class PictureProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor without that of videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token, self.video_token = IMAGE_PAD, VIDEO_PAD
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([IMAGE_PAD, VIDEO_PAD])
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def make_qwen_edit_pipeline(**transformer_settings: Any) -> Any:
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[])
    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_PAD, VIDEO_PAD]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(IMAGE_PAD), "video_token_id": 299}
    config = Qwen2_5_VLConfig(**{**qwen_image_edit.TINY_CONFIGS["text_encoder"], **ids})
    return QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULER),
        vae=random_network(AutoencoderKLQwenImage, qwen_image_edit.TINY_CONFIGS["vae"], 1),
        text_encoder=random_network(EncoderWithTokenTypes, config, 2),
        tokenizer=tokenizer,
        processor=PictureProcessor(Qwen2VLImageProcessorPil(), tokenizer),
        transformer=random_network(
            QwenImageTransformer2DModel, {**qwen_image_edit.TINY_CONFIGS["transformer"], **transformer_settings}, 3
        ),
    )


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
