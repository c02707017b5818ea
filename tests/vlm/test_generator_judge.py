"""Show-o learns to answer: by codes and by CLIP's features, from nothing but the answers, and is asked afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tastemaker.config.build import build_judge, make_tiny_any
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import JudgeRunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.weights import export_judge
from tastemaker.models.loading import read_checkpoint
from tastemaker.models.showo.model import ShowoBackbone, ShowoSpec, infer_showo_spec
from tastemaker.models.showo.vqa import IMAGE_PLACEHOLDER, score_answers, tokenize_dialogue
from tastemaker.models.toy import ToyFlowSpec
from tastemaker.training.events import StepCompleted
from tastemaker.training.run_directory import write_run_config
from tastemaker.vlm.finetuning import JudgeRun, train
from tastemaker.vlm.judge_models import GeneratorJudge, load_generator_judge

RECIPES = ("showo-vqa", "showo-vqa-clip")
PICTURES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ROWS: list[dict[str, Any]] = [
    {"turns": (f"{IMAGE_PLACEHOLDER}\nIs it red?",), "answer": "no"},
    {"turns": ("Is it?", "yes", "Blue?"), "answer": "yes"},
]


def config(recipe: str, *changes: str) -> JudgeRunConfig:
    fast = ["engine={precision: fp32, device: cpu, activation_memory: keep}", "batch_size=8", "micro_batch_size=8"]
    optim = "optim={lr: 3e-3, weight_decay: 0.0, warmup_steps: 0, lr_schedule: constant}"
    found = make_tiny_any(load_any_config(recipe, [*fast, optim, *changes]))
    assert isinstance(found, JudgeRunConfig)
    return found


def model(vision: str | None = None) -> ShowoBackbone:
    found = ShowoSpec(vision_encoder=vision).tiny().load(Placement())
    chance = torch.Generator().manual_seed(0)
    for name, p in found.net.named_parameters():
        if p.dim() == 2 and "embed" not in name:
            torch.nn.init.normal_(p, std=0.5, generator=chance)
    return found


def losses(run: JudgeRun) -> list[float]:
    return [event.metrics["loss"] for event in train(run) if isinstance(event, StepCompleted)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tiny_one_learns_its_answers(recipe: str, tmp_path: Path) -> None:
    toys = "data={type: toy_vqa, colors: [red, blue], num_samples: 16}"
    found = losses(build_judge(config(recipe, "steps=25", toys), tmp_path))
    assert found[0] > 2 and found[-1] < 0.4 * found[0]


@pytest.mark.parametrize("vision", [None, "clip"])
def test_only_the_answers_count(vision: str | None) -> None:
    """A gradient is where answers and their ends are, and nowhere else: not on questions, pictures, or filling."""
    backbone = model(vision)
    told = score_answers(backbone, PICTURES, [row["turns"] for row in ROWS], [str(row["answer"]) for row in ROWS])
    lengths = [len(backbone.prompt_tokenizer.tokenizer(f" {row['answer']}")) + 1 for row in ROWS]
    assert told.logits.shape[1] == max(lengths) and told.mask.sum(1).tolist() == lengths
    assert told.ids[:, -1].tolist() == [backbone.vocabulary.eos_id] * 2
    kept: list[torch.Tensor] = []
    pupil = GeneratorJudge(backbone)

    def keep(_: Any, __: Any, made: tuple[torch.Tensor, Any]) -> None:
        made[0].retain_grad()
        kept.append(made[0])

    pupil.net.register_forward_hook(keep)
    loss = pupil(PICTURES, ROWS)
    loss.rows.sum().backward()
    assert torch.equal(kept[0].grad.abs().sum(-1) > 0, told.mask)  # type: ignore[union-attr]
    each = told.logits.log_softmax(-1).gather(2, told.ids[..., None])[..., 0]
    expected = [-each[i][told.mask[i]].mean() for i in range(2)]
    assert torch.allclose(loss.rows, torch.stack(expected), atol=1e-5)


def test_only_the_first_word_counts_where_so_asked() -> None:
    pupil = GeneratorJudge(model())
    told = pupil.model.score_answers(PICTURES, [row["turns"] for row in ROWS], [str(row["answer"]) for row in ROWS])
    first = told.mask.float().argmax(1)
    each = told.logits.log_softmax(-1).gather(2, told.ids[..., None])[..., 0]
    assert torch.allclose(pupil(PICTURES, ROWS, first=True).rows, -each[[0, 1], first], atol=1e-5)


def test_a_row_is_scored_alike_alone_and_beside_a_longer_one() -> None:
    pupil = GeneratorJudge(model())
    together = pupil(PICTURES, ROWS).rows
    alone = [pupil(PICTURES[i : i + 1], ROWS[i : i + 1]).rows for i in range(2)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def test_a_conversation_is_read_in_order_and_its_picture_is_not_named() -> None:
    backbone = model()
    words = backbone.prompt_tokenizer.tokenizer
    found = tokenize_dialogue(backbone, (f"{IMAGE_PLACEHOLDER}\nIs it red?", "no", "Blue?"))
    end = backbone.vocabulary.eos_id
    expected = [*words("USER: \nIs it red? ASSISTANT:"), *words(" no"), end, *words("USER: Blue? ASSISTANT:")]
    assert found == expected


def test_what_was_learned_is_exported_as_published_and_read_again(tmp_path: Path) -> None:
    made = config("showo-vqa", "steps=1", "tuning={type: lora, rank: 2}")
    write_run_config(made, tmp_path / "run")
    run = build_judge(made, tmp_path / "run")
    losses(run)
    export_judge(tmp_path / "run", tmp_path / "told", "", Console(quiet=True))
    told = json.loads((tmp_path / "told/config.json").read_text())
    assert told["_class_name"] == "Showo" and told["num_vq_tokens"] == 16
    assert {*read_checkpoint(str(tmp_path / "told"))} == {*ShowoSpec().tiny().load(Placement()).net.state_dict()}
    found = infer_showo_spec(str(tmp_path / "told"))
    assert found is not None and found.vision_encoder is None


def test_a_generator_that_tells_nothing_is_refused() -> None:
    toy: Any = ToyFlowSpec()
    with pytest.raises(ConfigError, match="expected type showo"):
        load_generator_judge(toy, Placement())
