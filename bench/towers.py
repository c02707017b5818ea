"""What benches of generators ask for, and who judges it: HPS v2.1 at random weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from tastemaker.preprocessing import Preprocessing
from tastemaker.rewards.hps import Hps
from tastemaker.rewards.nets.hub import frozen
from tastemaker.rewards.nets.towers import Ending, Stills, Towers
from tastemaker.rewards.nets.words import Words, tiny_clip
from tastemaker.types import Placement

PROMPTS = tuple(f"a photo of {i} dogs on a boat" for i in range(32))
VIT_H = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
TEXT_H = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


def towers(placement: Placement, tiny: bool) -> Towers:
    """HPS v2.1 at random: CLIP ViT-H/14 as SRPO looks at pictures."""
    from transformers import CLIPConfig, CLIPModel

    if tiny:
        found = replace(Hps(), fit="crop").tiny().load(placement)
        assert isinstance(found, Towers)
        return found
    ends = {"vocab_size": 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513, "hidden_act": "gelu"}
    eyes = VIT_H | {"image_size": 224, "patch_size": 14, "hidden_act": "gelu"}
    config = CLIPConfig(text_config=TEXT_H | ends, vision_config=eyes, projection_dim=1024)
    with torch.device(placement.device):
        net = frozen(CLIPModel(config), placement)
    looks = Preprocessing(224, "crop", "bicubic", overshoot="keep", corner="round")
    return Towers(net, Stills(looks), Words(tiny_clip(), 77, masked=False), Ending())
