"""A step of GRPO by LlamaGen, free-running and teacher-forced: what takes how long."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from device import CUDA, DEVICE, forget, gib, seconds, settle  # beside this file, in no package
from llamagen_networks import Options
from sections import Keep, say
from torch import Tensor, nn

from tastemaker.core.distributions import Categorical, ChunkedCategorical
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, select_rows
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.llamagen.model import Llamagen, LlamagenBackbone
from tastemaker.models.nets.decoder_pool import compute_dtype
from tastemaker.models.nets.gpt import GPT
from tastemaker.models.nets.vq import VQ, VQConfig
from tastemaker.objectives.ppo import clipped_surrogate
from tastemaker.objectives.teacher_forcing import sample_tokens, teacher_forced_distribution
from tastemaker.processes.autoregressive import AutoregressiveProcess


def grpo(section: str, options: Options, keep: Keep) -> None:
    """A step of GRPO by GPT-XL, 8 samples of each of 32 prompts: what takes how long, free-running and forced."""
    tiny = options.tiny
    prompts, group, chunk, micro = (4, 2, 4, 2) if tiny else (32, 8, 128, 16)
    spec = Llamagen(size="XL", weights=None, codec=None, pixels=384)
    placement = Placement(DEVICE, torch.bfloat16 if CUDA else torch.float32, trained=torch.float32)
    model = (spec.tiny() if tiny else spec).load(placement)
    nn.init.normal_(model.net.get_parameter("output.weight"), std=0.05)
    if not tiny:
        model.codec = VQ(VQConfig()).to(DEVICE).requires_grad_(False)  # type: ignore[assignment]
    process = AutoregressiveProcess(top_k=min(2000, spec.codes), replay=False)
    weights = FullFinetuning().apply(model, ())
    optimizer = torch.optim.AdamW(model.net.parameters(), 1e-5, betas=(0.9, 0.95), fused=CUDA)
    bench = Learning(model, process, weights, optimizer, micro, section, keep)
    rng = Randomness(0, 0, torch.arange(prompts, device=DEVICE))
    for guidance in (Guidance(4.0, rollouts_only=True), None):
        bench.free(guidance, rng, group, chunk)
        if time.monotonic() > options.deadline - 25:
            return
    bench.forced(rng, group, 8 if not tiny else 2)
    bench.memory()


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.times: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        settle()
        began = time.perf_counter()
        yield
        settle()
        self.times[name] += time.perf_counter() - began


@dataclass(frozen=True)
class Learning:
    model: LlamagenBackbone
    process: AutoregressiveProcess
    weights: Any
    optimizer: torch.optim.Optimizer
    micro: int  # rows trained at once
    section: str
    keep: Keep

    def policy(self, guidance: Guidance | None) -> Policy[AutoregressiveProcess]:
        model = self.process.guide(self.model, guidance) if guidance else self.model
        return Policy(model, self.process, self.weights)

    def free(self, guidance: Guidance | None, rng: Randomness, group: int, chunk: int) -> None:
        """Rollouts, their log-probabilities once more, pictures, and the update; twice, for things are made once."""
        policy, rows = self.policy(guidance), rng.repeat(group)
        for _ in range(2):
            forget()
            clock = Clock()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
                for part in torch.arange(len(rows)).split(chunk):
                    cond = policy.embed([str(int(i) // group % 10) for i in part])
                    with clock.of("rollout"):
                        made = policy.sample(cond, select_rows(rows, part))
                    with clock.of("replay"):
                        segment = replace(made.segments[0], log_prob=self.replayed(policy, made))
                    with clock.of("pictures"):
                        self.shown(made.final)
                    with clock.of("update"):
                        self.updated(policy, made.cond, segment)
                with clock.of("update"):
                    self.stepped()
        self.tell("free-running" + (", guided" if guidance else ""), clock.times)

    @torch.no_grad()
    def replayed(self, policy: Policy[AutoregressiveProcess], made: Any) -> Tensor:
        (segment,), parts = made.segments, torch.arange(len(made)).split(self.micro)
        found = [
            policy.decide(select_rows(made.cond, r), select_rows(segment, r)).log_prob(segment.action[r]) for r in parts
        ]
        return torch.cat(found)

    def updated(self, policy: Policy[AutoregressiveProcess], cond: Any, segment: Any) -> None:
        for r in torch.arange(len(cond)).split(self.micro):
            part = select_rows(segment, r)
            log_prob = policy.decide(select_rows(cond, r), part).log_prob(part.action)
            gain, _ = clipped_surrogate(log_prob, part, torch.randn(len(r), device=DEVICE), 0.2)
            torch.autograd.backward(-gain.mean())

    def stepped(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forced(self, rng: Randomness, group: int, micro: int) -> None:
        """All samples of a picture by one call of the network."""
        policy, length = self.policy(None), self.model.shape[0]
        clean = (rng.uniform("clean", length) * 60).long()
        for _ in range(2):
            forget()
            clock = Clock()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
                for part in torch.arange(len(rng)).split(micro):
                    cond, seen = policy.embed([str(int(i) % 10) for i in part]), clean[part.to(DEVICE)]
                    with clock.of("rollout"):
                        tokens = drawing(policy, cond, seen, select_rows(rng, part).uniform("token", group, length))
                    with clock.of("pictures"):
                        self.shown(tokens.flatten(0, 1))
                    with clock.of("update"):
                        torch.autograd.backward(-teacher_forced_distribution(policy, cond, seen).each(tokens).mean())
                with clock.of("update"):
                    self.stepped()
        self.tell("teacher-forced", clock.times)

    @torch.no_grad()
    def shown(self, tokens: Tensor) -> None:
        for x in tokens.split(16):
            self.model.decode(x)

    def tell(self, name: str, times: dict[str, float]) -> None:
        total = sum(times.values())
        shares = {key: value / total for key, value in times.items()}
        said = ", ".join(f"{key} {value:.2f} s ({shares[key]:.0%})" for key, value in times.items())
        say(self.section, f"{name}: a step of {total:.2f} s; {said}; {gib():.1f} GiB at most")
        self.keep({"section": self.section, "step": name, "seconds": total, "shares": shares, "GiB": gib()})

    def memory(self) -> None:
        """What scoring takes beyond the network: all logits at once, or a few at a time."""
        net = self.model.net
        assert isinstance(net, GPT)
        shape, rows = net.shape, self.micro
        ids = torch.randint(0, shape.codes, (rows, shape.side**2), device=DEVICE)
        dtype = torch.bfloat16 if CUDA else compute_dtype(net, DEVICE)
        weight = net.output.weight.detach().to(dtype).requires_grad_()
        states = torch.randn(*ids.shape, shape.width, device=DEVICE, dtype=dtype, requires_grad=True)
        for name in ("all logits at once", "a few at a time"):
            forget()
            before = gib()

            def work(name: str = name) -> None:
                few = name.startswith("a few")
                here = ChunkedCategorical(states, weight) if few else Categorical((states @ weight.t()).float())
                torch.autograd.grad(here.log_prob(ids).mean(), (states, weight))

            spent = seconds(work)
            say(self.section, f"log-probabilities of {rows} rows, {name}: {gib() - before:.2f} GiB, {spent:.4f} s")
            self.keep({"section": self.section, "name": name, "ms": 1000 * spent, "GiB": gib() - before})


@torch.no_grad()
def drawing(policy: Policy[AutoregressiveProcess], cond: Any, seen: Tensor, uniform: Tensor) -> Tensor:
    return sample_tokens(policy.process, teacher_forced_distribution(policy, cond, seen), uniform)
