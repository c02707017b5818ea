"""Verify a reward: scores of small fixed samples, whether they repeat, their gradient, and published scores."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.catalog import default_spec
from ..config.registries import REWARDS
from ..config.validate import build_component
from ..core.reward import RewardSpec, Rubric, WeightedReward
from ..core.safe_files import parse_yaml
from ..core.types import Metadata
from ..data.image_io import read_image
from ..playground.edits import KINDS
from ..rewards.group import WinRateReward
from ..training.precision import choose_placement
from .library_scores import NAME, compare_with_library
from .local_weights import with_local_weights
from .reference_scores import ReferenceScore, load_reference_scores
from .report import NEEDS_DOWNLOAD, Check, Settings

COMPARED = ("published scores", NAME)  # checks of which one must pass for `matched`
PROMPTS = ('a photo of a red dog and a sign that says "exit"', 'a photo of a blue dog and a sign that says "exit"')
CAPTIONS = ("a photo of a red dog", "a photo of a blue dog")  # in the language of the playground
REMOVALS = ("remove the cell phone", "remove the cell phone")
MOVING = ("a photo of a dog moving left", "a photo of a car moving left")
INNER = {"type": "brightness"}
GROUP_SIZE = 2  # samples of each prompt
REPEATED, BATCHED = 1e-6, 1e-3  # allowed differences between two calls, and between one sample and a batch


@dataclass(frozen=True)
class RewardExample:
    """What a reward needs beside pixels, where the default is not enough."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # required ones
    prompts: tuple[str, str] = PROMPTS
    metadata: Mapping[str, Any] = field(default_factory=dict)  # added to `all_metadata`
    brings: str = ""  # what only you can give, without which published weights are not tried
    flat: str = ""  # why the gradient is zero on these samples
    together: str = ""  # why single samples cannot be scored


# What data of type `playground_edits` say about the instruction "remove the cell phone".
EDIT = {
    "kind": KINDS.index("remove"), "kept_class": 9, "kept_color": 9, "kept_center": [43.0, 19.0], "old_class": 11,
    "new_class": 11, "new_color": 8, "new_center": [35.0, 51.0], "box": [22.0, 38.0, 48.0, 64.0],
}  # fmt: skip


def mean_brightness(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    """A reward as a plain function, for the reward that calls one."""
    return images.mean((1, 2, 3))


EXAMPLES: dict[str, RewardExample] = {
    "actpred": RewardExample(metadata={"action": "riding a bike"}),
    "classifier": RewardExample(prompts=("3", "7"), brings="a classifier that you trained"),
    "clipped": RewardExample({"reward": INNER, "min": 0}),
    "discriminator": RewardExample(brings="the checkpoint of a discriminator that you trained"),
    "function": RewardExample({"function": f"{__name__}:mean_brightness"}),
    "openai_judge": RewardExample(brings="an endpoint with a judge"),
    "playground_content": RewardExample({"reward": INNER}, MOVING),
    "playground_edit": RewardExample(prompts=REMOVALS, metadata={"edit": EDIT}),
    "playground_judge": RewardExample(prompts=CAPTIONS),
    "playground_match": RewardExample(prompts=CAPTIONS),
    "playground_motion": RewardExample(prompts=MOVING),
    "playground_soft": RewardExample(prompts=CAPTIONS),
    "playground_verdict": RewardExample(prompts=CAPTIONS),
    "preference": RewardExample(brings="a preference model that you trained from votes"),
    "relative": RewardExample(
        {"reward": INNER, "positive_words": "good", "negative_words": "bad"}, flat="the reward inside ignores words"
    ),
    "remote": RewardExample(brings="a reward server (`tastemaker serve`)"),
    "shuffled": RewardExample(together="it scores a sample with the prompt of another one"),
    "sum": RewardExample({"rewards": [INNER]}),
}


def list_rewards() -> list[str]:
    """The names of all rewards."""
    return list(REWARDS)


def compared_checks(checks: Sequence[Check]) -> list[str]:
    """The comparisons that were made, or the first one if there were none."""
    made = {check.name for check in checks if check.verdict != "skip"}
    return [name for name in COMPARED if name in made] or list(COMPARED[:1])


def load_spec(name: str, settings: Settings) -> RewardSpec:
    """A reward by name, with its required settings, or by a mapping such as {type: hps}."""
    data = parse_yaml(name, "verify") if name.startswith("{") else {"type": name}
    kind = str(data["type"])
    data = {**EXAMPLES.get(kind, RewardExample()).settings, **data}
    if len(data) == 1 and default_spec(kind) is None:
        data["reward"] = INNER
    spec: RewardSpec = build_component(RewardSpec, data, "verify")
    if settings.tiny:
        return spec.tiny()
    return with_local_weights(spec, settings.weights)


def samples(frames: int, side: int) -> Tensor:
    """Four clips of a square that moves left over a gradient, in different colors: [4, frames, 3, side, side]."""
    ramp = torch.linspace(0.1, 0.9, side)
    background = torch.stack([ramp.view(1, -1).expand(side, side), ramp.view(-1, 1).expand(side, side)])
    pixels = torch.empty(2 * GROUP_SIZE, frames, 3, side, side)
    for clip, color in enumerate(((0.9, 0.1, 0.1), (0.8, 0.3, 0.2), (0.1, 0.2, 0.9), (0.3, 0.3, 0.7))):
        for frame in range(frames):
            pixels[clip, frame] = torch.stack([background[0], background[1], background.mean(0)])
            left, top = side // 2 - frame * side // (4 * frames), side // 4 + clip * side // 16
            pixels[clip, frame, :, top : top + side // 3, left : left + side // 3] = torch.tensor(color).view(3, 1, 1)
    return pixels


def all_metadata(pixels: Tensor) -> Metadata:
    """Every metadata key that some reward of this package requires, for a sample [F, 3, H, W]."""
    source = pixels.flip(-1)
    mask = torch.zeros_like(source)
    mask[..., : source.shape[-1] // 2] = 1  # a half, so that there is something outside of it too
    return {
        "image": source,
        "target": source,
        "mask": mask,
        "text": "exit",
        "tag": "single_object",
        "include": [{"class": "dog", "count": 1}],
        "fps": 8.0,
    }


def verify_reward(name: str, settings: Settings) -> Iterator[Check]:
    """Yield the checks of a reward."""
    spec, started = load_spec(name, settings), time.perf_counter()
    kind = REWARDS.name(type(spec))
    scored = WinRateReward(spec) if spec.compares_pairs else spec
    try:
        placement = choose_placement(settings.device, settings.precision)
        reward, precision = scored.load(placement), "tiny" if settings.tiny else settings.precision
        rubric = Rubric({"reward": WeightedReward(scored, reward)})
        test = RewardTest(scored, rubric, EXAMPLES.get(kind, RewardExample()), placement.device)
        with torch.no_grad():
            scores = test.score(test.pixels)
        checks: tuple[Callable[[], Check], ...] = (
            lambda: test.check_scores(scores),
            lambda: test.check_repetition(scores),
            lambda: test.check_single_samples(scores),
            test.check_gradient,
            lambda: check_references(kind, rubric, settings, placement.device),
            lambda: compare_with_library(kind, spec, reward, placement, precision),
        )
        for check in checks:
            result = check()
            seconds, started = time.perf_counter() - started, time.perf_counter()
            yield replace(result, seconds=round(seconds, 2))
    except Exception as error:  # whatever a library raises is a result
        if NEEDS_DOWNLOAD in str(error):
            raise
        yield Check("scores", "fail", reason=f"{type(error).__name__}: {error!s:.400}")


@dataclass(frozen=True)
class RewardTest:
    """A loaded reward with samples that suit it."""

    spec: RewardSpec
    rubric: Rubric
    example: RewardExample
    device: torch.device

    @property
    def pixels(self) -> Tensor:
        return samples(8 if self.spec.modality == "video" else 1, 64).to(self.device)

    @property
    def prompts(self) -> list[str]:
        return [prompt for prompt in self.example.prompts for _ in range(GROUP_SIZE)]

    def score(self, pixels: Tensor, rows: slice = slice(None), group_size: int = GROUP_SIZE) -> Tensor:
        metadata = [{**all_metadata(sample), **self.example.metadata} for sample in pixels.detach()]
        return self.rubric.score(pixels[rows], self.prompts[rows], metadata[rows], group_size).rewards["reward"]

    def check_scores(self, scores: Tensor) -> Check:
        good = len(scores) == 2 * GROUP_SIZE and all(map(math.isfinite, scores.tolist()))
        number = f"scores {', '.join(f'{score:.4g}' for score in scores.tolist())}"
        return Check("scores", "pass" if good else "fail", number, "" if good else "expected a finite score per sample")

    @torch.no_grad()
    def check_repetition(self, scores: Tensor) -> Check:
        """The same samples must get the same scores again."""
        difference = float((scores - self.score(self.pixels)).abs().max())
        good = difference <= REPEATED * max(1.0, float(scores.abs().max()))
        reason = "" if good else "scores are random; seed what the reward draws, or call its network in eval mode"
        return Check("repeated scores", "pass" if good else "fail", f"differ by {difference:.1e}", reason)

    @torch.no_grad()
    def check_single_samples(self, scores: Tensor) -> Check:
        """A sample must get the same score alone as in a batch."""
        name = "scores of single samples"
        if self.spec.needs_group or self.example.together:
            return Check(name, "skip", reason=self.example.together or "it compares the samples of a prompt")
        rows = (0, len(scores) - 1)
        alone = torch.cat([self.score(self.pixels, slice(row, row + 1), 1) for row in rows])
        difference = float((scores[list(rows)] - alone).abs().max())
        good = difference <= BATCHED * max(1.0, float(scores.abs().max()))
        reason = "" if good else "a score depends on the other samples of its batch"
        return Check(name, "pass" if good else "fail", f"differ by {difference:.1e}", reason)

    def check_gradient(self) -> Check:
        """A differentiable reward must have a finite gradient with respect to the pixels that is not zero."""
        name = "gradient"
        if not self.spec.differentiable:
            return Check(name, "skip", reason="the reward is not differentiable")
        pixels = self.pixels.requires_grad_()
        (gradient,) = torch.autograd.grad(self.score(pixels).sum(), pixels, allow_unused=True)
        size = 0.0 if gradient is None else float(gradient.norm())
        if size == 0 and self.example.flat:
            return Check(name, "skip", "norm 0", self.example.flat)
        good = math.isfinite(size) and size > 0
        reason = "" if good else "scores do not depend on the pixels through the graph"
        return Check(name, "pass" if good else "fail", f"norm {size:.3g}", reason)


@torch.no_grad()
def check_references(kind: str, rubric: Rubric, settings: Settings, device: torch.device) -> Check:
    """Compare with published scores, as far as there are any and their images are here."""
    name = COMPARED[0]
    known = [reference for reference in load_reference_scores() if reference.reward == kind]
    if not known:
        return Check(name, "skip", reason="none published")
    usable = [reference for reference in known if not (settings.tiny and reference.needs_weights)]
    if not usable:
        return Check(name, "skip", reason="published scores need published weights")
    compared = [reference for reference in usable if reference.scores]
    if not compared:
        return Check(name, "skip", reason=f"published without images: {usable[0].stated}")
    missing = [file for reference in compared for file in reference.missing_files(settings.references)]
    if missing:
        return Check(name, "skip", reason=f"put {', '.join(missing)} into the folder of --references")
    worst = 0.0
    for reference in compared:
        pixels, metadata = reference_samples(reference, settings.references)
        scores = rubric.score(pixels.to(device), list(reference.prompts), metadata).rewards["reward"].cpu()
        difference = float((scores - torch.tensor(reference.scores)).abs().max())
        if not difference <= reference.tolerance:
            number = f"got {[round(score, 4) for score in scores.tolist()]}, stated {list(reference.scores)}"
            return Check(name, "fail", number, f"more than {reference.tolerance:g} from {reference.source}")
        worst = max(worst, difference)
    return Check(name, "pass", f"scores as published, within {worst:.1e}", values={"difference": worst})


def reference_samples(reference: ReferenceScore, folder: str) -> tuple[Tensor, list[Metadata]]:
    """Pixels [B, 1, 3, H, W] and metadata of a published case: plain colors, or files of the user's folder."""

    def read(image: str | Sequence[float]) -> Tensor:
        if isinstance(image, str):
            return read_image(Path(folder) / image.rpartition("/")[2])
        return torch.tensor(image).view(1, 3, 1, 1).expand(1, 3, 32, 32)

    pixels = torch.stack([read(image) for image in reference.images])
    targets = [{"target": read(image)} for image in reference.targets] or [{} for _ in reference.images]
    return pixels, list(targets)


def reward_sources(name: str, settings: Settings) -> Sequence[Any]:
    """The published weights that a reward needs."""
    return load_spec(name, settings).sources


def needs_from_user(name: str) -> str:
    """What only the user can give for a reward that is named without settings, such as an endpoint."""
    return EXAMPLES.get(name, RewardExample()).brings
