"""DeQA-Score and Q-Align: mPLUG-Owl2 against networks of transformers, its tokenizer, its pixels and its files."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaModel

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.sentencepiece_tokenizer import SentencepieceBpe
from tastemaker.rewards.backbones.mplug_owl2 import (
    TINY_SIZES,
    CrossAttention,
    MplugOwl2,
    OwlSizes,
    tiny_mplug_owl2,
    tokenize_question,
)
from tastemaker.rewards.quality_levels import LEVELS, QUESTION, DeqaReward, LevelScorer, QalignReward, pad_to_square

DOUBLE = Placement(dtype=torch.float64)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SPECIAL = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
# In the order of merges: the score of a piece is minus its place.
MERGED = [
    "\u2581t", "he", "\u2581the", "it", "qu", "al", "qual", "ity", "quality", "\u2581quality", "im", "ag", "age",
    "image", "\u2581e", "xc", "\u2581g", "oo", "\u2581goo", "is", "\u2581is", "in",
]  # fmt: skip
LETTERS = sorted(set("USERHowuldyrathqiSNTmgexcnfpbks?:.") | {"\u2581"})
PIECES = [*SPECIAL, *((piece, -float(i)) for i, piece in enumerate(MERGED)), *((x, -1000.0) for x in LETTERS)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def random_net(seed: int = 0, sizes: OwlSizes = TINY_SIZES) -> MplugOwl2:
    """A network whose norms and positions are random too."""
    torch.manual_seed(seed)
    net = MplugOwl2(sizes).eval().requires_grad_(False)
    for x in net.state_dict().values():
        x.add_(torch.randn_like(x) * 0.2)
    return net


def write_sentencepiece(path: Path, pieces: list[tuple[str, float]], model_type: int = 2) -> None:
    def message(number: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    fields = [message(1, message(1, piece.encode()) + b"\x15" + struct.pack("<f", score)) for piece, score in pieces]
    path.write_bytes(b"".join(fields) + message(2, bytes([3 << 3, model_type])))


def test_byte_pair_pieces_are_those_of_the_tokenizers_library() -> None:
    ids = {piece: number for number, (piece, _) in enumerate(PIECES)}
    splits = [
        next((piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ids and piece[i:] in ids)
        for piece in MERGED
    ]
    reference = Tokenizer(BPE(ids, splits, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    own = SentencepieceBpe(PIECES)
    for text in (QUESTION, "the quality\nof it\u00e4", *LEVELS, "", "qualityity in in", "\nthe"):
        assert own.encode(text) == reference.encode("\u2581" + text.replace(" ", "\u2581")).ids, text
    assert own.encode("\nit")[:2] == [ids["\u2581"], ids["<0x0A>"]]


def test_vision_model_is_a_clip_with_fused_projections() -> None:
    net = random_net().model.vision_model
    state = net.state_dict()
    clip = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28,
            patch_size=14, layer_norm_eps=1e-6, hidden_act="quick_gelu",
        )
    ).eval()  # fmt: skip
    converted = {}
    for key, x in state.items():
        if "query_key_value" in key:
            parts = x.unflatten(0, (2, 3, 16)).movedim(1, 0).flatten(1, 2)  # from [head, 3, D]
            for name, part in zip("qkv", parts, strict=True):
                converted[key.replace("query_key_value", f"{name}_proj")] = part
        else:
            converted[key] = x
    renames = [
        ("embeddings.cls_token", "embeddings.class_embedding"),
        ("embeddings.patch_embed", "embeddings.patch_embedding"),
        ("embeddings.position_embedding", "embeddings.position_embedding.weight"), (".dense.", ".out_proj."),
        ("embeddings.pre_layernorm", "pre_layrnorm"), (".input_layernorm.", ".layer_norm1."),
        (".post_attention_layernorm.", ".layer_norm2."),
    ]  # fmt: skip
    for old, new in renames:
        converted = {key.replace(old, new): x for key, x in converted.items()}
    own = clip.state_dict()
    prefix = "vision_model." if any(key.startswith("vision_model.") for key in own) else ""
    loaded = {f"{prefix}{key}": x.view(own[f"{prefix}{key}"].shape) for key, x in converted.items()}
    ids = f"{prefix}embeddings.position_ids"
    clip.load_state_dict({**loaded, **({ids: own[ids]} if ids in own else {})})
    pixels = random(2, 3, 28, 28)
    with torch.no_grad():
        hidden = clip(pixels).last_hidden_state
        expected = F.layer_norm(hidden, (32,), state["post_layernorm.weight"], state["post_layernorm.bias"], 1e-6)
    torch.testing.assert_close(net(pixels), expected, atol=1e-5, rtol=1e-4)


def test_language_model_is_llama_with_other_weights_at_image_positions() -> None:
    net = random_net()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    llama: Any = LlamaModel(config).eval()
    language = {key.removeprefix("model."): x for key, x in net.state_dict().items() if "vis" not in key}
    for key in [key for key in language if ".multiway.1." in key]:
        language[key] = language[key.replace(".multiway.1.", ".multiway.0.")]
    shared = random_net()
    shared.load_state_dict({f"model.{key}": x for key, x in language.items() if key != "lm_head.weight"}, strict=False)
    plain = {key.replace(".multiway.0.", "."): x for key, x in language.items() if ".multiway.1." not in key}
    head = plain.pop("lm_head.weight")
    llama.load_state_dict(plain)
    pixels, before, after, answers = random(2, 3, 28, 28), [1, 5, 9], [7, 8], [10, 20, 30]
    with torch.no_grad():
        image = shared.model.visual_abstractor(shared.model.vision_model(pixels))
        texts = [llama.embed_tokens(torch.tensor([ids])).expand(2, -1, -1) for ids in (before, after)]
        hidden = llama(inputs_embeds=torch.cat([texts[0], image, texts[1]], 1)).last_hidden_state
    assert image.shape == (2, TINY_SIZES.queries + 1, 32)
    torch.testing.assert_close(
        shared(pixels, before, after, answers), hidden[:, -1] @ head[answers].T, atol=1e-4, rtol=1e-4
    )
    assert (net(pixels, before, after, answers) - shared(pixels, before, after, answers)).abs().max() > 1e-3
    # A norm at image positions does not see the text.
    norm, x, place = net.model.layers[0].input_layernorm, torch.randn(1, 10, 32), slice(3, 8)
    changed = x.clone()
    changed[:, 3:8] += 1
    first, second = norm(x, place), norm(changed, place)
    assert first[:, :3].equal(second[:, :3]) and first[:, 8:].equal(second[:, 8:])
    kinds = [norm.multiway[0](x), norm.multiway[1](x)]
    torch.testing.assert_close(first, torch.cat([kinds[0][:, :3], kinds[1][:, 3:8], kinds[0][:, 8:]], 1))


def test_abstractor_attends_to_queries_and_features() -> None:
    layer: Any = random_net().model.visual_abstractor.encoder.layers[0]
    cross: CrossAttention = layer.crossattention
    weights = {key: x.double() for key, x in cross.state_dict().items()}
    queries, features = torch.randn(2, 4, 32, dtype=torch.float64), torch.randn(2, 5, 32, dtype=torch.float64)

    def norm(x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    normed = norm(queries, "norm1")
    tokens = torch.cat([normed, norm(features, "normk")], 1)
    q_positions, k_positions = weights["attention.q_pos_embed"], weights["attention.k_pos_embed"]
    q = linear(normed + q_positions, "attention.query").view(2, 4, 2, 16)
    k = linear(tokens + torch.cat([q_positions, k_positions]), "attention.key").view(2, 9, 2, 16)
    v = linear(tokens, "attention.value").view(2, 9, 2, 16)
    share = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 4).softmax(-1)
    x = normed + linear(torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2), "output.out_proj")
    y = norm(x, "output.norm2")
    y = F.silu(linear(y, "output.mlp.w1")) * linear(y, "output.mlp.w3")
    expected = x + linear(norm(y, "output.mlp.ffn_ln", 1e-6), "output.mlp.w2")
    torch.testing.assert_close(cross.double()(queries, features), expected)


def write_folder(folder: Path, net: MplugOwl2) -> str:
    """A folder as published: config, tokenizer and tensors, with a constant that older files hold."""
    folder.mkdir()
    sizes = asdict(net.sizes)
    visual = {
        "visual_model": {
            "hidden_size": sizes["vision_width"], "intermediate_size": sizes["vision_mlp_width"],
            "num_hidden_layers": sizes["vision_depth"], "num_attention_heads": sizes["vision_heads"],
            "image_size": sizes["image_size"], "patch_size": sizes["patch_size"], "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-6, "use_post_layernorm": True, "use_cls_token": True,
        },
        "visual_abstractor": {
            "num_learnable_queries": sizes["queries"], "num_hidden_layers": sizes["abstractor_depth"],
            "num_attention_heads": sizes["abstractor_heads"], "intermediate_size": sizes["abstractor_mlp_width"],
            "layer_norm_eps": 1e-6, "add_v2t_pos_emb": False,
        },
    }  # fmt: skip
    config = {
        "model_type": "mplug_owl2", "hidden_size": sizes["width"], "intermediate_size": sizes["mlp_width"],
        "num_hidden_layers": sizes["depth"], "num_attention_heads": sizes["heads"], "rms_norm_eps": 1e-5,
        "num_key_value_heads": sizes["heads"], "vocab_size": sizes["vocabulary"], "visual_config": visual,
        "rope_scaling": None, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_sentencepiece(folder / "tokenizer.model", PIECES)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**net.state_dict(), **extra}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, MplugOwl2]:
    net = random_net(sizes=replace(TINY_SIZES, vocabulary=len(PIECES) + 1, norm_eps=1e-5))
    return write_folder(tmp_path_factory.mktemp("owl") / "deqa", net), net


def test_scores_are_expected_levels_of_a_published_folder(published: tuple[str, MplugOwl2]) -> None:
    weights, net = published
    pixels = random(3, 1, 3, 28, 28)
    question = tokenize_question(SentencepieceBpe(PIECES), QUESTION.replace("{subject}", "quality"), LEVELS)
    assert question.before[0] == 1 and question.after[:2] == (PIECES.index(("\u2581", -1000.0)), 3 + 10)
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    logits = net((pixels[:, 0] - mean) / std, question.before, question.after, question.answers)
    expected = logits.softmax(-1) @ torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    deqa, qalign = (spec.load(Placement()) for spec in (DeqaReward(weights), QalignReward(weights)))
    arguments: Any = (pixels, [""] * 3, [{}] * 3)
    torch.testing.assert_close(deqa.score(*arguments), expected)
    torch.testing.assert_close(qalign.score(*arguments), (expected - 1) / 4)
    taste = QalignReward(weights, "aesthetics").load(Placement()).score(*arguments)
    assert (taste - qalign.score(*arguments)).abs().max() > 1e-6


def test_gradient_is_that_of_finite_differences() -> None:
    pixels = random(1, 1, 3, 30, 40).double() * 0.5 + 0.25
    scorer = DeqaReward("tiny").load(DOUBLE)
    leaf = pixels.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scorer.score(leaf, [""], [{}]).sum(), leaf)
    step = 1e-5 * gradient / gradient.abs().max()
    ends = [scorer.score(pixels + sign * step, [""], [{}]).item() for sign in (1, -1)]
    assert (gradient * step).sum().item() == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-4)


def test_pixels_are_padded_and_resized_as_published() -> None:
    low = Image.fromarray((random(9, 12, 3) * 255).byte().numpy())
    image = low.resize((60, 41), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (60, 60), tuple(int(x * 255) for x in CLIP_MEAN))
    square.paste(image, (0, (60 - 41) // 2))
    pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)[None] / 255
    padded = torch.from_numpy(np.array(square)).movedim(-1, 0)[None] / 255
    torch.testing.assert_close(pad_to_square(pixels), padded, atol=1e-6, rtol=0)
    tall = torch.from_numpy(np.array(image.rotate(90, expand=True))).movedim(-1, 0)[None] / 255
    assert pad_to_square(tall).shape == (1, 3, 60, 60)
    assert pad_to_square(tall)[..., :, :9].std((0, 2, 3)).max() < 1e-6
    mean, std = (torch.tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
    resized = torch.from_numpy(np.array(square.resize((28, 28), Image.Resampling.BICUBIC))).movedim(-1, 0) / 255
    scorer = LevelScorer(tiny_mplug_owl2(Placement()), *replace_tiny())
    levels = (scorer.preprocess(pixels)[0] - (resized - mean) / std).abs() * std * 255
    assert levels.max() < 2.1 and levels.mean() < 0.2  # PIL rounds after each of two passes


def replace_tiny() -> tuple[Any, tuple[float, ...], bool]:
    """Settings of a scorer that rounds pixels to bytes."""
    scorer: Any = DeqaReward("tiny", round_to_bytes=True).load(Placement())
    return scorer.question, scorer.values, scorer.round_pixels


@pytest.mark.slow
def test_other_folders_are_refused(published: tuple[str, MplugOwl2], tmp_path: Path) -> None:
    net = published[1]

    def refuse(code: str, name: str, content: object = None, config: dict[str, Any] | None = None) -> None:
        folder = Path(write_folder(tmp_path / code, net))
        if config is not None:
            settings = json.loads((folder / "config.json").read_text()) | config
            (folder / "config.json").write_text(json.dumps(settings))
        elif name == "tokenizer.model" and content is None:
            (folder / name).unlink()
        elif isinstance(content, list):
            write_sentencepiece(folder / name, content, 1 if code == "TM2305" else 2)
        with pytest.raises(ConfigError, match=code):
            DeqaReward(str(folder)).load(Placement())

    refuse("TM2300", "config.json", config={"num_key_value_heads": 1})
    refuse("TM2301", "config.json", config={"model_type": "llama"})
    refuse("TM2302", "config.json", config={"num_hidden_layers": 3})
    refuse("TM2303", "tokenizer.model", [*PIECES, ("more", 0.0), ("pieces", 0.0)])
    refuse("TM2304", "tokenizer.model")
    refuse("TM2305", "tokenizer.model", PIECES)
