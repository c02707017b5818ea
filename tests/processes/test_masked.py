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
CODES = slice(60, 92)  # image tokens of the recorded model; 92 is its mask
PICTURE = slice(-17, -1)  # their places; the last token ends the picture
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
    """In float32, where cos 60 degrees is below one half: of 256 tokens 127 stay hidden at two thirds, not 128."""
    golden = load_file(SHOWO / "schedules.safetensors")[f"floor_masklen_T{steps}_N{tokens}"]
    process = MaskedProcess(steps)
    everything = torch.ones(1, tokens, dtype=torch.bool)
    sureness = torch.linspace(0.1, 0.9, tokens)[None]
    for step, wanted in enumerate(golden.tolist()):
        stay = process.remask(sureness, everything, torch.full((1, tokens), 0.5), step)
        assert stay.sum() == max(1, wanted)


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


def of_picture(logits: Tensor, weight: float) -> Tensor:
    """Logits of the picture's tokens, guided: the published (1 + w) given - w without is a scale of 1 + w."""
    logits = logits[:, PICTURE, CODES]
    if not weight:
        return logits
    given, without = logits.chunk(2)
    return apply_guidance(Guidance(1 + weight), given, without, torch.tensor(1.0))


@pytest.mark.parametrize(("name", "weight", "steps"), [("gen_cfg175_T6", 1.75, 6), ("gen_nocfg_T4", 0.0, 4)])
def test_generation_matches_recorded_steps(name: str, weight: float, steps: int) -> None:
    golden, process = load_file(SHOWO / f"{name}.safetensors"), MaskedProcess(steps)
    rows = len(golden["out"])
    hidden = torch.ones(rows, 16, dtype=torch.bool)
    written = torch.full((rows, 16), MASK_TOKEN_ID)
    for step in range(steps):
        shown = torch.where(written == MASK_TOKEN_ID, MASK, written + CODES.start)
        assert torch.equal(shown, golden["step_ids"][step, :rows, PICTURE])
        here = Categorical(of_picture(golden["logits"][step], weight))
        torch.testing.assert_close(here.mean.flatten(0, 1), golden["mn_probs"][step], rtol=1e-5, atol=1e-7)
        drawn = golden["mn_out"][step].view(rows, 16)
        guess = torch.where(hidden, drawn, written)
        sureness = here.log_prob(guess).exp()
        torch.testing.assert_close(sureness[hidden], golden["sel_probs"][step][hidden], rtol=1e-5, atol=1e-7)
        assert process.annealed_temperature(step) == pytest.approx(
            float(golden["temperature"][step]), rel=1e-6, abs=1e-12
        )
        uniform = golden["gumbel"][step].double().neg().exp().neg().exp().float()
        stay = process.remask(sureness, hidden, uniform, step)
        assert stay.sum(1).tolist() == golden["mask_len"][step].tolist()
        assert torch.equal(stay, golden["masking"][step])
        written, hidden = torch.where(stay, MASK_TOKEN_ID, guess), stay
    assert torch.equal(guess, golden["out"])


def test_known_tokens_stay_unmasked() -> None:
    process, hidden = MaskedProcess(8), torch.arange(64)[None].expand(3, 64) % 2 == 0
    uniform = Randomness(0, 0, torch.arange(3)).uniform("reveal", 64)
    for step in range(7):
        stay = process.remask(torch.full((3, 64), 0.5), hidden, uniform, step)
        assert not (stay & ~hidden).any()
        assert (stay.sum(1) < hidden.sum(1)).all()
        hidden = stay


def test_training_masks_match_published() -> None:
    golden, process = load_file(SHOWO / "train_masking.safetensors"), MaskedProcess()
    level = process.mask_ratio(golden["u_timestep"])
    torch.testing.assert_close(level, golden["mask_prob"])
    hidden = process.mask_tokens(golden["tokens"], level, golden["u_perm"])
    assert torch.equal(hidden, golden["labels"] != -100)
    assert torch.equal(torch.where(hidden, MASK, golden["tokens"]), golden["input_ids"])


def test_corruption_masks_the_given_share() -> None:
    process, x = MaskedProcess(), torch.arange(16).expand(5, 16)
    noisy = process.corrupt(x, Randomness(0, 0, torch.arange(5)), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert process.count_hidden(noisy).tolist() == [1, 4, 8, 12, 16]
    assert torch.equal(noisy.x == MASK_TOKEN_ID, noisy.noise)
    assert torch.equal(noisy.x[~noisy.noise], x[~noisy.noise])


def test_invalid_settings_are_refused() -> None:
    for process in ({"num_steps": 0}, {"temperature": -1.0}, {"exponent": 0.0}):
        with pytest.raises(ValueError, match="expected 1 to 10000 steps"):
            MaskedProcess(**process)


@pytest.mark.parametrize("rollouts_only", [False, True])
def test_guided_samples_have_a_first_ratio_of_one(rollouts_only: bool) -> None:
    learner = toys.policy("masked", guidance=Guidance(3.0, rollouts_only=rollouts_only))
    cond = learner.embed(toys.PROMPTS)
    for segment in learner.sample(cond, Randomness(0, 0, torch.arange(4))).segments:
        assert torch.equal(learner.action_distribution(cond, segment).log_prob(segment.action), segment.log_prob)


def test_likelihood_weights() -> None:
    policy, x = toys.policy("masked"), torch.randint(0, 4, (3, 4), generator=torch.Generator().manual_seed(0))
    cond, hidden = policy.embed(["a red"] * 3), torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    found = {}
    for weight in ("sum", "mean", "elbo"):
        process = MaskedProcess(likelihood_weight=weight)
        noisy = process.corrupt(x, Randomness(0, 0, torch.arange(3)), torch.ones(3), hidden)
        found[weight] = process.likelihood(policy.model, cond, x, noisy)
        # What is learned by likelihood alone is a mean over hidden tokens, however they are weighed.
        torch.testing.assert_close(found[weight] / process.count_hidden(noisy), found["sum"] / hidden.sum(1))
    torch.testing.assert_close(found["mean"] * torch.tensor([1.0, 3.0, 4.0]), found["sum"])
    torch.testing.assert_close(found["elbo"], 4 * found["mean"])
