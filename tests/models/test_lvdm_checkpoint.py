"""VideoCrafter2's published checkpoints: all components are read, and other files are refused."""

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
    """Of open_clip's encoder, which has one layer more than is used."""
    side, wide, words = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"positional_embedding": (77, side), "text_projection": (side, side)}
    shapes |= {"token_embedding.weight": (words, side), "ln_final.weight": (side,), "ln_final.bias": (side,)}
    for layer in range(TEXT["num_hidden_layers"] + 1):
        block = {"attn.in_proj_weight": (3 * side, side), "attn.in_proj_bias": (3 * side,)}
        linear = {"attn.out_proj": (side, side), "mlp.c_fc": (wide, side), "mlp.c_proj": (side, wide)}
        for name, shape in {**linear, "ln_1": (side,), "ln_2": (side,)}.items():
            block |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        shapes |= {f"transformer.resblocks.{layer}.{name}": shape for name, shape in block.items()}
    return {**random_weights(shapes, 5), "logit_scale": torch.tensor(4.6)}


def checkpoint(path: Path, prefix: str = "", wrapper: str = "state_dict") -> Path:
    """A small model.ckpt as published, with the tables of its sampler and what Lightning adds."""
    parts = {
        lvdm_checkpoint.UNET_PREFIX: unet_tensors(),
        lvdm_checkpoint.VAE_PREFIX: vae_tensors(),
        lvdm_checkpoint.TEXT_ENCODER_PREFIX: text_tensors(),
    }
    tensors = {prefix + part + key: x for part, actual in parts.items() for key, x in actual.items()}
    tables = {f"{prefix}betas": torch.zeros(1000), f"{prefix}scale_arr": torch.ones(1400)}
    torch.save({wrapper: {**tensors, **tables}, "epoch": 3, "pytorch-lightning_version": "1.8.3"}, path)
    tiny_pipelines.byte_clip_tokenizer().save_pretrained(path.parent)
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published checkpoints are as small as the recordings' networks."""
    monkeypatch.setitem(VIDEOCRAFTER.configs, SOURCE.hub, {"unet": UNET, "vae": VAE, "text_encoder": TEXT})


@pytest.mark.usefixtures("small")
def test_published_checkpoint_loads(tmp_path: Path) -> None:
    spec = VideocrafterSpec(str(checkpoint(tmp_path / "model.ckpt")), frames=3, height=32, width=32)
    model = spec.load(Placement())
    own = build_unet().state_dict()
    assert all(x.equal(own[key]) for key, x in model.net.state_dict().items())
    golden = load_file(FIXTURES / "lvdm_vae_tiny_io.safetensors")
    latents = golden["z"].transpose(1, 2)
    wanted = (golden["decode_first_stage_2DAE"].transpose(1, 2) / 2 + 0.5).clamp(0, 1)
    assert (model.decode(latents) - wanted).abs().max() <= 2e-6
    assert (model.decode(latents, [2, 0]) - wanted[:, [2, 0]]).abs().max() <= 2e-6
    clip = (golden["x"] / 2 + 0.5).expand(3, -1, -1, -1)[None]
    assert (model.encode(clip)[0] - 0.18215 * golden["enc_mean"]).abs().max() <= 2e-6
    folder = replace(spec, weights=str(tmp_path))
    assert folder.load(Placement()).net.state_dict().keys() == own.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_deepspeed_checkpoint_loads(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model.ckpt", prefix="_forward_module.", wrapper="module")
    model = VideocrafterSpec(str(path), frames=2, height=32, width=32).load(Placement())
    assert all(x.equal(model.net.state_dict()[key]) for key, x in build_unet().state_dict().items())


@pytest.mark.usefixtures("small")
def test_text_encoder_equals_open_clip(tmp_path: Path) -> None:
    spec = VideocrafterSpec(str(checkpoint(tmp_path / "model.ckpt")), frames=2, height=32, width=32)
    texts = spec.load_prompt_encoder(Placement())
    prompts = ("a red fox, running", "", "A  Red fox")
    actual = texts(prompts)["words"]
    ids = texts.encoders.clip.tokenize(prompts)["input_ids"]
    assert ids.shape == (3, 77) and ids[1].tolist() == [512, 513] + [0] * 75
    torch.testing.assert_close(actual, open_clip(text_tensors(), ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def open_clip(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """All but the last layer of a text encoder as open_clip has it, and its norm: torch's own layers."""
    side, wide = TEXT["hidden_size"], TEXT["intermediate_size"]
    x = weights["token_embedding.weight"][ids] + weights["positional_embedding"]
    mask = nn.Transformer.generate_square_subsequent_mask(77)
    for i in range(TEXT["num_hidden_layers"]):
        layer = nn.TransformerEncoderLayer(side, 2, wide, 0.0, "gelu", batch_first=True, norm_first=True)
        own = lvdm_checkpoint.select_component(weights, f"transformer.resblocks.{i}.")
        pairs = (("attn.", "self_attn."), ("mlp.c_fc", "linear1"), ("mlp.c_proj", "linear2"), ("ln_", "norm"))
        for theirs, ours in pairs:
            own = {key.replace(theirs, ours): y for key, y in own.items()}
        layer.load_state_dict(own)
        x = layer(x, src_mask=mask)
    return nn.functional.layer_norm(x, (side,), weights["ln_final.weight"], weights["ln_final.bias"])


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_unet_in_diffusers_layout_replaces_the_checkpoints(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model.ckpt")
    net = build_unet()
    with torch.no_grad():
        net.conv_in.weight.add_(1)
    folder = tmp_path / "adamdad"
    net.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written["fps_cond"] is True
    save_file(lvdm_checkpoint.unet_to_original(net.state_dict(), net.config), tmp_path / "theirs.safetensors")
    files = (folder, folder / "diffusion_pytorch_model.safetensors", tmp_path / "theirs.safetensors")
    for unet in files:
        spec = VideocrafterSpec(str(path), str(unet), frames=2, height=32, width=32)
        actual = spec.load(Placement()).net.state_dict()
        assert all(x.equal(actual[key]) for key, x in net.state_dict().items())


@pytest.mark.usefixtures("small")
def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"
    torch.save({"state_dict": {"model.diffusion_model.a": torch.zeros(1)}}, other)
    with pytest.raises(
        ConfigError, match="no checkpoint of VideoCrafter: nothing in it begins with 'first_stage_model"
    ):
        VideocrafterSpec(str(other)).load(Placement())
    with pytest.raises(
        ConfigError, match=r"were not found; expected a local path, or VideoCrafter/VideoCrafter2/model.ckpt"
    ):
        VideocrafterSpec().load(Placement())
    with pytest.raises(ConfigError, match=r"holds no diffusion_pytorch_model.safetensors"):
        VideocrafterSpec(str(checkpoint(tmp_path / "model.ckpt")), str(tmp_path)).load(Placement())
    assert VideocrafterSpec().sources == (SOURCE, CLIP_TOKENIZER)
