"""Compiled networks: in place, and the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_toys import data, full_weights, ready, same, whole
from engine_toys import learn as step_by_step
from torch._dynamo.utils import counters

from tastemaker.config.build import build, make_tiny
from tastemaker.config.load import load
from tastemaker.config.schema import EngineConfig
from tastemaker.core.lora import Lora
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.models.dit import Dit
from tastemaker.models.nets import decoder_pool
from tastemaker.models.nets.gpt import GPT, GPTConfig
from tastemaker.training import activation_memory
from tastemaker.training.errors import TrainingError
from tastemaker.training.loop import generate_samples, train_step
from tastemaker.training.precision import check_engine_config
from tastemaker.training.run import Run


def prepared(folder: Path, *, compile: bool) -> Run:
    engine = ["engine.device=cpu", "engine.precision=fp32", "data.device=cpu", "batch.prompts=8", "sample.count=8"]
    config = make_tiny(load("playground-flow16", engine))
    return build(replace(config, engine=replace(config.engine, compile=compile)), folder / str(compile))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_a_compiled_network_learns_and_samples_the_same(tmp_path: Path) -> None:
    runs = [prepared(tmp_path, compile=compile) for compile in (False, True)]
    names = [list(run.policy.weights.trainable()) for run in runs]
    assert names[0] == names[1]
    plain, compiled = ([train_step(run, step).metrics["loss"] for step in range(3)] for run in runs)
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert torch.allclose(generate_samples(runs[0], 3).pixels, generate_samples(runs[1], 3).pixels, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of PyTorch, about itself
def test_equal_blocks_share_their_graphs_and_nothing_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_memory, "MIN_PARAMETERS", 1)
    monkeypatch.setattr(activation_memory, "MIN_BLOCKS", 3)
    ends = []
    for compile in (False, True):
        torch._dynamo.reset()
        counters.clear()
        weights = full_weights()
        engine = ready(weights, memory="recompute", compile=compile)
        for step in range(3):
            with engine.computing(), torch.no_grad():
                weights.net(data()[:2])
            step_by_step(engine, weights, step, parts=1)
            # One without a gradient, for sampling, and one with, for all three blocks and their repetition.
            assert counters["stats"]["unique_graphs"] == (2 if compile else 0)
        ends.append(whole(weights.trainable()))
    same(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of PyTorch, about itself
def test_compiled_adapters_leave_out_the_same_step_after_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_memory, "MIN_PARAMETERS", 1)
    monkeypatch.setattr(activation_memory, "MIN_BLOCKS", 3)
    ends = []
    for compile in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        weights = Lora(rank=2, targets="all-linear", dropout=0.3).apply(full_weights(), ())
        engine = ready(weights, memory="recompute", compile=compile)
        for step in range(3):
            with weights.dropping(Randomness(0, step, torch.arange(4))):
                step_by_step(engine, weights, step, parts=1)
        assert counters["stats"]["unique_graphs"] == (1 if compile else 0)  # whichever block, row or step it is
        ends.append(whole(weights.trainable()))
    same(*ends, rtol=1e-3, atol=1e-5)


def test_only_large_networks_of_many_equal_blocks_are_compiled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    net = full_weights().net
    assert not activation_memory.should_compile_blocks(net)
    monkeypatch.setattr(activation_memory, "MIN_PARAMETERS", 1)
    assert not activation_memory.should_compile_blocks(net)  # three blocks
    monkeypatch.setattr(activation_memory, "MIN_BLOCKS", 3)
    assert activation_memory.should_compile_blocks(net)
    monkeypatch.undo()
    assert not activation_memory.should_compile_blocks(Dit(codec=None).load(Placement()).net)


def test_without_a_compiler_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TrainingError, match=r"engine\.compile is true, but a C\+\+ compiler was not found here"):
        check_engine_config(EngineConfig(device="cpu", compile=True), torch.device("cpu"), 1)
    with pytest.raises(TrainingError, match="cannot be combined with tf32"):
        check_engine_config(EngineConfig(device="cpu", compile=True, precision="tf32"), torch.device("cpu"), 1)
    check_engine_config(EngineConfig(device="cpu"), torch.device("cpu"), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of PyTorch, about itself
def test_a_transformer_is_compiled_where_its_logits_are_too_many_to_be_made_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All of the compiler but the translation, which takes minutes on a CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(decoder_pool, "MAX_CHUNK_LOGITS", 1)
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = GPT(GPTConfig(width=16, depth=2, heads=2, codes=32, side=2, vocabulary=4, multiple=16))
    ids, cond = torch.randint(0, 32, (3, 4)), torch.tensor([0, 1, 4])
    plain = decoder_pool.hidden_states_and_head(net, ids, cond)
    activation_memory.compile_whole(net)
    counters.clear()
    compiled = decoder_pool.hidden_states_and_head(net, ids, cond)
    assert counters["stats"]["unique_graphs"] == 1
    assert plain is not None and compiled is not None
    torch.testing.assert_close(compiled[0], plain[0])
    torch.testing.assert_close(net(ids[:, :-1], cond)[0], torch.nn.functional.linear(*plain))
