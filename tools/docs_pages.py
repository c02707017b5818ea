"""MkDocs hook: generate the pages about recipes, components and the API, and adapt links to files outside docs/.

`make docs` runs it; nothing that it generates is committed. Descriptions come from the recipes, from docstrings and
from the comments beside the fields of dataclasses, so that a page cannot disagree with the code.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import tastemaker
from tastemaker.config import registries
from tastemaker.config.catalog import INHERITED, find_docstring, recipe_rows, reward_row
from tastemaker.config.dump import config_to_dict
from tastemaker.config.field_comments import class_comments, describe_setting, field_comments, parse_module
from tastemaker.config.load import load_any_config, read_recipe
from tastemaker.config.recipes import PARTS, RECIPES, list_trainable_recipes, recipe_paths
from tastemaker.config.yaml_io import render_yaml
from tastemaker.core.registry import Registry

sys.path.append(str(Path(__file__).resolve().parent))  # MkDocs imports this file alone
from model_pages import expand_markers

ROOT = Path(__file__).resolve().parent.parent
INCLUDED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

FAMILIES = {  # folders of recipes, in the order of the index: title and description
    "playground": ("Playground", "Small trained generators that ship with the package. They run on a CPU or any GPU."),
    "images": (
        "Images",
        "FLUX, FLUX.2, Z-Image, Qwen-Image (also edits), Sana, SD3.5, SDXL, SD1.5, and DiTs.",
    ),
    "video": (
        "Video",
        "Wan (from text or an image), LTX, LTX-2, HunyuanVideo, CogVideoX, Mochi, SVD, VADER's models.",
    ),
    "tokens": ("Tokens", "LlamaGen, Show-o and Janus-Pro."),
    "autoencoders": ("Autoencoders", "VAEs and tokenizers."),
    "judges": ("Judges", "Vision-language models that are fine-tuned to judge images."),
    "toys": ("Toys", "Tiny models of colors, to try an objective on a CPU and to copy from."),
}
PAPERS = {  # method, as the first words of a recipe's description name it: arXiv number
    "AlignProp": "2310.03739",
    "AR-GRPO": "2508.06924",
    "AWM": "2509.25050",
    "CCA": "2410.09347",
    "CPS": "2509.05952",
    "CRD": "2603.14128",
    "DanceGRPO": "2505.07818",
    "DDPO": "2305.13301",
    "DGPO": "2510.08425",
    "DiffusionNFT": "2509.16117",
    "Direct-Align": "2509.06942",
    "DRaFT": "2309.17400",
    "DRTune": "2405.00760",
    "EPG": "2602.04663",
    "ESPO": "2512.03759",
    "Flow-DPPO": "2606.11025",
    "Flow-GRPO": "2505.05470",
    "GRPO-Guard": "2510.22319",
    "LeapAlign": "2604.15311",
    "MixGRPO": "2507.21802",
    "PARM": "2501.13926",
    "RAM": "2605.10759",
    "ReFL": "2304.05977",
    "SRPO": "2509.06942",
    "V-GRPO": "2604.23380",
    "VADER": "2407.08737",
    "VA-pi": "2512.19680",
}
OBJECTIVE_PAPERS = {
    "cca": "2410.09347",
    "crd": "2603.14128",
    "ddpo": "2305.13301",
    "dgpo": "2510.08425",
    "dpo": "2305.18290",
    "grpo": "2402.03300",
    "nft": "2509.16117",
    "ram": "2605.10759",
    "srpo": "2509.06942",
    "teacher_forced_grpo": "2512.19680",
}

Pages = dict[str, str]  # path below docs/ -> Markdown


# Recipes


def recipe_pages() -> tuple[Pages, list[Any]]:
    """One page for each recipe and an index of them, with their part of the navigation."""
    pages: Pages = {}
    rows = {row["name"]: row for row in recipe_rows()}
    folders = dict.fromkeys([*FAMILIES, *sorted({row["family"] for row in rows.values()})])
    index = [
        "# Recipes",
        "A recipe is a YAML file with all settings of a run. You train it by name and change any setting on the command"
        " line:\n\n```console\ntastemaker train grpo-toy-flow optim.lr=2e-3 steps=200\n```",
        "`tastemaker list recipes` prints this list, `tastemaker check RECIPE` checks a recipe without training, and"
        " `tastemaker plan RECIPE` computes its memory. Start with `reward-gradient-playground` on a laptop; on a GPU"
        " read [the first GPU run](../first-gpu-run.md).",
    ]
    navigation: list[Any] = ["recipes/index.md"]
    for family in folders:
        members = [row for row in rows.values() if row["family"] == family]
        if not members:
            continue
        title, about = FAMILIES.get(family, (family.capitalize(), ""))
        index += [f"## {title}", about]
        index.append(
            table(
                ["recipe", "what it does"],
                [[f"[`{row['name']}`]({row['name']}.md)", row["description"]] for row in members],
            )
        )
        for row in members:
            pages[f"recipes/{row['name']}.md"] = recipe_page(row["name"], row["description"])
        navigation.append({title: [{row["name"]: f"recipes/{row['name']}.md"} for row in members]})
    pages["recipes/index.md"] = join(index)
    return pages, navigation


def recipe_page(name: str, description: str) -> str:
    """What a recipe does, how to run it, its file as written, and all of its settings."""
    path = recipe_paths()[name]
    text = path.read_text(encoding="utf-8")
    notes = [line.removeprefix("#").strip() for line in header_lines(text)[1:]]
    notes = [line for line in notes if not line.startswith("tastemaker train")]
    config = config_to_dict(load_any_config(name))
    commands = [f"tastemaker check {name}", f"tastemaker plan {name}", f"tastemaker train {name}"]
    if any(word in text + str(read_recipe(name)) for word in ("Needs ", "black-forest-labs", "stabilityai")):
        commands.insert(2, f"tastemaker download {name}")
    planned = "objective" in config and path.parent.name not in ("playground", "toys")  # small models are refused
    if not planned:
        commands.remove(f"tastemaker plan {name}")
    parts = [
        f"# {name}",
        description,
        " ".join(notes),
        table(["", ""], recipe_facts(config, description)),
        fenced("console", "\n".join(commands)),
        "`check` validates the settings, `plan` computes the memory without loading weights, and `train` resumes if you"
        " run it again. Add `key=value` to change a setting."
        if planned
        else "`check` validates the settings, and `train` resumes if you run it again. Add `key=value` to change a"
        " setting.",
        "## The recipe",
        f"`{path.relative_to(ROOT).as_posix()}` extends the parts that it names under `extends`.",
        fenced("yaml", "\n".join(text.splitlines()[len(header_lines(text)) :]).strip()),
        "## All settings",
        "With the parts merged and every default written out, as in the run's `config.yaml`:",
        fenced("yaml", render_yaml(config).strip()),
    ]
    return join(parts)


def recipe_facts(config: Mapping[str, Any], description: str) -> list[list[str]]:
    facts = []
    for key, page in (("model", "models"), ("objective", "objectives")):
        if kind := (config.get(key) or {}).get("type"):
            facts.append([key, component_link(kind, page)])
    if rewards := config.get("rewards"):
        shown = [
            component_link(each["type"], "rewards")
            + (" (weight 0: logged, not trained on)" if each.get("weight") == 0 else "")
            for each in rewards.values()
        ]
        facts.append(["rewards", ", ".join(shown)])
    for key in ("data", "tuning", "autoencoder"):
        if kind := (config.get(key) or {}).get("type"):
            facts.append([key, component_link(kind, {"autoencoder": "autoencoders"}.get(key, key))])
    if steps := config.get("steps"):
        facts.append(["steps", f"{steps:,}"])
    papers = [
        f"{method} ([arXiv {number}](https://arxiv.org/abs/{number}))"
        for method, number in PAPERS.items()
        if re.search(rf"(?<![\w-]){re.escape(method)}(?![\w-])", description)
    ]
    return facts + ([["paper", ", ".join(papers)]] if papers else [])


def component_link(name: str, page: str) -> str:
    return f"[`{name}`](../components/{page}.md#{anchor(name)})" if ":" not in name else f"`{name}`"


def header_lines(text: str) -> list[str]:
    """The comment lines at the top of a file."""
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:end]


# Components

KINDS: dict[str, tuple[str, list[tuple[str, Registry]], str]] = {
    "models": (
        "Models",
        [("model", registries.MODELS)],
        "`model.type` names the generator. Each model is one file that mentions no objective. Published weights are"
        " read in the layout of diffusers or of their authors; [what is verified](../verification.md) says how they"
        " were tested.",
    ),
    "rewards": (
        "Rewards",
        [("reward", registries.REWARDS)],
        "`rewards.NAME.type` names a reward. Every reward also takes `weight`, `normalize`, `clip` and `held_out`."
        " [Choose a reward](../choose-a-reward.md) helps to decide, [Rewards](../rewards.md) compares all of them in"
        " one table, and [your own](../add-a-reward.md) can be a plain function.",
    ),
    "objectives": (
        "Objectives",
        [("objective", registries.OBJECTIVES)],
        "`objective.type` names the training method. [Choose an objective](../choose-an-objective.md) compares them by"
        " measurements, [Papers and equations](../papers.md) has the formulas.",
    ),
    "processes": (
        "Processes",
        [("process", registries.PROCESSES), ("path", registries.PATHS), ("dynamics", registries.DYNAMICS)],
        "A process turns the predictions of a network into samples. A Gaussian process has a path (how noise is added)"
        " and dynamics (how a sampling step removes it).",
    ),
    "data": (
        "Data",
        [("data", registries.DATA)],
        "`data.type` names what a run trains on: prompts, images, pairs or videos. See"
        " [your own prompts](../own-prompts.md) and [images to learn from](../data.md).",
    ),
    "tuning": (
        "Tuning",
        [("tuning", registries.TUNINGS)],
        "`tuning.type` says which weights train: all of them, or low-rank adapters.",
    ),
    "searches": (
        "Searches",
        [("search", registries.SEARCHES)],
        "A search generates several candidates of a prompt and keeps the best, instead of training or after it.",
    ),
    "autoencoders": (
        "Autoencoders",
        [("autoencoder", registries.AUTOENCODERS)],
        "`autoencoder.type` names what the training of a VAE or tokenizer builds. See"
        " [Train a VAE](../train-a-vae.md).",
    ),
}


def component_pages() -> tuple[Pages, list[Any]]:
    """One page for each kind of component, with the settings of each, and one about the other sections."""
    schema = json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))
    pages: Pages = {}
    index = ["# Components", "Everything that a recipe can name, with its settings, defaults and meaning."]
    rows = []
    for page, (title, kinds, introduction) in KINDS.items():
        parts = [f"# {title}", introduction]
        names = [name for _, registry in kinds for name in registry]
        for kind, registry in kinds:
            if len(kinds) > 1:
                parts.append(f"## {kind.capitalize()}")
            for name in registry:
                parts += component_section(schema, kind, registry, name, "###" if len(kinds) > 1 else "##")
        pages[f"components/{page}.md"] = join(parts)
        rows.append([f"[{title}]({page}.md)", ", ".join(f"`{name}`" for name in names)])
    pages["components/settings.md"] = settings_page(schema)
    rows.append(
        ["[Other sections](settings.md)", "`optim`, `batch`, `engine`, `checkpoint`, `sample`, `guard`, `loggers` …"]
    )
    pages["components/index.md"] = join([*index, table(["page", "what is on it"], rows)])
    navigation = ["components/index.md", *({KINDS[page][0]: f"components/{page}.md"} for page in KINDS)]
    return pages, [*navigation, {"Other sections": "components/settings.md"}]


def component_section(schema: Mapping[str, Any], kind: str, registry: Registry, name: str, level: str) -> list[str]:
    """The description of a component, a table of its settings, and the recipes that use it."""
    place = registry.locate(name)
    parts = [f"{level} `{name}` {{ #{anchor(name)} }}", docstring_markdown(find_docstring(registry, name))]
    if kind == "reward":
        parts.append(reward_facts(name))
    if kind == "objective" and name in OBJECTIVE_PAPERS:
        number = OBJECTIVE_PAPERS[name]
        parts.append(f"Paper: [arXiv {number}](https://arxiv.org/abs/{number})")
    if kind == "model":
        parts.append(model_parts(name))
    choice = find_schema(schema["$defs"][kind], name)
    parts.append(settings_table(choice, field_comments(place)))
    used = recipes_using(kind, name)
    if used:
        shown = ", ".join(f"[`{each}`](../recipes/{each}.md)" for each in used[:8])
        parts.append(f"Recipes: {shown}{f' and {len(used) - 8} more' if len(used) > 8 else ''}")
    parts.append(f"Source: `{place.partition(':')[0].replace('.', '/')}.py`")
    return parts


def reward_facts(name: str) -> str:
    row = reward_row(name)
    if row["range"] == INHERITED:
        return "Range, gradient and modality are those of the reward inside."
    weights = [f"`{source['hub']}` ({source['size']}, {source['license']})" for source in row["sources"]]
    weights += row["own_files"]
    facts = [
        ["range", row["range"]],
        ["gradient", "yes" if row["differentiable"] else "no"],
        [
            "scores",
            {"image": "images, and each frame of a video", "video": "whole videos"}.get(
                row["modality"], row["modality"]
            ),
        ],
        ["memory", row["memory"]],
        ["known failure modes", row["failure_modes"]],
    ]
    return table(["", ""], facts + ([["weights", "; ".join(weights)]] if weights else []))


def model_parts(name: str) -> str:
    """The parts in recipes/base/models that configure a model, with the comments at their top."""
    rows = []
    for recipe, path in recipe_paths().items():
        if PARTS not in path.parents or not recipe.startswith("models/"):
            continue
        text = path.read_text(encoding="utf-8")
        if re.search(rf"type: {name}\b", text):
            notes = [line.removeprefix("#").strip() for line in header_lines(text)]
            rows.append([f"`{recipe}`", " ".join(notes)])
    return table(["part to extend", "what it says"], rows) if rows else ""


def settings_page(schema: Mapping[str, Any]) -> str:
    """The sections of a recipe that are no components."""
    parts = [
        "# Other sections",
        "Settings of every recipe beside its components. Set them in a recipe, or on the command line:"
        "\n\n```console\ntastemaker train grpo-toy-flow batch.prompts=16 guard.every=20\n```",
    ]
    comments = schema_comments()
    single = []
    for key, section in schema["properties"].items():
        if "$ref" in section or key in ("rewards", "extends"):
            continue
        inner = next((each for each in section.get("anyOf", []) if "properties" in each), section)
        if "properties" not in inner:
            single.append([f"`{key}`", type_text(section), default_text(section), comments.get(("RunConfig", key), "")])
            continue
        owner = next((cls for cls, text in comments["docstrings"].items() if text == inner.get("description")), "")
        own = {name: text for (cls, name), text in comments["fields"].items() if cls == owner}
        parts += [f"## `{key}` {{ #{anchor(key)} }}", inner.get("description", ""), settings_table(inner, own)]
    for row in single:
        key = row[0].strip("`")
        row[3] = next((text for (_, name), text in comments["fields"].items() if name == key), "")
    parts += ["## Single settings", table(["setting", "type", "default", "meaning"], single)]
    return join(parts)


@cache
def schema_comments() -> dict[str, Any]:
    """First docstring lines and field comments of the classes in config/schema.py and of Guidance."""
    docstrings: dict[str, str] = {}
    fields: dict[tuple[str, str], str] = {}
    for module in ("tastemaker.config.schema", "tastemaker.core.policy"):
        tree, comments = parse_module(module)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                docstrings[node.name] = (ast.get_docstring(node) or "").strip().split("\n")[0]
                fields |= {(node.name, name): text for name, text in class_comments(node, comments).items()}
    return {"docstrings": docstrings, "fields": fields}


def find_schema(definition: Mapping[str, Any], name: str) -> dict[str, Any]:
    for choice in definition["anyOf"]:
        kind = choice.get("properties", {}).get("type", {})
        if kind.get("const") == name or name in kind.get("enum", ()):
            return dict(choice)
    return {"properties": {}}


def settings_table(schema: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    rows = [
        [f"`{name}`", type_text(setting), default_text(setting), describe_setting(name, comments, schema["properties"])]
        for name, setting in schema["properties"].items()
        if name != "type"
    ]
    return table(["setting", "type", "default", "meaning"], rows) if rows else "No settings."


def type_text(setting: Mapping[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "$ref" in setting:
        return f"a {setting['$ref'].rpartition('/')[2]}"
    if "enum" in setting:
        return ", ".join(f"`{each}`" for each in setting["enum"])
    if "const" in setting:
        return f"`{setting['const']}`"
    if "anyOf" in setting:
        return " or ".join(dict.fromkeys(type_text(each) for each in setting["anyOf"]))
    kind = setting.get("type")
    if kind == "array":
        items = setting.get("items") or {}
        return f"list of {type_text(items)}" if items else "list"
    words = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}
    return "path" if setting.get("format") == "path" else words.get(str(kind), "section" if kind == "object" else "any")


def default_text(setting: Mapping[str, Any]) -> str:
    if "default" not in setting:
        return "required"
    text = json.dumps(setting["default"], ensure_ascii=False)
    text = text.strip('"') if isinstance(setting["default"], str) and setting["default"] else text
    return f"`{text}`" if len(text) <= 60 else "see the source"


@cache
def recipe_components() -> dict[str, dict[str, set[str]]]:
    """For each recipe the types of its components, by kind."""
    registered = {}
    for name in list_trainable_recipes():
        data = read_recipe(name)
        kinds = {
            kind: {str((data.get(kind) or {}).get("type"))}
            for kind in ("model", "objective", "process", "data", "tuning", "autoencoder")
        }
        kinds["reward"] = {str(inner) for each in (data.get("rewards") or {}).values() for inner in reward_types(each)}
        process = data.get("process") or {}
        kinds |= {kind: {str((process.get(kind) or {}).get("type"))} for kind in ("path", "dynamics")}
        registered[name] = kinds
    return registered


def reward_types(settings: Any) -> Iterable[str]:
    if isinstance(settings, Mapping):
        yield from ([settings["type"]] if "type" in settings else [])
        for each in settings.values():
            yield from reward_types(each)


def recipes_using(kind: str, name: str) -> list[str]:
    return [recipe for recipe, kinds in recipe_components().items() if name in kinds.get(kind, ())]


# The API reference

API_PAGES = {
    "run": (
        "Load, train, generate",
        (".api", ".config.schema", ".core.registry", ".preferences.alignment", ".training.run", ".training.trainer"),
    ),
    "policy": (
        "Models and processes",
        (
            ".core.policy",
            ".core.model_spec",
            ".core.autoencoder",
            ".core.distributions",
            ".core.weights",
            ".processes.gaussian",
            ".processes.autoregressive",
            ".processes.masked",
        ),
    ),
    "display": ("Look at samples", (".report.display", ".report.figure")),
    "objective": ("The objective contract", (".core.objective", ".core.randomness")),
    "reward": ("The reward contract", (".core.reward",)),
    "types": ("Data types", (".core.types",)),
}


def api_pages() -> tuple[Pages, list[Any]]:
    """Pages for mkdocstrings: the names of `tastemaker.__all__` by subject, and the classes of the objectives."""
    modules: dict[str, list[str]] = {}
    for name in tastemaker.__all__:
        modules.setdefault(tastemaker._MODULES[name], []).append(name)
    listed = {module for _, group in API_PAGES.values() for module in group}
    if left := modules.keys() - listed:
        raise ValueError(f"tools/docs_pages.py: API_PAGES has no page for {sorted(left)}; add them to one")
    pages: Pages = {}
    navigation: list[Any] = ["api/index.md"]
    rows = []
    for page, (title, group) in API_PAGES.items():
        parts = [f"# {title}"]
        names = []
        for module in group:
            for name in modules.get(module, []):
                names.append(name)
                parts.append(api_entry(f"tastemaker{module}.{name}"))
        pages[f"api/{page}.md"] = join(parts)
        navigation.append({title: f"api/{page}.md"})
        rows += [[f"[`{name}`]({page}.md#{api_target(name)})", title] for name in names]
    objectives = [registries.OBJECTIVES.locate(name).replace(":", ".") for name in registries.OBJECTIVES]
    pages["api/objectives.md"] = join(
        ["# Objective classes", "The fields are the settings of `objective` in a recipe.", *map(api_entry, objectives)]
    )
    navigation.append({"Objective classes": "api/objectives.md"})
    pages["api/index.md"] = join(
        [
            "# API reference",
            "`import tastemaker as tm` gives you these names. [From Python](../library.md) shows how they work"
            " together. Any other name may change without notice.",
            table(["name", "page"], sorted(rows, key=lambda row: row[0].lower())),
        ]
    )
    return pages, navigation


def api_entry(path: str) -> str:
    return f"::: {path}"


def api_target(name: str) -> str:
    return f"tastemaker{tastemaker._MODULES[name]}.{name}"


# Markdown


def join(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([re.sub(r"(?<!\\)\|", r"\\|", " ".join(cell.split())) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def anchor(name: str) -> str:
    return name.replace("_", "-")


def docstring_markdown(text: str) -> str:
    """A docstring as paragraphs."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(paragraphs)


# Links

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
SOURCE = re.compile(r"""\b(src|href|srcset)="([^":]+)\"""")


@cache
def component_sources() -> dict[str, str]:
    """For the source file of each component its place on the site; the first if a file has several."""
    links: dict[str, str] = {}
    for page, (_, kinds, _) in KINDS.items():
        for _, registry in kinds:
            for name in registry:
                path = registry.locate(name).partition(":")[0].replace(".", "/") + ".py"
                links.setdefault(path, f"components/{page}.md#{anchor(name)}")
    return links


def adapt_links(text: str, source: str, target: str, repo_url: str | None) -> str:
    """Rewrite the relative links of a file, named from the repository's root, for its page at `target` below docs/.

    Links to the source of a component lead to its description. Links to other files that are no pages of the site
    become links to the repository, or plain text if it has no address.
    """

    def resolve(link: str) -> str | None:
        """The link on the site; None if it has none."""
        path, mark, fragment = link.partition("#")
        if not path or re.match(r"[a-z]+:", link) or link.startswith("/"):
            return link
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if place.startswith("notebooks/") and place.endswith(".ipynb"):  # a page of notebook_pages.py
            place = f"docs/{place.removesuffix('.ipynb')}.md"
        page = INCLUDED.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if page is None and (component := component_sources().get(place)):
            page, _, fragment = component.partition("#")
            mark = "#"
        if page is None:
            return f"{repo_url.rstrip('/')}/blob/main/{place}" if repo_url else None
        return posixpath.relpath(page, posixpath.dirname(target) or ".") + mark + fragment

    def replace(match: re.Match[str]) -> str:
        image, label, link = match.groups()
        label = LINK.sub(replace, label)
        resolved = resolve(link)
        return label if resolved is None else f"{image}[{label}]({resolved})"

    def replace_source(match: re.Match[str]) -> str:
        return f'{match[1]}="{resolve(match[2]) or match[2]}"'

    return outside_fences(text, lambda part: SOURCE.sub(replace_source, LINK.sub(replace, part)))


def link_recipes(text: str, target: str) -> str:
    """Link every recipe whose name stands alone as inline code, except in headings and links."""
    known = set(list_trainable_recipes())
    folder = posixpath.dirname(target) or "."

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        page = f"recipes/{name}.md"
        return f"[`{name}`]({posixpath.relpath(page, folder)})" if name in known and page != target else match[0]

    def by_line(part: str) -> str:
        lines = part.split("\n")
        return "\n".join(
            line if line.startswith("#") else re.sub(r"(?<![\[`\w])`([a-z0-9-]+)`(?![\]`])", replace, line)
            for line in lines
        )

    return outside_fences(text, by_line)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("```") else change(part) for part in FENCE.split(text))


# Hooks of MkDocs


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    sections = {"Recipes": recipe_pages, "Components": component_pages, "API reference": api_pages}
    generated: Pages = {}
    for entry in config.nav or []:
        for title, make in sections.items():
            if isinstance(entry, dict) and title in entry:
                pages, entry[title] = make()
                generated |= pages
    for source, target in INCLUDED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        front = "---\nhide: [navigation]\n---\n\n" if target == "index.md" else ""
        generated[target] = front + adapt_links(text, source, target, config.repo_url)
    config.extra["generated_pages"] = generated
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in config.extra["generated_pages"].items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    target = page.file.src_uri
    if target not in config.extra["generated_pages"]:
        markdown = adapt_links(expand_markers(markdown), f"docs/{target}", target, config.repo_url)
    markdown = re.sub(r"^```console$", "```bash", markdown, flags=re.MULTILINE)
    return link_recipes(markdown, target)
