"""Loading of LlamaGen's checkpoints in every layout, without running code in them."""

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
    """Random tensors for every key of the network."""
    torch.manual_seed(3)
    return {key: torch.randn_like(x) for key, x in SPEC.load(Placement()).net.state_dict().items()}


def with_sampling_buffers(weights: Tensors) -> Tensors:
    """Add the buffers that a checkpoint saved after sampling contains."""
    caches = {f"layers.0.attention.kv_cache.{x}_cache": torch.zeros(2, 1, 8, 16) for x in "kv"}
    return {**weights, "freqs_cis": torch.zeros(17, 8, 2), **caches}


def to_llama_keys(weights: Tensors, heads: int = 2) -> Tensors:
    """Rename tensors to the keys of transformers' Llama."""
    renamed: Tensors = {}
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for key, x in weights.items():
        parts = key.split(".")
        if parts[0] == "layers":
            start = f"model.layers.{parts[1]}"
            if parts[3] == "wqkv":
                head = x.shape[0] // (heads + 2)
                for part, rows in zip("qkv", x.split([heads * head, head, head]), strict=True):
                    renamed[f"{start}.self_attn.{part}_proj.weight"] = rows.clone()
                continue
            inner = {
                "attention": "self_attn.o_proj",
                "feed_forward": f"mlp.{names.get(parts[3], '')}",
                "attention_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
            }[parts[2]]
            renamed[f"{start}.{inner}.weight"] = x
        elif parts[0] == "output":
            renamed["lm_head.weight"] = x
        else:
            renamed[f"model.{key.replace('tok_embeddings', 'embed_tokens')}"] = x
    return renamed


def write_consolidated(folder: Path, weights: Tensors) -> Path:
    folder.mkdir()
    torch.save(weights, folder / "consolidated.pth")
    (folder / "state_type.txt").write_text("full")
    (folder / "resume_step.txt").write_text("12")
    return folder


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[Any]:
    """A process group with one real rank, because torch shards tensors only in a process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def write_shards(folder: Path, weights: Tensors, world_size: int = 3) -> Path:
    folder.mkdir()
    for rank in range(world_size):
        with fake_process_group(rank, world_size) as group:
            shards = {
                key: _create_chunk_sharded_tensor(x, rank, world_size, world_size, group) for key, x in weights.items()
            }
            torch.save(shards, folder / f"model.shard.{rank:05d}-of-{world_size:05d}.pth")
    (folder / "state_type.txt").write_text("sharded")
    return folder


def save_pickle(data: Any, path: Path) -> Path:
    torch.save(data, path)
    return path


def save_safetensors(weights: Tensors, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file({key: x.contiguous() for key, x in weights.items()}, path)
    return path


LAYOUTS: dict[str, Callable[[Tensors, Path], Path]] = {
    "model": lambda w, p: save_pickle(
        {"model": w, "optimizer": {"state": {}}, "steps": 3, "args": ARGS}, p / "0000003.pt"
    ),
    "module": lambda w, p: save_pickle({"module": w, "args": ARGS}, p / "x.pt"),
    "state_dict": lambda w, p: save_pickle({"state_dict": w, "epoch": 1}, p / "x.ckpt"),
    "bare": lambda w, p: save_pickle(w, p / "x.pth"),
    "leftovers": lambda w, p: save_pickle({"model": with_sampling_buffers(w)}, p / "x.pt"),
    "ddp and compiled": lambda w, p: save_pickle(
        {"model": {f"module._orig_mod.{k}": x for k, x in w.items()}}, p / "x.pt"
    ),
    "consolidated": lambda w, p: write_consolidated(p / "0000012", w),
    "consolidated file": lambda w, p: write_consolidated(p / "0000012", w) / "consolidated.pth",
    "sharded": lambda w, p: write_shards(p / "0000012", w),
    "safetensors": lambda w, p: save_safetensors(w, p / "x.safetensors"),
    "folder of the hub": lambda w, p: save_safetensors(w, p / "hub" / "model.safetensors").parent,
    "llama": lambda w, p: save_safetensors(to_llama_keys(w), p / "x.safetensors"),
    "llama pickled": lambda w, p: save_pickle(to_llama_keys(w), p / "pytorch_model.bin"),
    "half precision": lambda w, p: save_pickle({k: x.bfloat16() for k, x in w.items()}, p / "x.pt"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_layout_loads(layout: str, weights: Tensors, tmp_path: Path) -> None:
    path = LAYOUTS[layout](weights, tmp_path)
    loaded = replace(SPEC, weights=str(path)).load(Placement()).net.state_dict()
    assert {*loaded} == {*weights}
    for key, x in weights.items():
        expected = x.bfloat16().float() if layout == "half precision" else x
        assert torch.equal(loaded[key], expected) and loaded[key].dtype == torch.float32, key


def test_weights_are_cast_to_the_requested_dtype(weights: Tensors, tmp_path: Path) -> None:
    path = save_pickle({"model": weights}, tmp_path / "x.pt")
    model = replace(SPEC, weights=str(path)).load(Placement(dtype=torch.bfloat16))
    assert all(torch.equal(x, weights[key].bfloat16()) for key, x in model.net.state_dict().items())
    assert all(p.requires_grad and not p.is_meta for p in model.net.parameters())
    path.unlink()  # no tensor is still mapped to the file
    model.predict(torch.zeros(1, 16, dtype=torch.long), torch.ones(1), model.embed(["3"]))


def test_weight_files_of_this_package_load(weights: Tensors, tmp_path: Path) -> None:
    weight_files.write_weights(tmp_path / "x.safetensors", weights, {"model": {"type": "llamagen"}}, torch.float32)
    loaded = replace(SPEC, weights=str(tmp_path / "x.safetensors")).load(Placement()).net.state_dict()
    assert all(torch.equal(loaded[key], x) for key, x in weights.items())


class CreateFolderOnLoad:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


class GetattrOnLoad:
    def __reduce__(self) -> Any:
        return getattr, (Path, "cwd")


def test_pickled_code_is_not_run(weights: Tensors, tmp_path: Path) -> None:
    folder = tmp_path / "ran"
    path = save_pickle({"model": weights, "args": CreateFolderOnLoad(folder)}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"x\.pt.*could run code.*TM519"):
        replace(SPEC, weights=str(path)).load(Placement())
    assert not folder.exists()
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps({"model": CreateFolderOnLoad(folder)}, protocol=2))
    with pytest.raises(ConfigError, match=r"bare\.pt.*TM519"):
        replace(SPEC, weights=str(bare)).load(Placement())
    assert not folder.exists()


def test_pickled_getattr_is_inert(weights: Tensors, tmp_path: Path) -> None:
    path = save_pickle({"model": weights, "args": Namespace(folder=GetattrOnLoad())}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=r"could run code.*TM519"):
        replace(SPEC, weights=str(path)).load(Placement())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {**w, "layers.0.attention.wq.weight": torch.zeros(1)},
            r"unexpected 'layers\.0\.attention\.wq\.weight'",
        ),
        (lambda w: {k: x for k, x in w.items() if k != "norm.weight"}, r"missing 'norm\.weight'"),
        (lambda w: {**w, "norm.weight": torch.zeros(3)}, r"'norm\.weight'.*\[3\].*\[32\]"),
        (lambda w: {"model": {"a": 1}}, "'a' .*not a tensor"),
        (lambda w: [1, 2], "contains a list"),
        (lambda w: {"conv.weight": torch.zeros(1)}, r"missing .*unexpected 'conv\.weight'"),
    ],
)
def test_tensors_of_another_network_are_refused(
    change: Callable[[Tensors], Any], message: str, weights: Tensors, tmp_path: Path
) -> None:
    path = save_pickle(change(weights), tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=message):
        replace(SPEC, weights=str(path)).load(Placement())


def test_another_variant_or_conditioning_is_refused(weights: Tensors, tmp_path: Path) -> None:
    path = str(save_pickle(weights, tmp_path / "x.pt"))
    with pytest.raises(ConfigError, match=r"model\.variant=tiny.*TM450"):
        replace(SPEC, variant="B", heads=12, weights=path).load(Placement())
    with pytest.raises(ConfigError, match=r"model\.conditioning=class.*TM451"):
        replace(SPEC, conditioning="caption", weights=path).load(Placement())


@pytest.mark.filterwarnings("ignore")
def test_incomplete_shards_are_refused(weights: Tensors, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "0000012", weights)
    with pytest.raises(ConfigError, match=r"shards of one rank.*TM461"):
        replace(SPEC, weights=str(folder / "model.shard.00000-of-00003.pth")).load(Placement())
    (folder / "model.shard.00001-of-00003.pth").unlink()
    with pytest.raises(ConfigError, match=r"2 of 3.*TM459"):
        replace(SPEC, weights=str(folder)).load(Placement())


def test_truncated_file_is_refused(weights: Tensors, tmp_path: Path) -> None:
    path = save_pickle(weights, tmp_path / "x.pt")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"x\.pt.*TM520"):
        replace(SPEC, weights=str(path)).load(Placement())


VQ_SHAPE = VQConfig(32, (1, 2), 1, 16, 128, 8)


@pytest.mark.parametrize("layout", ["model", "ema", "state_dict", "bare", "safetensors"])
def test_tokenizer_sizes_are_inferred_from_tensors(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = VQ(VQ_SHAPE)
    state = {**net.state_dict(), "quantize.codebook_used": torch.zeros(65536)}
    if layout == "safetensors":
        path = save_safetensors(state, tmp_path / "vq.safetensors")
    elif layout == "ema":
        others = {"model": {key: 0 * x for key, x in state.items()}, "discriminator": {"a": torch.zeros(1)}}
        path = save_pickle({"ema": state, **others, "args": ARGS, "steps": 4}, tmp_path / "vq.pt")
    else:
        path = save_pickle(state if layout == "bare" else {layout: state, "args": ARGS}, tmp_path / "vq.pt")
    tokenizer = load_image_tokenizer(str(path), 128, 8, 16, Placement(dtype=torch.bfloat16))
    pixels = torch.rand(2, 3, 16, 16)
    assert isinstance(tokenizer, VQ) and tokenizer.config == VQ_SHAPE
    assert torch.equal(tokenizer.encode(pixels), net.encode(pixels))  # in float32, whatever the placement's dtype


def test_training_starts_from_a_published_tokenizer(tmp_path: Path) -> None:
    spec = VqSpec().tiny()
    torch.save({"model": spec.load(Placement()).state_dict()}, tmp_path / "vq.pt")
    started = replace(spec, seed=1, weights=str(tmp_path / "vq.pt")).load(Placement())
    assert torch.equal(started.post_quant_conv.weight, spec.load(Placement()).post_quant_conv.weight)


def test_checkpoint_of_another_network_is_refused_as_tokenizer(weights: Tensors, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a tokenizer of LlamaGen.*TM437"):
        load_image_tokenizer(str(save_pickle(weights, tmp_path / "gpt.pt")), 128, 8, 16, Placement())


def test_wrapper_keys_are_tried_in_order() -> None:
    state, other = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    assert loading.unwrap_state_dict({"model": state, "ema": other}, Path("x"))["a"] == 1
    assert loading.unwrap_state_dict({"model": state, "ema": other}, Path("x"), ("ema", "model"))["a"] == 0


def test_refused_weights_of_a_run_suggest_extending_it(tmp_path: Path) -> None:
    net, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 4).state_dict()
    advice = f"`extends: [{tmp_path}]`"
    for is_run in (False, True):
        if is_run:
            (tmp_path / "config.yaml").touch()
        with pytest.raises(ConfigError) as raised:
            loading.assign_state_dict(net, other, torch.float32, str(tmp_path))
        message = str(raised.value)
        assert all(fragment in message for fragment in (f"'{tmp_path}'", "'weight'", "[4, 2]", "[3, 2]"))
        assert (advice in message) == is_run
