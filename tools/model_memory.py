"""Write tools/model_memory.json: the memory of a LoRA run of each published model, as `tastemaker plan` computes it.

    python tools/model_memory.py            # all models that are not in the file
    python tools/model_memory.py flux wan   # these again

A model takes seconds to minutes of CPU time. Nothing is downloaded or loaded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from model_pages import describe_size

from tastemaker.core.output_paths import write_text_atomically
from tastemaker.diagnostics.plan import estimate_resources
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.verification.models import list_models, load_config, load_spec
from tastemaker.verification.report import Settings

FILE = Path(__file__).with_name("model_memory.json")
SETTINGS = (
    "LoRA, bf16, activation checkpointing, micro-batch and rollout batch of 1, NFT on diffusion models and GRPO on "
    "tokens, reward without weights, text encoders lent to the GPU"
)
OVERRIDES = ("engine.precision=bf16", "engine.activation_memory=checkpoint", "batch.rollout_batch_size=1")
# Whole frames of 720p need a mask of 20 GB in the decoder's attention.
OWN_OVERRIDES = {"hunyuanvideo": ("model.decode_tile_size=256",)}
FEW_STEPS = "process.num_steps=2"  # the peak does not depend on them, but the time that the plan takes


def main(names: list[str]) -> None:
    data = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"models": {}}
    kinds = list_models()
    chosen = names or [name for name in kinds if name not in data["models"]]
    for name in chosen:
        if kinds[name].startswith("toy_") or name.startswith("playground-"):
            continue
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                is_gaussian = load_spec(name).process_type is GaussianProcess
                overrides = [*OVERRIDES, *OWN_OVERRIDES.get(name, ()), *([FEW_STEPS] if is_gaussian else [])]
                config = load_config(name, Settings(), Path(folder), overrides)
                estimate = estimate_resources(config)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error!s:.300}", file=sys.stderr)
                continue
        data["models"][name] = {"peak": round(estimate.total), "size": describe_size(config.model)}
        data["settings"] = SETTINGS
        data["models"] = dict(sorted(data["models"].items()))
        write_text_atomically(FILE, json.dumps(data, indent=1) + "\n")
        print(f"{name}: {estimate.total / 2**30:.1f} GiB, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
