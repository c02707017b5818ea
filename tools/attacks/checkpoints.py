"""Attacks on what a run has written: damaged checkpoints, edited state, and hostile files in its directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from .lab import KEPT_STEP, Lab, attack, expect

ALIASES = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
])  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000


def newest_checkpoint(directory: Path) -> Path:
    return directory / f"checkpoints/step-{KEPT_STEP:06d}"


def flip_byte(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@attack("byte-flips", "a flipped bit in any file of a checkpoint is refused with a message", quick=True)
def flip_bytes(lab: Lab) -> None:
    checkpoint = newest_checkpoint(lab.reference())
    files = sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    for name in ["state.json"] if lab.quick else files:
        for i in range(lab.count(8 if name.endswith(".json") else 3, 1)):
            directory = lab.copy_run(f"flip-{name.replace('/', '-')}-{i}")
            file = newest_checkpoint(directory) / name
            position, bit = lab.rng.randrange(file.stat().st_size), lab.rng.randrange(8)
            with lab.attempt(f"bit {bit} of byte {position} of {name}"):
                flip_byte(file, position, bit)
                lab.run("train", str(directory)).expect_message()
            shutil.rmtree(directory)


def edit_step(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"step": {KEPT_STEP}', f'"step": {KEPT_STEP + 2}'))


def drop_key(key: str) -> Callable[[Path], None]:
    def drop(path: Path) -> None:
        state = json.loads(path.read_text())
        state.pop(key, None)
        path.write_text(json.dumps(state))

    return drop


EDITS: dict[str, Callable[[Path], None]] = {
    "the step": edit_step,
    "no files": drop_key("files"),
    "no step": drop_key("step"),
    "no extra": drop_key("extra"),
    "no scaler": drop_key("scaler"),
    "a list": lambda path: path.write_text("[]") and None,
    "nothing": lambda path: path.write_text("") and None,
    "half": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]) and None,
    "100,000 brackets": lambda path: path.write_text(DEEP) and None,
    "bytes that are no text": lambda path: path.write_bytes(b"\xff\xfe\x00") and None,
    "deleted": lambda path: path.unlink(),
    "manifest.json deleted": lambda path: path.with_name("manifest.json").unlink(missing_ok=True),
    "weights.safetensors deleted": lambda path: path.with_name("weights.safetensors").unlink(),
    "manifest.json of another step": lambda path: copy_from_older(path.with_name("manifest.json")),
    "all of another step": lambda path: [copy_from_older(each) for each in path.parent.glob("*.*")] and None,
}


def copy_from_older(path: Path) -> None:
    """Replace a file by that of the checkpoint before, which is sound by itself."""
    older = path.parent.with_name(f"step-{KEPT_STEP - 2:06d}") / path.name
    if older.exists():
        shutil.copy(older, path)


@attack("edited-state", "an edited, cut or missing state.json is refused with a message", quick=True)
def edit_state(lab: Lab) -> None:
    for name, edit in list(EDITS.items())[: lab.count(len(EDITS), 1)]:
        directory = lab.copy_run(f"edit-{name.replace(' ', '-').replace(',', '')}")
        with lab.attempt(name):
            edit(newest_checkpoint(directory) / "state.json")
            lab.run("train", str(directory)).expect_message()
        shutil.rmtree(directory)


@attack("advice-for-damage", "the command that the message names works, and the damaged checkpoint is kept aside")
def follow_advice(lab: Lab) -> None:
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json")[: lab.count(3, 1)]:
        directory = lab.copy_run(f"advice-{name}")
        with lab.attempt(f"damaged {name}"):
            file = newest_checkpoint(directory) / name
            flip_byte(file, file.stat().st_size // 2, 0)
            damaged = file.read_bytes()
            lab.run("train", str(directory)).expect_message(f"--from-step {KEPT_STEP - 2}")
            lab.run("train", str(directory), "--from-step", str(KEPT_STEP - 2)).expect_success()
            lab.expect_reference(directory)
            kept = [each for each in directory.rglob(name) if each.read_bytes() == damaged]
            expect(kept, "the damaged checkpoint was not kept")
        shutil.rmtree(directory)


def edit_config(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.yaml").write_text(text) and None


def cut_config(directory: Path) -> None:
    path = directory / "config.yaml"
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def append_line(name: str, line: str) -> Callable[[Path], None]:
    def append(directory: Path) -> None:
        with (directory / name).open("a") as file:
            file.write(line + "\n")

    return append


def tag_config(directory: Path) -> None:
    canary = directory.parent / "executed"
    text = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(f'x: !!python/object/apply:os.system ["touch {canary}"]\n{text}')


RUN_FILES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "aliases that multiply in config.yaml": (edit_config(f"{ALIASES}\nsteps: 10\n"), ("train", "report")),
    "half of config.yaml": (cut_config, ("train", "report")),
    "a Python tag in config.yaml": (tag_config, ("train", "report")),
    "100,000 brackets in config.yaml": (edit_config(f"steps: {DEEP}\n"), ("train", "report")),
    "a list as config.yaml": (edit_config("- 1\n- 2\n"), ("train", "report")),
    "100,000 brackets in metrics.jsonl": (append_line("metrics.jsonl", DEEP), ("report", "train")),
    "a number of 100,000 digits in metrics.jsonl": (
        append_line("metrics.jsonl", '{"step": ' + "9" * 100_000 + "}"),
        ("report", "train"),
    ),
    "a list in metrics.jsonl": (append_line("metrics.jsonl", '["step", {"step": [1]}]'), ("report",)),
    "100,000 brackets as environment.json": (
        lambda directory: (directory / "environment.json").write_text(DEEP) and None,
        ("report", "train"),
    ),
}


@attack("hostile-run-files", "train and report end within 60 s and 2 GiB, without a traceback", quick=True)
def plant_run_files(lab: Lab) -> None:
    for name, (plant, commands) in list(RUN_FILES.items())[: lab.count(len(RUN_FILES), 1)]:
        for command in commands[: lab.count(2, 1)]:
            directory = lab.copy_run("tampered")
            with lab.attempt(f"{command}: {name}"):
                plant(directory)
                result = lab.run(command, str(directory), seconds=60)
                expect(not (directory.parent / "executed").exists(), "the tag was executed")
                if result.code:
                    result.expect_message()
                expect("Traceback" not in result.output, f"a traceback: {result.last_line}")
                result.expect_memory(2)
            shutil.rmtree(directory)
