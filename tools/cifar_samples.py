"""Sample token sequences of a CIFAR-10 run, decode them, and classify the images. Tokens are small to transfer.

python tools/cifar_samples.py sample runs/cifar-gpt tokens --count 10000 --guidance 1.0 --guidance 1.5
python tools/cifar_samples.py decode tokens-1.5.npz runs/cifar-vq samples.npz --classifier cifar10.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from tastemaker.models.image_tokenizer import build_frozen_tokenizer, read_tokenizer
from tastemaker.rewards.classifier import NAMES, ClassifierReward
from tastemaker.search.base import RubricVerifier
from tastemaker.search.best_of_n import SingleSample
from tastemaker.search.generation import resolve_source
from tastemaker.training.run import Run
from tastemaker.training.samples import sampling_policy

DECODE_BATCH_SIZE = 250
app = typer.Typer()


@app.command()
def sample(
    run: Path,
    out: Path,
    count: int = 10_000,
    guidance: Annotated[list[float] | None, typer.Option(help="May be repeated; each scale has its own file.")] = None,
    seed: int = 0,
    batch_size: int = 1000,
    device: str = "auto",
) -> None:
    """Sample all classes equally often, and save the tokens."""
    for scale in guidance or [1.0]:
        file = out.with_name(f"{out.name}-{scale}.npz")
        sample_tokens(run, file, count, scale, seed, batch_size, device)
        typer.echo(f"{count} samples of {run} at guidance {scale} in {file}")


def sample_tokens(
    run_dir: Path, out: Path, count: int, guidance: float, seed: int, batch_size: int, device: str
) -> None:
    run = load_run(run_dir, [f"guidance={{scale: {guidance}}}", f"engine.device={device}"])
    labels, tokens = np.arange(count) % len(NAMES), []
    for first in range(0, count, batch_size):
        indices = torch.arange(first, min(first + batch_size, count))
        batch = PromptBatch(tuple(NAMES[labels[i]] for i in indices.tolist()), ({},) * len(indices))
        rng = Randomness(seed, 0, indices.to(run.engine.device))
        with inference_weights(run):
            x = SingleSample().run(sampling_policy(run.policy), RubricVerifier(run.rubric), batch, rng).x
        tokens.append(x.cpu().numpy().astype(np.uint16))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, tokens=np.concatenate(tokens), labels=labels.astype(np.uint8))
    run.engine.close()


def load_run(run_dir: Path, overrides: list[str]) -> Run:
    """Load a run from its last checkpoint."""
    config, checkpoint = resolve_source(str(run_dir), overrides)
    run = build(config)
    assert checkpoint is not None
    run.resume(checkpoint)
    return run


@contextmanager
def inference_weights(run: Run) -> Iterator[None]:
    """Compute without gradients, with the EMA if the run has one."""
    weights = run.policy.weights.use("ema") if run.ema_decay else nullcontext()
    with torch.no_grad(), run.engine.autocast(), weights:
        yield


@app.command()
def likelihood(
    run: Path,
    data: Path,
    start: Annotated[int, typer.Option(help="Index of the first image that was not trained on.")],
    count: int = 400,
    device: str = "auto",
) -> None:
    """Print the negative log-likelihood per token of training and held-out images. A gap means memorization."""
    loaded = load_run(run, [f"engine.device={device}"])
    count = min(count, start, len(load_cifar10(data, "train")) - start)
    if count < 1:
        raise typer.BadParameter(f"--start is {start}, but {data} has no images from there on; train on fewer")
    losses: dict[str, float] = {}
    for name, first in (("training", 0), ("held_out", start)):
        batch = Cifar10(data, num_samples=count, start_index=first).load(0).batch(0, count, 0, 1)
        with inference_weights(loaded):
            policy, torch_device = loaded.policy, loaded.engine.device
            x = policy.encode(batch.pixels.to(torch_device))
            rng = Randomness(0, 0, torch.arange(len(x), device=torch_device))
            log_likelihood = policy.likelihood(policy.embed(batch.prompts), x, policy.corrupt(x, rng))
        losses[name] = -(log_likelihood / x.shape[1]).mean().item()
    loaded.engine.close()
    typer.echo(json.dumps({"run": str(run), "nats per token": losses}))


@app.command()
def decode(
    tokens: Path,
    tokenizer: str,
    out: Path,
    classifier: Annotated[str, typer.Option()] = "",
    count: Annotated[int, typer.Option(help="Number of samples; 0 for all.")] = 0,
    sheet: Annotated[Path | None, typer.Option(help="Image file for a sheet of the first hundred.")] = None,
) -> None:
    """Decode tokens to an `.npz` in ADM's layout, and print the classifier's accuracy."""
    with np.load(tokens) as file:
        count = count or len(file["labels"])
        ids, labels = torch.from_numpy(file["tokens"][:count].astype(np.int64)), file["labels"][:count].tolist()
    net = build_frozen_tokenizer(*read_tokenizer(tokenizer), tokenizer, Placement())
    with torch.no_grad():
        pixels = torch.cat([net.decode(batch) for batch in torch.split(ids, DECODE_BATCH_SIZE)])
    np.savez(out, arr_0=(pixels * 255).round().byte().movedim(1, -1).numpy())
    report: dict[str, object] = {"samples": str(out), "count": len(pixels)}
    if classifier:
        reward = ClassifierReward(weights=classifier, output="correct").load(Placement())
        prompts = [NAMES[label] for label in labels]
        correct = reward.score(pixels[:, None], prompts, [{}] * len(prompts))
        report["accuracy"] = correct.mean().item()
        report["by class"] = {name: correct[i :: len(NAMES)].mean().item() for i, name in enumerate(NAMES)}
    if sheet is not None:
        save_image(make_contact_sheet(pixels[:100, None], [NAMES[label] for label in labels[:100]])[None], sheet)
    typer.echo(json.dumps(report))


@app.command()
def compare(tokenizer: str, out: Path, tokens: list[Path], rows: int = 2) -> None:
    """Draw the first samples of several files below each other, one class per column."""
    net = build_frozen_tokenizer(*read_tokenizer(tokenizer), tokenizer, Placement())
    pixels, captions = [], []
    for path in tokens:
        with np.load(path) as file, torch.no_grad():
            count = rows * len(NAMES)
            pixels.append(net.decode(torch.from_numpy(file["tokens"][:count].astype(np.int64))))
            captions += [f"{path.stem.removeprefix('tokens-')} {NAMES[label]}" for label in file["labels"][:count]]
    save_image(make_grid(torch.cat(pixels)[:, None], columns=len(NAMES), captions=captions), out)


if __name__ == "__main__":
    app()
