"""The table of published key layouts in docs/export.md, made of the `layout` of every model."""

from __future__ import annotations

from pathlib import Path

from ..config.registries import MODELS
from ..core.model_spec import ModelSpec, PipelineLayout
from ..models.checkpoint_keys import keep_names, reject_unknown_names

TABLE_BEGIN, TABLE_END = "<!-- key layouts: written by `make schema`, do not edit -->", "<!-- key layouts: end -->"
COLUMNS = ("model", "class that loads it", "adapters for that class", "adapters for ComfyUI", "whole network")
NONE = "not supported"


def models_with_layout() -> dict[str, PipelineLayout]:
    """The layouts of all models that other programs load, by the names of the models."""
    specs: dict[str, ModelSpec] = {name: MODELS.find(name, "model")() for name in MODELS}
    return {name: spec.layout for name, spec in specs.items() if spec.layout is not None}


def layout_row(name: str, layout: PipelineLayout) -> tuple[str, ...]:
    """Model, class, and the names of one layer X of its adapters and of its network."""
    loader = f"`{layout.pipeline_class}`" if layout.pipeline_class else "none"
    return f"`{name}`", loader, _library_adapters(layout), _comfyui_adapters(layout), _network_names(layout)


def _library_adapters(layout: PipelineLayout) -> str:
    if layout.library == "transformers":
        return "`base_model.model.X`, for peft"
    prefixes = " and ".join(f"`{component}.X`" for component in layout.components)
    how = {"pipeline": "", "merge": ", merged by code in the card", "tastemaker": ", read by this package only"}
    return prefixes + how[layout.lora_loader]


def _comfyui_adapters(layout: PipelineLayout) -> str:
    if not layout.comfyui_lora_prefix:
        return NONE
    names = "" if layout.comfyui_layer is None else ", X as its authors name it"
    return f"`{layout.comfyui_lora_prefix}_X`{names}"


def _network_names(layout: PipelineLayout) -> str:
    if layout.library == "transformers":
        return "names of transformers"
    if layout.to_original is reject_unknown_names:
        return "names of diffusers"
    if not layout.pipeline_class:
        return "names of its authors"
    if layout.to_original is keep_names:
        return "names of diffusers, which are the authors'"
    return "names of diffusers or of its authors"


def format_layout_table() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(layout_row(*each) for each in models_with_layout().items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replace_layout_table(text: str) -> str:
    """Replace the table in the text of docs/export.md."""
    before, rest = text.split(TABLE_BEGIN, 1)
    return f"{before}{TABLE_BEGIN}\n{format_layout_table()}\n{TABLE_END}{rest.split(TABLE_END, 1)[1]}"


def write_layout_page(path: Path = Path("docs/export.md")) -> None:
    path.write_text(replace_layout_table(path.read_text(encoding="utf-8")), encoding="utf-8")
