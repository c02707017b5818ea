"""`tastemaker launch`: job files that bash and the published schemas accept, sized by the plan."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_runner import run_cli
from jsonschema import Draft202012Validator

from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.diagnostics.gpu_presets import GPU_PRESETS
from tastemaker.diagnostics.job_files import ACCELERATORS, GIB, Job, choose_size, host_memory_gib, job_name, render_job
from tastemaker.diagnostics.plan import ResourceEstimate

JOB = Job("flow", ("flowgrpo-sd35", "name=it's mine", "steps=3"), "h100-80g", 2, 8, 320, 24, "me/tastemaker:1")
NOTES = ["Written for a test."]


def strict(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """A schema of an object that has these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


COUNT, TEXT = {"type": "integer", "minimum": 1}, {"type": "string", "minLength": 1}
REPLICA = strict(
    {"replicas": COUNT, "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, "template": {}},
    ("replicas", "restartPolicy", "template"),
)
# The fields of Kubeflow's custom resource that the training operator publishes (kubeflow.org/v1).
PYTORCH_JOB = strict(
    {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": strict({"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}}),
        "spec": strict(
            {
                "nprocPerNode": TEXT,
                "runPolicy": strict(
                    {
                        "activeDeadlineSeconds": COUNT,
                        "backoffLimit": COUNT,
                        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
                        "managedBy": TEXT,
                        "schedulingPolicy": {},
                        "suspend": {"type": "boolean"},
                        "ttlSecondsAfterFinished": COUNT,
                    }
                ),
                "elasticPolicy": strict(
                    {
                        **dict.fromkeys(
                            ("maxReplicas", "maxRestarts", "minReplicas", "nProcPerNode", "rdzvPort"), COUNT
                        ),
                        **dict.fromkeys(("rdzvHost", "rdzvId"), TEXT),
                        "metrics": {},
                        "rdzvBackend": {"enum": ["c10d", "etcd", "etcd-v2"]},
                        "rdzvConf": {},
                        "standalone": {"type": "boolean"},
                    }
                ),
                "pytorchReplicaSpecs": strict({"Master": REPLICA, "Worker": REPLICA}),
            },
            ("pytorchReplicaSpecs",),
        ),
    },
    ("apiVersion", "kind", "metadata", "spec"),
)
# The fields of SkyPilot's tasks that are used here.
SKY_TASK = strict(
    {
        "name": TEXT,
        "workdir": TEXT,
        "num_nodes": COUNT,
        "setup": TEXT,
        "run": TEXT,
        "file_mounts": {"type": "object"},
        "resources": strict(
            {
                "accelerators": {"type": "string", "pattern": r"^[A-Z0-9-]+:\d+$"},
                "memory": {"type": "string", "pattern": r"^\d+\+?$"},
                "job_recovery": strict({"strategy": TEXT, "max_restarts_on_errors": COUNT}),
            }
        ),
    },
    ("resources", "run"),
)


def check_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_slurm_script_is_valid_and_complete() -> None:
    script = render_job("slurm", JOB, NOTES)
    check_bash(script)
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(directives)] == directives  # Slurm reads none after the first command
    for option in ("nodes=2", "gpus-per-node=8", "mem=320G", "time=24:00:00", "requeue", "signal=B:USR1@300"):
        assert f"#SBATCH --{option}" in directives
    assert "--nproc-per-node=8 --max-restarts=3" in script and "--rdzv-backend=c10d" in script
    assert "train flowgrpo-sd35 'name=it'\"'\"'s mine' steps=3" in script


def test_slurm_script_requeues_itself_before_its_time_limit(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: the run gets SIGTERM and ends before the job is queued again."""
    log = tmp_path / "log"
    commands = {
        "scontrol": f'[ "$1" = show ] && echo first || echo "scontrol $*" >> {log}',
        "srun": f"trap 'echo stopped >> {log}; exit 130' TERM\necho started >> {log}\nwhile :; do sleep 0.05; done",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(render_job("slurm", JOB, NOTES))
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first", "SLURM_NNODES": "2"}
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", str(tmp_path / "job.sh")], env=environment)
    deadline = time.monotonic() + 120
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(10)  # SIGUSR1
    assert process.wait(timeout=120) == 0
    assert log.read_text().splitlines() == ["started", "stopped", "scontrol requeue 7"]


def test_kubernetes_file_has_the_fields_of_the_published_resource() -> None:
    data = yaml.safe_load(render_job("k8s", JOB, NOTES))
    assert [error.message for error in Draft202012Validator(PYTORCH_JOB).iter_errors(data)] == []
    worker = data["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert (worker["replicas"], container["name"], container["image"]) == (2, "pytorch", "me/tastemaker:1")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": 64, "memory": "320Gi"}
    assert container["command"][-3:] == ["flowgrpo-sd35", "name=it's mine", "steps=3"]
    with pytest.raises(ConfigError, match=r"--image.*TM2582"):
        render_job("k8s", Job("a", ("b",), "h100-80g", 1, 1, 64, 1), ())


def test_sky_task_has_known_fields_and_a_valid_script() -> None:
    data = yaml.safe_load(render_job("sky", JOB, NOTES))
    assert [error.message for error in Draft202012Validator(SKY_TASK).iter_errors(data)] == []
    check_bash(data["run"])
    assert data["resources"]["accelerators"] == "H100:8" and data["num_nodes"] == 2
    assert ACCELERATORS.keys() == GPU_PRESETS.keys()


def test_sky_task_says_whether_a_preempted_run_is_kept() -> None:
    assert "starts again from its first step" in render_job("sky", JOB, NOTES)
    text = render_job("sky", replace(JOB, bucket="my-runs"), NOTES)
    data = yaml.safe_load(text)
    assert data["file_mounts"] == {"/runs": {"name": "my-runs", "mode": "MOUNT"}}
    assert "steps=3 output_dir=/runs\n" in data["run"] and "first step" not in text
    chosen = replace(JOB, bucket="my-runs", settings=("flowgrpo-sd35", "output_dir=/runs/mine"))
    assert "train flowgrpo-sd35 output_dir=/runs/mine\n" in yaml.safe_load(render_job("sky", chosen, NOTES))["run"]


def planned(gib: float) -> ResourceEstimate:
    return ResourceEstimate(gib * GIB / 2, gib * GIB / 2, 0, 0, 0, 0, 0, 0, 1.0, 1.0)


def test_the_fewest_gpus_that_hold_the_run_are_chosen() -> None:
    sharded = load("grpo-toy-flow", ["engine.strategy=fsdp"])
    nodes, per_node, resources = choose_size(sharded, "h100-80g", lambda count: planned(1000 / count), 8, None)
    assert (nodes, per_node) == (2, 8) and host_memory_gib(resources, per_node) == 416
    assert choose_size(sharded, "h100-80g", lambda count: planned(10), 8, 4)[:2] == (1, 4)
    with pytest.raises(ConfigError, match=r"multiple of --gpus-per-node \(8\), got 12.*TM2580"):
        choose_size(sharded, "h100-80g", lambda count: planned(10), 8, 12)
    with pytest.raises(ConfigError, match=r"needs 90 GiB on each of 1 GPUs.*fsdp.*TM2581"):
        choose_size(load("grpo-toy-flow"), "h100-80g", lambda count: planned(90), 8, None)
    assert job_name("SD 3.5: Flow_GRPO") == "sd-3-5-flow-grpo"


def test_one_system_is_chosen(capsys: Any) -> None:
    assert run_cli("launch", "grpo-toy-flow", "--slurm", "--sky") == 2
    assert "TM2583" in capsys.readouterr().err


@pytest.mark.slow
def test_launch_plans_the_recipe_and_writes_a_file(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "job.sh"
    settings = ["model.variant=tiny", "model.codebook_size=64", "model.autoencoder=null", "rewards={}"]
    assert run_cli("launch", "grpo-llamagen", *settings, "--slurm", "--gpu", "l4-24g", "--out", str(out)) == 0
    assert f"sbatch {out}" in capsys.readouterr().err
    script = out.read_text()
    assert re.search(r"train grpo-llamagen model.variant=tiny .* &$", script, re.MULTILINE)
    assert "#SBATCH --gpus-per-node=1" in script and "1 x l4-24g" in script
