"""Load the components of a published diffusers pipeline: networks, text encoders, tokenizers and VAE."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..core.model_spec import ModelSpec, Tensors
from ..core.policy import Backbone, Process
from ..core.registry import ConfigError
from ..core.safe_files import read_json_object
from ..core.types import Placement
from ..data.embedding_store import fingerprint_file
from ..processes.gaussian import GaussianProcess
from .checkpoint_keys import TensorShapes
from .component_configs import ComponentConfigs
from .deferred_loading import defer_weights, open_folder
from .image_backbone import DOWNSAMPLE_FACTOR, FrozenVae
from .loading import trainable_dtype
from .nets.split_group_norm import use_split_group_norms
from .nets.wide_head_attention import use_wide_head_attention
from .pretrained import (
    PIPELINE_INDEX,
    WeightsSource,
    detect_weight_format,
    find_weights,
    read_single_file,
    silence_libraries,
)
from .sentencepiece_tokenizer import load_t5_tokenizer, needs_conversion
from .text_encoders import ByteTokenizer, CachedTextEncoder, TextEncoder, TextEncoders

TINY = "tiny"  # `weights: tiny`: small random networks, for tests
RANDOM = "random"  # `weights: random` or `random:HUB_ID`: random networks of the published size, to measure speed
SINGLE_FILES = ("transformer", "transformer_2", "unet")  # settings that replace a network by that of a file
ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")  # default LoRA targets of most published generators
JOINT_ATTENTION_LAYERS = (*ATTENTION_LAYERS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")  # of MM-DiT blocks


@dataclass(frozen=True)
class PublishedModel:
    """Everything about a pipeline's release: where its weights are and how large its components are."""

    name: str  # in the fingerprint of prompt embeddings
    releases: tuple[WeightsSource, ...]  # the default first
    tiny_configs: Mapping[str, Mapping[str, Any]]  # settings of small random components
    configs: dict[str, ComponentConfigs] = field(default_factory=dict)  # published settings, by hub id
    few_steps: Mapping[str, int] = field(default_factory=dict)  # sampling steps of distilled releases, by hub id

    def source(self, weights: str) -> WeightsSource:
        """Return the release of that hub id; for a local folder, the default release."""
        return next((source for source in self.releases if source.hub == weights), self.releases[0])

    def components(self, weights: str, placement: Placement, seed: int) -> PipelineComponents:
        """Return the components in `weights`: a hub id, a folder, `tiny` or `random`."""
        return PipelineComponents(weights, self.source(weights), self.tiny_configs, placement, seed, self.configs)


class PublishedSpec(ModelSpec):
    """Settings of a generator that is published as a diffusers pipeline."""

    published: ClassVar[PublishedModel]
    process_type: ClassVar[type[Process]] = GaussianProcess
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)  # components of the pipeline
    # Settings that prompt embeddings depend on, by the keys under which they are stored with embeddings.
    embedding_settings: ClassVar[Mapping[str, str]] = {"max_text_tokens": "max_text_tokens"}
    negative_mark: ClassVar[str] = ""  # before the keys of negative prompts, if they are encoded differently
    weights: str
    embeddings: Path | None
    seed: int
    tiny_side: ClassVar[int] = 32  # pixels of samples of the small random version
    tiny_text_tokens: ClassVar[int] = 16

    def tiny(self) -> Self:
        spec = cast(Any, self)  # a dataclass, which this base class is not
        names = {f.name for f in fields(spec)}
        settings: dict[str, Any] = dict.fromkeys(names.intersection(SINGLE_FILES))
        if "max_text_tokens" in names:
            settings["max_text_tokens"] = min(spec.max_text_tokens, self.tiny_text_tokens)
        side = self.tiny_side
        small: Self = replace(spec, weights=TINY, height=side, width=side, embeddings=None, **settings)
        return small

    @property
    def sources(self) -> tuple[WeightsSource, ...]:
        return weight_sources(self.weights, *self.published.releases)

    @property
    def releases(self) -> tuple[WeightsSource, ...]:
        return self.published.releases

    @property
    def distilled_steps(self) -> int | None:
        return self.published.few_steps.get(self.weights)

    def components(self, placement: Placement) -> PipelineComponents:
        return self.published.components(self.weights, placement, self.seed)

    def load_prompt_encoder(self, placement: Placement) -> CachedTextEncoder:
        return self.cached_prompt_encoder(self.components(placement))

    def cached_prompt_encoder(self, components: PipelineComponents) -> CachedTextEncoder:
        """Put the text encoders of the pipeline behind a cache."""
        if not self.text_encoders:
            raise ConfigError(
                "embed: this model does not have a text encoder; give a recipe or model that has one, such as flux "
                "[TM495]"
            )
        settings = {key: getattr(self, name) for key, name in self.embedding_settings.items()}
        return components.cache_text_encoders(
            lambda: self.load_text_encoders(components),
            self.text_encoders,
            {"model": self.published.name, **settings},
            self.embeddings,
            self.negative_mark,
        )

    def load_text_encoders(self, components: PipelineComponents) -> TextEncoders:
        """Load the text encoders of the pipeline."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define load_text_encoders; define it, or set text_encoders to () [TM496]"
        )


class ImageSpec(PublishedSpec):
    """Settings of a published image generator."""

    frames: ClassVar[int] = 1
    latent_channels: ClassVar[int]
    pixels_per_latent: ClassVar[int] = DOWNSAMPLE_FACTOR  # and side
    backbone_class: ClassVar[Callable[..., Backbone]]
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, self.latent_channels, self.height // self.pixels_per_latent, self.width // self.pixels_per_latent

    def load(self, placement: Placement) -> Backbone:
        return self.backbone_class(self, placement)


def weight_sources(name: str, *known: WeightsSource) -> tuple[WeightsSource, ...]:
    """Return what must be downloaded for `weights: name`: nothing for local folders and random weights."""
    if name == TINY or name.split(":")[0] == RANDOM or Path(name).expanduser().exists():
        return ()
    return (next((source for source in known if source.hub == name), WeightsSource(name)),)


class PipelineComponents:
    """Components of a pipeline by name: from a diffusers folder, or random with the settings of `configs`.

    Networks are loaded in the dtype of the run. Under fp16 only the network that trains keeps float32, for autocast.
    """

    def __init__(
        self,
        name: str,
        source: WeightsSource,
        tiny_configs: Mapping[str, Mapping[str, Any]],
        placement: Placement,
        seed: int = 0,
        published_configs: Mapping[str, ComponentConfigs] | None = None,
    ) -> None:
        kind, _, hub = name.partition(":")
        self.full_size = kind == RANDOM
        self.path = None if name == TINY or self.full_size else find_weights(name, source)
        if self.path is not None and not self.path.is_dir():
            raise ConfigError(
                f"model.weights: {self.path} is a file; give a folder in diffusers' layout, such as {source.hub}, "
                "and set model.transformer or model.unet to the file of the network [TM497]"
            )
        self.source, self.placement, self.seed = source, placement, seed
        self.configs = tiny_configs
        if self.full_size:
            known, hub = published_configs or {}, hub or source.hub
            if hub not in known:
                raise ConfigError(
                    f"model.weights: the size of '{hub:.100}' is not known; use one of {', '.join(known)} [TM498]"
                )
            self.configs = known[hub]

    def folder(self, component: str) -> Path:
        """Return the folder of a component; a folder of one text encoder holds it and its tokenizer at its root."""
        if self.path is None:
            raise ValueError(f"random weights have no folder of '{component}' [TM890]")
        folder = self.path / component
        is_text = component.startswith(("text_encoder", "tokenizer"))
        if is_text and not folder.is_dir() and (self.path / "config.json").is_file():
            return folder if (self.path / PIPELINE_INDEX).is_file() else self.path
        return folder

    def config(self, component: str) -> dict[str, Any]:
        """Return the settings of a network or scheduler."""
        if self.path is None:
            return dict(self.configs.get(component, {}))
        name = "scheduler_config.json" if component.startswith("scheduler") else "config.json"
        try:
            return read_json_object(self.folder(component) / name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path} does not have a readable {component}/{name}; give a folder in diffusers' layout [TM499]"
            ) from error

    def tensor_shapes(self, component: str, network_class: Any) -> dict[str, torch.Size]:
        """Return the shapes of a diffusers network's state dict, without allocating its weights."""
        return {key: x.shape for key, x in self._build_empty(component, network_class).state_dict().items()}

    def load_transformer(
        self,
        network_class: Any,
        file: str | None = None,
        to_diffusers_keys: Callable[[Tensors, TensorShapes], Tensors] | None = None,
        component: str = "transformer",
    ) -> nn.Module:
        """Load the transformer to be trained: that of the folder, or with the tensors of a single file.

        `to_diffusers_keys` renames the file's tensors, given the shapes of the network; without it, names are kept.
        """
        if file is None:
            return self.load_trainable(component, network_class)
        tensors = read_single_file(file, self.source)
        if to_diffusers_keys is not None:
            tensors = to_diffusers_keys(tensors, self.tensor_shapes(component, network_class))
        return self.load_trainable(component, network_class, tensors)

    def load_trainable(
        self, component: str, network_class: Any, tensors: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """Load the diffusers network to be trained, with the tensors of its folder or with those given."""
        device = self.placement.trainable_device or self.placement.device
        if device.type == "meta":
            deferred = self._load_deferred(component, network_class) if tensors is None else None
            if deferred is not None:
                return deferred
            device = torch.device("cpu")
        dtype = trainable_dtype(self.placement)
        # Random weights stay where they are made; only what was asked to be in host memory is made there.
        in_host_memory = self.full_size and self.placement.trainable_device == torch.device("cpu")
        net = self._load_diffusers(component, network_class, dtype, tensors, device if in_host_memory else None)
        trainable: nn.Module = net if self.full_size else net.to(device)
        return trainable

    def load_vae(
        self, component: str, network_class: Any, *, gradient_checkpointing: bool = True, is_video: bool = False
    ) -> FrozenVae:
        """Load the frozen VAE; checkpointing takes a seventh of the memory and computes the forward pass twice."""
        net = self.load_frozen(component, network_class, gradient_checkpointing=gradient_checkpointing)
        return FrozenVae.from_config(net, net.config, is_video=is_video)  # with defaults: older files omit the scale

    def load_frozen(self, component: str, network_class: Any, *, gradient_checkpointing: bool = False) -> Any:
        """Load a diffusers network that does not train."""
        net = self._load_diffusers(component, network_class, self.placement.dtype, None)
        with silence_libraries():  # diffusers warns about modules to keep in float32, of which there are none
            net = (net if self.full_size else net.to(self.placement.device)).eval().requires_grad_(False)
        use_split_group_norms(net)
        use_wide_head_attention(net)
        if gradient_checkpointing:
            net.enable_gradient_checkpointing()
        return net

    def load_text_encoder(self, component: str, network_class: Any, tokenizer: str, max_length: int) -> TextEncoder:
        """Load a frozen transformers text encoder, on the CPU, and its tokenizer."""
        net = self.load_encoder(component, network_class)
        with silence_libraries():
            vocab_size = net.config.get_text_config().vocab_size
            tokenizer_object: Any = (
                ByteTokenizer(vocab_size) if self.path is None else load_tokenizer(self.folder(tokenizer))
            )
        return TextEncoder(net, tokenizer_object, max_length, self.placement.device, component)

    def load_encoder(self, component: str, network_class: Any) -> Any:
        """Load a frozen transformers encoder, on the CPU."""
        with silence_libraries():
            if self.path is not None:
                net = load_pretrained(network_class, self.folder(component), self.placement.dtype)
            else:
                config = network_class.config_class(**self.configs[component])
                net = self._init_random(lambda: network_class(config), torch.device("cpu"), self.placement.dtype)
        return net.eval().requires_grad_(False)

    def cache_text_encoders(
        self,
        load: Callable[[], TextEncoders],
        components: Sequence[str],
        settings: Mapping[str, object],
        embeddings: Path | None,
        negative_mark: str = "",
    ) -> CachedTextEncoder:
        """Put text encoders behind a cache, identified by `settings` and the digests of their components."""
        fingerprint = self.encoder_fingerprint(components, settings)
        return CachedTextEncoder(load, self.placement, fingerprint, embeddings, negative_mark)

    def encoder_fingerprint(self, components: Sequence[str], settings: Mapping[str, object]) -> dict[str, str]:
        """Return what identifies embeddings: settings, and the digests of the text encoders that are on disk."""
        digests = {name: digest for name in components if (digest := self.text_encoder_digest(name))}
        return {**{name: str(value) for name, value in settings.items()}, **digests}

    def text_encoder_digest(self, component: str) -> str:
        """Return a digest of a text encoder's weights, or '' if they are not on disk."""
        if self.path is None:
            config = json.dumps([self.config(component), self.seed], sort_keys=True, default=str)
            return hashlib.sha256(config.encode()).hexdigest()[:16]
        # Only some folders hold a copy in half precision, model.fp16.safetensors: it must not change the digest.
        files = sorted(file for file in self.folder(component).glob("*.safetensors") if file.name.count(".") == 1)
        return hashlib.sha256("".join(map(fingerprint_file, files)).encode()).hexdigest()[:16] if files else ""

    def _load_diffusers(
        self,
        component: str,
        network_class: Any,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor] | None,
        device: torch.device | None = None,
    ) -> Any:
        with silence_libraries():
            if self.path is None:
                config = self.configs[component]
                net = self._init_random(lambda: network_class(**config), device or self.placement.device, dtype)
                return net if tensors is None else load_tensors(net, tensors, component).to(dtype)
            if tensors is None:
                return load_pretrained(network_class, self.path / component, dtype)
            cast = {key: x.to(dtype) for key, x in tensors.items()}
            return load_tensors(self._build_empty(component, network_class), cast, component)

    def _load_deferred(self, component: str, network_class: Any) -> nn.Module | None:
        """Build the network of a folder without its weights, to be read in part; None if they need a conversion."""
        if self.path is None or "quantization_config" in self.config(component):
            return None
        dtype = trainable_dtype(self.placement)
        fp32_modules = tuple(getattr(network_class, "_keep_in_fp32_modules", None) or ())
        tensors = open_folder(self.path / component, dtype, fp32_modules)
        if tensors is None:
            return None
        with default_dtype(dtype):  # of tables that the constructor computes, as in `from_pretrained`
            net: nn.Module = self._build_empty(component, network_class).eval()
        return net if defer_weights(net, tensors) else None

    def _build_empty(self, component: str, network_class: Any) -> Any:
        with silence_libraries(), parameters_on_meta():
            if self.path is None:
                return network_class(**self.configs[component])
            return network_class.from_config(self.config(component))

    def _init_random(self, build: Callable[[], Any], device: torch.device, dtype: torch.dtype) -> Any:
        """Build a network whose random weights depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if not self.full_size:
                return build().to(dtype)
            # On its device and in its dtype at once: a CPU takes minutes to fill 12 billion weights in float32.
            if device.type == "cpu" and self.placement.device.type == "cuda":
                with default_dtype(dtype), parameters_on_meta():
                    return fill_random(build(), self.placement.device, device)
            with default_dtype(dtype), torch.device(device):
                return build()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block, new tensors are of this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block, modules are built without memory for their parameters, to be filled by `assign=True`.

    Buffers and other tensors keep their values, unlike under `torch.device("meta")`: rotary tables, which are in no
    checkpoint, are computed by constructors.
    """

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:  # shared with another module
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return a replacement
    try:
        yield
    finally:
        hook.remove()


def fill_random(net: nn.Module, source: torch.device, device: torch.device) -> nn.Module:
    """Replace parameters on the meta device by random ones on `device`, drawn one after the other on `source`.

    A GPU draws billions of numbers in seconds, without room for the whole network. Matrices keep the size of their
    input, vectors are those of an untrained norm or bias.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module in net.modules():
        for name, p in module._parameters.items():
            if p is None or not p.is_meta:
                continue
            if p not in filled:
                x = torch.empty(p.shape, dtype=p.dtype, device=source)
                if p.ndim >= 2:
                    x.normal_(std=p[0].numel() ** -0.5)
                else:
                    x.fill_(float(name == "weight"))
                filled[p] = nn.Parameter(x.to(device), requires_grad=p.requires_grad)
            module._parameters[name] = filled[p]
    return net


def load_tokenizer(path: Path) -> Any:
    """Load a tokenizer of transformers from a folder."""
    from transformers import AutoTokenizer

    if needs_conversion(path):
        return load_t5_tokenizer(path)
    loader: Any = AutoTokenizer
    try:
        return loader.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} does not contain a tokenizer; give a folder in diffusers' layout [TM500]") from error


def load_pretrained(network_class: Any, path: Path, dtype: torch.dtype) -> Any:
    """Load a network of diffusers or transformers from its folder; a missing tensor is an error."""
    safetensors, variant = detect_weight_format(path)
    options = {
        "use_safetensors": safetensors,
        "variant": variant,
        "local_files_only": True,
        "output_loading_info": True,
    }
    try:
        net, info = network_class.from_pretrained(path, dtype=dtype, **options)
    except (OSError, ValueError, RuntimeError) as error:  # no such folder, no weights in it, tensors of other shapes
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]:.200}); download the folder again [TM501]"
        ) from error
    missing = sorted(map(str, info["missing_keys"]))
    if missing:
        raise ConfigError(
            f"{path} lacks '{missing[0]}' and {len(missing) - 1} more tensors; download the folder again [TM502]"
        )
    return net


def load_tensors(net: Any, tensors: Mapping[str, Tensor], component: str) -> Any:
    """Assign tensors to a network without copying them; other names or shapes are an error."""
    state = net.state_dict()
    wrong = sorted({*state} ^ {*tensors}) + [
        key for key, x in state.items() if key in tensors and x.shape != tensors[key].shape
    ]
    if wrong:
        raise ConfigError(
            f"the tensors in the file do not belong to this {component} ('{wrong[0]}' and {len(wrong) - 1} more "
            "differ); use a file of the same model, in diffusers' or the authors' layout [TM503]"
        )
    net.load_state_dict(dict(tensors), assign=True)
    return net.requires_grad_(True)


def dynamic_shift(
    tokens: int, base_shift: float = 0.5, max_shift: float = 1.15, base_seq_len: int = 256, max_seq_len: int = 4096
) -> float:
    """Return the timestep shift of a flow for an image of `tokens` tokens, as diffusers' dynamic shifting computes it.

    Its logarithm is linear in the number of tokens: `base_shift` at `base_seq_len`, `max_shift` at `max_seq_len`.
    """
    return math.exp(base_shift + (max_shift - base_shift) * (tokens - base_seq_len) / (max_seq_len - base_seq_len))
