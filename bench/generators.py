"""One training step of a recipe at published size with random weights: time, memory beside the plan's, network share.

    python bench/generators.py --plan-only --out planned.json           # minutes on a CPU, so not on the GPU
    python bench/generators.py --planned planned.json --out results.json   # on a GPU of at least 80 GiB
    python bench/generators.py --recipes grpo-flux2 --out dev.json      # other recipes of published generators
    python bench/generators.py --tiny --out tiny.json                   # small networks, on any machine

The model, its adapters, process, guidance, objective and engine are those of the recipe, with one group of samples;
`MEASURED` lists what else differs. The reward is HPS v2.1 with random weights, prompts are embedded to random numbers,
and nothing is downloaded. A step passes if its peak memory is within 10 % of the plan and the network takes at least
85 % of its time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from device import CUDA, device_name  # beside this file, in no package
from sections import Record, Results, log, result_writer, run_sections, section_parser
from training_run import build_run, time_steps, trace_phases

from tastemaker.config.build import make_tiny
from tastemaker.config.load import load
from tastemaker.config.schema import BatchConfig, RewardConfig, RunConfig
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.diagnostics.fake_backbones import conditioning_shapes
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.models.pipeline_components import SINGLE_FILES
from tastemaker.rewards.hps import HpsReward

SECONDS = 300.0  # after which a recipe is stopped
TIMED_STEPS = 2  # after a step of warm-up
INTEGERS = ("lengths", "attention_mask")  # conditioning tensors that are no embeddings
NETWORK_PHASES = ("rollout", "network with gradient")
PEAK_TOLERANCE, NETWORK_SHARE = 0.10, 0.85


@dataclass(frozen=True)
class Measured:
    """How a recipe is measured, where its own settings take too long."""

    samples: int = 8
    settings: tuple[str, ...] = ()
    warmup_steps: int | None = None  # sampling steps of the warm-up; None: those of the other benchmarks
    seconds: float = 100.0  # with building and warm-up; no step begins that would end later


MEASURED = {
    "grpo-z-image-turbo": Measured(),
    # The size at which klein was published. The recipe's 384x384 are 576 tokens of image beside 512 of text.
    "grpo-flux2-klein": Measured(
        settings=(
            "model.height=1024",
            "model.width=1024",
            "process.path.shift=9.887",
            "process.path.flux2_tokens=4096",
        )
    ),
    # A sample of the recipe's 20 steps takes a minute and a half on an H200, and its groups are of twelve.
    "dancegrpo-wan-i2v": Measured(samples=2, settings=("process.num_steps=5",), warmup_steps=2, seconds=150.0),
}
RECIPES = ",".join(MEASURED)


def choose_settings(recipe: str, options: argparse.Namespace) -> Measured:
    """Return how the recipe is measured, with the command line's changes."""
    chosen = MEASURED.get(recipe, Measured())
    return replace(chosen, samples=options.samples or chosen.samples, settings=(*chosen.settings, *options.set))


def published_config(recipe: str, chosen: Measured, tiny: bool) -> RunConfig:
    """Return the recipe with one group of samples per step, and the reward that is built here."""
    config, samples = load(recipe, [] if tiny else list(chosen.settings)), chosen.samples
    config = replace(config, rewards={"hps": RewardConfig(HpsReward())}, ema_decay=0.0, steps=1000)
    if config.objective.group_size > 1:
        config = replace(config, objective=replace(config.objective, group_size=samples))  # type: ignore[type-var]
    prompts = 1 if config.objective.group_size > 1 else samples
    micro_batch = min(samples, config.batch.micro_batch_size or samples)
    batch = BatchConfig(prompts, rollout_batch_size=micro_batch, micro_batch_size=micro_batch)
    return replace(make_tiny(config), batch=batch) if tiny else replace(config, batch=batch)


def with_random_weights(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with random weights of the published size and random embeddings of its prompts.

    All prompts of the measured steps are embedded: a missing one would build the text encoder, of billions of weights.
    """
    spec: Any = config.model
    configs = spec.published.configs
    hub = spec.weights if spec.weights in configs else spec.published.releases[0].hub
    parts = {f.name: None for f in fields(spec) if f.name in SINGLE_FILES}
    texts = [prompt for prompts, _ in read_prompts(config) for prompt in prompts]
    texts += ["", *([config.guidance.negative_prompt] if config.guidance else [])]
    texts = list(dict.fromkeys(texts))
    shapes = {name: shape for name, shape in conditioning_shapes(spec, configs[hub]).items() if name not in INTEGERS}
    tensors = {name: torch.randn(len(texts), *shape).bfloat16() for name, shape in shapes.items()}
    tensors["lengths"] = torch.full((len(texts),), spec.max_text_tokens)
    tensors["attention_mask"] = torch.ones(len(texts), spec.max_text_tokens, dtype=torch.bool)
    ShardedEmbeddingStore(folder, {}).add(texts, tensors)
    return replace(config, model=replace(spec, weights=f"random:{hub}", embeddings=folder, **parts))


def read_prompts(config: RunConfig) -> list[tuple[Any, Any]]:
    """Return prompts and metadata of the warm-up and of each timed step."""
    data: Any = config.data.load(0)
    batches = [data.batch(step, config.batch.prompts, 0, 1) for step in range(1 + TIMED_STEPS)]
    return [(batch.prompts, getattr(batch, "metadata", ())) for batch in batches]


def measure_recipe(recipe: str, options: argparse.Namespace, start: float, folder: Path, record: Record) -> None:
    chosen = choose_settings(recipe, options)
    config = published_config(recipe, chosen, options.tiny)
    estimate = planned_step(recipe, chosen, options)
    run = build_run(config if options.tiny else with_random_weights(config, folder), recipe, folder, options.tiny)
    with run.engine.autocast(), torch.no_grad():
        for prompts, metadata in read_prompts(config):  # a source image is encoded once in a run, not at every step
            run.policy.model.embed(prompts, metadata)
    deadline = start + chosen.seconds * (10 if options.tiny else 1)
    result = time_steps(
        run,
        trace_phases(run),
        recipe,
        config.batch,
        deadline,
        TIMED_STEPS,
        None if options.tiny else chosen.warmup_steps,
    )
    shares = result["shares"]
    network = sum(share for phase, share in shares.items() if phase in NETWORK_PHASES)
    record({**result, **estimate, "network share": network})
    for line in verdicts({**result, **estimate, "network share": network}):
        log(recipe, line)


def planned_step(recipe: str, chosen: Measured, options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan's GiB and PFLOP of a step, from the file of `--planned` or computed; none for tiny networks."""
    key = {"samples": chosen.samples, "settings": list(chosen.settings)}
    if options.tiny:
        return {**key, "planned GiB": None, "PFLOP": None}
    if not options.planned:
        config = published_config(recipe, chosen, tiny=False)
        spec: Any = config.model
        without_encoders = replace(config, model=replace(spec, embeddings=Path("embeddings")))  # as it is measured
        estimate = estimate_resources(without_encoders)
        return {**key, "planned GiB": estimate.total / 2**30, "PFLOP": estimate.flops / 1e15}
    planned = json.loads(Path(options.planned).read_text(encoding="utf-8"))
    found = next((each for each in planned if each["section"] == recipe), None)
    if found is None or {name: found[name] for name in key} != key:
        raise SystemExit(f"{options.planned} has no plan of {recipe} with {key}; write it with --plan-only")
    return {**key, "planned GiB": found["planned GiB"], "PFLOP": found["PFLOP"]}


def verdicts(result: dict[str, Any]) -> list[str]:
    """Say whether peak memory agrees with the plan and whether the network takes most of the step."""
    lines = []
    if result["planned GiB"] is not None and result["peak GiB"]:
        difference = result["peak GiB"] / result["planned GiB"] - 1
        verdict = "pass" if abs(difference) <= PEAK_TOLERANCE else "FAIL"
        sizes = f"{result['peak GiB']:.1f} GiB, planned {result['planned GiB']:.1f}"
        lines.append(f"{verdict}: peak {sizes} ({difference:+.1%}, allowed {PEAK_TOLERANCE:.0%})")
    share = result["network share"]
    verdict = "pass" if share >= NETWORK_SHARE else "FAIL"
    return [*lines, f"{verdict}: network share {share:.1%} (at least {NETWORK_SHARE:.0%})"]


def print_table(results: Results) -> None:
    print(f"\n{device_name()}, PyTorch {torch.__version__}")
    titles = [
        "recipe",
        "samples",
        "s per prompt",
        "s per sample",
        "peak GiB",
        "planned GiB",
        "network share",
        "TFLOP/s",
    ]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for result in results:
        planned = "" if result["planned GiB"] is None else f"{result['planned GiB']:.1f}"
        rate = "" if result["PFLOP"] is None else f"{1000 * result['PFLOP'] / result['seconds per step']:.0f}"
        cells = [result["section"], f"{result['samples']}", f"{result['seconds per prompt']:.2f}"]
        cells += [f"{result['seconds per sample']:.2f}", f"{result['peak GiB']:.1f}", planned]
        cells += [f"{result['network share']:.0%}", rate]
        print(f"| {' | '.join(cells)} |")
    for result in results if CUDA else []:
        for line in verdicts(result):
            print(f"{result['section']}: {line}")


def main() -> None:
    parser = section_parser(RECIPES, 3600.0)
    parser.add_argument("--recipes", dest="sections", help="recipes to measure, separated by commas")
    parser.add_argument("--samples", type=int, default=0, help="samples of a step, all of one prompt for GRPO and NFT")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, as engine.compile=true")
    parser.add_argument(
        "--plan-only", action="store_true", help="write the plan's numbers to --out and measure nothing"
    )
    parser.add_argument("--planned", default="", help="file that --plan-only has written with the same settings")
    options = parser.parse_args()
    if options.plan_only:
        record = result_writer(options.out)
        for recipe in options.sections.split(","):
            record({"section": recipe, **planned_step(recipe, choose_settings(recipe, options), options)})
    elif not options.section:
        arguments = ["--samples", str(options.samples), "--planned", options.planned]
        arguments += [word for each in options.set for word in ("--set", each)]
        limits = dict.fromkeys(options.sections.split(","), SECONDS)
        print_table(run_sections(__file__, limits, options, arguments))
    else:
        torch.manual_seed(0)
        torch.set_num_threads(1 if options.tiny else torch.get_num_threads())
        with tempfile.TemporaryDirectory() as folder:
            writer = result_writer(options.out)
            measure_recipe(options.section, options, time.monotonic(), Path(folder), writer)


if __name__ == "__main__":
    main()
