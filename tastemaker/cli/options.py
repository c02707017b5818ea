"""Options, exit codes and consoles that commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:  # it imports torch
    from ..config.schema import AnyConfig

EXIT_USAGE, EXIT_FAILURE, EXIT_INTERRUPTED = 2, 1, 130

Recipe = Annotated[str, typer.Argument(help="Name of a recipe (see `list recipes`) or path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change as key=value, e.g. optim.lr=3e-4.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Use tiny models with random weights.")]


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
    center_crop = "center"  # `center` is a method of str
    flip = "flip"
    ten_crop = "ten-crop"


class CaptionSource(StrEnum):
    caption = "caption"
    class_name = "class_name"
    class_id = "class_id"
    empty = "empty"


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
    str,
    typer.Option(help="single, best_of_n, parm, ..., or settings: '{type: parm, n: 20, start_progress: 0.5}'."),
]
VerifierOption = Annotated[str, typer.Option(help="Verifier of the search: a reward, or `run` for the run's rewards.")]
RunDeviceOption = Annotated[Device | None, typer.Option(help="Device; default: the recipe's.")]
RewardDeviceOption = Annotated[Device, typer.Option(help="Device of the rewards.")]
RewardPrecisionOption = Annotated[Precision, typer.Option(help="Precision of the rewards.")]


def stderr_console() -> Console:
    return Console(stderr=True)


def merge_overrides(overrides: list[str] | None, device: Device | None = None) -> list[str]:
    return [*(overrides or []), *([f"engine.device={device.value}"] if device else [])]


def warn_unused_overrides(config: AnyConfig, overrides: list[str] | None, *, tiny: bool) -> None:
    """Warn about overrides that tiny models ignore."""
    if tiny and overrides:
        from ..config.build import warn_ignored_overrides

        warn_ignored_overrides(config, overrides)
