"""Python snippets for the model card that load the exported weights with diffusers."""

from __future__ import annotations

from ..models.pipeline_layout import PipelineLayout

FOLDER_PLACEHOLDER = "path/of/this/folder"


def pipeline_snippet(layout: PipelineLayout) -> str:
    """Of a pipeline's folder."""
    return _python(layout, [f'pipeline = {layout.pipeline}.from_pretrained("{FOLDER_PLACEHOLDER}")'])


def lora_snippet(layout: PipelineLayout, base: str, file: str) -> str:
    """Of adapters for a base; where two parts have some it takes one at a time, under the name of the first."""
    lines = [f'pipeline = {layout.pipeline}.from_pretrained("{base}")']
    if not layout.shared:
        return _python(layout, [*lines, f'pipeline.load_lora_weights("{FOLDER_PLACEHOLDER}")'])
    lines += [f'found = load_file("{FOLDER_PLACEHOLDER}/{file}").items()']
    for part in layout.parts:
        renamed = "key" if part == layout.part else f'key.replace("{part}.", "{layout.part}.")'
        where = "" if part == layout.part else f", load_into_{part}=True"
        lines += [f'{part} = {{{renamed}: x for key, x in found if key.startswith("{part}.")}}']
        lines += [f'pipeline.load_lora_weights({part}, adapter_name="{part}"{where})']
    return _python(layout, ["from safetensors.torch import load_file", *lines])


def _python(layout: PipelineLayout, lines: list[str]) -> str:
    return "\n".join(["```python", f"from diffusers import {layout.pipeline}", *lines, "```"])
