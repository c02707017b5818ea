"""Commands that run rewards: score and serve-reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, Precision, RewardDeviceOption, RewardPrecisionOption, stderr_console

app = typer.Typer()


REWARD_HELP = "Name of a reward, or settings: '{type: jpeg, quality: 80}'."


@app.command()
def score(
    path: Annotated[Path, typer.Argument(help="Image, video, or folder of them.")],
    reward: Annotated[list[str], typer.Option(help=f"{REWARD_HELP} Repeatable.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl or .csv with `file` and `prompt`; other columns are metadata.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file; default: scores.jsonl beside the images.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size (images of one size).")] = 32,
    frames: Annotated[
        bool,
        typer.Option("--frames", help="Treat every folder of images as a video, not only *.frames."),
    ] = False,
    device: RewardDeviceOption = Device.auto,
    precision: RewardPrecisionOption = Precision.fp32,
) -> None:
    """Score images or videos with rewards.

    Prompts come from --prompts, a metadata.jsonl in the folder, or the file names.
    """
    from ..rewards import folder_scorer
    from ..training.precision import choose_placement

    jury = folder_scorer.load_folder_scorer(reward, choose_placement(device.value, precision.value))
    pictures = folder_scorer.find_images_with_prompts(path, prompts, frame_folders=frames)
    target = out or folder_scorer.image_root(path) / "scores.jsonl"
    folder_scorer.score_images(jury, pictures, target, batch, stderr_console())


@app.command("serve-reward")
def serve_reward(
    reward: Annotated[str, typer.Argument(help=REWARD_HELP)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8800,
    host: Annotated[str, typer.Option(help="Host; other machines need --token.")] = "127.0.0.1",
    token: Annotated[str, typer.Option(help="Environment variable with the access token.")] = "",
    queue: Annotated[int, typer.Option(min=1, help="Maximum number of queued requests.")] = 64,
    limit: Annotated[int, typer.Option(min=1, help="Maximum size of a request in MB.")] = 256,
    device: RewardDeviceOption = Device.auto,
    precision: RewardPrecisionOption = Precision.fp32,
) -> None:
    """Serve a reward over HTTP; use it in a recipe with `type: remote`."""
    from ..serving import server
    from ..training.precision import choose_placement

    terms = server.ServerOptions(host, port, token, queue, limit * 2**20)
    server.run_reward_server(reward, terms, choose_placement(device.value, precision.value), stderr_console())
