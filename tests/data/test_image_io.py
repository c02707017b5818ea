"""Images and videos are written to files and read back."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from torch import Tensor

import tastemaker.data
from tastemaker.data.image_io import (
    ImageError,
    check_video_format,
    grid_boxes,
    grid_upscale,
    make_contact_sheet,
    make_grid,
    read_image,
    save_image,
    to_uint8,
    video_suffix,
)


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def smooth(frames: int, height: int, width: int) -> Tensor:
    """A ramp that grows brighter from frame to frame, which lossy codecs keep."""
    ramp = torch.linspace(0.2, 0.6, width).expand(3, height, width)
    return torch.stack([ramp + 0.3 * k / frames for k in range(frames)])


def test_to_uint8_rounds_and_clamps() -> None:
    pixels = torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.5, float("nan")]).expand(3, 1, 6)
    assert to_uint8(pixels)[0, :, 0].tolist() == [0, 0, 128, 255, 255, 0]


def test_png_round_trip_is_lossless(tmp_path: Path) -> None:
    pixels = random(1, 3, 7, 9)
    save_image(pixels, tmp_path / "deep" / "a.png")
    torch.testing.assert_close(read_image(tmp_path / "deep" / "a.png"), (pixels * 255).round() / 255)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.png"]


@pytest.mark.parametrize("suffix", ["jpg", "webp", "gif", "mp4"])
def test_image_is_written_in_every_format(tmp_path: Path, suffix: str) -> None:
    pixels = smooth(1, 16, 16)
    save_image(pixels, tmp_path / f"a.{suffix}")
    assert (read_image(tmp_path / f"a.{suffix}") - pixels).abs().mean() < 0.02


@pytest.mark.parametrize(("suffix", "height", "width"), [("mp4", 32, 48), ("mp4", 9, 7), ("gif", 9, 7)])
def test_video_round_trip_pads_odd_sides_in_mp4(tmp_path: Path, suffix: str, height: int, width: int) -> None:
    pixels = smooth(5, height, width)
    save_image(pixels, tmp_path / f"a.{suffix}")
    back = read_image(tmp_path / f"a.{suffix}")
    even = (height + height % 2, width + width % 2) if suffix == "mp4" else (height, width)
    assert back.shape == (5, 3, *even)
    assert (back[..., :height, :width] - pixels).abs().mean() < 0.03


def test_video_with_broken_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    save_image(random(4, 3, 64, 64), path)
    whole = bytearray(path.read_bytes())
    begin = whole.index(b"mdat") + 900  # within the first frame, after what the encoder says of itself
    whole[begin : begin + 500] = np.random.default_rng(0).bytes(500)
    path.write_bytes(whole)
    with pytest.raises(ImageError, match=r"a.mp4 cannot be read as a video \(.+\)"):
        read_image(path)


def write_damaged_videos(folder: Path, positions: range) -> list[Path]:
    """Copies of one video, each with a few hundred random bytes at another position."""
    save_image(random(6, 3, 64, 64), folder / "whole.mp4")
    whole, chance = (folder / "whole.mp4").read_bytes(), np.random.default_rng(0)
    begin, files = whole.index(b"mdat"), []
    for place in positions:
        files.append(folder / f"{place}.mp4")
        files[-1].write_bytes(whole[: begin + place] + chance.bytes(400) + whole[begin + place + 400 :])
    return files


def read_error(path: Path) -> str:
    try:
        read_image(path)
    except ImageError as error:
        return str(error)
    return ""


def test_damaged_videos_are_mostly_refused(tmp_path: Path) -> None:
    files = write_damaged_videos(tmp_path, range(750, 20750, 2000))
    errors = [read_error(file) for file in files]
    assert sum(map(bool, errors)) >= 5  # damage that still decodes is not noticed
    assert all(re.match(r".*mp4 cannot be read as a video", x) for x in errors if x)
    assert read_image(tmp_path / "whole.mp4").shape == (6, 3, 64, 64)


def test_ffmpeg_log_level_is_restored_after_a_broken_video(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    broken = next(file for file in write_damaged_videos(tmp_path, range(750, 20750, 2000)) if read_error(file))
    before = av.logging.get_level(), av.logging.get_skip_repeated()
    assert read_error(broken) == read_error(broken) != ""
    assert (av.logging.get_level(), av.logging.get_skip_repeated()) == before


def test_broken_video_does_not_affect_other_threads(tmp_path: Path) -> None:
    files = write_damaged_videos(tmp_path, range(750, 20750, 2000))
    expected = [read_error(file) for file in files]
    both = [path for file in files for path in (file, tmp_path / "whole.mp4")]
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(read_error, both))
    assert errors[0::2] == expected and not any(errors[1::2])


@pytest.mark.parametrize("suffix", ["mov", "mkv", "avi", "webm", "m4v"])
def test_other_video_formats_are_read_only(tmp_path: Path, suffix: str) -> None:
    av, path = pytest.importorskip("av"), tmp_path / f"a.{suffix}"
    with av.open(path, "w", format="mp4" if suffix == "m4v" else None) as file:
        stream = file.add_stream("libvpx" if suffix == "webm" else "libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for frame in to_uint8(smooth(3, 16, 32)):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        file.mux(stream.encode(None))
    assert (read_image(path) - smooth(3, 16, 32)).abs().mean() < 0.05
    with pytest.raises(ImageError, match=f"a.{suffix} "):
        save_image(smooth(3, 16, 32), path)


def test_colors_survive_mp4(tmp_path: Path) -> None:
    pixels = torch.tensor([0.9, 0.1, 0.4])[None, :, None, None].expand(3, 3, 16, 16)
    save_image(pixels, tmp_path / "a.mp4")
    assert (read_image(tmp_path / "a.mp4") - pixels).abs().max() < 0.03


def test_several_frames_are_refused_in_image_formats(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"a\.jpg .*2 frames.*TM165"):
        save_image(random(2, 3, 4, 4), tmp_path / "a.jpg")


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 2]])
def test_animated_png_round_trip_is_lossless(tmp_path: Path, order: list[int]) -> None:
    pixels = random(4, 3, 7, 9)[order]
    save_image(pixels, tmp_path / "a.png")
    torch.testing.assert_close(read_image(tmp_path / "a.png"), (pixels * 255).round() / 255)
    with Image.open(tmp_path / "a.png") as image:
        assert image.info["duration"] == 125 and image.info["loop"] == 0


def test_videos_default_to_png_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    assert video_suffix() == "mp4"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert video_suffix() == "png"


def test_unknown_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"TM163"):
        save_image(random(1, 3, 4, 4), tmp_path / "a.xyz")
    (tmp_path / "a.xyz").write_bytes(b"x")
    with pytest.raises(ImageError, match=r"expected one of \.png.*TM167"):
        read_image(tmp_path / "a.xyz")


def test_grayscale_transparent_palette_and_16_bit_images_are_read(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 2), 51, np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(np.full((2, 2), 13107, np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGBA", (2, 2), (255, 0, 0, 51)).save(tmp_path / "clear.png")
    Image.new("RGB", (2, 2), (51, 51, 51)).convert("P").save(tmp_path / "palette.png")
    Image.new("CMYK", (2, 2), (0, 0, 0, 204)).save(tmp_path / "ink.jpg")
    for name in ("grey.png", "deep.png", "palette.png", "ink.jpg"):
        assert (read_image(tmp_path / name) - 0.2).abs().max() < 0.01, name
    assert read_image(tmp_path / "clear.png")[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.8, 0.8], abs=0.01)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # a quarter turn
    image.save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (1, 3, 4, 2)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "mp4"])
@pytest.mark.parametrize("keep", [0, 20, 60])
def test_corrupt_file_is_refused(tmp_path: Path, suffix: str, keep: int) -> None:
    path = tmp_path / f"a.{suffix}"
    save_image(random(1, 3, 64, 64), path)
    path.write_bytes(path.read_bytes()[:keep])
    kind = "a video" if suffix == "mp4" else "an image"
    with pytest.raises(ImageError, match=rf"a\.\w+ cannot be read as {kind}"):
        read_image(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"none\.png.*TM166"):
        read_image(tmp_path / "none.png")


def test_video_without_pyav_asks_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tastemaker.data.video_io", raising=False)
    monkeypatch.delattr(tastemaker.data, "video_io", raising=False)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImageError, match=r"a\.mp4 .*PyAV .*tastemaker\[video\].*\.gif.*TM173"):
        save_image(random(2, 3, 4, 4), tmp_path / "a.mp4")
    with pytest.raises(ImageError, match=r"--video-format mp4 .*tastemaker\[video\].*TM173"):
        check_video_format("mp4")
    check_video_format("gif")


def test_missing_video_writer_is_refused_before_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tastemaker.data.video_io", raising=False)
    monkeypatch.delattr(tastemaker.data, "video_io", raising=False)
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr("tastemaker.search.generation.build", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(ImageError, match=r"tastemaker\[video\].*TM173"):
        tastemaker.generate("playground-video", ["a red circle"], out=tmp_path / "out", video_format="mp4", tiny=True)


def test_grid_enlarges_small_samples_only() -> None:
    pixels = random(5, 1, 3, 8, 8)
    whole = make_grid(pixels, columns=3)
    assert whole.shape == (1, 3, 2 * 164, 3 * 164)
    assert torch.equal(whole[0, :, 2:162:20, 2:162:20], pixels[0, 0])
    assert torch.equal(whole[0, :, 166 : 166 + 160 : 20, 166 : 166 + 160 : 20], pixels[4, 0])
    assert bool((whole[0, :, 164:, 2 * 164 :] == 1).all())
    assert make_grid(random(4, 1, 3, 200, 100)).shape == (1, 3, 2 * 204, 2 * 104)


def test_grid_of_videos_keeps_frames() -> None:
    assert make_grid(random(4, 3, 3, 16, 16)).shape[0] == 3
    assert make_contact_sheet(random(4, 9, 3, 16, 16)).shape == (3, 4 * 164, 4 * 164)


@pytest.mark.parametrize("caption", ["a cat", "", "word " * 60, "w" * 300, "ein Käfer\nund 一只猫"])
def test_captions_are_wrapped_and_truncated(caption: str) -> None:
    plain, captioned = make_grid(random(2, 1, 3, 8, 8)), make_grid(random(2, 1, 3, 8, 8), captions=[caption, "b"])
    assert captioned.shape[3] == plain.shape[3]
    assert captioned.shape[2] > plain.shape[2]


@pytest.mark.parametrize("unit", ["w", "word ", "一", "a\u0301\u0302", "👨\u200d👩\u200d👧", "\n", "\ud800"])
def test_measuring_a_caption_does_not_depend_on_its_length(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[int]()

    def measure(font: ImageFont.FreeTypeFont, text: str, *arguments: Any, **options: Any) -> float:
        measured.append(len(text))
        assert len(measured) < 100, "a caption of two lines was measured 100 times"
        return getlength(font, text, *arguments, **options)

    getlength = ImageFont.FreeTypeFont.getlength
    monkeypatch.setattr(ImageFont.FreeTypeFont, "getlength", measure)
    work = []
    for count in (1_000, 1_000_000):
        measured.clear()
        make_grid(torch.rand(1, 1, 3, 8, 8), captions=[unit * (count // len(unit))])
        work.append((len(measured), sum(measured)))
    assert work[0] == work[1]


@pytest.mark.parametrize(("count", "height", "width"), [(1, 8, 8), (5, 16, 24), (8, 200, 100)])
def test_grid_boxes_locate_samples(count: int, height: int, width: int) -> None:
    pixels = torch.rand(count, 2, 3, height, width, generator=torch.Generator().manual_seed(0))
    whole, scale = make_grid(pixels, captions=["a"] * count), grid_upscale(height, width)
    for sample, (left, top, right, bottom) in zip(pixels, grid_boxes(count, height, width), strict=True):
        assert whole[..., top:bottom:scale, left:right:scale].equal(sample)


def test_frame_folder_round_trip_is_lossless(tmp_path: Path) -> None:
    pixels = (random(12, 3, 7, 9) * 255).round() / 255
    for _ in range(2):  # a second time over the first
        save_image(pixels, tmp_path / "a.frames")
    torch.testing.assert_close(read_image(tmp_path / "a.frames"), pixels)
    assert sorted(path.name for path in (tmp_path / "a.frames").iterdir())[-1] == "00011.png"
    assert [path.name for path in tmp_path.iterdir()] == ["a.frames"]


def test_frame_names_of_other_programs_are_read(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        save_image(torch.full((1, 3, 4, 4), number / 15), tmp_path / f"frame_{number}.png")
    assert (read_image(tmp_path)[:, 0, 0, 0] * 15).round().tolist() == [9, 10, 11]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0.png", "1.png", "3.png"], "frame 2 is missing"),
        (["1.png", "01.png"], "two frames have the same number"),
        (["0.png", "cover.png"], "contains cover.png"),
        ([], "contains no image"),
    ],
)
def test_incomplete_frame_folder_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        save_image(random(1, 3, 4, 4), tmp_path / name)
    with pytest.raises(ImageError, match=message):
        read_image(tmp_path)


def test_frames_of_different_sizes_or_broken_are_refused(tmp_path: Path) -> None:
    save_image(random(1, 3, 4, 4), tmp_path / "0.png")
    save_image(random(1, 3, 4, 6), tmp_path / "1.png")
    with pytest.raises(ImageError, match=r"TM170"):
        read_image(tmp_path)
    (tmp_path / "1.png").write_bytes(b"no picture")
    with pytest.raises(ImageError, match=r"TM172"):
        read_image(tmp_path)


@pytest.mark.parametrize("suffix", ["mp4", "gif", "png", "frames"])
def test_zero_frames_per_second_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ImageError, match=r"0 frames per second.*TM164"):
        save_image(random(2, 3, 4, 4), tmp_path / f"a.{suffix}", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "words", "empty"])
def test_corrupt_video_is_refused(tmp_path: Path, damage: str) -> None:
    save_image(smooth(5, 16, 16), tmp_path / "a.mp4")
    whole = (tmp_path / "a.mp4").read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "words": b"not a movie" * 20, "empty": b""}[damage]
    (tmp_path / "a.mp4").write_bytes(broken)
    with pytest.raises(ImageError, match=r"a\.mp4 cannot be read as a video"):
        read_image(tmp_path / "a.mp4")
