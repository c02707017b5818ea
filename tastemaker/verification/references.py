"""How diffusers' own pipelines sample what our models sample: one short entry per model, the rest is derived.

Derived from the spec's `layout` are the pipeline's class and the component that trains; from the pipeline's signature
the classes of all components and the arguments of its call; from the scheduler the timestep shift of a size.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from ..config.schema import RunConfig
from ..core.model_spec import ModelSpec, PipelineLayout
from ..core.policy import Backbone, Guidance
from ..core.randomness import Randomness
from ..core.types import Placement
from ..models.pipeline_components import PublishedSpec, dynamic_shift
from ..models.pretrained import find_weights, silence_libraries
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from .tiny_pipelines import build_tiny_pipeline, byte_chat_tokenizer
from .whole_pipelines import (
    LTX2_CALL,
    LTX_SCHEDULER,
    QWEN_SCHEDULER,
    clip_image_processor,
    join_ltx2_latents,
    load_picture_processor,
    make_hunyuanvideo15_pipeline,
    make_ltx2_audio_vae,
    make_ltx2_vocoder,
    make_qwen_image_21_pipeline,
    make_qwen_image_edit_pipeline,
    make_wan_i2v_pipeline,
    mark_image_tokens,
    qwen_edit_constants,
    split_ltx2_noise,
)

PROMPTS = ("a red cat on a mat", "two blue dogs")
FLOW, DDIM, EULER = "FlowMatchEulerDiscreteScheduler", "DDIMScheduler", "EulerDiscreteScheduler"
STABLE_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SD_DDIM = {"_class_name": DDIM, **STABLE_DIFFUSION, "steps_offset": 1, "clip_sample": False, "set_alpha_to_one": False}
FLUX_SCHEDULER = {"_class_name": FLOW, "use_dynamic_shifting": True, "shift": 3.0}


def twice_shifted(shift: float) -> Callable[[Any], Mapping[str, Any]]:
    """The path of diffusers' flow scheduler with its own timesteps: its last step begins at a shifted 0.001."""
    return lambda spec: {"sigma_min": shift * 0.001 / (1 + (shift - 1) * 0.001)}


@dataclass(frozen=True)
class PipelineReference:
    """What cannot be derived about the pipeline of a model.

    `scheduler` is the published scheduler_config.json, for pipelines of random weights. If the published one is of
    another class, it is converted to this one, whose steps are ours.
    """

    scheduler: Mapping[str, Any] = field(default_factory=lambda: {"_class_name": FLOW})
    path: Callable[[Any], Mapping[str, Any]] = lambda spec: {}  # settings of our path that the scheduler implies
    call: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the pipeline's call
    tiny_call: Mapping[str, Any] = field(default_factory=dict)  # those of a pipeline of random weights only
    guidance_offset: float = 0.0  # the pipeline's scale of classifier-free guidance minus ours
    is_distilled: bool = True  # False: the spec's guidance_scale is no input of this network
    settings: Callable[[Any], Mapping[str, Any]] = lambda spec: {}  # of the tiny pipeline, beside components
    latents: Callable[[Tensor], Tensor] | None = None  # ours [B, *shape] in the pipeline's layout; None: by its rules
    # Our noise as several arguments, and the pipeline's output as our latents, where it has more than `latents`.
    inputs: Callable[[Any, Any, Tensor], Mapping[str, Tensor]] | None = None  # of the pipeline and the spec
    outputs: Callable[[Any, Any], Tensor] | None = None  # of the pipeline
    shift_tokens: Callable[[Any], int] | None = None  # on which the timestep shift depends; None: all of a sample
    pixels: Callable[[Tensor], Tensor] = lambda x: x  # those of the pipeline [B, ...] as ours
    returns_latents: bool = True  # False: in a layout of its own, so that only pixels are compared
    prompts: Sequence[str] = PROMPTS
    image_sizes: Sequence[tuple[float, float]] = ((1, 1),)  # of the images of a prompt: parts of height and width
    constants: Callable[[Any], Mapping[str, Any]] = lambda spec: {}  # of the pipeline's module, which the spec sets
    prepare: Callable[[Any], None] = lambda pipeline: None  # change what differs from the authors' code
    load: Callable[[Path], Mapping[str, Any]] = lambda folder: {}  # published components that it cannot load by itself
    spec: Mapping[str, Any] = field(default_factory=dict)  # settings of the tiny spec
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings of tiny components
    components: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # tiny components that are not derived
    classes: Mapping[str, str] = field(default_factory=dict)  # of transformers, where a signature names a base class
    make: Callable[[Any], Any] | None = None  # the whole tiny pipeline of a spec, if too little of it is derived


def over_white(rgba: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] of images with an alpha channel [B, 4, H, W], as they are seen over white."""
    return rgba[:, :3] * rgba[:, 3:] + 1 - rgba[:, 3:]


def wan_from_image(shift: float) -> PipelineReference:
    """The entry of Wan that continues an image, with a timestep shift."""
    return PipelineReference(
        {"_class_name": FLOW, "shift": shift},
        path=twice_shifted(shift),
        spec={"max_text_tokens": 512},
        make=partial(make_wan_i2v_pipeline, shift=shift),
    )


QWEN3_READER: dict[str, Any] = {
    "components": {"tokenizer": byte_chat_tokenizer},
    "classes": {"text_encoder": "Qwen3Model"},
}
Z_IMAGE = PipelineReference(
    {"_class_name": FLOW, "shift": 6.0},
    guidance_offset=-1.0,
    call={"negative_prompt": ["", ""]},
    spec={"max_text_tokens": 40},
    **QWEN3_READER,
)
KLEIN = PipelineReference(
    FLUX_SCHEDULER,
    path=lambda spec: {"flux2_tokens": spec.height * spec.width // 256},
    is_distilled=False,
    tiny_call={"text_encoder_out_layers": (1, 2, 3)},  # quarters of the layers, as published
    returns_latents=False,
    spec={"height": 64, "width": 64, "max_text_tokens": 48},
    **QWEN3_READER,
)


# By the name of a part in recipes/base/models, or else by the model's type.
REFERENCES: dict[str, PipelineReference] = {
    "flux": PipelineReference(FLUX_SCHEDULER),
    "flux-schnell": PipelineReference(
        {"_class_name": FLOW, "shift": 1.0}, configs={"transformer": {"guidance_embeds": False}}
    ),
    "flux2-klein": KLEIN,
    "flux2-klein-base": KLEIN,
    "flux_kontext": PipelineReference(FLUX_SCHEDULER, call={"_auto_resize": False}),
    "sana": PipelineReference(
        {"_class_name": FLOW, "shift": 3.0},
        path=twice_shifted(3.0),
        call={"use_resolution_binning": False},
        spec={"max_text_tokens": 40},
        classes={"text_encoder": "Gemma2Model"},
    ),
    "sd3": PipelineReference({"_class_name": FLOW, "shift": 3.0}, path=twice_shifted(3.0)),
    "sd15": PipelineReference(SD_DDIM),
    "sdxl": PipelineReference(
        {"_class_name": EULER, **STABLE_DIFFUSION, "steps_offset": 1, "timestep_spacing": "leading"}
    ),
    "qwen_image": PipelineReference(
        {"_class_name": FLOW, **QWEN_SCHEDULER},
        spec={"max_text_tokens": 180},  # the published template alone has more bytes than tiny specs read
    ),
    "qwen_image_edit": PipelineReference(
        {"_class_name": FLOW, **QWEN_SCHEDULER},
        image_sizes=((1, 1), (1, 0.5)),
        spec={"height": 64, "width": 64, "max_text_tokens": 600, "source_pixels": 64 * 64, "condition_pixels": 64 * 64},
        constants=qwen_edit_constants,
        prepare=mark_image_tokens,
        load=load_picture_processor,
        make=make_qwen_image_edit_pipeline,
    ),
    "wan": PipelineReference({"_class_name": FLOW, "shift": 3.0}, path=twice_shifted(3.0)),
    "z-image": Z_IMAGE,
    "z-image-turbo": replace(Z_IMAGE, scheduler={"_class_name": FLOW, "shift": 3.0}, call={}),
    "wan22": PipelineReference({"_class_name": FLOW, "shift": 12.0}, path=twice_shifted(12.0)),
    "cogvideox": PipelineReference(
        {
            "_class_name": "CogVideoXDDIMScheduler",
            "snr_shift_scale": 3.0,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
        },
        latents=lambda x: x,
    ),
    "wan-i2v": wan_from_image(3.0),
    "wan22-i2v": wan_from_image(5.0),
    "wan22-ti2v": wan_from_image(5.0),
    "qwen_image_21": PipelineReference(
        prompts=PROMPTS[:1],  # the pipeline's padding of shorter prompts moves the image
        latents=lambda x: x[:, 0].flatten(2).transpose(1, 2),
        pixels=over_white,
        spec={"max_text_tokens": 200},
        make=make_qwen_image_21_pipeline,
    ),
    "hunyuanvideo15": PipelineReference(
        {"_class_name": FLOW, "shift": 5.0},
        prompts=PROMPTS[:1],  # diffusers' VAE decodes one video at a time
        spec={"max_text_tokens": 64},
        make=make_hunyuanvideo15_pipeline,
    ),
    "ltx": PipelineReference({"_class_name": FLOW, **LTX_SCHEDULER}),
    "ltx2": PipelineReference(
        {"_class_name": FLOW, **LTX_SCHEDULER},
        call=LTX2_CALL,
        latents=lambda x: x,
        inputs=split_ltx2_noise,
        outputs=join_ltx2_latents,
        shift_tokens=lambda spec: spec.video_tokens,
        components={"audio_vae": make_ltx2_audio_vae, "vocoder": make_ltx2_vocoder},
    ),
    "hunyuanvideo": PipelineReference({"_class_name": FLOW, "shift": 7.0}, spec={"max_text_tokens": 512}),
    "mochi": PipelineReference({"_class_name": FLOW, "invert_sigmas": True}),
    "modelscope": PipelineReference(SD_DDIM),
    "svd": PipelineReference(
        {
            "_class_name": EULER,
            **STABLE_DIFFUSION,
            "prediction_type": "v_prediction",
            "interpolation_type": "linear",
            "use_karras_sigmas": True,
            "sigma_min": 0.002,
            "sigma_max": 700.0,
            "timestep_spacing": "leading",
            "timestep_type": "continuous",
            "steps_offset": 1,
        },
        prompts=("",),
        latents=lambda x: x,
        components={"feature_extractor": clip_image_processor},
    ),
}
# Models whose published sampler or network no pipeline of diffusers or transformers has, with the reason.
UNCOMPARED: dict[str, str] = {
    "dit": "a network of this package",
    "flux2": "the tests compare dev with diffusers' pipeline; its text encoder has no tiny configuration here",
    "gpt": "a network of this package",
    "janus": "transformers has no pipeline of it; the tests compare tokens, logits and pixels with its model",
    "latent_dit": "its network is compared with diffusers' DiT in the tests",
    "llamagen": "no library has its sampler; the tests compare tokens with recordings of the authors' code",
    "maskgit": "a network of this package",
    "opensora": "no library has its pipeline; the tests compare networks with recordings of the authors' code",
    "sana_sprint": "its sampler adds noise of its own; the tests compare samples with diffusers' pipeline",
    "showo": "no library has its sampler; the tests compare logits with recordings of the authors' code",
    "toy_causal": "a network of this package",
    "toy_flow": "a network of this package",
    "toy_masked": "a network of this package",
    "videocrafter": "diffusers has no input for its fps; the tests compare steps with recordings of the authors' code",
}


def find_reference(part: str, kind: str) -> PipelineReference:
    """The entry of a part such as wan22, else that of its model's type, else one that is derived completely."""
    return REFERENCES.get(part) or REFERENCES.get(kind) or PipelineReference()


def is_listed(part: str, kind: str) -> bool:
    """Whether a model has an entry, so that a failing comparison is a failure of the model."""
    return part in REFERENCES or kind in REFERENCES


def why_not_compared(kind: str, spec: ModelSpec) -> str:
    """Why a model's samples are compared with no pipeline; empty if they are."""
    if kind in UNCOMPARED:
        return UNCOMPARED[kind]
    layout = spec.layout
    return "" if layout is not None and layout.pipeline_class else "its spec has no layout that names a pipeline"


def load_pipeline_class(layout: PipelineLayout) -> Any:
    """The pipeline's class in diffusers."""
    import diffusers

    with silence_libraries():  # some pipelines would use an image processor that needs torchvision
        return getattr(diffusers, layout.pipeline_class)


@dataclass(frozen=True)
class Comparison:
    """A model, its process and guidance, and the pipeline that should sample the same."""

    reference: PipelineReference
    spec: PublishedSpec
    process: GaussianProcess
    guidance: Guidance | None
    pipeline: Any  # on the CPU until our model has left the device
    placement: Placement
    tiny: bool

    @property
    def takes_image(self) -> bool:
        """Whether prompts come with an image."""
        return self.spec.reads_image

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The arguments of the pipeline's call."""
        return inspect.signature(type(self.pipeline).__call__).parameters

    @property
    def prompts(self) -> list[str]:
        return list(self.reference.prompts)[: 1 if self.takes_image else None]

    def images(self) -> list[Image.Image]:
        """The random images of the prompt, of the model's size or of parts of it."""
        settings: Any = self.spec
        generator = torch.Generator().manual_seed(1)
        sizes = [(int(settings.height * high), int(settings.width * wide)) for high, wide in self.reference.image_sizes]
        arrays = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in sizes]
        return [Image.fromarray(array.numpy()) for array in arrays]

    def metadata(self) -> list[dict[str, Any]]:
        """The images as metadata of prompts: pixels [1, 3, H, W] in [0, 1], or several of those."""
        if not self.takes_image:
            return [{} for _ in self.prompts]
        pixels = []
        for image in self.images():
            array = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            pixels.append(array.view(1, image.height, image.width, 3).permute(0, 3, 1, 2).float() / 255)
        return [{"image": pixels if len(pixels) > 1 else pixels[0]}]

    def latents(self, x: Tensor) -> Tensor:
        """Our latents [B, *shape] in the layout of the pipeline's argument `latents`."""
        if self.reference.latents is not None:
            return self.reference.latents(x)
        pack = getattr(type(self.pipeline), "_pack_latents", None)
        arguments = len(inspect.signature(pack).parameters) if pack else 0
        if self.spec.frames > 1:  # [B, f, C, h, w]
            return pack(x.transpose(1, 2)) if pack and arguments == 3 else x.transpose(1, 2)
        if x.dim() == 4:  # tokens [B, h, w, C]
            return x.flatten(1, 2)
        return pack(x[:, 0], len(x), *x.shape[2:]) if pack and arguments == 5 else x[:, 0]

    def call_options(self) -> dict[str, Any]:
        """Arguments of the pipeline's call: those of these candidates that it has, and those of the entry."""
        settings: Any = self.spec
        names = {each.name for each in fields(settings)}
        scale = 1.0 if self.guidance is None else self.guidance.scale
        distilled = settings.guidance_scale if "guidance_scale" in names and self.reference.is_distilled else None
        candidates: dict[str, Any] = {
            "prompt": self.prompts,
            "height": settings.height,
            "width": settings.width,
            "num_frames": self.spec.frames,
            "num_inference_steps": self.process.num_steps,
            "guidance_scale": distilled if isinstance(distilled, float) else scale + self.reference.guidance_offset,
            "generator": torch.Generator().manual_seed(settings.seed),  # of noise on an image
        }
        if isinstance(distilled, tuple):
            candidates |= {"min_guidance_scale": distilled[0], "max_guidance_scale": distilled[1]}
        if "true_cfg_scale" in self.parameters and self.guidance is not None:
            candidates |= {
                "true_cfg_scale": scale,
                "negative_prompt": [self.guidance.negative_prompt] * len(self.prompts),
            }
        if "max_text_tokens" in names:
            candidates["max_sequence_length"] = settings.max_text_tokens
        if "fps" in names:
            candidates["frame_rate"] = settings.fps
        if self.takes_image:
            images = self.images()
            candidates["image"] = images if len(images) > 1 else images[0]
            candidates["max_area"] = settings.height * settings.width
        chosen = {name: value for name, value in candidates.items() if name in self.parameters}
        further = {**self.reference.call, **(self.reference.tiny_call if self.tiny else {})}
        return {**chosen, **copy.deepcopy(further)}  # some pipelines change lists of prompts

    @torch.no_grad()
    def sample_ours(self) -> tuple[Tensor, Tensor, Tensor]:
        """Starting noise, latents and pixels of our sampler."""
        model: Backbone = self.spec.load(self.placement)
        if self.guidance is not None and self.guidance.scale != 1:
            model = self.process.wrap_guidance(model, self.guidance)
        rows = torch.arange(len(self.prompts), device=self.placement.device)
        rollout = self.process.start(model, model.embed(self.prompts, self.metadata()), Randomness(0, 0, rows))
        rollout.set_start(rollout.start.to(self.placement.dtype).float())  # the pipeline begins with rounded noise
        final = rollout.finish().final
        return rollout.start, final, model.decode(final).float()

    @torch.no_grad()
    def sample_reference(self, start: Tensor) -> tuple[Tensor | None, Tensor]:
        """Latents, if the pipeline returns those of its argument's layout, and pixels from the same noise."""
        name = "images" if self.spec.frames == 1 else "frames"

        def sample(kind: str) -> Any:
            if self.reference.inputs is None:
                noise: Mapping[str, Tensor] = {"latents": self.latents(start).to(self.placement.dtype, copy=True)}
            else:
                noise = self.reference.inputs(self.pipeline, self.spec, start.clone())
            return self.pipeline(**noise, output_type=kind, **self.call_options())

        def read_latents(output: Any) -> Tensor:
            outputs = self.reference.outputs
            latents: Tensor = getattr(output, name) if outputs is None else outputs(self.pipeline, output)
            return latents.float()

        gc.collect()
        with silence_libraries(), self.module_constants():
            self.pipeline.to(self.placement.device)
            latents = read_latents(sample("latent")) if self.reference.returns_latents else None
            return latents, self.reference.pixels(getattr(sample("pt"), name).float())

    @contextmanager
    def module_constants(self) -> Iterator[None]:
        """The constants of the pipeline's module as the spec says, during the block."""
        values = vars(sys.modules[type(self.pipeline).__module__])
        changed = self.reference.constants(self.spec)
        published = {name: values[name] for name in changed}
        values.update(changed)
        try:
            yield
        finally:
            values.update(published)


def prepare_comparison(
    config: RunConfig,
    reference: PipelineReference,
    folder: Path,
    *,
    tiny: bool,
    sampling_steps: int,
    placement: Placement,
    derive_shift: bool = True,
) -> Comparison:
    """Load the pipeline of published weights, or build one of random weights in `folder`.

    With `derive_shift` our timestep shift is the pipeline's, so that a configuration with another one is not a failure.
    """
    import diffusers

    spec = cast(PublishedSpec, config.model)
    layout = spec.layout
    assert layout is not None and isinstance(config.process, GaussianProcess)
    pipeline_class = load_pipeline_class(layout)
    if tiny:
        small: Any = replace(cast(Any, spec.tiny()), **reference.spec)
        pipeline = build_pipeline_of(small, pipeline_class, reference)
        with silence_libraries():
            pipeline.save_pretrained(folder)
        spec = replace(small, weights=str(folder))
    else:
        weights = find_weights(spec.weights, spec.published.source(spec.weights))
        with silence_libraries():
            pipeline = pipeline_class.from_pretrained(
                weights,
                dtype=placement.dtype,
                local_files_only=True,
                trust_remote_code=False,
                **reference.load(Path(weights)),
            )
        pipeline.set_progress_bar_config(disable=True)
        if type(pipeline.scheduler).__name__ != reference.scheduler["_class_name"]:
            options = dict(reference.scheduler)
            scheduler_class = getattr(diffusers, options.pop("_class_name"))
            pipeline.scheduler = scheduler_class.from_config(pipeline.scheduler.config, **options)
    reference.prepare(pipeline)
    process = config.process.with_num_steps(sampling_steps).deterministic()
    if derive_shift:
        tokens = reference.shift_tokens(spec) if reference.shift_tokens else None
        process = with_dynamic_shift(process, pipeline, spec, layout.component, tokens)
    path: Any = process.path
    process = replace(process, path=replace(path, **reference.path(spec)))
    return Comparison(reference, spec, process, config.guidance, pipeline, placement, tiny)


def build_pipeline_of(spec: Any, pipeline_class: Any, reference: PipelineReference) -> Any:
    """A pipeline of random weights for a tiny spec."""
    if reference.make is not None:
        return reference.make(spec)
    tiny_configs, trained = spec.components(Placement()).configs, spec.layout.components
    configs = {
        name: {**config, **reference.configs.get(name, {})}
        for name, config in tiny_configs.items()
        if name in trained or not name.startswith(("transformer", "unet"))
    }
    names = {each.name for each in fields(spec)}
    settings = {name: getattr(spec, name) for name in inspect.signature(pipeline_class).parameters if name in names}
    if "requires_safety_checker" in inspect.signature(pipeline_class).parameters:
        settings["requires_safety_checker"] = False
    settings = {name: value for name, value in settings.items() if name not in configs} | dict(reference.settings(spec))
    return build_tiny_pipeline(
        pipeline_class, configs, reference.scheduler, settings, reference.components, reference.classes
    )


def with_dynamic_shift(
    process: GaussianProcess, pipeline: Any, spec: ModelSpec, component: str, tokens: int | None = None
) -> GaussianProcess:
    """The process with the timestep shift that the pipeline's scheduler computes from the number of image tokens."""
    config, path = pipeline.scheduler.config, process.path
    if not isinstance(path, RectifiedFlow) or not config.get("use_dynamic_shifting"):
        return process
    tokens = tokens or math.prod(spec.shape) // getattr(pipeline, component).config.in_channels
    keys = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
    return replace(process, path=replace(path, shift=dynamic_shift(tokens, *(config[key] for key in keys))))
