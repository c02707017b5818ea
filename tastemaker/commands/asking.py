"""`tastemaker ask`: what a chat model says of a picture, or of every picture in a folder."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ..config.load import SUFFIXES, read, recipes
from ..config.validate import build
from ..models.prompting import speller
from ..models.showo import Showo
from ..models.telling import Teller
from ..models.telling import spec as published
from ..pictures import PictureError, picture_size, read_picture
from ..policy import ModelSpec
from ..registry import ConfigError
from ..rewards.nets.chat import Chat, chat
from ..rewards.nets.replies import Drawn, Manner, replies
from ..types import Placement
from .directory import CONFIG
from .ledger import mend
from .scoring import Picture, Row, gathered, pictures

RECORD = "answers.jsonl"


class Talker(Protocol):
    """Who answers questions about pictures [B, 3, H, W] of one size."""

    def answer(self, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner) -> list[str]: ...


@dataclass(frozen=True)
class Model:
    """A chat model of transformers."""

    chat: Chat
    device: torch.device

    def answer(self, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner) -> list[str]:
        return replies(self.chat, pixels.to(self.device), questions, rows, manner)


@dataclass(frozen=True)
class Order:
    """What to ask of which model."""

    question: str  # {prompt} stands for what is known of a picture: its prompt, or its name
    model: str
    manner: Manner = Manner()
    batch: int = 8  # pictures of one size at a time

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ConfigError("the question is empty; ask something, such as 'describe this image'")

    def put(self, picture: Picture) -> str:
        return self.question.replace("{prompt}", picture.prompt)

    def made(self) -> str:
        """A name for all that an answer depends on but the picture and the question."""
        return hashlib.sha256(repr((self.model, self.manner)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Reader:
    """A Show-o, which reads pictures as well as it paints them."""

    teller: Teller
    device: torch.device

    def answer(self, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner) -> list[str]:
        drawn = Drawn(manner, torch.tensor(rows, device=self.device)) if manner.temperature else None
        return self.teller.answer(pixels, questions, manner.tokens, drawn)


def talker(model: str, placement: Placement) -> Talker:
    """A chat model by folder or id, or a Show-o by its published name, its folder, a recipe or a run."""
    spec = painter(model)
    if spec is None:
        return Model(chat(model, placement, judges=False), placement.device)
    return Reader(Teller(spec.load(placement), speller(spec.tokenizer, spec.sizes().vocabulary)), placement.device)


def painter(model: str) -> Showo | None:
    """A Show-o, as its name, its folder, a recipe or a run tells; none if the name is of none of them."""
    if (known := published(model)) is not None:
        return known
    run = (Path(model) / CONFIG).is_file()
    if not run and model not in recipes() and not model.endswith(SUFFIXES):
        return None
    told = read(Path(model) / CONFIG if run else model).get("model")
    spec: ModelSpec = build(ModelSpec, told, "--model")
    if not isinstance(spec, Showo):
        raise ConfigError(f"--model: {model} paints pictures but reads none; name a Show-o, or a chat model that sees")
    return replace(spec, weights=model) if run else spec


def present(path: Path) -> None:
    """Refuse what is no picture before a large model is loaded."""
    if not path.is_dir():
        picture_size(path)


def said(model: Talker, order: Order, batch: Sequence[Picture]) -> list[str]:
    """What is said of pictures of one size, of a clip by its middle frame; draws go by a picture's name."""
    frames = [picture.pixels[len(picture.pixels) // 2] for picture in batch if picture.pixels is not None]
    rows = [zlib.crc32(f"{picture.file.name}\n{order.put(picture)}".encode()) for picture in batch]
    return model.answer(torch.stack(frames), [order.put(picture) for picture in batch], rows, order.manner)


def ask_one(model: Talker, order: Order, path: Path) -> str:
    """The answer about one picture."""
    picture = pictures(path, None)[0]
    return said(model, order, [Picture(path, picture.prompt, picture.facts, read_picture(path))])[0]


def ask_all(model: Talker, order: Order, path: Path, out: Path, console: Console) -> int:
    """Write a line a picture as soon as it is answered; those that are answered stay. How many could not be read."""
    found, kept = pictures(path, None), answered(out)
    known = {(row["file"], row["question"]) for row in kept if row["made"] == order.made()}
    left = [picture for picture in found if (str(picture.file), order.put(picture)) not in known]
    broken = 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        mend(out)
        with out.open("a", encoding="utf-8") as record, Progress(console=console) as progress:
            task = progress.add_task("asking", total=len(found), completed=len(found) - len(left))
            for batch in gathered(left, order.batch):
                if isinstance(batch, dict):
                    broken += 1
                    progress.console.print(f"skipped: {batch['error']}", markup=False, highlight=False, soft_wrap=True)
                else:
                    record.writelines(lines(order, batch, said(model, order, batch)))
                    record.flush()
                progress.advance(task, 1 if isinstance(batch, dict) else len(batch))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}); name another file with --out") from error
    console.print(f"{len(found) - broken} pictures answered, line by line in {out}", markup=False, soft_wrap=True)
    if broken:
        raise PictureError(f"{broken} of {len(found)} pictures could not be read; the lines above say why")
    return len(left)


def lines(order: Order, batch: Sequence[Picture], answers: Sequence[str]) -> list[str]:
    rows: list[Row] = [
        {"file": str(picture.file), "question": order.put(picture), "answer": answer, "model": order.model}
        for picture, answer in zip(batch, answers, strict=True)
    ]
    return [json.dumps({**row, "made": order.made()}, ensure_ascii=False) + "\n" for row in rows]


def answered(out: Path) -> list[dict[str, Any]]:
    """The answers a file holds, without a last line that was cut off."""
    if not out.is_file():
        return []
    rows = []
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not {"file", "question", "made"} <= row.keys():
            raise ConfigError(f"{out} holds something else than answers ({line:.40}); name another file with --out")
        rows.append(row)
    return rows
