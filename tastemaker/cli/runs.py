"""Commands about runs: train, generate, export, report, evaluate, bench, check, plan and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..core.registry import ConfigError
from .options import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    ExportLayout,
    Overrides,
    Precision,
    Recipe,
    RunDeviceOption,
    SearchOption,
    Tiny,
    VerifierOption,
    VideoFormat,
    merge_overrides,
    stderr_console,
    warn_unused_overrides,
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
    device: RunDeviceOption = None,
) -> None:
    """Train a model from a recipe. Given the directory of an earlier run, resume it."""
    from ..training.session import load_run_config, run_training

    config = load_run_config(recipe, merge_overrides(overrides, device))
    warn_unused_overrides(config, overrides, tiny=tiny)
    done = run_training(
        config, tiny=tiny, resume=resume, init_from=init_from, allowed=allow_change or (), console=stderr_console()
    )
    if not done:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def generate(
    recipe: Annotated[str, typer.Argument(help="A recipe, the directory of a run, or what was exported of one.")],
    overrides: Overrides = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts: .txt, .jsonl or .csv.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("generated"),
    count: Annotated[int, typer.Option(min=1, help="Pictures of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    search: SearchOption = "single",
    n: Annotated[int, typer.Option("--n", "--candidates", min=1, help="That the search looks at.")] = 4,
    scheduler: Annotated[str, typer.Option(help="Of diffusers, in place of the process's own sampler.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="With --scheduler; as the process has them.")] = None,
    judge: VerifierOption = "run",
    weights: Annotated[str, typer.Option(help="live, or a snapshot such as ema or reference.")] = "live",
    lora: Annotated[Path | None, typer.Option(help="Adapters for the model: a file, or an id on the hub.")] = None,
    lora_scale: Annotated[float, typer.Option(help="How much adapters count; 0 is the base model.")] = 1.0,
    clips: Annotated[
        VideoFormat | None, typer.Option(help="What clips are written as; mp4 where PyAV is installed.")
    ] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames a second of clips.")] = 8,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Generate images or videos from prompts. Resumes if interrupted; runs on several GPUs under torchrun."""
    from ..search import generation, settings

    config, found = generation.resolve_source(recipe, merge_overrides(overrides, device), lora)
    warn_unused_overrides(config, overrides, tiny=tiny)
    batch = generation.choose_prompts(prompt or (), prompts, config)
    chosen, ending = settings.build_sampler(search, n, scheduler, steps), clips.value if clips else ""
    order = generation.GenerationOptions(batch, count, seed, chosen, weights, out, lora_scale, judge, ending, fps)
    generation.generate_samples(config, found, order, tiny=tiny, console=stderr_console())


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    out: Annotated[Path, typer.Option(help="The .safetensors file; a folder with --layout, or of Show-o.")],
    weights: Annotated[str, typer.Option(help="ema, live or another snapshot; ema if there is one.")] = "",
    bits: Annotated[int, typer.Option(help="16, 32 for all of it, 8 for half the size; not with --layout.")] = 16,
    layout: Annotated[ExportLayout | None, typer.Option(help="Of published models: who is to load it.")] = None,
    dtype: Annotated[Precision, typer.Option(help="With --layout: how numbers are kept.")] = Precision.bf16,
    merge: Annotated[bool, typer.Option("--merge", help="Add adapters to the weights they adapt.")] = False,
    bare: Annotated[bool, typer.Option("--bare", help="For diffusers: the trained network alone.")] = False,
    ranks: Annotated[int, typer.Option(min=0, help="For llamagen: shards for so many; 0 writes one file.")] = 0,
) -> None:
    """Export a run's weights: one file for `weights:` and `codec:`, or the layout of another library."""
    from ..core import output_paths
    from ..export import generator, llamagen, weights_file

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


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="The directories of one or several runs.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file to write; report.html in the first run's.")] = None,
) -> None:
    """Write an HTML report of one or several runs: samples, curves, warnings and settings."""
    from ..report.output import write_and_announce_report as run_report

    run_report(runs, out, stderr_console())


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
    search: SearchOption = "single",
    n: Annotated[
        str, typer.Option("--n", "--candidates", help="Several, as in 1,4,20, draw score against price.")
    ] = "4",
    judge: VerifierOption = "",
    weights: Annotated[str, typer.Option(help="live, or a snapshot; the average if there is one.")] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder to write to, or to go on in.")] = None,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Evaluate a model on a benchmark (PlayEval, GenEval, …) with detectors that were not used as rewards."""
    from ..evaluation import benchmark_run, geneval_detector
    from ..search import generation, settings
    from ..training import placement

    questions = benchmark_run.load_benchmark(benchmark, prompts, count, metadata)
    eyes = geneval_detector.parse_detector(detector, unchecked=unchecked)
    if images is not None or not model:
        spot = placement.choose_placement(device.value if device else "auto", "fp32")
        benchmark_run.score_folder(questions, images, eyes, out, spot, tiny=tiny, console=stderr_console())
        return
    (config, found), counts = (
        generation.resolve_source(model, merge_overrides(overrides, device)),
        settings.parse_candidates(n),
    )
    warn_unused_overrides(config, overrides, tiny=tiny)
    place = out or benchmark_run.evaluation_directory(benchmark, config, found, settings.search_name(search))

    def examine(candidates: int, folder: Path) -> dict[str, Any]:
        chosen, whom = settings.build_search(search, candidates), judge or benchmark_run.default_verifier(benchmark)
        exam = benchmark_run.EvaluationOptions(questions, chosen, whom, weights, seed=seed, eyes=eyes)
        return benchmark_run.evaluate_model(config, found, exam, folder, tiny=tiny, console=stderr_console())

    if settings.wants_curve(search, counts):
        settings.evaluate_curve(settings.search_name(search), counts, examine, place, stderr_console())
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
    device: RunDeviceOption = None,
) -> None:
    """Benchmark every objective on every model family, with shuffled-reward controls. Resumes if interrupted."""
    from ..evaluation.scoreboard import page, runner
    from ..evaluation.scoreboard.measurement import Bench
    from ..evaluation.scoreboard.plan import load_plan as planned

    found = planned(plan)
    if summary is not None:
        return page.write_scoreboard(found, summary, write, stderr_console())
    place, changes = out or Path("runs") / f"bench-{found.name}", tuple(merge_overrides(overrides, device))
    numbers = runner.parse_seeds(seeds, "--seeds"), runner.parse_seeds(control_seeds, "--control-seeds")
    shared = Bench(found, place, prompts, count, changes, tiny)
    order = runner.BenchOptions(shared, plan, tuple(cells.split(",")) if cells else (), *numbers, jobs, minutes)
    return runner.run_worker(order) if worker else runner.run_bench(order, write, stderr_console())


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="As if started on so many.")] = None,
) -> None:
    """Print the resolved configuration, the batch arithmetic of a step, and every problem found."""
    from ..config.check import find_problems, torchrun_world_size
    from ..config.config_warnings import collect_warnings
    from ..config.dump import config_to_yaml
    from ..config.load import load_any_config
    from ..config.step_counts import compute_step_counts
    from ..training.device_precision import describe_precision

    config, shown = load_any_config(recipe, merge_overrides(overrides)), Console()
    shown.print(config_to_yaml(config), markup=False, highlight=False, soft_wrap=True)
    table = Table("a step", "", title="the arithmetic")
    for name, number in compute_step_counts(config, ranks or torchrun_world_size()).items():
        table.add_row(name, f"{number:,}")
    shown.print(table)
    precision, emulated = describe_precision(config.engine)
    shown.print(f"precision: {precision}", markup=False, highlight=False, soft_wrap=True)
    found = find_problems(config, ranks)
    if found:
        raise ConfigError("\n".join(found))
    for caution in [*collect_warnings(config), *([emulated] if emulated else [])]:
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
    """Predict GPU memory and step time of a run without loading it, and suggest settings if it does not fit."""
    from ..config.load import load_any_config
    from ..diagnostics.plan_report import GpuSpec
    from ..diagnostics.plan_report import print_plan as run_plan

    if not run_plan(
        load_any_config(recipe, merge_overrides(overrides)), ranks, GpuSpec(gpu_gib, tflops, tbps), Console()
    ):
        raise typer.Exit(EXIT_FAILURE)


@app.command()
def doctor(recipe: Recipe, overrides: Overrides = None, tiny: Tiny = False, device: RunDeviceOption = None) -> None:
    """Check on the real configuration that training can work: ratios, gradients, rewards, pixels, resume, ranks."""
    from ..config.load import load
    from ..diagnostics.doctor import run_doctor

    config, shown, failures = load(recipe, merge_overrides(overrides, device)), Console(), 0
    warn_unused_overrides(config, overrides, tiny=tiny)
    marks = {"pass": "[green]pass[/]", "fail": "[red]FAIL[/]", "skip": "[yellow]skip[/]"}
    for finding in run_doctor(config, tiny=tiny):
        failures += finding.verdict == "fail"
        shown.print(f"{marks[finding.verdict]}  {escape(finding.checked)}: {escape(finding.number)}", highlight=False)
        if finding.advice:
            shown.print(f"      {escape(finding.advice)}", highlight=False)
    if failures:
        shown.print(f"{failures} of the proofs failed: this run would not learn as it should")
        raise typer.Exit(EXIT_FAILURE)
    shown.print("every proof that applies holds")
