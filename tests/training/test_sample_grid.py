"""Samples to look at have a size, steps and guidance of their own, and training does not notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tastemaker.config.build import build, make_tiny
from tastemaker.config.check import find_problems
from tastemaker.config.load import load
from tastemaker.core.policy import Guidance, SupportsResize
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.models.flux import Flux
from tastemaker.models.flux_kontext import FluxKontext
from tastemaker.models.qwen_image import QwenImage
from tastemaker.models.sd3 import Sd3
from tastemaker.models.sd15 import Sd15
from tastemaker.models.sdxl import Sdxl
from tastemaker.processes.dynamics import ODE, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.masked import MaskedProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.search.generation import GenerationOptions, run_search
from tastemaker.search.single import SingleSample
from tastemaker.training.loop import generate_samples, train_step
from tastemaker.training.run import SAMPLE_STEP, Run
from tastemaker.training.sample_grid import sample_pixels, sampling_policy

SMALL = [
    "engine={device: cpu, precision: fp32, trainable: fp32, memory: keep}",
    "rewards=null", "rewards={color: {type: color}}",
    "data={type: prompts, prompts: [a red, a blue]}",
    "batch={prompts: 2, rollout: null, microbatch: null}", "process.steps=3", "optim.lr=0.01",
    "sample={count: 2, height: null, width: null, steps: null, guidance: null}",
]  # fmt: skip


def run(recipe: str, folder: Path, *settings: str, **sample: Any) -> Run:
    config = make_tiny(load(recipe, [*SMALL, f"output={folder}", *settings]))
    return build(replace(config, sample=replace(config.sample, **sample)))


def shown(made: Run) -> Tensor:
    return sample_pixels(made, ["a red", "a blue"], ({}, {}))


SPECS = [Flux(), FluxKontext(), Sd3(), QwenImage(), Sd15(), Sdxl()]


@pytest.mark.parametrize("spec", SPECS, ids=[type(spec).__name__ for spec in SPECS])
@torch.no_grad()
def test_a_model_seen_at_another_size_is_the_model_of_that_size(spec: Any) -> None:
    model = spec.tiny().load(Placement())
    assert isinstance(model, SupportsResize)
    other = model.sized(64, 32)
    wanted = replace(spec.tiny(), height=64, width=32).load(Placement())
    assert (other.shape, other.pixels) == (wanted.shape, wanted.pixels) and other.net is model.net
    assert model.pixels == (1, 3, 32, 32)  # as before
    x, t = Randomness(0, 0, torch.arange(2)).normal("x", *wanted.shape), torch.tensor([0.5, 0.7])
    cond = wanted.embed(["a cat", "two dogs"])
    assert other.predict(x, t, other.embed(["a cat", "two dogs"])).equal(wanted.predict(x, t, cond))
    assert other.decode(x).equal(wanted.decode(x))


def test_flux_is_looked_at_with_its_guidance_and_not_that_of_rollouts(tmp_path: Path) -> None:
    pictures = {
        (scale, drawn): shown(run("srpo-flux-hps", tmp_path, f"model={{guidance: {scale}, rollout_guidance: {drawn}}}"))
        for scale, drawn in ((4.0, 1.0), (4.0, "null"), (1.0, "null"))
    }
    assert pictures[4.0, 1.0].equal(pictures[4.0, "null"])
    assert not torch.allclose(pictures[4.0, 1.0], pictures[1.0, "null"], atol=1e-5)
    asked = shown(run("srpo-flux-hps", tmp_path, "model={guidance: 4.0, rollout_guidance: 2.0}", guidance=1.0))
    assert asked.equal(pictures[1.0, "null"])


def test_a_window_is_of_its_own_steps_alone() -> None:
    mixed = GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8, SDEWindow(2))
    assert mixed.in_steps(3) == GaussianProcess(RectifiedFlow(), ODE(), 3)
    assert GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8).in_steps(3) == GaussianProcess(
        RectifiedFlow(), FlowSDE(0.7), 3
    )
    assert MaskedProcess(steps=8).in_steps(3) == MaskedProcess(steps=3)


def test_generated_pictures_have_the_guidance_of_use(tmp_path: Path) -> None:
    batch = PromptBatch(("a red", "a blue"), ({}, {}))
    order = GenerationOptions(batch, 1, 0, SingleSample(), "live", tmp_path)
    pixels = [
        run_search(
            run("srpo-flux-hps", tmp_path, f"model={{guidance: 4.0, rollout_guidance: {drawn}}}"), order, [0, 1]
        )[0]
        for drawn in (1.0, "null")
    ]
    assert pixels[0].equal(pixels[1])


def test_size_and_steps_are_those_asked_for(tmp_path: Path) -> None:
    made = run("srpo-flux-hps", tmp_path, height=64, width=48, steps=5)
    picture = generate_samples(made, 0).pixels
    assert picture.shape == (2, 1, 3, 64, 48)
    seen = sampling_policy(made.policy, made.sample)
    assert seen.process.steps == 5 and seen.model.net is made.policy.model.net
    spec = replace(make_tiny(load("srpo-flux-hps", SMALL)).model, height=64, width=48, rollout_guidance=None)
    model: Any = spec.load(Placement())
    rng = Randomness(made.seed, SAMPLE_STEP, torch.arange(2))
    with torch.no_grad():
        final = seen.process.start(model, model.embed(["a red", "a blue"]), rng).finish().final
    assert model.decode(final).equal(picture)


def test_guidance_of_two_predictions_is_set_where_the_network_reads_none(tmp_path: Path) -> None:
    made = run("draft-sd15", tmp_path, "guidance.scale=5", guidance=2.0)
    model: Any = sampling_policy(made.policy, made.sample).model
    assert model.guidance.scale == 2.0 and made.policy.model.guidance.scale == 5.0  # type: ignore[attr-defined]
    alone: Any = sampling_policy(made.policy, replace(made.sample, guidance=1.0)).model
    assert alone.passes == 1
    plain = run("grpo-toy-flow", tmp_path, "objective.group=4", guidance=3.0)
    assert sampling_policy(plain.policy, plain.sample).model.guidance == Guidance(3.0)  # type: ignore[attr-defined]


def test_training_does_not_notice_that_it_is_looked_at(tmp_path: Path) -> None:
    metrics = []
    for looked in (False, True):
        made = run("srpo-flux-hps", tmp_path, height=64, width=48, steps=5, guidance=2.0)
        found = []
        for step in range(2):
            if looked:
                generate_samples(made, step)
            found.append(train_step(made, step).metrics)
        metrics.append((found, [p.detach().clone() for p in made.policy.weights.trainable().values()]))
    (plain, before), (seen, after) = metrics
    # Not to the bit: where MKL finds a matrix in memory decides the order of its sums, and AdamW makes whole steps of
    # gradients near zero, whose sign that order decides.
    assert plain == [pytest.approx(each, rel=1e-4) for each in seen]
    far = torch.cat([((a - b).abs() > 1e-4).flatten() for a, b in zip(before, after, strict=True)])
    assert far.float().mean() < 0.01


@pytest.mark.slow
def test_nothing_is_compiled_to_be_looked_at(tmp_path: Path) -> None:
    made, compiled = run("grpo-toy-flow", tmp_path, "objective.group=4"), []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    made.engine.config = replace(made.engine.config, compile=True)
    made.policy.model.net.compile(backend=count)
    generate_samples(made, 0)
    assert not compiled
    train_step(made, 0)
    assert compiled


def test_samples_are_made_as_many_at_a_time_as_rollouts(tmp_path: Path) -> None:
    whole = run("srpo-flux-hps", tmp_path)
    parts = run("srpo-flux-hps", tmp_path, "batch.rollout=1")
    torch.testing.assert_close(shown(parts), shown(whole), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("recipe", "setting", "told"),
    [
        ("grpo-toy-flow", "sample.height=64", "sample.height: toy_flow makes pictures of one size alone"),
        (
            "grpo-toy-causal",
            "sample.steps=4",
            "sample.steps: AutoregressiveProcess takes as many steps",
        ),
        ("srpo-flux-hps", "sample.width=100", "sample.width: "),
    ],
)
def test_what_cannot_be_shown_is_a_complaint(recipe: str, setting: str, told: str) -> None:
    assert any(told in sentence for sentence in find_problems(load(recipe, [setting])))
