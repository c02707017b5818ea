"""`tastemaker export` of a judge: a folder as the hub's, which transformers and the reward `vlm` load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from ..config.build import build_judge
from ..config.load import load_any_config
from ..config.schema import JudgeRunConfig
from ..core.lora import LoraWeights
from ..core.policy import ModelSpec
from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.showo.model import Showo
from ..models.showo.prompt_tokenizer import PHI
from ..training import checkpoint
from ..training.resume import CONFIG_FILE
from ..vlm.chat_model import load_chat_model
from ..vlm.judge_finetuning import save_chat_model

QUIET = ["engine.device=cpu", "engine.compile=false", "engine.strategy=replicated", "engine.precision=fp32"]


def export_judge(directory: Path, out: Path, name: str, console: Console) -> None:
    """Write the judge of a run, adapters added to what they adapt, in sixteen bits."""
    found, config = checkpoint.latest(directory), load_any_config(directory / CONFIG_FILE, QUIET)
    if found is None or not isinstance(config, JudgeRunConfig):
        raise ConfigError(f"{directory} has no checkpoint to export; give the directory of a run")
    check_new_directory(out, "a judge")
    run = build_judge(config, directory)
    run.resume(found)
    kept = run.weights.stored()
    chosen = name or ("ema" if "ema" in kept else "live")
    if chosen != "live" and chosen not in kept:
        raise ConfigError(f"--weights: the run keeps no '{chosen}' (there are: {', '.join(['live', *kept])})")
    if isinstance(run.weights, LoraWeights):
        tensors = run.weights.merged(chosen)
    else:
        tensors = dict(run.weights.net.state_dict()) | (kept[chosen] if chosen != "live" else {})
    plain = {key.removeprefix("net."): x for key, x in tensors.items()}
    if config.judge.model is not None:
        write_showo(config.judge.model, plain, out)
        console.print(f"{out}: {chosen} weights of {found.name}, for `ask` and model.weights", highlight=False)
        return
    judge = load_chat_model(config.judge.weights, Placement(), judges=False)
    judge.net.load_state_dict(plain)
    judge.net.to(torch.bfloat16)
    save_chat_model(judge, out)
    console.print(f"{out}: {chosen} weights of {found.name}, for the reward vlm", markup=False, highlight=False)


def check_new_directory(out: Path, what: str) -> None:
    """Refuse to write among other things."""
    if out.suffix or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"--out: '{out}' must be a new folder, for {what} is one; name another")


def write_showo(spec: ModelSpec, tensors: Mapping[str, Tensor], out: Path) -> None:
    """A folder in the layout Show-o is published in."""
    if not isinstance(spec, Showo):
        raise ConfigError(f"--out: a {type(spec).__name__} has no layout for others; use the run itself")
    words = spec.sizes().vocabulary
    told = {
        "_class_name": "Showo",
        "codebook_size": spec.codes,
        "llm_model_path": PHI.hub,  # whose settings its own program reads
        "load_from_showo": True,
        "llm_vocab_size": spec.vocabulary,
        "mask_token_id": words.hidden,
        "num_vq_tokens": spec.shape[0],
        "vocab_size": words.size,
        "w_clip_vit": spec.vision is not None,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    kept = {key: x.detach().to(torch.bfloat16).contiguous() for key, x in tensors.items()}
    save_file(kept, out / "pytorch_model.safetensors", {"format": "pt"})
