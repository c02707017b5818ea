"""How fast Show-o paints twenty candidates of one prompt at random weights, beside code written straight down.

    python bench/showo.py --out showo.json          # on a GPU: 1.45 billion weights, 256 pixels, 18 steps
    python bench/showo.py --tiny --out tiny.json    # the same lines at small size, on any machine

A prompt is read once, filling is left out, only logits of codes are computed, and all candidates step together. Tokens
are the same as when everything is read at every step: counted here in float32 and in what the speed is measured in.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tastemaker.distributions import Categorical
from tastemaker.models.nets.showo import phi
from tastemaker.models.prompting import LETTERS
from tastemaker.models.showo import Showo, ShowoBackbone
from tastemaker.policy import Guidance, Policy
from tastemaker.processes.masked import Masked, Rereading
from tastemaker.randomness import Randomness
from tastemaker.train.memory import compile_blocks
from tastemaker.types import HIDDEN, Placement
from tastemaker.weights import Full

sys.path.insert(0, str(Path(__file__).parent / "baselines"))
from plain_showo import measure, painted  # beside this file, in no package

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
WEIGHT = 1.75
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

    def policy(self, model: ShowoBackbone) -> Policy[Masked]:
        process = Masked(self.steps, replay=False)
        return Policy(process.guide(model, Guidance(1 + WEIGHT)), process, Full().apply(model, ()))

    @torch.no_grad()
    def sample(self, model: ShowoBackbone) -> Tensor:
        """All candidates together."""
        policy = self.policy(model)
        cond = policy.embed([PROMPT]).repeat(self.candidates)
        return policy.sample(cond, Randomness(0, 0, torch.arange(self.candidates, device=DEVICE))).final


def settle() -> None:
    if CUDA:
        torch.cuda.synchronize()


def plainly(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of the candidates one by one and all together, by published code."""
    model = case.load(dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        net = phi(case.spec.sizes()).requires_grad_(False)
    torch.set_default_dtype(before)
    words, tokens = model.vocabulary, case.spec.shape[0]
    own, none = model.prompter([PROMPT, ""]).to(DEVICE).split(1)

    def paint(rows: int) -> Tensor:
        text = torch.cat([own.expand(rows, -1), none.expand(rows, -1)])
        return painted(net, text, words, tokens, case.steps, WEIGHT)

    return {
        "one by one": measure(lambda: [paint(1) for _ in range(case.candidates)], settle, 1),
        "together": measure(lambda: paint(case.candidates), settle),
    }


def ours(case: Case, dtype: torch.dtype) -> dict[str, float]:
    model = case.load(dtype)
    found = {"prompt read once": measure(lambda: case.sample(model), settle)}
    if CUDA:
        compile_blocks(model.net)
        found["prompt read once, compiled"] = measure(lambda: case.sample(model), settle, 3)
        found["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


@torch.no_grad()
def alike(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """The share of tokens that are the same whether a prompt is read once or at every step.

    Of whole pictures, in which a token that differs changes all after it; and of steps from the same state.
    """
    model = case.load(dtype)
    policy, rows = case.policy(model), Randomness(0, 0, torch.arange(case.candidates, device=DEVICE))
    cond = policy.embed([PROMPT]).repeat(case.candidates)
    rollout: Any = policy.rollout(cond, rows)
    once, rollout.reading = rollout.reading, Rereading(policy.model, cond)
    same = []
    for step, segment in enumerate(rollout.finish().segments):
        drawn = Categorical(once.predict(segment.state, segment.t).float()).sample(rows, "token", step)
        hidden = segment.state == HIDDEN
        same.append((drawn == segment.action)[hidden].float().mean())
    whole = (case.sample(model) == rollout.preview()).float().mean()
    return {"of pictures": float(whole), "of steps": float(torch.stack(same).mean())}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    chosen = options.parse_args()
    spec = replace(Showo(), weights=None, codec=None, tokenizer=LETTERS)
    case = Case(spec.tiny(), 4, 4) if chosen.tiny else Case(spec, 20, 18)
    dtype = torch.bfloat16 if CUDA else torch.float32
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__}
    found["alike in float32"] = alike(case, torch.float32)
    found["alike as measured"] = alike(case, dtype)
    seconds = plainly(case, dtype) | ours(case, dtype)
    best = seconds.get("prompt read once, compiled", seconds["prompt read once"])
    found |= {"candidates": case.candidates, "steps": case.steps, "seconds": seconds}
    found |= {f"times {name}": seconds[name] / best for name in ("one by one", "together")}
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        Path(chosen.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
