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

from ..config.load import SUFFIXES, list_recipes, read_recipe
from ..config.validate import build_component
from ..core.plural import pluralize
from ..core.policy import ModelSpec
from ..core.registry import ConfigError
from ..core.types import Placement
from ..data.image_io import ImageError, image_size, read_image
from ..models.showo.model import Showo
from ..models.showo.prompt_tokenizer import load_detokenizer
from ..models.showo.vqa import ShowoVqa
from ..models.showo.vqa import infer_showo_spec as published
from ..rewards.scoring import ImageRecord, Row, batch_by_size, find_images_with_prompts
from ..search.sample_directory import drop_partial_line
from ..training.resume import CONFIG_FILE
from .annotations import detections_as_json
from .answer_generation import AnswerCallback, AnswerStreamer, GenerationSettings, GumbelSampling, generate_answers
from .chat_model import ChatModel, load_chat_model
from .chat_processors import CAPTION
from .decoding import ChatDecoderPool, DecodingMode

RECORD = "answers.jsonl"


class AnsweringModel(Protocol):
    """Who answers questions about pictures [B, 3, H, W] of one size."""

    caption: str  # what it is asked for one

    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        rows: Sequence[int],
        manner: GenerationSettings,
        aloud: AnswerCallback | None = None,
    ) -> list[str]: ...


class TransformersVlm:
    """A chat model of transformers."""

    def __init__(self, chat: ChatModel, device: torch.device, pace: DecodingMode | None = None) -> None:
        self.chat, self.device, self.desk = chat, device, ChatDecoderPool(chat.net, chat.speech, pace)
        self.caption = chat.speech.caption

    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        rows: Sequence[int],
        manner: GenerationSettings,
        aloud: AnswerCallback | None = None,
    ) -> list[str]:
        return generate_answers(self.chat, pixels.to(self.device), questions, rows, manner, aloud, self.desk)


@dataclass(frozen=True)
class AskOptions:
    """What to ask of which model."""

    questions: tuple[str, ...]  # {prompt} stands for what is known of a picture: its prompt, or its name
    model: str
    manner: GenerationSettings = GenerationSettings()
    batch: int = 8  # pictures of one size at a time

    def __post_init__(self) -> None:
        if not all(question.strip() for question in self.questions):
            raise ConfigError("the question is empty; ask something, such as 'describe this image'")

    def put(self, picture: ImageRecord) -> list[str]:
        """The questions about a picture, each once."""
        return list(dict.fromkeys(question.replace("{prompt}", picture.prompt) for question in self.questions))

    def made(self) -> str:
        """A name for all that an answer depends on but the picture and the question."""
        return hashlib.sha256(repr((self.model, self.manner)).encode()).hexdigest()[:12]

    def answers(self, out: Path, found: Sequence[ImageRecord]) -> list[Row]:
        """What a file holds of its answers about these pictures."""
        wanted = {(str(picture.file), question) for picture in found for question in self.put(picture)}
        rows = [row for row in read_answers(out) if row["made"] == self.made()]
        return [row for row in rows if (row["file"], row["question"]) in wanted]


class ShowoVlm:
    """A Show-o, which reads pictures as well as it paints them."""

    caption = CAPTION

    def __init__(self, teller: ShowoVqa, device: torch.device) -> None:
        self.teller, self.device = teller, device

    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        rows: Sequence[int],
        manner: GenerationSettings,
        aloud: AnswerCallback | None = None,
    ) -> list[str]:
        drawn = GumbelSampling(manner, torch.tensor(rows, device=self.device)) if manner.temperature else None
        spoken = AnswerStreamer(self._spelled, aloud) if aloud else None

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


def load_answering_model(model: str, placement: Placement, pace: DecodingMode | None = None) -> AnsweringModel:
    """A chat model by folder or id, or a Show-o by its published name, its folder, a recipe or a run."""
    spec = find_showo(model)
    if spec is None:
        on = pace if placement.device.type == "cuda" else None  # elsewhere there is nothing to win
        return TransformersVlm(load_chat_model(model, placement, judges=False), placement.device, on)
    return ShowoVlm(
        ShowoVqa(spec.load(placement), load_detokenizer(spec.tokenizer, spec.sizes().vocabulary)), placement.device
    )


def find_showo(model: str) -> Showo | None:
    """A Show-o, as its name, its folder, a recipe or a run tells; none if the name is of none of them."""
    if (known := published(model)) is not None:
        return known
    run = (Path(model) / CONFIG_FILE).is_file()
    if not run and model not in list_recipes() and not model.endswith(SUFFIXES):
        return None
    told = read_recipe(Path(model) / CONFIG_FILE if run else model)
    if "model" not in told:
        raise ConfigError(f"--model: {model:.200} {explain_unanswerable(model, told, run=run)}")
    spec: ModelSpec = build_component(ModelSpec, told["model"], "--model")
    if not isinstance(spec, Showo):
        raise ConfigError(f"--model: {model} paints pictures but reads none; name a Show-o, or a chat model that sees")
    return replace(spec, weights=model) if run else spec


def explain_unanswerable(model: str, told: Mapping[str, Any], *, run: bool) -> str:
    """Why what trains no generator cannot be asked as it is, and what can."""
    judge = told.get("judge")
    if not isinstance(judge, Mapping):
        return "trains no model that answers; name a Show-o, or a chat model that sees"
    if run:
        return f"taught a chat model; write it with `tastemaker export {model:.200} --out told`, and ask --model told"
    return f"is a recipe; name the chat model itself, such as {judge.get('weights', 'the folder it lies in')!s:.200}"


def check_image(path: Path) -> None:
    """Refuse what is no picture before a large model is loaded."""
    if not path.is_dir():
        image_size(path)


ImageQuestion = tuple[ImageRecord, str]  # a picture and a question about it


def answer_batch(
    model: AnsweringModel, order: AskOptions, batch: Sequence[ImageQuestion], aloud: AnswerCallback | None = None
) -> list[str]:
    """What is said of pictures of one size, of a clip by its middle frame; draws go by a picture's name."""
    frames = [picture.pixels[len(picture.pixels) // 2] for picture, _ in batch if picture.pixels is not None]
    rows = [zlib.crc32(f"{picture.file.name}\n{question}".encode()) for picture, question in batch]
    return model.answer(torch.stack(frames), [question for _, question in batch], rows, order.manner, aloud)


def answer_image(model: AnsweringModel, order: AskOptions, path: Path, aloud: Callable[[str, str], None]) -> list[str]:
    """The answers about one picture; `aloud` hears each question and what is new of its answer, then the end of it."""
    found = find_images_with_prompts(path, None)[0]
    picture, answers = replace(found, file=path, pixels=read_image(path)), []
    for question in order.put(picture):
        answers += answer_batch(model, order, [(picture, question)], partial(aloud, question))
        aloud(question, "\n")
    return answers


def answer_folder(
    model: AnsweringModel, order: AskOptions, path: Path, out: Path, console: Console, found: Sequence[ImageRecord] = ()
) -> list[Row]:
    """Write a line a question and picture as soon as it is answered; those that are answered stay. All of the lines."""
    found = found or find_images_with_prompts(path, None)
    known = {(row["file"], row["question"]) for row in read_answers(out) if row["made"] == order.made()}
    left = [(picture, open_questions(order, picture, known)) for picture in found]
    questions = {(picture.file, picture.prompt): asked for picture, asked in left if asked}
    waiting, broken = [picture for picture, asked in left if asked], 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        drop_partial_line(out)
        with out.open("a", encoding="utf-8") as record, Progress(console=console) as progress:
            task = progress.add_task("asking", total=len(found), completed=len(found) - len(waiting))
            for batch in prefetch_batches(batch_by_size(waiting, order.batch)):
                if isinstance(batch, dict):
                    broken += 1
                    progress.console.print(f"skipped: {batch['error']}", markup=False, highlight=False, soft_wrap=True)
                else:
                    for asked in split_batch(batch, questions, order.batch):
                        record.writelines(format_answers(order, asked, answer_batch(model, order, asked)))
                        record.flush()
                progress.advance(task, 1 if isinstance(batch, dict) else len(batch))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}); name another file with --out") from error
    console.print(f"{pluralize(len(found) - broken)} answered, line by line in {out}", markup=False, soft_wrap=True)
    if broken:
        raise ImageError(f"{broken} of {pluralize(len(found))} could not be read; the lines above say why")
    return order.answers(out, found)


def prefetch_batches(batches: Iterator[list[ImageRecord] | Row]) -> Iterator[list[ImageRecord] | Row]:
    """The next is read while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            yield batch


def open_questions(order: AskOptions, picture: ImageRecord, known: Container[tuple[str, str]]) -> list[str]:
    return [question for question in order.put(picture) if (str(picture.file), question) not in known]


def split_batch(
    batch: Sequence[ImageRecord], questions: Mapping[tuple[Path, str], Sequence[str]], size: int
) -> Iterator[list[ImageQuestion]]:
    """The open questions about pictures of one size, so many at a time."""
    every = [(picture, question) for picture in batch for question in questions[picture.file, picture.prompt]]
    yield from (every[i : i + size] for i in range(0, len(every), size))


def format_answers(order: AskOptions, batch: Sequence[ImageQuestion], answers: Sequence[str]) -> list[str]:
    rows: list[Row] = []
    for (picture, question), answer in zip(batch, answers, strict=True):
        row: Row = {"file": str(picture.file), "question": question, "answer": answer, "model": order.model}
        if picture.pixels is not None and (places := detections_as_json(answer, *picture.pixels.shape[-2:])):
            row["places"] = places
        rows.append(row | {"made": order.made()})
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


def read_answers(out: Path) -> list[dict[str, Any]]:
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
