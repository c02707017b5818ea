"""Tiny pipelines that are built as a whole, because too little of them follows from their signatures."""

from __future__ import annotations

from typing import Any

from ..models import hunyuanvideo15, qwen_image_21, wan, wan_i2v
from ..models.pretrained import silence_libraries
from .tiny_pipelines import byte_qwen_tokenizer, letter_t5_tokenizer, random_network

QWEN_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}


def import_libraries() -> tuple[Any, Any]:
    """diffusers and transformers, whose classes are without types."""
    import diffusers
    import transformers

    return diffusers, transformers


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
