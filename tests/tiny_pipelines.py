"""Tiny pipelines in diffusers' layout: tokenizers that need no download, and sampling from the pipeline's own noise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tastemaker.core.model_spec import PipelineLayout
from tastemaker.core.policy import Backbone
from tastemaker.core.randomness import Randomness
from tastemaker.export.lora import DIFFUSERS_LORA_FILE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.verification.tiny_pipelines import CLIP_TOKENS as CLIP_TOKENS
from tastemaker.verification.tiny_pipelines import T5_VOCAB_SIZE as T5_VOCAB_SIZE
from tastemaker.verification.tiny_pipelines import byte_clip_tokenizer as byte_clip_tokenizer
from tastemaker.verification.tiny_pipelines import byte_t5_tokenizer as byte_t5_tokenizer
from tastemaker.verification.tiny_pipelines import random_network as random_network


def make_flux_pipeline(*, distilled: bool) -> Any:
    """A small random FLUX, as diffusers' pipeline: dev (`distilled`) or schnell."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from tastemaker.models.flux import TINY_CONFIGS

    settings = {**TINY_CONFIGS["transformer"], "guidance_embeds": distilled}
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=distilled, shift=3.0 if distilled else 1.0),
        random_network(AutoencoderKL, TINY_CONFIGS["vae"], 1),
        random_network(CLIPTextModel, CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS}), 2),
        byte_clip_tokenizer(),
        random_network(T5EncoderModel, T5Config(**{**TINY_CONFIGS["text_encoder_2"], "vocab_size": T5_VOCAB_SIZE}), 3),
        byte_t5_tokenizer(),
        random_network(FluxTransformer2DModel, settings, 4),
    )


@dataclass(frozen=True)
class FixedNoise:
    """A stand-in for `Randomness` that returns fixed starting noise."""

    noise: Tensor

    def normal(self, name: str, *shape: int) -> Tensor:
        assert name == "start" and self.noise.shape[1:] == shape
        return self.noise


@torch.no_grad()
def sample_latents(model: Backbone, process: GaussianProcess, prompts: list[str], noise: Tensor) -> Tensor:
    """Sample clean latents from the given starting noise: [B, ...]."""
    fixed: Any = FixedNoise(noise)
    rng: Randomness = fixed
    return process.start(model, model.embed(prompts), rng).finish().final


CHAT_TEMPLATE = (  # with `content` as text, or as a list of parts
    "{% for message in messages %}<{{ message.role }}>"
    "{{ message.content if message.content is string else message.content[0].text }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{{ '-' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)
BYTE_TOKENS = 300  # of `byte_chat_tokenizer`, rounded up


def byte_chat_tokenizer() -> Any:
    """A tokenizer of Qwen whose vocabulary is single bytes, with a short chat template."""
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(bytes_to_unicode().values())}, merges=[])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def random_qwen3(config: dict[str, Any], seed: int) -> Any:
    """A small random Qwen3 with the vocabulary of `byte_chat_tokenizer`."""
    from transformers import Qwen3Config, Qwen3Model

    return random_network(Qwen3Model, Qwen3Config(**{**config, "vocab_size": BYTE_TOKENS}), seed)


def make_z_image_pipeline(shift: float) -> Any:
    """A small random Z-Image, as diffusers' pipeline."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    from tastemaker.models.z_image import TINY_CONFIGS

    return ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=shift),
        random_network(AutoencoderKL, TINY_CONFIGS["vae"], 1),
        random_qwen3(TINY_CONFIGS["text_encoder"], 2),
        byte_chat_tokenizer(),
        random_network(ZImageTransformer2DModel, TINY_CONFIGS["transformer"], 3),
    )


def make_flux2_pipeline(*, dev: bool) -> Any:
    """A small random FLUX.2, as diffusers' pipeline: dev with Mistral and distilled guidance, or klein."""
    import diffusers
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    from tastemaker.models.flux2 import TINY_CONFIGS

    vae = random_network(diffusers.AutoencoderKLFlux2, TINY_CONFIGS["vae"], 1)
    generator = torch.Generator().manual_seed(0)
    vae.bn.running_mean.normal_(generator=generator)
    vae.bn.running_var.uniform_(0.5, 2, generator=generator)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    transformer = {**TINY_CONFIGS["transformer"], "guidance_embeds": dev}
    net = random_network(diffusers.Flux2Transformer2DModel, transformer, 3)
    if not dev:
        text_encoder = random_qwen3(TINY_CONFIGS["text_encoder"], 2)
        return diffusers.Flux2KleinPipeline(scheduler, vae, text_encoder, byte_chat_tokenizer(), net)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Mistral3Config(
        text_config={**TINY_CONFIGS["text_encoder"], "vocab_size": BYTE_TOKENS, "model_type": "mistral"},
        vision_config={**vision, "head_dim": 8, "image_size": 28, "model_type": "pixtral"},
    )
    text_encoder = random_network(Mistral3ForConditionalGeneration, config, 2)
    return diffusers.Flux2Pipeline(scheduler, vae, text_encoder, bos_tokenizer(), net)


def bos_tokenizer() -> Any:
    """A tokenizer of bytes that begins every text with <s>, as its template does, like Mistral's."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = byte_chat_tokenizer().backend_tokenizer
    backend.add_special_tokens(["<s>"])
    number = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", pad_token="<|endoftext|>")
    tokenizer.chat_template = "<s>" + CHAT_TEMPLATE
    return tokenizer


def load_adapters(pipeline: Any, layout: PipelineLayout, folder: Path) -> None:
    """Load adapters as the model card says: two transformers one after the other, under the name of the first."""
    from diffusers.models.model_loading_utils import load_state_dict

    if len(layout.components) == 1:
        pipeline.load_lora_weights(folder, weight_name=DIFFUSERS_LORA_FILE)
        return
    tensors = load_state_dict(folder / DIFFUSERS_LORA_FILE)
    for component in layout.components:
        own = {key: x for key, x in tensors.items() if key.startswith(f"{component}.")}
        option = {} if component == layout.component else {f"load_into_{component}": True}
        renamed = {key.replace(f"{component}.", f"{layout.component}.", 1): x for key, x in own.items()}
        pipeline.load_lora_weights(renamed, adapter_name=component, **option)
