"""Images and videos that would decode to more pixels than allowed are refused before they take memory."""

from __future__ import annotations

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
from tastemaker.data.image_io import LIMIT_VARIABLE, decode_image, read_image, save_image
from tastemaker.data.image_transforms import decode_square


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
    monkeypatch.setenv(LIMIT_VARIABLE, "0.001")  # 1,000 pixels per frame, 4,000 per video
    for name in ("clip.gif", "clip.png", "clip.mp4"):
        save_image(video, tmp_path / name)
        with pytest.raises(ImageError, match=rf"{name}.*16x16 pixels in (40|16) frames.*TM1171"):
            read_image(tmp_path / name)
    save_image(video[:10], tmp_path / "short.gif")
    assert len(read_image(tmp_path / "short.gif")) == 10
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
