"""The command that converts a run to a file or to the layout of another library: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import MODELS, Precision, stderr_console

app = typer.Typer()


@app.command(rich_help_panel=MODELS, epilog="Example: tastemaker export runs/demo --out demo.safetensors")
def export(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    out: Annotated[Path, typer.Option(help="Output .safetensors file; a folder with --layout and for Show-o.")],
    weights: Annotated[str, typer.Option(help="ema, live or another snapshot; default: ema if any.")] = "",
    bits: Annotated[int, typer.Option(help="Bits per weight: 8, 16 or 32; not with --layout.")] = 16,
    layout: Annotated[
        Literal["diffusers", "comfyui", "authors", "llamagen"] | None, typer.Option(help="Layout of another library.")
    ] = None,
    dtype: Annotated[
        Precision | None, typer.Option(help="Dtype, with --layout; default: fp32 for llamagen, bf16 for others.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the LoRA into the weights.")] = False,
    network_only: Annotated[
        bool, typer.Option("--network-only", help="For diffusers: only the trained network.")
    ] = False,
    fsdp_shards: Annotated[int, typer.Option(min=0, help="For llamagen: number of FSDP shards; 0: one file.")] = 0,
) -> None:
    """Export a run's weights: one file for `weights:` and `codec:`, or the layout of another library."""
    from ..core import output_paths
    from ..export import generator, llamagen
    from ..export import weights as weights_file

    output_paths.check_output_directory(out.parent)
    if layout is None:
        return weights_file.export_weights(run, out, weights, bits, stderr_console())
    torch_dtype = generator.DTYPES[dtype or ("fp32" if layout == "llamagen" else "bf16")]
    if layout == "llamagen":
        options = llamagen.LlamagenExport(run, out, weights, torch_dtype, fsdp_shards)
        return llamagen.export_llamagen(options, stderr_console())
    order = generator.GeneratorExport(run, out, layout, weights, torch_dtype, merge, network_only)
    return generator.export_generator(order, stderr_console())
