"""LlamaGen's transformer compared with the published one, in full calls and token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiers import fast
from torch import Tensor

from tastemaker.models.nets.gpt import (
    GPT,
    GPTConfig,
    KVCache,
    apply_rotary_emb,
    padded_causal_mask,
    rope_2d,
    rope_factors,
)

LLAMAGEN = Path(__file__).parent.parent / "fixtures" / "llamagen"
KEYS = json.loads((LLAMAGEN / "keys_shapes.json").read_text("utf-8"))
SIZES = [name for name in KEYS if name.startswith("GPT")]


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(LLAMAGEN / "gpt_c2i_tiny.safetensors")


def published_gpt(golden: dict[str, Tensor]) -> GPT:
    net = GPT(GPTConfig(64, 2, 4, None, 96, 4, "class", 1, 10))
    net.load_state_dict({key[2:]: x for key, x in golden.items() if key.startswith("w.")})
    return net


def cached_logits(net: GPT, ids: Tensor, cond: Tensor, prefix_mask: Tensor | None = None) -> Tensor:
    """Logits computed with a key-value cache, one call per token: [B, length, codebook]."""
    cache: KVCache = ()
    outputs = []
    for i in range(ids.shape[1]):
        new_ids = ids[:, i - 1 : i] if i else None
        logits, cache = net(new_ids, None if i else cond, cache, prefix_mask)
        outputs.append(logits)
    return torch.cat(outputs, 1)


def random_gpt(config: GPTConfig) -> GPT:
    """A network with a random output layer, which is zero at initialization."""
    torch.manual_seed(0)
    net = GPT(config)
    torch.nn.init.normal_(net.output.weight)
    return net


def test_logits_equal_the_published_ones(golden: dict[str, Tensor]) -> None:
    logits, _ = published_gpt(golden)(golden["in.tokens"][:, :-1], golden["in.cond"])
    torch.testing.assert_close(logits, golden["out.train_logits"], rtol=0, atol=1e-4)
    actual = logits.log_softmax(-1).gather(-1, golden["in.tokens"][..., None])[..., 0]
    torch.testing.assert_close(actual, golden["out.token_logps"], rtol=0, atol=1e-4)


@torch.no_grad()
def test_cached_logits_equal_the_published_ones(golden: dict[str, Tensor]) -> None:
    net, ids, cond = published_gpt(golden), golden["in.tokens"], golden["in.cond"]
    conditional = cached_logits(net, ids, cond)
    torch.testing.assert_close(conditional, golden["out.kv_logits_cfg1"], rtol=0, atol=1e-4)
    unconditional = cached_logits(net, ids, torch.full_like(cond, 10))
    guided = unconditional + 4 * (conditional - unconditional)
    torch.testing.assert_close(guided, golden["out.kv_logits_cfg4"], rtol=0, atol=1e-4)


def test_gradients_equal_the_published_ones(golden: dict[str, Tensor]) -> None:
    net, ids = published_gpt(golden), golden["in.tokens"]
    logits, _ = net(ids[:, :-1], golden["in.cond"])
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    torch.testing.assert_close(loss[None], golden["out.train_loss"])
    torch.autograd.backward(loss)
    actual = net.layers[0].attention.wqkv.weight.grad, net.cls_embedding.embedding_table.weight.grad
    torch.testing.assert_close(actual, (golden["out.grad.wqkv0"], golden["out.grad.cls_table"]), rtol=1e-4, atol=1e-6)


def test_rotary_factors_equal_the_published_ones(golden: dict[str, Tensor]) -> None:
    expected = load_file(LLAMAGEN / "rope2d.safetensors")
    large = rope_2d(24, 64, 1, identity_prefix=False).permute(1, 2, 0)
    torch.testing.assert_close(large[[0, 1, 2, 24, 25, 576]], expected["freqs.g24_d64_c1"])
    for name, sizes in (("g4_d100_c1", (4, 100, 1)), ("g4_d20_c3", (4, 20, 3))):
        torch.testing.assert_close(rope_2d(*sizes, identity_prefix=False).permute(1, 2, 0), expected[f"freqs.{name}"])
    torch.testing.assert_close(rope_2d(4, 16, 1, identity_prefix=False).permute(1, 2, 0), golden["out.freqs_cis"])
    rotated = apply_rotary_emb(expected["in.x_d100"], rope_factors(rope_2d(4, 100, 1, identity_prefix=False)))
    torch.testing.assert_close(rotated, expected["out.rot_d100"])


@pytest.mark.parametrize("name", fast(SIZES, next(iter(SIZES))))
def test_every_size_has_the_published_keys_on_meta(name: str) -> None:
    size, conditioning = KEYS[name], "caption" if name.endswith("t2i") else "class"
    prefix, features = (120, 2048) if conditioning == "caption" else (1, 1000)
    with torch.device("meta"):
        net = GPT(
            GPTConfig(
                size["dim"],
                size["layers"],
                size["heads"],
                conditioning=conditioning,
                prefix_length=prefix,
                vocabulary=features,
            )
        )
    shapes = {key: list(x.shape) for key, x in net.state_dict().items()}
    assert len(shapes) == size["n_tensors"]
    assert {key: shapes[key] for key in size["keys"]} == size["keys"]
    assert net.rotary_factors.device.type == "cpu"  # computed before the weights are loaded


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("conditioning", ["class", "caption", "words"])
@torch.no_grad()
def test_cached_calls_equal_the_full_call(conditioning: str, kv_heads: int | None) -> None:
    prefix = 1 if conditioning == "class" else 5
    net = random_gpt(GPTConfig(32, 2, 4, kv_heads, 16, 3, conditioning, prefix, 12))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (3, 9), generator=generator)
    cond = {
        "class": torch.tensor([0, 7, 12]),
        "caption": torch.randn(3, 5, 12, generator=generator),
        "words": torch.randint(0, 12, (3, 5), generator=generator),
    }[conditioning]
    full, _ = net(ids[:, :-1], cond)
    assert full.shape == (3, 9, 16)
    torch.testing.assert_close(cached_logits(net, ids, cond), full, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_is_masked() -> None:
    net = random_gpt(GPTConfig(32, 2, 4, None, 16, 3, "caption", 4, 12))
    generator = torch.Generator().manual_seed(0)
    ids, features = torch.randint(0, 16, (2, 9), generator=generator), torch.randn(2, 4, 12, generator=generator)
    prefix_mask = torch.tensor([[False, False, True, True], [True] * 4])
    other = torch.where(prefix_mask[..., None], features, features + 1)
    (one, _), (two, _) = (net(ids[:, :-1], x, None, prefix_mask) for x in (features, other))
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(cached_logits(net, ids, features, prefix_mask), one, rtol=1e-4, atol=1e-4)
    unmasked, _ = net(ids[:, :-1], features)
    assert not torch.allclose(unmasked[0], one[0], atol=1e-3)
    torch.testing.assert_close(unmasked[1], one[1], rtol=1e-4, atol=1e-4)


def test_attention_mask_is_causal() -> None:
    prefix_mask = torch.tensor([[False, True]])
    assert padded_causal_mask(prefix_mask, 0, 3)[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert padded_causal_mask(prefix_mask, 3, 1)[0, 0].int().tolist() == [[0, 1, 1, 1]]


@torch.no_grad()
def test_logits_depend_on_word_order() -> None:
    net = random_gpt(GPTConfig(32, 2, 4, None, 16, 3, "words", 4, 12))
    word_ids = torch.tensor([[1, 2, 3, 0], [3, 2, 1, 0]])
    logits, _ = net(None, word_ids)
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads.*width.*TM480"):
        GPTConfig(width=100, heads=3)
