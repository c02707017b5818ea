"""LlamaGen recipes at tiny size: they learn, and their first ratios are 1."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import toys

from tastemaker.config.build import build
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import TokenBatch
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train, train_step

SETTINGS = (
    "sample.every=0",
    "guard.every=0",
    "engine.precision=fp32",
    "engine.reduce_dtype=fp32",
    "batch.micro_batch_size=null",
)
BRIGHTNESS = (
    "rewards={bright: {type: brightness}}",
    "batch.prompts=4",
    "data.template='a {name}'",
    "objective.group_size=16",
)
CLASSES = ("batch.prompts=16", "objective.beta=1.0", "optim.lr=1e-2", "steps=30")
# Settings of each recipe, the metric that must rise, and by how much at least.
RECIPES: dict[str, tuple[tuple[str, ...], str, float]] = {
    "llamagen-pretrain": (("optim.lr=3e-3", "batch.prompts=16", "steps=30"), "log_likelihood", 0.5),
    "grpo-llamagen": ((*BRIGHTNESS, "optim.lr=1e-2", "steps=25"), "reward/mean", 0.03),
    "ar-grpo": ((*BRIGHTNESS, "objective.kl_coef=0.01", "optim.lr=1e-2", "steps=25"), "reward/mean", 0.03),
    "grpo-llamagen-tf": (("batch.prompts=8", "batch.minibatches=1", "optim.lr=1e-2", "steps=30"), "reward/mean", 0.02),
    "va-pi": (("batch.prompts=8", "optim.lr=1e-2", "steps=30"), "reward/mean", 0.02),
    "cca-llamagen": ((*CLASSES, "objective.negative_weight=1.0"), "accuracy", 0.2),
    "dpo-llamagen": (CLASSES, "accuracy", 0.2),
}


# Only the recipe of teacher-forced GRPO is fast; test_matrix.py trains all objectives on toys.
TIERS = {"grpo-llamagen-tf": [], "grpo-llamagen": [pytest.mark.long], "dpo-llamagen": [pytest.mark.long]}
LEARNING = [pytest.param(name, marks=TIERS.get(name, [pytest.mark.slow])) for name in RECIPES]


@pytest.mark.parametrize("recipe", LEARNING)
def test_llamagen_recipes_learn(recipe: str, tmp_path: Path) -> None:
    settings, metric, margin = RECIPES[recipe]
    run = build(load(recipe, [*SETTINGS, *settings]), tmp_path, tiny=True)
    values = [event.metrics[metric] for event in train(run) if isinstance(event, StepCompleted)]
    print(recipe, mean(values[:3]), mean(values[-5:]))
    assert mean(values[-5:]) > mean(values[:3]) + margin


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("grpo-llamagen", marks=pytest.mark.slow),
        "ar-grpo",
        pytest.param("grpo-llamagen-tf", marks=pytest.mark.slow),
        "va-pi",
    ],
)
def test_first_ratios_are_exactly_one(recipe: str, precision: str, tmp_path: Path) -> None:
    rewards = ("rewards={bright: {type: brightness}}",) if recipe in ("grpo-llamagen", "ar-grpo") else ()
    settings = [*SETTINGS, *rewards, f"engine.precision={precision}", "batch.minibatches=1", "batch.micro_batch_size=4"]
    run = build(load(recipe, settings), tmp_path, tiny=True)
    toys.perturb(run.policy, 0.05)
    metrics = train_step(run, 0).to_event().metrics
    # The order of sums in MKL depends on the alignment of matrices, so float32 may differ in its last bit.
    no_deviation = pytest.approx(0, abs=1e-7 if precision == "fp32" else 0)
    assert (metrics["ratio"], metrics["ratio_deviation"], metrics["clip_fraction"]) == (
        pytest.approx(1, abs=1e-7),
        no_deviation,
        0,
    )


def test_dropout_is_reproducible_after_resume(tmp_path: Path) -> None:
    model = (
        "model.variant=tiny",
        "model.autoencoder=null",
        "model.image_size=32",
        "model.downsample_factor=8",
        "model.codebook_size=64",
    )
    settings = [*SETTINGS, *model, "model.dropout=0.3", "batch.prompts=4", "optim.lr=1e-2"]
    run, resumed = (build(load("llamagen-pretrain", settings), tmp_path / name) for name in ("one", "two"))
    for step in range(2):
        train_step(run, step)
    path = run.save(2)
    uninterrupted = train_step(run, 2).to_event().metrics
    resumed.resume(path)
    assert train_step(resumed, 2).to_event().metrics == uninterrupted


def test_precomputed_tokens_give_the_loss_of_their_images() -> None:
    policy, batch = toys.policy("causal", snapshots=("reference",)), toys.image_batch(8, 1, 0)
    tokens = TokenBatch(batch.prompts, policy.encode(batch.pixels))
    for objective in (Likelihood(), CCA()):
        ctx = toys.context(policy, 8)
        of_images, of_tokens = (objective.collect(ctx, data) for data in (batch, tokens))  # type: ignore[attr-defined]
        assert of_images.x.equal(of_tokens.x)
        assert toys.total_loss(objective, ctx, of_images).equal(toys.total_loss(objective, ctx, of_tokens))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"4 tokens.* 16.*TM306"):
        Likelihood().collect(toys.context(policy, 8), TokenBatch(batch.prompts, tokens.ids[:, :4]))


def test_token_data_is_accepted_by_its_objectives(tmp_path: Path) -> None:
    data = f"data={{type: token_folder, path: {tmp_path}}}"
    assert find_problems(load("llamagen-pretrain", [data])) == []
    (problem,) = find_problems(load("grpo-llamagen-tf", [data]))
    assert problem.startswith("data.type: ") and "'teacher_forced_grpo'" in problem and "'token_folder'" in problem
