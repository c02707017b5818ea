"""Adapters of text encoders and of two transformers go out in files, and come back from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiers import fast
from tiny_pipelines import T5_WORDS, byte_t5_tokenizer, random
from torch import Tensor

from tastemaker.config.build import build, make_tiny
from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import DIFFUSERS_LORA_FILE, LoraFromFile
from tastemaker.export.lora_reading import is_external_lora
from tastemaker.export.weights_file import export_weights
from tastemaker.models import wan
from tastemaker.models.modelscope import Modelscope
from tastemaker.search.generation import resolve_source
from tastemaker.training.resume import write_run_config
from tastemaker.training.run import Run
from tastemaker.training.session import prepare_run

QUIET = Console(quiet=True)
BOTH = "[net,text]"
SETTINGS = ["engine={device: cpu, precision: fp32, trainable: fp32, memory: keep, compile: false}", "process.steps=2"]
SETTINGS += ["batch={prompts: 1, rollout: 1, microbatch: 1}", "rewards={bright: {type: brightness}}", "guidance=null"]
LORA = "tuning={type: lora, rank: 2, alpha: 6, adapt: %s}"
WAN22 = "model.boundary=0.5"  # in the midst of two steps


def small(recipe: str, folder: Path, *settings: str) -> RunConfig:
    return make_tiny(load(recipe, [*SETTINGS, "tuning=null", f"output={folder}", "name=run", *settings]))


def trained(config: RunConfig) -> Run:
    """A run, moved by made-up numbers."""
    run = build(config)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in run.policy.weights.trainable().values():
            p.add_(0.1 * torch.randn(p.shape, generator=chance))
    run.save(1)
    write_run_config(config, run.directory)
    (run.directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}))
    return run


@torch.no_grad()
def samples(run: Run) -> Tensor:
    policy = run.policy
    return policy.sample(policy.embed(["a cat", "two dogs"]), Randomness(0, 0, torch.arange(2))).final


def read_back(run: Run, file: Path) -> Tensor:
    """Samples of the recipe with the adapters of a file."""
    config, found = resolve_source(str(run.directory / "config.yaml"), [], file)
    assert found is None and isinstance(config.tuning, LoraFromFile)
    return samples(build(config, fed=False))


@pytest.mark.parametrize("adapt", fast([BOTH, "[text]"], BOTH))
@pytest.mark.parametrize("layout", fast(["diffusers", "comfyui"], "diffusers"))
def test_adapters_of_a_text_encoder_come_back(layout: Any, adapt: str, tmp_path: Path) -> None:
    run = trained(small("vader-videocrafter2-hps", tmp_path, LORA % adapt))
    export_generator(GeneratorExport(run.directory, tmp_path / "out", layout, dtype=torch.float32), QUIET)
    file = next((tmp_path / "out").glob("*.safetensors"))
    wanted = samples(run)
    assert is_external_lora(file) and (read_back(run, file) - wanted).abs().max() < 1e-5
    if layout == "diffusers":
        assert (samples(build(resolve_source(str(tmp_path / "out"), [])[0], fed=False)) - wanted).abs().max() < 1e-5
    with torch.no_grad(), run.policy.weights.use("reference"):
        assert (samples(run) - wanted).abs().max() > 1e-3


@pytest.mark.slow
def test_encoders_of_which_a_file_says_nothing_stay_as_they_are(tmp_path: Path) -> None:
    run = trained(small("flowgrpo-sd35", tmp_path, LORA % BOTH, "batch.prompts=2"))
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), QUIET)
    some = {
        key: x
        for key, x in load_file(tmp_path / "out" / DIFFUSERS_LORA_FILE).items()
        if not key.startswith("text_encoder_3.")
    }
    save_file(some, tmp_path / "some.safetensors")
    config, _ = resolve_source(str(run.directory / "config.yaml"), [], tmp_path / "some.safetensors")
    weights: Any = build(config, fed=False).policy.weights
    assert set(weights.texts) == {"text_encoder", "text_encoder_2"}


def test_adapters_of_a_text_encoder_want_a_model_that_has_one(tmp_path: Path) -> None:
    save_file({f"text_encoder.x.lora_{x}.weight": torch.zeros(2, 2) for x in "AB"}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=r"adapts 'text_encoder\.x', which this network does not have; name its base"):
        LoraFromFile(tmp_path / "x.safetensors").apply(Modelscope().tiny().load(Placement()), ())


@pytest.mark.slow
def test_training_goes_on_from_them_if_the_recipe_adapts_text_too(tmp_path: Path) -> None:
    run = trained(small("vader-videocrafter2-hps", tmp_path, LORA % "[text]"))
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), QUIET)
    config = small("vader-videocrafter2-hps", tmp_path, "tuning={type: lora, rank: 2, alpha: 3, adapt: [text]}")
    begun = prepare_run(config, tmp_path / "again", tmp_path / "out" / DIFFUSERS_LORA_FILE)
    assert isinstance(begun, Run) and (samples(begun) - samples(run)).abs().max() < 1e-5
    other = small("vader-videocrafter2-hps", tmp_path, "tuning={type: lora, rank: 2}")
    with pytest.raises(ConfigError, match=r"set tuning\.rank=2, tuning\.adapt=\[text\], and tuning\.targets"):
        prepare_run(other, tmp_path / "other", tmp_path / "out" / DIFFUSERS_LORA_FILE)


@pytest.mark.slow
def test_where_diffusers_has_no_pipeline_text_goes_out_with_the_authors_names(tmp_path: Path) -> None:
    run = trained(small("vader-opensora-hps", tmp_path, LORA % BOTH))
    with pytest.raises(ConfigError, match="diffusers does not know OpenSora; give authors"):
        export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers"), QUIET)
    with pytest.raises(ConfigError, match="would lose what text_encoder learned; export the adapters alone: --layout"):
        export_weights(run.directory, tmp_path / "out.safetensors", "", 16, QUIET)
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "authors"), QUIET)
    assert "those of text_encoder beside them" in (tmp_path / "out/README.md").read_text()
    assert (read_back(run, tmp_path / "out/out.pt") - samples(run)).abs().max() < 1e-5


@pytest.mark.slow
def test_where_it_has_one_the_authors_have_no_names_for_text(tmp_path: Path) -> None:
    run = trained(small("vader-videocrafter2-hps", tmp_path, LORA % BOTH))
    with pytest.raises(ConfigError, match="have no names for those of text encoders; give diffusers"):
        export_generator(GeneratorExport(run.directory, tmp_path / "out", "authors"), QUIET)


def wan_pipeline(folder: Path) -> None:
    """Wan 2.2's in diffusers' layout, of random weights."""
    kind: Any = diffusers.WanPipeline
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler
    words = transformers.UMT5Config(**{**wan.SMALL["text_encoder"], "vocab_size": T5_WORDS})
    first, second = (random(diffusers.WanTransformer3DModel, wan.SMALL_NET, seed) for seed in (1, 2))
    kind(
        tokenizer=byte_t5_tokenizer(),
        text_encoder=random(transformers.UMT5EncoderModel, words, 3),
        vae=random(diffusers.AutoencoderKLWan, wan.SMALL["vae"], 4),
        scheduler=scheduler(shift=3.0),
        transformer=first,
        transformer_2=second,
        boundary_ratio=0.5,
    ).save_pretrained(folder)


def based(config: RunConfig, folder: Path) -> RunConfig:
    """The same of weights in a folder."""
    model: Any = config.model
    return replace(config, model=replace(model, weights=str(folder)))


def shown(folder: Path) -> Any:
    """The pipeline that the Python on a page makes."""
    found = re.search("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1].replace("path/of/this/folder", str(folder)), names)
    return names["pipeline"]


def agree(pipeline: Any, net: Any) -> None:
    """Both transformers compute what our network does on its side of the boundary."""
    chance = torch.Generator().manual_seed(0)
    x, words = torch.randn(2, 16, 2, 4, 4, generator=chance), torch.randn(2, 5, 32, generator=chance)
    level = torch.tensor([900.0, 100.0])
    with torch.no_grad():
        ours = net(x, level, words)[0]
        for row, part in enumerate((pipeline.transformer, pipeline.transformer_2)):
            theirs = part(x[row : row + 1], level[row : row + 1], words[row : row + 1]).sample
            assert (theirs - ours[row : row + 1]).abs().max() < 1e-4


@pytest.mark.slow
def test_adapters_of_two_transformers_come_back_and_load_as_their_page_says(tmp_path: Path) -> None:
    wan_pipeline(tmp_path / "base")
    run = trained(based(small("vader-wan-hps", tmp_path, LORA % "[net]", WAN22), tmp_path / "base"))
    export_generator(GeneratorExport(run.directory, tmp_path / "out", "diffusers", dtype=torch.float32), QUIET)
    assert {key.split(".")[0] for key in load_file(tmp_path / "out" / DIFFUSERS_LORA_FILE)} == {
        "transformer",
        "transformer_2",
    }
    wanted = samples(run)
    assert (read_back(run, tmp_path / "out" / DIFFUSERS_LORA_FILE) - wanted).abs().max() < 1e-5
    assert (samples(build(resolve_source(str(tmp_path / "out"), [])[0], fed=False)) - wanted).abs().max() < 1e-5
    agree(shown(tmp_path / "out"), run.policy.model.net)


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [LORA % "[net]", "tuning={type: full}"], ids=["merged", "full"])
def test_two_transformers_go_out_whole(tuning: str, tmp_path: Path) -> None:
    wan_pipeline(tmp_path / "base")
    run = trained(based(small("vader-wan-hps", tmp_path, tuning, WAN22), tmp_path / "base"))
    order = GeneratorExport(run.directory, tmp_path / "out", "diffusers", "live", torch.float32, merge="lora" in tuning)
    export_generator(order, QUIET)
    agree(shown(tmp_path / "out"), run.policy.model.net)
    again = build(resolve_source(str(tmp_path / "out"), [])[0], fed=False)
    assert (samples(again) - samples(run)).abs().max() < 1e-4
    with pytest.raises(ConfigError, match="the authors of this network use are not known here; give diffusers"):
        export_generator(GeneratorExport(run.directory, tmp_path / "x", "authors", "live", merge=order.merge), QUIET)
