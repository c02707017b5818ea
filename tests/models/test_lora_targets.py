"""Default LoRA targets of the published generators."""

from __future__ import annotations

import pytest
import torch

from tastemaker.core.lora import Lora
from tastemaker.core.model_spec import ModelSpec
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.flux import FluxSpec
from tastemaker.models.flux2 import Flux2Spec
from tastemaker.models.hunyuanvideo15 import HunyuanVideo15Spec
from tastemaker.models.ltx2 import Ltx2Spec
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.qwen_image_21 import QwenImage21Spec
from tastemaker.models.qwen_image_edit import QwenImageEditSpec
from tastemaker.models.sana import SanaSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.models.wan import WanSpec
from tastemaker.models.wan_i2v import WanI2VSpec
from tastemaker.models.z_image import ZImageSpec

ATTENTION = {"to_q", "to_k", "to_v", "to_out.0"}
JOINT = ATTENTION | {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}


def adapted_layers(spec: ModelSpec, tuning: Lora) -> set[str]:
    """The last parts of the names of layers with adapters."""
    weights = tuning.apply(spec.tiny().load(Placement(torch.device("cpu"), torch.float32)), ())
    layers = {key.partition(".lora_")[0] for key in weights.trainable()}
    return {
        ".".join(layer.rsplit(".", 2)[-2:]) if layer[-1].isdigit() else layer.rsplit(".", 1)[-1] for layer in layers
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FluxSpec(), JOINT | {"proj", "net.2"}),
        (Flux2Spec(), JOINT | {"linear_in", "linear_out", "to_qkv_mlp_proj", "to_out"}),
        (ZImageSpec(), ATTENTION | {f"feed_forward.w{i}" for i in (1, 2, 3)}),
        (Sd3Spec(), JOINT),
        (QwenImageSpec(), JOINT),
        (QwenImageEditSpec(), JOINT),
        (QwenImage21Spec(), ATTENTION),
        (SanaSpec(), ATTENTION),
        (WanI2VSpec(), ATTENTION | {"add_k_proj", "add_v_proj"}),
        (Ltx2Spec(), ATTENTION),
        (HunyuanVideo15Spec(), JOINT),
        (SdxlSpec(), ATTENTION),
        (Sd15Spec(), ATTENTION),
    ],
)
def test_default_targets_are_attention_and_some_feed_forward_layers(spec: ModelSpec, expected: set[str]) -> None:
    assert adapted_layers(spec, Lora(rank=2)) == expected


def test_all_linear_targets_every_linear_layer() -> None:
    assert {"proj_mlp", "proj_out", "linear"} <= adapted_layers(FluxSpec(), Lora(rank=2, target_modules="all-linear"))


def test_target_with_wildcards_matches_full_names() -> None:
    model = WanSpec(boundary_ratio=0.875).tiny().load(Placement(torch.device("cpu"), torch.float32))
    with pytest.raises(ConfigError, match=r"middle\.\*\.to_q.*TM081"):
        Lora(rank=2, target_modules=("middle.*.to_q",)).apply(model, ())
    actual = {
        key.partition(".lora_")[0] for key in Lora(rank=2, target_modules=("low.*.to_q",)).apply(model, ()).trainable()
    }
    assert actual and all(name.startswith("low.") and name.endswith(".to_q") for name in actual)
