"""Read and write the YAML of recipes: 3e-4 is a number, duplicate keys and aliases are errors with their line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..core.registry import ConfigError

FLOAT = "tag:yaml.org,2002:float"
TEXT = "tag:yaml.org,2002:str"
EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")  # text in YAML 1.1: 3e-4 and 1.5e3
CLOCK = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?$")  # 556 seconds in YAML 1.1: the aspect ratio 9:16


class Loader(yaml.SafeLoader):
    """Loads plain data, without aliases."""

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
        keys = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"duplicate key '{key.value}'", problem_mark=key.start_mark)
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes YAML that the loader reads back."""


Loader.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))
Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; `where` names the source in error messages."""
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{where}{line}: invalid YAML: {error.problem or error.context}; correct this line [TM064]"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{where}: the YAML is nested too deeply; write sections with settings, such as optim: {{lr: 1e-4}} [TM065]"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # invalid dates and numbers raise ValueError
        raise ConfigError(f"{where}: invalid YAML: {str(error).splitlines()[0]}; correct the file [TM066]") from error


def render_yaml(data: Any) -> str:
    """Format data as YAML, with short mappings and lists on one line."""
    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return text
