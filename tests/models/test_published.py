"""What all published models share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.embedding_store import ShardedEmbeddingStore
from tastemaker.models import pipeline_components
from tastemaker.models.flux import Flux
from tastemaker.models.flux_kontext import FluxKontext
from tastemaker.models.pretrained import WeightsSource
from tastemaker.models.qwen_image import QwenImage
from tastemaker.models.sd3 import Sd3
from tastemaker.models.sd15 import Sd15
from tastemaker.models.sdxl import Sdxl
from tastemaker.models.text_encoders import temporarily_on_device


@pytest.mark.parametrize("spec", [Flux, FluxKontext, QwenImage, Sd3, Sd15, Sdxl])
def test_only_what_is_not_here_is_fetched_and_nothing_else_in_its_place(spec: type[Flux], tmp_path: Path) -> None:
    (usual,) = spec().sources
    assert usual.hub == spec().weights and usual.size != WeightsSource("x").size
    assert spec(weights="somebody/else").sources == (WeightsSource("somebody/else"),)
    assert spec(weights=str(tmp_path)).sources == () and spec().tiny().sources == ()


def test_random_weights_have_the_published_size(tmp_path: Path) -> None:
    ShardedEmbeddingStore(tmp_path, {}).add([""], {"words": torch.zeros(1, 1)})
    meta = Placement(torch.device("meta"), torch.bfloat16, trained=torch.bfloat16)
    for spec, count in (
        (Flux("random"), 11_901_408_320),
        (Sd3("random"), 2_243_171_520),
        (Sd3("random:stabilityai/stable-diffusion-3.5-large"), 8_056_627_520),
    ):
        assert spec.sources == ()
        net = replace(spec, embeddings=tmp_path).load(meta).net
        assert sum(p.numel() for p in net.parameters()) == count
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="the size of 'a/b' is not known"):
        Flux("random:a/b").load(meta)


def test_text_encoders_wait_on_the_host_and_are_unchanged_by_being_lent() -> None:
    net, host = torch.nn.Linear(3, 3), torch.device("cpu")
    before = {key: x.clone() for key, x in net.state_dict().items()}
    with temporarily_on_device(net, host):
        assert net(torch.ones(1, 3)).shape == (1, 3)
    assert all(net.state_dict()[key].equal(x) for key, x in before.items())
    readers: Any = Flux().tiny().load(Placement()).remembered.read
    assert {p.device for p in readers.t5.net.parameters()} == {host}


def test_pictures_decoded_one_by_one_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Flux().tiny().load(Placement())
    x = torch.randn(3, *model.shape, generator=torch.Generator().manual_seed(0))
    together = model.decode(x)
    monkeypatch.setattr(pipeline_components, "DECODE_BATCH_LATENTS", 1)
    torch.testing.assert_close(model.decode(x), together, atol=1e-5, rtol=0)
