"""Commands about judges: ask one, have it write captions, and rank samples to learn from."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    Device,
    Overrides,
    Precision,
    RunDeviceOption,
    Tiny,
    merge_overrides,
    stderr_console,
    warn_unused_overrides,
)

app = typer.Typer()


class CaptionFormat(StrEnum):
    txt = "txt"
    jsonl = "jsonl"
    both = "both"


VlmOption = Annotated[str, typer.Option("--model", help="A folder, or an id on the hub, of a chat model that sees.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 writes the likeliest answer.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="Pictures of one size at a time.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the model runs.")]
PrecisionOption = Annotated[Precision, typer.Option("--precision", help="Of its network.")]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile what writes: slow to begin, then faster on a GPU.")
]


@app.command()
def ask(
    picture: Annotated[Path, typer.Argument(help="A picture, a clip, or a folder of them.")],
    question: Annotated[str, typer.Argument(help="With {prompt} in it, what is known of each picture.")],
    model: VlmOption,
    also: Annotated[list[str] | None, typer.Option(help="One more question; several times.")] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    seed: SeedOption = 0,
    draw: Annotated[
        Path | None, typer.Option(help="Draw what an answer points to: a picture, or a folder for a folder.")
    ] = None,
    outlines: Annotated[
        Path | None, typer.Option(help="PaliGemma's vae-oid.npz, which outlines need; boxes are drawn without.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A JSONL file; of a folder, answers.jsonl in it.")] = None,
    batch: BatchOption = 8,
    device: DeviceOption = Device.auto,
    precision: PrecisionOption = Precision.bf16,
    compiled: CompileOption = False,
) -> None:
    """Ask a vision-language model about an image, or about every image in a folder. Resumes if interrupted."""
    from ..training import placement
    from ..vlm import annotations, question_answering
    from ..vlm.answer_generation import GenerationSettings

    order = question_answering.AskOptions(
        (question, *(also or [])), model, GenerationSettings(temperature, top_p, max_tokens, seed), batch
    )
    question_answering.check_image(picture)
    marker = annotations.open_annotation_writer(draw, outlines, folder=picture.is_dir())
    answers = question_answering.load_answering_model(
        model, placement.choose_placement(device.value, precision.value), "compiled" if compiled else None
    )
    if picture.is_dir() or out is not None:
        home = picture if picture.is_dir() else picture.parent
        rows = question_answering.answer_folder(
            answers, order, picture, out or home / question_answering.RECORD, stderr_console()
        )
        told = [(Path(row["file"]), str(row["answer"])) for row in rows]
    else:
        several = len(order.questions) > 1
        told = [
            (picture, text) for text in question_answering.answer_image(answers, order, picture, AnswerPrinter(several))
        ]
    if marker is not None:
        annotations.annotate_images(marker, told, picture if picture.is_dir() else None, stderr_console())


class AnswerPrinter:
    """Answers on the screen as they are written, each after its question where there are several."""

    def __init__(self, several: bool) -> None:
        self.several, self.asked = several, ""

    def __call__(self, question: str, text: str) -> None:
        if self.several and question != self.asked:
            typer.echo(f"{question}\n  ", nl=False)
            self.asked = question
        typer.echo(text, nl=False)


@app.command()
def caption(
    folder: Annotated[Path, typer.Argument(help="A folder of pictures, at any depth.")],
    model: VlmOption,
    prompt: Annotated[str | None, typer.Option(help="What to ask; the model's usual words if not given.")] = None,
    form: Annotated[
        CaptionFormat, typer.Option(help="A .txt beside each picture, a metadata.jsonl, or both.")
    ] = CaptionFormat.txt,
    again: Annotated[bool, typer.Option("--again", help="Write captions that are there anew.")] = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a caption.")] = 64,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="The record to go on from; captions.jsonl in the folder.")] = None,
    batch: BatchOption = 8,
    device: DeviceOption = Device.auto,
    precision: PrecisionOption = Precision.bf16,
    compiled: CompileOption = False,
) -> None:
    """Caption every image in a folder with a vision-language model. Resumes if interrupted."""
    from ..training import placement
    from ..vlm import captioning, question_answering
    from ..vlm.answer_generation import GenerationSettings

    manner = GenerationSettings(temperature, top_p, max_tokens, seed)
    wish = captioning.CaptionOptions(folder, model, prompt, manner, batch, form.value, again, out)
    files = captioning.find_images(wish)
    talker = question_answering.load_answering_model(
        model, placement.choose_placement(device.value, precision.value), "compiled" if compiled else None
    )
    captioning.caption_folder(talker, wish, files, stderr_console())


@app.command()
def rank(
    recipe: Annotated[str, typer.Argument(help="A recipe, the directory of a run, or what was exported of one.")],
    overrides: Overrides = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts: .txt, .jsonl or .csv; the recipe's data if none is given.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Only so many of the prompts; 0 takes a file whole.")] = 0,
    count: Annotated[int, typer.Option(min=2, help="Samples of each prompt.")] = 20,
    by: Annotated[str, typer.Option(help="Who labels: playground, geneval, or any reward such as '{type: vlm}'.")] = (
        "playground"
    ),
    against: Annotated[
        list[str] | None, typer.Option(help="A benchmark, or a file of prompts, to keep apart from; several times.")
    ] = None,
    yes: Annotated[float, typer.Option(help="A score from which a sample is right.")] = 0.5,
    margin: Annotated[float | None, typer.Option(help="Pairs by so much of a score, not by right and wrong.")] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Of each prompt, at most.")] = 1,
    previews: Annotated[str, typer.Option(help="Progress to look at samples at; empty makes no PARM set.")] = (
        "0.25,0.5,0.7,0.9"
    ),
    unclear: Annotated[float, typer.Option(help="Progress up to which previews cannot be judged.")] = 0.55,
    clear: Annotated[float, typer.Option(help="Progress from which they can.")] = 0.62,
    weights: Annotated[str, typer.Option(help="live, or a snapshot such as ema.")] = "live",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write to, or to go on in.")] = Path("ranked"),
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Sample prompts, label the samples and write DPO pairs and judge training sets. Resumes if interrupted."""
    from ..data import preference_labeling, preference_pairs
    from ..search import generation

    config, found = generation.resolve_source(recipe, merge_overrides(overrides, device))
    warn_unused_overrides(config, overrides, tiny=tiny)
    batch, dropped = preference_labeling.select_prompts(prompts, config, limit, against or ())
    if dropped:
        stderr_console().print(
            f"{len(dropped)} prompts left out, such as '{dropped[0]:.80}'", markup=False, highlight=False
        )
    rules = preference_pairs.LabelRules(yes, margin, pairs, unclear, clear)
    looks = preference_labeling.parse_progress(previews, "--previews")
    order = preference_labeling.PreferenceOptions(batch, count, by, out, seed, weights, looks, rules)
    preference_labeling.label_preferences(config, found, order, tiny=tiny, console=stderr_console())
