"""Qwen-Image-Edit-Plus (2509 and 2511): Qwen-Image with up to three source images beside the prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..core.model_spec import EncoderFingerprint, PipelineLayout
from ..core.registry import ConfigError
from ..core.types import Condition, Metadata, Placement, Prompts
from ..data.image_io import to_uint8
from .checkpoint_keys import keep_names
from .component_configs import ComponentConfigs
from .image_backbone import predict_by_layout, read_source_images, resize_and_center_crop, resize_with_lanczos
from .latent_packing import pack_latents
from .pipeline_components import PipelineComponents, PublishedModel
from .pretrained import WeightsSource, silence_libraries
from .qwen_image import CONFIGS, QwenImageBackbone, QwenImageSpec, Side
from .qwen_image import TINY_CONFIGS as QWEN_IMAGE_TINY
from .sequential_offload import temporarily_on_device
from .text_encoders import CachedTextEncoder, TextEncoders, disable_autocast

MAX_SOURCES = 3
MAX_CACHED_PROMPTS = 256  # one prompt with its images takes 7 MB of CPU memory
IMAGE_PAD = "<|image_pad|>"
PICTURE = ("Picture {}: <|vision_start|>", "<|vision_end|>")  # before and after the tokens of a source
TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE_PREFIX_TOKENS = 64  # template tokens before the sources, which the transformer does not get
SIDE_MULTIPLE = 32  # of the sizes that sources are resized to
TINY_IMAGE_TOKEN = 298  # no byte of a prompt has this id
TINY_CONFIGS: ComponentConfigs = {
    **QWEN_IMAGE_TINY,
    "text_encoder": {
        **QWEN_IMAGE_TINY["text_encoder"],
        "text_config": {**QWEN_IMAGE_TINY["text_encoder"]["text_config"], "vocab_size": 300},
        "image_token_id": TINY_IMAGE_TOKEN,
    },
}
EDIT_2509 = WeightsSource("Qwen/Qwen-Image-Edit-2509", size="58 GB", license="Apache-2.0")
EDIT_2511 = WeightsSource("Qwen/Qwen-Image-Edit-2511", size="58 GB", license="Apache-2.0")
CONFIGS_2511: ComponentConfigs = {**CONFIGS, "transformer": {**CONFIGS["transformer"], "zero_cond_t": True}}
QWEN_IMAGE_EDIT = PublishedModel(
    "qwen_image_edit",
    (EDIT_2509, EDIT_2511),
    TINY_CONFIGS,
    {EDIT_2509.hub: CONFIGS, EDIT_2511.hub: CONFIGS_2511},
)
Sources = tuple[Tensor, ...]  # of one prompt, [1, 3, H, W] each
TokenSizes = tuple[tuple[int, int], ...]  # rows and columns of tokens of the sample and of its sources


class QwenEditPromptEncoder(TextEncoders):
    """Qwen2.5-VL's prompt_embeds [B, max_text_tokens, D] of prompts with their sources, padding last; lengths [B]."""

    def __init__(self, components: PipelineComponents, spec: QwenImageEditSpec, sources: Mapping[str, Request]) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        self.max_text_tokens, self.condition_pixels, self.sources = spec.max_text_tokens, spec.condition_pixels, sources
        # Small random encoders read bytes: the template alone would exceed any length.
        tiny = components.path is None
        self.template, self.prefix = ("{}", 0) if tiny else (TEMPLATE, TEMPLATE_PREFIX_TOKENS)
        self.picture = (" ", "") if tiny else PICTURE  # text between images keeps them apart
        full = components.load_text_encoder(
            "text_encoder", Qwen2_5_VLForConditionalGeneration, "tokenizer", spec.max_text_tokens + self.prefix
        )
        self.text_encoder = replace(full, net=full.net.model)  # without its output layer
        self.text_encoders = (self.text_encoder,)
        self.image_processor = load_image_processor(components)

    def __call__(self, prompts: list[str]) -> dict[str, Tensor]:
        """Embed the prompts that these keys stand for, each with its sources."""
        requests = [self.sources.get(key, Request(key)) for key in prompts]
        images = [[self._preprocess(pixels) for pixels in request.read()] for request in requests]
        merge = self.image_processor.merge_size**2
        rows = [
            self._encode_text(request.prompt, [int(grid.prod()) // merge for _, grid in each])
            for request, each in zip(requests, images, strict=True)
        ]
        hidden = self._run(rows, [image for each in images for image in each])
        lengths = [len(row) - self.prefix for row in rows]
        padded = [
            F.pad(x[self.prefix : self.prefix + length], (0, 0, 0, self.max_text_tokens - length))
            for x, length in zip(hidden, lengths, strict=True)
        ]
        return {"prompt_embeds": torch.stack(padded), "lengths": torch.tensor(lengths, device=hidden.device)}

    def _preprocess(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches [N, D] and grid [3] of a source, resized to about `condition_pixels`."""
        resized = resize_with_lanczos(pixels, *size_of_area(self.condition_pixels, *pixels.shape[2:]))
        images = self.image_processor(images=list(to_uint8(resized)), return_tensors="pt")
        return images["pixel_values"], images["image_grid_thw"][0]

    def _encode_text(self, prompt: str, counts: Sequence[int]) -> list[int]:
        """Token ids of the template with `count` image tokens per source, cut at `max_text_tokens` after its prefix."""
        image_token = self.text_encoder.net.config.image_token_id
        before, after = self.template.split("{}")
        ids: list[int] = []
        for number, count in enumerate(counts, 1):
            ids += [*self._tokenize(before + self.picture[0].format(number)), *[image_token] * count]
            before = self.picture[1]
        if len(ids) > self.prefix + self.max_text_tokens:
            raise ConfigError(
                f"model.max_text_tokens: {self.max_text_tokens} tokens are fewer than those of {len(counts)} source "
                f"images; set model.max_text_tokens to at least {len(ids) - self.prefix + 64} [TM2452]"
            )
        ids += self._tokenize(before + prompt.replace(IMAGE_PAD, "") + after)
        return ids[: self.prefix + self.max_text_tokens]

    def _tokenize(self, text: str) -> list[int]:
        tokens = self.text_encoder.tokenize([text])
        ids: list[int] = tokens["input_ids"][0][tokens["attention_mask"][0].bool()].tolist()
        return ids

    def _run(self, rows: Sequence[list[int]], images: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run the language model, with the vision tower for images: hidden states [B, L, D], padding last."""
        encoder, device = self.text_encoder, self.text_encoder.device
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
        inputs: dict[str, Any] = {}
        if images:
            patches = torch.cat([patches for patches, _ in images]).to(device, encoder.net.dtype)
            grids = torch.stack([grid for _, grid in images]).to(device)
            # Token types make the network rotate image tokens by row and column, as in training. diffusers 0.42 leaves
            # them out, so that transformers 5 counts image tokens like words.
            types = (ids == encoder.net.config.image_token_id).int()
            inputs = {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}
        with disable_autocast(ids), temporarily_on_device(encoder.net, device):
            output = encoder.net(input_ids=ids, attention_mask=mask, use_cache=False, **inputs)
        hidden: Tensor = output.last_hidden_state
        return hidden


def load_image_processor(components: PipelineComponents) -> Any:
    """Load Qwen2-VL's image processor, the version that needs no torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor: Any = Qwen2VLImageProcessorPil
    if components.path is None:
        return processor()
    folder = components.folder("processor")
    try:
        with silence_libraries():
            return processor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} does not contain an image processor; download the folder again [TM2453]"
        ) from error


@dataclass(frozen=True)
class Request:
    """A prompt with its sources, read when they are needed."""

    prompt: str
    image: object = None  # as in metadata

    def read(self) -> Sources:
        return read_source_images(self.image)


class CachedEditEncoder(CachedTextEncoder):
    """Embeddings of prompts together with their sources, kept under keys that name the content of both."""

    def __init__(
        self,
        load: Callable[[Mapping[str, Request]], TextEncoders],
        placement: Placement,
        fingerprint: EncoderFingerprint,
        embeddings: Path | None,
    ) -> None:
        self.requests: dict[str, Request] = {}  # by key
        super().__init__(lambda: load(self.requests), placement, fingerprint, embeddings)
        self.max_cached_prompts = MAX_CACHED_PROMPTS

    def keys(self, prompts: Prompts, metadata: Sequence[Metadata] = (), *, negative: bool = False) -> list[str]:
        images = [each.get("image") for each in metadata] or [None] * len(prompts)
        keys = []
        for prompt, image in zip(prompts, images, strict=True):
            keys.append(prompt + "".join(f" <image {digest_image(pixels)}>" for pixels in read_source_images(image)))
            self.requests[keys[-1]] = Request(prompt, image)
        return keys


def digest_image(pixels: Tensor) -> str:
    """Return a digest of the size and the content of an image [1, 3, H, W]."""
    array = to_uint8(pixels)
    return hashlib.sha256(repr(array.shape).encode() + array.tobytes()).hexdigest()[:32]


def size_of_area(area: int, height: int, width: int) -> tuple[int, int]:
    """Return the height and width of about this area with the aspect ratio of an image, in multiples of 32."""
    ratio = width / height
    wide = math.sqrt(area * ratio)
    high = wide / ratio
    return tuple(max(SIDE_MULTIPLE, round(x / SIDE_MULTIPLE) * SIDE_MULTIPLE) for x in (high, wide))  # type: ignore[return-value]


class QwenImageEditBackbone(QwenImageBackbone):
    """Denoises packed latents beside the clean latents of the sources in a prompt's metadata `image`.

    A batch without images is sampled from the prompts alone, as with Qwen-Image.
    """

    prompt_encoder: CachedEditEncoder

    def __init__(self, spec: QwenImageEditSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.source_fit, self.source_pixels = spec.source_fit, spec.source_pixels
        self.device = placement.device

    def enable_text_encoder_training(self) -> dict[str, nn.Module]:
        return {}  # the sources of a prompt would be encoded again at every call

    def embed(self, prompts: Prompts, metadata: Sequence[Metadata] = ()) -> Condition:
        sources = [read_source_images(each.get("image")) for each in metadata]
        if any(sources):
            for prompt, images in zip(prompts, sources, strict=True):
                check_sources(prompt, images)
        keys = self.prompt_encoder.keys(prompts, [{"image": images} for images in sources])
        tensors = self.prompt_encoder(keys)
        self.prompt_encoder.requests.clear()
        # Lengths stay on the CPU, so that trimming to the longest prompt needs no device synchronization.
        cond = Condition(tuple(prompts), {**tensors, "lengths": tensors["lengths"].cpu()}, tuple(metadata))
        if not any(sources):
            return cond
        latents, sizes = self._encode_sources(sources)
        return replace(cond, tensors={**cond.tensors, "sources": latents, "source_sizes": sizes})

    def _encode_sources(self, sources: Sequence[Sources]) -> tuple[Tensor, Tensor]:
        """Encode to packed latents [B, n, 64], padded at the end, and their rows and columns of tokens [B, 3, 2]."""
        encoded: dict[str, Tensor] = {}  # each image of a batch is encoded once
        rows, sizes = [], torch.zeros(len(sources), MAX_SOURCES, 2, dtype=torch.long)
        for row, images in enumerate(sources):
            tokens = []
            for number, pixels in enumerate(images):
                if (key := digest_image(pixels)) not in encoded:
                    encoded[key] = self.autoencoder.encode(self._fit(pixels).to(self.device))
                sizes[row, number] = torch.tensor(encoded[key].shape[2:]) // 2
                tokens.append(pack_latents(encoded[key])[0])
            rows.append(torch.cat(tokens))
        longest = max(map(len, rows))
        return torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in rows]), sizes

    def _fit(self, pixels: Tensor) -> Tensor:
        """Resize a source [1, 3, H, W] for the autoencoder."""
        if self.source_fit == "sample":
            return resize_and_center_crop(pixels, *self.pixels[2:])
        return resize_with_lanczos(pixels, *size_of_area(self.source_pixels, *pixels.shape[2:]))

    def predict(self, x: Tensor, t: Tensor, cond: Condition) -> Tensor:
        if "sources" not in cond.tensors:
            return super().predict(x, t, cond)
        return predict_by_layout(self.net, self._predict_group, x, t, cond, self._layouts(x, cond))

    def _layouts(self, x: Tensor, cond: Condition) -> list[TokenSizes]:
        """Rows and columns of tokens of each sample and of its sources; without sizes, one source as large as it."""
        sample = (x.shape[1], x.shape[2])
        sizes = cond.tensors.get("source_sizes")
        if sizes is None:
            return [(sample, sample)] * len(x)
        return [(sample, *((rows, columns) for rows, columns in each if rows)) for each in sizes.tolist()]

    def _predict_group(self, x: Tensor, t: Tensor, cond: Condition, layout: TokenSizes) -> Tensor:
        """Predict samples whose sources have equal sizes, in one network call."""
        count = sum(rows * columns for rows, columns in layout[1:])
        tokens = x.flatten(1, 2)
        sources = cond.tensors["sources"][:, :count].to(tokens.dtype)
        velocity = self.predict_tokens(torch.cat([tokens, sources], 1), t, cond, layout)
        return velocity[:, : tokens.shape[1]].view_as(x)


def check_sources(prompt: str, images: Sources) -> None:
    """Refuse a prompt without images beside prompts that have some, and more images than the model knows."""
    if not images:
        raise ValueError(
            f"prompt '{prompt:.80}' does not have an `image` in its metadata, but other prompts do; give a path, "
            "pixels [F, 3, H, W] or a list of those for each prompt, or for none [TM2451]"
        )
    if len(images) > MAX_SOURCES:
        raise ValueError(
            f"prompt '{prompt:.80}' has {len(images)} images; the model reads one to {MAX_SOURCES}, so leave out the "
            "others [TM2455]"
        )


@dataclass(frozen=True)
class QwenImageEditSpec(QwenImageSpec):
    """Qwen-Image-Edit 2509 or 2511: edits or combines the one to three images in a prompt's metadata `image`."""

    weights: str = EDIT_2509.hub  # hub id, or folder in diffusers' layout
    height: Side = 1024
    width: Side = 1024
    max_text_tokens: Annotated[int, Field(ge=1, le=4096)] = 1024  # of a prompt with its images, 200 or so each
    source_fit: Literal["area", "sample"] = "area"  # keep aspect ratios, or cover the size of the sample and crop
    source_pixels: Annotated[int, Field(ge=1024)] = 1024 * 1024  # area of a source for the transformer
    condition_pixels: Annotated[int, Field(ge=1024)] = 384 * 384  # area of a source for Qwen2.5-VL
    reads_image: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = False
    published: ClassVar[PublishedModel] = QWEN_IMAGE_EDIT
    backbone_class = QwenImageEditBackbone
    embedding_settings: ClassVar[Mapping[str, str]] = {
        "max_text_tokens": "max_text_tokens",
        "condition_pixels": "condition_pixels",
    }
    layout: ClassVar[PipelineLayout] = PipelineLayout(
        "QwenImageEditPlusPipeline", "transformer", "lora_unet", keep_names
    )

    def cached_prompt_encoder(self, components: PipelineComponents) -> CachedEditEncoder:
        names = self.embedding_settings.items()
        settings = {"model": self.published.name, **{key: str(getattr(self, name)) for key, name in names}}
        fingerprint = components.encoder_fingerprint(self.text_encoders, settings)
        return CachedEditEncoder(
            lambda sources: QwenEditPromptEncoder(components, self, sources),
            components.placement,
            fingerprint,
            self.embeddings,
        )

    def tiny(self) -> QwenImageEditSpec:
        return replace(super().tiny(), source_pixels=32 * 32, condition_pixels=32 * 32)
