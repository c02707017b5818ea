"""Masked generation as in Show-o: schedules, recorded generations and training masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.core.distributions import Categorical
from tastemaker.core.guidance import apply_guidance
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import MASK_TOKEN_ID
from tastemaker.processes.masked import MaskedProcess

SHOWO = Path(__file__).parent.parent / "fixtures" / "showo"
CODEBOOK = slice(60, 92)  # ids of image tokens in the recorded model; 92 is its mask token
IMAGE = slice(-17, -1)  # positions of image tokens; the last token ends the image
MASK = 92


@pytest.mark.parametrize(
    ("name", "process"),
    [
        ("cosine", MaskedProcess(schedule="cosine")),
        ("linear", MaskedProcess(schedule="linear")),
        ("pow0.5", MaskedProcess(schedule="power", exponent=0.5)),
        ("pow2", MaskedProcess(schedule="power", exponent=2.0)),
        ("sigmoid", MaskedProcess(schedule="sigmoid")),
    ],
)
def test_mask_schedules_match_published(name: str, process: MaskedProcess) -> None:
    golden = load_file(SHOWO / "schedules.safetensors")
    torch.testing.assert_close(process.mask_ratio(golden["t"]), golden[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("steps", "tokens"), [(12, 256), (18, 256), (50, 1024)])
def test_number_of_masked_tokens_matches_published(steps: int, tokens: int) -> None:
    """In float32 the cosine of 60 degrees is below one half: 127 of 256 tokens stay masked at two thirds, not 128."""
    golden = load_file(SHOWO / "schedules.safetensors")[f"floor_masklen_T{steps}_N{tokens}"]
    process = MaskedProcess(steps)
    all_masked = torch.ones(1, tokens, dtype=torch.bool)
    confidence = torch.linspace(0.1, 0.9, tokens)[None]
    for step, expected in enumerate(golden.tolist()):
        masked = process.remask(confidence, all_masked, torch.full((1, tokens), 0.5), step)
        assert masked.sum() == max(1, expected)


@pytest.mark.parametrize("steps", [12, 18, 50])
def test_compounding_temperature_matches_published(steps: int) -> None:
    golden = load_file(SHOWO / "schedules.safetensors")[f"temperature_T{steps}"]
    process = MaskedProcess(steps)
    assert [process.annealed_temperature(step) for step in range(steps)] == pytest.approx(
        golden.tolist(), rel=1e-6, abs=1e-12
    )


def test_linear_temperature_annealing() -> None:
    assert [MaskedProcess(4, temperature=2.0, annealing="linear").annealed_temperature(i) for i in range(4)] == [
        1.5,
        1.0,
        0.5,
        0.0,
    ]


def image_logits(logits: Tensor, weight: float) -> Tensor:
    """Return guided logits of image tokens: the published weight w is a guidance scale of 1 + w."""
    logits = logits[:, IMAGE, CODEBOOK]
    if not weight:
        return logits
    conditional, unconditional = logits.chunk(2)
    return apply_guidance(Guidance(1 + weight), conditional, unconditional, torch.tensor(1.0))


@pytest.mark.parametrize(("name", "weight", "steps"), [("gen_cfg175_T6", 1.75, 6), ("gen_nocfg_T4", 0.0, 4)])
def test_generation_matches_recorded_steps(name: str, weight: float, steps: int) -> None:
    golden, process = load_file(SHOWO / f"{name}.safetensors"), MaskedProcess(steps)
    rows = len(golden["out"])
    masked = torch.ones(rows, 16, dtype=torch.bool)
    tokens = torch.full((rows, 16), MASK_TOKEN_ID)
    for step in range(steps):
        input_ids = torch.where(tokens == MASK_TOKEN_ID, MASK, tokens + CODEBOOK.start)
        assert torch.equal(input_ids, golden["step_ids"][step, :rows, IMAGE])
        distribution = Categorical(image_logits(golden["logits"][step], weight))
        torch.testing.assert_close(distribution.mean.flatten(0, 1), golden["mn_probs"][step], rtol=1e-5, atol=1e-7)
        samples = golden["mn_out"][step].view(rows, 16)
        filled = torch.where(masked, samples, tokens)
        confidence = distribution.log_prob(filled).exp()
        torch.testing.assert_close(confidence[masked], golden["sel_probs"][step][masked], rtol=1e-5, atol=1e-7)
        assert process.annealed_temperature(step) == pytest.approx(
            float(golden["temperature"][step]), rel=1e-6, abs=1e-12
        )
        uniform = golden["gumbel"][step].double().neg().exp().neg().exp().float()
        remasked = process.remask(confidence, masked, uniform, step)
        assert remasked.sum(1).tolist() == golden["mask_len"][step].tolist()
        assert torch.equal(remasked, golden["masking"][step])
        tokens, masked = torch.where(remasked, MASK_TOKEN_ID, filled), remasked
    assert torch.equal(filled, golden["out"])


def test_known_tokens_stay_unmasked() -> None:
    process, masked = MaskedProcess(8), torch.arange(64)[None].expand(3, 64) % 2 == 0
    uniform = Randomness(0, 0, torch.arange(3)).uniform("reveal", 64)
    for step in range(7):
        remasked = process.remask(torch.full((3, 64), 0.5), masked, uniform, step)
        assert not (remasked & ~masked).any()
        assert (remasked.sum(1) < masked.sum(1)).all()
        masked = remasked


def test_training_masks_match_published() -> None:
    golden, process = load_file(SHOWO / "train_masking.safetensors"), MaskedProcess()
    level = process.mask_ratio(golden["u_timestep"])
    torch.testing.assert_close(level, golden["mask_prob"])
    masked = process.mask_tokens(golden["tokens"], level, golden["u_perm"])
    assert torch.equal(masked, golden["labels"] != -100)
    assert torch.equal(torch.where(masked, MASK, golden["tokens"]), golden["input_ids"])


def test_corruption_masks_the_given_share() -> None:
    process, x = MaskedProcess(), torch.arange(16).expand(5, 16)
    noisy = process.corrupt(x, Randomness(0, 0, torch.arange(5)), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert process.count_hidden(noisy).tolist() == [1, 4, 8, 12, 16]
    assert torch.equal(noisy.x == MASK_TOKEN_ID, noisy.noise)
    assert torch.equal(noisy.x[~noisy.noise], x[~noisy.noise])


def test_invalid_settings_are_refused() -> None:
    for key, value in (("num_steps", 0), ("temperature", -1.0), ("exponent", 0.0)):
        with pytest.raises(ValueError, match=f"{key}.* {value}"):
            MaskedProcess(**{key: value})


@pytest.mark.parametrize("rollouts_only", [False, True])
def test_guided_samples_have_a_first_ratio_of_one(rollouts_only: bool) -> None:
    policy = toys.policy("masked", guidance=Guidance(3.0, rollouts_only=rollouts_only))
    cond = policy.embed(toys.PROMPTS)
    for segment in policy.sample(cond, Randomness(0, 0, torch.arange(4))).segments:
        assert torch.equal(policy.action_distribution(cond, segment).log_prob(segment.action), segment.log_prob)


def test_likelihood_weights() -> None:
    policy, x = toys.policy("masked"), torch.randint(0, 4, (3, 4), generator=torch.Generator().manual_seed(0))
    cond, masked = policy.embed(["a red"] * 3), torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    likelihoods = {}
    for likelihood_weight in ("sum", "mean", "elbo"):
        process = MaskedProcess(likelihood_weight=likelihood_weight)
        noisy = process.corrupt(x, Randomness(0, 0, torch.arange(3)), torch.ones(3), masked)
        likelihoods[likelihood_weight] = process.likelihood(policy.model, cond, x, noisy)
        # The likelihood objective divides by the count, which gives a mean over masked tokens for every weight.
        torch.testing.assert_close(
            likelihoods[likelihood_weight] / process.count_hidden(noisy), likelihoods["sum"] / masked.sum(1)
        )
    torch.testing.assert_close(likelihoods["mean"] * torch.tensor([1.0, 3.0, 4.0]), likelihoods["sum"])
    torch.testing.assert_close(likelihoods["elbo"], 4 * likelihoods["mean"])
