"""What people rate highly, by BLIP reading the prompt beside the picture (ImageReward, Xu et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..core.reward import BatchSize, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_weights, load_state_dict
from .backbones.blip import MEAN, STD, Blip, read_blip, tiny_blip
from .backbones.loading import TINY
from .backbones.preprocessing import Preprocessing
from .backbones.tokenizers import BERT_TOKENIZER, FixedLengthTokenizer, load_tokenizer, tiny_bert_tokenizer

FILE = WeightsSource("THUDM/ImageReward", "ImageReward.pt", "1.8 GB", "Apache-2.0")
LENGTH = 35  # tokens of a prompt that are read


@dataclass(frozen=True)
class ImageReward:
    """A score of picture and prompt, centred and scaled to one over the pictures its authors collected."""

    weights: str = FILE.hub
    tokenizer: str | None = None  # folder or hub id of bert-base-uncased; else what lies beside the weights
    overshoot: Literal["clip", "keep"] = "clip"  # of the bicubic filter; ReFL keeps it
    batch_size: BatchSize = 32
    about: ClassVar[RewardCard] = RewardCard(
        range="-2 to 2",
        hacked_by="crowded, over-detailed pictures that repeat what the prompt names; grids of texture at other sizes",
        memory="1.8 GB, half of it in 16 bits",
        sources=(FILE, BERT_TOKENIZER),
    )
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames"]] = "frames"
    runs_on: ClassVar[Literal["device"]] = "device"

    def load(self, placement: Placement) -> ImageRewardScorer:
        if self.weights == TINY:
            net, reader = tiny_blip(), tiny_bert_tokenizer()
        else:
            path = find_weights(self.weights, FILE)
            path = path / FILE.file if path.is_dir() else path
            net = read_blip(load_state_dict(path), self.weights)
            reader = load_tokenizer(self.tokenizer, path, "bert", BERT_TOKENIZER, net.text.config.vocab_size)
        looks = Preprocessing(net.size, overshoot=self.overshoot, corner="round")
        return ImageRewardScorer(net.placed(placement), looks, FixedLengthTokenizer(reader, LENGTH))

    def tiny(self) -> Self:
        return replace(self, weights=TINY)


@dataclass(frozen=True)
class ImageRewardScorer:
    net: Blip
    looks: Preprocessing
    words: FixedLengthTokenizer

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Metadata]) -> Tensor:
        return self.compare(self.see(pixels), prompts)

    def see(self, pixels: Tensor) -> Tensor:
        return self.net.see(self.looks(pixels[:, 0]))

    def compare(self, seen: Tensor, prompts: Prompts) -> Tensor:
        """One look serves several prompts here too: the picture's tokens do not depend on what is read."""
        raw: Tensor = self.net(seen, **self.words(prompts, seen.device))
        return (raw - MEAN) / STD
