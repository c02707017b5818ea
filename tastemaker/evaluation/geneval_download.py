"""GenEval's prompts and detector: drawn again and written down, fetched from where they are published, and verified."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..core.registry import ConfigError
from ..models.downloads import DownloadError
from ..rewards.backbones.published_files import DETECTOR, PublishedFile
from .geneval import METADATA, METADATA_URL, published_metadata, published_prompts

TEXTS = "generation_prompts.txt"
CHUNK = 1 << 20


def download_geneval(*, only_list: bool, console: Console) -> None:
    """Say what GenEval needs beside CLIP, and bring here what is not."""
    known = f"{DETECTOR.address} ({DETECTOR.size}, {DETECTOR.licence}, SHA-256 {DETECTOR.digest}...)"
    say(console, f"GenEval's detector is {known}, {'here' if DETECTOR.place.is_file() else 'not here'}")
    say(console, f"GenEval's prompts are {METADATA_URL}, drawn again here and held against its MD5; none is fetched")
    if only_list:
        return
    for path in write_prompts(DETECTOR.place.parent):
        say(console, f"the prompts are in {path}")
    say(console, f"the detector is in {fetch_verified(DETECTOR, console)}")


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def write_prompts(folder: Path) -> list[Path]:
    """The metadata as published, and the prompts alone."""
    texts = "".join(f"{fact['prompt']}\n" for fact in published_prompts())  # which verifies them
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((METADATA, published_metadata()), (TEXTS, texts)):
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / METADATA, folder / TEXTS]


def fetch_verified(file: PublishedFile, console: Console) -> Path:
    """The file here, whole and verified; a part that was fetched before is gone on with."""
    if file.place.is_file():
        return file.verified(file.place)
    partial = file.place.with_name(f"{file.place.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(file, partial, console)
    except OSError as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DownloadError(
            f"{file.address} could not be fetched ({reason}); the same command goes on once it can be reached, or copy "
            f"the file to {file.place}, or give its path: --detector, or `weights:` of the reward"
        ) from error
    try:
        file.verified(partial)
    except ConfigError:
        partial.unlink()  # going on with it would never end well
        raise
    os.replace(partial, file.place)
    return file.place


def _fetch(file: PublishedFile, partial: Path, console: Console) -> None:
    have = partial.stat().st_size if partial.is_file() else 0
    request = urllib.request.Request(file.address, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=60) as answer, Progress(console=console) as progress:
        going_on = bool(have and _status(answer) == 206)
        total = int(answer.headers.get("Content-Length", 0)) + (have if going_on else 0)
        bar = progress.add_task(file.name, total=total or None, completed=have if going_on else 0)
        with partial.open("ab" if going_on else "wb") as out:
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                progress.update(bar, advance=len(chunk))


def _status(answer: Any) -> int | None:
    found: int | None = answer.status
    return found
