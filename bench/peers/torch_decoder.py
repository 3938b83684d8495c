"""The decoder in torch; its parameters have the order and shapes of `decoder_work`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from bench.peers import decoder_work

_WIDTH, _HEADS = decoder_work.WIDTH, decoder_work.HEADS


def _norm() -> nn.LayerNorm:
    return nn.LayerNorm(_WIDTH, eps=decoder_work.NORM_EPSILON)


class _TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a = _norm()
        self.query = nn.Linear(_WIDTH, _WIDTH)
        self.key = nn.Linear(_WIDTH, _WIDTH)
        self.value = nn.Linear(_WIDTH, _WIDTH)
        self.output = nn.Linear(_WIDTH, _WIDTH)
        self.norm_b = _norm()
        self.wide = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.narrow = nn.Linear(4 * _WIDTH, _WIDTH)

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(-1, (_HEADS, -1)).transpose(1, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the block's output [N, T, width] for `hidden` [N, T, width]."""
        normed = self.norm_a(hidden)
        parts = [self._heads(of(normed)) for of in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return hidden + self.narrow(functional.gelu(self.wide(self.norm_b(hidden))))


class TorchDecoder(nn.Module):
    """Decoder that maps tokens [N, T] int64 to logits [N, T, 256] of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(decoder_work.VOCABULARY, _WIDTH)
        self.position = nn.Embedding(decoder_work.CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(_TorchBlock() for _ in range(decoder_work.BLOCKS)))
        self.norm = _norm()
        self.logits = nn.Linear(_WIDTH, decoder_work.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, T, 256] for tokens [N, T]."""
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.logits(self.norm(self.blocks(hidden)))
