"""Small pictures with captions, and voting sessions of them."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from tastemaker.preferences.sessions import Session, create_session
from tastemaker.preferences.votes import Kind

PROMPTS = ("a red circle", "two <b>blue</b> squares", "a green triangle", "one yellow star")


def write_pictures(folder: Path, level: int, per_prompt: int = 1, prompts: tuple[str, ...] = PROMPTS) -> Path:
    """Write pictures whose red channel is `level`, with their prompts in metadata.jsonl."""
    folder.mkdir(parents=True)
    rows = []
    for p, prompt in enumerate(prompts):
        for k in range(per_prompt):
            Image.new("RGB", (16, 16), (level, 50 * p, 50 * k)).save(folder / f"{p}-{k}.png")
            rows.append(json.dumps({"file": f"{p}-{k}.png", "prompt": prompt}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def make_session(folder: Path, kind: Kind = "pair", per_prompt: int = 3, *, blind: bool = True) -> Session:
    """Create a session of two folders of pictures: secretbefore is dark, secretafter is bright."""
    sources = [
        f"{name}={write_pictures(folder / 'pictures' / name, level, per_prompt)}"
        for name, level in (("secretbefore", 20), ("secretafter", 220))
    ]
    return create_session(folder / "votes" / "taste", sources, seeds=range(per_prompt), kind=kind, blind=blind)
