"""Scores of rewards as transformers computes them: its processor for PIL images, its model class, and nothing of ours.

Networks of published weights are loaded by transformers from their folder. Tiny ones are saved to one first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..core.reward import Reward
from ..core.types import Placement
from ..data.image_io import to_uint8
from ..models.pretrained import WeightsSource, find_weights, silence_libraries
from ..rewards.aesthetic_v25 import SIGLIP
from ..rewards.backbones.dual_encoder import CLIP_L, load_clip_image_encoder
from ..rewards.backbones.frozen_models import TINY, read_config
from ..rewards.backbones.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from ..rewards.backbones.tokenizers import CLIP_TOKENIZER, has_tokenizer, tiny_clip_tokenizer
from ..rewards.image_similarity import DINO, load_dino
from ..rewards.pickscore import PICKSCORE
from .report import Check

NAME = "scores of transformers"
PROMPTS = ("a photo of a red dog", "a blue cat", "three", "a sign that says exit")
PREPROCESSOR = "preprocessor_config.json"
FREE_SETTINGS = ("weights", "head", "tokenizer", "divide_by", "output", "batch_size")  # others must be the defaults
TINY_SIDE = 28  # pixels of images for tiny networks
HEIGHT, WIDTH = 96, 144  # of samples: not square, and larger than tiny networks read
BICUBIC = 3  # PIL's number
# Differences over the standard deviation of the scores: processors round to 8 bits after resizing, rewards do not.
TOLERANCES = {"tiny": 0.06, "fp32": 0.15, "bf16": 0.5}


class NotComparableError(Exception):
    """The reason why transformers cannot compute the scores of a reward with these settings."""


@dataclass(frozen=True)
class LibraryCase:
    """A loaded reward, the folder of its network in transformers' layout, and samples as PIL images."""

    spec: Any
    reward: Any
    folder: Path
    images: Sequence[Image.Image]
    references: Sequence[Image.Image]
    prompts: Sequence[str]
    device: torch.device

    @property
    def is_tiny(self) -> bool:
        return bool(self.spec.weights == TINY)

    def load(self, model_class: Any) -> Any:
        """The network in 32 bits, as transformers reads it."""
        with silence_libraries():
            net = model_class.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32
            )
        return net.to(self.device).eval()

    def process(self, processor_class: Any, images: Sequence[Image.Image], **defaults: Any) -> Any:
        """Pixel values of images by the processor of the folder, or by one with the defaults of the family."""
        if (self.folder / PREPROCESSOR).is_file():
            processor = processor_class.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        else:
            processor = processor_class(**defaults)
        return processor(images=list(images), return_tensors="pt").pixel_values.to(self.device)


def clip_scores(case: LibraryCase) -> Tensor:
    """Cosines of images and prompts by CLIPModel, with the head of the reward: its scale and bias."""
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    if not case.is_tiny and read_config(case.folder).get("model_type") != "clip":
        raise NotComparableError("compared for CLIP only")
    tokenizer: Any = tiny_clip_tokenizer()
    if not case.is_tiny:
        beside = has_tokenizer(case.folder) and not case.spec.tokenizer
        source = case.spec.tokenizer or CLIP_TOKENIZER.hub
        folder = case.folder if beside else folder_of(find_weights(source, CLIP_TOKENIZER))
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokens = tokenizer(list(case.prompts), padding=True, truncation=True, max_length=77, return_tensors="pt")
    pixels = case.process(CLIPImageProcessorPil, case.images, **tiny_sizes(case))
    output = case.load(CLIPModel)(pixel_values=pixels, **tokens.to(case.device))
    scores: Tensor = case.reward.head((output.image_embeds * output.text_embeds).sum(1))
    return scores


def clip_i_scores(case: LibraryCase) -> Tensor:
    """Cosines of images and references by CLIPModel; by its image encoder alone for tiny networks."""
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPVisionModelWithProjection

    net = case.load(CLIPVisionModelWithProjection if case.is_tiny else CLIPModel)
    both = (case.process(CLIPImageProcessorPil, each, **tiny_sizes(case)) for each in (case.images, case.references))
    first, second = (
        net(pixel_values=pixels).image_embeds
        if case.is_tiny
        else net.get_image_features(pixel_values=pixels).pooler_output
        for pixels in both
    )
    return F.cosine_similarity(first, second)


def dino_scores(case: LibraryCase) -> Tensor:
    """Cosines of the class tokens of Dinov2Model, with the processor of DINOv2."""
    from transformers import BitImageProcessorPil, Dinov2Model

    if not case.is_tiny and read_config(case.folder).get("model_type") != "dinov2":
        raise NotComparableError("compared for DINOv2 only")
    settings: dict[str, Any] = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD, "resample": BICUBIC}
    sizes = {"size": {"shortest_edge": TINY_SIDE * 256 // 224}, "crop_size": TINY_SIDE}
    settings |= sizes if case.is_tiny else {"size": {"shortest_edge": 256}, "crop_size": 224}
    net = case.load(Dinov2Model)
    both = (case.process(BitImageProcessorPil, each, **settings) for each in (case.images, case.references))
    first, second = (net(pixel_values=pixels).last_hidden_state[:, 0] for pixels in both)
    return F.cosine_similarity(first, second)


def aesthetic_v25_scores(case: LibraryCase) -> Tensor:
    """The head of the reward on the unit embeddings of SiglipVisionModel."""
    from transformers import SiglipImageProcessorPil, SiglipVisionModel

    side = TINY_SIDE if case.is_tiny else 384
    pixels = case.process(SiglipImageProcessorPil, case.images, size={"height": side, "width": side})
    embedding = F.normalize(case.load(SiglipVisionModel)(pixel_values=pixels).pooler_output, dim=-1)
    scores: Tensor = embedding @ case.reward.weight + case.reward.bias
    return scores


def tiny_sizes(case: LibraryCase) -> dict[str, Any]:
    """Settings of CLIP's processor for tiny networks."""
    return {"size": {"shortest_edge": TINY_SIDE}, "crop_size": TINY_SIDE} if case.is_tiny else {}


@dataclass(frozen=True)
class LibraryReward:
    """How transformers computes the scores of a reward, and where its published network comes from."""

    scores: Callable[[LibraryCase], Tensor]
    source: WeightsSource
    network: Callable[[Any, Any, Placement], Any]  # of a spec and its loaded reward


LIBRARY = {
    "aesthetic_v25": LibraryReward(aesthetic_v25_scores, SIGLIP, lambda spec, reward, placement: reward.net),
    "clip": LibraryReward(clip_scores, CLIP_L, lambda spec, reward, placement: reward.net),
    "clip_i": LibraryReward(
        clip_i_scores, CLIP_L, lambda spec, reward, placement: load_clip_image_encoder(spec.weights, placement).net
    ),
    "dino_similarity": LibraryReward(
        dino_scores, DINO, lambda spec, reward, placement: load_dino_network(spec, placement)
    ),
    "pickscore": LibraryReward(clip_scores, PICKSCORE, lambda spec, reward, placement: reward.net),
}


def load_dino_network(spec: Any, placement: Placement) -> Any:
    encoder: Any = load_dino(spec.weights, placement)
    return encoder.net


@torch.no_grad()
def compare_with_library(kind: str, spec: Any, reward: Reward, placement: Placement, precision: str) -> Check:
    """Compare scores of fixed samples with those of transformers."""
    library = LIBRARY.get(kind)
    if library is None:
        return Check(NAME, "skip", reason="transformers does not compute this score")
    changed = [f.name for f in fields(spec) if f.name not in FREE_SETTINGS and getattr(spec, f.name) != f.default]
    if changed:
        return Check(NAME, "skip", reason=f"compared with the default '{changed[0]}' only")
    pixels, share = texture(0), torch.tensor([1.0, 0.7, 0.3, 0.0]).view(4, 1, 1, 1)
    references = share * pixels + (1 - share) * texture(1)  # more and less similar ones
    with tempfile.TemporaryDirectory() as temporary:
        is_tiny = spec.weights == TINY
        folder = Path(temporary) if is_tiny else folder_of(find_weights(spec.weights, library.source))
        if is_tiny:
            with silence_libraries():
                library.network(spec, reward, placement).save_pretrained(folder)
        images, others = (to_pil(each) for each in (pixels, references))
        try:
            case = LibraryCase(spec, reward, folder, images, others, PROMPTS, placement.device)
            expected = library.scores(case).float().cpu()
        except NotComparableError as error:
            return Check(NAME, "skip", reason=str(error))
    metadata = [{"image": from_pil(image)} for image in others]
    clips = torch.stack([from_pil(image) for image in images])
    scores = reward.score(clips.to(placement.device), PROMPTS, metadata).float().cpu()
    difference, tolerance = float((scores - expected).abs().max() / expected.std()), TOLERANCES[precision]
    good = difference <= tolerance
    number = f"scores within {difference:.1%} of their standard deviation"
    got = f"got {[round(x, 4) for x in scores.tolist()]}, transformers has {[round(x, 4) for x in expected.tolist()]}"
    reason = "" if good else f"{got}; at most {tolerance:.0%} is rounding"
    return Check(NAME, "pass" if good else "fail", number, reason, values={"difference": difference})


def texture(seed: int) -> Tensor:
    """Four images with coarse and fine structure: [4, 3, HEIGHT, WIDTH] in [0, 1]."""
    generator, total = torch.Generator().manual_seed(seed), torch.full((4, 3, HEIGHT, WIDTH), 0.5)
    for size, amplitude in ((4, 0.6), (8, 0.3), (16, 0.3), (48, 0.15)):
        noise = torch.rand(4, 3, size, size * WIDTH // HEIGHT, generator=generator) - 0.5
        total += amplitude * F.interpolate(noise, (HEIGHT, WIDTH), mode="bicubic")
    return total.clamp(0, 1)


def to_pil(images: Tensor) -> list[Image.Image]:
    return [Image.fromarray(to_uint8(image[None])[0]) for image in images]


def from_pil(image: Image.Image) -> Tensor:
    """A clip of one frame [1, 3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent
