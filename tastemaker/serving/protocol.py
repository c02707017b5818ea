"""Wire format of reward requests: npz or JSON, never pickle."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.types import Metadata
from ..data.image_io import ImageError, decode_image, encode_png

NPZ, JSON = "application/x-npz", "application/json"
NPZ_ARRAYS = ("pixels", "words")  # of an npz; words are the bytes of JSON


class ProtocolError(ValueError):
    """A request or an answer that cannot be read or written."""


@dataclass(frozen=True)
class ScoreRequest:
    """Rows to score."""

    pixels: Tensor  # [B, F, 3, H, W] in [0, 1]
    prompts: tuple[str, ...]
    facts: tuple[Metadata, ...]

    def __len__(self) -> int:
        return len(self.prompts)


def encode_request(question: ScoreRequest, form: Literal["npz", "png"]) -> tuple[str, bytes]:
    """A question as a body and its content type: exact numbers in an npz, or bytes a pixel in PNGs."""
    words: dict[str, Any] = {"prompts": list(question.prompts), "facts": list(question.facts)}
    pixels = question.pixels.detach().float().cpu()
    if form == "png":
        words["pictures"] = [base64.b64encode(encode_png(row)).decode() for row in pixels]
        return JSON, _to_json(words)
    file = io.BytesIO()
    np.savez(file, pixels=pixels.numpy(), words=np.frombuffer(_to_json(words), np.uint8))
    return NPZ, file.getvalue()


def _to_json(words: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(words, default=_path).encode()
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"the facts cannot travel as JSON ({error}); give numbers, text, lists and mappings"
        ) from error


def _path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"found a {type(value).__name__}")


def decode_request(kind: str, body: bytes, limit: int) -> ScoreRequest:
    """The question in a body; `limit` bounds how many numbers its pictures may unfold to."""
    if kind == NPZ:
        arrays = _read_npz(body, limit)
        words = _read_json(arrays["words"].tobytes())
        pixels = _pixels_from_array(arrays["pixels"])
    elif kind == JSON:
        words = _read_json(body)
        pixels = _pixels_from_png(words.get("pictures"), limit)
    else:
        raise ProtocolError(f"the content type is '{kind:.60}'; expected {NPZ} or {JSON}")
    prompts, facts = words.get("prompts"), words.get("facts") or [{}] * len(pixels)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ProtocolError("'prompts' is no list of texts; expected one for each picture")
    if not isinstance(facts, list) or not all(isinstance(fact, dict) for fact in facts):
        raise ProtocolError("'facts' is no list of mappings; expected one for each picture, or none at all")
    if not 0 < len(pixels) == len(prompts) == len(facts):
        found = f"{len(pixels)} pictures, {len(prompts)} prompts and {len(facts)} facts"
        raise ProtocolError(f"found {found}; expected at least one picture, and one prompt and fact for each")
    return ScoreRequest(pixels, tuple(prompts), tuple(facts))


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        words = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the words are not JSON ({error}); expected an object with 'prompts'") from error
    if not isinstance(words, dict):
        raise ProtocolError("the words are no JSON object; expected one with 'prompts' and, if there are any, 'facts'")
    return words


def _read_npz(body: bytes, limit: int) -> dict[str, NDArray[Any]]:
    """The arrays of an npz, none of them unfolded before its size is known."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return {name: _read_npy(archive, f"{name}.npy", limit) for name in NPZ_ARRAYS}
    except KeyError as error:
        raise ProtocolError(f"the npz lacks an array ({error}); expected {' and '.join(NPZ_ARRAYS)}") from error
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ProtocolError(f"the npz cannot be read ({error!s:.200}); expected what numpy.savez writes") from error


def _read_npy(archive: zipfile.ZipFile, name: str, limit: int) -> NDArray[Any]:
    held = archive.getinfo(name).file_size
    with archive.open(name) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"'{name}' is of a newer form than plain numbers need")
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
    # NumPy makes room for what a header promises, which may be more than any machine has.
    if math.prod(shape) > limit or math.prod(shape) * kind.itemsize > held:
        raise ValueError(f"'{name}' says it holds {list(shape)}, more than there is or may be")
    with archive.open(name) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _pixels_from_array(array: NDArray[Any]) -> Tensor:
    if array.dtype not in (np.float32, np.float16, np.uint8) or array.ndim != 5 or array.shape[2] != 3:
        found = f"{array.dtype} {list(array.shape)}"
        raise ProtocolError(f"'pixels' is {found}; expected float32, float16 or uint8 of [B, F, 3, H, W]")
    pixels = torch.from_numpy(np.ascontiguousarray(array))
    return pixels / 255 if pixels.dtype == torch.uint8 else pixels.float()


def _pixels_from_png(texts: object, limit: int) -> Tensor:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ProtocolError("'pictures' is no list of texts; expected a PNG in base64 for each row")
    rows: list[Tensor] = []
    for place, text in enumerate(texts):
        try:
            rows.append(decode_image(base64.b64decode(text, validate=True), f"picture {place}", limit))
        except (binascii.Error, ImageError) as error:
            raise ProtocolError(f"picture {place} cannot be read ({error!s:.200}); expected a PNG in base64") from error
        limit -= rows[-1].numel()
    if len({row.shape for row in rows}) > 1:
        raise ProtocolError(
            f"pictures are of sizes {sorted({tuple(row.shape) for row in rows})}; send each size by itself"
        )
    return torch.stack(rows) if rows else torch.zeros(0, 1, 3, 1, 1)
