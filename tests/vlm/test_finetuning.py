"""Fine-tuning of VLM judges: learning a toy set, exact resume, export as a reward, and data files."""

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

# PaliGemma's processor calls a deprecated numpy interface.
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
    overrides = ["batch_size=16", "micro_batch_size=16", "steps=60"]
    run_config = make_tiny_any(load_any_config("orm-onevision", [*TUNINGS[tuning], *overrides, *more]))
    assert isinstance(run_config, JudgeRunConfig)
    return run_config


@pytest.fixture
def red_or_blue(tmp_path: Path) -> Path:
    """A data set of red images with the answer yes and blue images with the answer no."""
    rows = []
    for i in range(32):
        color = torch.rand(3, generator=torch.Generator().manual_seed(i)) * 0.3
        color[2 * (i % 2)] += 0.7
        save_image(color.view(1, 3, 1, 1).expand(1, 3, 8, 8), tmp_path / "colors" / f"{i}.png")
        question = QUESTION.replace("{prompt}", "red")
        rows.append({"image": f"{i}.png", "question": question, "answer": "no" if i % 2 else "yes"})
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "colors/train.jsonl").write_text("".join(lines[:24]))
    (tmp_path / "colors/held.jsonl").write_text("".join(lines[24:]))
    return tmp_path / "colors"


def metrics(run: JudgeRun) -> list[dict[str, float]]:
    return [dict(event.metrics) for event in train(run) if isinstance(event, StepCompleted)]


@pytest.mark.parametrize("tuning", SLOW_FULL)
def test_tiny_judge_learns_yes_and_no(tuning: str, red_or_blue: Path, tmp_path: Path) -> None:
    data = f"data={{type: vqa_file, path: {red_or_blue}/train.jsonl}}"
    validation = f"validation={{every: 60, num_samples: 8, data: {{type: vqa_file, path: {red_or_blue}/held.jsonl}}}}"
    history = metrics(build_judge(config(tuning, data, validation), tmp_path))
    assert history[0]["loss"] > 1
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]
    assert history[-1]["validation/accuracy"] >= 0.9


@pytest.mark.parametrize("tuning", TUNINGS)
def test_resumed_run_equals_uninterrupted_run(tuning: str, tmp_path: Path) -> None:
    uninterrupted = build_judge(config(tuning, "steps=4", "ema_decay=0.9"), tmp_path / "uninterrupted")
    expected = metrics(uninterrupted)
    first = build_judge(config(tuning, "steps=4", "ema_decay=0.9", "checkpoint.every=2"), tmp_path / "first")
    events = train(first)
    before = [dict(event.metrics) for event in events if isinstance(event, StepCompleted)][:2]
    resumed = build_judge(config(tuning, "steps=4", "ema_decay=0.9", "checkpoint.every=2"), tmp_path / "first")
    resumed.resume(tmp_path / "first/checkpoints/step-000002")
    after = metrics(resumed)
    assert [each["loss"] for each in [*before, *after]] == [each["loss"] for each in expected]
    for key, p in uninterrupted.weights.trainable().items():
        assert torch.equal(p, resumed.weights.trainable()[key]), key
    for key, x in uninterrupted.weights.snapshot_tensors()["ema"].items():
        assert torch.equal(x, resumed.weights.snapshot_tensors()["ema"][key]), key


def test_micro_batches_give_the_loss_of_the_batch(tmp_path: Path) -> None:
    one, many = (build_judge(config("full", "steps=1", f"micro_batch_size={n}"), tmp_path / str(n)) for n in (16, 4))
    (a,), (b,) = metrics(one), metrics(many)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_checkpoints(tmp_path_factory.mktemp)


@pytest.mark.parametrize("family", BUILDERS)
def test_finetuning_loss_matches_inference_log_prob(family: str, folders: dict[str, Path]) -> None:
    """The teacher-forced log-probability of an answer's first token equals the one of the judge's logits."""
    judge = load_chat_model(str(folders[family]), Placement())
    pixels = torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    turns = [("<image> Is it a cat?",), ("<image> Is it a very large dog?",)]
    conversations = tuple(
        {"turns": turn, "answer": answer} for turn, answer in zip(turns, ("yes", "no it is not"), strict=True)
    )
    finetuned = ChatModelForFinetuning(judge)
    with torch.no_grad():
        first, full = finetuned(pixels, conversations, first=True), finetuned(pixels, conversations)
        single = torch.cat([finetuned(pixels[i : i + 1], conversations[i : i + 1]).rows for i in range(2)])
    log_probs = judge.ask(pixels, turns).logits.float().log_softmax(-1)
    words = [judge.tokenizer(text, add_special_tokens=False).input_ids for text in ("yes", "no it is not")]
    expected = torch.stack([log_probs[i, words[i][0]] for i in range(2)])
    torch.testing.assert_close(-first.rows, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(full.rows, single, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(full.rows[1], first.rows[1], atol=1e-2)  # later tokens count


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "paligemma"])
def test_teacher_forced_logits_match_greedy_generation(family: str, folders: dict[str, Path]) -> None:
    """The logits of a greedy answer are the same in teacher forcing and in generation."""
    judge = load_chat_model(str(folders[family]), Placement())
    pixels, turns = torch.rand(1, 3, 40, 56, generator=torch.Generator().manual_seed(1)), ("<image> What is it?",)
    inputs = judge.processor.encode(pixels, [judge.processor.render(turns)])
    out = judge.net.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        **inputs.extra_inputs,
        max_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[:, inputs.input_ids.shape[1] :]
    ones = torch.ones_like(ids[:, :-1])
    with_answers = judge.processor.append_answers(
        judge.processor.encode(pixels, [judge.processor.render(turns)]), ids[:, :-1], ones
    )
    with torch.no_grad():
        logits = judge.net(**with_answers.network_inputs, use_cache=False, logits_to_keep=ids.shape[1]).logits
    torch.testing.assert_close(logits, torch.stack(out.logits, 1), atol=2e-4, rtol=1e-3)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


def yes_scores(weights: Path) -> torch.Tensor:
    """Probabilities of yes from an exported judge for two images of the named color and two others: [4]."""
    colors = torch.tensor([[0.9, 0.1, 0.1], [0.8, 0.2, 0.1], [0.1, 0.1, 0.9], [0.2, 0.1, 0.8]])
    pixels = colors.view(4, 1, 3, 1, 1).expand(-1, -1, -1, 8, 8)
    judge = VlmReward(weights=str(weights), question=QUESTION).load(Placement())
    return judge.score(pixels, ["red"] * 4, [{}] * 4)


@pytest.mark.parametrize("tuning", SLOW_LORA)
def test_exported_judge_is_a_reward(
    tuning: str, red_or_blue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = f"data={{type: vqa_file, path: {red_or_blue}/train.jsonl}}"
    command = [
        "train",
        "orm-onevision",
        *TUNINGS[tuning],
        data,
        "batch_size=16",
        "micro_batch_size=16",
        "steps=60",
        "--tiny",
    ]
    assert run(*command) == 0
    assert run("export", "runs/orm-onevision", "--out", "orm") == 0
    score = yes_scores(tmp_path / "orm")
    assert score[:2].min() > 0.7 and score[2:].max() < 0.3
    assert run("export", "runs/orm-onevision", "--out", "orm") == EXIT_USAGE  # the directory exists


@pytest.mark.parametrize("tuning", SLOW_FULL)
def test_paligemma_learns_answers_and_is_a_reward(
    tuning: str, folders: dict[str, Path], red_or_blue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train from images, questions and answers in a JSONL file by the recipe, export, and score."""
    monkeypatch.chdir(tmp_path)
    data = f"data={{type: vqa_file, path: {red_or_blue}/train.jsonl}}"
    model, overrides = f"judge.weights={folders['paligemma']}", ["batch_size=16", "micro_batch_size=16", "steps=40"]
    assert run("train", "paligemma-finetune", *TUNINGS[tuning], data, model, *overrides, "name=paligemma") == 0
    lines = [json.loads(line) for line in Path("runs/paligemma/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert run("export", "runs/paligemma", "--out", "paligemma") == 0
    score = yes_scores(tmp_path / "paligemma")
    assert score[:2].min() > 0.6 and score[2:].max() < 0.4


def test_tied_output_head_gets_no_lora(folders: dict[str, Path]) -> None:
    tied, untied = (
        ChatModelForFinetuning(load_chat_model(str(folders[family]), Placement())) for family in ("paligemma", "llava")
    )
    assert "net.lm_head" in untied.lora_targets and "net.lm_head" not in tied.lora_targets
    linear = [name for name, module in tied.named_modules() if isinstance(module, torch.nn.Linear)]
    assert set(linear) - set(tied.lora_targets) == {"net.lm_head"}


def save_conversations(folder: Path, rows: Any) -> Path:
    for i in range(3):
        save_image(torch.full((1, 3, 8, 8), i / 3), folder / f"{i}.png")
    (folder / "orm.json").write_text(json.dumps(rows))
    return folder / "orm.json"


def test_every_answer_of_a_conversation_is_an_example(tmp_path: Path) -> None:
    first = [{"from": role, "value": text} for role, text in (("human", "<image> A?"), ("gpt", "yes"))]
    second = [{"from": role, "value": text} for role, text in (("human", "B?"), ("gpt", "no"))]
    path = save_conversations(tmp_path, [{"image": "0.png", "conversations": [*first, *second]}])
    batch = VqaFile(path).load(0).batch(0, 2, 0, 1)
    assert isinstance(batch, QuestionAnswerBatch)
    assert {(each["turns"], each["answer"]) for each in batch.conversations} == {
        (("<image> A?",), "yes"),
        (("<image> A?", "yes", "B?"), "no"),
    }
    (tmp_path / "plain.jsonl").write_text('{"image": "1.png", "question": "What?", "answer": "a cat"}\n')
    assert VqaFile(tmp_path / "plain.jsonl").load(0).examples[0].answer == "a cat"


def test_stretched_images_keep_relative_positions(tmp_path: Path) -> None:
    """Positions in answers stay valid, because images are stretched as in PaliGemma's processor."""
    for i, (height, width) in enumerate(((30, 10), (10, 40))):
        pixels = torch.zeros(1, 3, height, width)
        pixels[..., : height // 5, : width // 5] = 1.0
        save_image(pixels, tmp_path / f"{i}.png")
    rows = [{"image": f"{i}.png", "question": "detect white", "answer": "<loc0000>"} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stretched = VqaFile(tmp_path / "rows.jsonl", 20, "stretch").load(0).batch(0, 2, 0, 1).pixels
    corner = torch.zeros(2, 3, 20, 20)
    corner[..., :4, :4] = 1.0
    assert stretched.shape == corner.shape and (stretched - corner).abs().mean() < 0.01
    assert not VqaFile(tmp_path / "rows.jsonl", 20).load(0).batch(0, 2, 0, 1).pixels.any()


def test_invalid_question_files_are_refused(tmp_path: Path) -> None:
    for rows, pattern in (
        ([{"image": "9.png", "conversations": []}], r"row 1.*9\.png"),
        ([{"image": "0.png", "conversations": [{"from": "gpt", "value": "yes"}]}], "human and gpt"),
        ([{"image": "0.png", "question": "What?"}], "'answer'"),
        ([], r"orm\.json.*list"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            VqaFile(save_conversations(tmp_path, rows)).load(0)
    with pytest.raises(ConfigError, match=r"toy_pairs.*preference pairs.*TM804"):
        build_judge(config("full", "data={type: toy_pairs}"), tmp_path)


def test_config_with_objective_and_judge_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'objective'.*'judge'.*TM051"):
        load_any_config("orm-onevision", ["objective={type: grpo}"])
    with pytest.raises(ConfigError, match=r"judge.*TM026"):
        load("orm-onevision")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
@pytest.mark.parametrize("tuning", TUNINGS)
def test_two_ranks_match_one(tuning: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "orm-onevision", *TUNINGS[tuning], "batch_size=8", "micro_batch_size=4", "steps=3", "--tiny"]
    validation = "validation={every: 1, num_samples: 8, data: {type: toy_vqa, start_index: 1000}}"
    assert run(*command, validation, "name=one") == 0
    on_ranks(2, *command, validation, "name=two", f"engine.strategy={strategy}")
    one, two = (
        [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for name in ("loss", "grad_norm", "validation/loss"):
        values = [[row[name] for row in rows if name in row] for rows in (one, two)]
        assert values[0] and values[1] == pytest.approx(values[0], rel=2e-3), name
    assert run("export", "runs/two", "--out", "judge") == 0
    assert yes_scores(tmp_path / "judge").isfinite().all()


@pytest.mark.parametrize("recipe", list_judge_recipes())
def test_every_judge_recipe_trains(recipe: str, tmp_path: Path) -> None:
    run_config = make_tiny_any(
        load_any_config(recipe, ["steps=2", "batch_size=4", "engine={device: cpu, precision: fp32}"])
    )
    assert isinstance(run_config, JudgeRunConfig)
    assert len(metrics(build_judge(run_config, tmp_path))) == 2
