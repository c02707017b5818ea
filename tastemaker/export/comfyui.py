"""ComfyUI workflows that use exported files, in the format of its interface and API."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WorkflowNodes = dict[str, dict[str, Any]]
EXAMPLE_PROMPT = "a photo of a lighthouse at dusk"


@dataclass(frozen=True)
class ComfyWorkflowSettings:
    """Sampling settings of a workflow and the file it loads."""

    file: str
    is_lora: bool  # the file holds adapters for the base model
    num_steps: int
    shift: float
    height: int
    width: int
    guidance_scale: float


def workflow_node(class_type: str, title: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": dict(inputs), "_meta": {"title": title}}


def flux_workflow(settings: ComfyWorkflowSettings) -> WorkflowNodes:
    """Return the nodes of a FLUX workflow by name. An input from another node is [name, index of the output]."""
    size = {"width": settings.width, "height": settings.height}
    # Equal shifts hold for every image size; the node takes their logarithms.
    shifts = dict.fromkeys(("max_shift", "base_shift"), round(math.log(settings.shift), 6))
    network_file = "flux1-dev.safetensors" if settings.is_lora else settings.file
    nodes = {
        "network": workflow_node(
            "UNETLoader", "from models/diffusion_models", {"unet_name": network_file, "weight_dtype": "default"}
        ),
        "encoders": workflow_node(
            "DualCLIPLoader",
            "from models/text_encoders",
            {"clip_name1": "t5xxl_fp16.safetensors", "clip_name2": "clip_l.safetensors", "type": "flux"},
        ),
        "autoencoder": workflow_node("VAELoader", "from models/vae", {"vae_name": "ae.safetensors"}),
        "prompt": workflow_node("CLIPTextEncode", "prompt", {"text": EXAMPLE_PROMPT, "clip": ["encoders", 0]}),
        "negative": workflow_node("CLIPTextEncode", "unused at cfg 1", {"text": "", "clip": ["encoders", 0]}),
        "guidance": workflow_node(
            "FluxGuidance", "guidance", {"guidance": settings.guidance_scale, "conditioning": ["prompt", 0]}
        ),
        "size": workflow_node("EmptySD3LatentImage", "size", {**size, "batch_size": 1}),
        "shift": workflow_node(
            "ModelSamplingFlux",
            "timestep shift",
            {**shifts, **size, "model": ["lora" if settings.is_lora else "network", 0]},
        ),
        "sampler": workflow_node(
            "KSampler",
            "sampler",
            {
                "seed": 0,
                "steps": settings.num_steps,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
                "model": ["shift", 0],
                "positive": ["guidance", 0],
                "negative": ["negative", 0],
                "latent_image": ["size", 0],
            },
        ),
        "image": workflow_node("VAEDecode", "image", {"samples": ["sampler", 0], "vae": ["autoencoder", 0]}),
        "file": workflow_node("SaveImage", "file", {"filename_prefix": "tastemaker", "images": ["image", 0]}),
    }
    if settings.is_lora:
        lora = {"lora_name": settings.file, "strength_model": 1.0, "model": ["network", 0]}
        nodes["lora"] = workflow_node("LoraLoaderModelOnly", "from models/loras", lora)
    return nodes


WORKFLOWS: Mapping[str, Callable[[ComfyWorkflowSettings], WorkflowNodes]] = {"flux": flux_workflow}
