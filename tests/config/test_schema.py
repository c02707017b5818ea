"""The JSON schema of recipes: up to date, and as strict as validation."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tastemaker.config.dump import config_to_dict
from tastemaker.config.json_schema import build_schema
from tastemaker.config.load import RECIPES, list_generator_recipes, load, read_yaml_mapping
from tastemaker.config.recipes import recipe_paths


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads((RECIPES / "schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_schema_file_is_up_to_date(validator: Any) -> None:
    advice = "run: python -c 'from tastemaker.config.json_schema import write_schema; write_schema()'"
    assert validator.schema == json.loads(json.dumps(build_schema())), advice


def test_every_recipe_matches_the_schema(validator: Any) -> None:
    sources = {name: read_yaml_mapping(path) for name, path in recipe_paths().items()}
    resolved = {f"{name}, resolved": config_to_dict(load(name)) for name in list_generator_recipes()}
    invalid = {name: list(validator.iter_errors(data)) for name, data in {**sources, **resolved}.items()}
    assert {name: [each.message for each in errors] for name, errors in invalid.items() if errors} == {}


@pytest.mark.parametrize(
    "data",
    [
        {"objectiv": {}},
        {"objective": {"type": "grpo", "gropu": 3}},
        {"objective": {"type": "grop"}},
        {"optim": {"lr": "much"}},
        {"optim": {"betas": [0.9, 1.5]}},
        {"rewards": {"a": {"type": "clipped", "reward": {"type": "jpeg", "qualty": 3}}}},
        {"engine": {"device": "gpu"}},
        {"extends": 3},
    ],
)
def test_schema_rejects_invalid_configs(data: Any, validator: Any) -> None:
    assert list(validator.iter_errors(data))


def test_schema_accepts_custom_components(validator: Any) -> None:
    assert not list(
        validator.iter_errors({"rewards": {"a": {"type": "my_pkg.rewards:Sharpness", "radius": 3, "weight": 2}}})
    )
