"""Open-Sora 1.2 beside what its authors' code computed: networks, files and adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.core.lora import Lora, LoraWeights
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Condition, Placement
from tastemaker.export.lora import LoraFromFile, write_diffusers_lora, write_original_lora
from tastemaker.models.component_configs import SD_VAE
from tastemaker.models.nets.opensora_vae import OpenSoraVae, TemporalVae, latent_index, num_latents
from tastemaker.models.nets.stdit3 import STDiT3
from tastemaker.models.opensora.components import TINY_CONFIGS, build_network, infer_stdit3_config
from tastemaker.models.opensora.model import OpenSoraBackbone, OpenSoraSpec

GOLDEN = Path(__file__).parent.parent / "fixtures" / "video"
TINY = {"width": 32, "depth": 2, "heads": 4, "caption_dim": 24, "max_text_tokens": 6}
TARGETS = ("qkv", "q_linear", "kv_linear")  # what VADER adapts
SPEC = OpenSoraSpec().tiny()
# CPUs add in different orders: up to 1e-5 was measured between them.
ROUNDING = 2e-5


def golden(name: str) -> dict[str, Tensor]:
    return {key: x.float() if x.is_floating_point() else x for key, x in load_file(GOLDEN / name).items()}


def far(found: Tensor, wanted: Tensor) -> float:
    """The largest difference beside the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="module")
def said() -> dict[str, Tensor]:
    return golden("stdit3_tiny_io.safetensors")


@pytest.fixture
def net() -> STDiT3:
    made = STDiT3(**TINY)
    made.load_state_dict(golden("stdit3_tiny_state.safetensors"))
    return made


@pytest.fixture(scope="module")
def vae() -> OpenSoraVae:
    from diffusers import AutoencoderKL

    with safe_open(GOLDEN / "osora_vae12_tiny_state.safetensors", framework="pt") as file:
        settings = json.loads(file.metadata()["spatial"])
    kind: Any = AutoencoderKL
    made = OpenSoraVae(kind(**settings), TemporalVae(filters=8, blocks=1, groups=4), decode_chunk_size=18).eval()
    told = made.load_state_dict(golden("osora_vae12_tiny_state.safetensors"), strict=False)
    assert not told.unexpected_keys
    assert all(".module.encoder." in key or ".module.quant_conv" in key for key in told.missing_keys)
    return made.requires_grad_(False)


def test_networks_have_published_keys_and_shapes() -> None:
    with torch.device("meta"):
        nets = {"stdit3_xl2": STDiT3(), "osora_vae12_temporal": torch.nn.ModuleDict({"temporal_vae": TemporalVae()})}
    for name, made in nets.items():
        told = json.loads((GOLDEN / f"{name}_full_keys.json").read_text(encoding="utf-8"))
        published = {key.replace("*", str(i)): shape for key, shape in told.items() for i in range(28)}
        assert {key: list(x.shape) for key, x in made.state_dict().items()} == published
    assert sum(x.numel() for x in nets["stdit3_xl2"].state_dict().values()) == 1_208_872_772
    adapted = [layer for key, layer in nets["stdit3_xl2"].named_modules() if key.rpartition(".")[2] in TARGETS]
    assert len(adapted) == 168
    assert sum(16 * sum(layer.weight.shape) for layer in adapted) == 9_289_728


def test_autoencoder_has_published_size() -> None:
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    with torch.device("meta"):
        whole = OpenSoraVae(kind(**SD_VAE), TemporalVae()).state_dict()
    assert 0 < 1_573_430_548 - 4 * sum(x.numel() for x in whole.values()) < 100_000  # which names and shapes take


def test_stdit3_output_equals_published_one(net: STDiT3, said: Mapping[str, Tensor]) -> None:
    told: dict[str, Any] = {"fps": said["fps"], "size": (float(said["height"][0]), float(said["width"][0]))}
    x, words, seen = said["x"].clone().requires_grad_(), said["y"][:, 0], said["mask"].bool()
    out = net(x, said["timestep"], words, seen, said["x_mask"], **told)
    torch.testing.assert_close(out, said["out"], rtol=0, atol=ROUNDING)
    (out * said["grad_out"]).sum().backward()
    assert x.grad is not None
    assert far(x.grad, said["grad_x"]) < ROUNDING
    for key, p in net.named_parameters():
        if f"grad.{key}" in said:
            assert p.grad is not None
            assert far(p.grad, said[f"grad.{key}"]) < ROUNDING
    with torch.no_grad():
        plain = net(x, said["timestep"], words, seen, **told), net(x, said["timestep"], words, **told)
    torch.testing.assert_close(plain[0], said["out_nomask"], rtol=0, atol=ROUNDING)
    torch.testing.assert_close(plain[1], said["out_notextmask"], rtol=0, atol=ROUNDING)


@torch.no_grad()
@pytest.mark.parametrize("held", [False, True])
def test_backbone_velocity_equals_published_one(net: STDiT3, said: Mapping[str, Tensor], held: bool) -> None:
    model = SPEC.load(Placement())
    model.net, model.size = net, (float(said["height"][0]), float(said["width"][0]))
    for row in (0, 1):
        model.spec = replace(SPEC, fps=float(said["fps"][row]))
        x, free = (said[name][row : row + 1] for name in ("x", "x_mask"))
        tensors = {"words": said["y"][row], "seen": said["mask"][row : row + 1].bool()}
        if held:
            tensors |= {"held": x.transpose(1, 2), "until": free.float()}
        found = model.predict(x.transpose(1, 2), said["timestep"][row : row + 1] / 1000, Condition(("",), tensors))
        wanted = -said["out" if held else "out_nomask"][row : row + 1, :4].transpose(1, 2)
        wanted = torch.where(free[..., None, None, None], wanted, 0) if held else wanted
        torch.testing.assert_close(found, wanted, rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_masked_text_is_ignored(net: STDiT3, said: Mapping[str, Tensor]) -> None:
    told: dict[str, Any] = {"fps": said["fps"], "size": (40.0, 64.0)}
    seen = torch.tensor([[True] * 3 + [False] * 3] * 2)
    words = said["y"][:, 0]
    other = torch.where(seen[..., None], words, torch.randn_like(words))
    whole = net(said["x"], said["timestep"], words, seen, **told)
    assert far(net(said["x"], said["timestep"], other, seen, **told), whole) < 1e-6
    assert far(net(said["x"], said["timestep"], words[:, :3], None, **told), whole) < 1e-6


def test_autoencoder_output_equals_published_one(vae: OpenSoraVae) -> None:
    told = golden("osora_vae12_tiny_io.safetensors")
    mean, spread = vae.temporal_vae.encode(told["tvae.x"]).chunk(2, 1)
    assert far(mean, told["tvae.mean"]) < ROUNDING
    assert far(spread, told["tvae.logvar"]) < ROUNDING
    assert far(vae.temporal_vae.decode(told["tvae.z"], 17), told["tvae.dec17"]) < ROUNDING
    assert far(vae.temporal_vae.decode(told["tvae.z"][:, :, :1], 1), told["tvae.dec1"]) < ROUNDING
    assert far(vae.decode(told["pipe.z"], 18), told["pipe.dec18"]) < ROUNDING
    assert far(vae.decode(told["pipe.z"][:, :, ::2], 11), told["pipe.dec_alt"]) < ROUNDING
    assert far(vae.decode_single_latents(told["pipe.z"], [2]), told["pipe.dec_frame2_as_single"]) < ROUNDING


def through(spec: OpenSoraSpec, vae: OpenSoraVae, together: int = 1) -> OpenSoraBackbone:
    """A backbone with the recorded autoencoder, frames decoded so many at once."""
    model = spec.load(Placement())
    model.autoencoder = vae
    vae.decode_chunk_size = together
    return model


def test_requested_frames_decode_only_their_chunk(vae: OpenSoraVae) -> None:
    told = golden("osora_vae12_tiny_io.safetensors")
    model = through(replace(SPEC, duration=18), vae)
    x = told["pipe.z"].transpose(1, 2)
    assert x.shape[1:] == model.shape
    whole = model.decode(x)
    assert far(whole, (told["pipe.dec18"] / 2 + 0.5).clamp(0, 1).transpose(1, 2)) < 5e-6  # of another batch
    for frame in range(18):
        assert torch.equal(model.decode(x, [frame]), whole[:, [frame]])
    assert torch.equal(model.decode(x, [17, 3, -1, 3]), whole[:, [17, 3, 17, 3]])
    noisy = x.clone()
    noisy[:, 5:] = torch.nan  # of the second chunk
    assert torch.equal(model.decode(noisy, [0, 16]), whole[:, [0, 16]])
    assert model.decode(noisy, [17]).isnan().all()


def test_single_latent_decoding_equals_vader(vae: OpenSoraVae) -> None:
    told = golden("osora_vae12_tiny_io.safetensors")
    model = through(replace(SPEC, duration=18, decode_single_latents=True), vae)
    x = told["pipe.z"].transpose(1, 2)
    wanted = (told["pipe.dec_frame2_as_single"] / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    for frame in (5, 8):
        assert latent_index(frame, 18) == 2
        assert far(model.decode(x, [frame]), wanted) < ROUNDING


def test_checkpointed_decoder_has_the_same_gradient(vae: OpenSoraVae) -> None:
    model = through(replace(SPEC, duration=18), vae, 4)
    x = torch.randn(1, *model.shape, generator=torch.Generator().manual_seed(0))
    slopes = []
    for again in (False, True):
        vae.checkpoint_decoder = again
        leaf = x.clone().requires_grad_()
        (model.decode(leaf, [2]) ** 2).sum().backward()
        assert leaf.grad is not None
        slopes.append(leaf.grad)
    vae.checkpoint_decoder = False
    torch.testing.assert_close(slopes[0], slopes[1])
    assert slopes[0][:, :5].abs().sum() > 0
    assert slopes[0][:, 5:].abs().sum() == 0


def test_latent_count_and_index() -> None:
    assert [num_latents(frames) for frames in (1, 4, 5, 17, 18, 51, 102, 204, 408)] == [1, 1, 2, 5, 6, 15, 30, 60, 120]
    assert [latent_index(frame, 17) for frame in (0, 1, 4, 5, 16)] == [0, 1, 1, 2, 4]
    assert [latent_index(frame, 51) for frame in (17, 18, 50)] == [5, 6, 14]
    assert [latent_index(frame, 6) for frame in range(6)] == [0, 0, 1, 1, 1, 1]


def test_published_files_load_and_others_are_refused(tmp_path: Path, said: Mapping[str, Tensor]) -> None:
    tensors = golden("stdit3_tiny_state.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    made = build_network(str(tmp_path), 0, Placement())
    own = made.state_dict()
    assert infer_stdit3_config(tensors) == {**TINY, "channels": 4}
    assert all(torch.equal(own[key], x) for key, x in tensors.items())
    half = build_network(str(tmp_path), 0, Placement(dtype=torch.bfloat16)).state_dict()
    assert half["t_block.1.weight"].dtype == torch.bfloat16
    assert half["rope.freqs"].dtype == torch.float32
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="are not of this network"):
        build_network(str(tmp_path), 0, Placement())
    with pytest.raises(ConfigError, match="tastemaker download hpcai-tech/OpenSora-VAE"):
        replace(SPEC, vae=str(tmp_path / "none")).load(Placement())


def test_published_autoencoder_file_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tastemaker.models.opensora import components

    own = SPEC.load(Placement()).autoencoder.state_dict()
    assert {key.split(".")[0] for key in own} == {"spatial_vae", "temporal_vae", "scale", "shift"}
    save_file({key: x.contiguous() for key, x in own.items()}, tmp_path / "model.safetensors")
    monkeypatch.setattr(components, "SD_VAE", TINY_CONFIGS["spatial"])
    monkeypatch.setattr(components, "TemporalVae", lambda: TemporalVae(**TINY_CONFIGS["temporal"]))
    read = replace(SPEC, vae=str(tmp_path), seed=5).load(Placement()).autoencoder.state_dict()
    assert all(torch.equal(read[key], x) for key, x in own.items())


def test_vader_lora_round_trip(tmp_path: Path) -> None:
    model = SPEC.load(Placement())
    chance = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for key, layer in model.net.named_modules():
        if key.rpartition(".")[2] in TARGETS:
            outputs, inputs = layer.weight.shape
            found[f"base_model.model.{key}.lora_A.weight"] = torch.randn(4, inputs, generator=chance)
            found[f"base_model.model.{key}.lora_B.weight"] = torch.randn(outputs, 4, generator=chance)
    torch.save(found, tmp_path / "peft_model_800.pt")
    before = {key: x.clone() for key, x in model.net.state_dict().items()}
    weights = LoraFromFile(tmp_path / "peft_model_800.pt", OpenSoraSpec.layout).apply(model, ())
    assert isinstance(weights, LoraWeights)
    assert len(weights.trainable()) == len(found) == 12
    layer = "temporal_blocks.0.cross_attn.kv_linear"
    down, up = (found[f"base_model.model.{layer}.lora_{factor}.weight"] for factor in "AB")
    torch.testing.assert_close(weights.merged()[f"{layer}.weight"], before[f"{layer}.weight"] + 8 / 4 * up @ down)
    write_original_lora(weights, OpenSoraSpec.layout, tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again.keys() == found.keys()
    assert all(torch.equal(again[key], x) for key, x in found.items())


def test_own_lora_keeps_its_scale(tmp_path: Path) -> None:
    model = SPEC.load(Placement())
    weights = Lora(rank=4, alpha=12, target_modules=TARGETS).apply(model, ())
    assert isinstance(weights, LoraWeights)
    with torch.no_grad():
        for p in weights.trainable().values():
            p.normal_(generator=torch.Generator().manual_seed(0))
    write_diffusers_lora(weights, OpenSoraSpec.layout, tmp_path / "adapters.safetensors", torch.float32)
    write_original_lora(weights, OpenSoraSpec.layout, tmp_path / "adapters.pt")
    for name in ("adapters.safetensors", "adapters.pt"):
        read = LoraFromFile(tmp_path / name, OpenSoraSpec.layout).apply(SPEC.load(Placement()), ())
        assert isinstance(read, LoraWeights)
        for key, x in weights.merged().items():
            torch.testing.assert_close(read.merged()[key], x)
