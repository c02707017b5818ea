"""How large the published generators of clips are, and the text encoders that those of pictures share with them."""

from __future__ import annotations

from typing import Any

ComponentConfigs = dict[str, dict[str, Any]]

CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "eos_token_id": 2,
}
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
WAN_1B: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "ffn_dim": 8960,
        "num_layers": 30,
        "text_dim": 4096,
    },
    "vae": {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
    "text_encoder": {**T5_XXL, "vocab_size": 256384},
}
WAN_14B: ComponentConfigs = {
    **WAN_1B,
    "transformer": {**WAN_1B["transformer"], "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}
WAN_5B: ComponentConfigs = {
    **WAN_1B,
    "transformer": {
        **WAN_1B["transformer"],
        "in_channels": 48,
        "out_channels": 48,
        "num_attention_heads": 24,
        "ffn_dim": 14336,
    },
    "vae": {
        **WAN_1B["vae"],
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
}
COGVIDEOX_2B: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 30,
        "attention_head_dim": 64,
        "num_layers": 30,
        "time_embed_dim": 512,
        "text_embed_dim": 4096,
        "max_text_seq_length": 226,
        "sample_width": 90,
        "sample_height": 60,
        "sample_frames": 49,
    },
    "vae": {"block_out_channels": (128, 256, 256, 512), "layers_per_block": 3, "latent_channels": 16},
    "text_encoder": T5_XXL,
}
COGVIDEOX_5B: ComponentConfigs = {
    **COGVIDEOX_2B,
    "transformer": {
        **COGVIDEOX_2B["transformer"],
        "num_attention_heads": 48,
        "num_layers": 42,
        "use_rotary_positional_embeddings": True,
    },
}
LTX: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "cross_attention_dim": 2048,
        "num_layers": 28,
        "caption_channels": 4096,
    },
    "vae": {
        "latent_channels": 128,
        "block_out_channels": (128, 256, 512, 512),
        "decoder_block_out_channels": (128, 256, 512, 512),
        "layers_per_block": (4, 3, 3, 3, 4),
        "decoder_layers_per_block": (4, 3, 3, 3, 4),
    },
    "text_encoder": T5_XXL,
}
HUNYUANVIDEO: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "rope_axes_dim": (16, 56, 56),
    },
    "vae": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16},
    "text_encoder": {
        "vocab_size": 128320,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "text_encoder_2": CLIP_L,
}
MOCHI: ComponentConfigs = {
    "transformer": {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 48,
        "pooled_projection_dim": 1536,
        "text_embed_dim": 4096,
        "max_sequence_length": 256,
    },
    "vae": {
        "encoder_block_out_channels": (64, 128, 256, 384),
        "decoder_block_out_channels": (128, 256, 512, 768),
        "layers_per_block": (3, 3, 4, 6, 3),
        "latent_channels": 12,
    },
    "text_encoder": T5_XXL,
}
SVD_XT: ComponentConfigs = {
    "unet": {
        "block_out_channels": (320, 640, 1280, 1280),
        "num_attention_heads": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "num_frames": 25,
    },
    "vae": {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
    },
    "image_encoder": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "projection_dim": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
}
VIDEO_CONFIGS: dict[str, ComponentConfigs] = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": WAN_1B,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": WAN_14B,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": WAN_5B,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": WAN_14B,  # of each of its two transformers
    "zai-org/CogVideoX-2b": COGVIDEOX_2B,
    "zai-org/CogVideoX-5b": COGVIDEOX_5B,
    "Lightricks/LTX-Video": LTX,
    "hunyuanvideo-community/HunyuanVideo": HUNYUANVIDEO,
    "genmo/mochi-1-preview": MOCHI,
    "stabilityai/stable-video-diffusion-img2vid-xt": SVD_XT,
    "stabilityai/stable-video-diffusion-img2vid": {**SVD_XT, "unet": {**SVD_XT["unet"], "num_frames": 14}},
}
