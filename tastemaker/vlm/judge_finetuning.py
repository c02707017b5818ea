"""Fine-tuning of a vision-language judge: one module computes the answer loss, so that FSDP gathers its shards once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.types import Loss, Metadata
from ..rewards.backbones.loading import quiet_transformers
from .chat_model import ChatModel
from .chat_processors import ChatInputs, ChatProcessor, Conversation
from .yes_no import IMAGE


class ChatModelForFinetuning(nn.Module):
    """From pictures, what was said and what is to be answered, to how far the answers are from being given."""

    def __init__(self, chat: ChatModel) -> None:
        super().__init__()
        self.net: nn.Module = chat.net
        self.chat = chat
        # A head that is the table of words too is not adapted: added to the one, adapters would change the other.
        kept = _shared(chat.net)
        self.usual = tuple(name for name, x in self.named_modules() if isinstance(x, nn.Linear) and x is not kept)

    def forward(self, pixels: Tensor, asked: Sequence[Metadata], first: bool = False) -> Loss:
        """Minus the mean log-probability of an answer's tokens, or of its `first`, and whether that is likeliest."""
        speech = self.chat.speech
        said = speech.asked(pixels, [speech.written(_shown(each["turns"])) for each in asked])
        ids, mask = self._answers([str(each["answer"]) for each in asked], pixels.device)
        ids, mask = (ids[:, :1], mask[:, :1]) if first else (ids, mask)
        return answer_loss(self.net, speech, said, ids, mask)

    def _answers(self, texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """The tokens of answers, each with the end of its turn, and which of them count: [B, A], [B, A]."""
        tokenizer = self.chat.tokenizer
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        rows = [[*tokenizer(text, add_special_tokens=False).input_ids, *end] for text in texts]
        longest, filler = max(map(len, rows)), tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [filler] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
        return ids, mask


def answer_loss(net: nn.Module, speech: ChatProcessor, said: ChatInputs, ids: Tensor, mask: Tensor) -> Loss:
    """The loss of answers [B, A] of which some tokens count [B, A], after what was said; what was said is not learned.

    PaliGemma reads picture and question in any order, its answer in order alone: the loss of a prefix language model.
    """
    # The last token of an answer says nothing more; the others are read, for the next is said after them.
    read = speech.answered(said, ids[:, :-1], mask[:, :-1])
    logits = net(use_cache=False, logits_to_keep=ids.shape[1], **read.told).logits.float()
    each = logits.log_softmax(-1).gather(2, ids[..., None])[..., 0]
    right = (logits[:, 0].argmax(-1) == ids[:, 0]).float()
    return Loss(-(each * mask).sum(1) / mask.sum(1), {"right": right})


def _shared(net: Any) -> Any:
    """The head, if its weights are those of the words that are read."""
    head, words = net.get_output_embeddings(), net.get_input_embeddings()
    return head if head is not None and head.weight is words.weight else None


def _shown(turns: Conversation) -> Conversation:
    return turns if IMAGE in turns[0] else (f"{IMAGE}\n{turns[0]}", *turns[1:])


def save_chat_model(chat: ChatModel, path: Path) -> None:
    """A folder as the hub's, for transformers and for the reward `vlm`."""
    with quiet_transformers():
        chat.net.save_pretrained(path)
        for part in chat.speech.parts:
            part.save_pretrained(path)
