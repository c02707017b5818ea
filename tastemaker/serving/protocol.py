"""Wire format of reward requests: npz or JSON, never pickle.

A decoder knows what a request will occupy before it allocates it, whatever the request says about its own size.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..core.types import Metadata
from ..data.image_io import ImageError, decode_image, encode_png, image_errors

NPZ, JSON = "application/x-npz", "application/json"
NPZ_ARRAYS = ("pixels", "json")  # `json` holds the bytes of a JSON object with prompts and metadata
PIXEL_TYPES = (np.float32, np.float16, np.uint8)

MAX_SAMPLES = 2048  # of a request
MAX_TEXT_BYTES = 8 * 2**20  # of the JSON of a request, without its images
MAX_JSON_VALUES = 2**18  # commas, colons and brackets, which are at least as many as there are values
MAX_JSON_DEPTH = 32
MAX_ZIP_MEMBERS = 64
READ_VALUES = 2**18  # that are decompressed at a time

# Upper bounds of what JSON occupies: a character beyond the basic plane makes all of its text four times as wide.
BYTES_PER_CHARACTER, BYTES_PER_JSON_VALUE = 4, 128
IMAGE_TEXT = re.compile(rb'"[A-Za-z0-9+/]{1024,}+=*"')  # base64, of which JSON makes text of one byte per character
# The header as NumPy writes it. NumPy reads it with Python's parser, which fails now and then in concurrent threads.
NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?\w{1,8})', 'fortran_order': (True|False), 'shape': \(((?:\d{1,18}(?:, ?)?){0,8})\),? ?\}\s*"
)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CENTRAL_DIRECTORY_ENTRY = b"PK\x01\x02"

Reserve = Callable[[int], None]  # called with a number of bytes before they are allocated; raises to refuse


class ProtocolError(ValueError):
    """A request or response that cannot be encoded or decoded."""


class OversizedRequestError(ProtocolError):
    """A request that is larger than a server accepts."""


@dataclass(frozen=True)
class ScoreRequest:
    """Samples to score."""

    pixels: Tensor  # [B, F, 3, H, W] in [0, 1]
    prompts: tuple[str, ...]
    metadata: tuple[Metadata, ...]

    def __len__(self) -> int:
        return len(self.prompts)


def encode_request(request: ScoreRequest, image_format: Literal["npz", "png"]) -> tuple[str, bytes]:
    """Return the content type and body of a request: exact floats in an npz, or 8-bit PNGs in JSON."""
    fields: dict[str, Any] = {"prompts": list(request.prompts), "metadata": list(request.metadata)}
    pixels = request.pixels.detach().float().cpu()
    if image_format == "png":
        fields["images"] = [base64.b64encode(encode_png(sample)).decode() for sample in pixels]
        return JSON, _to_json(fields)
    file = io.BytesIO()
    np.savez(file, pixels=pixels.numpy(), json=np.frombuffer(_to_json(fields), np.uint8))
    return NPZ, file.getvalue()


def _to_json(fields: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(fields, default=_path_to_str).encode()
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"the metadata cannot be sent as JSON ({error}); use numbers, text, lists and mappings [TM732]"
        ) from error


def _path_to_str(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"found a {type(value).__name__}, which JSON does not support [TM733]")


def reserve_nothing(size: int) -> None:
    """Count no bytes, for callers without a budget of memory."""


def decode_request(content_type: str, body: bytes, max_bytes: int, reserve: Reserve = reserve_nothing) -> ScoreRequest:
    """Decode a request whose pixels occupy at most `max_bytes` as 32-bit floats."""
    if content_type == NPZ:
        pixels, fields = _decode_npz(body, max_bytes, reserve)
    elif content_type == JSON:
        reserve(len(body) * (2 if body.isascii() else 1 + BYTES_PER_CHARACTER))
        fields = _read_json(body, IMAGE_TEXT.sub(b'""', body), reserve)
        pixels = _decode_images(fields.pop("images", None), max_bytes, reserve)
    else:
        raise ProtocolError(
            f"expected the content type {NPZ} or {JSON}, got '{content_type:.60}'; change the content type of the "
            "request [TM734]"
        )
    prompts, metadata = fields.get("prompts"), fields.get("metadata") or [{}] * len(pixels)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ProtocolError("'prompts' is not a list of texts; send one prompt per image [TM735]")
    if not isinstance(metadata, list) or not all(isinstance(each, dict) for each in metadata):
        raise ProtocolError("'metadata' is not a list of objects; send one object per image, or no metadata [TM736]")
    if not 0 < len(pixels) == len(prompts) == len(metadata):
        counts = f"{len(pixels)} images, {len(prompts)} prompts and {len(metadata)} metadata"
        raise ProtocolError(
            f"found {counts}; send at least one image, and one prompt and one metadata object per image [TM737]"
        )
    return ScoreRequest(pixels, tuple(prompts), tuple(metadata))


def _check_size(num_samples: int, size: int, max_bytes: int) -> None:
    """Refuse pixels that occupy more than `max_bytes` bytes as 32-bit floats, or too many samples."""
    if num_samples > MAX_SAMPLES:
        raise OversizedRequestError(
            f"the request has {num_samples} samples, but the limit is {MAX_SAMPLES}; send fewer samples per request "
            "[TM1001]"
        )
    if size > max_bytes:
        raise OversizedRequestError(
            f"the pixels occupy {size} bytes as 32-bit floats, but the limit is {max_bytes}; send fewer samples per "
            "request, or smaller ones [TM1002]"
        )


# JSON


def _read_json(body: bytes, text: bytes, reserve: Reserve) -> dict[str, Any]:
    """Parse a JSON object. `text` is the body without its images, and bounds what the other values occupy."""
    num_values = sum(map(text.count, (b",", b":", b"[", b"{")))
    if len(text) > MAX_TEXT_BYTES or num_values > MAX_JSON_VALUES:
        raise OversizedRequestError(
            f"the JSON has {len(text)} bytes and up to {num_values} values without images, but the limits are "
            f"{MAX_TEXT_BYTES} and {MAX_JSON_VALUES}; send fewer samples or less metadata per request [TM1003]"
        )
    reserve(len(text) * BYTES_PER_CHARACTER + num_values * BYTES_PER_JSON_VALUE)
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the request is not JSON ({error}); send an object with 'prompts' [TM738]") from error
    if not isinstance(fields, dict):
        raise ProtocolError(
            "the request is not a JSON object; send an object with 'prompts' and optionally 'metadata' [TM739]"
        )
    if _is_deeper(fields, MAX_JSON_DEPTH):
        raise ProtocolError(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels; send flatter metadata [TM1004]")
    return fields


def _is_deeper(value: object, depth: int) -> bool:
    """Whether lists and objects are nested in more than `depth` levels."""
    level: list[object] = [value]
    for _ in range(depth + 1):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return False
        level = [each for part in containers for each in (part.values() if isinstance(part, dict) else part)]
    return True


def _decode_images(texts: object, max_bytes: int, reserve: Reserve) -> Tensor:
    """Decode PNGs of one size, one at a time, into one tensor."""
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ProtocolError("'images' is not a list of texts; send one PNG in base64 per sample [TM745]")
    shape: tuple[int, ...] = ()
    pixels = torch.zeros(0, 1, 3, 1, 1)
    for i, text in enumerate(texts):
        try:
            data = base64.b64decode(text, validate=True)
            image_shape = _read_png_shape(data, f"image {i}", max_bytes)
            if not shape:
                shape, size = image_shape, 4 * math.prod(image_shape)
                _check_size(len(texts), size * len(texts), max_bytes)
                reserve(size * (len(texts) + 2))  # Pillow and the frames of one image need twice its size for a moment
                pixels = torch.empty(len(texts), *shape)
            if image_shape != shape:
                sizes = f"{list(shape)} and {list(image_shape)}"
                raise ProtocolError(
                    f"the images have different sizes ({sizes}); send one request for each size [TM747]"
                )
            pixels[i] = decode_image(data, f"image {i}", math.prod(shape))
        except (ValueError, RuntimeError) as error:  # a RuntimeError if frames are not of the size that the file says
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"image {i} cannot be read ({error!s:.200}); send a PNG in base64 [TM746]") from error
    return pixels


def _read_png_shape(data: bytes, name: str, max_bytes: int) -> tuple[int, int, int, int]:
    """Return the shape [F, 3, H, W] of a PNG from its header, without decoding it."""
    if not data.startswith(PNG_SIGNATURE) or len(data) < 24:
        raise ImageError(f"{name} is not a PNG; convert it [TM1005]")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    _check_size(1, 12 * width * height, max_bytes)  # before Pillow sees it
    with image_errors(name), Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        num_frames = int(getattr(image, "n_frames", 1))
    return num_frames, 3, height, width


# npz


def _decode_npz(body: bytes, max_bytes: int, reserve: Reserve) -> tuple[Tensor, dict[str, Any]]:
    if body.count(CENTRAL_DIRECTORY_ENTRY) > MAX_ZIP_MEMBERS:  # zipfile reads all of them, 500 bytes each
        raise OversizedRequestError(
            f"the npz file has more than {MAX_ZIP_MEMBERS} members; send {' and '.join(NPZ_ARRAYS)} only [TM1006]"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            text = _read_text(archive, reserve)
            fields = _read_json(text, text, reserve)
            return _read_pixels(archive, max_bytes, reserve), fields
    except KeyError as error:
        raise ProtocolError(
            f"the npz file lacks an array ({error}); send {' and '.join(NPZ_ARRAYS)} [TM740]"
        ) from error
    except ProtocolError:
        raise
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ProtocolError(
            f"the npz file cannot be read ({error!s:.200}); send the output of numpy.savez [TM741]"
        ) from error


@contextmanager
def _open_npy(
    archive: zipfile.ZipFile, name: str
) -> Iterator[tuple[Callable[[int], bytes], tuple[int, ...], bool, np.dtype[Any]]]:
    """Yield a function that reads exactly some bytes of an array, and its shape, order and type as the header says."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"'{name}' has an unsupported compression; save it with numpy.savez_compressed [TM1007]")
    with archive.open(member) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"'{name}' has an unsupported version of the npy format; save it with numpy.savez [TM742]")
        header = NPY_HEADER.fullmatch(file.read(int.from_bytes(file.read(2), "little")))
        if header is None:
            raise ValueError(f"'{name}' has an unknown npy header; save it with numpy.savez [TM1029]")
        dtype, is_fortran = np.dtype(header[1].decode()), header[2] == b"True"
        shape = tuple(int(length) for length in header[3].split(b",") if length.strip())

        def read(size: int) -> bytes:
            data = file.read(size)
            if len(data) < size:
                raise ValueError(f"'{name}' ends before the values of its shape {list(shape)!s:.80} [TM743]")
            return data

        yield read, shape, is_fortran, dtype
        if file.read(1):  # also verifies the checksum
            raise ValueError(f"'{name}' has more values than its shape {list(shape)!s:.80} [TM1008]")


def _read_text(archive: zipfile.ZipFile, reserve: Reserve) -> bytes:
    with _open_npy(archive, "json") as (read, shape, _, dtype):
        if dtype != np.uint8 or len(shape) != 1:
            raise ValueError(f"'json' is {dtype!s:.40} {list(shape)!s:.80}, not a list of bytes [TM1009]")
        if shape[0] > MAX_TEXT_BYTES:
            raise OversizedRequestError(
                f"'json' has {shape[0]} bytes, but the limit is {MAX_TEXT_BYTES}; send less metadata [TM1010]"
            )
        reserve(max(shape[0], 0))
        return read(max(shape[0], 0))


def _read_pixels(archive: zipfile.ZipFile, max_bytes: int, reserve: Reserve) -> Tensor:
    """Decompress the pixels part by part into 32-bit floats, so that nothing else of their size exists."""
    with _open_npy(archive, "pixels") as (read, shape, is_fortran, dtype):
        if dtype not in PIXEL_TYPES or len(shape) != 5 or shape[2] != 3 or min(shape) < 1:
            kind = f"{dtype!s:.40} {list(shape)!s:.80}"
            raise ProtocolError(
                f"'pixels': expected float32, float16 or uint8 of shape [B, F, 3, H, W], got {kind}; convert the "
                "pixels [TM744]"
            )
        num_values = math.prod(shape)
        _check_size(shape[0], 4 * num_values, max_bytes)
        reserve(4 * num_values * (2 if is_fortran else 1))
        pixels = torch.empty(num_values)
        for start in range(0, num_values, READ_VALUES):
            part = pixels.numpy()[start : start + READ_VALUES]
            values = np.frombuffer(read(len(part) * dtype.itemsize), dtype)
            part[:] = values / np.float32(255) if dtype == np.uint8 else values
    return pixels.view(shape[::-1]).permute(4, 3, 2, 1, 0).contiguous() if is_fortran else pixels.view(shape)
