"""diffusers schedulers sample on our noise paths, and equal our samplers where the method is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as Files
from typing import Any, cast

import diffusers
import pytest
import torch
import toys
from tiers import fast
from torch import Tensor

from tastemaker.config.build import build_policy, make_tiny
from tastemaker.config.load import load
from tastemaker.core.distributions import expand_dims_like
from tastemaker.core.policy import Backbone
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Condition, Metadata, Placement, PromptBatch, Prompts
from tastemaker.processes.dynamics import DDIM, ODE
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import KarrasPath, NoisePath, RectifiedFlow, VariancePreserving
from tastemaker.search.base import RubricVerifier
from tastemaker.search.best_of_n import SingleSample
from tastemaker.search.diffusers_scheduler import DiffusersSchedulerSearch

LATENT = VariancePreserving(set_alpha_to_one=True)
BATCH = PromptBatch(toys.PROMPTS, ({},) * 4)


def sample_with(path: NoisePath, search: Any, rows: tuple[int, ...] = (0, 1, 2, 3), steps: int = 5) -> Tensor:
    policy = replace(toys.policy("flow"), process=GaussianProcess(path, ODE(), steps))
    batch = PromptBatch(tuple(BATCH.prompts[i] for i in rows), ({},) * len(rows))
    result = search.run(policy, RubricVerifier(toys.rubric()), batch, Randomness(0, 0, torch.tensor(rows)))
    assert result.x.isfinite().all() and result.score.isnan().all()
    x: Tensor = result.x
    return x


@pytest.mark.parametrize("path", [RectifiedFlow(), RectifiedFlow(3.0), RectifiedFlow(2.0, sigma_min=0.01)])
def test_diffusers_euler_equals_ours_on_rectified_flow(path: RectifiedFlow) -> None:
    ours, diffusers_samples = (
        sample_with(path, search)
        for search in (SingleSample(), DiffusersSchedulerSearch("FlowMatchEulerDiscreteScheduler"))
    )
    torch.testing.assert_close(diffusers_samples, ours, rtol=0, atol=2e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize(
    "path",
    [
        LATENT,
        replace(LATENT, set_alpha_to_one=False),
        replace(LATENT, timestep_spacing="trailing"),
        replace(LATENT, beta_schedule="linear", beta_start=1e-4, beta_end=0.02, steps_offset=0),
        replace(LATENT, beta_schedule="cosine", timestep_spacing="trailing"),
        replace(LATENT, final_signal_scale=0.7),
        replace(LATENT, final_signal_scale=0.7, set_alpha_to_one=False),
    ],
)
def test_diffusers_ddim_equals_ours(path: VariancePreserving, prediction: Any) -> None:
    path = replace(
        path, prediction_type="epsilon" if path.final_signal_scale < 1 and prediction == "v_prediction" else prediction
    )
    ours, diffusers_samples = (
        sample_with(path, search) for search in (SingleSample(), DiffusersSchedulerSearch("DDIMScheduler"))
    )
    error = float((diffusers_samples - ours).norm() / ours.norm())
    assert error < 1e-4


def test_diffusers_euler_equals_ours_on_karras_path() -> None:
    ours, diffusers_samples = (
        sample_with(KarrasPath(), search)
        for search in (SingleSample(), DiffusersSchedulerSearch("EulerDiscreteScheduler"))
    )
    torch.testing.assert_close(diffusers_samples, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, LATENT) for name in ("DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler")),
        *(
            (name, LATENT)
            for name in ("HeunDiscreteScheduler", "UniPCMultistepScheduler", "PNDMScheduler", "DDPMScheduler")
        ),
        *((name, RectifiedFlow(2.0)) for name in ("DPMSolverMultistepScheduler", "FlowMatchHeunDiscreteScheduler")),
    ],
)
def test_every_scheduler_samples_independently_of_the_batch(name: str, path: NoisePath) -> None:
    batched, single = (
        sample_with(path, DiffusersSchedulerSearch(name, 8)),
        sample_with(path, DiffusersSchedulerSearch(name, 8), (2,)),
    )
    torch.testing.assert_close(batched[2:3], single, rtol=1e-3, atol=1e-3)
    assert batched.equal(sample_with(path, DiffusersSchedulerSearch(name, 8)))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (RectifiedFlow(), "UniPCMultistepScheduler"),
        pytest.param(
            replace(LATENT, timestep_spacing="trailing"), "DPMSolverMultistepScheduler", marks=pytest.mark.slow
        ),
        (
            replace(LATENT, timestep_spacing="trailing", final_signal_scale=0.7),
            "DPMSolverMultistepScheduler",
        ),  # VideoCrafter2's
    ],
)
def test_multistep_solver_beats_euler_at_equal_steps(path: NoisePath, name: str) -> None:
    policy = toys.policy("flow")

    def run_search(search: Any, steps: int) -> Tensor:
        policy_with_steps = replace(policy, process=GaussianProcess(path, ODE(), steps))
        x: Tensor = search.run(
            policy_with_steps, RubricVerifier(toys.rubric()), BATCH, Randomness(0, 0, torch.arange(4))
        ).x
        return x

    exact = run_search(SingleSample(), 200)
    errors = [
        float((run_search(search, 20) - exact).norm()) for search in (SingleSample(), DiffusersSchedulerSearch(name))
    ]
    assert errors[1] < errors[0]


VIDEO_MODELS = {
    "modelscope": ("DDIMScheduler", "DPMSolverMultistepScheduler"),
    "videocrafter2": ("DDIMScheduler", "DPMSolverMultistepScheduler"),
    "cogvideox": ("DDIMScheduler", "DPMSolverMultistepScheduler"),
    "opensora": ("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    "wan": ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"),
    "ltx": ("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    "hunyuanvideo": ("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    "mochi": ("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    "svd": ("EulerDiscreteScheduler",),
}


@pytest.mark.parametrize("name", fast(VIDEO_MODELS, "cogvideox", "wan"))
def test_video_models_sample_with_common_schedulers(name: str, tmp_path: Files) -> None:
    (tmp_path / "clips.yaml").write_text(f"extends: [base, models/{name}]\ndata: {{type: prompts, prompts: [a cat]}}")
    overrides = ["objective={type: reward_gradient}", "rewards={bright: {type: brightness}}", "engine.precision=fp32"]
    overrides += [f"model.image={toys.IMAGE}"] if name == "svd" else []
    config = make_tiny(
        load(tmp_path / "clips.yaml", [*overrides, "process.num_steps=4", "process.dynamics={type: ode}"])
    )
    policy = replace(build_policy(config, Placement()), process=replace(config.process, num_steps=4))

    def run_search(search: Any) -> Tensor:
        batch = PromptBatch(("a cat",), ({},))
        x: Tensor = search.run(policy, RubricVerifier(toys.rubric()), batch, Randomness(0, 0, torch.arange(1))).x
        return x

    equivalent, *others = (run_search(DiffusersSchedulerSearch(scheduler)) for scheduler in VIDEO_MODELS[name])
    torch.testing.assert_close(equivalent, run_search(SingleSample()), rtol=1e-3, atol=1e-3)
    assert all(x.isfinite().all() and not x.allclose(equivalent, atol=1e-3) for x in others)


class ExactNormalModel(Backbone):
    """The exact prediction for data that is normal with standard deviation one half."""

    forward_passes, shape = 1, (1, 4, 16, 16)

    def __init__(self, path: NoisePath) -> None:
        self.path = path

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        return Condition(tuple(prompts), {}, tuple(metadata))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        alpha, sigma = (expand_dims_like(each(t), x) for each in (self.path.alpha, self.path.sigma))
        clean = alpha * x / (alpha**2 + 4 * sigma**2)
        return self.path.target(clean, (x - alpha * clean) / sigma, t)

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels

    def decode(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return x


@pytest.mark.parametrize(
    "name",
    fast(["CogVideoXDDIM", "DEISMultistep", "KDPM2Discrete", "PNDM", "SASolver", "UniPCMultistep"], "PNDM", "SASolver"),
)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_sample_variance_matches_the_model(name: str, prediction: Any) -> None:
    path, model = replace(LATENT, prediction_type=prediction), cast(Any, ExactNormalModel)
    policy = replace(toys.policy("flow"), model=model(path), process=GaussianProcess(path, ODE(), 50))
    result = DiffusersSchedulerSearch(f"{name}Scheduler").run(
        policy, RubricVerifier(toys.rubric()), BATCH, Randomness(0, 0, torch.arange(4))
    )
    assert 0.46 < float(result.x.std()) < 0.54


def test_scheduler_with_missing_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers.LMSDiscreteScheduler, "_backends", ["torch", "no_such"], raising=False)
    with pytest.raises(ConfigError, match=r"LMSDiscreteScheduler.*no_such.*`pip install.*TM561"):
        sample_with(LATENT, DiffusersSchedulerSearch("LMSDiscreteScheduler"))


@pytest.mark.parametrize(
    ("search", "path", "pattern"),
    [
        (DiffusersSchedulerSearch("DPMSolverMultistep"), LATENT, "'DPMSolverMultistepScheduler'"),
        (DiffusersSchedulerSearch("DDIMScheduler"), RectifiedFlow(), "flow models.*TM565"),
        (DiffusersSchedulerSearch("FlowMatchEulerDiscreteScheduler"), LATENT, "levels.*DDIMScheduler"),
        (DiffusersSchedulerSearch("DDIMScheduler"), KarrasPath(), "EulerDiscreteScheduler"),
        (DiffusersSchedulerSearch("DDIMScheduler", settings={"karras": True}), LATENT, "'karras'"),
        (DiffusersSchedulerSearch("DDIMInverseScheduler"), LATENT, "DDIMInverseScheduler.*TM562"),
        (DiffusersSchedulerSearch("RePaintScheduler"), LATENT, "RePaintScheduler.*TM562"),
        (DiffusersSchedulerSearch("CogVideoXDPMScheduler"), LATENT, "CogVideoXDPMScheduler.*TM562"),
        (DiffusersSchedulerSearch("IPNDMScheduler"), LATENT, "levels.*DDIMScheduler"),
        (
            DiffusersSchedulerSearch("DPMSolverMultistepScheduler", settings={"solver_type": "x"}),
            LATENT,
            r"\(x is not",
        ),
        (
            DiffusersSchedulerSearch("PNDMScheduler"),
            replace(LATENT, prediction_type="sample"),
            r"\(prediction_type given",
        ),
    ],
)
def test_incompatible_schedulers_are_refused(search: DiffusersSchedulerSearch, path: NoisePath, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        sample_with(path, search)


def test_schedulers_are_refused_for_token_models() -> None:
    with pytest.raises(ConfigError, match=r"samples tokens.*TM558"):
        DiffusersSchedulerSearch().run(
            toys.policy("causal"), RubricVerifier(toys.rubric()), BATCH, Randomness(0, 0, torch.arange(4))
        )


def test_settings_reach_the_scheduler() -> None:
    plain, karras = (
        sample_with(LATENT, DiffusersSchedulerSearch("DPMSolverMultistepScheduler", settings=settings))
        for settings in ({}, {"use_karras_sigmas": True})
    )
    assert not torch.allclose(plain, karras)


def test_training_rollouts_do_not_use_schedulers() -> None:
    policy = replace(toys.policy("flow"), process=GaussianProcess(LATENT, DDIM(1.0), 4))
    before = policy.sample(policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4)))
    DiffusersSchedulerSearch("DDIMScheduler").run(
        policy, RubricVerifier(toys.rubric()), BATCH, Randomness(0, 0, torch.arange(4))
    )
    after = policy.sample(policy.embed(toys.PROMPTS), Randomness(0, 0, torch.arange(4)))
    assert before.final.equal(after.final) and len(after.segments) == 3
