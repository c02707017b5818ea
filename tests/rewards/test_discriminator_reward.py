"""A tokenizer's discriminator as a reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.autoencoders.training import train
from tastemaker.config.build import build_autoencoder, make_tiny_any
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.discriminator import DiscriminatorReward

GOLDEN = Path(__file__).parent.parent / "fixtures" / "llamagen" / "patchgan_and_gan_losses.safetensors"


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


@pytest.fixture
def weights(golden: dict[str, Tensor], tmp_path: Path) -> Path:
    """A published discriminator whose batch norms have their initial statistics."""
    state = {key[2:]: x.clone() for key, x in golden.items() if key.startswith("w.")}
    for key, x in state.items():
        if key.endswith(("running_mean", "running_var", "num_batches_tracked")):
            x.fill_(key.endswith("running_var"))
    save_file(state, tmp_path / "discriminator.safetensors")
    return tmp_path / "discriminator.safetensors"


def test_score_is_the_mean_of_the_published_logits(golden: dict[str, Tensor], weights: Path) -> None:
    pixels = ((golden["in.image"] + 1) / 2)[:, None].requires_grad_()
    for path in (weights, weights.parent):  # a file, or a checkpoint directory
        scores = DiscriminatorReward(str(path), width=8).load(Placement()).score(pixels, ["", ""], [{}, {}])
        torch.testing.assert_close(scores, golden["out.logits_eval"].mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(scores.sum(), pixels)[0].abs().max() > 0


@pytest.mark.parametrize("form", ["consolidated", "sharded"])
def test_discriminator_is_read_from_a_tokenizer_run(form: str, tmp_path: Path) -> None:
    overrides = [
        "engine.device=cpu",
        "engine.precision=fp32",
        "batch_size=4",
        "data.device=cpu",
        "sample.every=0",
        "steps=1",
    ]
    format_overrides = ["validation.every=0", f"checkpoint.format={form}"]
    config = make_tiny_any(
        load_any_config("llamagen-vq", [*overrides, "discriminator={start_step: 0, num_layers: 2}", *format_overrides])
    )
    assert isinstance(config, AutoencoderRunConfig) and config.discriminator is not None
    run = build_autoencoder(config, tmp_path / "run")
    list(train(run))
    assert run.discriminator is not None
    scorer = DiscriminatorReward(str(tmp_path / "run"), width=config.discriminator.width, num_layers=2).load(
        Placement()
    )
    trained = run.discriminator.net.state_dict()
    assert all(x.equal(trained[key]) for key, x in scorer.net.state_dict().items())


def test_missing_or_wrongly_sized_weights_are_refused(weights: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pt.*TM555"):
        DiscriminatorReward("nowhere.pt").load(Placement())
    with pytest.raises(ConfigError, match=r"sizes.*TM509"):
        DiscriminatorReward(str(weights), width=16).load(Placement())
