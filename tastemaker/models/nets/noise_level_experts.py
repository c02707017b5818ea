"""Networks that share the levels of noise between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoiseLevelExperts(nn.Module):
    """Two transformers, one for levels from the boundary up and one for those below; each sees its own rows alone."""

    partial = True

    def __init__(self, high: nn.Module, low: nn.Module, boundary: float) -> None:
        super().__init__()
        self.high, self.low, self.boundary = high, low, boundary

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        noisy = timestep >= 1000 * self.boundary
        out = torch.empty_like(hidden_states)
        for expert, mine in ((self.high, noisy), (self.low, ~noisy)):
            if bool(mine.any()):
                rows = mine.nonzero()[:, 0]
                made = expert(hidden_states[rows], timestep[rows], encoder_hidden_states[rows], return_dict=False)[0]
                out = out.to(made.dtype).index_copy(0, rows, made)
        return (out,)
