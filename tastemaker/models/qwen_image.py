"""Qwen-Image (2025): a transformer of 20 billion weights that reads prompts by Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.distributions import broadcast_to_shape
from ..core.policy import Process
from ..core.types import Condition, Metadata, Placement, Prompts
from ..processes.gaussian import GaussianProcess
from .cached_text_encoder import build_cached_text_encoder
from .flux import pack_latents, unpack_latents
from .pipeline_components import JOINT_ATTENTION_LAYERS, TINY, FrozenVae, PipelineComponents, weight_sources
from .pipeline_layout import PipelineLayout, keep_names
from .pretrained import WeightsSource
from .single_file import read_single_file
from .text_encoders import CachedTextEncoder, TextEncoder

QWEN = WeightsSource("Qwen/Qwen-Image", size="58 GB", licence="Apache-2.0")
CHANNELS, FACTOR = 16, 8  # of its autoencoder
Side = Annotated[int, Field(ge=32, le=4096, multiple_of=16)]

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_PREFIX_TOKENS = 34  # tokens of the template before the prompt, which the transformer does not see
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {
        "in_channels": 4 * CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
    "vae": {"base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1},
    "text_encoder": {
        "text_config": {
            "vocab_size": 99,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
            "bos_token_id": 97,
            "eos_token_id": 98,
            "pad_token_id": 0,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
    },
}


class SingleFrameVae:
    """An autoencoder of clips that is given one frame at a time, so without memory of the frames before."""

    def __init__(self, net: Any, recompute: bool, stretch: bool) -> None:
        self.net, self.recompute, self.stretch, self.dtype = net, recompute, stretch, net.dtype

    def parameters(self) -> Iterator[nn.Parameter]:
        found: Iterator[nn.Parameter] = self.net.parameters()
        return found

    def encode(self, pixels: Tensor) -> Any:
        return self.net.encode(pixels)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Stage by stage, for the published one cannot recompute what it does not keep."""
        decoder = self.net.decoder
        x = decoder.conv_in(self.net.post_quant_conv(latents))
        for stage in (decoder.mid_block, *decoder.up_blocks):
            x = checkpoint(stage, x, use_reentrant=False) if self.recompute else stage(x)
        shown = decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))
        return (stretch_contrast(shown) if self.stretch and torch.is_grad_enabled() else shown,)


def stretch_contrast(x: Tensor) -> Tensor:
    """Each picture from its own darkest to its own brightest, -1 to 1."""
    low, high = x.flatten(1).amin(1), x.flatten(1).amax(1)
    return 2 * (x - broadcast_to_shape(low, x)) / broadcast_to_shape((high - low).clamp(min=1e-6), x) - 1


class QwenPromptEncoder:
    """What the language model says of each token of the prompt and after it, and how many those are."""

    def __init__(self, kit: PipelineComponents, spec: QwenImage) -> None:
        # Small random encoders spell, and of the template's many letters there would be no end.
        self.template, self.before = ("{}", 0) if kit.path is None else (TEMPLATE, TEMPLATE_PREFIX_TOKENS)
        self.reader = build_text_encoder(kit, spec.words + self.before)

    def __call__(self, texts: list[str]) -> dict[str, Tensor]:
        asked = [self.template.format(text) for text in texts]
        mask = self.reader.tokens(asked)["attention_mask"]
        order = (1 - mask).argsort(dim=1, stable=True)[..., None]  # filling last, wherever the tokenizer puts it
        words = self.reader(asked, masked=True).last_hidden_state * mask[..., None]
        return {"words": words.take_along_dim(order, 1)[:, self.before :], "lengths": mask.sum(1) - self.before}


class QwenImageBackbone:
    """Denoises rows and columns of packed latents, [h/2, w/2, 64], of its own size or any other: the velocity at t."""

    passes = 1

    def __init__(self, spec: QwenImage, placement: Placement) -> None:
        from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

        kit = PipelineComponents(spec.weights, QWEN, SMALL, placement, spec.seed)
        tensors = None if spec.transformer is None else read_single_file(spec.transformer, QWEN)
        net: Any = kit.trained("transformer", QwenImageTransformer2DModel, tensors, JOINT_ATTENTION_LAYERS)
        last = f"transformer_blocks.{len(net.transformer_blocks) - 1}."
        vain = ("attn.add_q_proj.", "attn.norm_added_q.", "attn.to_add_out.", "txt_mlp.")
        net.idle = tuple(last + name for name in vain)  # nobody reads the words that leave the last block
        self.net: nn.Module = net
        codec = kit.autoencoder("vae", AutoencoderKLQwenImage, recompute=False, clips=True)
        self.codec: FrozenVae = replace(codec, net=SingleFrameVae(codec.net, spec.recompute, spec.stretch))
        self.texts = spec.texts(placement)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        told = self.texts(prompts)
        # On the host, where cutting words to the longest prompt need not wait for the device.
        return Condition(tuple(prompts), {**told, "lengths": told["lengths"].cpu()}, tuple(facts))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        words, seen = trim_padding(cond.tensors["words"], cond.tensors.get("lengths"))
        dtype = next(self.net.parameters()).dtype  # without autocast, all of them must be alike
        velocity: Tensor = self.net(
            hidden_states=x.flatten(1, 2).to(dtype),
            encoder_hidden_states=words.to(dtype),
            encoder_hidden_states_mask=None if seen is None else seen.to(x.device),
            timestep=t,
            img_shapes=[[(1, x.shape[1], x.shape[2])]] * len(x),
            return_dict=False,
        )[0]
        return velocity.view_as(x)

    def sized(self, height: int, width: int) -> QwenImageBackbone:
        other, side = copy(self), 2 * FACTOR
        other.shape, other.pixels = (height // side, width // side, 4 * CHANNELS), (1, 3, height, width)
        return other

    def encode(self, pixels: Tensor) -> Tensor:
        latents = self.codec.encode(pixels[:, 0])
        return pack_latents(latents).view(len(latents), latents.shape[2] // 2, latents.shape[3] // 2, -1)

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        shown = self.codec.decode(unpack_latents(x.flatten(1, 2), 2 * x.shape[1], 2 * x.shape[2]))[:, None]
        return shown if frames is None else shown[:, list(frames)]


def trim_padding(words: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Words [B, n, D] up to the longest prompt, and which of them are no filling; none is faster, if all are."""
    if lengths is None:
        return words, None
    longest = int(lengths.max())
    seen = torch.arange(longest) < lengths[:, None]
    return words[:, :longest], None if bool(seen.all()) else seen


def build_text_encoder(kit: PipelineComponents, length: int) -> TextEncoder:
    """Qwen2.5-VL without its eyes and its last layer, which are not asked."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    whole = kit.reader("text_encoder", Qwen2_5_VLForConditionalGeneration, "tokenizer", length)
    inner: Any = whole.net.model
    inner.visual = None
    return replace(whole, net=inner)


@dataclass(frozen=True)
class QwenImage:
    """Qwen-Image; a flow whose levels are shifted by the size of the picture and stretched to end at 0.02."""

    weights: str = QWEN.hub  # a folder in diffusers' layout, or its name on the hub
    transformer: str | None = None  # one file with other weights of the network
    height: Side = 1328
    width: Side = 1328
    words: Annotated[int, Field(ge=1, le=1024)] = 512  # tokens that prompts are cut to
    recompute: bool = True  # the autoencoder's activations when its gradient is asked for
    stretch: bool = False  # where a gradient is wanted, each picture from its darkest to its brightest, as SRPO does
    embeddings: Path | None = None  # a folder `tastemaker embed` wrote; without others, no text encoder is loaded
    seed: int = 0  # of random weights
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = GaussianProcess
    layout: ClassVar[PipelineLayout] = PipelineLayout("QwenImagePipeline", "transformer", "lora_unet", keep_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height // (2 * FACTOR), self.width // (2 * FACTOR), 4 * CHANNELS

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, QWEN)

    def texts(self, placement: Placement) -> CachedTextEncoder:
        kit = PipelineComponents(self.weights, QWEN, SMALL, placement, self.seed)
        settings = {"model": "qwen_image", "words": self.words}
        return build_cached_text_encoder(
            kit, lambda: QwenPromptEncoder(kit, self), ("text_encoder",), settings, self.embeddings
        )

    def load(self, placement: Placement) -> QwenImageBackbone:
        return QwenImageBackbone(self, placement)

    def tiny(self) -> QwenImage:
        words = min(self.words, 32)
        return replace(self, weights=TINY, transformer=None, height=32, width=32, words=words, embeddings=None)
