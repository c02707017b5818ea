"""Low-rank adapters on peft's layers, injected in place; the one file that imports peft."""

from __future__ import annotations

import fnmatch
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .dropout import DropoutMasks, RowDropout
from .randomness import Randomness
from .registry import ConfigError
from .weights import HasNet, Weights, unknown_snapshot_error

if TYPE_CHECKING:  # it takes three seconds to import, which runs without adapters do not wait for
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

LIVE_ADAPTER = "live"


@runtime_checkable
class HasTrainableTextEncoder(Protocol):
    """What reads the prompts of a generator, and can learn to read them otherwise."""

    def teach(self) -> dict[str, nn.Module]:
        """From now on every call reads anew, with gradients; the encoders by name."""


@runtime_checkable
class HasDefaultLoraTargets(Protocol):
    """A network of which its users adapt certain layers."""

    usual: tuple[str, ...]  # how the names of those layers end


class LoraWeights(Weights):
    """Only adapters train; the reference is the network with them switched off, and costs nothing.

    `texts` are text encoders that are adapted too, by the names their folders have; those begin their tensors' names.
    """

    def __init__(
        self,
        net: nn.Module,
        config: LoraConfig | None,
        snapshots: Sequence[str] = (),
        texts: Mapping[str, tuple[nn.Module, LoraConfig]] | None = None,
    ) -> None:
        from peft import inject_adapter_in_model

        adapted = texts or {}
        self.net, self.texts = net, {name: encoder for name, (encoder, _) in adapted.items()}
        self.active = LIVE_ADAPTER
        found = [*([(net, config)] if config else []), *adapted.values()]
        self.config = found[0][1]
        self.names = [LIVE_ADAPTER, *(name for name in snapshots if name != "reference")]
        # All adapters are made at once: none may be added once the network is sharded.
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there are several is meant
            for name in self.names:
                for module, own in found:
                    inject_adapter_in_model(own, module, name)
        self._chances = [_by_rows(module, own) for module, own in found if own.lora_dropout]
        with torch.no_grad():
            for key, p in self._named():
                if "lora_" in key and key.startswith(tuple(self.texts)):
                    p.data = p.data.float()  # a frozen encoder may be in half precision, what learns must not
        self._activate(LIVE_ADAPTER)
        for name in self.names[1:]:
            self.blend(name)

    def _modules(self) -> Iterator[nn.Module]:
        return (module for whole in (self.net, *self.texts.values()) for module in whole.modules())

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.net.named_parameters()
        for name, encoder in self.texts.items():
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
        # peft moves requires_grad about with the active adapter, but FSDP2 takes it over for good at its first gather,
        # whichever adapter is active then: so it is set back each time.
        for key, p in self._named():
            p.requires_grad_(f".{LIVE_ADAPTER}." in key)

    def _of(self, name: str) -> dict[str, nn.Parameter]:
        mark = f".{name}."
        return {key.replace(mark, "."): p for key, p in self._named() if mark in key and "lora_" in key}

    def trainable(self) -> dict[str, nn.Parameter]:
        return self._of(LIVE_ADAPTER)

    def stored(self) -> dict[str, dict[str, Tensor]]:
        return {name: dict(self._of(name)) for name in self.names[1:]}

    @torch.no_grad()
    def blend(self, name: str, decay: float = 0.0) -> None:
        if name not in self.names[1:]:
            raise unknown_snapshot_error(name, self.names[1:])
        live, kept = self._of(LIVE_ADAPTER), self._of(name)
        torch._foreach_lerp_(list(kept.values()), [live[key].to(p.dtype) for key, p in kept.items()], 1 - decay)

    @torch.no_grad()
    def merged(self, name: str = LIVE_ADAPTER) -> dict[str, Tensor]:
        """Every tensor of the network as it was named before, adapters of that name added to what they adapt."""
        if self.texts:
            found = ", ".join(self.texts)
            told = "export the adapters alone: --layout diffusers, or authors where diffusers has no such pipeline"
            raise ConfigError(f"merging would lose what {found} learned; {told}")
        layers: dict[str, Any] = dict(self.net.named_modules())
        whole: dict[str, Tensor] = {}
        for key, x in self.net.state_dict().items():
            layer, inside, last = key.rpartition(".base_layer.")
            if inside and last == "weight":
                whole[f"{layer}.{last}"] = (x.float() + layers[layer].get_delta_weight(name).float()).to(x.dtype)
            elif "lora_" not in key:
                whole[f"{layer}.{last}" if inside else key] = x
        return whole

    def scale(self, by: float) -> None:
        """Let every adapter count so many times as much as it was trained to."""
        for layer in _adapters(self._modules()):
            for name in self.names:
                layer.set_scale(name, by)

    def alike(self) -> str | None:
        return None if any(chance.places is not None for chance in self._chances) else self.active

    @contextmanager
    def dropping(self, rng: Randomness, draw: int = 0) -> Iterator[None]:
        with ExitStack() as stack:
            for chance in self._chances:
                # A text encoder reads each text for all its rows, so that those are not rows of the update.
                rows = rng if chance.net is self.net else replace(rng, rows=rng.rows[:1] * 0)
                stack.enter_context(chance.by(rows, draw))
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


def trainable_text_encoders(model: HasNet) -> dict[str, nn.Module]:
    """The text encoders that read for a model, by name, which from now on can learn; none if it has no such."""
    readers = [part for part in vars(model).values() if isinstance(part, HasTrainableTextEncoder)]
    return readers[0].teach() if readers else {}


def _spelled(net: nn.Module, targets: Sequence[str]) -> list[str]:
    """Targets, with the names of all layers in place of one with stars that they match."""
    names = [name for name, _ in net.named_modules()]
    return [found for target in targets for found in (fnmatch.filter(names, target) or [target])]


def _none_called(chosen: Sequence[str], linear: Sequence[str]) -> ConfigError:
    there = ", ".join(name for name, _ in Counter(name.rpartition(".")[2] for name in linear).most_common(8))
    found = f"tuning: no layer's name ends with {', '.join(chosen):.60}; those of linear layers mostly end with {there}"
    return ConfigError(f"{found}; set tuning.targets to some of them, or to usual")


def _adapters(modules: Iterator[nn.Module]) -> Iterator[LoraLayer]:
    from peft.tuners.lora import LoraLayer

    return (module for module in modules if isinstance(module, LoraLayer))


def _by_rows(net: nn.Module, config: LoraConfig) -> DropoutMasks:
    """Put dropout that belongs to rows in place of peft's, the same in all adapters of a layer."""
    chance = DropoutMasks(net)
    for layer in _adapters(net.modules()):
        features, last = layer.in_features or 0, isinstance(layer.get_base_layer(), nn.Linear)
        own = RowDropout(config.lora_dropout, features, chance, last=last)
        for name in layer.lora_dropout:
            layer.lora_dropout[name] = own
    return chance


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters on the layers named in `targets` (peft's rules), which their names may end with.

    A target with stars is a whole name, as low.*.to_q for one of two transformers. `all-linear` is every linear layer,
    `all-layers` convolutions too; `usual` is what the users of a model adapt, or every linear layer where that is not
    known.
    """

    rank: int = 16
    alpha: float | None = None  # scale is alpha / rank; twice the rank if not given
    targets: tuple[str, ...] | str = "usual"
    dropout: float = 0.0
    adapt: tuple[Literal["net", "text"], ...] = ("net",)  # the network, the text encoders that read for it, or both
    text_targets: tuple[str, ...] | str = "all-linear"
    adapts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (1 <= self.rank <= 65_536 and 0 <= self.dropout < 1 and (self.alpha is None or self.alpha > 0)):
            found = f"rank {self.rank}, alpha {self.alpha}, dropout {self.dropout}"
            raise ValueError(f"found {found}; expected rank of at least 1, alpha above 0, dropout from 0 to below 1")
        named = {each for each in (self.targets, self.text_targets) if isinstance(each, str)}
        if wrong := named - {"usual", "all-linear", "all-layers"}:
            told = "expected usual, all-linear, all-layers or a list of names such as [to_q, to_v]"
            raise ValueError(f"targets are {min(wrong)!r:.60}; {told}")
        if not self.adapt:
            raise ValueError("'adapt' is empty; expected net, text or both")

    def apply(self, model: HasNet, snapshots: Sequence[str]) -> Weights:
        texts = {name: (net, self.config(net, self.text_targets)) for name, net in self._encoders(model).items()}
        config = self.config(model.net, self.targets) if "net" in self.adapt else None
        return LoraWeights(model.net, config, snapshots, texts)

    def config(self, net: nn.Module, targets: tuple[str, ...] | str) -> LoraConfig:
        """What peft is told of a network, of which those layers are adapted."""
        from peft import LoraConfig

        if targets == "usual":
            targets = net.usual if isinstance(net, HasDefaultLoraTargets) else "all-linear"
        chosen = _spelled(net, targets) if isinstance(targets, tuple) else self._every(net, targets)
        if not any(f".{name}".endswith(f".{target}") for name, _ in net.named_modules() for target in chosen):
            raise _none_called(chosen, self._every(net, "all-linear"))
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=self.dropout)  # type: ignore[arg-type]

    def _encoders(self, model: HasNet) -> dict[str, nn.Module]:
        if "text" not in self.adapt:
            return {}
        found = trainable_text_encoders(model)
        if not found:
            told = "tuning.adapt names text, but this model has no text encoder that could be trained"
            raise ConfigError(f"{told}; leave it at [net]")
        return found

    @staticmethod
    def _every(net: nn.Module, kind: str) -> list[str]:
        kinds = (nn.Linear,) if kind == "all-linear" else (nn.Linear, nn.Conv2d, nn.Conv3d)
        return [name for name, module in net.named_modules() if isinstance(module, kinds)]
