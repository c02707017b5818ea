"""Commands about rewards and what else there is: score, serve-reward, embed, encode, download and list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..registry import ConfigError
from .options import Device, Exactness, Kind, Overrides, Precision, Saying, Tiny, View, Where, console

app = typer.Typer()

Asked = "A reward's name, or a mapping: '{type: jpeg, quality: 80}'."


@app.command()
def score(
    path: Annotated[Path, typer.Argument(help="A picture, a clip, or a folder of them.")],
    reward: Annotated[list[str], typer.Option(help=f"{Asked} May be given several times.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl or .csv with `file` and `prompt`; other columns become facts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the scores; scores.jsonl beside the pictures.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures of one size to score at a time.")] = 32,
    frames: Annotated[
        bool, typer.Option("--frames", help="Every folder of stills is a clip, not only those that end in .frames.")
    ] = False,
    device: Where = Device.auto,
    precision: Exactness = Precision.fp32,
) -> None:
    """Score pictures; prompts come from --prompts, from metadata.jsonl beside them, or from their names."""
    from ..commands import placing, scoring

    jury = scoring.jury(reward, placing.placement(device.value, precision.value))
    pictures = scoring.pictures(path, prompts, folders=frames)
    target = out or scoring.home(path) / "scores.jsonl"
    scoring.score(jury, pictures, target, batch, console())


@app.command("serve-reward")
def serve_reward(
    reward: Annotated[str, typer.Argument(help=Asked)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8800,
    host: Annotated[str, typer.Option(help="Beyond this machine, a token is needed too.")] = "127.0.0.1",
    token: Annotated[str, typer.Option(help="The name of the environment variable that holds the token.")] = "",
    queue: Annotated[int, typer.Option(min=1, help="Requests at a time; more are refused.")] = 64,
    limit: Annotated[int, typer.Option(min=1, help="Megabytes of a request.")] = 256,
    device: Where = Device.auto,
    precision: Exactness = Precision.fp32,
) -> None:
    """Answer over HTTP what a reward says of pictures; `type: remote` asks it."""
    from ..commands import placing, serving

    terms = serving.Terms(host, port, token, queue, limit * 2**20)
    serving.serve(reward, terms, placing.placement(device.value, precision.value), console())


@app.command()
def embed(
    model: Annotated[str, typer.Argument(help="A recipe, or the name of a published model such as flux.")],
    overrides: Overrides = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts: .txt, .jsonl or .csv; the recipe's data if none is given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write to, or to go on in.")] = Path("embeddings"),
    layout: Annotated[str, typer.Option(help="tastemaker, or srpo as SRPO and DanceGRPO read it.")] = "tastemaker",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many of the prompts.")] = None,
    shard: Annotated[int, typer.Option(min=1, help="Megabytes of a file.")] = 512,
    tiny: Tiny = False,
    device: Annotated[Device, typer.Option(help="Where the encoders run.")] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="Of the encoders.")] = Precision.bf16,
) -> None:
    """Write down what a model's text encoders say of prompts, so that training needs no encoder; again, it goes on."""
    from ..commands import embedding, placing

    order = embedding.Order(model, overrides or (), prompts, out, layout, limit, shard * 2**20)
    embedding.embed(order, placing.placement(device.value, precision.value), tiny=tiny, console=console())


@app.command()
def encode(
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures, a folder for each class, or CIFAR-10's.")],
    tokenizer: Annotated[str, typer.Option(help="A run, a file, or a published name such as vq_ds16_c2i.")] = "",
    vae: Annotated[str, typer.Option(help="Latents in place of tokens: a run, a file, or diffusers' folder.")] = "",
    size: Annotated[int, typer.Option(min=1, help="Pixels a side of the squares that are encoded.")] = 256,
    out: Annotated[Path | None, typer.Option(help="The folder to write to, or to go on in.")] = None,
    views: Annotated[
        View | None, typer.Option(help="Of each picture: its middle (latents), also mirrored (tokens), or ten crops.")
    ] = None,
    crop_range: Annotated[float, typer.Option(min=1, max=4, help="What ten crops are cut from, in their side.")] = 1.1,
    name: Annotated[str, typer.Option(help="Of the data, in the folders' names.")] = "imagenet",
    split: Annotated[str, typer.Option(help="Of CIFAR-10: train or test.")] = "train",
    say: Annotated[Saying | None, typer.Option(help="With --vae: of a picture; its caption, else its class.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --vae: pictures of a shard.")] = 1024,
    skip: Annotated[int, typer.Option(min=0, help="Pictures that may be broken, on a rank; one more ends it.")] = 10,
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.auto,
) -> None:
    """Write the tokens or latents of pictures; again, it goes on, on as many ranks as there are."""
    from ..commands import encoding, latents, placing

    place = placing.placement(device.value, "fp32")
    if bool(tokenizer) == bool(vae):
        raise ConfigError("encode: give either --tokenizer, for tokens, or --vae, for latents")
    if vae:
        if views is View.ten_crop:
            raise ConfigError("--views ten-crop is for tokens; choose middle or flip")
        target = out or Path("latents")
        asked = latents.Order(pictures, vae, target, size, views is View.flip, say.value if say else None, rows, skip)
        latents.encode(asked, place, console())
    else:
        target = out or Path("codes")
        order = encoding.Order(
            pictures, tokenizer, target, size, (views or View.flip).value, crop_range, name, split, skip
        )
        encoding.encode(order, place, console())


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(help="Recipes, rewards, models or ids on the hub (owner/name).")],
    only_list: Annotated[bool, typer.Option("--list", help="Say what is needed, and fetch nothing.")] = False,
) -> None:
    """Fetch published weights: what they are, how large and under which licence, then the files; again, it goes on."""
    from ..commands.downloading import download as run_download

    run_download(names, only_list=only_list, console=console())


@app.command("list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What there is, by the names recipes use."""
    from ..commands import listing

    if as_json:
        Console().print_json(json.dumps(listing.rows(kind.value)))
    else:
        Console().print(listing.table(kind.value))
