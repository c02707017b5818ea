"""A first version of a new model, written from what the code of a diffusers pipeline says about it.

Classes, sizes and the call of the network are read from signatures and from the source of the pipeline. What cannot be
read is marked TODO in the files, and the parity test fails until it is filled in.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

from ..core.registry import ConfigError, suggest_name
from .component_configs import TINY_VAE
from .skeleton_templates import MODEL, RECIPE, TEST

LATENTS, TIMES = ("hidden_states", "x", "sample"), ("timestep", "t", "timesteps")
TEXTS = ("encoder_hidden_states", "cap_feats", "prompt_embeds", "text_embeds")
TEXT_WIDTHS = ("joint_attention_dim", "cap_feat_dim", "caption_channels", "cross_attention_dim", "text_dim")
IGNORED = ("return_dict", "joint_attention_kwargs", "attention_kwargs", "cross_attention_kwargs")
TINY_WIDTH, TINY_HEAD = 32, 16


@dataclass(frozen=True)
class PipelineFacts:
    """What the code of a pipeline says about its network and how it is called."""

    pipeline: str
    component: str  # that trains
    network: Any  # class of diffusers
    vae: Any
    text_width: str  # name of the network's setting that is the width of prompt embeddings, or ''
    arguments: Mapping[str, str]  # of the network, as Python code
    missing: tuple[str, ...]  # arguments that the pipeline passes, but nothing is known about
    output: str  # how the velocity follows from `output`
    unguided_scale: float
    embeds_are_lists: bool


def read_pipeline(source: str) -> PipelineFacts:
    """Read the facts about a pipeline, named as diffusers:ZImagePipeline."""
    library, _, name = source.partition(":")
    if library != "diffusers" or not name:
        raise ConfigError(
            f"--from: expected diffusers:PIPELINE, such as diffusers:ZImagePipeline, got {source!r:.80} [TM2410]"
        )
    import diffusers

    known = [each for each in dir(diffusers) if each.endswith("Pipeline")]
    if name not in known:
        raise ConfigError(f"--from: diffusers has no '{name:.80}'{suggest_name(name, known)} [TM2411]")
    pipeline: Any = getattr(diffusers, name)
    hints = inspect.get_annotations(pipeline.__init__, eval_str=True)
    component = next((each for each in ("transformer", "unet") if each in hints), "")
    if not component or "vae" not in hints:
        raise ConfigError(
            f"--from: {name} has no transformer or unet with a vae (it has {', '.join(hints)}); start from "
            "the example in docs/add-a-model.md [TM2412]"
        )
    network, code = hints[component], textwrap.dedent(inspect.getsource(pipeline.__call__))
    code += "# calls _pack_latents" if "_pack_latents" in dir(pipeline) else ""
    arguments, missing = call_arguments(network, code, component)
    settings = inspect.signature(network.__init__).parameters
    guided = vars(pipeline).get("do_classifier_free_guidance")
    guided_code = inspect.getsource(guided.fget) if guided else ""
    embeds = inspect.signature(pipeline.__call__).parameters.get("prompt_embeds")
    return PipelineFacts(
        name,
        component,
        network,
        hints["vae"],
        next((each for each in TEXT_WIDTHS if each in settings), ""),
        arguments,
        missing,
        output_code(code, str(inspect.signature(network.forward).parameters[next(iter(arguments))].annotation)),
        0.0 if "_guidance_scale > 0" in guided_code else 1.0,
        "list" in str(embeds.annotation if embeds else ""),
    )


def call_arguments(network: Any, code: str, component: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the arguments of the network that are known, as code, and the names of those that the pipeline adds."""
    parameters = inspect.signature(network.forward).parameters
    names = [each for each in parameters if each != "self"]
    passed = passed_names(code, component, names)
    arguments: dict[str, str] = {}
    for name in names:
        if name in LATENTS and not any(each in arguments for each in LATENTS):
            arguments[name] = latents_code(code, str(parameters[name].annotation))
        elif name in TIMES:
            arguments[name] = time_code(code)
        elif name in TEXTS:
            is_list = "list" in str(parameters[name].annotation)
            text = 'cond.tensors["prompt_embeds"].to(dtype)'
            arguments[name] = f"list({text})" if is_list else text
    missing = [each for each in passed if each not in arguments and each not in IGNORED]
    return arguments, tuple(missing)


def passed_names(code: str, component: str, names: list[str]) -> list[str]:
    """Return the arguments that the pipeline gives to its network, by the source of its `__call__`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{component}":
            return [*names[: len(node.args)], *(each.arg for each in node.keywords if each.arg)]
    return []


def time_code(code: str) -> str:
    """Return the network's time as a function of t, which is 1 for noise."""
    if re.search(r"\(1000 - \w+\) / 1000", code):
        return "1 - t"
    return "t" if re.search(r"\b(timestep|t)\w* / 1000", code) else "1000 * t"


def latents_code(code: str, annotation: str) -> str:
    if "_pack_latents" in code:
        return "pack_latents(x[:, 0]).to(dtype)"
    frames = "x.transpose(1, 2)" if "unsqueeze(2)" in code else "x[:, 0]"
    return f"list({frames}.to(dtype).unbind())" if "list" in annotation else f"{frames}.to(dtype)"


def output_code(code: str, annotation: str) -> str:
    """Return the code from `output`, the network's first result, to the velocity [B, 1, C, h, w]."""
    sign = "-" if re.search(r"\b(\w+) = -\1\b", code) else ""
    if "_pack_latents" in code:
        return f"{sign}unpack_latents(output, *x.shape[3:])[:, None]"
    output = "torch.stack(output)" if "list" in annotation else "output"
    return f"{sign}{output}.transpose(1, 2)" if "unsqueeze(2)" in code else f"{sign}{output}[:, None]"


def published_settings(network: Any) -> dict[str, Any]:
    """Return the defaults of a network's constructor, which are often those of the published one."""
    parameters = inspect.signature(network.__init__).parameters
    return {
        key: p.default for key, p in parameters.items() if key != "self" and p.default is not inspect.Parameter.empty
    }


def tiny_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that make a network small: few layers, two heads, narrow everything else."""
    tiny: dict[str, Any] = {}
    for key, value in settings.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if re.search("layers|depth", key) and is_number:
            tiny[key] = 1
        elif "heads" in key and is_number:
            tiny[key] = 2
        elif re.search("head_dim", key):
            tiny[key] = TINY_HEAD
        elif re.search("dim|hidden", key) and is_number and value > TINY_WIDTH:
            tiny[key] = TINY_WIDTH
        elif key.startswith("axes_dim") and isinstance(value, list | tuple):
            even = [2 * (TINY_HEAD * each // sum(value) // 2) for each in value]
            tiny[key] = (TINY_HEAD - sum(even[1:]), *even[1:])
    return tiny


def tiny_autoencoder(vae: Any) -> dict[str, Any]:
    """Return small settings of an autoencoder: those of AutoencoderKL that it has."""
    known = {**TINY_VAE, "scaling_factor": 0.5, "shift_factor": 0.1}
    return {key: value for key, value in known.items() if key in inspect.signature(vae.__init__).parameters}


def skeleton_files(name: str, facts: PipelineFacts) -> dict[str, str]:
    """Return the texts of the model, its recipe and its parity test by file name."""
    settings = published_settings(facts.network)
    class_name = "".join(part.capitalize() for part in name.split("_"))
    call = [f"{key}={value}," for key, value in facts.arguments.items()]
    call += [f"# TODO: the pipeline also passes {key}; see its __call__." for key in facts.missing]
    width = facts.text_width or "TODO_text_width"
    packs = "pack_latents" in facts.output
    values = {
        "name": name,
        "class_name": class_name,
        "pipeline": facts.pipeline,
        "component": facts.component,
        "network": facts.network.__name__,
        "vae": facts.vae.__name__,
        "settings": format_settings({key: value for key, value in settings.items() if value is not None}),
        "vae_options": "" if facts.vae._supports_gradient_checkpointing else ", gradient_checkpointing=False",
        "tiny_vae": format_settings(tiny_autoencoder(facts.vae)),
        "tiny": format_settings(tiny_settings(settings)),
        "call": textwrap.indent("\n".join(call), " " * 12),
        "output": facts.output,
        "imports": "from tastemaker.models.latent_packing import pack_latents, unpack_latents\n" if packs else "",
        "uses_torch": "import torch\n" if "torch." in facts.output else "",
        "text_width": width,
        "unguided_scale": str(facts.unguided_scale),
        "embeds": "list(embeds)" if facts.embeds_are_lists else "embeds",
        "start": "pack_latents(noise[:, 0])" if packs else "noise[:, 0]",
        "final": "pack_latents(sampled[:, 0])" if packs else "sampled[:, 0]",
    }
    texts = {f"{name}.py": MODEL, f"{name}.yaml": RECIPE, f"test_{name}.py": TEST}
    return {file: template.substitute(values) for file, template in texts.items()}


def format_settings(settings: Mapping[str, Any]) -> str:
    return textwrap.indent(pformat(dict(settings), width=100, sort_dicts=False), "     ").strip()


def write_skeleton(name: str, source: str, out: Path, *, force: bool) -> list[Path]:
    """Write the three files into a folder and return their paths."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"new model: '{name:.60}' is not a module name; use lower case, digits and _ [TM2413]")
    files = {out / file: text for file, text in skeleton_files(name, read_pipeline(source)).items()}
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        raise ConfigError(f"--out: {', '.join(existing)} exists already; give another --out, or add --force [TM2414]")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)
