"""`tastemaker export --layout`: a post-trained model in the layouts that diffusers, ComfyUI and its authors load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..config.dump import registered_name
from ..config.load import load_any_config
from ..config.registries import MODELS
from ..config.schema import RunConfig
from ..core.lora import Lora, LoraWeights
from ..core.model_spec import PipelineLayout
from ..core.output_paths import replace_directory
from ..core.registry import ConfigError
from ..core.types import Placement
from ..core.weights import Weights
from ..models.pipeline_components import TINY
from ..models.pretrained import WeightsSource, find_weights
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from ..report.run_record import RunRecord, read_run
from ..training import checkpoint
from ..training.run_directory import CONFIG_FILE, RECIPE_FILE
from . import diffusers_pipeline, lora, transformers_model
from .comfyui import WORKFLOWS, ComfyWorkflowSettings
from .diffusers_pipeline import GeneratorExport as GeneratorExport
from .model_card import (
    ModelCardData,
    lora_snippet,
    original_lora_snippet,
    peft_snippet,
    pipeline_snippet,
    public_name,
    render_model_card,
    tastemaker_snippet,
    transformers_snippet,
    write_gallery,
)
from .modelspec import make_metadata, save_safetensors
from .publishable import publishable_config, remove_local_names
from .weights import choose_checkpoint_snapshot, export_autoencoder, is_autoencoder_run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_COMFYUI_STEPS = 25


@dataclass(frozen=True)
class TrainedGenerator:
    """The network of a run with the weights of a checkpoint."""

    config: RunConfig
    layout: PipelineLayout
    base_model: str
    checkpoint: Path
    weights_name: str  # live, or the name of a snapshot
    net: Any
    weights: Weights
    size: tuple[int, int]  # height and width of a sample

    def adapters(self, options: GeneratorExport) -> LoraWeights | None:
        """Return the LoRA adapters if they are to be exported by themselves."""
        return self.weights if isinstance(self.weights, LoraWeights) and not options.merge else None

    def metadata(self, options: GeneratorExport) -> dict[str, str]:
        """Return the `modelspec.*` metadata of exported files."""
        is_lora = self.adapters(options) is not None
        return make_metadata(self.config, options.layout, is_lora=is_lora, size=self.size)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of the network with LoRA adapters merged."""
        tensors: Mapping[str, Tensor] = self.net.state_dict()
        if isinstance(self.weights, LoraWeights):
            tensors = self.weights.merged()
        return {key: x.detach().to(dtype) if x.is_floating_point() else x for key, x in tensors.items()}


def export_generator(options: GeneratorExport, console: Console) -> None:
    """Write a folder with weights, recipe, model card and, for ComfyUI, a workflow."""
    if is_autoencoder_run(options.run_dir):
        export_autoencoder(options.run_dir, options.out, options.layout, options.weights, options.dtype, console)
        return
    if options.out.suffix == ".safetensors":
        raise ConfigError(
            f"--out: '{options.out}' is the name of a file; give the name of a folder, because a model card is "
            "written as well [TM665]"
        )
    if options.out.exists():
        raise ConfigError(f"--out: {options.out} exists already; give a new folder, or remove this one [TM666]")
    if diffusers_pipeline.is_dit_run(options.run_dir):
        export_dit = diffusers_pipeline.export_dit_pipeline
        (diffusers_pipeline.export_dit_file if options.layout == "authors" else export_dit)(options, console)
        return
    trained = load_trained_generator(options)
    write = WRITERS[options.layout]
    with replace_directory(options.out) as partial:
        usage = write(options, trained, partial)
        record = read_run(options.run_dir)
        card = collect_card_data(options, trained, record, usage, write_gallery(record, partial))
        (partial / "README.md").write_text(render_model_card(card), encoding="utf-8")
        recipe = (options.run_dir / CONFIG_FILE).read_text(encoding="utf-8")
        (partial / RECIPE_FILE).write_text(publishable_config(recipe) if options.publishable else recipe, "utf-8")
        if options.publishable:
            remove_local_names(partial)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file()) / 1e6
    text = f"{options.out}: {trained.weights_name} weights of {trained.checkpoint.name}, {size:.1f} MB"
    console.print(text, highlight=False)


def load_trained_generator(options: GeneratorExport) -> TrainedGenerator:
    """Load the network with a snapshot of its weights. Optimizer state and other snapshots are not read."""
    config, layout, step_dir = find_checkpoint(options.run_dir)
    model_name, is_lora = type(config.model).__name__, isinstance(config.tuning, Lora)
    if "transformers" in (options.layout, layout.library) and options.layout != layout.library:
        raise ConfigError(f"--layout: {options.layout} does not support {model_name}; give {layout.library} [TM2570]")
    if options.layout != "authors" and not layout.pipeline_class:
        raise ConfigError(f"--layout: {options.layout} does not support {model_name}; give authors [TM667]")
    if options.layout == "comfyui" and not layout.comfyui_lora_prefix and layout.pipeline_class:
        raise ConfigError(f"--layout: ComfyUI's names for {model_name} are unknown; use --layout diffusers [TM668]")
    if options.merge and not is_lora:
        raise ConfigError("--merge: this run trained no adapters; remove --merge [TM669]")
    needs_pipeline = options.layout == "diffusers" and not options.network_only and (options.merge or not is_lora)
    if needs_pipeline and config.model.weights == TINY:
        raise ConfigError(
            "this run used small random weights, and no pipeline exists for them; add --network-only [TM670]"
        )
    name = choose_checkpoint_snapshot(options.weights, step_dir)
    model = config.model.load(Placement(dtype=options.dtype))
    weights = config.tuning.apply(model, ())
    if isinstance(weights, LoraWeights):
        for p in weights.trainable().values():
            p.data = p.data.float()  # factors are multiplied before they are rounded
    checkpoint.initialize_weights(step_dir, weights, "weights" if name == "live" else f"snapshots/{name}")
    size = (model.pixels[2], model.pixels[3])
    return TrainedGenerator(config, layout, config.model.weights or "", step_dir, name, model.net, weights, size)


def find_checkpoint(run_dir: Path) -> tuple[RunConfig, PipelineLayout, Path]:
    """Return configuration, layout and last checkpoint of a run that trained a published model."""
    step_dir = checkpoint.latest_checkpoint(run_dir)
    if not (run_dir / CONFIG_FILE).is_file() or step_dir is None:
        raise ConfigError(f"{run_dir} has no checkpoint to export; give a run directory with a checkpoint [TM671]")
    config = load_any_config(run_dir / CONFIG_FILE)
    layout = config.model.layout if isinstance(config, RunConfig) else None
    if not isinstance(config, RunConfig) or layout is None:
        known = ", ".join(name for name in MODELS if MODELS.find(name, "model")().layout)
        raise ConfigError(f"--layout: this model is not a published one ({known}); remove --layout [TM672]")
    return config, layout, step_dir


def write_diffusers(options: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """Write LoRA adapters or a pipeline folder for diffusers. Returns the usage for the model card."""
    layout, base_model, adapters = trained.layout, trained.base_model, trained.adapters(options)
    if adapters is not None:
        file = out / lora.DIFFUSERS_LORA_FILE
        lora.write_diffusers_lora(adapters, layout, file, options.dtype, trained.metadata(options))
        return lora_snippet(layout, base_model, lora.DIFFUSERS_LORA_FILE)
    if not options.network_only:
        base_folder = find_weights(base_model, WeightsSource(base_model))
        diffusers_pipeline.copy_other_components(base_folder, layout, out)
    tensors = trained.tensors(options.dtype)
    for component, prefix in layout.components.items():
        component_tensors = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
        net = trained.net.get_submodule(prefix.rstrip("."))
        diffusers_pipeline.save_component(
            net, component_tensors, out / component, options.max_shard_size, trained.metadata(options)
        )
    if options.network_only:
        base_name = public_name(base_model)
        return " ".join(f"The folder `{component}` replaces that of {base_name}." for component in layout.components)
    return pipeline_snippet(layout) if layout.lora_loader != "tastemaker" else tastemaker_snippet()


def write_comfyui(options: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """Write one file for ComfyUI and a workflow that loads it. Returns the usage for the model card."""
    adapters, layout = trained.adapters(options), trained.layout
    if adapters is None:
        files = write_original_networks(options, trained, out)
    else:
        trained_prefixes = [
            prefix
            for prefix in layout.components.values()
            if any(key.startswith(prefix) for key in adapters.trainable())
        ]
        files = [original_file_name(options, prefix) for prefix in trained_prefixes]
        for prefix, file in zip(trained_prefixes, files, strict=True):
            lora.write_comfyui_lora(adapters, layout, out / file, options.dtype, prefix, trained.metadata(options))
    folder = "loras" if adapters is not None else "diffusion_models"
    usage = f"Put {' and '.join(f'`{file}`' for file in files)} into ComfyUI's `models/{folder}`."
    build_workflow = WORKFLOWS.get(layout.comfyui_workflow)
    if build_workflow is None:
        return usage
    nodes = build_workflow(workflow_settings(trained, files[0], is_lora=adapters is not None))
    (out / "workflow.json").write_text(json.dumps(nodes, indent=1) + "\n", encoding="utf-8")
    return f"{usage} Then open `workflow.json` in ComfyUI; it samples with the settings of `sample` in the recipe."


def write_original_layout(options: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """Write one file under the names that the model's authors use. Returns the usage for the model card."""
    layout, adapters = trained.layout, trained.adapters(options)
    if adapters is not None:
        file = f"{options.out.name}.pt"
        lora.write_original_lora(adapters, layout, out / file)
        encoders = f", including those of {', '.join(adapters.text_encoders)}" if adapters.text_encoders else ""
        usage = (
            f"`{file}` holds LoRA adapters under the authors' names with alpha {layout.original_lora_alpha:g}"
            f"{encoders}; `tastemaker generate RECIPE --lora` reads it too."
        )
        if adapters.text_encoders:
            return usage
        return f"{usage} {original_lora_snippet(file, layout.original_lora_alpha)}"
    files = write_original_networks(options, trained, out)
    if len(files) > 1:
        return f"{' and '.join(f'`{file}`' for file in files)} hold the networks under their authors' names."
    return f"`{files[0]}` holds the network under its authors' names."


def write_transformers(options: GeneratorExport, trained: TrainedGenerator, out: Path) -> str:
    """Write adapters for peft, or the folder of a model of transformers. Returns the usage for the model card."""
    adapters, name = trained.adapters(options), trained.layout.pipeline_class
    if adapters is not None:
        transformers_model.write_peft_adapters(
            adapters, out, options.dtype, trained.base_model, trained.metadata(options)
        )
        return peft_snippet(name, trained.base_model)
    base = None if options.network_only else find_weights(trained.base_model, WeightsSource(trained.base_model))
    tensors = trained.tensors(options.dtype)
    transformers_model.write_model(tensors, base, out, options.max_shard_size, trained.metadata(options))
    if base is None:
        return f"The file replaces the tensors of the same names in {public_name(trained.base_model)}."
    return transformers_snippet(name)


def write_original_networks(options: GeneratorExport, trained: TrainedGenerator, out: Path) -> list[str]:
    """Write a file for each network under its authors' names. Returns the names of the files."""
    tensors, files = trained.tensors(options.dtype), []
    for prefix in trained.layout.components.values():
        net = trained.net.get_submodule(prefix.rstrip("."))
        own = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
        original = trained.layout.to_original(own, net.config)
        files.append(original_file_name(options, prefix))
        save_safetensors(original, out / files[-1], trained.metadata(options))
    return files


def original_file_name(options: GeneratorExport, prefix: str) -> str:
    """Return NAME.safetensors, or NAME-high.safetensors for the transformer whose tensors begin with `high.`."""
    return "-".join([options.out.name, *prefix.rstrip(".").split()]) + ".safetensors"


def workflow_settings(trained: TrainedGenerator, file: str, *, is_lora: bool) -> ComfyWorkflowSettings:
    """The settings of the section `sample`, and those of training where it has none."""
    spec: Any = trained.config.model
    num_steps, shift = DEFAULT_COMFYUI_STEPS, 1.0
    if isinstance(process := trained.config.process, GaussianProcess):
        num_steps = process.num_steps
        shift = process.path.shift if isinstance(process.path, RectifiedFlow) else shift
    training = {"height": spec.height, "width": spec.width, "num_steps": num_steps}
    settings: dict[str, Any] = {**training, "guidance_scale": spec.guidance_scale}
    settings |= trained.config.sample.inference_settings()
    return ComfyWorkflowSettings(file, is_lora, shift=shift, **settings)


WRITERS: dict[str, Callable[[GeneratorExport, TrainedGenerator, Path], str]] = {
    "diffusers": write_diffusers,
    "comfyui": write_comfyui,
    "authors": write_original_layout,
    "transformers": write_transformers,
}


def collect_card_data(
    options: GeneratorExport,
    trained: TrainedGenerator,
    record: RunRecord,
    usage: str,
    gallery: Sequence[tuple[str, str]] = (),
) -> ModelCardData:
    """Collect what the model card states."""
    config, sources = trained.config, trained.config.model.sources
    return ModelCardData(
        record=record,
        base_model=trained.base_model,
        source=sources[0] if sources else None,
        method=(type(config.objective).__doc__ or "").strip().splitlines()[0],
        rewards={name: reward.spec.sources for name, reward in config.rewards.items()},
        step=trained.checkpoint.name,
        weights=trained.weights_name,
        usage=usage,
        is_lora=trained.adapters(options) is not None,
        objective=registered_name(type(config.objective)),
        library=trained.layout.library,
        gallery=tuple(gallery),
        frames=config.model.frames,
    )
