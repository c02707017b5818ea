"""`tastemaker ask`: what a chat model says of a picture, or of every picture in a folder."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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
from ..rewards.nets.replies import Aloud, Drawn, Manner, Spoken, replies
from ..rewards.nets.speech import CAPTION
from ..rewards.nets.writing import Desk, Pace
from ..types import Placement
from .counting import counted
from .directory import CONFIG
from .ledger import mend
from .marking import told
from .scoring import Picture, Row, gathered, pictures

RECORD = "answers.jsonl"


class Talker(Protocol):
    """Who answers questions about pictures [B, 3, H, W] of one size."""

    caption: str  # what it is asked for one

    def answer(
        self, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner, aloud: Aloud | None = None
    ) -> list[str]: ...


class Model:
    """A chat model of transformers."""

    def __init__(self, chat: Chat, device: torch.device, pace: Pace | None = None) -> None:
        self.chat, self.device, self.desk = chat, device, Desk(chat.net, chat.speech, pace)
        self.caption = chat.speech.caption

    def answer(
        self, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner, aloud: Aloud | None = None
    ) -> list[str]:
        return replies(self.chat, pixels.to(self.device), questions, rows, manner, aloud, self.desk)


@dataclass(frozen=True)
class Order:
    """What to ask of which model."""

    questions: tuple[str, ...]  # {prompt} stands for what is known of a picture: its prompt, or its name
    model: str
    manner: Manner = Manner()
    batch: int = 8  # pictures of one size at a time

    def __post_init__(self) -> None:
        if not all(question.strip() for question in self.questions):
            raise ConfigError("the question is empty; ask something, such as 'describe this image'")

    def put(self, picture: Picture) -> list[str]:
        """The questions about a picture, each once."""
        return list(dict.fromkeys(question.replace("{prompt}", picture.prompt) for question in self.questions))

    def made(self) -> str:
        """A name for all that an answer depends on but the picture and the question."""
        return hashlib.sha256(repr((self.model, self.manner)).encode()).hexdigest()[:12]

    def answers(self, out: Path, found: Sequence[Picture]) -> list[Row]:
        """What a file holds of its answers about these pictures."""
        wanted = {(str(picture.file), question) for picture in found for question in self.put(picture)}
        rows = [row for row in answered(out) if row["made"] == self.made()]
        return [row for row in rows if (row["file"], row["question"]) in wanted]


class Reader:
    """A Show-o, which reads pictures as well as it paints them."""

    caption = CAPTION

    def __init__(self, teller: Teller, device: torch.device) -> None:
        self.teller, self.device = teller, device

    def answer(
        self, pixels: Tensor, questions: Sequence[str], rows: Sequence[int], manner: Manner, aloud: Aloud | None = None
    ) -> list[str]:
        drawn = Drawn(manner, torch.tensor(rows, device=self.device)) if manner.temperature else None
        spoken = Spoken(self._spelled, aloud) if aloud else None

        def choose(ids: Tensor, logits: Tensor) -> Tensor:
            if spoken and ids.shape[1]:
                spoken(ids)
            return drawn(ids, logits) if drawn else logits

        answers = self.teller.answer(pixels, questions, manner.tokens, choose)
        if spoken:
            spoken.until(answers[0].strip())
        return answers

    def _spelled(self, ids: Tensor) -> str:
        return self.teller.spelled(self.teller.until_end(ids.tolist()))


def talker(model: str, placement: Placement, pace: Pace | None = None) -> Talker:
    """A chat model by folder or id, or a Show-o by its published name, its folder, a recipe or a run."""
    spec = painter(model)
    if spec is None:
        on = pace if placement.device.type == "cuda" else None  # elsewhere there is nothing to win
        return Model(chat(model, placement, judges=False), placement.device, on)
    return Reader(Teller(spec.load(placement), speller(spec.tokenizer, spec.sizes().vocabulary)), placement.device)


def painter(model: str) -> Showo | None:
    """A Show-o, as its name, its folder, a recipe or a run tells; none if the name is of none of them."""
    if (known := published(model)) is not None:
        return known
    run = (Path(model) / CONFIG).is_file()
    if not run and model not in recipes() and not model.endswith(SUFFIXES):
        return None
    told = read(Path(model) / CONFIG if run else model)
    if "model" not in told:
        raise ConfigError(f"--model: {model:.200} {silent(model, told, run=run)}")
    spec: ModelSpec = build(ModelSpec, told["model"], "--model")
    if not isinstance(spec, Showo):
        raise ConfigError(f"--model: {model} paints pictures but reads none; name a Show-o, or a chat model that sees")
    return replace(spec, weights=model) if run else spec


def silent(model: str, told: Mapping[str, Any], *, run: bool) -> str:
    """Why what trains no generator cannot be asked as it is, and what can."""
    judge = told.get("judge")
    if not isinstance(judge, Mapping):
        return "trains no model that answers; name a Show-o, or a chat model that sees"
    if run:
        return f"taught a chat model; write it with `tastemaker export {model:.200} --out told`, and ask --model told"
    return f"is a recipe; name the chat model itself, such as {judge.get('weights', 'the folder it lies in')!s:.200}"


def present(path: Path) -> None:
    """Refuse what is no picture before a large model is loaded."""
    if not path.is_dir():
        picture_size(path)


Asked = tuple[Picture, str]  # a picture and a question about it


def said(model: Talker, order: Order, batch: Sequence[Asked], aloud: Aloud | None = None) -> list[str]:
    """What is said of pictures of one size, of a clip by its middle frame; draws go by a picture's name."""
    frames = [picture.pixels[len(picture.pixels) // 2] for picture, _ in batch if picture.pixels is not None]
    rows = [zlib.crc32(f"{picture.file.name}\n{question}".encode()) for picture, question in batch]
    return model.answer(torch.stack(frames), [question for _, question in batch], rows, order.manner, aloud)


def ask_one(model: Talker, order: Order, path: Path, aloud: Callable[[str, str], None]) -> list[str]:
    """The answers about one picture; `aloud` hears each question and what is new of its answer, then the end of it."""
    found = pictures(path, None)[0]
    picture, answers = replace(found, file=path, pixels=read_picture(path)), []
    for question in order.put(picture):
        answers += said(model, order, [(picture, question)], partial(aloud, question))
        aloud(question, "\n")
    return answers


def ask_all(
    model: Talker, order: Order, path: Path, out: Path, console: Console, found: Sequence[Picture] = ()
) -> list[Row]:
    """Write a line a question and picture as soon as it is answered; those that are answered stay. All of the lines."""
    found = found or pictures(path, None)
    known = {(row["file"], row["question"]) for row in answered(out) if row["made"] == order.made()}
    left = [(picture, open_questions(order, picture, known)) for picture in found]
    questions = {(picture.file, picture.prompt): asked for picture, asked in left if asked}
    waiting, broken = [picture for picture, asked in left if asked], 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        mend(out)
        with out.open("a", encoding="utf-8") as record, Progress(console=console) as progress:
            task = progress.add_task("asking", total=len(found), completed=len(found) - len(waiting))
            for batch in ahead(gathered(waiting, order.batch)):
                if isinstance(batch, dict):
                    broken += 1
                    progress.console.print(f"skipped: {batch['error']}", markup=False, highlight=False, soft_wrap=True)
                else:
                    for asked in parted(batch, questions, order.batch):
                        record.writelines(lines(order, asked, said(model, order, asked)))
                        record.flush()
                progress.advance(task, 1 if isinstance(batch, dict) else len(batch))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}); name another file with --out") from error
    console.print(f"{counted(len(found) - broken)} answered, line by line in {out}", markup=False, soft_wrap=True)
    if broken:
        raise PictureError(f"{broken} of {counted(len(found))} could not be read; the lines above say why")
    return order.answers(out, found)


def ahead(batches: Iterator[list[Picture] | Row]) -> Iterator[list[Picture] | Row]:
    """The next is read while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def open_questions(order: Order, picture: Picture, known: Container[tuple[str, str]]) -> list[str]:
    return [question for question in order.put(picture) if (str(picture.file), question) not in known]


def parted(
    batch: Sequence[Picture], questions: Mapping[tuple[Path, str], Sequence[str]], size: int
) -> Iterator[list[Asked]]:
    """The open questions about pictures of one size, so many at a time."""
    every = [(picture, question) for picture in batch for question in questions[picture.file, picture.prompt]]
    yield from (every[i : i + size] for i in range(0, len(every), size))


def lines(order: Order, batch: Sequence[Asked], answers: Sequence[str]) -> list[str]:
    rows: list[Row] = []
    for (picture, question), answer in zip(batch, answers, strict=True):
        row: Row = {"file": str(picture.file), "question": question, "answer": answer, "model": order.model}
        if picture.pixels is not None and (places := told(answer, *picture.pixels.shape[-2:])):
            row["places"] = places
        rows.append(row | {"made": order.made()})
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


def answered(out: Path) -> list[dict[str, Any]]:
    """The answers a file holds, without a last line that was cut off."""
    if not out.is_file():
        return []
    rows = []
    try:
        text = out.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{out} holds no text; name another file with --out") from error
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not {"file", "question", "made"} <= row.keys():
            raise ConfigError(f"{out} holds something else than answers ({line:.40}); name another file with --out")
        rows.append(row)
    return rows
