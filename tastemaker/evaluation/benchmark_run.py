"""`tastemaker evaluate`: generate a benchmark's samples with a recipe or run, score them, and report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..config.build import build, make_tiny
from ..config.dump import to_plain
from ..config.schema import RunConfig
from ..config.validate import build_component
from ..config.yaml_io import parse_yaml
from ..console import ProgressBar, Table, make_console
from ..core import output_paths
from ..core.checkpoint_files import read_manifest
from ..core.objective import Comm
from ..core.randomness import Randomness
from ..core.registry import ConfigError
from ..core.reward import BatchSize
from ..core.safe_files import read_json
from ..core.types import Placement, PromptBatch
from ..playground.network_files import TINY
from ..report.worst_cases import write_worst_cases
from ..rewards.backbones.dual_encoder import CLIP_L
from ..rewards.folder_scorer import parse_reward
from ..rewards.geneval import GenevalReward
from ..rewards.ocr import OcrEngine, StubOcrEngine
from ..search.base import RubricVerifier, Search, SearchCost, observe_steps
from ..search.best_of_n import SingleSample
from ..search.flops import FlopCosts, format_flops, measure_flop_costs
from ..search.generation import StepImages, check_weights_exist, describe_inference
from ..search.settings import build_verifier, check_constant_cost
from ..training import distributed
from ..training.device_precision import resolve_locally
from ..training.run import Run
from ..training.samples import sampling_policy
from ..vlm.blip_vqa import BLIP_VQA
from ..vlm.question_judge import QuestionJudge, load_question_judge
from .benchmark_files import PUBLISHED_BENCHMARKS, find_samples, load_published_benchmark
from .benchmarks import Benchmark, playeval, playeval_motion, wordeval
from .endpoint_judge import JudgeEndpoint
from .evaluate import (
    BATCH_SIZE,
    REPORT,
    BenchmarkScorer,
    SampleFn,
    StageProgress,
    evaluate,
    evaluate_files,
    is_finished,
)
from .geneval import find_images, geneval, load_geneval_scorer, write_results
from .playeval import HELD_OUT_DETECTOR, load_playeval_motion_scorer, load_playeval_scorer, load_wordeval_scorer
from .playeval_edit import load_playeval_edit_scorer, playeval_edit
from .question_scorers import (
    CompBenchScorer,
    DpgScorer,
    GenEval2Scorer,
    OcrBenchmarkScorer,
    QuestionScorer,
    UniGenBenchScorer,
    WiseScorer,
)
from .video_quality import DINO, load_video_quality_scorer

BENCHMARKS: dict[str, Callable[[int, int], Benchmark]] = {
    "playeval": playeval,
    "playeval-edit": playeval_edit,
    "playeval-motion": playeval_motion,
    "wordeval": wordeval,
}
SCORERS: dict[str, Callable[[str, torch.device], BenchmarkScorer]] = {
    "playeval": load_playeval_scorer,
    "playeval-edit": load_playeval_edit_scorer,
    "playeval-motion": load_playeval_motion_scorer,
    "wordeval": load_wordeval_scorer,
}
QUESTION_SCORERS: dict[str, type[QuestionScorer]] = {
    "geneval2": GenEval2Scorer,
    "dpg": DpgScorer,
    "wise": WiseScorer,
    "unigenbench": UniGenBenchScorer,
    "t2i-compbench": CompBenchScorer,
}
DEFAULT_JUDGES = {"t2i-compbench": BLIP_VQA.hub}
DEFAULT_JUDGE = "Qwen/Qwen3-VL-8B-Instruct"  # of GenEval 2; the others' own judges are not chat models, or are larger
JUDGE_USAGE = ".judge"  # folder of an evaluation with what was asked of an endpoint
DEFAULT_SIZE, GENEVAL_SIZE = (504, 2), (553, 4)  # prompts, samples per prompt
ProgressNote = Callable[[StageProgress], str]  # text beside the progress bar of the current stage


@dataclass(frozen=True)
class JudgeSettings:
    """What answers a benchmark's questions: a vision-language model, or the networks of vbench-lite."""

    weights: str = ""  # folder or hub id; by default the one that the benchmark names, or Qwen3-VL-8B
    batch_size: BatchSize = 8  # questions at once
    template: str = ""  # wise: a file with the question, in which {prompt} and {explanation} stand
    system: str = ""  # wise: the system message, before the question
    endpoint: JudgeEndpoint | None = None  # a chat-completions endpoint that answers instead
    subject_weights: str = DINO.hub  # vbench-lite: DINO
    quality_weights: str = CLIP_L.hub  # vbench-lite: CLIP of CLIP-IQA, or the path of MUSIQ's musiq_spaq_ckpt-*.pth


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate, and how samples are generated and scored."""

    benchmark: Benchmark
    search: Search = SingleSample()
    verifier: str = "playground_judge"  # of the search
    weights: str = ""  # live or a snapshot; by default ema if the run has it
    detector: str = HELD_OUT_DETECTOR
    seed: int = 0
    geneval: GenevalReward = GenevalReward()  # detector and rules of GenEval
    save_steps: bool = False  # write the previews of all candidates after every step
    judge: JudgeSettings = JudgeSettings()  # of benchmarks with questions


def load_benchmark(name: str, prompts: int | None, count: int | None, metadata: Path | None = None) -> Benchmark:
    """Return a benchmark by name, with `count` samples for each of its first `prompts` prompts."""
    known = [*BENCHMARKS, "geneval", *PUBLISHED_BENCHMARKS]
    if name not in known:
        raise ConfigError(f"evaluate: unknown benchmark '{name:.60}'; expected one of {', '.join(known)} [TM588]")
    if name in PUBLISHED_BENCHMARKS:
        return load_published_benchmark(name, prompts, count, metadata)
    if metadata is not None and name != "geneval":
        raise ConfigError(
            f"--metadata: the benchmark {name} has its own prompts; remove --metadata, which works with geneval and "
            f"{', '.join(PUBLISHED_BENCHMARKS)} [TM589]"
        )
    default = GENEVAL_SIZE if name == "geneval" else DEFAULT_SIZE
    size = default[0] if prompts is None else prompts, default[1] if count is None else count
    try:
        return geneval(*size, metadata) if name == "geneval" else BENCHMARKS[name](*size)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--num-prompts, --count: {error} [TM590]") from error


def default_verifier(benchmark: str) -> str:
    """Return the verifier of a search if none is named: the playground's judge does not know photographs."""
    return "vlm" if benchmark == "geneval" or benchmark in PUBLISHED_BENCHMARKS else "playground_judge"


def parse_judge(judge: str, benchmark: str) -> JudgeSettings:
    """Parse --judge: empty for the default, a folder or hub id, the URL of an endpoint, or settings."""
    judged = [*QUESTION_SCORERS, "vbench-lite"]
    if judge and benchmark not in judged:
        raise ConfigError(
            f"--judge: the benchmark {benchmark} asks no questions; remove --judge, which works with "
            f"{', '.join(judged)} [TM2178]"
        )
    if judge.startswith(("http://", "https://")):
        return JudgeSettings(endpoint=build_component(JudgeEndpoint, {"urls": [judge]}, "--judge"))
    if not judge.lstrip().startswith("{"):
        return JudgeSettings(judge)
    settings: JudgeSettings = build_component(JudgeSettings, parse_yaml(judge, "--judge"), "--judge")
    if settings.endpoint and (settings.weights or benchmark == "vbench-lite"):
        raise ConfigError(
            "--judge: 'endpoint' answers the questions of a benchmark instead of a model on this machine; remove "
            "'endpoint' or 'weights', and use it with a benchmark that asks questions [TM2310]"
        )
    return settings


def load_scorer(
    name: str,
    detector: str,
    geneval_spec: GenevalReward,
    judge: JudgeSettings,
    placement: Placement,
    out: Path,
    *,
    tiny: bool,
) -> BenchmarkScorer:
    """Return the scorer of a benchmark. A judge behind an endpoint keeps what was spent on it in `out`."""
    exact = replace(placement, dtype=torch.float32)
    if name == "geneval":
        return load_geneval_scorer(geneval_spec, exact, tiny=tiny)
    if name == "ocr":
        return OcrBenchmarkScorer(StubOcrEngine() if tiny else OcrEngine())
    if name == "vbench-lite":
        return load_video_quality_scorer(judge.subject_weights, judge.quality_weights, exact, tiny=tiny)
    if name not in QUESTION_SCORERS:
        return SCORERS[name](TINY if tiny else detector, placement.device)
    if judge.endpoint is not None:
        return build_question_scorer(name, judge, judge.endpoint.load(out / JUDGE_USAGE))
    weights = TINY if tiny else judge.weights or DEFAULT_JUDGES.get(name, DEFAULT_JUDGE)
    # A judge of eight billion weights does not need 32 bits, which most GPUs have no room for.
    precision = torch.bfloat16 if placement.device.type == "cuda" else torch.float32
    loaded = load_question_judge(
        weights, replace(placement, dtype=precision), judge.batch_size, blip=name == "t2i-compbench"
    )
    return build_question_scorer(name, judge, loaded)


def build_question_scorer(name: str, settings: JudgeSettings, judge: QuestionJudge) -> QuestionScorer:
    return WiseScorer(judge, settings.template, settings.system) if name == "wise" else QUESTION_SCORERS[name](judge)


def evaluation_directory(benchmark: str, config: RunConfig, checkpoint: Path | None, search: str) -> Path:
    """Return the default output directory: in the run's directory, or in ./evaluations for a recipe."""
    parent = checkpoint.parents[1] / "evaluations" if checkpoint else Path("evaluations")
    return parent / f"{benchmark}-{search}-{checkpoint.name if checkpoint else config.name or 'run'}"


def evaluate_model(
    config: RunConfig,
    checkpoint: Path | None,
    options: EvaluationOptions,
    out: Path,
    *,
    tiny: bool,
    console: Console,
    progress_note: ProgressNote | None = None,
) -> dict[str, Any]:
    """Run all stages of an evaluation with progress bars, print its table, and return the report."""
    if options.benchmark.video and config.model.frames == 1:
        raise ConfigError(
            f"evaluate: the benchmark {options.benchmark.name} needs videos, but the model generates images; "
            "choose another benchmark, or a video model [TM591]"
        )
    output_paths.check_output_directory(out)
    # Every rank generates samples by itself.
    config = replace(config, engine=replace(config.engine, context_parallel=1))
    run = build(make_tiny(config) if tiny else config, load_data=False)
    config = replace(config, engine=run.engine.config)  # with `auto` resolved
    if checkpoint is not None:
        run.resume(checkpoint)
    weights = evaluated_weights(config, options)
    check_weights_exist(run, weights)
    check_constant_cost(run, options.search)
    placement = run.engine.placement()
    name = options.benchmark.name
    scorer = load_scorer(name, options.detector, options.geneval, options.judge, placement, out, tiny=tiny)
    model = describe_model(config, checkpoint, options, scorer.detector, tiny=tiny)
    settings = describe_settings(config, checkpoint, options, tiny=tiny)
    sample_fn = build_sample_fn(run, options, weights, out, tiny=tiny)
    if (inference := describe_inference(run.sample)) and run.engine.comm.rank == 0:
        console.print(inference, markup=False, highlight=False)
    batch_size = run.batch.rollout_batch_size or BATCH_SIZE  # the recipe may say how many samples fit
    stages = evaluate(options.benchmark, sample_fn, scorer, out, model, batch_size, run.engine.comm, settings)
    report = run_stages(stages, options.benchmark, out, console, run.engine.comm, progress_note)
    run.engine.close()
    return report


def evaluated_weights(config: RunConfig, options: EvaluationOptions) -> str:
    return options.weights or ("ema" if config.ema_decay else "live")


def describe_model(
    config: RunConfig, checkpoint: Path | None, options: EvaluationOptions, detector: str = "", *, tiny: bool
) -> str:
    """Return a line with everything that samples and scores depend on, for the manifest of the output directory."""
    parts = [
        config.name or "run",
        checkpoint.name if checkpoint else "untrained",
        evaluated_weights(config, options),
        f"{options.search}",
        f"seed {options.seed}",
        *([detector] if detector else []),
        f"settings {scores_fingerprint(config, checkpoint, options, tiny)}",
    ]
    return ", ".join(parts)


def describe_settings(
    config: RunConfig, checkpoint: Path | None, options: EvaluationOptions, *, tiny: bool
) -> dict[str, Any]:
    """Return the weights, the search and its judge with all settings, for the report."""
    weights = "tiny" if tiny else config.model.weights or "random"
    judge: Any = None
    if options.search.uses_verifier and options.verifier == "run":
        judge = {name: to_plain(reward, None) for name, reward in config.rewards.items()}
    elif options.search.uses_verifier:
        spec = parse_reward(options.verifier, "--verifier")[1]
        judge = to_plain(spec.tiny() if tiny else spec, None)
    return {
        "recipe": config.name or "run",
        "weights": weights,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "snapshot": evaluated_weights(config, options),
        "search": to_plain(options.search, None),
        "judge": judge,
    }


def summarize_settings(settings: Mapping[str, Any]) -> str:
    """Return the weights, the search and the judge in one line, with the settings that are most often varied."""
    search, judge = settings["search"], settings["judge"]
    line = f"{settings['recipe']}, weights {settings['checkpoint'] or settings['weights']}, search {search['type']}"
    line += f" with {search['n']} candidates" if "n" in search else ""
    if judge is None:
        return f"{line}, no judge"
    if "type" not in judge:
        return f"{line}, judge: the run's rewards {', '.join(judge)}"
    details = [str(judge[name]) for name in ("weights", "question", "answer_mode") if judge.get(name)]
    return f"{line}, judge {' '.join([judge['type'], *details])}"


def is_evaluated(config: RunConfig, checkpoint: Path | None, options: EvaluationOptions, out: Path) -> bool:
    """Whether a directory holds the complete result of an evaluation, without building the model."""
    config = replace(config, engine=resolve_locally(config.engine)[0])
    return is_finished(options.benchmark, out, describe_model(config, checkpoint, options, tiny=False))


def scores_fingerprint(config: RunConfig, checkpoint: Path | None, options: EvaluationOptions, tiny: bool) -> str:
    """Return a hash of all settings and weights that scores depend on."""
    verifier = None
    if not isinstance(options.search, SingleSample):
        verifier = (options.verifier, config.rewards if options.verifier == "run" else None)
    settings = (config.model, config.process, config.guidance, config.tuning, config.engine.precision, verifier, tiny)
    inference = config.sample.inference_settings()
    others = (options.geneval, options.detector, *([inference] if inference else []))
    judge = options.judge
    if judge.endpoint is not None:  # where it runs and what it may cost has no influence on scores
        judge = replace(judge, endpoint=JudgeEndpoint(model=judge.endpoint.model))
    others += (judge,) if judge != JudgeSettings() else ()
    identity = f"{(*settings, *others)!r}".encode()
    state = read_manifest(checkpoint).digest.encode() if checkpoint else b""
    return hashlib.sha256(identity + state).hexdigest()[:12]


def score_folder(
    benchmark: Benchmark,
    images: Path | None,
    spec: GenevalReward,
    judge: JudgeSettings,
    out: Path | None,
    placement: Placement,
    *,
    tiny: bool,
    console: Console,
) -> dict[str, Any]:
    """Score a folder of existing samples, on one or several ranks. Resumes if interrupted."""
    if images is None:
        raise ConfigError(
            "evaluate: no model and no images were given; give a recipe or run directory with --model, or a "
            "folder with --images [TM592]"
        )
    if benchmark.name != "geneval" and benchmark.name not in PUBLISHED_BENCHMARKS:
        raise ConfigError(
            f"--images: the benchmark {benchmark.name} generates its own samples; remove --images, which works with "
            f"geneval and {', '.join(PUBLISHED_BENCHMARKS)} [TM593]"
        )
    out = output_paths.check_output_directory(out or Path("evaluations") / f"{benchmark.name}-{images.resolve().name}")
    files = find_images(benchmark, images) if benchmark.name == "geneval" else find_samples(benchmark, images)
    comm, initialized = distributed.init_process_group(placement.device)
    scorer = load_scorer(benchmark.name, HELD_OUT_DETECTOR, spec, judge, placement, out, tiny=tiny)
    stats = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fingerprint = hashlib.sha256(repr(stats).encode()).hexdigest()[:12]
    model = f"{images.resolve()}, pictures {fingerprint}, {scorer.detector}"
    stages = evaluate_files(benchmark, files, scorer, out, model, comm)
    report = run_stages(stages, benchmark, out, console, comm)
    if initialized:
        distributed.destroy_process_group()
    return report


def run_stages(
    stages: Iterator[StageProgress],
    benchmark: Benchmark,
    out: Path,
    console: Console,
    workers: Comm,
    progress_note: ProgressNote | None = None,
) -> dict[str, Any]:
    """Run the stages with progress bars, then print and return the report. Only rank 0 prints."""
    console = console if workers.rank == 0 else make_console(quiet=True)
    with ProgressBar(console) as progress:
        current = ""
        for stage in stages:
            if stage.stage != current:
                current, first = stage.stage, stage.completed
                progress.start(stage.stage, stage.total, first, "" if stage.stage == "report" else "samples")
            progress.update(stage.completed, progress_note(stage) if progress_note else "")
    report: dict[str, Any] = read_json(out / REPORT)
    console.print(report_table(report))
    console.print(f"the report is {out / REPORT}; samples and scores are in the same folder")
    if workers.rank == 0:
        console.print(f"the worst samples are in {write_worst_cases(out, report)}", markup=False, soft_wrap=True)
    if benchmark.name == "geneval" and workers.rank == 0:
        console.print(f"{write_results(benchmark, out)} holds the results in the format of GenEval's own evaluation")
    return report


def build_sample_fn(run: Run, options: EvaluationOptions, weights: str, out: Path = Path(), *, tiny: bool) -> SampleFn:
    """Return the function that generates samples with a run's model and the search. Sample indices seed the noise."""
    searches = not isinstance(options.search, SingleSample)
    verifier = build_verifier(options.verifier, run, tiny=tiny) if searches else RubricVerifier(run.rubric)
    observer = StepImages(out, options.search.candidates_per_sample) if options.save_steps else None
    measured: list[FlopCosts] = []  # once, with the first batch

    @torch.no_grad()
    def sample(batch: PromptBatch, indices: torch.Tensor) -> tuple[torch.Tensor, SearchCost]:
        rng = Randomness(options.seed, 0, indices.to(run.engine.device))
        snapshot = nullcontext() if weights == "live" else run.policy.weights.use(weights)
        with run.engine.autocast(), snapshot:
            policy = sampling_policy(run.policy, run.sample)
            with observe_steps(observer):
                result = options.search.run(policy, verifier, batch, rng)
            pixels = policy.decode(result.x).float().clamp(0, 1).cpu()
            if not measured:
                measured.append(measure_flop_costs(policy, verifier if searches else None, batch, rng))
        return pixels, measured[0].add_flops(result.cost)

    return sample


def report_table(report: dict[str, Any]) -> Table:
    """Return a table with a row for each task: means and 95 % intervals."""
    names = tuple(report["scores"])
    caption = [f"Frechet distance {report['frechet']:.3g}"] if "frechet" in report else []
    caption += [f"diversity {report['diversity']:.3g}"] if "diversity" in report else []
    if "correct" in names:
        caption.append(f"{report['any']['correct']:.1%} of prompts have a correct image")
    costs = f"{report['calls']:.3g} network calls"
    costs += f", {report['verifier_calls']:.3g} judge calls" if report.get("verifier_calls") else ""
    costs += f" and {format_flops(report['flops'])}" if report.get("flops") else ""
    caption.append(f"{costs} per sample")
    judge = f" (judge: {report['judge']})" if "judge" in report else ""
    title = f"{report['benchmark']}{escape(judge)}: {report['prompts']} prompts, {report['images']} samples"
    if "settings" in report:
        settings = summarize_settings(report["settings"])
        title += f"\n{escape(settings.removesuffix(', no judge') if 'judge' in report else settings)}"
    if report.get("unparsed"):
        caption.append(f"{report['unparsed']} answers of the judge could not be parsed and count as 0")
    table = Table("task", *names, title=title, caption=", ".join(caption))
    for tag in dict.fromkeys(tag for name in names for tag in report["scores"][name]):
        table.add_row(escape(tag), *(format_interval(report["scores"][name].get(tag)) for name in names))
    for part, intervals in report.get("parts", {}).items():
        for tag, interval in intervals.items():
            table.add_row(escape(f"{part}: {tag}"), format_interval(interval), *[""] * (len(names) - 1))
    return table


def format_interval(interval: Mapping[str, float] | None) -> str:
    """Return a mean with its 95 % interval, or nothing if there is none."""
    if interval is None:
        return ""
    return f"{interval['mean']:.3f} [dim]{interval['low']:.3f}-{interval['high']:.3f}[/]"
