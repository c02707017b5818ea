"""The catalog of `tastemaker list`: everything that a configuration can name, and the table of docs/rewards.md.

Descriptions come from the docstrings of classes and the first line of recipes. Nothing is imported for them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.cards import RewardCard
from ..core.registry import ConfigError, Registry
from . import named_datasets, registries
from .recipes import list_trainable_recipes, merge_parents, recipe_paths
from .static_source import NotStatic, StaticClass

if TYPE_CHECKING:  # it imports torch
    from ..core.reward import RewardSpec

KINDS: dict[str, Registry] = {
    "models": registries.MODELS,
    "autoencoders": registries.AUTOENCODERS,
    "rewards": registries.REWARDS,
    "objectives": registries.OBJECTIVES,
    "data": registries.DATA,
    "searches": registries.SEARCHES,
}
RECIPE_FAMILIES = {  # folders of recipes, in the order of `tastemaker list recipes`
    "playground": "Playground: small models whose weights are included; they train on a CPU",
    "images": "Images: FLUX, Z-Image, Qwen-Image, Sana, Stable Diffusion and DiT",
    "video": "Video: Wan, HunyuanVideo, CogVideoX, LTX, Mochi and others",
    "tokens": "Image tokens: LlamaGen, Show-o and Janus-Pro",
    "autoencoders": "Autoencoders: VAEs and tokenizers",
    "judges": "Judges: vision-language models that answer questions about images",
    "preferences": "Preferences: models of what people prefer, learned from votes",
    "toys": "Toys: seconds to minutes on a CPU, to try a method or a change",
}
CPU_FAMILIES = ("playground", "toys")
INHERITED = "as inside"  # a property of a combinator that is that of the reward inside
Row = dict[str, Any]

TABLE_BEGIN, TABLE_END = "<!-- rewards: written by `make schema`, do not edit -->", "<!-- rewards: end -->"
TABLE_COLUMNS = (
    "reward",
    "description",
    "gradient",
    "reads",
    "runs on",
    "memory",
    "range",
    "failure modes",
    "weights",
)


def component_rows(kind: str) -> list[Row]:
    """List the components of a kind with their name and description; rewards and models with further properties."""
    if kind == "rewards":
        return [reward_row(name) for name in registries.REWARDS]
    if kind == "models":
        return [model_row(name) for name in registries.MODELS]
    if kind == "prompts":
        return prompt_set_rows()
    if kind == "recipes":
        return recipe_rows()
    registry = KINDS[kind]
    rows = [{"name": name, "description": first_sentence(find_docstring(registry, name))} for name in registry]
    if kind == "data":
        description = first_sentence(named_datasets.__doc__ or "")
        rows.append({"name": named_datasets.NAMED_DATASET, "description": description})
    return rows


def model_row(name: str) -> Row:
    """Describe a model with its published weights: place, size, license, and whether access is gated."""
    place = registries.MODELS.locate(name)
    try:
        if place.partition(":")[0] in sys.modules:
            raise NotStatic(f"{place} is imported already, so that its class is used")
        releases = StaticClass(place).defaults().releases
    except NotStatic:
        releases = registries.MODELS.find(name, "list")().releases
    description = first_sentence(find_docstring(registries.MODELS, name))
    return {"name": name, "description": description, "sources": [asdict(release) for release in releases]}


def format_source(source: Row) -> str:
    """Size, license and whether access is gated, as text."""
    return ", ".join([source["size"], source["license"], *(["gated"] if source["gated"] else [])])


def reward_row(name: str) -> Row:
    """Describe a reward with its default settings; a combinator has no properties of its own."""
    description = first_sentence(find_docstring(registries.REWARDS, name))
    row = {"name": name, "aliases": registries.REWARDS.aliases(name), "description": description}
    try:
        return {**row, **static_reward_properties(registries.REWARDS.locate(name))}
    except NotStatic:
        return {**row, **reward_properties(default_spec(name))}


def static_reward_properties(place: str) -> Row:
    """The properties of the reward "module:Class" with default settings, read from its source."""
    if place.partition(":")[0] in sys.modules:
        raise NotStatic(f"{place} is imported already, so that its class is used")
    source = StaticClass(place)
    return reward_properties(None if source.has_required_fields else source.defaults())


def reward_properties(spec: RewardSpec | None) -> Row:
    """Whether a reward is differentiable, what it reads, where it runs, and its card; None is a combinator."""
    if spec is None:
        card = asdict(RewardCard(INHERITED, INHERITED, INHERITED))
        return {"differentiable": None, "modality": None, "runs_on": None, "needs_group": None, **card}
    properties = {"differentiable": spec.differentiable, "modality": spec.modality, "runs_on": spec.runs_on}
    return {**properties, "needs_group": spec.needs_group, **asdict(spec.card)}


def default_spec(name: str) -> RewardSpec | None:
    """A reward with default settings; None if it has required ones, as combinators have."""
    from ..core.reward import RewardSpec
    from .validate import build_component

    try:
        spec: RewardSpec = build_component(RewardSpec, {"type": name})
    except ConfigError:
        return None
    return spec


def recipe_rows() -> list[Row]:
    """List the complete recipes with their family (folder) and their first line as description."""
    rows = []
    for name in list_trainable_recipes():
        path = recipe_paths()[name]
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        description = first.removeprefix("#").strip() if first.startswith("#") else ""
        rows.append({"name": name, "family": path.parent.name, "description": description})
    return rows


def select_recipes(rows: list[Row], *, objective: str = "", model: str = "", device: str = "") -> list[Row]:
    """Return the recipes of an objective and a model, and with device "cpu" only those that train on a CPU.

    A text matches if its words are among those of the component's type or of the recipe's name: "flux" matches
    flux_kontext and srpo-flux-hps, and "dpo" does not match ddpo.
    """
    selected = [row for row in rows if device != "cpu" or row["family"] in CPU_FAMILIES]
    for sections, text in ((("objective",), objective), (("model", "autoencoder", "judge"), model)):
        wanted = _words(text)
        selected = [row for row in selected if wanted <= _recipe_words(row["name"], sections)] if wanted else selected
    if not selected:
        filters = {"--objective": objective, "--model": model, "--device": device}
        given = " ".join(f"{option} {value:.60}" for option, value in filters.items() if value)
        raise ConfigError(
            f"list recipes: no recipe matches {given}; use fewer filters, or see all recipes with `tastemaker list "
            "recipes` [TM022]"
        )
    return selected


def _recipe_words(name: str, sections: tuple[str, ...]) -> set[str]:
    """The words of a recipe's name and of the types in its sections."""
    data = merge_parents(recipe_paths()[name])
    components = [data[section] for section in sections if isinstance(data.get(section), dict)]
    return _words(name) | {word for each in components for word in _words(str(each.get("type", "")))}


def _words(text: str) -> set[str]:
    return {word for word in re.split(r"[^a-z0-9.]+", text.lower()) if word}


def prompt_set_rows() -> list[Row]:
    """List the prompt sets with their size and first prompt; VADER's names are aliases."""
    from ..data.prompt_sets import load_prompt_templates, set_prompts, vader_set_names

    rows = []
    for name in load_prompt_templates():
        aliases = [alias for alias, meaning in vader_set_names().items() if meaning == name]
        prompts = set_prompts(name)
        rows.append({"name": name, "aliases": aliases, "count": len(prompts), "description": prompts[0][0]})
    return rows


def find_docstring(registry: Registry, name: str) -> str:
    """The docstring of a registered class, from its source unless the class is imported already."""
    place = registry.locate(name)
    try:
        if place.partition(":")[0] not in sys.modules:
            return StaticClass(place).docstring
    except NotStatic:
        pass
    return registry.find(name, "list").__doc__ or ""


def first_sentence(text: str) -> str:
    plain = " ".join(text.split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", plain, maxsplit=1)[0]


def format_reward_table() -> str:
    """The Markdown table of docs/rewards.md, one line per reward."""
    head = [f"| {' | '.join(TABLE_COLUMNS)} |", f"|{'---|' * len(TABLE_COLUMNS)}"]
    return "\n".join([*head, *(f"| {' | '.join(_table_cells(row))} |" for row in component_rows("rewards"))])


def _table_cells(row: Row) -> list[str]:
    name = f"`{row['name']}`" + "".join(f", `{alias}`" for alias in row["aliases"])
    weights = [
        f"{source['hub']}{'/' + source['file'] if source['file'] else ''} ({format_source(source)})"
        for source in row["sources"]
    ] + list(row["own_files"])
    cells = [
        row["description"],
        {True: "yes", False: "no", None: row["range"]}[row["differentiable"]],
        f"{row['modality'] or row['range']}{', whole groups' if row['needs_group'] else ''}",
        row["runs_on"] or row["range"],
        row["memory"],
        row["range"],
        row["failure_modes"],
        "; ".join(weights) or "-",
    ]
    return [name, *(cell.replace("|", "\\|") for cell in cells)]


def replace_reward_table(text: str) -> str:
    """Replace the table in the text of docs/rewards.md."""
    before, rest = text.split(TABLE_BEGIN, 1)
    return f"{before}{TABLE_BEGIN}\n{format_reward_table()}\n{TABLE_END}{rest.split(TABLE_END, 1)[1]}"


def write_reward_page(path: Path = Path("docs/rewards.md")) -> None:
    path.write_text(replace_reward_table(path.read_text(encoding="utf-8")), encoding="utf-8")
