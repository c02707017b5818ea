"""Commands that run rewards: score and serve-reward."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from .options import EVALUATE, MODELS, RewardDeviceOption, RewardPrecisionOption, print_next_steps, stderr_console

app = typer.Typer()


REWARD_HELP = "Name of a reward, or settings: '{type: jpeg, quality: 80}'."


@app.command(rich_help_panel=EVALUATE, epilog="Example: tastemaker score samples --reward aesthetic")
def score(
    path: Annotated[Path, typer.Argument(help="Image, video, or folder of them.")],
    reward: Annotated[list[str], typer.Option(help=f"{REWARD_HELP} Repeatable.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl or .csv with `file` and `prompt`; other columns are metadata.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file; default: scores.jsonl beside the images.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size (images of one size).")] = 32,
    frame_folders: Annotated[
        bool, typer.Option("--frame-folders", help="Treat every folder of images as a video, not only *.frames.")
    ] = False,
    device: RewardDeviceOption = "auto",
    precision: RewardPrecisionOption = "fp32",
) -> None:
    """Score images or videos with rewards.

    Prompts come from --prompts, a metadata.jsonl in the folder, or the file names.
    """
    from ..rewards import folder_scorer
    from ..training.precision import choose_placement

    scorer = folder_scorer.load_folder_scorer(reward, choose_placement(device, precision))
    images = folder_scorer.find_images_with_prompts(path, prompts, frame_folders=frame_folders)
    target = out or folder_scorer.image_root(path) / "scores.jsonl"
    folder_scorer.score_images(scorer, images, target, batch_size, stderr_console())
    name = reward[0] if not reward[0].startswith("{") else "NAME"
    settings = f"{{type: {reward[0]}}}" if name != "NAME" else reward[0]
    print_next_steps(f"tastemaker train RECIPE {shlex.quote(f'rewards.{name}={settings}')}")


@app.command("serve-reward", rich_help_panel=MODELS, epilog="Example: tastemaker serve-reward aesthetic --port 8800")
def serve_reward(
    reward: Annotated[list[str], typer.Argument(help=f"{REWARD_HELP} Several are served by name.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8800,
    host: Annotated[str, typer.Option(help="Host; other machines need --token-env.")] = "127.0.0.1",
    token_env: Annotated[str, typer.Option(help="Environment variable with the access token.")] = "",
    queue_size: Annotated[int, typer.Option(min=1, help="Maximum number of queued requests.")] = 64,
    max_request_mb: Annotated[int, typer.Option(min=1, help="Maximum size of a request in MB, decompressed.")] = 256,
    max_total_mb: Annotated[int, typer.Option(min=1, help="Maximum size of all requests in progress in MB.")] = 1024,
    receive_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds in which a request must arrive.")] = 60.0,
    answer_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a waiting request fails.")] = 600.0,
    batch_wait_ms: Annotated[
        float, typer.Option(min=0, max=10_000, help="Milliseconds that a batch waits for requests of other clients.")
    ] = 0.0,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further name of this machine in requests. Repeatable; '*': any.")
    ] = None,
    device: RewardDeviceOption = "auto",
    precision: RewardPrecisionOption = "fp32",
) -> None:
    """Serve one or several rewards over HTTP; use them in a recipe with `type: remote`."""
    from ..serving import server
    from ..serving.limits import ServiceLimits
    from ..training.precision import choose_placement

    limits = ServiceLimits(
        max_requests=queue_size,
        max_bytes=max_request_mb * 2**20,
        max_total_bytes=max_total_mb * 2**20,
        receive_timeout=receive_timeout,
        answer_timeout=answer_timeout,
    )
    options = server.ServerOptions(host, port, token_env, tuple(allowed_host or ()), limits, batch_wait_ms / 1000)
    server.run_reward_server(reward, options, choose_placement(device, precision), stderr_console())
