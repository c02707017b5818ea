"""The migration page lists every flag of LlamaGen's trainers, and the settings it names are valid."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import torch

from tastemaker.config.check import find_problems
from tastemaker.config.config_warnings import collect_warnings
from tastemaker.config.load import load
from tastemaker.config.schema import RunConfig
from tastemaker.core.guidance import in_interval
from tastemaker.objectives.teacher_forced_grpo import TeacherForcedGRPO

PAGE = (Path(__file__).parents[2] / "docs" / "migrate-llamagen-grpo.md").read_text(encoding="utf-8")
ORIGINAL_FLAGS = """
gpt-model gpt-ckpt from-fsdp vq-model vq-ckpt codebook-size codebook-embed-dim image-size downsample-size num-classes
cls-token-num mixed-precision grad-precision data-parallel lr weight-decay beta1 beta2 max-grad-norm epochs global-seed
num-generations top-k top-p temperature sample-batch-size train-batch-size gradient-accumulation-steps num-workers
adv-clip-max clip-range dataset data-path use-wandb wandb-project wandb-entity wandb-run-name log-image-every
log-interval ckpt-every ckpt-dir ckpt-sharded
"""
ADDED_FLAGS = """
uncond-prob data-loader sample-model-mode reward-rec-type reward-rec-weight reward-perceptual-weight reward-use-gan
reward-gan-weight reward-disc-dim reward-disc-num-layers reward-disc-ckpt reward-use-embedcos reward-embedcos-weight
aux-ce-weight kl-coef use-kl-loss kl-base-ckpt use-token-noise token-noise-prob use-token-dropout token-dropout-ratio
free-run-gt-mix-prob eval-chunk-size eval-t-window dropout-p token-dropout-p t5-feat-path short-t5-feat-path data-start
data-end
"""
SAMPLING_FLAGS = """
cfg-scale cfg-interval temperature top-k top-p seed precision compile num-fid-samples per-proc-batch-size sample-dir
"""
SETTINGS = [
    "model.variant=L",
    "model.weights=c2i_L_256.pt",
    "model.autoencoder=vq.pt",
    "model.codebook_size=16384",
    "model.image_size=256",
    "data.image_size=256",
    "model.downsample_factor=16",
    "model.num_classes=1000",
    "model.dropout=0.1",
    "model.embeddings=embeddings",
    "engine.precision=fp16",
    "engine.reduce_dtype=fp32",
    "engine.strategy=hsdp",
    "engine.hsdp_replicas=2",
    "optim.lr=1e-5",
    "optim.weight_decay=1e-2",
    "optim.betas=[0.9, 0.95]",
    "optim.max_grad_norm=1.0",
    "steps=100",
    "seed=0",
    "objective.group_size=8",
    "process.temperature=1.0",
    "batch.prompts=32",
    "batch.minibatches=32",
    "batch.micro_batch_size=1",
    "objective.advantage_clip=5.0",
    "objective.clip_range=1e-4",
    "objective.samples_per_call=4",
    "loggers=[{type: wandb, project: autoreg-grpo}]",
    "name=mine",
    "output_dir=checkpoints",
    "sample.every=100",
    "checkpoint.every=100",
    "checkpoint.format=sharded",
    "objective.token_noise=0.5",
    "objective.ce_coef=0.1",
    "objective.kl_coef=0.01",
    "objective.own_token_ratio=0.3",
    "objective.token_dropout=0.5",
    "objective.clip_range_high=0.3",
    "objective.prompt_dropout=0.1",
    "objective.latent_reward_weight=1.0",
    "objective.emulate_bugs=[dropout]",
    "rewards.mse.weight=4",
    "rewards.l1.type=l1",
    "rewards.l1.weight=2",
    "rewards.lpips.type=lpips",
    "rewards.lpips.weight=1",
    "rewards.discriminator.type=discriminator",
    "rewards.discriminator.weight=1",
    "rewards.discriminator.width=64",
    "rewards.discriminator.num_layers=3",
    "rewards.discriminator.weights=discriminator.safetensors",
]


def flag_table() -> dict[str, str]:
    """The documented setting of each flag."""
    table: dict[str, str] = {}
    for flags, setting in re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE):
        table |= dict.fromkeys(re.findall(r"`--([\w-]+)`", flags), setting)
    return table


def test_every_flag_is_documented() -> None:
    assert {*ORIGINAL_FLAGS.split(), *ADDED_FLAGS.split(), *SAMPLING_FLAGS.split()} <= flag_table().keys()


def test_guidance_interval_matches_published_code() -> None:
    tokens, interval = 576, 100
    inside = in_interval(1 - torch.arange(tokens) / tokens, (round(1 - (interval + 1.5) / tokens, 4), 1.0))
    published = [
        position == 0 or position - 1 <= interval for position in range(tokens)
    ]  # the first token is predicted with the prompt
    assert inside.tolist() == published


def test_documented_settings_are_valid() -> None:
    config = load("grpo-llamagen-tf", SETTINGS)
    assert config.objective == TeacherForcedGRPO(
        clip_range_high=0.3,
        kl_coef=0.01,
        ce_coef=0.1,
        token_noise=0.5,
        own_token_ratio=0.3,
        token_dropout=0.5,
        prompt_dropout=0.1,
        latent_reward_weight=1.0,
        emulate_bugs=("dropout",),
        samples_per_call=4,
    )
    assert [problem for problem in find_problems(config, 4) if problem.startswith(("objective", "rewards"))] == []


def test_documented_settings_are_tested() -> None:
    tested = {setting.split("=")[0] for setting in SETTINGS}
    documented = {name for line in flag_table().values() for name in re.findall(r"`((?:\w+\.)+\w+)[`=]", line)}
    sections = {f.name for f in fields(RunConfig)}
    settings = {name for name in documented if name.split(".")[0] in sections}
    # Settings of other data or models, or refused here.
    excluded = {
        "model.class_names",
        "model.max_text_tokens",
        "process.top_k",
        "process.top_p",
        "data.num_workers",
        "data.file_pattern",
    }
    excluded |= {"guidance.scale", "guidance.interval", "batch.rollout_batch_size"}  # for sampling
    assert settings - tested - excluded == set()


def test_rollouts_only_guidance_warns() -> None:
    (warning,) = collect_warnings(load("ar-grpo"))
    assert warning.startswith("guidance.rollouts_only: ")
    for settings in (["guidance.rollouts_only=false"], ["guidance.scale=1"]):
        assert collect_warnings(load("ar-grpo", settings)) == []
    overrides = ["guidance={scale: 2.0, rollouts_only: true}"]  # teacher forcing scores the policy it samples from
    assert collect_warnings(load("grpo-llamagen-tf", overrides)) == []
