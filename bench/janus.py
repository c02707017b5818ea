"""Speed of Janus-Pro with random weights: eight guided images, against transformers' generation, and one update.

    python bench/janus.py --out janus.json          # on a GPU: 1.5 and 6.6 billion weights, 576 tokens
    python bench/janus.py --tiny --out tiny.json    # a small network, on any machine

Decoding reads every matrix once per token. In bfloat16 that is 2.5 and 12.3 GB for 1B and 7B, so that 576 tokens take
at least 0.34 and 1.65 s at 4.3 TB/s. The cache of sixteen rows adds 0.13 and 0.32 s. Each section is a process with a
time limit, and results are written at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device import CUDA, DEVICE, median_seconds, peak_gib, print_header  # beside this file, in no package
from sections import Record, Results, log, log_errors, result_writer, run_sections, section_parser

from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.janus.checkpoint import JANUS_1B, JANUS_7B
from tastemaker.models.janus.model import JanusBackbone, JanusSpec
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.training.activation_memory import checkpoint_activations

SECTIONS = {"decode-1B": 90, "library-1B": 120, "update-1B": 60, "decode-7B": 180}  # seconds
WEIGHTS = {"1B": f"random:{JANUS_1B.hub}", "7B": f"random:{JANUS_7B.hub}"}
DTYPE = torch.bfloat16 if CUDA else torch.float32
PROMPT = "a photo of a red bench below a clock"
GUIDANCE = 5.0


@dataclass(frozen=True)
class JanusBenchmark:
    spec: JanusSpec
    images: int
    section: str
    record: Record

    def load(self) -> JanusBackbone:
        model = self.spec.load(Placement(DEVICE, DTYPE))
        log(self.section, f"{sum(p.numel() for p in model.net.parameters()) / 1e9:.2f} billion weights in {DTYPE}")
        return model

    def measure(self, name: str, work: Callable[[], Any], repeats: int = 2) -> None:
        with log_errors(self.section, name):
            seconds = median_seconds(work, repeats)
            log(self.section, f"{name}: {seconds:.3f} s, peak {peak_gib():.1f} GiB")
            sizes = {"images": self.images, "seconds": seconds, "GiB": peak_gib()}
            self.record({"section": self.section, "name": name, **sizes})

    def run_decode(self) -> None:
        """Sample eight guided images of one prompt."""
        model, process = self.load(), AutoregressiveProcess(recompute_log_probs=False)
        guided = process.wrap_guidance(model, Guidance(GUIDANCE))
        policy: Policy[Any] = Policy(guided, process, FullFinetuning().apply(model, ()))
        cond = policy.embed([PROMPT]).repeat(self.images)
        rng = Randomness(0, 0, torch.arange(self.images, device=DEVICE))
        self.measure("static KV cache", lambda: policy.sample(cond, rng))

    def run_library(self) -> None:
        """Sample the same with transformers' `generate`, whose model has the vision encoder and text head too."""
        from transformers import JanusConfig, JanusForConditionalGeneration

        sizes, tokens = self.spec.sizes, self.spec.shape[0]
        patch = {"image_size": sizes.grid_size * 16, "patch_size": 16, "num_image_tokens": tokens}
        config: Any = JanusConfig(
            text_config=sizes.text_config().to_dict(),
            vision_config={**patch, "projection_dim": sizes.width, "num_hidden_layers": 1},
            vq_config=JanusConfig().vq_config.to_dict() if sizes.vq.channels >= 32 else {"base_channels": 32},
        )
        image = sizes.image_config()
        for key in ("embed_dim", "num_embeddings", "projection_dim", "image_token_embed_dim"):
            setattr(config.vq_config, key, getattr(image, key))
        config.vq_config.num_patches = sizes.grid_size
        model_class: Any = JanusForConditionalGeneration
        with torch.device(DEVICE):
            model = model_class(config).to(DTYPE).eval()
        settings = model.generation_config
        settings.bos_token_id, settings.pad_token_id = 1, 0
        settings.generation_kwargs = {"boi_token_id": 2}
        ids = torch.tensor([[1, *range(3, 17), 2]], device=DEVICE).repeat(self.images, 1)
        options = {"generation_mode": "image", "do_sample": True, "top_k": 0, "guidance_scale": GUIDANCE}
        self.measure(
            "transformers", lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options), repeats=1
        )

    def run_update(self) -> None:
        """Score eight guided sequences and back-propagate, with activation checkpointing."""
        model, process = self.load(), AutoregressiveProcess()
        weights = FullFinetuning().apply(model, ())
        checkpoint_activations(model.net)
        guided = process.wrap_guidance(model, Guidance(GUIDANCE))
        cond = guided.embed([PROMPT] * self.images)
        ids = torch.zeros(self.images, *model.shape, dtype=torch.long, device=DEVICE)

        def update() -> None:
            guided.predict(ids, torch.ones(self.images, device=DEVICE), cond).logsumexp(-1).mean().backward()
            for p in weights.trainable().values():
                p.grad = None

        self.measure("update", update)


def print_table(results: Results) -> None:
    print_header()
    print("| section | what | images | s | GiB |\n|---|---|---|---|---|")
    for each in results:
        print(f"| {each['section']} | {each['name']} | {each['images']} | {each['seconds']:.3f} | {each['GiB']:.1f} |")


def main() -> None:
    options = section_parser(",".join(SECTIONS) if CUDA else "decode-1B", 450.0).parse_args()
    if not options.section:
        print_table(run_sections(__file__, SECTIONS, options))
        return
    work, _, size = options.section.partition("-")
    spec = JanusSpec().tiny() if options.tiny else JanusSpec(WEIGHTS[size])
    bench = JanusBenchmark(spec, 2 if options.tiny else 8, options.section, result_writer(options.out))
    {"decode": bench.run_decode, "library": bench.run_library, "update": bench.run_update}[work]()


if __name__ == "__main__":
    main()
