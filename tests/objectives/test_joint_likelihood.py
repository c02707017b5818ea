"""Joint training of Show-o: three losses in one run, in fixed proportions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from tastemaker.config.build import build, make_tiny
from tastemaker.config.data_checks import check_joint_batch
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import ImageBatch, JointBatch, select_rows
from tastemaker.data.joint import JointDataset
from tastemaker.objectives.joint_likelihood import JointLikelihood
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train
from tastemaker.vlm.judge_models import GeneratorJudge

OVERRIDES = ["data.num_images=3", "data.num_texts=2", "data.num_questions=1", "batch.prompts=12", "sample.every=0"]
OVERRIDES += [
    "steps=3",
    "checkpoint.every=2",
    "checkpoint.keep_last=9",
    "optim.warmup_steps=0",
    "engine.precision=fp32",
]


def build_run(directory: Path, *overrides: str) -> Any:
    return build(make_tiny(load("showo-joint", [*OVERRIDES, "engine.device=cpu", *overrides])), directory)


def rows_of(batch: JointBatch, key: str | None) -> Tensor:
    """Indices of the samples whose conversations have a key, or that have none."""
    return torch.tensor([i for i, each in enumerate(batch.conversations) if (key in each if key else not each)])


def gradient(run: Any, loss: Tensor) -> Tensor:
    parameters = list(run.policy.weights.trainable().values())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(parameters, grads, strict=True)]
    )


@pytest.mark.parametrize(
    "overrides",
    [[], ["model.likelihood_scope=codebook"], ["model.vision_encoder=tiny"]],
    ids=["tokens", "codebook", "clip"],
)
def test_joint_loss_is_the_weighted_sum_of_three(overrides: list[str], tmp_path: Path) -> None:
    run = build_run(tmp_path, "objective={type: joint_likelihood, lm_coef: 0.3, mmu_coef: 2}", *overrides)
    batch, ctx, model = run.data.batch(0, 12, 0, 1), run.context(0, 12), run.policy.model.unguided
    experience = run.objective.collect(ctx, batch)
    joint = run.objective.loss(ctx, experience, None)

    images, texts, questions = (rows_of(batch, key) for key in (None, "text", "turns"))
    assert (len(images), len(texts), len(questions)) == (6, 4, 2)
    finetuning, image_ctx = (
        Likelihood(prompt_dropout=0.1),
        replace(ctx, rng=select_rows(ctx.rng, images), first_row=None),
    )
    captioned = ImageBatch(tuple(batch.prompts[i] for i in images), batch.pixels[images])
    t2i = finetuning.loss(image_ctx, finetuning.collect(image_ctx, captioned), None).rows.mean()
    lm = torch.stack([text_loss(model, batch.conversations[i]["text"]) for i in texts]).mean()
    conversations = [batch.conversations[i] for i in questions]
    mmu = GeneratorJudge(model)(batch.question_pixels[questions], conversations).rows.mean()

    expected = t2i + 0.3 * lm + 2 * mmu
    torch.testing.assert_close(joint.rows.mean(), expected, rtol=1e-5, atol=1e-5)
    for name, loss in (("t2i", t2i), ("lm", lm), ("mmu", mmu)):
        torch.testing.assert_close(joint.metrics[f"loss/{name}"].mean(), loss.detach(), rtol=1e-5, atol=1e-5)
    parts = [gradient(run, loss) for loss in (t2i, lm, mmu)]
    assert all(part.abs().max() > 1e-4 for part in parts)
    of_sum = parts[0] + 0.3 * parts[1] + 2 * parts[2]
    torch.testing.assert_close(gradient(run, joint.rows.mean()), of_sum, rtol=1e-3, atol=1e-5)
    # Micro-batches cut through the kinds.
    chunks = [select_rows(experience, rows) for rows in torch.arange(12).split(5)]
    losses = torch.cat([run.objective.loss(ctx, chunk, None).rows for chunk in chunks])
    torch.testing.assert_close(losses, joint.rows, rtol=1e-4, atol=1e-5)


def text_loss(model: Any, text: str) -> Tensor:
    """Mean next-token loss of one text without padding."""
    end = model.vocabulary.eos_id
    limit = model.prompt_tokenizer.length + model.shape[0] + 2
    ids = torch.tensor([[end, *model.prompt_tokenizer.tokenizer(text), end][:limit]])
    causal = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits = model.net(ids, causal)[0]
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])


def test_joint_run_resumes_exactly(tmp_path: Path) -> None:
    def weights(run: Any) -> list[Tensor]:
        return [p.detach().clone() for p in run.policy.weights.trainable().values()]

    uninterrupted = build_run(tmp_path / "run", "batch.micro_batch_size=4")
    before = weights(uninterrupted)
    list(train(uninterrupted))
    resumed = build_run(tmp_path / "other", "batch.micro_batch_size=4")
    resumed.resume(tmp_path / "run/checkpoints/step-000002")
    list(train(resumed))
    expected = weights(uninterrupted)
    assert any(not torch.equal(old, new) for old, new in zip(before, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), expected, strict=True))


def test_all_three_losses_fall(tmp_path: Path) -> None:
    run = build_run(tmp_path, "steps=25", "optim.lr=0.01", "objective.lm_coef=1", "checkpoint.every=25")
    updates = [event.metrics for event in train(run) if isinstance(event, StepCompleted)]
    for name in ("loss/t2i", "loss/lm", "loss/mmu"):
        assert updates[-1][name] < updates[0][name] - 0.3, name


def test_shards_of_ranks_are_the_batch_in_order(tmp_path: Path) -> None:
    data = load("showo-joint", OVERRIDES).data.load(0)
    assert isinstance(data, JointDataset) and data.counts == (3, 2, 1)
    kinds = [sorted(each) for each in data.batch(1, 12, 0, 1).conversations]
    cycle = [[], [], [], ["text"], ["text"], ["answer", "turns"]]
    assert kinds == cycle * 2
    for world_size in (2, 3):  # three ranks cut through a cycle
        batch, shards = data.batch(1, 12, 0, 1), [data.batch(1, 12, rank, world_size) for rank in range(world_size)]
        assert batch.prompts == sum((shard.prompts for shard in shards), ())
        assert torch.equal(batch.pixels, torch.cat([shard.pixels for shard in shards]))
        assert torch.equal(batch.share, torch.cat([shard.share for shard in shards]))
        assert torch.equal(batch.question_pixels, torch.cat([shard.question_pixels for shard in shards]))
        assert batch.conversations == sum((shard.conversations for shard in shards), ())


def test_wrong_joint_settings_are_refused(tmp_path: Path) -> None:
    message = check_joint_batch(load("showo-joint", ["batch.prompts=20"]), 1)
    assert message is not None and "batch.prompts" in message and "24" in message and "TM905" in message
    with pytest.raises(ConfigError, match=r"num_texts 0.*TM903"):
        load("showo-joint", ["data.num_texts=0"])
    with pytest.raises(ConfigError, match=r"'text' yields.*TM904"):
        load("showo-joint", ["data.text={type: toy_vqa}"])
    with pytest.raises(ValueError, match=r"lm_coef -1.*TM088"):
        JointLikelihood(lm_coef=-1)
    model = toys.policy("masked").model
    with pytest.raises(ConfigError, match=r"showo.*TM902"):
        model.joint_log_likelihood(*[torch.zeros(1)] * 5)  # type: ignore[arg-type]
