"""explainingai's VAE: recorded outputs, checkpoints, settings they do not determine, and gray images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiers import fast
from torch import Tensor

from tastemaker.autoencoders.patchgan import PatchGANDiscriminator, load_discriminator
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.block_vae import BlockVaeSpec
from tastemaker.models.nets.block_vae import LATENT_STATS_KEYS, BlockVaeConfig, BlockVaeNet
from tastemaker.models.nets.vae import sample_posterior
from tastemaker.models.pretrained import load_weights_into
from tastemaker.models.pretrained_autoencoder import load_autoencoder, load_vae

GOLDEN = Path(__file__).parent.parent / "fixtures" / "base" / "explainingai_vae_tiny.safetensors"
SMALL: dict[str, Any] = {
    "down_channels": (32, 32), "mid_channels": (32,), "down_sample": (True,), "attn_down": (True,),
    "num_down_layers": 1, "num_up_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return {key: x.float() for key, x in load_file(GOLDEN).items()}


def published_params() -> dict[str, Any]:
    with safe_open(GOLDEN, "pt") as file:
        params = json.loads(file.metadata()["config"])["params"]
    return {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}


def weights(golden: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key[2:]: x for key, x in golden.items() if key.startswith("w.")}


def test_block_vae_output_equals_published_one(golden: dict[str, Tensor]) -> None:
    net = BlockVaeSpec(**published_params(), kl_weight=1.0).load(Placement())  # the published settings
    load_weights_into(net, weights(golden), "golden", LATENT_STATS_KEYS)
    pixels = (golden["in.image"] + 1) / 2
    moments = net.moments(pixels)
    torch.testing.assert_close(moments, golden["out.encoder_output"], atol=2e-5, rtol=1e-4)
    latents, kl = sample_posterior(moments, golden["in.noise"])
    torch.testing.assert_close(latents, golden["out.sample"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kl.mean()[None], golden["out.kl_loss"], atol=1e-4, rtol=1e-5)
    reconstruction, extra_loss = net(pixels, golden["in.noise"])
    torch.testing.assert_close(2 * reconstruction - 1, golden["out.decoded"], atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(extra_loss, kl)
    mse = (2 * (reconstruction - pixels)).square().mean()
    torch.testing.assert_close(mse[None], golden["out.recon_mse"], atol=1e-5, rtol=1e-5)


def test_default_block_vae_has_published_parameter_count() -> None:
    with torch.device("meta"):
        plain, with_attention = (BlockVaeNet(BlockVaeConfig(mid_channels=mids), 0.0) for mids in ((384,), (384, 384)))
    assert sum(p.numel() for p in plain.parameters()) == 17_760_359
    assert not any("attention" in key for key in plain.state_dict())
    assert len(with_attention.encoder_mids) == len(with_attention.decoder_mids) == 1
    assert plain.stride == 4


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mids", fast([(32,), (32, 32), (32, 64, 32)], (32, 64, 32)))
def test_sizes_are_inferred_from_published_checkpoint(mids: tuple[int, ...], wrapped: bool, tmp_path: Path) -> None:
    spec = BlockVaeSpec(**{**SMALL, "mid_channels": mids})
    net, file = spec.load(Placement()).eval(), tmp_path / "vae_autoencoder_ckpt.pth"
    tensors = {key: x for key, x in net.state_dict().items() if key not in LATENT_STATS_KEYS}
    torch.save({"step": 3, "model": tensors, "config": {"a": [1]}} if wrapped else tensors, file)
    loaded = load_autoencoder(str(file), Placement())
    assert isinstance(loaded, BlockVaeNet) and loaded.config == spec.network_config()
    pixels = torch.rand(2, 3, 8, 12)
    torch.testing.assert_close(loaded(pixels)[0], net(pixels)[0], atol=1e-5, rtol=1e-5)  # attention uses another kernel
    assert spec.with_inferred_sizes(tensors) == spec
    assert load_vae(str(file), 4, 2, Placement()).encode(pixels[..., :8]).shape == (2, 4, 4, 4)


def test_weights_with_other_mid_blocks_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "vae_autoencoder_ckpt.pth"
    torch.save(BlockVaeSpec(**SMALL).load(Placement()).state_dict(), file)
    with pytest.raises(ConfigError, match=r"autoencoder\.mid_channels: .*\[32\].*TM419"):
        BlockVaeSpec(**{**SMALL, "mid_channels": (32, 32)}, weights=str(file)).load(Placement())
    assert BlockVaeSpec(**SMALL, weights=str(file), seed=3).load(Placement()).state_dict().keys()


def test_undetermined_settings_are_requested(golden: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "vae_autoencoder_ckpt.pth"
    torch.save(weights(golden), file)
    with pytest.raises(ConfigError, match=r"TM476"):
        load_autoencoder(str(file), Placement())
    torch.save({"model": weights(golden), "code": print}, file)
    with pytest.raises(ConfigError, match=r"could run code.*TM519"):
        load_autoencoder(str(file), Placement())
    torch.save({"layer.weight": torch.zeros(1)}, file)
    with pytest.raises(ConfigError, match=r"block_vae.*TM517"):
        load_autoencoder(str(file), Placement())


def test_yaml_file_gives_undetermined_settings(golden: dict[str, Tensor], tmp_path: Path) -> None:
    file, yaml_file = tmp_path / "vae_autoencoder_ckpt.pth", tmp_path / "vae.yaml"
    torch.save(weights(golden), file)
    undetermined = {key: published_params()[key] for key in ("num_heads", "norm_channels")}
    for settings in (undetermined, published_params()):
        section = {"type": "block_vae", "weights": str(file), **settings}
        yaml_file.write_text(json.dumps({"autoencoder": section}))  # JSON is YAML, too
        loaded = load_autoencoder(str(yaml_file), Placement())
        assert isinstance(loaded, BlockVaeNet) and loaded.config == BlockVaeSpec(**published_params()).network_config()
        assert all(loaded.state_dict()[key].equal(x) for key, x in weights(golden).items())
    for text, message in (
        ("data: {}", "`autoencoder`"),
        ("autoencoder: {type: block_vae, weights: a.pth, norm_channels: 7}", "settings of block_vae"),
        ("a: [", "TM064"),
    ):
        yaml_file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_autoencoder(str(yaml_file), Placement())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_sample": (True, True)}, "'down_sample'.* 2 .* 1"),
        ({"mid_channels": (64,)}, "'mid_channels'"),
        ({"norm_channels": 24}, "'norm_channels'.*24"),
        ({"num_heads": 3}, "'num_heads'.*3"),
    ],
)
def test_inconsistent_block_vae_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockVaeSpec(**{**SMALL, **change})


def test_one_channel_reconstructs_luma() -> None:
    net = BlockVaeSpec(**SMALL, im_channels=1).load(Placement()).eval()
    gray = torch.rand(2, 1, 8, 8).repeat(1, 3, 1, 1)
    reconstruction, _ = net(gray)
    assert reconstruction.shape == gray.shape
    assert reconstruction[:, 0].equal(reconstruction[:, 1]) and reconstruction[:, 0].equal(reconstruction[:, 2])
    color = torch.tensor([0.9, 0.1, 0.4]).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    luma = (color * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True).repeat(1, 3, 1, 1)
    torch.testing.assert_close(net(color)[0], net(luma)[0], atol=1e-5, rtol=1e-4)


def test_gray_discriminator_weights_load_for_rgb(tmp_path: Path) -> None:
    net = PatchGANDiscriminator(8, 2, extra_layer=False)
    tensors = {f"layers.{key}": x for key, x in {
        "0.0.weight": torch.randn(8, 1, 4, 4), "0.0.bias": torch.randn(8), "1.0.weight": torch.randn(16, 8, 4, 4),
        "1.1.weight": torch.ones(16), "1.1.bias": torch.zeros(16), "1.1.running_mean": torch.zeros(16),
        "1.1.running_var": torch.ones(16), "1.1.num_batches_tracked": torch.tensor(0),
        "2.0.weight": torch.randn(1, 16, 4, 4),
    }.items()}  # fmt: skip
    torch.save(tensors, tmp_path / "vae_discriminator_ckpt.pth")
    load_discriminator(net, tmp_path / "vae_discriminator_ckpt.pth")
    gray = torch.rand(1, 1, 16, 16)
    first = torch.nn.functional.conv2d(2 * gray - 1, tensors["layers.0.0.weight"], tensors["layers.0.0.bias"], 2, 1)
    torch.testing.assert_close(net.main[0](2 * gray.repeat(1, 3, 1, 1) - 1), first, atol=1e-5, rtol=1e-4)


def test_latent_statistics_noise_and_export(tmp_path: Path) -> None:
    net = BlockVaeSpec(**SMALL).load(Placement())
    pixels = torch.rand(32, 3, 8, 8)
    assert net.channels and net.export_format == "authors"
    assert not net(pixels)[0].equal(net(pixels)[0])
    noise = torch.randn(32, *net.latent_noise_shape(pixels))
    assert net(pixels, noise)[0].equal(net(pixels, noise)[0])
    net.measure_latents(pixels)
    z = net.encode(pixels)
    assert torch.allclose(z.std((0, 2, 3)), torch.ones(4), atol=1e-3)
    torch.testing.assert_close(net.decode(z), net.eval()(pixels)[0].clamp(0, 1), atol=1e-4, rtol=1e-4)
    net.export(tmp_path / "vae_autoencoder_ckpt.pth", torch.float32)
    loaded = load_autoencoder(str(tmp_path / "vae_autoencoder_ckpt.pth"), Placement())
    torch.testing.assert_close(loaded(pixels)[0], net(pixels)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"data\.image_size.* 2.*TM484"):
        net(torch.rand(1, 3, 9, 8))
