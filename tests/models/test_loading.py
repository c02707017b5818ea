"""LlamaGen's checkpoints load in every layout without a flag, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models import loading, weight_files
from tastemaker.models.image_tokenizer import VqSpec, load_image_tokenizer
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.models.nets.vq import VQ, VQConfig

SPEC = replace(LlamagenSpec().tiny(), kv_heads=1, num_classes=7)
ARGS = Namespace(gpt_model="GPT-B", lr=1e-4, cloud_save_path=None, betas=[0.9, 0.95])
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> Tensors:
    """Of a network whose output is not zero."""
    torch.manual_seed(3)
    return {key: torch.randn_like(x) for key, x in SPEC.load(Placement()).net.state_dict().items()}


def with_leftovers(weights: Tensors) -> Tensors:
    """As a checkpoint saved after sampling has them."""
    caches = {f"layers.0.attention.kv_cache.{x}_cache": torch.zeros(2, 1, 8, 16) for x in "kv"}
    return {**weights, "freqs_cis": torch.zeros(17, 8, 2), **caches}


def llama(weights: Tensors, heads: int = 2) -> Tensors:
    """Under the names of transformers' Llama."""
    found: Tensors = {}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for key, x in weights.items():
        parts = key.split(".")
        if parts[0] == "layers":
            start = f"model.layers.{parts[1]}"
            if parts[3] == "wqkv":
                head = x.shape[0] // (heads + 2)
                for part, rows in zip("qkv", x.split([heads * head, head, head]), strict=True):
                    found[f"{start}.self_attn.{part}_proj.weight"] = rows.clone()
                continue
            inner = {
                "attention": "self_attn.o_proj",
                "feed_forward": f"mlp.{names.get(parts[3], '')}",
                "attention_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
            }[parts[2]]
            found[f"{start}.{inner}.weight"] = x
        elif parts[0] == "output":
            found["lm_head.weight"] = x
        else:
            found[f"model.{key.replace('tok_embeddings', 'embed_tokens')}"] = x
    return found


def whole(folder: Path, weights: Tensors) -> Path:
    folder.mkdir()
    torch.save(weights, folder / "consolidated.pth")
    (folder / "state_type.txt").write_text("full")
    (folder / "resume_step.txt").write_text("12")
    return folder


@contextmanager
def pretended(rank: int, world: int) -> Iterator[Any]:
    """A group of ranks of which only one is here, for torch makes pieces of tensors in no other way."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def in_shards(folder: Path, weights: Tensors, world: int = 3) -> Path:
    folder.mkdir()
    for rank in range(world):
        with pretended(rank, world) as group:
            pieces = {key: _create_chunk_sharded_tensor(x, rank, world, world, group) for key, x in weights.items()}
            torch.save(pieces, folder / f"model.shard.{rank:05d}-of-{world:05d}.pth")
    (folder / "state_type.txt").write_text("sharded")
    return folder


def pickled(data: Any, path: Path) -> Path:
    torch.save(data, path)
    return path


def safe(weights: Tensors, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file({key: x.contiguous() for key, x in weights.items()}, path)
    return path


LAYOUTS: dict[str, Callable[[Tensors, Path], Path]] = {
    "model": lambda w, p: pickled({"model": w, "optimizer": {"state": {}}, "steps": 3, "args": ARGS}, p / "0000003.pt"),
    "module": lambda w, p: pickled({"module": w, "args": ARGS}, p / "x.pt"),
    "state_dict": lambda w, p: pickled({"state_dict": w, "epoch": 1}, p / "x.ckpt"),
    "bare": lambda w, p: pickled(w, p / "x.pth"),
    "leftovers": lambda w, p: pickled({"model": with_leftovers(w)}, p / "x.pt"),
    "ddp and compiled": lambda w, p: pickled({"model": {f"module._orig_mod.{k}": x for k, x in w.items()}}, p / "x.pt"),
    "consolidated": lambda w, p: whole(p / "0000012", w),
    "consolidated file": lambda w, p: whole(p / "0000012", w) / "consolidated.pth",
    "sharded": lambda w, p: in_shards(p / "0000012", w),
    "safetensors": lambda w, p: safe(w, p / "x.safetensors"),
    "folder of the hub": lambda w, p: safe(w, p / "hub" / "model.safetensors").parent,
    "llama": lambda w, p: safe(llama(w), p / "x.safetensors"),
    "llama pickled": lambda w, p: pickled(llama(w), p / "pytorch_model.bin"),
    "half precision": lambda w, p: pickled({k: x.bfloat16() for k, x in w.items()}, p / "x.pt"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_layout_loads(layout: str, weights: Tensors, tmp_path: Path) -> None:
    path = LAYOUTS[layout](weights, tmp_path)
    found = replace(SPEC, weights=str(path)).load(Placement()).net.state_dict()
    assert {*found} == {*weights}
    for key, x in weights.items():
        wanted = x.bfloat16().float() if layout == "half precision" else x
        assert torch.equal(found[key], wanted) and found[key].dtype == torch.float32, key


def test_weights_are_cast_to_the_requested_dtype(weights: Tensors, tmp_path: Path) -> None:
    path = pickled({"model": weights}, tmp_path / "x.pt")
    model = replace(SPEC, weights=str(path)).load(Placement(dtype=torch.bfloat16))
    assert all(torch.equal(x, weights[key].bfloat16()) for key, x in model.net.state_dict().items())
    assert all(p.requires_grad and not p.is_meta for p in model.net.parameters())
    path.unlink()  # nothing of it is still in the file
    model.predict(torch.zeros(1, 16, dtype=torch.long), torch.ones(1), model.embed(["3"]))


def test_own_weight_files_load(weights: Tensors, tmp_path: Path) -> None:
    weight_files.write_weights(tmp_path / "x.safetensors", weights, {"model": {"type": "llamagen"}}, torch.float32)
    found = replace(SPEC, weights=str(tmp_path / "x.safetensors")).load(Placement()).net.state_dict()
    assert all(torch.equal(found[key], x) for key, x in weights.items())


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class Lookup:
    def __reduce__(self) -> Any:
        return getattr, (Path, "cwd")


def test_pickled_code_is_not_run(weights: Tensors, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = pickled({"model": weights, "args": Bomb(mark)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"x\.pt holds more than tensors and settings, which could run code"):
        replace(SPEC, weights=str(path)).load(Placement())
    assert not mark.exists()
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps({"model": Bomb(mark)}, protocol=2))
    with pytest.raises(ConfigError, match=r"bare\.pt"):
        replace(SPEC, weights=str(bare)).load(Placement())
    assert not mark.exists()


def test_pickled_getattr_is_inert(weights: Tensors, tmp_path: Path) -> None:
    path = pickled({"model": weights, "args": Namespace(folder=Lookup())}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="could run code"):
        replace(SPEC, weights=str(path)).load(Placement())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: {**w, "layers.0.attention.wq.weight": torch.zeros(1)}, r"it has 'layers\.0\.attention\.wq\.weight'"),
        (lambda w: {k: x for k, x in w.items() if k != "norm.weight"}, r"it lacks 'norm\.weight'"),
        (lambda w: {**w, "norm.weight": torch.zeros(3)}, r"'norm\.weight' is \[3\], expected \[32\]"),
        (lambda w: {"model": {"a": 1}}, "'a' in it is no tensor"),
        (lambda w: [1, 2], "it holds a list"),
        (lambda w: {"conv.weight": torch.zeros(1)}, r"lacks .* and it has 'conv\.weight', unknown here"),
    ],
)
def test_tensors_of_another_network_are_refused(
    change: Callable[[Tensors], Any], sentence: str, weights: Tensors, tmp_path: Path
) -> None:
    path = pickled(change(weights), tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=sentence):
        replace(SPEC, weights=str(path)).load(Placement())


def test_another_variant_or_conditioning_is_refused(weights: Tensors, tmp_path: Path) -> None:
    path = str(pickled(weights, tmp_path / "x.pt"))
    with pytest.raises(ConfigError, match=r"set model\.variant=tiny"):
        replace(SPEC, variant="B", heads=12, weights=path).load(Placement())
    with pytest.raises(ConfigError, match=r"set model\.conditioning=class"):
        replace(SPEC, conditioning="caption", weights=path).load(Placement())


@pytest.mark.filterwarnings("ignore")
def test_incomplete_shards_are_refused(weights: Tensors, tmp_path: Path) -> None:
    folder = in_shards(tmp_path / "0000012", weights)
    with pytest.raises(ConfigError, match="shards of one rank"):
        replace(SPEC, weights=str(folder / "model.shard.00000-of-00003.pth")).load(Placement())
    (folder / "model.shard.00001-of-00003.pth").unlink()
    with pytest.raises(ConfigError, match="holds 2 of 3 files"):
        replace(SPEC, weights=str(folder)).load(Placement())


def test_truncated_file_is_refused(weights: Tensors, tmp_path: Path) -> None:
    path = pickled(weights, tmp_path / "x.pt")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"x\.pt"):
        replace(SPEC, weights=str(path)).load(Placement())


VQ_SHAPE = VQConfig(32, (1, 2), 1, 16, 128, 8)


@pytest.mark.parametrize("layout", ["model", "ema", "state_dict", "bare", "safetensors"])
def test_tokenizer_sizes_are_inferred_from_tensors(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = VQ(VQ_SHAPE)
    state = {**net.state_dict(), "quantize.codebook_used": torch.zeros(65536)}
    if layout == "safetensors":
        path = safe(state, tmp_path / "vq.safetensors")
    elif layout == "ema":
        others = {"model": {key: 0 * x for key, x in state.items()}, "discriminator": {"a": torch.zeros(1)}}
        path = pickled({"ema": state, **others, "args": ARGS, "steps": 4}, tmp_path / "vq.pt")
    else:
        path = pickled(state if layout == "bare" else {layout: state, "args": ARGS}, tmp_path / "vq.pt")
    found = load_image_tokenizer(str(path), 128, 8, 16, Placement(dtype=torch.bfloat16))
    pixels = torch.rand(2, 3, 16, 16)
    assert isinstance(found, VQ) and found.config == VQ_SHAPE
    assert torch.equal(found.encode(pixels), net.encode(pixels))  # in float32, whatever else computes in


def test_training_starts_from_a_published_tokenizer(tmp_path: Path) -> None:
    spec = VqSpec().tiny()
    torch.save({"model": spec.load(Placement()).state_dict()}, tmp_path / "vq.pt")
    started = replace(spec, seed=1, weights=str(tmp_path / "vq.pt")).load(Placement())
    assert torch.equal(started.post_quant_conv.weight, spec.load(Placement()).post_quant_conv.weight)


def test_other_checkpoint_is_no_tokenizer(weights: Tensors, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer of LlamaGen"):
        load_image_tokenizer(str(pickled(weights, tmp_path / "gpt.pt")), 128, 8, 16, Placement())


def test_wrapper_keys_are_tried_in_order() -> None:
    state, other = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    assert loading.unwrap_state_dict({"model": state, "ema": other}, Path("x"))["a"] == 1
    assert loading.unwrap_state_dict({"model": state, "ema": other}, Path("x"), ("ema", "model"))["a"] == 0


def test_refused_run_weights_come_with_advice(tmp_path: Path) -> None:
    net, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 4).state_dict()
    told = "'weight' is [4, 2], expected [3, 2]; set the sizes they were trained with"
    for way in ("", f", or start a recipe with `extends: [{tmp_path}]`, which has its sizes"):
        with pytest.raises(ConfigError) as refused:
            loading.assign_state_dict(net, other, torch.float32, str(tmp_path))
        assert str(refused.value) == f"the weights '{tmp_path}' are of another network: {told}{way}"
        (tmp_path / "config.yaml").touch()
