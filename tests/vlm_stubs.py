"""Small random chat models that see, in folders as the hub has them, one of each family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.frozen_models import silence_transformers
from tastemaker.vlm.chat_model import TINY_SPECIAL_TOKENS, tiny_chat, tiny_tokenizer

SPREAD = 0.4  # of random weights: at the usual 0.02 no token would mind its place
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": SPREAD,
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


def one_vision(path: Path) -> None:
    """As llava-hf has it."""
    net, tokenizer = tiny_chat(Placement())
    torch.manual_seed(1)
    for weight in net.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, SPREAD)
    net.save_pretrained(path)
    tokenizer.save_pretrained(path)


def qwen(kind: str, path: Path) -> None:
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
    eyes: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "initializer_range": SPREAD}
    if kind == "Qwen2VL":
        eyes |= {"embed_dim": 32, "mlp_ratio": 2}
    else:
        eyes |= {"out_hidden_size": 32, "intermediate_size": 64}
        eyes |= {"fullatt_block_indexes": [0]} if kind == "Qwen2_5_VL" else {"deepstack_visual_indexes": [0]}
    library: Any = transformers
    config = getattr(library, f"{kind}Config")(text_config=text, vision_config=eyes, **ids)
    getattr(library, f"{kind}ForConditionalGeneration")(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    patch = 16 if kind == "Qwen3VL" else 14
    library.Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 16, patch_size=patch).save_pretrained(
        path
    )


def llava(path: Path) -> None:
    """LLaVA 1.5, which is asked by its processor."""
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    eyes = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    eyes |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 16}
    text = TEXT | {"model_type": "llama", "vocab_size": len(tokenizer)}
    settings: Any = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")}
    LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=eyes, **settings)).save_pretrained(path)
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    whole: Any = LlavaProcessor
    whole(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=VICUNA,
    ).save_pretrained(path)  # fmt: skip


def paligemma(path: Path) -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, PaliGemmaProcessor
    from transformers import SiglipImageProcessorPil as Looks

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(("<|endoftext|>", "<|im_end|>", "<bos>", "<image>"))
    tokenizer.bos_token = "<bos>"
    images: Any = Looks(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    whole: Any = PaliGemmaProcessor
    processor = whole(images, tokenizer)
    text = TEXT | {"model_type": "gemma", "vocab_size": len(tokenizer) + 8, "num_image_tokens": 4}
    eyes = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False}
    settings: Any = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "projection_dim": 32}
    config = PaliGemmaConfig(text_config=text, vision_config=eyes, **settings)
    PaliGemmaForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)


MAKERS: dict[str, Callable[[Path], None]] = {
    "llava_onevision": one_vision,
    "qwen2_vl": lambda path: qwen("Qwen2VL", path),
    "qwen2_5_vl": lambda path: qwen("Qwen2_5_VL", path),
    "qwen3_vl": lambda path: qwen("Qwen3VL", path),
    "llava": llava,
    "paligemma": paligemma,
}

# For tests of what every family does. One that prepares pictures in torch, one of several image sizes and one whose
# picture comes before its text run always; the others share their code.
FAMILIES = [
    *("llava_onevision", "qwen2_5_vl", "paligemma"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl", "qwen3_vl", "llava")),
]


class Folders(dict[str, Path]):
    """A folder of each family by its name, written when it is first asked for."""

    def __init__(self, parent: Callable[[str], Path]) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, name: str) -> Path:
        self[name] = self.parent(name)
        with silence_transformers():
            MAKERS[name](self[name])
        return self[name]


def make_folders(parent: Callable[[str], Path]) -> dict[str, Path]:
    """A folder of each family, by its name."""
    found = {name: parent(name) for name in MAKERS}
    with silence_transformers():
        for name, make in MAKERS.items():
            make(found[name])
    return found
