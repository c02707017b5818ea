"""Costs of searches: FLOPs and network calls in `generate` and `evaluate`, and cost curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from cli_runner import run_cli
from rich.console import Console

from tastemaker import cli
from tastemaker.cli import EXIT_USAGE
from tastemaker.core.policy import Guidance
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.search.base import RubricVerifier, SearchCost
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.fk_steering import FKSteering
from tastemaker.search.flops import format_flops, measure_flop_costs
from tastemaker.search.noise_search import NoiseSearch
from tastemaker.search.parm import PARMSearch, PublishedPARMSearch
from tastemaker.search.refine import Refine
from tastemaker.search.settings import build_search, evaluate_curve, is_curve_requested, search_name

QUICK = ["--tiny", "--device", "cpu", "--num-prompts", "6", "--count", "1"]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def read_metadata(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metadata.jsonl").read_text().splitlines()]


def test_search_metadata_states_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "grpo-toy-masked", "-p", "a red", "-p", "a blue", "--device", "cpu"]
    assert run_cli(*arguments, "--search", "parm", "--num-candidates", "20", "--out", "found") == 0
    output = capsys.readouterr().err
    metadata = read_metadata("found")
    assert all(row["calls"] <= 20 * 8 and row["verifier_calls"] >= 20 and row["flops"] > 0 for row in metadata)
    assert f"{sum(row['calls'] for row in metadata):,.0f} network calls" in output
    flops = format_flops(sum(row["flops"] for row in metadata))
    assert f"{sum(row['verifier_calls'] for row in metadata):,.0f} verifier calls and {flops}" in output
    assert run_cli(*arguments, "--out", "single") == 0
    assert [row["verifier_calls"] for row in read_metadata("single")] == [0, 0]
    assert read_metadata("single")[0]["flops"] < metadata[0]["flops"]


def test_steering_and_noise_search_state_their_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["generate", "grpo-toy-flow", "-p", "a red", "--device", "cpu", "process.num_steps=8"]
    steering = [*arguments, "--search", "fk_steering", "--num-candidates", "3"]
    noise = [*arguments, "--search", "{type: noise_search, n: 3, rounds: 2}"]
    assert run_cli(*steering, "--out", "steered") == 0
    assert run_cli(*noise, "--out", "noise") == 0
    calls = [(row["calls"], row["verifier_calls"]) for out in ("steered", "noise") for row in read_metadata(out)]
    assert calls == [(3 * 8, 3 * 4), (2 * 3 * 8, 2 * 3)]
    capsys.readouterr()
    assert run_cli("generate", "likelihood-toy-flow", "-p", "a red", "--search", "fk_steering") == EXIT_USAGE
    assert "TM1623" in capsys.readouterr().err


def test_judge_option_selects_the_verifier() -> None:
    arguments = [
        "generate",
        "grpo-playground-masked",
        "--tiny",
        "--device",
        "cpu",
        "--count",
        "1",
        "--search",
        "best_of_n",
    ]
    assert run_cli(*arguments, "--num-candidates", "2", "--out", "own") == 0
    assert run_cli(*arguments, "--num-candidates", "2", "--verifier", "playground_judge", "--out", "judged") == 0
    assert all(0 < row["score"] < 1 for row in read_metadata("judged"))
    assert read_metadata("own")[0]["made"] != read_metadata("judged")[0]["made"]


def test_several_candidate_counts_plot_score_against_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "playeval", "-m", "grpo-playground-masked", *QUICK]
    assert (
        run_cli(
            *arguments, "--search", "{type: parm, start_progress: 0.5}", "--num-candidates", "1,3", "--out", "curve"
        )
        == 0
    )
    curve = json.loads(Path("curve/costs.json").read_text())
    assert curve["search"] == "parm" and [point["n"] for point in curve["points"]] == [1, 3]
    one, three = curve["points"]
    assert (
        one["calls"] < three["calls"]
        and one["verifier_calls"] < three["verifier_calls"]
        and 0 < one["flops"] < three["flops"]
    )
    chart = Path("curve/costs.svg").read_text()
    assert chart.startswith("<svg") and "Score against cost: parm" in chart
    report = json.loads(Path("curve/n3/report.json").read_text())
    assert {key: report[key] for key in ("calls", "verifier_calls", "flops")} == {
        key: three[key] for key in ("calls", "verifier_calls", "flops")
    }
    assert "cost per sample" in capsys.readouterr().err
    assert run_cli(*arguments, "--search", "parm", "--num-candidates", "two") == EXIT_USAGE
    assert "TM586" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flow", "masked", "causal"])
def test_network_call_flops_match_its_matrices(name: str) -> None:
    batch, rng = toys.prompts(4), Randomness(0, 0, torch.arange(4))
    policy = toys.policy(name)
    plain = measure_flop_costs(policy, RubricVerifier(toys.rubric()), batch, rng)
    guided = measure_flop_costs(toys.policy(name, guidance=Guidance(2.0)), None, batch, rng)
    assert plain.per_network_call > 0 and guided.per_verifier_call == 0
    assert guided.per_network_call == plain.per_network_call  # a guided prediction is two calls of equal cost
    matrix_flops = sum(2 * p.numel() for p in policy.model.net.parameters() if p.ndim == 2)
    assert plain.per_network_call < 100 * matrix_flops


def test_search_costs_add_up() -> None:
    assert SearchCost(4, 2, 1e9) + SearchCost(2) == SearchCost(6, 2, 1e9)
    assert SearchCost(6, 2, 1e9).per_sample(2) == SearchCost(3, 1, 5e8)
    assert [format_flops(x) for x in (5, 2.5e6, 3.8e13, 2.2e18)] == ["5 FLOP", "2.5 MFLOP", "38 TFLOP", "2.2 EFLOP"]


def test_search_is_built_from_a_name_or_settings() -> None:
    assert build_search("best_of_n", 20) == BestOfN(20)
    assert build_search("{type: parm, start_progress: 0.5, prune: false}", 8) == PARMSearch(8, 0.5, prune=False)
    assert build_search("{type: published_parm, n: 3}", 8) == PublishedPARMSearch(3)
    assert build_search("{type: refine, search: {type: best_of_n, n: 2}}", 8) == Refine(BestOfN(2))
    steering = build_search("{type: fk_steering, potential: max, reward_scale: 2, resample_at: [0.5]}", 8)
    assert steering == FKSteering(8, "max", 2.0, (0.5,))
    assert build_search("{type: noise_search, rounds: 2, step_size: 0.3}", 5) == NoiseSearch(5, 2, 0.3)
    assert search_name("{type: parm, n: 3}") == "parm"
    with pytest.raises(ConfigError, match=r"pram.*TM107"):
        build_search("pram", 3)
    with pytest.raises(ConfigError, match=r"--search.*TM820"):
        build_search("{type: parm, frist: 0.5}", 3)


def test_only_rank_zero_writes_the_cost_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    overall = {"mean": 0.5, "low": 0.4, "high": 0.6}
    report = {
        "benchmark": "playeval",
        "scores": {"strict": {"overall": overall}},
        "calls": 1,
        "verifier_calls": 0,
        "flops": 0,
    }
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        curve = evaluate_curve("parm", (1, 2), lambda n, out: report, Path(), Console(quiet=True))
        points = [{"n": n, "score": "strict", **overall, "calls": 1, "verifier_calls": 0, "flops": 0} for n in (1, 2)]
        assert curve == {"search": "parm", "points": points}
        assert Path("costs.json").is_file() == Path("costs.svg").is_file() == (rank == "0")


def test_candidates_option_has_a_long_name() -> None:
    arguments = ["generate", "grpo-toy-masked", "-p", "a red", "--device", "cpu", "--search", "best_of_n"]
    assert run_cli(*arguments, "--num-candidates", "3", "--out", "found") == 0
    assert read_metadata("found")[0]["verifier_calls"] == 3


def test_warnings_of_the_package_are_printed_plainly_by_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    own_file, other_file = str(Path(cli.__file__).parent / "runs.py"), "/elsewhere/module.py"
    assert cli.format_warning("no answer", UserWarning, own_file, 3) == "warning: no answer\n"
    assert "module.py:3: UserWarning" in cli.format_warning("old", UserWarning, other_file, 3)
    monkeypatch.setenv("RANK", "1")
    assert cli.format_warning("no answer", UserWarning, own_file, 3) == ""


@pytest.mark.parametrize("search", ["single", "{type: parm, n: 4}", "{type: refine}"])
def test_curve_with_a_fixed_candidate_count_is_refused(search: str) -> None:
    with pytest.raises(ConfigError, match=r"^--num-candidates: .*--search.*TM583"):
        is_curve_requested(search, (1, 2))
    assert not is_curve_requested(search, (4,)) and is_curve_requested("{type: parm, start_progress: 0.5}", (1, 2))
