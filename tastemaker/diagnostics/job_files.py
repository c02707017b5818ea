"""Job files for Slurm, Kubernetes (Kubeflow's PyTorchJob) and SkyPilot, from a recipe and its plan."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from ..config.schema import AutoencoderRunConfig, RunConfig
from ..core.registry import ConfigError
from .gpu_presets import find_gpu
from .plan import ResourceEstimate

GIB = 2**30
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
CPUS_PER_GPU = 8
BASE_HOST_GIB, HOST_GIB_PER_GPU = 32, 16  # Python, PyTorch, data and text encoders; beside copies of the weights
HOST_ROUNDING = 16
MAX_RESTARTS = 3
STOP_SECONDS, SHUTDOWN_SECONDS = 300, 240  # before the time limit; for a step and a checkpoint after the signal
PORT = 29500
BUCKET_MOUNT = "/runs"
SHUTDOWN_VARIABLE = "PET_SHUTDOWN_TIMEOUT"  # torchrun's option of that name; a torchrun without it ignores the variable
System = Literal["slurm", "k8s", "sky"]
# Names of SkyPilot's accelerators.
ACCELERATORS = {
    "a100-40g": "A100",
    "a100-80g": "A100-80GB",
    "a6000-48g": "RTXA6000",
    "b200-180g": "B200",
    "h100-80g": "H100",
    "h200-141g": "H200",
    "l4-24g": "L4",
    "l40s-48g": "L40S",
    "rtx3090-24g": "RTX3090",
    "rtx4090-24g": "RTX4090",
    "rtx5090-32g": "RTX5090",
}


@dataclass(frozen=True)
class Job:
    """One training run on a cluster."""

    name: str  # letters, digits and hyphens
    settings: tuple[str, ...]  # the recipe and its overrides
    gpu: str  # a name of `tastemaker plan --gpu`
    nodes: int
    gpus_per_node: int
    memory_gib: int  # host memory of a node
    hours: int
    image: str = ""  # container image, of Kubernetes
    bucket: str = ""  # object storage that keeps the runs, of SkyPilot

    @property
    def train_command(self) -> str:
        return f"-m tastemaker train {shlex.join(self.settings)}"


def job_name(name: str) -> str:
    """A name that Kubernetes takes: lower case letters, digits and hyphens, at most 50."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].rstrip("-") or "tastemaker"


def choose_size(
    config: RunConfig | AutoencoderRunConfig,
    gpu: str,
    estimate: Callable[[int], ResourceEstimate],
    gpus_per_node: int,
    gpus: int | None,
) -> tuple[int, int, ResourceEstimate]:
    """Nodes, GPUs of a node, and the plan: the fewest GPUs that hold the run, or as many as were asked for."""
    limit = find_gpu(gpu).gib
    counts = [gpus] if gpus else [n for n in GPU_COUNTS if n == 1 or config.engine.strategy != "replicated"]
    total = 0.0
    for count in counts:
        planned = estimate(count)
        total = planned.total / GIB
        if total <= limit:
            per_node = min(count, gpus_per_node)
            if count % per_node:
                raise ConfigError(
                    f"--gpus: expected a multiple of --gpus-per-node ({gpus_per_node}), got {count}; change one of "
                    "them [TM2580]"
                )
            return count // per_node, per_node, planned
    sharding = "" if config.engine.strategy != "replicated" else ", such as engine.strategy=fsdp"
    raise ConfigError(
        f"launch: the run needs {total:.0f} GiB on each of {counts[-1]} GPUs, and {gpu} has {limit:.0f}; run "
        f"`tastemaker plan` with --gpu {gpu} for settings that save memory{sharding} [TM2581]"
    )


def host_memory_gib(planned: ResourceEstimate, gpus_per_node: int) -> int:
    """Memory of a node: a copy of weights while each rank loads them, and whatever `engine.cpu_offload` keeps there."""
    per_rank = (planned.host_memory + planned.weights + planned.frozen) / GIB + HOST_GIB_PER_GPU
    return math.ceil((BASE_HOST_GIB + gpus_per_node * per_rank) / HOST_ROUNDING) * HOST_ROUNDING


def slurm_file(job: Job) -> str:
    """A batch script. Before the time limit it stops the run, which saves its step, and queues itself again."""
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": CPUS_PER_GPU * job.gpus_per_node,
        "mem": f"{job.memory_gib}G",
        "time": f"{job.hours}:00:00",
        "output": f"{job.name}-%j.log",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items()]
    return f"""#!/bin/bash
{chr(10).join(lines)}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{STOP_SECONDS}

# Stop the run: it finishes its step, writes a checkpoint and ends. The same command resumes it.
stop() {{
    kill -TERM "$run" 2>/dev/null
    wait "$run"
}}
# Before the time limit Slurm sends SIGUSR1 to this script only.
requeue() {{
    trap '' TERM
    stop
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}}
trap requeue USR1
trap 'stop; exit 130' TERM

export {SHUTDOWN_VARIABLE}={SHUTDOWN_SECONDS}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={job.gpus_per_node} --max-restarts={MAX_RESTARTS} \\
    --rdzv-backend=c10d --rdzv-endpoint="$first:{PORT}" --rdzv-id="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\
    {job.train_command} &
run=$!
wait "$run"
"""


def kubernetes_file(job: Job) -> str:
    """A PyTorchJob. Its operator tells torchrun by PET_ variables how the pods meet and how often they restart."""
    if not job.image:
        raise ConfigError("--k8s: pods need an image; give --image with one that has tastemaker installed [TM2582]")
    resources = {
        "nvidia.com/gpu": job.gpus_per_node,
        "cpu": CPUS_PER_GPU * job.gpus_per_node,
        "memory": f"{job.memory_gib}Gi",
    }
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": ["torchrun", *shlex.split(job.train_command)],
        "env": [{"name": SHUTDOWN_VARIABLE, "value": str(SHUTDOWN_SECONDS)}],
        "workingDir": "/work",
        "resources": {"limits": resources, "requests": dict(resources)},
        "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": job.name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return _render(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name},
            "spec": {
                "nprocPerNode": str(job.gpus_per_node),
                "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": MAX_RESTARTS},
                "elasticPolicy": {
                    "rdzvBackend": "c10d",
                    "minReplicas": job.nodes,
                    "maxReplicas": job.nodes,
                    "maxRestarts": MAX_RESTARTS,
                },
                "pytorchReplicaSpecs": {
                    "Worker": {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                },
            },
        }
    )


def sky_file(job: Job) -> str:
    """A task of SkyPilot, which copies this folder to the machines.

    A managed job resumes after a preemption if its runs are in a bucket: the disks are lost with the machines.
    """
    if job.bucket and not any(setting.startswith("output_dir=") for setting in job.settings):
        job = replace(job, settings=(*job.settings, f"output_dir={BUCKET_MOUNT}"))
    mounts = {BUCKET_MOUNT: {"name": job.bucket, "mode": "MOUNT"}}
    run = (
        f"export {SHUTDOWN_VARIABLE}={SHUTDOWN_SECONDS}\n"
        'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        'torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node="$SKYPILOT_NUM_GPUS_PER_NODE" \\\n'
        f'  --max-restarts={MAX_RESTARTS} --rdzv-backend=c10d --rdzv-endpoint="$first:{PORT}" '
        f"--rdzv-id={job.name} \\\n  {job.train_command}\n"
    )
    return _render(
        {
            "name": job.name,
            "workdir": ".",
            "num_nodes": job.nodes,
            "resources": {
                "accelerators": f"{ACCELERATORS[job.gpu]}:{job.gpus_per_node}",
                "memory": f"{job.memory_gib}+",
                "job_recovery": {"max_restarts_on_errors": MAX_RESTARTS},
            },
            **({"file_mounts": mounts} if job.bucket else {}),
            "setup": "pip install tastemaker\n",
            "run": run,
        }
    )


WRITERS: Mapping[System, Callable[[Job], str]] = {"slurm": slurm_file, "k8s": kubernetes_file, "sky": sky_file}
# What a file relies on, as comments at its top.
NEEDS: Mapping[System, tuple[str, ...]] = {
    "slurm": ("Submit it in the folder of your recipe, on a disk that all machines share.",),
    "k8s": ("The PersistentVolumeClaim of the job's name is mounted at /work: your recipe, data and runs are there.",),
    "sky": (),
}
BUCKET_NEEDS = (
    f"The runs are in the bucket, mounted at {BUCKET_MOUNT}, so a machine that replaces another resumes them."
)
NO_BUCKET_NEEDS = (
    "No bucket is mounted: after a preemption the run starts again from its first step. Write this file with --bucket "
    "NAME to keep the runs."
)
SUBMIT = {"slurm": "sbatch {}", "k8s": "kubectl apply -f {}", "sky": "sky jobs launch {}"}


def render_job(system: System, job: Job, notes: Sequence[str]) -> str:
    """The file for a system; at its top, as comments, are notes and what it relies on."""
    text = WRITERS[system](job)
    bucket = (BUCKET_NEEDS if job.bucket else NO_BUCKET_NEEDS,) if system == "sky" else ()
    comments = "".join(f"# {note}\n" for note in (*notes, *NEEDS[system], *bucket))
    if text.startswith("#!"):
        shebang, _, rest = text.partition("\n")
        directives, _, body = rest.partition("\n\n")
        return f"{shebang}\n{directives}\n\n{comments}\n{body}"
    return comments + text


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)


def _render(data: Mapping[str, Any]) -> str:
    return yaml.dump(data, Dumper=_BlockDumper, sort_keys=False, width=1000)
