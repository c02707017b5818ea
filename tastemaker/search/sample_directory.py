"""The folder pictures are generated into: what is in it already, and what is known of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.image_io import save_image

RECORD = "metadata.jsonl"


@dataclass(frozen=True)
class SampleDirectory:
    """Each rank writes down its own pictures; at the end the first puts all together."""

    folder: Path
    made: str  # what all pictures have in common; those of another making count for nothing
    rank: int

    def _rows(self) -> dict[int, Mapping[str, Any]]:
        """By index, of pictures that are there."""
        found: dict[int, Mapping[str, Any]] = {}
        for path in [self.folder / RECORD, *sorted(self.folder.glob(f"{RECORD}.*"))]:
            for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
                row = _parsed(line)
                if row.get("made") == self.made and (self.folder / row["file"]).exists():
                    found[row["index"]] = row
        return found

    def known(self) -> dict[int, str]:
        """The prompts of the pictures that are there, by index."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return {index: row["prompt"] for index, row in self._rows().items()}

    def mend(self) -> None:
        """Make ready to write: nobody may be reading any more."""
        drop_partial_line(self.folder / f"{RECORD}.{self.rank}")

    def add(self, pixels: Tensor, file: str, facts: Mapping[str, Any], frames_per_second: int = 8) -> None:
        """Keep a picture, then what is known of it: an interrupted one is made again."""
        save_image(pixels, self.folder / file, frames_per_second)
        with (self.folder / f"{RECORD}.{self.rank}").open("a", encoding="utf-8") as record:
            record.write(json.dumps({"file": file, **facts, "made": self.made}) + "\n")

    def close(self, count: int) -> list[str]:
        """One record of all pictures, in their order; their files are returned."""
        rows = [row for index, row in sorted(self._rows().items()) if index < count]
        partial = self.folder / f".{RECORD}.partial"
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(self.folder / RECORD)
        for path in self.folder.glob(f"{RECORD}.*"):
            path.unlink()
        return [str(row["file"]) for row in rows]


def drop_partial_line(record: Path) -> None:
    """Take away a last line that was cut off, so that the next is not lost with it."""
    if record.is_file() and (text := record.read_text(encoding="utf-8")) and not text.endswith("\n"):
        record.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}  # of a rank that was stopped while it wrote
    return row if isinstance(row, dict) and {"file", "index", "prompt"} <= row.keys() else {}
