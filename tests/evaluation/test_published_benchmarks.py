"""Benchmarks with published prompt files: reading them, and the rules of their scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmark_samples import write_benchmark
from torch import Tensor

from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, PromptBatch
from tastemaker.evaluation.benchmark_files import find_samples, load_published_benchmark, split_noun_phrases
from tastemaker.evaluation.benchmark_run import parse_judge
from tastemaker.evaluation.benchmarks import Benchmark
from tastemaker.evaluation.evaluate import REPORT, SCORES, evaluate, read_jsonl
from tastemaker.evaluation.question_scorers import (
    CompBenchScorer,
    DpgScorer,
    GenEval2Scorer,
    OcrBenchmarkScorer,
    WiseScorer,
    parse_wise_score,
    require_parents,
)
from tastemaker.evaluation.video_quality import (
    DIMENSIONS,
    load_subject_encoder,
    load_video_quality_scorer,
    quality_interval,
)
from tastemaker.playground import signs
from tastemaker.rewards.musiq import MusiqNet, MusiqReward, MusiqScorer
from tastemaker.rewards.ocr import OcrEngine
from tastemaker.search.base import SearchCost
from tastemaker.vlm.blip_vqa import load_blip_vqa
from tastemaker.vlm.question_judge import (
    NO,
    YES,
    BlipQuestionJudge,
    ChatQuestionJudge,
    JudgeQuestion,
    QuestionJudge,
    Spellings,
    load_question_judge,
)


class ScriptedJudge(QuestionJudge):
    """Answers by a function of the question, and remembers what it was asked."""

    def __init__(self, yes: Callable[[str], float], texts: Sequence[str] = ()) -> None:
        super().__init__("scripted", batch_size=2)
        self.yes, self.replies = yes, list(texts)
        self.asked: list[tuple[str, tuple[Spellings, ...]]] = []

    def probabilities(
        self, pixels: Tensor, texts: Sequence[str], answers: Sequence[tuple[Spellings, ...]]
    ) -> list[tuple[float, ...]]:
        assert len(pixels) == len(texts) <= self.batch_size
        self.asked += zip(texts, answers, strict=True)
        pairs = [(self.yes(text), 1 - self.yes(text)) for text in texts]
        return [pair[: len(each)] for pair, each in zip(pairs, answers, strict=True)]

    def texts(self, pixels: Tensor, texts: Sequence[str], max_new_tokens: int) -> list[str]:
        self.asked += [(text, ()) for text in texts]
        return [self.replies.pop(0) for _ in texts]


def load(name: str, folder: Path, count: int | None = None) -> Benchmark:
    return load_published_benchmark(name, None, count, write_benchmark(name, folder))


def images_of(benchmark: Benchmark) -> Tensor:
    return torch.rand(len(benchmark), 1, 3, 8, 8)


def gray(batch: PromptBatch, indices: Tensor) -> tuple[Tensor, SearchCost]:
    return torch.full((len(batch), 1, 3, 8, 8), 0.5), SearchCost(0)


def test_geneval2_averages_probabilities_of_the_expected_answers(tmp_path: Path) -> None:
    benchmark = load("geneval2", tmp_path / "file")
    judge = ScriptedJudge(lambda text: {"How": 0.25, "Are": 1.0}.get(text.split()[0], 0.5))
    list(evaluate(benchmark, gray, GenEval2Scorer(judge), tmp_path / "out"))
    first, second = read_jsonl(tmp_path / "out" / SCORES)
    assert first["am"] == pytest.approx((0.5 + 0.25 + 1) / 3)
    assert first["gm"] == pytest.approx((0.5 * 0.25 * 1) ** (1 / 3)) and second["gm"] == pytest.approx(0.5)
    report = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    assert report["scores"]["gm"]["overall"]["mean"] == pytest.approx((first["gm"] + 0.5) / 2)
    assert {k: v["mean"] for k, v in report["parts"]["skill"].items()} == {"object": 0.5, "count": 0.25, "attribute": 1}
    assert report["headline"] == "gm" and report["judge"] == "scripted"
    asked = dict(judge.asked)
    assert asked["How many dogs are there? Answer in one word."] == (("two", "Two", "2", " two", " Two", " 2"),)
    assert asked["Is there a cat? Answer in one word."] == (YES,)


def test_geneval2_geometric_mean_is_zero_if_one_answer_is_impossible(tmp_path: Path) -> None:
    benchmark = load("geneval2", tmp_path)
    rows = GenEval2Scorer(ScriptedJudge(lambda text: float("many" not in text))).score(
        images_of(benchmark), benchmark.prompts, benchmark.metadata
    )
    assert [row["gm"] for row in rows] == [0, 1]


def test_dpg_questions_need_their_parents(tmp_path: Path) -> None:
    benchmark = load("dpg", tmp_path)
    judge = ScriptedJudge(lambda text: 0.2 if "Is the mug red" in text else 0.9)
    rows = DpgScorer(judge).score(images_of(benchmark), benchmark.prompts, benchmark.metadata)
    assert [row["dpg"] for row in rows] == [0.5, 1.0] and benchmark.samples_per_prompt == 4
    assert len(judge.asked) == 5  # the first line is asked too
    last = rows[0]["answers"][3]
    assert (last["answer"], last["score"], last["part"], last["detail"]) == ("yes", 0, "relation", "relation - spatial")
    assert require_parents({1: 0.0, 2: 1.0, 3: 1.0}, {1: [], 2: [1], 3: [2]}) == {1: 0, 2: 0, 3: 0}


def test_dpg_file_with_an_unknown_parent_is_refused(tmp_path: Path) -> None:
    file = write_benchmark("dpg", tmp_path)
    file.write_text(file.read_text("utf-8").replace('"2,3"', "9"), encoding="utf-8")
    with pytest.raises(ConfigError, match="TM2164"):
        load_published_benchmark("dpg", None, None, file)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 1", 1),
        ("**Score:** 0", 0),
        ("**Score: 1**.", 1),
        ("It shows mooncakes.\nscore : 1", 1),
        ("1", 1),
        ("Fine.\n 0 \n", 0),
        ("Score: 0\nor rather\n**Score: 1**", 1),
        ("Score: 10", None),
        ("Score: -1", None),
        ("-1", None),
        ("Score: 0.5", None),
        ("Score: 1/2", None),
        ("It has 1 cake", None),
        ("", None),
    ],
)
def test_wise_scores_are_parsed(text: str, score: int | None) -> None:
    assert parse_wise_score(text) == score


def test_wise_weighs_categories_and_counts_unparsed_answers_as_wrong(tmp_path: Path) -> None:
    benchmark = load("wise", tmp_path / "file")
    assert benchmark.tags == ("culture", "time", "chemistry")
    judge = ScriptedJudge(lambda text: 0.0, ["Score: 1", "I cannot tell", "Score: 0"])
    list(evaluate(benchmark, gray, WiseScorer(judge), tmp_path / "out"))
    report = json.loads((tmp_path / "out" / REPORT).read_text("utf-8"))
    assert report["scores"]["correct"]["overall"]["mean"] == pytest.approx(0.4 / 0.64)  # of the categories at hand
    assert report["unparsed"] == 1 and report["missing_categories"] == ["space", "biology", "physics"]
    assert report["scores"]["parsed"]["time"]["mean"] == 0


def test_wise_asks_again_where_an_answer_cannot_be_parsed(tmp_path: Path) -> None:
    benchmark = load("wise", tmp_path)
    judge = ScriptedJudge(lambda text: 0.0, ["Score: 1", "?", "Score: 0", "?", "Score: 1"])
    judge.deterministic = False
    rows = WiseScorer(judge).score(images_of(benchmark), benchmark.prompts, benchmark.metadata)
    assert [row["correct"] for row in rows] == [1, 1, 0] and len(judge.asked) == 5


def test_wise_template_is_filled_once(tmp_path: Path) -> None:
    template = tmp_path / "question.txt"
    template.write_text("{prompt}|{explanation}|{other}", encoding="utf-8")
    judge = ScriptedJudge(lambda text: 0.0, ["1"])
    metadata = {"prompt": "a {explanation}", "explanation": "secret {prompt}"}
    WiseScorer(judge, str(template)).score(torch.rand(1, 1, 3, 8, 8), ["a"], [metadata])
    assert judge.asked[0][0] == "a {explanation}|secret {prompt}|{other}"
    template.write_text("{prompt}", encoding="utf-8")
    with pytest.raises(ConfigError, match="TM2171"):
        WiseScorer(judge, str(template))


def test_compbench_multiplies_the_probabilities_of_its_phrases(tmp_path: Path) -> None:
    benchmark = load("t2i-compbench", tmp_path)
    assert benchmark.prompts == ("a green bench and a blue bowl", "rubber boots")  # neither training nor positions
    assert benchmark.tags == ("color", "texture")
    judge = ScriptedJudge(lambda text: 0.25 if "bowl" in text else 0.8)
    rows = CompBenchScorer(judge).score(images_of(benchmark), benchmark.prompts, benchmark.metadata)
    assert [row["vqa"] for row in rows] == [pytest.approx(0.8 * 0.25), pytest.approx(0.8)]
    judge.short_questions = True  # as BLIP is asked
    CompBenchScorer(judge).score(images_of(benchmark), benchmark.prompts, benchmark.metadata)
    assert [text for text, _ in judge.asked[3:]] == ["a green bench?", "a blue bowl?", "rubber boots?"]


@pytest.mark.parametrize(
    ("prompt", "phrases"),
    [
        ("a red apple and yellow bananas", ["a red apple", "yellow bananas"]),
        ("A bathroom with white tile and a beige toilet.", ["A bathroom", "white tile", "a beige toilet"]),
        (
            "The fluffy rug and leather ottoman rest on the wooden floor",
            ["The fluffy rug", "leather ottoman", "the wooden floor"],
        ),
    ],
)
def test_plain_prompts_are_split_into_noun_phrases(prompt: str, phrases: list[str]) -> None:
    assert split_noun_phrases(prompt) == phrases


def test_file_of_a_category_without_questions_is_refused(tmp_path: Path) -> None:
    folder = write_benchmark("t2i-compbench", tmp_path)
    with pytest.raises(ConfigError, match="TM2167"):
        load_published_benchmark("t2i-compbench", None, None, folder / "spatial_val.txt")


def test_missing_files_and_unused_judges_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TM2154"):
        load_published_benchmark("geneval2", None, None, None)
    with pytest.raises(ConfigError, match="TM2155"):
        load_published_benchmark("dpg", None, None, tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="TM2178"):
        parse_judge("some/model", "playeval")
    assert parse_judge("{weights: some/model, batch_size: 2}", "dpg").batch_size == 2


def test_chat_judge_sums_the_softmax_over_single_token_spellings() -> None:
    judge = load_question_judge("tiny", Placement(), batch_size=2)
    images = torch.rand(2, 3, 30, 30, generator=torch.Generator().manual_seed(0))
    answers = (("yes", " Yes", "yesterday"), ("2", "two"))
    questions = [JudgeQuestion(i, f"question {k}?", answers) for k in range(3) for i in (1, 0)]
    probabilities = judge.ask_probabilities(images, questions)
    assert isinstance(judge, ChatQuestionJudge)
    chat = judge.chat
    logits = chat.ask(images[[0]], [("<image>\nquestion 2?",)]).logits[0].softmax(-1)
    yes, spaced, two = (chat.tokenizer(text, add_special_tokens=False).input_ids[0] for text in ("yes", " Yes", "2"))
    expected = (float(logits[yes] + logits[spaced]), float(logits[two]))
    assert probabilities[5] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ConfigError, match="TM2150"):
        judge.ask_probabilities(images, [JudgeQuestion(0, "which?", (("zebra",),))])


def test_blip_judge_is_independent_of_its_batch_and_answers_its_likeliest_token() -> None:
    judge = load_question_judge("tiny", Placement(), blip=True)
    images = torch.rand(2, 3, 40, 50, generator=torch.Generator().manual_seed(0))
    questions = [JudgeQuestion(0, "dog?", (YES, NO)), JudgeQuestion(1, "a very big dog?", (YES, NO))]
    together = judge.ask_probabilities(images, questions)
    assert together[0] == pytest.approx(judge.ask_probabilities(images, questions[:1])[0], rel=1e-4)
    assert isinstance(judge, BlipQuestionJudge)
    vqa = judge.vqa
    first = vqa.first_logits(images, ["dog?", "cat?"]).argmax(-1)
    likeliest = [vqa.tokenizer.decode([token]) for token in first.tolist()]
    assert vqa.answer(images, ["dog?", "cat?"], 1) == likeliest


def test_blip_and_dino_are_loaded_from_folders(tmp_path: Path) -> None:
    tiny = load_blip_vqa("tiny", Placement())
    tiny.net.save_pretrained(tmp_path / "blip")
    tiny.tokenizer.save_pretrained(tmp_path / "blip")
    judge = load_question_judge(str(tmp_path / "blip"), Placement())
    images = torch.rand(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    same = replace(tiny, image_size=480)
    assert isinstance(judge, BlipQuestionJudge) and judge.name == str(tmp_path / "blip")
    torch.testing.assert_close(judge.vqa.first_logits(images, ["dog?"]), same.first_logits(images, ["dog?"]))
    encoder = load_subject_encoder("tiny", Placement())
    encoder.net.save_pretrained(tmp_path / "dino")
    loaded = load_subject_encoder(str(tmp_path / "dino"), Placement())
    wide = torch.rand(2, 3, 30, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(replace(loaded, size=32)(wide), encoder(wide))


def test_video_quality_tells_still_moving_and_flickering_clips_apart(tmp_path: Path) -> None:
    benchmark = load("vbench-lite", tmp_path)
    assert len(benchmark) == 3 and benchmark.video  # without the prompt of another dimension
    texture = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0)).repeat_interleave(4, 2)[:, :, :64]
    still = texture[..., :64].expand(8, 3, 64, 64)
    moving = torch.stack([texture[0, :, :, 3 * k : 3 * k + 64] for k in range(8)])
    flashing = still * torch.tensor([1.0, 0.5] * 4)[:, None, None, None]
    scorer = load_video_quality_scorer("", "", Placement(), tiny=True)
    everything = {"dimensions": list(DIMENSIONS)}
    rows = scorer.score(torch.stack([still, moving, flashing]), ["", "", ""], [everything] * 3)
    assert [row["dynamic_degree"] for row in rows[:2]] == [0, 1]
    assert rows[0]["subject_consistency"] == pytest.approx(1) and rows[0]["temporal_flickering"] == 1
    assert rows[2]["motion_smoothness"] < rows[1]["motion_smoothness"] <= rows[0]["motion_smoothness"] + 1e-6
    assert rows[2]["temporal_flickering"] < 0.9
    partial = scorer.score(moving[None], [""], [benchmark.metadata[1]])[0]
    assert partial["imaging_quality"] is None and partial["temporal_flickering"] is not None
    with pytest.raises(ConfigError, match="TM2172"):
        scorer.score(moving[None, :2], [""], [everything])


def test_imaging_quality_is_musiq_with_a_file_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = load_video_quality_scorer("", "copies/musiq_spaq_ckpt-358bb6af.pth", Placement(), tiny=True)
    clip = torch.rand(3, 3, 20, 600, generator=torch.Generator().manual_seed(0))
    (row,) = scorer.score(clip[None], [""], [{"dimensions": ["imaging_quality"]}])
    small = F.interpolate(clip, (17, 512), mode="bilinear", antialias=False)
    expected = MusiqReward("tiny").load(Placement()).score(small[:, None], [""] * 3, [{}] * 3).mean() / 100
    assert row["imaging_quality"] == pytest.approx(float(expected), rel=1e-4)
    ava = MusiqScorer(MusiqNet(10, width=32, mlp_width=48, depth=1, heads=2))
    monkeypatch.setattr(MusiqReward, "load", lambda self, placement: ava)
    with pytest.raises(ConfigError, match="TM2061"):
        load_video_quality_scorer("", "musiq_ava_ckpt-e8d3f067.pth", Placement(), tiny=True)


def test_quality_is_the_weighted_mean_of_normalized_dimensions() -> None:
    empty = dict.fromkeys(DIMENSIONS)
    rows = [
        {"index": 0, **empty, "subject_consistency": 0.5731, "dynamic_degree": 1.0},
        {"index": 1, **empty, "subject_consistency": 1.0},
        {"index": 2, **empty, "dynamic_degree": 0.0},
    ]
    subject, dynamic = (0.5 + 1) / 2, 0.5
    interval = quality_interval(rows)
    assert interval["mean"] == pytest.approx((subject + 0.5 * dynamic) / 1.5)
    assert interval["low"] < interval["mean"] < interval["high"] and not math.isnan(interval["low"])


def test_ocr_reads_rendered_words(tmp_path: Path) -> None:
    words = [signs.WORDS[i] for i in (3, 7)]
    file = tmp_path / "test.txt"
    file.write_text(f'a sign that says "{words[0]}"\na sign that says "{words[1]} {words[0]}"\n', encoding="utf-8")
    benchmark = load_published_benchmark("ocr", None, 1, file)
    assert benchmark.tags == ("1 word", "2 words")
    pixels = signs.SignPainter().paint(torch.tensor([3, 3]), Randomness(0, 0, torch.arange(2)))
    rows = OcrBenchmarkScorer(OcrEngine()).score(pixels, benchmark.prompts, benchmark.metadata)
    assert (rows[0]["exact"], rows[0]["words"], rows[0]["similarity"]) == (1, 1, 1)
    assert rows[1]["exact"] == 0 and rows[1]["words"] == 0.5 and 0 < rows[1]["similarity"] < 1


def test_existing_samples_are_found_by_their_published_names(tmp_path: Path) -> None:
    benchmark = load("dpg", tmp_path / "file", count=2)
    for name in ("a1_0.png", "a1_1.png", "00001/0000.png", "b2_1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = [str(file.relative_to(tmp_path)) for file in find_samples(benchmark, tmp_path)]
    assert files == ["a1_0.png", "a1_1.png", "00001/0000.png", "b2_1.jpg"]
    (tmp_path / "a1_1.png").unlink()
    with pytest.raises(ConfigError, match="TM2174"):
        find_samples(benchmark, tmp_path)
