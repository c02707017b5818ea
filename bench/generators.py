"""One training step of a recipe at published size with random weights: time, memory beside the plan's, network share.

    python bench/generators.py --out generators.json                    # on a GPU of at least 80 GiB
    python bench/generators.py --recipes grpo-flux2 --out dev.json      # other recipes of published generators
    python bench/generators.py --tiny --out tiny.json                   # small networks, on any machine

The model, its adapters, process, guidance, objective and engine are those of the recipe, with one group of samples. The
reward is HPS v2.1 with random weights, prompts are embedded to random numbers, and nothing is downloaded. A step is
good if its peak memory is within 10 % of the plan and the network takes at least 85 % of its time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from device import device_name  # beside this file, in no package
from sections import Record, Results, result_writer, run_sections, section_parser
from training_run import build_run, time_steps, trace_phases

from tastemaker.config.build import make_tiny
from tastemaker.config.load import load
from tastemaker.config.schema import BatchConfig, RewardConfig, RunConfig
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.diagnostics.fake_backbones import conditioning_shapes
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.rewards.hps import HpsReward

RECIPES = "grpo-z-image-turbo,grpo-flux2-klein"
SECONDS = 300.0  # limit of a recipe, with building and compilation
NUM_PROMPTS = 4  # that are embedded
INTEGERS = ("lengths", "attention_mask")  # conditioning tensors that are no embeddings
NETWORK_PHASES = ("rollout", "network with gradient")


def published_config(recipe: str, overrides: Sequence[str], samples: int, tiny: bool) -> RunConfig:
    """Return the recipe with one group of samples per step, and the reward that is built here."""
    config = load(recipe, [*overrides])
    config = replace(config, rewards={"hps": RewardConfig(HpsReward())}, ema_decay=0.0, steps=1000)
    if config.objective.group_size > 1:
        config = replace(config, objective=replace(config.objective, group_size=samples))  # type: ignore[type-var]
    prompts = 1 if config.objective.group_size > 1 else samples
    micro_batch = min(samples, config.batch.micro_batch_size or samples)
    batch = BatchConfig(prompts, rollout_batch_size=micro_batch, micro_batch_size=micro_batch)
    return replace(make_tiny(config), batch=batch) if tiny else replace(config, batch=batch)


def with_random_weights(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with random weights of the published size and random embeddings of its prompts."""
    spec: Any = config.model
    configs = spec.published.configs
    hub = spec.weights if spec.weights in configs else spec.published.releases[0].hub
    parts = {f.name: None for f in fields(spec) if f.name in ("transformer", "unet")}
    texts = [*config.data.load(0).first_prompts(NUM_PROMPTS).prompts, ""]
    texts += [config.guidance.negative_prompt] if config.guidance else []
    texts = list(dict.fromkeys(texts))
    shapes = {name: shape for name, shape in conditioning_shapes(spec, configs[hub]).items() if name not in INTEGERS}
    tensors = {name: torch.randn(len(texts), *shape).bfloat16() for name, shape in shapes.items()}
    tensors["lengths"] = torch.full((len(texts),), spec.max_text_tokens)
    tensors["attention_mask"] = torch.ones(len(texts), spec.max_text_tokens, dtype=torch.bool)
    ShardedEmbeddingStore(folder, {}).add(texts, tensors)
    return replace(config, model=replace(spec, weights=f"random:{hub}", embeddings=folder, **parts))


def measure_recipe(recipe: str, options: argparse.Namespace, deadline: float, folder: Path, record: Record) -> None:
    config = published_config(recipe, options.set, options.samples, options.tiny)
    planned = None if options.tiny else estimate_resources(config).total / 2**30
    run = build_run(config if options.tiny else with_random_weights(config, folder), recipe, folder, options.tiny)
    result = time_steps(run, trace_phases(run), recipe, config.batch, deadline)
    shares = result["shares"]
    network = sum(share for phase, share in shares.items() if phase in NETWORK_PHASES)
    record({**result, "planned GiB": planned, "network share": network})


def print_table(results: Results) -> None:
    print(f"\n{device_name()}, PyTorch {torch.__version__}")
    print(
        "| recipe | s per prompt | s per sample | peak GiB | planned GiB | network share |\n|---|---|---|---|---|---|"
    )
    for result in results:
        planned = "" if result["planned GiB"] is None else f"{result['planned GiB']:.1f}"
        cells = [result["section"], f"{result['seconds per prompt']:.2f}", f"{result['seconds per sample']:.2f}"]
        cells += [f"{result['peak GiB']:.1f}", planned, f"{result['network share']:.0%}"]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = section_parser(RECIPES, 3600.0)
    parser.add_argument("--recipes", dest="sections", help="recipes to measure, separated by commas")
    parser.add_argument("--samples", type=int, default=8, help="samples of a step, all of one prompt for GRPO and NFT")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, as engine.compile=true")
    options = parser.parse_args()
    if not options.section:
        arguments = ["--samples", str(options.samples), *(word for each in options.set for word in ("--set", each))]
        limits = dict.fromkeys(options.sections.split(","), SECONDS)
        print_table(run_sections(__file__, limits, options, arguments))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1 if options.tiny else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        deadline = time.monotonic() + options.seconds
        measure_recipe(options.section, options, deadline, Path(folder), result_writer(options.out))


if __name__ == "__main__":
    main()
