"""Descriptions of settings: the comments beside the fields of dataclasses, read from their source.

A setting is described where it is defined. The documentation and the forms of the studio show these texts. Nothing is
imported, so torch is not.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# Meanings of settings that many components share, where no comment stands beside the field.
COMMON_SETTINGS = {
    "advantage": "what rewards are compared with: mean and spread of the group; mean of the group and spread of the"
    " batch; the batch (global); the latest rewards of the prompt (tracker)",
    "advantage_clip": "advantages are clipped to plus and minus this",
    "batch_size": "samples scored at once",
    "beta": "scale of the log-ratios to the reference; a larger one stays nearer to it",
    "depth": "number of blocks",
    "dropout": "dropout of the adapters",
    "dynamics": "how a sampling step removes noise",
    "eta": "noise of a DDIM step: 0 for none, 1 for as much as DDPM",
    "heads": "attention heads",
    "kl_coef": "weight of the KL penalty to the reference policy; 0 for none",
    "n": "candidates per prompt",
    "noise_level": "amount of noise that a step adds",
    "num_classes": "number of classes",
    "num_steps": "sampling steps",
    "path": "path of the file or folder",
    "rank": "rank of the adapters",
    "reward": "the reward inside",
    "seed": "of random numbers",
    "split": "which part of the data",
    "target_modules": "names of the layers with adapters",
    "temperature": "of the sampling distribution",
    "top_p": "share of the probability from which tokens are sampled",
    "weights": "a path, or an id on the Hugging Face Hub",
    "window": "steps that use the SDE and are trained; the others follow the ODE",
}
CLIP_RANGE = "importance ratios are clipped to 1 - clip_range and 1 + clip_range."


def describe_setting(name: str, comments: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """Return what a setting means, by the comment of its field or by its common meaning."""
    if name == "clip_range":
        return f"{CLIP_RANGE} {comments.get(name, '')}"
    if name in ("height", "width") and {"height", "width"} <= settings.keys():
        return comments.get(name, "of a sample, in pixels")
    if settings.get(name, {}).get("$ref", "").endswith("/path"):
        return comments.get(name, "how noise is added")
    return comments.get(name) or COMMON_SETTINGS.get(name, "")


@cache
def parse_module(name: str) -> tuple[ast.Module, dict[int, tuple[bool, str]]]:
    """The syntax tree of a module and its comments: line -> (whether it stands alone, text)."""
    spec = importlib.util.find_spec(name)
    path = Path((spec and spec.origin) or "")
    comments = {}
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                own_line = not token.line[: token.start[1]].strip()
                comments[token.start[0]] = (own_line, token.string.lstrip("# ").strip())
    return ast.parse(path.read_text(encoding="utf-8")), comments


def class_comments(node: ast.ClassDef, comments: Mapping[int, tuple[bool, str]]) -> dict[str, str]:
    """The comments of a class's fields, on their line or on the lines above."""
    texts_by_field = {}
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        own_line, text = comments.get(item.end_lineno or item.lineno, (True, ""))
        texts = [] if own_line else [text]
        line = item.lineno - 1
        while line in comments and comments[line][0]:
            texts.insert(0, comments[line][1])
            line -= 1
        text = " ".join(each for each in texts if not each.startswith("type: ignore"))
        if text := re.sub(r"\s*# type: ignore\S*", "", text):
            texts_by_field[item.target.id] = text
    return texts_by_field


@cache
def field_comments(place: str) -> dict[str, str]:
    """The comments of the fields of "module:Class" and of the classes of this package that it inherits from."""
    module, _, name = place.partition(":")
    tree, comments = parse_module(module)
    node = next((each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name), None)
    if node is None:
        return {}
    inherited: dict[str, str] = {}
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base, ast.Name):
            inherited |= field_comments(f"{imported_from(tree, module, base.id)}:{base.id}")
    return inherited | class_comments(node, comments)


def imported_from(tree: ast.Module, module: str, name: str) -> str:
    """The module of this package in which a name of a module is defined; the module itself if it is not imported."""
    package = module.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            return source if source.startswith("tastemaker") else module
    return module
