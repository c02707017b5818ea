"""Samples during training have their own size, steps and guidance, and do not change training."""

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
from tastemaker.config.schema import SampleConfig
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.evaluation.benchmark_run import EvaluationOptions, build_sample_fn, load_benchmark
from tastemaker.models.flux import FluxSpec
from tastemaker.models.flux_kontext import FluxKontextSpec
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.processes.dynamics import ODE, FlowSDE
from tastemaker.processes.gaussian import GaussianProcess, SDEWindow
from tastemaker.processes.masked import MaskedProcess
from tastemaker.processes.paths import RectifiedFlow
from tastemaker.search.best_of_n import SingleSample
from tastemaker.search.generation import GenerationOptions, describe_inference, resolve_source, run_search
from tastemaker.training.loop import train_step
from tastemaker.training.run import SAMPLE_STEP, Run
from tastemaker.training.samples import generate_samples, sample_pixels, sampling_policy

SMALL = [
    "engine={device: cpu, precision: fp32, param_dtype: fp32, activation_memory: keep}",
    "rewards=null", "rewards={color: {type: color}}",
    "data={type: prompts, prompts: [a red, a blue]}",
    "batch={prompts: 2, rollout_batch_size: null, micro_batch_size: null}", "process.num_steps=3", "optim.lr=0.01",
    "sample={count: 2, height: null, width: null, num_steps: null, guidance_scale: null}",
]  # fmt: skip


def build_run(recipe: str, directory: Path, *settings: str, **sample: Any) -> Run:
    config = make_tiny(load(recipe, [*SMALL, f"output_dir={directory}", *settings]))
    return build(replace(config, sample=replace(config.sample, **sample)))


def generate(run: Run) -> Tensor:
    return sample_pixels(run, ["a red", "a blue"], ({}, {}))


SPECS = [FluxSpec(), FluxKontextSpec(), Sd3Spec(), QwenImageSpec(), Sd15Spec(), SdxlSpec()]


@pytest.mark.parametrize("spec", SPECS, ids=[type(spec).__name__ for spec in SPECS])
@torch.no_grad()
def test_resized_model_equals_a_model_of_that_size(spec: Any) -> None:
    model = spec.tiny().load(Placement())
    resized = model.with_size(64, 32)
    expected = replace(spec.tiny(), height=64, width=32).load(Placement())
    assert (resized.shape, resized.pixels) == (expected.shape, expected.pixels) and resized.net is model.net
    assert model.pixels == (1, 3, 32, 32)  # unchanged
    x, t = Randomness(0, 0, torch.arange(2)).normal("x", *expected.shape), torch.tensor([0.5, 0.7])
    cond = expected.embed(["a cat", "two dogs"])
    assert resized.predict(x, t, resized.embed(["a cat", "two dogs"])).equal(expected.predict(x, t, cond))
    assert resized.decode(x).equal(expected.decode(x))


def test_flux_samples_use_guidance_scale_not_rollout_guidance_scale(tmp_path: Path) -> None:
    samples = {
        (scale, rollout_scale): generate(
            build_run(
                "srpo-flux-hps", tmp_path, f"model={{guidance_scale: {scale}, rollout_guidance_scale: {rollout_scale}}}"
            )
        )
        for scale, rollout_scale in ((4.0, 1.0), (4.0, "null"), (1.0, "null"))
    }
    assert samples[4.0, 1.0].equal(samples[4.0, "null"])
    assert not torch.allclose(samples[4.0, 1.0], samples[1.0, "null"], atol=1e-5)
    overridden = generate(
        build_run(
            "srpo-flux-hps", tmp_path, "model={guidance_scale: 4.0, rollout_guidance_scale: 2.0}", guidance_scale=1.0
        )
    )
    assert overridden.equal(samples[1.0, "null"])


def test_sde_window_belongs_to_its_number_of_steps() -> None:
    mixed = GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8, SDEWindow(2))
    assert mixed.with_num_steps(3) == GaussianProcess(RectifiedFlow(), ODE(), 3)
    assert GaussianProcess(RectifiedFlow(), FlowSDE(0.7), 8).with_num_steps(3) == GaussianProcess(
        RectifiedFlow(), FlowSDE(0.7), 3
    )
    assert MaskedProcess(num_steps=8).with_num_steps(3) == MaskedProcess(num_steps=3)


def test_generation_uses_the_sampling_guidance(tmp_path: Path) -> None:
    batch = PromptBatch(("a red", "a blue"), ({}, {}))
    options = GenerationOptions(batch, 1, 0, SingleSample(), "live", tmp_path)
    pixels = [
        run_search(
            build_run(
                "srpo-flux-hps", tmp_path, f"model={{guidance_scale: 4.0, rollout_guidance_scale: {rollout_scale}}}"
            ),
            options,
            [0, 1],
        )[0]
        for rollout_scale in (1.0, "null")
    ]
    assert pixels[0].equal(pixels[1])


def test_samples_have_the_configured_size_and_steps(tmp_path: Path) -> None:
    run = build_run("srpo-flux-hps", tmp_path, height=64, width=48, num_steps=5)
    pixels = generate_samples(run, 0).pixels
    assert pixels.shape == (2, 1, 3, 64, 48)
    policy = sampling_policy(run.policy, run.sample)
    assert policy.process.num_steps == 5 and policy.model.net is run.policy.model.net
    spec = replace(make_tiny(load("srpo-flux-hps", SMALL)).model, height=64, width=48, rollout_guidance_scale=None)
    model: Any = spec.load(Placement())
    rng = Randomness(run.seed, SAMPLE_STEP, torch.arange(2))
    with torch.no_grad():
        final = policy.process.start(model, model.embed(["a red", "a blue"]), rng).finish().final
    assert model.decode(final).equal(pixels)


def test_generation_and_evaluation_use_the_settings_of_sample(tmp_path: Path) -> None:
    """SRPO trains at 720x720 with 25 steps and shows 1024x1024 with 50; explicit settings win."""
    config = resolve_source("srpo-flux-hps", [])[0]
    published = {"height": 1024, "width": 1024, "num_steps": 50, "guidance_scale": 3.5}
    assert config.sample.inference_settings() == published
    assert (config.model.height, config.process.num_steps) == (720, 25)  # type: ignore[attr-defined]
    settings = ["process.num_steps=9", "model={width: 512}", "sample.guidance_scale=2", "model.guidance_scale=1"]
    changed = resolve_source("srpo-flux-hps", settings)[0].sample.inference_settings()
    assert changed == {"height": 1024, "guidance_scale": 2}
    assert describe_inference(config.sample) == (
        "settings of `sample`: height 1024, width 1024, num steps 50, guidance scale 3.5"
    )
    options = GenerationOptions(PromptBatch(("a red",), ({},)), 1, 0, SingleSample(), "live", tmp_path)
    assert options.fingerprint(config, None) != options.fingerprint(replace(config, sample=SampleConfig()), None)
    run = build_run("srpo-flux-hps", tmp_path, height=64, width=48, num_steps=3)
    pixels, _, cost = run_search(run, options, [0])
    assert (pixels.shape, cost.calls) == ((1, 1, 3, 64, 48), 3)
    sample_fn = build_sample_fn(run, EvaluationOptions(load_benchmark("playeval", 8, 1)), "live", tiny=True)
    pixels, cost = sample_fn(options.prompts, torch.tensor([0]))
    assert (pixels.shape, cost.calls) == ((1, 1, 3, 64, 48), 3)


def test_sample_guidance_scale_sets_classifier_free_guidance(tmp_path: Path) -> None:
    run = build_run("draft-sd15", tmp_path, "guidance.scale=5", guidance_scale=2.0)
    model: Any = sampling_policy(run.policy, run.sample).model
    assert model.guidance.scale == 2.0 and run.policy.model.guidance.scale == 5.0  # type: ignore[attr-defined]
    unguided: Any = sampling_policy(run.policy, replace(run.sample, guidance_scale=1.0)).model
    assert unguided.forward_passes == 1
    plain = build_run("grpo-toy-flow", tmp_path, "objective.group_size=4", guidance_scale=3.0)
    assert sampling_policy(plain.policy, plain.sample).model.guidance == Guidance(3.0)  # type: ignore[attr-defined]


def test_sampling_does_not_change_training(tmp_path: Path) -> None:
    results = []
    for with_samples in (False, True):
        run = build_run("srpo-flux-hps", tmp_path, height=64, width=48, num_steps=5, guidance_scale=2.0)
        step_metrics = []
        for step in range(2):
            if with_samples:
                generate_samples(run, step)
            step_metrics.append(train_step(run, step).to_event().metrics)
        results.append((step_metrics, [p.detach().clone() for p in run.policy.weights.trainable().values()]))
    (plain, weights), (sampled, sampled_weights) = results
    # Not bit for bit: the order of sums in MKL depends on the alignment of matrices, and AdamW makes full steps for
    # gradients near zero, whose sign depends on that order.
    assert plain == [pytest.approx(each, rel=1e-4) for each in sampled]
    differs = torch.cat([((a - b).abs() > 1e-4).flatten() for a, b in zip(weights, sampled_weights, strict=True)])
    assert differs.float().mean() < 0.01


@pytest.mark.slow
def test_sampling_runs_uncompiled(tmp_path: Path) -> None:
    run, compilations = build_run("grpo-toy-flow", tmp_path, "objective.group_size=4"), []

    def count(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph.forward

    run.engine.config = replace(run.engine.config, compile=True)
    run.policy.model.net.compile(backend=count)
    generate_samples(run, 0)
    assert not compilations
    train_step(run, 0)
    assert compilations


def test_samples_are_generated_in_rollout_batches(tmp_path: Path) -> None:
    full = build_run("srpo-flux-hps", tmp_path)
    batched = build_run("srpo-flux-hps", tmp_path, "batch.rollout_batch_size=1")
    torch.testing.assert_close(generate(batched), generate(full), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("recipe", "setting", "expected"),
    [
        ("grpo-toy-flow", "sample.height=64", "sample.height: "),
        (
            "grpo-toy-causal",
            "sample.num_steps=4",
            "sample.num_steps: AutoregressiveProcess",
        ),
        ("srpo-flux-hps", "sample.width=100", "sample.width: "),
    ],
)
def test_unsupported_sample_settings_are_refused(recipe: str, setting: str, expected: str) -> None:
    assert any(expected in problem for problem in find_problems(load(recipe, [setting])))
