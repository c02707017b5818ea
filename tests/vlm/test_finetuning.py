"""Judges that learn their answers: a tiny one learns a toy set, resumes exactly, and is a reward afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import on_ranks
from vlm_stubs import BUILDERS, save_checkpoints

from tastemaker.cli import EXIT_USAGE, main
from tastemaker.config.build import build_judge, make_tiny_any
from tastemaker.config.load import list_judge_recipes, load, load_any_config
from tastemaker.config.schema import JudgeRunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement, QuestionAnswerBatch
from tastemaker.data.image_io import save_image
from tastemaker.data.vqa import VqaFile
from tastemaker.rewards.vlm import VlmReward
from tastemaker.training.events import StepCompleted
from tastemaker.vlm.chat_model import load_chat_model
from tastemaker.vlm.finetuning import JudgeRun, train
from tastemaker.vlm.judge_models import ChatModelForFinetuning

# PaliGemma's processor itself asks numpy for what it will no longer do.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

OPTIM = "weight_decay: 0.0, warmup_steps: 0, lr_schedule: constant"
SLOW = ["engine={precision: fp32, device: cpu, activation_memory: keep}"]
FULL = ["tuning={type: full}", f"optim={{lr: 5e-3, {OPTIM}}}", *SLOW]
LORA = ["tuning={type: lora, rank: 8}", f"optim={{lr: 5e-3, {OPTIM}}}", *SLOW]
TUNINGS = {"full": FULL, "lora": LORA}
SLOW_FULL = [pytest.param("full", marks=pytest.mark.slow), "lora"]
SLOW_LORA = ["full", pytest.param("lora", marks=pytest.mark.slow)]
QUESTION = "<image> Is this {prompt}? Please answer yes or no without explanation."


def config(tuning: str, *more: str) -> JudgeRunConfig:
    small = ["batch_size=16", "micro_batch_size=16", "steps=60"]
    found = make_tiny_any(load_any_config("orm-onevision", [*TUNINGS[tuning], *small, *more]))
    assert isinstance(found, JudgeRunConfig)
    return found


@pytest.fixture
def reds(tmp_path: Path) -> Path:
    """Red pictures, to which yes is right, and blue ones, to which no is."""
    rows = []
    for i in range(32):
        shade = torch.rand(3, generator=torch.Generator().manual_seed(i)) * 0.3
        shade[2 * (i % 2)] += 0.7
        save_image(shade.view(1, 3, 1, 1).expand(1, 3, 8, 8), tmp_path / "reds" / f"{i}.png")
        question = QUESTION.replace("{prompt}", "red")
        rows.append({"image": f"{i}.png", "question": question, "answer": "no" if i % 2 else "yes"})
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "reds/train.jsonl").write_text("".join(lines[:24]))
    (tmp_path / "reds/held.jsonl").write_text("".join(lines[24:]))
    return tmp_path / "reds"


def metrics(run: JudgeRun) -> list[dict[str, float]]:
    return [dict(event.metrics) for event in train(run) if isinstance(event, StepCompleted)]


@pytest.mark.parametrize("tuning", SLOW_FULL)
def test_a_tiny_judge_learns_to_say_yes_and_no(tuning: str, reds: Path, tmp_path: Path) -> None:
    data = f"data={{type: vqa_file, path: {reds}/train.jsonl}}"
    held = f"validation={{every: 60, num_samples: 8, data: {{type: vqa_file, path: {reds}/held.jsonl}}}}"
    told = metrics(build_judge(config(tuning, data, held), tmp_path))
    assert told[0]["loss"] > 1
    assert told[-1]["loss"] < 0.2 * told[0]["loss"]
    assert told[-1]["validation/accuracy"] >= 0.9


@pytest.mark.parametrize("tuning", TUNINGS)
def test_a_resumed_run_is_the_run_that_never_stopped(tuning: str, tmp_path: Path) -> None:
    whole = build_judge(config(tuning, "steps=4", "ema_decay=0.9"), tmp_path / "whole")
    straight = metrics(whole)
    first = build_judge(config(tuning, "steps=4", "ema_decay=0.9", "checkpoint.every=2"), tmp_path / "first")
    events = train(first)
    before = [dict(event.metrics) for event in events if isinstance(event, StepCompleted)][:2]
    again = build_judge(config(tuning, "steps=4", "ema_decay=0.9", "checkpoint.every=2"), tmp_path / "first")
    again.resume(tmp_path / "first/checkpoints/step-000002")
    after = metrics(again)
    assert [each["loss"] for each in [*before, *after]] == [each["loss"] for each in straight]
    for key, p in whole.weights.trainable().items():
        assert torch.equal(p, again.weights.trainable()[key]), key
    for key, x in whole.weights.snapshot_tensors()["ema"].items():
        assert torch.equal(x, again.weights.snapshot_tensors()["ema"][key]), key


def test_microbatches_add_up_to_the_batch(tmp_path: Path) -> None:
    one, many = (build_judge(config("full", "steps=1", f"micro_batch_size={n}"), tmp_path / str(n)) for n in (16, 4))
    (a,), (b,) = metrics(one), metrics(many)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_checkpoints(tmp_path_factory.mktemp)


@pytest.mark.parametrize("family", BUILDERS)
def test_an_answer_is_as_likely_when_taught_as_when_asked(family: str, folders: dict[str, Path]) -> None:
    """Token by token: what is said before an answer, then the answer itself, gives the same probabilities."""
    judge = load_chat_model(str(folders[family]), Placement())
    pixels = torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    turns = [("<image> Is it a cat?",), ("<image> Is it a very large dog?",)]
    asked = tuple(
        {"turns": turn, "answer": answer} for turn, answer in zip(turns, ("yes", "no it is not"), strict=True)
    )
    pupil = ChatModelForFinetuning(judge)
    with torch.no_grad():
        first, whole = pupil(pixels, asked, first=True), pupil(pixels, asked)
        alone = torch.cat([pupil(pixels[i : i + 1], asked[i : i + 1]).rows for i in range(2)])
    likely = judge.ask(pixels, turns).logits.float().log_softmax(-1)
    words = [judge.tokenizer(text, add_special_tokens=False).input_ids for text in ("yes", "no it is not")]
    expected = torch.stack([likely[i, words[i][0]] for i in range(2)])
    torch.testing.assert_close(-first.rows, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(whole.rows, alone, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(whole.rows[1], first.rows[1], atol=1e-2)  # later tokens count


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "paligemma"])
def test_the_later_tokens_of_an_answer_are_those_it_would_write(family: str, folders: dict[str, Path]) -> None:
    """The taught probability of a greedy answer is the one it is written with."""
    judge = load_chat_model(str(folders[family]), Placement())
    pixels, turns = torch.rand(1, 3, 40, 56, generator=torch.Generator().manual_seed(1)), ("<image> What is it?",)
    said = judge.processor.encode(pixels, [judge.processor.render(turns)])
    out = judge.net.generate(
        said.input_ids,
        attention_mask=said.attention_mask,
        **said.extra_inputs,
        max_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[:, said.input_ids.shape[1] :]
    ones = torch.ones_like(ids[:, :-1])
    read = judge.processor.append_answers(
        judge.processor.encode(pixels, [judge.processor.render(turns)]), ids[:, :-1], ones
    )
    with torch.no_grad():
        logits = judge.net(**read.network_inputs, use_cache=False, logits_to_keep=ids.shape[1]).logits
    torch.testing.assert_close(logits, torch.stack(out.logits, 1), atol=2e-4, rtol=1e-3)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def scored(weights: Path) -> torch.Tensor:
    """How much of a yes an exported judge says to pictures of the right colour, and to others: [4]."""
    colors = torch.tensor([[0.9, 0.1, 0.1], [0.8, 0.2, 0.1], [0.1, 0.1, 0.9], [0.2, 0.1, 0.8]])
    pixels = colors.view(4, 1, 3, 1, 1).expand(-1, -1, -1, 8, 8)
    judge = VlmReward(weights=str(weights), question=QUESTION).load(Placement())
    return judge.score(pixels, ["red"] * 4, [{}] * 4)


@pytest.mark.parametrize("tuning", SLOW_LORA)
def test_what_is_exported_is_a_reward(tuning: str, reds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = f"data={{type: vqa_file, path: {reds}/train.jsonl}}"
    asked = [
        "train",
        "orm-onevision",
        *TUNINGS[tuning],
        data,
        "batch_size=16",
        "micro_batch_size=16",
        "steps=60",
        "--tiny",
    ]
    assert run(*asked) == 0
    assert run("export", "runs/orm-onevision", "--out", "orm") == 0
    score = scored(tmp_path / "orm")
    assert score[:2].min() > 0.7 and score[2:].max() < 0.3
    assert run("export", "runs/orm-onevision", "--out", "orm") == EXIT_USAGE  # it is there


@pytest.mark.parametrize("tuning", SLOW_FULL)
def test_paligemma_learns_answers_and_is_a_reward(
    tuning: str, folders: dict[str, Path], reds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From image, question and answer in a JSONL, by the recipe; what is exported is asked, and judges."""
    monkeypatch.chdir(tmp_path)
    data = f"data={{type: vqa_file, path: {reds}/train.jsonl}}"
    model, short = f"judge.weights={folders['paligemma']}", ["batch_size=16", "micro_batch_size=16", "steps=40"]
    assert run("train", "paligemma-finetune", *TUNINGS[tuning], data, model, *short, "name=told") == 0
    lines = [json.loads(line) for line in Path("runs/told/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert run("export", "runs/told", "--out", "paligemma") == 0
    score = scored(tmp_path / "paligemma")
    assert score[:2].min() > 0.6 and score[2:].max() < 0.4


def test_a_head_that_is_the_table_of_words_too_is_not_adapted(folders: dict[str, Path]) -> None:
    tied, own = (
        ChatModelForFinetuning(load_chat_model(str(folders[family]), Placement())) for family in ("paligemma", "llava")
    )
    assert "net.lm_head" in own.lora_targets and "net.lm_head" not in tied.lora_targets
    linear = [name for name, module in tied.named_modules() if isinstance(module, torch.nn.Linear)]
    assert set(linear) - set(tied.lora_targets) == {"net.lm_head"}


def lessons(folder: Path, rows: Any) -> Path:
    for i in range(3):
        save_image(torch.full((1, 3, 8, 8), i / 3), folder / f"{i}.png")
    (folder / "orm.json").write_text(json.dumps(rows))
    return folder / "orm.json"


def test_every_answer_of_a_conversation_is_a_row(tmp_path: Path) -> None:
    said = [{"from": who, "value": what} for who, what in (("human", "<image> A?"), ("gpt", "yes"))]
    more = [{"from": who, "value": what} for who, what in (("human", "B?"), ("gpt", "no"))]
    path = lessons(tmp_path, [{"image": "0.png", "conversations": [*said, *more]}])
    batch = VqaFile(path).load(0).batch(0, 2, 0, 1)
    assert isinstance(batch, QuestionAnswerBatch)
    assert {(each["turns"], each["answer"]) for each in batch.conversations} == {
        (("<image> A?",), "yes"),
        (("<image> A?", "yes", "B?"), "no"),
    }
    (tmp_path / "plain.jsonl").write_text('{"image": "1.png", "question": "What?", "answer": "a cat"}\n')
    assert VqaFile(tmp_path / "plain.jsonl").load(0).examples[0].answer == "a cat"


def test_pictures_of_many_sizes_are_learned_from_whole(tmp_path: Path) -> None:
    """Places that answers name are still where they were, as PaliGemma's own processor would show them."""
    for i, (height, width) in enumerate(((30, 10), (10, 40))):
        pixels = torch.zeros(1, 3, height, width)
        pixels[..., : height // 5, : width // 5] = 1.0
        save_image(pixels, tmp_path / f"{i}.png")
    rows = [{"image": f"{i}.png", "question": "detect white", "answer": "<loc0000>"} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = VqaFile(tmp_path / "rows.jsonl", 20, "stretch").load(0).batch(0, 2, 0, 1).pixels
    corner = torch.zeros(2, 3, 20, 20)
    corner[..., :4, :4] = 1.0
    assert whole.shape == corner.shape and (whole - corner).abs().mean() < 0.01
    assert not VqaFile(tmp_path / "rows.jsonl", 20).load(0).batch(0, 2, 0, 1).pixels.any()


def test_bad_lessons_are_told_in_a_sentence(tmp_path: Path) -> None:
    for rows, told in (
        ([{"image": "9.png", "conversations": []}], r"row 1: there is no file .*9\.png"),
        ([{"image": "0.png", "conversations": [{"from": "gpt", "value": "yes"}]}], "human and gpt"),
        ([{"image": "0.png", "question": "What?"}], "'answer' is missing"),
        ([], "expected a list of objects"),
    ):
        with pytest.raises(ConfigError, match=told):
            VqaFile(lessons(tmp_path, rows)).load(0)
    with pytest.raises(ConfigError, match=r"toy_pairs.*preference pairs"):
        build_judge(config("full", "data={type: toy_pairs}"), tmp_path)


def test_a_recipe_trains_one_thing() -> None:
    with pytest.raises(ConfigError, match="found both 'objective' and 'judge'"):
        load_any_config("orm-onevision", ["objective={type: grpo}"])
    with pytest.raises(ConfigError, match="trains a judge"):
        load("orm-onevision")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
@pytest.mark.parametrize("tuning", TUNINGS)
def test_two_ranks_learn_as_one(tuning: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["train", "orm-onevision", *TUNINGS[tuning], "batch_size=8", "micro_batch_size=4", "steps=3", "--tiny"]
    held = "validation={every: 1, num_samples: 8, data: {type: toy_vqa, start_index: 1000}}"
    assert run(*asked, held, "name=one") == 0
    on_ranks(2, *asked, held, "name=two", f"engine.strategy={strategy}")
    one, two = (
        [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for name in ("loss", "grad_norm", "validation/loss"):
        there = [[row[name] for row in rows if name in row] for rows in (one, two)]
        assert there[0] and there[1] == pytest.approx(there[0], rel=2e-3), name
    assert run("export", "runs/two", "--out", "judge") == 0
    assert scored(tmp_path / "judge").isfinite().all()


@pytest.mark.parametrize("recipe", list_judge_recipes())
def test_every_recipe_of_a_judge_trains(recipe: str, tmp_path: Path) -> None:
    found = make_tiny_any(load_any_config(recipe, ["steps=2", "batch_size=4", "engine={device: cpu, precision: fp32}"]))
    assert isinstance(found, JudgeRunConfig)
    assert len(metrics(build_judge(found, tmp_path))) == 2
