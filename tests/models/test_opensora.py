"""Open-Sora 1.2 compared with outputs of its authors' code: networks, files and adapters."""

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
TARGETS = ("qkv", "q_linear", "kv_linear")  # the layers that VADER adapts
SPEC = OpenSoraSpec().tiny()
# CPUs add in different orders: differences up to 1e-5 were measured.
TOLERANCE = 2e-5


def golden(name: str) -> dict[str, Tensor]:
    return {key: x.float() if x.is_floating_point() else x for key, x in load_file(GOLDEN / name).items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest expected absolute value."""
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def recording() -> dict[str, Tensor]:
    return golden("stdit3_tiny_io.safetensors")


@pytest.fixture
def net() -> STDiT3:
    stdit3 = STDiT3(**TINY)
    stdit3.load_state_dict(golden("stdit3_tiny_state.safetensors"))
    return stdit3


@pytest.fixture(scope="module")
def vae() -> OpenSoraVae:
    from diffusers import AutoencoderKL

    with safe_open(GOLDEN / "osora_vae12_tiny_state.safetensors", framework="pt") as file:
        settings = json.loads(file.metadata()["spatial"])
    vae_class: Any = AutoencoderKL
    autoencoder = OpenSoraVae(
        vae_class(**settings), TemporalVae(filters=8, blocks=1, groups=4), decode_chunk_size=18
    ).eval()
    result = autoencoder.load_state_dict(golden("osora_vae12_tiny_state.safetensors"), strict=False)
    assert not result.unexpected_keys
    assert all(".module.encoder." in key or ".module.quant_conv" in key for key in result.missing_keys)
    return autoencoder.requires_grad_(False)


def test_networks_have_published_keys_and_shapes() -> None:
    with torch.device("meta"):
        nets = {"stdit3_xl2": STDiT3(), "osora_vae12_temporal": torch.nn.ModuleDict({"temporal_vae": TemporalVae()})}
    for name, network in nets.items():
        patterns = json.loads((GOLDEN / f"{name}_full_keys.json").read_text(encoding="utf-8"))
        published = {key.replace("*", str(i)): shape for key, shape in patterns.items() for i in range(28)}
        assert {key: list(x.shape) for key, x in network.state_dict().items()} == published
    assert sum(x.numel() for x in nets["stdit3_xl2"].state_dict().values()) == 1_208_872_772
    adapted = [layer for key, layer in nets["stdit3_xl2"].named_modules() if key.rpartition(".")[2] in TARGETS]
    assert len(adapted) == 168
    assert sum(16 * sum(layer.weight.shape) for layer in adapted) == 9_289_728


def test_autoencoder_has_published_size() -> None:
    from diffusers import AutoencoderKL

    vae_class: Any = AutoencoderKL
    with torch.device("meta"):
        state_dict = OpenSoraVae(vae_class(**SD_VAE), TemporalVae()).state_dict()
    # The rest of the published file is the safetensors header with keys and shapes.
    assert 0 < 1_573_430_548 - 4 * sum(x.numel() for x in state_dict.values()) < 100_000


def test_stdit3_output_equals_published_one(net: STDiT3, recording: Mapping[str, Tensor]) -> None:
    conditioning: dict[str, Any] = {
        "fps": recording["fps"],
        "size": (float(recording["height"][0]), float(recording["width"][0])),
    }
    x, text_embeds, text_mask = recording["x"].clone().requires_grad_(), recording["y"][:, 0], recording["mask"].bool()
    out = net(x, recording["timestep"], text_embeds, text_mask, recording["x_mask"], **conditioning)
    torch.testing.assert_close(out, recording["out"], rtol=0, atol=TOLERANCE)
    (out * recording["grad_out"]).sum().backward()
    assert x.grad is not None
    assert relative_error(x.grad, recording["grad_x"]) < TOLERANCE
    for key, p in net.named_parameters():
        if f"grad.{key}" in recording:
            assert p.grad is not None
            assert relative_error(p.grad, recording[f"grad.{key}"]) < TOLERANCE
    with torch.no_grad():
        plain = (
            net(x, recording["timestep"], text_embeds, text_mask, **conditioning),
            net(x, recording["timestep"], text_embeds, **conditioning),
        )
    torch.testing.assert_close(plain[0], recording["out_nomask"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(plain[1], recording["out_notextmask"], rtol=0, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("has_references", [False, True])
def test_backbone_velocity_equals_published_one(
    net: STDiT3, recording: Mapping[str, Tensor], has_references: bool
) -> None:
    model = SPEC.load(Placement())
    model.net, model.size = net, (float(recording["height"][0]), float(recording["width"][0]))
    for row in (0, 1):
        model.spec = replace(SPEC, fps=float(recording["fps"][row]))
        x, frame_mask = (recording[name][row : row + 1] for name in ("x", "x_mask"))
        tensors = {"prompt_embeds": recording["y"][row], "attention_mask": recording["mask"][row : row + 1].bool()}
        if has_references:
            tensors |= {"reference_latents": x.transpose(1, 2), "fixed_until": frame_mask.float()}
        velocity = model.predict(
            x.transpose(1, 2), recording["timestep"][row : row + 1] / 1000, Condition(("",), tensors)
        )
        expected = -recording["out" if has_references else "out_nomask"][row : row + 1, :4].transpose(1, 2)
        expected = torch.where(frame_mask[..., None, None, None], expected, 0) if has_references else expected
        torch.testing.assert_close(velocity, expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_masked_text_is_ignored(net: STDiT3, recording: Mapping[str, Tensor]) -> None:
    conditioning: dict[str, Any] = {"fps": recording["fps"], "size": (40.0, 64.0)}
    text_mask = torch.tensor([[True] * 3 + [False] * 3] * 2)
    text_embeds = recording["y"][:, 0]
    other = torch.where(text_mask[..., None], text_embeds, torch.randn_like(text_embeds))
    expected = net(recording["x"], recording["timestep"], text_embeds, text_mask, **conditioning)
    assert relative_error(net(recording["x"], recording["timestep"], other, text_mask, **conditioning), expected) < 1e-6
    assert (
        relative_error(net(recording["x"], recording["timestep"], text_embeds[:, :3], None, **conditioning), expected)
        < 1e-6
    )


def test_autoencoder_output_equals_published_one(vae: OpenSoraVae) -> None:
    recording = golden("osora_vae12_tiny_io.safetensors")
    mean, log_variance = vae.temporal_vae.encode(recording["tvae.x"]).chunk(2, 1)
    assert relative_error(mean, recording["tvae.mean"]) < TOLERANCE
    assert relative_error(log_variance, recording["tvae.logvar"]) < TOLERANCE
    assert relative_error(vae.temporal_vae.decode(recording["tvae.z"], 17), recording["tvae.dec17"]) < TOLERANCE
    assert relative_error(vae.temporal_vae.decode(recording["tvae.z"][:, :, :1], 1), recording["tvae.dec1"]) < TOLERANCE
    assert relative_error(vae.decode(recording["pipe.z"], 18), recording["pipe.dec18"]) < TOLERANCE
    assert relative_error(vae.decode(recording["pipe.z"][:, :, ::2], 11), recording["pipe.dec_alt"]) < TOLERANCE
    assert (
        relative_error(vae.decode_single_latents(recording["pipe.z"], [2]), recording["pipe.dec_frame2_as_single"])
        < TOLERANCE
    )


def with_recorded_vae(spec: OpenSoraSpec, vae: OpenSoraVae, chunk_size: int = 1) -> OpenSoraBackbone:
    """A backbone with the recorded autoencoder, which decodes `chunk_size` frames at once."""
    model = spec.load(Placement())
    model.autoencoder = vae
    vae.decode_chunk_size = chunk_size
    return model


def test_requested_frames_decode_only_their_chunk(vae: OpenSoraVae) -> None:
    recording = golden("osora_vae12_tiny_io.safetensors")
    model = with_recorded_vae(replace(SPEC, duration=18), vae)
    x = recording["pipe.z"].transpose(1, 2)
    assert x.shape[1:] == model.shape
    full = model.decode(x)
    # The recording was computed with another batch size.
    assert relative_error(full, (recording["pipe.dec18"] / 2 + 0.5).clamp(0, 1).transpose(1, 2)) < 5e-6
    for frame in range(18):
        assert torch.equal(model.decode(x, [frame]), full[:, [frame]])
    assert torch.equal(model.decode(x, [17, 3, -1, 3]), full[:, [17, 3, 17, 3]])
    noisy = x.clone()
    noisy[:, 5:] = torch.nan  # latents of the second chunk
    assert torch.equal(model.decode(noisy, [0, 16]), full[:, [0, 16]])
    assert model.decode(noisy, [17]).isnan().all()


def test_single_latent_decoding_equals_vader(vae: OpenSoraVae) -> None:
    recording = golden("osora_vae12_tiny_io.safetensors")
    model = with_recorded_vae(replace(SPEC, duration=18, decode_single_latents=True), vae)
    x = recording["pipe.z"].transpose(1, 2)
    expected = (recording["pipe.dec_frame2_as_single"] / 2 + 0.5).clamp(0, 1).transpose(1, 2)
    for frame in (5, 8):
        assert latent_index(frame, 18) == 2
        assert relative_error(model.decode(x, [frame]), expected) < TOLERANCE


def test_checkpointed_decoder_has_the_same_gradient(vae: OpenSoraVae) -> None:
    model = with_recorded_vae(replace(SPEC, duration=18), vae, 4)
    x = torch.randn(1, *model.shape, generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in (False, True):
        vae.checkpoint_decoder = recompute
        leaf = x.clone().requires_grad_()
        (model.decode(leaf, [2]) ** 2).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    vae.checkpoint_decoder = False
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0][:, :5].abs().sum() > 0
    assert gradients[0][:, 5:].abs().sum() == 0


def test_latent_count_and_index() -> None:
    assert [num_latents(frames) for frames in (1, 4, 5, 17, 18, 51, 102, 204, 408)] == [1, 1, 2, 5, 6, 15, 30, 60, 120]
    assert [latent_index(frame, 17) for frame in (0, 1, 4, 5, 16)] == [0, 1, 1, 2, 4]
    assert [latent_index(frame, 51) for frame in (17, 18, 50)] == [5, 6, 14]
    assert [latent_index(frame, 6) for frame in range(6)] == [0, 0, 1, 1, 1, 1]


def test_published_files_load_and_others_are_refused(tmp_path: Path) -> None:
    tensors = golden("stdit3_tiny_state.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    network = build_network(str(tmp_path), 0, Placement())
    loaded = network.state_dict()
    assert infer_stdit3_config(tensors) == {**TINY, "channels": 4}
    assert all(torch.equal(loaded[key], x) for key, x in tensors.items())
    bf16 = build_network(str(tmp_path), 0, Placement(dtype=torch.bfloat16)).state_dict()
    assert bf16["t_block.1.weight"].dtype == torch.bfloat16
    assert bf16["rope.freqs"].dtype == torch.float32
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"this network.*TM503"):
        build_network(str(tmp_path), 0, Placement())
    with pytest.raises(ConfigError, match=r"TM505"):
        replace(SPEC, vae=str(tmp_path / "none")).load(Placement())


def test_published_autoencoder_file_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tastemaker.models.opensora import components

    state_dict = SPEC.load(Placement()).autoencoder.state_dict()
    assert {key.split(".")[0] for key in state_dict} == {"spatial_vae", "temporal_vae", "scale", "shift"}
    save_file({key: x.contiguous() for key, x in state_dict.items()}, tmp_path / "model.safetensors")
    monkeypatch.setattr(components, "SD_VAE", TINY_CONFIGS["spatial"])
    monkeypatch.setattr(components, "TemporalVae", lambda: TemporalVae(**TINY_CONFIGS["temporal"]))
    loaded = replace(SPEC, vae=str(tmp_path), seed=5).load(Placement()).autoencoder.state_dict()
    assert all(torch.equal(loaded[key], x) for key, x in state_dict.items())


def test_vader_lora_round_trip(tmp_path: Path) -> None:
    model = SPEC.load(Placement())
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for key, layer in model.net.named_modules():
        if key.rpartition(".")[2] in TARGETS:
            outputs, inputs = layer.weight.shape
            tensors[f"base_model.model.{key}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
            tensors[f"base_model.model.{key}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    torch.save(tensors, tmp_path / "peft_model_800.pt")
    before = {key: x.clone() for key, x in model.net.state_dict().items()}
    weights = LoraFromFile(tmp_path / "peft_model_800.pt", OpenSoraSpec.layout).apply(model, ())
    assert isinstance(weights, LoraWeights)
    assert len(weights.trainable()) == len(tensors) == 12
    layer = "temporal_blocks.0.cross_attn.kv_linear"
    down, up = (tensors[f"base_model.model.{layer}.lora_{factor}.weight"] for factor in "AB")
    torch.testing.assert_close(weights.merged()[f"{layer}.weight"], before[f"{layer}.weight"] + 8 / 4 * up @ down)
    write_original_lora(weights, OpenSoraSpec.layout, tmp_path / "exported.pt")
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[key], x) for key, x in tensors.items())


def test_exported_lora_keeps_its_scale(tmp_path: Path) -> None:
    model = SPEC.load(Placement())
    weights = Lora(rank=4, alpha=12, target_modules=TARGETS).apply(model, ())
    assert isinstance(weights, LoraWeights)
    with torch.no_grad():
        for p in weights.trainable().values():
            p.normal_(generator=torch.Generator().manual_seed(0))
    write_diffusers_lora(weights, OpenSoraSpec.layout, tmp_path / "adapters.safetensors", torch.float32)
    write_original_lora(weights, OpenSoraSpec.layout, tmp_path / "adapters.pt")
    for name in ("adapters.safetensors", "adapters.pt"):
        loaded = LoraFromFile(tmp_path / name, OpenSoraSpec.layout).apply(SPEC.load(Placement()), ())
        assert isinstance(loaded, LoraWeights)
        for key, x in weights.merged().items():
            torch.testing.assert_close(loaded.merged()[key], x)
