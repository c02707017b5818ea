"""Texts of the files that `tastemaker new model` writes."""

from __future__ import annotations

from string import Template

MODEL = Template('''"""$class_name, from the $pipeline of diffusers. TODO: what it is, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

${uses_torch}from torch import Tensor

from tastemaker import Condition, Placement
from tastemaker.core.model_spec import PipelineLayout
from tastemaker.models.checkpoint_keys import reject_unknown_names
from tastemaker.models.component_configs import ComponentConfigs
from tastemaker.models.image_backbone import ImageBackbone
${imports}from tastemaker.models.pipeline_components import ImageSpec, PipelineComponents, PublishedModel
from tastemaker.models.pretrained import WeightsSource
from tastemaker.models.text_encoders import TextEncoders

# TODO: the hub id, and the size and license on its page.
SOURCE = WeightsSource("owner/name", size="size on its page", license="license on its page")
CONFIGS: ComponentConfigs = {  # TODO: as in the config.json files; these are diffusers' defaults
    "$component": $settings,
}
TINY_CONFIGS: ComponentConfigs = {
    "$component": $tiny,
    "vae": $tiny_vae,  # TODO: check
}
PUBLISHED = PublishedModel("$name", (SOURCE,), TINY_CONFIGS, {SOURCE.hub: CONFIGS})


class ${class_name}Backbone(ImageBackbone):
    """Denoises latents [1, C, h, w]."""

    def __init__(self, spec: ${class_name}Spec, placement: Placement) -> None:
        from diffusers import $network, $vae

        components = spec.components(placement)
        self.net: Any = components.load_trainable("$component", $network)
        self.autoencoder = components.load_vae("vae", $vae$vae_options)
        self.prompt_encoder = spec.cached_prompt_encoder(components)
        self.shape, self.pixels = spec.shape, (1, 3, spec.height, spec.width)

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Return the velocity noise - clean of latents [B, 1, C, h, w] at t [B], 1 for noise and 0 for clean."""
        dtype = next(self.net.parameters()).dtype
        output = self.net(
$call
            return_dict=False,
        )[0]
        velocity: Tensor = $output
        return velocity


@dataclass(frozen=True)
class ${class_name}Spec(ImageSpec):
    """TODO: one line for `tastemaker list models`."""

    weights: str = SOURCE.hub  # hub id or folder in diffusers' layout
    height: int = 1024
    width: int = 1024
    max_text_tokens: int = 512
    embeddings: Path | None = None  # folder written by `tastemaker embed`
    seed: int = 0  # of random weights
    latent_channels = 16
    published: ClassVar[PublishedModel] = PUBLISHED
    backbone_class = ${class_name}Backbone
    layout: ClassVar[PipelineLayout] = PipelineLayout("$pipeline", "$component", "", reject_unknown_names)

    def load_text_encoders(self, components: PipelineComponents) -> TextEncoders:
        raise NotImplementedError("TODO: write load_text_encoders, as tastemaker/models/z_image.py does")
''')
RECIPE = Template("""# Flow-GRPO on $class_name with LoRA. TODO: the settings of its authors.
# tastemaker train $name.yaml
extends: [base, training/generators-lora, data/everyday-prompts]
model: {type: "$name:${class_name}Spec"}
# TODO: the shift, steps and guidance of the pipeline and its scheduler_config.json.
process:
  type: gaussian
  path: {type: rectified_flow, shift: 3.0}
  dynamics: {type: flow_sde, noise_level: 0.7}
  num_steps: 10
objective: {type: grpo, group_size: 16, clip_range: 1e-4}
steps: 1000
""")
TEST = Template('''"""$class_name compared with diffusers' $pipeline, with small random weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest
import torch
from $name import TINY_CONFIGS, ${class_name}Spec

from tastemaker import Condition, Placement
from tastemaker.core.randomness import Randomness
from tastemaker.models.latent_packing import pack_latents  # noqa: F401
from tastemaker.models.text_encoders import TextEncoders
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import RectifiedFlow

SHIFT, STEPS = 3.0, 3


class NoEncoders(TextEncoders):
    """The parity of samples is tested with random embeddings."""

    text_encoders = ()

    def __call__(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": torch.zeros(len(prompts), 16, TINY_CONFIGS["$component"]["$text_width"])}


def make_pipeline(net: Any, vae: Any) -> Any:
    """Build the pipeline around our networks; it needs no text encoder for embedded prompts."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    given = {"$component": net, "vae": vae, "scheduler": scheduler}
    names = [name for name in inspect.signature(diffusers.$pipeline.__init__).parameters if name != "self"]
    return diffusers.$pipeline(**{name: given.get(name) for name in names})


@contextmanager
def todo(what: str) -> Iterator[None]:
    """Turn an error into a note about what is left to do."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, NotImplementedError) as error:
        pytest.fail(f"TODO: {what}. {type(error).__name__}: {error}", pytrace=False)


@torch.no_grad()
def test_samples_equal_the_diffusers_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(${class_name}Spec, "load_text_encoders", lambda spec, components: NoEncoders())
    with todo("make TINY_CONFIGS fit the classes of the pipeline"):
        model = ${class_name}Spec().tiny().load(Placement())
        pipeline = make_pipeline(model.net, model.autoencoder.net)
    generator = torch.Generator().manual_seed(0)
    for p in model.net.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=generator))
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(2, *model.shape, generator=generator)
    embeds = torch.randn(2, 16, TINY_CONFIGS["$component"]["$text_width"], generator=generator)
    options = {"height": 32, "width": 32, "num_inference_steps": STEPS, "guidance_scale": $unguided_scale}
    with todo("give the pipeline all that it needs beside the embeddings, here and in the condition below"):
        expected = pipeline(prompt_embeds=$embeds, latents=$start, output_type="latent", **options).images
    cond, rows = Condition(("", ""), {"prompt_embeds": embeds}), Randomness(0, 0, torch.arange(2))
    with todo("make ${class_name}Backbone.predict call the network as $pipeline does"):
        rollout = GaussianProcess(RectifiedFlow(SHIFT), num_steps=STEPS).start(model, cond, rows)
        rollout.set_start(noise)
        sampled = rollout.finish().final
        difference = ($final - expected).abs().max().item()
    assert difference <= 5e-5, (
        "TODO: compare predict with the __call__ of $pipeline: the scale and direction of the time, the sign of the "
        "output, further inputs; and the shift and steps of its scheduler"
    )


def test_text_encoders_are_loaded() -> None:
    with todo("load the text encoders"):
        model = ${class_name}Spec().tiny().load(Placement())
    assert model.embed(["a red cat", ""]).tensors["prompt_embeds"].shape[0] == 2
''')
