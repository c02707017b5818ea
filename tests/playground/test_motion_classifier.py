"""The motion classifier, its training clips, and the frame of a clip that image rewards score."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.playground import motion
from tastemaker.playground.captions import sample_captions
from tastemaker.playground.detector import SceneDetector, decode_detections
from tastemaker.playground.motion import (
    FRAMES,
    MOTIONS,
    NO_MOTION,
    MotionClassifier,
    animate,
    paint_clips,
    representative_frame,
    requested_motion,
    resize_clips,
)
from tastemaker.playground.network_files import load_network
from tastemaker.playground.scenes import Painter, sample_scenes
from tastemaker.playground.train_reward_models import update
from tastemaker.playground.training_tasks import (
    CHANGING,
    FROZEN,
    NO_MOTION_KINDS,
    NOISE,
    MotionTask,
    augment_clips,
    paint_training_clips,
    sample_frame_times,
)
from tastemaker.playground.verdict import compute_verdict


def rng(count: int) -> Randomness:
    return Randomness(0, 0, torch.arange(count))


def test_motion_classifier_fits_into_a_megabyte() -> None:
    assert 2 * sum(weights.numel() for weights in MotionClassifier().parameters()) < 0.95e6  # bytes of float16


@pytest.mark.slow
def test_small_motion_classifier_overfits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MotionClassifier((16, 16, 16))
    motions = torch.arange(14) % (NO_MOTION + 1)
    clips = paint_training_clips(motions % NO_MOTION, torch.where(motions == NO_MOTION, FROZEN, -1), rng(14), 1.0)
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3, betas=(0.9, 0.98))
    for _ in range(30):
        update(MotionTask(net), {"clips": clips, "shown": motions}, optimizer, cuda=False)
    with torch.no_grad():
        assert (net(clips).argmax(1) == motions).float().mean() > 0.9


def test_motion_batches_hold_every_class() -> None:
    batch = MotionTask(MotionClassifier(MotionClassifier.tiny)).sample_batch(rng(56))
    assert batch["clips"].shape == (56, FRAMES, 3, 64, 64)
    assert (torch.bincount(batch["shown"], minlength=NO_MOTION + 1) > 2).all()
    assert 0.25 < (batch["shown"] == NO_MOTION).float().mean() < 0.55


def test_no_motion_kinds_freeze_or_change_objects() -> None:
    motions = motion.sample_motion(rng(16))
    frozen = paint_training_clips(motions, torch.full_like(motions, FROZEN), rng(16), 1.0).diff(dim=1).abs().mean()
    moving = paint_training_clips(motions, torch.full_like(motions, -1), rng(16), 1.0).diff(dim=1).abs().mean()
    changing = paint_training_clips(motions, torch.full_like(motions, CHANGING), rng(16), 1.0).diff(dim=1).abs().mean()
    noise = paint_training_clips(motions, torch.full_like(motions, NOISE), rng(16), 1.0).diff(dim=1).abs().mean()
    assert frozen < 0.3 * moving and moving < changing < noise


@pytest.mark.parametrize("kind", range(-1, len(NO_MOTION_KINDS)))
def test_only_valid_motions_have_steady_frame_times(kind: int) -> None:
    motions = torch.full((64,), MOTIONS.index("moving up"))
    steps = sample_frame_times(motions, torch.full_like(motions, kind), rng(64)).diff(dim=1)
    steady = ((steps > 0.02) & (steps < 0.25)).all(1)
    detectable_by_times = ("frozen", "shuffled", "jumping", "to and fro", "shrinking")
    assert not steady.any() if kind >= 0 and NO_MOTION_KINDS[kind] in detectable_by_times else steady.all()


def test_augmentation_leaves_a_third_of_videos_unchanged() -> None:
    clips = paint_training_clips(motion.sample_motion(rng(24)), torch.full((24,), -1), rng(24), 1.0)
    distances = (augment_clips(clips, rng(24)) - clips).abs().mean((1, 2, 3, 4))
    assert 3 < (distances < 1e-6).sum() < 14 and distances.max() < 0.2


def test_objects_can_have_separate_motions() -> None:
    scenes = sample_scenes(sample_captions(rng(6)), rng(6))
    motions = torch.arange(4).expand(6, -1)  # left, right, up, down
    frames, _ = animate(scenes, motions)
    for index in range(4):
        single, _ = animate(scenes, torch.full((6,), index))
        assert torch.equal(frames.x[:, index], single.x[:, index]) and torch.equal(
            frames.y[:, index], single.y[:, index]
        )


def test_representative_frame_depends_on_the_motion() -> None:
    captions, motions = sample_captions(rng(12)), torch.arange(12) % len(MOTIONS)
    scenes = sample_scenes(captions, rng(12))
    clips, still = paint_clips(Painter(), scenes, motions, rng(12)), Painter().paint(scenes, rng(12))
    frames = representative_frame(clips, motions)
    growing = motions == MOTIONS.index("growing")
    assert torch.allclose(frames[growing], clips[growing, -1:], atol=1e-5)
    assert torch.allclose(frames[growing], still[growing], atol=1e-5)
    assert (frames - still).abs().mean((1, 2, 3, 4)).max() < 0.03 < (clips[:, 0] - still[:, 0]).abs().mean()


def test_representative_frame_gradient_stays_in_its_video() -> None:
    clips = torch.rand(2, FRAMES, 3, 64, 64).requires_grad_()
    representative_frame(clips, torch.tensor([4, 5])).sum().backward()
    assert clips.grad is not None
    assert clips.grad.abs().sum((2, 3, 4)).nonzero().tolist() == [[0, 0], [1, FRAMES - 1]]


def test_detector_works_on_representative_frames() -> None:
    captions, motions = sample_captions(rng(72)), torch.arange(72) % len(MOTIONS)
    clips = paint_clips(Painter(), sample_scenes(captions, rng(72)), motions, rng(72))
    with torch.no_grad():
        detections = decode_detections(
            load_network(SceneDetector, "playground/detector1")(representative_frame(clips, motions)[:, 0])
        )
    assert compute_verdict(detections, captions).mean() > 0.97


def test_resize_clips_handles_lengths_and_sizes() -> None:
    assert (
        resize_clips(torch.rand(2, 3, 3, 16, 16)).shape
        == resize_clips(torch.rand(2, 8, 3, 64, 64)).shape
        == (2, 8, 3, 64, 64)
    )
    with pytest.raises(ValueError, match=r"frames.*TM759"):
        resize_clips(torch.rand(2, 1, 3, 64, 64))


def test_requested_motion_comes_from_metadata_or_prompt() -> None:
    device = torch.device("cpu")
    texts = ["a photo of a dog turning", "a photo of a dog growing"]
    assert requested_motion(texts, [{}, {}], device).tolist() == [4, 5]
    assert requested_motion(texts, [{"motion": "moving up"}, {"prompt": texts[0]}], device).tolist() == [2, 4]
