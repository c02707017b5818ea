"""Qwen2-VL and Qwen2.5-VL as the body of reward models: pixels with gradient, hidden states at reward tokens.

HPSv3, VideoReward and EditReward were trained with plain positions (each token's index on all three rotary axes), not
with M-RoPE, because their code hands embeddings without token ids to the language model. So it is done here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.safe_files import read_json_object
from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights
from .frozen_models import load_network, random_network, read_config, silence_transformers
from .preprocessing import CLIP_MEAN, CLIP_STD
from .tokenizers import load_tokenizer

PATCH, MERGE, TEMPORAL = 14, 2, 2  # pixels of a patch, patches of a token per side, frames of a patch
FACTOR = PATCH * MERGE
MAX_ASPECT_RATIO = 200
MODEL_CLASSES = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}
SYSTEM_TURN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
# Names of transformers before 4.52, and of today, to those of the network without its language-model head.
KEYS = ((r"^(model\.)?visual\.", "visual."), (r"^model\.(language_model\.)?", "language_model."))
UNUSED_KEYS = ("lm_head.",)
TEMPLATES = Path(__file__).with_name("qwen2_vl_templates.json")


def smart_resize(height: int, width: int, min_pixels: int, max_pixels: int, factor: int = FACTOR) -> tuple[int, int]:
    """Height and width in multiples of `factor` with about the same aspect ratio and a number of pixels in the limits.

    Results lie on edges (768x768 becomes 420x420), so the order of the operations in double precision matters.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(
            f"the sample has {height}x{width} pixels; the longer side may be at most {MAX_ASPECT_RATIO} times the "
            "shorter one, so sample another size [TM2100]"
        )
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        rows, columns = (math.floor(side / scale / factor) * factor for side in (height, width))
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    # Very long images of the published limits would have no rows of patches left.
    return max(factor, rows), max(factor, columns)


@dataclass(frozen=True)
class QwenPreprocessing:
    """Resize frames, normalize them and cut them into patches; differentiable."""

    min_pixels: int
    max_pixels: int
    round_to_bytes: bool = (
        False  # as the published code, which reads 8-bit images; the gradient passes straight through
    )

    def __call__(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches [N, 1176] of a clip [T, 3, H, W] in [0, 1], and its grid (time, rows, columns); stills double."""
        size = smart_resize(frames.shape[-2], frames.shape[-1], self.min_pixels, self.max_pixels)
        if self.round_to_bytes:
            frames = round_to_bytes(frames)
        if size != tuple(frames.shape[-2:]):
            frames = F.interpolate(frames, size, mode="bicubic", antialias=True).clamp(0, 1)
        if self.round_to_bytes:
            frames = round_to_bytes(frames)
        if len(frames) % TEMPORAL:
            frames = torch.cat([frames, frames[-1:]])
        mean, std = (frames.new_tensor(x)[:, None, None] for x in (CLIP_MEAN, CLIP_STD))
        return cut_patches((frames - mean) / std)


def round_to_bytes(pixels: Tensor) -> Tensor:
    """Pixels rounded to multiples of 1/255; the gradient is that of the identity."""
    rounded = (pixels.detach() * 255).round() / 255
    return pixels + (rounded - pixels.detach())


def cut_patches(frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches [N, 1176] of frames [T, 3, H, W] with even T, in the order of Qwen2-VL's processor, and their grid."""
    grid = (len(frames) // TEMPORAL, frames.shape[-2] // PATCH, frames.shape[-1] // PATCH)
    steps, rows, columns = grid
    x = frames.reshape(steps, TEMPORAL, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1), grid


@dataclass(frozen=True)
class RewardRequest:
    """What one forward pass reads of a sample: its images or one clip, and the text after them."""

    clips: tuple[Tensor, ...]  # each [T, 3, H, W] in [0, 1]
    text: str  # holds the reward tokens


class QwenRewardBackbone:
    """A frozen Qwen2-VL or Qwen2.5-VL without its language-model head, with the tokenizer of a reward model."""

    def __init__(self, net: Any, tokenizer: Any, reward_tokens: Sequence[str], media: str = "image") -> None:
        self.net, self.tokenizer = net, tokenizer
        self.width = int(net.config.text_config.hidden_size)
        self.reward_ids: list[int] = tokenizer.convert_tokens_to_ids(list(reward_tokens))
        self.media_id = int(net.config.image_token_id if media == "image" else net.config.video_token_id)
        self.special_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]

    def fill_template(self, template: str, prompt: str) -> str:
        """A template with its prompt, without special tokens in the prompt: they could pass for an image or a score."""
        before = None
        while before != prompt:  # what remains may be a token again
            before = prompt
            for token in self.special_tokens:
                prompt = prompt.replace(token, "")
        return template.replace("{prompt}", prompt)

    def hidden_states(self, requests: Sequence[RewardRequest], preprocessing: QwenPreprocessing) -> Tensor:
        """Hidden states after the final norm at the reward tokens, in their order: [B, tokens, C]."""
        device = self.net.device
        prepared = [[preprocessing(clip.to(device)) for clip in request.clips] for request in requests]
        grids = [grid for clips in prepared for _, grid in clips]
        patches = torch.cat([each for clips in prepared for each, _ in clips]).to(self.net.dtype)
        features = self.net.visual(patches, grid_thw=torch.tensor(grids, device=device)).pooler_output
        rows = [
            self._encode(request.text, [math.prod(grid) // MERGE**2 for _, grid in clips])
            for request, clips in zip(requests, prepared, strict=True)
        ]
        length = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
        embeddings = self.net.get_input_embeddings()(ids)
        embeddings = embeddings.masked_scatter((ids == self.media_id)[..., None], features.to(embeddings.dtype))
        positions = (mask.cumsum(-1) - 1).clamp(min=0).expand(3, -1, -1)
        output = self.net.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False
        )
        places = torch.tensor([[row.index(token) for token in self.reward_ids] for row in rows], device=device)
        hidden: Tensor = output.last_hidden_state
        return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))

    def _encode(self, text: str, counts: Sequence[int]) -> list[int]:
        """Token ids of one user turn: each clip as `count` tokens, then the text up to its last reward token."""
        ids = self._tokenize(f"{SYSTEM_TURN}<|im_start|>user\n")
        for count in counts:
            ids += [*self._tokenize(VISION_START), *[self.media_id] * count, *self._tokenize(VISION_END)]
        ids += self._tokenize(text)
        # Attention is causal, so what follows the last reward token has no effect.
        return ids[: ids.index(self.reward_ids[-1]) + 1]

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def reward_head(width: int) -> nn.Sequential:
    """The head of HPSv3 and EditReward: mean and logarithm of the standard deviation of the preference."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def freeze_head(head: nn.Module, placement: Placement) -> nn.Module:
    """The head on its device in at least 32 bits, frozen and without dropout."""
    dtype = torch.promote_types(placement.dtype, torch.float32)
    return head.to(placement.device, dtype).eval().requires_grad_(False)


@cache
def read_template(name: str) -> str:
    """A published instruction, with all of its white space."""
    return str(read_json_object(TEMPLATES)[name])


def convert_key(key: str) -> str:
    """The name of a tensor in the network without its language-model head."""
    for pattern, replacement in KEYS:
        key, count = re.subn(pattern, replacement, key)
        if count:
            break
    return key


def merge_lora(tensors: Mapping[str, Tensor], alpha: float, path: Path) -> dict[str, Tensor]:
    """A PEFT state dict with its adapters added, W + alpha / rank * B A in 32 bits, and without PEFT's prefixes."""
    merged = {}
    for key, x in tensors.items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if ".lora_" in name:
            continue
        if key.endswith(".base_layer.weight"):
            stem = key.removesuffix("base_layer.weight")
            try:
                down, up = (tensors[f"{stem}lora_{part}.default.weight"].float() for part in "AB")
            except KeyError as error:
                raise ConfigError(f"{path} lacks the adapter {error}; download the file again [TM2101]") from error
            x = (x.float() + alpha / len(down) * (up @ down)).to(x.dtype)
        merged[name] = x
    return merged


def load_backbone(
    tensors: Mapping[str, Tensor],
    base: str,
    base_config: WeightsSource,
    reward_tokens: Sequence[str],
    path: Path,
    placement: Placement,
    media: str = "image",
) -> QwenRewardBackbone:
    """The network of published tensors, with the config.json and the tokenizer of its base model.

    Tensors that are missing, left over or of another shape are refused.
    """
    import transformers
    from transformers import AutoConfig

    folder = find_weights(base, base_config)
    folder = folder if folder.is_dir() else folder.parent
    model_type = read_config(folder).get("model_type")
    if model_type not in MODEL_CLASSES:
        raise ConfigError(
            f"`base` is '{base:.200}', a network of the type {model_type!s:.40}; expected one of "
            f"{', '.join(MODEL_CLASSES)} [TM2102]"
        )
    state = {convert_key(key): x for key, x in tensors.items() if not key.startswith(UNUSED_KEYS)}
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    embedding = state.get("language_model.embed_tokens.weight")
    vocabulary = 0 if embedding is None else len(embedding)
    config.text_config.vocab_size = vocabulary
    model_class: Any = getattr(transformers, MODEL_CLASSES[model_type])
    _require_same_tensors(state, model_class, config, path, base)
    tokenizer = load_tokenizer(str(folder), folder, "any", base_config, vocabulary)
    tokenizer.add_tokens(list(reward_tokens), special_tokens=True)
    if len(tokenizer) != vocabulary:
        raise ConfigError(
            f"the tokenizer of '{base:.200}' has {len(tokenizer)} tokens with {', '.join(reward_tokens)}, but {path} "
            f"has {vocabulary}; set `base` to the model that the reward was trained from [TM2103]"
        )
    net = load_network(model_class, config, path, placement, state)
    return QwenRewardBackbone(net, tokenizer, reward_tokens, media)


def _require_same_tensors(state: Mapping[str, Tensor], model_class: Any, config: Any, path: Path, base: str) -> None:
    with torch.device("meta"), silence_transformers():
        own = model_class(config).state_dict()
    wrong = [key for key in own if key not in state or state[key].shape != own[key].shape]
    wrong += [key for key in state if key not in own]
    if wrong:
        raise ConfigError(
            f"{path} is of another network than '{base:.200}' ('{wrong[0]}' and {len(wrong) - 1} more tensors differ); "
            "use the published file, or set `base` to the model that it was trained from [TM2104]"
        )


def tiny_backbone(reward_tokens: Sequence[str], placement: Placement, media: str = "image") -> QwenRewardBackbone:
    """A small random Qwen2-VL with a tokenizer of bytes, for tests."""
    from transformers import Qwen2VLModel

    tokenizer = tiny_qwen_tokenizer()
    tokenizer.add_tokens(list(reward_tokens), special_tokens=True)
    return QwenRewardBackbone(
        random_network(Qwen2VLModel, tiny_qwen_config(tokenizer), placement), tokenizer, reward_tokens, media
    )


def tiny_qwen_tokenizer(model: Any = None) -> Any:
    """A tokenizer of bytes, or of another model of `tokenizers`, with Qwen2-VL's special tokens, for tests."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    byte_ids = {token: number for number, token in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(byte_ids, []) if model is None else model)
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer_class(tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    special = ["<|im_start|>", VISION_START, VISION_END, "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def tiny_qwen_config(tokenizer: Any) -> Any:
    """The config of a small Qwen2-VL for the tokens of a tokenizer, for tests."""
    from transformers import Qwen2VLConfig

    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "initializer_range": 0.2}
    return qwen_config(Qwen2VLConfig, text, vision, tokenizer)


def qwen_config(config_class: Any, text: Mapping[str, Any], vision: Mapping[str, Any], tokenizer: Any) -> Any:
    """The config of a Qwen2-VL or Qwen2.5-VL of these sizes, with the ids of a tokenizer's image and video tokens."""
    image_id, video_id, start_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>", VISION_START])
    return config_class(
        text_config=dict(text), vision_config=dict(vision), image_token_id=image_id, video_token_id=video_id,
        vision_start_token_id=start_id,
    )  # fmt: skip
