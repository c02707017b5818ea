"""What benches of generators ask for, who judges it (HPS v2.1 at random weights), and the run that is made of both."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from device import settle  # beside this file, in no package
from sections import say
from timeline import gib

from tastemaker.config.build import build_policy
from tastemaker.config.schema import RunConfig
from tastemaker.core.reward import Rubric, WeightedReward
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.dual_encoders import CosineHead, DualEncoderScorer, ImagePreprocessing
from tastemaker.rewards.backbones.loading import freeze_network
from tastemaker.rewards.backbones.preprocessing import Preprocessing
from tastemaker.rewards.backbones.tokenizers import FixedLengthTokenizer, tiny_clip_tokenizer
from tastemaker.rewards.hps import Hps
from tastemaker.training.engine import Engine
from tastemaker.training.run import Run

PROMPTS = tuple(f"a photo of {i} dogs on a boat" for i in range(32))
VIT_H = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
TEXT_H = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


def towers(placement: Placement, tiny: bool) -> DualEncoderScorer:
    """HPS v2.1 at random: CLIP ViT-H/14 as SRPO looks at pictures."""
    from transformers import CLIPConfig, CLIPModel

    if tiny:
        found = replace(Hps(), fit="crop").tiny().load(placement)
        assert isinstance(found, DualEncoderScorer)
        return found
    ends = {"vocab_size": 49408, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513, "hidden_act": "gelu"}
    eyes = VIT_H | {"image_size": 224, "patch_size": 14, "hidden_act": "gelu"}
    config = CLIPConfig(text_config=TEXT_H | ends, vision_config=eyes, projection_dim=1024)
    with torch.device(placement.device):
        net = freeze_network(CLIPModel(config), placement)
    looks = Preprocessing(224, "crop", "bicubic", overshoot="keep", corner="round")
    return DualEncoderScorer(
        net, ImagePreprocessing(looks), FixedLengthTokenizer(tiny_clip_tokenizer(), 77, masked=False), CosineHead()
    )


def assembled(config: RunConfig, section: str, folder: Path, tiny: bool) -> Run:
    """What `build` of a configuration gives, but for the reward, whose weights are random too."""
    began = time.perf_counter()
    engine = Engine(config.engine, config.optim, config.steps, 0)
    policy = build_policy(config, engine.placement(adapts=config.tuning.adapts))
    rubric = Rubric({"hps": WeightedReward(Hps(), towers(engine.placement(), tiny))})
    run = Run(policy, config.objective, rubric, config.data.load(0), engine, folder, config.steps)
    settle()
    count = sum(p.numel() for p in policy.weights.net.parameters())
    say(section, f"{count / 1e9:.2f} billion weights ready after {time.perf_counter() - began:.0f} s, {gib():.1f} GiB")
    return run
