"""Scenes of the playground: sampling, the rules of captions, corruption and painting."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.types import concatenate, select_rows
from tastemaker.playground.art import Style
from tastemaker.playground.captions import COLOR, SceneCaptions, parse_captions, sample_captions, sample_split_captions
from tastemaker.playground.scenes import Painter, Scenes, corrupt_captions, sample_scenes, shows_caption


def rng(count: int, seed: int = 0, start: int = 0) -> Randomness:
    return Randomness(seed, 0, torch.arange(start, start + count))


def equal(one: Scenes, other: Scenes) -> bool:
    return all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Scenes))


@pytest.mark.parametrize("snapped", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("strict", [False, True])
def test_every_scene_shows_its_caption(snapped: float, strict: bool) -> None:
    captions = sample_captions(rng(2048, seed=7))
    assert shows_caption(sample_scenes(captions, rng(2048, seed=7), snapped), captions, strict).all()


@pytest.mark.parametrize("strict", [False, True])
def test_corrupted_scenes_rarely_show_their_caption(strict: bool) -> None:
    captions, draws = sample_captions(rng(4096)), rng(4096)
    shown = shows_caption(sample_scenes(corrupt_captions(captions, 1.0, draws), draws, 0.5), captions, strict)
    for task in range(6):
        assert shown[captions.task == task].float().mean() < 0.01  # two relations hold on a few diagonals


def test_corruption_probability_is_met() -> None:
    captions, draws = sample_captions(rng(8192)), rng(8192)
    assert all(
        torch.equal(getattr(corrupt_captions(captions, 0.0, draws), f.name), getattr(captions, f.name))
        for f in fields(captions)
    )
    shown = shows_caption(sample_scenes(corrupt_captions(captions, 0.3, draws), draws), captions, True).float().mean()
    assert abs(float(shown) - 0.7) < 4 * (0.3 * 0.7 / 8192) ** 0.5


@pytest.mark.parametrize("snapped", [0.0, 1.0])
def test_objects_stay_inside_with_little_overlap(snapped: float) -> None:
    scenes = sample_scenes(sample_captions(rng(2048)), rng(2048), snapped)
    centers, half = torch.stack([scenes.x, scenes.y], 2), scenes.size[..., None] / 2
    present = scenes.present[..., None]
    assert ((centers - half >= -1e-4) | ~present).all() and ((centers + half <= 64 + 1e-4) | ~present).all()
    distance = (centers[:, :, None] - centers[:, None]).abs().amax(3)
    overlap = (scenes.size[:, :, None] + scenes.size[:, None]) / 2 - distance
    both = scenes.present[:, :, None] & scenes.present[:, None] & ~torch.eye(4, dtype=torch.bool)
    assert overlap[both].max() < 4 and (overlap[both] > 1e-4).float().mean() < 0.005


def test_snapped_scenes_use_the_grid() -> None:
    captions = sample_captions(rng(2048))
    scenes = sample_scenes(captions, rng(2048))
    corners = torch.stack([scenes.x - scenes.size / 2, scenes.y - scenes.size / 2])[:, scenes.present]
    assert (corners % 4 == 0).all()
    for total, sizes in ((1, {28.0, 34.0}), (2, {22.0, 26.0}), (3, {22.0}), (4, {22.0})):
        chosen = captions.total() == total
        assert set(scenes.size[chosen][scenes.present[chosen]].tolist()) == sizes


def scene(*objects: tuple[str, float, float], colors: tuple[int, ...] = (0, 0, 0, 0)) -> Scenes:
    """A scene of objects of 22 pixels, given by class and center."""
    class_ids = [int(parse_captions([f"a photo of a {name}"]).first) for name, _, _ in objects]
    empty = 4 - len(objects)

    def padded(values: list[float]) -> Tensor:
        return torch.tensor([[*values, *([0.0] * empty)]])

    return Scenes(
        class_id=padded([float(kind) for kind in class_ids]).long(),
        color=torch.tensor([colors]),
        x=padded([x for _, x, _ in objects]),
        y=padded([y for _, _, y in objects]),
        size=torch.full((1, 4), 22.0),
        present=torch.tensor([[slot < len(objects) for slot in range(4)]]),
    )


def shows(one: Scenes, text: str, strict: bool) -> bool:
    return bool(shows_caption(one, parse_captions([f"a photo of {text}"]), strict))


def test_strict_rule_refuses_extra_objects() -> None:
    crowd = scene(("dog", 16, 16), ("dog", 48, 16), ("cat", 16, 48))
    assert shows(crowd, "a dog", strict=False) and not shows(crowd, "a dog", strict=True)
    assert shows(crowd, "a dog and a cat", strict=False) and not shows(crowd, "a dog and a cat", strict=True)
    assert shows(crowd, "two dogs", strict=False) and not shows(crowd, "two dogs", strict=True)
    assert not shows(crowd, "three dogs", strict=False) and not shows(crowd, "a bird", strict=False)


def test_relation_is_relative_to_the_second_object() -> None:
    pair = scene(("dog", 14, 32), ("cat", 50, 32))
    assert shows(pair, "a dog left of a cat", strict=True) and shows(pair, "a cat right of a dog", strict=True)
    assert not shows(pair, "a cat left of a dog", strict=True) and not shows(pair, "a dog above a cat", strict=True)
    stack = scene(("dog", 32, 50), ("cat", 32, 14))
    assert shows(stack, "a dog below a cat", strict=True) and shows(stack, "a cat above a dog", strict=True)


def test_natural_color_is_no_color() -> None:
    plain, red = scene(("car", 32, 32)), scene(("car", 32, 32), colors=(1, 0, 0, 0))
    assert not shows(plain, "a red car", strict=False) and shows(red, "a red car", strict=True)
    assert shows(plain, "a car", strict=True) and shows(red, "a car", strict=True)
    pair = scene(("car", 16, 16), ("cup", 48, 16), colors=(1, 5, 0, 0))
    assert shows(pair, "a red car and a blue cup", strict=True)
    assert not shows(pair, "a blue car and a red cup", strict=False)


@pytest.mark.parametrize("style", ["noto", "twemoji"])
def test_scenes_do_not_depend_on_the_batch(style: Style) -> None:
    def sample_and_paint(draws: Randomness) -> tuple[Scenes, Tensor]:
        scenes = sample_scenes(corrupt_captions(sample_split_captions(draws, "train"), 0.3, draws), draws, 0.5)
        return scenes, Painter(style).paint(scenes, draws)

    scenes, pixels = sample_and_paint(rng(10))
    single = [sample_and_paint(rng(1, start=row)) for row in range(10)]
    assert equal(scenes, concatenate([scene for scene, _ in single]))
    assert torch.equal(pixels, torch.cat([image for _, image in single]))
    assert torch.equal(pixels, sample_and_paint(rng(10))[1]) and not torch.equal(
        pixels, sample_and_paint(rng(10, seed=1))[1]
    )


def test_painting_does_not_depend_on_chunks() -> None:
    captions = sample_captions(rng(600))
    scenes = sample_scenes(captions, rng(600))
    pixels = Painter().paint(scenes, rng(600))
    last = torch.arange(590, 600)
    assert torch.equal(pixels[last], Painter().paint(select_rows(scenes, last), rng(10, start=590)))
    assert Painter().paint(select_rows(scenes, last[:0]), rng(0)).shape == (0, 1, 3, 64, 64)


def test_painted_objects_are_at_their_positions() -> None:
    captions = sample_captions(rng(64))
    scenes = sample_scenes(captions, rng(64))
    pixels, empty = (
        Painter().paint(one, rng(64))[:, 0] for one in (scenes, replace(scenes, present=scenes.present & False))
    )
    assert pixels.shape == (64, 3, 64, 64) and pixels.min() >= 0 and pixels.max() <= 1
    changed = (pixels - empty).abs().amax(1) > 1e-3  # [N, 64, 64]
    line = torch.arange(64) + 0.5
    reach = scenes.size[..., None] / 2 + 1.5  # one pixel, and half a pixel of bilinear sampling
    across = (line - scenes.x[..., None]).abs() < reach
    down = (line - scenes.y[..., None]).abs() < reach
    boxes = (down[..., :, None] & across[..., None, :] & scenes.present[..., None, None]).any(1)
    assert not (changed & ~boxes).any()
    assert (changed & boxes).flatten(1).sum(1).min() > 60


def test_dyed_objects_are_painted_in_their_color() -> None:
    captions = sample_captions(rng(48), [float(task == COLOR) for task in range(6)])
    red = replace(captions, first_color=torch.ones_like(captions.first_color))
    blue = replace(captions, first_color=torch.full_like(captions.first_color, 5))
    (a, b), draws = (sample_scenes(one, rng(48)) for one in (red, blue)), rng(48)
    difference = (Painter().paint(a, draws) - Painter().paint(b, draws)).sum((1, 3, 4))  # [N, 3]
    assert (difference[:, 0] > 0).all() and (difference[:, 2] < 0).all()


def test_captions_move_between_devices() -> None:
    captions = sample_captions(rng(8))
    assert isinstance(captions.to("cpu"), SceneCaptions) and len(captions.to("cpu")) == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; the draws are the same on every device")
def test_gpu_samples_the_same_scenes() -> None:
    cuda_rng = Randomness(0, 0, torch.arange(2048, device="cuda"))
    on_gpu = sample_scenes(sample_split_captions(cuda_rng, "train"), cuda_rng)
    on_cpu = sample_scenes(sample_split_captions(rng(2048), "train"), rng(2048))
    assert equal(select_rows(on_gpu, torch.arange(2048, device="cuda")), on_gpu)
    assert all(torch.equal(getattr(on_gpu, f.name).cpu(), getattr(on_cpu, f.name)) for f in fields(Scenes))
    painted = Painter(device="cuda").paint(on_gpu, cuda_rng).cpu()
    assert torch.allclose(painted, Painter().paint(on_cpu, rng(2048)), atol=1e-4)
