"""Transformers read from a single file, as ComfyUI and the authors publish them, against diffusers' own readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from tiers import fast
from torch import Tensor

from tastemaker.config.registries import MODELS
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.wan import WanSpec

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
CONVERTERS: dict[str, Convert] = {
    "wan": single_file_utils.convert_wan_transformer_to_diffusers,
    "wan_i2v": single_file_utils.convert_wan_transformer_to_diffusers,
    "ltx": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    "ltx2": single_file_utils.convert_ltx2_transformer_to_diffusers,
    "qwen_image_21": single_file_utils.convert_qwen_image21_transformer_checkpoint_to_diffusers,
}
NETWORK = "model.diffusion_model."
BESIDE = {  # what published files hold beside the network
    "ltx": {"vae.decoder.conv_in.conv.weight": torch.zeros(1)},
    "ltx2": {
        "vae.decoder.conv_in.conv.weight": torch.zeros(1),
        "vocoder.ups.0.weight": torch.zeros(1),
        "text_embedding_projection.aggregate_embed.weight": torch.zeros(1),
        f"{NETWORK}video_embeddings_connector.learnable_registers": torch.zeros(1),
        f"{NETWORK}audio_embeddings_connector.learnable_registers": torch.zeros(1),
    },
}


def small_spec(name: str) -> Any:
    return MODELS.find(name, "model")().tiny()


def save(tensors: dict[str, Tensor], path: Path) -> str:
    save_file({key: x.clone().contiguous() for key, x in tensors.items()}, path)
    return str(path)


@pytest.mark.parametrize("name", fast(CONVERTERS, "qwen_image_21"))
def test_single_file_replaces_the_transformer(name: str, tmp_path: Path) -> None:
    spec = small_spec(name)
    state = replace(spec, seed=1).load(Placement()).net.state_dict()
    original = spec.layout.to_original(state, {})
    assert original.keys() != state.keys()
    converted = CONVERTERS[name](dict(original))
    assert converted.keys() == state.keys() and all(x.equal(state[key]) for key, x in converted.items())
    published = {**{NETWORK + key: x for key, x in original.items()}, **BESIDE.get(name, {})}
    for tensors in (published, original, state):
        loaded = replace(spec, transformer=save(tensors, tmp_path / "network.safetensors")).load(Placement()).net
        assert all(x.equal(state[key]) for key, x in loaded.state_dict().items())


@pytest.mark.slow
def test_single_file_of_another_size_is_refused(tmp_path: Path) -> None:
    spec = small_spec("wan")
    tensors = spec.layout.to_original(spec.load(Placement()).net.state_dict(), {})
    tensors["blocks.0.ffn.0.weight"] = tensors["blocks.0.ffn.0.weight"][:-1]
    with pytest.raises(ConfigError, match="TM503"):
        replace(spec, transformer=save(tensors, tmp_path / "wan.safetensors")).load(Placement())


def test_wan_22_reads_a_file_for_each_transformer(tmp_path: Path) -> None:
    spec = WanSpec(boundary_ratio=0.875).tiny()
    expected: Any = replace(spec, seed=1).load(Placement()).net
    files = {
        setting: save(spec.layout.to_original(net.state_dict(), {}), tmp_path / f"{setting}.safetensors")
        for setting, net in (("transformer", expected.high), ("transformer_2", expected.low))
    }
    both: Any = replace(spec, **files).load(Placement()).net
    assert all(x.equal(both.state_dict()[key]) for key, x in expected.state_dict().items())
    low = replace(spec, transformer_2=files["transformer_2"]).load(Placement()).net.state_dict()
    high = spec.load(Placement()).net.state_dict()  # that of the weights
    for key, x in low.items():
        assert x.equal(high[key] if key.startswith("high.") else expected.state_dict()[key]), key
    with pytest.raises(ConfigError, match=r"model\.transformer_2.*model\.boundary_ratio.*TM2505"):
        replace(spec, boundary_ratio=None, transformer_2=files["transformer_2"]).load(Placement())
    assert replace(spec, **files).tiny() == spec
