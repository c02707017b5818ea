"""Small random vision-language models in the hub's checkpoint layout, one per family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.frozen_models import silence_transformers
from tastemaker.vlm.chat_model import TINY_SPECIAL_TOKENS, tiny_chat, tiny_tokenizer

INITIALIZER_RANGE = 0.4  # at the default of 0.02 outputs would hardly depend on token positions
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": INITIALIZER_RANGE,
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{% for c in m.content %}{% if c.type=='image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{c.text}}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{m.role|upper}}: {% for c in m.content %}{% if c.type=='image' %}<image>\n"
    "{% else %}{{c.text}}{% endif %}{% endfor %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def save_llava_onevision(path: Path) -> None:
    """Save LLaVA-OneVision in the layout of llava-hf."""
    net, tokenizer = tiny_chat(Placement())
    torch.manual_seed(1)
    for weight in net.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, INITIALIZER_RANGE)
    net.save_pretrained(path)
    tokenizer.save_pretrained(path)


def save_qwen(prefix: str, path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(
        (*TINY_SPECIAL_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    )
    tokenizer.chat_template = CHATML
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {key: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4, "mrope_interleaved": True}
    text = TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "initializer_range": INITIALIZER_RANGE}
    if prefix == "Qwen2VL":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
    else:
        vision |= {"out_hidden_size": 32, "intermediate_size": 64}
        vision |= {"fullatt_block_indexes": [0]} if prefix == "Qwen2_5_VL" else {"deepstack_visual_indexes": [0]}
    library: Any = transformers
    config = getattr(library, f"{prefix}Config")(text_config=text, vision_config=vision, **ids)
    getattr(library, f"{prefix}ForConditionalGeneration")(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    patch = 16 if prefix == "Qwen3VL" else 14
    library.Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 16, patch_size=patch).save_pretrained(
        path
    )


def save_llava(path: Path) -> None:
    """Save LLaVA 1.5, whose prompts go through its processor."""
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 16}
    text = TEXT | {"model_type": "llama", "vocab_size": len(tokenizer)}
    settings: Any = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")}
    LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, **settings)).save_pretrained(path)
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor_class: Any = LlavaProcessor
    processor_class(
        image_processor, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=VICUNA,
    ).save_pretrained(path)  # fmt: skip


def save_paligemma(path: Path) -> None:
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
        SiglipImageProcessorPil,
    )

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(("<|endoftext|>", "<|im_end|>", "<bos>", "<image>"))
    tokenizer.bos_token = "<bos>"
    image_processor: Any = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    image_processor.image_seq_length = 4
    processor_class: Any = PaliGemmaProcessor
    processor = processor_class(image_processor, tokenizer)
    text = TEXT | {"model_type": "gemma", "vocab_size": len(tokenizer) + 8, "num_image_tokens": 4}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    settings: Any = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "projection_dim": 32}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, **settings)
    PaliGemmaForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)


BUILDERS: dict[str, Callable[[Path], None]] = {
    "llava_onevision": save_llava_onevision,
    "qwen2_vl": lambda path: save_qwen("Qwen2VL", path),
    "qwen2_5_vl": lambda path: save_qwen("Qwen2_5_VL", path),
    "qwen3_vl": lambda path: save_qwen("Qwen3VL", path),
    "llava": save_llava,
    "paligemma": save_paligemma,
}

# For tests of behavior common to all families. One that preprocesses images in torch, one with several image sizes and
# one that puts the image before the text always run; the others share their code.
FAMILIES = [
    *("llava_onevision", "qwen2_5_vl", "paligemma"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl", "qwen3_vl", "llava")),
]


class CheckpointDirectories(dict[str, Path]):
    """Checkpoint directories by family name, each written on first access."""

    def __init__(self, parent: Callable[[str], Path]) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, name: str) -> Path:
        self[name] = self.parent(name)
        with silence_transformers():
            BUILDERS[name](self[name])
        return self[name]


def save_checkpoints(parent: Callable[[str], Path]) -> dict[str, Path]:
    """Save a checkpoint of every family and return the directories by family name."""
    directories = {name: parent(name) for name in BUILDERS}
    with silence_transformers():
        for name, save in BUILDERS.items():
            save(directories[name])
    return directories
