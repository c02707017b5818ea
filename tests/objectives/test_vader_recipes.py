"""VADER recipes: published settings, and one step at tiny size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tastemaker.config.build import build, make_tiny
from tastemaker.config.check import find_problems
from tastemaker.config.load import list_generator_recipes, load
from tastemaker.config.schema import RunConfig
from tastemaker.core.lora import Lora
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.prompts import PromptSet
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.training.loop import train_step

REWARDS = (
    "aesthetic", "hps", "pickscore", "actpred", "detection", "detection-dino", "weather", "compression",
    "aesthetic-hps", "vjepa",
)  # fmt: skip
MODELS = ("videocrafter2", "modelscope", "opensora")
SMALL = ["sample.every=0", "guard.every=0", "engine={precision: fp32}", "batch.prompts=2"]


def load_recipe(name: str, *changes: str) -> RunConfig:
    return load(name, list(changes))


PUBLISHED = {f"vader-{model}-{reward}" for model in MODELS for reward in REWARDS}
NEWER_MODELS = ("wan", "wan22", "cogvideox", "hunyuanvideo", "mochi", "ltx", "svd")


def test_vader_recipes_cover_rewards_and_models() -> None:
    assert PUBLISHED | {f"vader-{model}-hps" for model in NEWER_MODELS} <= set(list_generator_recipes())


@pytest.mark.slow
def test_vader_recipes_pass_the_check() -> None:
    assert {name: problems for name in sorted(PUBLISHED) if (problems := find_problems(load_recipe(name), 1))} == {}


@pytest.mark.parametrize(
    "model", [NEWER_MODELS[0], *(pytest.param(model, marks=pytest.mark.slow) for model in NEWER_MODELS[1:])]
)
def test_vader_recipes_of_newer_models(model: str) -> None:
    config = load_recipe(f"vader-{model}-hps")
    assert find_problems(config, 1) == [] and config.model.frames > 1 and config.objective.needs_gradient


def test_vader_settings_match_published() -> None:
    videocrafter, modelscope, opensora = (load_recipe(f"vader-{model}-hps") for model in MODELS)
    for config, size, steps, scale in (
        (videocrafter, (12, 4, 40, 64), 25, 12.0),
        (modelscope, (16, 4, 48, 48), 25, 9.0),
        (opensora, None, 30, 7.0),
    ):
        assert size is None or config.model.shape == size
        assert getattr(config.process, "num_steps", 0) == steps and config.guidance and config.guidance.scale == scale
        assert config.optim.lr == 2e-4 and config.optim.max_grad_norm == 1.0
        objective = config.objective
        assert isinstance(objective, RewardGradient)
        assert (objective.gradient_mode, objective.last_steps, objective.frames) == ("last_steps", 1, "random")
    assert videocrafter.tuning == Lora(16, 8, ("to_q", "to_k", "to_v"), 0.01)
    assert opensora.tuning == Lora(16, 8, ("qkv", "q_linear", "kv_linear"), 0.01)
    assert modelscope.tuning == Lora(16, 16, "all-layers", 0.1)
    assert load_recipe("vader-modelscope-actpred").data == PromptSet("actions")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vader-videocrafter2-hps", ()),
        pytest.param("vader-modelscope-actpred", (), marks=pytest.mark.slow),
        ("vader-opensora-aesthetic", ()),
        pytest.param("vader-modelscope-detection", ("objective.frames=fml",), marks=pytest.mark.slow),
        pytest.param("vader-opensora-vjepa", ("objective.gradient_mode=random",), marks=pytest.mark.slow),
        pytest.param("vader-modelscope-hps", ("tuning.modules=[backbone, text_encoder]",), marks=pytest.mark.slow),
        ("vader-opensora-hps", ("tuning.modules=[backbone, text_encoder]",)),
        pytest.param("vader-videocrafter2-pickscore", ("tuning.modules=[text_encoder]",), marks=pytest.mark.slow),
    ],
)
def test_step_updates_adapters(name: str, changes: tuple[str, ...], tmp_path: Path) -> None:
    config = make_tiny(load_recipe(name, *SMALL, *changes))
    run = build(replace(config, process=config.process.with_num_steps(2)), tmp_path)
    before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
    train_step(run, 0)
    changed = {key for key, p in run.policy.weights.trainable().items() if not p.detach().equal(before[key])}
    assert isinstance(config.tuning, Lora)
    for module in config.tuning.modules:
        assert any(key.startswith("text_encoder") == (module == "text_encoder") for key in changed), module


def test_all_layers_are_linear_and_convolution_layers() -> None:
    model = make_tiny(load_recipe("vader-modelscope-hps")).model
    backbone = model.load(Placement())
    layer_types = (nn.Linear, nn.Conv2d, nn.Conv3d)
    count = sum(isinstance(module, layer_types) for module in backbone.net.modules())
    weights = Lora(2, target_modules="all-layers").apply(backbone, ())
    assert len(weights.trainable()) == 2 * count
    with pytest.raises(ConfigError, match=r"'target_modules'.*'to_q'.*TM083"):
        load_recipe("vader-modelscope-hps", "tuning.target_modules=to_q")
