"""Generators of clips go out whole for diffusers, and as adapters under their authors' names."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from rich.console import Console
from tiers import fast
from tiny_pipelines import CLIP_ENDS, byte_clip_tokenizer, random
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.guidance import unwrap_guidance
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import LoraFromFile
from tastemaker.export.lora_reading import ADAPTABLE_LAYERS
from tastemaker.models.modelscope import Modelscope
from tastemaker.models.video_unet import SMALL
from tastemaker.search.generation import resolve_source
from tastemaker.training.resume import write_run_config
from tastemaker.training.run import Run
from tastemaker.training.session import prepare_run

QUIET = Console(quiet=True)
LORA = "{type: lora, rank: 2, alpha: 6, targets: [to_q, to_k, to_v]}"
SETTINGS = [
    "engine={device: cpu, precision: fp32, trainable: fp32, memory: keep, compile: false}",
    "batch={prompts: 2}",
    "guidance={scale: 2.0}",
]
RECIPE = """extends: [base, models/{name}, data/colors]
model: {{weights: {weights}, frames: 2, height: 32, width: 32}}
process: {{steps: 2}}
objective: {{type: reward_gradient}}
rewards: {{color: {{type: color}}}}
steps: 1
"""


def pipeline(folder: Path) -> None:
    """ModelScope's in diffusers' layout, of random weights."""
    words = transformers.CLIPTextConfig(**{**SMALL["text_encoder"], **CLIP_ENDS})
    made: Any = diffusers.TextToVideoSDPipeline(  # type: ignore[no-untyped-call]
        vae=random(diffusers.AutoencoderKL, SMALL["vae"], 1),
        text_encoder=random(transformers.CLIPTextModel, words, 2),
        tokenizer=byte_clip_tokenizer(),
        unet=random(diffusers.UNet3DConditionModel, SMALL["unet"], 3),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),  # type: ignore[no-untyped-call]
    )
    made.save_pretrained(folder)


def trained(name: str, weights: str, tuning: str, folder: Path) -> tuple[Path, Path, Any]:
    """A recipe, a run of it and its network, moved by made-up numbers."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(name=name, weights=weights), encoding="utf-8")
    config = load(str(recipe), [*SETTINGS, f"tuning={tuning}", f"output={folder}", "name=run"])
    run = build(config)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.policy.weights.trainable().values():
            p.add_(0.05 * torch.randn(p.shape, generator=chance))
    run.save(1)
    write_run_config(config, run.directory)
    (run.directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}))
    return recipe, run.directory, unwrap_guidance(run.policy.model)[0]


def seen() -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    x, words = torch.randn(2, 2, 4, 4, 4, generator=chance), torch.randn(2, 5, 16, generator=chance)
    return x, torch.tensor([20.0, 700.0]), words


@pytest.mark.parametrize("tuning", fast(["{type: full}", LORA], LORA), ids=["full", "merged"])
def test_diffusers_loads_the_whole_pipeline(tuning: str, tmp_path: Path) -> None:
    pipeline(tmp_path / "base")
    _, run, model = trained("modelscope", str(tmp_path / "base"), tuning, tmp_path)
    order = GeneratorExport(run, tmp_path / "out", "diffusers", dtype=torch.float32, merge=tuning == LORA)
    export_generator(order, QUIET)
    kind: Any = diffusers.TextToVideoSDPipeline
    theirs = kind.from_pretrained(tmp_path / "out").unet
    x, level, words = seen()
    with torch.no_grad():
        found = theirs(x.transpose(1, 2), level, words).sample.transpose(1, 2)
        assert (model.net(x, level, words) - found).abs().max() < 2e-5


@pytest.mark.slow
def test_adapters_go_out_under_the_authors_names_and_come_back(tmp_path: Path) -> None:
    recipe, run, model = trained("videocrafter2", "tiny", LORA, tmp_path)
    export_generator(GeneratorExport(run, tmp_path / "liked", "authors"), QUIET)
    file = tmp_path / "liked" / "liked.pt"
    written = torch.load(file, weights_only=True)
    first = "base_model.model.model.diffusion_model.init_attn.0.transformer_blocks.0.attn1.to_q.lora_A.weight"
    assert first in written and all(x.dtype == torch.float32 for x in written.values())
    config, _ = resolve_source(str(recipe), SETTINGS, file)
    again: Any = config.model.load(Placement())
    weights: Any = config.tuning.apply(again, ())
    assert (weights.config.r, weights.config.lora_alpha) == (2, 8)
    x, level, words = seen()
    with torch.no_grad():
        wanted, found = (net(x, level, words, torch.tensor([24, 8])) for net in (model.net, again.net))
        assert (wanted - found).abs().max() < 1e-5
    assert repr(config.tuning) == f"LoraFromFile(path={file!r})"  # which is part of what names a picture


@pytest.mark.parametrize("layout", fast(["authors", "comfyui", "diffusers"], "authors"))
def test_training_goes_on_from_adapters_whoever_wrote_them(layout: Any, tmp_path: Path) -> None:
    recipe, run, model = trained("videocrafter2", "tiny", LORA, tmp_path)
    export_generator(GeneratorExport(run, tmp_path / "liked", layout, dtype=torch.float32), QUIET)
    file = next(path for path in (tmp_path / "liked").iterdir() if path.suffix in (".pt", ".safetensors"))
    changes = [*SETTINGS, f"output={tmp_path}", "name=again", "ema=0.9"]
    config = load(str(recipe), [*changes, "tuning={type: lora, rank: 2, alpha: 3, targets: [to_q, to_k, to_v]}"])
    begun = prepare_run(config, tmp_path / "again", file)
    assert isinstance(begun, Run)
    x, level, words = seen()
    with torch.no_grad():
        wanted = model.net(x, level, words, torch.tensor([24, 8]))
        for borrowed in (nullcontext(), begun.policy.weights.use("ema")):
            with borrowed:
                found = begun.policy.model.net(x, level, words, torch.tensor([24, 8]))
                assert (wanted - found).abs().max() < 1e-4
    other = load(str(recipe), [*changes, "tuning={type: lora, rank: 4, targets: [to_q, to_k, to_v]}"])
    with pytest.raises(ConfigError, match=r"of rank 2 on \d+ layers, and tuning asks for rank 4 .* set tuning.rank=2"):
        prepare_run(other, tmp_path / "other", file)


@pytest.mark.slow
def test_adapters_without_names_are_those_of_all_layers_in_turn(tmp_path: Path) -> None:
    """As VADER keeps those of ModelScope; narrow layers have adapters of a lower rank."""
    wanted, model = (Modelscope().tiny().load(Placement()) for _ in range(2))
    chance, factors = torch.Generator().manual_seed(0), []
    for module in [each for each in wanted.net.modules() if type(each) in ADAPTABLE_LAYERS]:
        weight: Any = module.weight
        rank = min(6, *weight.shape[:2])
        up = 0.1 * torch.randn(len(weight), rank, *[1] * (weight.dim() - 2), generator=chance)
        down = 0.1 * torch.randn(rank, *weight.shape[1:], generator=chance)
        weight.data += (up.flatten(1) @ down.flatten(1)).view_as(weight)
        factors += [up, down]
    torch.save(factors, tmp_path / "1000_unet.pt")
    weights: Any = LoraFromFile(tmp_path / "1000_unet.pt", Modelscope.layout).apply(model, ())
    assert (weights.config.r, weights.config.lora_alpha) == (6, 6)
    x, level, words = seen()
    with torch.no_grad():
        assert (wanted.net(x, level, words) - model.net(x, level, words)).abs().max() < 1e-4
    torch.save(factors[2:], tmp_path / "fewer.pt")
    with pytest.raises(ConfigError, match="factors without names, which are not those of this network's"):
        LoraFromFile(tmp_path / "fewer.pt").apply(Modelscope().tiny().load(Placement()), ())


@pytest.mark.slow
def test_a_network_whose_authors_published_no_adapters_says_so(tmp_path: Path) -> None:
    _, run, _ = trained("modelscope", "tiny", LORA, tmp_path)
    with pytest.raises(ConfigError, match="the authors of this network have no layout for adapters"):
        export_generator(GeneratorExport(run, tmp_path / "out", "authors"), QUIET)
