"""A language model on packed rows: JSONL is tokenised and packed in the store; attention stays in each text.

    python -m examples.tokens s3://corpus/v1 --tokenizer s3://corpus/tokenizer.json

Law: no text passes through here; a row is tokens, which text each belongs to, and where in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import meshsdk as mesh
from examples.arguments import command_line, positive, run
from examples.figures import SeenRows, report
from meshsdk import ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def packed_tokens(url: str, tokenizer: str, length: int) -> mesh.Dataset:
    """Rows of `length` tokens, several texts in each; the lines' "text" is what is tokenised."""
    lines = mesh.open(url, fields={"tokens": "jsonl"}, kind="lines")
    return lines.map(ops.json("tokens", "text"), ops.tokenize("tokens", tokenizer)).pack(
        "tokens", length=length
    )


class Block(nn.Module):
    """Attention and a small network, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.think(self.between(x))


class LanguageModel(nn.Module):
    """`tokens`, `segments`, `positions` [rows, length] → logits; widths in multiples of 8."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(-(-vocabulary // 8) * 8, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        allowed = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, allowed)
        return x @ self.words.weight.T


def next_token_loss(model: nn.Module, batch: mesh.Batch, device: torch.device) -> torch.Tensor:
    """Mean over the tokens that follow another of the same text, in rows that count."""
    tokens, segments, places = (
        batch[name].to(device).long() for name in ("tokens", "tokens.segments", "tokens.positions")
    )
    logits = model(tokens, segments, places)[:, :-1]
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    counts &= (batch.status == 0).to(device)[:, None]
    each = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1)


def check_vocabulary(tokens: torch.Tensor, vocabulary: int) -> None:
    """Raises SystemExit for tokens that a model of this vocabulary has no place for."""
    largest = int(tokens.long().max())  # of uint16 torch has no maximum
    if largest >= vocabulary:
        raise SystemExit(
            f"--vocabulary {vocabulary}: the tokenizer gives the token {largest}. Give as many as it knows, "
            f"{largest + 1} or more; the default is {1 << 16}"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("examples.tokens", __doc__)
    parser.add_argument("source", help="JSONL files with a text a line, as s3://corpus/v1")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, as s3://corpus/tokenizer.json")
    parser.add_argument("--vocabulary", type=positive, default=1 << 16, help="tokens it knows, or more")
    parser.add_argument("--length", type=positive, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=positive, default=8, help="rows of a step over all ranks")
    parser.add_argument("--steps", type=positive, default=100, help="in all")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The losses, step by step."""
    options = parse(arguments)
    torch.manual_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = packed_tokens(options.source, options.tokenizer, options.length)
    model = LanguageModel(options.vocabulary, options.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), options.rate)
    losses: list[float] = []
    seen, filled = SeenRows(), 0
    with mesh.Loader(dataset, options.batch, seed=7, shuffle=mesh.Blocks(shards=16)) as loader:
        while len(losses) < options.steps:
            for batch in loader:
                check_vocabulary(batch["tokens"], options.vocabulary)
                loss = next_token_loss(model, batch, device)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.add(batch)
                losses.append(loss.item())
                filled += int((batch["tokens.segments"] > 0).sum())
                if len(losses) == options.steps:
                    break
        share = filled / (loader.stats().samples * options.length)
        report(loader, seen.total, loss=f"{losses[-1]:.3f}", tokens=filled, filled=f"{share:.0%}")
    return losses


if __name__ == "__main__":
    run(main)
