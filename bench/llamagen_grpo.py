"""Time of a GRPO step of LlamaGen by phase, free-running and teacher-forced."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from device import CUDA, DEVICE, PhaseTimer, median_seconds, peak_gib, reset_memory  # beside this file, in no package
from llamagen_networks import LlamagenOptions
from sections import Record, log
from torch import Tensor, nn

from tastemaker.core.distributions import Categorical, ChunkedCategorical
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement, select_rows
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.llamagen.model import LlamagenBackbone, LlamagenSpec
from tastemaker.models.nets.gpt import GPT, compute_dtype
from tastemaker.models.nets.vq import VQ, VQConfig
from tastemaker.objectives.ppo import clipped_surrogate
from tastemaker.objectives.teacher_forced_grpo import sample_tokens, teacher_forced_distribution
from tastemaker.processes.autoregressive import AutoregressiveProcess


def measure_grpo(section: str, options: LlamagenOptions, record: Record) -> None:
    """Time a GRPO step of GPT-XL with 8 samples for each of 32 prompts, free-running and teacher-forced."""
    tiny = options.tiny
    num_prompts, group_size, rollout_size, micro_size = (4, 2, 4, 2) if tiny else (32, 8, 128, 16)
    spec = LlamagenSpec(variant="XL", weights=None, autoencoder=None, image_size=384)
    placement = Placement(DEVICE, torch.bfloat16 if CUDA else torch.float32, trainable_dtype=torch.float32)
    model = (spec.tiny() if tiny else spec).load(placement)
    nn.init.normal_(model.net.get_parameter("output.weight"), std=0.05)
    if not tiny:
        model.autoencoder = VQ(VQConfig()).to(DEVICE).requires_grad_(False)  # type: ignore[assignment]
    process = AutoregressiveProcess(top_k=min(2000, spec.codebook_size), recompute_log_probs=False)
    weights = FullFinetuning().apply(model, ())
    optimizer = torch.optim.AdamW(model.net.parameters(), 1e-5, betas=(0.9, 0.95), fused=CUDA)
    step = GrpoStep(model, process, weights, optimizer, micro_size, section, record)
    rng = Randomness(0, 0, torch.arange(num_prompts, device=DEVICE))
    for guidance in (Guidance(4.0, rollouts_only=True), None):
        step.measure_free_running(guidance, rng, group_size, rollout_size)
        if time.monotonic() > options.deadline - 25:
            return
    step.measure_teacher_forced(rng, group_size, 2 if tiny else 8)
    step.measure_log_prob_memory()


@dataclass(frozen=True)
class GrpoStep:
    model: LlamagenBackbone
    process: AutoregressiveProcess
    weights: Any
    optimizer: torch.optim.Optimizer
    micro_batch_size: int
    section: str
    record: Record

    def policy(self, guidance: Guidance | None) -> Policy[AutoregressiveProcess]:
        model = self.process.wrap_guidance(self.model, guidance) if guidance else self.model
        return Policy(model, self.process, self.weights)

    def measure_free_running(
        self, guidance: Guidance | None, rng: Randomness, group_size: int, rollout_size: int
    ) -> None:
        """Time rollouts, recomputed log-probs, decoding and update. The second of two steps is reported."""
        policy, sample_rng = self.policy(guidance), rng.repeat(group_size)
        for _ in range(2):
            reset_memory()
            timer = PhaseTimer()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
                for batch in torch.arange(len(sample_rng)).split(rollout_size):
                    cond = policy.embed([str(int(i) // group_size % 10) for i in batch])
                    with timer.phase("rollout"):
                        rollout = policy.sample(cond, select_rows(sample_rng, batch))
                    with timer.phase("log-probs"):
                        segment = replace(rollout.segments[0], log_prob=self.recompute_log_probs(policy, rollout))
                    with timer.phase("decoding"):
                        self.decode(rollout.final)
                    with timer.phase("update"):
                        self.backward(policy, rollout.cond, segment)
                with timer.phase("update"):
                    self.step_optimizer()
        self.report("free-running" + (", guided" if guidance else ""), timer.seconds)

    @torch.no_grad()
    def recompute_log_probs(self, policy: Policy[AutoregressiveProcess], rollout: Any) -> Tensor:
        (segment,) = rollout.segments
        log_probs = []
        for batch in torch.arange(len(rollout)).split(self.micro_batch_size):
            distribution = policy.action_distribution(select_rows(rollout.cond, batch), select_rows(segment, batch))
            log_probs.append(distribution.log_prob(segment.action[batch]))
        return torch.cat(log_probs)

    def backward(self, policy: Policy[AutoregressiveProcess], cond: Any, segment: Any) -> None:
        for batch in torch.arange(len(cond)).split(self.micro_batch_size):
            part = select_rows(segment, batch)
            log_prob = policy.action_distribution(select_rows(cond, batch), part).log_prob(part.action)
            advantages = torch.randn(len(batch), device=DEVICE)
            surrogate, _ = clipped_surrogate(log_prob, part, advantages, 0.2)
            torch.autograd.backward(-surrogate.mean())

    def step_optimizer(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure_teacher_forced(self, rng: Randomness, group_size: int, micro_batch_size: int) -> None:
        """Time teacher-forced GRPO, where one network call samples all tokens of an image."""
        policy, length = self.policy(None), self.model.shape[0]
        clean = (rng.uniform("clean", length) * 60).long()
        for _ in range(2):
            reset_memory()
            timer = PhaseTimer()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
                for batch in torch.arange(len(rng)).split(micro_batch_size):
                    cond, context = policy.embed([str(int(i) % 10) for i in batch]), clean[batch.to(DEVICE)]
                    with timer.phase("rollout"), torch.no_grad():
                        uniform = select_rows(rng, batch).uniform("token", group_size, length)
                        distribution = teacher_forced_distribution(policy, cond, context)
                        tokens = sample_tokens(policy.process, distribution, uniform)
                    with timer.phase("decoding"):
                        self.decode(tokens.flatten(0, 1))
                    with timer.phase("update"):
                        distribution = teacher_forced_distribution(policy, cond, context)
                        torch.autograd.backward(-distribution.log_probs(tokens).mean())
                with timer.phase("update"):
                    self.step_optimizer()
        self.report("teacher-forced", timer.seconds)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> None:
        for x in tokens.split(16):
            self.model.decode(x)

    def report(self, name: str, seconds: dict[str, float]) -> None:
        total = sum(seconds.values())
        shares = {phase: value / total for phase, value in seconds.items()}
        text = ", ".join(f"{phase} {value:.2f} s ({shares[phase]:.0%})" for phase, value in seconds.items())
        log(self.section, f"{name}: a step of {total:.2f} s; {text}; peak {peak_gib():.1f} GiB")
        self.record({"section": self.section, "step": name, "seconds": total, "shares": shares, "GiB": peak_gib()})

    def measure_log_prob_memory(self) -> None:
        """Measure the memory of log-probs beyond the network: all logits at once, or in chunks."""
        net = self.model.net
        assert isinstance(net, GPT)
        config, batch_size = net.config, self.micro_batch_size
        ids = torch.randint(0, config.codebook_size, (batch_size, config.grid_size**2), device=DEVICE)
        dtype = torch.bfloat16 if CUDA else compute_dtype(net, DEVICE)
        weight = net.output.weight.detach().to(dtype).requires_grad_()
        states = torch.randn(*ids.shape, config.width, device=DEVICE, dtype=dtype, requires_grad=True)

        def all_at_once() -> None:
            distribution = Categorical((states @ weight.t()).float())
            torch.autograd.grad(distribution.log_prob(ids).mean(), (states, weight))

        def in_chunks() -> None:
            distribution = ChunkedCategorical(states, weight)
            torch.autograd.grad(distribution.log_prob(ids).mean(), (states, weight))

        for name, work in (("all logits at once", all_at_once), ("in chunks", in_chunks)):
            reset_memory()
            before = peak_gib()
            seconds = median_seconds(work)
            memory = peak_gib() - before
            log(self.section, f"log-probs of {batch_size} images, {name}: {memory:.2f} GiB, {seconds:.4f} s")
            self.record({"section": self.section, "name": name, "ms": 1000 * seconds, "GiB": memory})
