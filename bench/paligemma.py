"""Speed of text generation by PaliGemma with random weights, against transformers' `generate`.

    python bench/paligemma.py --out paligemma.json          # on a GPU: 2.9 billion weights, 224 pixels, 128 tokens
    python bench/paligemma.py --tiny --out tiny.json        # small networks, on any machine

Tokens per second do not include the first token, which waits for the prefill that is equal for all. Answers are
compared in float32, where they must be equal, and in the dtype of the timing: as generated, where a different token
changes all later ones, and step by step after the same tokens. A token of one sample reads 5.0 GB of bfloat16 weights,
1.2 ms at 4.3 TB/s. Each section is a process with a time limit, and results are written at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from device import CUDA, DEVICE, default_dtype, peak_gib, print_header, synchronize  # beside this file, in no package
from sections import Record, Results, log, log_errors, result_writer, run_sections, section_parser
from torch import Tensor

from tastemaker.vlm.chat_processors import ChatInputs, DefaultChatProcessor
from tastemaker.vlm.generation import ChatDecoderPool, DecodingMode

SECTIONS = {"answers": 65, "compiled": 45}  # seconds
DTYPE = torch.bfloat16 if CUDA else torch.float32  # of the timing
DEFAULT_MODE: DecodingMode = "cuda_graph" if CUDA else "eager"
QUESTION_LENGTH = 12  # tokens
PAD_ID = 0
GenerateFn = Callable[[ChatInputs, int], Tensor]


@dataclass(frozen=True)
class PaligemmaCase:
    text_config: dict[str, Any]
    vision_config: dict[str, Any]
    max_new_tokens: int
    batch_sizes: tuple[int, ...]

    def load(self, dtype: torch.dtype) -> Any:
        """Create a network with random weights that never ends an answer."""
        from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

        width, vocab_size = self.text_config["hidden_size"], self.text_config["vocab_size"]
        ids: Any = {"image_token_id": vocab_size - 1, "projection_dim": width}
        config = PaliGemmaConfig(
            text_config={**self.text_config, "model_type": "gemma"},
            vision_config={**self.vision_config, "model_type": "siglip_vision_model", "projection_dim": width},
            **ids,
        )
        torch.manual_seed(0)
        with default_dtype(dtype), DEVICE:
            net: Any = PaliGemmaForConditionalGeneration(config)
        net.generation_config.eos_token_id, net.generation_config.pad_token_id = None, PAD_ID
        return net.eval().requires_grad_(False)

    def inputs(self, net: Any, batch_size: int) -> ChatInputs:
        """Return random images with a random question about each."""
        generator = torch.Generator().manual_seed(1)
        vision, image_token_id = net.config.vision_config, net.config.image_token_id
        num_image_tokens = (vision.image_size // vision.patch_size) ** 2
        question = torch.randint(3, image_token_id, (batch_size, QUESTION_LENGTH), generator=generator)
        ids = torch.cat([torch.full((batch_size, num_image_tokens), image_token_id), question], 1).to(DEVICE)
        pixels = torch.rand(batch_size, 3, vision.image_size, vision.image_size, generator=generator) * 2 - 1
        extra = {"pixel_values": pixels.to(DEVICE, net.dtype), "token_type_ids": torch.zeros_like(ids)}
        return ChatInputs(ids, torch.ones_like(ids), extra)


FULL = PaligemmaCase(
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
SMALL = PaligemmaCase(
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
def generate_with_transformers(net: Any, inputs: ChatInputs, max_new_tokens: int) -> Tensor:
    ids: Tensor = net.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        **inputs.extra_inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return ids[:, inputs.input_ids.shape[1] :]


def generate_with_pool(net: Any, mode: DecodingMode) -> GenerateFn:
    pool = ChatDecoderPool(net, DefaultChatProcessor(net, None), mode)
    return lambda inputs, max_new_tokens: pool.generate(inputs, max_new_tokens, PAD_ID)


def time_call(action: Callable[[], Tensor]) -> tuple[float, Tensor]:
    synchronize()
    start = time.perf_counter()
    result = action()
    synchronize()
    return time.perf_counter() - start, result


@dataclass(frozen=True)
class PaligemmaBenchmark:
    case: PaligemmaCase
    section: str
    record: Record

    def load(self, dtype: torch.dtype) -> Any:
        start = time.perf_counter()
        net = self.case.load(dtype)
        synchronize()
        billions = sum(p.numel() for p in net.parameters()) / 1e9
        log(self.section, f"{billions:.2f} billion weights in {dtype} after {time.perf_counter() - start:.1f} s")
        return net

    def measure(self, name: str, generate: GenerateFn, inputs: ChatInputs, repeats: int) -> Tensor:
        """Record tokens per second of the whole batch, the fastest of several runs after a warm-up."""
        batch_size, tokens = len(inputs.input_ids), self.case.max_new_tokens
        warmup, _ = time_call(lambda: generate(inputs, tokens if repeats > 1 else 4))
        first = min(time_call(lambda: generate(inputs, 1))[0] for _ in range(2))
        runs = [time_call(lambda: generate(inputs, tokens)) for _ in range(repeats)]
        seconds, output = min(runs, key=lambda run: run[0])
        rate = batch_size * (tokens - 1) / max(seconds - first, 1e-9)
        text = f"{rate:.1f} tokens/s, {seconds:.2f} s per answer, {warmup:.1f} s of warm-up"
        log(self.section, f"batch of {batch_size}, {name}: {text}")
        times = {"tokens/s": rate, "seconds": seconds, "first": first, "warm": warmup}
        self.record({"section": self.section, "rows": batch_size, "way": name, **times, "GiB": peak_gib()})
        return output

    def run_answers(self) -> None:
        """Measure everything that needs no compiler: speed, and which tokens are equal."""
        net = self.load(DTYPE)
        for batch_size in self.case.batch_sizes:
            inputs = self.case.inputs(net, batch_size)
            with log_errors(self.section, f"batch of {batch_size}"):
                expected = self.measure("generate", partial(generate_with_transformers, net), inputs, 1)
                tokens = self.measure(DEFAULT_MODE, generate_with_pool(net, DEFAULT_MODE), inputs, 2)
                if batch_size == self.case.batch_sizes[0]:
                    self.compare_tokens(net, inputs, expected, tokens)
        if CUDA:
            with log_errors(self.section, "float32"):
                self.run_float32()
            with log_errors(self.section, "eager"):
                self.measure("eager", generate_with_pool(net, "eager"), inputs, 1)

    def run_float32(self) -> None:
        """Check that tokens are equal where rounding does not matter."""
        net = self.load(torch.float32)
        inputs, count = self.case.inputs(net, self.case.batch_sizes[-1]), self.case.max_new_tokens
        expected = generate_with_transformers(net, inputs, count)
        self.compare_tokens(net, inputs, expected, generate_with_pool(net, DEFAULT_MODE)(inputs, count))

    @torch.no_grad()
    def compare_tokens(self, net: Any, inputs: ChatInputs, expected: Tensor, tokens: Tensor) -> None:
        """Record the share of equal tokens: of answers as generated, and of steps after the same tokens."""
        pool = ChatDecoderPool(net, DefaultChatProcessor(net, None), DEFAULT_MODE)
        prefilled = pool.prefill(inputs)
        decoder, logits, shares = pool.decoder_for(prefilled, self.case.max_new_tokens), prefilled.logits, []
        for token in expected.unbind(1):
            shares.append((logits.argmax(-1) == token).float().mean())
            logits = decoder.step(token)
        name = f"equal in {net.dtype}".replace("torch.", "")
        generated, steps = float((expected == tokens).float().mean()), float(torch.stack(shares).mean())
        log(self.section, f"{name}, batch of {len(tokens)}: {generated:.2%} as generated, {steps:.2%} step by step")
        result = {"rows": len(tokens), "as generated": generated, "step by step": steps}
        self.record({"section": self.section, "name": name, **result})

    def run_compiled(self) -> None:
        net = self.load(DTYPE)
        inputs = self.case.inputs(net, self.case.batch_sizes[0])
        self.measure("compiled", generate_with_pool(net, "compiled"), inputs, 2)


def print_table(results: Results) -> None:
    timings = [result for result in results if "way" in result]
    baseline = {result["rows"]: result["tokens/s"] for result in timings if result["way"] == "generate"}
    print_header()
    print("| batch size | decoding | tokens/s | vs generate | s per answer | s to first token |")
    print("|---|---|---|---|---|---|")
    for result in timings:
        rate, other = result["tokens/s"], baseline.get(result["rows"])
        speedup = f"{rate / other:.2f}x" if other else ""
        cells = [str(result["rows"]), result["way"], f"{rate:.1f}", speedup]
        cells += [f"{result['seconds']:.3f}", f"{result['first']:.3f}"]
        print(f"| {' | '.join(cells)} |")
    for result in results:
        if "as generated" in result:
            shares = f"{result['as generated']:.2%} as generated, {result['step by step']:.2%} step by step"
            print(f"{result['name']}, batch of {result['rows']}: {shares}")


def main() -> None:
    options = section_parser(",".join(SECTIONS) if CUDA else "answers", 105.0).parse_args()
    if not options.section:
        print_table(run_sections(__file__, SECTIONS, options))
        return
    bench = PaligemmaBenchmark(SMALL if options.tiny else FULL, options.section, result_writer(options.out))
    {"answers": bench.run_answers, "compiled": bench.run_compiled}[options.section]()


if __name__ == "__main__":
    main()
