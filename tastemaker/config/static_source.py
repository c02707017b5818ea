"""Read docstrings and default settings of components from their source, without importing them.

`tastemaker list` describes every component. Importing all of them would import torch and take seconds; parsing their
files takes milliseconds. What cannot be read this way raises NotStatic, and the caller imports the class instead.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Imported = tuple[str, str]  # a module, and a name in it
Definition = ast.expr | ast.FunctionDef | ast.ClassDef | Imported


class NotStatic(Exception):
    """A value that is known only after its module is imported."""


def definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    """The names that the statements of a module or class define: assignments, functions and classes."""
    names: dict[str, Definition] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            names |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            for target in node.targets:
                names |= unpacked_definitions(target, node.value)
    return names


def unpacked_definitions(target: ast.expr, value: ast.expr) -> dict[str, Definition]:
    """The names in `a, b = value`, each as `tuple(value)[i]`; nothing for other targets."""
    if not isinstance(target, ast.Tuple):
        return {}
    text = ast.unparse(value)
    return {
        name.id: ast.parse(f"tuple({text})[{i}]", mode="eval").body
        for i, name in enumerate(target.elts)
        if isinstance(name, ast.Name)
    }


class StaticModule:
    """A module's source, whose names are evaluated one by one when asked for."""

    def __init__(self, name: str) -> None:
        try:
            spec = importlib.util.find_spec(name)
            self.tree = ast.parse(Path((spec and spec.origin) or "").read_text(encoding="utf-8"))
        except (ImportError, OSError, SyntaxError, ValueError) as error:
            raise NotStatic(f"module '{name}' has no source that can be read") from error
        self.name, self.package = name, (spec and spec.parent) or ""
        self.definitions = definitions(self.tree.body)
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)
                self.definitions |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}

    def value(self, name: str) -> Any:
        """The value of a name at the module's top level."""
        definition = self.definitions.get(name)
        if isinstance(definition, ast.expr):
            return self.evaluate(definition)
        if isinstance(definition, ast.FunctionDef):
            return self.function(definition)
        if isinstance(definition, tuple) and definition[0].split(".")[0] == self.name.split(".")[0]:
            if definition[1] not in static_module(definition[0]).definitions:  # a module: from . import name
                return StaticAttributes(static_module(".".join(definition)))
            return static_module(definition[0]).value(definition[1])
        if isinstance(definition, ast.ClassDef) and self._imports_only_stdlib():
            return vars(importlib.import_module(self.name))[name]
        if isinstance(definition, ast.ClassDef) and is_dataclass_definition(definition):
            return static_constructor(definition)
        raise NotStatic(f"{self.name}.{name} is known only after an import")

    def evaluate(self, node: ast.expr) -> Any:
        """The value of an expression."""
        namespace = self._names_in(node)
        try:
            return eval(compile(ast.Expression(node), self.name, "eval"), namespace)
        except Exception as error:  # code outside its module may lack anything
            raise NotStatic(f"{ast.unparse(node)} in {self.name} is known only after an import") from error

    def function(self, node: ast.FunctionDef) -> Callable[..., Any]:
        """The function of a definition, without its decorators."""
        namespace = self._names_in(*node.body)
        bare = ast.copy_location(ast.FunctionDef(node.name, node.args, node.body, []), node)
        exec(compile(ast.Module([bare], []), self.name, "exec"), namespace)
        function: Callable[..., Any] = namespace[node.name]
        return function

    def _names_in(self, *nodes: ast.AST) -> dict[str, Any]:
        """The values of all names of this module that some code mentions."""
        names = {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        return {name: self.value(name) for name in names & self.definitions.keys()}

    def _imports_only_stdlib(self) -> bool:
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [node.names[0].name if isinstance(node, ast.Import) else node.module or "" for node in nodes]
        relative = any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
        return not relative and all(name.split(".")[0] in sys.stdlib_module_names for name in names)


class StaticAttributes:
    """The names of a module that was not imported, as attributes."""

    def __init__(self, module: StaticModule) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return self._module.value(name)


def is_dataclass_definition(node: ast.ClassDef) -> bool:
    """Whether a class has the decorator `dataclass`."""
    return any(ast.unparse(decorator).startswith("dataclass") for decorator in node.decorator_list)


def static_constructor(node: ast.ClassDef) -> Callable[..., SimpleNamespace]:
    """A function that keeps the arguments of a dataclass as attributes, without its defaults and methods."""
    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    names = [field.id for field in fields if isinstance(field, ast.Name)]
    return lambda *values, **named: SimpleNamespace(**dict(zip(names, values, strict=False)), **named)


@cache
def static_module(name: str) -> StaticModule:
    """A module's source, parsed once."""
    return StaticModule(name)


class StaticClass:
    """A dataclass as its source defines it, at the place "module:Class"."""

    def __init__(self, place: str) -> None:
        module, _, name = place.partition(":")
        self.module = static_module(module)
        node = self.module.definitions.get(name)
        if not isinstance(node, ast.ClassDef):
            raise NotStatic(f"{place} is no class in its module's source")
        self.node, self.definitions = node, definitions(node.body)

    @property
    def docstring(self) -> str:
        """The docstring as written; a class without one raises NotStatic, since a dataclass writes its own then."""
        text = ast.get_docstring(self.node, clean=False)
        if text is None:
            raise NotStatic(f"{self.node.name} has no docstring")
        return text

    @property
    def has_required_fields(self) -> bool:
        """Whether some field has no default, so that the class cannot be made without settings."""
        return any(isinstance(node, ast.AnnAssign) and node.value is None for node in self.node.body)

    def find_owner(self, name: str) -> StaticClass:
        """The class that defines a member: this one, or a base class in the same package."""
        if name in self.definitions:
            return self
        for base in self._bases():
            owner = base.find_owner(name)
            if name in owner.definitions:
                return owner
        return self

    def _bases(self) -> list[StaticClass]:
        """The base classes whose source is in the same package as this one."""
        places = []
        for base in self.node.bases:
            definition = self.module.definitions.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(definition, ast.ClassDef):
                places.append((self.module.name, definition.name))
            elif isinstance(definition, tuple) and definition[0].split(".")[0] == self.module.name.split(".")[0]:
                places.append(definition)
        return [StaticClass(f"{module}:{name}") for module, name in places]

    def defaults(self) -> Any:
        """An object with the attributes an instance without settings has; properties are computed from these."""
        return StaticInstance(self)


class StaticInstance:
    """An instance of a class that was not imported; each attribute is evaluated when asked for."""

    def __init__(self, cls: StaticClass) -> None:
        self._class = cls

    def __getattr__(self, name: str) -> Any:
        owner = self._class.find_owner(name)
        definition = owner.definitions.get(name)
        if isinstance(definition, ast.expr):
            return owner.module.evaluate(definition)
        if isinstance(definition, ast.FunctionDef):  # a property: specs have no other methods that are listed
            try:
                return owner.module.function(definition)(self)
            except Exception as error:  # code outside its module may lack anything
                raise NotStatic(f"{self._class.node.name}.{name} is known only after an import") from error
        raise NotStatic(f"{self._class.node.name}.{name} is not in the source of its class")
