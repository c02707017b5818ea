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
NPZ_ARRAYS = ("pixels", "json")  # `json` holds the bytes of a JSON object with prompts and metadata


class ProtocolError(ValueError):
    """A request or response that cannot be encoded or decoded."""


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


def decode_request(content_type: str, body: bytes, max_values: int) -> ScoreRequest:
    """Decode a request. `max_values` limits the number of pixel values that a body may decompress to."""
    if content_type == NPZ:
        arrays = _read_npz(body, max_values)
        fields = _read_json(arrays["json"].tobytes())
        pixels = _pixels_from_array(arrays["pixels"])
    elif content_type == JSON:
        fields = _read_json(body)
        pixels = _pixels_from_png(fields.get("images"), max_values)
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


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the request is not JSON ({error}); send an object with 'prompts' [TM738]") from error
    if not isinstance(fields, dict):
        raise ProtocolError(
            "the request is not a JSON object; send an object with 'prompts' and optionally 'metadata' [TM739]"
        )
    return fields


def _read_npz(body: bytes, max_values: int) -> dict[str, NDArray[Any]]:
    """Read the arrays of an npz. The size of each is checked before it is decompressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            return {name: _read_npy(archive, f"{name}.npy", max_values) for name in NPZ_ARRAYS}
    except KeyError as error:
        raise ProtocolError(
            f"the npz file lacks an array ({error}); send {' and '.join(NPZ_ARRAYS)} [TM740]"
        ) from error
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ProtocolError(
            f"the npz file cannot be read ({error!s:.200}); send the output of numpy.savez [TM741]"
        ) from error


def _read_npy(archive: zipfile.ZipFile, name: str, max_values: int) -> NDArray[Any]:
    file_size = archive.getinfo(name).file_size
    with archive.open(name) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"'{name}' has an unsupported version of the npy format; save it with numpy.savez [TM742]")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    # NumPy allocates what the header promises, which may be more than the machine has.
    if math.prod(shape) > max_values or math.prod(shape) * dtype.itemsize > file_size:
        raise ValueError(
            f"'{name}' has the shape {list(shape)}, which is more than the file contains or the server accepts [TM743]"
        )
    with archive.open(name) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _pixels_from_array(array: NDArray[Any]) -> Tensor:
    if array.dtype not in (np.float32, np.float16, np.uint8) or array.ndim != 5 or array.shape[2] != 3:
        kind = f"{array.dtype} {list(array.shape)}"
        raise ProtocolError(
            f"'pixels': expected float32, float16 or uint8 of shape [B, F, 3, H, W], got {kind}; convert the pixels "
            "[TM744]"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(array))
    return pixels / 255 if pixels.dtype == torch.uint8 else pixels.float()


def _pixels_from_png(texts: object, max_values: int) -> Tensor:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ProtocolError("'images' is not a list of texts; send one PNG in base64 per sample [TM745]")
    images: list[Tensor] = []
    for i, text in enumerate(texts):
        try:
            images.append(decode_image(base64.b64decode(text, validate=True), f"image {i}", max_values))
        except (binascii.Error, ImageError) as error:
            raise ProtocolError(f"image {i} cannot be read ({error!s:.200}); send a PNG in base64 [TM746]") from error
        max_values -= images[-1].numel()
    shapes = sorted({tuple(image.shape) for image in images})
    if len(shapes) > 1:
        raise ProtocolError(f"the images have different sizes ({shapes}); send one request for each size [TM747]")
    return torch.stack(images) if images else torch.zeros(0, 1, 3, 1, 1)
