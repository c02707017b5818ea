"""ImageReward from its published file, against numbers its own code gave on a tiny network."""

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
NO_FACTS: list[dict[str, Any]] = [{}] * 4


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(FIXTURES / "tiny_golden.safetensors")


def state(recorded: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("state."): x for key, x in recorded.items() if key.startswith("state.")}


def test_the_network_gives_the_numbers_of_the_published_code(recorded: dict[str, Tensor]) -> None:
    net = read_blip(state(recorded), "tiny", num_heads=(4, 4)).freeze(Placement())
    seen = net.encode_images(recorded["input.pixel_values"])
    torch.testing.assert_close(seen, recorded["output.image_embeds"], atol=1e-5, rtol=1e-5)
    raw = net(seen, recorded["input.input_ids"], recorded["input.attention_mask"])
    torch.testing.assert_close(raw[:, None], recorded["output.mlp_raw"], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close((raw[:, None] - MEAN) / STD, recorded["output.reward"], atol=1e-5, rtol=1e-6)


def test_every_tensor_of_the_published_file_has_its_place() -> None:
    told = json.loads((FIXTURES / "keymap.json").read_text())
    found = {key: _convert_key(key) for key in told["map"]}
    expected = {key: None if new is None else new.replace("mlp.layers.", "head.") for key, new in told["map"].items()}
    assert {key: new for key, new in found.items() if not UNUSED_KEYS.fullmatch(key)} == {
        key: new for key, new in expected.items() if new is not None
    }
    assert sorted(key for key in found if UNUSED_KEYS.fullmatch(key)) == sorted(told["dropped"])


def test_the_published_shapes_make_the_published_network() -> None:
    shapes = json.loads((FIXTURES / "state_dict_keys.json").read_text())
    told = json.loads((FIXTURES / "keymap.json").read_text())
    vision = {key: x for key, x in told["vision_config"].items() if key != "layer_norm_eps"}
    text = {
        key: x
        for key, x in told["text_config"].items()
        if key not in ("encoder_hidden_size", "is_decoder", "add_pooling_layer")
    }
    with torch.device("meta"):
        net = Blip(vision, text)
    own = {key: list(x.shape) for key, x in net.state_dict().items()}
    assert own == {_convert_key(key): told["shape"] for key, told in shapes.items() if not UNUSED_KEYS.fullmatch(key)}


def published(folder: Path) -> str:
    """A tiny checkpoint under the published names, with heads of 64 numbers, and its tokenizer beside it."""
    half = {"intermediate_size": 96, "num_hidden_layers": 2}
    net = Blip(
        {**half, "hidden_size": 128, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        {**half, "hidden_size": 64, "num_attention_heads": 1, "vocab_size": 64, "max_position_embeddings": 40}
        | {"layer_norm_eps": 1e-12},
    )
    back = {new: old for old, new in names().items()}
    torch.save({back[key]: x for key, x in net.state_dict().items()}, folder / "ImageReward.pt")
    tiny_bert_tokenizer().save_pretrained(folder)
    return str(folder)


def names() -> dict[str, str]:
    told = json.loads((FIXTURES / "keymap.json").read_text())["map"]
    return {old: new.replace("mlp.layers.", "head.") for old, new in told.items() if new is not None}


def test_a_published_file_is_read_with_the_tokenizer_beside_it(tmp_path: Path) -> None:
    folder = published(tmp_path)
    one, two = (
        ImageReward(weights=w).load(Placement()).score(PIXELS, PROMPTS, NO_FACTS)
        for w in (folder, f"{folder}/ImageReward.pt")
    )
    torch.testing.assert_close(one, two)
    assert one.shape == (4,)


def test_a_file_narrower_than_a_head_is_a_sentence(recorded: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError, match="less than one head of 64; expected the published"):
        read_blip(state(recorded), "tiny")


def test_prompts_are_read_as_bert_reads_them_up_to_35_tokens() -> None:
    scorer = ImageReward().tiny().load(Placement())
    ids = scorer.tokenizer(PROMPTS, torch.device("cpu"))
    assert ids["input_ids"].shape == (4, 35)
    assert ids["input_ids"][:, 0].tolist() == [2] * 4  # [CLS], for [ENC] is never put in
    assert ids["input_ids"][1, :3].tolist() == [2, 3, 0]
    assert ids["attention_mask"].sum(1).tolist()[1] == 2
    assert int(ids["input_ids"][3, -1]) == 3  # [SEP] is kept where a prompt is cut


def test_padding_changes_nothing(recorded: dict[str, Tensor]) -> None:
    net = read_blip(state(recorded), "tiny", num_heads=(4, 4)).freeze(Placement())
    ids, mask = recorded["input.input_ids"], recorded["input.attention_mask"]
    seen = net.encode_images(recorded["input.pixel_values"])
    longest = int(mask.sum(1).max())
    torch.testing.assert_close(
        net(seen, ids[:, :longest], mask[:, :longest]), net(seen, ids, mask), atol=1e-5, rtol=1e-6
    )


def test_gradients_agree_with_finite_differences() -> None:
    scorer = ImageReward().tiny().load(Placement(dtype=torch.float64))
    pixels = PIXELS[:2].double().requires_grad_()
    slope = torch.autograd.grad(scorer.score(pixels, PROMPTS[:2], NO_FACTS[:2]).sum(), pixels)[0]
    way = torch.randn(pixels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ahead, behind = (scorer.score(pixels + h * way, PROMPTS[:2], NO_FACTS[:2]).sum() for h in (1e-5, -1e-5))
    torch.testing.assert_close((slope * way).sum(), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-8)


def test_sixteen_bits_leave_the_head_in_thirty_two() -> None:
    scorer = ImageReward().tiny().load(Placement(dtype=torch.bfloat16))
    assert scorer.net.head["0"].weight.dtype == torch.float32
    whole = ImageReward().tiny().load(Placement()).score(PIXELS, PROMPTS, NO_FACTS)
    half = scorer.score(PIXELS, PROMPTS, NO_FACTS)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole, atol=0.2, rtol=0)


def test_files_that_are_no_imagereward_are_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = Path(published(tmp_path))
    whole = folder / "ImageReward.pt"
    tensors = torch.load(whole, weights_only=True)
    for name, kept, sentence in [
        ("mlp.pt", {key: x for key, x in tensors.items() if "mlp.layers.7" not in key}, "of another network"),
        ("other.pt", {"layers.0.weight": torch.zeros(2, 2)}, "expected the published ImageReward.pt"),
    ]:
        torch.save(kept, folder / name)
        with pytest.raises(ConfigError, match=sentence):
            ImageReward(weights=str(folder / name)).load(Placement())
    (folder / "cut.pt").write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        ImageReward(weights=str(folder / "cut.pt")).load(Placement())
    with pytest.raises(ConfigError, match=r"THUDM/ImageReward/ImageReward\.pt from the hub"):
        ImageReward().load(Placement())
