"""A chat model that sees, of random weights and a few words, for tests."""

from __future__ import annotations

from typing import Any

from ..core.types import Placement
from ..rewards.backbones.loading import random_network

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
MERGED = ("y e", "ye s", "Y e", "Ye s", "n o", "N o", "Ġ yes", "Ġ Yes", "Ġ no", "Ġ No")


def tiny_tokenizer(special: tuple[str, ...] = SPECIAL) -> Any:
    """Bytes, and words for yes and no."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Joined
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    merges = [(first, second) for first, second in (pair.split() for pair in MERGED)]
    known = [*sorted(ByteLevel.alphabet()), *(first + second for first, second in merges)]
    inner = Tokenizer(BPE({word: number for number, word in enumerate(known)}, merges))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), Joined()
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def tiny_chat(placement: Placement) -> tuple[Any, Any]:
    """A LLaVA-OneVision and its tokenizer."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    tokenizer = tiny_tokenizer()
    text = {
        "model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    eyes = {
        "model_type": "siglip_vision_model", "hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 1, "image_size": 30, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    config = LlavaOnevisionConfig(
        text_config=text,
        vision_config=eyes,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        vision_feature_layer=-1,
    )
    return random_network(LlavaOnevisionForConditionalGeneration, config, placement), tokenizer
