"""The watcher of clips, what it learns from, and the frame of a clip that can be judged as a still."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.playground import motion
from tastemaker.playground.captions import sample_captions
from tastemaker.playground.detector import SceneDetector, decode_detections
from tastemaker.playground.motion import FRAMES, MOTIONS, animate, paint_clips
from tastemaker.playground.motion_classifier import (
    NO_MOTION,
    MotionClassifier,
    representative_frame,
    requested_motion,
    resize_clips,
)
from tastemaker.playground.motion_training import (
    CHANGING,
    FROZEN,
    NO_MOTION_KINDS,
    NOISE,
    MotionTask,
    augment_clips,
    clocks,
    paint_training_clips,
)
from tastemaker.playground.network_files import load_network
from tastemaker.playground.scenes import Painter, sample_scenes
from tastemaker.playground.train_reward_models import update
from tastemaker.playground.verdict import verdict


def rng(count: int) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def test_the_watcher_fits_into_a_megabyte() -> None:
    assert 2 * sum(weights.numel() for weights in MotionClassifier().parameters()) < 0.95e6  # bytes of float16


@pytest.mark.slow
def test_a_small_watcher_learns_the_clips_it_is_shown() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MotionClassifier((16, 16, 16))
    said = torch.arange(14) % (NO_MOTION + 1)
    clips = paint_training_clips(said % NO_MOTION, torch.where(said == NO_MOTION, FROZEN, -1), rng(14), 1.0)
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3, betas=(0.9, 0.98))
    for _ in range(30):
        update(MotionTask(net), {"clips": clips, "shown": said}, optimizer, cuda=False)
    with torch.no_grad():
        assert (net(clips).argmax(1) == said).float().mean() > 0.9


def test_a_lesson_holds_every_motion_and_clips_without_one() -> None:
    lesson = MotionTask(MotionClassifier(MotionClassifier.tiny)).lesson(rng(56))
    assert lesson["clips"].shape == (56, FRAMES, 3, 64, 64)
    assert (torch.bincount(lesson["shown"], minlength=NO_MOTION + 1) > 2).all()
    assert 0.25 < (lesson["shown"] == NO_MOTION).float().mean() < 0.55


def test_what_is_frozen_stands_still_and_what_changes_is_something_else() -> None:
    said = motion.sample_motion(rng(16))
    frozen = paint_training_clips(said, torch.full_like(said, FROZEN), rng(16), 1.0).diff(dim=1).abs().mean()
    moving = paint_training_clips(said, torch.full_like(said, -1), rng(16), 1.0).diff(dim=1).abs().mean()
    changing = paint_training_clips(said, torch.full_like(said, CHANGING), rng(16), 1.0).diff(dim=1).abs().mean()
    noise = paint_training_clips(said, torch.full_like(said, NOISE), rng(16), 1.0).diff(dim=1).abs().mean()
    assert frozen < 0.3 * moving and moving < changing < noise


@pytest.mark.parametrize("way", range(-1, len(NO_MOTION_KINDS)))
def test_only_clocks_of_clips_that_are_right_go_on_evenly(way: int) -> None:
    said = torch.full((64,), MOTIONS.index("moving up"))
    steps = clocks(said, torch.full_like(said, way), rng(64)).diff(dim=1)
    steady = ((steps > 0.02) & (steps < 0.25)).all(1)
    told_by_clocks = ("frozen", "shuffled", "jumping", "to and fro", "shrinking")
    assert not steady.any() if way >= 0 and NO_MOTION_KINDS[way] in told_by_clocks else steady.all()


def test_flaws_are_mild_and_leave_every_third_clip_alone() -> None:
    clips = paint_training_clips(motion.sample_motion(rng(24)), torch.full((24,), -1), rng(24), 1.0)
    apart = (augment_clips(clips, rng(24)) - clips).abs().mean((1, 2, 3, 4))
    assert 3 < (apart < 1e-6).sum() < 14 and apart.max() < 0.2


def test_things_may_each_have_a_motion_of_their_own() -> None:
    scenes = sample_scenes(sample_captions(rng(6)), rng(6))
    each = torch.arange(4).expand(6, -1)  # left, right, up, down
    frames, _ = animate(scenes, each)
    for thing in range(4):
        alone, _ = animate(scenes, torch.full((6,), thing))
        assert torch.equal(frames.x[:, thing], alone.x[:, thing]) and torch.equal(frames.y[:, thing], alone.y[:, thing])


def test_what_grew_is_told_by_its_last_frame_and_the_others_from_nearer() -> None:
    captions, said = sample_captions(rng(12)), torch.arange(12) % len(MOTIONS)
    scenes = sample_scenes(captions, rng(12))
    clips, still = paint_clips(Painter(), scenes, said, rng(12)), Painter().paint(scenes, rng(12))
    told = representative_frame(clips, said)
    grown = said == MOTIONS.index("growing")
    assert torch.allclose(told[grown], clips[grown, -1:], atol=1e-5)
    assert torch.allclose(told[grown], still[grown], atol=1e-5)
    assert (told - still).abs().mean((1, 2, 3, 4)).max() < 0.03 < (clips[:, 0] - still[:, 0]).abs().mean()


def test_the_frame_that_tells_passes_gradients_to_its_clip_alone() -> None:
    clips = torch.rand(2, FRAMES, 3, 64, 64).requires_grad_()
    representative_frame(clips, torch.tensor([4, 5])).sum().backward()
    assert clips.grad is not None
    assert clips.grad.abs().sum((2, 3, 4)).nonzero().tolist() == [[0, 0], [1, FRAMES - 1]]


def test_a_detector_of_stills_finds_the_caption_in_the_frame_that_tells() -> None:
    captions, said = sample_captions(rng(72)), torch.arange(72) % len(MOTIONS)
    clips = paint_clips(Painter(), sample_scenes(captions, rng(72)), said, rng(72))
    with torch.no_grad():
        found = decode_detections(
            load_network(SceneDetector, "playground/detector1")(representative_frame(clips, said)[:, 0])
        )
    assert verdict(found, captions).mean() > 0.97


def test_clips_of_other_lengths_and_sizes_are_brought_to_those_the_watcher_knows() -> None:
    assert (
        resize_clips(torch.rand(2, 3, 3, 16, 16)).shape
        == resize_clips(torch.rand(2, 8, 3, 64, 64)).shape
        == (2, 8, 3, 64, 64)
    )
    with pytest.raises(ValueError, match="the clips have one frame; expected two or more"):
        resize_clips(torch.rand(2, 1, 3, 64, 64))


def test_a_motion_is_asked_for_by_facts_or_by_the_prompt() -> None:
    device = torch.device("cpu")
    texts = ["a photo of a dog turning", "a photo of a dog growing"]
    assert requested_motion(texts, [{}, {}], device).tolist() == [4, 5]
    assert requested_motion(texts, [{"motion": "moving up"}, {"prompt": texts[0]}], device).tolist() == [2, 4]
