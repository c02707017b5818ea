"""Fine-tuning Show-o to answer questions, from VQ codes or CLIP features: loss, export and reload."""

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
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CONVERSATIONS: list[dict[str, Any]] = [
    {"turns": (f"{IMAGE_PLACEHOLDER}\nIs it red?",), "answer": "no"},
    {"turns": ("Is it?", "yes", "Blue?"), "answer": "yes"},
]


def config(recipe: str, *changes: str) -> JudgeRunConfig:
    overrides = ["engine={precision: fp32, device: cpu, activation_memory: keep}", "batch_size=8", "micro_batch_size=8"]
    optim = "optim={lr: 3e-3, weight_decay: 0.0, warmup_steps: 0, lr_schedule: constant}"
    run_config = make_tiny_any(load_any_config(recipe, [*overrides, optim, *changes]))
    assert isinstance(run_config, JudgeRunConfig)
    return run_config


def model(vision: str | None = None) -> ShowoBackbone:
    backbone = ShowoSpec(vision_encoder=vision).tiny().load(Placement())
    generator = torch.Generator().manual_seed(0)
    for name, p in backbone.net.named_parameters():
        if p.dim() == 2 and "embed" not in name:
            torch.nn.init.normal_(p, std=0.5, generator=generator)
    return backbone


def losses(run: JudgeRun) -> list[float]:
    return [event.metrics["loss"] for event in train(run) if isinstance(event, StepCompleted)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_tiny_model_learns_its_answers(recipe: str, tmp_path: Path) -> None:
    data = "data={type: toy_vqa, colors: [red, blue], num_samples: 16}"
    history = losses(build_judge(config(recipe, "steps=25", data), tmp_path))
    assert history[0] > 2 and history[-1] < 0.4 * history[0]


@pytest.mark.parametrize("vision", [None, "clip"])
def test_loss_depends_only_on_answer_tokens(vision: str | None) -> None:
    """Gradients are nonzero only at answer and end tokens, not at question, image or padding tokens."""
    backbone = model(vision)
    scores = score_answers(
        backbone, IMAGES, [row["turns"] for row in CONVERSATIONS], [str(row["answer"]) for row in CONVERSATIONS]
    )
    lengths = [len(backbone.prompt_tokenizer.tokenizer(f" {row['answer']}")) + 1 for row in CONVERSATIONS]
    assert scores.logits.shape[1] == max(lengths) and scores.mask.sum(1).tolist() == lengths
    assert scores.ids[:, -1].tolist() == [backbone.vocabulary.eos_id] * 2
    logits: list[torch.Tensor] = []
    judge = GeneratorJudge(backbone)

    def retain_grad(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        output[0].retain_grad()
        logits.append(output[0])

    judge.net.register_forward_hook(retain_grad)
    loss = judge(IMAGES, CONVERSATIONS)
    loss.rows.sum().backward()
    assert torch.equal(logits[0].grad.abs().sum(-1) > 0, scores.mask)  # type: ignore[union-attr]
    log_probs = scores.logits.log_softmax(-1).gather(2, scores.ids[..., None])[..., 0]
    expected = [-log_probs[i][scores.mask[i]].mean() for i in range(2)]
    assert torch.allclose(loss.rows, torch.stack(expected), atol=1e-5)


def test_first_scores_only_the_first_answer_token() -> None:
    judge = GeneratorJudge(model())
    scores = judge.model.score_answers(
        IMAGES, [row["turns"] for row in CONVERSATIONS], [str(row["answer"]) for row in CONVERSATIONS]
    )
    first = scores.mask.float().argmax(1)
    log_probs = scores.logits.log_softmax(-1).gather(2, scores.ids[..., None])[..., 0]
    assert torch.allclose(judge(IMAGES, CONVERSATIONS, first=True).rows, -log_probs[[0, 1], first], atol=1e-5)


def test_sample_loss_is_independent_of_the_batch() -> None:
    judge = GeneratorJudge(model())
    batched = judge(IMAGES, CONVERSATIONS).rows
    single = [judge(IMAGES[i : i + 1], CONVERSATIONS[i : i + 1]).rows for i in range(2)]
    assert torch.allclose(batched, torch.cat(single), atol=1e-4)


def test_dialogue_tokens_are_in_order_with_no_image_placeholder() -> None:
    backbone = model()
    tokenizer = backbone.prompt_tokenizer.tokenizer
    tokens = tokenize_dialogue(backbone, (f"{IMAGE_PLACEHOLDER}\nIs it red?", "no", "Blue?"))
    end = backbone.vocabulary.eos_id
    expected = [
        *tokenizer("USER: \nIs it red? ASSISTANT:"),
        *tokenizer(" no"),
        end,
        *tokenizer("USER: Blue? ASSISTANT:"),
    ]
    assert tokens == expected


def test_exported_model_has_the_published_layout_and_reloads(tmp_path: Path) -> None:
    run_config = config("showo-vqa", "steps=1", "tuning={type: lora, rank: 2}")
    write_run_config(run_config, tmp_path / "run")
    run = build_judge(run_config, tmp_path / "run")
    losses(run)
    export_judge(tmp_path / "run", tmp_path / "exported", "", Console(quiet=True))
    exported = json.loads((tmp_path / "exported/config.json").read_text())
    assert exported["_class_name"] == "Showo" and exported["num_vq_tokens"] == 16
    assert {*read_checkpoint(str(tmp_path / "exported"))} == {*ShowoSpec().tiny().load(Placement()).net.state_dict()}
    spec = infer_showo_spec(str(tmp_path / "exported"))
    assert spec is not None and spec.vision_encoder is None


def test_generator_that_cannot_answer_is_refused() -> None:
    toy: Any = ToyFlowSpec()
    with pytest.raises(ConfigError, match=r"showo.*TM715"):
        load_generator_judge(toy, Placement())
