"""Write a diffusers pipeline folder: the trained component plus copies of the other components."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.registry import ConfigError
from ..models.pipeline_layout import PipelineLayout
from ..models.pretrained import select_needed_files

INDEX_FILE = "model_index.json"
WEIGHTS_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"
MAX_SHARD_SIZE = "5GB"


def save_component(net: Any, tensors: Mapping[str, Tensor], folder: Path, shard: str = MAX_SHARD_SIZE) -> None:
    """A network of diffusers: its configuration and tensors, in several files with an index if they are many."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True)
    told = {key: value for key, value in json.loads(net.to_json_string()).items() if key != "_name_or_path"}
    (folder / "config.json").write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_torch_state_dict(dict(tensors), folder, filename_pattern=WEIGHTS_PATTERN, max_shard_size=shard)


def copy_other_components(base: Path, layout: PipelineLayout, folder: Path) -> None:
    """Everything of a pipeline but what was trained."""
    try:
        index = json.loads((base / INDEX_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{base} has no readable {INDEX_FILE}, so the pipeline's other parts are unknown; "
            "add --bare to leave them out"
        ) from error
    for part in [name for name, told in index.items() if isinstance(told, list) and name not in layout.parts]:
        if (base / part).is_dir():
            _copy(base / part, folder / part)
        else:
            index[part] = [None, None]  # as a filter of pictures may be, which was not fetched
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    for name in select_needed_files(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)  # what a link of the hub's cache leads to
