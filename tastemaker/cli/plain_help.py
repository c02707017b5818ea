"""Help in plain text for pipes and narrow terminals, with the commands in the same groups as on a wide terminal."""

from __future__ import annotations

import re
import shutil
import sys
from typing import Any

from typer.core import TyperGroup

from .options import PANELS

MIN_PANEL_COLUMNS = 80  # boxes around help texts need this many columns


def needs_plain_text() -> bool:
    """Whether help and usage errors are written without boxes: not to a terminal, or to one of under 80 columns."""
    return not sys.stdout.isatty() or shutil.get_terminal_size().columns < MIN_PANEL_COLUMNS


def move_imports_first(arguments: list[str]) -> list[str]:
    """Move every `--import MODULE` before the command, whose own options do not include it."""
    imports, others, rest = [], [], iter(arguments)
    for argument in rest:
        if argument == "--":
            others += [argument, *rest]
        elif argument == "--import":
            imports += [argument, *([value] if (value := next(rest, None)) is not None else [])]
        elif argument.startswith("--import="):
            imports.append(argument)
        else:
            others.append(argument)
    return [*imports, *others]


class CommandGroup(TyperGroup):
    """All commands, listed by group. `--import MODULE` may also stand behind the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, move_imports_first(args))

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: PANELS.index(self._panel(name)))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per group, each command with the first sentence of its help."""
        width = max(map(len, self.commands))
        for panel in PANELS:
            names = [name for name in self.list_commands(ctx) if self._panel(name) == panel]
            with formatter.section(panel):
                formatter.write_dl([(f"{name:{width}}", self._first_sentence(name)) for name in names])

    def _panel(self, name: str) -> str:
        return str(vars(self.commands[name])["rich_help_panel"])

    def _first_sentence(self, name: str) -> str:
        paragraph = " ".join((self.commands[name].help or "").split("\n\n")[0].split())
        return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]
