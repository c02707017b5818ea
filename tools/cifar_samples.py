"""Tokens of samples, which are small to carry, and pictures of them, with how many a classifier takes for their class.

python tools/cifar_samples.py tokens runs/cifar-gpt tokens --count 10000 --guidance 1.0 --guidance 1.5
python tools/cifar_samples.py pictures tokens-1.5.npz runs/cifar-vq samples.npz --classifier cifar10.safetensors
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from tastemaker.config.build import build
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.data.cifar10 import Cifar10, load_cifar10
from tastemaker.data.image_io import make_contact_sheet, make_grid, save_image
from tastemaker.models.vq import build_frozen_tokenizer, read_tokenizer
from tastemaker.rewards.classifier import NAMES, Classifier
from tastemaker.search.base import RubricVerifier
from tastemaker.search.generation import resolve_source
from tastemaker.search.single import SingleSample
from tastemaker.training.sample_grid import sampling_policy

app = typer.Typer()


@app.command()
def tokens(
    run: Path,
    out: Path,
    count: int = 10_000,
    guidance: Annotated[list[float] | None, typer.Option(help="May be given several times, for as many files.")] = None,
    seed: int = 0,
    rows: int = 1000,
    device: str = "auto",
) -> None:
    """Sample as many of each class, and keep their tokens."""
    for scale in guidance or [1.0]:
        file = out.with_name(f"{out.name}-{scale}.npz")
        sample(run, file, count, scale, seed, rows, device)
        typer.echo(f"{count} samples of {run} at guidance {scale} in {file}")


def sample(run: Path, out: Path, count: int, guidance: float, seed: int, rows: int, device: str) -> None:
    config, found = resolve_source(str(run), [f"guidance={{scale: {guidance}}}", f"engine.device={device}"])
    made = build(config)
    assert found is not None
    made.resume(found)
    labels, kept = np.arange(count) % len(NAMES), []
    for first in range(0, count, rows):
        chosen = torch.arange(first, min(first + rows, count))
        batch = PromptBatch(tuple(NAMES[labels[i]] for i in chosen.tolist()), ({},) * len(chosen))
        rng = Randomness(seed, 0, chosen.to(made.engine.device))
        borrowed = made.policy.weights.use("ema") if made.ema else nullcontext()
        with torch.no_grad(), made.engine.computing(), borrowed:
            x = SingleSample().find(sampling_policy(made.policy), RubricVerifier(made.rubric), batch, rng).x
        kept.append(x.cpu().numpy().astype(np.uint16))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, tokens=np.concatenate(kept), labels=labels.astype(np.uint8))
    made.engine.close()


@app.command()
def likelihood(
    run: Path,
    data: Path,
    start: Annotated[int, typer.Option(help="Of the first photograph that was not learned.")],
    count: int = 400,
    device: str = "auto",
) -> None:
    """Say how likely photographs that were learned are, and others; if both alike, nothing was learned by heart."""
    config, found = resolve_source(str(run), [f"engine.device={device}"])
    made = build(config)
    assert found is not None
    made.resume(found)
    told: dict[str, float] = {}
    several = min(count, start, len(load_cifar10(data, "train")) - start)
    if several < 1:
        raise typer.BadParameter(f"--start is {start}, and {data} has no photographs from there on; learn from fewer")
    for name, first in (("learned", 0), ("others", start)):
        batch = Cifar10(data, count=several, start=first).load(0).batch(0, several, 0, 1)
        borrowed = made.policy.weights.use("ema") if made.ema else nullcontext()
        with torch.no_grad(), made.engine.computing(), borrowed:
            x = made.policy.encode(batch.pixels.to(made.engine.device))
            rng = Randomness(0, 0, torch.arange(len(x), device=made.engine.device))
            each = made.policy.likelihood(made.policy.embed(batch.prompts), x, made.policy.corrupt(x, rng)) / x.shape[1]
        told[name] = -each.mean().item()
    made.engine.close()
    typer.echo(json.dumps({"run": str(run), "nats a token": told}))


@app.command()
def pictures(
    tokens: Path,
    tokenizer: str,
    out: Path,
    classifier: Annotated[str, typer.Option()] = "",
    count: Annotated[int, typer.Option(help="Only the first so many, 0 for all.")] = 0,
    shown: Annotated[Path | None, typer.Option(help="A sheet of the first hundred.")] = None,
) -> None:
    """Decode tokens to an `.npz` in ADM's layout, and say how many are taken for their class."""
    with np.load(tokens) as file:
        many = count or len(file["labels"])
        ids, labels = torch.from_numpy(file["tokens"][:many].astype(np.int64)), file["labels"][:many].tolist()
    net = build_frozen_tokenizer(*read_tokenizer(tokenizer), tokenizer, Placement())
    with torch.no_grad():
        pixels = torch.cat([net.decode(piece) for piece in torch.split(ids, 250)])
    np.savez(out, arr_0=(pixels * 255).round().byte().movedim(1, -1).numpy())
    told: dict[str, object] = {"samples": str(out), "count": len(pixels)}
    if classifier:
        judge = Classifier(weights=classifier, says="correct").load(Placement())
        prompts = [NAMES[label] for label in labels]
        right = judge.score(pixels[:, None], prompts, [{}] * len(prompts))
        told["accuracy"] = right.mean().item()
        told["by class"] = {name: right[i :: len(NAMES)].mean().item() for i, name in enumerate(NAMES)}
    if shown is not None:
        save_image(make_contact_sheet(pixels[:100, None], [NAMES[label] for label in labels[:100]])[None], shown)
    typer.echo(json.dumps(told))


@app.command()
def beside(tokenizer: str, out: Path, tokens: list[Path], rows: int = 2) -> None:
    """Draw the first of several files below each other, a class a column, named by their files."""
    net = build_frozen_tokenizer(*read_tokenizer(tokenizer), tokenizer, Placement())
    pixels, told = [], []
    for path in tokens:
        with np.load(path) as file, torch.no_grad():
            many = rows * len(NAMES)
            pixels.append(net.decode(torch.from_numpy(file["tokens"][:many].astype(np.int64))))
            told += [f"{path.stem.removeprefix('tokens-')} {NAMES[label]}" for label in file["labels"][:many]]
    save_image(make_grid(torch.cat(pixels)[:, None], columns=len(NAMES), captions=told), out)


if __name__ == "__main__":
    app()
