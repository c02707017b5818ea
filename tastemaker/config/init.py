"""`tastemaker init`: choose a shipped recipe by three answers, and write a commented recipe that extends it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.registry import suggest_name
from .recipes import YAML_SUFFIXES, merge_parents, recipe_paths
from .yaml_io import render_yaml

HARDWARE = {
    "laptop": "a computer without a GPU",
    "gpu": "one GPU",
    "cluster": "several GPUs, on one machine or more",
}
GOALS = {
    "prompt": "images show what the prompt says",
    "preference": "people prefer the images (HPS, PickScore, ImageReward)",
    "aesthetics": "images look better (LAION aesthetic score)",
    "text": "text in images is legible",
    "motion": "videos move as the prompt says",
    "own": "what a Python function of yours scores",
}
Settings = Mapping[str, Any]

FSDP: Settings = {"engine": {"strategy": "fsdp"}}
FLUX_LORA: Settings = {
    "tuning": {"type": "lora", "rank": 128, "alpha": 256},
    "optim": {"lr": 3e-4},
    "engine": {"strategy": "replicated", "param_dtype": "fp32"},
}


@dataclass(frozen=True)
class Start:
    """A recipe to start from, and the settings that the hardware needs."""

    recipe: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class ModelChoice:
    """A model with its starting recipes by hardware and goal."""

    description: str
    starts: Mapping[str, Mapping[str, Start]]


def _on(hardware: Sequence[str], starts: Mapping[str, Start]) -> dict[str, Mapping[str, Start]]:
    return dict.fromkeys(hardware, starts)


MODELS = {
    "playground": ModelChoice(
        "small models that are included; minutes to an hour on a CPU",
        _on(
            ("laptop", "gpu"),
            {
                "prompt": Start("nft-playground"),
                "text": Start("nft-playground-words"),
                "motion": Start("reward-gradient-playground-video"),
                "own": Start("nft-playground"),
            },
        ),
    ),
    "sd15": ModelChoice(
        "Stable Diffusion 1.5, with LoRA",
        _on(
            ("gpu", "cluster"),
            {"preference": Start("draft-sd15"), "aesthetics": Start("ddpo-sd15"), "own": Start("ddpo-sd15")},
        ),
    ),
    "sdxl": ModelChoice("Stable Diffusion XL, with LoRA", _on(("gpu", "cluster"), {"preference": Start("refl-sdxl")})),
    "sd35": ModelChoice(
        "Stable Diffusion 3.5 medium, with LoRA",
        _on(("gpu", "cluster"), {"preference": Start("flowgrpo-sd35"), "own": Start("flowgrpo-sd35")}),
    ),
    "flux": ModelChoice(
        "FLUX.1-dev: LoRA on one GPU, all weights on several",
        {
            "gpu": {"preference": Start("srpo-flux-hps-lora"), "own": Start("dancegrpo-flux", FLUX_LORA)},
            "cluster": {
                "preference": Start("srpo-flux-hps", FSDP),
                "text": Start("direct-align-flux-ocr", FSDP),
                "own": Start("dancegrpo-flux"),
            },
        },
    ),
    "qwen-image": ModelChoice(
        "Qwen-Image: LoRA on one GPU, all weights on several",
        {
            "gpu": {"preference": Start("srpo-qwen-image-lora")},
            "cluster": {"preference": Start("srpo-qwen-image", FSDP)},
        },
    ),
    "z-image": ModelChoice(
        "Z-Image-Turbo, in its eight steps, with LoRA",
        _on(("gpu", "cluster"), {"preference": Start("draft-z-image-turbo"), "own": Start("grpo-z-image-turbo")}),
    ),
    "flux2": ModelChoice(
        "FLUX.2 klein, in its four steps, with LoRA",
        _on(("gpu", "cluster"), {"preference": Start("draft-flux2-klein"), "own": Start("grpo-flux2-klein")}),
    ),
    "wan": ModelChoice("Wan 2.1, video, with LoRA", _on(("gpu", "cluster"), {"preference": Start("vader-wan-hps")})),
    "llamagen": ModelChoice(
        "LlamaGen, images of ImageNet classes",
        _on(("gpu", "cluster"), {"prompt": Start("grpo-llamagen"), "own": Start("grpo-llamagen")}),
    ),
}


def list_model_choices(hardware: str) -> dict[str, str]:
    """The models that train on this hardware, with descriptions."""
    _require_choice("--hardware", hardware, HARDWARE)
    return {name: choice.description for name, choice in MODELS.items() if hardware in choice.starts}


def list_goal_choices(hardware: str, model: str) -> dict[str, str]:
    """What a starting recipe of a model can improve, with descriptions."""
    _require_choice("--model", model, MODELS)
    _require_choice("--model", model, list_model_choices(hardware), f" on {HARDWARE[hardware]}")
    return {goal: GOALS[goal] for goal in MODELS[model].starts[hardware]}


def _require_choice(option: str, value: str, choices: Mapping[str, Any], reason: str = "") -> None:
    if value not in choices:
        raise ConfigError(f"{option}: '{value:.60}' is not available{reason}{suggest_name(value, choices)} [TM024]")


@dataclass(frozen=True)
class StarterFiles:
    """The files that `tastemaker init` writes, and the commands to run next."""

    files: Mapping[Path, str]
    next_commands: tuple[str, ...]

    def write(self) -> None:
        for path, text in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def make_starter_files(hardware: str, model: str, goal: str, out: Path) -> StarterFiles:
    """Make the recipe for three answers, and for the goal `own` a Python file with a reward beside it."""
    _require_choice("--goal", goal, GOALS)
    _require_choice("--goal", goal, list_goal_choices(hardware, model), f" for {model} on {HARDWARE[hardware]}")
    if out.suffix not in YAML_SUFFIXES:
        raise ConfigError(
            f"--out: expected a file name that ends in .yaml, got '{out!s:.200}'; rename the file [TM025]"
        )
    start = MODELS[model].starts[hardware][goal]
    base = merge_parents(recipe_paths()[start.recipe])
    files = {}
    module = re.sub(r"\W", "_", out.stem) + "_reward"
    if goal == "own":
        files[out.with_name(f"{module}.py")] = REWARD_FILE
    rewards = _own_reward(base, module) if goal == "own" else ""
    files[out] = _render_recipe(out, start, base, f"{GOALS[goal]}; {model} on {HARDWARE[hardware]}", rewards)
    return StarterFiles(files, _list_commands(hardware, model, start.recipe, out))


def _render_recipe(out: Path, start: Start, base: Settings, purpose: str, rewards: str) -> str:
    objective, optim = base["objective"], {**base.get("optim", {}), **start.settings.get("optim", {})}
    optim = {key: optim[key] for key in ("lr",) if key in optim}
    sections = [
        f"# {purpose[0].upper()}{purpose[1:]}. Written by `tastemaker init`.\n"
        f"# tastemaker train {out}\n"
        f"# Every setting that is not here comes from the recipe {start.recipe}. `tastemaker check {out}` prints all.",
        f"extends: [{start.recipe}]",
        "# Prompts: the recipe's. For your own, write one per line into a file and remove the first #.\n"
        "# data: {type: prompt_file, path: prompts.txt}",
        rewards,
        _comment("Needed on this hardware.", {k: v for k, v in start.settings.items() if k != "optim"}),
        _comment(
            "Number of training steps. A finished run continues if you raise it and train again.",
            {"steps": base["steps"]},
        ),
        _comment("Learning rate. If the reward stays, double it; if samples degrade, halve it.", {"optim": optim}),
        _comment(
            "Prompts per step; more give a steadier gradient and take longer.",
            {"batch": {"prompts": base["batch"]["prompts"]}},
        ),
        _comment(
            "Samples per prompt, which are compared with one another.",
            {"objective": {"group_size": objective["group_size"]}} if "group_size" in objective else {},
        ),
        _comment("Compare runs of several seeds before you believe a difference.", {"seed": base.get("seed", 0)}),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _comment(text: str, settings: Settings) -> str:
    """Settings as YAML below a comment; empty if there are none."""
    lines = [
        render_yaml({key: value}).rstrip() if isinstance(value, Mapping) else f"{key}: {value}"
        for key, value in settings.items()
        if value not in ({}, None)
    ]
    return "\n".join([f"# {text}", *lines]) if lines else ""


def _own_reward(base: Settings, module: str) -> str:
    """The section that replaces the rewards of a recipe; those of weight 0 are measured, so they stay."""
    trained = [name for name, reward in base.get("rewards", {}).items() if reward.get("weight", 1) != 0]
    removed = "".join(f"  {name}: null  # removes the reward of the recipe\n" for name in trained)
    return (
        f"# Your reward: the function `score` in {module}.py. Start tastemaker in the folder of this file.\n"
        f"rewards:\n{removed}  own: {{type: '{module}:score'}}"
    )


def _list_commands(hardware: str, model: str, recipe: str, out: Path) -> tuple[str, ...]:
    commands = [f"tastemaker check {out}"]
    if model != "playground":
        commands.append(f"tastemaker download {recipe}")
    if hardware == "gpu":
        commands += [f"tastemaker plan {out} --gpu rtx4090-24g", f"tastemaker train {out}"]
    elif hardware == "cluster":
        commands += [
            f"tastemaker plan {out} --gpu h100-80g --world-size 8",
            f"torchrun --nproc-per-node 8 -m tastemaker train {out}",
        ]
    else:
        commands.append(f"tastemaker train {out}")
    return tuple(commands)


REWARD_FILE = '''"""A reward: a function that scores images. Higher is better."""


def score(images, prompts, **metadata):
    """Return one score per image.

    `images` is a tensor [B, 3, H, W] with values in [0, 1], `prompts` a list of B texts. Other columns of the prompt
    file come as lists of B values in `metadata`.
    """
    return images.mean(dim=(1, 2, 3))  # brightness, as an example: replace it
'''
