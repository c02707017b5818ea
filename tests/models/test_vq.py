"""The VQ tokenizer compared with the published one, and its codebook usage in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.playground import PlaygroundScenes
from tastemaker.models import weight_files
from tastemaker.models.image_tokenizer import VqSpec, load_image_tokenizer
from tastemaker.models.nets.vq import (
    VQ,
    ColorTokenizer,
    LookupFreeQuantizer,
    VectorQuantizer,
    VQConfig,
    drop_usage_buffer,
)

LLAMAGEN = Path(__file__).parent.parent / "fixtures" / "llamagen"
KEYS = json.loads((LLAMAGEN / "keys_shapes.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    tensors = load_file(LLAMAGEN / "vq_tiny.safetensors")
    return {key: x.float() if x.is_floating_point() else x for key, x in tensors.items()}


def published_vq(golden: dict[str, Tensor]) -> VQ:
    net = VQ(VQConfig(32, (1, 2), 1, 16, 128, 8, entropy_weight=0.1, dead_code_weight=0.0))
    net.load_state_dict({key[2:]: x for key, x in golden.items() if key.startswith("w.")})
    return net


def test_tokens_equal_published_ones(golden: dict[str, Tensor]) -> None:
    pixels = (golden["in.image"] + 1) / 2
    assert torch.equal(published_vq(golden).encode(pixels).flatten(), golden["out.indices"])


def test_autocast_does_not_change_tokens(golden: dict[str, Tensor]) -> None:
    net = published_vq(golden)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net.quantize.assign_codes(golden["out.pre_quant"]).flatten(), golden["out.indices"])


def test_decoded_images_equal_published_ones(golden: dict[str, Tensor]) -> None:
    net, expected = published_vq(golden), golden["out.decode_code"]
    vectors = net.quantize.lookup(golden["in.codes"]).transpose(1, 2).reshape(2, 8, 8, 8)
    torch.testing.assert_close(vectors, golden["out.codebook_entry"])
    torch.testing.assert_close(net.decode_unclamped(vectors) * 2 - 1, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(net.decode(golden["in.codes"]), ((expected + 1) / 2).clamp(0, 1), rtol=0, atol=1e-5)


def test_latents_and_token_embeddings_equal_published_ones(golden: dict[str, Tensor]) -> None:
    net = published_vq(golden)
    torch.testing.assert_close(
        net.encode_continuous((golden["in.image"] + 1) / 2), golden["out.pre_quant"], rtol=0, atol=1e-5
    )
    embeddings = net.token_embeddings(golden["in.codes"]).transpose(1, 2).reshape(2, 8, 8, 8)
    torch.testing.assert_close(embeddings, golden["out.codebook_entry"])


def test_quantizer_losses_equal_published_ones(golden: dict[str, Tensor]) -> None:
    output = published_vq(golden).quantize(golden["out.pre_quant"])
    torch.testing.assert_close(output.latent, golden["out.quant"])
    terms = torch.stack([output.codebook_loss, 0.25 * output.commitment_loss, 0.1 * output.entropy_loss])
    expected = torch.cat([golden["out.vq_loss"], golden["out.commit_loss"], golden["out.entropy_loss"]])
    torch.testing.assert_close(terms, expected)


def test_straight_through_gradients_equal_published_ones(golden: dict[str, Tensor]) -> None:
    net, image = published_vq(golden), golden["in.image"]
    reconstruction, extra_loss = net((image + 1) / 2)
    torch.testing.assert_close(reconstruction * 2 - 1, golden["out.rec"], rtol=0, atol=2e-5)
    torch.autograd.backward((reconstruction * 2 - 1 - image).square().mean() + extra_loss)
    torch.testing.assert_close(net.quantize.embedding.weight.grad, golden["out.grad.embedding"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(net.encoder.conv_in.weight.grad, golden["out.grad.enc_conv_in"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "multipliers"), [("VQ-16", (1, 1, 2, 2, 4)), ("VQ-8", (1, 2, 2, 4))])
def test_published_vq_sizes_have_published_keys(name: str, multipliers: tuple[int, ...]) -> None:
    with torch.device("meta"):
        net = VQ(VQConfig(channel_multipliers=multipliers))
    shapes = {key: list(x.shape) for key, x in net.state_dict().items()}
    expected = {key: torch.empty(shape, device="meta") for key, shape in KEYS[name]["keys"].items()}
    assert shapes == {key: list(x.shape) for key, x in drop_usage_buffer(expected).items()}
    assert "quantize.codebook_used" in expected


def test_lfq_first_channel_is_most_significant() -> None:
    z = torch.tensor([1.0, -1.0, 0.5, -0.5]).view(1, 4, 1, 1)
    quantizer = LookupFreeQuantizer(16)
    assert quantizer.assign_codes(z).tolist() == [[0b1010]]
    assert quantizer.lookup(torch.tensor([[0b1010]])).tolist() == [[[1.0, -1.0, 1.0, -1.0]]]
    assert torch.equal(
        quantizer.assign_codes(quantizer.lookup(torch.arange(16)).T.view(1, 4, 4, 4)), torch.arange(16)[None]
    )


def test_lfq_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match=r"power of two.*TM486"):
        VqSpec(quantizer="lfq", codebook_size=1000)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(VqSpec(8, (1, 1, 1, 2), 1, 8, 64, norm_num_groups=2, entropy_weight=0.01), marks=pytest.mark.slow),
        pytest.param(
            VqSpec(
                8,
                (1, 1, 1, 2),
                1,
                8,
                64,
                norm_num_groups=2,
                entropy_weight=0.1,
                commitment_weight=0.05,
                quantizer="lfq",
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=["codebook", "lfq"],
)
def test_tokenizer_learns_to_reconstruct(spec: VqSpec) -> None:
    """Images of four colors each: a tokenizer with collapsed codes predicts the mean color, an error of 0.24."""
    net = spec.load(Placement())
    pixels = torch.rand(16, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    pixels = pixels.repeat_interleave(8, 2).repeat_interleave(8, 3)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(120):
        reconstruction, extra_loss = net(pixels)
        optimizer.zero_grad()
        torch.autograd.backward((reconstruction - pixels).abs().mean() + extra_loss)
        optimizer.step()
    assert (net.decode(net.encode(pixels)) - pixels).abs().mean() < 0.17
    assert net.codebook_usage(pixels) > 0.4  # of 64 codes, for 64 colors


def test_dead_code_loss_revives_codes() -> None:
    usage = {}
    for weight in (0.0, 1.0):
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        codebook = VectorQuantizer(256, 8)
        optimizer = torch.optim.Adam(codebook.parameters(), 1e-3)
        for _ in range(60):
            output = codebook(clustered_latents(generator))
            optimizer.zero_grad()
            torch.autograd.backward(output.codebook_loss + weight * output.dead_code_loss)
            optimizer.step()
        ids = codebook.assign_codes(clustered_latents(generator, 64))
        usage[weight] = (torch.bincount(ids.flatten(), minlength=256) > 0).float().mean().item()
    assert usage[1.0] > 0.9
    assert usage[0.0] < 0.5


def clustered_latents(generator: torch.Generator, batch_size: int = 16) -> Tensor:
    """Latents in forty clusters on one side of the codes: [batch_size, 8, 8, 8]."""
    clusters = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)) + torch.tensor([2.0] + [0.0] * 7)
    chosen = clusters[torch.randint(0, 40, (batch_size * 64,), generator=generator)]
    return (
        (chosen + 0.2 * torch.randn(batch_size * 64, 8, generator=generator))
        .view(batch_size, 8, 8, 8)
        .permute(0, 3, 1, 2)
    )


def test_codebook_usage_is_the_share_of_codes_in_use() -> None:
    net = VqSpec().tiny().load(Placement())
    pixels = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert net.codebook_usage(pixels) == len(set(net.encode(pixels).flatten().tolist())) / 64


def test_tokenizer_file_round_trip(tmp_path: Path) -> None:
    spec = VqSpec().tiny()
    net = spec.load(Placement())
    settings = {
        "type": "vq",
        "channels": 8,
        "channel_multipliers": [1, 2, 2, 4],
        "num_res_blocks": 1,
        "z_channels": 8,
        "codebook_size": 64,
    } | {"norm_num_groups": 2}
    weight_files.write_weights(tmp_path / "vq.safetensors", net.state_dict(), {"autoencoder": settings}, torch.float32)
    pixels = PlaygroundScenes(device="cpu").load(0).batch(0, 4, 0, 1).pixels[:, 0]
    tokenizer = load_image_tokenizer(str(tmp_path / "vq.safetensors"), 64, 8, 64, Placement())
    assert torch.equal(tokenizer.encode(pixels), net.encode(pixels))
    assert not any(p.requires_grad for p in tokenizer.parameters())
    with pytest.raises(ConfigError, match=r"model\.codebook_size=64.*TM435"):
        load_image_tokenizer(str(tmp_path / "vq.safetensors"), 128, 8, 64, Placement())


def test_weights_of_another_autoencoder_are_refused(tmp_path: Path) -> None:
    weight_files.write_weights(tmp_path / "other.safetensors", {"x": torch.zeros(1)}, {"autoencoder": {"type": "vae"}})
    with pytest.raises(ConfigError, match=r"other\.safetensors.* vq.*TM436"):
        load_image_tokenizer(str(tmp_path / "other.safetensors"), 64, 8, 64, Placement())


def test_color_tokenizer_round_trip() -> None:
    tokenizer = ColorTokenizer(64, 4, 16)
    pixels = torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(4, 2)
    pixels = pixels.repeat_interleave(4, 3)
    ids = tokenizer.encode(pixels)
    assert ids.shape == (8, 16) and int(ids.max()) < 64
    assert (tokenizer.decode(ids) - pixels).abs().max() <= 1 / 6 + 1e-6  # half a step of four levels
    assert torch.equal(tokenizer.encode(tokenizer.decode(ids)), ids)
