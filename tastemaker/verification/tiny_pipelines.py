"""Small random pipelines of diffusers, built from a pipeline's signature, and tokenizers that need no download."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.registry import ConfigError
from ..models.pretrained import silence_libraries
from ..rewards.backbones.tokenizers import tiny_clip_tokenizer

# Of `byte_clip_tokenizer`.
CLIP_TOKENS = {
    "vocab_size": 514,
    "bos_token_id": 512,
    "eos_token_id": 513,
    "pad_token_id": 513,
}
T5_VOCAB_SIZE = 128  # of `byte_t5_tokenizer`, rounded up
PERTURBATION = 0.05  # standard deviation of the noise on weights: a new transformer ignores its prompt


def byte_clip_tokenizer() -> Any:
    """A CLIP tokenizer whose vocabulary is single bytes."""
    tokenizer = tiny_clip_tokenizer()
    tokenizer.model_max_length = 77
    return tokenizer


def byte_t5_tokenizer() -> Any:
    """A T5 tokenizer whose vocabulary is single characters."""
    import transformers

    characters = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    tokenizer_class: Any = transformers.T5Tokenizer
    vocab = [(character, -1.0 - 0.01 * index) for index, character in enumerate(characters)]
    return tokenizer_class(vocab=vocab, extra_ids=0)


def letter_t5_tokenizer() -> Any:
    """A T5 tokenizer of lower-case letters, whose 30 tokens fit into any vocabulary."""
    from transformers import T5Tokenizer

    tokenizer_class: Any = T5Tokenizer
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\N{LOWER ONE EIGHTH BLOCK}", -2.0)]
    return tokenizer_class(vocab=[*pieces, *((chr(97 + i), -3.0) for i in range(26))], extra_ids=0)


def byte_qwen_tokenizer() -> Any:
    """A Qwen2 tokenizer whose vocabulary is single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokenizer_class: Any = Qwen2Tokenizer
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return tokenizer_class(vocab=letters, merges=[])


CHAT_TEMPLATE = (  # with `content` as text, or as a list of parts
    "{% for message in messages %}<{{ message.role }}>"
    "{{ message.content if message.content is string else message.content[0].text }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{{ '-' if enable_thinking is defined and not enable_thinking }}{% endif %}"
)


def byte_chat_tokenizer() -> Any:
    """`byte_qwen_tokenizer` with a short chat template."""
    tokenizer = byte_qwen_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# By the class that a pipeline's signature names; the others get letters.
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "CLIPTokenizer": byte_clip_tokenizer,
    "CLIPTokenizerFast": byte_clip_tokenizer,
    "Qwen2Tokenizer": byte_qwen_tokenizer,
    "Qwen2TokenizerFast": byte_qwen_tokenizer,
}


def random_network(network_class: Any, config: Any, seed: int = 0) -> Any:
    """A network with noise added to every parameter, including those initialized to zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = network_class(**config) if isinstance(config, dict) else network_class(config)
        for weights in net.parameters():
            weights.add_(PERTURBATION * torch.randn_like(weights))
    return net.eval()


def build_tiny_pipeline(
    pipeline_class: Any,
    configs: Mapping[str, Mapping[str, Any]],
    scheduler: Mapping[str, Any],
    settings: Mapping[str, Any],
    components: Mapping[str, Callable[[], Any]],
    classes: Mapping[str, str],
) -> Any:
    """A pipeline of random networks with these configurations; their classes are those of the pipeline's signature.

    `scheduler` is the content of scheduler_config.json with its class under `_class_name`, `settings` are arguments of
    the pipeline that are no components, `components` make what cannot be derived, and `classes` of transformers are for
    components of which the signature names a base class only.
    """
    import diffusers
    import transformers

    types, parameters = pipeline_class._get_signature_types(), inspect.signature(pipeline_class.__init__).parameters
    parts: dict[str, Any] = {name: make() for name, make in components.items()} | dict(settings)
    with silence_libraries():
        derived = {name: choices[0] for name, choices in types.items() if name not in parts}
        remaining = derived | {name: getattr(transformers, classes[name]) for name in derived if name in classes}
        for name, component_class in remaining.items():
            if name == "scheduler":
                options = dict(scheduler)
                parts[name] = getattr(diffusers, options.pop("_class_name"))(**options)
            elif name.startswith("tokenizer"):
                parts[name] = TOKENIZERS.get(component_class.__name__, letter_t5_tokenizer)()
            elif name not in configs:
                parts[name] = _default_component(pipeline_class, name, parameters[name].default)
        for seed, (name, network_class) in enumerate(remaining.items()):
            if name in configs:
                tokenizer = parts.get(name.replace("text_encoder", "tokenizer"))
                parts[name] = _tiny_network(network_class, configs[name], tokenizer, seed)
        pipeline = pipeline_class(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _default_component(pipeline_class: Any, name: str, default: Any) -> Any:
    """The default of an argument, or nothing for a component that the pipeline can do without."""
    if default is not inspect.Parameter.empty:
        return default
    if name in pipeline_class._optional_components:
        return None
    raise ConfigError(
        f"verify: {pipeline_class.__name__} needs '{name}', for which the model has no tiny configuration; add it to "
        "TINY_CONFIGS, or to the model's entry in tastemaker/verification/references.py [TM2252]"
    )


def _tiny_network(network_class: Any, config: Mapping[str, Any], tokenizer: Any, seed: int) -> Any:
    """A random network of diffusers or transformers; a text encoder's vocabulary is enlarged to its tokenizer's."""
    if network_class.__module__.startswith("diffusers."):
        return random_network(network_class, dict(config), seed)
    settings, text = dict(config), config.get("text_config")
    if tokenizer is not None:
        fitted = _fit_vocabulary(dict(settings if text is None else text), tokenizer)
        settings = fitted if text is None else {**settings, "text_config": fitted}
    return random_network(network_class, network_class.config_class(**settings), seed)


def _fit_vocabulary(config: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The settings with the tokenizer's vocabulary and special tokens, if it has more tokens than the network."""
    if len(tokenizer) <= config.get("vocab_size", 0):
        return config
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {
        **config,
        "vocab_size": len(tokenizer),
        **{name: number for name, number in ids.items() if number is not None},
    }
