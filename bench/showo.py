"""Sampling speed of Show-o: twenty candidates of one prompt with random weights, against the published code.

    python bench/showo.py --out showo.json          # on a GPU: 1.45 billion weights, 256 pixels, 18 steps
    python bench/showo.py --tiny --out tiny.json    # small networks, on any machine

The prompt is read once, padding is left out, only logits of image codes are computed, and all candidates step together.
Tokens equal those of reading everything at every step, which is checked in float32 and in the dtype of the timing.
A step of twenty guided candidates is 42 TFLOP in the published code and 26 here, so that 18 steps take at least 1.5 and
0.9 s at 500 TFLOP/s. Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, median_seconds, peak_gib, print_header, synchronize  # beside this file, in no package
from sections import Record, Results, log, log_errors, result_writer, run_sections, section_parser
from torch import Tensor

from tastemaker.core.distributions import Categorical
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import MASK_TOKEN_ID, Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.loading import init_random
from tastemaker.models.nets.showo import build_phi
from tastemaker.models.showo.model import ShowoBackbone, ShowoSpec
from tastemaker.models.showo.prompt_tokenizer import BYTE_TOKENIZER
from tastemaker.processes.masked import MaskedProcess, UncachedMaskedPredictor
from tastemaker.training.activation_memory import compile_blocks

sys.path.insert(0, str(Path(__file__).parent / "baselines"))
from plain_showo import generate  # beside this file, in no package

SECTIONS = {"eager": 50, "compiled": 45}  # seconds
DTYPE = torch.bfloat16 if CUDA else torch.float32  # of the timing
GUIDANCE_WEIGHT = 1.75
MAX_FLOAT32_CANDIDATES = 4  # enough to compare tokens
PROMPT = "a photo of a red bench below a clock"


@dataclass(frozen=True)
class ShowoCase:
    spec: ShowoSpec
    candidates: int
    steps: int

    def load(self, dtype: torch.dtype) -> ShowoBackbone:
        model = self.spec.load(Placement(DEVICE, dtype))
        model.net.requires_grad_(False)
        return model

    def policy(self, model: ShowoBackbone) -> Policy[MaskedProcess]:
        process = MaskedProcess(self.steps, recompute_log_probs=False)
        guided = process.wrap_guidance(model, Guidance(1 + GUIDANCE_WEIGHT))
        return Policy(guided, process, FullFinetuning().apply(model, ()))

    def start(self, model: ShowoBackbone) -> Any:
        """Return a rollout of all candidates before its first step."""
        policy, rng = self.policy(model), Randomness(0, 0, torch.arange(self.candidates, device=DEVICE))
        return policy.rollout(policy.embed([PROMPT]).repeat(self.candidates), rng)

    @torch.no_grad()
    def sample(self, model: ShowoBackbone) -> Tensor:
        """Sample all candidates together."""
        final: Tensor = self.start(model).finish().final
        return final


@dataclass(frozen=True)
class ShowoBenchmark:
    case: ShowoCase
    section: str
    record: Record

    def load(self, dtype: torch.dtype) -> ShowoBackbone:
        start = time.perf_counter()
        model = self.case.load(dtype)
        synchronize()
        billions = sum(p.numel() for p in model.net.parameters()) / 1e9
        log(self.section, f"{billions:.2f} billion weights in {dtype} after {time.perf_counter() - start:.1f} s")
        return model

    def measure(self, name: str, work: Callable[[], Any], repeats: int, factor: float = 1.0, note: str = "") -> None:
        with log_errors(self.section, name):
            seconds = factor * median_seconds(work, repeats)
            log(self.section, f"{name}: {seconds:.3f} s {note}")
            sizes = {"candidates": self.case.candidates, "steps": self.case.steps}
            self.record({"section": self.section, "name": name, "seconds": seconds, "note": note, **sizes})

    def run_eager(self) -> None:
        """Measure everything that needs no compiler: speed, and which tokens are equal."""
        model = self.load(DTYPE)
        self.measure("prompt read once", lambda: self.case.sample(model), 2)
        self.measure_baseline(model)
        if CUDA:
            self.compare_tokens(self.case, model, DTYPE)
            del model
            model = self.load(torch.float32)
        few = replace(self.case, candidates=min(MAX_FLOAT32_CANDIDATES, self.case.candidates))
        self.compare_tokens(few, model, torch.float32)

    def measure_baseline(self, model: ShowoBackbone) -> None:
        """Time the published code with all candidates together and one by one."""
        case = self.case
        net = init_random(lambda: build_phi(case.spec.network_config()), 0, Placement(DEVICE, DTYPE))
        net.requires_grad_(False)
        prompt, empty = torch.split(model.prompt_tokenizer([PROMPT, ""]).to(DEVICE), 1)

        def sample(batch_size: int) -> Tensor:
            text = torch.cat([prompt.expand(batch_size, -1), empty.expand(batch_size, -1)])
            return generate(net, text, model.vocabulary, case.spec.shape[0], case.steps, GUIDANCE_WEIGHT)

        self.measure("together", lambda: sample(case.candidates), 1)
        note = f"extrapolated from the median of 3 of {case.candidates}"
        self.measure("one by one", lambda: sample(1), 3, case.candidates, note)

    def compare_tokens(self, case: ShowoCase, model: ShowoBackbone, dtype: torch.dtype) -> None:
        name = f"equal in {dtype}".replace("torch.", "")
        with log_errors(self.section, name):
            shares = Sampled.of(case, model, cached=False).equal_shares(case, model)
            log(self.section, f"{name}, {case.candidates} candidates: {shares}")
            self.record({"section": self.section, "name": name, **shares, "candidates": case.candidates})

    def run_compiled(self) -> None:
        model, start = self.load(DTYPE), time.perf_counter()
        eager = Sampled.of(self.case, model)
        compile_blocks(model.net)
        self.case.sample(model)
        synchronize()
        log(self.section, f"compiled and sampled once in {time.perf_counter() - start:.0f} s")
        self.measure("prompt read once, compiled", lambda: self.case.sample(model), 2)
        name = f"compiled, equal in {DTYPE}".replace("torch.", "")
        with log_errors(self.section, name):
            shares = eager.equal_shares(self.case, model)
            log(self.section, f"{name}, {self.case.candidates} candidates: {shares}")
            self.record({"section": self.section, "name": name, **shares, "candidates": self.case.candidates})
        self.record({"section": self.section, "name": "peak", "GiB": peak_gib()})


@dataclass(frozen=True)
class Sampled:
    """Images that were sampled in one way, to be compared with another way."""

    rollout: Any

    @classmethod
    @torch.no_grad()
    def of(cls, case: ShowoCase, model: ShowoBackbone, *, cached: bool = True) -> Sampled:
        """Sample all candidates together; the prompt is read once (`cached`) or at every step."""
        rollout = case.start(model)
        if not cached:
            rollout.predictor = UncachedMaskedPredictor(rollout.model, rollout.cond)
        rollout.finish()
        return cls(rollout)

    @torch.no_grad()
    def equal_shares(self, case: ShowoCase, model: ShowoBackbone) -> dict[str, float]:
        """Return the share of tokens that are equal if the prompt is read once and the network is as it is now.

        In whole images a different token changes all later ones; single steps start from the same state.
        """
        shares, other = [], case.start(model)
        for step, segment in enumerate(self.rollout.segments):
            logits = other.predictor.predict(segment.state, segment.t).float()
            masked = segment.state == MASK_TOKEN_ID
            shares.append(
                (Categorical(logits).sample(other.rng, "token", step) == segment.action)[masked].float().mean()
            )
        images = (case.sample(model) == self.rollout.preview()).float().mean()
        return {"of images": float(images), "of steps": float(torch.stack(shares).mean())}


def print_table(results: Results) -> None:
    seconds = {result["name"]: result["seconds"] for result in results if "seconds" in result}
    print_header()
    print("| sampler | s | vs one by one | vs together | |\n|---|---|---|---|---|")
    for result in results:
        if "seconds" in result:
            baselines = [seconds.get(name) for name in ("one by one", "together")]
            speedups = " | ".join(f"{baseline / result['seconds']:.2f}x" if baseline else "" for baseline in baselines)
            print(f"| {result['name']} | {result['seconds']:.3f} | {speedups} | {result['note']} |")
        elif "of images" in result:
            shares = f"{result['of images']:.2%} of the tokens of images, {result['of steps']:.2%} of single steps"
            print(f"{result['name']}: {shares}")


def full_spec() -> ShowoSpec:
    return replace(ShowoSpec(), weights=None, autoencoder=None, tokenizer=BYTE_TOKENIZER)


def tiny_spec() -> ShowoSpec:
    return full_spec().tiny()


def main() -> None:
    options = section_parser(",".join(SECTIONS) if CUDA else "eager", 95.0).parse_args()
    if not options.section:
        print_table(run_sections(__file__, SECTIONS, options))
        return
    case = ShowoCase(tiny_spec(), 4, 4) if options.tiny else ShowoCase(full_spec(), 20, 18)
    bench = ShowoBenchmark(case, options.section, result_writer(options.out))
    {"eager": bench.run_eager, "compiled": bench.run_compiled}[options.section]()


if __name__ == "__main__":
    main()
