"""How large the published generators are: what their config.json files say, for those who have not fetched them."""

from __future__ import annotations

from .video_component_configs import CLIP_L, T5_XXL, VIDEO_CONFIGS
from .video_component_configs import ComponentConfigs as ComponentConfigs

CLIP_G = {
    **CLIP_L,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD_VAE = {**VAE, "latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True}
FLUX_DEV: ComponentConfigs = {
    "transformer": {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": (16, 56, 56),
    },
    "vae": {**VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
    "text_encoder": CLIP_L,
    "text_encoder_2": T5_XXL,
}
SD35_MEDIUM: ComponentConfigs = {
    "transformer": {
        "sample_size": 128,
        "num_layers": 24,
        "attention_head_dim": 64,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    "vae": {**VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609},
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
    "text_encoder_3": T5_XXL,
}
SD35_LARGE: ComponentConfigs = {
    **SD35_MEDIUM,
    "transformer": {
        **SD35_MEDIUM["transformer"],
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "pos_embed_max_size": 192,
        "dual_attention_layers": (),
    },
}
SD3_MEDIUM: ComponentConfigs = {
    **SD35_MEDIUM,
    "transformer": {
        **SD35_MEDIUM["transformer"],
        "pos_embed_max_size": 192,
        "dual_attention_layers": (),
        "qk_norm": None,
    },
}
QWEN_IMAGE: ComponentConfigs = {
    "transformer": {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
    "vae": {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
}
SD15: ComponentConfigs = {
    "unet": {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 8, "cross_attention_dim": 768},
    "vae": {**SD_VAE, "scaling_factor": 0.18215},
    "text_encoder": CLIP_L,
}
SDXL: ComponentConfigs = {
    "unet": {
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "vae": {**SD_VAE, "scaling_factor": 0.13025},
    "text_encoder": CLIP_L,
    "text_encoder_2": CLIP_G,
}
CLIP_H = {
    **CLIP_G,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "projection_dim": 1024,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
}  # without its last layer
MODELSCOPE: ComponentConfigs = {
    "unet": {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 64, "cross_attention_dim": 1024},
    "vae": {**SD_VAE, "scaling_factor": 0.18215},
    "text_encoder": CLIP_H,
}
COMPONENT_CONFIGS: dict[str, ComponentConfigs] = {
    "PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers": {"text_encoder": T5_XXL},  # what Open-Sora reads by
    "black-forest-labs/FLUX.1-dev": FLUX_DEV,
    "black-forest-labs/FLUX.1-schnell": {
        **FLUX_DEV,
        "transformer": {**FLUX_DEV["transformer"], "guidance_embeds": False},
    },
    "black-forest-labs/FLUX.1-Kontext-dev": FLUX_DEV,
    "stabilityai/stable-diffusion-3.5-medium": SD35_MEDIUM,
    "stabilityai/stable-diffusion-3.5-large": SD35_LARGE,
    "stabilityai/stable-diffusion-3-medium-diffusers": SD3_MEDIUM,
    "Qwen/Qwen-Image": QWEN_IMAGE,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": SD15,
    "stabilityai/stable-diffusion-xl-base-1.0": SDXL,
    "damo-vilab/text-to-video-ms-1.7b": MODELSCOPE,
    "VideoCrafter/VideoCrafter2": {**MODELSCOPE, "unet": {**MODELSCOPE["unet"], "fps_cond": True}},
    **VIDEO_CONFIGS,
}
