"""VideoCrafter2's published checkpoints: loading of all components, and refusal of other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from videocrafter_toys import FIXTURES, UNET, build_unet, random_weights, read_fixture, unet_tensors

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models import lvdm_checkpoint
from tastemaker.models.videocrafter import CLIP_TOKENIZER, SOURCE, VIDEOCRAFTER, VideocrafterSpec

VAE: dict[str, Any] = {
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "scaling_factor": 0.18215,
}
TEXT: dict[str, Any] = {
    **tiny_pipelines.CLIP_TOKENS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
}


def vae_tensors() -> dict[str, Tensor]:
    return random_weights(read_fixture("lvdm_vae_tiny.json"), 31)


def text_tensors() -> dict[str, Tensor]:
    """Weights of open_clip's text encoder, which has one layer more than is used."""
    width, mlp_width, vocab_size = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"positional_embedding": (77, width), "text_projection": (width, width)}
    shapes |= {"token_embedding.weight": (vocab_size, width), "ln_final.weight": (width,), "ln_final.bias": (width,)}
    for layer in range(TEXT["num_hidden_layers"] + 1):
        block = {"attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,)}
        linear = {"attn.out_proj": (width, width), "mlp.c_fc": (mlp_width, width), "mlp.c_proj": (width, mlp_width)}
        for name, shape in {**linear, "ln_1": (width,), "ln_2": (width,)}.items():
            block |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        shapes |= {f"transformer.resblocks.{layer}.{name}": shape for name, shape in block.items()}
    return {**random_weights(shapes, 5), "logit_scale": torch.tensor(4.6)}


def save_checkpoint(path: Path, prefix: str = "", wrapper: str = "state_dict") -> Path:
    """Save a small model.ckpt in the published layout, with sampler tables and entries of Lightning."""
    components = {
        lvdm_checkpoint.UNET_PREFIX: unet_tensors(),
        lvdm_checkpoint.VAE_PREFIX: vae_tensors(),
        lvdm_checkpoint.TEXT_ENCODER_PREFIX: text_tensors(),
    }
    tensors = {
        prefix + component + key: x
        for component, component_tensors in components.items()
        for key, x in component_tensors.items()
    }
    tables = {f"{prefix}betas": torch.zeros(1000), f"{prefix}scale_arr": torch.ones(1400)}
    torch.save({wrapper: {**tensors, **tables}, "epoch": 3, "pytorch-lightning_version": "1.8.3"}, path)
    tiny_pipelines.byte_clip_tokenizer().save_pretrained(path.parent)
    return path


@pytest.fixture
def small_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the published checkpoint the sizes of the recorded networks."""
    monkeypatch.setitem(VIDEOCRAFTER.configs, SOURCE.hub, {"unet": UNET, "vae": VAE, "text_encoder": TEXT})


@pytest.mark.usefixtures("small_configs")
def test_published_checkpoint_loads(tmp_path: Path) -> None:
    spec = VideocrafterSpec(str(save_checkpoint(tmp_path / "model.ckpt")), frames=3, height=32, width=32)
    model = spec.load(Placement())
    unet_weights = build_unet().state_dict()
    assert all(x.equal(unet_weights[key]) for key, x in model.net.state_dict().items())
    golden = load_file(FIXTURES / "lvdm_vae_tiny_io.safetensors")
    latents = golden["z"].transpose(1, 2)
    expected = (golden["decode_first_stage_2DAE"].transpose(1, 2) / 2 + 0.5).clamp(0, 1)
    assert (model.decode(latents) - expected).abs().max() <= 2e-6
    assert (model.decode(latents, [2, 0]) - expected[:, [2, 0]]).abs().max() <= 2e-6
    clip = (golden["x"] / 2 + 0.5).expand(3, -1, -1, -1)[None]
    assert (model.encode(clip)[0] - 0.18215 * golden["enc_mean"]).abs().max() <= 2e-6
    folder = replace(spec, weights=str(tmp_path))
    assert folder.load(Placement()).net.state_dict().keys() == unet_weights.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("small_configs")
def test_deepspeed_checkpoint_loads(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model.ckpt", prefix="_forward_module.", wrapper="module")
    model = VideocrafterSpec(str(path), frames=2, height=32, width=32).load(Placement())
    assert all(x.equal(model.net.state_dict()[key]) for key, x in build_unet().state_dict().items())


@pytest.mark.usefixtures("small_configs")
def test_text_encoder_equals_open_clip(tmp_path: Path) -> None:
    spec = VideocrafterSpec(str(save_checkpoint(tmp_path / "model.ckpt")), frames=2, height=32, width=32)
    prompt_encoder = spec.load_prompt_encoder(Placement())
    prompts = ("a red fox, running", "", "A  Red fox")
    actual = prompt_encoder(prompts)["prompt_embeds"]
    ids = prompt_encoder.encoders.clip.tokenize(prompts)["input_ids"]
    assert ids.shape == (3, 77) and ids[1].tolist() == [512, 513] + [0] * 75
    torch.testing.assert_close(actual, encode_with_open_clip(text_tensors(), ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def encode_with_open_clip(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Output of open_clip's text encoder without its last layer, computed with torch's layers: [B, 77, width]."""
    width, mlp_width = TEXT["hidden_size"], TEXT["intermediate_size"]
    x = weights["token_embedding.weight"][ids] + weights["positional_embedding"]
    mask = nn.Transformer.generate_square_subsequent_mask(77)
    for i in range(TEXT["num_hidden_layers"]):
        layer = nn.TransformerEncoderLayer(width, 2, mlp_width, 0.0, "gelu", batch_first=True, norm_first=True)
        layer_weights = lvdm_checkpoint.select_component(weights, f"transformer.resblocks.{i}.")
        pairs = (("attn.", "self_attn."), ("mlp.c_fc", "linear1"), ("mlp.c_proj", "linear2"), ("ln_", "norm"))
        for original, renamed in pairs:
            layer_weights = {key.replace(original, renamed): y for key, y in layer_weights.items()}
        layer.load_state_dict(layer_weights)
        x = layer(x, src_mask=mask)
    return nn.functional.layer_norm(x, (width,), weights["ln_final.weight"], weights["ln_final.bias"])


@pytest.mark.slow
@pytest.mark.usefixtures("small_configs")
def test_unet_in_diffusers_layout_replaces_the_checkpoints(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "model.ckpt")
    net = build_unet()
    with torch.no_grad():
        net.conv_in.weight.add_(1)
    folder = tmp_path / "diffusers"
    net.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["fps_cond"] is True
    save_file(lvdm_checkpoint.unet_to_original(net.state_dict(), net.config), tmp_path / "original.safetensors")
    files = (folder, folder / "diffusion_pytorch_model.safetensors", tmp_path / "original.safetensors")
    for unet in files:
        spec = VideocrafterSpec(str(path), str(unet), frames=2, height=32, width=32)
        loaded = spec.load(Placement()).net.state_dict()
        assert all(x.equal(loaded[key]) for key, x in net.state_dict().items())


@pytest.mark.usefixtures("small_configs")
def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"
    torch.save({"state_dict": {"model.diffusion_model.a": torch.zeros(1)}}, other)
    with pytest.raises(ConfigError, match=r"'first_stage_model.*TM466"):
        VideocrafterSpec(str(other)).load(Placement())
    with pytest.raises(ConfigError, match=r"TM505"):
        VideocrafterSpec().load(Placement())
    with pytest.raises(ConfigError, match=r"diffusion_pytorch_model\.safetensors.*TM471"):
        VideocrafterSpec(str(save_checkpoint(tmp_path / "model.ckpt")), str(tmp_path)).load(Placement())
    assert VideocrafterSpec().sources == (SOURCE, CLIP_TOKENIZER)
