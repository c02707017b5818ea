"""VLM judges: questions, answers and verdicts match recordings of the published judges."""

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

RECORDING = json.loads((Path(__file__).parents[1] / "fixtures/showo/reward_flow.json").read_text(encoding="utf-8"))
CASES = RECORDING["score_cases"]
VOCABULARY = ["yes", "Yes", "no", "No", "maybe", *(f"word {k}" for k in range(40))]
ANSWER_TOKENS = AnswerTokens(yes=(0, 1), no=(2, 3))
MODES: list[AnswerMode] = ["yes_no_logits", "full_softmax", "upstream_generate"]
IMAGES = torch.rand(5, 1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a cat", "two dogs on a very long bench " * 8, "", "a {prompt} <image><|im_end|>\n", "a red car"]


def logits(values: dict[str, float]) -> Tensor:
    """Logits of one answer, -20 for all words that are not given: [1, V]."""
    out = torch.full((1, len(VOCABULARY)), -20.0)
    for word, value in values.items():
        out[0, VOCABULARY.index(word)] = value
    return out


@dataclass
class ScriptedModel(YesNoModel):
    """A model that returns scripted answers in order and records the questions."""

    queue: list[Tensor]
    answer_tokens: AnswerTokens = ANSWER_TOKENS
    questions: list[str] = field(default_factory=list)

    def strip_special_tokens(self, prompt: str) -> str:
        return prompt

    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep_cache: bool = False) -> ChatOutput:
        self.questions += [turns[-1] for turns in conversations]
        rows = torch.cat([self.queue.pop(0) for _ in conversations])
        return ChatOutput(rows, pixels, tuple(conversations), torch.ones(len(rows), 1))

    def ask_followup(self, output: ChatOutput, rows: Tensor, answer: str, question: str) -> Tensor:
        assert answer == "yes"
        return self.ask(output.pixels[rows], [(question,)] * len(rows)).logits


def logits_with_token(token: str, values: dict[str, float]) -> Tensor:
    out = logits(values)
    out[0, VOCABULARY.index(token)] += 1e-5  # makes this token the argmax among equal logits
    return out


def test_rendered_conversations_match_the_recording() -> None:
    processor, prompt = OneVisionProcessor(None, None), "a photo of a red dog"
    clarity = CLARITY.replace("{prompt}", prompt)
    assert processor.render((QUESTIONS["orm"].replace("{prompt}", prompt),)) == RECORDING["orm_prompt"]
    assert processor.render((clarity,)) == RECORDING["clarity_prompt"]
    assert processor.render((clarity, "yes", POTENTIAL)) == RECORDING["potential_prompt"]


@pytest.mark.parametrize("case", [case for case in CASES if case["fn"] == "orm"], ids=str)
def test_outcome_scores_match_the_recording(case: dict[str, Any]) -> None:
    token = torch.tensor([VOCABULARY.index(case["token"])])
    answer = parse_answer(logits(case["logits"]), ANSWER_TOKENS, "upstream_generate", 0.5, token)
    assert answer.is_yes.item() is case["ret"][0]
    assert answer.score.item() == pytest.approx(case["ret"][1], abs=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if c["fn"] == "parm" and not c["clear_in"]], ids=str)
def test_preview_verdicts_match_the_recording(case: dict[str, Any]) -> None:
    judge = ScriptedModel([logits_with_token(token, values) for token, values in case["queue"]])
    verdict = VlmJudge(judge, "upstream_generate", 0.5).judge_preview(IMAGES[:1, 0], ["a cat"])
    promising, cost, clear = case["ret"]
    assert (verdict.promising.item(), verdict.judgeable.item()) == (promising, clear)
    assert 1 - verdict.score.item() == pytest.approx(cost, abs=1e-5)
    assert len(judge.questions) == case["vlm_calls"]


def test_capitalized_yes_counts_except_in_upstream_generate() -> None:
    mixed_logits = logits({"yes": -3.0, "Yes": 4.0, "no": 0.0, "maybe": 3.0})
    yes_no, full_softmax, published = (
        parse_answer(mixed_logits, ANSWER_TOKENS, mode, 0.5).score.item() for mode in MODES
    )
    yes, no, other = math.exp(-3) + math.exp(4), 1.0, math.exp(3)
    assert yes_no == pytest.approx(yes / (yes + no), abs=1e-6)
    assert full_softmax == pytest.approx(yes / (yes + no + other), abs=1e-6)
    assert published == pytest.approx(math.exp(-3) / (yes + no + other), abs=1e-6)


def test_sampling_settings_change_only_the_upstream_generate_score() -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    random_logits = torch.randn(6, 45, generator=torch.Generator().manual_seed(1)) * 3
    truncated = replace(ANSWER_TOKENS, top_k=7, top_p=0.8)
    expected = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(7)(None, random_logits))
    torch.testing.assert_close(truncated.warp_logits(random_logits).softmax(-1), expected.softmax(-1))
    for mode in MODES[:2]:
        assert torch.equal(
            parse_answer(random_logits, truncated, mode, 0.5).score,
            parse_answer(random_logits, ANSWER_TOKENS, mode, 0.5).score,
        )
    confident = logits({"yes": 3.0, "no": 1.0})
    assert parse_answer(confident, truncated, "upstream_generate", 0.5).score.item() == 1.0  # top-p leaves one word


def recorded_search(name: str) -> Any:
    return next(each for each in RECORDING["flows"] if each["name"] == name)


def answer_logits(yes: float) -> Tensor:
    return logits({"yes": math.log(yes), "no": math.log(1 - yes)})


@dataclass
class ScriptedSearchModel(ScriptedModel):
    """A model that replays a recorded search: answers to the previews of each candidate, and to the final images."""

    previews: dict[int, list[tuple[bool, float, bool]]] = field(default_factory=dict)
    unclear: list[int] = field(default_factory=list)

    def ask(self, pixels: Tensor, conversations: Sequence[Conversation], keep_cache: bool = False) -> ChatOutput:
        if not keep_cache:
            return ScriptedModel.ask(self, pixels, conversations)
        assert len(conversations) == len(self.unclear)
        verdicts = [self.previews[each].pop(0) for each in self.unclear]
        self.unclear = [each for each, verdict in zip(self.unclear, verdicts, strict=True) if not verdict[2]]
        self.followups = [answer_logits(1 - cost) for _, cost, clear in verdicts if clear]
        rows = torch.cat([answer_logits(0.9 if clear else 0.1) for _, _, clear in verdicts])
        return ChatOutput(rows, pixels, tuple(conversations), torch.ones(len(rows), 1))

    def ask_followup(self, output: ChatOutput, rows: Tensor, answer: str, question: str) -> Tensor:
        return torch.cat(self.followups)


def preview_verdicts(name: str) -> dict[int, list[tuple[bool, float, bool]]]:
    """The recorded verdicts of each candidate: up to the first clear preview, or three."""
    verdicts: dict[int, list[tuple[bool, float, bool]]] = {}
    remaining, number = list(recorded_search(name)["parm"]), 0
    while remaining:
        previews = [remaining.pop(0)]
        while not previews[-1][2] and len(previews) < 3:
            previews.append(remaining.pop(0))
        verdicts[number], number = previews, number + 1
    return verdicts


def picked_candidate(search: Search, judge: Verifier, count: int) -> int:
    """The index of the candidate that a search returns."""
    policy, batch, rng = toys.policy("masked"), PromptBatch(("a red",), ({},)), Randomness(3, 0, torch.arange(1))
    result = search.run(policy, judge, batch, rng)
    cond = policy.embed(batch.prompts, batch.metadata).repeat(count)
    finals = start_candidates(policy, cond, rng.repeat(count)).finish().final
    return next(k for k in range(count) if torch.equal(finals[k], result.x[0]))


def scorer(model: ScriptedModel) -> VlmScorer:
    return VlmScorer(VlmReward(answer_mode="upstream_generate"), VlmJudge(model, "upstream_generate", 0.5))


def test_best_of_n_picks_the_recorded_candidate() -> None:
    recording = recorded_search("argmax")
    judge = ScriptedModel([answer_logits(score) for _, score in recording["orm"]])
    assert [picked_candidate(BestOfN(recording["search"]), scorer(judge), recording["search"])] == recording["picked"]
    assert len(judge.questions) == len(recording["calls"])


@pytest.mark.parametrize(("name", "finals"), [("two_survive", (0.4, 0.8, 0.8)), ("never_clear", (0.5, 0.5, 0.5))])
def test_parm_search_picks_the_recorded_candidate(name: str, finals: tuple[float, ...]) -> None:
    recording = recorded_search(name)
    count = recording["search"]
    judge = ScriptedSearchModel(
        [answer_logits(score) for score in finals], previews=preview_verdicts(name), unclear=list(range(count))
    )
    assert [picked_candidate(PARMSearch(count), scorer(judge), count)] == recording["picked"]


def test_explain_returns_one_reason_per_sample() -> None:
    judge = VlmReward(batch_size=2).tiny().load(Placement())
    reasons = judge.explain(IMAGES, PROMPTS, [{}] * 5)
    assert len(reasons) == 5 and all(isinstance(reason, str) for reason in reasons)
    assert reasons == judge.explain(IMAGES, PROMPTS, [{}] * 5)
    with pytest.raises(ValueError, match=r"ScriptedModel.*TM707"):
        scorer(ScriptedModel([])).explain(IMAGES, PROMPTS, [{}] * 5)


@pytest.mark.parametrize("mode", MODES)
def test_judge_that_answers_neither_yes_nor_no_warns(mode: AnswerMode) -> None:
    judge = VlmJudge(ScriptedModel([logits({"maybe": 3.0}), logits({"yes": 3.0})]), mode, 0.5, "my/judge")
    with pytest.warns(UserWarning, match=r"'my/judge'.*yes.*no"):
        verdict = judge.judge_finished(IMAGES[:2, 0], ["a cat", "a dog"], "orm")
    assert verdict.score.isfinite().all() and verdict.score[0] < verdict.score[1]


def test_judge_that_answers_no_does_not_warn() -> None:
    judge = VlmJudge(ScriptedModel([logits({"No": 3.0})]), "yes_no_logits", 0.5, "my/judge")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judge.judge_finished(IMAGES[:1, 0], ["a cat"], "orm")


def test_top_k_zero_keeps_every_token() -> None:
    values = logits({"yes": 2.0, "no": 1.0, "maybe": 0.5})
    expected = values.softmax(-1)[0, 0]
    answer = parse_answer(values, replace(ANSWER_TOKENS, top_k=0), "upstream_generate", 0.5)
    torch.testing.assert_close(answer.yes[0], expected)


def test_capitalized_words_are_answer_tokens() -> None:
    token_ids = {"yes": 1, "Yes": 2, "YES": 3, " yes": 4, "no": 5, "NO": 6}

    class StubTokenizer:
        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(input_ids=[token_ids[text]] if text in token_ids else [8, 9])

    tokens = find_answer_tokens(StubTokenizer())
    assert (tokens.yes, tokens.no) == ((1, 2, 3, 4), (5, 6))


def test_prm_question_is_used_at_every_step() -> None:
    judge = ScriptedModel([logits({"yes": 1.0, "no": 0.0}), logits({"yes": 0.0, "no": 1.0})])
    for progress, log_odds in ((0.3, 1.0), (1.0, -1.0)):
        verdict = VlmJudge(judge, "yes_no_logits", 0.5).judge(IMAGES[:1, 0], ["a cat"], "prm", progress)
        assert verdict.judgeable.all() and verdict.score.item() == pytest.approx(
            1 / (1 + math.exp(-log_odds)), rel=1e-5
        )
    assert judge.questions == [QUESTIONS["prm"].replace("{prompt}", "a cat")] * 2


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.8), (20, 0.8), (5, 1.0), (50, 0.1)])
def test_warped_logits_match_transformers(top_k: int, top_p: float) -> None:
    values = torch.randn(64, 90, generator=torch.Generator().manual_seed(0)).mul(3).round()  # with many ties
    expected = TopKLogitsWarper(top_k)(torch.zeros(0), values) if top_k else values
    expected = TopPLogitsWarper(top_p)(torch.zeros(0), expected) if top_p < 1 else expected
    assert torch.equal(AnswerTokens((0,), (1,), top_k, top_p).warp_logits(values), expected)
