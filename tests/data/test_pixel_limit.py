"""Images and videos that would decode to more pixels than allowed are refused before they take memory."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from PIL import Image

from tastemaker.core.errors import ConfigError, ImageError
from tastemaker.data import image_io
from tastemaker.data.image_io import LIMIT_VARIABLE, decode_image, read_image, save_image
from tastemaker.data.image_transforms import decode_square
from tastemaker.rewards import folder_scorer


def write_bomb(path: Path, side: int) -> None:
    """Write a PNG of black pixels, 1 bit each, without holding them in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compressor, row = zlib.compressobj(9), bytes(1 + (side + 7) // 8)
    body = b"".join(compressor.compress(row) for _ in range(side)) + compressor.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))


def test_score_names_the_file_its_size_and_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bomb(tmp_path / "bomb.png", 13_312)
    assert (tmp_path / "bomb.png").stat().st_size < 30_000
    assert run_cli("score", str(tmp_path), "--reward", "jpeg", "--out", str(tmp_path / "scores.jsonl")) == 1
    message = capsys.readouterr().err
    for word in ("bomb.png", "13312x13312", "178", LIMIT_VARIABLE, "TM1171"):
        assert word in message, (word, message)


@pytest.mark.slow
def test_image_of_177_megapixels_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    write_bomb(tmp_path / "bomb.png", 13_312)
    program = (
        "import resource, sys\nfrom tastemaker.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    print('KB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = ["score", str(tmp_path), "--reward", "jpeg", "--out", str(tmp_path / "scores.jsonl")]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    assert int(done.stdout.split("KB ")[1]) < 1_500_000, done.stdout  # it was 6,600,000


def test_limit_counts_frames_and_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video = torch.rand(40, 3, 16, 16)
    monkeypatch.setenv(LIMIT_VARIABLE, "0.001")  # 1,000 pixels per frame, 2,000 per video
    for name in ("clip.gif", "clip.png", "clip.mp4"):
        save_image(video, tmp_path / name)
        with pytest.raises(ImageError, match=rf"{name}.*16x16 pixels in (40|8) frames.*TM1171"):
            read_image(tmp_path / name)
    save_image(video[:7], tmp_path / "short.gif")
    assert len(read_image(tmp_path / "short.gif")) == 7
    image = BytesIO()
    Image.new("RGB", (64, 64)).save(image, "WEBP")
    with pytest.raises(ImageError, match=r"image 0.*64x64.*TM1171"):
        decode_image(image.getvalue(), "image 0", 10**9)
    with pytest.raises(ImageError, match=r"64x64.*TM1171"):
        decode_square(image.getvalue(), "image 1", 8)
    monkeypatch.setenv(LIMIT_VARIABLE, "0.0041")
    assert decode_image(image.getvalue(), "image 0", 10**9).shape == (1, 3, 64, 64)
    for wrong in ("many", "0", "nan", "-3"):
        monkeypatch.setenv(LIMIT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match="TM1170"):
            read_image(tmp_path / "short.gif")


def test_large_photograph_is_decoded_at_the_scale_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JPEG counts at the scale that the decoder reduces it to."""
    Image.new("RGB", (800, 800), "red").save(tmp_path / "photo.jpg")
    monkeypatch.setenv(LIMIT_VARIABLE, "0.02")
    assert decode_square(tmp_path / "photo.jpg", "photo.jpg", 64).shape == (64, 64, 3)
    with pytest.raises(ImageError, match="800x800"):
        read_image(tmp_path / "photo.jpg")


def test_other_formats_are_not_tried(tmp_path: Path) -> None:
    """Pillow would start Ghostscript for a file of PostScript that is called .png."""
    (tmp_path / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(ImageError, match=r"script\.png"):
        read_image(tmp_path / "script.png")


def test_frames_of_a_folder_are_counted_together_before_one_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.001")
    for name, frames in (("long.frames", 8), ("short.frames", 7)):
        save_image(torch.rand(frames, 3, 16, 16), tmp_path / name)
    assert len(read_image(tmp_path / "short.frames")) == 7
    monkeypatch.setattr(Image.Image, "crop", None)
    with pytest.raises(ImageError, match=r"long\.frames has 16x16 pixels in 8 frames.*TM1171"):
        read_image(tmp_path / "long.frames")


def test_first_frame_of_a_video_has_a_limit(tmp_path: Path) -> None:
    video_io = pytest.importorskip("tastemaker.data.video_io")
    save_image(torch.rand(2, 3, 16, 32), tmp_path / "clip.mp4")
    assert video_io.read_first_frame(tmp_path / "clip.mp4", 5000).shape == (16, 32, 3)
    with pytest.raises(ValueError, match="TM1179"):
        video_io.read_first_frame(tmp_path / "clip.mp4", 511)


def test_strips_of_an_image_are_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.randint(0, 256, (23, 17, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rotated, image = Image.Exif(), Image.fromarray(noise.numpy(), "RGBA")
    rotated[0x0112] = 6
    variants = {
        "plain": (image.convert("RGB"), {}),
        "transparent": (image, {}),
        "palette": (image.convert("RGB").quantize(7), {"transparency": 3}),
        "gray": (image.convert("LA"), {}),
        "deep": (Image.fromarray(noise.numpy().astype("uint16")[..., 0] * 257), {}),
        "rotated": (image.convert("RGB"), {"exif": rotated}),
    }
    for name, (variant, options) in variants.items():
        variant.save(tmp_path / f"{name}.png", **options)
    whole = {name: read_image(tmp_path / f"{name}.png") for name in variants}
    assert torch.equal(whole["plain"][0], noise[..., :3].movedim(-1, 0) / 255)
    assert whole["rotated"].shape == (1, 3, 17, 23)
    monkeypatch.setattr(image_io, "STRIP_PIXELS", 40)
    for name, pixels in whole.items():
        assert torch.equal(read_image(tmp_path / f"{name}.png"), pixels), name


def test_waiting_images_are_bounded_by_their_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, side in enumerate([4] * 6 + [8, 9, 10, 11, 12] + [4] * 3):
        Image.new("RGB", (side, side)).save(tmp_path / f"{number:02d}.png")
    records = folder_scorer.find_images_with_prompts(tmp_path, None)
    monkeypatch.setattr(folder_scorer, "MAX_WAITING_PIXELS", 100)
    batches = [batch for batch in folder_scorer.batch_by_size(records, 32) if isinstance(batch, list)]
    assert sorted(image.file for batch in batches for image in batch) == sorted(image.file for image in records)
    pixels = [sum(image.pixels.numel() // 3 for image in batch if image.pixels is not None) for batch in batches]
    assert max(pixels) <= 12 * 12 and max(map(len, batches)) == 6  # one large image, or a few small ones


@pytest.mark.slow
def test_many_large_pictures_are_scored_in_bounded_memory(tmp_path: Path) -> None:
    write_bomb(tmp_path / "0.png", 7_900)
    for number in (1, 2):
        shutil.copy(tmp_path / "0.png", tmp_path / f"{number}.png")
    program = (
        "import resource, sys\nfrom tastemaker.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as error:\n    assert not error.code\n"
        "print('KB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = ["score", str(tmp_path), "--reward", "brightness", "--out", str(tmp_path / "scores.jsonl")]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    assert int(done.stdout.split("KB ")[1]) < 2 * 2**20, done.stdout
