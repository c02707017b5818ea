"""Options, exit codes and consoles that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ..console import make_console
from ..console import print_next_steps as print_next_steps

# Sections of `tastemaker --help`, in order.
TRAIN, LOOK, EVALUATE, DATA, MODELS, DIAGNOSE = PANELS = ("Train", "Look", "Evaluate", "Data", "Models", "Diagnose")
EXIT_USAGE, EXIT_FAILURE, EXIT_INTERRUPTED = 2, 1, 130

Recipe = Annotated[str, typer.Argument(help="Name of a recipe (see `list recipes`) or path of a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change as key=value, e.g. optim.lr=3e-4.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Use tiny models with random weights.")]


Device = Literal["auto", "cuda", "mps", "cpu"]
Precision = Literal["fp32", "fp16", "bf16"]

SearchOption = Annotated[
    str,
    typer.Option(help="single, best_of_n, parm, ..., or settings: '{type: parm, n: 20, start_progress: 0.5}'."),
]
SaveStepsOption = Annotated[
    bool, typer.Option("--save-steps", help="Write the previews of all candidates after every step.")
]
VerifierOption = Annotated[str, typer.Option(help="Verifier of the search: a reward, or `run` for the run's rewards.")]
RunDeviceOption = Annotated[Device | None, typer.Option(help="Device; default: the recipe's.")]
PromptFileOption = Annotated[
    Path | None, typer.Option(help="Prompt file: .txt, .jsonl or .csv; default: the recipe's data.")
]
RewardDeviceOption = Annotated[Device, typer.Option(help="Device of the rewards.")]
RewardPrecisionOption = Annotated[Precision, typer.Option(help="Precision of the rewards.")]


def stderr_console() -> Console:
    return make_console(stderr=True)


def merge_overrides(overrides: list[str] | None, device: Device | None = None) -> list[str]:
    return [*(overrides or []), *([f"engine.device={device}"] if device else [])]
