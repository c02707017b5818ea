"""`tastemaker align`: from votes to a model that draws to the voter's taste, and a blind evaluation of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from ..config.check import require_valid
from ..config.dump import config_to_dict
from ..config.load import apply_overrides, list_recipes
from ..config.schema import PreferenceRunConfig, RunConfig
from ..config.validate import validate_config
from ..console import message_console, print_line
from ..core.output_paths import write_text_atomically
from ..core.registry import ConfigError
from ..core.safe_files import read_json_object
from ..core.types import PromptBatch
from ..data.dataset import Dataset
from ..data.playground import PlaygroundPrompts
from ..data.prompts import open_prompt_file
from ..processes.gaussian import GaussianProcess
from ..processes.paths import RectifiedFlow
from ..search.generation import resolve_source
from ..training.trainer import load_run_config, run_training
from .sessions import Session, SessionSource, create_session
from .training import REPORT_FILE
from .votes import read_votes

Method = Literal["reward_gradient", "grpo", "nft", "dpo", "kto"]
ON_VOTES = ("dpo", "kto")  # methods that train on the votes instead of a learned reward
PREFERENCE, MODEL, EVALUATION, STATE_FILE = "preference", "model", "evaluation", "alignment.json"
REWARD = "preference"  # the name of the learned reward in the run
MIN_UNSEEN_PROMPTS = 4
NEARLY_ODE = {"type": "flow_sde", "noise_level": 1e-4}  # Euler's method on rectified flow, with invisible noise

OBJECTIVES: Mapping[Method, dict[str, Any]] = {
    "reward_gradient": {"type": "reward_gradient", "gradient_mode": "last_steps", "last_steps": 2},
    "grpo": {"type": "grpo", "group_size": 8, "clip_range": 1e-3, "advantage": "group_mean"},
    "nft": {
        "type": "nft",
        "group_size": 8,
        "beta": 1.0,
        "num_timesteps": 2,
        "advantage_clip": 1.0,
        "kl_coef": 0.1,
        "old_policy_decay_rate": 0.02,
        "old_policy_decay_max": 0.5,
    },
    "dpo": {"type": "dpo", "beta": 30.0, "num_timesteps": 4, "sft_coef": 0.05},
    "kto": {"type": "kto", "beta": 300.0, "utility": "loss_averse", "num_timesteps": 4},
}
STEPS: Mapping[Method, int] = {"reward_gradient": 60, "grpo": 100, "nft": 80, "dpo": 150, "kto": 150}
# Of the log-probability that a sample is preferred to a typical one. Content rewards of the recipe keep their weight.
TASTE_WEIGHT = 2.0
# Rewards that keep the content of a model without rewards of its own: the match of the tower, with a weight such that
# samples of one prompt differ by about 1.
CONTENT_WEIGHTS = {"clip": 30.0, "hps": 40.0, "pickscore": 1.0}


@dataclass(frozen=True)
class AlignmentOptions:
    """What to align to what."""

    votes: Path
    model: str  # a recipe, the directory of a run, or an export
    out: Path
    method: Method = "reward_gradient"
    overrides: tuple[str, ...] = ()  # of the run that trains the model
    preference: str = ""  # recipe or run of the preference model; by default preference-playground or preference-clip
    preference_overrides: tuple[str, ...] = ()
    voter: str = ""  # only the votes of this voter
    prompts: Path | None = None  # of the blind evaluation; by default unseen ones of the model's data
    num_prompts: int = 30
    seeds: tuple[int, ...] = (0, 1)
    tiny: bool = False


@dataclass(frozen=True)
class Alignment:
    """What was made, stage by stage."""

    directory: Path
    completed: bool  # False if it was asked to stop; run it again to continue
    run: Path
    preference: Path | None = None
    summary: str = ""  # of the preference model
    session: Session | None = None


def align(
    votes: str | Path,
    model: str | Path,
    overrides: Sequence[str] = (),
    *,
    method: Method | None = None,
    out: str | Path | None = None,
    preference: str = "",
    preference_overrides: Sequence[str] = (),
    voter: str = "",
    prompts: Path | None = None,
    num_prompts: int = 30,
    seeds: Sequence[int] = (0, 1),
    tiny: bool = False,
    console: Console | None = None,
) -> Alignment:
    """Align a model to the votes of a person, and prepare a blind evaluation of the model before and after.

    Args:
        votes: a vote log, the votes.jsonl of a voting session.
        model: a recipe, the directory of a run, or an export.
        overrides: settings of the run that trains the model, as "key=value".
        method: reward_gradient, grpo or nft train with the learned taste as a reward; dpo trains on votes, and kto on
            likes. By default kto if the log holds only likes, and reward_gradient otherwise.
        out: the directory of the result; an alignment that is there is resumed. By default runs/align-MODEL.
        preference: the recipe of the preference model; by default one that fits the model.
        voter: use only the votes of this voter.
        prompts: a file with prompts for the blind evaluation; by default prompts that nobody voted on.
        num_prompts: how many prompts the blind evaluation has, each with one pair for every seed.
    """
    options = AlignmentOptions(
        Path(votes),
        str(model),
        Path(out) if out is not None else Path("runs") / f"align-{Path(model).name}",
        method or choose_method(Path(votes), voter),
        tuple(overrides),
        preference,
        tuple(preference_overrides),
        voter,
        prompts,
        num_prompts,
        tuple(seeds),
        tiny,
    )
    return run_alignment(options, console or message_console())


def choose_method(votes: Path, voter: str = "") -> Method:
    """KTO for a log that holds only likes, because they have no pairs; else the gradient of a learned reward."""
    kinds = {vote.kind for vote in read_votes(votes) if voter in ("", vote.voter)}
    return "kto" if kinds == {"like"} else "reward_gradient"


def run_alignment(options: AlignmentOptions, console: Console) -> Alignment:
    """Learn the taste of votes, train a model with it, and write the samples of a blind evaluation.

    Every stage resumes if interrupted, and is skipped if it is done.
    """
    if options.method not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise ConfigError(f"--method: expected one of {known}, got '{options.method:.60}'; choose one of them [TM1320]")
    base, checkpoint = resolve_source(options.model, (), tiny=options.tiny, console=console)
    claim_directory(options)
    config = build_model_config(options, base)  # before anything is trained, for its mistakes
    preference, summary = None, ""
    if options.method not in ON_VOTES:
        preference_config = build_preference_config(options, base)
        print_line(console, f"1. learn the taste of {options.votes}", "bold")
        if not run_training(preference_config, tiny=options.tiny, console=console):
            return Alignment(options.out, False, options.out / MODEL)
        preference = options.out / PREFERENCE
        summary = str(read_json_object(preference / REPORT_FILE).get("summary", ""))
    print_line(console, f"2. train {base.name} with {options.method}", "bold")
    if not run_training(config, tiny=options.tiny, init_from=_new_run_only(config, checkpoint), console=console):
        return Alignment(options.out, False, config.directory, preference, summary)
    print_line(console, "3. generate the samples of the blind evaluation", "bold")
    sources = [
        SessionSource("before", options.model, str(checkpoint) if checkpoint else None),
        SessionSource("after", str(config.directory), None, same_sampler(base, config)),
    ]
    session = create_session(
        options.out / EVALUATION,
        sources,
        choose_unseen_prompts(options, config),
        options.seeds,
        tiny=options.tiny,
        console=console,
    )
    return Alignment(options.out, True, config.directory, preference, summary, session)


def same_sampler(base: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """Overrides with which the trained model is sampled as the model before, if it trains with another sampler."""
    before, after = (config_to_dict(each)["process"] for each in (base, config))
    if config.process.stochastic and not base.process.stochastic:
        before["dynamics"] = NEARLY_ODE  # the objective refuses the deterministic sampler itself
    return tuple(f"process.{key}={json.dumps(value)}" for key, value in before.items() if after.get(key) != value)


def _new_run_only(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """The weights to start from, unless the run has checkpoints of its own."""
    return None if (config.directory / "checkpoints").is_dir() else checkpoint


def claim_directory(options: AlignmentOptions) -> None:
    """Write what is aligned to what; refuse a directory that holds another alignment."""
    votes = read_votes(options.votes)
    digest = hashlib.sha256(options.votes.read_bytes()).hexdigest()
    state = {"votes": str(options.votes), "sha256": digest, "model": options.model, "method": options.method}
    file = options.out / STATE_FILE
    if file.is_file():
        before = read_json_object(file)
        changed = [key for key, value in state.items() if before.get(key) != value]
        if changed:
            what = "the votes changed" if changed == ["sha256"] else f"{changed[0]} was {before.get(changed[0])}"
            raise ConfigError(
                f"--out: {options.out} holds another alignment ({what}); choose another --out, or remove the "
                "directory [TM1321]"
            )
        return
    options.out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, json.dumps({**state, "count": len(votes)}, indent=1) + "\n")


def is_playground(config: RunConfig) -> bool:
    """Whether a model draws scenes of the playground, for which there are detectors."""
    return str(config.model.weights or "").startswith("playground/") or isinstance(config.data, PlaygroundPrompts)


def build_preference_config(options: AlignmentOptions, base: RunConfig) -> PreferenceRunConfig:
    """The configuration of the preference model."""
    recipe = options.preference or ("preference-playground" if is_playground(base) else "preference-clip")
    settings = [
        f"data={json.dumps({'type': 'votes', 'path': str(options.votes), 'voter': options.voter})}",
        f"output_dir={options.out}",
        f"name={PREFERENCE}",
        f"engine.device={base.engine.device}",
    ]
    config = load_run_config(recipe, [*settings, *options.preference_overrides])
    if not isinstance(config, PreferenceRunConfig):
        known = ", ".join(name for name in list_recipes() if name.startswith("preference-"))
        raise ConfigError(f"--preference: {recipe:.60} does not train a preference model; use one of {known} [TM1322]")
    return config


def build_model_config(options: AlignmentOptions, base: RunConfig) -> RunConfig:
    """The configuration of the run that aligns the model: that of the model, with the method and the learned reward."""
    data = config_to_dict(base)
    same = data["objective"]["type"] == options.method
    if not same:
        data["objective"] = dict(OBJECTIVES[options.method])
        if options.method == "kto" and not isinstance(base.process, GaussianProcess):
            data["objective"]["beta"] = 0.1  # of log-probabilities instead of squared errors
    if base.objective.consumes is not PromptBatch:  # a recipe that pretrains: its batches and rates are others
        data["optim"] = {"lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.95], "lr_schedule": "linear"}
        data["batch"] = {"prompts": 48}
        data["ema_decay"] = 0.0
        data["sample"] = {**data["sample"], "weights": "live"}
    data["data"] = choose_data(options, base, data["data"])
    data["rewards"] = choose_rewards(options, base, data["rewards"])
    data["process"] = adapt_process(options.method, base, data["process"])
    data |= {"steps": STEPS[options.method], "output_dir": str(options.out), "name": MODEL}
    steps = validate_config(apply_overrides(data, options.overrides)).steps
    for section in ("guard", "sample", "checkpoint"):
        data[section] = {**data[section], "every": max(1, steps // 4)}
    config = validate_config(apply_overrides(data, options.overrides))
    if not isinstance(config, RunConfig):
        raise ConfigError("align: the overrides change the kind of the run; remove them [TM1323]")
    return replace(require_valid(config), output_dir=options.out, name=MODEL)


def choose_data(options: AlignmentOptions, base: RunConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """The votes for DPO and KTO; else the prompts of the model's recipe, or those that were voted on."""
    if options.method in ON_VOTES:
        kind = "like_votes" if options.method == "kto" else "votes"
        return {"type": kind, "path": str(options.votes), "voter": options.voter}
    if base.data.batch_type is PromptBatch:
        return dict(data)
    if is_playground(base):
        return {"type": "playground_prompts", "motion": base.model.frames > 1}
    return {"type": "prompts", "prompts": list(dict.fromkeys(vote.prompt for vote in read_votes(options.votes)))}


def choose_rewards(options: AlignmentOptions, base: RunConfig, rewards: Mapping[str, Any]) -> dict[str, Any]:
    """The learned reward beside the rewards of the content, and held-out rewards for the guard."""
    gradient = options.method == "reward_gradient"
    kept = {
        name: settings
        for name, settings in rewards.items()
        if settings.get("weight", 1.0) == 0 or base.rewards[name].spec.differentiable or not gradient
    }
    content = {name: each for name, each in kept.items() if each.get("weight", 1.0) != 0}
    held_out = {name: {**each, "held_out": True} for name, each in kept.items() if each.get("weight", 1.0) == 0}
    if is_playground(base) and base.model.frames == 1:
        content = content or {"content": {"type": "playground_soft" if gradient else "playground_verdict"}}
        second = {"type": "playground_verdict", "output": "verdict", "weights": "playground/detector1"}
        held_out.setdefault("second", {**second, "weight": 0, "held_out": True})
    if options.method in ON_VOTES:  # trains on the votes alone; rewards only watch
        return {name: {**each, "weight": 0, "held_out": True} for name, each in {**content, **held_out}.items()}
    if not content:
        tower = build_preference_config(options, base).preference.tower
        settings = config_to_dict(build_preference_config(options, base))["preference"]["tower"]
        if settings["type"] in CONTENT_WEIGHTS and tower.differentiable:
            content = {"content": {**settings, "weight": CONTENT_WEIGHTS[settings["type"]]}}
    learned = {
        "type": "preference",
        "path": str(options.out / PREFERENCE),
        "output": "log_probability",
        "weight": TASTE_WEIGHT,
    }
    return {REWARD: learned, **content, **held_out}


def adapt_process(method: Method, base: RunConfig, process: Mapping[str, Any]) -> dict[str, Any]:
    """The sampler of the model; GRPO needs a stochastic one, and NFT draws its timesteps uniformly."""
    settings = dict(process)
    if not isinstance(base.process, GaussianProcess) or not isinstance(base.process.path, RectifiedFlow):
        return settings
    if method == "grpo" and not base.process.stochastic:
        settings["dynamics"] = {"type": "flow_sde"}
    if method == "nft":
        settings["path"] = {**settings["path"], "timestep_sampling": "uniform"}
    return settings


def choose_unseen_prompts(options: AlignmentOptions, config: RunConfig) -> Sequence[str]:
    """Prompts of the blind evaluation that nobody voted on."""
    voted = {vote.prompt for vote in read_votes(options.votes)}
    data: Dataset
    if options.prompts is not None:
        data = open_prompt_file(options.prompts).load(config.seed)
    elif is_playground(config):
        data = PlaygroundPrompts(split="held_out", motion=config.model.frames > 1).load(config.seed)
    else:
        data = config.data.load(config.seed)
    candidates = data.first_prompts(min(len(data), 8 * options.num_prompts + len(voted))).prompts
    unseen = [prompt for prompt in dict.fromkeys(candidates) if prompt not in voted][: options.num_prompts]
    if len(unseen) < min(MIN_UNSEEN_PROMPTS, options.num_prompts):
        raise ConfigError(
            f"--prompts: only {len(unseen)} of the model's prompts were not voted on; give a file of prompts for the "
            "blind evaluation, one per line [TM1324]"
        )
    return unseen
