"""Load the components of a diffusers pipeline folder: networks, tokenizers and autoencoder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.registry import ConfigError
from ..core.types import Placement
from .component_configs import COMPONENT_CONFIGS, ComponentConfigs
from .pretrained import WeightsSource, find_weights
from .text_encoders import ByteTokenizer, TextEncoder, disable_autocast
from .third_party_logging import silence_libraries as silence_libraries  # for those who use parts by themselves
from .weight_format import detect_weight_format

TINY = "tiny"  # weights that are in no file
RANDOM = "random"  # likewise, at the published size, or that of `random:ID`: to measure speed and memory by
ATTENTION_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")  # what adapters of most published generators are on
JOINT_ATTENTION_LAYERS = (
    *ATTENTION_LAYERS,
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)  # likewise where texts attend too
DECODE_BATCH_LATENTS = 1 << 13  # places of latents decoded in one call: a picture of 720x720, or two of 512x512


def weight_sources(name: str, *known: WeightsSource) -> tuple[WeightsSource, ...]:
    """Where the weights of that name are to be fetched from, if anywhere; of those known, size and licence are told."""
    if name == TINY or name.split(":")[0] == RANDOM or Path(name).expanduser().exists():
        return ()
    return (next((source for source in known if source.hub == name), WeightsSource(name)),)


def published_configs(name: str, source: WeightsSource) -> ComponentConfigs:
    """The sizes of the model that a name as `random:ID` says, or of the usual one."""
    hub = name.partition(":")[2] or source.hub
    if hub not in COMPONENT_CONFIGS:
        raise ConfigError(f"the size of '{hub:.100}' is not known; expected one of {', '.join(COMPONENT_CONFIGS)}")
    return COMPONENT_CONFIGS[hub]


class PipelineComponents:
    """Components of a published pipeline by name, or small random ones with the configs in `tiny`.

    `tiny` holds a configuration for each network. Only the network that trains keeps float32 under fp16, for autocast.
    """

    def __init__(
        self,
        name: str,
        source: WeightsSource,
        tiny: Mapping[str, Mapping[str, Any]],
        placement: Placement,
        seed: int = 0,
    ) -> None:
        self.large = name.split(":")[0] == RANDOM
        self.path = None if name == TINY or self.large else find_weights(name, source)
        if self.path is not None and not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is a file; expected a folder in diffusers' layout, such as {source.hub}, and one file of "
                "the network as `transformer` or `unet` beside it"
            )
        self.placement, self.seed = placement, seed
        self.tiny = published_configs(name, source) if self.large else tiny

    def config(self, part: str) -> dict[str, Any]:
        """The settings of a part, a network or its scheduler."""
        if self.path is None:
            return dict(self.tiny.get(part, {}))
        name = "scheduler_config.json" if part.startswith("scheduler") else "config.json"
        try:
            told: dict[str, Any] = json.loads((self.path / part / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path} has no readable {part}/{name}; expected a folder in diffusers' layout"
            ) from error
        return told

    def shapes(self, part: str, kind: Any) -> dict[str, torch.Size]:
        """Of all tensors a diffusers network has, which is not filled for that."""
        return {key: x.shape for key, x in self._empty(part, kind).state_dict().items()}

    def trained(
        self, part: str, kind: Any, tensors: Mapping[str, Tensor] | None = None, usual: tuple[str, ...] = ()
    ) -> nn.Module:
        """The diffusers network that is to be trained, with its own tensors or those given.

        In the precision its weights will be trained in; where that is not said, in bf16 if all is. `usual` is how the
        names of those layers end that adapters go to if nobody says otherwise: every linear layer if empty.
        """
        alike = torch.bfloat16 if self.placement.dtype == torch.bfloat16 else torch.float32
        net: Any = self._diffusers(part, kind, self.placement.trained or alike, tensors)
        if usual:
            net.usual = usual
        made: nn.Module = net if self.large else net.to(self.placement.device)
        return made

    def autoencoder(self, part: str, kind: Any, *, recompute: bool = True, clips: bool = False) -> FrozenVae:
        """The frozen diffusers autoencoder; `recompute` takes a seventh of the memory, by computing all twice."""
        net = self.frozen(part, kind, recompute=recompute)
        return FrozenVae.of(net, net.config, clips=clips)  # with defaults: older files leave the scale out

    def frozen(self, part: str, kind: Any, *, recompute: bool = False) -> Any:
        """A diffusers network that does not train."""
        net = self._frozen(self._diffusers(part, kind, self.placement.dtype, None))
        if recompute:
            net.enable_gradient_checkpointing()
        return net

    def reader(self, part: str, kind: Any, tokenizer: str, length: int) -> TextEncoder:
        """A frozen text encoder of transformers with its tokenizer, prompts cut and filled to `length` tokens.

        It waits on the host: beside a network in training there is seldom room for it.
        """
        net = self.encoder(part, kind)
        with silence_libraries():
            vocabulary = net.config.get_text_config().vocab_size
            words: Any = ByteTokenizer(vocabulary) if self.path is None else self._tokenizer(self.path / tokenizer)
        return TextEncoder(net, words, length, self.placement.device, part)

    def encoder(self, part: str, kind: Any) -> Any:
        """A frozen encoder of transformers, on the host."""
        with silence_libraries():
            if self.path is not None:
                net = load_pretrained(kind, self.path / part, self.placement.dtype)
            else:
                settings = kind.config_class(**self.tiny[part])
                net = self._random(lambda: kind(settings), torch.device("cpu"), self.placement.dtype)
        return net.eval().requires_grad_(False)

    def _diffusers(self, part: str, kind: Any, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None) -> Any:
        with silence_libraries():
            if self.path is None:
                net = self._random(lambda: kind(**self.tiny[part]), self.placement.device, dtype)
                return net if tensors is None else load_tensors(net, tensors, part).to(dtype)
            if tensors is None:
                return load_pretrained(kind, self.path / part, dtype)
            return load_tensors(self._empty(part, kind), {key: x.to(dtype) for key, x in tensors.items()}, part)

    def _empty(self, part: str, kind: Any) -> Any:
        from accelerate import init_empty_weights

        with silence_libraries(), init_empty_weights():
            return kind(**self.tiny[part]) if self.path is None else kind.from_config(self.config(part))

    def _tokenizer(self, path: Path) -> Any:
        from transformers import AutoTokenizer

        try:
            loader: Any = AutoTokenizer
            return loader.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} holds no tokenizer; expected a folder in diffusers' layout") from error

    def _random(self, make: Callable[[], Any], device: torch.device, dtype: torch.dtype) -> Any:
        """A network that is the same every time, whatever else draws numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if not self.large:
                return make().to(dtype)
            # Made where and as it will be: the host would take minutes to fill 12 billion weights in float32.
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                with torch.device(device):
                    return make()
            finally:
                torch.set_default_dtype(before)

    def _frozen(self, net: nn.Module) -> Any:
        with silence_libraries():  # or diffusers warns of modules to be kept in float32, of which there are none
            return (net if self.large else net.to(self.placement.device)).eval().requires_grad_(False)


def load_pretrained(kind: Any, path: Path, dtype: torch.dtype) -> Any:
    """A network with every tensor of its folder; both libraries build it without filling it first."""
    safe, variant = detect_weight_format(path)
    told = {"use_safetensors": safe, "variant": variant, "local_files_only": True, "output_loading_info": True}
    try:
        net, found = kind.from_pretrained(path, dtype=dtype, **told)
    except (OSError, ValueError, RuntimeError) as error:  # no such folder, no weights in it, tensors of other shapes
        raise ConfigError(
            f"{path} cannot be read ({str(error).splitlines()[0]:.200}); fetch the folder again"
        ) from error
    lost = sorted(map(str, found["missing_keys"]))
    if lost:
        raise ConfigError(f"{path} lacks '{lost[0]}' and {len(lost) - 1} more tensors; fetch the folder again")
    return net


def load_tensors(net: Any, tensors: Mapping[str, Tensor], part: str) -> Any:
    """A network made of given tensors, which it takes as they are."""
    own = net.state_dict()
    wrong = sorted({*own, *tensors} - ({*own} & {*tensors})) + [
        key for key, x in own.items() if key in tensors and x.shape != tensors[key].shape
    ]
    if wrong:
        raise ConfigError(
            f"the file's tensors are not of this {part} ('{wrong[0]}' and {len(wrong) - 1} more differ); "
            "name one of the same model, in diffusers' or the authors' layout"
        )
    net.load_state_dict(dict(tensors), assign=True)
    return net.requires_grad_(True)


def dynamic_shift(tokens: int, few: float = 0.5, many: float = 1.15, fewest: int = 256, most: int = 4096) -> float:
    """The `shift` of a straight path for so many picture tokens, as the dynamic schedulers of diffusers have it."""
    return math.exp(few + (many - few) * (tokens - fewest) / (most - fewest))


@dataclass(frozen=True)
class FrozenVae:
    """A frozen autoencoder, its latents (raw - shift) * scale; [N, C, h, w], of [N, 3, H, W] in [0, 1]."""

    net: Any
    shift: Tensor  # of one number or of one a channel, [C, 1, 1]
    scale: Tensor
    clips: bool = False  # one made for clips gets clips of one frame

    @classmethod
    def of(cls, net: Any, config: Mapping[str, Any], *, clips: bool) -> FrozenVae:
        where = next(net.parameters()).device
        means, deviations = config.get("latents_mean"), config.get("latents_std")
        if means and deviations:
            shift, spread = (torch.tensor(x, device=where).view(-1, 1, 1) for x in (means, deviations))
            return cls(net, shift, 1 / spread, clips)
        shift = torch.tensor(config.get("shift_factor") or 0.0, device=where)
        return cls(net, shift, torch.tensor(config.get("scaling_factor") or 1.0, device=where), clips)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels to the mode of the posterior, scaled and shifted."""
        seen = (2 * pixels - 1).to(self.net.dtype)
        with disable_autocast(seen):
            raw: Tensor = self.net.encode(seen[:, :, None] if self.clips else seen).latent_dist.mode().float()
        return ((raw[:, :, 0] if self.clips else raw) - self.shift) * self.scale

    def decode(self, latents: Tensor) -> Tensor:
        """Decode in small batches: activations of one decoder call take gigabytes."""
        rows = max(1, DECODE_BATCH_LATENTS // latents[0, 0].numel())
        return torch.cat([self._decode(part) for part in torch.split(latents, rows)])

    def _decode(self, latents: Tensor) -> Tensor:
        raw = (latents / self.scale + self.shift).to(self.net.dtype)
        with disable_autocast(raw):
            shown: Tensor = self.net.decode(raw[:, :, None] if self.clips else raw, return_dict=False)[0].float()
        return ((shown[:, :, 0] if self.clips else shown) / 2 + 0.5).clamp(0, 1)
