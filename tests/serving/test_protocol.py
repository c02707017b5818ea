"""The wire format: invalid, oversized and malicious requests are refused."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tastemaker.serving.protocol import JSON, NPZ, ProtocolError, decode_request

MAX_VALUES = 2**24


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def json_array(**fields: Any) -> Any:
    return np.frombuffer(json.dumps(fields).encode(), np.uint8)


PROMPT = json_array(prompts=["a"])
ZEROS = np.zeros((1, 1, 3, 8, 8), np.uint8)


def test_pickles_are_never_loaded() -> None:
    pickled = np.array([print], dtype=object)
    with pytest.raises(ProtocolError, match=r"cannot be read.*TM741"):
        decode_request(NPZ, npz(pixels=pickled, json=PROMPT), MAX_VALUES)


def test_decompression_bombs_are_refused() -> None:
    bomb = npz(pixels=np.zeros((1, 1, 3, 512, 512), np.float32), json=PROMPT)
    assert len(bomb) < 20_000
    with pytest.raises(ProtocolError, match=r"server accepts.*TM743"):
        decode_request(NPZ, bomb, 100_000)
    file = io.BytesIO()
    Image.new("RGB", (512, 512)).save(file, "PNG")
    fields = {"images": [base64.b64encode(file.getvalue()).decode()], "prompts": ["a"]}
    with pytest.raises(ProtocolError, match=r"100000.*TM171"):
        decode_request(JSON, json.dumps(fields).encode(), 100_000)


def test_wrong_array_header_is_refused() -> None:
    body = npz(pixels=ZEROS, json=PROMPT)
    plain = io.BytesIO()
    np.savez(plain, pixels=ZEROS, json=PROMPT)
    forged = plain.getvalue().replace(b"(1, 1, 3, 8, 8)", b"(9, 9, 3, 8, 8)")
    assert len(decode_request(NPZ, body, MAX_VALUES)) == 1
    with pytest.raises(ProtocolError):
        decode_request(NPZ, forged, MAX_VALUES)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixels": np.zeros((1, 3, 8, 8), np.uint8)}, "lacks an array"),
        ({"pixels": np.zeros((1, 3, 8, 8), np.uint8), "json": PROMPT}, "expected float32"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8)), "json": PROMPT}, "'pixels': .*float64"),
        ({"pixels": np.zeros((2, 1, 3, 8, 8), np.uint8), "json": PROMPT}, "2 images, 1 prompts"),
        ({"pixels": ZEROS, "json": json_array(prompts=[3])}, "not a list of texts"),
        ({"pixels": ZEROS, "json": json_array(prompts="a")}, "not a list of texts"),
        (
            {"pixels": ZEROS, "json": json_array(prompts=["a"], metadata=[1])},
            "'metadata'",
        ),
    ],
)
def test_invalid_arrays_are_refused(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_request(NPZ, npz(**arrays), MAX_VALUES)


def test_uint8_and_float16_are_accepted_and_metadata_is_optional() -> None:
    request = decode_request(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 51, np.uint8), json=PROMPT), MAX_VALUES)
    assert request.pixels.unique().tolist() == pytest.approx([0.2]) and request.metadata == ({},)
    half = decode_request(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 0.5, np.float16), json=PROMPT), MAX_VALUES)
    assert half.pixels.dtype == torch.float32


def test_images_of_different_sizes_are_refused() -> None:
    images = []
    for side in (4, 8):
        file = io.BytesIO()
        Image.new("RGB", (side, side)).save(file, "PNG")
        images.append(base64.b64encode(file.getvalue()).decode())
    with pytest.raises(ProtocolError, match=r"for each size.*TM747"):
        decode_request(JSON, json.dumps({"images": images, "prompts": ["a", "b"]}).encode(), MAX_VALUES)
