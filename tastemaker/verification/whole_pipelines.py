"""Tiny pipelines that are built as a whole, where too little follows from signatures, and parts of pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models import hunyuanvideo15, qwen_image_21, qwen_image_edit, wan, wan_i2v
from ..models.pretrained import silence_libraries
from .tiny_pipelines import byte_qwen_tokenizer, letter_t5_tokenizer, random_network

LTX_SCHEDULER = {
    "base_image_seq_len": 1024,
    "base_shift": 0.95,
    "max_image_seq_len": 4096,
    "max_shift": 2.05,
    "shift_terminal": 0.1,
    "use_dynamic_shifting": True,
}
QWEN_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
PADS = (qwen_image_edit.IMAGE_PAD, "<|video_pad|>")
# Of LTX-2.0: one scale of guidance for video and sound, without that of LTX-2.3.
LTX2_CALL: Mapping[str, Any] = {
    **dict.fromkeys(("audio_guidance_scale", "audio_stg_scale", "audio_modality_scale", "audio_guidance_rescale")),
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "use_cross_timestep": False,
}


def import_libraries() -> tuple[Any, Any]:
    """diffusers and transformers, whose classes are without types."""
    import diffusers
    import transformers

    return diffusers, transformers


def clip_image_processor() -> Any:
    """The image processor of CLIP with its published settings."""
    from transformers import CLIPImageProcessor

    processor_class: Any = CLIPImageProcessor
    return processor_class()


def make_text_processor(tokenizer: Any) -> Any:
    """A tokenizer as a processor: that of Qwen3-VL needs torchvision for videos."""
    from transformers.processing_utils import ProcessorMixin

    base: Any = ProcessorMixin

    def initialize(self: Any, tokenizer: Any) -> None:
        base.__init__(self, tokenizer)

    def apply_chat_template(self: Any, conversation: Any, **settings: Any) -> Any:
        turns = [f"<|im_start|>{turn['role']}\n{turn['content'][0]['text']}<|im_end|>\n" for turn in conversation]
        return self.tokenizer(["".join(turns)]).input_ids

    methods = {"__init__": initialize, "apply_chat_template": apply_chat_template}
    processor_class: Any = type("TextProcessor", (base,), methods)
    return processor_class(tokenizer)


def make_qwen_image_21_pipeline(spec: Any = None) -> Any:
    """Qwen-Image 2.1 with random networks and a tokenizer of bytes."""
    diffusers, transformers = import_libraries()
    tokenizer, configs = byte_qwen_tokenizer(), qwen_image_21.TINY_CONFIGS
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|image_pad|>"]})
    text_config = transformers.Qwen3VLConfig(**configs["text_encoder"])
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULER),
        vae=random_network(diffusers.AutoencoderKLQwenImage21, configs["vae"], 1),
        text_encoder=random_network(transformers.Qwen3VLForConditionalGeneration, text_config, 2),
        processor=make_text_processor(tokenizer),
        transformer=random_network(diffusers.QwenImage21Transformer2DModel, configs["transformer"], 3),
    )


def make_picture_processor(image_processor: Any, tokenizer: Any) -> Any:
    """Qwen2-VL's processor without that of videos, which needs torchvision."""
    from transformers import Qwen2VLProcessor
    from transformers.processing_utils import ProcessorMixin

    base: Any = Qwen2VLProcessor
    mixin: Any = ProcessorMixin

    def initialize(self: Any, image_processor: Any, tokenizer: Any) -> None:
        self.image_token, self.video_token = PADS
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(list(PADS))
        mixin.__init__(self, image_processor, tokenizer)

    processor_class: Any = type("PictureProcessor", (base,), {"__init__": initialize})
    return processor_class(image_processor, tokenizer)


def load_picture_processor(folder: Path) -> Mapping[str, Any]:
    """The published processor of Qwen-Image-Edit, without that of videos."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    _, transformers = import_libraries()
    loader: Any = Qwen2VLImageProcessorPil
    options = {"local_files_only": True}
    image_processor = loader.from_pretrained(folder / "processor", trust_remote_code=False, **options)
    tokenizer = transformers.Qwen2Tokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False, **options)
    return {"processor": make_picture_processor(image_processor, tokenizer)}


def mark_image_tokens(pipeline: Any) -> None:
    """Make Qwen2.5-VL rotate image tokens by row and column: transformers 5 needs the types of tokens.

    diffusers 0.42 leaves the argument out, so that images count like words, other than in training.
    """

    def add_token_types(net: Any, positional: Any, arguments: Any) -> Any:
        types = (arguments["input_ids"] == net.config.image_token_id).int()
        return positional, {"mm_token_type_ids": types, **arguments}

    pipeline.text_encoder.register_forward_pre_hook(add_token_types, with_kwargs=True)


def make_qwen_image_edit_pipeline(spec: Any = None, **transformer_settings: Any) -> Any:
    """Qwen-Image-Edit-Plus with random networks and a tokenizer of bytes."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    diffusers, transformers = import_libraries()
    tokenizer, configs = byte_qwen_tokenizer(), qwen_image_edit.TINY_CONFIGS
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHAT_TOKENS, *PADS]})
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(PADS[0]), "video_token_id": 299}
    text_config = transformers.Qwen2_5_VLConfig(**{**configs["text_encoder"], **ids})
    image_processor: Any = Qwen2VLImageProcessorPil
    network = {**configs["transformer"], **transformer_settings}
    pipeline = diffusers.QwenImageEditPlusPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**QWEN_SCHEDULER),
        vae=random_network(diffusers.AutoencoderKLQwenImage, configs["vae"], 1),
        text_encoder=random_network(transformers.Qwen2_5_VLForConditionalGeneration, text_config, 2),
        tokenizer=tokenizer,
        processor=make_picture_processor(image_processor(), tokenizer),
        transformer=random_network(diffusers.QwenImageTransformer2DModel, network, 3),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def qwen_edit_constants(spec: Any) -> Mapping[str, Any]:
    """The areas of sources, which diffusers has as constants of the pipeline's module."""
    return {"VAE_IMAGE_SIZE": spec.source_pixels, "CONDITION_IMAGE_SIZE": spec.condition_pixels}


def make_hunyuanvideo15_pipeline(spec: Any) -> Any:
    """HunyuanVideo 1.5 with random networks, with tokenizers of letters and bytes."""
    diffusers, transformers = import_libraries()
    configs, tokenizer = hunyuanvideo15.TINY_CONFIGS, letter_t5_tokenizer()
    # 120 tokens of the system message, of which the pipeline cuts off 108.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][-120:] }} {% endfor %}"
    text_config = transformers.Qwen2_5_VLTextConfig(**configs["text_encoder"])
    glyph_config = transformers.T5Config(**configs["text_encoder_2"])
    pipeline = diffusers.HunyuanVideo15Pipeline(
        text_encoder=random_network(transformers.Qwen2_5_VLTextModel, text_config, 1),
        tokenizer=tokenizer,
        transformer=random_network(diffusers.HunyuanVideo15Transformer3DModel, configs["transformer"], 2),
        vae=random_network(diffusers.AutoencoderKLHunyuanVideo15, configs["vae"], 3),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=random_network(transformers.T5EncoderModel, glyph_config, 4),
        tokenizer_2=transformers.ByT5Tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )
    pipeline.tokenizer_max_length = spec.max_text_tokens
    return pipeline


def make_wan_i2v_pipeline(spec: Any, shift: float = 3.0) -> Any:
    """Wan that continues an image, with random networks that read it as the spec says."""
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    diffusers, transformers = import_libraries()
    # The image pipeline calls ftfy without looking whether it is installed.
    vars(pipeline_wan_i2v)["prompt_clean"] = pipeline_wan.prompt_clean
    network, side = wan_i2v.TINY_NETWORKS[spec.image_conditioning], wan_i2v.TINY_VISION["image_size"]
    processor = image_encoder = None
    if spec.image_conditioning == "clip":
        processor_class: Any = CLIPImageProcessorPil
        vision_config = transformers.CLIPVisionConfig(**wan_i2v.TINY_VISION)
        processor = processor_class(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        image_encoder = random_network(transformers.CLIPVisionModel, vision_config, 1)
    text_config = transformers.UMT5Config(**wan.TINY_CONFIGS["text_encoder"])
    stages = {
        "transformer": random_network(diffusers.WanTransformer3DModel, network, 2),
        "transformer_2": random_network(diffusers.WanTransformer3DModel, network, 3) if spec.boundary_ratio else None,
    }
    with silence_libraries():
        return diffusers.WanImageToVideoPipeline(
            tokenizer=letter_t5_tokenizer(),
            text_encoder=random_network(transformers.UMT5EncoderModel, text_config, 4),
            vae=random_network(diffusers.AutoencoderKLWan, wan.TINY_CONFIGS["vae"], 5),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift),
            image_processor=processor,
            image_encoder=image_encoder,
            boundary_ratio=spec.boundary_ratio,
            expand_timesteps=spec.image_conditioning == "first_frame",
            **stages,
        )


# LTX-2, whose sound is a second input and output


def make_ltx2_audio_vae() -> Any:
    """A small random autoencoder of spectrograms, whose latents have a mean and deviation as published ones do."""
    diffusers, _ = import_libraries()
    config = {"base_channels": 128, "latent_channels": 8, "num_res_blocks": 1, "ch_mult": (1, 1, 1)}
    net = random_network(diffusers.AutoencoderKLLTX2Audio, config, 1)
    net.latents_mean.fill_(0.25)
    net.latents_std.fill_(1.5)
    return net


def make_ltx2_vocoder() -> Any:
    """A small random network from spectrograms to waveforms."""
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    upsampling = {"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    layers = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    return random_network(
        LTX2Vocoder, {"in_channels": 128, "hidden_channels": 8, "out_channels": 2, **upsampling, **layers}, 2
    )


def split_ltx2_noise(pipeline: Any, spec: Any, x: Tensor) -> Mapping[str, Tensor]:
    """Our noise [B, n, 128] as the pipeline's inputs. It normalizes tokens of sound that it gets, even noise."""
    net = pipeline.audio_vae
    audio = pipeline._denormalize_audio_latents(x[:, spec.video_tokens :], net.latents_mean, net.latents_std)
    return {"latents": x[:, : spec.video_tokens], "audio_latents": audio}


def join_ltx2_latents(pipeline: Any, output: Any) -> Tensor:
    """Latents of video [B, 128, f, h, w] and sound [B, 8, L, 16] of the pipeline as our tokens [B, n, 128]."""
    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    scale = vae.config.scaling_factor
    video = pipeline._normalize_latents(output.frames.float(), vae.latents_mean, vae.latents_std, scale)
    audio = output.audio.float().transpose(1, 2).flatten(2)
    audio = pipeline._normalize_audio_latents(audio, audio_vae.latents_mean, audio_vae.latents_std)
    return torch.cat([video.flatten(2).transpose(1, 2), audio], 1)
