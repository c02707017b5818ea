"""What the commands share: options, exit codes, and where they print."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:  # what it is takes torch to say, which most commands do without
    from ..config.schema import AnyConfig

EXIT_USAGE, EXIT_FAILURE, EXIT_INTERRUPTED = 2, 1, 130

Recipe = Annotated[str, typer.Argument(help="A recipe's name (see `list recipes`) or the path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change, as key=value: optim.lr=3e-4")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Build every model at random small size.")]


class Device(StrEnum):
    auto = "auto"
    cuda = "cuda"
    mps = "mps"
    cpu = "cpu"


class Precision(StrEnum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class ExportLayout(StrEnum):
    diffusers = "diffusers"
    comfyui = "comfyui"
    authors = "authors"
    llamagen = "llamagen"


class VideoFormat(StrEnum):
    mp4 = "mp4"
    gif = "gif"
    png = "png"
    frames = "frames"


class CropViews(StrEnum):
    middle = "middle"
    flip = "flip"
    ten_crop = "ten-crop"


class CaptionSource(StrEnum):
    caption = "caption"
    name = "name"
    number = "number"
    nothing = "nothing"


class ComponentKind(StrEnum):
    models = "models"
    autoencoders = "autoencoders"
    rewards = "rewards"
    objectives = "objectives"
    recipes = "recipes"
    data = "data"
    searches = "searches"
    prompts = "prompts"


SearchOption = Annotated[
    str, typer.Option(help="single, best_of_n, parm, ..., or with settings: '{type: parm, n: 20, first: 0.5}'.")
]
VerifierOption = Annotated[str, typer.Option(help="Whom the search asks: a reward, or `run` for the run's own.")]
RunDeviceOption = Annotated[Device | None, typer.Option(help="Where to run; the recipe says so otherwise.")]
RewardDeviceOption = Annotated[Device, typer.Option(help="Where the rewards run.")]
RewardPrecisionOption = Annotated[Precision, typer.Option(help="Of the rewards' networks.")]


def stderr_console() -> Console:
    return Console(stderr=True)


def merge_overrides(overrides: list[str] | None, device: Device | None = None) -> list[str]:
    return [*(overrides or []), *([f"engine.device={device.value}"] if device else [])]


def warn_unused_overrides(config: AnyConfig, overrides: list[str] | None, *, tiny: bool) -> None:
    """Say which of the settings small models leave aside, where such are asked for."""
    if tiny and overrides:
        from ..config.ignored_overrides import warn_ignored_overrides

        warn_ignored_overrides(config, overrides)
