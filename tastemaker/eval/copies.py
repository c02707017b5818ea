"""How good copies of pictures are: PSNR, SSIM, LPIPS and rFID, of which the last two need files that may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..perceptual import SMALLEST, Perceptual, perceptual
from ..registry import ConfigError
from ..types import Placement
from .metrics import frechet
from .reference import Eye, eye

WINDOW = 7  # pixels a side, within which SSIM compares
STEADY = (0.01**2, 0.03**2)  # keep its quotients finite, for pixels from 0 to 1
FEW = 2048  # features of FID's network: of fewer pictures a distance is far too large


class Copies:
    """Compares pictures with their copies, both rounded to 8 bits as files would hold them."""

    def __init__(self, lpips: Perceptual | None, seer: Eye | None, missing: tuple[str, ...] = ()) -> None:
        self.lpips, self.seer, self.missing = lpips, seer, missing

    @classmethod
    def by(cls, vgg: str, heads: str, inception: Path | None, placement: Placement) -> Copies:
        """With whatever of it there is."""
        missing: list[str] = []
        lpips, seer = None, None
        try:
            lpips = perceptual(vgg, heads, placement)
        except ConfigError as error:
            missing.append(f"LPIPS was not measured: {error}")
        try:
            seer = None if inception is None else eye("inception", str(inception), placement)
        except ConfigError as error:
            missing.append(f"rFID was not measured: {error}")
        if inception is None:
            missing.append("rFID was not measured: set validation.inception to FID's network")
        return cls(lpips, seer, tuple(missing))

    @torch.no_grad()
    def look(self, pixels: Tensor, made: Tensor) -> dict[str, Tensor]:
        one, other = (rounded(x) for x in (pixels, made))
        squares = (one - other).square().flatten(1).mean(1)
        seen = {"psnr": -10 * squares.clamp(min=1e-10).log10(), "ssim": similarity(one, other)}
        if self.lpips is not None and min(pixels.shape[-2:]) >= SMALLEST:
            with torch.autocast(pixels.device.type, enabled=False):
                seen["lpips"] = self.lpips(other, one).float()
        if self.seer is not None:
            seen["pictures"], seen["copies"] = self.seer.look(one)[0], self.seer.look(other)[0]
        return {name: x.cpu() for name, x in seen.items()}

    def numbers(self, seen: Mapping[str, Tensor]) -> tuple[dict[str, float], tuple[str, ...]]:
        found = {name: float(seen[name].double().mean()) for name in ("psnr", "ssim", "lpips") if name in seen}
        missing, count = list(self.missing), len(seen["psnr"])
        if self.lpips is not None and "lpips" not in seen:
            missing.append(f"LPIPS was not measured: it needs pictures of {SMALLEST} pixels a side or more")
        if "copies" in seen and count > 1:
            found["rfid"] = frechet(seen["copies"], seen["pictures"])
        if "copies" in seen and count < FEW:
            missing.append(f"rFID is of {count} pictures and cannot be compared with others'; set validation.rows")
        return found, tuple(missing)


def rounded(pixels: Tensor) -> Tensor:
    return (pixels.float().clamp(0, 1) * 255).round() / 255


def similarity(one: Tensor, other: Tensor) -> Tensor:
    """SSIM (Wang et al. 2004) of [N, 3, H, W] in [0, 1]: [N]; windows weigh alike, variances are unbiased."""
    side = min(WINDOW, *one.shape[-2:])
    count = side * side

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.double(), side, 1)

    first, second = mean(one), mean(other)
    spread = count / max(count - 1, 1)
    variances = [spread * (mean(x * x) - m * m) for x, m in ((one.double(), first), (other.double(), second))]
    shared = spread * (mean(one.double() * other.double()) - first * second)
    light = (2 * first * second + STEADY[0]) / (first.square() + second.square() + STEADY[0])
    found: Tensor = light * (2 * shared + STEADY[1]) / (variances[0] + variances[1] + STEADY[1])
    return found.mean((1, 2, 3))
