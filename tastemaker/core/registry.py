"""Registries: names of components, imported when they are used."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from .errors import ConfigError as ConfigError

C = TypeVar("C", bound=type)
MAX_NAMES, MAX_NEAREST = 16, 5  # listed in a message if no name is similar
IMPORTED_MODULES: list[str] = []  # modules of the user's that `--import` named, for processes that commands start
USER_CODE_VARIABLE = "TASTEMAKER_USER_CODE"  # environment variable; "refuse": no module of the user's is imported


def import_user_module(name: str) -> ModuleType:
    """Import a module of the user's, which may be in the working directory.

    That directory is searched last and only from the first such import on, so that no file in it replaces a module of
    Python or of an installed package.
    """
    if os.environ.get(USER_CODE_VARIABLE) == "refuse":
        raise ConfigError(
            f"'{name:.60}' is code of your own, which this process may not import; start the studio with --allow-code, "
            "or run the command in a terminal [TM1430]"
        )
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)
    return importlib.import_module(name)


def subprocess_path() -> str:
    """PYTHONPATH for a process that imports what this one can, without the working directory.

    Python would run a sitecustomize.py in any directory of PYTHONPATH. The process adds the working directory itself
    when it imports a module of the user's.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = {"", os.getcwd()} - set(inherited)
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [path for path in sys.path if path not in here]
    return os.pathsep.join(filter(None, [*paths, *inherited, *({package_root} - {*paths})]))


def import_modules(names: Iterable[str]) -> None:
    """Import modules of the user's, which register components under names of their own."""
    for name in names:
        try:
            import_user_module(name)
        except ConfigError:
            raise
        except Exception as error:  # importing the module of a user may raise anything
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ConfigError(
                f"--import: the module '{name:.60}' cannot be imported ({reason}); name it as in Python, such as "
                "my_package.my_module, from the directory it is in"
                " [TM848]"
            ) from error
        if name not in IMPORTED_MODULES:
            IMPORTED_MODULES.append(name)


def suggest_name(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the most similar name, or the names to choose from.

    Of more than `MAX_NAMES` names, the five nearest are listed.
    """
    names = sorted(known)
    similar = difflib.get_close_matches(word, names, 1) or difflib.get_close_matches(word.lower(), names, 1)
    if similar:
        return f"; did you mean '{similar[0]}'?"
    if not names:
        return "; no names are available"
    if len(names) <= MAX_NAMES:
        return f"; expected one of {', '.join(names)}"
    nearest = difflib.get_close_matches(word.lower(), names, MAX_NEAREST, cutoff=0.0)
    return f"; the nearest of {len(names)} names are {', '.join(nearest)}"


class Registry:
    """Maps names to "module:attribute"; a module is imported when its name is used.

    Aliases are names from other projects, each with the settings it stands for, including their `type`.
    """

    def __init__(self, kind: str, names: dict[str, str]) -> None:
        self.kind, self._names = kind, names
        self._aliases: dict[str, Mapping[str, Any]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def add(self, name: str, location: str) -> None:
        """Register a "module:attribute" under a name."""
        if name in self._names:
            raise ConfigError(
                f"{self.kind} '{name}' is already registered as {self._names[name]}; choose another name [TM104]"
            )
        self._names[name] = location

    def add_alias(self, alias: str, settings: Mapping[str, Any]) -> None:
        """Let `type: alias` stand for these settings, which include a `type`."""
        self._aliases[alias] = settings

    def register(self, name: str) -> Callable[[C], C]:
        """A class decorator that registers the class once its module is imported."""

        def decorate(cls: C) -> C:
            if "." in cls.__qualname__:
                raise ConfigError(
                    f"{self.kind} '{name:.60}' is defined inside {cls.__qualname__}; move the class to the top "
                    "level of its module [TM105]"
                )
            self.add(name, f"{cls.__module__}:{cls.__qualname__}")
            return cls

        return decorate

    def aliases(self, name: str) -> list[str]:
        """Aliases of a registered name."""
        return sorted(alias for alias, settings in self._aliases.items() if settings["type"] == name)

    def resolve_alias(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an alias in `type` by the settings it stands for; the settings given override them."""
        defaults = self._aliases.get(settings["type"], {"type": settings["type"]})
        return {**defaults, **{key: value for key, value in settings.items() if key != "type"}}

    def name(self, cls: type) -> str:
        """The registered name of a class, or its "module:Class"."""
        location = f"{cls.__module__}:{cls.__qualname__}"
        return next((name for name, known in self._names.items() if known == location), location)

    def locate(self, name: str) -> str:
        """The "module:attribute" of a name, an alias or a "module:attribute" itself; empty if it is unknown."""
        return self._names.get(self._aliases.get(name, {"type": name})["type"], name if ":" in name else "")

    def find(self, name: str, where: str = "") -> type:
        """Import the class of a name, an alias or "my_package.module:Class"."""
        cls = self.find_object(name, where)
        if not isinstance(cls, type):
            prefix = f"{where}: " if where else ""
            raise ConfigError(
                f"{prefix}expected a class, but '{name:.60}' is a {type(cls).__name__}; name a class after the colon "
                "[TM106]"
            )
        return cls

    def find_object(self, name: str, where: str = "") -> Any:
        """Import what a name, an alias or "my_package.module:attribute" stands for, which may not be a class."""
        prefix = f"{where}: " if where else ""
        location = self.locate(name)
        if not location:
            raise ConfigError(
                f"{prefix}unknown {self.kind} '{name:.60}'{suggest_name(name, self._names)}; for your own, name "
                "the module that registers it with --import"
                " [TM107]"
            )
        module, _, attribute = location.partition(":")
        try:
            is_own = module.split(".")[0] == __name__.split(".")[0]
            component = vars((importlib.import_module if is_own else import_user_module)(module)).get(attribute)
        except Exception as error:  # importing the module of a user may raise anything
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ConfigError(
                f"{prefix}{self.kind} '{name:.60}' cannot be imported ({reason}); install the missing package, or "
                "correct the module [TM108]"
            ) from error
        if component is None:
            raise ConfigError(
                f"{prefix}module '{module:.60}' does not define '{attribute:.60}'; correct the name after the "
                "colon [TM109]"
            )
        return component


# Not in config.registries, because models load autoencoders by name and do not import config.
AUTOENCODERS = Registry(
    "autoencoder",
    {
        "autoencoder_kl": "tastemaker.models.autoencoder_kl:AutoencoderKLSpec",
        "block_vae": "tastemaker.models.block_vae:BlockVaeSpec",
        "from_config": "tastemaker.models.vae:CustomAutoencoderSpec",
        "vae": "tastemaker.models.vae:VaeSpec",
        "vq": "tastemaker.models.image_tokenizer:VqSpec",
    },
)
