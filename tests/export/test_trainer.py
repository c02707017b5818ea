"""Checkpoints of LlamaGen's trainers: written, read, gone on from, whole and in shards."""

from __future__ import annotations

import functools
import json
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tiers import fast
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from tastemaker import build, load
from tastemaker.config.schema import RunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.export.fsdp_shards import shard_row_ranges, write_rank_shard
from tastemaker.export.llamagen import LlamagenExport, export_llamagen, resume_from_llamagen
from tastemaker.models import loading
from tastemaker.models.llamagen import optimizer_state
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.training import checkpoint
from tastemaker.training.run import Run
from tastemaker.training.safetensors_io import CheckpointError
from tastemaker.training.session import run_training

RECIPE = """
extends: [base, models/llamagen]
guidance: null
model: {type: llamagen, size: tiny, weights: null, codec: null, pixels: 32, downsample: 8, codes: 64, classes: 10}
objective: {type: grpo, group: 4}
data: {type: prompts, prompts: ["1", "2", "3"]}
rewards: {bright: {type: brightness}}
batch: {prompts: 2}
optim: {lr: 1.0e-2}
engine: {device: cpu}
sample: {every: 0}
guard: {every: 0}
steps: 3
"""


def quiet() -> Console:
    return Console(file=StringIO())


def recipe(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    return load(path, [f"output={folder / 'runs'}", *overrides])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_training(recipe(folder, "name=one"), console=quiet())
    return folder / "runs" / "one"


def gone_on(trained: Path, folder: Path, *overrides: str) -> Run:
    run = build(recipe(folder, "name=two", *overrides), folder / "two")
    run.engine.close()
    return run


def own(trained: Path, folder: Path) -> Run:
    """The run itself, as it was when it ended."""
    run = gone_on(trained, folder)
    found = checkpoint.latest(trained)
    assert found is not None
    run.resume(found)
    return run


@pytest.mark.parametrize("ranks", fast([0, 1, 3], 3))
@pytest.mark.filterwarnings("ignore")
def test_what_is_written_is_read_and_gone_on_from(ranks: int, trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path / "theirs", ranks=ranks), quiet())
    folder = tmp_path / "theirs" / "0000003"
    assert (folder / "state_type.txt").read_text() == ("sharded" if ranks else "full")
    assert (folder / "resume_step.txt").read_text() == "3"
    files = {"consolidated.pth"} if not ranks else {f"model.shard.{r:05d}-of-{ranks:05d}.pth" for r in range(ranks)}
    files |= {f"optimizer.{r:05d}-of-{ranks or 1:05d}.pth" for r in range(ranks or 1)}
    assert {path.name for path in folder.iterdir()} == files | {"state_type.txt", "resume_step.txt"}
    before, after = own(trained, tmp_path), gone_on(trained, tmp_path)
    resume_from_llamagen(after, folder)
    assert after.start == before.start == 3
    for key, p in before.policy.weights.trainable().items():
        assert torch.equal(p, after.policy.weights.trainable()[key]), key
    for key, x in before.engine.optimizer.state().items():
        assert torch.equal(x, after.engine.optimizer.state()[key]), key
    assert any(x.any() for key, x in after.engine.optimizer.state().items() if key.endswith("exp_avg"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_from_a_folder_by_its_name(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path / "theirs", ranks=2), quiet())
    run_training(recipe(tmp_path, "name=more", "steps=5"), resume=tmp_path / "theirs" / "0000003", console=quiet())
    run_training(recipe(tmp_path, "name=whole", "steps=5"), console=quiet())
    more, whole = (rewards(tmp_path / "runs" / name) for name in ("more", "whole"))
    assert [*more] == [4, 5] and [*whole] == [1, 2, 3, 4, 5]
    assert all(more[step] == whole[step] for step in more)  # as if nothing had happened


def rewards(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["reward"] for line in lines if "reward" in line}


def test_weights_alone_are_named_as_weights(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path), quiet())
    config = recipe(tmp_path, f"model.weights={tmp_path / '0000003'}")
    run = build(config, tmp_path / "run")
    before = own(trained, tmp_path).policy.weights.trainable()
    assert all(torch.equal(p, before[key]) for key, p in run.policy.weights.trainable().items())


def test_the_file_is_what_the_original_writes(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path, dtype=torch.bfloat16), quiet())
    bare = torch.load(tmp_path / "0000003" / "consolidated.pth", weights_only=True)
    net = GPT(recipe(tmp_path).model.sizes())  # type: ignore[attr-defined]
    assert [*bare] == [*net.state_dict()] and {x.dtype for x in bare.values()} == {torch.bfloat16}
    state = torch.load(tmp_path / "0000003" / "optimizer.00000-of-00001.pth", weights_only=True)
    named = list(net.named_parameters())
    groups = [[p for name, p in named if ("norm" in name) == last] for last in (False, True)]
    adam = torch.optim.AdamW([{"params": group} for group in groups])
    adam.load_state_dict(state)  # as its trainer, which decays what has no "norm" in its name, would
    assert all(adam.state[p]["exp_avg"].shape == p.shape for _, p in named)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", [2, 3])
def test_optimizers_are_cut_as_fsdp_cuts_parameters(world: int) -> None:
    shape = GPTConfig(12, 2, 3, None, 25, 3, "class", 1, 7, multiple=7)
    shapes = {name: tuple(p.shape) for name, p in GPT(shape).named_parameters()}
    for rank, held in enumerate(optimizer_state.fsdp_flat_ranges(shapes, world)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        net = GPT(shape)
        blocks = set(net.layers)
        wrap = functools.partial(lambda_auto_wrap_policy, lambda_fn=blocks.__contains__)
        sharded = FullyShardedDataParallel(
            net, auto_wrap_policy=wrap, device_id=torch.device("cpu"), use_orig_params=True
        )
        found = {name.replace("_fsdp_wrapped_module.", ""): p.numel() for name, p in sharded.named_parameters()}
        dist.destroy_process_group()
        assert found == {name: count for name, (_, count) in held.items()}


@pytest.mark.filterwarnings("ignore")
def test_shards_are_those_of_torch(tmp_path: Path) -> None:
    whole = {"a": torch.arange(30.0).view(5, 6), "b": torch.ones(1)}
    for rank in range(3):
        write_rank_shard(whole, tmp_path / "x.pth", rank, 3)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        found = torch.load(tmp_path / "x.pth", weights_only=False)
        dist.destroy_process_group()
        first, rows = shard_row_ranges(5, 3)[rank]
        assert torch.equal(found["a"].local_shards()[0].tensor, whole["a"][first : first + rows])
        assert found["a"].size() == (5, 6) and len(found["b"].local_shards()) == (rank == 0)


def test_what_does_not_fit_is_a_sentence(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path), quiet())
    with pytest.raises(ConfigError, match="is there already"):
        export_llamagen(LlamagenExport(trained, tmp_path), quiet())
    folder = tmp_path / "0000003"
    with pytest.raises((CheckpointError, ConfigError), match="0000003"):
        resume_from_llamagen(gone_on(trained, tmp_path, "tuning={type: lora, targets: [wqkv]}"), folder)
    (folder / "resume_step.txt").write_text("three")
    with pytest.raises(ConfigError, match="'three' is no step"):
        resume_from_llamagen(gone_on(trained, tmp_path), folder)
    (folder / "optimizer.00000-of-00001.pth").unlink()
    with pytest.raises(ConfigError, match="start from its weights alone, as"):
        resume_from_llamagen(gone_on(trained, tmp_path), folder)


def test_a_released_folder_says_its_step_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "GPT-XXL-lr1e-6-0000100"
    folder.mkdir()
    torch.save({}, folder / loading.CONSOLIDATED_FILE)
    assert optimizer_state.is_llamagen_checkpoint(folder) and optimizer_state.read_step(folder) == 100
    assert not optimizer_state.is_llamagen_checkpoint(tmp_path)


def test_runs_of_other_models_are_refused(tmp_path: Path) -> None:
    config = load("grpo-toy-causal", [f"output={tmp_path}", "name=toy", "steps=1", "sample.every=0", "guard.every=0"])
    run_training(config, console=quiet())
    with pytest.raises(ConfigError, match="the run trained another model"):
        export_llamagen(LlamagenExport(tmp_path / "toy", tmp_path / "out"), quiet())
