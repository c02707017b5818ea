"""LlamaGen in its published sizes: conditioning, generation and refused settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import fast

from tastemaker.core.guidance import NEGATIVE
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Condition, Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.models.llamagen.model import VARIANTS, LlamagenBackbone, LlamagenSpec
from tastemaker.models.nets.gpt import GPT
from tastemaker.models.nets.vq import VQ, VQConfig
from tastemaker.processes.autoregressive import AutoregressiveProcess

KEYS = json.loads((Path(__file__).parent.parent / "fixtures/llamagen/keys_shapes.json").read_text("utf-8"))
COUNTS = {
    "B": (110_888_448, 112_282_368),
    "L": (342_910_976, 345_031_680),
    "XL": (774_699_520, 777_678_080),
    "XXL": (1_410_972_672, 1_414_940_160),
    "XXXL": (3_893_027_840, 3_902_261_760),
    "1B": (1_199_616_000, 1_205_954_560),
    "3B": (3_096_659_200, 3_110_249_600),
    "7B": (6_614_589_440, 6_635_655_168),
}
PROMPTS = {"class": ("207", "tench", ""), "caption": ("A red  cat", "a much longer caption", "")}


def tiny_llamagen(conditioning: str, seed: int = 0) -> LlamagenBackbone:
    """A tiny LlamaGen with perturbed weights, because its output layer starts at zero."""
    model = replace(LlamagenSpec().tiny(), conditioning=conditioning, seed=seed).load(Placement())  # type: ignore[arg-type]
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("size", fast(COUNTS, next(iter(COUNTS))))
@pytest.mark.parametrize("conditioning", ["class", "caption"])
def test_variants_have_published_parameter_counts(size: Any, conditioning: Any) -> None:
    spec = LlamagenSpec(variant=size, conditioning=conditioning)
    with torch.device("meta"):
        net = GPT(spec.network_config())
    assert sum(p.numel() for p in net.parameters()) == COUNTS[size][conditioning == "caption"]
    published = KEYS[f"GPT-{size}/{'t2i' if conditioning == 'caption' else 'c2i'}"]
    shapes = {key: list(x.shape) for key, x in net.state_dict().items()}
    assert (
        len(shapes) == published["n_tensors"] and {key: shapes[key] for key in published["keys"]} == published["keys"]
    )


def test_all_variants_are_tested() -> None:
    assert {*COUNTS} == {*VARIANTS} - {"tiny"}


@pytest.mark.parametrize("conditioning", ["class", "caption"])
def test_llamagen_follows_the_backbone_interface(conditioning: str) -> None:
    model = tiny_llamagen(conditioning)
    policy: Policy[Any] = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    cond = policy.embed(PROMPTS[conditioning])
    trajectory = policy.sample(cond, Randomness(0, 0, torch.arange(3)))
    assert trajectory.final.shape == (3, 16) and policy.decode(trajectory.final).shape == (3, 1, 3, 32, 32)
    log_prob = policy.action_distribution(trajectory.cond, trajectory.segments[0]).log_prob(trajectory.final)
    assert torch.equal(log_prob, trajectory.segments[0].log_prob)


@pytest.mark.parametrize("conditioning", ["class", "caption"])
@torch.no_grad()
def test_llamagen_cached_calls_equal_the_full_call(conditioning: str) -> None:
    model = tiny_llamagen(conditioning)
    cond, ids = model.embed(PROMPTS[conditioning]), torch.arange(48).view(3, 16)
    full = model.predict(ids, torch.ones(3), cond)
    cache, last = model.init_cache(cond), None
    for position in range(16):
        logits, cache = model.decode_step(last, cache, cond)
        torch.testing.assert_close(logits, full[:, position], rtol=1e-4, atol=1e-4)
        last = ids[:, position]


def test_class_prompts_are_indices_names_or_empty() -> None:
    model = LlamagenSpec().tiny().load(Placement())
    cond = model.embed(["207", "a photo of a golden retriever", ""], [{"seen": 1}] * 3)
    assert cond.tensors["label"].tolist() == [207, 207, 1000] and cond.metadata[0] == {"seen": 1}
    with pytest.raises(ConfigError, match=r"'golden retreiver'.*golden retriever.*TM132"):
        model.embed(["golden retreiver"])


def test_custom_class_names_are_prompts() -> None:
    model = replace(LlamagenSpec().tiny(), num_classes=2, class_names=("cat", "dog")).load(Placement())
    assert model.embed(["dog", "cat", "1", ""]).tensors["label"].tolist() == [1, 0, 1, 2]
    with pytest.raises(ValueError, match=r"'class_names'.* 2.*TM133"):
        LlamagenSpec(num_classes=3, class_names=("cat", "dog"))


def test_captions_are_left_padded() -> None:
    model = tiny_llamagen("caption")
    cond = model.embed(["Ab", "ab", "abcdefghijklmnop"])
    mask, features = cond.tensors["attention_mask"], cond.tensors["features"]
    assert mask.int().tolist() == [[0] * 5 + [1] * 3] * 2 + [[1] * 8]  # letters, end token
    assert not features[0, :5].any() and features[0, 5:].abs().sum(-1).gt(0).all()
    assert torch.equal(features[0], features[1])  # captions are lowercased


def test_empty_caption_uses_null_embedding() -> None:
    model = tiny_llamagen("caption")
    guided = AutoregressiveProcess().wrap_guidance(model, Guidance(3.0))
    cond = guided.embed(["ab", "a much longer caption"])
    net: Any = model.net
    assert torch.equal(cond.tensors[NEGATIVE + "features"][1], net.cls_embedding.uncond_embedding)
    assert torch.equal(cond.tensors[NEGATIVE + "attention_mask"], cond.tensors["attention_mask"])  # as published
    assert not net.cls_embedding.uncond_embedding.requires_grad


def test_precomputed_embeddings_need_no_text_encoder(tmp_path: Path) -> None:
    embeddings = {"features": torch.randn(1, 8, 2048), "attention_mask": torch.ones(1, 8, dtype=torch.bool)}
    ShardedEmbeddingStore(tmp_path, {"model": "llamagen", "max_text_tokens": "8"}).add(["a cat"], embeddings)
    spec = replace(LlamagenSpec().tiny(), conditioning="caption", text_encoder="google/flan-t5-xl", embeddings=tmp_path)
    model = spec.load(Placement())
    assert torch.equal(model.embed(["a cat"]).tensors["features"], embeddings["features"])
    assert model.embed([""]).tensors["features"].shape == (1, 8, 2048)
    with pytest.raises(ConfigError, match=r"'a dog'.*TM505"):
        model.embed(["a dog"])
    with pytest.raises(ConfigError, match=r"TM505"):
        replace(spec, embeddings=None).load(Placement())


@pytest.mark.parametrize("conditioning", ["class", "caption"])
def test_lora_trains_llamagen(conditioning: str) -> None:
    model = tiny_llamagen(conditioning)
    weights = Lora(rank=2).apply(model, ("reference",))
    ids = torch.arange(48).view(3, 16)
    model.predict(ids, torch.ones(3), model.embed(PROMPTS[conditioning])).square().mean().backward()
    assert all(p.grad is not None for p in weights.trainable().values())


@torch.no_grad()
def test_caption_padding_is_masked() -> None:
    model = tiny_llamagen("caption")
    cond, ids = model.embed(["ab"]), torch.arange(16)[None]
    features = torch.where(cond.tensors["attention_mask"][..., None], cond.tensors["features"], torch.ones(()))
    other = Condition(cond.prompts, {**cond.tensors, "features": features})
    one, two = (model.predict(ids, torch.ones(1), c) for c in (cond, other))
    torch.testing.assert_close(one, two)


def test_dropout_is_active_only_with_gradients() -> None:
    model = replace(LlamagenSpec().tiny(), dropout=0.5).load(Placement())
    torch.nn.init.normal_(model.net.get_parameter("output.weight"))
    cond, ids = model.embed(["1", "2"]), torch.arange(32).view(2, 16)

    def predict() -> torch.Tensor:
        return model.predict(ids, torch.ones(2), cond).detach()

    assert not torch.equal(predict(), predict())
    with torch.no_grad():
        assert torch.equal(predict(), predict())


def test_random_weights_follow_seed_and_dtype() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    spec, bf16 = LlamagenSpec().tiny(), Placement(dtype=torch.bfloat16)
    one, two = (spec.load(bf16).net.state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) and one[key].dtype == torch.bfloat16 for key in one)
    assert torch.equal(before, torch.get_rng_state())
    float32 = spec.load(Placement(dtype=torch.bfloat16, trainable_dtype=torch.float32)).net.state_dict()
    assert all(x.dtype == torch.float32 for x in float32.values())


def test_llamagen_sources_follow_settings() -> None:
    assert [str(source) for source in LlamagenSpec(variant="XL", image_size=384).sources] == [
        "FoundationVision/LlamaGen/c2i_XL_384.pt",
        "FoundationVision/LlamaGen/vq_ds16_c2i.pt",
    ]
    captioned = LlamagenSpec(
        variant="XL", conditioning="caption", weights="peizesun/llamagen_t2i", autoencoder="vq_ds16_t2i", image_size=512
    )
    assert [str(source) for source in captioned.sources] == [
        "peizesun/llamagen_t2i/t2i_XL_stage2_512.pt",
        "peizesun/llamagen_t2i/vq_ds16_t2i.pt",
        "google/flan-t5-xl",
    ]
    with pytest.raises(ConfigError, match=r"7B.*256.*TM452"):
        _ = LlamagenSpec(variant="7B").sources


def test_missing_llamagen_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"TM505"):
        replace(LlamagenSpec(), autoencoder=None).load(Placement())


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    torch.save(VQ(VQConfig(32, (1, 2), 1, 16, 128, 8)).state_dict(), tmp_path / "vq.pt")
    spec = replace(
        LlamagenSpec().tiny(),
        autoencoder=str(tmp_path / "vq.pt"),
        codebook_size=128,
        image_size=16,
        downsample_factor=2,
    )
    model = spec.load(Placement())
    assert model.encode(torch.rand(2, 1, 3, 16, 16)).shape == (2, 64)
    with pytest.raises(ConfigError, match=r"256.*64.*data\.image_size=16.*TM464"):
        model.encode(torch.rand(2, 1, 3, 32, 32))


def test_indivisible_image_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'image_size'.*250.*TM434"):
        LlamagenSpec(image_size=250)


def test_shape_follows_the_downsample_factor() -> None:
    for downsample, side in ((16, 16), (8, 32)):
        assert LlamagenSpec(downsample_factor=downsample).shape == (side * side,)  # type: ignore[arg-type]
