"""A decoder of three blocks in float16; one feed-forward multiplies its activations.

`overflows.py SCALE [FRAMES]`: with FRAMES the frames of batches 0 and 2 are kept there.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from distdiag import DebugUnderflowOverflow


class FeedForward(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.wo(torch.relu(self.wi(x)) * self.scale)
        return hidden


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(size), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.ff(self.norm(x))
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.block = nn.ModuleList([Block(32) for _ in range(3)])
        self.head = nn.Linear(32, 64)
        self.half()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.block:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def train(model: Decoder, scale: float) -> None:
    ids = torch.randint(0, 64, (2, 8))
    for step in range(3):
        block = model.block[2]
        assert isinstance(block, Block)
        block.ff.scale = scale if step == 2 else 1.0
        model(ids).float().logsumexp(-1).mean().backward()


if __name__ == "__main__":
    torch.manual_seed(0)
    decoder = Decoder()
    if len(sys.argv) > 2:
        DebugUnderflowOverflow(decoder, save=sys.argv[2], trace_batch_nums=[0, 2])
    train(decoder, float(sys.argv[1]))
