"""ImageReward's network: BLIP's two halves in transformers, the text reading the picture, and a linear head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.registry import ConfigError
from ...core.types import Placement
from ...models.pretrained import load_weights_into

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw score over the authors' pictures
RULES = (
    (r"blip\.visual_encoder\.cls_token", "vision.embeddings.class_embedding"),
    (r"blip\.visual_encoder\.pos_embed", "vision.embeddings.position_embedding"),
    (r"blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"blip\.text_encoder\.", "text."),
    (r"mlp\.layers\.", "head."),
)
UNUSED = re.compile(r"blip\.((vision|text)_proj\..+|text_encoder\.embeddings\.position_ids)")
HEAD = (1024, 128, 64, 16, 1)  # widths of the layers numbered 0, 2, 4, 6 and 7; dropout stood between


class Blip(nn.Module):
    """One raw score for a picture and the text that is read beside it."""

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.vision: Any = BlipVisionModel(BlipVisionConfig(**vision, layer_norm_eps=1e-6))
        # A decoder only in that it has the layers which look at the picture; its words see each other both ways.
        unused: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 0, "sep_token_id": 0}
        reading = BlipTextConfig(**text, **unused, encoder_hidden_size=vision["hidden_size"], is_decoder=True)
        self.text: Any = BlipTextModel(reading, add_pooling_layer=False)  # type: ignore[no-untyped-call]
        sides = (int(text["hidden_size"]), *HEAD)
        places = dict(zip("02467", range(5), strict=True))
        self.head = nn.ModuleDict({name: nn.Linear(sides[i], sides[i + 1]) for name, i in places.items()})

    def see(self, prepared: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] to the tokens of each: [B, 1 + patches, D]."""
        seen: Tensor = self.vision(prepared.to(self.vision.dtype)).last_hidden_state
        return seen

    def forward(self, seen: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The raw score, before it is centred: [B]."""
        read = self.text(input_ids, attention_mask, encoder_hidden_states=seen, is_decoder=False).last_hidden_state
        x: Tensor = read[:, 0].to(self.head["0"].weight.dtype)
        for layer in self.head.values():
            x = layer(x)
        return x[:, 0]

    @property
    def size(self) -> int:
        return int(self.vision.config.image_size)

    def placed(self, placement: Placement) -> Blip:
        """Frozen, in the precision asked for but for the head, which is never in less than 32 bits."""
        self.to(placement.device, placement.dtype).eval().requires_grad_(False)
        self.head.to(dtype=torch.promote_types(placement.dtype, torch.float32))
        return self


def read_blip(tensors: Mapping[str, Tensor], name: str, heads: tuple[int, int] | None = None) -> Blip:
    """The network of published tensors; attention heads of pictures and texts are 64 wide unless given."""
    from transformers.initialization import no_init_weights

    kept = {_renamed(key): x for key, x in tensors.items() if not UNUSED.fullmatch(key)}
    try:
        patches, places = kept["vision.embeddings.patch_embedding.weight"], kept["vision.embeddings.position_embedding"]
        words = kept["text.embeddings.word_embeddings.weight"]
        vision = _sizes(kept, "vision.encoder.layers.", "mlp.fc1.weight")
        text = _sizes(kept, "text.encoder.layer.", "intermediate.dense.weight")
        length = len(kept["text.embeddings.position_embeddings.weight"])
    except (KeyError, ValueError) as error:
        expected = "expected the published ImageReward.pt"
        raise ConfigError(f"the weights '{name:.200}' have no {error}; {expected}") from error
    looking, reading = heads or (vision["hidden_size"] // 64, text["hidden_size"] // 64)
    if not looking or not reading:
        found = f"{vision['hidden_size']} and {text['hidden_size']} numbers wide, less than one head of 64"
        raise ConfigError(f"the weights '{name:.200}' are {found}; expected the published ImageReward.pt")
    side = round((places.shape[1] - 1) ** 0.5) * patches.shape[-1]
    seen = {"num_attention_heads": looking, "image_size": side, "patch_size": patches.shape[-1]}
    said = {"num_attention_heads": reading, "vocab_size": len(words), "max_position_embeddings": length}
    with no_init_weights():  # half a billion random numbers that are overwritten at once
        net = Blip(vision | seen, text | said | {"layer_norm_eps": 1e-12})
    load_weights_into(net, kept, name)
    return net


def _renamed(key: str) -> str:
    for old, new in RULES:
        key, changed = re.subn(f"^{old}", new, key)
        if changed:
            break
    return key


def _sizes(tensors: Mapping[str, Tensor], prefix: str, widening: str) -> dict[str, int]:
    layers = 1 + max(int(key.removeprefix(prefix).split(".")[0]) for key in tensors if key.startswith(prefix))
    wide = tensors[f"{prefix}0.{widening}"]
    return {"hidden_size": wide.shape[1], "intermediate_size": len(wide), "num_hidden_layers": layers}


def tiny_blip() -> Blip:
    """A small network that has opinions: at first the weights of a large one are too near to nought for that."""
    half = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = half | {"vocab_size": 64, "max_position_embeddings": 40, "layer_norm_eps": 1e-12}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = Blip(half | {"image_size": 32, "patch_size": 8}, text)
        for weights in net.parameters():
            weights.add_(torch.randn_like(weights) * weights.shape[-1] ** -0.5)
    return net
