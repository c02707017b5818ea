"""Questions, answers and verdicts, held against recordings of the published judges."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from tastemaker.core.randomness import Randomness
from tastemaker.core.reward import Verifier
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.rewards.vlm import VlmReward, VlmScorer
from tastemaker.search.base import Search, start_candidates
from tastemaker.search.best_of_n import BestOfN
from tastemaker.search.parm import PARMSearch
from tastemaker.vlm.chat_model import ChatOutput, YesNoModel
from tastemaker.vlm.chat_processors import Conversation, OneVisionProcessor
from tastemaker.vlm.judge import VlmJudge
from tastemaker.vlm.yes_no import (
    CLARITY,
    POTENTIAL,
    QUESTIONS,
    AnswerMode,
    AnswerTokens,
    find_answer_tokens,
    parse_answer,
)

FLOW = json.loads((Path(__file__).parents[1] / "fixtures/showo/reward_flow.json").read_text(encoding="utf-8"))
CASES = FLOW["score_cases"]
VOCABULARY = ["yes", "Yes", "no", "No", "maybe", *(f"word {k}" for k in range(40))]
WORDS = AnswerTokens(yes=(0, 1), no=(2, 3))
MODES: list[AnswerMode] = ["yes_no_logits", "full_softmax", "upstream_generate"]
PICTURES = torch.rand(5, 1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a cat", "two dogs on a very long bench " * 8, "", "a {prompt} <image><|im_end|>\n", "a red car"]


def logits(told: dict[str, float]) -> Tensor:
    """Those of one answer; what is not told is all but impossible: [1, V]."""
    out = torch.full((1, len(VOCABULARY)), -20.0)
    for word, value in told.items():
        out[0, VOCABULARY.index(word)] = value
    return out


@dataclass
class Scripted(YesNoModel):
    """A judge that gives the answers it is told to, in order, and counts the questions."""

    queue: list[Tensor]
    answer_tokens: AnswerTokens = WORDS
    asked: list[str] = field(default_factory=list)

    def strip_special_tokens(self, prompt: str) -> str:
        return prompt

    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep_cache: bool = False) -> ChatOutput:
        self.asked += [turns[-1] for turns in conversations]
        rows = torch.cat([self.queue.pop(0) for _ in conversations])
        return ChatOutput(rows, pixels, tuple(conversations), torch.ones(len(rows), 1))

    def ask_followup(self, heard: ChatOutput, rows: Tensor, answer: str, question: str) -> Tensor:
        assert answer == "yes"
        return self.ask(heard.pixels[rows], [(question,)] * len(rows)).logits


def said(token: str, told: dict[str, float]) -> Tensor:
    out = logits(told)
    out[0, VOCABULARY.index(token)] += 1e-5  # the likeliest, where all are alike
    return out


def test_conversations_are_worded_as_recorded() -> None:
    speech, prompt = OneVisionProcessor(None, None), "a photo of a red dog"
    clarity = CLARITY.replace("{prompt}", prompt)
    assert speech.render((QUESTIONS["orm"].replace("{prompt}", prompt),)) == FLOW["orm_prompt"]
    assert speech.render((clarity,)) == FLOW["clarity_prompt"]
    assert speech.render((clarity, "yes", POTENTIAL)) == FLOW["potential_prompt"]


@pytest.mark.parametrize("case", [case for case in CASES if case["fn"] == "orm"], ids=str)
def test_outcomes_score_as_recorded(case: dict[str, Any]) -> None:
    token = torch.tensor([VOCABULARY.index(case["token"])])
    answer = parse_answer(logits(case["logits"]), WORDS, "upstream_generate", 0.5, token)
    assert answer.is_yes.item() is case["ret"][0]
    assert answer.score.item() == pytest.approx(case["ret"][1], abs=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if c["fn"] == "parm" and not c["clear_in"]], ids=str)
def test_previews_are_judged_as_recorded(case: dict[str, Any]) -> None:
    judge = Scripted([said(token, told) for token, told in case["queue"]])
    verdict = VlmJudge(judge, "upstream_generate", 0.5).judge_preview(PICTURES[:1, 0], ["a cat"])
    promising, cost, clear = case["ret"]
    assert (verdict.promising.item(), verdict.judgeable.item()) == (promising, clear)
    assert 1 - verdict.score.item() == pytest.approx(cost, abs=1e-5)
    assert len(judge.asked) == case["vlm_calls"]


def test_a_judge_that_says_yes_in_capitals_is_understood_but_not_by_the_published_rule() -> None:
    told = logits({"yes": -3.0, "Yes": 4.0, "no": 0.0, "maybe": 3.0})
    share, whole, published = (parse_answer(told, WORDS, mode, 0.5).score.item() for mode in MODES)
    yes, no, other = math.exp(-3) + math.exp(4), 1.0, math.exp(3)
    assert share == pytest.approx(yes / (yes + no), abs=1e-6)
    assert whole == pytest.approx(yes / (yes + no + other), abs=1e-6)
    assert published == pytest.approx(math.exp(-3) / (yes + no + other), abs=1e-6)


def test_sampling_settings_change_the_published_score_alone() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    told = torch.randn(6, 45, generator=torch.Generator().manual_seed(1)) * 3
    few = replace(WORDS, top_k=7, top_p=0.8)
    theirs = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(7)(None, told))
    torch.testing.assert_close(few.warp_logits(told).softmax(-1), theirs.softmax(-1))
    for mode in MODES[:2]:
        assert torch.equal(parse_answer(told, few, mode, 0.5).score, parse_answer(told, WORDS, mode, 0.5).score)
    sure = logits({"yes": 3.0, "no": 1.0})
    assert parse_answer(sure, few, "upstream_generate", 0.5).score.item() == 1.0  # top-p leaves one word


def flow(name: str) -> Any:
    return next(each for each in FLOW["flows"] if each["name"] == name)


def answer(yes: float) -> Tensor:
    return logits({"yes": math.log(yes), "no": math.log(1 - yes)})


@dataclass
class Reader(Scripted):
    """A judge by the script of a recorded search: of each candidate what is said of its previews, and in the end."""

    previews: dict[int, list[tuple[bool, float, bool]]] = field(default_factory=dict)
    unclear: list[int] = field(default_factory=list)

    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep_cache: bool = False) -> ChatOutput:
        if not keep_cache:
            return Scripted.ask(self, pixels, conversations)
        assert len(conversations) == len(self.unclear)
        looks = [self.previews[each].pop(0) for each in self.unclear]
        self.unclear = [each for each, look in zip(self.unclear, looks, strict=True) if not look[2]]
        self.later = [answer(1 - cost) for _, cost, clear in looks if clear]
        rows = torch.cat([answer(0.9 if clear else 0.1) for _, _, clear in looks])
        return ChatOutput(rows, pixels, tuple(conversations), torch.ones(len(rows), 1))

    def ask_followup(self, heard: ChatOutput, rows: Tensor, answer: str, question: str) -> Tensor:
        return torch.cat(self.later)


def split(name: str) -> dict[int, list[tuple[bool, float, bool]]]:
    """What a recording says of each candidate: everything up to where it is clear, or three looks."""
    found: dict[int, list[tuple[bool, float, bool]]] = {}
    told, number = list(flow(name)["parm"]), 0
    while told:
        looks = [told.pop(0)]
        while not looks[-1][2] and len(looks) < 3:
            looks.append(told.pop(0))
        found[number], number = looks, number + 1
    return found


def pick(search: Search, judge: Verifier, count: int) -> int:
    """Which candidate a search takes."""
    policy, batch, rng = toys.policy("masked"), PromptBatch(("a red",), ({},)), Randomness(3, 0, torch.arange(1))
    found = search.run(policy, judge, batch, rng)
    cond = policy.embed(batch.prompts, batch.metadata).repeat(count)
    finals = start_candidates(policy, cond, rng.repeat(count)).finish().final
    return next(k for k in range(count) if torch.equal(finals[k], found.x[0]))


def scorer(talker: Scripted) -> VlmScorer:
    return VlmScorer(VlmReward(answer_mode="upstream_generate"), VlmJudge(talker, "upstream_generate", 0.5))


def test_the_best_of_several_is_the_recorded_one() -> None:
    told = flow("argmax")
    judge = Scripted([answer(score) for _, score in told["orm"]])
    assert [pick(BestOfN(told["search"]), scorer(judge), told["search"])] == told["picked"]
    assert len(judge.asked) == len(told["calls"])


@pytest.mark.parametrize(("name", "finals"), [("two_survive", (0.4, 0.8, 0.8)), ("never_clear", (0.5, 0.5, 0.5))])
def test_a_search_with_previews_takes_the_recorded_one(name: str, finals: tuple[float, ...]) -> None:
    told = flow(name)
    count = told["search"]
    judge = Reader([answer(score) for score in finals], previews=split(name), unclear=list(range(count)))
    assert [pick(PARMSearch(count), scorer(judge), count)] == told["picked"]


def test_it_says_what_is_wrong_for_a_search_that_reflects() -> None:
    judge = VlmReward(batch_size=2).tiny().load(Placement())
    told = judge.explain(PICTURES, PROMPTS, [{}] * 5)
    assert len(told) == 5 and all(isinstance(reason, str) for reason in told)
    assert told == judge.explain(PICTURES, PROMPTS, [{}] * 5)
    with pytest.raises(ValueError, match="Scripted answers in one word"):
        scorer(Scripted([])).explain(PICTURES, PROMPTS, [{}] * 5)


@pytest.mark.parametrize("mode", MODES)
def test_a_judge_that_answers_neither_yes_nor_no_is_a_sentence(mode: AnswerMode) -> None:
    panel = VlmJudge(Scripted([logits({"maybe": 3.0}), logits({"yes": 3.0})]), mode, 0.5, "my/judge")
    with pytest.warns(UserWarning, match="'my/judge' answers neither yes nor no"):
        said = panel.judge_finished(PICTURES[:2, 0], ["a cat", "a dog"], "orm")
    assert said.score.isfinite().all() and said.score[0] < said.score[1]


def test_a_judge_that_answers_is_not_complained_of() -> None:
    panel = VlmJudge(Scripted([logits({"No": 3.0})]), "yes_no_logits", 0.5, "my/judge")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        panel.judge_finished(PICTURES[:1, 0], ["a cat"], "orm")


def test_a_top_k_of_nought_keeps_every_word() -> None:
    told = logits({"yes": 2.0, "no": 1.0, "maybe": 0.5})
    every = told.softmax(-1)[0, 0]
    said = parse_answer(told, replace(WORDS, top_k=0), "upstream_generate", 0.5)
    torch.testing.assert_close(said.yes[0], every)


def test_words_in_capitals_are_yes_and_no_too() -> None:
    known = {"yes": 1, "Yes": 2, "YES": 3, " yes": 4, "no": 5, "NO": 6}

    class Spelled:
        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(input_ids=[known[text]] if text in known else [8, 9])

    words = find_answer_tokens(Spelled())
    assert (words.yes, words.no) == ((1, 2, 3, 4), (5, 6))


def test_a_prm_is_asked_its_own_question_at_every_step() -> None:
    judge = Scripted([logits({"yes": 1.0, "no": 0.0}), logits({"yes": 0.0, "no": 1.0})])
    for progress, likely in ((0.3, 1.0), (1.0, -1.0)):
        said = VlmJudge(judge, "yes_no_logits", 0.5).judge(PICTURES[:1, 0], ["a cat"], "prm", progress)
        assert said.judgeable.all() and said.score.item() == pytest.approx(1 / (1 + math.exp(-likely)), rel=1e-5)
    assert judge.asked == [QUESTIONS["prm"].replace("{prompt}", "a cat")] * 2


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.8), (20, 0.8), (5, 1.0), (50, 0.1)])
def test_what_sampling_leaves_is_what_transformers_leaves(top_k: int, top_p: float) -> None:
    told = torch.randn(64, 90, generator=torch.Generator().manual_seed(0)).mul(3).round()  # with many equals
    theirs = TopKLogitsWarper(top_k)(torch.zeros(0), told) if top_k else told
    theirs = TopPLogitsWarper(top_p)(torch.zeros(0), theirs) if top_p < 1 else theirs
    assert torch.equal(AnswerTokens((0,), (1,), top_k, top_p).warp_logits(told), theirs)
