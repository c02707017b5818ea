"""Commands about rewards and what else there is: score, serve-reward, embed, encode, download and list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..core.registry import ConfigError
from .options import (
    CaptionSource,
    ComponentKind,
    CropViews,
    Device,
    Overrides,
    Precision,
    RewardDeviceOption,
    RewardPrecisionOption,
    Tiny,
    stderr_console,
)

app = typer.Typer()

REWARD_HELP = "A reward's name, or a mapping: '{type: jpeg, quality: 80}'."


@app.command()
def score(
    path: Annotated[Path, typer.Argument(help="A picture, a clip, or a folder of them.")],
    reward: Annotated[list[str], typer.Option(help=f"{REWARD_HELP} May be given several times.")],
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
    device: RewardDeviceOption = Device.auto,
    precision: RewardPrecisionOption = Precision.fp32,
) -> None:
    """Score images or videos with rewards.

    Prompts come from --prompts, a metadata.jsonl in the folder, or the file names.
    """
    from ..rewards import scoring
    from ..training import placement

    jury = scoring.load_folder_scorer(reward, placement.choose_placement(device.value, precision.value))
    pictures = scoring.find_images_with_prompts(path, prompts, folders=frames)
    target = out or scoring.image_root(path) / "scores.jsonl"
    scoring.score_images(jury, pictures, target, batch, stderr_console())


@app.command("serve-reward")
def serve_reward(
    reward: Annotated[str, typer.Argument(help=REWARD_HELP)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8800,
    host: Annotated[str, typer.Option(help="Beyond this machine, a token is needed too.")] = "127.0.0.1",
    token: Annotated[str, typer.Option(help="The name of the environment variable that holds the token.")] = "",
    queue: Annotated[int, typer.Option(min=1, help="Requests at a time; more are refused.")] = 64,
    limit: Annotated[int, typer.Option(min=1, help="Megabytes of a request.")] = 256,
    device: RewardDeviceOption = Device.auto,
    precision: RewardPrecisionOption = Precision.fp32,
) -> None:
    """Serve a reward over HTTP; use it in a recipe with `type: remote`."""
    from ..serving import launcher
    from ..training import placement

    terms = launcher.ServerOptions(host, port, token, queue, limit * 2**20)
    launcher.run_reward_server(
        reward, terms, placement.choose_placement(device.value, precision.value), stderr_console()
    )


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
    """Precompute the text embeddings of prompts, so that training needs no text encoder. Resumes if interrupted."""
    from ..data import embedding_precompute
    from ..training import placement

    order = embedding_precompute.EmbedOptions(model, overrides or (), prompts, out, layout, limit, shard * 2**20)
    embedding_precompute.embed_prompts(
        order, placement.choose_placement(device.value, precision.value), tiny=tiny, console=stderr_console()
    )


@app.command()
def encode(
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures, a folder for each class, or CIFAR-10's.")],
    tokenizer: Annotated[str, typer.Option(help="A run, a file, or a published name such as vq_ds16_c2i.")] = "",
    vae: Annotated[str, typer.Option(help="Latents in place of tokens: a run, a file, or diffusers' folder.")] = "",
    size: Annotated[int, typer.Option(min=1, help="Pixels a side of the squares that are encoded.")] = 256,
    out: Annotated[Path | None, typer.Option(help="The folder to write to, or to go on in.")] = None,
    views: Annotated[
        CropViews | None,
        typer.Option(help="Of each picture: its middle (latents), also mirrored (tokens), or ten crops."),
    ] = None,
    crop_range: Annotated[float, typer.Option(min=1, max=4, help="What ten crops are cut from, in their side.")] = 1.1,
    name: Annotated[str, typer.Option(help="Of the data, in the folders' names.")] = "imagenet",
    split: Annotated[str, typer.Option(help="Of CIFAR-10: train or test.")] = "train",
    say: Annotated[
        CaptionSource | None, typer.Option(help="With --vae: of a picture; its caption, else its class.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --vae: pictures of a shard.")] = 1024,
    skip: Annotated[int, typer.Option(min=0, help="Pictures that may be broken, on a rank; one more ends it.")] = 10,
    device: Annotated[Device, typer.Option(help="Where it runs.")] = Device.auto,
) -> None:
    """Encode images to tokens or latents. Resumes if interrupted; runs on several GPUs under torchrun."""
    from ..data import latent_encoding, token_encoding
    from ..training import placement

    place = placement.choose_placement(device.value, "fp32")
    if bool(tokenizer) == bool(vae):
        raise ConfigError("encode: give either --tokenizer, for tokens, or --vae, for latents")
    if vae:
        if views is CropViews.ten_crop:
            raise ConfigError("--views ten-crop is for tokens; choose middle or flip")
        target = out or Path("latents")
        asked = latent_encoding.LatentEncodingOptions(
            pictures, vae, target, size, views is CropViews.flip, say.value if say else None, rows, skip
        )
        latent_encoding.encode_latents(asked, place, stderr_console())
    else:
        target = out or Path("codes")
        order = token_encoding.TokenEncodingOptions(
            pictures, tokenizer, target, size, (views or CropViews.flip).value, crop_range, name, split, skip
        )
        token_encoding.encode_tokens(order, place, stderr_console())


@app.command()
def download(
    names: Annotated[list[str], typer.Argument(help="Recipes, rewards, models or ids on the hub (owner/name).")],
    only_list: Annotated[bool, typer.Option("--list", help="Say what is needed, and fetch nothing.")] = False,
) -> None:
    """Download published weights; prints size and license first. Resumes if interrupted."""
    from ..models.downloads import download as run_download

    run_download(names, only_list=only_list, console=stderr_console())


@app.command("list")
def list_(
    kind: Annotated[ComponentKind, typer.Argument(help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List models, rewards, objectives, data, searches, prompts or recipes by the names that configs use."""
    from ..config import catalog

    if as_json:
        Console().print_json(json.dumps(catalog.component_rows(kind.value)))
    else:
        Console().print(catalog.component_table(kind.value))
