"""Commands about judges: ask one, and rank samples to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .options import Device, Overrides, Place, Precision, Tiny, console, settings

app = typer.Typer()


@app.command()
def ask(
    picture: Annotated[Path, typer.Argument(help="A picture, a clip, or a folder of them.")],
    question: Annotated[str, typer.Argument(help="With {prompt} in it, what is known of each picture.")],
    model: Annotated[str, typer.Option(help="A folder, or an id on the hub, of a chat model that sees.")],
    temperature: Annotated[float, typer.Option(min=0, help="0 writes the likeliest answer.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A JSONL file; of a folder, answers.jsonl in it.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures of one size at a time.")] = 8,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="Of its network.")] = Precision.bf16,
) -> None:
    """Ask a chat model about a picture, or about each in a folder; again, it goes on."""
    from ..commands import asking, placing
    from ..rewards.nets.replies import Manner

    order = asking.Order(question, model, Manner(temperature, top_p, max_tokens, seed), batch)
    asking.present(picture)
    answers = asking.talker(model, placing.placement(device.value, precision.value))
    if picture.is_dir() or out is not None:
        home = picture if picture.is_dir() else picture.parent
        asking.ask_all(answers, order, picture, out or home / asking.RECORD, console())
    else:
        said = asking.ask_one(answers, order, picture)
        Console().print(said, markup=False, highlight=False, soft_wrap=True)


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
    clear: Annotated[float, typer.Option(help="Progress from which they can.")] = 0.61,
    weights: Annotated[str, typer.Option(help="live, or a snapshot such as ema.")] = "live",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="The folder to write to, or to go on in.")] = Path("ranked"),
    tiny: Tiny = False,
    device: Place = None,
) -> None:
    """Sample prompts, label the samples, and write pairs for DPO and questions for judges; again, it goes on."""
    from ..commands import generating, lessons, ranking

    config, found = generating.source(recipe, settings(overrides, device))
    batch, dropped = ranking.asked(prompts, config, limit, against or ())
    if dropped:
        console().print(f"{len(dropped)} prompts left out, such as '{dropped[0]:.80}'", markup=False, highlight=False)
    rules = lessons.Rules(yes, margin, pairs, unclear, clear)
    looks = ranking.numbers(previews, "--previews")
    order = ranking.Order(batch, count, by, out, seed, weights, looks, rules)
    ranking.rank(config, found, order, tiny=tiny, console=console())
