"""Convert OmegaConf YAML files of Show-o and of Image-Generation-CoT to ours.

A file with `training.beta` trains DPO, one with `training.batch_size_lm` trains the three losses of Show-o, another one
with an `optimizer` fine-tunes on captioned images. A file without an optimizer describes a model to sample from.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.load import apply_overrides
from ..core.cards import PUBLISHED_JUDGES
from ..core.registry import ConfigError, suggest_name
from ..data.pairs import PairFile
from ..models.showo.model import COT_STAGES
from ..models.showo.vision_encoder import CLIP

Settings = dict[str, Any]

SECTIONS = (
    *("wandb", "experiment", "model", "dataset", "optimizer", "lr_scheduler", "mask_schedule", "training"),
    "inference",
)
# Keys by section; those that mean nothing here are listed too, so that a misspelled one is refused.
KEYS: dict[str, set[str]] = {
    "experiment": {
        *("project", "name", "output_dir", "logging_dir", "save_every", "eval_every", "generate_every", "log_every"),
        *("log_grad_norm_every", "resume_from_checkpoint", "max_train_examples_t2i", "max_train_examples_mmu"),
    },
    "model": {"vq_model", "showo", "rw_model", "gradient_checkpointing", "enable_xformers_memory_efficient_attention"},
    "model.vq_model": {"type", "vq_model_name", "pretrained_model_path"},
    "model.showo": {
        *("load_from_showo", "pretrained_model_path", "w_clip_vit", "vocab_size", "llm_vocab_size", "llm_model_path"),
        *("codebook_size", "num_vq_tokens", "num_new_special_tokens"),
    },
    "dataset": {
        *("gen_type", "und_type", "combined_loader_mode", "add_system_prompt", "params", "preprocessing"),
    },
    "dataset.params": {
        *("data_path", "train_t2i_shards_path_or_url", "train_mmu_shards_path_or_url", "train_lm_shards_path_or_url"),
        *("add_caption_prompt", "external_caption_path", "external_journeydb_caption_path", "batch_size"),
        *("external_laion12m_caption_path", "external_cc12m_caption_path", "validation_prompts_file"),
        *("shuffle_buffer_size", "num_workers", "resolution", "pin_memory", "persistent_workers"),
    },
    "dataset.preprocessing": {"max_seq_length", "resolution", "center_crop", "random_flip"},
    "optimizer": {"name", "params"},
    "optimizer.params": {"learning_rate", "scale_lr", "beta1", "beta2", "weight_decay", "epsilon"},
    "lr_scheduler": {"scheduler", "params"},
    "lr_scheduler.params": {"learning_rate", "warmup_steps", "warmup_ratio"},
    "mask_schedule": {"schedule", "params"},
    "training": {
        *("gradient_accumulation_steps", "noise_type", "batch_size", "batch_size_t2i", "batch_size_lm"),
        *("batch_size_mmu", "mixed_precision", "enable_tf32", "seed", "max_train_steps", "num_epoch"),
        *("overfit_one_batch", "cond_dropout_prob", "min_masking_rate", "label_smoothing", "max_grad_norm"),
        *("guidance_scale", "generation_timesteps", "generation_temperature", "mask_schedule", "t2i_coeff"),
        *("lm_coeff", "mmu_coeff", "beta", "reward_coef", "dpo_coef", "sft_coef", "predict_all_tokens"),
    },
    "inference": {"generation_timesteps", "guidance_scale", "generation_temperature"},
}
# Settings that exist in the files but have one value here.
ONLY_VALUES: dict[str, Any] = {
    "training.overfit_one_batch": False,
    "training.min_masking_rate": 0,
    "training.label_smoothing": 0,
    "training.noise_type": "mask",
    "training.predict_all_tokens": False,
    "training.dpo_coef": 1,
    "optimizer.name": "adamw",
    "optimizer.params.scale_lr": False,
    "model.vq_model.type": "magvitv2",
    "model.showo.num_new_special_tokens": 10,
    "dataset.preprocessing.random_flip": False,
}
INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
MAX_INTERPOLATIONS = 10  # a value may refer to one that refers to another
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
# Data of the three losses: theirs, ours, the type that reads it, and whether it has a size.
JOINT_SOURCES = (
    ("train_t2i_shards_path_or_url", "images", "captioned_folder", True),
    ("train_lm_shards_path_or_url", "text", "prompt_file", False),
    ("train_mmu_shards_path_or_url", "questions", "vqa_file", True),
)


def convert_config(data: Settings, overrides: Sequence[str]) -> tuple[Settings, list[str]] | None:
    """Convert a file of Show-o or Image-Generation-CoT; None if it is not one.

    Overrides of their keys (`training.beta=0.2`) are applied before, and are not passed on.
    """
    model = data.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("showo"), Mapping):
        return None
    theirs = [each for each in overrides if is_their_key(each.partition("=")[0])]
    data = apply_overrides(data, theirs)
    check_sections(data)
    data = resolve_interpolations(data)
    check_values(data)
    return convert_run(data), [each for each in overrides if each not in theirs]


def is_their_key(key: str) -> bool:
    """Whether an override is about a key of the original file."""
    section, _, rest = key.partition(".")
    if section == "model":
        return rest.split(".")[0] in KEYS["model"]
    return section in SECTIONS


def resolve_interpolations(data: Settings) -> Settings:
    """Replace values such as ${optimizer.params.learning_rate} by what they refer to."""

    def resolve(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {key: resolve(each, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
        if isinstance(value, list):
            return [resolve(each, where) for each in value]
        for _ in range(MAX_INTERPOLATIONS):
            if not isinstance(value, str) or "${" not in value:
                return value
            match = INTERPOLATION.fullmatch(value)
            found = get_setting(data, match[1]) if match else None
            if found is None:
                break
            value = found
        raise ConfigError(
            f"{where}: '{value!s:.60}' refers to no setting of the file; expected the path of one, as in "
            "${optimizer.params.learning_rate}"
            " [TM906]"
        )

    resolved: Settings = resolve(data, "")
    return resolved


def get_setting(data: Mapping[str, Any], path: str) -> Any:
    """The value at a path of keys, or None."""
    value: Any = data
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_sections(data: Settings) -> None:
    """Refuse unknown keys, and sections that are no mappings."""
    for key in data:
        if key not in SECTIONS:
            raise ConfigError(f"config: Show-o has no section '{key!s:.60}'{suggest_name(str(key), SECTIONS)} [TM907]")
    for section, keys in KEYS.items():
        values = get_setting(data, section)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section}: found {values!r:.60}; expected a mapping [TM908]")
        for key in values:
            if key not in keys:
                raise ConfigError(f"{section}: Show-o has no key '{key!s:.60}'{suggest_name(str(key), keys)} [TM909]")


def check_values(data: Settings) -> None:
    """Refuse values that have no counterpart here."""
    for path, expected in ONLY_VALUES.items():
        value = get_setting(data, path)
        if value is not None and to_number(value) != expected:
            raise ConfigError(f"{path} is {value!r:.60}; only {str(expected).lower()} is supported [TM910]")


def to_number(value: Any) -> Any:
    """A number that YAML reads as text, such as 1e-8; anything else unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def convert_run(data: Settings) -> Settings:
    training, experiment = get_setting(data, "training") or {}, get_setting(data, "experiment") or {}
    output = Path(experiment.get("output_dir", "runs/show-o"))
    names: Settings = {"output_dir": str(output.parent), "name": output.name}
    common: Settings = {**names, "model": convert_model(data), **convert_sampling(data)}
    if get_setting(data, "optimizer") is None:
        return {**common, "extends": "dpo-showo"}
    if "beta" in training:
        converted = convert_dpo(data, training)
    elif "batch_size_lm" in training:
        converted = convert_joint(data, training)
    else:
        converted = convert_finetuning(data, training)
    every: Settings = {
        section: {"every": int(experiment[key])}
        for key, section in (("save_every", "checkpoint"), ("generate_every", "sample"))
        if experiment.get(key)
    }
    model = {**common["model"], "likelihood_scope": "sequence"}
    schedule = convert_schedule(data, training, converted)
    return {**common, **every, **converted, **schedule, "model": model, "seed": training.get("seed", 0)}


def convert_model(data: Settings) -> Settings:
    showo, vq = data["model"]["showo"], get_setting(data, "model.vq_model") or {}
    size = int(get_setting(data, "dataset.preprocessing.resolution") or 256)
    codes, text = int(showo.get("codebook_size", 8192)), int(showo.get("llm_vocab_size", 50295))
    expected = {"vocab_size": text + 10 + codes + 1, "num_vq_tokens": (size // 16) ** 2}
    for key, value in expected.items():
        if int(showo.get(key, value)) != value:
            raise ConfigError(
                f"model.showo.{key} is {showo[key]!r:.60}; the other settings of the model make it {value} [TM911]"
            )
    weights = find_published_name(str(showo.get("pretrained_model_path", "showlab/show-o")), COT_STAGES)
    if get_setting(data, "training.batch_size_lm") is not None and showo.get("load_from_showo") is False:
        warnings.warn(
            "model.showo.load_from_showo is false: the original starts from Phi-1.5's language weights, which are not "
            f"read here; this run starts from {weights}, or from random weights with model.weights=null"
            " [TM912]",
            stacklevel=2,
        )
    return {
        "type": "showo",
        "weights": weights,
        "autoencoder": vq.get("pretrained_model_path") or vq.get("vq_model_name", "showlab/magvitv2"),
        "tokenizer": showo.get("llm_model_path", "microsoft/phi-1_5"),
        "vision_encoder": CLIP.hub if showo.get("w_clip_vit") else None,
        "image_size": size,
        "max_text_tokens": int(get_setting(data, "dataset.preprocessing.max_seq_length") or 128),
        "codebook_size": codes,
        "text_vocab_size": text,
    }


def find_published_name(path: str, names: Mapping[str, Any]) -> str:
    """The name of published weights if a folder such as ckpts/parm is not there, otherwise the path itself."""
    last = Path(path).name
    return last if last in names and not Path(path).expanduser().exists() else path


def convert_sampling(data: Settings) -> Settings:
    """Steps and guidance of sampling: those of `inference`, or else those of the samples that training logs."""
    settings = {**(get_setting(data, "training") or {}), **(get_setting(data, "inference") or {})}
    process: Settings = {}
    if "generation_timesteps" in settings:
        process["num_steps"] = int(settings["generation_timesteps"])
    if "generation_temperature" in settings:
        process["temperature"] = to_number(settings["generation_temperature"])
    schedule = get_setting(data, "mask_schedule.schedule") or settings.get("mask_schedule")
    if schedule is not None:
        power = re.fullmatch(r"pow([\d.]+)", str(schedule))
        process |= {"schedule": "power", "exponent": float(power[1])} if power else {"schedule": schedule}
    guidance = {"guidance": {"scale": 1 + float(settings["guidance_scale"])}} if "guidance_scale" in settings else {}
    return {**({"process": process} if process else {}), **guidance}


def convert_dpo(data: Settings, training: Settings) -> Settings:
    coef = float(to_number(training.get("reward_coef", 0)))
    objective = {
        "beta": training["beta"],
        "sft_coef": 0.0 if coef else training.get("sft_coef", 0),  # the original ignores it beside the judge's term
        "prompt_dropout": training.get("cond_dropout_prob", 0.1),
        "noise_sharing": "independent",
    }
    size = int(get_setting(data, "dataset.preprocessing.resolution") or 256)
    path = get_setting(data, "dataset.params.data_path")
    converted: Settings = {
        "extends": "dpo-parm-showo" if coef else "dpo-showo",
        "objective": {**objective, **({"reward_guidance_coef": coef} if coef else {})},
        **({"data": {"type": "pair_file", "path": path, "image_size": size}} if path else {}),
        "batch": convert_batch(training, int(training.get("batch_size_t2i", 10))),
    }
    if coef:
        judge = find_published_name(str(get_setting(data, "model.rw_model") or "parm"), PUBLISHED_JUDGES)
        converted["rewards"] = {"judge": {"weights": judge}}
    return converted


def convert_joint(data: Settings, training: Settings) -> Settings:
    sizes = {
        "num_images": int(training.get("batch_size_t2i", 1)),
        "num_texts": int(training["batch_size_lm"]),
        "num_questions": int(training.get("batch_size_mmu", 1)),
    }
    size = int(get_setting(data, "dataset.preprocessing.resolution") or 256)
    sources: Settings = {}
    for theirs, ours, kind, has_size in JOINT_SOURCES:
        path = get_setting(data, f"dataset.params.{theirs}")
        if isinstance(path, str) and Path(path).exists():
            sources[ours] = {"type": kind, "path": path, **({"image_size": size} if has_size else {})}
        elif path is not None:
            warnings.warn(
                f"dataset.params.{theirs}: {path!s:.60} is no folder or file that can be read, so the run has example "
                f"data; set data.{ours}, for example '{{type: {kind}, path: ...}}'"
                " [TM913]",
                stacklevel=2,
            )
    return {
        "extends": "showo-joint",
        "objective": {
            "t2i_coef": training.get("t2i_coeff", 1.0),
            "lm_coef": training.get("lm_coeff", 0.1),
            "mmu_coef": training.get("mmu_coeff", 1.0),
            "prompt_dropout": training.get("cond_dropout_prob", 0.1),
        },
        "data": {**sizes, **sources},
        "batch": convert_batch(training, sum(sizes.values())),
    }


def convert_finetuning(data: Settings, training: Settings) -> Settings:
    path = get_setting(data, "dataset.params.train_t2i_shards_path_or_url")
    size = int(get_setting(data, "dataset.preprocessing.resolution") or 256)
    folder = path if isinstance(path, str) and Path(path).exists() else None
    return {
        "extends": "showo-finetune",
        "objective": {"prompt_dropout": training.get("cond_dropout_prob", 0.1)},
        "data": {"type": "captioned_folder", "path": folder, "image_size": size},
        "batch": convert_batch(training, int(training.get("batch_size_t2i", 16))),
    }


def convert_batch(training: Settings, size: int) -> Settings:
    """Samples per step of one process of theirs, with gradient accumulation."""
    accumulation = int(training.get("gradient_accumulation_steps", 1))
    return {"prompts": size * accumulation, "micro_batch_size": size if accumulation > 1 else None}


def convert_schedule(data: Settings, training: Settings, converted: Settings) -> Settings:
    """Optimizer, precision, memory, and the steps: `max_train_steps`, or epochs by the size of the data."""
    params, scheduler = get_setting(data, "optimizer.params") or {}, get_setting(data, "lr_scheduler") or {}
    name, precision = scheduler.get("scheduler", "constant"), training.get("mixed_precision", "no")
    for path, value, known in (
        ("lr_scheduler.scheduler", name, SCHEDULES),
        ("training.mixed_precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise ConfigError(f"{path} is {value!r:.60}; expected one of {', '.join(known)} [TM914]")
    steps = count_steps(training, converted)
    warmup = get_setting(scheduler, "params.warmup_steps")
    ratio = float(to_number(get_setting(scheduler, "params.warmup_ratio") or 0))
    if warmup is None and steps is not None:
        warmup = math.ceil(ratio * steps)
    optim = {
        "lr": to_number(params.get("learning_rate", 1e-4)),
        "betas": [to_number(params.get("beta1", 0.9)), to_number(params.get("beta2", 0.999))],
        "weight_decay": to_number(params.get("weight_decay", 0.01)),
        "eps": to_number(params.get("epsilon", 1e-8)),
        "max_grad_norm": to_number(training.get("max_grad_norm") or 0),
        "lr_schedule": SCHEDULES[name],
        **({} if warmup is None else {"warmup_steps": int(warmup)}),
    }
    memory = "checkpoint" if get_setting(data, "model.gradient_checkpointing") else "keep"
    engine = {"precision": PRECISIONS[precision], "activation_memory": memory}
    return {"optim": optim, "engine": engine, **({} if steps is None else {"steps": steps})}


def count_steps(training: Settings, converted: Settings) -> int | None:
    """Training steps; None if they follow from data that is not there."""
    if "max_train_steps" in training:
        return int(training["max_train_steps"])
    path = get_setting(converted, "data.path")
    if "num_epoch" not in training or not path or not Path(path).exists():
        return None
    pairs = len(PairFile(Path(path)).load(int(training.get("seed", 0))))
    return int(training["num_epoch"]) * -(-pairs // int(converted["batch"]["prompts"]))
