"""LoRA on the tower of a preference model: it starts as the frozen tower, trains on votes, and loads as a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from painted_votes import write_painted_votes
from rich.console import Console
from safetensors.torch import load_file, save_file

from tastemaker.config.load import load_any_config
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import read_image
from tastemaker.data.votes import VoteData
from tastemaker.preferences.preference_model import PreferenceHead, encode_samples
from tastemaker.preferences.tower_adapters import AdapterSettings, add_adapters, predict_votes, train_adapters
from tastemaker.preferences.votes import read_votes
from tastemaker.rewards.clip import ClipReward
from tastemaker.rewards.playground import PlaygroundMatchReward
from tastemaker.rewards.preference import PreferenceReward, load_tower
from tastemaker.training.trainer import run_training

QUIET = Console(quiet=True)
CAPTION = "a photo of a dog"


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_painted_votes(tmp_path_factory.mktemp("votes"), prompts=12, votes=30)


@pytest.mark.slow
def test_adapters_of_clip_and_of_the_playground_start_without_effect_and_train(votes: Path) -> None:
    data = VoteData(votes).load(0)
    targets, places = torch.ones(len(data)), list(range(len(data)))
    for spec in (ClipReward(weights="tiny"), PlaygroundMatchReward(weights="tiny")):
        tower = load_tower(spec, Placement())
        pixels = torch.rand(2, 1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        frozen = torch.cat(list(encode_samples(tower, pixels, [CAPTION] * 2, "all").values()), 1)
        adapters = add_adapters(tower, rank=2)
        assert not [name for name in adapters.trainable() if "text" in name or "reader" in name]
        same = torch.cat(list(encode_samples(tower, pixels, [CAPTION] * 2, "all").values()), 1)
        torch.testing.assert_close(same, frozen, rtol=1e-4, atol=1e-5)
        head = PreferenceHead(frozen.shape[1])
        torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(0))

        def loss(tower=tower, head=head) -> float:  # type: ignore[no-untyped-def]
            logits = predict_votes(tower, head, data.collate, places, "all", 16)
            return float(torch.nn.functional.softplus(-logits).mean())

        before, settings = loss(), AdapterSettings("all", steps=8, lr=1e-2, batch_size=16, l2=0.0, seed=0)
        assert list(train_adapters(tower, adapters, head, data.collate, targets, places, settings)) == [*range(1, 9)]
        assert loss() < before - 0.01
        changed = torch.cat(list(encode_samples(tower, pixels, [CAPTION] * 2, "all").values()), 1)
        assert (changed - frozen).abs().max() > 1e-3


def test_trained_adapters_load_as_a_differentiable_reward(votes: Path, tmp_path: Path) -> None:
    settings = [f"data.path={votes}", f"output_dir={tmp_path}", "name=lora", "steps=1", "preference.folds=3"]
    lora = ["preference.lora_rank=2", "preference.lora_steps=6", "preference.lora_lr=0.01", "engine.device=cpu"]
    assert run_training(load_any_config("preference-playground", [*settings, *lora]), tiny=True, console=QUIET)
    report = json.loads((tmp_path / "lora" / "preference.json").read_text())
    compared = report["lora"]
    assert {"frozen", "lora"} <= set(compared) and "LoRA predicts" in report["summary"]
    assert all(0 <= compared[name]["accuracy"] <= 1 for name in ("frozen", "lora"))

    file = tmp_path / "lora" / "preference.safetensors"
    reward = PreferenceReward(tmp_path / "lora").load(Placement())
    decided = [vote for vote in read_votes(votes) if vote.pairs()]
    margins = []
    for vote in decided:
        pixels = torch.stack([read_image(votes.parent / sample.file)[:1] for sample in vote.samples])
        scores = reward.score(pixels, [vote.prompt] * 2, [{}] * 2)
        margins.append(float(scores[vote.choice] - scores[1 - vote.choice]))  # type: ignore[index, operator]
    assert sum(margins) > 0  # the votes it was trained on
    pixels = torch.rand(1, 1, 3, 64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward.score(pixels, [CAPTION], [{}]).sum(), pixels)
    assert gradient.abs().max() > 0
    assert not any(p.requires_grad for p in reward.net.image_layers()[0].parameters())

    tensors = load_file(file)
    adapters = {name for name in tensors if name.startswith("adapter.")}
    without = {name: torch.zeros_like(x) if name in adapters else x for name, x in tensors.items()}
    resave(file, tmp_path / "zero.safetensors", without)
    frozen = PreferenceReward(tmp_path / "zero.safetensors").load(Placement())
    assert adapters and not torch.allclose(frozen.score(pixels, [CAPTION], [{}]), reward.score(pixels, [CAPTION], [{}]))
    resave(file, tmp_path / "few.safetensors", {k: x for k, x in tensors.items() if k not in sorted(adapters)[:1]})
    with pytest.raises(ConfigError, match="TM1520"):
        PreferenceReward(tmp_path / "few.safetensors").load(Placement())


def resave(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import safe_open

    with safe_open(source, "pt") as file:
        save_file(tensors, target, file.metadata())
