"""What searches cost, as `generate` and `evaluate` state it."""

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
from tastemaker.search.flops import format_flops, measure_flop_costs
from tastemaker.search.parm import PARMSearch, PublishedPARMSearch
from tastemaker.search.refine import Refine
from tastemaker.search.settings import build_search, evaluate_curve, is_curve_requested, search_name

QUICK = ["--tiny", "--device", "cpu", "--prompts", "6", "--count", "1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metadata.jsonl").read_text().splitlines()]


def test_every_picture_of_a_search_states_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "grpo-toy-masked", "-p", "a red", "-p", "a blue", "--device", "cpu"]
    assert run_cli(*asked, "--search", "parm", "--n", "20", "--out", "found") == 0
    told = capsys.readouterr().err
    found = rows("found")
    assert all(row["calls"] <= 20 * 8 and row["judged"] >= 20 and row["flops"] > 0 for row in found)
    assert f"{sum(row['calls'] for row in found):,.0f} network calls" in told
    assert (
        f"{sum(row['judged'] for row in found):,.0f} verifier calls and {format_flops(sum(r['flops'] for r in found))}"
        in told
    )
    assert run_cli(*asked, "--out", "single") == 0
    assert [row["judged"] for row in rows("single")] == [0, 0]
    assert rows("single")[0]["flops"] < found[0]["flops"]


def test_a_search_asks_whom_it_is_told_to() -> None:
    asked = ["generate", "grpo-playground-masked", "--tiny", "--device", "cpu", "--count", "1", "--search", "best_of_n"]
    assert run_cli(*asked, "--n", "2", "--out", "own") == 0
    assert run_cli(*asked, "--n", "2", "--judge", "playground_judge", "--out", "judged") == 0
    assert all(0 < row["score"] < 1 for row in rows("judged"))
    assert rows("own")[0]["made"] != rows("judged")[0]["made"]


def test_several_numbers_of_candidates_draw_score_against_price(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["evaluate", "playeval", "-m", "grpo-playground-masked", *QUICK]
    assert run_cli(*asked, "--search", "{type: parm, start_progress: 0.5}", "--n", "1,3", "--out", "curve") == 0
    told = json.loads(Path("curve/prices.json").read_text())
    assert told["search"] == "parm" and [point["n"] for point in told["points"]] == [1, 3]
    one, three = told["points"]
    assert one["calls"] < three["calls"] and one["judged"] < three["judged"] and 0 < one["flops"] < three["flops"]
    picture = Path("curve/prices.svg").read_text()
    assert picture.startswith("<svg") and "Score against cost: parm" in picture
    report = json.loads(Path("curve/n3/report.json").read_text())
    assert {key: report[key] for key in ("calls", "judged", "flops")} == {
        key: three[key] for key in ("calls", "judged", "flops")
    }
    assert "cost per sample" in capsys.readouterr().err
    assert run_cli(*asked, "--search", "parm", "--n", "two") == EXIT_USAGE
    assert "expected integers, as in 1,4,20" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flow", "masked", "causal"])
def test_a_network_call_costs_what_its_matrices_do(name: str) -> None:
    batch, rng = toys.prompts(4), Randomness(0, 0, torch.arange(4))
    policy = toys.policy(name)
    plain = measure_flop_costs(policy, RubricVerifier(toys.rubric()), batch, rng)
    guided = measure_flop_costs(toys.policy(name, guidance=Guidance(2.0)), None, batch, rng)
    assert plain.per_network_call > 0 and guided.per_verifier_call == 0
    assert (
        guided.per_network_call == plain.per_network_call
    )  # a guided prediction is two calls, each as dear as one alone
    inside = sum(2 * p.numel() for p in policy.model.net.parameters() if p.ndim == 2)
    assert plain.per_network_call < 100 * inside


def test_prices_add_up_and_are_shared() -> None:
    assert SearchCost(4, 2, 1e9) + SearchCost(2) == SearchCost(6, 2, 1e9)
    assert SearchCost(6, 2, 1e9).per_sample(2) == SearchCost(3, 1, 5e8)
    assert [format_flops(x) for x in (5, 2.5e6, 3.8e13, 2.2e18)] == ["5 FLOP", "2.5 MFLOP", "38 TFLOP", "2.2 EFLOP"]


def test_a_search_is_named_or_has_settings() -> None:
    assert build_search("best_of_n", 20) == BestOfN(20)
    assert build_search("{type: parm, start_progress: 0.5, prune: false}", 8) == PARMSearch(8, 0.5, prune=False)
    assert build_search("{type: published_parm, n: 3}", 8) == PublishedPARMSearch(3)
    assert build_search("{type: refine, search: {type: best_of_n, n: 2}}", 8) == Refine(BestOfN(2))
    assert search_name("{type: parm, n: 3}") == "parm"
    with pytest.raises(ConfigError, match="pram"):
        build_search("pram", 3)
    with pytest.raises(ConfigError, match="--search"):
        build_search("{type: parm, frist: 0.5}", 3)


def test_of_several_ranks_the_first_alone_draws_score_against_price(monkeypatch: pytest.MonkeyPatch) -> None:
    overall = {"mean": 0.5, "low": 0.4, "high": 0.6}
    told = {"benchmark": "playeval", "scores": {"strict": {"overall": overall}}, "calls": 1, "judged": 0, "flops": 0}
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert evaluate_curve("parm", (1, 2), lambda n, out: told, Path(), Console(quiet=True)) == [told, told]
        assert Path("prices.json").is_file() == Path("prices.svg").is_file() == (rank == "0")


def test_candidates_have_a_name_that_torchrun_does_not_take_for_its_own() -> None:
    asked = ["generate", "grpo-toy-masked", "-p", "a red", "--device", "cpu", "--search", "best_of_n"]
    assert run_cli(*asked, "--candidates", "3", "--out", "found") == 0
    assert rows("found")[0]["judged"] == 3


def test_a_warning_of_our_own_is_a_sentence_and_the_first_rank_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = str(Path(cli.__file__).parent / "runs.py"), "/elsewhere/module.py"
    assert cli.format_warning("the judge is silent", UserWarning, ours, 3) == "warning: the judge is silent\n"
    assert "module.py:3: UserWarning" in cli.format_warning("old", UserWarning, theirs, 3)
    monkeypatch.setenv("RANK", "1")
    assert cli.format_warning("the judge is silent", UserWarning, ours, 3) == ""


@pytest.mark.parametrize("search", ["single", "{type: parm, n: 4}", "{type: refine}"])
def test_a_curve_of_candidates_that_do_not_vary_is_refused(search: str) -> None:
    with pytest.raises(ConfigError, match=r"--n: found 2 numbers, but --search .* does not use them"):
        is_curve_requested(search, (1, 2))
    assert not is_curve_requested(search, (4,)) and is_curve_requested("{type: parm, start_progress: 0.5}", (1, 2))
