"""Published generators at full size on fake tensors: their own code and shapes, without weights or memory.

`embed` returns empty conditioning of the right shape, so that no text encoder is loaded. Token decoders are those of
`fake_token_backbones`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from typing_extensions import override

from ..config.schema import RunConfig
from ..core.autoencoder import AutoencoderNet
from ..core.registry import ConfigError
from ..core.types import Condition, Placement
from ..data.embedding_store import ShardedEmbeddingStore
from ..data.prompts import EditFile
from ..models import caption_encoder
from ..models.autoencoder_kl import AutoencoderKLSpec
from ..models.cogvideox import CogVideoXSpec
from ..models.component_configs import T5_XXL, ComponentConfigs
from ..models.flux2 import Flux2Spec
from ..models.flux_kontext import FluxKontextSpec
from ..models.hunyuanvideo import HunyuanVideoSpec
from ..models.hunyuanvideo15 import GLYPH_TOKENS, HunyuanVideo15Spec
from ..models.janus.model import JanusSpec
from ..models.latent_dit.model import LatentDitBackbone, LatentDitSpec, load_latent_dit
from ..models.llamagen.model import LlamagenSpec
from ..models.ltx import LtxSpec
from ..models.ltx2 import Ltx2Spec
from ..models.mochi import MochiSpec
from ..models.nets.magvit import Magvit
from ..models.opensora.components import T5
from ..models.opensora.model import OpenSoraBackbone, OpenSoraSpec
from ..models.pipeline_components import RANDOM, SINGLE_FILES, PipelineComponents, PublishedSpec
from ..models.pretrained import WeightsSource, find_cached
from ..models.pretrained_autoencoder import load_vae
from ..models.qwen_image_21 import QwenImage21Spec
from ..models.qwen_image_edit import QwenImageEditSpec
from ..models.showo.model import ShowoSpec
from ..models.showo.prompt_tokenizer import BYTE_TOKENIZER
from ..models.svd import SvdSpec
from ..models.text_encoders import CachedTextEncoder
from ..models.wan import NoiseLevelExperts, WanSpec
from ..models.wan_i2v import WanI2VSpec
from .fake_token_backbones import ConditioningSpec, load_janus, load_llamagen

SD_VAE_CHANNELS = (128, 256, 512)  # of Stable Diffusion's VAE by level; the last for all further levels
CLIP_TEXT_TOKENS = 77
TEXT_MASKS = ("attention_mask", "glyph_mask")  # which text tokens are not padding
ConditioningShapes = dict[str, tuple[int, ...]]


@contextmanager
def load_fake_backbone(config: RunConfig, world: int = 1) -> Iterator[Any]:
    """Build the backbone of a run on fake tensors; within the block FakeTensorMode is active."""
    engine = config.engine
    dtype = torch.bfloat16 if engine.precision in ("bf16", "fp16") else torch.float32
    trained = torch.bfloat16 if engine.param_dtype == "bf16" else torch.float32
    placement = Placement(torch.device("cpu"), dtype, engine.attention_backend, trained)
    sharded = (world > 1 and engine.strategy != "replicated") or engine.cpu_offload
    spec: Any = config.model
    with TemporaryDirectory() as folder:
        # A folder of embeddings spares every model its text encoder.
        ShardedEmbeddingStore(Path(folder), {}).add([""], {"prompt_embeds": torch.zeros(1, 1)})
        if "embeddings" in {f.name for f in fields(spec)}:
            spec = replace(spec, embeddings=Path(folder))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, fake_modules():
            if isinstance(spec, LlamagenSpec):
                backbone, conditioning = load_llamagen(spec, placement, sharded=sharded)
            elif isinstance(spec, JanusSpec):
                backbone, conditioning = load_janus(spec, placement, sharded=sharded)
            elif isinstance(spec, ShowoSpec):
                backbone, conditioning = _load_showo(spec, placement)
            elif isinstance(spec, LatentDitSpec):
                backbone, conditioning = _load_latent_dit(spec, placement)
            elif isinstance(spec, OpenSoraSpec):
                backbone, conditioning = _load_opensora(spec, placement)
            else:
                backbone, conditioning = _load_pipeline(spec, replace(placement, trainable_dtype=dtype))
            if isinstance(spec, Flux2Spec) and isinstance(config.data, EditFile):  # one source image for each prompt
                conditioning["reference"] = ((1, *spec.shape[1:]), dtype)
            backbone.embed = lambda prompts, metadata=(): Condition(
                tuple(prompts), make_conditioning(conditioning, len(prompts), mode), tuple(metadata)
            )
            backbone.embed_negative = backbone.embed
            yield backbone


def make_conditioning(spec: ConditioningSpec, rows: int, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Conditioning tensors of a batch: embeddings are fake; token ids and masks are real, since code branches on them.

    Prompts differ from each other, and none is padded.
    """
    tensors = {}
    for name, (shape, dtype) in spec.items():
        if dtype.is_floating_point:
            with mode:
                tensors[name] = torch.empty(rows, *shape, dtype=dtype)
        else:
            with unset_fake_temporarily():
                ids = torch.arange(rows).view(rows, *(1 for _ in shape)).repeat(1, *shape)
                tensors[name] = torch.ones_like(ids, dtype=dtype) if dtype == torch.bool else ids
    return tensors


@contextmanager
def fake_modules() -> Iterator[None]:
    """Let modules of fake parameters be moved, cast and copied within the block: in place, or by bytes, they cannot."""
    module_class: Any = nn.Module
    tensor_class: Any = FakeTensor
    original = module_class._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        moved: dict[nn.Parameter, nn.Parameter] = {}  # several modules may share a parameter
        for module in self.modules() if recurse else [self]:
            for key, p in module._parameters.items():
                if p is not None and p not in moved:
                    moved[p] = nn.Parameter(fn(p.detach()), p.requires_grad)
                module._parameters[key] = None if p is None else moved[p]
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else fn(buffer)
        return self

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            empty = torch.empty_like(self.detach())
            memo[id(self)] = nn.Parameter(empty, self.requires_grad) if isinstance(self, nn.Parameter) else empty
        copied: Tensor = memo[id(self)]
        return copied

    module_class._apply, tensor_class.__deepcopy__ = apply, deepcopy
    try:
        yield
    finally:
        module_class._apply = original
        del tensor_class.__deepcopy__


class FakeExperts(NoiseLevelExperts):
    """Runs one expert on all rows: fake timesteps cannot choose, and a call costs the same with either."""

    @override
    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        return (self.low(hidden_states, timestep, encoder_hidden_states, return_dict=False)[0],)


def trace_qwen_image_21(
    net: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    timestep: Tensor,
    img_shapes: Any,
    img_mask: Tensor,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """The forward pass of Qwen-Image 2.1 for text-to-image, without its shapes that depend on the values of masks."""
    length = encoder_hidden_states.shape[1]
    x = torch.cat([net.txt_in(encoder_hidden_states), net.img_in(hidden_states)], 1)
    with unset_fake_temporarily():
        is_image = torch.arange(x.shape[1]) >= length
    rotary = net.pos_embed(img_shapes[0], is_image, device=torch.device("cpu"))
    temb = net.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]).to(x.dtype), x)
    settings = {"rotary_emb": rotary, "target_token_mask": is_image, "segments": [(0, length, True)]}
    modulation = net.modulation(temb)
    for block in net.transformer_blocks:
        x = block(x, modulation, **settings)
    return (net.proj_out(net.norm_out(x, temb, is_image)),)


def run_hunyuan15(
    net: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    encoder_hidden_states_2: Tensor,
    **unused: object,
) -> tuple[Tensor]:
    """The forward pass of HunyuanVideo 1.5 on text without padding: fake masks cannot select tokens."""
    text = net.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
    tokens = torch.cat([net.context_embedder_2(encoder_hidden_states_2), text], 1)
    mask = tokens[..., 0].bool()  # a fake one: attention makes a mask of all pairs of tokens of it
    x, temb, rotary = net.x_embedder(hidden_states), net.time_embed(timestep), net.rope(hidden_states)
    for block in net.transformer_blocks:
        x, tokens = block(x, tokens, temb, mask, rotary)
    output = net.proj_out(net.norm_out(x, temb))  # one token per latent
    return (output.transpose(1, 2).unflatten(2, hidden_states.shape[2:]),)


def _load_pipeline(spec: Any, placement: Placement) -> tuple[Any, ConditioningSpec]:
    """Load a diffusers pipeline with random weights of the published sizes."""
    if not isinstance(spec, PublishedSpec):
        raise ConfigError(
            f"plan: expected a published generator, got {type(spec).__name__}; run a small model with `tastemaker "
            "train` instead [TM659]"
        )
    configs, settings = spec.published.configs, cast(Any, spec)  # a dataclass, which its base class is not
    hub = spec.weights if spec.weights in configs else spec.published.releases[0].hub
    parts = {f.name: None for f in fields(settings) if f.name in SINGLE_FILES}
    backbone = replace(settings, weights=f"{RANDOM}:{hub}", **parts).load(placement)
    if isinstance(backbone.net, NoiseLevelExperts):
        backbone.net.__class__ = FakeExperts
    if isinstance(spec, QwenImage21Spec):
        backbone.net.__class__ = type("FakeQwenImage21", (type(backbone.net),), {"forward": trace_qwen_image_21})
    if isinstance(spec, HunyuanVideo15Spec):
        network_class = type(backbone.net)
        backbone.net.__class__ = type(network_class.__name__, (network_class,), {"forward": run_hunyuan15})
    shapes = conditioning_shapes(spec, configs[hub])
    dtypes = {name: torch.bool if name in TEXT_MASKS else placement.dtype for name in shapes}
    return backbone, {name: (shape, dtypes[name]) for name, shape in shapes.items()}


def _load_opensora(spec: OpenSoraSpec, placement: Placement) -> tuple[Any, ConditioningSpec]:
    backbone = OpenSoraBackbone(replace(spec, weights=RANDOM, vae=RANDOM, text_encoder=f"{RANDOM}:{T5.hub}"), placement)
    width = int(T5_XXL["d_model"])
    return backbone, {"prompt_embeds": ((spec.max_text_tokens, width), placement.dtype)}


def _load_latent_dit(spec: LatentDitSpec, placement: Placement) -> tuple[Any, ConditioningSpec]:
    net = load_latent_dit(replace(spec, weights=None), placement)
    backbone = LatentDitBackbone(spec, _fake_vae(spec, placement), net, None)
    backbone.fingerprint = PLANNED_AUTOENCODER
    config = spec.network_config()
    if config.max_text_tokens and config.text_embed_dim:
        return backbone, {"condition": ((config.max_text_tokens, config.text_embed_dim), placement.dtype)}
    if config.max_text_tokens:
        return backbone, {"condition": ((config.max_text_tokens,), torch.long)}
    return backbone, {"condition": ((), torch.long)} if config.num_classes else {}


PLANNED_AUTOENCODER = "planned"  # fingerprint that latents of a plan carry


def _fake_vae(spec: LatentDitSpec, placement: Placement) -> AutoencoderNet:
    """The VAE of a DiT if its files are here; otherwise one as large as Stable Diffusion's, with a warning."""
    missing = [
        source.hub
        for source in spec.sources
        if source.hub == spec.autoencoder and find_cached(WeightsSource(source.hub)) is None
    ]
    if missing:
        warnings.warn(
            f"plan: the autoencoder {spec.autoencoder} is not downloaded, so the estimate uses the size of Stable "
            f"Diffusion's autoencoder; download {spec.autoencoder} for an exact estimate [TM660]",
            stacklevel=2,
        )
        channels = tuple(SD_VAE_CHANNELS[min(level, 2)] for level in range(spec.downsample_factor.bit_length()))
        net = AutoencoderKLSpec(latent_channels=spec.latent_channels, block_out_channels=channels).load(placement)
        return net.requires_grad_(False).eval()
    with unset_fake_temporarily():  # weights are read from a file
        loaded: Any = load_vae(spec.autoencoder, spec.latent_channels, spec.downsample_factor, placement)
    loaded._apply(torch.empty_like)
    vae: AutoencoderNet = loaded
    return vae


def _load_showo(spec: ShowoSpec, placement: Placement) -> tuple[Any, ConditioningSpec]:
    """Show-o with prompts as long as they may be."""
    random = replace(spec, weights=None, autoencoder=None, tokenizer=BYTE_TOKENIZER, vision_encoder=None)
    backbone = random.load(placement)
    if spec.autoencoder is not None:
        backbone.autoencoder = Magvit(spec.autoencoder_config()).requires_grad_(False)

    return backbone, {"text": ((spec.max_text_tokens + 1,), torch.long)}


def held_modules(holder: Any) -> list[nn.Module]:
    """The networks that an object holds, directly or in an object of ours such as the adapter of a VAE."""
    values = vars(holder).values()
    inner = [value for value in values if type(value).__module__.startswith("tastemaker.models")]
    modules = [value for value in values if isinstance(value, nn.Module)]
    return modules + [module for value in inner if not isinstance(value, nn.Module) for module in held_modules(value)]


def lent_encoders(spec: Any, backbone: Any, dtype: torch.dtype, trained: Collection[nn.Module] = ()) -> list[nn.Module]:
    """The networks in `dtype` that stay on the CPU and visit the GPU one at a time, to embed the prompts of a batch.

    Those of source images; and those of prompts, unless their embeddings were computed before. `trained` ones stay on
    the GPU.
    """
    from transformers import PreTrainedModel, T5EncoderModel

    encoders: list[nn.Module] = [net for net in held_modules(backbone) if isinstance(net, PreTrainedModel)]
    if trained or getattr(spec, "embeddings", None) is not None:
        return [net for net in encoders if net not in trained]
    prompt_encoder = getattr(backbone, "prompt_encoder", None)
    with uninitialized_encoders():
        if isinstance(prompt_encoder, CachedTextEncoder):
            encoders += [encoder.net for encoder in prompt_encoder.encoders.text_encoders]
        elif isinstance(spec, LlamagenSpec | LatentDitSpec) and spec.conditioning == "caption":
            hub = spec.text_encoder if spec.text_encoder in caption_encoder.CONFIGS else caption_encoder.T5.hub
            settings = caption_encoder.T5, caption_encoder.TINY_CONFIGS, Placement(torch.device("cpu"), dtype)
            components = PipelineComponents(f"{RANDOM}:{hub}", *settings, published_configs=caption_encoder.CONFIGS)
            encoders.append(components.load_encoder("", T5EncoderModel))
    return encoders


@contextmanager
def uninitialized_encoders() -> Iterator[None]:
    """Within the block, networks of transformers are not initialized, which for some needs the numbers of tensors."""
    from transformers import PreTrainedModel

    network_class: Any = PreTrainedModel
    original, network_class.initialize_weights = network_class.initialize_weights, lambda self, *args, **kwargs: None
    try:
        yield
    finally:
        network_class.initialize_weights = original


def conditioning_shapes(spec: Any, sizes: ComponentConfigs) -> ConditioningShapes:
    """Shapes of a model's conditioning tensors by name, without the batch dimension."""
    video_shapes = VIDEO_MODELS.get(type(spec))
    if video_shapes is None:
        return image_model_shapes(spec, sizes)
    return video_shapes(spec, sizes.get("transformer", sizes.get("unet", {})))


def masked_text_shapes(spec: Any, width: int) -> ConditioningShapes:
    return {"prompt_embeds": (spec.max_text_tokens, width), "attention_mask": (spec.max_text_tokens,)}


def wan_i2v_shapes(spec: WanI2VSpec, net: dict[str, Any]) -> ConditioningShapes:
    """Text, the latents of the source image, and its 257 CLIP tokens if the network reads them."""
    shapes = {"prompt_embeds": (spec.max_text_tokens, net["text_dim"]), "image_latents": spec.shape}
    if spec.image_conditioning == "first_frame":
        shapes["image_latents"] = (1, *spec.shape[1:])
    return shapes | ({"image_embeds": (257, net["image_dim"])} if spec.image_conditioning == "clip" else {})


VIDEO_MODELS: dict[type, Callable[[Any, dict[str, Any]], ConditioningShapes]] = {
    WanSpec: lambda spec, net: {"prompt_embeds": (spec.max_text_tokens, net["text_dim"])},
    WanI2VSpec: wan_i2v_shapes,
    CogVideoXSpec: lambda spec, net: {"prompt_embeds": (spec.max_text_tokens, net["text_embed_dim"])},
    LtxSpec: lambda spec, net: masked_text_shapes(spec, net["caption_channels"]),
    Ltx2Spec: lambda spec, net: {
        **masked_text_shapes(spec, width := net.get("caption_channels", 3840)),
        "audio_prompt_embeds": (spec.max_text_tokens, width),
    },
    MochiSpec: lambda spec, net: masked_text_shapes(spec, net["text_embed_dim"]),
    HunyuanVideoSpec: lambda spec, net: {
        **masked_text_shapes(spec, net["text_embed_dim"]),
        "pooled_prompt_embeds": (net["pooled_projection_dim"],),
    },
    HunyuanVideo15Spec: lambda spec, net: {
        **masked_text_shapes(spec, net.get("text_embed_dim", 3584)),
        "glyph_embeds": (GLYPH_TOKENS, net.get("text_embed_2_dim", 1472)),
        "glyph_mask": (GLYPH_TOKENS,),
    },
    SvdSpec: lambda spec, net: {"look": (1, net["cross_attention_dim"]), "reference": spec.shape[1:]},
}


def is_editor(spec: Any) -> bool:
    """Whether the network reads the tokens of an image beside those of the sample; the plan counts one, as large."""
    return isinstance(spec, FluxKontextSpec | QwenImageEditSpec)


def image_model_shapes(spec: Any, sizes: ComponentConfigs) -> ConditioningShapes:
    """Shapes for image models, and for video models with a UNet."""
    if "unet" in sizes:
        shapes: ConditioningShapes = {"prompt_embeds": (CLIP_TEXT_TOKENS, int(sizes["unet"]["cross_attention_dim"]))}
        shapes |= {"fps": ()} if sizes["unet"].get("fps_cond") else {}
        return shapes | ({"pooled_prompt_embeds": (1280,)} if "addition_embed_type" in sizes["unet"] else {})
    net = sizes["transformer"]
    if "caption_channels" in net:  # Sana
        return masked_text_shapes(spec, int(net["caption_channels"]))
    if "context_in_dim" in net:  # Qwen-Image 2.1
        return {"prompt_embeds": (spec.max_text_tokens, int(net["context_in_dim"]))}
    if "pooled_projection_dim" not in net:  # Qwen-Image, FLUX.2 and Z-Image have no pooled embedding
        width = net["joint_attention_dim"] if "joint_attention_dim" in net else net["cap_feat_dim"]
        shapes = {"prompt_embeds": (spec.max_text_tokens, int(width))}
        return shapes | ({"sources": (math.prod(spec.shape[:2]), spec.shape[2])} if is_editor(spec) else {})
    before = CLIP_TEXT_TOKENS if "text_encoder_3" in sizes else 0
    shapes = {
        "prompt_embeds": (before + spec.max_text_tokens, int(net["joint_attention_dim"])),
        "pooled_prompt_embeds": (int(net["pooled_projection_dim"]),),
    }
    if is_editor(spec):  # reads the tokens of the image that it edits, patches of 2x2 latents
        channels, height, width = spec.shape[-3:]
        shapes["reference"] = (height * width // 4, 4 * channels)
    return shapes
