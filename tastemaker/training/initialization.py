"""`--init-from`: weights to start from, of a run, a checkpoint, a file, or a folder that `tastemaker export` wrote."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config.build import InitialWeights, build_judge_model
from ..config.schema import AnyConfig, AutoencoderRunConfig, JudgeRunConfig, PreferenceRunConfig, RunConfig
from ..core.checkpoint_files import is_checkpoint
from ..core.lora import Lora
from ..core.registry import ConfigError
from ..core.types import Placement
from ..export.diffusers_pipeline import WEIGHTS_PATTERN
from ..export.lora import DIFFUSERS_LORA_FILE, LORA_SUFFIXES, is_external_lora, resolve_lora_path
from ..models.pretrained import load_state_dict

WEIGHTS_FILE = WEIGHTS_PATTERN.format(suffix="")  # of a component that is not sharded


def find_initial_weights(config: AnyConfig, source: Path) -> InitialWeights:
    """Return what `--init-from` names: the path itself, the LoRA file of an exported folder, or a folder's tensors."""
    path = resolve_lora_path(source) if isinstance(config, RunConfig) else source
    if not path.is_dir() or (path / "checkpoints").is_dir() or is_checkpoint(path):
        return path
    adapters, wants_adapters = find_lora_file(path), is_lora_tuning(config)
    if adapters is not None and wants_adapters:
        return adapters
    if adapters is not None:
        raise ConfigError(
            f"--init-from: {source} holds LoRA adapters, and the run trains all weights; set tuning.type=lora, or "
            "export with --merge"
            " [TM855]"
        )
    if wants_adapters:
        section = "model" if isinstance(config, RunConfig) else "judge"
        raise ConfigError(
            f"--init-from: {source} holds all weights, and the run trains adapters on top of them; name the folder as "
            f"{section}.weights={source} instead"
            " [TM856]"
        )
    return read_network(config, path)


def is_lora_tuning(config: AnyConfig) -> bool:
    return not isinstance(config, AutoencoderRunConfig | PreferenceRunConfig) and isinstance(config.tuning, Lora)


def find_lora_file(folder: Path) -> Path | None:
    """Return the file with LoRA adapters in an exported folder, in any layout; None if it has none."""
    if (folder / DIFFUSERS_LORA_FILE).is_file():
        return folder / DIFFUSERS_LORA_FILE
    files = sorted(file for file in folder.iterdir() if file.suffix in LORA_SUFFIXES and file.is_file())
    return files[0] if len(files) == 1 and is_external_lora(files[0]) else None


def read_exports(config: RunConfig) -> dict[Path, dict[str, Tensor]]:
    """Return the tensors of exported folders that the objective names as teachers, by their paths."""
    exports = {}
    for source in config.objective.snapshot_sources().values():
        is_run = (source.path / "checkpoints").is_dir() or is_checkpoint(source.path)
        if source.path.is_dir() and not is_run:
            if find_lora_file(source.path) is not None:
                raise ConfigError(
                    f"{source.key}: {source.path} holds LoRA adapters in the layout of another program; name the run "
                    "that trained them, or export it with --merge [TM1610]"
                )
            exports[source.path] = read_network(config, source.path)
    return exports


def read_network(config: AnyConfig, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an exported folder, by the names of the network that the configuration trains."""
    layout = config.model.layout if isinstance(config, RunConfig) else None
    if layout is None or layout.library == "transformers":
        return load_network(config, folder)
    missing = [component for component in layout.components if not (folder / component).is_dir()]
    if missing:
        raise ConfigError(
            f"--init-from: {folder} has no folder '{missing[0]}'; name one that was exported with --layout diffusers"
            " [TM857]"
        )
    return {
        prefix + key: x
        for component, prefix in layout.components.items()
        for key, x in read_component(folder / component).items()
    }


def read_component(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a component of diffusers: those of one file, or of shards with an index."""
    single = folder / WEIGHTS_FILE
    return load_state_dict(single if single.is_file() else folder)


def load_network(config: AnyConfig, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the configuration's network, loaded from a folder instead of its own weights."""
    if isinstance(config, JudgeRunConfig):
        return dict(build_judge_model(replace(config.judge, weights=str(folder)), Placement()).state_dict())
    if isinstance(config, PreferenceRunConfig):
        raise ConfigError(
            "--init-from: a preference reward loads no exported folders; name a run or a checkpoint [TM1348]"
        )
    spec: Any = config.model if isinstance(config, RunConfig) else config.autoencoder
    if "weights" not in {each.name for each in fields(spec)}:
        raise ConfigError(
            f"--init-from: {type(spec).__name__} loads no exported folders; name a run, a checkpoint or a file [TM858]"
        )
    loaded = replace(spec, weights=str(folder)).load(Placement())
    return dict((loaded.net if isinstance(config, RunConfig) else loaded).state_dict())
