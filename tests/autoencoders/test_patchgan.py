"""PatchGAN discriminator compared with the published one: logits, losses and checkpoint layouts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.autoencoders.discriminator import DISCRIMINATOR_LOSSES, GENERATOR_LOSSES
from tastemaker.autoencoders.patchgan import PatchGANDiscriminator, convert_explainingai_keys, load_discriminator
from tastemaker.core.registry import ConfigError

GOLDEN = Path(__file__).parent.parent / "fixtures" / "llamagen" / "patchgan_and_gan_losses.safetensors"


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


def published_weights(golden: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[2:]: x for key, x in golden.items() if key.startswith("w.")}


def test_logits_equal_published_ones(golden: dict[str, Tensor]) -> None:
    net = PatchGANDiscriminator(8)
    net.load_state_dict(published_weights(golden))
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()  # recorded after the training pass below
    pixels = (golden["in.image"] + 1) / 2
    torch.testing.assert_close(net.eval()(pixels), golden["out.logits_eval"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(net.train()(pixels), golden["out.logits_train"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(net.state_dict(), published_weights(golden))


def test_losses_equal_published_ones(golden: dict[str, Tensor]) -> None:
    real, fake = golden["in.real"], golden["in.fake"]
    for name in ("hinge", "vanilla"):
        torch.testing.assert_close(DISCRIMINATOR_LOSSES[name](real, fake).mean()[None], golden[f"out.{name}_d_loss"])
    torch.testing.assert_close(GENERATOR_LOSSES["mean"](fake).mean()[None], golden["out.hinge_gen_loss"])


def test_non_saturating_loss_differs_from_published_one(golden: dict[str, Tensor]) -> None:
    fake = golden["in.fake"]
    swapped = F.binary_cross_entropy_with_logits(torch.ones_like(fake), fake)
    torch.testing.assert_close(swapped[None], golden["out.non_saturating_gen_loss"])
    expected = F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))
    torch.testing.assert_close(GENERATOR_LOSSES["non_saturating"](fake).mean(), expected)
    # A more convincing reconstruction has a lower loss.
    assert GENERATOR_LOSSES["non_saturating"](fake + 5).mean() < expected


def test_discriminators_have_published_parameter_counts() -> None:
    explainingai, llamagen = PatchGANDiscriminator(64, 3, extra_layer=False), PatchGANDiscriminator(64, 3)
    assert sum(p.numel() for p in explainingai.parameters()) == 663_360
    assert sum(p.numel() for p in llamagen.parameters()) == 2_765_633


def test_both_checkpoint_layouts_load(golden: dict[str, Tensor], tmp_path: Path) -> None:
    llamagen = {"model": {"conv": torch.zeros(1)}, "discriminator": published_weights(golden), "steps": 3}
    torch.save(llamagen, tmp_path / "vq.pt")
    net = PatchGANDiscriminator(8)
    load_discriminator(net, tmp_path / "vq.pt")
    assert net.main[11].weight.equal(golden["w.main.11.weight"])
    native = PatchGANDiscriminator(8, 3, extra_layer=False).state_dict()
    explainingai = {f"layers.{explainingai_key(key)}": x for key, x in native.items()}
    assert convert_explainingai_keys(explainingai).keys() == native.keys()
    torch.save(explainingai, tmp_path / "vae_discriminator_ckpt.pth")
    other = PatchGANDiscriminator(8, 3, extra_layer=False)
    load_discriminator(other, tmp_path / "vae_discriminator_ckpt.pth")
    assert all(x.equal(native[key]) for key, x in other.state_dict().items())
    save_file(native, tmp_path / "native.safetensors")
    load_discriminator(other, tmp_path / "native.safetensors")


def explainingai_key(key: str) -> str:
    """The key in explainingai's layout: `main.3.weight` is `1.1.weight`, the norm of the second layer."""
    number, name = key.removeprefix("main.").split(".")
    index = int(number)
    return f"{(index + 1) // 3}.{(index + 1) % 3 if index > 1 else index}.{name}"


def test_small_images_and_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"discriminator\.num_layers.*TM554"):
        PatchGANDiscriminator(8)(torch.rand(1, 3, 16, 16))
    assert PatchGANDiscriminator(8)(torch.rand(2, 3, 24, 24)).shape == (2, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"none\.pth.*TM555"):
        load_discriminator(PatchGANDiscriminator(8), tmp_path / "none.pth")
    torch.save({"discriminator": {"main.0.weight": torch.zeros(1)}}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"other\.pt.*another network.*TM509"):
        load_discriminator(PatchGANDiscriminator(8), tmp_path / "other.pt")
    torch.save({"args": Namespace(a=1)}, tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match=r"could run code.*TM519"):
        load_discriminator(PatchGANDiscriminator(8), tmp_path / "pickled.pt")
