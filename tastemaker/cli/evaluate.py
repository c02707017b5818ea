"""Commands that measure samples: evaluate, bench, report, pack, reference, compare and reconstruct."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..console import show_status
from .options import (
    EVALUATE,
    LOOK,
    Device,
    Overrides,
    RunDeviceOption,
    SaveStepsOption,
    SearchOption,
    Tiny,
    VerifierOption,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

app = typer.Typer()


FeatureNetworkOption = Annotated[
    Literal["inception", "classifier"],
    typer.Option(help="Feature network: Inception (FID) or the CIFAR-10 classifier."),
]
FeatureWeightsOption = Annotated[str, typer.Option(help="Weights of the feature network.")]
BENCHMARK_NAMES = (
    "geneval, geneval2, dpg, wise, unigenbench, t2i-compbench, vbench-lite, ocr, playeval, playeval-edit, "
    "playeval-motion or wordeval."
)
DeviceOption = Annotated[Device, typer.Option(help="Device.")]


@app.command(rich_help_panel=EVALUATE, epilog="Example: tastemaker evaluate playeval --model runs/demo")
def evaluate(
    benchmark: Annotated[str, typer.Argument(help=BENCHMARK_NAMES)],
    model: Annotated[str, typer.Option("--model", "-m", help="A recipe or the directory of a run.")] = "",
    overrides: Overrides = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts; default: all, or 504 of the playground's.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Samples per prompt; default: the benchmark's own.")] = None,
    images: Annotated[Path | None, typer.Option(help="Score this folder instead of a model.")] = None,
    metadata: Annotated[Path | None, typer.Option(help="The benchmark's own prompt file or folder.")] = None,
    detector: Annotated[str, typer.Option(help="GenEval: a Mask2Former, or '{threshold: 0.4}'.")] = "",
    skip_self_test: Annotated[
        bool, typer.Option("--skip-self-test", help="GenEval: skip the detector's self-test.")
    ] = False,
    judge: Annotated[str, typer.Option(help="A vision-language model, the URL of an endpoint, or settings.")] = "",
    search: SearchOption = "single",
    num_candidates: Annotated[str, typer.Option(help="Candidates of the search; 1,4,20 gives a curve.")] = "4",
    verifier: VerifierOption = "",
    weights: Annotated[str, typer.Option(help="Weights: live or a snapshot; default: ema if any.")] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Output folder; resumes if it exists.")] = None,
    save_steps: SaveStepsOption = False,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Evaluate a model on a benchmark (PlayEval, GenEval, …) with detectors that were not used as rewards."""
    if images is not None or not model:
        from ..evaluation import benchmark_run
        from ..evaluation.geneval import parse_detector
        from ..training.precision import choose_placement

        loaded = benchmark_run.load_benchmark(benchmark, num_prompts, count, metadata)
        specs = parse_detector(detector, self_test=not skip_self_test), benchmark_run.parse_judge(judge, benchmark)
        placement = choose_placement(device or "auto", "fp32")
        benchmark_run.score_folder(loaded, images, *specs, out, placement, tiny=tiny, console=stderr_console())
        return print_next_steps("tastemaker leaderboard evaluations/*, to compare models")
    from .. import api
    from ..search.settings import parse_candidates

    api.evaluate(
        benchmark,
        model,
        merge_overrides(overrides, device),
        num_prompts=num_prompts,
        count=count,
        metadata=metadata,
        detector=detector,
        self_test=not skip_self_test,
        judge=judge,
        search=search,
        num_candidates=parse_candidates(num_candidates),
        verifier=verifier,
        weights=weights,
        seed=seed,
        out=out,
        save_steps=save_steps,
        tiny=tiny,
        console=stderr_console(),
    )
    return print_next_steps(*suggest_after_evaluation(benchmark, model, overrides or []))


def suggest_after_evaluation(benchmark: str, model: str, overrides: Sequence[str]) -> list[str]:
    """Commands that follow: the report and the export of a run, or the training of a recipe."""
    if Path(model).is_dir():
        return [f"tastemaker report {model}", f"tastemaker export {model} --out {Path(model).name}.safetensors"]
    file = (
        ""
        if benchmark in ("geneval", "playeval", "playeval-edit", "playeval-motion", "wordeval")
        else " --metadata FILE"
    )
    trained = f"tastemaker evaluate {benchmark}{file} --model RUN, to compare the trained model"
    return [f"tastemaker train {shlex.join([model, *overrides])}", trained]


@app.command(rich_help_panel=EVALUATE, epilog="Example: tastemaker leaderboard evaluations/* --out leaderboard.jsonl")
def leaderboard(
    evaluations: Annotated[list[Path], typer.Argument(help="Folders that evaluate wrote, or leaderboard files.")],
    out: Annotated[Path, typer.Option(help="File for one JSON line per evaluation.")] = Path("leaderboard.jsonl"),
) -> None:
    """Compare evaluated models: a table by benchmark and judge, with intervals and differences to the best."""
    from ..evaluation.leaderboard import make_leaderboard

    make_leaderboard(evaluations, out, stderr_console())
    print_next_steps(f"tastemaker leaderboard {out} NEW_EVALUATION --out {out}, to add a model")


@app.command(rich_help_panel=EVALUATE, epilog="Example: tastemaker bench playground --num-prompts 48 --jobs 2")
def bench(
    plan: Annotated[str, typer.Argument(help="playground, or a YAML file with cells.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; resumes if it exists.")] = None,
    cells: Annotated[str, typer.Option(help="Only these cells, comma-separated.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of every cell, comma-separated.")] = "0,1,2",
    control_seeds: Annotated[str, typer.Option(help="Seeds of the controls with shuffled rewards.")] = "0",
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts of the benchmark.")] = 504,
    count: Annotated[int, typer.Option(min=1, help="Samples per prompt.")] = 2,
    jobs: Annotated[int, typer.Option(min=1, help="Parallel processes.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Time limit: no job starts after it.")] = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page whose results section is updated.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Only summarize this folder or results.json.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Benchmark every objective on every model family, with shuffled-reward controls. Resumes if interrupted."""
    from ..evaluation.scoreboard import runner
    from ..evaluation.scoreboard.measurement import Bench
    from ..evaluation.scoreboard.page import write_scoreboard
    from ..evaluation.scoreboard.plan import load_plan

    loaded = load_plan(plan)
    if summary is not None:
        write_scoreboard(loaded, summary, page, stderr_console())
        return print_next_steps(f"tastemaker bench {plan}, which measures what is missing")
    directory = out or Path("runs") / f"bench-{loaded.name}"
    shared = Bench(loaded, directory, num_prompts, count, tuple(merge_overrides(overrides, device)), tiny)
    all_seeds = runner.parse_seeds(seeds, "--seeds"), runner.parse_seeds(control_seeds, "--control-seeds")
    options = runner.BenchOptions(shared, plan, tuple(cells.split(",")) if cells else (), *all_seeds, jobs, minutes)
    if worker:
        return runner.run_worker(options)
    runner.run_bench(options, page, stderr_console())
    return print_next_steps(f"tastemaker bench {plan} --summary {directory} --page PAGE.md")


@app.command(rich_help_panel=LOOK, epilog="Example: tastemaker report runs/demo")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    out: Annotated[Path | None, typer.Option(help="Output file; default: report.html in the first run.")] = None,
) -> None:
    """Write an HTML report of one or several runs: samples, curves, warnings and settings."""
    from ..core.output_paths import check_output_file
    from ..report.page import write_report
    from ..report.share_image import share_image_path

    with show_status("writing the report", stderr_console()):
        path = write_report(runs, out and check_output_file(out))
    stderr_console().print(f"the report is {path}", markup=False, highlight=False, soft_wrap=True)
    print_next_steps(f"open {path} in a browser; {share_image_path(path).name} beside it is an image to share")


@app.command(rich_help_panel=EVALUATE, epilog="Example: tastemaker pack samples --out samples.npz")
def pack(
    images: Annotated[Path, typer.Argument(help="Folder of images of one size.")],
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("samples.npz"),
) -> None:
    """Pack a folder of samples into one `.npz` in the layout of ADM's evaluator."""
    from ..evaluation import image_sets

    image_sets.pack_images(images, out, stderr_console())
    print_next_steps(f"tastemaker compare {out} --reference REFERENCE.safetensors --weights WEIGHTS")


@app.command(
    rich_help_panel=EVALUATE,
    epilog="Example: tastemaker reference images --weights inception.pth --name coco --split val",
)
def reference(
    images: Annotated[Path, typer.Argument(help="Real images: a folder, CIFAR-10, an .npz, or a reference of ADM.")],
    weights: FeatureWeightsOption,
    name: Annotated[str, typer.Option(help="Name of the dataset, such as cifar10.")],
    split: Annotated[str, typer.Option(help="Split, such as train.")],
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("reference.safetensors"),
    limit: Annotated[int, typer.Option(min=0, help="Number of images, at random; 0: all.")] = 0,
    num_images: Annotated[
        int, typer.Option(min=0, help="Number of images behind the statistics of ADM's reference.")
    ] = 0,
    network: FeatureNetworkOption = "inception",
    device: DeviceOption = "auto",
) -> None:
    """Compute reference features of real images, for `tastemaker compare`."""
    from ..evaluation import image_sets
    from ..evaluation.feature_extractors import load_feature_extractor
    from ..training.precision import choose_placement

    extractor = load_feature_extractor(network, weights, choose_placement(device, "fp32"))
    description = image_sets.ReferenceDescription(name, split, limit, num_images)
    image_sets.make_reference(images, description, extractor, out, stderr_console())
    print_next_steps(f"tastemaker compare SAMPLES --reference {out} --weights {weights}")


@app.command(
    rich_help_panel=EVALUATE,
    epilog="Example: tastemaker compare samples --reference coco.safetensors --weights inception.pth",
)
def compare(
    samples: Annotated[Path, typer.Argument(help="An .npz or a folder of images.")],
    reference: Annotated[Path, typer.Option(help="File written by `tastemaker reference`.")],
    weights: FeatureWeightsOption,
    name: Annotated[str, typer.Option(help="Expected dataset of the reference.")] = "",
    split: Annotated[str, typer.Option(help="Expected split of the reference.")] = "",
    num_images: Annotated[int, typer.Option(min=0, help="Expected number of images of the reference.")] = 0,
    network: FeatureNetworkOption = "inception",
    allow_few_samples: Annotated[
        bool, typer.Option("--allow-few-samples", help="Allow fewer samples than features.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for the metrics.")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Compute FID, KID, precision, recall and, if the network has classes, the Inception score of samples."""
    from ..evaluation import image_sets
    from ..evaluation.feature_extractors import load_feature_extractor
    from ..training.precision import choose_placement

    extractor = load_feature_extractor(network, weights, choose_placement(device, "fp32"))
    expected = image_sets.ReferenceDescription(name, split, count=num_images)
    metrics = image_sets.compare_to_reference(
        samples, reference, expected, extractor, stderr_console(), allow_few=allow_few_samples
    )
    image_sets.write_metrics(metrics, out)
    print_next_steps("tastemaker generate RUN --count 4, for more samples: FID and KID fall until there are thousands")


@app.command(rich_help_panel=EVALUATE, epilog="Example: tastemaker reconstruct images --model runs/vae-playground")
def reconstruct(
    images: Annotated[Path, typer.Argument(help="Folder of images, searched recursively.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Autoencoder: a run, a file, a folder or a YAML file.")],
    out: Annotated[Path, typer.Option(help="Output folder; resumes if it exists.")] = Path("reconstructed"),
    size: Annotated[int, typer.Option(min=0, help="Size of the center crop; 0: original size.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size (images of one size).")] = 16,
    max_skipped: Annotated[int, typer.Option(min=0, help="Broken files to skip before stopping.")] = 10,
    vgg_weights: Annotated[str, typer.Option(help="VGG16 weights for LPIPS; default: the hub's, if downloaded.")] = "",
    lpips_weights: Annotated[str, typer.Option(help="LPIPS heads; default: those of the package lpips.")] = "",
    device: DeviceOption = "auto",
) -> None:
    """Reconstruct images with an autoencoder; writes PSNR, SSIM and LPIPS of each. Resumes if interrupted."""
    from ..autoencoders.lpips import VGG16
    from ..evaluation import reconstruction
    from ..training.precision import choose_placement

    options = reconstruction.ReconstructionOptions(
        images, model, out, size, batch_size, max_skipped, vgg_weights or VGG16.hub, lpips_weights
    )
    reconstruction.reconstruct_images(options, choose_placement(device, "fp32"), stderr_console())
    print_next_steps(f"tastemaker encode IMAGES --vae {model}, for latents (--tokenizer {model}, for tokens)")
