"""Published generators at full size on fake tensors: their own code and shapes, without weights or memory.

`embed` returns empty conditioning of the right shape, so that no text encoder is loaded. LlamaGen's CUDA-graph decoder,
which needs a GPU, is replaced by one that takes the same memory and runs only the last token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from typing_extensions import override

from ..config.schema import RunConfig
from ..core.autoencoder import AutoencoderNet
from ..core.distributions import MAX_CHUNK_LOGITS, TokenSampler
from ..core.policy import Guidance, TokenDecoder
from ..core.registry import ConfigError
from ..core.types import Condition, Placement
from ..data.embedding_store import ShardedEmbeddingStore
from ..data.prompts import EditFile
from ..models.autoencoder_kl import AutoencoderKLSpec
from ..models.cogvideox import CogVideoXSpec
from ..models.component_configs import T5_XXL, ComponentConfigs
from ..models.flux2 import Flux2Spec
from ..models.flux_kontext import FluxKontextSpec
from ..models.hunyuanvideo import HunyuanVideoSpec
from ..models.latent_dit.model import LatentDitBackbone, LatentDitSpec, load_latent_dit
from ..models.llamagen.model import LlamagenBackbone, LlamagenSpec
from ..models.ltx import LtxSpec
from ..models.mochi import MochiSpec
from ..models.nets.gpt import GPT
from ..models.nets.magvit import Magvit
from ..models.nets.token_decoder import allocate_kv_cache, decode_step, transformer_blocks
from ..models.nets.vq import VQ, VQConfig
from ..models.opensora.components import T5
from ..models.opensora.model import OpenSoraBackbone, OpenSoraSpec
from ..models.pipeline_components import RANDOM, PublishedSpec
from ..models.pretrained import WeightsSource, find_cached
from ..models.pretrained_autoencoder import load_vae
from ..models.showo.model import ShowoSpec
from ..models.showo.prompt_tokenizer import BYTE_TOKENIZER
from ..models.svd import SvdSpec
from ..models.wan import NoiseLevelExperts, WanSpec

ConditioningSpec = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape without batch dimension, and dtype
SD_VAE_CHANNELS = (128, 256, 512)  # of Stable Diffusion's VAE by level; the last for all further levels
CLIP_TEXT_TOKENS = 77
TEXT_MASK = "attention_mask"  # which text tokens are not padding
ConditioningShapes = dict[str, tuple[int, ...]]
LLAMAGEN_VQ_LEVELS = {8: (1, 2, 2, 4), 16: (1, 1, 2, 2, 4)}  # channel multipliers by downsampling factor


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
                backbone, conditioning = _load_llamagen(spec, placement, sharded=sharded)
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
        for module in self.modules() if recurse else [self]:
            for key, p in module._parameters.items():
                if p is not None:
                    module._parameters[key] = nn.Parameter(fn(p.detach()), p.requires_grad)
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


def _load_pipeline(spec: Any, placement: Placement) -> tuple[Any, ConditioningSpec]:
    """Load a diffusers pipeline with random weights of the published sizes."""
    if not isinstance(spec, PublishedSpec):
        raise ConfigError(
            f"plan: expected a published generator, got {type(spec).__name__}; run a small model with `tastemaker "
            "train` instead [TM659]"
        )
    configs, settings = spec.published.configs, cast(Any, spec)  # a dataclass, which its base class is not
    hub = spec.weights if spec.weights in configs else spec.published.releases[0].hub
    parts = {f.name: None for f in fields(settings) if f.name in ("transformer", "unet")}
    backbone = replace(settings, weights=f"{RANDOM}:{hub}", **parts).load(placement)
    if isinstance(backbone.net, NoiseLevelExperts):
        backbone.net.__class__ = FakeExperts
    shapes = conditioning_shapes(spec, configs[hub])
    dtypes = {name: torch.bool if name == TEXT_MASK else placement.dtype for name in shapes}
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


def _load_llamagen(spec: LlamagenSpec, placement: Placement, *, sharded: bool) -> tuple[Any, ConditioningSpec]:
    backbone, config = FakeLlamagenBackbone(spec, placement, sharded=sharded), spec.network_config()
    if config.conditioning == "class":
        return backbone, {"label": ((), torch.long)}
    length = config.prefix_length
    return backbone, {
        "features": ((length, config.vocabulary), placement.dtype),
        "attention_mask": ((length,), torch.bool),
    }


class FakeLlamagenBackbone(LlamagenBackbone):
    """LlamaGen with decoders that need no GPU. Its hidden states are used as on a GPU, unless weights are sharded."""

    def __init__(self, spec: LlamagenSpec, placement: Placement, *, sharded: bool) -> None:
        super().__init__(replace(spec, weights=None, autoencoder=None), placement)
        self.sharded, self.dtype = sharded, placement.dtype
        if spec.autoencoder is not None:
            levels = LLAMAGEN_VQ_LEVELS.get(spec.downsample_factor, (1,) * spec.downsample_factor.bit_length())
            self.autoencoder = VQ(VQConfig(128, levels, 2, 256, spec.codebook_size, 8)).requires_grad_(False)
        assert isinstance(self.net, GPT)
        self.fake_pool = FakeDecoderPool(self.net, sharded)

    @override
    def make_decoder(
        self, cond: Condition, uniform: Tensor, choice: TokenSampler, guidance: Guidance | None
    ) -> TokenDecoder | None:
        return self.fake_pool.make_decoder(len(cond), uniform, guided=guidance is not None)

    @override
    def hidden_states(self, x: Tensor, t: Tensor, cond: Condition) -> tuple[Tensor, Tensor] | None:
        net: Any = self.net
        many = x.numel() * net.config.codebook_size > MAX_CHUNK_LOGITS
        if self.sharded or not many or type(net.output) is not nn.Linear:
            return None
        tokens, attention_mask = self.condition_tokens(cond)
        states = net.hidden_states(x[:, :-1], tokens, None, attention_mask)[0]
        return states.to(self.dtype), net.output.weight.to(self.dtype)


class FakeDecoderPool:
    """Memory and work of LlamaGen's decoders: a KV cache allocated once and, where dtypes differ, a copy of weights.

    Sharded weights (FSDP) can only be reached by whole calls: no cache is kept, it grows with each token.
    """

    def __init__(self, net: GPT, sharded: bool) -> None:
        self.net, self.sharded = net, sharded
        self.kept: list[Tensor] = []  # cache and copied weights, which stay while the network learns
        self.sequence_tokens, self.length, self.rows = 0, 0, 0  # tokens decoded in all, in a sequence, and sequences
        self.bytes_read, self.dtype = 0.0, torch.float32

    def make_decoder(self, prompts: int, uniform: Tensor, *, guided: bool) -> FakeTokenDecoder:
        rows = prompts * (2 if guided else 1)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self._param_dtype()
        if not self.sharded and not self.kept:
            stride = -(-self.net.config.head_dim // 8) * 8
            with fake_mode_of(self.net):
                cache = allocate_kv_cache(self.net.config, rows, torch.empty(0, dtype=dtype), stride)
                copied = self._is_adapted() or self._param_dtype() != dtype
                self.kept = [cache, torch.empty(self.matrix_weights() if copied else 0, dtype=dtype)]
        self.length, self.rows, self.dtype = uniform.shape[1], rows, dtype
        self.sequence_tokens += rows * self.length
        self.bytes_read += self._bytes_read(rows, self.length, dtype)
        return FakeTokenDecoder(self, rows, uniform, dtype)

    def _param_dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    def _is_adapted(self) -> bool:
        return any(not p.requires_grad for p in self.net.parameters())

    def matrix_weights(self) -> int:
        """Weights that decoding one token multiplies by: all but the embeddings."""
        blocks = sum(p.numel() for block in transformer_blocks(self.net) for p in block.parameters())
        return blocks + self.net.output.weight.numel()

    def _bytes_read(self, rows: int, length: int, dtype: torch.dtype) -> float:
        """All matrices once per token, and the keys and values of half of the places on average."""
        shape = self.net.config
        place = 2.0 * shape.depth * (shape.kv_heads or shape.heads) * -(-shape.head_dim // 8) * 8 * dtype.itemsize
        return length * (self.matrix_weights() * dtype.itemsize + rows * (shape.prefix_length + length / 2) * place)

    def decode_token(self, rows: int, place: int, dtype: torch.dtype) -> None:
        """Run one token of every row at a place of the sequence."""
        shape = self.net.config
        with fake_mode_of(self.net):
            ids = torch.empty(rows, dtype=torch.long)
            attention_mask = (
                None if shape.conditioning == "class" else torch.ones(rows, shape.prefix_length, dtype=torch.bool)
            )
            if not self.sharded:
                cache = self.kept[0] if self.kept and self.kept[0].shape[2] == rows else None
                if cache is None:
                    cache = allocate_kv_cache(shape, rows, torch.empty(0, dtype=dtype), shape.head_dim)
                decode_step(self.net, ids, attention_mask, cache[..., : shape.head_dim], place)
                return
            heads = shape.kv_heads or shape.heads
            keys, values = (torch.empty(rows, heads, place, shape.head_dim, dtype=dtype) for _ in range(2))
            past = tuple((keys.clone(), values.clone()) for _ in range(shape.depth))
            self.net(ids[:, None], None, past, attention_mask)


@dataclass
class FakeTokenDecoder:
    """A `TokenDecoder` that computes only the last token, when the cache is full."""

    pool: FakeDecoderPool
    rows: int
    uniform: Tensor  # [B, L]
    dtype: torch.dtype
    written: int = field(default=0)

    @property
    def ids(self) -> Tensor:
        return torch.zeros_like(self.uniform, dtype=torch.long)

    @property
    def log_prob(self) -> Tensor:
        return torch.zeros_like(self.uniform)

    def decode_next(self) -> None:
        self.written += 1
        if self.written == self.uniform.shape[1]:
            self.pool.decode_token(self.rows, self.pool.net.config.prefix_length + self.written - 1, self.dtype)

    def replace_last(self, ids: Tensor) -> None:
        pass

    def select(self, rows: Tensor) -> Self:
        return self


def fake_mode_of(net: nn.Module) -> FakeTensorMode:
    """The mode that the parameters of a fake network were created in."""
    mode: FakeTensorMode = next(p for p in net.parameters()).fake_mode  # type: ignore[attr-defined]
    return mode


def conditioning_shapes(spec: Any, sizes: ComponentConfigs) -> ConditioningShapes:
    """Shapes of a model's conditioning tensors by name, without the batch dimension."""
    video_shapes = VIDEO_MODELS.get(type(spec))
    if video_shapes is None:
        return image_model_shapes(spec, sizes)
    return video_shapes(spec, sizes.get("transformer", sizes.get("unet", {})))


def masked_text_shapes(spec: Any, width: int) -> ConditioningShapes:
    return {"prompt_embeds": (spec.max_text_tokens, width), TEXT_MASK: (spec.max_text_tokens,)}


VIDEO_MODELS: dict[type, Callable[[Any, dict[str, Any]], ConditioningShapes]] = {
    WanSpec: lambda spec, net: {"prompt_embeds": (spec.max_text_tokens, net["text_dim"])},
    CogVideoXSpec: lambda spec, net: {"prompt_embeds": (spec.max_text_tokens, net["text_embed_dim"])},
    LtxSpec: lambda spec, net: masked_text_shapes(spec, net["caption_channels"]),
    MochiSpec: lambda spec, net: masked_text_shapes(spec, net["text_embed_dim"]),
    HunyuanVideoSpec: lambda spec, net: {
        **masked_text_shapes(spec, net["text_embed_dim"]),
        "pooled_prompt_embeds": (net["pooled_projection_dim"],),
    },
    SvdSpec: lambda spec, net: {"look": (1, net["cross_attention_dim"]), "reference": spec.shape[1:]},
}


def image_model_shapes(spec: Any, sizes: ComponentConfigs) -> ConditioningShapes:
    """Shapes for image models, and for video models with a UNet."""
    if "unet" in sizes:
        shapes: ConditioningShapes = {"prompt_embeds": (CLIP_TEXT_TOKENS, int(sizes["unet"]["cross_attention_dim"]))}
        shapes |= {"fps": ()} if sizes["unet"].get("fps_cond") else {}
        return shapes | ({"pooled_prompt_embeds": (1280,)} if "addition_embed_type" in sizes["unet"] else {})
    net = sizes["transformer"]
    if "pooled_projection_dim" not in net:  # Qwen-Image, FLUX.2 and Z-Image have no pooled embedding
        width = net["joint_attention_dim"] if "joint_attention_dim" in net else net["cap_feat_dim"]
        return {"prompt_embeds": (spec.max_text_tokens, int(width))}
    before = CLIP_TEXT_TOKENS if "text_encoder_3" in sizes else 0
    shapes = {
        "prompt_embeds": (before + spec.max_text_tokens, int(net["joint_attention_dim"])),
        "pooled_prompt_embeds": (int(net["pooled_projection_dim"]),),
    }
    if isinstance(spec, FluxKontextSpec):  # reads the tokens of the image that it edits, patches of 2x2 latents
        channels, height, width = spec.shape[-3:]
        shapes["reference"] = (height * width // 4, 4 * channels)
    return shapes
