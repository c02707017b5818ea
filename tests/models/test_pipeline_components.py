"""Loading the components of published pipelines: sources, random weights, text encoders, VAEs and empty networks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import T5EncoderModel

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.models import image_backbone, pipeline_components
from tastemaker.models.flux import FluxSpec
from tastemaker.models.flux_kontext import FluxKontextSpec
from tastemaker.models.pipeline_components import PipelineComponents, fill_random, load_tensors, parameters_on_meta
from tastemaker.models.pretrained import WeightsSource
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.qwen_image_edit import QwenImageEditSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.models.sequential_offload import temporarily_on_device


@pytest.mark.parametrize(
    "spec", [FluxSpec, FluxKontextSpec, QwenImageSpec, QwenImageEditSpec, Sd3Spec, Sd15Spec, SdxlSpec]
)
def test_sources_are_what_must_be_downloaded(spec: type[FluxSpec], tmp_path: Path) -> None:
    (default,) = spec().sources
    assert default.hub == spec().weights and default.size != WeightsSource("x").size
    assert spec(weights="somebody/else").sources == (WeightsSource("somebody/else"),)
    assert spec(weights=str(tmp_path)).sources == () and spec().tiny().sources == ()


def test_random_weights_have_the_published_size(tmp_path: Path) -> None:
    ShardedEmbeddingStore(tmp_path, {}).add([""], {"prompt_embeds": torch.zeros(1, 1)})
    meta = Placement(torch.device("meta"), torch.bfloat16, trainable_dtype=torch.bfloat16)
    for spec, count in (
        (FluxSpec("random"), 11_901_408_320),
        (Sd3Spec("random"), 2_243_171_520),
        (Sd3Spec("random:stabilityai/stable-diffusion-3.5-large"), 8_056_627_520),
    ):
        assert spec.sources == ()
        net = replace(spec, embeddings=tmp_path).load(meta).net
        assert sum(p.numel() for p in net.parameters()) == count
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r"'a/b'.*TM498"):
        FluxSpec("random:a/b").load(meta)


def test_random_text_encoders_are_drawn_on_the_gpu_and_kept_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes minutes for the 5 billion weights of T5-XXL."""
    devices = []

    def fill_on_cpu(net: nn.Module, source: torch.device, device: torch.device) -> nn.Module:
        assert all(p.is_meta for p in net.parameters())
        devices.append((source.type, device.type))
        return fill_random(net, device, device)

    monkeypatch.setattr(pipeline_components, "fill_random", fill_on_cpu)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    placement = Placement(torch.device("cuda"), torch.bfloat16)
    published = {"a/b": {"text_encoder": sizes}}
    components = PipelineComponents("random:a/b", WeightsSource("a/b"), {}, placement, 0, published)
    net = components.load_encoder("text_encoder", T5EncoderModel)
    assert devices == [("cuda", "cpu")]
    assert {(p.device.type, p.dtype) for p in net.parameters()} == {("cpu", torch.bfloat16)}
    assert net(torch.tensor([[1, 2, 3]])).last_hidden_state.isfinite().all()


def test_temporarily_on_device_restores_the_cpu_tensors() -> None:
    net, host = torch.nn.Linear(3, 3), torch.device("cpu")
    before = {key: x.clone() for key, x in net.state_dict().items()}
    with temporarily_on_device(net, host):
        assert net(torch.ones(1, 3)).shape == (1, 3)
    assert all(net.state_dict()[key].equal(x) for key, x in before.items())
    encoders: Any = FluxSpec().tiny().load(Placement()).prompt_encoder.encoders
    assert {p.device for p in encoders.t5.net.parameters()} == {host}


def test_decoding_in_small_batches_equals_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FluxSpec().tiny().load(Placement())
    x = torch.randn(3, *model.shape, generator=torch.Generator().manual_seed(0))
    expected = model.decode(x)
    monkeypatch.setattr(image_backbone, "DECODE_BATCH_LATENTS", 1)
    torch.testing.assert_close(model.decode(x), expected, atol=1e-5, rtol=0)


class RotaryNetwork(nn.Module):
    """A network like diffusers' transformers: weights, a non-persistent buffer, and a table that is no buffer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("frequencies", torch.arange(width).float() / width, persistent=False)
        self.angles = torch.arange(width).float().sin()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.frequencies + self.angles)  # type: ignore[operator]
        return x


def test_parameters_on_meta_keeps_buffers_and_gives_the_same_outputs() -> None:
    plain = RotaryNetwork(8, 2)
    with parameters_on_meta():
        empty = RotaryNetwork(8, 2)
    assert all(p.is_meta and p.requires_grad for p in empty.parameters())
    assert empty.frequencies.equal(plain.frequencies) and empty.angles.equal(plain.angles)
    load_tensors(empty, plain.state_dict(), "network")
    x = torch.randn(3, 8)
    assert empty(x).equal(plain(x))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(empty.parameters(), plain.parameters(), strict=True))


def test_parameters_on_meta_ends_with_the_block() -> None:
    with pytest.raises(RuntimeError, match="stop"), parameters_on_meta():
        raise RuntimeError("stop")
    assert not any(p.is_meta for p in RotaryNetwork(2, 1).parameters())


class LiveBytes(TorchDispatchMode):
    """Peak memory of the tensors that operations within the block return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out.is_meta:
            key = out.untyped_storage()._cdata
            self.sizes[key] = out.untyped_storage().nbytes()
            weakref.finalize(out, self.sizes.pop, key, None)
            self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def test_parameters_on_meta_needs_memory_for_one_tensor_at_a_time() -> None:
    layer, layers = 4 * 64 * 64, 16
    with LiveBytes() as plain:
        RotaryNetwork(64, layers)
    with LiveBytes() as empty, parameters_on_meta():
        RotaryNetwork(64, layers)
    assert plain.peak >= layers * layer and empty.peak < 2 * layer
