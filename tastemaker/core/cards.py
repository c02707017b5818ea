"""Descriptions of rewards and published weights.

This module imports the standard library only, so that `tastemaker list` needs no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class WeightsSource:
    """Published weights on the Hugging Face hub."""

    hub: str  # owner/name on the hub
    file: str = ""  # the file that is needed; the folder or the whole repository if empty
    size: str = "size on its page"
    license: str = "license on its page"
    gated: bool = False  # access must be requested on its page
    folder: str = ""  # the folder of the repository that is needed, if it is only that

    def __str__(self) -> str:
        return "/".join(part for part in (self.hub, self.file or self.folder) if part)


def parse_hub_id(name: str) -> WeightsSource:
    """The source that `owner/name`, `owner/name/file.pt` or `owner/name/folder` means; a file has a suffix."""
    owner, repository, *inside = name.strip("/").split("/")
    path = "/".join(inside)
    is_file = path and re.fullmatch(r"\.[A-Za-z]\w*", PurePosixPath(path).suffix)
    return WeightsSource(f"{owner}/{repository}", file=path if is_file else "", folder="" if is_file else path)


IMAGE_COT = "ZiyuG/Image-Generation-CoT"
# Image-Generation-CoT's fine-tuned judges, by the names that `weights` of a judge takes.
PUBLISHED_JUDGES = {name: WeightsSource(IMAGE_COT, size="16 GB", folder=name) for name in ("orm_ft", "parm")}


@dataclass(frozen=True)
class RewardCard:
    """What to know about a reward before training on it."""

    range: str  # of typical scores
    failure_modes: str  # what raises it without making samples better
    memory: str = "none"  # size of its weights
    sources: tuple[WeightsSource, ...] = ()  # default weights
    own_files: tuple[str, ...] = ()  # files that the user brings, with their size and license
