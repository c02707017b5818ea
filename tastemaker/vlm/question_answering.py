"""`tastemaker ask`: answers of a vision-language model about one image, or about every image in a folder."""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config.load import YAML_SUFFIXES, list_recipes, load_any_config, read_recipe
from ..config.validate import build_component
from ..console import ProgressBar, message_console
from ..core.errors import pluralize
from ..core.model_spec import ModelSpec
from ..core.registry import ConfigError
from ..core.safe_files import MAX_ROWS_BYTES, parse_json, read_text
from ..core.types import Placement
from ..data.image_io import ImageError, image_size, read_image
from ..models.showo.model import ShowoSpec, infer_showo_spec
from ..models.showo.prompt_tokenizer import load_detokenizer
from ..models.showo.vqa import ShowoVqa
from ..rewards.folder_scorer import ImageRecord, ScoreRow, batch_by_size, find_images_with_prompts
from ..search.generation import truncate_partial_line
from ..training.run_directory import CONFIG_FILE, find_run_checkpoint
from .annotations import detections_as_json, print_line
from .chat_model import ChatModel, load_chat_model
from .chat_processors import CAPTION_PROMPT
from .generation import (
    AnswerCallback,
    AnswerStreamer,
    ChatDecoderPool,
    DecodingMode,
    GenerationSettings,
    GumbelSampling,
    generate_answers,
)

RECORD = "answers.jsonl"


class AnsweringModel(ABC):
    """A model that answers questions about images [B, 3, H, W] of one size."""

    caption_prompt: str = CAPTION_PROMPT  # its default question for a caption

    @abstractmethod
    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        sample_ids: Sequence[int],
        generation: GenerationSettings,
        on_text: AnswerCallback | None = None,
    ) -> list[str]:
        """One answer per image; `sample_ids` seed the random draws, `on_text` gets the first answer as it grows."""


class ChatAnsweringModel(AnsweringModel):
    """A chat model of transformers."""

    def __init__(self, chat: ChatModel, device: torch.device, mode: DecodingMode | None = None) -> None:
        self.chat, self.device, self.decoder_pool = chat, device, ChatDecoderPool(chat.net, chat.processor, mode)
        self.caption_prompt = chat.processor.caption_prompt

    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        sample_ids: Sequence[int],
        generation: GenerationSettings,
        on_text: AnswerCallback | None = None,
    ) -> list[str]:
        pixels = pixels.to(self.device)
        return generate_answers(self.chat, pixels, questions, sample_ids, generation, on_text, self.decoder_pool)


class ShowoAnsweringModel(AnsweringModel):
    """A Show-o, which understands images as well as it generates them."""

    def __init__(self, vqa: ShowoVqa, device: torch.device) -> None:
        self.vqa, self.device = vqa, device

    def answer(
        self,
        pixels: Tensor,
        questions: Sequence[str],
        sample_ids: Sequence[int],
        generation: GenerationSettings,
        on_text: AnswerCallback | None = None,
    ) -> list[str]:
        ids = torch.tensor(sample_ids, device=self.device)
        sampling = GumbelSampling(generation, ids) if generation.temperature else None
        vqa = self.vqa
        streamer = (
            AnswerStreamer(lambda ids: vqa.detokenize(vqa.truncate_at_eos(ids.tolist())), on_text) if on_text else None
        )

        def process_logits(tokens: Tensor, logits: Tensor) -> Tensor:
            if streamer and tokens.shape[1]:
                streamer(tokens)
            return sampling(tokens, logits) if sampling else logits

        answers = vqa.answer(pixels, questions, generation.max_new_tokens, process_logits)
        if streamer:
            streamer.emit(answers[0].strip())
        return answers


@dataclass(frozen=True)
class AskOptions:
    """Questions, and the model that answers them."""

    questions: tuple[str, ...]  # {prompt} stands for the image's prompt, or else for its file name
    model: str
    generation: GenerationSettings = GenerationSettings()
    batch_size: int = 8

    def __post_init__(self) -> None:
        if not all(question.strip() for question in self.questions):
            raise ConfigError("the question is empty; ask for example 'describe this image' [TM719]")

    def questions_about(self, image: ImageRecord) -> list[str]:
        """The questions about an image, without duplicates."""
        return list(dict.fromkeys(question.replace("{prompt}", image.prompt) for question in self.questions))

    def fingerprint(self) -> str:
        """A hash of everything that an answer depends on besides image and question."""
        return hashlib.sha256(repr((self.model, self.generation)).encode()).hexdigest()[:12]

    def read_answers(self, out: Path, images: Sequence[ImageRecord]) -> list[ScoreRow]:
        """The rows of a file that answer these questions about these images with these options."""
        wanted = {(str(image.file), question) for image in images for question in self.questions_about(image)}
        rows = [row for row in read_answers(out) if row["made"] == self.fingerprint()]
        return [row for row in rows if (row["file"], row["question"]) in wanted]


def load_answering_model(model: str, placement: Placement, mode: DecodingMode | None = None) -> AnsweringModel:
    """A chat model by folder or hub id, or a Show-o by its published name, its folder, a recipe or a run."""
    spec = find_showo(model)
    if spec is None:
        mode = mode if placement.device.type == "cuda" else None  # other devices gain nothing
        return ChatAnsweringModel(load_chat_model(model, placement, needs_yes_no=False), placement.device, mode)
    detokenizer = load_detokenizer(spec.tokenizer, spec.network_config().vocabulary)
    return ShowoAnsweringModel(ShowoVqa(spec.load(placement), detokenizer), placement.device)


def find_showo(model: str) -> ShowoSpec | None:
    """The Show-o of a published name, a folder, a recipe or a run; None if the name is that of something else."""
    if (published := infer_showo_spec(model)) is not None:
        return published
    is_run = (Path(model) / CONFIG_FILE).is_file()
    if not is_run and model not in list_recipes() and not model.endswith(YAML_SUFFIXES):
        return None
    recipe = read_recipe(Path(model) / CONFIG_FILE if is_run else model)
    if "model" not in recipe:
        judge = recipe.get("judge")
        if not isinstance(judge, Mapping):
            advice = "does not train a model that answers questions; give a Show-o model, or a vision-language model"
        elif is_run:
            advice = f"is a fine-tuned judge; run `tastemaker export {model:.200} --out judge`, then ask --model judge"
        else:
            advice = f"is a recipe; give the model itself, such as {judge.get('weights', 'its folder')!s:.200}"
        raise ConfigError(f"--model: {model:.200} {advice} [TM720]")
    spec: ModelSpec = build_component(ModelSpec, recipe["model"], "--model")
    if not isinstance(spec, ShowoSpec):
        advice = "give a Show-o model, or a vision-language model"
        raise ConfigError(f"--model: {model} generates images but does not answer questions; {advice} [TM721]")
    if is_run:
        return replace(spec, weights=model)
    config = load_any_config(model) if "objective" in recipe else None
    if config is not None and find_run_checkpoint(config, model, (), message_console()) is not None:
        return replace(spec, weights=str(config.directory))
    if spec.weights is None:
        warnings.warn(
            f"--model: {model:.200} names no model.weights: the answers come from random weights; train it first, or "
            "name a run or a published Show-o [TM843]",
            stacklevel=2,
        )
    return spec


def check_image(path: Path) -> None:
    """Refuse a file that is no image before a large model is loaded."""
    if not path.is_dir():
        image_size(path)


ImageQuestion = tuple[ImageRecord, str]


def answer_batch(
    model: AnsweringModel, options: AskOptions, batch: Sequence[ImageQuestion], on_text: AnswerCallback | None = None
) -> list[str]:
    """Answers about images of one size, of a video about its middle frame; draws depend on the file's name alone."""
    frames = [image.pixels[len(image.pixels) // 2] for image, _ in batch if image.pixels is not None]
    sample_ids = [zlib.crc32(f"{image.file.name}\n{question}".encode()) for image, question in batch]
    questions = [question for _, question in batch]
    return model.answer(torch.stack(frames), questions, sample_ids, options.generation, on_text)


def answer_image(
    model: AnsweringModel, options: AskOptions, path: Path, on_text: Callable[[str, str], None]
) -> list[str]:
    """Answers about one image; `on_text` gets each question with the new part of its answer, and a final newline."""
    record = find_images_with_prompts(path, None)[0]
    image, answers = replace(record, file=path, pixels=read_image(path)), []
    for question in options.questions_about(image):
        answers += answer_batch(model, options, [(image, question)], partial(on_text, question))
        on_text(question, "\n")
    return answers


def answer_folder(
    model: AnsweringModel,
    options: AskOptions,
    path: Path,
    out: Path,
    console: Console,
    images: Sequence[ImageRecord] = (),
) -> list[ScoreRow]:
    """Answer the questions about a folder's images that `out` does not answer yet, and append each as a line.

    Returns all rows of these images and questions.
    """
    images = images or find_images_with_prompts(path, None)
    known = {(row["file"], row["question"]) for row in read_answers(out) if row["made"] == options.fingerprint()}
    questions: dict[tuple[Path, str], list[str]] = {}
    pending, unreadable = [], 0
    for image in images:
        if unanswered := [text for text in options.questions_about(image) if (str(image.file), text) not in known]:
            questions[image.file, image.prompt] = unanswered
            pending.append(image)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        truncate_partial_line(out)
        with out.open("a", encoding="utf-8") as record, ProgressBar(console) as progress:
            progress.start("asking", len(images), len(images) - len(pending), "images")
            for batch in prefetch_batches(batch_by_size(pending, options.batch_size)):
                if isinstance(batch, dict):
                    unreadable += 1
                    print_line(progress.console, f"skipped: {batch['error']}")
                else:
                    pairs = [(image, text) for image in batch for text in questions[image.file, image.prompt]]
                    for first in range(0, len(pairs), options.batch_size):
                        chunk = pairs[first : first + options.batch_size]
                        record.writelines(format_answers(options, chunk, answer_batch(model, options, chunk)))
                        record.flush()
                progress.advance(1 if isinstance(batch, dict) else len(batch))
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written ({error}); give another file with --out [TM722]") from error
    console.print(f"{pluralize(len(images) - unreadable)} answered, see {out}", markup=False, soft_wrap=True)
    if unreadable:
        raise ImageError(
            f"{unreadable} of {pluralize(len(images))} could not be read; the lines above give the reasons [TM723]"
        )
    return options.read_answers(out, images)


def prefetch_batches(batches: Iterator[list[ImageRecord] | ScoreRow]) -> Iterator[list[ImageRecord] | ScoreRow]:
    """Read the next batch in a thread while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, batches, None)
        while (batch := upcoming.result()) is not None:
            upcoming = pool.submit(next, batches, None)
            yield batch


def format_answers(options: AskOptions, batch: Sequence[ImageQuestion], answers: Sequence[str]) -> list[str]:
    """Lines of JSON."""
    rows: list[ScoreRow] = []
    for (image, question), answer in zip(batch, answers, strict=True):
        row: ScoreRow = {"file": str(image.file), "question": question, "answer": answer, "model": options.model}
        if image.pixels is not None and (detections := detections_as_json(answer, *image.pixels.shape[-2:])):
            row["places"] = detections
        rows.append(row | {"made": options.fingerprint()})
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


def read_answers(out: Path) -> list[dict[str, Any]]:
    """The rows of a file of answers; incomplete lines are skipped."""
    if not out.is_file():
        return []
    rows = []
    try:
        text = read_text(out, MAX_ROWS_BYTES)
    except ConfigError as error:
        raise ConfigError(f"--out: {out} is not a text file; give another file with --out [TM724]") from error
    for line in text.splitlines():
        try:
            row = parse_json(line, out)
        except ConfigError:
            continue
        if not isinstance(row, dict) or not {"file", "question", "made"} <= row.keys():
            raise ConfigError(
                f"--out: {out} contains other data than answers ({line:.40}); give another file with --out [TM725]"
            )
        rows.append(row)
    return rows
