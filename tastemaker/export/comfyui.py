"""Workflows for ComfyUI that use exported files, in the form its interface opens and its API takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WorkflowNodes = dict[str, dict[str, Any]]
EXAMPLE_PROMPT = "a photo of a lighthouse at dusk"


@dataclass(frozen=True)
class ComfyWorkflowSettings:
    """What a workflow is to make, and with what."""

    file: str
    adapters: bool  # the file holds adapters, for the base model
    steps: int
    shift: float
    height: int
    width: int
    guidance: float


def workflow_node(kind: str, title: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_type": kind, "inputs": dict(inputs), "_meta": {"title": title}}


def flux_workflow(job: ComfyWorkflowSettings) -> WorkflowNodes:
    """Nodes by name; an input that comes from another node is that node's name and the place of its output."""
    encoders = {"clip_name1": "t5xxl_fp16.safetensors", "clip_name2": "clip_l.safetensors", "type": "flux"}
    size = {"width": job.width, "height": job.height}
    base = {"unet_name": "flux1-dev.safetensors" if job.adapters else job.file, "weight_dtype": "default"}
    adapters = {"lora_name": job.file, "strength_model": 1.0, "model": ["network", 0]}
    # Both shifts alike hold for every size, and the node takes their logarithms.
    levels = dict.fromkeys(("max_shift", "base_shift"), round(math.log(job.shift), 6))
    sampling = {
        "seed": 0,
        "steps": job.steps,
        "cfg": 1.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
    }
    wires = {
        "model": ["levels", 0],
        "positive": ["guidance", 0],
        "negative": ["nothing", 0],
        "latent_image": ["size", 0],
    }
    return {
        "network": workflow_node("UNETLoader", "from models/diffusion_models", base),
        **({"adapters": workflow_node("LoraLoaderModelOnly", "from models/loras", adapters)} if job.adapters else {}),
        "encoders": workflow_node("DualCLIPLoader", "from models/text_encoders", encoders),
        "autoencoder": workflow_node("VAELoader", "from models/vae", {"vae_name": "ae.safetensors"}),
        "prompt": workflow_node("CLIPTextEncode", "prompt", {"text": EXAMPLE_PROMPT, "clip": ["encoders", 0]}),
        "nothing": workflow_node("CLIPTextEncode", "not used, for cfg is 1", {"text": "", "clip": ["encoders", 0]}),
        "guidance": workflow_node(
            "FluxGuidance", "guidance", {"guidance": job.guidance, "conditioning": ["prompt", 0]}
        ),
        "size": workflow_node("EmptySD3LatentImage", "size", {**size, "batch_size": 1}),
        "levels": workflow_node(
            "ModelSamplingFlux", "levels", {**levels, **size, "model": ["adapters" if job.adapters else "network", 0]}
        ),
        "sampler": workflow_node("KSampler", "sampler", {**sampling, **wires}),
        "picture": workflow_node("VAEDecode", "picture", {"samples": ["sampler", 0], "vae": ["autoencoder", 0]}),
        "file": workflow_node("SaveImage", "file", {"filename_prefix": "tastemaker", "images": ["picture", 0]}),
    }


WORKFLOWS: Mapping[str, Callable[[ComfyWorkflowSettings], WorkflowNodes]] = {"flux": flux_workflow}
