"""Modules that compute the loss of a judge's answers: chat models of transformers, and generators that answer (Show-o).

Each is one `nn.Module`, so that FSDP gathers its shards in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from ..core.distributions import Categorical
from ..core.model_spec import ModelSpec
from ..core.policy import Backbone
from ..core.registry import ConfigError
from ..core.types import Loss, Metadata, Placement
from ..rewards.backbones.frozen_models import silence_transformers
from .chat_model import ChatModel
from .chat_processors import ChatInputs, ChatProcessor
from .yes_no import IMAGE


def _flatten_loss(loss: Loss) -> tuple[list[Any], int]:
    return [loss.rows, loss.metrics], loss.steps


def _unflatten_loss(values: Iterable[Any], steps: Any) -> Loss:
    rows, metrics = values
    return Loss(rows, metrics, steps)


# Modules below return a Loss, and FSDP of PyTorch 2.11 finds the tensors of a module's output in pytrees only.
register_pytree_node(Loss, _flatten_loss, _unflatten_loss)


class ChatModelForFinetuning(nn.Module):
    """A chat model as a module from images, conversations and answers to the loss of the answers."""

    def __init__(self, chat: ChatModel) -> None:
        super().__init__()
        self.net: nn.Module = chat.net
        self.chat = chat
        # A tied head gets no adapter, which would change the input embeddings too.
        tied = _tied_head(chat.net)
        self.lora_targets = tuple(
            name for name, module in self.named_modules() if isinstance(module, nn.Linear) and module is not tied
        )

    def forward(self, pixels: Tensor, conversations: Sequence[Metadata], first: bool = False) -> Loss:
        """Mean negative log-likelihood of an answer's tokens, or of its `first` one, and the accuracy of the first."""
        processor = self.chat.processor
        turns = [conversation["turns"] for conversation in conversations]
        texts = [processor.render(x if IMAGE in x[0] else (f"{IMAGE}\n{x[0]}", *x[1:])) for x in turns]
        inputs = processor.encode(pixels, texts)
        ids, mask = self._answer_tokens([str(conversation["answer"]) for conversation in conversations], pixels.device)
        ids, mask = (ids[:, :1], mask[:, :1]) if first else (ids, mask)
        return answer_loss(self.net, processor, inputs, ids, mask)

    def _answer_tokens(self, texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens of answers with their end-of-sequence token, padded on the right, and their mask: [B, A] each."""
        tokenizer = self.chat.tokenizer
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        rows = [[*tokenizer(text, add_special_tokens=False).input_ids, *end] for text in texts]
        length, pad = max(map(len, rows)), tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
        return ids, mask


def answer_loss(net: nn.Module, processor: ChatProcessor, inputs: ChatInputs, ids: Tensor, mask: Tensor) -> Loss:
    """Negative log-likelihood of answers [B, A] with mask [B, A] after the inputs, which are not learned.

    For PaliGemma, which attends to its prompt in both directions, it is the loss of a prefix language model.
    """
    # The last token predicts nothing more; the others are inputs for the next ones.
    longer = processor.append_answers(inputs, ids[:, :-1], mask[:, :-1])
    logits = net(use_cache=False, logits_to_keep=ids.shape[1], **longer.network_inputs).logits.float()
    log_probs = logits.log_softmax(-1).gather(2, ids[..., None])[..., 0]
    correct = (logits[:, 0].argmax(-1) == ids[:, 0]).float()
    return Loss(-(log_probs * mask).sum(1) / mask.sum(1), {"accuracy": correct})


def _tied_head(net: Any) -> Any:
    """The output head, if it shares its weights with the input embeddings."""
    head, embeddings = net.get_output_embeddings(), net.get_input_embeddings()
    return head if head is not None and head.weight is embeddings.weight else None


def save_chat_model(chat: ChatModel, path: Path) -> None:
    """Save a folder in the Hub's layout, for transformers and for the reward `vlm`."""
    with silence_transformers():
        chat.net.save_pretrained(path)
        for processor in chat.processor.saved_processors:
            processor.save_pretrained(path)


class GeneratorJudge(nn.Module):
    """A generator that answers questions (Show-o), as a module from images and conversations to the answers' loss."""

    lora_targets: tuple[str, ...] = ()  # all linear layers

    def __init__(self, model: Backbone) -> None:
        super().__init__()
        self.net = model.net
        self.model = model  # no module, because its image encoder is frozen

    def forward(self, pixels: Tensor, conversations: Sequence[Metadata], first: bool = False) -> Loss:
        """Mean negative log-likelihood of an answer's tokens, or of its `first` one, and the accuracy of the first."""
        scores = self.model.score_answers(
            pixels,
            [conversation["turns"] for conversation in conversations],
            [str(conversation["answer"]) for conversation in conversations],
        )
        is_first = scores.mask & (scores.mask.cumsum(1) == 1)
        log_probs = Categorical(scores.logits).log_prob(scores.ids)
        correct = ((scores.logits.argmax(-1) == scores.ids) & is_first).any(1).float()
        weight = (is_first if first else scores.mask).float()
        return Loss(-(log_probs * weight).sum(1) / weight.sum(1), {"accuracy": correct})


def load_generator_judge(spec: ModelSpec, placement: Placement) -> GeneratorJudge:
    """A generator that answers questions about images; refuses others."""
    model = spec.load(placement)
    if model.answers_questions:
        return GeneratorJudge(model)
    raise ConfigError(
        f"judge.model: {type(spec).__name__} does not answer questions about images; use a model of type showo [TM715]"
    )
