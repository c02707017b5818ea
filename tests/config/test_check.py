from typing import get_args, get_type_hints

import pytest

from tastemaker.config.check import find_problems, require_valid, torchrun_world_size
from tastemaker.config.load import load
from tastemaker.config.step_counts import compute_step_counts
from tastemaker.core.registry import ConfigError
from tastemaker.objectives.reward_gradient import RewardGradient


@pytest.mark.parametrize(
    ("recipe", "changes", "sentence"),
    [
        (
            "grpo-toy-flow",
            ["model={type: toy_causal}"],
            "process: gaussian cannot drive the model toy_causal; set process.type to autoregressive",
        ),
        (
            "grpo-toy-causal",
            ["objective={type: nft}"],
            "objective: nft needs the process gaussian, found autoregressive; choose another objective",
        ),
        (
            "vader-svd-hps",
            ["data={type: prompts, prompts: [a fox]}"],
            "model: svd goes on from a picture, but found none for the first prompt; set model.image, or give each "
            "prompt a fact `image`",
        ),
        (
            "grpo-toy-flow",
            ["process.dynamics={type: ode}"],
            "process: the sampler is deterministic, so there is nothing to reinforce; set process.dynamics to "
            "one with noise, such as flow_sde, or ddim with eta above 0",
        ),
        (
            "grpo-toy-flow",
            ["process.dynamics={type: ddim, eta: 0}"],
            "process: the sampler is deterministic, so there is nothing to reinforce; set process.dynamics to "
            "one with noise, such as flow_sde, or ddim with eta above 0",
        ),
        (
            "grpo-toy-flow",
            ["data={type: toy_pairs}"],
            "data: grpo learns from prompts, but toy_pairs holds preference pairs; set "
            "data.type to prompts or prompt_file",
        ),
        (
            "dpo-toy-flow",
            ["data={type: prompts, prompts: [a red]}"],
            "data: dpo learns from preference pairs, but prompts holds prompts; set "
            "data.type to toy_pairs or pair_file",
        ),
        (
            "draft-toy-flow",
            ["rewards.small.type=jpeg"],
            "rewards: reward_gradient back-propagates through rewards, but 'small' has no "
            "gradient; set its weight to 0, or use grpo",
        ),
        (
            "draft-toy-flow",
            ["rewards={a: {type: jpeg}, b: {type: jpeg, quality: 5}, color: {type: color}}"],
            "rewards: reward_gradient back-propagates through rewards, but 'a', 'b' have no "
            "gradient; set their weight to 0, or use grpo",
        ),
        (
            "grpo-toy-flow",
            ["rewards=null"],
            "rewards: grpo learns from rewards, but there are none; add one, as in rewards.color.type=color",
        ),
        (
            "grpo-toy-flow",
            ["rewards.color.weight=0"],
            "rewards: grpo learns from rewards, but all of them have weight 0; add one, as in rewards.color.type=color",
        ),
        (
            "grpo-toy-flow",
            ["rewards.still.type=stillness"],
            "rewards: 'still' reads motion, but toy_flow makes stills of one frame; remove it",
        ),
        (
            "refl-toy-epsilon",
            ["objective.span=[6, 30]"],
            "objective: reward_gradient reaches for step 30 of a sampler of 10; ask for one below 10",
        ),
        (
            "grpo-toy-causal",
            ["process.top_k=5"],
            "process: top_k 5 and top_p 1.0 while log-probs are trained: a token that falls out of the kept "
            "ones has probability 0 when it is scored again; set 0 and 1",
        ),
        (
            "grpo-toy-flow",
            ["batch.prompts=8", "batch.updates=3"],
            "batch.updates: 8 prompts a rank do not divide by 3 updates; choose batch.prompts a multiple of 3",
        ),
        (
            "grpo-toy-flow",
            ["engine.strategy=hsdp"],
            "engine.replicas: 1 ranks do not divide into 2 replicas; start a multiple of 2 with torchrun",
        ),
        (
            "grpo-toy-flow",
            ["sample.use=ema"],
            "sample.use: ema is asked for, but none is kept; set ema, as in ema=0.99, or sample.use=live",
        ),
        (
            "grpo-toy-flow",
            ["data={type: prompt_file, path: none.txt}"],
            "data.path: there is nothing at 'none.txt'; paths begin where the command is run",
        ),
    ],
)
def test_a_broken_rule_is_one_sentence(recipe: str, changes: list[str], sentence: str) -> None:
    assert find_problems(load(recipe, changes), world=1) == [sentence]


@pytest.mark.parametrize("through", get_args(get_type_hints(RewardGradient)["through"]))
def test_a_gradient_may_go_through_any_part_of_the_sampler(through: str) -> None:
    changes = [f"objective.through={through}", "objective.steps=[3, 24]", "objective.span=[5, 9]"]
    assert find_problems(load("vader-wan-hps", changes), world=1) == []


def test_a_tail_is_no_longer_than_the_sampler() -> None:
    sentence = "objective: reward_gradient reaches for a tail of 26 steps of a sampler of 25; ask for at most 25"
    assert find_problems(load("vader-wan-hps", ["objective.tail=26"]), world=1) == [sentence]
    assert find_problems(load("vader-wan-hps", ["objective.tail=25"]), world=1) == []
    assert find_problems(load("vader-wan-hps", ["objective.tail=26", "objective.through=random"]), world=1) == []


def test_fewer_steps_than_the_tail_will_do_to_sample() -> None:
    assert find_problems(load("vader-wan-hps", ["objective.tail=5", "process.steps=4"]), world=1, fed=False) == []


def test_toy_pictures_have_the_models_frames() -> None:
    sentence = "data.frames: toy_pictures has 1, but toy_flow makes 4; set data.frames=4"
    assert find_problems(load("likelihood-toy-video", ["data.frames=1"]), world=1) == [sentence]


def test_a_reward_of_whole_clips_needs_several_frames() -> None:
    told = "objective.frames: random is one frame a clip, but 'still' needs several"
    sentence = f"{told}; set objective.frames to all, alt or fml"
    assert find_problems(load("reward-gradient-toy-video", ["objective.frames=random"]), world=1) == [sentence]
    assert find_problems(load("reward-gradient-toy-video", ["objective.frames=fml"]), world=1) == []
    assert find_problems(load("reward-gradient-toy-video", ["objective.frames=[0, 4]"]), world=1) == [
        "objective: 'frames' asks for frame 4 of a clip of 4; ask for one below 4"
    ]


def test_a_watched_reward_needs_no_gradient() -> None:
    assert find_problems(load("draft-toy-flow", ["rewards.small={type: jpeg, weight: 0}"]), world=1) == []


def test_likelihood_may_truncate_its_sampler() -> None:
    assert find_problems(load("likelihood-toy-causal", ["process.top_k=5"]), world=1) == []


def test_dropout_of_adapters_cannot_leak_into_a_ratio() -> None:
    changes = ["objective={type: ddpo}", "process.dynamics.eta=1"]
    (found,) = find_problems(load("vader-modelscope-hps", changes))
    assert found.startswith("tuning.dropout: 0.1 while log-probs are trained") and found.endswith("tuning.dropout=0")
    assert find_problems(load("vader-modelscope-hps", [*changes, "tuning.dropout=0"])) == []


def test_prompts_are_shared_out_evenly() -> None:
    config = load("grpo-toy-flow", ["batch.prompts=9"])
    sentence = "batch.prompts: 9 prompts do not divide among 2 ranks; choose a multiple of 2"
    assert find_problems(config, world=3) == []
    assert find_problems(config, world=2) == [sentence]


def test_hybrid_sharding_wants_whole_replicas() -> None:
    config = load("grpo-toy-flow", ["engine.strategy=hsdp"])
    assert find_problems(config, world=4) == []


def test_all_complaints_come_at_once() -> None:
    changes = ["process.dynamics={type: ode}", "rewards=null", "batch.prompts=7", "sample.use=ema"]
    with pytest.raises(ConfigError) as error:
        require_valid(load("grpo-toy-flow", changes), world=2)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "process",
        "rewards",
        "batch.prompts",
        "sample.use",
    ]


def test_the_number_of_ranks_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert torchrun_world_size() == 3
    assert find_problems(load("grpo-toy-flow")) == [
        "batch.prompts: 8 prompts do not divide among 3 ranks; choose a multiple of 3"
    ]
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        torchrun_world_size()


def test_the_arithmetic_of_a_step() -> None:
    changes = ["batch={prompts: 8, updates: 2, epochs: 3, microbatch: 5}", "guidance.scale=2", "steps=10"]
    assert compute_step_counts(load("grpo-toy-flow", changes), world=2) == {
        "rows of data a step": 8,
        "samples a step": 64,
        "network calls a sample": 20,
        "network calls a step to sample": 1280,
        "updates a step": 6,
        "rows an update": 32,
        "rows a backward pass on one rank, at most": 5,
        "updates in all": 60,
    }


def test_learning_from_pictures_makes_no_samples() -> None:
    found = compute_step_counts(load("likelihood-toy-causal"))
    assert (found["samples a step"], found["network calls a step to sample"], found["rows an update"]) == (0, 0, 64)


def test_ranks_that_share_tokens_have_the_same_rows() -> None:
    config = load("srpo-flux-hps", ["engine.context=2", "batch.prompts=6"])
    assert find_problems(config, world=4) == [] and find_problems(config, world=1) == []
    advice = "start a multiple of 2 with torchrun, or change it"
    sentence = f"engine.context: 3 ranks do not divide into groups of 2; {advice}"
    assert find_problems(config, world=3) == [sentence]


@pytest.mark.parametrize("other", ["compile=true", "strategy=fsdp", "context=2"])
def test_recorded_calls_are_whole_and_not_compiled(other: str) -> None:
    assert find_problems(load("grpo-toy-flow", ["engine.graphs=true"])) == []
    (told,) = find_problems(load("grpo-toy-flow", ["engine.graphs=true", f"engine.{other}"]))
    assert told.startswith(f"engine.graphs: calls cannot be recorded with engine.{other.partition('=')[0]}")


def test_what_is_only_sampled_need_not_be_fit_to_learn() -> None:
    config = load("grpo-llamagen", ["process.top_k=2000", "process.top_p=0.9", "model.dropout=0.1"])
    told = find_problems(config, 3)
    assert [found.split(":")[0] for found in told] == ["process", "model.dropout", "batch.prompts"]
    assert find_problems(config, 3, fed=False) == []
