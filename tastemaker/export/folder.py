"""A pipeline's folder in diffusers' layout, its trained part anew and the others as they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..models.layouts import Layout
from ..pretrained import lean
from ..registry import ConfigError

INDEX = "model_index.json"
WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"
SHARD = "5GB"


def write_part(net: Any, tensors: Mapping[str, Tensor], folder: Path, shard: str = SHARD) -> None:
    """A network of diffusers: its configuration and tensors, in several files with an index if they are many."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True)
    told = {key: value for key, value in json.loads(net.to_json_string()).items() if key != "_name_or_path"}
    (folder / "config.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_torch_state_dict(dict(tensors), folder, filename_pattern=WEIGHTS, max_shard_size=shard)


def copy_parts(base: Path, layout: Layout, folder: Path) -> None:
    """Everything of a pipeline but what was trained."""
    try:
        index = json.loads((base / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base} has no readable {INDEX}, so the pipeline's other parts are unknown; add --bare to leave them out"
        ) from error
    for part in [name for name, told in index.items() if isinstance(told, list) and name not in layout.parts]:
        if (base / part).is_dir():
            _copy(base / part, folder / part)
        else:
            index[part] = [None, None]  # as a filter of pictures may be, which was not fetched
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    for name in lean(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)  # what a link of the hub's cache leads to
