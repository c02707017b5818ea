"""The command that converts a run to a file or to the layout of another library: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import ExportLayout, Precision, stderr_console

app = typer.Typer()


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    out: Annotated[Path, typer.Option(help="Output .safetensors file; a folder with --layout and for Show-o.")],
    weights: Annotated[str, typer.Option(help="ema, live or another snapshot; default: ema if any.")] = "",
    bits: Annotated[int, typer.Option(help="Bits per weight: 8, 16 or 32; not with --layout.")] = 16,
    layout: Annotated[
        ExportLayout | None,
        typer.Option(help="Layout of another library."),
    ] = None,
    dtype: Annotated[Precision, typer.Option(help="Dtype, with --layout.")] = Precision.bf16,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the LoRA into the weights.")] = False,
    bare: Annotated[bool, typer.Option("--bare", help="For diffusers: only the trained network.")] = False,
    ranks: Annotated[int, typer.Option(min=0, help="For llamagen: number of FSDP shards; 0: one file.")] = 0,
) -> None:
    """Export a run's weights: one file for `weights:` and `codec:`, or the layout of another library."""
    from ..core import output_paths
    from ..export import generator, llamagen
    from ..export import weights as weights_file

    output_paths.check_output_directory(out.parent)
    if layout is None:
        return weights_file.export_weights(run, out, weights, bits, stderr_console())
    kept = generator.DTYPES[dtype.value]
    if layout is ExportLayout.llamagen:
        return llamagen.export_llamagen(llamagen.LlamagenExport(run, out, weights, kept, ranks), stderr_console())
    whose: Literal["diffusers", "comfyui", "authors"] = "diffusers" if layout is ExportLayout.diffusers else "comfyui"
    whose = "authors" if layout is ExportLayout.authors else whose
    order = generator.GeneratorExport(run, out, whose, weights, kept, merge, bare)
    return generator.export_generator(order, stderr_console())
