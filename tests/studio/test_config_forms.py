"""The form of a new run: typed fields of a recipe, overrides of changed fields only, problems beside their fields."""

from __future__ import annotations

import time

import pytest

from tastemaker.config.load import load
from tastemaker.config.recipes import list_trainable_recipes
from tastemaker.core.errors import ConfigError
from tastemaker.studio.config_forms import (
    ConfigForm,
    build_form,
    check_overrides,
    find_paths,
    find_user_code,
    find_user_code_in_overrides,
    refuse_user_code,
    sort_messages,
)
from tastemaker.studio.config_worker import ConfigWorker, answer


@pytest.fixture(scope="module")
def form() -> ConfigForm:
    return build_form("grpo-toy-flow")


def values_of(form: ConfigForm) -> dict[str, str]:
    return {field.key: field.value for field in form.fields()}


def test_fields_are_typed_and_described(form: ConfigForm) -> None:
    fields = {field.key: field for field in form.fields()}
    kinds = {
        "steps": "number",
        "optim.lr_schedule": "choice",
        "engine.compile": "switch",
        "sample.prompts": "lines",
        "optim.betas": "yaml",
        "rewards.color.weight": "number",
        "guidance": "yaml",
    }
    assert {key: fields[key].kind for key in kinds} == kinds
    assert fields["optim.lr"].value == "0.001"
    assert fields["optim.lr"].default == "1e-05"
    assert fields["optim.lr_schedule"].choices == ("constant", "cosine", "linear")
    assert "optimizer updates" in fields["batch.minibatches"].description  # the comment beside the field
    assert fields["objective.group_size"].description
    important = [field.key for field in form.important_fields()]
    assert important[:2] == ["steps", "optim.lr"]
    assert {"objective.kl_coef", "rewards.color.weight", "sample.prompts", "batch.prompts"} <= set(important)
    assert not {"output_dir", "name", "engine.device"} & set(fields)  # set by the studio


def test_only_changed_fields_become_overrides_and_load_as_entered(form: ConfigForm) -> None:
    values = values_of(form)
    assert form.read_overrides(values) == []
    assert form.read_overrides({**values, "steps": " 100 "}) == []
    changed = {
        "steps": "7",
        "optim.lr": "3e-4",
        "optim.lr_schedule": "cosine",
        "sample.prompts": "a red\r\n# yes: {on}\r\n\r\n\U0001f600",
        "engine.compile": "true",
        "optim.betas": "[0.8, 0.9]",
        "batch.micro_batch_size": "4",
    }
    overrides = form.read_overrides({**values, **changed})
    assert len(overrides) == len(changed)
    config = load("grpo-toy-flow", overrides)
    assert (config.steps, config.optim.lr, config.optim.lr_schedule) == (7, 3e-4, "cosine")
    assert config.sample.prompts == ("a red", "# yes: {on}", "\U0001f600")
    assert (config.engine.compile, config.optim.betas, config.batch.micro_batch_size) == (True, (0.8, 0.9), 4)


@pytest.mark.parametrize("name", ["grpo-playground-flow", "flowgrpo-sd35", pytest.param("all", marks=pytest.mark.slow)])
def test_a_form_without_changes_is_the_recipe(name: str) -> None:
    for recipe in list_trainable_recipes() if name == "all" else [name]:
        form = build_form(recipe)
        keys = [field.key for field in form.fields()]
        assert len(keys) == len(set(keys)), recipe
        assert "steps" in keys, recipe
        assert form.read_overrides(values_of(form)) == [], recipe


def test_problems_stand_beside_their_fields(form: ConfigForm) -> None:
    values = {**values_of(form), "optim.lr": "fast", "steps": "0", "optim.betas": "[0.9, 1.5]"}
    overrides = [*form.read_overrides(values), "optim.speed=1"]
    problems = answer({"task": "check", "source": "grpo-toy-flow", "overrides": overrides})["problems"]
    by_key, others = sort_messages(problems, values.keys())
    assert {"optim.lr", "steps", "optim.betas"} <= by_key.keys()
    assert "optim.lr" in by_key["optim.lr"]
    assert any("speed" in message for message in [*by_key.values(), *others])
    # A rule over several sections, of `check`.
    overrides = ["objective.type=dpo"]
    problems = answer({"task": "check", "source": "grpo-toy-flow", "overrides": overrides})["problems"]
    assert problems
    good = answer({"task": "check", "source": "grpo-toy-flow", "overrides": ["steps=3"]})
    assert good["problems"] == []
    assert "64 samples" in good["summary"]


def test_user_code_is_found_wherever_it_is_named() -> None:
    settings = {
        "objective": {"type": "my.module:Mine"},
        "rewards": {
            "a": {"type": "sum", "rewards": [{"type": "color"}, {"type": "x:y"}]},
            "b": {"function": "os.system"},
        },
        "data": {"type": "prompts", "prompts": ["type: a:b"]},
    }
    assert len(find_user_code(settings)) == 3
    for override in (
        "objective.type=my.module:Mine",
        "objective={type: 'my:Mine'}",
        "rewards.x={type: function, function: os:system}",
        "model.autoencoder={type: from_config, class_path: a:b}",
        'rewards.x.type="a:b"',
    ):
        assert find_user_code_in_overrides([override]), override
    assert not find_user_code_in_overrides(["optim.lr=1e-3", "sample.prompts=['type: a:b']", "steps=[", "x"])
    with pytest.raises(ConfigError, match="TM1450"):
        refuse_user_code(["objective.type: a:b"])


def test_texts_that_are_no_settings_are_refused() -> None:
    for text, code in (
        ("--import=os", "TM1447"),
        ("-h", "TM1447"),
        ("steps", "TM1447"),
        ("output_dir=/etc", "TM1448"),
        ("name=x", "TM1448"),
        (f"a={'x' * 30_000}", "TM1449"),
    ):
        (message,) = check_overrides([text])
        assert code in message, text
    assert check_overrides(["model.weights=/data/x.safetensors"]) == []
    assert find_paths(["model.weights=/data/x.safetensors", "steps=3", "data.path='~/a'"]) == [
        "model.weights=/data/x.safetensors",
        "data.path='~/a'",
    ]
    for source in ("models/flux", "../x", "nothing"):
        with pytest.raises(ConfigError, match="TM1445"):
            build_form(source)


@pytest.mark.slow
def test_the_worker_checks_refuses_user_code_and_is_given_up_in_time() -> None:
    worker = ConfigWorker(allow_code=False)
    try:
        request = {"task": "check", "source": "grpo-toy-flow", "overrides": ["steps=x", "rewards.color.type=os:system"]}
        problems = worker.ask(request, 300)["problems"]
        assert any(problem.startswith("steps: ") for problem in problems)
        assert any("TM1430" in problem for problem in problems)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            worker.ask({**request, "task": "plan", "source": "flowgrpo-sd35", "device": "cpu", "overrides": []}, 0.01)
        assert time.monotonic() - start < 30
        assert worker.ask({**request, "overrides": []}, 300)["problems"] == []  # a new process
    finally:
        worker.close()
