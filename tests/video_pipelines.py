"""Small video pipelines of diffusers, each with the spec and the process that are compared with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tastemaker.models import cogvideox, hunyuanvideo, ltx, ltx2, mochi, wan
from tastemaker.models.cogvideox import CogVideoXSpec
from tastemaker.models.hunyuanvideo import HunyuanVideoSpec
from tastemaker.models.ltx import LtxSpec
from tastemaker.models.mochi import MochiSpec
from tastemaker.models.pipeline_components import dynamic_shift
from tastemaker.models.pretrained import silence_libraries
from tastemaker.models.wan import WanSpec
from tastemaker.models.wan_i2v import WanI2VSpec
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow, VariancePreserving
from tastemaker.verification.tiny_pipelines import letter_t5_tokenizer as t5_tokenizer
from tastemaker.verification.whole_pipelines import make_wan_i2v_pipeline


def wan_pipeline(two_stages: bool) -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    return WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=UMT5EncoderModel(UMT5Config(**wan.TINY_CONFIGS["text_encoder"])),
        vae=AutoencoderKLWan(**wan.TINY_CONFIGS["vae"]),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanTransformer3DModel(**wan.TINY_CONFIGS["transformer"]),
        transformer_2=WanTransformer3DModel(**wan.TINY_CONFIGS["transformer_2"]) if two_stages else None,
        boundary_ratio=0.875 if two_stages else None,
    )


SOURCE_IMAGE = Image.fromarray(  # of the size of tiny clips, so that nothing is resized
    (torch.rand(32, 32, 3, generator=torch.Generator().manual_seed(3)) * 255).byte().numpy()
)


def cog_pipeline(rotary: bool) -> Any:
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    return CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=T5EncoderModel(T5Config(**cogvideox.TINY_CONFIGS["text_encoder"])),
        vae=AutoencoderKLCogVideoX(**cogvideox.TINY_CONFIGS["vae"], scaling_factor=0.7),
        transformer=CogVideoXTransformer3DModel(
            **{**cogvideox.TINY_CONFIGS["transformer"], "use_rotary_positional_embeddings": rotary}
        ),
        scheduler=CogVideoXDDIMScheduler(
            snr_shift_scale=1.0 if rotary else 3.0,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )


def ltx_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    vae = AutoencoderKLLTXVideo(**ltx.TINY_CONFIGS["vae"])
    vae.latents_mean += torch.linspace(-0.5, 0.5, 128)
    vae.latents_std += torch.linspace(0, 0.5, 128)
    return LTXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=T5EncoderModel(T5Config(**ltx.TINY_CONFIGS["text_encoder"])),
        vae=vae,
        transformer=LTXVideoTransformer3DModel(**ltx.TINY_CONFIGS["transformer"]),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=1024,
            base_shift=0.95,
            max_image_seq_len=4096,
            max_shift=2.05,
            shift_terminal=0.1,
            use_dynamic_shifting=True,
        ),
    )


def ltx2_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2Pipeline,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    configs = ltx2.TINY_CONFIGS
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=1024,
            base_shift=0.95,
            max_image_seq_len=4096,
            max_shift=2.05,
            shift_terminal=0.1,
            use_dynamic_shifting=True,
        ),
        vae=AutoencoderKLLTX2Video(**configs["vae"]),
        audio_vae=AutoencoderKLLTX2Audio(base_channels=128, latent_channels=8, num_res_blocks=1, ch_mult=(1, 1, 1)),
        text_encoder=Gemma3ForConditionalGeneration(Gemma3Config(**configs["text_encoder"])),
        tokenizer=t5_tokenizer(),
        connectors=LTX2TextConnectors(**configs["connectors"]),
        transformer=LTX2VideoTransformer3DModel(**configs["transformer"]),
        vocoder=LTX2Vocoder(
            in_channels=128,
            hidden_channels=8,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1]],
        ),
    )


def clip_tokenizer() -> CLIPTokenizer:
    characters = list(bytes_to_unicode().values())
    vocabulary = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}, merges=[], model_max_length=77)


def hunyuan_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )

    configs = hunyuanvideo.TINY_CONFIGS
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(**configs["text_encoder"])),
        tokenizer=t5_tokenizer(),
        transformer=HunyuanVideoTransformer3DModel(**configs["transformer"]),
        vae=AutoencoderKLHunyuanVideo(**configs["vae"]),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(CLIPTextConfig(**configs["text_encoder_2"])),
        tokenizer_2=clip_tokenizer(),
    )


def mochi_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLMochi,
        FlowMatchEulerDiscreteScheduler,
        MochiPipeline,
        MochiTransformer3DModel,
    )

    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(**mochi.TINY_CONFIGS["vae"]),
        text_encoder=T5EncoderModel(T5Config(**mochi.TINY_CONFIGS["text_encoder"])),
        tokenizer=t5_tokenizer(),
        transformer=MochiTransformer3DModel(**mochi.TINY_CONFIGS["transformer"]),
    )


@dataclass(frozen=True)
class Case:
    """A small diffusers pipeline, our spec and process for it, and further options of the pipeline call."""

    make: Callable[[], Any]
    spec: Any
    process: GaussianProcess
    guidance: float = 1.0
    call_options: dict[str, Any] | None = None
    to_pipeline_latents: Callable[[Tensor], Tensor] = field(
        default=lambda x: x.transpose(1, 2)
    )  # to the pipeline's layout


SHIFTED_TWICE = RectifiedFlow(shift=3.0, sigma_min=0.002994012)  # diffusers' scheduler applies the shift twice
ZERO_SNR = VariancePreserving(
    prediction_type="v_prediction",
    timestep_spacing="trailing",
    set_alpha_to_one=True,
    rescale_betas_zero_snr=True,
    snr_shift_scale=3.0,
)
CASES = {
    "wan": Case(
        lambda: wan_pipeline(two_stages=False), WanSpec().tiny(), GaussianProcess(SHIFTED_TWICE, num_steps=4), 5.0
    ),
    "cogvideox-2b": Case(
        lambda: cog_pipeline(rotary=False),
        CogVideoXSpec().tiny(),
        GaussianProcess(ZERO_SNR, num_steps=4),
        6.0,
        to_pipeline_latents=lambda x: x,
    ),
    "cogvideox-5b": Case(
        lambda: cog_pipeline(rotary=True),
        CogVideoXSpec().tiny(),
        GaussianProcess(replace(ZERO_SNR, snr_shift_scale=1.0), num_steps=4),
        6.0,
        to_pipeline_latents=lambda x: x,
    ),
    "ltx": Case(
        ltx_pipeline,
        LtxSpec(fps=24.0).tiny(),
        GaussianProcess(RectifiedFlow(dynamic_shift(2, 0.95, 2.05, 1024, 4096), shift_terminal=0.1), num_steps=4),
        3.0,
        {"frame_rate": 24.0},
        lambda x: x.movedim(2, -1).flatten(1, 3),
    ),
    "hunyuanvideo": Case(
        hunyuan_pipeline,
        replace(HunyuanVideoSpec().tiny(), frames=29, max_text_tokens=512),
        GaussianProcess(RectifiedFlow(7.0), num_steps=3),
        call_options={"guidance_scale": 6.0},
    ),
    "mochi": Case(
        mochi_pipeline,
        MochiSpec().tiny(),
        GaussianProcess(RectifiedFlow(linear_quadratic_threshold=0.025), num_steps=4),
        4.5,
    ),
    "wan22": Case(
        lambda: wan_pipeline(two_stages=True),
        WanSpec(boundary_ratio=0.875).tiny(),
        GaussianProcess(SHIFTED_TWICE, num_steps=4),
        4.0,
    ),
}
CASES |= {
    name: Case(
        partial(make_wan_i2v_pipeline, spec),
        spec,
        GaussianProcess(SHIFTED_TWICE, num_steps=4),
        4.0,
        {"image": SOURCE_IMAGE},
    )
    for name, spec in {
        "wan-i2v": replace(WanI2VSpec().tiny(), max_text_tokens=512),
        "wan22-i2v": WanI2VSpec(image_conditioning="latents", boundary_ratio=0.9).tiny(),
        "wan22-ti2v": WanI2VSpec(image_conditioning="first_frame").tiny(),
    }.items()
}


def source_metadata(case: Case) -> dict[str, Tensor]:
    """Metadata with the source image of a case, if it has one, as pixels [1, 3, H, W]."""
    image = (case.call_options or {}).get("image")
    return {} if image is None else {"image": to_tensor(image)}


def to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0)[None] / 255


def save_pipeline(case: Case, folder: Path) -> Any:
    """Build the pipeline with random weights that depend on the prompt, and save it to a directory."""
    with silence_libraries(), torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = case.make()
        for component in ("transformer", "transformer_2", "unet"):
            net = pipeline.components.get(component)
            for number, p in enumerate([] if net is None else net.parameters()):
                p.data.add_(
                    0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number + len(component)))
                )
        pipeline.save_pretrained(folder)
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
        pipeline.set_progress_bar_config(disable=True)
    return pipeline
