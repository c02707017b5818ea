"""Adapters of published generators are on the layers their users adapt, if nothing else is asked for."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.lora import Lora
from tastemaker.core.policy import ModelSpec
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.flux import Flux
from tastemaker.models.qwen_image import QwenImage
from tastemaker.models.sd3 import Sd3
from tastemaker.models.sd15 import Sd15
from tastemaker.models.sdxl import Sdxl
from tastemaker.models.wan import Wan

ATTENTION = {"to_q", "to_k", "to_v", "to_out.0"}
JOINT = ATTENTION | {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}


def adapted(spec: ModelSpec, tuning: Lora) -> set[str]:
    """The last names of the layers with adapters."""
    weights = tuning.apply(spec.tiny().load(Placement(torch.device("cpu"), torch.float32)), ())
    layers = {key.partition(".lora_")[0] for key in weights.trainable()}
    return {
        ".".join(layer.rsplit(".", 2)[-2:]) if layer[-1].isdigit() else layer.rsplit(".", 1)[-1] for layer in layers
    }


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (Flux(), JOINT | {"proj", "net.2"}),
        (Sd3(), JOINT),
        (QwenImage(), JOINT),
        (Sdxl(), ATTENTION),
        (Sd15(), ATTENTION),
    ],
)
def test_adapters_are_on_attention_and_in_flux_on_feed_forward_layers_too(spec: ModelSpec, wanted: set[str]) -> None:
    assert adapted(spec, Lora(rank=2)) == wanted


def test_adapters_go_to_every_linear_layer_when_asked() -> None:
    assert {"proj_mlp", "proj_out", "linear"} <= adapted(Flux(), Lora(rank=2, targets="all-linear"))


def test_a_target_with_stars_is_a_whole_name() -> None:
    model = Wan(boundary=0.875).tiny().load(Placement(torch.device("cpu"), torch.float32))
    with pytest.raises(ConfigError, match=r"no layer's name ends with middle\.\*\.to_q"):
        Lora(rank=2, targets=("middle.*.to_q",)).apply(model, ())
    found = {key.partition(".lora_")[0] for key in Lora(rank=2, targets=("low.*.to_q",)).apply(model, ()).trainable()}
    assert found and all(name.startswith("low.") and name.endswith(".to_q") for name in found)
