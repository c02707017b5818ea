"""Proof that a file holds the weights that a reward asks for: by its name and its sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...core.registry import ConfigError

# What the published files hold. Several have the same keys and shapes, so that only their names tell them apart.
CONTENTS = {
    "HPS_v2_compressed.pt": "HPS v2.0",
    "HPS_v2.1_compressed.pt": "HPS v2.1",
    "open_clip_model.safetensors": "a CLIP of open_clip",
    "open_clip_pytorch_model.safetensors": "a CLIP of open_clip",
    "open_clip_pytorch_model.bin": "a CLIP of open_clip",
    "HPSv3.safetensors": "HPSv3",
    "aesthetic_predictor_v2_5.pth": "the aesthetic head V2.5",
    "musiq_koniq_ckpt-e95806b9.pth": "MUSIQ",
    "musiq_spaq_ckpt-358bb6af.pth": "MUSIQ",
    "musiq_paq2piq_ckpt-364c0c84.pth": "MUSIQ",
    "musiq_ava_ckpt-e8d3f067.pth": "MUSIQ",
    "ImageReward.pt": "ImageReward",
    "aesthetic-model.pth": "the aesthetic head",
    "sac+logos+ava1-l14-linearMSE.pth": "the aesthetic head",
    "sa_0_4_vit_l_14_linear.pth": "the aesthetic head",
    "rainy_reward.pt": "the head of rain",
    "snowy_reward.pt": "the head of snow",
    "compression_reward.pt": "the compression head",
}
# Image encoders of the published CLIPs by width; other widths are not published and not checked.
VIT_NAMES = {768: "ViT-B", 1024: "ViT-L", 1280: "ViT-H", 1408: "ViT-g", 1664: "ViT-bigG"}


@dataclass(frozen=True)
class PublishedFile:
    """A file that is published elsewhere than on the Hub, with the beginning of its SHA-256 if that is known."""

    name: str  # in settings
    url: str
    sha256_prefix: str
    size: str
    license: str
    folder: str = "geneval"  # of the downloads, and the name that `tastemaker download` takes
    setting: str = "--detector or the `weights:` of the reward"  # that takes a path instead

    @property
    def path(self) -> Path:
        """Where the download is stored."""
        from huggingface_hub import cached_assets_path

        return Path(cached_assets_path("tastemaker", self.folder)) / self.url.rsplit("/", 1)[1]

    def local_path(self) -> Path:
        """The path of the downloaded file; refuses if it is missing."""
        if not self.path.is_file():
            raise ConfigError(
                f"the weights '{self.name}' were not found; give a local path, or download {self.url} "
                f"({self.size}, {self.license}) with `tastemaker download {self.folder}` [TM359]"
            )
        return self.path

    def verify(self, path: Path) -> Path:
        """Return the path if its SHA-256 is that of the published file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not digest.startswith(self.sha256_prefix):
            expected = f"the SHA-256 of {self.name} begins with {self.sha256_prefix}"
            raise ConfigError(
                f"{path} has the SHA-256 {digest[:12]}..., but {expected}; download the file again [TM360]"
            )
        return path


def require_contents(path: Path, expected: str, key: str) -> None:
    """Refuse a file that is known to hold something else than `expected`, one of the values of CONTENTS."""
    found = CONTENTS.get(path.name, expected)
    if found != expected:
        raise ConfigError(
            f"{key} is '{path!s:.200}', which is {found}, but {expected} is asked for; name its file [TM881]"
        )


def require_image_encoder(tensors: Mapping[str, Tensor], expected: str, path: Path, key: str) -> None:
    """Refuse a CLIP, in the layout of transformers, whose image encoder is a published one of another size."""
    embedding = tensors.get("vision_model.embeddings.class_embedding")
    width = 0 if embedding is None else len(embedding)
    if VIT_NAMES.get(width, expected) != expected or not width:
        found = f"a CLIP with a {VIT_NAMES[width]}, {width} wide" if width else "no CLIP"
        raise ConfigError(
            f"{key} is '{path!s:.200}', {found}, but the published weights are a CLIP with a {expected}; name them"
            " [TM882]"
        )
