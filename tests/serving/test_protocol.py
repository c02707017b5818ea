"""The wire format: invalid, oversized and malicious requests are refused."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tastemaker.serving.protocol import JSON, NPZ, OversizedRequestError, ProtocolError, decode_request

MAX_BYTES = 2**26


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
    with pytest.raises(ProtocolError, match=r"object.*TM744"):
        decode_request(NPZ, npz(pixels=pickled, json=PROMPT), MAX_BYTES)


def test_decompression_bombs_are_refused() -> None:
    bomb = npz(pixels=np.zeros((1, 1, 3, 512, 512), np.float32), json=PROMPT)
    assert len(bomb) < 20_000
    with pytest.raises(OversizedRequestError, match="TM1002"):
        decode_request(NPZ, bomb, 2**20)
    file = io.BytesIO()
    Image.new("RGB", (512, 512)).save(file, "PNG")
    fields = {"images": [base64.b64encode(file.getvalue()).decode()], "prompts": ["a"]}
    with pytest.raises(OversizedRequestError, match="TM1002"):
        decode_request(JSON, json.dumps(fields).encode(), 2**20)


def test_uint8_pixels_are_counted_as_floats() -> None:
    """A megabyte of zeros in a kilobyte becomes four megabytes of floats, which is over a limit of two."""
    bomb = npz(pixels=np.zeros((1, 1, 3, 512, 683), np.uint8), json=PROMPT)
    with pytest.raises(OversizedRequestError, match="TM1002"):
        decode_request(NPZ, bomb, 2**21)


def test_memory_is_reserved_before_it_is_allocated() -> None:
    """A refused reservation ends the decoding, and the sum is at least the size of the decoded request."""
    sizes: list[int] = []
    request = decode_request(
        NPZ,
        npz(pixels=np.zeros((2, 1, 3, 64, 64), np.uint8), json=json_array(prompts=["a"] * 2)),
        MAX_BYTES,
        sizes.append,
    )
    assert max(sizes) == request.pixels.nbytes and request.pixels.dtype == torch.float32

    def refuse(size: int) -> None:
        if size > 1000:
            raise MemoryError

    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    images = {"images": [base64.b64encode(file.getvalue()).decode()], "prompts": ["a"]}
    with pytest.raises(MemoryError):
        decode_request(JSON, json.dumps(images).encode(), MAX_BYTES, refuse)


def write_zip(compression: int, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """An npz whose pixels have `num_bytes` bytes, whatever the header says."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    text = io.BytesIO()
    np.save(text, PROMPT)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("pixels.npy", header.getvalue() + bytes(num_bytes))
        archive.writestr("json.npy", text.getvalue())
    return file.getvalue()


def test_declared_sizes_are_not_trusted() -> None:
    shape, size = (1, 1, 3, 8, 8), 192
    assert len(decode_request(NPZ, write_zip(zipfile.ZIP_DEFLATED, shape, size), MAX_BYTES)) == 1
    cases = {
        "TM743": write_zip(zipfile.ZIP_DEFLATED, shape, size - 1),
        "TM1008": write_zip(zipfile.ZIP_DEFLATED, shape, 2**20),
        "TM1007": write_zip(zipfile.ZIP_LZMA, shape, size),  # zipfile decompresses it without a bound
        "TM1029": write_zip(zipfile.ZIP_STORED, (1, 1, 3, -8, -8), size),
        "TM1002": write_zip(zipfile.ZIP_STORED, (1, 1, 3, 10**9, 10**9), size),
        "TM1001": write_zip(zipfile.ZIP_STORED, (10**6, 1, 3, 1, 1), size),
        "TM741": write_zip(zipfile.ZIP_DEFLATED, shape, size).replace(
            b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"
        ),  # encrypted
    }
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for i in range(100):
            archive.writestr(f"{i}", b"")
    cases["TM1006"] = many.getvalue()
    for code, body in cases.items():
        with pytest.raises(ProtocolError, match=code):
            decode_request(NPZ, body, MAX_BYTES)


def test_json_is_bounded_in_depth_size_and_number_of_values() -> None:
    deep = json.loads("[" * 40 + "]" * 40)
    cases = {
        "TM1004": {"prompts": ["a"], "metadata": [{"deep": deep}]},
        "TM1003": {"prompts": [""] * 300_000},
        "TM1010": {"prompts": ["a" * 2**23]},
    }
    for code, fields in cases.items():
        with pytest.raises(ProtocolError, match=code):
            decode_request(NPZ, npz(pixels=ZEROS, json=json_array(**fields)), MAX_BYTES)
    with pytest.raises(ProtocolError, match="TM738"):
        decode_request(JSON, b"[" * 100_000, MAX_BYTES)
    with pytest.raises(OversizedRequestError, match="TM1003"):
        decode_request(JSON, b'{"images": [' + b"{}," * 300_000 + b"{}]}", MAX_BYTES)


def test_wrong_array_header_is_refused() -> None:
    body = npz(pixels=ZEROS, json=PROMPT)
    plain = io.BytesIO()
    np.savez(plain, pixels=ZEROS, json=PROMPT)
    forged = plain.getvalue().replace(b"(1, 1, 3, 8, 8)", b"(9, 9, 3, 8, 8)")
    assert len(decode_request(NPZ, body, MAX_BYTES)) == 1
    with pytest.raises(ProtocolError):
        decode_request(NPZ, forged, MAX_BYTES)


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
        decode_request(NPZ, npz(**arrays), MAX_BYTES)


def test_uint8_and_float16_are_accepted_and_metadata_is_optional() -> None:
    request = decode_request(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 51, np.uint8), json=PROMPT), MAX_BYTES)
    assert request.pixels.unique().tolist() == pytest.approx([0.2]) and request.metadata == ({},)
    half = decode_request(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 0.5, np.float16), json=PROMPT), MAX_BYTES)
    assert half.pixels.dtype == torch.float32


def test_images_of_different_sizes_are_refused() -> None:
    images = []
    for side in (4, 8):
        file = io.BytesIO()
        Image.new("RGB", (side, side)).save(file, "PNG")
        images.append(base64.b64encode(file.getvalue()).decode())
    with pytest.raises(ProtocolError, match=r"for each size.*TM747"):
        decode_request(JSON, json.dumps({"images": images, "prompts": ["a", "b"]}).encode(), MAX_BYTES)
