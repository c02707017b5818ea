"""How fast Show-o paints twenty candidates of one prompt at random weights, beside code written straight down.

    python bench/showo.py --out showo.json          # on a GPU: 1.45 billion weights, 256 pixels, 18 steps
    python bench/showo.py --tiny --out tiny.json    # the same lines at small size, on any machine

A prompt is read once, filling is left out, only logits of codes are computed, and all candidates step together. Tokens
are the same as when everything is read at every step: counted here in float32 and in what the speed is measured in.
A step of twenty guided candidates is 42 TFLOP plainly and 26 here, so 18 of them take at least 1.5 and 0.9 s at
500 TFLOP/s. Every section is a process of its own with a time limit, which tells each number once it is known.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA, DEVICE, gib, seconds, settle  # beside this file, in no package
from sections import Found, Keep, carry_out, keeper, say, spared
from torch import Tensor

from tastemaker.core.distributions import Categorical
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import MASK_TOKEN_ID, Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.loading import init_random
from tastemaker.models.nets.showo import build_phi
from tastemaker.models.showo.model import Showo, ShowoBackbone
from tastemaker.models.showo.prompt_tokenizer import BYTE_TOKENIZER
from tastemaker.processes.masked import MaskedProcess, UncachedMaskedPredictor
from tastemaker.training.activation_memory import compile_blocks

sys.path.insert(0, str(Path(__file__).parent / "baselines"))
from plain_showo import painted  # beside this file, in no package

SECTIONS = {"eager": 50, "compiled": 45}  # seconds at most
DTYPE = torch.bfloat16 if CUDA else torch.float32  # that speed is measured in
WEIGHT = 1.75
FEW = 4  # candidates that are enough to count tokens by in float32
PROMPT = "a photo of a red bench below a clock"


@dataclass(frozen=True)
class Case:
    spec: Showo
    candidates: int
    steps: int

    def load(self, dtype: torch.dtype) -> ShowoBackbone:
        model = self.spec.load(Placement(DEVICE, dtype))
        model.net.requires_grad_(False)
        return model

    def policy(self, model: ShowoBackbone) -> Policy[MaskedProcess]:
        process = MaskedProcess(self.steps, replay=False)
        return Policy(process.guide(model, Guidance(1 + WEIGHT)), process, FullFinetuning().apply(model, ()))

    @torch.no_grad()
    def sample(self, model: ShowoBackbone) -> Tensor:
        """All candidates together."""
        policy = self.policy(model)
        cond = policy.embed([PROMPT]).repeat(self.candidates)
        return policy.sample(cond, Randomness(0, 0, torch.arange(self.candidates, device=DEVICE))).final


@dataclass(frozen=True)
class Bench:
    case: Case
    section: str
    keep: Keep

    def loaded(self, dtype: torch.dtype) -> ShowoBackbone:
        began = time.perf_counter()
        model = self.case.load(dtype)
        settle()
        count = sum(p.numel() for p in model.net.parameters()) / 1e9
        say(self.section, f"{count:.2f} billion weights in {dtype} after {time.perf_counter() - began:.1f} s")
        return model

    def timed(self, name: str, work: Callable[[], Any], repeats: int, times: float = 1.0, note: str = "") -> None:
        with spared(self.section, name):
            spent = times * seconds(work, repeats)
            say(self.section, f"{name}: {spent:.3f} s{note}")
            told = {"seconds": spent, "note": note.strip(" ,"), **self.shape()}
            self.keep({"section": self.section, "name": name, **told})

    def shape(self) -> dict[str, int]:
        return {"candidates": self.case.candidates, "steps": self.case.steps}

    def eager(self) -> None:
        """All that takes no compiler: speed, and which tokens are the same."""
        model = self.loaded(DTYPE)
        self.timed("prompt read once", lambda: self.case.sample(model), 2)
        self.plain(model)
        if CUDA:
            self.agree(self.case, model, DTYPE)
            del model
            model = self.loaded(torch.float32)
        self.agree(replace(self.case, candidates=min(FEW, self.case.candidates)), model, torch.float32)

    def plain(self, model: ShowoBackbone) -> None:
        """Seconds of the candidates all together and one by one, by published code."""
        case = self.case
        net = init_random(lambda: build_phi(case.spec.sizes()), 0, Placement(DEVICE, DTYPE)).requires_grad_(False)
        words, tokens = model.vocabulary, case.spec.shape[0]
        own, none = torch.split(model.prompter([PROMPT, ""]).to(DEVICE), 1)

        def paint(rows: int) -> Tensor:
            text = torch.cat([own.expand(rows, -1), none.expand(rows, -1)])
            return painted(net, text, words, tokens, case.steps, WEIGHT)

        self.timed("together", lambda: paint(case.candidates), 1)
        note = f", by the median of 3 of {case.candidates}"
        self.timed("one by one", lambda: paint(1), 3, case.candidates, note)

    def agree(self, case: Case, model: ShowoBackbone, dtype: torch.dtype) -> None:
        name = f"alike in {dtype}".replace("torch.", "")
        with spared(self.section, name):
            found = alike(case, model)
            say(self.section, f"{name}, {case.candidates} candidates: {found}")
            self.keep({"section": self.section, "name": name, **found, "candidates": case.candidates})

    def compiled(self) -> None:
        model, began = self.loaded(DTYPE), time.perf_counter()
        compile_blocks(model.net)
        self.case.sample(model)
        settle()
        say(self.section, f"compiled, and painted once, after {time.perf_counter() - began:.0f} s")
        self.timed("prompt read once, compiled", lambda: self.case.sample(model), 2)
        self.keep({"section": self.section, "name": "peak", "GiB": gib()})


@torch.no_grad()
def alike(case: Case, model: ShowoBackbone) -> dict[str, float]:
    """The share of tokens that are the same whether a prompt is read once or at every step.

    Of whole pictures, in which a token that differs changes all after it; and of steps from the same state.
    """
    policy, rows = case.policy(model), Randomness(0, 0, torch.arange(case.candidates, device=DEVICE))
    cond = policy.embed([PROMPT]).repeat(case.candidates)
    rollout: Any = policy.rollout(cond, rows)
    once, rollout.reading = rollout.reading, UncachedMaskedPredictor(policy.model, cond)
    same = []
    for step, segment in enumerate(rollout.finish().segments):
        drawn = Categorical(once.predict(segment.state, segment.t).float()).sample(rows, "token", step)
        hidden = segment.state == MASK_TOKEN_ID
        same.append((drawn == segment.action)[hidden].float().mean())
    whole = (case.sample(model) == rollout.preview()).float().mean()
    return {"of pictures": float(whole), "of steps": float(torch.stack(same).mean())}


def table(found: Found) -> None:
    seconds = {line["name"]: line["seconds"] for line in found if "seconds" in line}
    print(f"\n{torch.cuda.get_device_name() if CUDA else 'cpu'}, PyTorch {torch.__version__}")
    print("| way | s | times one by one | times together | |\n|---|---|---|---|---|")
    for line in found:
        if "seconds" in line:
            plain = [seconds.get(name) for name in ("one by one", "together")]
            times = " | ".join(f"{one / line['seconds']:.2f}x" if one else "" for one in plain)
            print(f"| {line['name']} | {line['seconds']:.3f} | {times} | {line['note']} |")
        elif "of pictures" in line:
            print(f"{line['name']}: {line['of pictures']:.2%} of pictures' tokens, {line['of steps']:.2%} of steps'")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--sections", default=",".join(SECTIONS) if CUDA else "eager")
    options.add_argument("--seconds", type=float, default=95.0, help="of all sections together")
    options.add_argument("--section", default="")
    chosen = options.parse_args()
    if not chosen.section:
        table(carry_out(__file__, SECTIONS, chosen))
        return
    spec = replace(Showo(), weights=None, codec=None, tokenizer=BYTE_TOKENIZER)
    case = Case(spec.tiny(), 4, 4) if chosen.tiny else Case(spec, 20, 18)
    bench = Bench(case, chosen.section, keeper(chosen.out))
    {"eager": bench.eager, "compiled": bench.compiled}[chosen.section]()


if __name__ == "__main__":
    main()
