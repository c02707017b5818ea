"""Names for the kinds of one thing, imported only when asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from .errors import ConfigError as ConfigError

C = TypeVar("C", bound=type)
MANY = 40  # names that are still read, if none is alike


def suggest_name(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, 1) or difflib.get_close_matches(word.lower(), names, 1)
    if near:
        return f"; did you mean '{near[0]}'?"
    some = ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")
    return f"; known are {some}" if names else "; none are known"


class Registry:
    """Names to "module:attribute"; nothing is imported until found.

    `aliases` are what others call things, each with the settings it stands for, their `type` among them.
    """

    def __init__(self, kind: str, names: dict[str, str], aliases: Mapping[str, Mapping[str, Any]] = {}) -> None:
        self.kind, self._names, self._aliases = kind, names, aliases

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def add(self, name: str, place: str) -> None:
        if name in self._names:
            raise ConfigError(f"{self.kind} '{name}' is already registered as {self._names[name]}; choose another name")
        self._names[name] = place

    def register(self, name: str) -> Callable[[C], C]:
        """A decorator that gives a class a name, which is known once the module that says so is imported."""

        def give(cls: C) -> C:
            if "." in cls.__qualname__:
                raise ConfigError(f"{self.kind} '{name:.60}' lies within {cls.__qualname__}; move it to its module")
            self.add(name, f"{cls.__module__}:{cls.__qualname__}")
            return cls

        return give

    def aliases(self, name: str) -> list[str]:
        """What others call a thing."""
        return sorted(alias for alias, meant in self._aliases.items() if meant["type"] == name)

    def spelled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with a `type`, an alias replaced by what it stands for; what they say themselves counts more."""
        meant = self._aliases.get(settings["type"], {"type": settings["type"]})
        return {**meant, **{key: value for key, value in settings.items() if key != "type"}}

    def name(self, found: type) -> str:
        """What to write after `type:` to get this class back."""
        place = f"{found.__module__}:{found.__qualname__}"
        return next((name for name, known in self._names.items() if known == place), place)

    def place(self, name: str) -> str:
        """The "module:attribute" behind a registered name or alias, or behind one that is written so; else empty."""
        return self._names.get(self._aliases.get(name, {"type": name})["type"], name if ":" in name else "")

    def find(self, name: str, where: str = "") -> type:
        """The class behind a name, or behind "my_package.module:Class"."""
        start = f"{where}: " if where else ""
        place = self.place(name)
        if not place:
            raise ConfigError(f"{start}no {self.kind} is called '{name:.60}'{suggest_name(name, self._names)}")
        module, _, attribute = place.partition(":")
        try:
            found = vars(importlib.import_module(module)).get(attribute)
        except Exception as error:  # a foreign module may raise anything at all while it is imported
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ConfigError(
                f"{start}{self.kind} '{name:.60}' cannot be imported ({reason}); install or correct it"
            ) from error
        if found is None:
            raise ConfigError(f"{start}module '{module:.60}' has no '{attribute:.60}'; check the name after the colon")
        if not isinstance(found, type):
            raise ConfigError(
                f"{start}'{name:.60}' is a {type(found).__name__}; expected a class to make the {self.kind} of"
            )
        return found


# Here rather than in config.registries, because models open autoencoders by name and do not import config.
AUTOENCODERS = Registry(
    "autoencoder",
    {
        "autoencoder_kl": "tastemaker.models.autoencoder_kl:AutoencoderKL",
        "block_vae": "tastemaker.models.block_vae:BlockVae",
        "from_config": "tastemaker.models.custom_autoencoder:CustomAutoencoder",
        "vae": "tastemaker.models.vae:Vae",
        "vq": "tastemaker.models.vq:Vq",
    },
)
