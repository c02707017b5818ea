"""Every error and warning for users ends with a code such as [TM012], which names one place of the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "tastemaker"
CODE = re.compile(r"\[(TM\d{3,4})\]$")
ERRORS = {
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpointError",
    "DownloadError",
    "ImageError",
    "NotImplementedError",
    "OversizedRequestError",
    "ProtocolError",
    "RewardError",
    "RewardServiceError",
    "TrainingError",
    "TypeError",
    "ValueError",
    "make_error",
    "warnings.warn",
}


def find_messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every literal message that is raised or warned about."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and node.args
            if is_call and isinstance(node.args[0], ast.JoinedStr | ast.Constant):
                text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0])
                yield f"{path.relative_to(ROOT)}:{node.lineno}", str(text).rstrip("'\"")


def test_every_message_ends_with_a_code() -> None:
    missing = [place for place, text in find_messages() if not CODE.search(text)]
    used = set(used_codes())
    free = next(code for n in range(1000, 10000) if (code := f"TM{n}") not in used)
    assert not missing, f"add a code such as [{free}], which is free, to the end of the messages at {missing}"


def test_a_code_names_one_message() -> None:
    repeated = {code: count for code, count in Counter(used_codes()).items() if count > 1}
    # An unknown key has the same code with and without a suggestion from another section.
    assert repeated == {"TM820": 2}


def used_codes() -> list[str]:
    return [
        code for path in sorted(ROOT.rglob("*.py")) for code in re.findall(r"\[(TM\d{3,4})\]", path.read_text("utf-8"))
    ]
