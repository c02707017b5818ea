"""VideoReward of VideoAlign: Qwen2-VL 2B that rates visual quality, motion quality and text alignment of a clip
(Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal
from weakref import WeakValueDictionary

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from ..core.reward import BatchSize, Modality, PretrainedReward, Reward, RewardCard
from ..core.types import Metadata, Placement, Prompts
from ..models.pretrained import WeightsSource, find_published_file, load_state_dict, load_weights_into
from .backbones.frozen_models import TINY
from .backbones.published_files import require_contents
from .backbones.qwen2_vl import (
    QwenPreprocessing,
    QwenRewardBackbone,
    RewardRequest,
    freeze_head,
    load_backbone,
    merge_lora,
    read_template,
    tiny_backbone,
)

FILE = WeightsSource("KlingTeam/VideoReward", "checkpoint-11352/model.pth", "5 GB", "license on its page, code MIT")
BASE = "Qwen/Qwen2-VL-2B-Instruct"
BASE_CONFIG = WeightsSource(BASE, "config.json", "2 kB", "Apache-2.0")
BASE_TOKENIZER = WeightsSource(BASE, "tokenizer.json", "7 MB", "Apache-2.0")
BASE_TOKENIZER_CONFIG = WeightsSource(BASE, "tokenizer_config.json", "5 kB", "Apache-2.0")
REWARD_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
# Mean and standard deviation of each rating over the authors' validation set, in the order of the tokens.
MEANS, STDS = (3.6757, 1.1646, 2.8105), (2.2476, 1.3811, 2.5121)
MIN_PIXELS, MAX_PIXELS = 100352, 200704
MIN_FRAMES, MAX_FRAMES = 4, 768
DEFAULT_FPS = 16.0
LORA_ALPHA = 128
HEAD = "rm_head."
Rating = Literal["visual_quality", "motion_quality", "text_alignment"]
RATINGS: tuple[Rating, ...] = ("visual_quality", "motion_quality", "text_alignment")


@dataclass(frozen=True)
class VideoAlignReward(PretrainedReward):
    """The sum of VideoReward's ratings of a clip: visual quality, motion quality and text alignment, or one of them.

    Each rating is normalized to mean 0 and standard deviation 1 over the authors' clips. Rewards with other `ratings`
    of the same weights share one network.
    """

    ratings: tuple[Rating, ...] = RATINGS
    fps: PositiveFloat | None = None  # of samples without metadata `fps`; by default the model's if known, else 16
    sampled_fps: PositiveFloat = 2.0  # of the frames that are read; the network was trained with 2
    weights: str = FILE.hub  # or a folder that holds the published file, or a file
    base: str = BASE  # folder or hub id with the config.json and the tokenizer of the base model
    round_to_bytes: bool = False  # of pixels, as in the published code; the gradient passes straight through
    batch_size: BatchSize = 2
    card: ClassVar[RewardCard] = RewardCard(
        range="-9 to 9; -3 to 3 for each rating",
        failure_modes="visual quality: an animated look; motion quality: nearly still, smooth clips, so log `dynamics` "
        "beside it; text alignment was unstable in DanceGRPO",
        memory="4.6 GB in 16 bits; 38 clips/s of 8 frames on an H200",
        sources=(FILE, BASE_CONFIG, BASE_TOKENIZER, BASE_TOKENIZER_CONFIG),
    )
    differentiable: ClassVar[bool] = True
    modality: ClassVar[Modality] = "video"

    def __post_init__(self) -> None:
        if not self.ratings or len(set(self.ratings)) != len(self.ratings):
            raise ValueError(
                f"'ratings': expected some of {', '.join(RATINGS)}, each once, got {list(self.ratings)}; correct "
                "'ratings' [TM2110]"
            )

    def load(self, placement: Placement) -> VideoAlignScorer:
        preprocessing = QwenPreprocessing(MIN_PIXELS, MAX_PIXELS, self.round_to_bytes)
        return VideoAlignScorer(self, _load_rater(self.weights, self.base, placement), preprocessing)


class VideoRater:
    """The network and its head of one row, which is read at each of the three reward tokens."""

    def __init__(self, backbone: QwenRewardBackbone, head: nn.Module) -> None:
        self.backbone, self.head = backbone, head

    def rate(self, requests: Sequence[RewardRequest], preprocessing: QwenPreprocessing) -> Tensor:
        """Normalized ratings [B, 3]; the head is computed in 32 bits, where 16 would move scores in steps of 1/64."""
        hidden = self.backbone.hidden_states(requests, preprocessing)
        raw: Tensor = self.head(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))[..., 0]
        return (raw - raw.new_tensor(MEANS)) / raw.new_tensor(STDS)


@dataclass(frozen=True)
class VideoAlignScorer(Reward):
    spec: VideoAlignReward
    rater: VideoRater
    preprocessing: QwenPreprocessing

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        columns = [RATINGS.index(rating) for rating in self.spec.ratings]
        return self.rate(pixels, prompts, metadata)[:, columns].sum(1)

    def rate(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        """Normalized ratings in the order of RATINGS: [B, 3]."""
        template, requests = read_template("videoalign.detailed_special"), []
        for clip, prompt, entry in zip(pixels, prompts, metadata, strict=True):
            fps = read_fps(entry.get("fps", self.spec.fps or DEFAULT_FPS), prompt)
            frames = clip[sample_frames(len(clip), fps, self.spec.sampled_fps).to(clip.device)]
            requests.append(RewardRequest((frames,), self.rater.backbone.fill_template(template, prompt)))
        return self.rater.rate(requests, self.preprocessing).to(pixels.device)


def read_fps(value: object, prompt: str) -> float:
    """Frames per second of a sample, checked."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1000:
        raise ValueError(
            f"the metadata `fps` of '{prompt:.80}' is {value!r:.60}; set it to the frames per second of the samples, "
            "above 0 and at most 1000 [TM2111]"
        )
    return float(value)


def sample_frames(frames: int, fps: float, sampled_fps: float) -> Tensor:
    """Indices of the frames that are read: an even number of them, evenly spaced, from the first to the last.

    A single frame is read once, and becomes two.
    """
    if frames < 2:
        return torch.zeros(frames, dtype=torch.long)
    highest = min(MAX_FRAMES, frames) // 2 * 2
    count = frames / fps * sampled_fps
    count = min(max(count, MIN_FRAMES), max(highest, MIN_FRAMES))
    count = min(round(count / 2) * 2, frames // 2 * 2)
    return torch.linspace(0, frames - 1, count).round().long()


_loaded_raters: WeakValueDictionary[tuple[str, str, Placement], VideoRater] = WeakValueDictionary()


def _load_rater(weights: str, base: str, placement: Placement) -> VideoRater:
    """The network of published tensors; rewards with the same weights and placement share one."""
    if (loaded := _loaded_raters.get((weights, base, placement))) is not None:
        return loaded
    if weights == TINY:
        backbone = tiny_backbone(REWARD_TOKENS, placement, "video")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = nn.Linear(backbone.width, 1, bias=False)
    else:
        path = find_published_file(weights, FILE, "`weights` of video_align", ("model.pth",))
        require_contents(path, "VideoReward", "`weights` of video_align")
        tensors = merge_lora(load_state_dict(path), LORA_ALPHA, path)
        body = {key: x for key, x in tensors.items() if not key.startswith(HEAD)}
        backbone = load_backbone(body, base, BASE_CONFIG, REWARD_TOKENS, path, placement, "video")
        head = nn.Linear(backbone.width, 1, bias=False)
        head_tensors = {key.removeprefix(HEAD): x for key, x in tensors.items() if key.startswith(HEAD)}
        load_weights_into(head, head_tensors, path)
    rater = _loaded_raters[weights, base, placement] = VideoRater(backbone, freeze_head(head, placement))
    return rater
