"""Tiny pipelines of Qwen-Image-Edit-Plus, Qwen-Image 2.1, Sana and Sana-Sprint, as diffusers has them."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
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
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from tastemaker.models import qwen_image_21, qwen_image_edit, sana
from tastemaker.models.qwen_image_edit import IMAGE_PAD

VIDEO_PAD = "<|video_pad|>"
QWEN_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


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


class TextProcessor(ProcessorMixin):
    """A tokenizer as a processor: that of Qwen3-VL needs torchvision for videos."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content'][0]['text']}<|im_end|>\n" for turn in conversation]
        return self.tokenizer(["".join(turns)]).input_ids


def make_qwen_21_pipeline() -> Any:
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|image_pad|>"]})
    return QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULER),
        vae=random_network(AutoencoderKLQwenImage21, qwen_image_21.TINY_CONFIGS["vae"], 1),
        text_encoder=random_network(
            Qwen3VLForConditionalGeneration, Qwen3VLConfig(**qwen_image_21.TINY_CONFIGS["text_encoder"]), 2
        ),
        processor=TextProcessor(tokenizer),
        transformer=random_network(QwenImage21Transformer2DModel, qwen_image_21.TINY_CONFIGS["transformer"], 3),
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
