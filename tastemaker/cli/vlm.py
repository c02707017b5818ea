"""Commands that run a vision-language model: ask and caption."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import DATA, Device, Precision, print_next_steps, stderr_console

app = typer.Typer()


VlmOption = Annotated[str, typer.Option("--model", help="Vision-language model: a folder or a hub id.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy.")]
TopP = Annotated[float, typer.Option(min=0, max=1, help="Nucleus sampling.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed.")]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Batch size (images of one size).")]
DeviceOption = Annotated[Device, typer.Option(help="Device of the model.")]
PrecisionOption = Annotated[Precision, typer.Option(help="Precision of the model.")]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the decoder: slow start, then faster on a GPU.")
]


@app.command(
    rich_help_panel=DATA,
    epilog='Example: tastemaker ask image.png "How many dogs?" --model google/paligemma2-3b-mix-448',
)
def ask(
    image: Annotated[Path, typer.Argument(help="Image, video, or folder of them.")],
    question: Annotated[str, typer.Argument(help="Question; {prompt} is replaced by the prompt of the image.")],
    model: VlmOption,
    more_questions: Annotated[
        list[str] | None, typer.Option("--question", help="Another question; repeatable.")
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = 128,
    seed: SeedOption = 0,
    draw: Annotated[
        Path | None, typer.Option(help="Draw the boxes of an answer: output image, or folder for a folder.")
    ] = None,
    mask_decoder: Annotated[
        Path | None, typer.Option(help="PaliGemma's vae-oid.npz, to draw segmentation masks instead of boxes.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output JSONL; default for a folder: its answers.jsonl.")] = None,
    batch_size: BatchSizeOption = 8,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "bf16",
    compiled: CompileOption = False,
) -> None:
    """Ask a vision-language model about an image, or about every image in a folder. Resumes if interrupted."""
    from ..training.precision import choose_placement
    from ..vlm import annotations, question_answering
    from ..vlm.generation import GenerationSettings

    options = question_answering.AskOptions(
        (question, *(more_questions or [])), model, GenerationSettings(temperature, top_p, max_tokens, seed), batch_size
    )
    question_answering.check_image(image)
    writer = annotations.open_annotation_writer(draw, mask_decoder, folder=image.is_dir())
    answerer = question_answering.load_answering_model(
        model, choose_placement(device, precision), "compiled" if compiled else None
    )
    if image.is_dir() or out is not None:
        record = out or (image if image.is_dir() else image.parent) / question_answering.RECORD
        rows = question_answering.answer_folder(answerer, options, image, record, stderr_console())
        results = [(Path(row["file"]), str(row["answer"])) for row in rows]
    else:
        printer = AnswerPrinter(len(options.questions) > 1)
        results = [(image, text) for text in question_answering.answer_image(answerer, options, image, printer)]
    if writer is not None:
        annotations.annotate_images(writer, results, image if image.is_dir() else None, stderr_console())
    if image.is_dir():
        print_next_steps(f"tastemaker score {image} --reward {shlex.quote(f'{{type: vlm, weights: {model}}}')}")


class AnswerPrinter:
    """Prints answers while they are generated, each after its question if there are several."""

    def __init__(self, several: bool) -> None:
        self.several, self.question = several, ""

    def __call__(self, question: str, text: str) -> None:
        if self.several and question != self.question:
            typer.echo(f"{question}\n  ", nl=False)
            self.question = question
        typer.echo(text, nl=False)


@app.command(rich_help_panel=DATA, epilog="Example: tastemaker caption images --model google/paligemma2-3b-mix-448")
def caption(
    folder: Annotated[Path, typer.Argument(help="Folder of images, searched recursively.")],
    model: VlmOption,
    prompt: Annotated[str | None, typer.Option(help="Captioning prompt; default: the model's own.")] = None,
    caption_format: Annotated[
        Literal["txt", "jsonl", "both"],
        typer.Option("--format", help="Format: a .txt beside each image, a metadata.jsonl, or both."),
    ] = "txt",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing captions.")] = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a caption in tokens.")] = 64,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="Record to resume from; default: captions.jsonl.")] = None,
    batch_size: BatchSizeOption = 8,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "bf16",
    compiled: CompileOption = False,
) -> None:
    """Caption every image in a folder with a vision-language model. Resumes if interrupted."""
    from ..training.precision import choose_placement
    from ..vlm import captioning, question_answering
    from ..vlm.generation import GenerationSettings

    settings = GenerationSettings(temperature, top_p, max_tokens, seed)
    options = captioning.CaptionOptions(folder, model, prompt, settings, batch_size, caption_format, overwrite, out)
    files = captioning.find_images(options)
    answerer = question_answering.load_answering_model(
        model, choose_placement(device, precision), "compiled" if compiled else None
    )
    captioning.caption_folder(answerer, options, files, stderr_console())
    print_next_steps(f"tastemaker train dit-folder 'data={{type: captioned_folder, path: {folder}}}'")
