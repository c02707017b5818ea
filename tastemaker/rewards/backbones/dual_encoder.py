"""Dual encoders of images and texts (CLIP, AltCLIP, SigLIP, SigLIP 2), and CLIP's image encoder alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.reward import CachedImageReward, ImageTextTower, TowerFeatures
from ...core.safe_files import read_json_object
from ...core.types import Placement, Prompts
from ...models.pretrained import WeightsSource, find_weights, load_state_dict
from . import open_clip
from .frozen_models import TINY, load_network, random_network, read_config
from .preprocessing import CLIP_MEAN, CLIP_STD, NaflexPreprocessing, Preprocessing
from .tokenizers import CLIP_TOKENIZER, FixedLengthTokenizer, load_tokenizer, tiny_clip_tokenizer

CLIP_L = WeightsSource("openai/clip-vit-large-patch14", size="1.7 GB", license="MIT")
MODEL_CLASSES = {"clip": "CLIPModel", "altclip": "AltCLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
SIGLIP_MEAN = SIGLIP_STD = (0.5, 0.5, 0.5)
FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # PIL's numbers
VISION_KEYS = ("vision_model.", "visual_projection.")
MAX_CACHED_TEXTS = 4096  # 16 MB of features of a thousand numbers each
ResizeMode = Literal["crop", "pad", "stretch"]
ClipResizeMode = Literal["stretch", "crop"]  # VADER's, with a bilinear filter; CLIP's own, with a bicubic one
Inputs = dict[str, Any]
Tokenize = Callable[[list[str], torch.device], Inputs]
CheckWeights = Callable[[Path, Mapping[str, Tensor], Mapping[str, Tensor]], None]


class TextFeatureCache:
    """Features of texts; those of the most recently used texts are kept."""

    def __init__(self, encode: Callable[[list[str]], Tensor], max_entries: int = MAX_CACHED_TEXTS) -> None:
        self.max_entries = max_entries
        self._encode = encode
        self._features: dict[str, Tensor] = {}  # least recently used first

    def __call__(self, texts: Prompts) -> Tensor:
        """Features of texts: [B, C]."""
        cached = {text: self._features.pop(text, None) for text in dict.fromkeys(texts)}
        new = [text for text, features in cached.items() if features is None]
        # Kept beyond this call, so they must hold neither its graph nor the marks of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            features = {text: x for text, x in cached.items() if x is not None}
            if new:
                features |= zip(new, (x.clone() for x in self._encode(new)), strict=True)
        self._features |= {text: features[text] for text in cached}
        while len(self._features) > self.max_entries:
            self._features.pop(next(iter(self._features)))
        return torch.stack([features[text] for text in texts])


@dataclass(frozen=True)
class ImagePreprocessing:
    """Preprocessing to network inputs, with interpolated positions for images larger than in pretraining."""

    preprocessing: Preprocessing
    interpolate_positions: bool = False

    def __call__(self, pixels: Tensor) -> Inputs:
        options: Inputs = {"interpolate_pos_encoding": True} if self.interpolate_positions else {}
        return {"pixel_values": self.preprocessing(pixels), **options}


@dataclass(frozen=True)
class CosineHead:
    """scale * cosine + bias, or its sigmoid: the probability of a match."""

    scale: float = 1.0
    bias: float = 0.0
    sigmoid: bool = False

    def __call__(self, cosine: Tensor) -> Tensor:
        logits = self.scale * cosine + self.bias
        return logits.sigmoid() if self.sigmoid else logits


class DualEncoderScorer(CachedImageReward, ImageTextTower):
    """Scores by the cosine between the image and text features of a frozen network."""

    def __init__(self, net: Any, preprocess: Callable[[Tensor], Inputs], tokenize: Tokenize, head: CosineHead) -> None:
        self.net, self.preprocess, self.tokenize, self.head = net, preprocess, tokenize, head
        self.text_features = TextFeatureCache(self._encode_texts)

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit features of the first frame of each sample: [B, C]."""
        inputs = self.preprocess(pixels[:, 0])
        inputs["pixel_values"] = inputs["pixel_values"].to(self.net.dtype)
        return normalize_features(self.net.get_image_features(**inputs).pooler_output)

    def score_features(self, features: Tensor, prompts: Prompts) -> Tensor:
        return self.head((features * self.text_features(prompts)).sum(1))

    def tower(self) -> ImageTextTower:
        return self

    def encode(self, pixels: Tensor, prompts: Prompts) -> TowerFeatures:
        inputs = self.preprocess(pixels[:, 0])
        inputs["pixel_values"] = inputs["pixel_values"].to(self.net.dtype)
        output = self.net.get_image_features(**inputs)
        image, text = normalize_features(output.pooler_output), self.text_features(prompts)
        return TowerFeatures(image, text.to(image), (token_map(output.last_hidden_state),))

    def image_layers(self) -> tuple[nn.Module, tuple[str, ...]]:
        names = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
        return self.net, tuple(f"vision_model.encoder.*.{name}" for name in names)

    def _encode_texts(self, texts: list[str]) -> Tensor:
        return normalize_features(self.net.get_text_features(**self.tokenize(texts, self.net.device)).pooler_output)


def token_map(tokens: Tensor) -> Tensor:
    """Tokens [B, N, C] of a vision transformer as a map [B, C, h, w], without its class token.

    Tokens of images that are not square become one row.
    """
    side = math.isqrt(tokens.shape[1])
    patches = tokens[:, tokens.shape[1] - side * side :] if tokens.shape[1] - side * side <= 1 else tokens
    height = side if patches.shape[1] == side * side else 1
    return patches.transpose(1, 2).reshape(len(patches), patches.shape[2], height, -1).float()


def normalize_features(features: Tensor) -> Tensor:
    """Unit features in at least 32 bits, since cosines of similar images differ by little."""
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)


@dataclass(frozen=True)
class ImageTextModel:
    """A frozen dual encoder with the tokenizer, preprocessing and logit scale that its files name."""

    net: Any
    path: Path
    logit_scale: float  # exp(logit_scale) of the file; cast to 16 bits, 100 would be 99
    logit_bias: float = 0.0

    @property
    def model_type(self) -> str:
        return str(self.net.config.model_type)

    @property
    def image_size(self) -> int:
        return int(self.net.config.vision_config.image_size)

    def tokenizer(self, name: str | None, clean_text: bool = False) -> FixedLengthTokenizer:
        """The model's own tokenizer, or the one of that name."""
        if self.path == Path(TINY):
            return FixedLengthTokenizer(tiny_clip_tokenizer(), 77, clean_text=clean_text)
        config = self.net.config.text_config
        if self.model_type == "clip":
            tokenizer = load_tokenizer(name, self.path, "clip", CLIP_TOKENIZER, config.vocab_size)
        else:  # each checkpoint comes with its own
            tokenizer = load_tokenizer(name or str(self.path), self.path, "any", CLIP_TOKENIZER, config.vocab_size)
        # AltCLIP's XLM-R takes 512 tokens, but was trained with CLIP's 77.
        max_length = 77 if self.model_type == "altclip" else config.max_position_embeddings
        masked = self.model_type in ("clip", "altclip")
        return FixedLengthTokenizer(tokenizer, max_length, attention_mask=masked, clean_text=clean_text)

    def preprocessing(
        self, resize_mode: ResizeMode | None, size: int | None, overshoot: Literal["clip", "keep"]
    ) -> ImagePreprocessing | NaflexPreprocessing:
        """The model's own preprocessing, with another resize mode or size if given."""
        if self.model_type == "siglip2":
            if resize_mode or size:
                raise ConfigError("SigLIP 2 NaFlex keeps aspect ratios; remove `resize_mode` and `image_size` [TM351]")
            config = self.net.config.vision_config
            return NaflexPreprocessing(config.patch_size, config.num_patches)
        default = _default_preprocessing(self.path, self.model_type, self.image_size)
        # torchvision, which keeps the overshoot of bicubic filters for tensors, also rounds odd crops to even.
        preprocessing = replace(
            default,
            resize_mode=resize_mode or default.resize_mode,
            size=size or default.size,
            overshoot=overshoot,
            crop_rounding="round" if overshoot == "keep" else default.crop_rounding,
        )
        return ImagePreprocessing(preprocessing, interpolate_positions=preprocessing.size != self.image_size)


def load_image_text_model(
    weights: str, source: WeightsSource, placement: Placement, check: CheckWeights | None = None
) -> ImageTextModel:
    """A frozen dual encoder of a local path or a downloaded repository, in the layout of transformers or open_clip.

    `check` gets the path, the tensors under their own names and under those of transformers; it refuses other weights.
    """
    import transformers

    if weights == TINY:
        return ImageTextModel(_tiny_clip(placement), Path(TINY), 100.0)
    path = find_weights(weights, source)
    original = load_state_dict(path)
    tensors = {key: x for key, x in original.items() if not key.endswith("position_ids")}
    if open_clip.MARKER in tensors or f"module.{open_clip.MARKER}" in tensors:
        tensors = open_clip.convert_keys(tensors, weights)
        settings = open_clip.read_settings(_folder(path))
        options = (settings.num_heads, settings.activation) if settings else ()
        config = open_clip.clip_config(tensors, weights, *options)
    else:
        config = _read_model_config(path)
    if check is not None:
        check(path, original, tensors)
    net = load_network(getattr(transformers, MODEL_CLASSES[config.model_type]), config, path, placement, tensors)
    bias = float(tensors["logit_bias"]) if "logit_bias" in tensors else 0.0
    return ImageTextModel(net, path, float(tensors["logit_scale"].double().exp()), bias)


def _read_model_config(path: Path) -> Any:
    from transformers import AutoConfig

    folder = _folder(path)
    model_type = _read_json(folder / "config.json").get("model_type")
    if model_type not in MODEL_CLASSES:
        content = f"a '{model_type}'" if model_type else "no config.json with a model type"
        raise ConfigError(f"{folder} contains {content}; give the folder of one of {', '.join(MODEL_CLASSES)} [TM352]")
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _default_preprocessing(path: Path, model_type: str, image_size: int) -> Preprocessing:
    """The preprocessing of the processor beside the weights, else the usual one of the model type."""
    folder = _folder(path)
    nested = _read_json(folder / "processor_config.json").get("image_processor", {})
    settings = _read_json(folder / "preprocessor_config.json") or nested
    clip = model_type in ("clip", "altclip")
    mean, std = (CLIP_MEAN, CLIP_STD) if clip else (SIGLIP_MEAN, SIGLIP_STD)
    mean, std = tuple(settings.get("image_mean", mean)), tuple(settings.get("image_std", std))
    resize_mode: ResizeMode = "crop" if settings.get("do_center_crop", clip) else "stretch"
    names = ("size", "crop_size") if resize_mode == "crop" else ("size",)
    sides = [settings[name] for name in names if name in settings]
    sizes = [int(next(iter(side.values())) if isinstance(side, dict) else side) for side in sides]
    resample = settings.get("resample", 3)
    if len(set(sizes)) > 1 or resample not in FILTERS:
        raise ConfigError(
            f"{folder}: the processor has sizes {sizes} and filter {resample}; expected one size and a filter of "
            f"{list(FILTERS)}, so use another model [TM353]"
        )
    return Preprocessing(sizes[0] if sizes else image_size, resize_mode, FILTERS[resample], mean, std)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); download the file again [TM354]") from error


TINY_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def _tiny_clip(placement: Placement) -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = TINY_SIZES | {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    vision = TINY_SIZES | {"image_size": 28, "patch_size": 14}
    return random_network(CLIPModel, CLIPConfig(text_config=text, vision_config=vision, projection_dim=16), placement)


class ClipImageEncoder:
    """CLIP's frozen image encoder with its projection."""

    def __init__(self, net: Any) -> None:
        self.net, self.width = net, int(net.config.projection_dim)

    def embed(self, pixels: Tensor, resize_mode: ClipResizeMode) -> Tensor:
        """Unit embeddings [N, D] of images [N, 3, H, W] in [0, 1], in at least 32 bits."""
        interpolation: Literal["bilinear", "bicubic"] = "bilinear" if resize_mode == "stretch" else "bicubic"
        prepared = Preprocessing(self.net.config.image_size, resize_mode, interpolation)(pixels)
        return normalize_features(self.net(pixel_values=prepared.to(self.net.dtype)).image_embeds)


_loaded_encoders: WeakValueDictionary[tuple[str, Placement], ClipImageEncoder] = WeakValueDictionary()


def load_clip_image_encoder(weights: str, placement: Placement) -> ClipImageEncoder:
    """CLIP's image encoder; rewards with the same weights and placement share one."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    if (loaded := _loaded_encoders.get((weights, placement))) is not None:
        return loaded
    if weights == TINY:
        sizes = {**TINY_SIZES, "projection_dim": 16, "image_size": 28, "patch_size": 14}
        config: Any = CLIPVisionConfig.from_dict(sizes)
        net = random_network(CLIPVisionModelWithProjection, config, placement)
    else:
        path = find_weights(weights, CLIP_L)
        read_config(_folder(path))
        config = CLIPVisionConfig.from_pretrained(_folder(path), local_files_only=True)
        tensors = {key: x for key, x in load_state_dict(path).items() if key.startswith(VISION_KEYS)}
        if "visual_projection.weight" in tensors:  # not every vision_config repeats the width of the projection
            config.projection_dim = len(tensors["visual_projection.weight"])
        net = load_network(CLIPVisionModelWithProjection, config, path, placement, tensors)
    encoder = _loaded_encoders[weights, placement] = ClipImageEncoder(net)
    return encoder
