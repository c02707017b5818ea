"""HPS from its published file and other layouts: what transformers finds, or a sentence where nothing can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_clip import (
    SPECIAL_TOKENS,
    build_clip,
    open_clip_state,
    random_clip,
    save_checkpoint,
    save_original_checkpoints,
)
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones import open_clip
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.backbones.tokenizers import tiny_clip_tokenizer
from tastemaker.rewards.hps import HpsReward
from tastemaker.rewards.pickscore import PickScoreReward

PROMPTS = ["a red cat", "", "Two dogs & a boat, it's late", "word " * 2000]
PIXELS = torch.rand(4, 1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
NO_FACTS: list[dict[str, Any]] = [{}] * 4


@pytest.fixture(scope="module")
def net() -> Any:
    return build_clip()


@pytest.fixture(scope="module")
def folder(net: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(net, tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def published(net: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_original_checkpoints(net, tmp_path_factory.mktemp("hps") / "files")


def cosines(net: Any, prepared: Tensor) -> Tensor:
    """What transformers itself makes of prepared pictures and the prompts."""
    ids = tiny_clip_tokenizer()(PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    out = net(pixel_values=prepared, **ids)
    return (out.image_embeds * out.text_embeds).sum(1)


@torch.no_grad()
def test_the_published_file_scores_as_transformers_does(net: Any, folder: str, published: tuple[str, str]) -> None:
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    assert expected.std() > 0.01
    for weights in published:
        scores = HpsReward(weights=weights, tokenizer=folder).load(Placement()).score(PIXELS, PROMPTS, NO_FACTS)
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("file", ["open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"])
def test_a_folder_as_open_clip_fills_it_is_read_as_well(file: str, net: Any, folder: str, tmp_path: Path) -> None:
    save_file({key: x.clone() for key, x in open_clip_state(net).items()}, tmp_path / file)
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    scores = HpsReward(weights=str(tmp_path), tokenizer=folder).load(Placement()).score(PIXELS, PROMPTS, NO_FACTS)
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_folder_in_the_layout_of_transformers_is_read_as_well(net: Any, folder: str) -> None:
    scores = HpsReward(weights=folder).load(Placement()).score(PIXELS, PROMPTS, NO_FACTS)
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


def test_the_version_names_the_file_of_a_folder(folder: str, published: tuple[str, str]) -> None:
    place = str(Path(published[0]).parent)
    HpsReward(weights=place, tokenizer=folder).load(Placement())
    with pytest.raises(ConfigError, match="holds no weights"):
        HpsReward(version="v2.0", weights=place, tokenizer=folder).load(Placement())


@torch.no_grad()
def test_the_sizes_of_the_published_network_follow_from_its_tensors() -> None:
    with torch.device("meta"):
        sizes = {"num_attention_heads": 16, "hidden_act": "gelu"}
        seen = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "patch_size": 14}
        read = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, **sizes}
        config = CLIPConfig(text_config=read, vision_config={**seen, **sizes}, projection_dim=1024)
        state = CLIPModel(config).state_dict()
    found = open_clip.clip_config(state, "HPS")
    for half, expected in (("text_config", read), ("vision_config", {**seen, **sizes, "image_size": 224})):
        told = getattr(found, half).to_dict()
        assert {key: told[key] for key in expected} == expected
    assert found.projection_dim == 1024
    assert found.text_config.max_position_embeddings == 77


def narrow(net_heads: tuple[int, int], place: Path) -> tuple[Any, str, str]:
    """A CLIP of narrow heads, its open_clip file, and a folder with its tokenizer."""
    looking, reading = net_heads
    small = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "hidden_act": "gelu"}
    seen = {**small, "num_attention_heads": looking, "image_size": 28, "patch_size": 14}
    read = {**small, "num_attention_heads": reading, **SPECIAL_TOKENS}
    net = random_clip(CLIPModel, CLIPConfig(text_config=read, vision_config=seen, projection_dim=16))
    return net, save_original_checkpoints(net, place / "files")[1], save_checkpoint(net, place / "clip")


@torch.no_grad()
def test_heads_are_read_from_the_settings_of_open_clip_beside_the_file(tmp_path: Path) -> None:
    net, weights, words = narrow((4, 3), tmp_path)
    spec = HpsReward(weights=weights, tokenizer=words)
    with pytest.raises(ConfigError, match=r"48 numbers wide, which does not tell .* put open_clip_config.json beside"):
        spec.load(Placement())
    told = {"embed_dim": 16, "vision_cfg": {"width": 48, "head_width": 12}, "text_cfg": {"width": 48, "heads": 3}}
    settings = Path(weights).parent / "open_clip_config.json"
    settings.write_text(json.dumps({"model_cfg": told}))
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    torch.testing.assert_close(spec.load(Placement()).score(PIXELS, PROMPTS, NO_FACTS), expected, atol=1e-6, rtol=0)
    settings.write_text("{}")
    with pytest.raises(ConfigError, match=r"open_clip_config\.json"):
        spec.load(Placement())


@torch.no_grad()
def test_pickscore_of_tensors_crops_as_torchvision_does(net: Any, folder: str) -> None:
    pixels = PIXELS[..., :28, :31]  # three too wide: torchvision begins at the second pixel, transformers at the first
    for overshoot, corner in (("keep", "round"), ("clip", "floor")):
        spec: Any = PickScoreReward(folder, overshoot=overshoot)  # type: ignore[arg-type]
        prepared = Preprocessing(28, overshoot=overshoot, crop_rounding=corner)(pixels[:, 0])  # type: ignore[arg-type]
        scale = net.logit_scale.exp()
        torch.testing.assert_close(
            spec.load(Placement()).score(pixels, PROMPTS, NO_FACTS), scale * cosines(net, prepared), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
def test_gradients_agree_with_finite_differences(fit: Any, net: Any, folder: str) -> None:
    scorer = HpsReward(weights=folder, resize_mode=fit).load(Placement(dtype=torch.float64))
    pixels = PIXELS[:2].double().requires_grad_()
    slope = torch.autograd.grad(scorer.score(pixels, PROMPTS[:2], NO_FACTS[:2]).sum(), pixels)[0]
    way = torch.randn(pixels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ahead, behind = (scorer.score(pixels + h * way, PROMPTS[:2], NO_FACTS[:2]).sum() for h in (1e-5, -1e-5))
    torch.testing.assert_close((slope * way).sum(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_sixteen_bits_change_scores_by_little(folder: str) -> None:
    whole = HpsReward(weights=folder).load(Placement()).score(PIXELS, PROMPTS, NO_FACTS)
    half = HpsReward(weights=folder).load(Placement(dtype=torch.bfloat16)).score(PIXELS, PROMPTS, NO_FACTS)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole, atol=0.02, rtol=0)


@torch.no_grad()
def test_texts_of_the_web_are_put_right_as_open_clip_does() -> None:
    scorer = HpsReward().tiny().load(Placement())
    same = [
        'a & "b" it\'s fine',
        "A &amp;  \u201cB\u201d it\u2019s \ufb01ne",
        "a &amp;amp; \u201eb\u201d it's \uff46ine",
    ]
    scores = scorer.score(PIXELS[:1].expand(3, -1, -1, -1, -1), same, NO_FACTS)
    torch.testing.assert_close(scores, scores[:1].expand(3))


def test_files_that_are_no_hps_are_refused_with_a_sentence(net: Any, folder: str, tmp_path: Path) -> None:
    whole = Path(save_original_checkpoints(net, tmp_path / "files")[0])
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole.read_bytes()[:5000])
    state = open_clip_state(net)
    lacking, strange = tmp_path / "lacking.pt", tmp_path / "strange.pt"
    torch.save({key: x for key, x in state.items() if "resblocks.1.mlp" not in key}, lacking)
    torch.save({**state, "visual.head.weight": torch.zeros(2, 2)}, strange)
    other = tmp_path / "other.pt"
    torch.save({"layers.0.weight": torch.zeros(2, 2)}, other)
    for path, sentence in [
        (cut, "not a readable checkpoint"),
        (lacking, "lacks 'text_model.encoder.layers.1.mlp"),
        (strange, "hold 'visual.head.weight', which no CLIP of open_clip has"),
        (other, "no config.json"),
        (tmp_path / "nothing.pt", "HPS_v2.1_compressed.pt from the hub"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            HpsReward(weights=str(path), tokenizer=folder).load(Placement())


def test_a_tokenizer_that_is_not_there_or_of_another_network_is_refused(
    folder: str, published: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json from the hub"):
        HpsReward(weights=published[1], tokenizer="nobody/nothing").load(Placement())
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        HpsReward(weights=published[1], tokenizer=str(Path(published[1]).parent)).load(Placement())
    Path(folder, "small").mkdir(exist_ok=True)
    small = build_clip()
    state = open_clip_state(small)
    state["token_embedding.weight"] = state["token_embedding.weight"][:400]
    torch.save({"state_dict": state}, Path(folder, "small", "hps.pt"))
    with pytest.raises(ConfigError, match="514 tokens"):
        HpsReward(weights=str(Path(folder, "small", "hps.pt")), tokenizer=folder).load(Placement())


def test_quick_pixels_of_any_shape_are_scored() -> None:
    scorer = HpsReward().tiny().load(Placement())
    for shape in [(1, 1), (3, 200), (64, 64), (512, 300)]:
        scores = scorer.score(torch.rand(2, 1, 3, *shape), ["a", "b"], [{}, {}])
        assert scores.shape == (2,)
        assert bool(F.relu(scores.abs() - 1).sum() < 1e-5)
