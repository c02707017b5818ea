"""CLIP, AltCLIP, SigLIP and SigLIP 2, opened from a folder as the hub holds them or from open_clip's files."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...core.registry import ConfigError
from ...core.types import Placement
from ...models.pretrained import WeightsSource, find_weights, load_state_dict
from . import open_clip
from .dual_encoders import ImagePreprocessing
from .loading import TINY, load_network, random_network
from .naflex import NaflexPreprocessing
from .preprocessing import CLIP_MEAN, CLIP_STD, Preprocessing
from .tokenizers import CLIP_TOKENIZER, FixedLengthTokenizer, load_tokenizer, tiny_clip_tokenizer

KINDS = {"clip": "CLIPModel", "altclip": "AltCLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
HALF = (0.5, 0.5, 0.5)
FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # as PIL numbers them
ImageTextFit = Literal["crop", "pad", "stretch"]


@dataclass(frozen=True)
class ImageTextModel:
    """A frozen network, and what its files say of how to use it."""

    net: Any
    path: Path
    scale: float  # exp(logit_scale), from the file: in 16 bits 100 would be 99
    bias: float = 0.0

    @property
    def kind(self) -> str:
        return str(self.net.config.model_type)

    @property
    def size(self) -> int:
        return int(self.net.config.vision_config.image_size)

    def words(self, name: str | None, mended: bool = False) -> FixedLengthTokenizer:
        """Its tokenizer, or the one of that name."""
        if self.path == Path(TINY):
            return FixedLengthTokenizer(tiny_clip_tokenizer(), 77, mended=mended)
        sizes = self.net.config.text_config
        if self.kind == "clip":
            found = load_tokenizer(name, self.path, "clip", CLIP_TOKENIZER, sizes.vocab_size)
        else:  # each its own, so there is no usual one
            found = load_tokenizer(name or str(self.path), self.path, "any", CLIP_TOKENIZER, sizes.vocab_size)
        # AltCLIP's XLM-R could read 512 tokens, but was trained beside CLIP on 77.
        length = 77 if self.kind == "altclip" else sizes.max_position_embeddings
        return FixedLengthTokenizer(found, length, masked=self.kind in ("clip", "altclip"), mended=mended)

    def looks(
        self, fit: ImageTextFit | None, size: int | None, overshoot: Literal["clip", "keep"]
    ) -> ImagePreprocessing | NaflexPreprocessing:
        """Its own preprocessing, with another fit or size where one is given."""
        if self.kind == "siglip2":
            if fit or size:
                raise ConfigError("SigLIP 2 of this kind keeps the proportions of pictures; leave out `fit` and `size`")
            return NaflexPreprocessing(
                self.net.config.vision_config.patch_size, self.net.config.vision_config.num_patches
            )
        own = _preprocessing(self.path, self.kind, self.size)
        # Where the filter's overshoot stays, tensors were resized as torchvision does, which rounds an odd crop.
        corner: Literal["floor", "round"] = "round" if overshoot == "keep" else own.corner
        looks = replace(own, fit=fit or own.fit, size=size or own.size, overshoot=overshoot, corner=corner)
        return ImagePreprocessing(looks, beyond=looks.size != self.size)


def load_image_text_model(weights: str, source: WeightsSource, placement: Placement) -> ImageTextModel:
    """The network of a local path or of what was fetched from the hub."""
    import transformers

    if weights == TINY:
        return ImageTextModel(_tiny(placement), Path(TINY), 100.0)
    path = find_weights(weights, source)
    if path.is_dir() and source.file and (path / source.file).is_file():
        path = path / source.file
    tensors = {key: x for key, x in load_state_dict(path).items() if not key.endswith("position_ids")}
    if open_clip.MARK in tensors or f"module.{open_clip.MARK}" in tensors:
        tensors = open_clip.convert_keys(tensors, weights)
        config = open_clip.clip_config(tensors, weights, open_clip.read_head_counts(_folder(path)))
    else:
        config = _configuration(path)
    net = load_network(getattr(transformers, KINDS[config.model_type]), config, path, placement, tensors)
    bias = float(tensors["logit_bias"]) if "logit_bias" in tensors else 0.0
    return ImageTextModel(net, path, float(tensors["logit_scale"].double().exp()), bias)


def _configuration(path: Path) -> Any:
    from transformers import AutoConfig

    folder = _folder(path)
    settings = _json(folder / "config.json")
    if settings.get("model_type") not in KINDS:
        found = f"a '{settings['model_type']}'" if "model_type" in settings else "no config.json that names its kind"
        raise ConfigError(f"{folder} holds {found}; expected the folder of one of {', '.join(KINDS)}")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _preprocessing(path: Path, kind: str, size: int) -> Preprocessing:
    """What the image processor beside the weights says, else what is usual for the kind."""
    folder = _folder(path)
    whole = _json(folder / "processor_config.json").get("image_processor", {})
    told = _json(folder / "preprocessor_config.json") or whole
    usual = (CLIP_MEAN, CLIP_STD) if kind in ("clip", "altclip") else (HALF, HALF)
    mean, std = tuple(told.get("image_mean", usual[0])), tuple(told.get("image_std", usual[1]))
    fit: ImageTextFit = "crop" if told.get("do_center_crop", kind in ("clip", "altclip")) else "stretch"
    sides = [_side(told[name]) for name in ("size", "crop_size") if name in told and (fit == "crop" or name == "size")]
    if len(set(sides)) > 1 or told.get("resample", 3) not in FILTERS:
        found = f"sizes {sides} and filter {told.get('resample', 3)}"
        raise ConfigError(f"the processor in {folder} has {found}; expected one size and a filter of {list(FILTERS)}")
    return Preprocessing(sides[0] if sides else size, fit, FILTERS[told.get("resample", 3)], mean, std)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _side(size: Any) -> int:
    return int(next(iter(size.values())) if isinstance(size, dict) else size)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); fetch it again") from error


def _tiny(placement: Placement) -> Any:
    from transformers import CLIPConfig, CLIPModel

    half = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"vocab_size": 514, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    seen = half | {"image_size": 28, "patch_size": 14}
    return random_network(
        CLIPModel, CLIPConfig(text_config=half | ends, vision_config=seen, projection_dim=16), placement
    )
