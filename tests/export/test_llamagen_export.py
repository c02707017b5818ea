"""Export to checkpoints of LlamaGen's trainers and resumes from them, consolidated and sharded."""

from __future__ import annotations

import functools
import json
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cli_runner import run_cli
from rich.console import Console
from tiers import fast
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from tastemaker import build, load
from tastemaker.config.schema import RunConfig
from tastemaker.core.errors import CheckpointError
from tastemaker.core.registry import ConfigError
from tastemaker.export.llamagen import (
    LlamagenExport,
    export_llamagen,
    resume_from_llamagen,
    shard_row_ranges,
    write_rank_shard,
)
from tastemaker.models import loading
from tastemaker.models.llamagen import optimizer_state
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.training import checkpoint
from tastemaker.training.run import Run
from tastemaker.training.trainer import run_training

RECIPE = """
extends: [base, models/llamagen]
guidance: null
model:
  {type: llamagen, variant: tiny, weights: null, autoencoder: null, image_size: 32, downsample_factor: 8,
   codebook_size: 64, num_classes: 10}
objective: {type: grpo, group_size: 4}
data: {type: prompts, prompts: ["1", "2", "3"]}
rewards: {bright: {type: brightness}}
batch: {prompts: 2}
optim: {lr: 1.0e-2}
engine: {device: cpu}
sample: {every: 0}
guard: {every: 0}
steps: 3
"""


def string_console() -> Console:
    return Console(file=StringIO())


def make_config(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    return load(path, [f"output_dir={folder / 'runs'}", *overrides])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_training(make_config(folder, "name=one"), console=string_console())
    return folder / "runs" / "one"


def build_new_run(folder: Path, *overrides: str) -> Run:
    run = build(make_config(folder, "name=two", *overrides), folder / "two")
    run.engine.close()
    return run


def load_trained_run(trained: Path, folder: Path) -> Run:
    """Load the trained run from its last checkpoint."""
    run = build_new_run(folder)
    step_dir = checkpoint.latest_checkpoint(trained)
    assert step_dir is not None
    run.resume(step_dir)
    return run


@pytest.mark.parametrize("num_shards", fast([0, 1, 3], 3))
@pytest.mark.filterwarnings("ignore")
def test_exported_checkpoint_is_resumed(num_shards: int, trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path / "llamagen", num_shards=num_shards), string_console())
    folder = tmp_path / "llamagen" / "0000003"
    assert (folder / "state_type.txt").read_text() == ("sharded" if num_shards else "full")
    assert (folder / "resume_step.txt").read_text() == "3"
    files = {f"model.shard.{r:05d}-of-{num_shards:05d}.pth" for r in range(num_shards)} or {"consolidated.pth"}
    files |= {f"optimizer.{r:05d}-of-{num_shards or 1:05d}.pth" for r in range(num_shards or 1)}
    assert {path.name for path in folder.iterdir()} == files | {"state_type.txt", "resume_step.txt"}
    before, after = load_trained_run(trained, tmp_path), build_new_run(tmp_path)
    resume_from_llamagen(after, folder)
    assert after.start_step == before.start_step == 3
    for key, p in before.policy.weights.trainable().items():
        assert torch.equal(p, after.policy.weights.trainable()[key]), key
    for key, x in before.engine.optimizer.state_dict().items():
        assert torch.equal(x, after.engine.optimizer.state_dict()[key]), key
    assert any(x.any() for key, x in after.engine.optimizer.state_dict().items() if key.endswith("exp_avg"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_resumes_from_a_folder(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path / "llamagen", num_shards=2), string_console())
    run_training(
        make_config(tmp_path, "name=resumed", "steps=5"),
        resume=tmp_path / "llamagen" / "0000003",
        console=string_console(),
    )
    run_training(make_config(tmp_path, "name=uninterrupted", "steps=5"), console=string_console())
    resumed, uninterrupted = (read_rewards(tmp_path / "runs" / name) for name in ("resumed", "uninterrupted"))
    assert [*resumed] == [4, 5] and [*uninterrupted] == [1, 2, 3, 4, 5]
    assert all(resumed[step] == uninterrupted[step] for step in resumed)  # equal to the uninterrupted run


def read_rewards(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}


def test_weights_are_loaded_from_a_folder(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path), string_console())
    config = make_config(tmp_path, f"model.weights={tmp_path / '0000003'}")
    run = build(config, tmp_path / "run")
    before = load_trained_run(trained, tmp_path).policy.weights.trainable()
    assert all(torch.equal(p, before[key]) for key, p in run.policy.weights.trainable().items())


def test_export_command_keeps_float32_unless_asked(trained: Path, tmp_path: Path) -> None:
    for options, dtype in (((), torch.float32), (("--dtype", "bf16"), torch.bfloat16)):
        out = tmp_path / str(dtype)
        arguments = ["export", str(trained), "--layout", "llamagen", "--out", str(out), *options]
        assert run_cli(*arguments) == 0
        weights = torch.load(out / "0000003" / "consolidated.pth", weights_only=True)
        assert {x.dtype for x in weights.values()} == {dtype}


def test_files_match_the_original_trainer(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path, dtype=torch.bfloat16), string_console())
    weights = torch.load(tmp_path / "0000003" / "consolidated.pth", weights_only=True)
    net = GPT(make_config(tmp_path).model.network_config())  # type: ignore[attr-defined]
    assert [*weights] == [*net.state_dict()] and {x.dtype for x in weights.values()} == {torch.bfloat16}
    state = torch.load(tmp_path / "0000003" / "optimizer.00000-of-00001.pth", weights_only=True)
    named = list(net.named_parameters())
    groups = [[p for name, p in named if ("norm" in name) == last] for last in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    optimizer.load_state_dict(state)  # the original trainer decays parameters without "norm" in their name
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for _, p in named)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizer_ranges_match_fsdp(world_size: int) -> None:
    shape = GPTConfig(12, 2, 3, None, 25, 3, "class", 1, 7, multiple_of=7)
    shapes = {name: tuple(p.shape) for name, p in GPT(shape).named_parameters()}
    for rank, ranges in enumerate(optimizer_state.fsdp_flat_ranges(shapes, world_size)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        net = GPT(shape)
        blocks = set(net.layers)
        wrap = functools.partial(lambda_auto_wrap_policy, lambda_fn=blocks.__contains__)
        sharded = FullyShardedDataParallel(
            net, auto_wrap_policy=wrap, device_id=torch.device("cpu"), use_orig_params=True
        )
        sizes = {name.replace("_fsdp_wrapped_module.", ""): p.numel() for name, p in sharded.named_parameters()}
        dist.destroy_process_group()
        assert sizes == {name: count for name, (_, count) in ranges.items()}


@pytest.mark.filterwarnings("ignore")
def test_shards_load_as_torch_sharded_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(30.0).view(5, 6), "b": torch.ones(1)}
    for rank in range(3):
        write_rank_shard(tensors, tmp_path / "x.pth", rank, 3)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        loaded = torch.load(tmp_path / "x.pth", weights_only=False)
        dist.destroy_process_group()
        first, count = shard_row_ranges(5, 3)[rank]
        assert torch.equal(loaded["a"].local_shards()[0].tensor, tensors["a"][first : first + count])
        assert loaded["a"].size() == (5, 6) and len(loaded["b"].local_shards()) == (rank == 0)


def test_unsuitable_checkpoints_are_refused(trained: Path, tmp_path: Path) -> None:
    export_llamagen(LlamagenExport(trained, tmp_path), string_console())
    with pytest.raises(ConfigError, match=r"exists already.*TM675"):
        export_llamagen(LlamagenExport(trained, tmp_path), string_console())
    folder = tmp_path / "0000003"
    with pytest.raises((CheckpointError, ConfigError), match=r"0000003.*TM458"):
        resume_from_llamagen(build_new_run(tmp_path, "tuning={type: lora, target_modules: [wqkv]}"), folder)
    (folder / "resume_step.txt").write_text("three")
    with pytest.raises(ConfigError, match=r"'three'.*TM454"):
        resume_from_llamagen(build_new_run(tmp_path), folder)
    (folder / "optimizer.00000-of-00001.pth").unlink()
    with pytest.raises(ConfigError, match=r"holds no optimizer.*TM455"):
        resume_from_llamagen(build_new_run(tmp_path), folder)


def test_step_is_read_from_the_name_of_a_released_folder(tmp_path: Path) -> None:
    folder = tmp_path / "GPT-XXL-lr1e-6-0000100"
    folder.mkdir()
    torch.save({}, folder / loading.CONSOLIDATED_FILE)
    assert optimizer_state.is_llamagen_checkpoint(folder) and optimizer_state.read_step(folder) == 100
    assert not optimizer_state.is_llamagen_checkpoint(tmp_path)


def test_runs_of_other_models_are_refused(tmp_path: Path) -> None:
    config = load(
        "grpo-toy-causal", [f"output_dir={tmp_path}", "name=toy", "steps=1", "sample.every=0", "guard.every=0"]
    )
    run_training(config, console=string_console())
    with pytest.raises(ConfigError, match=r"another model.*TM674"):
        export_llamagen(LlamagenExport(tmp_path / "toy", tmp_path / "out"), string_console())
