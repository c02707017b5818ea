"""Nothing in the working directory is executed, except a module that the user names; no model folder brings code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tastemaker
from tastemaker.core.registry import ConfigError, subprocess_path
from tastemaker.models.pipeline_components import load_tokenizer
from tastemaker.models.pretrained import WeightsSource, find_weights

ROOT = Path(__file__).parent.parent.parent
PACKAGE = Path(tastemaker.__file__).parent
# Python itself imports these from the working directory under `-m`, before it looks for the package.
IMPORTED_BY_RUNPY = {
    "collections",
    "contextlib",
    "functools",
    "importlib",
    "keyword",
    "operator",
    "reprlib",
    "types",
    "warnings",
}
HOSTILE = {*sys.stdlib_module_names, "sitecustomize", "usercustomize"} - IMPORTED_BY_RUNPY
HOSTILE |= {"click", "numpy", "rich", "safetensors", "sympy", "torch", "typer", "yaml"}
SCRIPT = "import sys; sys.path[0] = 'bin'; from tastemaker.cli import main; sys.exit(main())"


@pytest.fixture
def hostile_directory(tmp_path: Path) -> Path:
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"import os\nos.write(2, b'EXECUTED {name}')\nos._exit(99)\n")
    return tmp_path


def run_python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)


def test_no_file_in_the_working_directory_is_executed(hostile_directory: Path) -> None:
    """By the installed script, which starts like this with its own folder first on the path, and by `python -m`."""
    check = ["check", "grpo-toy-flow", "engine.device=cpu"]  # imports torch
    starts = (["-m", "tastemaker"], check), (["-umtastemaker"], ["--help"]), (["-c", SCRIPT], ["list", "models"])
    for entry, command in starts:
        done = run_python(hostile_directory, *entry, *command)
        assert done.returncode == 0 and "EXECUTED" not in done.stderr, (entry, command, done.stderr)


def test_safe_path_keeps_even_modules_that_python_starts_with_out(hostile_directory: Path) -> None:
    for name in IMPORTED_BY_RUNPY:
        (hostile_directory / f"{name}.py").write_text("import os\nos._exit(99)\n")
    safe = {"PYTHONSAFEPATH": "1"}
    for options, environment in ((["-P", "-m", "tastemaker"], {}), (["-m", "tastemaker"], safe)):
        done = run_python(hostile_directory, *options, "--version", **environment)
        assert done.returncode == 0 and done.stdout.startswith("tastemaker"), (options, done.stderr)


def test_started_processes_keep_the_working_directory_out() -> None:
    """Each command line of the package's own begins with the interpreter and -P, or -I."""
    commands, wrong = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "sys.executable" in text else ():
            if isinstance(node, (ast.List, ast.Tuple)) and "sys.executable" in map(ast.unparse, node.elts):
                first = [ast.unparse(part) for part in node.elts[:2]]
                commands += 1
                if first not in (["sys.executable", "'-P'"], ["sys.executable", "'-I'"]):
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not wrong and commands >= 8


@pytest.mark.slow
def test_own_module_is_found_last_and_only_when_named(hostile_directory: Path) -> None:
    """Both ranks of the doctor find it too, and no sitecustomize.py runs in them."""
    for name in HOSTILE - {"sitecustomize", "usercustomize"}:
        if name not in sys.builtin_module_names and importlib.util.find_spec(name) is None:  # such as winreg
            (hostile_directory / f"{name}.py").unlink()
    helper = "WEIGHT = 1.0\ndef score(images, prompts):\n    return [WEIGHT * image.mean() for image in images]\n"
    (hostile_directory / "own_rewards.py").write_text("import html\nfrom own_helper import score\nHTML = html.escape\n")
    (hostile_directory / "own_helper.py").write_text(helper)
    reward = "rewards={own: {type: function, function: 'own_rewards:score'}}"
    program = (
        "from tastemaker.config.load import load\nfrom tastemaker.diagnostics.two_ranks import run_first_step\n"
        "from tastemaker.config.build import make_tiny\n"
        f"print(run_first_step(make_tiny(load('grpo-toy-flow', [{reward!r}, 'engine.device=cpu']))))"
    )
    done = run_python(hostile_directory, "-P", "-c", program)
    assert done.returncode == 0 and "(None" not in done.stdout and "EXECUTED" not in done.stderr, done


def test_processes_do_not_inherit_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path)])
    assert str(tmp_path) not in subprocess_path().split(os.pathsep)
    assert str(PACKAGE.parent) in subprocess_path().split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert str(tmp_path) in subprocess_path().split(os.pathsep)  # the user's own decision


def test_code_in_a_model_folder_is_not_executed(tmp_path: Path) -> None:
    code = f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n"
    (tmp_path / "evil.py").write_text(code)
    auto_map = dict.fromkeys(("AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor"), "evil.Evil")
    tokenizer = {"AutoTokenizer": ["evil.Evil", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": tokenizer}))
    with pytest.raises(ConfigError, match="TM500"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "executed").exists()


# Variables that hold a class of transformers or diffusers which is chosen here and takes no code from a folder.
OWN_CLASSES = {
    ("models/pipeline_components.py", "network_class"),
    ("models/qwen_image_edit.py", "processor"),
    ("models/showo/vision_encoder.py", "config_class"),
    ("rewards/backbones/frozen_models.py", "model_class"),
}


def test_every_loader_that_could_run_code_of_a_model_refuses_to() -> None:
    """Auto classes ask at the terminal whether to run the code of a folder, unless they are told not to.

    A concrete configuration or tokenizer, such as CLIPVisionConfig, never runs any. Everything else refuses.
    """
    wrong, refusing = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".from_pretrained" in text or "load_dataset" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".from_pretrained", "load_dataset")):
                trust = {k.arg: k.value for k in node.keywords}.get("trust_remote_code")
                receiver = ast.unparse(node.func).removesuffix(".from_pretrained")
                is_concrete = receiver.endswith("Config") and not receiver.endswith("AutoConfig")
                refuses = isinstance(trust, ast.Constant) and trust.value is False
                refusing += refuses
                if not refuses and (trust is not None or not (is_concrete or (name, receiver) in OWN_CLASSES)):
                    wrong.append(f"{name}:{node.lineno}: {receiver}")
    assert not wrong and refusing >= 13, (wrong, refusing)


def test_folder_with_the_name_of_published_weights_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = WeightsSource("owner/name", size="1 MB", license="MIT")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"owner/name.*TM1190"):
        find_weights("owner/name", source)
    assert find_weights("./owner/name", source).is_dir()
