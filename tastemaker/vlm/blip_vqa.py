"""BLIP for visual question answering (Li et al. 2022), the judge of T2I-CompBench's colors, shapes and textures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.registry import ConfigError
from ..core.types import Placement
from ..models.pretrained import WeightsSource, find_weights
from ..rewards.backbones.frozen_models import TINY, load_network, random_network, silence_transformers
from ..rewards.backbones.preprocessing import Preprocessing

BLIP_VQA = WeightsSource("Salesforce/blip-vqa-capfilt-large", size="1.5 GB", license="BSD-3-Clause")
IMAGE_SIZE = 480  # pixels a side, at which the published network was trained
MAX_QUESTION_TOKENS = 35


@dataclass(frozen=True)
class BlipVqa:
    """A frozen BLIP with its tokenizer."""

    net: Any
    tokenizer: Any
    image_size: int = IMAGE_SIZE

    @torch.no_grad()
    def first_logits(self, pixels: Tensor, questions: Sequence[str]) -> Tensor:
        """Logits [B, V] of the first token of the answers about images [B, 3, H, W]."""
        logits = pixels.new_zeros(len(pixels), self.net.config.text_config.vocab_size, dtype=torch.float32)
        for indices, states, start in self._encode(pixels, questions):
            logits[indices] = self.net.text_decoder(input_ids=start, encoder_hidden_states=states).logits[:, -1].float()
        return logits

    @torch.no_grad()
    def answer(self, pixels: Tensor, questions: Sequence[str], max_new_tokens: int) -> list[str]:
        """Greedy answers about images [B, 3, H, W]."""
        answers, text = [""] * len(questions), self.net.config.text_config
        for indices, states, start in self._encode(pixels, questions):
            ids = self.net.text_decoder.generate(
                input_ids=start, encoder_hidden_states=states, max_new_tokens=max_new_tokens, do_sample=False,
                eos_token_id=text.sep_token_id, pad_token_id=text.pad_token_id,
            )  # fmt: skip
            for i, answer in zip(
                indices, self.tokenizer.batch_decode(ids[:, 1:], skip_special_tokens=True), strict=True
            ):
                answers[i] = str(answer).strip()
        return answers

    def _encode(self, pixels: Tensor, questions: Sequence[str]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield indices of questions of one length, their hidden states [n, L, C], and the first decoder token [n, 1].

        Questions are not padded, because transformers' decoder ignores the mask of its cross-attention, so that padding
        would change the answers.
        """
        ids = [self.tokenizer(text, truncation=True, max_length=MAX_QUESTION_TOKENS).input_ids for text in questions]
        prepared = Preprocessing(self.image_size, "stretch", "bicubic")(pixels.float()).to(self.net.dtype)
        image = self.net.vision_model(pixel_values=prepared, interpolate_pos_encoding=True).last_hidden_state
        for length in sorted(set(map(len, ids))):
            indices = [i for i, row in enumerate(ids) if len(row) == length]
            tokens = torch.tensor([ids[i] for i in indices], device=pixels.device)
            # As published, a question starts with the encoder's own token, which follows the decoder's.
            tokens[:, 0] = self.net.decoder_start_token_id + 1
            states: Tensor = self.net.text_encoder(input_ids=tokens, encoder_hidden_states=image[indices])[0]
            yield indices, states, torch.full_like(tokens[:, :1], self.net.decoder_start_token_id)


def load_blip_vqa(weights: str, placement: Placement) -> BlipVqa:
    """BLIP-VQA of a folder or hub id in the layout of transformers, or a tiny random one."""
    from transformers import AutoTokenizer, BlipConfig, BlipForQuestionAnswering

    if weights == TINY:
        net, tokenizer = tiny_blip_vqa(placement)
        return BlipVqa(net, tokenizer, image_size=32)
    path = find_weights(weights, BLIP_VQA if weights == BLIP_VQA.hub else WeightsSource(weights))
    config: Any = BlipConfig.from_pretrained(path, local_files_only=True)
    text = config.text_config
    if text.bos_token_id is None or text.bos_token_id + 1 >= text.vocab_size:
        raise ConfigError(
            f"--judge: the vocabulary of {path} ends before BLIP's own two tokens; give BLIP for visual question "
            f"answering, such as {BLIP_VQA.hub} [TM2151]"
        )
    with silence_transformers():
        net = load_network(BlipForQuestionAnswering, config, path, placement)
        tokenizer = _load_tokenizer(AutoTokenizer, path)
    return BlipVqa(net, tokenizer)


def _load_tokenizer(auto_tokenizer: Any, path: Path) -> Any:
    try:
        return auto_tokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--judge: the tokenizer in {path} cannot be used ({reason:.200}); download the folder again [TM2152]"
        ) from error


def tiny_blip_vqa(placement: Placement) -> tuple[Any, Any]:
    """A small random BLIP-VQA and a tokenizer of letters and of the words yes and no, for tests."""
    from string import ascii_lowercase

    from transformers import BertTokenizer, BlipConfig, BlipForQuestionAnswering

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, "yes", "no", "?", *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase)]
    tokenizer = BertTokenizer({token: number for number, token in enumerate(words)})
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "vocab_size": len(words) + 2, "bos_token_id": len(words), "encoder_hidden_size": 32, "projection_dim": 16,
        "pad_token_id": 0, "sep_token_id": 3, "eos_token_id": 3, "initializer_range": 0.4, **size,
    }  # fmt: skip
    vision = {"image_size": 32, "patch_size": 16, "projection_dim": 16, **size}
    config = BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
    return random_network(BlipForQuestionAnswering, config, placement), tokenizer
