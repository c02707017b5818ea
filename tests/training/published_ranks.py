"""Train small published generators on several ranks; each rank runs published_ranks.py DIRECTORY RANK WORLD_SIZE."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

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

FLUX, FLUX2, LTX = (toys.GENERATORS[name] for name in ("flux", "flux2", "ltx"))
# 720x720 pixels, SRPO's own size, are 45x45 tokens: an odd number, as of these 3x3.
toys.GENERATORS["flux_odd"] = replace(FLUX, spec=replace(FLUX.spec, height=48, width=48, max_text_tokens=15))
toys.GENERATORS["flux2_odd"] = replace(FLUX2, spec=replace(FLUX2.spec, height=48, width=48, max_text_tokens=15))
toys.GENERATORS["flux2_edit"] = toys.GENERATORS["flux2_odd"]  # with two source images
toys.GENERATORS["ltx_odd"] = replace(LTX, spec=replace(LTX.spec, frames=17))
LTX2 = toys.GENERATORS["ltx2"]
toys.GENERATORS["ltx2_odd"] = replace(LTX2, spec=replace(LTX2.spec, frames=17, height=96, width=96))
COLOR_SRPO = SRPO(positive_words=("white",), negative_words=("grey",), template="{prompt} {word}", reward_margin=None)
CASES = {
    "flux-srpo": ("flux", COLOR_SRPO, FullFinetuning()),
    "flux-gradient": ("flux", RewardGradient(last_steps=2), FullFinetuning()),
    "sd3-grpo": ("sd3", GRPO(group_size=4), Lora(rank=4)),
    "qwen_image-grpo": ("qwen_image", GRPO(group_size=4), FullFinetuning()),
    "sd15-gradient": ("sd15", RewardGradient(last_steps=1), Lora(rank=4)),
    "flux_odd-gradient": ("flux_odd", RewardGradient(last_steps=2), FullFinetuning()),
    "flux2_odd-gradient": ("flux2_odd", RewardGradient(last_steps=2), FullFinetuning()),
    "flux2_edit-gradient": ("flux2_edit", RewardGradient(last_steps=1), FullFinetuning()),
    "wan-gradient": ("wan", RewardGradient(last_steps=2), FullFinetuning()),
    "ltx_odd-gradient": ("ltx_odd", RewardGradient(last_steps=2), FullFinetuning()),
    "wan_i2v-gradient": ("wan_i2v", RewardGradient(last_steps=2, frames="last"), FullFinetuning()),
    "ltx2_odd-gradient": ("ltx2_odd", RewardGradient(last_steps=2, frames="first"), FullFinetuning()),
    "sdxl-gradient": ("sdxl", RewardGradient(gradient_mode="single_step", step_range=(1, 3)), FullFinetuning()),
}


# In bf16, the default here, gradients differ by a percent of the largest element of their tensor.
PRECISION: dict[str, Literal["fp32"]] = {"flux2_odd": "fp32", "flux2_edit": "fp32"}
METADATA: dict[str, dict[str, Any]] = {"flux2_edit": {"image": [str(toys.IMAGE)] * 2}}
IMAGE_TOKENS = {
    "flux": 4, "qwen_image": 4, "flux_odd": 9, "flux2_odd": 9, "flux2_edit": 27, "wan": 8, "ltx_odd": 3, "wan_i2v": 8,
    "ltx2_odd": 27,
}  # fmt: skip


def cases(world_size: int) -> dict[str, dict[str, Any]]:
    """Return the cases: sharded networks, and context parallelism over all ranks."""
    memory = {case: "checkpoint" if case.startswith("flux") else "keep" for case in CASES}
    split_only = (
        "flux_odd-gradient", "flux2_odd-gradient", "flux2_edit-gradient", "wan-gradient", "ltx_odd-gradient",
        "wan_i2v-gradient", "ltx2_odd-gradient",
    )  # fmt: skip
    sharded = {
        case: {"strategy": "fsdp", "activation_memory": activation_memory}
        for case, activation_memory in memory.items()
        if case not in split_only
    }
    split = {
        "flux-srpo:replicated": {"context_parallel": world_size, "activation_memory": "checkpoint"},
        "flux-gradient:replicated": {"context_parallel": world_size},
        "flux-gradient:fsdp": {"context_parallel": world_size, "strategy": "fsdp", "activation_memory": "checkpoint"},
        "qwen_image-grpo:replicated": {"context_parallel": world_size},
        "flux_odd-gradient:replicated": {"context_parallel": world_size, "activation_memory": "checkpoint"},
        "flux2_odd-gradient:replicated": {"context_parallel": world_size, "activation_memory": "checkpoint"},
        "flux2_edit-gradient:replicated": {"context_parallel": world_size},
        "wan-gradient:replicated": {"context_parallel": world_size},
        "ltx_odd-gradient:replicated": {"context_parallel": world_size},
        "wan_i2v-gradient:replicated": {"context_parallel": world_size},
        "ltx2_odd-gradient:replicated": {"context_parallel": world_size},
    }
    return {**sharded, **split}


class RecordedSGD:
    """Plain gradient descent, which does not amplify rounding errors as AdamW does; it records the gradients."""

    def __init__(self, engine: Engine) -> None:
        self.parameters, self.gradients = engine.parameters, {}
        engine.optimizer = self

    @torch.no_grad()
    def update(self, lr: float) -> None:
        for name, p in self.parameters.items():
            if p.grad is not None:
                self.gradients[name] = distributed.full_tensor(p.grad).clone()
                p -= lr * p.grad


def train(case: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return loss and gradient of the second of two steps."""
    torch.manual_seed(0)  # for LoRA weights
    name, objective, tuning = CASES[case]
    # Texts of Qwen-Image are padded to the longest, here an odd number of letters and the end token.
    prompts = tuple(f"{prompt} " for prompt in toys.PROMPTS) if name == "qwen_image" else toys.PROMPTS
    config = EngineConfig(device="cpu", precision=PRECISION.get(name, "auto"), **settings)
    engine = Engine(config, OptimConfig(lr=1e-2, max_grad_norm=0.0), 2, seed=0)
    run = Run(
        toys.policy(name, tuning, objective.snapshots()),
        objective,
        toys.rubric(),
        PromptDataset(prompts, (METADATA.get(name, {}),) * len(prompts), 0),
        engine,
        Path(),
        steps=2,
        batch=BatchConfig(prompts=4),
    )
    optimizer, token_counts = RecordedSGD(engine), record_tokens(run.policy.weights.net)
    steps = [train_step(run, step).to_event() for step in range(2)]
    if isinstance(objective, GRPO):
        assert all(step.metrics["ratio"] == 1 for step in steps), steps
    if "context_parallel" in settings:
        assert engine.data_parallel.world_size == engine.comm.world_size // settings["context_parallel"]
        share = IMAGE_TOKENS[name] / settings["context_parallel"]
        assert token_counts and set(token_counts) <= {math.floor(share), math.ceil(share)}, token_counts
    return {"loss": torch.tensor(steps[1].metrics["loss/policy"]), **optimizer.gradients}


def record_tokens(net: Any) -> list[int]:
    """Record the number of image tokens in each call of the first attention layer."""
    counts: list[int] = []
    for block in list(getattr(net, "transformer_blocks", getattr(net, "blocks", ())))[:1]:
        attention = getattr(block, "attn", getattr(block, "attn1", None))
        attention.register_forward_pre_hook(
            lambda _, inputs, kwargs: counts.append(num_tokens(inputs, kwargs)), with_kwargs=True
        )
    return counts


def num_tokens(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int((kwargs["hidden_states"] if "hidden_states" in kwargs else inputs[0]).shape[1])


def refusal(name: str, world_size: int) -> str:
    """Return the message for a network that context parallelism refuses."""
    policy = toys.policy(name)
    engine = Engine(EngineConfig(device="cpu", context_parallel=world_size), OptimConfig(), 1, seed=0)
    try:
        engine.prepare(policy.weights)
        cond = policy.embed(["a"])
        policy.model.predict(torch.zeros(1, *policy.model.shape), torch.ones(1), cond)
    except TrainingError as error:
        return str(error)
    return ""


def compare(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
    # The loss of GRPO is a mean of advantages that cancel, so only rounding errors are left.
    torch.testing.assert_close(result.pop("loss"), expected.pop("loss"), rtol=1e-4, atol=1e-4)
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        torch.testing.assert_close(result[name], x, rtol=1e-3, atol=1e-4 * largest, msg=lambda m, n=name: f"{n}: {m}")


def main(directory: Path, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{directory}/rendezvous", timedelta(seconds=60), rank=rank, world_size=world_size
    )
    report: dict[str, str] = {}
    case = ""
    try:
        for case, settings in cases(world_size).items():
            compare(train(case.split(":")[0], settings), load_file(directory / f"{case.split(':')[0]}.safetensors"))
            report[case] = "passed"
        case = "refusals"
        assert "SD3Transformer2DModel" in refusal("sd3", world_size)
        report[case] = "passed"
    except BaseException:
        report[case] = traceback.format_exc()
        raise
    finally:
        (directory / f"report-{world_size}-{rank}.json").write_text(json.dumps(report))
        if sys.exc_info()[0]:
            os._exit(1)  # the others would wait for this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
