"""Published generators of tokens at full size without their weights: LlamaGen writes them, Show-o reveals them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import RunConfig
from ..core.distributions import MAX_CHUNK_LOGITS, Categorical, ChunkedCategorical
from ..core.types import Placement
from ..models import loading
from ..models.llamagen.model import Llamagen
from ..models.nets.gpt import GPT
from ..models.nets.magvit import Magvit
from ..models.nets.showo import ShowoTransformer as Phi
from ..models.nets.showo import omni_attention_mask
from ..models.nets.token_decoder import allocate_kv_cache, decode_step, transformer_blocks
from ..models.nets.vq import VQ, VQConfig
from ..models.showo.model import Showo

LEVELS = {8: (1, 2, 2, 4), 16: (1, 1, 2, 2, 4)}  # of LlamaGen's tokenizers, by pixels a token


@dataclass
class FakeBackbone:
    """What weights are put into."""

    net: nn.Module


@dataclass(frozen=True)
class TokenRunSettings:
    """What of a run decides how tokens are made and scored."""

    dtype: torch.dtype  # that products are computed in
    apart: bool  # weights lie in shards, which only whole calls put together
    scored: int  # rows the network sees for each that is scored: 2 under guidance
    guided: int  # likewise while sampling
    group: int  # samples of one reading, where all of a group are drawn of one
    replay: bool  # samples are read once more by the call that will score them

    @classmethod
    def of(cls, config: RunConfig, dtype: torch.dtype, world: int) -> TokenRunSettings:
        guidance, objective = config.guidance, config.objective
        guided = 1 if guidance is None or guidance.scale == 1 else 2
        scored = 1 if guidance is None or guidance.rollouts_only else guided
        once = objective.samples() and objective.calls(2) == 1
        process: Any = config.process
        apart = world > 1 and config.engine.strategy != "replicated"
        return cls(dtype, apart, scored, guided, objective.group if once else 1, process.replay)


class FakeLlamagen:
    """LlamaGen: a cache of keys and values laid out once, a step of all rows, and one reading that scores."""

    def __init__(self, spec: Llamagen, placement: Placement, setting: TokenRunSettings) -> None:
        self.spec, self.setting, self.length = spec, setting, spec.shape[0]
        net = loading.init_random(lambda: GPT(spec.sizes()), 0, placement)
        self.shape, self.backbone = net.shape, FakeBackbone(net)
        self.codec, self.cache = self._codec() if spec.codec else None, self._room(0)

    def _codec(self) -> VQ:
        several = LEVELS.get(self.spec.downsample, (1,) * self.spec.downsample.bit_length())
        return VQ(VQConfig(128, several, 2, 256, self.spec.codes, 8)).requires_grad_(False)

    def frozen(self) -> Iterator[nn.Parameter]:
        return iter(()) if self.codec is None else self.codec.parameters()

    def _told(self, rows: int) -> tuple[Tensor, Tensor | None]:
        if self.shape.told == "class":
            return torch.empty(rows, dtype=torch.long), None
        features = torch.empty(rows, self.shape.prefix, self.shape.vocabulary, dtype=self.setting.dtype)
        return features, torch.empty(rows, self.shape.prefix, dtype=torch.bool)

    def score(self, rows: int) -> Tensor:
        """Log-probabilities of whole sequences; of many, no logits are held."""
        net: Any = self.backbone.net
        told, shown = self._told(rows)
        ids = torch.empty(rows, self.length, dtype=torch.long)
        kept = ids[: -(-rows // self.setting.scored)]
        whole = not self.setting.apart and type(net.output) is nn.Linear
        if not whole or kept.numel() * self.shape.codes <= MAX_CHUNK_LOGITS:
            logits = self._led(net(ids[:, :-1], told, None, shown)[0])
            return Categorical(logits.float()).log_prob(kept)
        states = self._led(net.states(ids[:, :-1], told, None, shown)[0]).to(self.setting.dtype)
        return ChunkedCategorical(states, net.output.weight.to(self.setting.dtype)).log_prob(kept)

    def _led(self, x: Tensor) -> Tensor:
        """Of both halves one, where decisions are scored under guidance."""
        if self.setting.scored == 1 or len(x) == 1:
            return x
        given, without = x.float().chunk(2)
        return without + 2 * (given - without)

    def sample(self, rows: int) -> None:
        if self.setting.group > 1:
            self._force(rows)
        else:
            self.step(rows, self.length - 1)
            if self.setting.replay:
                self.score(max(1, rows // self.setting.guided * self.setting.scored))
        self._decode(max(1, rows // self.setting.guided))

    def _force(self, rows: int) -> None:
        """Some pictures are read once, and every token of their groups is drawn of what was read."""
        net: Any = self.backbone.net
        few = max(1, rows // self.setting.group)
        told, shown = self._told(few)
        logits = self._led(net(torch.empty(few, self.length - 1, dtype=torch.long), told, None, shown)[0])
        logits.float().softmax(-1).cumsum(-1)

    def _decode(self, rows: int) -> None:
        if self.codec is not None:
            self.codec.decode(torch.empty(rows, self.length, dtype=torch.long))

    def step(self, rows: int, read: int) -> None:
        """One token of every row after so many, by a cache that is there; grown anew where weights lie apart."""
        net: Any = self.backbone.net
        place = self.shape.prefix + read
        shown = self._told(rows)[1]
        ids = torch.empty(rows, dtype=torch.long)
        if not self.setting.apart:
            cache = self.cache if rows == self.cache.shape[2] else self._room(rows)
            decode_step(net, ids, shown, cache[..., : self.shape.head], place)
            return
        heads = self.shape.kv_heads or self.shape.heads
        each = [torch.empty(rows, heads, place, self.shape.head, dtype=self.setting.dtype) for _ in range(2)]
        past = tuple((each[0].clone(), each[1].clone()) for _ in range(self.shape.depth))
        net(ids[:, None], None, past, shown)

    def call(self) -> None:
        """What one call costs in the mean, while sampling one row."""
        if self.setting.group > 1:
            self.score(1)
        else:
            self.step(1, self.length // 2)

    def again(self, calls: int) -> int:
        """Readings of a sample beside the calls that make it."""
        return self.setting.scored if self.setting.replay and self.setting.group == 1 else 0

    def matrices(self) -> float:
        """Weights that a step multiplies by: all but embeddings."""
        net: Any = self.backbone.net
        return float(
            sum(p.numel() for block in transformer_blocks(net) for p in block.parameters()) + net.output.weight.numel()
        )

    def place(self) -> float:
        """Bytes that one place of one row takes in the cache."""
        heads, stride = self.shape.kv_heads or self.shape.heads, -(-self.shape.head // 8) * 8
        return 2.0 * self.shape.depth * heads * stride * self.setting.dtype.itemsize

    def read(self, rows: int) -> None:
        """Tokens are what the data hold, as a rule."""

    def held(self, rows: int, adapted: bool) -> list[Tensor]:
        """The cache, and copies of weights that are of another precision or adapted."""
        if self.setting.apart or self.setting.group > 1:
            return []
        net: Any = self.backbone.net
        copied = adapted or next(net.parameters()).dtype != self.setting.dtype
        copies = torch.empty(int(self.matrices()) if copied else 0, dtype=self.setting.dtype)
        self.cache = self._room(rows)
        return [self.cache, copies]

    def _room(self, rows: int) -> Tensor:
        return allocate_kv_cache(
            self.shape, rows, torch.empty(0, dtype=self.setting.dtype), -(-self.shape.head // 8) * 8
        )

    def moved(self, samples: float, at_once: int) -> float:
        """Bytes that writing must read: all matrices for each token of each batch, and what each row has read."""
        if not samples or self.setting.group > 1:
            return 0.0
        rows = samples * self.setting.guided
        batches = max(1.0, rows / at_once)
        read = self.shape.prefix + self.length / 2
        return self.length * (batches * self.matrices() * self.setting.dtype.itemsize + rows * read * self.place())


class FakeShowo:
    """Show-o: prompt and picture are read whole at every step, and scored by one such reading."""

    def __init__(self, spec: Showo, placement: Placement, setting: TokenRunSettings) -> None:
        self.spec, self.setting, self.length = spec, setting, spec.shape[0]
        self.words = spec.sizes().vocabulary
        self.backbone = FakeBackbone(loading.init_random(lambda: Phi(spec.sizes()), 0, placement))
        self.codec = Magvit(spec.magvit()).requires_grad_(False) if spec.codec else None

    def frozen(self) -> Iterator[nn.Parameter]:
        return iter(()) if self.codec is None else self.codec.parameters()

    def _read(self, rows: int, tokens: slice) -> Tensor:
        """Logits of the picture's places, of codes or of all ids; no prompt is shorter than it may be."""
        net: Any = self.backbone.net
        start = self.spec.words + 1
        ids = torch.empty(rows, start + self.length + 2, dtype=torch.long)
        allowed = omni_attention_mask(torch.empty(rows, dtype=torch.long), start, ids.shape[1])
        ends = 0 if tokens == slice(None) else 1
        logits: Tensor = net(ids, allowed, places=slice(start + ends, ids.shape[1] - ends), tokens=tokens)[0]
        return logits

    def score(self, rows: int) -> Tensor:
        logits = self._led(self._read(rows, slice(None) if self.spec.scored == "sequence" else self.words.pictures))
        return Categorical(logits).log_prob(torch.empty(logits.shape[:2], dtype=torch.long))

    def _led(self, x: Tensor) -> Tensor:
        if self.setting.scored == 1 or len(x) == 1:
            return x
        given, without = x.chunk(2)
        return without + 2 * (given - without)

    def sample(self, rows: int) -> None:
        """A step, in which tokens are drawn; then the pictures."""
        shown = max(1, rows // self.setting.guided)
        logits = self._read(rows, self.words.pictures)
        if self.setting.guided > 1 and rows > 1:
            given, without = logits.chunk(2)
            logits = without + 2 * (given - without)
        found = Categorical(logits)
        found.log_prob(found.quantile(torch.empty(logits.shape[:2])))
        if self.codec is not None:
            self.codec.decode(torch.empty(shown, self.length, dtype=torch.long))

    def call(self) -> None:
        self._read(1, self.words.pictures)

    def again(self, calls: int) -> int:
        """Where rollouts alone are guided, each step is read once more without."""
        return calls if self.setting.replay and self.setting.guided > self.setting.scored else 0

    def read(self, rows: int) -> None:
        """Tokens are what the data hold, as a rule."""

    def held(self, rows: int, adapted: bool) -> list[Tensor]:
        return []

    def moved(self, samples: float, at_once: int) -> float:
        return 0.0
