"""Reconstruction metrics: PSNR, SSIM, LPIPS and rFID; the last two are skipped if their weights are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autoencoders.lpips import SMALLEST, LPIPSDistance, load_lpips
from ..core.registry import ConfigError
from ..core.types import Placement
from .metrics import frechet_distance
from .reference_statistics import FeatureExtractor, load_feature_extractor

WINDOW = 7  # pixels a side, within which SSIM compares
SSIM_CONSTANTS = (0.01**2, 0.03**2)  # keep its quotients finite, for pixels from 0 to 1
MIN_FID_IMAGES = 2048  # features of FID's network: of fewer pictures a distance is far too large


class ReconstructionEvaluator:
    """Compares pictures with their copies, both rounded to 8 bits as files would hold them."""

    def __init__(
        self, lpips: LPIPSDistance | None, seer: FeatureExtractor | None, missing: tuple[str, ...] = ()
    ) -> None:
        self.lpips, self.seer, self.missing = lpips, seer, missing

    @classmethod
    def by(cls, vgg: str, heads: str, inception: Path | None, placement: Placement) -> ReconstructionEvaluator:
        """With whatever of it there is."""
        missing: list[str] = []
        lpips, seer = None, None
        try:
            lpips = load_lpips(vgg, heads, placement)
        except ConfigError as error:
            missing.append(f"LPIPS was not measured: {error}")
        try:
            seer = None if inception is None else load_feature_extractor("inception", str(inception), placement)
        except ConfigError as error:
            missing.append(f"rFID was not measured: {error}")
        if inception is None:
            missing.append("rFID was not measured: set validation.inception to FID's network")
        return cls(lpips, seer, tuple(missing))

    @torch.no_grad()
    def look(self, pixels: Tensor, made: Tensor) -> dict[str, Tensor]:
        one, other = (quantize_to_8bit(x) for x in (pixels, made))
        squares = (one - other).square().flatten(1).mean(1)
        seen = {"psnr": -10 * squares.clamp(min=1e-10).log10(), "ssim": ssim(one, other)}
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
            found["rfid"] = frechet_distance(seen["copies"], seen["pictures"])
        if "copies" in seen and count < MIN_FID_IMAGES:
            missing.append(f"rFID is of {count} pictures and cannot be compared with others'; set validation.rows")
        return found, tuple(missing)


def quantize_to_8bit(pixels: Tensor) -> Tensor:
    return (pixels.float().clamp(0, 1) * 255).round() / 255


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """SSIM (Wang et al. 2004) of [N, 3, H, W] in [0, 1]: [N]; windows weigh alike, variances are unbiased."""
    side = min(WINDOW, *one.shape[-2:])
    count = side * side

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.double(), side, 1)

    first, second = mean(one), mean(other)
    spread = count / max(count - 1, 1)
    variances = [spread * (mean(x * x) - m * m) for x, m in ((one.double(), first), (other.double(), second))]
    shared = spread * (mean(one.double() * other.double()) - first * second)
    light = (2 * first * second + SSIM_CONSTANTS[0]) / (first.square() + second.square() + SSIM_CONSTANTS[0])
    found: Tensor = light * (2 * shared + SSIM_CONSTANTS[1]) / (variances[0] + variances[1] + SSIM_CONSTANTS[1])
    return found.mean((1, 2, 3))
