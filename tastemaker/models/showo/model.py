"""Show-o: one transformer over text and image tokens that generates images by masked-token prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ...core.cards import IMAGE_COT
from ...core.distributions import Categorical
from ...core.guidance import batch_conditions
from ...core.policy import Backbone, Guidance, Process
from ...core.registry import ConfigError
from ...core.safe_files import read_json
from ...core.types import Condition, Corrupted, Metadata, Placement, Prompts
from ...processes.masked import MaskedProcess
from .. import loading
from ..image_tokenizer import CodebookSize, Count, TokenGridSpec
from ..nets.magvit import Magvit, MagvitConfig, MagvitStages
from ..nets.showo import (
    PromptPrefixCache,
    ShowoConfig,
    ShowoTransformer,
    ShowoVocabulary,
    omni_attention_mask,
    trim_left_padding,
)
from ..nets.vq import ColorTokenizer
from ..pipeline_components import TINY
from ..pretrained import WeightsSource
from .inpainting import known_tokens
from .joint import joint_log_likelihood
from .prompt_tokenizer import BYTE_TOKENIZER, PHI, ShowoPromptTokenizer, load_text_tokenizer
from .vision_encoder import CLIP, ClipVisionEncoder, vision_feature_size
from .vqa import AnswerLogits, score_answers

FILE = "pytorch_model.safetensors"
MAGVIT = WeightsSource("showlab/magvitv2", FILE, "0.4 GB", "MIT")
SHOWO_LICENSES = {"show-o": "MIT", "show-o-512x512": "Apache-2.0", "show-o-512x512-wo-llava-tuning": "Apache-2.0"}
CLIP_VIT_RELEASES = ("show-o-w-clip-vit", "show-o-w-clip-vit-512x512")  # these read CLIP features
COT_STAGES = {
    "dpo": "dpo",
    "dpo_iter": "dpo_iter",
    "dpo_iter_parm_guide": "dpo_iter_parm_gudie",  # the folder is misspelled on the hub
    "dpo_iter_parm_gudie": "dpo_iter_parm_gudie",
}
# Released weights, by the names that `weights` takes.
PUBLISHED_SHOWO = {
    **{
        f"showlab/{name}": WeightsSource(f"showlab/{name}", FILE, "5.8 GB", license)
        for name, license in SHOWO_LICENSES.items()
    },
    **{f"showlab/{name}": WeightsSource(f"showlab/{name}", FILE, "5.8 GB") for name in CLIP_VIT_RELEASES},
    **{name: WeightsSource(IMAGE_COT, f"{folder}/pytorch_model.bin", "2.9 GB") for name, folder in COT_STAGES.items()},
}


class ShowoBackbone(Backbone):
    """Predicts all image tokens from a prompt and the tokens that are not masked."""

    forward_passes = 1
    answers_questions = True

    def __init__(self, spec: ShowoSpec, placement: Placement) -> None:
        self.device, self.likelihood_scope = placement.device, spec.likelihood_scope
        self.shape: tuple[int, ...] = spec.shape
        self.pixels = (1, 3, spec.image_size, spec.image_size)
        self.vocabulary = spec.network_config().vocabulary
        tokenizer = load_text_tokenizer(spec.tokenizer, self.vocabulary)
        self.prompt_tokenizer = ShowoPromptTokenizer(self.vocabulary, tokenizer, spec.max_text_tokens + 1)
        self.autoencoder = load_magvit(spec, placement)
        vision = spec.vision_encoder
        self.vision_encoder = None if vision is None else ClipVisionEncoder(vision, placement, spec.seed)
        self.net: nn.Module = build_network(spec, placement)

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        tensors = {"text": self.prompt_tokenizer(prompts).to(self.device)}
        known = known_tokens(self, metadata, self.vocabulary.codebook_size)
        return Condition(tuple(prompts), tensors if known is None else {**tensors, "known": known}, tuple(metadata))

    def known_tokens(self, cond: Condition) -> Tensor | None:
        return cond.tensors.get("known")

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        return self._logits(x, cond, slice(1, x.shape[1] + 1), self.vocabulary.image_ids)

    def _logits(self, x: Tensor, cond: Condition, positions: slice, vocabulary: slice) -> Tensor:
        """Logits of a slice of the vocabulary at a slice of the image's positions, of which <|soi|> is the first."""
        text, padding, removed = trim_left_padding(cond.tensors["text"], self.vocabulary.pad_id)
        ids = torch.cat([text, self.vocabulary.wrap_image_tokens(x)], 1)
        start = text.shape[1]
        mask = omni_attention_mask(padding, start, ids.shape[1])
        within = slice(start + (positions.start or 0), None if positions.stop is None else start + positions.stop)
        logits: Tensor = self.net(ids, mask, positions=within, vocabulary=vocabulary, start_position=removed)[0]
        return logits

    def make_predictor(self, cond: Condition, guidance: Guidance | None) -> PromptPrefixCache:
        text = (batch_conditions(cond) if guidance else cond).tensors["text"]
        return PromptPrefixCache(self.net, self.vocabulary, text, guidance)

    def likelihood(self, x: Tensor, noisy: Corrupted, cond: Condition) -> Tensor | None:
        """Log-likelihood of the masked tokens among the whole vocabulary; with <|soi|> and <|eoi|> if "sequence"."""
        if self.likelihood_scope == "codebook":
            return None
        logits = self._logits(noisy.x, cond, slice(None), slice(None))
        counted = F.pad(noisy.noise, (1, 1), value=self.likelihood_scope == "sequence")
        return (Categorical(logits).log_prob(self.vocabulary.wrap_image_tokens(x)) * counted).sum(1)

    def score_answers(self, pixels: Tensor, turns: Sequence[Sequence[str]], answers: Sequence[str]) -> AnswerLogits:
        return score_answers(self, pixels, turns, answers)

    def joint_log_likelihood(
        self,
        x: Tensor,
        noisy: Corrupted,
        cond: Condition,
        conversations: Sequence[Metadata],
        question_pixels: Tensor,
    ) -> Tensor:
        return joint_log_likelihood(self, x, noisy, cond, conversations, question_pixels)

    def encode(self, pixels: Tensor) -> Tensor:
        # In float32, because rounding would change the signs that tokens are made of.
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            ids = self.autoencoder.encode(pixels[:, 0].float())
        return loading.check_token_count(ids, pixels, self.shape, self.pixels[-1])

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.autoencoder.decode(x.clamp(min=0))[:, None]  # masked tokens are decoded as token 0


def build_network(spec: ShowoSpec, placement: Placement) -> ShowoTransformer:
    """The transformer with its published weights, assigned without initializing it first, or with random ones."""
    dtype = loading.trainable_dtype(placement)
    if spec.weights is not None:
        with torch.device("meta"):
            net = ShowoTransformer(spec.network_config())
        source = PUBLISHED_SHOWO.get(spec.weights)
        stage = Path(spec.weights).name
        if source is None and stage in COT_STAGES and not Path(spec.weights).expanduser().exists():
            raise ConfigError(
                f"model.weights: there is no folder '{spec.weights:.200}'; for the published weights run `tastemaker "
                f"download {stage}` and set model.weights={stage}"
                " [TM900]"
            )
        tensors = loading.read_checkpoint(source.hub if source else spec.weights, source)
        loading.assign_state_dict(net, tensors, dtype, spec.weights)
        return net.to(placement.device)
    return loading.init_random(lambda: ShowoTransformer(spec.network_config()), spec.seed, placement)


def load_magvit(spec: ShowoSpec, placement: Placement) -> Magvit | ColorTokenizer:
    """The frozen image tokenizer; a ColorTokenizer if none is configured."""
    if spec.autoencoder is None:
        return ColorTokenizer(spec.codebook_size, spec.grid_size, spec.image_size).to(placement.device)
    with torch.device("meta"):
        net = Magvit(spec.autoencoder_config())
    source = MAGVIT if spec.autoencoder == MAGVIT.hub else None
    # Always in float32, because rounding would change the signs that tokens are made of.
    loading.assign_state_dict(net, loading.read_checkpoint(spec.autoencoder, source), torch.float32, spec.autoencoder)
    return net.to(placement.device).eval().requires_grad_(False)


@dataclass(frozen=True)
class ShowoSpec(TokenGridSpec):
    """Show-o: Phi-1.5 with image tokens in its vocabulary; it generates images by unmasking their tokens."""

    weights: str | None = "showlab/show-o"  # a released name, a file, a folder or a run; None: random weights
    autoencoder: str | None = MAGVIT.hub  # a hub name, file or folder; None: tokens are the colors of cells
    tokenizer: str = PHI.hub  # the text tokenizer: a folder or a hub name
    vision_encoder: str | None = None  # CLIP, for weights that read image features: a folder or a hub name
    image_size: Annotated[int, Field(ge=8, le=2048)] = 256  # pixels per side
    downsample_factor: Annotated[int, Field(ge=1, le=32)] = 16  # pixels per token, in each direction
    max_text_tokens: Annotated[int, Field(ge=4, le=1024)] = 128  # longer prompts are truncated
    # The likelihood of masked tokens among the codebook, among the whole vocabulary, or as published of the whole
    # sequence with <|soi|> and <|eoi|>.
    likelihood_scope: Literal["codebook", "vocabulary", "sequence"] = "codebook"
    codebook_size: CodebookSize = 8192
    text_vocab_size: Annotated[int, Field(ge=8, le=10**6)] = 50295
    eos_token_id: Annotated[int, Field(ge=0, le=10**6)] = 50256
    width: Annotated[int, Field(ge=8, le=16384)] = 2048
    depth: Count = 24
    heads: Annotated[int, Field(ge=1, le=256)] = 32
    intermediate_size: Annotated[int, Field(ge=8, le=65536)] = 8192
    autoencoder_channels: Annotated[int, Field(ge=8, le=1024)] = 128
    # Channel multiplier and residual blocks of each level of the autoencoder.
    encoder_levels: tuple[tuple[Count, Count], ...] = ((1, 4), (2, 3), (2, 4), (4, 3), (4, 4))
    decoder_levels: tuple[tuple[Count, Count], ...] = ((1, 4), (1, 4), (2, 3), (2, 4), (4, 3))
    seed: int = 0
    process_type: ClassVar[type[Process]] = MaskedProcess
    releases: ClassVar[tuple[WeightsSource, ...]] = tuple(PUBLISHED_SHOWO.values())

    def __post_init__(self) -> None:
        self.network_config()
        self.check_image_size("downsample_factor")
        if self.eos_token_id >= self.text_vocab_size:
            vocab = self.text_vocab_size
            raise ValueError(
                f"'eos_token_id': expected less than 'text_vocab_size' ({vocab}), got {self.eos_token_id}; "
                "correct 'eos_token_id' [TM529]"
            )
        stride = self.autoencoder_config().stride
        power_of_two = self.codebook_size & (self.codebook_size - 1) == 0
        if self.autoencoder is not None and (not power_of_two or stride != self.downsample_factor):
            raise ValueError(
                f"expected a power of two as 'codebook_size' and {stride} as 'downsample_factor', because the "
                f"autoencoder has {len(self.encoder_levels)} levels, got {self.codebook_size} and "
                f"{self.downsample_factor}; correct these settings [TM530]"
            )

    def network_config(self) -> ShowoConfig:
        vocabulary = ShowoVocabulary(self.text_vocab_size, self.eos_token_id, self.codebook_size)
        features = vision_feature_size(self.vision_encoder)
        return ShowoConfig(self.width, self.depth, self.heads, self.intermediate_size, vocabulary, features)

    def autoencoder_config(self) -> MagvitConfig:
        encoder, decoder = (
            MagvitStages(tuple(multiplier for multiplier, _ in levels), tuple(blocks for _, blocks in levels))
            for levels in (self.encoder_levels, self.decoder_levels)
        )
        return MagvitConfig(self.autoencoder_channels, self.codebook_size.bit_length() - 1, encoder, decoder)

    @property
    def grid_size(self) -> int:
        return self.image_size // self.downsample_factor

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        sources = (
            PUBLISHED_SHOWO.get(self.weights or ""),
            MAGVIT if self.autoencoder == MAGVIT.hub else None,
            PHI if self.tokenizer == PHI.hub else None,
            CLIP if self.vision_encoder == CLIP.hub else None,
        )
        return tuple(source for source in sources if source is not None)

    def load(self, placement: Placement) -> ShowoBackbone:
        return ShowoBackbone(self, placement)

    def tiny(self) -> ShowoSpec:
        return replace(
            self,
            weights=None,
            autoencoder=None,
            tokenizer=BYTE_TOKENIZER,
            vision_encoder=self.vision_encoder and TINY,
            image_size=32,
            downsample_factor=8,
            max_text_tokens=11,
            codebook_size=64,
            text_vocab_size=60,
            eos_token_id=59,
            width=32,
            depth=2,
            heads=2,
            intermediate_size=64,
        )


def infer_showo_spec(name: str) -> ShowoSpec | None:
    """The spec of a released name or of a local folder with Show-o's config.json; None for anything else."""
    if name in PUBLISHED_SHOWO:
        size = 512 if "512" in name else 256
        return ShowoSpec(name, image_size=size, vision_encoder=CLIP.hub if "clip" in name else None)
    try:
        config: Any = read_json(Path(name).expanduser() / "config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("_class_name") != "Showo":
        return None
    spec = ShowoSpec(name, vision_encoder=CLIP.hub if config.get("w_clip_vit") else None)
    grid_size = math.isqrt(int(config.get("num_vq_tokens", 256)))
    return replace(spec, image_size=grid_size * spec.downsample_factor)
