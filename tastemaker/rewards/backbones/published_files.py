"""Files that are published elsewhere than on the hub: where, what they must be, and where they lie here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...core.registry import ConfigError


@dataclass(frozen=True)
class PublishedFile:
    """One file at an address, told by the beginning of its SHA-256."""

    name: str  # what settings call it
    address: str
    digest: str
    size: str
    licence: str

    @property
    def place(self) -> Path:
        """Where it lies once fetched."""
        from huggingface_hub import cached_assets_path

        return Path(cached_assets_path("tastemaker", "geneval")) / self.address.rsplit("/", 1)[1]

    def here(self) -> Path:
        """The file, if it was fetched before."""
        if not self.place.is_file():
            raise ConfigError(
                f"the weights '{self.name}' are not here; expected a local path, or {self.address} ({self.size}, "
                f"{self.licence}), which `tastemaker download geneval` fetches"
            )
        return self.place

    def verified(self, path: Path) -> Path:
        """The file at that path, if it is the published one."""
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if not found.startswith(self.digest):
            raise ConfigError(
                f"{path} has the SHA-256 {found[:12]}..., but {self.name} begins with {self.digest}; fetch it again"
            )
        return path


# The file that GenEval's own script fetches: names of mmdet 3, weights of mmdet 2. mmdet puts digests into names.
DETECTOR = PublishedFile(
    "mmdet/mask2former-swin-s",
    "https://download.openmmlab.com/mmdetection/v3.0/mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco/"
    "mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco_20220504_001756-c9d0c4f2.pth",
    "c9d0c4f2",
    "0.3 GB",
    "Apache-2.0",
)
