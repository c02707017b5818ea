"""Sizes of text encoders and VAEs that several published generators share, as in their config.json files."""

from __future__ import annotations

from typing import Any

ComponentConfigs = dict[str, dict[str, Any]]  # of a pipeline: settings of each network, by component name

CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "eos_token_id": 2,
}
CLIP_G: dict[str, Any] = {
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
}
CLIP_H_VISION: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
}
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
TINY_T5: dict[str, Any] = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
VAE: dict[str, Any] = {  # 16 latent channels: FLUX.1 and Stable Diffusion 3
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TINY_VAE: dict[str, Any] = {**VAE, "block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
SD_VAE: dict[str, Any] = {**VAE, "latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True}
QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_8B: dict[str, Any] = {**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288}
TINY_QWEN3: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MISTRAL_SMALL: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN25_7B: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN25_VL_7B: dict[str, Any] = {
    "text_config": {
        **QWEN25_7B,
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    },
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
    "tie_word_embeddings": False,
}
QWEN3_VL_8B: dict[str, Any] = {
    "text_config": {
        **QWEN3_8B,
        "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
    },
    "vision_config": {"out_hidden_size": 4096},
    "tie_word_embeddings": False,
}
FLAN_T5_XL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
    "feed_forward_proj": "gated-gelu",
}
FLAN_T5_BASE: dict[str, Any] = {**FLAN_T5_XL, "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
