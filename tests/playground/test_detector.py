"""The playground's detector and other reward models: shapes, losses, training and corruptions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tastemaker.core.randomness import Randomness
from tastemaker.models.weight_files import read_weights
from tastemaker.playground import corruptions, train_reward_models
from tastemaker.playground.captions import parse_captions, sample_captions
from tastemaker.playground.detector import CELL, CELLS, DetectorMaps, SceneDetector, decode_detections, detector_loss
from tastemaker.playground.network_files import copy_detector_stem, load_network, random_network
from tastemaker.playground.networks import YesNoJudge, caption_words, first_frame
from tastemaker.playground.scenes import sample_scenes
from tastemaker.playground.train_reward_models import (
    ALL_NETWORKS,
    TASKS_BY_NAME,
    TrainingBudget,
    fit,
    network_file,
    update,
)
from tastemaker.playground.training_tasks import DetectorTask, ambiguous_color, evaluate_detector, paint_scenes


def rng(count: int, seed: int = 0) -> Randomness:
    return Randomness(seed, 0, torch.arange(count))


def test_detector_parameter_count() -> None:
    assert sum(p.numel() for p in SceneDetector().parameters()) == pytest.approx(1.2e6, rel=0.01)


def test_reward_models_fit_their_size_budget() -> None:
    sizes = [
        sum(p.numel() for p in random_network(TASKS_BY_NAME[name][1], seed).parameters()) for name, seed in ALL_NETWORKS
    ]
    assert 2 * sum(sizes) <= 15e6  # bytes of float16


def test_decode_detections_reads_the_maps_at_peaks() -> None:
    heat = torch.full((1, 48, CELLS, CELLS), -9.0)
    heat[0, 7, 3, 5], heat[0, 8, 3, 6] = 3.0, 2.0  # the weaker neighbor belongs to the same object
    color, offset, size = torch.zeros(1, 10, CELLS, CELLS), torch.zeros(1, 2, CELLS, CELLS), torch.zeros(1, 2, 16, 16)
    color[0, 4, 3, 5], offset[0, 0, 3, 5] = 1.0, 0.25
    detections = decode_detections(DetectorMaps(heat, color, offset, size))
    assert (detections.score[0] > 0.3).sum() == 1
    assert detections.class_id[0, 0] == 7 and detections.color[0, 0] == 5
    assert detections.center[0, 0].tolist() == [CELL * 5.75, CELL * 3.5]


def test_detector_loss_is_smallest_at_the_truth() -> None:
    scenes = sample_scenes(parse_captions(["a photo of a red cake and a blue book"]), rng(1))
    maps = [torch.zeros(1, channels, CELLS, CELLS) for channels in (48, 10, 2, 2)]
    leaves = [m.requires_grad_() for m in maps]
    optimizer = torch.optim.Adam(leaves, 0.1)
    for _ in range(150):
        optimizer.zero_grad()
        detector_loss(DetectorMaps(*leaves), scenes).sum().backward()
        optimizer.step()
    detections = decode_detections(DetectorMaps(*(m.detach() for m in leaves)))
    assert sorted(detections.class_id[0, :2].tolist()) == sorted(scenes.class_id[0, :2].tolist())
    assert (detections.score[0] > 0.3).sum() == 2
    order = detections.class_id[0, :2].argsort()
    assert torch.allclose(
        detections.center[0, :2][order][:, 0], scenes.x[0, :2][scenes.class_id[0, :2].argsort()], atol=0.5
    )


@pytest.mark.slow
def test_small_detector_overfits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = SceneDetector((16, 32, 32))
    captions = sample_captions(rng(8))
    scenes = sample_scenes(captions, rng(8))
    batch = {"pixels": paint_scenes(scenes, rng(8)), "scenes": scenes}
    optimizer = torch.optim.AdamW(net.parameters(), 5e-3, betas=(0.9, 0.98))
    for _ in range(40):
        update(DetectorTask(net), batch, optimizer, cuda=False)
    with torch.no_grad():
        metrics = evaluate_detector(net, batch["pixels"], scenes, captions, ~ambiguous_color(scenes, captions))
    assert metrics["class"] > 0.95 and metrics["number of things"] > 0.9 and metrics["verdict"] > 0.9
    assert metrics["box overlap"] > 0.7


@pytest.mark.parametrize("name", list(TASKS_BY_NAME))
def test_reward_models_train_and_round_trip(name: str, tmp_path: Path) -> None:
    arguments = [
        name,
        "--tiny",
        "--steps",
        "2",
        "--batch",
        "8",
        "--lesson",
        "8",
        "--num-scenes",
        "8",
        "--device",
        "cpu",
    ]
    train_reward_models.main([*arguments, "--out", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    net = load_network(TASKS_BY_NAME[name][1], file)
    assert not any(p.requires_grad for p in net.parameters())
    assert set(read_weights(file)[1]) == {"network", "widths", "evaluation"}


def test_judge_is_initialized_from_the_detector_stem(tmp_path: Path) -> None:
    settings = ["--tiny", "--steps", "1", "--batch", "8", "--lesson", "8", "--num-scenes", "8", "--device", "cpu"]
    train_reward_models.main(["detector", *settings, "--out", str(tmp_path)])
    judge, detector = (
        random_network(YesNoJudge, 0, tiny=True),
        load_network(SceneDetector, tmp_path / "detector0.safetensors"),
    )
    assert copy_detector_stem(judge, YesNoJudge.tiny, tmp_path / "detector0.safetensors")
    assert torch.equal(judge.stem.enter.weight, detector.stem.enter.weight)
    assert not copy_detector_stem(random_network(YesNoJudge, 0), YesNoJudge.widths, tmp_path / "detector0.safetensors")


def test_training_all_skips_existing_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in ALL_NETWORKS:
        network_file(name, seed, tmp_path).touch()
    train_reward_models.main(["all", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("exists; remove") == len(ALL_NETWORKS) == 7


def test_training_is_deterministic_by_seed() -> None:
    tasks = [DetectorTask(random_network(SceneDetector, 3, tiny=True)) for _ in range(2)]
    first, second = (fit(task, TrainingBudget(steps=2, batch_size=8, chunk_size=8), 3) for task in tasks)
    assert first == second


def test_corruption_grows_with_strength() -> None:
    pixels = paint_scenes(sample_scenes(sample_captions(rng(10)), rng(10)), rng(10))
    for kind in range(5):
        corrupted = [
            corruptions.corrupt(pixels, torch.full((10,), kind), torch.full((10,), strength), rng(10))
            for strength in (0.0, 0.3, 0.9)
        ]
        assert torch.allclose(corrupted[0], pixels, atol=1e-6)
        distances = [(image - pixels).square().mean() for image in corrupted]
        assert distances[0] < distances[1] < distances[2]


def test_preview_of_zero_noise_is_the_image() -> None:
    pixels = paint_scenes(sample_scenes(sample_captions(rng(10)), rng(10)), rng(10))
    assert torch.allclose(corruptions.simulate_preview(pixels, torch.zeros(10), rng(10)), pixels, atol=1e-6)


def test_caption_words_are_unique() -> None:
    texts = [
        "a photo of a dog",
        "a photo of a red dog",
        "a photo of two dogs",
        "a photo of a dog and a cat",
        "a photo of a dog left of a cat",
        "a photo of a cat left of a dog",
        "a photo of a red dog and a blue cat",
        "a photo of a blue dog and a red cat",
    ]
    assert len({tuple(row) for row in caption_words(parse_captions(texts)).tolist()}) == len(texts)


def test_first_frame_resizes_to_the_network_size() -> None:
    assert first_frame(torch.rand(2, 3, 3, 16, 16)).shape == (2, 3, 64, 64)
