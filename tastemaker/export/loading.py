"""How diffusers loads what was written for it, in Python that a model's page shows."""

from __future__ import annotations

from ..models.layouts import Layout

FOLDER = "path/of/this/folder"


def whole(layout: Layout) -> str:
    """Of a pipeline's folder."""
    return _python(layout, [f'pipeline = {layout.pipeline}.from_pretrained("{FOLDER}")'])


def adapters(layout: Layout, base: str, file: str) -> str:
    """Of adapters for a base; where two parts have some it takes one at a time, under the name of the first."""
    lines = [f'pipeline = {layout.pipeline}.from_pretrained("{base}")']
    if not layout.shared:
        return _python(layout, [*lines, f'pipeline.load_lora_weights("{FOLDER}")'])
    lines += [f'found = load_file("{FOLDER}/{file}").items()']
    for part in layout.parts:
        renamed = "key" if part == layout.part else f'key.replace("{part}.", "{layout.part}.")'
        where = "" if part == layout.part else f", load_into_{part}=True"
        lines += [f'{part} = {{{renamed}: x for key, x in found if key.startswith("{part}.")}}']
        lines += [f'pipeline.load_lora_weights({part}, adapter_name="{part}"{where})']
    return _python(layout, ["from safetensors.torch import load_file", *lines])


def _python(layout: Layout, lines: list[str]) -> str:
    return "\n".join(["```python", f"from diffusers import {layout.pipeline}", *lines, "```"])
