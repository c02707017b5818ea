"""Show-o as configurations name it: words and pictures by one transformer, pictures a few codes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ...core.distributions import Categorical
from ...core.guidance import batch_conditions
from ...core.policy import Guidance, Process
from ...core.types import Condition, Corrupted, Metadata, Placement, Prompts
from ...processes.masked import MaskedProcess
from .. import loading
from ..nets.color_tokenizer import ColorTokenizer
from ..nets.magvit import Magvit, MagvitConfig, MagvitStages
from ..nets.showo import ShowoConfig, ShowoVocabulary, omni_attention_mask
from ..nets.showo import ShowoTransformer as Network
from ..nets.showo_prefix_cache import PromptPrefixCache, trim_left_padding
from ..pipeline_components import TINY
from ..pretrained import WeightsSource
from ..vq import Codes, Count
from .answer_scoring import AnswerLogits, score_answers
from .inpainting import known_tokens
from .prompt_tokenizer import BYTE_TOKENIZER, PHI, ShowoPromptTokenizer, load_text_tokenizer
from .vision_encoder import CLIP, ClipVisionEncoder, vision_feature_size

COT = "ZiyuG/Image-Generation-CoT"
FILE = "pytorch_model.safetensors"
MAGVIT = WeightsSource("showlab/magvitv2", FILE, "0.4 GB", "MIT")
SHOWO = {"show-o": "MIT", "show-o-512x512": "Apache-2.0", "show-o-512x512-wo-llava-tuning": "Apache-2.0"}  # painters
CLIP_VIT_RELEASES = ("show-o-w-clip-vit", "show-o-w-clip-vit-512x512")  # that read features of CLIP
COT_STAGES = {
    "dpo": "dpo",
    "dpo_iter": "dpo_iter",
    "dpo_iter_parm_guide": "dpo_iter_parm_gudie",  # spelt so where it is published
    "dpo_iter_parm_gudie": "dpo_iter_parm_gudie",
}
PUBLISHED = {
    **{f"showlab/{name}": WeightsSource(f"showlab/{name}", FILE, "5.8 GB", licence) for name, licence in SHOWO.items()},
    **{f"showlab/{name}": WeightsSource(f"showlab/{name}", FILE, "5.8 GB") for name in CLIP_VIT_RELEASES},
    **{name: WeightsSource(COT, f"{folder}/pytorch_model.bin", "2.9 GB") for name, folder in COT_STAGES.items()},
}  # by the names that `weights` takes


class ShowoBackbone:
    """Reads a prompt and what shows of a square of codes, and predicts all of them."""

    passes = 1

    def __init__(self, spec: Showo, placement: Placement) -> None:
        self.device, self.scored = placement.device, spec.scored
        self.shape: tuple[int, ...] = spec.shape
        self.pixels = (1, 3, spec.pixels, spec.pixels)
        self.vocabulary = spec.sizes().vocabulary
        self.prompter = ShowoPromptTokenizer(
            self.vocabulary, load_text_tokenizer(spec.tokenizer, self.vocabulary), spec.words + 1
        )
        self.codec = load_image_tokenizer(spec, placement)
        self.eyes = None if spec.vision is None else ClipVisionEncoder(spec.vision, placement, spec.seed)
        self.net: nn.Module = build_network(spec, placement)

    def embed(self, prompts: Prompts, facts: Sequence[Metadata] = ()) -> Condition:
        tensors = {"text": self.prompter(prompts).to(self.device)}
        given = known_tokens(self, facts, self.vocabulary.codes)
        return Condition(tuple(prompts), tensors if given is None else {**tensors, "known": given}, tuple(facts))

    def canvas(self, cond: Condition) -> Tensor | None:
        """What is known of the pictures beforehand: [B, N], hidden elsewhere; none if nothing is."""
        return cond.tensors.get("known")

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self._read(x, cond, slice(1, x.shape[1] + 1), self.vocabulary.pictures)

    def _read(self, x: Tensor, cond: Condition, places: slice, tokens: slice) -> Tensor:
        """Logits of some tokens at some places of the picture, the mark that opens it being the first."""
        text, padding, gone = trim_left_padding(cond.tensors["text"], self.vocabulary.filling)
        ids = torch.cat([text, self.vocabulary.framed(x)], 1)
        start = text.shape[1]
        allowed = omni_attention_mask(padding, start, ids.shape[1])
        within = slice(start + (places.start or 0), None if places.stop is None else start + places.stop)
        logits: Tensor = self.net(ids, allowed, places=within, tokens=tokens, first=gone)[0]
        return logits

    def reading(self, cond: Condition, guidance: Guidance | None) -> PromptPrefixCache:
        """Who predicts for as long as weights and prompts stay the same."""
        text = (batch_conditions(cond) if guidance else cond).tensors["text"]
        return PromptPrefixCache(self.net, self.vocabulary, text, guidance)

    def likelihood(self, x: Tensor, noisy: Corrupted, cond: Condition) -> Tensor | None:
        """Among all ids, not codes alone; as published of the marks around the picture too, which always show."""
        if self.scored == "codes":
            return None
        logits = self._read(noisy.x, cond, slice(None), slice(None))
        counted = torch.nn.functional.pad(noisy.noise, (1, 1), value=self.scored == "sequence")
        return (Categorical(logits).log_prob(self.vocabulary.framed(x)) * counted).sum(1)

    def tell(self, pixels: Tensor, turns: Sequence[Sequence[str]], said: Sequence[str]) -> AnswerLogits:
        """What answers about pictures [B, 3, H, W] are scored by."""
        return score_answers(self, pixels, turns, said)

    def encode(self, pixels: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):  # rounded, signs would be others
            ids = self.codec.encode(pixels[:, 0].float())
        return loading.check_token_count(ids, pixels, self.shape, self.pixels[-1])

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.codec.decode(x.clamp(min=0))[:, None]  # what is still hidden shows as the first code


def build_network(spec: Showo, placement: Placement) -> Network:
    """Of published weights, without having been filled before; or at random, where and as it will be."""
    dtype = loading.trainable_dtype(placement)
    if spec.weights is not None:
        with torch.device("meta"):
            net = Network(spec.sizes())
        source = PUBLISHED.get(spec.weights)
        tensors = loading.read_checkpoint(source.hub if source else spec.weights, source)
        loading.assign_state_dict(net, tensors, dtype, spec.weights)
        return net.to(placement.device)
    return loading.init_random(lambda: Network(spec.sizes()), spec.seed, placement)


def load_image_tokenizer(spec: Showo, placement: Placement) -> Magvit | ColorTokenizer:
    """The published tokenizer, frozen; without a name, the colours of cells in its place."""
    if spec.codec is None:
        return ColorTokenizer(spec.codes, spec.side, spec.pixels).to(placement.device)
    with torch.device("meta"):
        net = Magvit(spec.magvit())
    source = MAGVIT if spec.codec == MAGVIT.hub else None
    # In float32 whatever else computes in: rounded, other signs would be found.
    loading.assign_state_dict(net, loading.read_checkpoint(spec.codec, source), torch.float32, spec.codec)
    return net.to(placement.device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Showo:
    """Show-o: Phi-1.5 with the codes of pictures among its words, which paints by revealing them."""

    weights: str | None = "showlab/show-o"  # as released by that name, a file, a folder or a run; at random without
    codec: str | None = MAGVIT.hub  # likewise; without one, tokens are the colours of cells
    tokenizer: str = PHI.hub  # of words: a folder, or its name on the hub
    vision: str | None = None  # CLIP, where pictures are told of by its features: a folder, or its name on the hub
    pixels: Annotated[int, Field(ge=8, le=2048)] = 256  # a side
    downsample: Annotated[int, Field(ge=1, le=32)] = 16  # pixels a token, each way
    words: Annotated[int, Field(ge=4, le=1024)] = 128  # tokens of a prompt, longer ones are cut
    # Hidden codes among codes, or among the whole vocabulary; as published the sequence, with both ends of the picture.
    scored: Literal["codes", "vocabulary", "sequence"] = "codes"
    codes: Codes = 8192
    vocabulary: Annotated[int, Field(ge=8, le=10**6)] = 50295  # of the tokenizer
    end: Annotated[int, Field(ge=0, le=10**6)] = 50256  # the id of its end of texts
    width: Annotated[int, Field(ge=8, le=16384)] = 2048
    depth: Count = 24
    heads: Annotated[int, Field(ge=1, le=256)] = 32
    inner: Annotated[int, Field(ge=8, le=65536)] = 8192
    channels: Annotated[int, Field(ge=8, le=1024)] = 128  # likewise below: of the codec
    encoder: tuple[tuple[Count, Count], ...] = ((1, 4), (2, 3), (2, 4), (4, 3), (4, 4))  # multiplier, blocks by level
    decoder: tuple[tuple[Count, Count], ...] = ((1, 4), (1, 4), (2, 3), (2, 4), (4, 3))
    seed: int = 0
    frames: ClassVar[int] = 1
    suits: ClassVar[type[Process]] = MaskedProcess

    def __post_init__(self) -> None:
        self.sizes()
        if self.pixels % self.downsample:
            found = f"'pixels' is {self.pixels}; expected a multiple of 'downsample', which is {self.downsample}"
            raise ValueError(found)
        if self.end >= self.vocabulary:
            raise ValueError(f"'end' is {self.end}; expected an id below 'vocabulary', which is {self.vocabulary}")
        if self.codec is not None and (2 ** (self.codes.bit_length() - 1), self.magvit().stride) != (
            self.codes,
            self.downsample,
        ):
            raise ValueError(
                f"found {self.codes} codes of {self.downsample} pixels a side; expected a power of two, and "
                f"{self.magvit().stride} pixels, for so many levels has the codec"
            )

    def sizes(self) -> ShowoConfig:
        words = ShowoVocabulary(self.vocabulary, self.end, self.codes)
        return ShowoConfig(self.width, self.depth, self.heads, self.inner, words, vision_feature_size(self.vision))

    def magvit(self) -> MagvitConfig:
        halves = (self.encoder, self.decoder)
        first, last = (MagvitStages(tuple(m for m, _ in half), tuple(blocks for _, blocks in half)) for half in halves)
        return MagvitConfig(self.channels, self.codes.bit_length() - 1, first, last)

    @property
    def side(self) -> int:
        """Tokens a side."""
        return self.pixels // self.downsample

    @property
    def shape(self) -> tuple[int]:
        return (self.side * self.side,)

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        named = (PUBLISHED.get(self.weights or ""), MAGVIT if self.codec == MAGVIT.hub else None)
        words = PHI if self.tokenizer == PHI.hub else None
        vision = CLIP if self.vision == CLIP.hub else None
        return tuple(source for source in (*named, words, vision) if source is not None)

    def load(self, placement: Placement) -> ShowoBackbone:
        return ShowoBackbone(self, placement)

    def tiny(self) -> Showo:
        small = replace(self, weights=None, codec=None, tokenizer=BYTE_TOKENIZER, pixels=32, downsample=8, words=11)
        small = replace(small, vision=self.vision and TINY)
        return replace(small, codes=64, vocabulary=60, end=59, width=32, depth=2, heads=2, inner=64)
