"""How much attention each token gets: sampled while the model computes."""

from __future__ import annotations

import torch

__all__ = ["AttentionMass", "block_scores"]

QUERIES = 32
"""Queries of a chunk that are looked at in a layer, each by one head of those that share keys, in turn."""
LAYERS = 3
"""One of so many layers is looked at: a look costs more for being one than for its queries."""
SINKS = 4
"""First tokens of a prompt, which every query attends to whatever they say."""

_GOLDEN = (5**0.5 - 1) / 2


class AttentionMass:
    """The attention that the tokens of one prompt received.

    Args:
        tokens: how many there are at most.
        queries: of each pass, how many to look at in every third layer. Default 32; ``None`` looks at all of them, by all
            heads, in all layers.
        device: the model's, which is not waited for. Default the host.

    Attributes:
        mass: ``float32[tokens]``: softmax weights, over heads, layers and the queries looked at.
        seen: ``float32[tokens]``: how many of these could see the token.
    """

    def __init__(self, tokens: int, queries: int | None = QUERIES, device: torch.device | None = None) -> None:
        self.queries = queries
        self.mass = torch.zeros(tokens, device=device)
        self.seen = torch.zeros(tokens, device=device)

    def scores(self) -> torch.Tensor:
        """``float32[tokens]``: mass over how often a token was visible; 0 where it never was.

        Early tokens are visible to more queries than late ones, which says nothing of how much they matter.
        """
        return torch.where(self.seen > 0, self.mass / self.seen.clamp(min=1), 0.0)

    @torch.no_grad()
    def look(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        window: int | None,
    ) -> None:
        """Count a pass of one layer.

        Args:
            layer: its number. Each layer has queries and heads of its own: the same ones in all layers would say little more
                than one layer does. Multiples of the golden ratio spread them evenly, however many layers there are.
            query: ``[1, heads, T, width]``, after RoPE.
            key: ``[1, KV heads, K + T, width]``, after RoPE.
            mask: ``[1, 1, T, K + T]``, of flags or of numbers to add; or ``[1, K + T]``, which tokens are there, for causal;
                ``None`` for causal of all.
            scaling: of the scores.
            window: tokens that a query sees, itself included; ``None`` for all.
        """
        count, length = query.shape[2], key.shape[2]
        unseen, turn = layer % LAYERS and self.queries is not None, layer // LAYERS
        if unseen or query.shape[0] != 1 or length > self.mass.numel():
            return
        heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        if self.queries is None:
            picked = torch.arange(count, device=query.device).repeat(groups)
            head = torch.arange(groups, device=query.device).repeat_interleave(count)
        else:
            step = max(count // self.queries, 1)
            picked = torch.arange(count - 1 - int(turn * _GOLDEN % 1 * step), -1, -step, device=query.device)
            head = torch.arange(turn, turn + picked.numel(), device=query.device) % groups
        some = query[0].view(heads, groups, count, -1)[:, head, picked] * scaling
        scores = (some @ key[0].transpose(1, 2)).float()
        if mask is not None and mask.dim() == 4:
            rows = mask[0, 0, picked, :length]
            visible = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
        else:
            at, keys = picked + (length - count), torch.arange(length, device=query.device)
            visible = keys[None] <= at[:, None]
            if window is not None:
                visible &= keys[None] > at[:, None] - window
            if mask is not None and mask.dim() == 2:
                visible &= mask[0, :length].bool()
        weights = scores.masked_fill_(~visible, -torch.inf).softmax(-1)
        # Products may overflow in fp16 where the model's own do not: what is no number would be one in no sum after it.
        weights = weights.nan_to_num_(0)
        self.mass[:length] += weights.view(-1, length).sum(0) / heads
        self.seen[:length] += visible.sum(0)


def block_scores(scores: torch.Tensor, first: int, blocks: int, block_tokens: int) -> list[float]:
    """The score of each block: the mean of its tokens', and for those with the first tokens of a prompt the largest.

    Args:
        scores: of each token.
        first: the first block's number.
        blocks: how many.
        block_tokens: tokens of one.
    """
    part = scores[first * block_tokens : (first + blocks) * block_tokens]
    means: list[float] = part.view(blocks, block_tokens).mean(1).tolist()
    sinks = -(-SINKS // block_tokens)
    top = max(means, default=0.0)
    return [top if first + i < sinks else mean for i, mean in enumerate(means)]
