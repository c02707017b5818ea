"""HPS from its published file and other layouts: agreement with transformers, and refused files."""

from __future__ import annotations

import json
import re
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
from tastemaker.rewards.backbones.published_files import require_image_encoder
from tastemaker.rewards.backbones.tokenizers import tiny_clip_tokenizer
from tastemaker.rewards.clip import ClipReward
from tastemaker.rewards.hps import HpsReward
from tastemaker.rewards.imagereward import ImageReward
from tastemaker.rewards.pickscore import PickScoreReward

PROMPTS = ["a red cat", "", "Two dogs & a boat, it's late", "word " * 2000]
PIXELS = torch.rand(4, 1, 3, 40, 56, generator=torch.Generator().manual_seed(0))
NO_METADATA: list[dict[str, Any]] = [{}] * 4


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
    """Cosine similarities of preprocessed images and the prompts, computed by transformers."""
    ids = tiny_clip_tokenizer()(PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt")
    out = net(pixel_values=prepared, **ids)
    return (out.image_embeds * out.text_embeds).sum(1)


@torch.no_grad()
def test_published_file_scores_match_transformers(net: Any, folder: str, published: tuple[str, str]) -> None:
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    assert expected.std() > 0.01
    for weights in published:
        scores = HpsReward(weights=weights, tokenizer=folder).load(Placement()).score(PIXELS, PROMPTS, NO_METADATA)
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("file", ["open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"])
def test_open_clip_directory_is_read_as_clip_and_not_as_hps(file: str, net: Any, folder: str, tmp_path: Path) -> None:
    save_file({key: x.clone() for key, x in open_clip_state(net).items()}, tmp_path / file)
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    clip = ClipReward(weights=str(tmp_path), tokenizer=folder, resize_mode="pad", overshoot="keep")
    torch.testing.assert_close(clip.load(Placement()).score(PIXELS, PROMPTS, NO_METADATA), expected, atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match=rf"HPS_v2\.1_compressed\.pt.*{re.escape(file)}.*TM880"):
        HpsReward(weights=str(tmp_path), tokenizer=folder).load(Placement())
    with pytest.raises(ConfigError, match=rf"{re.escape(file)}.*HPS v2\.1.*TM881"):
        HpsReward(weights=str(tmp_path / file), tokenizer=folder).load(Placement())
    with pytest.raises(ConfigError, match=rf"{re.escape(file)}.*PickScore.*TM88[13]"):
        PickScoreReward(weights=str(tmp_path), tokenizer=folder).load(Placement())


@torch.no_grad()
def test_transformers_file_is_read(net: Any, folder: str) -> None:
    weights = str(Path(folder) / "model.safetensors")
    scores = HpsReward(weights=weights).load(Placement()).score(PIXELS, PROMPTS, NO_METADATA)
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_missing_version_is_refused_instead_of_another_file(net: Any, folder: str, tmp_path: Path) -> None:
    """The folder `hps_ckpt` of SRPO holds v2.1 and the base CLIP, whose scores are nobody's HPS."""
    published = save_original_checkpoints(net, tmp_path / "hps_ckpt")[0]
    directory = Path(published).parent
    base = build_clip()
    base.visual_projection.weight.data.neg_()
    torch.save(open_clip_state(base), directory / "open_clip_pytorch_model.bin")
    scores = HpsReward(weights=str(directory), tokenizer=folder).load(Placement()).score(PIXELS, PROMPTS, NO_METADATA)
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match=r"HPS_v2_compressed\.pt.*HPS_v2\.1_compressed\.pt.*TM880"):
        HpsReward(version="v2.0", weights=str(directory), tokenizer=folder).load(Placement())
    with pytest.raises(ConfigError, match=r"is HPS v2\.1.*HPS v2\.0.*TM881"):
        HpsReward(version="v2.0", weights=published, tokenizer=folder).load(Placement())
    with pytest.raises(ConfigError, match=r"open_clip_pytorch_model\.bin.*PickScore.*TM883"):
        PickScoreReward(weights=str(directory), tokenizer=folder).load(Placement())
    with pytest.raises(ConfigError, match=r"ImageReward\.pt.*TM880"):
        ImageReward(weights=str(directory)).load(Placement())


def test_clip_of_another_published_size_is_refused() -> None:
    path, position = Path("weights.pt"), "vision_model.embeddings.class_embedding"
    for width in (1280, 128):  # ViT-H, and one that nobody published
        require_image_encoder({position: torch.zeros(width)}, "ViT-H", path, "`weights` of hps")
    for tensors in ({position: torch.zeros(1024)}, {}):
        with pytest.raises(ConfigError, match=r"`weights` of hps.*ViT-H.*TM882"):
            require_image_encoder(tensors, "ViT-H", path, "`weights` of hps")


def test_network_with_more_layers_than_its_config_is_refused(net: Any, tmp_path: Path) -> None:
    folder = Path(save_checkpoint(net, tmp_path))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"text_model\.encoder\.layers\.1.*config\.json.*TM884"):
        ClipReward(weights=str(folder)).load(Placement())


@torch.no_grad()
def test_published_network_sizes_are_inferred_from_tensors() -> None:
    with torch.device("meta"):
        sizes = {"num_attention_heads": 16, "hidden_act": "gelu"}
        vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "patch_size": 14}
        text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, **sizes}
        config = CLIPConfig(text_config=text, vision_config={**vision, **sizes}, projection_dim=1024)
        state = CLIPModel(config).state_dict()
    inferred = open_clip.clip_config(state, "HPS")
    for half, expected in (("text_config", text), ("vision_config", {**vision, **sizes, "image_size": 224})):
        inferred_half = getattr(inferred, half).to_dict()
        assert {key: inferred_half[key] for key in expected} == expected
    assert inferred.projection_dim == 1024
    assert inferred.text_config.max_position_embeddings == 77


def clip_with_head_counts(num_heads: tuple[int, int], directory: Path) -> tuple[Any, str, str]:
    """A CLIP with the given numbers of vision and text heads, its open_clip file, and its tokenizer directory."""
    vision_heads, text_heads = num_heads
    small = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "hidden_act": "gelu"}
    vision = {**small, "num_attention_heads": vision_heads, "image_size": 28, "patch_size": 14}
    text = {**small, "num_attention_heads": text_heads, **SPECIAL_TOKENS}
    net = random_clip(CLIPModel, CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return net, save_original_checkpoints(net, directory / "files")[1], save_checkpoint(net, directory / "clip")


@torch.no_grad()
def test_head_counts_are_read_from_open_clip_config(tmp_path: Path) -> None:
    net, weights, tokenizer = clip_with_head_counts((4, 3), tmp_path)
    spec = HpsReward(weights=weights, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"48.*open_clip_config\.json.*TM366"):
        spec.load(Placement())
    model_config = {
        "embed_dim": 16,
        "vision_cfg": {"width": 48, "head_width": 12},
        "text_cfg": {"width": 48, "heads": 3},
    }
    config_file = Path(weights).parent / "open_clip_config.json"
    config_file.write_text(json.dumps({"model_cfg": model_config}))
    expected = cosines(net, Preprocessing(28, "pad", overshoot="keep")(PIXELS[:, 0]))
    torch.testing.assert_close(spec.load(Placement()).score(PIXELS, PROMPTS, NO_METADATA), expected, atol=1e-6, rtol=0)
    config_file.write_text(json.dumps({"model_cfg": {**model_config, "quick_gelu": True}}))
    assert spec.load(Placement()).net.config.vision_config.hidden_act == "quick_gelu"
    config_file.write_text("{}")
    with pytest.raises(ConfigError, match=r"open_clip_config\.json.*TM367"):
        spec.load(Placement())


@torch.no_grad()
def test_pickscore_crops_tensors_as_torchvision_does(net: Any, folder: str) -> None:
    pixels = PIXELS[
        ..., :28, :31
    ]  # three columns too wide: torchvision starts at the second pixel, transformers at the first
    for overshoot, crop_rounding in (("keep", "round"), ("clip", "floor")):
        spec: Any = PickScoreReward(folder, overshoot=overshoot)  # type: ignore[arg-type]
        prepared = Preprocessing(28, overshoot=overshoot, crop_rounding=crop_rounding)(pixels[:, 0])  # type: ignore[arg-type]
        scale = net.logit_scale.exp()
        torch.testing.assert_close(
            spec.load(Placement()).score(pixels, PROMPTS, NO_METADATA),
            scale * cosines(net, prepared),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("resize_mode", ["pad", "crop", "stretch"])
def test_gradients_agree_with_finite_differences(resize_mode: Any, net: Any, folder: str) -> None:
    scorer = HpsReward(weights=f"{folder}/model.safetensors", resize_mode=resize_mode).load(
        Placement(dtype=torch.float64)
    )
    pixels = PIXELS[:2].double().requires_grad_()
    gradient = torch.autograd.grad(scorer.score(pixels, PROMPTS[:2], NO_METADATA[:2]).sum(), pixels)[0]
    direction = torch.randn(pixels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ahead, behind = (
            scorer.score(pixels + h * direction, PROMPTS[:2], NO_METADATA[:2]).sum() for h in (1e-5, -1e-5)
        )
    torch.testing.assert_close((gradient * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_bfloat16_scores_are_close_to_float32(folder: str) -> None:
    spec = HpsReward(weights=f"{folder}/model.safetensors")
    float32, bfloat16 = (
        spec.load(Placement(dtype=dtype)).score(PIXELS, PROMPTS, NO_METADATA)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert bfloat16.dtype == torch.float32
    torch.testing.assert_close(bfloat16, float32, atol=0.02, rtol=0)


@torch.no_grad()
def test_web_text_is_cleaned_as_in_open_clip() -> None:
    scorer = HpsReward().tiny().load(Placement())
    variants = [
        'a & "b" it\'s fine',
        "A &amp;  \u201cB\u201d it\u2019s \ufb01ne",
        "a &amp;amp; \u201eb\u201d it's \uff46ine",
    ]
    scores = scorer.score(PIXELS[:1].expand(3, -1, -1, -1, -1), variants, NO_METADATA)
    torch.testing.assert_close(scores, scores[:1].expand(3))


def test_files_that_are_not_hps_are_refused(net: Any, folder: str, tmp_path: Path) -> None:
    complete = Path(save_original_checkpoints(net, tmp_path / "files")[0])
    cut = tmp_path / "cut.pt"
    cut.write_bytes(complete.read_bytes()[:5000])
    state = open_clip_state(net)
    incomplete, unexpected = tmp_path / "incomplete.pt", tmp_path / "unexpected.pt"
    torch.save({key: x for key, x in state.items() if "resblocks.1.mlp" not in key}, incomplete)
    torch.save({**state, "visual.head.weight": torch.zeros(2, 2)}, unexpected)
    other = tmp_path / "other.pt"
    torch.save({"layers.0.weight": torch.zeros(2, 2)}, other)
    for path, pattern in [
        (cut, r"cut\.pt.*readable"),
        (incomplete, "'text_model.encoder.layers.1.mlp"),
        (unexpected, "'visual.head.weight'.*open_clip"),
        (other, r"config\.json"),
        (tmp_path / "nothing.pt", "HPS_v2.1_compressed.pt"),
    ]:
        with pytest.raises(ConfigError, match=pattern):
            HpsReward(weights=str(path), tokenizer=folder).load(Placement())


def test_missing_or_mismatched_tokenizer_is_refused(folder: str, published: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*TM505"):
        HpsReward(weights=published[1], tokenizer="nobody/nothing").load(Placement())
    with pytest.raises(ConfigError, match=r"no tokenizer.*TM371"):
        HpsReward(weights=published[1], tokenizer=str(Path(published[1]).parent)).load(Placement())
    Path(folder, "small").mkdir(exist_ok=True)
    small = build_clip()
    state = open_clip_state(small)
    state["token_embedding.weight"] = state["token_embedding.weight"][:400]
    torch.save({"state_dict": state}, Path(folder, "small", "hps.pt"))
    with pytest.raises(ConfigError, match=r"514 tokens.*TM373"):
        HpsReward(weights=str(Path(folder, "small", "hps.pt")), tokenizer=folder).load(Placement())


def test_pixels_of_any_shape_are_scored() -> None:
    scorer = HpsReward().tiny().load(Placement())
    for shape in [(1, 1), (3, 200), (64, 64), (512, 300)]:
        scores = scorer.score(torch.rand(2, 1, 3, *shape), ["a", "b"], [{}, {}])
        assert scores.shape == (2,)
        assert bool(F.relu(scores.abs() - 1).sum() < 1e-5)
