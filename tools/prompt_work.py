"""Count how much of a network call depends on the prompt only, in models at their published size.

    python tools/prompt_work.py [MODEL ...]

A model is a file of `tastemaker/recipes/base/models`, without its ending. FLOPs of matrix products, convolutions and
attention are counted on fake tensors, with prompts of the maximum length: nothing is downloaded. Attention over text
and image tokens together is not prompt work, since it depends on the sample.
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.diagnostics.fake_backbones import load_fake_backbone
from tastemaker.diagnostics.fake_memory import FakeAttention, use_fake_kernels
from tastemaker.diagnostics.fake_run import run_under_autocast

CROSS_ATTENTION = ("*.attn2.to_k", "*.attn2.to_v")
UNET_CROSS_ATTENTION = ("*.attentions.*.attn2.to_k", "*.attentions.*.attn2.to_v")  # not those over frames
PROMPT_MODULES = {
    "flux": ("context_embedder", "time_text_embed.text_embedder"),
    "flux2": ("context_embedder",),
    "sd3": ("context_embedder", "time_text_embed.text_embedder"),
    "qwen-image": ("txt_in",),
    "z-image": ("cap_embedder", "context_refiner.*"),
    "sana": ("caption_projection", *CROSS_ATTENTION),
    "sana-sprint": ("caption_projection", *CROSS_ATTENTION),
    "sd15": UNET_CROSS_ATTENTION,
    "sdxl": (*UNET_CROSS_ATTENTION, "add_embedding"),
    "modelscope": UNET_CROSS_ATTENTION,
    "videocrafter2": UNET_CROSS_ATTENTION,
    "opensora": ("y_embedder", "*.cross_attn.kv_linear"),
    "wan": ("condition_embedder.text_embedder", *CROSS_ATTENTION),
    "wan22-ti2v": ("condition_embedder.text_embedder", *CROSS_ATTENTION),
    "ltx": ("caption_projection", *CROSS_ATTENTION),
    "ltx2": ("caption_projection", "audio_caption_projection", *CROSS_ATTENTION, "*.audio_attn2.to_[kv]"),
    "hunyuanvideo": ("context_embedder",),  # reads the timestep too: once per prompt and step
    "hunyuanvideo15": ("context_embedder", "context_embedder_2"),
    "cogvideox": ("patch_embed.text_proj",),
    "mochi": ("time_embed.caption_proj", "time_embed.pooler"),
}


def main(names: list[str]) -> None:
    print("| model | text tokens | TFLOP of a call | of which prompt work |\n|---|---|---|---|")
    for name in names or PROMPT_MODULES:
        tokens, total, prompt = count_prompt_work(name)
        print(f"| {name} | {tokens} | {total / 1e12:.3g} | {prompt / total:.2%} |", flush=True)


def count_prompt_work(name: str) -> tuple[int, float, float]:
    """Return the text tokens of a model, the FLOPs of a network call for one sample, and those of prompt work."""
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(f"extends: [base, models/{name}]\ndata: {{type: prompts, prompts: [a cat]}}\n")
        config = load(
            recipe, ["objective={type: reward_gradient}", "rewards={a: {type: brightness}}", "engine.precision=bf16"]
        )
    assert isinstance(config, RunConfig)
    with load_fake_backbone(config) as backbone, torch.no_grad():
        cond = backbone.embed(("a cat",))
        x, t = torch.empty(1, *backbone.shape), torch.full((1,), 0.5)
        counts = PromptModules(backbone.net, PROMPT_MODULES[name])
        counter: Any = FlopCounterMode(display=False)
        FakeAttention.flops = 0
        with counter, use_fake_kernels():
            counts.total = lambda: counter.get_total_flops() + FakeAttention.flops
            run_under_autocast(config.engine, lambda: backbone.predict(x, t, cond))
    tokens = max(len(x[0]) for x in cond.tensors.values() if x.dim() == 3)
    return tokens, counter.get_total_flops() + FakeAttention.flops, counts.flops


class PromptModules:
    """Adds up the FLOPs of the calls of some modules, outermost ones only."""

    def __init__(self, net: nn.Module, patterns: tuple[str, ...]) -> None:
        self.flops, self.depth, self.before = 0.0, 0, 0.0
        self.total: Any = lambda: 0.0
        found = {p: [m for name, m in net.named_modules() if fnmatch.fnmatch(name, p)] for p in patterns}
        missing = [pattern for pattern, modules in found.items() if not modules]
        assert not missing, f"no module is named {missing}"
        for module in {m for modules in found.values() for m in modules}:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.before = self.before if self.depth else self.total()
        self.depth += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.depth -= 1
        self.flops += 0.0 if self.depth else self.total() - self.before


if __name__ == "__main__":
    main(sys.argv[1:])
