"""How fast a PaliGemma of random weights writes its answers, beside transformers' own `generate`, in one run.

    python bench/paligemma.py --out paligemma.json          # on a GPU: 2.9 billion weights, 224 pixels, 128 tokens
    python bench/paligemma.py --tiny --out tiny.json        # the same lines at small size, on any machine

Tokens a second are those after the first, for the first waits for the picture to be read, which is the same for all.
Answers are compared in float32, where they are to be the same, and in what the speed is measured in: as written, where
a token that differs changes all after it, and step by step after the same tokens. A token of one row reads 5.0 GB of
weights in bfloat16, 1.2 ms at 4.3 TB/s. Every section is a process of its own with a time limit, which tells each
number once it is known.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from device import CUDA, DEVICE, gib, settle  # beside this file, in no package
from sections import Found, Keep, carry_out, keeper, say, spared
from torch import Tensor

from tastemaker.vlm.chat_processors import AutoChatProcessor, ChatInputs
from tastemaker.vlm.decoding import ChatDecoderPool, DecodingMode

SECTIONS = {"answers": 65, "compiled": 45}  # seconds at most
DTYPE = torch.bfloat16 if CUDA else torch.float32  # that speed is measured in
PACE: DecodingMode = "recorded" if CUDA else "steps"  # as answers are written unless something else is asked for
QUESTION = 12  # tokens
FILLER = 0


@dataclass(frozen=True)
class Case:
    text: dict[str, Any]
    eyes: dict[str, Any]
    tokens: int
    rows: tuple[int, ...]

    def load(self, dtype: torch.dtype) -> Any:
        """A network of random weights that never ends an answer, filled where and as it will be."""
        from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

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

    def asked(self, net: Any, rows: int) -> ChatInputs:
        """Pictures of noise, and a question about each."""
        rng = torch.Generator().manual_seed(1)
        eyes, number = net.config.vision_config, net.config.image_token_id
        count = (eyes.image_size // eyes.patch_size) ** 2
        words = torch.randint(3, number, (rows, QUESTION), generator=rng)
        ids = torch.cat([torch.full((rows, count), number), words], 1).to(DEVICE)
        pixels = torch.rand(rows, 3, eyes.image_size, eyes.image_size, generator=rng) * 2 - 1
        more = {"pixel_values": pixels.to(DEVICE, net.dtype), "token_type_ids": torch.zeros_like(ids)}
        return ChatInputs(ids, torch.ones_like(ids), more)


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


@torch.no_grad()
def plainly(net: Any, asked: ChatInputs, tokens: int) -> Tensor:
    """As transformers writes."""
    told = {"attention_mask": asked.mask, **asked.more, "max_new_tokens": tokens, "do_sample": False}
    ids: Tensor = net.generate(asked.ids, **told)
    return ids[:, asked.ids.shape[1] :]


def ours(net: Any, pace: DecodingMode) -> Callable[[ChatInputs, int], Tensor]:
    desk = ChatDecoderPool(net, AutoChatProcessor(net, None), pace)
    return lambda asked, tokens: desk.write(asked, tokens, FILLER)


def spent(action: Callable[[], Tensor]) -> tuple[float, Tensor]:
    settle()
    began = time.perf_counter()
    out = action()
    settle()
    return time.perf_counter() - began, out


@dataclass(frozen=True)
class Bench:
    case: Case
    section: str
    keep: Keep

    def loaded(self, dtype: torch.dtype) -> Any:
        began = time.perf_counter()
        net = self.case.load(dtype)
        settle()
        count = sum(p.numel() for p in net.parameters()) / 1e9
        say(self.section, f"{count:.2f} billion weights in {dtype} after {time.perf_counter() - began:.1f} s")
        return net

    def timed(self, way: str, write: Callable[[ChatInputs, int], Tensor], asked: ChatInputs, times: int) -> Tensor:
        """Tokens a second of all rows together, the fastest of several after a short or whole one that makes things."""
        rows, tokens = len(asked.ids), self.case.tokens
        warm = spent(lambda: write(asked, tokens if times > 1 else 4))[0]
        first = min(spent(lambda: write(asked, 1))[0] for _ in range(2))
        whole, out = min((spent(lambda: write(asked, tokens)) for _ in range(times)), key=lambda one: one[0])
        rate = rows * (tokens - 1) / max(whole - first, 1e-9)
        told = {"tokens/s": rate, "seconds": whole, "first": first, "warm": warm}
        say(self.section, f"{rows} rows, {way}: {rate:.1f} tokens/s, {whole:.2f} s an answer, {warm:.1f} s to begin")
        self.keep({"section": self.section, "rows": rows, "way": way, **told, "GiB": gib()})
        return out

    def answers(self) -> None:
        """All that takes no compiler: speed, and which tokens are the same."""
        net = self.loaded(DTYPE)
        for rows in self.case.rows:
            asked = self.case.asked(net, rows)
            with spared(self.section, f"{rows} rows"):
                theirs = self.timed("generate", partial(plainly, net), asked, 1)
                mine = self.timed(PACE, ours(net, PACE), asked, 2)
                if rows == self.case.rows[0]:
                    self.agree(net, asked, theirs, mine)
        if CUDA:
            with spared(self.section, "float32"):
                self.exactly()
            with spared(self.section, "steps"):
                self.timed("steps", ours(net, "steps"), asked, 1)

    def exactly(self) -> None:
        """Whether the tokens are the same where rounding hides nothing."""
        net = self.loaded(torch.float32)
        asked = self.case.asked(net, self.case.rows[-1])
        self.agree(net, asked, plainly(net, asked, self.case.tokens), ours(net, PACE)(asked, self.case.tokens))

    @torch.no_grad()
    def agree(self, net: Any, asked: ChatInputs, theirs: Tensor, mine: Tensor) -> None:
        """The share of tokens that are the same: of answers as written, and of steps after the same tokens."""
        desk = ChatDecoderPool(net, AutoChatProcessor(net, None), PACE)
        read = desk.read(asked)
        scribe, logits, steps = desk.scribe(read, self.case.tokens), read.logits, []
        for word in theirs.unbind(1):
            steps.append((logits.argmax(-1) == word).float().mean())
            logits = scribe.step(word)
        name = f"alike in {net.dtype}".replace("torch.", "")
        written, each = float((theirs == mine).float().mean()), float(torch.stack(steps).mean())
        say(self.section, f"{name}, {len(mine)} rows: {written:.2%} as written, {each:.2%} step by step")
        told = {"rows": len(mine), "as written": written, "step by step": each}
        self.keep({"section": self.section, "name": name, **told})

    def compiled(self) -> None:
        net = self.loaded(DTYPE)
        self.timed("compiled", ours(net, "compiled"), self.case.asked(net, self.case.rows[0]), 2)


def table(found: Found) -> None:
    lines = [line for line in found if "way" in line]
    plain = {line["rows"]: line["tokens/s"] for line in lines if line["way"] == "generate"}
    print(f"\n{torch.cuda.get_device_name() if CUDA else 'cpu'}, PyTorch {torch.__version__}")
    print("| rows | way | tokens/s | times generate | s an answer | s to its first token |\n|---|---|---|---|---|---|")
    for line in lines:
        rate, other = line["tokens/s"], plain.get(line["rows"])
        gain = f"{rate / other:.2f}x" if other else ""
        first = f"| {line['rows']} | {line['way']} | {rate:.1f} | {gain}"
        print(f"{first} | {line['seconds']:.3f} | {line['first']:.3f} |")
    for line in found:
        if "as written" in line:
            told = f"{line['as written']:.2%} as written, {line['step by step']:.2%} step by step"
            print(f"{line['name']}, {line['rows']} rows: {told}")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--out", default="")
    options.add_argument("--sections", default=",".join(SECTIONS) if CUDA else "answers")
    options.add_argument("--seconds", type=float, default=105.0, help="of all sections together")
    options.add_argument("--section", default="")
    chosen = options.parse_args()
    if not chosen.section:
        table(carry_out(__file__, SECTIONS, chosen))
        return
    bench = Bench(SMALL if chosen.tiny else WHOLE, chosen.section, keeper(chosen.out))
    {"answers": bench.answers, "compiled": bench.compiled}[chosen.section]()


if __name__ == "__main__":
    main()
