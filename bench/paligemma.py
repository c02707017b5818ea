"""How fast a PaliGemma of random weights writes its answers, beside transformers' own `generate`, in one run.

    python bench/paligemma.py --out paligemma.json          # on a GPU: 2.9 billion weights, 224 pixels, 128 tokens
    python bench/paligemma.py --tiny --out tiny.json        # the same lines at small size, on any machine

Tokens a second are those after the first, for the first waits for the picture to be read, which is the same for all.
Answers are compared in float32, where they are to be the same, and in what the speed is measured in: as written, where
a token that differs changes all after it, and step by step after the same tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from tastemaker.rewards.nets.speech import Asked, Processed
from tastemaker.rewards.nets.writing import Desk, Pace

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
QUESTION = 12  # tokens
FILLER = 0


@dataclass(frozen=True)
class Case:
    text: dict[str, Any]
    eyes: dict[str, Any]
    tokens: int
    rows: tuple[int, ...]

    def load(self, dtype: torch.dtype) -> Any:
        """A network of random weights that never ends an answer."""
        width, vocabulary = self.text["hidden_size"], self.text["vocab_size"]
        settings: Any = {"image_token_id": vocabulary - 1, "projection_dim": width}
        config = PaliGemmaConfig(
            text_config={**self.text, "model_type": "gemma"},
            vision_config={**self.eyes, "model_type": "siglip_vision_model", "projection_dim": width},
            **settings,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        try:
            with DEVICE:
                net: Any = PaliGemmaForConditionalGeneration(config)
        finally:
            torch.set_default_dtype(before)
        settings = net.generation_config
        settings.eos_token_id, settings.pad_token_id = None, FILLER
        return net.eval().requires_grad_(False)

    def asked(self, net: Any, rows: int) -> Asked:
        """Pictures of noise, and a question about each."""
        rng = torch.Generator().manual_seed(1)
        eyes, number = net.config.vision_config, net.config.image_token_id
        count = (eyes.image_size // eyes.patch_size) ** 2
        words = torch.randint(3, number, (rows, QUESTION), generator=rng)
        ids = torch.cat([torch.full((rows, count), number), words], 1).to(DEVICE)
        pixels = torch.rand(rows, 3, eyes.image_size, eyes.image_size, generator=rng) * 2 - 1
        more = {"pixel_values": pixels.to(DEVICE, net.dtype), "token_type_ids": torch.zeros_like(ids)}
        return Asked(ids, torch.ones_like(ids), more)


WHOLE = Case(
    {
        "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 257216,
    },
    {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14, "vision_use_head": False,
    },
    128,
    (1, 8),
)  # fmt: skip
SMALL = Case(
    {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 160, "initializer_range": 0.4,
    },
    {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_use_head": False,
    },
    16,
    (1, 3),
)  # fmt: skip


def settle() -> None:
    if CUDA:
        torch.cuda.synchronize()


@torch.no_grad()
def plainly(net: Any, asked: Asked, tokens: int) -> Tensor:
    """As transformers writes."""
    ids = net.generate(asked.ids, attention_mask=asked.mask, **asked.more, max_new_tokens=tokens, do_sample=False)
    return ids[:, asked.ids.shape[1] :]


def ours(net: Any, pace: Pace) -> Callable[[Asked, int], Tensor]:
    desk = Desk(net, Processed(net, None), pace)
    return lambda asked, tokens: desk.write(asked, tokens, FILLER)


def seconds(action: Callable[[], object], times: int) -> float:
    """The shortest of several, after one that does not count."""
    action()
    settle()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        settle()
        taken.append(time.perf_counter() - began)
    return min(taken)


def speed(write: Callable[[Asked, int], Tensor], asked: Asked, tokens: int) -> dict[str, float]:
    """Tokens a second of all rows together, and seconds of a whole answer with the reading of its picture."""
    whole, first = (seconds(lambda n=n: write(asked, n), 2) for n in (tokens, 1))
    return {"tokens/s": len(asked.ids) * (tokens - 1) / max(whole - first, 1e-9), "seconds": whole, "first": first}


@torch.no_grad()
def alike(net: Any, asked: Asked, tokens: int, pace: Pace) -> dict[str, float]:
    """The share of tokens that are the same: of answers as they are written, and of steps after the same tokens."""
    theirs, mine = plainly(net, asked, tokens), ours(net, pace)(asked, tokens)
    desk = Desk(net, Processed(net, None), pace)
    read = desk.read(asked)
    scribe, logits, steps = desk.scribe(read, tokens), read.logits, []
    for word in theirs.unbind(1):
        steps.append((logits.argmax(-1) == word).float().mean())
        logits = scribe.step(word)
    return {"as written": float((theirs == mine).float().mean()), "step by step": float(torch.stack(steps).mean())}


def measured(case: Case, dtype: torch.dtype, deadline: float) -> dict[str, Any]:
    net = case.load(dtype)
    paces: tuple[Pace, ...] = ("steps", "recorded", "compiled") if CUDA else ("steps",)
    found: dict[str, Any] = {"weights": sum(p.numel() for p in net.parameters())}
    found["alike"] = alike(net, case.asked(net, case.rows[0]), case.tokens, "recorded" if CUDA else "steps")
    for rows in case.rows:
        asked = case.asked(net, rows)
        here: dict[str, Any] = {"generate": speed(lambda a, n: plainly(net, a, n), asked, case.tokens)}
        for pace in paces:
            if time.perf_counter() > deadline:
                here[pace] = "left out: no time"
                continue
            try:
                here[pace] = speed(ours(net, pace), asked, case.tokens)
                here[pace]["times generate"] = here[pace]["tokens/s"] / here["generate"]["tokens/s"]
            except Exception as error:  # one way that fails says so and leaves the others to be measured
                here[pace] = f"{type(error).__name__}: {error!s:.300}"
        found[f"{rows} rows"] = here
    if CUDA:
        found["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--seconds", type=float, default=420, help="after which nothing new is begun")
    chosen = options.parse_args()
    case, deadline = SMALL if chosen.tiny else WHOLE, time.perf_counter() + chosen.seconds
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__}
    net = case.load(torch.float32)
    pace: Pace = "recorded" if CUDA else "steps"
    found["alike in float32"] = alike(net, case.asked(net, case.rows[-1]), case.tokens, pace)
    del net
    found["tokens"] = case.tokens
    found["measured"] = measured(case, torch.bfloat16 if CUDA else torch.float32, deadline)
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        Path(chosen.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
