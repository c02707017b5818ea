"""Compiled networks give the same results as eager ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_toys import assert_close, build_engine, full_tensors, full_weights, make_inputs
from engine_toys import train_step as train_engine_step
from torch._dynamo.utils import counters

from tastemaker.config.build import build, make_tiny
from tastemaker.config.load import load
from tastemaker.config.schema import EngineConfig
from tastemaker.core.errors import TrainingError
from tastemaker.core.lora import Lora
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import NetworkTraits
from tastemaker.models.dit import DitSpec
from tastemaker.models.nets import gpt
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.training import activation_memory
from tastemaker.training.loop import train_step
from tastemaker.training.precision import check_engine_config
from tastemaker.training.run import Run
from tastemaker.training.samples import generate_samples


def build_run(directory: Path, *, compile: bool) -> Run:
    engine = ["engine.device=cpu", "engine.precision=fp32", "data.device=cpu", "batch.prompts=8", "sample.count=8"]
    config = make_tiny(load("playground-flow16", engine))
    return build(replace(config, engine=replace(config.engine, compile=compile)), directory / str(compile))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch itself
def test_compiled_run_matches_eager_run(tmp_path: Path) -> None:
    runs = [build_run(tmp_path, compile=compile) for compile in (False, True)]
    names = [list(run.policy.weights.trainable()) for run in runs]
    assert names[0] == names[1]
    plain, compiled = ([train_step(run, step).to_event().metrics["loss/policy"] for step in range(3)] for run in runs)
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert torch.allclose(generate_samples(runs[0], 3).pixels, generate_samples(runs[1], 3).pixels, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # from PyTorch itself
def test_blocks_share_graphs_without_recompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_memory, "MIN_PARAMETERS", 1)
    monkeypatch.setattr(activation_memory, "MIN_BLOCKS", 3)
    weights_after = []
    for compile in (False, True):
        torch._dynamo.reset()
        counters.clear()
        weights = full_weights()
        engine = build_engine(weights, activation_memory="checkpoint", compile=compile)
        for step in range(3):
            with engine.autocast(), torch.no_grad():
                weights.net(make_inputs()[:2])
            train_engine_step(engine, weights, step, num_micro_batches=1)
            # One graph without gradients, for sampling, and one with, for all three blocks and their recomputation.
            assert counters["stats"]["unique_graphs"] == (2 if compile else 0)
        weights_after.append(full_tensors(weights.trainable()))
    assert_close(*weights_after, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # from PyTorch itself
def test_compiled_lora_dropout_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_memory, "MIN_PARAMETERS", 1)
    monkeypatch.setattr(activation_memory, "MIN_BLOCKS", 3)
    weights_after = []
    for compile in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        weights = Lora(rank=2, target_modules="all-linear", dropout=0.3).apply(full_weights(), ())
        engine = build_engine(weights, activation_memory="checkpoint", compile=compile)
        for step in range(3):
            with weights.dropout_masks(Randomness(0, step, torch.arange(4))):
                train_engine_step(engine, weights, step, num_micro_batches=1)
        assert counters["stats"]["unique_graphs"] == (1 if compile else 0)  # for all blocks, rows and steps
        weights_after.append(full_tensors(weights.trainable()))
    assert_close(*weights_after, rtol=1e-3, atol=1e-5)


def test_only_large_networks_are_compiled_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    net = full_weights().net
    assert not activation_memory.should_compile_blocks(net)
    monkeypatch.setattr(activation_memory, "MIN_PARAMETERS", 1)
    assert not activation_memory.should_compile_blocks(net)  # three blocks
    monkeypatch.setattr(activation_memory, "MIN_BLOCKS", 3)
    assert activation_memory.should_compile_blocks(net)
    monkeypatch.undo()
    assert not activation_memory.should_compile_blocks(DitSpec(autoencoder=None).load(Placement()).net)


def test_missing_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TrainingError, match=r"engine\.compile.*C\+\+.*TM288"):
        check_engine_config(EngineConfig(device="cpu", compile=True), torch.device("cpu"), 1)
    with pytest.raises(TrainingError, match=r"tf32.*TM287"):
        check_engine_config(EngineConfig(device="cpu", compile=True, precision="tf32"), torch.device("cpu"), 1)
    check_engine_config(EngineConfig(device="cpu"), torch.device("cpu"), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # from PyTorch itself
def test_extra_forward_methods_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Trace without code generation, which takes minutes on a CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(gpt, "MAX_CHUNK_LOGITS", 1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = GPT(GPTConfig(width=16, depth=2, heads=2, codebook_size=32, grid_size=2, vocabulary=4, multiple_of=16))
    ids, cond = torch.randint(0, 32, (3, 4)), torch.tensor([0, 1, 4])
    plain = gpt.hidden_states_and_head(net, ids, cond)
    activation_memory.compile_whole(net, NetworkTraits(extra_forward_methods=(GPT.hidden_states.__name__,)))
    counters.clear()
    compiled = gpt.hidden_states_and_head(net, ids, cond)
    assert counters["stats"]["unique_graphs"] == 1
    assert plain is not None and compiled is not None
    torch.testing.assert_close(compiled[0], plain[0])
    torch.testing.assert_close(net(ids[:, :-1], cond)[0], torch.nn.functional.linear(*plain))
