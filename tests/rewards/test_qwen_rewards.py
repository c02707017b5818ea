"""HPSv3, VideoReward and EditReward from published layouts at tiny size: pixels, positions, heads and gradients."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2VLModel

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.frozen_models import random_network
from tastemaker.rewards.backbones.qwen2_vl import (
    QwenPreprocessing,
    read_template,
    reward_head,
    smart_resize,
    tiny_qwen_config,
    tiny_qwen_tokenizer,
)
from tastemaker.rewards.edit_reward import EditRewardReward
from tastemaker.rewards.hpsv3 import PIXELS, Hpsv3Reward
from tastemaker.rewards.video_align import MEANS, STDS, VideoAlignReward, sample_frames

DOUBLE = Placement(dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_smart_resize_gives_the_published_sizes() -> None:
    square = {256: 448, 448: 448, 512: 448, 640: 448, 720: 448, 768: 420, 960: 448, 1024: 448, 1328: 448}
    cases = {(side, side): (out, out) for side, out in (square | {1536: 420, 2048: 448}).items()}
    cases |= {(480, 832): (336, 588), (720, 1280): (336, 588), (768, 1344): (336, 588), (768, 1024): (364, 504)}
    cases |= {(896, 1152): (392, 504), (832, 1216): (364, 532)}
    cases |= {(w, h): (b, a) for (h, w), (a, b) in cases.items()}
    wrong = {size: smart_resize(*size, PIXELS, PIXELS) for size in cases}
    assert wrong == cases
    clips = {(480, 832): (336, 588), (720, 1280): (336, 588), (512, 512): (448, 448), (256, 256): (336, 336)}
    clips |= {(480, 720): (364, 532), (768, 768): (420, 420)}
    assert {size: smart_resize(*size, 100352, 200704) for size in clips} == clips
    with pytest.raises(ValueError, match="TM2100"):
        smart_resize(10, 2001, PIXELS, PIXELS)


def test_templates_are_the_published_texts() -> None:
    digests = {
        "hpsv3.instruction": "f0af73142f70b8fc",
        "hpsv3.suffix": "2471faca094ae5bd",
        "videoalign.detailed_special": "fd7862ecb43bbe39",
        "editreward.dim1": "35506a6f6af6da52",
        "editreward.dim2": "7f783e483ef60719",
    }
    assert {name: hashlib.sha256(read_template(name).encode()).hexdigest()[:16] for name in digests} == digests


def test_patches_are_those_of_the_processor_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    array = (random(90, 130, 3) * 255).byte().numpy()
    small = np.asarray(Image.fromarray(array).resize((588, 392), Image.Resampling.BICUBIC))  # a natural one is smoother
    processor: Any = Qwen2VLImageProcessorPil(size={"shortest_edge": PIXELS, "longest_edge": PIXELS})
    expected = processor(images=[Image.fromarray(small)], return_tensors="pt")
    pixels = torch.from_numpy(small.copy()).movedim(-1, 0)[None] / 255
    patches, grid = QwenPreprocessing(PIXELS, PIXELS, round_to_bytes=True)(pixels)
    assert list(grid) == expected["image_grid_thw"][0].tolist()
    difference = (patches - expected["pixel_values"]).abs()
    assert difference.max() < 2.5 / 255 / 0.26  # two passes of 8 bits
    assert difference.mean() < 0.5 / 255 / 0.26


def save_base(folder: Path, reward_tokens: list[str]) -> tuple[str, Any, int]:
    """Save a tiny base model without weights; return its folder, the reward model's config and its tokens."""
    tokenizer = tiny_qwen_tokenizer()
    config = tiny_qwen_config(tokenizer)
    tokens = len(tokenizer) + len(reward_tokens)
    config.text_config.vocab_size = 320  # more rows than tokens, as published; the reward model has fewer
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config.text_config.vocab_size = tokens
    return str(folder), config, tokens


def published_key(key: str) -> str:
    return key.replace("language_model.", "model.", 1) if key.startswith("language_model.") else key


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hpsv3Reward, Any, Any]:
    folder = tmp_path_factory.mktemp("hpsv3")
    base, config, tokens = save_base(folder / "base", ["<|Reward|>"])
    net, head = random_network(Qwen2VLModel, config, Placement()), reward_head(32)
    state = {published_key(key): x.contiguous() for key, x in net.state_dict().items()}
    state |= {f"rm_head.{key}": x for key, x in head.state_dict().items()} | {"lm_head.weight": torch.zeros(tokens, 32)}
    save_file(state, folder / "HPSv3.safetensors")
    return Hpsv3Reward(weights=str(folder), base=base), net, head.eval()


def test_hpsv3_reads_the_hidden_state_of_its_token_with_plain_positions(hpsv3: tuple[Hpsv3Reward, Any, Any]) -> None:
    spec, net, head = hpsv3
    scorer, pixels = spec.load(Placement()), random(2, 1, 3, 60, 100)
    prompts = ["a cat", "two dogs<|Re<|Reward|>ward|><|image_pad|> on a table"]
    scores = scorer.score(pixels, prompts, [{}, {}])
    torch.testing.assert_close(scores[:1], scorer.score(pixels[:1], prompts[:1], [{}]), atol=1e-5, rtol=1e-5)
    clean = scorer.score(pixels[1:], ["two dogs on a table"], [{}])
    torch.testing.assert_close(scores[1:], clean, atol=1e-5, rtol=1e-5)
    # The reference is built from the whole text, with positions as transformers 4.45 counted them.
    tokenizer = scorer.backbone.tokenizer
    patches, grid = scorer.preprocessing(pixels[0])
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    text += "<|image_pad|>" * (grid[1] * grid[2] // 4) + "<|vision_end|>"
    text += read_template("hpsv3.instruction").replace("{prompt}", "a cat") + read_template("hpsv3.suffix")
    text += "<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)[None]
    place = ids[0].tolist().index(tokenizer.convert_tokens_to_ids("<|Reward|>"))
    with torch.no_grad():
        features = net.get_image_features(patches, torch.tensor([grid])).pooler_output[0]
        embeddings = net.get_input_embeddings()(ids)
        embeddings[ids == net.config.image_token_id] = features
        plain = net.language_model(inputs_embeds=embeddings).last_hidden_state[:, place]
        types = (ids == net.config.image_token_id).int()
        mrope = net(ids, pixel_values=patches, image_grid_thw=torch.tensor([grid]), mm_token_type_ids=types)
        torch.testing.assert_close(scores[:1], head(plain)[:, 0], atol=1e-5, rtol=1e-4)
        assert (head(mrope.last_hidden_state[:, place])[:, 0] - scores[:1]).abs() > 1e-4


def finite_difference_error(score: Any, pixels: Tensor, step: float = 1e-4) -> float:
    """Relative difference of the gradient along itself to a central difference; norms are computed in 32 bits."""
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(leaf).sum(), leaf)
    direction = gradient / gradient.abs().max()
    expected = (score(pixels + step * direction).sum() - score(pixels - step * direction).sum()) / (2 * step)
    return float(((gradient * direction).sum() - expected).abs() / expected.abs())


@pytest.mark.slow
def test_gradients_of_pixels_match_finite_differences() -> None:
    image, clip = random(1, 1, 3, 40, 48).double() * 0.5 + 0.25, random(1, 4, 3, 40, 48).double() * 0.5 + 0.25
    cases = {"hpsv3": (Hpsv3Reward, image), "video_align": (VideoAlignReward, clip), "edit": (EditRewardReward, image)}
    errors = {}
    for name, (spec, pixels) in cases.items():
        scorer = spec(weights="tiny").load(DOUBLE)
        metadata = [{"image": random(3, 30, 50, seed=2)}]
        errors[name] = finite_difference_error(partial(scorer.score, prompts=["a cat"], metadata=metadata), pixels)
    assert max(errors.values()) < 0.01, errors


def test_rounding_to_bytes_keeps_the_gradient() -> None:
    pixels = random(1, 3, 448, 448).requires_grad_()
    rounded, _ = QwenPreprocessing(PIXELS, PIXELS, round_to_bytes=True)(pixels)
    exact, _ = QwenPreprocessing(PIXELS, PIXELS)(pixels)
    gradients = [torch.autograd.grad(x.square().sum() if x is exact else (x * exact.detach() * 2).sum(), pixels)[0]
                 for x in (rounded, exact)]  # fmt: skip
    torch.testing.assert_close(*gradients)
    assert 0 < (rounded - exact).abs().max() < 0.51 / 255 / 0.26


def test_hpsv3_refuses_other_weights(hpsv3: tuple[Hpsv3Reward, Any, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    spec, *_ = hpsv3
    tensors = load_file(Path(spec.weights) / "HPSv3.safetensors")
    cases = {
        "TM2104": {key: x for key, x in tensors.items() if "layers.1.mlp" not in key},
        "TM2103": tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"].repeat(2, 1)},
        "TM509": {key: x for key, x in tensors.items() if key != "rm_head.5.bias"},
    }
    for code, state in cases.items():
        save_file(state, tmp_path / "other.safetensors")
        with pytest.raises(ConfigError, match=code):
            Hpsv3Reward(weights=str(tmp_path / "other.safetensors"), base=spec.base).load(Placement())


def test_video_align_samples_the_published_frames() -> None:
    counts = {(81, 16): 10, (49, 8): 12, (121, 24): 10, (33, 16): 4, (3, 16): 2, (2, 8): 2, (1, 8): 1}
    assert {case: len(sample_frames(*case, 2.0)) for case in counts} == counts
    assert sample_frames(33, 16, 2.0).tolist() == [0, 11, 21, 32]


def test_video_align_merges_its_adapters_and_normalizes_ratings(tmp_path: Path) -> None:
    tokens = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    base, config, count = save_base(tmp_path / "base", tokens)
    net = random_network(Qwen2VLModel, config, Placement())
    state, rng = {}, torch.Generator().manual_seed(1)
    for key, x in net.state_dict().items():
        name = f"base_model.model.{published_key(key)}"
        if "language_model.layers" in key and "_proj." in key:
            stem, _, kind = name.rpartition(".")
            state[f"{stem}.base_layer.{kind}"] = x
            if kind == "weight":
                down, up = (torch.randn(size, generator=rng) * 0.2 for size in ((4, x.shape[1]), (len(x), 4)))
                state |= {f"{stem}.lora_A.default.weight": down, f"{stem}.lora_B.default.weight": up}
        else:
            state[name] = x
    row = torch.randn(1, 32, generator=rng)
    state |= {"base_model.model.rm_head.weight": row, "base_model.model.lm_head.weight": torch.zeros(count, 32)}
    folder = tmp_path / "checkpoint-11352"
    folder.mkdir()
    torch.save(state, folder / "model.pth")
    scorer = VideoAlignReward(weights=str(tmp_path), base=base).load(Placement())
    stem = "base_model.model.model.layers.1.mlp.up_proj."
    expected = state[f"{stem}base_layer.weight"] + 32 * (
        state[f"{stem}lora_B.default.weight"] @ state[f"{stem}lora_A.default.weight"]
    )
    merged = scorer.rater.backbone.net.language_model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(merged, expected)

    clips, metadata = random(2, 5, 3, 40, 48), [{"fps": 8}, {}]
    ratings = scorer.rate(clips, ["a cat", "a dog"], metadata)
    for k, name in enumerate(("visual_quality", "motion_quality", "text_alignment")):
        single = VideoAlignReward(weights=str(tmp_path), base=base, ratings=(name,)).load(Placement())  # type: ignore[arg-type]
        assert single.rater is scorer.rater
        torch.testing.assert_close(single.score(clips, ["a cat", "a dog"], metadata), ratings[:, k])
    torch.testing.assert_close(scorer.score(clips, ["a cat", "a dog"], metadata), ratings.sum(1))
    assert (ratings[:, 0] - ratings[:, 1]).abs().min() > 1e-4
    scorer.rater.head.requires_grad_(False).get_parameter("weight").zero_()
    expected = torch.tensor([-m / s for m, s in zip(MEANS, STDS, strict=True)])
    torch.testing.assert_close(scorer.rate(clips[:1], ["a cat"], [{}])[0], expected)
    with pytest.raises(ValueError, match="TM2111"):
        scorer.score(clips[:1], ["a cat"], [{"fps": 0}])
    with pytest.raises(ValueError, match="TM2110"):
        VideoAlignReward(ratings=())


def test_edit_reward_rates_an_edit_beside_its_source_with_both_heads(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    tokenizer = tiny_qwen_tokenizer()
    text = tiny_qwen_config(tokenizer).text_config.to_dict() | {"model_type": "qwen2_5_vl_text"}
    image_id, video_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
    }
    vision |= {"fullatt_block_indexes": [1], "initializer_range": 0.2}
    config: Any = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=image_id, video_token_id=video_id
    )
    config.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config.text_config.vocab_size = len(tokenizer) + 1
    net = random_network(Qwen2_5_VLModel, config, Placement())
    heads = [reward_head(32).eval(), reward_head(32).eval()]
    state = {published_key(key): x.contiguous() for key, x in net.state_dict().items()}
    for k, head in enumerate(heads):
        state |= {f"rm_heads.head_{k}.{key}": x for key, x in head.state_dict().items()}
    (tmp_path / "weights").mkdir()
    save_file(state, tmp_path / "weights" / "model.safetensors")
    scorer = EditRewardReward(weights=str(tmp_path / "weights"), base=str(tmp_path / "base")).load(Placement())

    pixels, source = random(2, 1, 3, 40, 48), random(3, 60, 30, seed=5)
    prompts, metadata = ["make it red", "add a hat"], [{"image": source}, {"image": source.flip(1)[None]}]
    with torch.no_grad():
        ratings = scorer.rate(pixels, prompts, metadata)
        torch.testing.assert_close(scorer.score(pixels, prompts, metadata), ratings.mean(1))
        tokens = scorer.backbone.tokenizer
        for k, head in enumerate(heads):  # the reference puts source before edit, with plain positions
            patches, grids = zip(*(scorer.preprocessing(x[None]) for x in (source, pixels[0, 0])), strict=True)
            ids = tokens("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n").input_ids
            for grid in grids:
                images = "<|image_pad|>" * (grid[1] * grid[2] // 4)
                ids += tokens(f"<|vision_start|>{images}<|vision_end|>").input_ids
            template = read_template(f"editreward.dim{k + 1}").replace("{prompt}", prompts[0])
            ids = torch.tensor(ids + tokens(template + read_template("hpsv3.suffix")).input_ids)[None]
            embeddings = net.get_input_embeddings()(ids)
            features = net.visual(torch.cat(patches), grid_thw=torch.tensor(grids)).pooler_output
            embeddings[ids == image_id] = features
            place = ids[0].tolist().index(tokens.convert_tokens_to_ids("<|Reward|>"))
            hidden = net.language_model(inputs_embeds=embeddings).last_hidden_state[:, place]
            torch.testing.assert_close(ratings[:1, k], head(hidden)[:, 0], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="TM2120"):
        scorer.score(pixels, prompts, [{}, {}])
    with pytest.raises(ConfigError, match="TM2121"):
        EditRewardReward(weights=str(tmp_path / "base")).load(Placement())
