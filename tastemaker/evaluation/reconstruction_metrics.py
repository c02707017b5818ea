"""Reconstruction metrics: PSNR, SSIM, LPIPS and rFID. LPIPS and rFID are skipped if their weights are missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autoencoders.lpips import MIN_SIZE, LPIPSDistance, load_lpips
from ..core.registry import ConfigError
from ..core.types import Placement
from .feature_extractors import FeatureExtractor, load_feature_extractor
from .metrics import frechet_distance

SSIM_WINDOW = 7  # pixels
SSIM_CONSTANTS = (0.01**2, 0.03**2)  # C1 and C2 of Wang et al. for pixels in [0, 1]
MIN_FID_IMAGES = 2048  # number of Inception features; with fewer images the distance is far too large


class ReconstructionEvaluator:
    """Compares images with their reconstructions, both rounded to 8 bits as in image files."""

    def __init__(
        self, lpips: LPIPSDistance | None, feature_extractor: FeatureExtractor | None, missing: tuple[str, ...] = ()
    ) -> None:
        self.lpips, self.feature_extractor, self.missing = lpips, feature_extractor, missing

    @classmethod
    def from_weights(
        cls, vgg: str, lpips_weights: str, inception: Path | None, placement: Placement
    ) -> ReconstructionEvaluator:
        """Load the networks whose weights are available and note which metrics are missing."""
        missing: list[str] = []
        lpips, feature_extractor = None, None
        try:
            lpips = load_lpips(vgg, lpips_weights, placement)
        except ConfigError as error:
            missing.append(f"LPIPS was not measured: {error}")
        try:
            if inception is not None:
                feature_extractor = load_feature_extractor("inception", str(inception), placement)
        except ConfigError as error:
            missing.append(f"rFID was not measured: {error}")
        if inception is None:
            missing.append("rFID was not measured: set validation.inception_weights to FID's network")
        return cls(lpips, feature_extractor, tuple(missing))

    @torch.no_grad()
    def measure(self, pixels: Tensor, reconstruction: Tensor) -> dict[str, Tensor]:
        """Measure images [N, 3, H, W] against their reconstructions: metrics [N] and features [N, C], on the CPU."""
        original, copy = quantize_to_8bit(pixels), quantize_to_8bit(reconstruction)
        mse = (original - copy).square().flatten(1).mean(1)
        measured = {"psnr": -10 * mse.clamp(min=1e-10).log10(), "ssim": ssim(original, copy)}
        if self.lpips is not None and min(pixels.shape[-2:]) >= MIN_SIZE:
            with torch.autocast(pixels.device.type, enabled=False):
                measured["lpips"] = self.lpips(copy, original).float()
        if self.feature_extractor is not None:
            measured["images"] = self.feature_extractor.extract(original)[0]
            measured["reconstructions"] = self.feature_extractor.extract(copy)[0]
        return {name: x.cpu() for name, x in measured.items()}

    def summarize(self, measured: Mapping[str, Tensor]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return means over all images, rFID, and sentences about metrics that are missing or unreliable."""
        metrics = {
            name: float(measured[name].double().mean()) for name in ("psnr", "ssim", "lpips") if name in measured
        }
        missing, count = list(self.missing), len(measured["psnr"])
        if self.lpips is not None and "lpips" not in measured:
            missing.append(f"LPIPS was not measured: it needs images of at least {MIN_SIZE} pixels a side")
        if "reconstructions" in measured and count > 1:
            metrics["rfid"] = frechet_distance(measured["reconstructions"], measured["images"])
        if "reconstructions" in measured and count < MIN_FID_IMAGES:
            missing.append(
                f"rFID of {count} images cannot be compared with published values; set validation.num_samples"
            )
        return metrics, tuple(missing)


def quantize_to_8bit(pixels: Tensor) -> Tensor:
    return (pixels.float().clamp(0, 1) * 255).round() / 255


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """SSIM (Wang et al. 2004) of images [N, 3, H, W] in [0, 1]: [N]. Uniform windows, unbiased variances."""
    side = min(SSIM_WINDOW, *a.shape[-2:])
    count = side * side

    def window_mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.double(), side, 1)

    mean_a, mean_b = window_mean(a), window_mean(b)
    correction = count / max(count - 1, 1)
    variance_a, variance_b = (
        correction * (window_mean(x * x) - mean * mean) for x, mean in ((a.double(), mean_a), (b.double(), mean_b))
    )
    covariance = correction * (window_mean(a.double() * b.double()) - mean_a * mean_b)
    luminance = (2 * mean_a * mean_b + SSIM_CONSTANTS[0]) / (mean_a.square() + mean_b.square() + SSIM_CONSTANTS[0])
    similarity: Tensor = (
        luminance * (2 * covariance + SSIM_CONSTANTS[1]) / (variance_a + variance_b + SSIM_CONSTANTS[1])
    )
    return similarity.mean((1, 2, 3))
