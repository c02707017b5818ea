"""Show-o's joint likelihood: image tokens, texts and answers about images in one call of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.types import Condition, Corrupted, Metadata, concatenate
from ..nets.showo import omni_attention_mask
from .vqa import encode_image_prefix, pack_image_text, tokenize_answer, tokenize_dialogue

if TYPE_CHECKING:
    from .model import ShowoBackbone

IGNORED = -100  # as target: the position predicts nothing


@dataclass(frozen=True)
class Sequences:
    """Sequences of one kind, left-padded to the same length."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, 1, L, L] whether a query (dimension 2) sees a key
    targets: Tensor  # [B, L] what the position predicts
    count: Tensor  # [B] tokens over which the log-likelihood is averaged
    feature_mask: Tensor  # [B, L] whether an image feature replaces the embedding

    def __len__(self) -> int:
        return len(self.ids)

    def pad_left(self, length: int, pad_id: int) -> Sequences:
        """Pad sequences on the left to `length` tokens. Positions shift, but attention depends on distances only."""
        more = length - self.ids.shape[1]
        # Every position has to attend to something: padding to padding.
        mask = F.pad(self.mask, (more, 0, more, 0))
        mask[:, :, :more, :more] = torch.ones(more, more, dtype=torch.bool, device=mask.device).tril()
        return Sequences(
            F.pad(self.ids, (more, 0), value=pad_id),
            mask,
            F.pad(self.targets, (more, 0), value=IGNORED),
            self.count,
            F.pad(self.feature_mask, (more, 0)),
        )


def joint_log_likelihood(
    model: ShowoBackbone,
    x: Tensor,
    noisy: Corrupted,
    cond: Condition,
    conversations: Sequence[Metadata],
    question_pixels: Tensor,
) -> Tensor:
    """Mean log-likelihood [B] of the masked image tokens, of a text, or of an answer, in one call of the network."""
    kinds = ["text" if "text" in each else "question" if "turns" in each else "image" for each in conversations]
    rows = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in ("image", "text", "question")}
    parts: list[Sequences] = []
    features: Tensor | None = None
    if rows["image"]:
        index = torch.tensor(rows["image"], device=x.device)
        hidden = noisy.noise[index]
        parts.append(_image_sequences(model, cond.tensors["text"][index], x[index], noisy.x[index], hidden))
    if rows["text"]:
        parts.append(_text_sequences(model, [str(conversations[i]["text"]) for i in rows["text"]]))
    if rows["question"]:
        index = torch.tensor(rows["question"], device=question_pixels.device)
        sequences, features = _question_sequences(
            model, question_pixels[index], [conversations[i] for i in rows["question"]]
        )
        parts.append(sequences)
    length = max(part.ids.shape[1] for part in parts)
    joint = concatenate([part.pad_left(length, model.vocabulary.pad_id) for part in parts])
    logits = model.net(
        joint.ids,
        joint.mask,
        image_features=features,
        feature_mask=None if features is None else joint.feature_mask,
    )[0]
    order = torch.tensor([i for kind in rows.values() for i in kind], device=x.device)
    return _mean_log_prob(model, logits, joint, len(rows["image"]))[order.argsort()]


def _mean_log_prob(model: ShowoBackbone, logits: Tensor, joint: Sequences, num_images: int) -> Tensor:
    """Mean log-probability of the targets of each sequence: [B]. The first `num_images` are captioned images."""
    images, others = logits[:num_images], logits[num_images:]
    if model.likelihood_scope == "codebook":
        images = images[..., model.vocabulary.image_ids]  # image tokens among image tokens
    normalizer = torch.cat([images.logsumexp(-1), others.logsumexp(-1)])
    log_prob = logits.gather(-1, joint.targets.clamp(min=0)[..., None])[..., 0] - normalizer
    return (log_prob * (joint.targets != IGNORED)).sum(1) / joint.count


def _image_sequences(model: ShowoBackbone, text: Tensor, x: Tensor, noisy: Tensor, hidden: Tensor) -> Sequences:
    """Captions [B, T] with image tokens [B, N], of which the hidden ones are predicted where they stand."""
    vocabulary = model.vocabulary
    ids = torch.cat([text, vocabulary.wrap_image_tokens(noisy)], 1)
    padding = (text == vocabulary.pad_id).sum(1)
    mask = omni_attention_mask(padding, text.shape[1], ids.shape[1])
    counted = F.pad(hidden, (1, 1), value=model.likelihood_scope == "sequence").bool()
    targets = torch.where(counted, vocabulary.wrap_image_tokens(x), IGNORED)
    targets = F.pad(targets, (text.shape[1], 0), value=IGNORED)
    return Sequences(ids, mask, targets, hidden.sum(1).float(), torch.zeros_like(ids, dtype=torch.bool))


def _text_sequences(model: ShowoBackbone, texts: Sequence[str]) -> Sequences:
    """Texts between two end-of-text tokens, as long as a caption with its image at most; every token but the first."""
    vocabulary, limit = model.vocabulary, model.prompt_tokenizer.length + model.shape[0] + 2
    tokens = []
    for text in texts:
        tokens.append([vocabulary.eos_id, *model.prompt_tokenizer.tokenizer(text), vocabulary.eos_id][:limit])
    longest = max(map(len, tokens))
    ids = torch.tensor([[vocabulary.pad_id] * (longest - len(each)) + each for each in tokens], device=model.device)
    padding = torch.tensor([longest - len(each) for each in tokens], device=model.device)
    mask = omni_attention_mask(padding, longest, longest)
    lengths = longest - padding - 1
    return Sequences(ids, mask, _next_tokens(ids, lengths), lengths.float(), torch.zeros_like(ids, dtype=torch.bool))


def _question_sequences(
    model: ShowoBackbone, pixels: Tensor, conversations: Sequence[Metadata]
) -> tuple[Sequences, Tensor | None]:
    """Images with conversations, of which the last answer is predicted, and image features if the model reads these."""
    answers = [tokenize_answer(model, str(each["answer"])) for each in conversations]
    prefix, features = encode_image_prefix(model, pixels)
    texts = [
        tokenize_dialogue(model, each["turns"]) + answer for each, answer in zip(conversations, answers, strict=True)
    ]
    ids, mask = pack_image_text(model.vocabulary, prefix, texts)
    lengths = torch.tensor([len(answer) for answer in answers], device=ids.device)
    feature_mask = (ids == model.vocabulary.mask_id) & (features is not None)
    return Sequences(ids, mask, _next_tokens(ids, lengths), lengths.float(), feature_mask), features


def _next_tokens(ids: Tensor, lengths: Tensor) -> Tensor:
    """Targets [B, L] for predicting the last `lengths` tokens of each sequence [B, L] from those before."""
    following = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    positions = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(positions >= ids.shape[1] - 1 - lengths[:, None], following, IGNORED)
