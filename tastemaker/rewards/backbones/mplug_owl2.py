"""mPLUG-Owl2, which transformers does not have: the network of DeQA-Score and Q-Align, in the layout of their files.

A vision transformer reads the image, an abstractor turns its features into 65 embeddings, and a LLaMA reads them
between two texts. Norms, keys and values of the LLaMA have two sets of weights, for text and for image positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights, load_state_dict
from ...models.sentencepiece_tokenizer import SentencepieceBpe
from .frozen_models import freeze_network, random_network, read_config

MODEL_TYPE, TOKENIZER_FILE = "mplug_owl2", "tokenizer.model"
TEXT, IMAGE = 0, 1  # which of the two sets of weights
UNUSED_KEYS = ("rotary_emb.inv_freq",)  # constants that older versions of transformers saved
BOS = "<s>"


@dataclass(frozen=True)
class OwlSizes:
    """Sizes of the three networks. Defaults are those of the published configuration class."""

    width: int = 4096
    mlp_width: int = 11008
    depth: int = 32
    heads: int = 32
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    vocabulary: int = 32000
    vision_width: int = 1024
    vision_mlp_width: int = 4096
    vision_depth: int = 24
    vision_heads: int = 16
    vision_norm_eps: float = 1e-6
    image_size: int = 448
    patch_size: int = 14
    queries: int = 64
    abstractor_depth: int = 6
    abstractor_heads: int = 16
    abstractor_mlp_width: int = 2816
    abstractor_norm_eps: float = 1e-6

    @property
    def vision_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], path: Path) -> OwlSizes:
        """The sizes of a published config.json; refuses what this network does not do."""
        vision, abstractor = (_read_part(config, name) for name in ("visual_model", "visual_abstractor"))
        heads = config.get("num_attention_heads", cls.heads)
        expected = {
            "num_key_value_heads": (config.get("num_key_value_heads") or heads, heads),
            "rope_scaling": (config.get("rope_scaling"), None),
            "attention_bias": (config.get("attention_bias", False), False),
            "hidden_act": (config.get("hidden_act", "silu"), "silu"),
            "visual_model.hidden_act": (vision.get("hidden_act", "quick_gelu"), "quick_gelu"),
            "visual_model.use_post_layernorm": (vision.get("use_post_layernorm", True), True),
            "visual_model.use_cls_token": (vision.get("use_cls_token", True), True),
            "visual_abstractor.add_v2t_pos_emb": (abstractor.get("add_v2t_pos_emb", False), False),
        }
        for name, (found, known) in expected.items():
            if found != known:
                raise ConfigError(
                    f"{path}/config.json has {name}: {found!r:.60}; this network expects {known!r}, so use the "
                    "published weights [TM2300]"
                )
        names = {
            "width": (config, "hidden_size"),
            "mlp_width": (config, "intermediate_size"),
            "depth": (config, "num_hidden_layers"),
            "heads": (config, "num_attention_heads"),
            "norm_eps": (config, "rms_norm_eps"),
            "rope_theta": (config, "rope_theta"),
            "vocabulary": (config, "vocab_size"),
            "vision_width": (vision, "hidden_size"),
            "vision_mlp_width": (vision, "intermediate_size"),
            "vision_depth": (vision, "num_hidden_layers"),
            "vision_heads": (vision, "num_attention_heads"),
            "vision_norm_eps": (vision, "layer_norm_eps"),
            "image_size": (vision, "image_size"),
            "patch_size": (vision, "patch_size"),
            "queries": (abstractor, "num_learnable_queries"),
            "abstractor_depth": (abstractor, "num_hidden_layers"),
            "abstractor_heads": (abstractor, "num_attention_heads"),
            "abstractor_mlp_width": (abstractor, "intermediate_size"),
            "abstractor_norm_eps": (abstractor, "layer_norm_eps"),
        }
        return cls(**{name: part[key] for name, (part, key) in names.items() if part.get(key) is not None})


def _read_part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    visual = config.get("visual_config")
    part = visual.get(name) if isinstance(visual, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Attention of [B, heads, L, D]; returns [B, L, heads * D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, heads * D] to [B, heads, L, D]."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


class VisionAttention(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.heads = sizes.vision_heads
        self.query_key_value = nn.Linear(sizes.vision_width, 3 * sizes.vision_width)
        self.dense = nn.Linear(sizes.vision_width, sizes.vision_width)

    def forward(self, x: Tensor) -> Tensor:
        # The fused projection is ordered [head, 3, D].
        q, k, v = self.query_key_value(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        projected: Tensor = self.dense(attend(q, k, v))
        return projected


class QuickGeluMlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        projected: Tensor = self.fc2(x * torch.sigmoid(1.702 * x))
        return projected


class VisionLayer(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(sizes.vision_width, sizes.vision_norm_eps)
        self.self_attn = VisionAttention(sizes)
        self.post_attention_layernorm = nn.LayerNorm(sizes.vision_width, sizes.vision_norm_eps)
        self.mlp = QuickGeluMlp(sizes.vision_width, sizes.vision_mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        projected: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + projected


class VisionEmbeddings(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, sizes.vision_width))
        self.patch_embed = nn.Conv2d(3, sizes.vision_width, sizes.patch_size, sizes.patch_size, bias=False)
        self.position_embedding = nn.Parameter(torch.randn(1, sizes.vision_tokens, sizes.vision_width))
        self.pre_layernorm = nn.LayerNorm(sizes.vision_width, sizes.vision_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embed(pixels).flatten(2).mT
        tokens = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], 1) + self.position_embedding
        normalized: Tensor = self.pre_layernorm(tokens)
        return normalized


class Layers(nn.Module):
    """Layers under the name `layers`."""

    def __init__(self, build: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build() for _ in range(depth))


class VisionModel(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(sizes)
        self.encoder = Layers(lambda: VisionLayer(sizes), sizes.vision_depth)
        self.post_layernorm = nn.LayerNorm(sizes.vision_width, sizes.vision_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of the class token and all patches: [B, tokens, C]."""
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        normalized: Tensor = self.post_layernorm(x)
        return normalized


class AbstractorAttention(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        width, self.heads = sizes.vision_width, sizes.abstractor_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        # Published sine and cosine tables, which the files hold.
        self.register_buffer("q_pos_embed", torch.randn(sizes.queries, width))
        self.register_buffer("k_pos_embed", torch.randn(sizes.vision_tokens, width))

    def forward(self, queries: Tensor, features: Tensor) -> Tensor:
        """Queries attend to themselves and to the features. Positions are added to queries and keys, not to values."""
        tokens = torch.cat([queries, features], 1)
        query_positions, feature_positions = self.get_buffer("q_pos_embed"), self.get_buffer("k_pos_embed")
        q = self.query(queries + query_positions)
        k = self.key(tokens + torch.cat([query_positions, feature_positions]))
        return attend(*(split_heads(x, self.heads) for x in (q, k, self.value(tokens))))


class AbstractorMlp(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        width, hidden = sizes.vision_width, sizes.abstractor_mlp_width
        self.w1, self.w2, self.w3 = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, hidden)
        self.ffn_ln = nn.LayerNorm(hidden, sizes.abstractor_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.w2(self.ffn_ln(F.silu(self.w1(x)) * self.w3(x)))
        return projected


class AbstractorOutput(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.out_proj = nn.Linear(sizes.vision_width, sizes.vision_width)
        self.norm2 = nn.LayerNorm(sizes.vision_width)
        self.mlp = AbstractorMlp(sizes)

    def forward(self, attended: Tensor, queries: Tensor) -> Tensor:
        x: Tensor = queries + self.out_proj(attended)
        projected: Tensor = self.mlp(self.norm2(x))
        return x + projected


class CrossAttention(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.norm1, self.normk = nn.LayerNorm(sizes.vision_width), nn.LayerNorm(sizes.vision_width)
        self.attention = AbstractorAttention(sizes)
        self.output = AbstractorOutput(sizes)

    def forward(self, queries: Tensor, features: Tensor) -> Tensor:
        queries = self.norm1(queries)  # also those of the residual connection
        updated: Tensor = self.output(self.attention(queries, self.normk(features)), queries)
        return updated


class AbstractorLayer(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.crossattention = CrossAttention(sizes)

    def forward(self, queries: Tensor, features: Tensor) -> Tensor:
        updated: Tensor = self.crossattention(queries, features)
        return updated


class VisualAbstractor(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.query_embeds = nn.Parameter(torch.randn(1, sizes.queries, sizes.vision_width))
        self.encoder = Layers(lambda: AbstractorLayer(sizes), sizes.abstractor_depth)
        self.visual_fc = nn.Linear(sizes.vision_width, sizes.width)
        self.vit_eos = nn.Parameter(torch.randn(1, 1, sizes.width))

    def forward(self, features: Tensor) -> Tensor:
        """Embeddings of an image for the language model: [B, queries + 1, C]."""
        queries = self.query_embeds.expand(len(features), -1, -1)
        for layer in self.encoder.layers:
            queries = layer(queries, features)
        return torch.cat([self.visual_fc(queries), self.vit_eos.expand(len(features), -1, -1)], 1)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        normalized = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normalized.to(x.dtype)


class Multiway(nn.Module):
    """Two modules: one for text positions, one for those of the image, which lie at `image` in every row."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.multiway = nn.ModuleList(build() for _ in (TEXT, IMAGE))

    def forward(self, x: Tensor, image: slice) -> Tensor:
        text = self.multiway[TEXT]
        parts = [text(x[:, : image.start]), self.multiway[IMAGE](x[:, image]), text(x[:, image.stop :])]
        return torch.cat(parts, 1)


class LlamaAttention(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.heads, width = sizes.heads, sizes.width
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj = Multiway(lambda: nn.Linear(width, width, bias=False))
        self.v_proj = Multiway(lambda: nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor, image: slice, rotation: tuple[Tensor, Tensor]) -> Tensor:
        projected = (self.q_proj(x), self.k_proj(x, image), self.v_proj(x, image))
        q, k, v = (split_heads(each, self.heads) for each in projected)
        attended: Tensor = self.o_proj(attend(rotate(q, *rotation), rotate(k, *rotation), v, causal=True))
        return attended


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of LLaMA: the first half of the channels is paired with the second one."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class SwigluMlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class LlamaLayer(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.input_layernorm = Multiway(lambda: RmsNorm(sizes.width, sizes.norm_eps))
        self.self_attn = LlamaAttention(sizes)
        self.post_attention_layernorm = Multiway(lambda: RmsNorm(sizes.width, sizes.norm_eps))
        self.mlp = SwigluMlp(sizes.width, sizes.mlp_width)

    def forward(self, x: Tensor, image: slice, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x, image), image, rotation)
        projected: Tensor = self.mlp(self.post_attention_layernorm(x, image))
        return x + projected


class OwlModel(nn.Module):
    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.depth))
        self.norm = RmsNorm(sizes.width, sizes.norm_eps)
        self.vision_model = VisionModel(sizes)
        self.visual_abstractor = VisualAbstractor(sizes)


class MplugOwl2(nn.Module):
    """The network with the names of its published tensors."""

    def __init__(self, sizes: OwlSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = OwlModel(sizes)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, pixels: Tensor, before: Sequence[int], after: Sequence[int], answers: Sequence[int]) -> Tensor:
        """Logits [B, answers] of the next token, after token ids, an image [B, 3, H, W] for each row, and token ids."""
        model = self.model
        image = model.visual_abstractor(model.vision_model(pixels))
        rows = [
            model.embed_tokens(torch.tensor([ids], device=pixels.device)).expand(len(pixels), -1, -1)
            for ids in (before, after)
        ]
        x = torch.cat([rows[0], image, rows[1]], 1)
        place, rotation = slice(len(before), len(before) + image.shape[1]), self._rotation(x)
        for layer in model.layers:
            x = layer(x, place, rotation)
        # Other tokens do not count, so that their logits are not computed.
        logits = F.linear(model.norm(x[:, -1]), self.lm_head.weight[list(answers)])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [L, D] of the positions of [B, L, C]."""
        dim, dtype = self.sizes.width // self.sizes.heads, torch.promote_types(x.dtype, torch.float32)
        frequencies = self.sizes.rope_theta ** -(torch.arange(0, dim, 2, device=x.device, dtype=dtype) / dim)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=dtype), frequencies).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@dataclass(frozen=True)
class OwlQuestion:
    """A question about an image as token ids: what stands before and after it, and the answers that count."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    answers: tuple[int, ...]


def tokenize_question(tokenizer: SentencepieceBpe, text: str, answers: Sequence[str]) -> OwlQuestion:
    """The ids of a text with `<|image|>`, and the first id of each answer.

    Each part is tokenized by itself, as published, so that the part after the image begins with a space.
    """
    before, after = text.split("<|image|>")
    ids = (tokenizer.id_of(BOS), *tokenizer.encode(before))
    return OwlQuestion(ids, tuple(tokenizer.encode(after)), tuple(tokenizer.encode(answer)[0] for answer in answers))


def load_mplug_owl2(weights: str, source: WeightsSource, placement: Placement) -> tuple[MplugOwl2, SentencepieceBpe]:
    """The frozen network and the tokenizer of a folder in the layout of the Hub. Other tensors are refused."""
    folder = find_weights(weights, source)
    folder = folder if folder.is_dir() else folder.parent
    config = read_config(folder)
    if config.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"`weights` is '{weights:.200}', a network of the type {config.get('model_type')!s:.40}; expected "
            f"{MODEL_TYPE}, such as {source} [TM2301]"
        )
    tokenizer = SentencepieceBpe.read(folder / TOKENIZER_FILE)
    sizes = OwlSizes.from_config(config, folder)
    tensors = {key: x for key, x in load_state_dict(folder).items() if not key.endswith(UNUSED_KEYS)}
    with torch.device("meta"):  # 8 billion random numbers would take minutes
        net = MplugOwl2(sizes)
    own = net.state_dict()
    wrong = [key for key in own if key not in tensors or tensors[key].shape != own[key].shape]
    wrong += [key for key in tensors if key not in own]
    if wrong:
        raise ConfigError(
            f"the tensors in {folder} do not match its config.json ('{wrong[0]}' and {len(wrong) - 1} more differ); "
            "download the folder again [TM2302]"
        )
    if len(tokenizer) > sizes.vocabulary:
        raise ConfigError(
            f"{folder / TOKENIZER_FILE} has {len(tokenizer)} tokens, but the network has {sizes.vocabulary}; use the "
            "tokenizer of this network [TM2303]"
        )
    net.load_state_dict(tensors, assign=True)
    frozen: MplugOwl2 = freeze_network(net, placement)
    return frozen, tokenizer


TINY_SIZES = OwlSizes(
    width=32, mlp_width=48, depth=2, heads=2, vocabulary=64, vision_width=32, vision_mlp_width=48, vision_depth=2,
    vision_heads=2, image_size=28, queries=4, abstractor_depth=2, abstractor_heads=2, abstractor_mlp_width=48,
)  # fmt: skip


def tiny_mplug_owl2(placement: Placement) -> MplugOwl2:
    """A small random network, for tests."""
    net: MplugOwl2 = random_network(MplugOwl2, TINY_SIZES, placement)
    return net
