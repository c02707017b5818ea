"""Rules across settings, step counts and world sizes: every broken rule names its key."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tastemaker.config.check import find_problems, require_valid, torchrun_world_size
from tastemaker.config.engine_rules import check_context_parallel
from tastemaker.config.load import load, load_any_config
from tastemaker.config.registries import MODELS
from tastemaker.config.step_counts import StepCounts, compute_step_counts
from tastemaker.core.registry import ConfigError
from tastemaker.objectives.reward_gradient import RewardGradient

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("recipe", "change", "key", "fragment"),
    [
        ("grpo-toy-flow", "model={type: toy_causal}", "process.type", "process.type=autoregressive"),
        ("grpo-toy-causal", "objective={type: nft}", "objective.type", "'gaussian'"),
        ("vader-svd-hps", "data={type: prompts, prompts: [a fox]}", "model.image", "first prompt"),
        ("grpo-toy-flow", "process.dynamics={type: ode}", "process.dynamics", "stochastic"),
        ("grpo-toy-flow", "process.dynamics={type: ddim, eta: 0}", "process.dynamics", "stochastic"),
        ("grpo-toy-flow", "data={type: toy_pairs}", "data.type", "prompts or prompt_file"),
        ("dpo-toy-flow", "data={type: prompts, prompts: [a red]}", "data.type", "toy_pairs or pair_file"),
        ("draft-toy-flow", "rewards.small.type=jpeg", "rewards", "'small'"),
        (
            "draft-toy-flow",
            "rewards={a: {type: jpeg}, b: {type: jpeg, quality: 5}, color: {type: color}}",
            "rewards",
            "'a', 'b'",
        ),
        ("grpo-toy-flow", "rewards=null", "rewards", "no rewards"),
        ("grpo-toy-flow", "rewards.color.weight=0", "rewards", "weight 0"),
        ("grpo-toy-flow", "rewards.still.type=stillness", "rewards", "'still'"),
        ("refl-toy-epsilon", "objective.step_range=[6, 30]", "objective", "step 30"),
        ("grpo-toy-causal", "process.top_k=5", "process", "top_k is 5"),
        ("grpo-toy-flow", "batch.minibatches=3", "batch.minibatches", "multiple of 3"),
        ("grpo-toy-flow", "engine.strategy=hsdp", "engine.hsdp_replicas", "multiple of 2"),
        ("grpo-toy-flow", "engine.cpu_offload=true", "engine.cpu_offload", "engine.strategy=fsdp"),
        ("grpo-toy-flow", "engine={cpu_offload: true, strategy: sdp}", "engine.cpu_offload", "sdp, which keeps"),
        ("grpo-toy-flow", "sample.weights=ema", "sample.weights", "ema_decay"),
        ("grpo-toy-flow", "data={type: prompt_file, path: none.txt}", "data.path", "'none.txt'"),
    ],
)
def test_broken_rule_names_its_key(recipe: str, change: str, key: str, fragment: str) -> None:
    (problem,) = find_problems(load(recipe, [change]), world_size=1)
    assert problem.startswith(f"{key}: ") and fragment in problem


@pytest.mark.parametrize("mode", get_args(get_type_hints(RewardGradient)["gradient_mode"]))
def test_every_gradient_mode_is_valid(mode: str) -> None:
    changes = [f"objective.gradient_mode={mode}", "objective.steps=[3, 24]", "objective.step_range=[5, 9]"]
    assert find_problems(load("vader-wan-hps", changes), world_size=1) == []


def test_last_steps_are_at_most_those_of_the_sampler() -> None:
    (problem,) = find_problems(load("vader-wan-hps", ["objective.last_steps=26"]), world_size=1)
    assert problem.startswith("objective.last_steps: ") and "got 26;" in problem
    assert find_problems(load("vader-wan-hps", ["objective.last_steps=25"]), world_size=1) == []
    assert (
        find_problems(
            load("vader-wan-hps", ["objective.last_steps=26", "objective.gradient_mode=random"]), world_size=1
        )
        == []
    )


def test_generation_ignores_last_steps() -> None:
    assert (
        find_problems(
            load("vader-wan-hps", ["objective.last_steps=5", "process.num_steps=4"]), world_size=1, load_data=False
        )
        == []
    )


def test_toy_images_have_the_models_number_of_frames() -> None:
    (problem,) = find_problems(load("likelihood-toy-video", ["data.num_frames=1"]), world_size=1)
    assert problem.startswith("data.num_frames: ") and problem.endswith("data.num_frames=4 [TM787]")


def test_video_reward_needs_several_frames() -> None:
    (problem,) = find_problems(load("reward-gradient-toy-video", ["objective.frames=random"]), world_size=1)
    assert problem.startswith("objective.frames: ") and "'still'" in problem
    assert find_problems(load("reward-gradient-toy-video", ["objective.frames=fml"]), world_size=1) == []
    (problem,) = find_problems(load("reward-gradient-toy-video", ["objective.frames=[0, 4]"]), world_size=1)
    assert problem.startswith("objective: 'frames'")


def test_reward_of_weight_zero_needs_no_gradient() -> None:
    assert find_problems(load("draft-toy-flow", ["rewards.small={type: jpeg, weight: 0}"]), world_size=1) == []


def test_likelihood_allows_truncated_sampling() -> None:
    assert find_problems(load("likelihood-toy-causal", ["process.top_k=5"]), world_size=1) == []


def test_lora_dropout_is_refused_with_log_probabilities() -> None:
    changes = ["objective={type: ddpo}", "process.dynamics.eta=1"]
    (problem,) = find_problems(load("vader-modelscope-hps", changes))
    assert problem.startswith("tuning.dropout: 0.1") and problem.endswith("tuning.dropout=0 [TM792]")
    assert find_problems(load("vader-modelscope-hps", [*changes, "tuning.dropout=0"])) == []


def test_prompts_are_divisible_by_ranks() -> None:
    config = load("grpo-toy-flow", ["batch.prompts=9"])
    assert find_problems(config, world_size=3) == []
    (problem,) = find_problems(config, world_size=2)
    assert problem.startswith("batch.prompts: 9")


def test_hsdp_ranks_divide_into_replicas() -> None:
    config = load("grpo-toy-flow", ["engine.strategy=hsdp"])
    assert find_problems(config, world_size=4) == []


def test_all_problems_are_reported_at_once() -> None:
    changes = ["process.dynamics={type: ode}", "rewards=null", "batch.prompts=7", "sample.weights=ema"]
    with pytest.raises(ConfigError) as error:
        require_valid(load("grpo-toy-flow", changes), world_size=2)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "process.dynamics",
        "rewards",
        "batch.prompts",
        "sample.weights",
    ]


def test_default_world_size_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert torchrun_world_size() == 3
    (problem,) = find_problems(load("grpo-toy-flow"))
    assert problem.startswith("batch.prompts: 8")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE.*'many'.*TM023"):
        torchrun_world_size()


def test_step_counts_of_grpo() -> None:
    changes = ["batch={prompts: 8, minibatches: 2, epochs: 3, micro_batch_size: 5}", "guidance.scale=2", "steps=10"]
    assert compute_step_counts(load("grpo-toy-flow", changes), world_size=2) == StepCounts(
        prompts=8,
        samples=64,
        network_calls_per_sample=20,
        rollout_network_calls=1280,
        updates=6,
        minibatch_size=32,
        micro_batch_size=5,
        total_updates=60,
    )


def test_step_counts_of_training_on_images() -> None:
    counts = compute_step_counts(load("likelihood-toy-causal"))
    assert (counts.samples, counts.rollout_network_calls, counts.minibatch_size) == (0, 0, 64)


def test_context_parallel_ranks_share_prompts() -> None:
    config = load("srpo-flux-hps", ["engine.context_parallel=2", "batch.prompts=6"])
    assert find_problems(config, world_size=4) == [] and find_problems(config, world_size=1) == []
    (problem,) = find_problems(config, world_size=3)
    assert problem.startswith("engine.context_parallel: 3 ranks")


@pytest.mark.parametrize(
    "recipe",
    [
        "vader-cogvideox-hps",
        "vader-hunyuanvideo-hps",
        "vader-hunyuanvideo15-hps",
        "vader-mochi-hps",
        "flowgrpo-sd35",
        "vae-playground",
    ],
)
def test_context_parallel_of_other_models_is_refused(recipe: str) -> None:
    problems = find_problems(load_any_config(recipe, ["engine.context_parallel=2"]), world_size=2)
    (problem,) = (problem for problem in problems if "TM920" in problem)
    assert problem.startswith("engine.context_parallel: 2, but")


def test_message_and_documentation_name_the_models_with_context_parallelism() -> None:
    message = check_context_parallel(load("flowgrpo-sd35", ["engine.context_parallel=2"]), 2) or ""
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    documented = page.partition("It works for ")[2].partition(". ")[0]
    names = {"flux": "FLUX", "flux2": "FLUX.2", "flux_kontext": "FLUX Kontext", "qwen_image": "Qwen-Image"}
    names |= {"ltx": "LTX-Video", "ltx2": "LTX-2", "wan": "Wan", "wan_i2v": "Wan"}
    supported = {name for name in MODELS if MODELS.find(name, "model").supports_context_parallel}
    assert supported == names.keys()
    for text in (message, documented):
        missing = [name for name in names.values() if not re.search(rf"\b{re.escape(name)}(,| \(| and| only|$)", text)]
        assert missing == [], text


@pytest.mark.parametrize("other", ["compile=true", "strategy=fsdp", "context_parallel=2"])
def test_cuda_graphs_exclude_compile_and_sharding(other: str) -> None:
    assert find_problems(load("grpo-toy-flow", ["engine.cuda_graphs=true"])) == []
    *_, problem = find_problems(load("grpo-toy-flow", ["engine.cuda_graphs=true", f"engine.{other}"]))
    assert problem.startswith("engine.cuda_graphs: ") and f"engine.{other.partition('=')[0]}" in problem


def test_generation_skips_training_rules() -> None:
    config = load("grpo-llamagen", ["process.top_k=2000", "process.top_p=0.9", "model.dropout=0.1"])
    problems = find_problems(config, 3)
    assert [problem.split(":")[0] for problem in problems] == ["process", "model.dropout", "batch.prompts"]
    assert find_problems(config, 3, load_data=False) == []


def test_cpu_offload_is_for_generators() -> None:
    config = load_any_config("playground-vae", ["engine={strategy: fsdp, cpu_offload: true}"])
    assert [problem for problem in find_problems(config, world_size=1) if "TM931" in problem]
    assert find_problems(load("grpo-toy-flow", ["engine={strategy: fsdp, cpu_offload: true}"]), world_size=1) == []
