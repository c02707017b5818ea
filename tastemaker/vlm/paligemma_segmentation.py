"""Places in PaliGemma's answers: boxes of four `<loc....>`, and outlines of sixteen `<seg...>` by its VQ-VAE."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..models.pretrained import load_state_dict

SCALE = 1024  # of <loc....>, along either side
CODES, WIDTH, SIDE = 16, 512, 4  # of an outline: its codes, the numbers of each, and the square they lie in
PLACE = re.compile(r"<loc(\d{4})>" * 4 + r"\s*((?:<seg\d{3}>){16})?(?:<seg\d{3}>)*\s*([^;<>]*)")


@dataclass(frozen=True)
class PaliGemmaDetection:
    """Something an answer points to."""

    label: str
    box: tuple[float, float, float, float]  # left, top, right, bottom; 1 is the whole side
    codes: tuple[int, ...] = ()  # of its outline, if that was asked for

    def corners(self, width: int, height: int) -> tuple[int, int, int, int]:
        """The box in pixels."""
        left, top, right, bottom = self.box
        return round(left * width), round(top * height), round(right * width), round(bottom * height)


def parse_detections(answer: str) -> list[PaliGemmaDetection]:
    """What an answer such as `<loc0100><loc0200><loc0900><loc0800> cat ; ...` points to; corners stand top first."""
    found = []
    for match in PLACE.finditer(answer):
        top, left, bottom, right = (int(number) / SCALE for number in match.groups()[:4])
        codes = tuple(int(number) for number in re.findall(r"\d{3}", match[5] or ""))
        box = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        found.append(PaliGemmaDetection(match[6].strip(), box, codes))
    return found


class MaskDecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        conv, wide = nn.Conv2d(width, width, 1), [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
        self.net = nn.Sequential(wide[0], nn.ReLU(), wide[1], nn.ReLU(), conv)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.net(x)
        return out


class PaliGemmaMaskDecoder(nn.Module):
    """The decoder of PaliGemma's VQ-VAE: from sixteen codes to how much of a box is covered, 64 by 64."""

    def __init__(self, width: int = 128, codes: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(codes, WIDTH), requires_grad=False)
        parts: list[nn.Module] = [
            nn.Conv2d(WIDTH, width, 1),
            nn.ReLU(),
            MaskDecoderBlock(width),
            MaskDecoderBlock(width),
        ]
        before = width
        for _ in range(4):
            parts += [nn.ConvTranspose2d(before, width, 4, stride=2, padding=1), nn.ReLU()]
            before, width = width, width // 2
        self.decoder = nn.Sequential(*parts, nn.Conv2d(before, 1, 1))

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Codes [B, 16] to shares in [0, 1]: [B, 64, 64]."""
        grid = self.embedding[codes].view(-1, SIDE, SIDE, WIDTH).movedim(-1, 1)
        out: Tensor = self.decoder(grid)[:, 0] / 2 + 0.5
        return out.clamp(0, 1)

    def mask(self, place: PaliGemmaDetection, width: int, height: int) -> Tensor | None:
        """How much of each pixel of a picture is covered [height, width], none where no outline was given."""
        if not place.codes:
            return None
        if max(place.codes) >= len(self.embedding):
            raise ConfigError(
                f"the answer names the outline code {max(place.codes)}, but the weights know {len(self.embedding)}; "
                "expected those of PaliGemma (vae-oid.npz)"
            )
        left, top, right, bottom = place.corners(width, height)
        whole = torch.zeros(height, width)
        if right > left and bottom > top:
            square = self(torch.tensor([place.codes]))[:, None]
            fitted = F.interpolate(square, (bottom - top, right - left), mode="bicubic", antialias=True)
            whole[top:bottom, left:right] = fitted[0, 0].clamp(0, 1)
        return whole


def load_mask_decoder(path: Path) -> PaliGemmaMaskDecoder:
    """From `vae-oid.npz` as big_vision publishes it, or the same tensors in a .safetensors file."""
    found = _tensors(path)
    net = PaliGemmaMaskDecoder()
    state = {key: x.float() for key, x in found.items() if key.startswith("decoder.")}
    state["embedding"] = found.get("_vq_vae._embedding", torch.zeros(0)).float()
    wrong = [key for key, x in net.state_dict().items() if key not in state or state[key].shape != x.shape]
    if wrong:
        raise ConfigError(f"{path} has no fitting '{wrong[0]}'; expected PaliGemma's VQ-VAE, vae-oid.npz of big_vision")
    net.load_state_dict({key: state[key] for key in net.state_dict()})
    return net.eval().requires_grad_(False)


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; expected PaliGemma's VQ-VAE, vae-oid.npz of big_vision")
    if path.suffix != ".npz":
        return dict(load_state_dict(path))
    try:
        with np.load(path, allow_pickle=False) as held:
            arrays: dict[str, Any] = {key: held[key] for key in held.files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no readable .npz ({error!s:.100}); fetch vae-oid.npz again") from error
    return {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in arrays.items()}
