"""Small published generators learning on several ranks, a script each of them runs: FOLDER RANK WORLD."""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import toys
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.config.schema import BatchConfig, EngineConfig, OptimConfig
from tastemaker.core.lora import Lora
from tastemaker.core.weights import FullFinetuning
from tastemaker.data.prompts import PromptDataset
from tastemaker.objectives.grpo import GRPO
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.objectives.srpo import SRPO
from tastemaker.training import distributed
from tastemaker.training.engine import Engine, TrainingError
from tastemaker.training.loop import train_step
from tastemaker.training.run import Run

COLOURS = SRPO(praise=("white",), blame=("grey",), template="{prompt} {word}", margin=None)
CASES = {
    "flux-srpo": ("flux", COLOURS, FullFinetuning()),
    "flux-gradient": ("flux", RewardGradient(tail=2), FullFinetuning()),
    "sd3-grpo": ("sd3", GRPO(group=4), Lora(rank=4)),
    "qwen_image-grpo": ("qwen_image", GRPO(group=4), FullFinetuning()),
    "sd15-gradient": ("sd15", RewardGradient(tail=1), Lora(rank=4)),
    "sdxl-gradient": ("sdxl", RewardGradient(through="single", span=(1, 3)), FullFinetuning()),
}


def plan(world: int) -> dict[str, dict[str, Any]]:
    """What is run, and how: the network in shards, or tokens of the same rows on both ranks."""
    recomputed = {case: "recompute" if case.startswith("flux") else "keep" for case in CASES}
    sharded = {case: {"strategy": "fsdp", "memory": memory} for case, memory in recomputed.items()}
    split = {
        "flux-srpo:replicated": {"context": world, "memory": "recompute"},
        "flux-gradient:replicated": {"context": world},
        "flux-gradient:fsdp": {"context": world, "strategy": "fsdp", "memory": "recompute"},
        "qwen_image-grpo:replicated": {"context": world},
    }
    return {**sharded, **split}


class Downhill:
    """Plain gradient descent, in which what is nearly nothing stays so; it keeps the gradients it saw."""

    def __init__(self, engine: Engine) -> None:
        self.parameters, self.gradients = engine.parameters, {}
        engine.optimizer = self

    @torch.no_grad()
    def update(self, lr: float) -> None:
        for name, p in self.parameters.items():
            if p.grad is not None:
                self.gradients[name] = distributed.full_tensor(p.grad).clone()
                p -= lr * p.grad


def trained(case: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and gradient of the second of two steps, which begins where the first ended."""
    torch.manual_seed(0)  # of adapters
    name, objective, tuning = CASES[case]
    # Of Qwen-Image texts are as long as the longest, here an odd number of letters and the end.
    prompts = tuple(f"{prompt} " for prompt in toys.PROMPTS) if name == "qwen_image" else toys.PROMPTS
    engine = Engine(EngineConfig(device="cpu", **settings), OptimConfig(lr=1e-2, clip=0.0), 2, seed=0)
    run = Run(
        toys.policy(name, tuning, objective.snapshots()),
        objective,
        toys.rubric(),
        PromptDataset(prompts, ({},) * len(prompts), 0),
        engine,
        Path(),
        steps=2,
        batch=BatchConfig(prompts=4),
    )
    kept, parts = Downhill(engine), tokens(run.policy.weights.net)
    told = [train_step(run, step) for step in range(2)]
    if isinstance(objective, GRPO):
        assert all(update.metrics["ratio"] == 1 for update in told), told
    if "context" in settings:
        assert engine.rows.world == engine.comm.world // settings["context"]
        assert set(parts) == {4 // settings["context"]}, parts
    return {"loss": torch.tensor(told[1].metrics["loss"]), **kept.gradients}


def tokens(net: Any) -> list[int]:
    """How many of a picture's tokens the first attention is asked about at each call, as they come."""
    seen: list[int] = []
    for block in getattr(net, "transformer_blocks", ())[:1]:
        block.attn.register_forward_pre_hook(lambda _, given, named: seen.append(shown(given, named)), with_kwargs=True)
    return seen


def shown(given: tuple[Any, ...], named: dict[str, Any]) -> int:
    return int((named["hidden_states"] if "hidden_states" in named else given[0]).shape[1])


def refusal(name: str, world: int, words: int) -> str:
    """What is said of a network, or of texts, that cannot be cut."""
    policy = toys.policy(name)
    engine = Engine(EngineConfig(device="cpu", context=world), OptimConfig(), 1, seed=0)
    try:
        engine.prepare(policy.weights)
        cond = policy.embed(["a"])
        cond.tensors["words"] = cond.tensors["words"][:, :words]
        policy.model.predict(torch.zeros(1, *policy.model.shape), torch.ones(1), cond)
    except TrainingError as error:
        return str(error)
    return ""


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    # GRPO's loss is a mean of advantages of size one that cancel, so that rounding is all that is left of it.
    torch.testing.assert_close(found.pop("loss"), expected.pop("loss"), rtol=1e-4, atol=1e-4)
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-4 * largest, msg=lambda m, n=name: f"{n}: {m}")


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), rank=rank, world_size=world)
    report: dict[str, str] = {}
    case = ""
    try:
        for case, settings in plan(world).items():
            compare(trained(case.split(":")[0], settings), load_file(folder / f"{case.split(':')[0]}.safetensors"))
            report[case] = "passed"
        case = "refusals"
        assert "SD3Transformer2DModel cannot be cut by its tokens" in refusal("sd3", world, 2)
        assert "4 tokens of pictures, 15 of texts and 2 heads cannot be shared" in refusal("flux", world, 15)
        report[case] = "passed"
    except BaseException:
        report[case] = traceback.format_exc()
        raise
    finally:
        (folder / f"report-{world}-{rank}.json").write_text(json.dumps(report))
        if sys.exc_info()[0]:
            os._exit(1)  # the others would wait for this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
