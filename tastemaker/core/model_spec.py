"""What a configuration says about a model, and how the model maps to diffusers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

from torch import Tensor

from .cards import WeightsSource
from .policy import Backbone, Process
from .registry import ConfigError
from .types import Metadata, Placement, Prompts

Tensors = dict[str, Tensor]
# What prompt embeddings depend on: the kind of model, its settings, and digests of its encoders.
EncoderFingerprint = Mapping[str, str]


class PromptEncoder(Protocol):
    """Embeds prompts: tensors by name, one row a prompt."""

    max_cached_prompts: int  # prompts remembered

    @property
    def fingerprint(self) -> EncoderFingerprint: ...
    def keys(self, prompts: Prompts, metadata: Sequence[Metadata] = (), *, negative: bool = False) -> list[str]:
        """The texts under which embeddings are kept: the prompts, with what else the encoder reads of them."""

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class PipelineLayout:
    """Names of a model in diffusers, in ComfyUI and in its original checkpoint."""

    pipeline_class: str  # of diffusers
    component: str  # the component of the pipeline that trains
    comfyui_lora_prefix: str  # before the names of adapters in ComfyUI
    to_original: Callable[[Tensors, Mapping[str, Any]], Tensors]  # diffusers' tensors and config to the original names
    comfyui_workflow: str = ""  # kind of ComfyUI workflow, if one is known
    # Original names of layers to ours, if LoRAs are published under the original names.
    original_lora_layers: Callable[[Sequence[str], Any], dict[str, str]] | None = None
    original_lora_alpha: float = 8.0  # of such LoRA files, which do not store it: peft's default
    component_prefixes: tuple[
        tuple[str, str], ...
    ] = ()  # components and their prefixes in the network, if several train
    # What loads adapters: the pipeline, code that adds them to its weights, or this package only.
    lora_loader: Literal["pipeline", "merge", "tastemaker"] = "pipeline"
    # ComfyUI's name of a layer of the authors, if ComfyUI's adapters are on the layers that the authors have.
    comfyui_layer: Callable[[str], str] | None = None
    library: Literal["diffusers", "transformers"] = "diffusers"  # that has `pipeline_class`

    @property
    def components(self) -> dict[str, str]:
        """The components that train, with the prefix of their tensors in the network."""
        return dict(self.component_prefixes) or {self.component: ""}


@dataclass(frozen=True)
class DiffusersConversion:
    """A network converted to diffusers: class, config and renamed tensors."""

    model_class: str  # of diffusers
    component: str  # of the pipeline
    pipeline_class: str  # of diffusers
    config: Mapping[str, Any]
    tensors: Tensors
    model_index: Mapping[str, Any]  # further entries of model_index.json, such as class names
    spec_fields: Mapping[str, Any]  # settings of the spec that loads it again
    differences: str  # a sentence about what diffusers computes differently; empty if nothing
    autoencoder: str | None = None  # by name or path
    scaling_factor: float = 1.0  # of its latents


class ModelSpec(ABC):
    """The settings of a model, a frozen dataclass; `load` builds the backbone."""

    supports_context_parallel: ClassVar[bool] = False  # whether ranks can share tokens (`engine.context_parallel`)
    supports_8bit_decoding: ClassVar[bool] = False  # whether token decoders read 8 bits (`engine.rollout_precision`)

    @property
    @abstractmethod
    def process_type(self) -> type[Process]:
        """The generation process its network was made for."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of one clean sample in model space."""

    @property
    @abstractmethod
    def frames(self) -> int:
        """Frames of a sample; an image has one."""

    @abstractmethod
    def load(self, placement: Placement) -> Backbone: ...
    @abstractmethod
    def tiny(self) -> ModelSpec:
        """Settings of a small random version, for tests."""

    @property
    def weights(self) -> str | None:
        """Checkpoint of the network: a path or hub id; None for random weights."""
        return None

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        """Published weights that these settings need."""
        return ()

    @property
    def releases(self) -> tuple[WeightsSource, ...]:
        """The published weights of the network that settings can name, for `tastemaker list models`."""
        return ()

    @property
    def timestep_shift(self) -> float | None:
        """The timestep shift its weights were trained with at this size and length; None if it is not known."""
        return None

    @property
    def distilled_steps(self) -> int | None:
        """Sampling steps that its weights were distilled to, with their guidance; None if they were not distilled."""
        return None

    @property
    def frame_rate(self) -> float | None:
        """Frames per second of its clips: the setting `fps` of models that have it; None if it is not known."""
        rate: float | None = getattr(self, "fps", None)
        return None if rate is None else float(rate)

    @property
    def needs_initial_image(self) -> bool:
        """Whether every prompt must come with an image, because the model continues one and the settings name none."""
        return False

    @property
    def reads_image(self) -> bool:
        """Whether prompts may come with an image in their metadata, which the model edits or continues."""
        return self.needs_initial_image

    @property
    def layout(self) -> PipelineLayout | None:
        """How the model maps to a published diffusers pipeline; None if there is none."""
        return None

    @property
    def converts_to_diffusers(self) -> bool:
        """Whether `moved` is implemented: the network is not published, but diffusers has one like it."""
        return False

    def to_diffusers(self, tensors: Mapping[str, Tensor]) -> DiffusersConversion:
        """The network under diffusers' names; refused where diffusers computes something else."""
        raise ConfigError(
            f"--layout: diffusers does not have a network like that of {type(self).__name__}; remove --layout [TM086]"
        )

    def with_class_names(self, names: Sequence[str]) -> Self:
        """A copy whose class ids have the names that the data has for them, if the model does not know these."""
        return self

    def to_authors(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The network under the names of its authors' trainer, for `export --layout authors`."""
        raise ConfigError(
            f"--layout: the authors of {type(self).__name__} have no layout of their own; "
            "use --layout diffusers, or remove --layout [TM853]"
        )

    def load_prompt_encoder(self, placement: Placement) -> PromptEncoder:
        """The text encoders alone, to embed prompts beforehand."""
        raise ConfigError(
            "embed: this model does not have a text encoder; give a recipe or model that has one, such as flux [TM087]"
        )
