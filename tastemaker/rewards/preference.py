"""The learned taste of people: a preference model that `tastemaker train` made from votes, as a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.registry import ConfigError
from ..core.reward import BatchSize, ImageTextTower, Reward, RewardCard, RewardSpec
from ..core.types import Metadata, Placement, Prompts
from ..models.weight_files import read_weights
from ..preferences.preference_model import LAYER_BLOCKS, FeatureLayer, PreferenceHead, encode_samples
from ..preferences.tower_adapters import PREFIX, add_adapters, load_adapter_tensors
from .clip import ClipReward
from .hps import HpsReward
from .pickscore import PickScoreReward
from .playground import PlaygroundMatchReward

PREFERENCE_FILE = "preference.safetensors"  # in the directory of the run that trained the model
TINY = Path("tiny")
TOWERS: Mapping[str, type[RewardSpec]] = {  # rewards on whose network a preference model can be trained
    "clip": ClipReward,
    "hps": HpsReward,
    "pickscore": PickScoreReward,
    "playground_match": PlaygroundMatchReward,
}


def tower_settings(tower: RewardSpec) -> dict[str, Any]:
    """The settings of a tower as plain data, with its `type`."""
    name = next((name for name, kind in TOWERS.items() if type(tower) is kind), None)
    if name is None:
        raise ConfigError(
            f"preference.tower: {type(tower).__name__} has no image-text network to train a preference model on; use "
            f"one of {', '.join(TOWERS)} [TM1301]"
        )
    fields: Any = tower  # every spec is a dataclass
    return {"type": name, **asdict(fields)}


def build_tower(settings: Mapping[str, Any]) -> RewardSpec:
    """The tower of settings that `tower_settings` returned."""
    return TOWERS[str(settings["type"])](**{key: value for key, value in settings.items() if key != "type"})


def load_tower(tower: RewardSpec, placement: Placement) -> ImageTextTower:
    """Load the frozen network of a tower."""
    tower_settings(tower)  # refuses rewards without one
    loaded = tower.load(placement).tower()
    assert loaded is not None
    return loaded


@dataclass(frozen=True)
class PreferenceReward(RewardSpec):
    """The taste learned from votes: how likely the sample is preferred to a typical one of the samples voted on.

    sigmoid(logit of A - logit of B) is the probability that A is preferred to B. Training with logits has no end, and
    soon leaves what the votes know; probabilities saturate once a sample is clearly preferred.
    """

    path: Path = Path("runs/preference-playground")  # the run that trained it, or a folder with its weights file
    output: Literal["logit", "probability", "log_probability"] = "logit"
    batch_size: BatchSize = 64
    card: ClassVar[RewardCard] = RewardCard(
        range="-5 to 5",
        failure_modes="images unlike those voted on; with reward gradients, textures: add a reward of the content",
        memory="that of its tower",
    )
    differentiable: ClassVar[bool] = True

    def load(self, placement: Placement) -> PreferenceScorer:
        if self.path == TINY:
            return PreferenceScorer.tiny(placement, self.output)
        tensors, config = read_weights(find_preference_file(self.path))
        layer: FeatureLayer = config.get("features", "")
        if layer not in LAYER_BLOCKS or not isinstance(config.get("tower"), dict):
            raise ConfigError(
                f"`path` of preference: {self.path} is not a preference model; name the run of `tastemaker train "
                "preference-playground` or a similar recipe [TM1303]"
            )
        head = PreferenceHead(len(tensors["weight"]))
        head.load_state_dict({key: x for key, x in tensors.items() if not key.startswith(PREFIX)})
        tower = load_tower(build_tower(config["tower"]), placement)
        if config.get("lora_rank"):
            load_adapters(tower, int(config["lora_rank"]), tensors, self.path)
        return PreferenceScorer(tower, head.to(placement.device), layer, self.output)

    def tiny(self) -> Self:
        return replace(self, path=TINY)


def load_adapters(tower: ImageTextTower, rank: int, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Add the adapters that were trained with a preference model to its tower, frozen."""
    adapters = add_adapters(tower, rank)
    expected = {PREFIX + name: p.shape for name, p in adapters.trainable().items()}
    wrong = [name for name, shape in expected.items() if name not in tensors or tensors[name].shape != shape]
    if wrong:
        raise ConfigError(
            f"`path` of preference: the LoRA adapters in {path!s:.200} do not fit its tower ({wrong[0]}); use the "
            "tower that they were trained with, or train the preference model again [TM1520]"
        )
    load_adapter_tensors(adapters, tensors)
    adapters.net.requires_grad_(False)


def find_preference_file(path: Path) -> Path:
    """The weights of the preference model in a run, in a folder, or the file itself."""
    file = path / PREFERENCE_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"`path` of preference: {file!s:.200} does not exist; train a preference model from votes first, for "
            "example `tastemaker train preference-playground data.path=votes.jsonl` [TM1302]"
        )
    return file


class PreferenceScorer(Reward):
    """Scores samples by the head of a preference model."""

    def __init__(self, tower: ImageTextTower, head: PreferenceHead, layer: FeatureLayer, output: str) -> None:
        self.net, self.head, self.layer, self.output = tower, head.requires_grad_(False).eval(), layer, output

    @classmethod
    def tiny(cls, placement: Placement, output: str) -> PreferenceScorer:
        """A small random tower and head, for tests; prompts are any text."""
        layer: FeatureLayer = "all"
        tower = load_tower(ClipReward(weights=str(TINY)), placement)
        pixels = torch.rand(1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(placement.device)
        width = sum(x.shape[1] for x in encode_samples(tower, pixels, [""], layer).values())
        head = PreferenceHead(width)
        with torch.no_grad():
            head.weight.copy_(torch.randn(width, generator=torch.Generator().manual_seed(0)) / width**0.5)
        return cls(tower, head.to(placement.device), layer, output)

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        texts = [str(known.get("prompt", prompt)) for prompt, known in zip(prompts, metadata, strict=True)]
        blocks = encode_samples(self.net, pixels, texts, self.layer)
        logit: Tensor = self.head(torch.cat(list(blocks.values()), 1).float())
        if self.output == "logit":
            return logit
        return logit.sigmoid() if self.output == "probability" else F.logsigmoid(logit)

    def tower(self) -> ImageTextTower:
        return self.net
