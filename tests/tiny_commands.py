"""Change documented commands so that they take seconds on a CPU and need no weights."""

from __future__ import annotations

import shlex

SMALL_RUN = ("sample.every=0", "guard.every=0", "--device", "cpu")
SMALL_BATCH = ("batch.prompts=2", "batch.minibatches=1", "engine.compile=false")
# What is appended to a command.
ADDITIONS: dict[str, tuple[str, ...]] = {
    "ask": ("--device", "cpu"),
    "demo": ("--steps", "2", "--num-prompts", "6", "--device", "cpu"),
    "download": ("--list",),
    "embed": ("--tiny", "--device", "cpu"),
    "encode": ("--device", "cpu"),
    "evaluate": ("--num-prompts", "6", "--count", "1", "--device", "cpu"),
    "export": (),
    "generate": ("--device", "cpu"),
    "reconstruct": ("--device", "cpu"),
    "score": ("--device", "cpu"),
    "train": ("--tiny", *SMALL_BATCH, *SMALL_RUN),
}
SMALL_RECIPES = {  # where the published numbers take long, even with tiny networks
    "ddpo-sd15": ("process.num_steps=4",),
    "flowgrpo-sd35": ("objective.group_size=2", "process.num_steps=4"),
    "grpo-playground-flow": ("objective.group_size=2",),
}
REWARDS_WITHOUT_WEIGHTS = {"hps": "brightness", "aesthetic": "jpeg"}


def make_tiny(line: str, steps: int) -> list[str]:
    """The arguments of a documented command, changed to train `steps` steps of tiny models on the CPU."""
    words = shlex.split(line)
    command, *arguments = words[words.index("tastemaker") + 1 :]
    if command == "score":
        arguments = [REWARDS_WITHOUT_WEIGHTS.get(word, word) for word in arguments]
    if command == "train":
        arguments = [word for word in arguments if not word.startswith("steps=")] + [f"steps={steps}"]
        if "--from-step" in arguments:
            arguments[arguments.index("--from-step") + 1] = "2"  # of which every tiny run has a checkpoint
        if arguments[0].startswith("runs/"):  # it continues a run whose model is tiny already
            return [command, *arguments, *SMALL_RUN[2:]]
        arguments += SMALL_RECIPES.get(arguments[0], ())
    added = [word for word in ADDITIONS.get(command, ()) if word not in arguments]
    return [command, *arguments, *added]
