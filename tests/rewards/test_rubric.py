"""The rubric: weights, breakdown, chunks, frames, threads, and what it says of rewards that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

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
from tastemaker.core.types import Metadata, Placement, Prompts
from tastemaker.rewards.color import BrightnessReward, ColorReward
from tastemaker.rewards.compression import JpegReward
from tastemaker.rewards.motion import StillnessReward

Scorer = Callable[[Tensor, Prompts, Sequence[Metadata]], Tensor]


@dataclass(frozen=True)
class Own(RewardSpec, Reward):
    """A user's reward, made of a function."""

    function: Scorer
    card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
    differentiable: bool = True
    modality: Literal["image", "video"] = "image"
    runs_on: Literal["device", "host", "remote"] = "device"
    batch_size: int = 64
    seen: list[int] = field(default_factory=list, hash=False)

    def load(self, placement: Placement) -> Own:
        return self

    def tiny(self) -> Own:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        self.seen.append(len(pixels))
        return self.function(pixels, prompts, metadata)


def rubric(weight: float = 1.0, **specs: RewardSpec) -> Rubric:
    return Rubric(
        {name: WeightedReward(spec, load_shared_reward(spec, Placement()), weight) for name, spec in specs.items()}
    )


def mean(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
    return pixels.mean((1, 2, 3, 4))


PIXELS = torch.rand(5, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ("red", "green", "blue", "grey", "a yellow bird")


def test_metadata_stay_with_their_samples_in_chunks() -> None:
    def read(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return torch.tensor([each["number"] for each in metadata])

    numbers = [float(i) for i in range(5)]
    spec = Own(read, differentiable=False, modality="video", batch_size=2)
    scores = rubric(it=spec).score(PIXELS, PROMPTS, [{"number": number} for number in numbers])
    assert scores.total.tolist() == numbers and spec.seen == [2, 2, 1]


def test_normalized_score_subtracts_the_mean_first() -> None:
    weighted = WeightedReward(BrightnessReward(), BrightnessReward(), 2.0, RewardNormalization(0.5, 0.25))
    total = Rubric({"bright": weighted}).score(PIXELS, PROMPTS).total
    torch.testing.assert_close(total, 2 * (PIXELS.mean((1, 2, 3, 4)) - 0.5) / 0.25)


def test_the_total_is_the_weighted_sum_and_the_breakdown_is_unweighted() -> None:
    graded = {
        "dark": WeightedReward(BrightnessReward(), BrightnessReward(), -2.0),
        "color": WeightedReward(ColorReward(), ColorReward(), 0.5),
    }
    scores = Rubric(graded).score(PIXELS, PROMPTS)
    torch.testing.assert_close(scores.rewards["dark"], PIXELS.mean((1, 2, 3, 4)))
    torch.testing.assert_close(scores.total, -2 * scores.rewards["dark"] + 0.5 * scores.rewards["color"])


def test_parts_keep_the_order_of_the_rubric_whichever_is_done_first() -> None:
    scores = rubric(jpeg=JpegReward(), bright=BrightnessReward(), color=ColorReward()).score(PIXELS, PROMPTS)
    assert list(scores.rewards) == ["jpeg", "bright", "color"]


def test_a_reward_of_weight_zero_is_watched_without_a_graph() -> None:
    pixels = PIXELS.clone().requires_grad_()
    watched = WeightedReward(BrightnessReward(), BrightnessReward(), 0.0)
    scores = Rubric({"watched": watched, "counts": WeightedReward(ColorReward(), ColorReward())}).score(pixels, PROMPTS)
    assert not scores.rewards["watched"].requires_grad
    torch.testing.assert_close(scores.total, scores.rewards["counts"])
    torch.testing.assert_close(scores.rewards["watched"], PIXELS.mean((1, 2, 3, 4)))


def test_a_rubric_of_watched_rewards_only_scores_zero() -> None:
    scores = rubric(0.0, bright=BrightnessReward()).score(PIXELS, PROMPTS)
    assert scores.total.tolist() == [0.0] * 5


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_chunks_give_what_one_call_gives(size: int) -> None:
    whole = rubric(color=ColorReward()).score(PIXELS, PROMPTS).total
    torch.testing.assert_close(rubric(color=ColorReward(batch_size=size)).score(PIXELS, PROMPTS).total, whole)


def test_no_call_is_larger_than_a_reward_can_bear_frames_counted() -> None:
    own = Own(mean, batch_size=4)
    rubric(own=own).score(PIXELS, PROMPTS)
    assert own.seen == [4, 4, 4, 3]


def test_a_reward_of_frames_is_the_mean_over_frames() -> None:
    each = torch.stack([ColorReward().score(PIXELS[:, k, None], PROMPTS, [{}] * 5) for k in range(3)], 1)
    torch.testing.assert_close(rubric(color=ColorReward()).score(PIXELS, PROMPTS).total, each.mean(1))


def test_a_lifted_row_knows_its_frame_and_keeps_its_metadata() -> None:
    def which(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        return torch.tensor([100.0 * fact["row"] + fact["frame"] for fact in metadata])

    metadata = [{"row": i} for i in range(5)]
    total = rubric(own=Own(which, differentiable=False)).score(PIXELS, PROMPTS, metadata).total
    assert total.tolist() == [100.0 * i + 1 for i in range(5)]  # the mean of frames 0, 1, 2
    assert metadata[0] == {"row": 0}


def test_a_reward_of_clips_sees_all_frames() -> None:
    scores = rubric(still=StillnessReward()).score(PIXELS, PROMPTS)
    torch.testing.assert_close(scores.total, 1 - (PIXELS[:, 1:] - PIXELS[:, :-1]).abs().mean((1, 2, 3, 4)))


def test_gradients_flow_through_rewards_that_have_them_beside_one_that_has_none() -> None:
    pixels = PIXELS.clone().requires_grad_()
    total = rubric(bright=BrightnessReward(), jpeg=JpegReward()).score(pixels, PROMPTS).total.sum()
    torch.testing.assert_close(torch.autograd.grad(total, pixels)[0], torch.full_like(PIXELS, 1 / PIXELS[0].numel()))


def test_a_differentiable_reward_on_the_host_keeps_its_gradient() -> None:
    pixels = PIXELS.clone().requires_grad_()
    total = rubric(own=Own(mean, runs_on="host")).score(pixels, PROMPTS).total.sum()
    torch.testing.assert_close(torch.autograd.grad(total, pixels)[0], torch.full_like(PIXELS, 1 / PIXELS[0].numel()))


def test_host_rewards_run_beside_device_rewards() -> None:
    met = threading.Barrier(2, timeout=20)

    def meet(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        met.wait()  # passes only if the other reward runs at the same time
        return pixels.mean((1, 2, 3, 4))

    host = Own(meet, differentiable=False, runs_on="host", modality="video")
    rubric(host=host, device=Own(meet, modality="video")).score(PIXELS, PROMPTS)


def test_rewards_are_computed_in_full_precision_under_autocast() -> None:
    precise = rubric(own=Own(lambda x, p, f: (x.flatten(1) @ x.flatten(1).T).sum(1), modality="video"))
    plain = precise.score(PIXELS, PROMPTS).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(precise.score(PIXELS, PROMPTS).total, plain)


def test_a_reward_that_raises_names_itself_the_prompt_and_the_cause() -> None:
    with pytest.raises(RewardError, match=r"reward 'tint' failed on \['red', 'mauve'\].*'mauve'"):
        rubric(tint=ColorReward()).score(PIXELS[:2, :1], ["red", "mauve"])


def test_a_reward_that_raises_on_the_host_does_so_too() -> None:
    def broken(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        raise OSError("no server")

    with pytest.raises(RewardError, match=r"reward 'far' failed on \['red'.*OSError: no server"):
        rubric(far=Own(broken, differentiable=False, runs_on="remote")).score(PIXELS, PROMPTS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_the_prompts(bad: float) -> None:
    values = torch.tensor([0.0, 1.0, bad, 0.0, 0.0])
    own = Own(lambda x, p, f: values, differentiable=False, modality="video")
    with pytest.raises(RewardError, match=r"reward 'own' returned NaN or infinity for \['blue'\]"):
        rubric(own=own).score(PIXELS, PROMPTS)


def test_a_reward_of_the_wrong_shape_says_which() -> None:
    own = Own(lambda x, p, f: x.mean((2, 3, 4)), modality="video")
    with pytest.raises(RewardError, match=r"reward 'own' returned shape \[5, 3\] for 5 samples \['red'"):
        rubric(own=own).score(PIXELS, PROMPTS)


def test_a_reward_that_returns_no_tensor_says_so() -> None:
    own = Own(lambda x, p, f: [0.0] * len(x), differentiable=False)  # type: ignore[arg-type, return-value]
    with pytest.raises(RewardError, match="reward 'own' returned a list"):
        rubric(own=own).score(PIXELS, PROMPTS)


def test_a_reward_that_loses_the_gradient_it_promises_is_caught() -> None:
    own = Own(lambda x, p, f: x.detach().mean((1, 2, 3, 4)))
    with pytest.raises(RewardError, match="reward 'own' is marked as differentiable"):
        rubric(own=own).score(PIXELS.clone().requires_grad_(), PROMPTS)


def test_out_of_memory_is_not_disguised() -> None:
    def large(pixels: Tensor, prompts: Prompts, metadata: Sequence[Metadata]) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        rubric(own=Own(large)).score(PIXELS, PROMPTS)


def test_prompts_that_do_not_match_the_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples, 2 prompts and 2 metadata"):
        rubric(color=ColorReward()).score(PIXELS, ["red", "blue"])


def test_no_pictures_have_no_scores() -> None:
    specs: dict[str, RewardSpec] = {"one": BrightnessReward(), "other": JpegReward()}
    rubric = Rubric({name: WeightedReward(spec, spec.load(Placement())) for name, spec in specs.items()})
    found = rubric.score(torch.zeros(0, 1, 3, 8, 8), [])
    assert found.total.shape == (0,) and [part.shape for part in found.rewards.values()] == [(0,), (0,)]


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="reward 'color' has batch_size 0"):
        rubric(color=ColorReward(batch_size=0))


def test_equal_specs_hash_equal_and_share_one_scorer() -> None:
    assert ColorReward() == ColorReward()
    assert hash(ColorReward()) == hash(ColorReward())
    assert hash(JpegReward(quality=50)) == hash(JpegReward(quality=50))
    assert load_shared_reward(JpegReward(quality=50), Placement()) is load_shared_reward(
        JpegReward(quality=50), Placement()
    )
    assert JpegReward(quality=50) != JpegReward()


def test_a_spec_that_cannot_be_hashed_gets_a_sentence() -> None:
    @dataclass(frozen=True)
    class Listed(RewardSpec):
        words: list[str]
        card: ClassVar[RewardCard] = RewardCard(range="any", failure_modes="anything")
        differentiable: bool = True
        modality: Literal["image", "video"] = "image"
        runs_on: Literal["device", "host", "remote"] = "device"
        batch_size: int = 1

        def load(self, placement: Placement) -> Own:
            return Own(mean)

        def tiny(self) -> Listed:
            return self

    with pytest.raises(ValueError, match="Listed cannot be hashed"):
        load_shared_reward(Listed(["a"]), Placement())
