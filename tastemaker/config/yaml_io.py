"""Write the YAML of recipes. `core/safe_files.py` reads it: 3e-4 is a number, duplicate keys and aliases are errors."""

from __future__ import annotations

from typing import Any

import yaml

from ..core.safe_files import EXPONENT, FLOAT
from ..core.safe_files import parse_yaml as parse_yaml


class Dumper(yaml.SafeDumper):
    """Writes YAML that the loader reads back: without aliases for values that occur twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))


def render_yaml(data: Any) -> str:
    """Format data as YAML, with short mappings and lists on one line."""
    text: str = yaml.dump(data, Dumper=Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return text
