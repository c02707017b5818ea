"""Exports of Janus-Pro: transformers and peft load them, and compute what the run computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from janus_folders import save_folder, tiny_janus
from rich.console import Console
from torch import Tensor
from transformers import JanusForConditionalGeneration
from untrained_runs import UntrainedRun, make_untrained_run

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.export.generator import GeneratorExport, export_generator
from tastemaker.export.lora import ADAPTER_FILE
from tastemaker.search.generation import resolve_source
from tastemaker.training.initialization import read_network

CONSOLE = Console(quiet=True)
PROMPTS = ["a red cat", "two dogs under a tree"]
TUNINGS = {"full": "tuning={type: full}", "lora": "tuning={type: lora, rank: 2, alpha: 6}"}
MODEL_CLASS: Any = JanusForConditionalGeneration


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_janus(), tmp_path_factory.mktemp("base") / "janus")


def make_run(base: Path, folder: Path, tuning: str) -> UntrainedRun:
    model = f"model={{type: janus, weights: {base}, max_text_tokens: 64}}"
    return make_untrained_run(folder, "grpo-janus", "model=null", model, TUNINGS[tuning], "objective.group_size=2")


@torch.no_grad()
def logits_of_run(trained: UntrainedRun) -> Tensor:
    model = trained.run.policy.model.unguided
    return model.predict(torch.arange(32).view(2, 16), torch.ones(2), model.embed(PROMPTS))


@torch.no_grad()
def logits_of_library(model: Any, trained: UntrainedRun) -> Tensor:
    """Logits of transformers' own modules for the same prompts and tokens."""
    cond = trained.run.policy.model.unguided.embed(PROMPTS)
    text, mask = cond.tensors["text"], cond.tensors["attention_mask"]
    image = model.prepare_embeddings_for_image_generation(torch.arange(32).view(2, 16)[:, :-1])
    embedded = torch.cat([model.get_input_embeddings()(text), image], 1)
    full_mask = torch.cat([mask, mask.new_ones(2, 15)], 1).long()
    states = model.model.language_model(inputs_embeds=embedded, attention_mask=full_mask).last_hidden_state
    return model.model.generation_head(states[:, text.shape[1] - 1 :])


def test_transformers_and_peft_load_exports(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    for tuning in TUNINGS:
        trained = make_run(base, tmp_path / tuning, tuning)
        out = tmp_path / tuning / "out"
        export_generator(GeneratorExport(trained.run.directory, out, "transformers", dtype=torch.float32), CONSOLE)
        untrained = MODEL_CLASS.from_pretrained(base)
        expected = logits_of_run(trained)
        assert not torch.allclose(logits_of_library(untrained, trained), expected, atol=1e-3)
        if tuning == "lora":
            loaded = PeftModel.from_pretrained(untrained, out).merge_and_unload()
            card = (out / "README.md").read_text()
            assert "library_name: peft" in card and str(tmp_path) not in card and 'from_pretrained(model, "path' in card
        else:
            loaded, info = MODEL_CLASS.from_pretrained(out, output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"]
            vision = "model.vision_model.post_layernorm.weight"
            assert torch.equal(loaded.state_dict()[vision], untrained.state_dict()[vision])
        torch.testing.assert_close(logits_of_library(loaded, trained), expected, rtol=0, atol=5e-5)


@pytest.mark.slow
def test_exports_are_read_back(base: Path, tmp_path: Path) -> None:
    for tuning in TUNINGS:
        trained = make_run(base, tmp_path / tuning, tuning)
        out = tmp_path / tuning / "out"
        export_generator(GeneratorExport(trained.run.directory, out, "transformers", dtype=torch.float32), CONSOLE)
        config, checkpoint = resolve_source(str(out), [])
        model = config.model.load(Placement())
        config.tuning.apply(model, ())
        assert checkpoint is None
        with torch.no_grad():
            logits = model.predict(torch.arange(32).view(2, 16), torch.ones(2), model.embed(PROMPTS))
        torch.testing.assert_close(logits, logits_of_run(trained), rtol=0, atol=5e-5)
        assert (out / ADAPTER_FILE).is_file() == (tuning == "lora")
        if tuning == "full":
            tensors = read_network(trained.config, out)
            assert all(x.equal(trained.run.policy.model.net.state_dict()[key]) for key, x in tensors.items())
            options = GeneratorExport(trained.run.directory, tmp_path / "no", "diffusers")
            with pytest.raises(ConfigError, match=r"JanusSpec; give transformers.*TM2570"):
                export_generator(options, CONSOLE)
