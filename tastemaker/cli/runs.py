"""Commands about runs: train, generate, export, report, evaluate, bench, check, plan and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..registry import ConfigError
from .options import (
    FAILURE,
    INTERRUPTED,
    Asked,
    Clips,
    Outward,
    Overrides,
    Place,
    Precision,
    Recipe,
    Searching,
    Tiny,
    console,
    leave_aside,
    settings,
)

app = typer.Typer()


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name (see `list recipes`), a YAML file, or the directory of a run.")
    ],
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from this checkpoint: everything.")] = None,
    init_from: Annotated[Path | None, typer.Option(help="Start from the weights in this checkpoint or file.")] = None,
    allow_change: Annotated[list[str] | None, typer.Option(help="A key that may differ from the run's own.")] = None,
    tiny: Tiny = False,
    device: Place = None,
) -> None:
    """Train; on the directory of an earlier run, go on where it stopped."""
    from ..commands.training import configuration, run_training

    config = configuration(recipe, settings(overrides, device))
    leave_aside(config, overrides, tiny=tiny)
    done = run_training(
        config, tiny=tiny, resume=resume, init_from=init_from, allowed=allow_change or (), console=console()
    )
    if not done:
        raise typer.Exit(INTERRUPTED)


@app.command()
def generate(
    recipe: Annotated[str, typer.Argument(help="A recipe, the directory of a run, or what was exported of one.")],
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts: .txt, .jsonl or .csv.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("generated"),
    count: Annotated[int, typer.Option(min=1, help="Pictures of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    search: Searching = "single",
    n: Annotated[int, typer.Option("--n", "--candidates", min=1, help="That the search looks at.")] = 4,
    scheduler: Annotated[str, typer.Option(help="Of diffusers, in place of the process's own sampler.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="With --scheduler; as the process has them.")] = None,
    judge: Asked = "run",
    weights: Annotated[str, typer.Option(help="live, or a snapshot such as ema or reference.")] = "live",
    lora: Annotated[Path | None, typer.Option(help="Adapters for the model: a file, or an id on the hub.")] = None,
    lora_scale: Annotated[float, typer.Option(help="How much adapters count; 0 is the base model.")] = 1.0,
    clips: Annotated[Clips | None, typer.Option(help="What clips are written as; mp4 where PyAV is installed.")] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames a second of clips.")] = 8,
    tiny: Tiny = False,
    device: Place = None,
) -> None:
    """Make pictures of prompts, and say what they cost; run again, it goes on, on as many ranks as there are."""
    from ..commands import generating, searching

    config, found = generating.source(recipe, settings(overrides, device), lora)
    leave_aside(config, overrides, tiny=tiny)
    batch = generating.prompts(prompt or (), prompts, config)
    chosen, ending = searching.sampled(search, n, scheduler, steps), clips.value if clips else ""
    order = generating.Order(batch, count, seed, chosen, weights, out, lora_scale, judge, ending, fps)
    generating.make(config, found, order, tiny=tiny, console=console())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    out: Annotated[Path, typer.Option(help="The .safetensors file; a folder with --layout, or of Show-o.")],
    weights: Annotated[str, typer.Option(help="ema, live or another snapshot; ema if there is one.")] = "",
    bits: Annotated[int, typer.Option(help="16, 32 for all of it, 8 for half the size; not with --layout.")] = 16,
    layout: Annotated[Outward | None, typer.Option(help="Of published models: who is to load it.")] = None,
    dtype: Annotated[Precision, typer.Option(help="With --layout: how numbers are kept.")] = Precision.bf16,
    merge: Annotated[bool, typer.Option("--merge", help="Add adapters to the weights they adapt.")] = False,
    bare: Annotated[bool, typer.Option("--bare", help="For diffusers: the trained network alone.")] = False,
    ranks: Annotated[int, typer.Option(min=0, help="For llamagen: shards for so many; 0 writes one file.")] = 0,
) -> None:
    """Write a run's weights: one file that `weights:` and `codec:` load, or what others load."""
    from ..commands import exporting, handing, publishing, targets

    targets.folder(out.parent)
    if layout is None:
        return exporting.export(run, out, weights, bits, console())
    kept = publishing.DTYPES[dtype.value]
    if layout is Outward.llamagen:
        return handing.hand_over(handing.Handover(run, out, weights, kept, ranks), console())
    whose: Literal["diffusers", "comfyui", "authors"] = "diffusers" if layout is Outward.diffusers else "comfyui"
    whose = "authors" if layout is Outward.authors else whose
    order = publishing.Publication(run, out, whose, weights, kept, merge, bare)
    return publishing.publish(order, console())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="The directories of one or several runs.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write; report.html in the first run's.")] = None,
) -> None:
    """Write one page of pictures, curves, warnings and settings, to be opened in any browser."""
    from ..commands.reporting import report as run_report

    run_report(runs, out, console())


@app.command()
def evaluate(
    benchmark: Annotated[str, typer.Argument(help="geneval, playeval, playeval-motion or wordeval.")],
    model: Annotated[
        str, typer.Option("--model", "-m", "--objective-run", help="A recipe, or a run's directory; the last counts.")
    ] = "",
    overrides: Overrides = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="How many of its prompts: 504, of GenEval 553.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Pictures of each prompt: 2, of GenEval 4.")] = None,
    images: Annotated[Path | None, typer.Option(help="GenEval: score this folder in place of a model.")] = None,
    metadata: Annotated[Path | None, typer.Option(help="GenEval: other prompts, in its own layout.")] = None,
    detector: Annotated[str, typer.Option(help="GenEval: another Mask2Former, or '{threshold: 0.4}'.")] = "",
    unchecked: Annotated[bool, typer.Option("--unchecked", help="GenEval: without a trial of the detector.")] = False,
    search: Searching = "single",
    n: Annotated[
        str, typer.Option("--n", "--candidates", help="Several, as in 1,4,20, draw score against price.")
    ] = "4",
    judge: Asked = "",
    weights: Annotated[str, typer.Option(help="live, or a snapshot; the average if there is one.")] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder to write to, or to go on in.")] = None,
    tiny: Tiny = False,
    device: Place = None,
) -> None:
    """Make a benchmark's pictures, score them by one who is no reward, and report; run again, it goes on."""
    from ..commands import evaluating, generating, placing, refereeing, searching

    questions = evaluating.benchmark(benchmark, prompts, count, metadata)
    eyes = refereeing.eyes(detector, unchecked=unchecked)
    if images is not None or not model:
        spot = placing.placement(device.value if device else "auto", "fp32")
        evaluating.score_folder(questions, images, eyes, out, spot, tiny=tiny, console=console())
        return
    (config, found), counts = generating.source(model, settings(overrides, device)), searching.numbers(n)
    leave_aside(config, overrides, tiny=tiny)
    place = out or evaluating.folder(benchmark, config, found, searching.named(search))

    def examine(candidates: int, folder: Path) -> dict[str, Any]:
        chosen, whom = searching.chosen(search, candidates), judge or evaluating.usual_judge(benchmark)
        exam = evaluating.Examination(questions, chosen, whom, weights, seed=seed, eyes=eyes)
        return evaluating.examine(config, found, exam, folder, tiny=tiny, console=console())

    if searching.several(search, counts):
        searching.curve(searching.named(search), counts, examine, place, console())
    else:
        examine(counts[0], place)


@app.command()
def bench(
    plan: Annotated[str, typer.Argument(help="playground, or the path of a YAML file of cells.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write to, or to go on in.")] = None,
    cells: Annotated[str, typer.Option(help="Only these, with commas between them.")] = "",
    seeds: Annotated[str, typer.Option(help="Of every cell, with commas between them.")] = "0,1,2",
    control_seeds: Annotated[str, typer.Option(help="Those that are run with shuffled rewards too.")] = "0",
    prompts: Annotated[int, typer.Option(min=1, help="How many of the benchmark's prompts.")] = 504,
    count: Annotated[int, typer.Option(min=1, help="Pictures of each prompt.")] = 2,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="After so many, nothing new is begun.")] = None,
    write: Annotated[Path | None, typer.Option(help="A page whose marked part the results replace.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Run nothing: tell of this folder or results.json.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    tiny: Tiny = False,
    device: Place = None,
) -> None:
    """Measure every objective on every family, before and after, with controls; run again, it goes on."""
    from ..bench.cells import plan as planned
    from ..commands import benching, telling
    from ..commands.measuring import Bench

    found = planned(plan)
    if summary is not None:
        return telling.tell(found, summary, write, console())
    place, changes = out or Path("runs") / f"bench-{found.name}", tuple(settings(overrides, device))
    numbers = benching.numbers(seeds, "--seeds"), benching.numbers(control_seeds, "--control-seeds")
    shared = Bench(found, place, prompts, count, changes, tiny)
    order = benching.Order(shared, plan, tuple(cells.split(",")) if cells else (), *numbers, jobs, minutes)
    return benching.serve(order) if worker else benching.carry_out(order, write, console())


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="As if started on so many.")] = None,
) -> None:
    """Print the resolved configuration, the arithmetic of a step, and every complaint."""
    from ..config.arithmetic import arithmetic
    from ..config.cautions import cautions
    from ..config.check import complaints, launched
    from ..config.dump import dump
    from ..config.load import load_any
    from ..train.device_precision import describe_precision

    config, shown = load_any(recipe, settings(overrides)), Console()
    shown.print(dump(config), markup=False, highlight=False, soft_wrap=True)
    table = Table("a step", "", title="the arithmetic")
    for name, number in arithmetic(config, ranks or launched()).items():
        table.add_row(name, f"{number:,}")
    shown.print(table)
    precision, emulated = describe_precision(config.engine)
    shown.print(f"precision: {precision}", markup=False, highlight=False, soft_wrap=True)
    found = complaints(config, ranks)
    if found:
        raise ConfigError("\n".join(found))
    for caution in [*cautions(config), *([emulated] if emulated else [])]:
        shown.print(f"caution: {caution}", markup=False, highlight=False, soft_wrap=True)
    shown.print("no complaints")


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="As if started on so many GPUs.")] = 1,
    gpu_gib: Annotated[float, typer.Option(min=1, help="The memory of one GPU.")] = 80.0,
    tflops: Annotated[float, typer.Option(min=1, help="What it reaches: 540 on an H200, compiled, in bf16.")] = 540.0,
    tbps: Annotated[float, typer.Option(min=0.1, help="TB/s of its memory: 4.3 on an H200.")] = 4.3,
) -> None:
    """Predict memory, time and batches of a run before anything is loaded, and what to change if it will not fit."""
    from ..commands.planning import Gpu
    from ..commands.planning import plan as run_plan
    from ..config.load import load_any

    if not run_plan(load_any(recipe, settings(overrides)), ranks, Gpu(gpu_gib, tflops, tbps), Console()):
        raise typer.Exit(FAILURE)


@app.command()
def doctor(recipe: Recipe, overrides: Overrides = None, tiny: Tiny = False, device: Place = None) -> None:
    """Prove on the real configuration that it can learn: ratios, gradients, rewards, pixels, resume, ranks."""
    from ..config.load import load
    from ..doctor.examine import examine

    config, shown, failures = load(recipe, settings(overrides, device)), Console(), 0
    leave_aside(config, overrides, tiny=tiny)
    marks = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]", "skip": "[yellow]skip[/]"}
    for finding in examine(config, tiny=tiny):
        failures += finding.verdict == "fail"
        shown.print(f"{marks[finding.verdict]}  {escape(finding.checked)}: {escape(finding.number)}", highlight=False)
        if finding.advice:
            shown.print(f"      {escape(finding.advice)}", highlight=False)
    if failures:
        shown.print(f"{failures} of the proofs failed: this run would not learn as it should")
        raise typer.Exit(FAILURE)
    shown.print("every proof that applies holds")
