"""LoRA adapters with peft's layers, injected in place. The only module that imports peft."""

from __future__ import annotations

import fnmatch
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .dropout import DropoutMasks, RowDropout
from .fused_lora import fuse_adapters
from .randomness import Randomness
from .registry import ConfigError
from .weights import NetworkTraits, TrainableModel, Weights, unknown_snapshot_error

if TYPE_CHECKING:  # importing peft takes three seconds, which runs without adapters save
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

LIVE_ADAPTER = "live"


class LoraWeights(Weights):
    """Only adapters train; the reference is the network with adapters disabled, and takes no memory.

    `text_encoders` are adapted too, by component name, which is the prefix of their tensors' names.
    """

    def __init__(
        self,
        net: nn.Module,
        config: LoraConfig | None,
        snapshots: Sequence[str] = (),
        text_encoders: Mapping[str, tuple[nn.Module, LoraConfig]] | None = None,
        traits: NetworkTraits = NetworkTraits(),
        *,
        fused: bool = True,
        merge_rollouts: bool = False,
    ) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import Linear

        encoders = text_encoders or {}
        self.net, self.traits = net, traits
        self.text_encoders = {name: encoder for name, (encoder, _) in encoders.items()}
        self.active, self.merge_rollouts = LIVE_ADAPTER, merge_rollouts
        adapted = [*([(net, config)] if config else []), *encoders.values()]
        self.config = adapted[0][1]
        self.names = [LIVE_ADAPTER, *(name for name in snapshots if name != "reference")]
        # All adapters are made now: none can be added once the network is sharded.
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # peft warns about several adapters
            for name in self.names:
                for module, lora_config in adapted:
                    inject_adapter_in_model(lora_config, module, name)
        if fused:
            fuse_adapters([layer for layer in _lora_layers(self._modules()) if type(layer) is Linear])
        self._dropout = [use_row_dropout(module, each) for module, each in adapted if each.lora_dropout]
        with torch.no_grad():
            for key, p in self._named():
                if "lora_" in key and key.startswith(tuple(self.text_encoders)):
                    p.data = p.data.float()  # trainable weights are float32 even if the frozen encoder is not
        self._activate(LIVE_ADAPTER)
        for name in self.names[1:]:
            self.update_snapshot(name)

    def _modules(self) -> Iterator[nn.Module]:
        return (module for whole in (self.net, *self.text_encoders.values()) for module in whole.modules())

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.net.named_parameters()
        for name, encoder in self.text_encoders.items():
            yield from encoder.named_parameters(prefix=name)

    def _layers(self) -> Iterator[BaseTunerLayer]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return (module for module in self._modules() if isinstance(module, BaseTunerLayer))

    def _activate(self, name: str) -> None:
        self.active = name
        for layer in self._layers():
            layer.set_adapter(name)
        self._mark()

    def _switch(self, *, on: bool) -> None:
        self.active = LIVE_ADAPTER if on else "reference"
        for layer in self._layers():
            layer.enable_adapters(on)
        self._mark()

    def _mark(self) -> None:
        # peft sets requires_grad with the active adapter, but FSDP2 keeps what it finds at its first gather, whichever
        # adapter is active then: so only the live adapter ever requires gradients.
        for key, p in self._named():
            p.requires_grad_(f".{LIVE_ADAPTER}." in key)

    def _adapter(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of one adapter, under names without the adapter's."""
        infix = f".{name}."
        return {key.replace(infix, "."): p for key, p in self._named() if infix in key and "lora_" in key}

    def trainable(self) -> dict[str, nn.Parameter]:
        return self._adapter(LIVE_ADAPTER)

    def snapshot_tensors(self) -> dict[str, dict[str, Tensor]]:
        return {name: dict(self._adapter(name)) for name in self.names[1:]}

    @torch.no_grad()
    def update_snapshot(self, name: str, decay: float = 0.0) -> None:
        if name not in self.names[1:]:
            raise unknown_snapshot_error(name, self.names[1:])
        live, snapshot = self._adapter(LIVE_ADAPTER), self._adapter(name)
        live_tensors = [live[key].to(p.dtype) for key, p in snapshot.items()]
        torch._foreach_lerp_(list(snapshot.values()), live_tensors, 1 - decay)

    @torch.no_grad()
    def merged(self, name: str = LIVE_ADAPTER) -> dict[str, Tensor]:
        """State dict of the network with an adapter merged into its layers, under the original names."""
        if self.text_encoders:
            raise ConfigError(
                f"merged weights would lose the LoRA adapters of {', '.join(self.text_encoders)}, because they "
                "contain the backbone only; export the adapters without --merge, with --layout diffusers (or "
                "--layout authors if diffusers does not have this pipeline) [TM080]"
            )
        layers: dict[str, Any] = dict(self.net.named_modules())
        merged: dict[str, Tensor] = {}
        for key, x in self.net.state_dict().items():
            layer, inside, last = key.rpartition(".base_layer.")
            if inside and last == "weight" and x.dtype.itemsize == 1:
                raise ConfigError(
                    f"'{key}' has 8 bits, so adapters cannot be merged into it; set engine.base_precision=same [TM2610]"
                )
            if inside and last == "weight":
                merged[f"{layer}.{last}"] = (x.float() + layers[layer].get_delta_weight(name).float()).to(x.dtype)
            elif "lora_" not in key:
                merged[f"{layer}.{last}" if inside else key] = x
        return merged

    def scale(self, factor: float) -> None:
        """Multiply the output of every adapter by a factor of its trained scale."""
        for layer in _lora_layers(self._modules()):
            for name in self.names:
                layer.set_scale(name, factor)

    def graph_key(self) -> str | None:
        return None if any(masks.position_words is not None for masks in self._dropout) else self.active

    @contextmanager
    def dropout_masks(self, rng: Randomness, draw: int = 0) -> Iterator[None]:
        with ExitStack() as stack:
            for masks in self._dropout:
                # A text encoder encodes each prompt once for all its samples, so it has one mask for all rows.
                rows = rng if masks.net is self.net else replace(rng, rows=rng.rows[:1] * 0)
                stack.enter_context(masks.active(rows, draw))
            yield

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        if name != "reference" and name not in self.names:
            raise unknown_snapshot_error(name, ["reference", *self.names[1:]])
        try:
            if name == "reference":
                self._switch(on=False)
            else:
                self._activate(name)
            with torch.no_grad():
                yield
        finally:
            self._switch(on=True)
            self._activate(LIVE_ADAPTER)


def _expand_wildcards(net: nn.Module, targets: Sequence[str]) -> list[str]:
    """Replace targets with a star by the names of all modules that they match."""
    names = [name for name, _ in net.named_modules()]
    return [match for target in targets for match in (fnmatch.filter(names, target) or [target])]


def _no_match_error(targets: Sequence[str], linear: Sequence[str]) -> ConfigError:
    common = ", ".join(name for name, _ in Counter(name.rpartition(".")[2] for name in linear).most_common(8))
    return ConfigError(
        f"tuning.target_modules: no layer has a name that ends with {', '.join(targets):.60}; the linear layers "
        f"of this model end with {common}; choose from these names, or set tuning.target_modules=default [TM081]"
    )


def _lora_layers(modules: Iterator[nn.Module]) -> Iterator[LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return (module for module in modules if isinstance(module, LoraLayer))


def use_row_dropout(net: nn.Module, config: LoraConfig) -> DropoutMasks:
    """Replace peft's dropout by one whose masks depend on the row, shared by all adapters of a layer."""
    masks = DropoutMasks(net)
    for layer in _lora_layers(net.modules()):
        features, last = layer.in_features or 0, isinstance(layer.get_base_layer(), nn.Linear)
        dropout = RowDropout(config.lora_dropout, features, masks, last=last)
        for name in layer.lora_dropout:
            layer.lora_dropout[name] = dropout
    return masks


@dataclass(frozen=True)
class Lora:
    """Train LoRA adapters on the layers whose names end with one of `target_modules` (peft's rules).

    A target with a star matches whole names, as low.*.to_q for one of two transformers. `all-linear` is every linear
    layer, `all-layers` convolutions too; `default` is the model's usual choice, or every linear layer if it has none.
    """

    rank: int = 16
    alpha: float | None = None  # scale is alpha / rank; twice the rank if not given
    target_modules: tuple[str, ...] | str = "default"
    dropout: float = 0.0
    modules: tuple[Literal["backbone", "text_encoder"], ...] = ("backbone",)  # what gets adapters
    text_target_modules: tuple[str, ...] | str = "all-linear"
    fused: bool = True  # adapters of linear layers add to the layer's output within their own matrix product
    merge_rollouts: bool = False  # rollouts multiply copies of the adapted layers, with their adapters merged
    is_adapter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.rank <= 65_536 and 0 <= self.dropout < 1 and (self.alpha is None or self.alpha > 0)):
            raise ValueError(
                f"expected rank of at least 1, alpha above 0 and dropout from 0 to below 1, got rank {self.rank}, "
                f"alpha {self.alpha}, dropout {self.dropout}; correct these settings [TM082]"
            )
        for key in ("target_modules", "text_target_modules"):
            targets = getattr(self, key)
            if isinstance(targets, str) and targets not in ("default", "all-linear", "all-layers"):
                expected = "default, all-linear, all-layers or a list of names such as [to_q, to_v]"
                raise ValueError(f"'{key}': expected {expected}, got {targets!r:.60}; correct '{key}' [TM083]")
        if self.merge_rollouts and not (self.fused and "backbone" in self.modules):
            raise ValueError(
                "'merge_rollouts' needs fused=true and adapters of the backbone; set fused=true and "
                "modules=[backbone], or remove merge_rollouts [TM2753]"
            )
        if not self.modules:
            raise ValueError(
                "'modules' is empty; set it to [backbone], [text_encoder] or [backbone, text_encoder] [TM084]"
            )

    def apply(self, model: TrainableModel, snapshots: Sequence[str]) -> Weights:
        encoders = {name: (net, self.config(net, self.text_target_modules)) for name, net in self._encoders(model)}
        config = None
        if "backbone" in self.modules:
            config = self.config(model.net, self.target_modules, model.traits.lora_targets)
        options = {"fused": self.fused, "merge_rollouts": self.merge_rollouts}
        return LoraWeights(model.net, config, snapshots, encoders, model.traits, **options)

    def config(
        self, net: nn.Module, targets: tuple[str, ...] | str, default_targets: tuple[str, ...] = ()
    ) -> LoraConfig:
        """The peft configuration that adapts `targets` of a network; `default` stands for `default_targets`."""
        from peft import LoraConfig

        if targets == "default":
            targets = default_targets or "all-linear"
        chosen = _expand_wildcards(net, targets) if isinstance(targets, tuple) else _layer_names(net, targets)
        if not any(f".{name}".endswith(f".{target}") for name, _ in net.named_modules() for target in chosen):
            raise _no_match_error(chosen, _layer_names(net, "all-linear"))
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=self.dropout)  # type: ignore[arg-type]

    def _encoders(self, model: TrainableModel) -> list[tuple[str, nn.Module]]:
        if "text_encoder" not in self.modules:
            return []
        encoders = model.enable_text_encoder_training()
        if not encoders:
            raise ConfigError(
                "tuning.modules: text_encoder was given, but this model does not have a trainable text encoder; "
                "set tuning.modules=[backbone] [TM085]"
            )
        return list(encoders.items())


def _layer_names(net: nn.Module, kind: str) -> list[str]:
    """Names of all linear layers, with `all-layers` of convolutions too."""
    kinds = (nn.Linear,) if kind == "all-linear" else (nn.Linear, nn.Conv2d, nn.Conv3d)
    return [name for name, module in net.named_modules() if isinstance(module, kinds)]
