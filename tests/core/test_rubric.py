"""The rubric: weights, score breakdown, batches, frames, threads, and errors of rewards that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tastemaker.core.reward import (
    Reward,
    RewardCard,
    RewardError,
    RewardNormalization,
    RewardSpec,
    Rubric,
    WeightedReward,
    load_shared_reward,
)
from tastemaker.core.reward_inputs import copy_metadata, metadata_equal
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.function import FunctionReward, register_function
from tastemaker.rewards.motion import StillnessReward
from tastemaker.rewards.wrappers import ClippedReward

Scorer = Callable[[Tensor, Prompts, Sequence[Metadata]], Tensor]


@dataclass(frozen=True)
class CustomReward(RewardSpec, Reward):
    """A user's reward that wraps a function; records the size of every batch."""

    function: Scorer
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: bool = True
    modality: Literal["image", "video"] = "image"
    runs_on: Literal["device", "host", "remote"] = "device"
    batch_size: int = 64
    batch_sizes: list[int] = field(default_factory=list, hash=False)

    def load(self, placement: Placement) -> CustomReward:
        return self

    def tiny(self) -> CustomReward:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.batch_sizes.append(len(pixels))
        return self.function(pixels, prompts, metadata)


def rubric(weight: float = 1.0, **specs: RewardSpec) -> Rubric:
    return Rubric(
        {name: WeightedReward(spec, load_shared_reward(spec, Placement()), weight) for name, spec in specs.items()}
    )


def mean(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
    return pixels.mean((1, 2, 3, 4))


PIXELS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey", "a yellow bird")


def test_metadata_stays_with_its_samples_in_batches() -> None:
    def read_number(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return torch.tensor([each["number"] for each in metadata])

    numbers = [float(i) for i in range(5)]
    spec = CustomReward(read_number, differentiable=False, modality="video", batch_size=2)
    scores = rubric(it=spec).score(PIXELS, PROMPTS, [{"number": number} for number in numbers])
    assert scores.total.tolist() == numbers and spec.batch_sizes == [2, 2, 1]


def test_normalized_score_subtracts_the_mean_first() -> None:
    weighted = WeightedReward(BrightnessReward(), BrightnessReward(), 2.0, RewardNormalization(0.5, 0.25))
    total = Rubric({"bright": weighted}).score(PIXELS, PROMPTS).total
    torch.testing.assert_close(total, 2 * (PIXELS.mean((1, 2, 3, 4)) - 0.5) / 0.25)


def test_total_is_the_weighted_sum_of_an_unweighted_breakdown() -> None:
    weighted = {
        "dark": WeightedReward(BrightnessReward(), BrightnessReward(), -2.0),
        "color": WeightedReward(ColorReward(), ColorReward(), 0.5),
    }
    scores = Rubric(weighted).score(PIXELS, PROMPTS)
    torch.testing.assert_close(scores.rewards["dark"], PIXELS.mean((1, 2, 3, 4)))
    torch.testing.assert_close(scores.total, -2 * scores.rewards["dark"] + 0.5 * scores.rewards["color"])


def test_breakdown_keeps_the_order_of_the_rubric() -> None:
    scores = rubric(jpeg=JpegReward(), bright=BrightnessReward(), color=ColorReward()).score(PIXELS, PROMPTS)
    assert list(scores.rewards) == ["jpeg", "bright", "color"]


def test_zero_weight_reward_is_scored_with_no_graph() -> None:
    pixels = PIXELS.clone().requires_grad_()
    monitored = WeightedReward(BrightnessReward(), BrightnessReward(), 0.0)
    scores = Rubric({"monitored": monitored, "counts": WeightedReward(ColorReward(), ColorReward())}).score(
        pixels, PROMPTS
    )
    assert not scores.rewards["monitored"].requires_grad
    torch.testing.assert_close(scores.total, scores.rewards["counts"])
    torch.testing.assert_close(scores.rewards["monitored"], PIXELS.mean((1, 2, 3, 4)))


def test_rubric_of_zero_weight_rewards_totals_zero() -> None:
    scores = rubric(0.0, bright=BrightnessReward()).score(PIXELS, PROMPTS)
    assert scores.total.tolist() == [0.0] * 5


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_batched_scores_equal_one_call(size: int) -> None:
    expected = rubric(color=ColorReward()).score(PIXELS, PROMPTS).total
    torch.testing.assert_close(rubric(color=ColorReward(batch_size=size)).score(PIXELS, PROMPTS).total, expected)


def test_batch_size_limits_frames_per_call() -> None:
    custom = CustomReward(mean, batch_size=4)
    rubric(custom=custom).score(PIXELS, PROMPTS)
    assert custom.batch_sizes == [4, 4, 4, 3]


def test_image_reward_of_a_clip_is_the_mean_over_frames() -> None:
    each = torch.stack([ColorReward().score(PIXELS[:, k, None], PROMPTS, [{}] * 5) for k in range(3)], 1)
    torch.testing.assert_close(rubric(color=ColorReward()).score(PIXELS, PROMPTS).total, each.mean(1))


def test_frame_samples_get_their_frame_number_and_keep_metadata() -> None:
    def sample_and_frame(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return torch.tensor([100.0 * entry["row"] + entry["frame"] for entry in metadata])

    metadata = [{"row": i} for i in range(5)]
    total = rubric(custom=CustomReward(sample_and_frame, differentiable=False)).score(PIXELS, PROMPTS, metadata).total
    assert total.tolist() == [100.0 * i + 1 for i in range(5)]  # the mean of frames 0, 1, 2
    assert metadata[0] == {"row": 0}


def test_video_reward_gets_all_frames() -> None:
    scores = rubric(still=StillnessReward()).score(PIXELS, PROMPTS)
    torch.testing.assert_close(scores.total, 1 - (PIXELS[:, 1:] - PIXELS[:, :-1]).abs().mean((1, 2, 3, 4)))


def test_gradients_flow_through_differentiable_rewards_beside_others() -> None:
    pixels = PIXELS.clone().requires_grad_()
    total = rubric(bright=BrightnessReward(), jpeg=JpegReward()).score(pixels, PROMPTS).total.sum()
    torch.testing.assert_close(torch.autograd.grad(total, pixels)[0], torch.full_like(PIXELS, 1 / PIXELS[0].numel()))


def test_differentiable_host_reward_keeps_its_gradient() -> None:
    pixels = PIXELS.clone().requires_grad_()
    total = rubric(custom=CustomReward(mean, runs_on="host")).score(pixels, PROMPTS).total.sum()
    torch.testing.assert_close(torch.autograd.grad(total, pixels)[0], torch.full_like(PIXELS, 1 / PIXELS[0].numel()))


def test_host_rewards_run_concurrently_with_device_rewards() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def wait_for_other(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        barrier.wait()  # passes only if the other reward runs at the same time
        return pixels.mean((1, 2, 3, 4))

    host = CustomReward(wait_for_other, differentiable=False, runs_on="host", modality="video")
    rubric(host=host, device=CustomReward(wait_for_other, modality="video")).score(PIXELS, PROMPTS)


def test_rewards_are_computed_in_full_precision_under_autocast() -> None:
    matmul = rubric(custom=CustomReward(lambda x, p, f: (x.flatten(1) @ x.flatten(1).T).sum(1), modality="video"))
    expected = matmul.score(PIXELS, PROMPTS).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matmul.score(PIXELS, PROMPTS).total, expected)


def test_error_of_a_reward_names_reward_prompts_and_cause() -> None:
    with pytest.raises(RewardError, match=r"'tint'.*\['red', 'mauve'\].*'mauve'.*TM382"):
        rubric(tint=ColorReward()).score(PIXELS[:2, :1], ["red", "mauve"])


def test_error_of_a_remote_reward_names_reward_prompts_and_cause() -> None:
    def broken(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        raise OSError("no server")

    with pytest.raises(RewardError, match=r"'far'.*\['red'.*OSError: no server.*TM115"):
        rubric(far=CustomReward(broken, differentiable=False, runs_on="remote")).score(PIXELS, PROMPTS)


def test_reward_that_exits_does_not_end_the_process() -> None:
    def leaving(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        raise SystemExit(0)

    with pytest.raises(RewardError, match=r"'own'.*SystemExit.*TM115"):
        rubric(own=CustomReward(leaving)).score(PIXELS, PROMPTS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_infinite_score_names_the_prompts(bad: float) -> None:
    values = torch.tensor([0.0, 1.0, bad, 0.0, 0.0])
    custom = CustomReward(lambda x, p, f: values, differentiable=False, modality="video")
    with pytest.raises(RewardError, match=r"'custom'.*NaN.*\['blue'\].*TM117"):
        rubric(custom=custom).score(PIXELS, PROMPTS)


def test_scores_of_wrong_shape_are_refused() -> None:
    custom = CustomReward(lambda x, p, f: x.mean((2, 3, 4)), modality="video")
    with pytest.raises(RewardError, match=r"'custom'.*\[5, 3\].*\['red'.*TM116"):
        rubric(custom=custom).score(PIXELS, PROMPTS)


def test_scores_that_are_not_a_tensor_are_refused() -> None:
    custom = CustomReward(lambda x, p, f: [0.0] * len(x), differentiable=False)  # type: ignore[arg-type, return-value]
    with pytest.raises(RewardError, match=r"'custom'.*list.*TM116"):
        rubric(custom=custom).score(PIXELS, PROMPTS)


def test_differentiable_reward_with_no_gradient_is_refused() -> None:
    custom = CustomReward(lambda x, p, f: x.detach().mean((1, 2, 3, 4)))
    with pytest.raises(RewardError, match=r"'custom'.*differentiable.*TM118"):
        rubric(custom=custom).score(PIXELS.clone().requires_grad_(), PROMPTS)


def test_out_of_memory_error_is_not_wrapped() -> None:
    def run_out_of_memory(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        rubric(custom=CustomReward(run_out_of_memory)).score(PIXELS, PROMPTS)


def test_wrong_number_of_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"5 samples, 2 prompts.*TM112"):
        rubric(color=ColorReward()).score(PIXELS, ["red", "blue"])


def test_empty_batch_has_empty_scores() -> None:
    specs: dict[str, RewardSpec] = {"one": BrightnessReward(), "other": JpegReward()}
    rubric = Rubric({name: WeightedReward(spec, spec.load(Placement())) for name, spec in specs.items()})
    scores = rubric.score(torch.zeros(0, 1, 3, 8, 8), [])
    assert scores.total.shape == (0,) and [part.shape for part in scores.rewards.values()] == [(0,), (0,)]


def test_batch_size_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'color'.*batch_size 0.*TM111"):
        rubric(color=ColorReward(batch_size=0))


def test_equal_specs_hash_equal_and_share_one_scorer() -> None:
    assert ColorReward() == ColorReward()
    assert hash(ColorReward()) == hash(ColorReward())
    assert hash(JpegReward(quality=50)) == hash(JpegReward(quality=50))
    assert load_shared_reward(JpegReward(quality=50), Placement()) is load_shared_reward(
        JpegReward(quality=50), Placement()
    )
    assert JpegReward(quality=50) != JpegReward()


def test_unhashable_spec_is_refused() -> None:
    @dataclass(frozen=True)
    class UnhashableSpec(RewardSpec):
        words: list[str]
        card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
        differentiable: bool = True
        modality: Literal["image", "video"] = "image"
        runs_on: Literal["device", "host", "remote"] = "device"
        batch_size: int = 1

        def load(self, placement: Placement) -> CustomReward:
            return CustomReward(mean)

        def tiny(self) -> UnhashableSpec:
            return self

    with pytest.raises(ValueError, match=r"UnhashableSpec.*TM110"):
        load_shared_reward(UnhashableSpec(["a"]), Placement())


@pytest.mark.parametrize("runs_on", ["device", "host"])
@pytest.mark.parametrize("through_numpy", [False, True])
def test_reward_that_writes_into_its_pixels_changes_nothing_for_others(
    runs_on: Literal["device", "host"], through_numpy: bool
) -> None:
    def blacken(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        scores = mean(pixels, prompts, metadata)
        if through_numpy:
            pixels.detach().numpy()[:] = 0
        else:
            pixels.zero_()
        metadata[0]["number"] = 7
        return scores

    def user_function(images: Tensor, prompts: list[str], **metadata: object) -> Tensor:
        return blacken(images[:, None], prompts, [{}])

    pixels, metadata = PIXELS.clone(), [{"number": 1} for _ in PROMPTS]
    specs: dict[str, RewardSpec] = {
        "writer": CustomReward(blacken, differentiable=False, runs_on=runs_on),
        "function": FunctionReward(register_function(user_function), runs_on=runs_on),
        "wrapped": ClippedReward(CustomReward(blacken, differentiable=False, runs_on=runs_on), min=-9.0),
        "bright": BrightnessReward(),
    }
    for prompt_sets in ([PROMPTS], [PROMPTS, PROMPTS]):
        for scores in rubric(**specs).score_each(pixels, prompt_sets, metadata):
            for reward in scores.rewards.values():
                torch.testing.assert_close(reward, PIXELS.mean((1, 2, 3, 4)))
    assert pixels.equal(PIXELS) and metadata[0] == {"number": 1}


@pytest.mark.parametrize("runs_on", ["device", "host"])
def test_reward_that_writes_into_metadata_changes_nothing_for_others(runs_on: Literal["device", "host"]) -> None:
    def overwrite(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        scores = read_target(pixels, prompts, metadata)
        for entry in metadata:
            entry["target"].zero_()
            entry["array"][:] = 0
            entry["objects"][0]["count"] = 0
        return scores

    def read_target(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        values = [x["target"].mean() + x["array"].sum() + x["objects"][0]["count"] for x in metadata]
        return torch.stack([torch.as_tensor(value) for value in values]).float()

    shared = torch.ones(3, 4, 4)  # by the samples of a prompt
    metadata = [{"target": shared, "array": np.ones(2), "objects": [{"count": 3}]} for _ in PROMPTS]
    specs: dict[str, RewardSpec] = {
        "writer": CustomReward(overwrite, differentiable=False, runs_on=runs_on),
        "reader": CustomReward(read_target, differentiable=False),
    }
    for prompt_sets in ([PROMPTS], [PROMPTS, PROMPTS]):
        for scores in rubric(**specs).score_each(PIXELS, prompt_sets, metadata):
            for reward in scores.rewards.values():
                torch.testing.assert_close(reward, torch.full((len(PROMPTS),), 6.0))
    expected = {"target": torch.ones(3, 4, 4), "array": np.ones(2), "objects": [{"count": 3}]}
    assert metadata_equal(metadata, [expected] * len(PROMPTS))


def test_copies_of_metadata_share_what_samples_share() -> None:
    """The source image of an edit is in the metadata of each of its samples."""
    image, name = torch.full((3, 4, 4), torch.nan), object()
    copies = copy_metadata([{"image": image, "name": name, "sizes": (1, [2])}] * 3)
    assert copies[0]["image"] is copies[2]["image"] is not image and copies[1]["name"] is name
    assert copies[0] is not copies[1] and metadata_equal(copies[0], {"image": image, "name": name, "sizes": (1, [2])})
    copies[0]["image"][0, 0, 0] = 1.0
    assert not metadata_equal(copies[0], {"image": image, "name": name, "sizes": (1, [2])})


@pytest.mark.parametrize(("found", "name"), [(None, "NoneType"), ([torch.zeros(5)] * 3, "3 tensors"), (3, "int")])
def test_wrong_number_of_results_for_several_lists_of_prompts_is_refused(found: Any, name: str) -> None:
    custom = CustomReward(lambda x, p, f: mean(x, p, f), differentiable=False)  # equal ones would share a scorer
    object.__setattr__(custom, "score_prompts", lambda *arguments: found)
    with pytest.raises(RewardError, match=rf"'custom' returned .*{name} for 2 lists of prompts.*TM1183"):
        rubric(custom=custom).score_each(PIXELS, [PROMPTS, PROMPTS])


def test_meta_scores_quote_the_beginning_of_a_prompt_only() -> None:
    custom = CustomReward(lambda x, p, f: torch.zeros(len(x), device="meta"), differentiable=False)
    with pytest.raises(RewardError, match="TM1163") as caught:
        rubric(custom=custom).score(PIXELS, [f"{prompt} {'x' * 10_000}" for prompt in PROMPTS])
    assert len(str(caught.value)) < 1000


def test_gradients_pass_through_the_copy_of_a_reward_that_writes() -> None:
    def double(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return mean(pixels.mul_(2), prompts, metadata)

    pixels = PIXELS.clone().requires_grad_()
    rubric(writer=CustomReward(double), bright=BrightnessReward()).score(pixels, PROMPTS).total.sum().backward()
    assert pixels.grad is not None
    torch.testing.assert_close(pixels.grad, torch.full_like(PIXELS, 3 / PIXELS[0].numel()))


def test_rewards_of_the_package_get_no_copy() -> None:
    loaded = [spec.load(Placement()) for spec in (BrightnessReward(), JpegReward(), ClippedReward(ColorReward(), 0.0))]
    assert not any(reward.needs_copy for reward in loaded)
