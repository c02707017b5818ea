"""ImageReward from its published file: agreement with the reference code on a tiny network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.tokenizers import tiny_bert_tokenizer
from tastemaker.rewards.imagereward import MEAN, STD, UNUSED_KEYS, Blip, ImageReward, _convert_key, read_blip

FIXTURES = Path(__file__).parent.parent / "fixtures" / "imagereward"
PROMPTS = ["a red cat", "", "Two dogs & a boat, it's late", "word " * 2000]
PIXELS = torch.rand(4, 1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
NO_METADATA: list[dict[str, Any]] = [{}] * 4


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(FIXTURES / "tiny_golden.safetensors")


def recorded_state(recorded: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("state."): x for key, x in recorded.items() if key.startswith("state.")}


def test_network_matches_reference_outputs(recorded: dict[str, Tensor]) -> None:
    net = read_blip(recorded_state(recorded), "tiny", num_heads=(4, 4)).freeze(Placement())
    features = net.encode_images(recorded["input.pixel_values"])
    torch.testing.assert_close(features, recorded["output.image_embeds"], atol=1e-5, rtol=1e-5)
    raw = net(features, recorded["input.input_ids"], recorded["input.attention_mask"])
    torch.testing.assert_close(raw[:, None], recorded["output.mlp_raw"], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close((raw[:, None] - MEAN) / STD, recorded["output.reward"], atol=1e-5, rtol=1e-6)


def test_every_published_key_is_converted_or_dropped() -> None:
    keymap = json.loads((FIXTURES / "keymap.json").read_text())
    converted = {key: _convert_key(key) for key in keymap["map"]}
    expected = {key: None if new is None else new.replace("mlp.layers.", "head.") for key, new in keymap["map"].items()}
    assert {key: new for key, new in converted.items() if not UNUSED_KEYS.fullmatch(key)} == {
        key: new for key, new in expected.items() if new is not None
    }
    assert sorted(key for key in converted if UNUSED_KEYS.fullmatch(key)) == sorted(keymap["dropped"])


def test_network_has_the_published_shapes() -> None:
    shapes = json.loads((FIXTURES / "state_dict_keys.json").read_text())
    keymap = json.loads((FIXTURES / "keymap.json").read_text())
    vision = {key: x for key, x in keymap["vision_config"].items() if key != "layer_norm_eps"}
    text = {
        key: x
        for key, x in keymap["text_config"].items()
        if key not in ("encoder_hidden_size", "is_decoder", "add_pooling_layer")
    }
    with torch.device("meta"):
        net = Blip(vision, text)
    own_shapes = {key: list(x.shape) for key, x in net.state_dict().items()}
    assert own_shapes == {
        _convert_key(key): entry["shape"] for key, entry in shapes.items() if not UNUSED_KEYS.fullmatch(key)
    }


def save_published_layout(folder: Path) -> str:
    """Save a tiny checkpoint with the published keys and heads of width 64, with its tokenizer."""
    bfloat16 = {"intermediate_size": 96, "num_hidden_layers": 2}
    net = Blip(
        {**bfloat16, "hidden_size": 128, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        {**bfloat16, "hidden_size": 64, "num_attention_heads": 1, "vocab_size": 64, "max_position_embeddings": 40}
        | {"layer_norm_eps": 1e-12},
    )
    published_keys = {new: old for old, new in key_map().items()}
    torch.save({published_keys[key]: x for key, x in net.state_dict().items()}, folder / "ImageReward.pt")
    tiny_bert_tokenizer().save_pretrained(folder)
    return str(folder)


def key_map() -> dict[str, str]:
    keymap = json.loads((FIXTURES / "keymap.json").read_text())["map"]
    return {old: new.replace("mlp.layers.", "head.") for old, new in keymap.items() if new is not None}


def test_published_file_is_read_with_its_neighboring_tokenizer(tmp_path: Path) -> None:
    folder = save_published_layout(tmp_path)
    one, two = (
        ImageReward(weights=weights).load(Placement()).score(PIXELS, PROMPTS, NO_METADATA)
        for weights in (folder, f"{folder}/ImageReward.pt")
    )
    torch.testing.assert_close(one, two)
    assert one.shape == (4,)


def test_network_narrower_than_one_head_is_refused(recorded: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"head of 64.*TM397"):
        read_blip(recorded_state(recorded), "tiny")


def test_prompts_are_tokenized_as_bert_does_up_to_35_tokens() -> None:
    scorer = ImageReward().tiny().load(Placement())
    ids = scorer.tokenizer(PROMPTS, torch.device("cpu"))
    assert ids["input_ids"].shape == (4, 35)
    assert ids["input_ids"][:, 0].tolist() == [2] * 4  # [CLS]; [ENC] is never used
    assert ids["input_ids"][1, :3].tolist() == [2, 3, 0]
    assert ids["attention_mask"].sum(1).tolist()[1] == 2
    assert int(ids["input_ids"][3, -1]) == 3  # [SEP] is kept where a prompt is cut


def test_padding_does_not_change_scores(recorded: dict[str, Tensor]) -> None:
    net = read_blip(recorded_state(recorded), "tiny", num_heads=(4, 4)).freeze(Placement())
    ids, mask = recorded["input.input_ids"], recorded["input.attention_mask"]
    features = net.encode_images(recorded["input.pixel_values"])
    longest = int(mask.sum(1).max())
    torch.testing.assert_close(
        net(features, ids[:, :longest], mask[:, :longest]), net(features, ids, mask), atol=1e-5, rtol=1e-6
    )


def test_gradients_agree_with_finite_differences() -> None:
    scorer = ImageReward().tiny().load(Placement(dtype=torch.float64))
    pixels = PIXELS[:2].double().requires_grad_()
    gradient = torch.autograd.grad(scorer.score(pixels, PROMPTS[:2], NO_METADATA[:2]).sum(), pixels)[0]
    direction = torch.randn(pixels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ahead, behind = (
            scorer.score(pixels + h * direction, PROMPTS[:2], NO_METADATA[:2]).sum() for h in (1e-5, -1e-5)
        )
    torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-8)


def test_bfloat16_keeps_the_head_in_float32() -> None:
    scorer = ImageReward().tiny().load(Placement(dtype=torch.bfloat16))
    assert scorer.net.head["0"].weight.dtype == torch.float32
    float32 = ImageReward().tiny().load(Placement()).score(PIXELS, PROMPTS, NO_METADATA)
    bfloat16 = scorer.score(PIXELS, PROMPTS, NO_METADATA)
    assert bfloat16.dtype == torch.float32
    torch.testing.assert_close(bfloat16, float32, atol=0.2, rtol=0)


def test_files_that_are_not_imagereward_are_refused(tmp_path: Path) -> None:
    folder = Path(save_published_layout(tmp_path))
    complete = folder / "ImageReward.pt"
    tensors = torch.load(complete, weights_only=True)
    for name, state, pattern in [
        ("mlp.pt", {key: x for key, x in tensors.items() if "mlp.layers.7" not in key}, "mlp.pt.*another network"),
        ("other.pt", {"layers.0.weight": torch.zeros(2, 2)}, "other.pt.*ImageReward.pt"),
    ]:
        torch.save(state, folder / name)
        with pytest.raises(ConfigError, match=pattern):
            ImageReward(weights=str(folder / name)).load(Placement())
    (folder / "cut.pt").write_bytes(complete.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"cut\.pt.*readable.*TM520"):
        ImageReward(weights=str(folder / "cut.pt")).load(Placement())
    with pytest.raises(ConfigError, match=r"THUDM/ImageReward/ImageReward\.pt.*TM505"):
        ImageReward().load(Placement())
