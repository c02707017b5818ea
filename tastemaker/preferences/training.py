"""Training of preference models: features once, then heads on more and more votes, each tested on unseen prompts."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config.schema import CheckpointConfig, PreferenceConfig, PreferenceRunConfig
from ..core.interruption import StopRequest
from ..core.registry import ConfigError
from ..core.reward import ImageTextTower
from ..core.types import PreferenceBatch
from ..core.weights import Weights
from ..data.dataset import Dataset, ShuffledDataset
from ..models.weight_files import read_weights, write_weights
from ..rewards.preference import PREFERENCE_FILE, tower_settings
from ..training import checkpoint
from ..training.engine import Engine
from ..training.events import CheckpointSaved, Event, StepCompleted, TrainingFinished, TrainingStarted
from ..training.loop import interruption_reason, stop_on_signal
from .preference_model import (
    Blocks,
    Comparisons,
    FeatureLayer,
    FittedPreference,
    PreferenceHead,
    Prior,
    encode_samples,
    fit_preference,
    split_prompts,
)
from .statistics import describe_share, wilson_interval
from .tower_adapters import (
    AdapterSettings,
    adapter_tensors,
    add_adapters,
    choose_temperature,
    load_adapter_tensors,
    predict_votes,
    train_adapters,
)

REPORT_FILE, FEATURES_FILE = "preference.json", "features.safetensors"
NUM_BINS = 5  # of the reliability table, from 50 to 100 %
FIRST_VOTES = 20  # votes of the first point of the learning curve
MIN_VOTES, MIN_PROMPTS = 10, 3


@dataclass
class PreferenceRun:
    """State of a run that trains a preference model. `weights.net` is its head."""

    weights: Weights
    tower: ImageTextTower
    data: Dataset
    engine: Engine
    directory: Path
    settings: PreferenceConfig
    steps: int  # points of the learning curve
    batch_size: int = 32
    seed: int = 0
    checkpoint: CheckpointConfig = CheckpointConfig()
    start_step: int = 0  # steps completed
    checkpoint_metadata: Mapping[str, Any] = field(default_factory=dict)
    config: PreferenceRunConfig | None = field(init=False, default=None)  # that it was built from, if any
    step_complete: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.engine.prepare(self.weights)

    def save(self, step: int) -> Path:
        extra = {**self.checkpoint_metadata, "step": step, "seed": self.seed}
        return checkpoint.save(self.directory, step, self.engine, self.weights, extra, self.checkpoint)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. A run that is done stays done; any other takes seconds, and starts again."""
        step = int(checkpoint.load(path, self.engine, self.weights)["step"])
        self.start_step = step if step >= self.steps else 0


def train(run: PreferenceRun) -> Iterator[Event]:
    """Fit heads on more and more votes, then one on all of them; yield an event for everything that happens."""
    size = sum(p.numel() for p in run.weights.trainable().values())
    yield TrainingStarted(run.start_step, run.steps, run.directory, size)
    if run.start_step >= run.steps:
        yield TrainingFinished(run.steps, f"all {run.steps} steps done")
        return
    votes = compute_comparisons(run)
    folds = [
        Fold.of(votes, held_out, run.seed) for held_out in split_prompts(votes.prompt, run.settings.folds, run.seed)
    ]
    curve: list[dict[str, float]] = []
    prediction = torch.full_like(votes.target, 0.5)
    with stop_on_signal() as stop_requested:
        for step, count in enumerate(curve_points(folds, run.steps), 1):
            started = time.perf_counter()
            prediction = predict_held_out(votes, folds, count, run.seed)
            quality = measure_quality(prediction, votes.target)
            curve.append({"votes": count, **quality})
            metrics = {
                "votes": float(count),
                "loss": quality["loss"],
                **{f"validation/{key}": value for key, value in quality.items()},
            }
            yield StepCompleted(step, {**metrics, "lr": 0.0}, time.perf_counter() - started, count)
            if stop_requested.is_set() and step < run.steps:
                yield TrainingFinished(step, interruption_reason(step))
                return
        fitted = fit_preference(votes, seed=run.seed)
        head, adapted = fitted.to_head(), None
        if run.settings.lora_rank:
            adapted = adapt_tower(run, votes, folds[0], fitted, stop_requested)
            if adapted is None:
                yield TrainingFinished(run.steps, interruption_reason(run.steps))
                return
            head = adapted.head
    run.weights.net.load_state_dict(head.to(run.engine.device).state_dict())
    report = make_report(run, votes, prediction, curve, fitted)
    if adapted is not None:
        report |= {"lora": adapted.report, "summary": f"{report['summary']}. {adapted.summary}"}
    if run.engine.comm.rank == 0:
        write_model(run, head, adapted.tensors if adapted else {}, report)
    yield CheckpointSaved(run.steps, run.save(run.steps))
    yield TrainingFinished(run.steps, report["summary"])


@dataclass(frozen=True)
class AdaptedModel:
    """A head with the adapters trained beside it, and how both compare to the frozen tower."""

    head: PreferenceHead
    tensors: dict[str, Tensor]  # of the adapters
    report: dict[str, Any]
    summary: str


def adapt_tower(
    run: PreferenceRun, votes: Comparisons, fold: Fold, fitted: FittedPreference, stop_requested: StopRequest
) -> AdaptedModel | None:
    """Train LoRA adapters twice: without the votes of one fold, which are then predicted, and on all votes.

    Returns None if it was asked to stop.
    """
    settings, device, data = run.settings, run.engine.device, run.data
    assert isinstance(data, ShuffledDataset)
    targets = vote_targets(data)
    adapters = add_adapters(run.tower, settings.lora_rank, run.seed)
    initial = adapter_tensors(adapters)

    def train_on(places: list[int], start: FittedPreference) -> PreferenceHead | None:
        load_adapter_tensors(adapters, initial)
        options = AdapterSettings(
            settings.features, settings.lora_steps, settings.lora_lr, run.batch_size, start.prior.l2, run.seed
        )
        head = replace(start, temperature=1.0).to_head().to(device)
        for _ in train_adapters(run.tower, adapters, head, data.collate, targets, places, options):
            if stop_requested.is_set():
                return None
        return head

    rest, held_out = fold.rest.tolist(), fold.held_out.tolist()
    frozen = fit_preference(votes.select(fold.rest), fold.prior, fold.temperature, run.seed)
    head = train_on(rest, frozen)
    if head is None:
        return None
    logits = predict_votes(run.tower, head, data.collate, held_out, settings.features, run.batch_size)
    temperature = choose_temperature(logits, targets[held_out])
    score = frozen.score(votes.blocks)
    before = (score[votes.first] - score[votes.second])[fold.held_out].sigmoid()
    quality = {
        "frozen": measure_quality(before, votes.target[fold.held_out]),
        "lora": measure_quality((logits / temperature).sigmoid(), targets[held_out]),
    }
    head = train_on(list(range(len(votes))), fitted)
    if head is None:
        return None
    with torch.no_grad():
        head.weight.div_(temperature)
    shares = {name: describe_share(each["accuracy"] * len(held_out), len(held_out)) for name, each in quality.items()}
    summary = f"Of one fold's held-out votes, LoRA predicts {shares['lora']}, the frozen tower {shares['frozen']}"
    report = {"rank": settings.lora_rank, "steps": settings.lora_steps, "temperature": temperature, **quality}
    return AdaptedModel(head.cpu(), {k: x.cpu() for k, x in adapter_tensors(adapters).items()}, report, summary)


def vote_targets(data: ShuffledDataset) -> Tensor:
    """1 for each pair of the data, or 0.5 for a tie: [V]."""
    return torch.tensor(getattr(data, "targets", ()) or (1.0,) * len(data), dtype=torch.float64)


@dataclass(frozen=True)
class Fold:
    """Votes on some prompts, held out, and those on all others with the prior chosen from them."""

    held_out: Tensor  # indices of votes
    rest: Tensor
    prior: Prior
    temperature: float

    @classmethod
    def of(cls, votes: Comparisons, held_out: Tensor, seed: int) -> Fold:
        everything = torch.arange(len(votes))
        rest = everything[~torch.isin(everything, held_out)]
        fitted = fit_preference(votes.select(rest), seed=seed)
        shuffled = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
        return cls(held_out, shuffled, fitted.prior, fitted.temperature)


def curve_points(folds: Sequence[Fold], steps: int) -> list[int]:
    """Numbers of votes for the points of the learning curve, in equal ratios up to all that are not held out."""
    most = min(len(fold.rest) for fold in folds)
    least = min(FIRST_VOTES, most)
    return [round(least * (most / least) ** (k / max(1, steps - 1))) if steps > 1 else most for k in range(steps)]


def predict_held_out(votes: Comparisons, folds: Sequence[Fold], count: int, seed: int) -> Tensor:
    """The probability of every vote's first sample, by heads trained on `count` votes on other prompts: [V]."""
    prediction = torch.full_like(votes.target, 0.5)
    for fold in folds:
        fitted = fit_preference(votes.select(fold.rest[:count]), fold.prior, fold.temperature, seed)
        score = fitted.score(votes.blocks)
        prediction[fold.held_out] = (score[votes.first] - score[votes.second])[fold.held_out].sigmoid()
    return prediction


def measure_quality(prediction: Tensor, target: Tensor) -> dict[str, float]:
    """Accuracy with its Wilson interval, loss, and expected calibration error of predictions; a tie counts half."""
    correct = float(count_correct(prediction, target))
    low, high = wilson_interval(correct, len(target))
    errors = [row["votes"] * abs(row["predicted"] - row["observed"]) for row in reliability(prediction, target)]
    return {
        "accuracy": correct / len(target),
        "accuracy_low": low,
        "accuracy_high": high,
        "loss": float(F.binary_cross_entropy(prediction, target)),
        "calibration_error": sum(errors) / len(target),
    }


def count_correct(prediction: Tensor, target: Tensor) -> Tensor:
    """The number of votes whose preferred sample has the higher probability; ties count half."""
    right = torch.where(target == 0.5, 0.5, ((prediction > 0.5) == (target > 0.5)).double())
    return torch.where(prediction == 0.5, 0.5, right).sum()


def reliability(prediction: Tensor, target: Tensor) -> list[dict[str, float]]:
    """How often predictions of a confidence are right, in bins from 50 to 100 %."""
    flip = prediction < 0.5
    confidence, right = torch.where(flip, 1 - prediction, prediction), torch.where(flip, 1 - target, target)
    place = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    rows = []
    for k in range(NUM_BINS):
        chosen = place == k
        if chosen.any():
            row = {"from": 0.5 + k / (2 * NUM_BINS), "to": 0.5 + (k + 1) / (2 * NUM_BINS), "votes": int(chosen.sum())}
            rows.append({**row, "predicted": float(confidence[chosen].mean()), "observed": float(right[chosen].mean())})
    return rows


@torch.no_grad()
def feature_width(tower: ImageTextTower, layer: FeatureLayer, data: Dataset, device: torch.device) -> int:
    """The number of features of a sample, from the first one of the data."""
    batch: PreferenceBatch = data.batch(0, 1, 0, 1)
    blocks = encode_samples(tower, batch.chosen.to(device), batch.prompts, layer)
    return sum(x.shape[1] for x in blocks.values())


def compute_comparisons(run: PreferenceRun) -> Comparisons:
    """Encode the samples of all votes, each once, and return the votes as comparisons."""
    data = run.data
    if not isinstance(data, ShuffledDataset):
        raise ConfigError(
            f"data.type: a preference model trains on pairs in files, and {type(data).__name__} has none; set "
            "data.type to votes, pair_file or pair_folder [TM1311]"
        )
    cache, keys, prompts = FeatureCache(run), list[tuple[str, str]](), list[str]()
    for start in range(0, len(data), run.batch_size):
        batch = data.collate(list(range(start, min(start + run.batch_size, len(data)))))
        chosen, rejected = (cache.encode(pixels, batch.prompts) for pixels in (batch.chosen, batch.rejected))
        keys += zip(chosen, rejected, strict=True)
        prompts += batch.prompts
    cache.save()
    distinct = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    if len(keys) < MIN_VOTES or len(distinct) < MIN_PROMPTS:
        raise ConfigError(
            f"data: found {len(keys)} votes on {len(distinct)} prompts; a preference model needs at least {MIN_VOTES} "
            f"votes on {MIN_PROMPTS} prompts, so vote on more pairs [TM1312]"
        )
    names = {key: k for k, key in enumerate(dict.fromkeys(key for pair in keys for key in pair))}
    first, second = (torch.tensor([names[pair[side]] for pair in keys]) for side in (0, 1))
    # Half of the votes are turned around, so that a target says something about the features and not about the order.
    turned = torch.rand(len(keys), generator=torch.Generator().manual_seed(run.seed)) < 0.5
    target = vote_targets(data)
    return Comparisons(
        cache.blocks(list(names)),
        torch.where(turned, second, first),
        torch.where(turned, first, second),
        torch.where(turned, 1 - target, target),
        torch.tensor([distinct[prompt] for prompt in prompts]),
    )


class FeatureCache:
    """Features of samples by their content and prompt, kept in the run's directory, so that each is encoded once."""

    def __init__(self, run: PreferenceRun) -> None:
        self.run, self.path = run, run.directory / FEATURES_FILE
        self.fingerprint = {**tower_settings(run.settings.tower), "features": run.settings.features}
        self.rows: dict[str, Blocks] = {}
        self.names: list[str] = []
        if self.path.is_file():
            tensors, config = read_weights(self.path)
            if config.get("fingerprint") == json.loads(json.dumps(self.fingerprint)):
                blocks = {name: x.double() for name, x in tensors.items()}
                self.rows = {key: {n: x[k] for n, x in blocks.items()} for k, key in enumerate(config["keys"])}

    @torch.no_grad()
    def encode(self, pixels: Tensor, prompts: Sequence[str]) -> list[str]:
        """Encode the samples [B, F, 3, H, W] that are new, and return the keys of all."""
        pixels = (pixels * 255).round().clamp(0, 255).to(torch.uint8)
        keys = [
            hashlib.sha256(prompt.encode() + b"\0" + sample.numpy().tobytes()).hexdigest()[:24]
            for sample, prompt in zip(pixels, prompts, strict=True)
        ]
        new = [k for k, key in enumerate(keys) if key not in self.rows]
        if new:
            inputs = pixels[new].to(self.run.engine.device).float() / 255
            texts = [prompts[k] for k in new]
            blocks = encode_samples(self.run.tower, inputs, texts, self.run.settings.features)
            host = {name: x.double().cpu() for name, x in blocks.items()}
            self.rows |= {keys[k]: {name: x[i] for name, x in host.items()} for i, k in enumerate(new)}
        return keys

    def blocks(self, keys: Sequence[str]) -> Blocks:
        """Features of samples by key: {name: [N, C]}."""
        return {name: torch.stack([self.rows[key][name] for key in keys]) for name in self.rows[keys[0]]}

    def save(self) -> None:
        if self.run.engine.comm.rank == 0 and self.rows:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            config = {"fingerprint": self.fingerprint, "keys": list(self.rows)}
            write_weights(self.path, self.blocks(list(self.rows)), config, torch.float32)


def write_model(
    run: PreferenceRun, head: PreferenceHead, adapters: Mapping[str, Tensor], report: Mapping[str, Any]
) -> None:
    """Write the weights that the reward `preference` loads, and the report."""
    config: dict[str, Any] = {"tower": tower_settings(run.settings.tower), "features": run.settings.features}
    if adapters:
        config["lora_rank"] = run.settings.lora_rank
    write_weights(run.directory / PREFERENCE_FILE, {**head.state_dict(), **adapters}, config, torch.float32)
    (run.directory / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def make_report(
    run: PreferenceRun,
    votes: Comparisons,
    prediction: Tensor,
    curve: Sequence[Mapping[str, float]],
    fitted: FittedPreference,
) -> dict[str, Any]:
    """What `preference.json` says: held-out quality, calibration, learning curve, and the chosen prior."""
    return {
        "summary": summarize(votes, prediction, curve),
        "votes": len(votes),
        "ties": int((votes.target == 0.5).sum()),
        "prompts": len(set(votes.prompt.tolist())),
        "held_out": {**measure_quality(prediction, votes.target), "reliability": reliability(prediction, votes.target)},
        "learning_curve": list(curve),
        "prior": asdict(fitted.prior),
        "temperature": fitted.temperature,
        "tower": tower_settings(run.settings.tower),
        "features": run.settings.features,
    }


def summarize(votes: Comparisons, prediction: Tensor, curve: Sequence[Mapping[str, float]]) -> str:
    """The result in words: "with 240 votes it predicts 74 % of ...; the learning curve is ..."."""
    trained = int(curve[-1]["votes"])
    share = describe_share(float(count_correct(prediction, votes.target)), len(votes))
    steps = ", ".join(f"{100 * point['accuracy']:.0f} % with {point['votes']:.0f} votes" for point in curve)
    error = measure_quality(prediction, votes.target)["calibration_error"]
    gain = curve[-1]["accuracy"] - curve[len(curve) // 2]["accuracy"]
    advice = "more votes still help" if gain > 0.5 / math.sqrt(len(votes)) else "more votes would help little"
    return (
        f"with {trained} votes it predicts {share} votes on prompts that it has not seen; calibration error "
        f"{100 * error:.0f} %. Learning curve: {steps}; {advice}"
    )
