"""The command that converts a run to a file or to the layout of another library: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..console import show_status
from .options import MODELS, Precision, print_next_steps, stderr_console

app = typer.Typer()


@app.command(rich_help_panel=MODELS, epilog="Example: tastemaker export runs/demo --out demo.safetensors")
def export(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    out: Annotated[Path, typer.Option(help="Output .safetensors file; a folder with --layout and for Show-o.")],
    weights: Annotated[str, typer.Option(help="ema, live or another snapshot; default: ema if any.")] = "",
    bits: Annotated[int, typer.Option(help="Bits per weight: 8, 16 or 32; not with --layout.")] = 16,
    layout: Annotated[
        Literal["diffusers", "comfyui", "transformers", "authors", "llamagen"] | None,
        typer.Option(help="Layout of another library."),
    ] = None,
    dtype: Annotated[
        Precision | None, typer.Option(help="Dtype, with --layout; default: fp32 for llamagen, bf16 for others.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the LoRA into the weights.")] = False,
    network_only: Annotated[
        bool, typer.Option("--network-only", help="For diffusers: only the trained network.")
    ] = False,
    push: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="Also upload the folder to this repository on the hub.")
    ] = "",
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; default: that of its owner.")
    ] = None,
    fsdp_shards: Annotated[int, typer.Option(min=0, help="For llamagen: number of FSDP shards; 0: one file.")] = 0,
) -> None:
    """Export a run's weights: one file for `weights:` and `codec:`, or the layout of another library."""
    from ..core import output_paths
    from ..export import generator, hub, llamagen
    from ..export import weights as weights_file

    output_paths.check_output_directory(out.parent)
    console = stderr_console()
    if push:
        hub.check_push(push, out)
    torch_dtype = generator.DTYPES[dtype or ("fp32" if layout == "llamagen" else "bf16")]
    with show_status(f"exporting {run}", console):
        if layout is None:
            weights_file.export_weights(run, out, weights, bits, console)
        elif layout == "llamagen":
            llamagen.export_llamagen(llamagen.LlamagenExport(run, out, weights, torch_dtype, fsdp_shards), console)
        else:
            order = generator.GeneratorExport(
                run, out, layout, weights, torch_dtype, merge, network_only, publishable=bool(push)
            )
            generator.export_generator(order, console)
    if push:
        with show_status(f"uploading {out}", console):
            done = hub.push_folder(out, push, private=private)
        console.print(done, markup=False, highlight=False, soft_wrap=True)
    print_next_steps(*suggest_after_export(run, out, layout))


def suggest_after_export(run: Path, out: Path, layout: str | None) -> list[str]:
    """How to load what was exported: with the other library, or with commands of this package."""
    from ..config.load import load_any_config
    from ..config.schema import AutoencoderRunConfig, JudgeRunConfig, RunConfig
    from ..export.model_card import read_usage
    from ..training.run_directory import CONFIG_FILE

    config = load_any_config(run / CONFIG_FILE)
    if isinstance(config, AutoencoderRunConfig):
        if layout == "diffusers":
            return ["from diffusers import AutoencoderKL", f'vae = AutoencoderKL.from_pretrained("{out}")']
        return [f"tastemaker reconstruct IMAGES --model {out}"]
    if isinstance(config, JudgeRunConfig):
        return [f'tastemaker ask IMAGE "QUESTION" --model {out}']
    if (out / "README.md").is_file():
        return read_usage(out, config.model.weights or "" if isinstance(config, RunConfig) else "")
    if layout == "llamagen":
        return [f"load {out} with LlamaGen's --gpt-ckpt, or tastemaker train RECIPE model.weights={out}"]
    if layout == "authors":
        return [f"tastemaker generate RECIPE model.weights={out}"]
    return [f"tastemaker generate {out}", f"tastemaker train RECIPE model.weights={out}"]
