"""Bodies as they travel: what lies, unfolds beyond the limit or makes no sense is refused in a sentence."""

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

MUCH = 2**24


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def words(**said: Any) -> Any:
    return np.frombuffer(json.dumps(said).encode(), np.uint8)


def test_pickles_are_never_opened() -> None:
    trap = np.array([print], dtype=object)
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_request(NPZ, npz(pixels=trap, words=words(prompts=["a"])), MUCH)


def test_bodies_that_unfold_beyond_the_limit_are_refused_before_they_do() -> None:
    bomb = npz(pixels=np.zeros((1, 1, 3, 512, 512), np.float32), words=words(prompts=["a"]))
    assert len(bomb) < 20_000
    with pytest.raises(ProtocolError, match="more than there is or may be"):
        decode_request(NPZ, bomb, 100_000)
    file = io.BytesIO()
    Image.new("RGB", (512, 512)).save(file, "PNG")
    said = {"pictures": [base64.b64encode(file.getvalue()).decode()], "prompts": ["a"]}
    with pytest.raises(ProtocolError, match="more than 100000 numbers"):
        decode_request(JSON, json.dumps(said).encode(), 100_000)


def test_a_header_that_promises_more_than_there_is_is_refused() -> None:
    body = npz(pixels=np.zeros((1, 1, 3, 8, 8), np.uint8), words=words(prompts=["a"]))
    plain = io.BytesIO()
    np.savez(plain, pixels=np.zeros((1, 1, 3, 8, 8), np.uint8), words=words(prompts=["a"]))
    lied = plain.getvalue().replace(b"(1, 1, 3, 8, 8)", b"(9, 9, 3, 8, 8)")
    assert len(decode_request(NPZ, body, MUCH)) == 1
    with pytest.raises(ProtocolError):
        decode_request(NPZ, lied, MUCH)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"pixels": np.zeros((1, 3, 8, 8), np.uint8)}, "lacks an array"),
        ({"pixels": np.zeros((1, 3, 8, 8), np.uint8), "words": words(prompts=["a"])}, "expected float32"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8)), "words": words(prompts=["a"])}, "'pixels' is float64"),
        ({"pixels": np.zeros((2, 1, 3, 8, 8), np.uint8), "words": words(prompts=["a"])}, "2 pictures, 1 prompts"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8), np.uint8), "words": words(prompts=[3])}, "no list of texts"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8), np.uint8), "words": words(prompts="a")}, "no list of texts"),
        ({"pixels": np.zeros((1, 1, 3, 8, 8), np.uint8), "words": words(prompts=["a"], facts=[1])}, "'facts'"),
    ],
)
def test_arrays_that_make_no_sense_are_sentences(arrays: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        decode_request(NPZ, npz(**arrays), MUCH)


def test_bytes_and_halves_are_taken_too_and_facts_may_be_left_out() -> None:
    found = decode_request(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 51, np.uint8), words=words(prompts=["a"])), MUCH)
    assert found.pixels.unique().tolist() == pytest.approx([0.2]) and found.facts == ({},)
    half = decode_request(NPZ, npz(pixels=np.full((1, 1, 3, 2, 2), 0.5, np.float16), words=words(prompts=["a"])), MUCH)
    assert half.pixels.dtype == torch.float32


def test_pictures_of_different_sizes_are_sent_apart() -> None:
    pictures = []
    for side in (4, 8):
        file = io.BytesIO()
        Image.new("RGB", (side, side)).save(file, "PNG")
        pictures.append(base64.b64encode(file.getvalue()).decode())
    with pytest.raises(ProtocolError, match="send each size by itself"):
        decode_request(JSON, json.dumps({"pictures": pictures, "prompts": ["a", "b"]}).encode(), MUCH)
