"""Objectives on two ranks equal one, snapshots included: statistics of all ranks, whole groups on each, teachers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch_ranks import finish, launch
from test_run_ranks import assert_close, read_tensors

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.xdist_group("ranks")]
SETTINGS = ("steps=3", "batch.prompts=4", "optim.lr=1e-4")
SNAPSHOTS = {
    "ram-toy-flow": ("old", "reference"),
    "dgpo-toy-flow": ("old", "reference"),
    "crd-toy-flow": ("old", "sampling", "reference"),
    "leap-toy-flow": (),
    "kto-toy-flow": ("reference",),
    "kto-toy-causal": ("reference",),
    "kto-online-toy-epsilon": ("reference",),
    "mapo-toy-flow": (),
    "mapo-online-toy-flow": ("reference",),
    "distill-toy-flow": ("teacher_guided",),
    "tempflow-toy-flow": (),
    "precise-toy-flow": (),
}


def final_tensors(directory: Path, snapshots: tuple[str, ...]) -> dict[str, torch.Tensor]:
    checkpoint = directory / "checkpoints/step-000003"
    names = ("weights", *(f"snapshots/{name}" for name in snapshots))
    return {f"{name}/{key}": x for name in names for key, x in read_tensors(checkpoint, name).items()}


@pytest.mark.parametrize("recipe", SNAPSHOTS)
def test_two_ranks_equal_one(recipe: str, tmp_path: Path) -> None:
    for ranks in (1, 2):
        finish(launch(recipe, tmp_path / str(ranks), *SETTINGS, ranks=ranks))
    one, two = (final_tensors(tmp_path / str(ranks), SNAPSHOTS[recipe]) for ranks in (1, 2))
    assert_close(one, two)


@pytest.mark.parametrize(("target", "strategy"), [("ode", "fsdp"), ("kl", "fsdp"), ("ode", "replicated")])
def test_teachers_of_which_a_rank_has_no_prompts_equal_one_rank(target: str, strategy: str, tmp_path: Path) -> None:
    """A batch is all four prompts, of which one has the second teacher: one of the ranks has no rows of it."""
    prompts = tmp_path / "prompts.jsonl"
    tasks = {"a red": "weak", "a green": "weak", "a blue": "weak", "a white": "strong"}
    prompts.write_text("\n".join(json.dumps({"prompt": prompt, "task": task}) for prompt, task in tasks.items()))
    teachers = "{weak: {guidance_scale: 1.5}, strong: {guidance_scale: 4.0}}"
    settings = (
        f"data={{type: prompt_file, path: {prompts}}}",
        f"objective={{type: distill, assign: task, teachers: {teachers}, target: {target}}}",
        f"process.dynamics={{type: {'flow_sde' if target == 'kl' else 'ode'}}}",
    )
    finish(launch("distill-toy-flow", tmp_path / "1", *SETTINGS, *settings))
    finish(launch("distill-toy-flow", tmp_path / "2", *SETTINGS, *settings, f"engine.strategy={strategy}", ranks=2))
    snapshots = ("teacher_weak", "teacher_strong")
    one, two = (final_tensors(tmp_path / ranks, snapshots) for ranks in ("1", "2"))
    assert_close(one, two)
    assert any(not x.equal(one[f"snapshots/teacher_weak/{key[8:]}"]) for key, x in one.items() if key[:8] == "weights/")
