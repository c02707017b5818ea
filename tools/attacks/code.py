"""Attacks that try to run code: modules in the working directory, pickles, YAML tags, and markup in reports."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from .lab import Lab, attack, expect, train_arguments

DECOYS = (
    "html", "sympy", "yaml", "rich", "typer", "PIL", "safetensors", "peft", "diffusers", "transformers", "numpy",
    "torchvision", "av", "antigravity", "sitecustomize", "usercustomize", "rapidocr", "datasets", "jinja2",
    "accelerate", "typing", "json", "torch",
)  # fmt: skip
# What the installed command is: a script whose own folder comes first on the path.
CONSOLE_SCRIPT = "import sys\nfrom tastemaker.cli import main\nsys.exit(main())\n"


@attack("code-in-working-directory", "no module beside you is imported, except one that a setting names", quick=True)
def plant_modules(lab: Lab) -> None:
    here = lab.folder / "here"
    here.mkdir()
    for name in DECOYS:
        (here / f"{name}.py").write_text(
            f"open({str(lab.folder / 'imported')!r}, 'a').write('{name} ')\nraise SystemExit(7)\n"
        )
    reward = lab.folder / "own"
    reward.mkdir()
    (reward / "darkness.py").write_text(
        "def darkness(images, prompts, **metadata):\n    return -images.mean((1, 2, 3))\n"
    )
    script = lab.folder / "bin/tastemaker"
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    listing, check = ["list", "models"], ["check", "grpo-toy-flow"]
    # The default path of Python: no -P, which would keep the working directory out by itself.
    starts: list[tuple[tuple[str, ...], list[str], dict[str, str]]] = [
        (("-m", "tastemaker"), listing, {}),
        (("-mtastemaker",), listing, {}),
        ((str(script),), check, {}),
        ((str(script),), train_arguments(lab.folder, "run", 1), {}),
        (("-m", "tastemaker"), check, {}),
        (("-um", "tastemaker"), ["--help"], {}),
        (("-m", "tastemaker"), ["--help"], {"PYTHONSAFEPATH": "1"}),
    ]
    for launcher, command, environment in starts[: lab.count(7, 2)]:
        with lab.attempt(" ".join([*launcher, *command[:2]])):
            result = lab.run(*command, folder=here, launcher=launcher, safe_path=False, env=environment)
            imported = lab.folder / "imported"
            expect(not imported.exists(), f"imported {imported.read_text() if imported.exists() else ''}")
            result.expect_success()
        (lab.folder / "imported").unlink(missing_ok=True)
    with lab.attempt("a reward of one's own in the working directory"):
        own = 'rewards={mine: {type: "darkness:darkness"}}'
        lab.run(*train_arguments(lab.folder, "own-run", 1, own), folder=reward).expect_success()


class Trap:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def hostile_pickles(canary: Path) -> dict[str, bytes]:
    """Return pickles that would create a file, by the way in which they do it."""
    import builtins
    import os
    import subprocess

    touch, path = f"touch {canary}", str(canary)
    code = f"open({path!r}, 'w')"
    text = {
        "GLOBAL and REDUCE": f"cos\nsystem\n(S'{touch}'\ntR.",
        "INST": f"(S'{touch}'\nios\nsystem\n.",
        "OBJ": f"(cos\nsystem\nS'{touch}'\no.",
        "BUILD": f"cbuiltins\nexec\n(S\"{code}\"\ntR(dS'x'\nI1\nsb.",
        "a torch function": f"ctorch\nload\n(S'{path}'\ntR.",
        "getattr": f"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'{touch}'\ntR.",
    }
    traps = {
        "os.system": Trap(os.system, touch),
        "subprocess": Trap(subprocess.call, ["touch", path]),
        "eval": Trap(builtins.eval, code),
        "open": Trap(open, path, "w"),
    }
    forms = {name: raw.encode() for name, raw in text.items()}
    forms |= {name: pickle.dumps({"weight": trap}) for name, trap in traps.items()}
    forms["STACK_GLOBAL, protocol 4"] = pickle.dumps(Trap(os.system, touch), protocol=4)
    forms["in a list, protocol 0"] = pickle.dumps([1, [Trap(os.system, touch)]], protocol=0)
    return forms


def wrap_as_torch_file(pickled: bytes) -> bytes:
    """Return the zip that torch.save would write around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


@attack("hostile-pickles", "nothing is executed; exit code 1 or 2 with a message", quick=True)
def plant_pickles(lab: Lab) -> None:
    canary = lab.folder / "executed"
    forms = hostile_pickles(canary)
    cases: dict[str, tuple[str, bytes]] = {}
    suffixes = (".pt", ".bin", ".pth")
    for i, (name, raw) in enumerate(forms.items()):
        zipped = i % 2 == 0
        content = wrap_as_torch_file(raw) if zipped else raw
        cases[f"{name} in {'a zip' if zipped else 'a bare file'}"] = (f"x{i}{suffixes[i % 3]}", content)
    bare = forms["GLOBAL and REDUCE"]
    cases["a pickle as safetensors"] = ("pickle.safetensors", bare)
    cases["a zip as safetensors"] = ("zip.safetensors", wrap_as_torch_file(bare))
    header = b'{"x":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,399999999996]}}'
    cases["safetensors of 400 GB"] = ("huge.safetensors", struct.pack("<Q", len(header)) + header)
    cases["a safetensors header of 2^63 bytes"] = ("header.safetensors", struct.pack("<Q", 2**63 - 1) + b"{}")
    chosen = list(cases.items())[:: 8 if lab.quick else 1]
    for i, (name, (file, content)) in enumerate(chosen):
        with lab.attempt(name):
            path = lab.folder / file
            path.write_bytes(content)
            result = lab.run(*train_arguments(lab.folder, f"run-{i}", 1), "--init-from", str(path))
            expect(not canary.exists(), "code was executed")
            result.expect_message().expect_memory(2)
        canary.unlink(missing_ok=True)


@attack("yaml-tags", "nothing is executed; exit code 2 with a message")
def plant_tags(lab: Lab) -> None:
    canary = lab.folder / "executed"
    forms = {
        "object/apply": f'!!python/object/apply:os.system ["touch {canary}"]',
        "object/new": f'!!python/object/new:os.system ["touch {canary}"]',
        "name": "!!python/name:os.system",
        "module": "!!python/module:antigravity",
    }
    for i, (name, value) in enumerate(forms.items()):
        with lab.attempt(name):
            recipe = lab.folder / f"recipe-{i}.yaml"
            recipe.write_text(f"extends: grpo-toy-flow\nname: {value}\n")
            result = lab.run("train", str(recipe), "steps=1") if i % 2 else lab.run("check", str(recipe))
            expect(not canary.exists(), "code was executed")
            result.expect_message()
    for name, value in list(forms.items())[:2]:
        with lab.attempt(f"{name} in an override"):
            result = lab.run("check", "grpo-toy-flow", f"rewards={value}")
            expect(not canary.exists(), "code was executed")
            result.expect_message()


MARKUP = (
    "<script>attack()</script>",
    '"><img src=x onerror=attack()>',
    "'><svg/onload=attack()>",
    "</script><script>attack()</script>",
    "</style></title></textarea><iframe src=javascript:attack()>",
    "${attack()}{{attack()}}",
    "<!--><img src=x onerror=attack()>-->",
    "&lt;script&gt;attack()",
)


class ActiveContent(HTMLParser):
    """Collects what a browser would run: elements and attributes that mention `attack`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside = tag if tag in ("script", "style") else ""
        active = [
            f"{tag} {key}"
            for key, value in attributes
            if "attack()" in (value or "") and (key.startswith("on") or key in ("src", "href", "srcdoc", "style"))
        ]
        self.found += active
        if tag in ("iframe", "object", "embed") or (tag == "img" and ("src", "x") in attributes):
            self.found.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script" and data.strip().startswith("attack()"):
            self.found.append("script")


@attack("markup-in-reports", "prompts, rewards, warnings and names of runs appear as text; nothing in them is active")
def inject_markup(lab: Lab) -> None:
    prompts = json.dumps([f"a red {markup}" for markup in MARKUP])
    name = "<img src=x onerror=attack()>"
    reward = '{"<b onmouseover=attack()>": {type: color}}'
    arguments = train_arguments(lab.folder, name, 2, f"data={{type: prompts, prompts: {prompts}}}", "sample.every=1")
    result = lab.run(*arguments, f"rewards={reward}")
    if result.code:  # a name may be refused as well
        with lab.attempt("such a reward's name is refused"):
            result.expect_message()
        result = lab.run(*arguments)
    directory = lab.folder / name
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "guard/<script>attack()</script>": 1.0, "warning": MARKUP[1]}) + "\n")
    lab.run("report", str(directory))
    pages = list(directory.rglob("*.html"))
    for page in pages:
        for markup in MARKUP:
            with lab.attempt(f"{markup} in {page.name}"):
                parser = ActiveContent()
                parser.feed(page.read_text(encoding="utf-8"))
                expect(not parser.found, f"active: {parser.found[:3]}")
    with lab.attempt("the report is written"):
        result.expect_success()
        expect(pages, "there is no report")
