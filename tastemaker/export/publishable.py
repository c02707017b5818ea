"""What may leave this machine: configurations without secrets and without paths of its disks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ..config.yaml_io import render_yaml
from ..core.safe_files import read_json_object
from ..report.run_record import parse_config

SECRET_KEY = re.compile(r"(?i)(^|_)(api_?key|token|password|passwd|secret|authorization|credentials?)($|_)")
SECRET_NAME = re.compile(r"(?i)_env$")  # names an environment variable and holds no secret
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})")
ABSOLUTE = re.compile(r"^(~?/|~\\|[A-Za-z]:[\\/]|\\\\|file:)")
REMOVED = "removed"
LOADED_FROM = "_name_or_path"


def publishable_config(text: str) -> str:
    """The YAML of a configuration without secrets; paths outside of the package keep their last part only."""
    settings = parse_config(text)
    return render_yaml(_clean(settings)) if settings else ""


def remove_local_names(folder: Path) -> None:
    """Remove from the configs in a folder the paths that diffusers and transformers loaded their components from."""
    for path in folder.rglob("*.json"):
        try:
            config = read_json_object(path)
        except (OSError, ValueError):
            continue
        if ABSOLUTE.match(str(config.get(LOADED_FROM, ""))):
            del config[LOADED_FROM]
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _clean(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _clean(each, str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_clean(each, key) for each in value]
    if not isinstance(value, str):
        return value
    if SECRET_KEY.search(key) and not SECRET_NAME.search(key) and value:
        return REMOVED
    return clean_text(value)


def clean_text(text: str) -> str:
    """A setting without secrets, without the user and query of an address, and without the folders of a path."""
    text = SECRET_VALUE.sub(REMOVED, text)
    if re.match(r"^[a-z][a-z0-9+.-]*://", text) and not text.startswith("file:"):
        parts = urlsplit(text)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    if ABSOLUTE.match(text):
        return PureWindowsPath(text.rstrip("/\\")).name or REMOVED
    return text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text
