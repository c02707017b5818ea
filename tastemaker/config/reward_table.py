"""The table of rewards in docs/rewards.md, written from what the rewards say of themselves."""

from __future__ import annotations

from pathlib import Path

from .catalog import Row, component_rows

BEGIN, END = "<!-- rewards: written by `make schema`, do not edit -->", "<!-- rewards: end -->"
COLUMNS = ("reward", "what it is", "gradient", "reads", "runs on", "memory", "range", "hacked by", "from the hub")


def reward_table() -> str:
    """In Markdown, one line a reward."""
    head = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*head, *(f"| {' | '.join(reward_cells(row))} |" for row in component_rows("rewards"))])


def reward_cells(row: Row) -> list[str]:
    """What stands in a line."""
    name = f"`{row['name']}`" + "".join(f", `{alias}`" for alias in row["aliases"])
    inside = row["range"]
    gradient = {True: "yes", False: "no", None: inside}[row["differentiable"]]
    fetched = [
        f"{source['hub']}{'/' + source['file'] if source['file'] else ''} "
        f"({', '.join([source['size'], source['licence'], *(['gated'] if source['gated'] else [])])})"
        for source in row["sources"]
    ]
    told = [row["what"], gradient, row["reads"] or inside, row["runs_on"] or inside, row["memory"], row["range"]]
    return [name, *(text.replace("|", "\\|") for text in (*told, row["hacked_by"], "; ".join(fetched) or "-"))]


def replace_table(text: str) -> str:
    """A page with the table as it is now."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{reward_table()}\n{END}{rest.split(END, 1)[1]}"


def write_page(path: Path = Path("docs/rewards.md")) -> None:
    path.write_text(replace_table(path.read_text(encoding="utf-8")), encoding="utf-8")
