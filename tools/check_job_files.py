"""Check the files that `tastemaker launch` writes with the parsers of the tools that read them.

    python tools/check_job_files.py build/job-tools

The folder gets an environment with SkyPilot, Kubeflow's client and submitit. On Debian and Ubuntu it also gets Slurm,
which is unpacked there and not installed. Nothing is submitted to a cluster, and none of it becomes a dependency.

- SkyPilot: `sky.Task.from_yaml`
- Kubeflow: the file is read into the models of its client; a field that they do not have is refused
- submitit: the names of the options are among those that it writes
- Slurm: `sbatch --test-only` with a controller on this machine that knows four nodes, none of which runs. GPUs count
  only when a node has started, so the options of GPUs are parsed, and the rest is scheduled without them.

Each parser must also refuse a file with a planted mistake.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("skypilot==0.14.1", "kubeflow-training==1.9.4", "submitit==1.5.4")
SLURM_PACKAGES = ("slurmctld", "slurm-client", "slurm-wlm-basic-plugins")
# A mistake for each kind of file: what is replaced in the first file, by what.
MISTAKES = {
    "sky": ("num_nodes:", "number_of_nodes:"),
    "k8s": ("restartPolicy:", "restartPolicies:"),
    "submitit": ("--nodes=", "--machines="),
    "slurm": ("--signal=B:USR1", "--signal=B:USR9"),
}


def write_files(folder: Path) -> dict[str, list[Path]]:
    """Write files of several sizes for each system; return them by parser."""
    from tastemaker.diagnostics.job_files import ACCELERATORS, Job, render_job

    quoted = ("flowgrpo-sd35", "name=it's mine", "data.prompts=[a cat, 'b: c']", "steps=3")
    jobs = {
        "one": Job("flow", ("grpo-toy-flow",), "l4-24g", 1, 1, 64, 1, "me/tastemaker:1"),
        "many": Job("flow-2", quoted, "h100-80g", 2, 8, 320, 24, "me/tastemaker:1", "my-runs"),
    }
    files: dict[str, list[Path]] = {"sky": [], "k8s": [], "slurm": []}
    for system, written in files.items():
        chosen = dict(jobs)
        if system == "sky":
            chosen |= {gpu: Job("flow", quoted, gpu, 1, 8, 320, 24) for gpu in ACCELERATORS}
        for name, job in chosen.items():
            path = folder / f"{name}.{system}{'.sh' if system == 'slurm' else '.yaml'}"
            path.write_text(render_job(system, job, ["Written to be checked."]), encoding="utf-8")  # type: ignore[arg-type]
            written.append(path)
    return {**files, "submitit": files["slurm"]}


def parse_sky(path: Path) -> str:
    """Read a task with SkyPilot; return how it understands it."""
    sky: Any = importlib.import_module("sky")
    task = sky.Task.from_yaml(str(path))
    (resources,) = task.resources
    assert resources.accelerators and resources.job_recovery["max_restarts_on_errors"] == 3, resources
    return f"{task.num_nodes} x {resources.accelerators}, mounts {sorted(task.storage_mounts)}"


def parse_k8s(path: Path) -> str:
    """Read a PyTorchJob into the models of Kubeflow's client; refuse fields that they do not have."""
    models: Any = importlib.import_module("kubeflow.training.models")
    yaml: Any = importlib.import_module("yaml")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    job = build_model(models, "KubeflowOrgV1PyTorchJob", data, data["kind"])
    assert (job.api_version, job.kind) == ("kubeflow.org/v1", "PyTorchJob")
    workers = job.spec.pytorch_replica_specs["Worker"]
    return f"{workers.replicas} x {workers.template.spec.containers[0].resources.limits}"


def build_model(models: Any, kind: str, value: Any, place: str) -> Any:
    """Return a value as the type that the client's models declare, such as 'dict(str, V1Pod)'; raise ValueError."""
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            raise ValueError(f"{place}: expected a list, got {value!r}")
        return [build_model(models, match[1], each, f"{place}[{index}]") for index, each in enumerate(value)]
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        if not isinstance(value, dict):
            raise ValueError(f"{place}: expected a mapping, got {value!r}")
        return {key: build_model(models, match[1], each, f"{place}.{key}") for key, each in value.items()}
    simple: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    if kind in simple:
        quantity = kind == "str" and ".resources." in place  # Kubernetes reads numbers there too
        if not isinstance(value, simple[kind]) and not (quantity and isinstance(value, int)):
            raise ValueError(f"{place}: expected {kind}, got {value!r}")
        return value
    model = getattr(models, kind, None) or getattr(importlib.import_module("kubernetes.client"), kind)
    names = {external: internal for internal, external in model.attribute_map.items()}
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ValueError(f"{place}: {kind} has no field {unknown}")
    types = model.openapi_types
    built = {names[key]: build_model(models, types[names[key]], each, f"{place}.{key}") for key, each in value.items()}
    return model(**built)  # raises ValueError where a required field is missing


def parse_submitit(path: Path) -> str:
    """Compare the options of a script with those that submitit writes and takes."""
    slurm: Any = importlib.import_module("submitit.slurm.slurm")
    known = {name.replace("_", "-") for name in slurm.SlurmExecutor._valid_parameters()}
    script = slurm._make_sbatch_string(command="true", folder=path.parent, nodes=1, ntasks_per_node=1)
    known |= set(re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)) | {"requeue"}
    used = re.findall(r"^#SBATCH --([\w-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    unknown = [name for name in used if name not in known]
    if unknown or not used:
        raise ValueError(f"submitit has no option {unknown}")
    return f"{len(used)} options"


PARSERS: Mapping[str, Callable[[Path], str]] = {"sky": parse_sky, "k8s": parse_k8s, "submitit": parse_submitit}


def make_environment(folder: Path) -> Path:
    """Create an environment with the tools and return its Python; an existing one is used again."""
    python = folder / "venv/bin/python"
    if not (folder / "venv/complete").exists():
        venv.create(folder / "venv", with_pip=True, clear=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True, stdin=subprocess.DEVNULL
        )
        (folder / "venv/complete").touch()
    return python


def run_parser(python: Path, system: str, path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Parse a file in the environment of the tools, with a home folder of its own."""
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": ""}
    command = [str(python), __file__, "--parse", system, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def unpack_slurm(folder: Path) -> Path | None:
    """Unpack Slurm's programs with apt and return their folder; None where there is no apt."""
    target = folder / "slurm"
    if not (target / "usr/bin/sbatch").exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            return None
        packages = folder / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *SLURM_PACKAGES], cwd=packages, check=True, capture_output=True)
        for package in sorted(packages.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)
    return target


@contextmanager
def run_controller(slurm: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm's controller within the block; yield the environment for its commands."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (plugins,) = slurm.glob("usr/lib/*/slurm-wlm")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{socket.gethostname()}(127.0.0.1)",
        "SlurmctldPort": port,
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "SlurmUser": user,
        "PluginDir": plugins,
        "StateSaveLocation": folder,
        "SlurmctldPidFile": folder / "pid",
        "SlurmctldLogFile": folder / "log",
        "ProctrackType": "proctrack/linuxproc",
        "SwitchType": "switch/none",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "GresTypes": "gpu",
        "SlurmdTimeout": 0,
    }
    nodes = "NodeName=n[1-4] CPUs=64 RealMemory=400000 NodeAddr=127.0.0.1 Port=[17001-17004] State=CLOUD"
    lines = [*(f"{key}={value}" for key, value in settings.items()), nodes, "PartitionName=main Nodes=ALL Default=YES"]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    libraries = os.pathsep.join([str(plugins.parent), str(plugins), os.environ.get("LD_LIBRARY_PATH", "")])
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "SLURM_CONF": str(folder / "slurm.conf")}
    daemon = subprocess.Popen(
        [str(slurm / "usr/sbin/slurmctld-wlm"), "-D", "-c", "-f", str(folder / "slurm.conf")],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        ping = [str(slurm / "usr/bin/scontrol"), "ping"]
        while subprocess.run(ping, env=environment, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline and daemon.poll() is None, (folder / "log").read_text()
            time.sleep(0.2)
        yield environment
    finally:
        daemon.terminate()
        daemon.wait(30)


def test_submission(slurm: Path, script: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit code and the answer of `sbatch --test-only` to a script."""
    command = [str(slurm / "usr/bin/sbatch"), "--test-only"]
    done = subprocess.run(command, input=script, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def check_slurm(slurm: Path, path: Path, environment: Mapping[str, str]) -> str:
    """Let sbatch parse a script and the controller schedule it without its GPUs; raise ValueError if it is refused."""
    script = path.read_text(encoding="utf-8")
    code, answer = test_submission(slurm, script, environment)
    if code and "Requested node configuration is not available" not in answer:  # nodes that never ran have no GPUs
        raise ValueError(answer)
    code, answer = test_submission(slurm, re.sub(r"#SBATCH --gpus-per-node=\d+\n", "", script), environment)
    if code or "to start at" not in answer:
        raise ValueError(answer)
    return answer.partition("using ")[2]


def check_all(folder: Path) -> list[str]:
    """Check all files with all parsers; print what they say, and return the problems."""
    files_folder, home = folder / "files", folder / "home"
    for each in (files_folder, home):
        each.mkdir(parents=True, exist_ok=True)
    python, files, problems = make_environment(folder), write_files(files_folder), list[str]()
    for system in PARSERS:
        for path in [*files[system], plant_mistake(system, files[system][0])]:
            done, planted = run_parser(python, system, path, home), path.stem.startswith("mistake")
            answer = (done.stdout if not done.returncode else done.stderr).strip().splitlines() or [""]
            report(problems, system, path, done.returncode == 0, planted, answer[-1])
    if (slurm := unpack_slurm(folder)) is None:
        print("slurm: skipped, because its programs are fetched with apt, which is not here")
        return problems
    with run_controller(slurm, folder / "controller") as environment:
        for path in [*files["slurm"], plant_mistake("slurm", files["slurm"][0])]:
            try:
                accepted, answer_text = True, check_slurm(slurm, path, environment)
            except ValueError as error:
                accepted, answer_text = False, str(error)
            report(problems, "slurm", path, accepted, path.stem.startswith("mistake"), answer_text)
    return problems


def plant_mistake(system: str, path: Path) -> Path:
    """Write a copy of a file with a mistake that its parser must find."""
    right, wrong = MISTAKES[system]
    text = path.read_text(encoding="utf-8")
    assert right in text, f"{path} has no {right}"
    mistaken = path.with_name(f"mistake-{system}-{path.name}")
    mistaken.write_text(text.replace(right, wrong), encoding="utf-8")
    return mistaken


def report(problems: list[str], system: str, path: Path, accepted: bool, planted: bool, answer: str) -> None:
    """Print what a parser says about a file; it is a problem unless exactly the planted mistakes are refused."""
    line = f"{system}: {path.name} {'accepted' if accepted else 'refused'}: {answer[:200]}"
    print(line, flush=True)
    if accepted == planted:
        problems.append(line)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check job files with the parsers of the tools that read them.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/job-tools"))
    parser.add_argument("--parse", nargs=2, metavar=("SYSTEM", "FILE"), help="parse one file in this environment")
    arguments = parser.parse_args()
    if arguments.parse:
        system, file = arguments.parse
        print(PARSERS[system](Path(file)))
        return
    problems = check_all(arguments.folder.resolve())
    for problem in problems:
        print(f"problem: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
