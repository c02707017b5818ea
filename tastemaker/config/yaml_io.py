"""YAML as recipes are written: numbers as everyone expects them, keys that stand once, mistakes with their line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..core.registry import ConfigError

FLOAT = "tag:yaml.org,2002:float"
TEXT = "tag:yaml.org,2002:str"
EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")  # YAML 1.1 takes 3e-4 and 1.5e3 for text
CLOCK = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?$")  # and 9:16, the shape of a picture, for 556 seconds


class Loader(yaml.SafeLoader):
    """Plain data, in which nothing refers to anything else."""

    yaml_implicit_resolvers = {
        first: [(TEXT, CLOCK), *known] if first in "-+0123456789" else list(known)
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it out
            problem = "found an alias (*name); write its value out, or use 'extends'"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' stands twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes what the loader reads back."""


Loader.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))
Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Read YAML; `where` is what to call it if that fails."""
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: {error.problem or error.context}; correct the YAML") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply; expected sections of settings") from error
    except (yaml.YAMLError, ValueError) as error:  # dates and numbers that cannot be raise ValueError
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}; correct the YAML") from error


def render_yaml(data: Any) -> str:
    """Write YAML, short things on one line."""
    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return text
