"""Table 5: Transformer-XL on WikiText-103, its memory in place or replaced by others.

    python -m experiments.cached.table5 --data data/wikitext-103 --size base --minutes 10

Cached Transformers, https://arxiv.org/abs/2312.12742; test perplexity. Kinds: `baseline` (the last M tokens of every
layer), `MT` (learned memory tokens in front, beside that memory), `RMT` (memory tokens that are written and read on,
in its place, gradients over two segments), `GRC` (a gated recurrent cache in its place, one per stream, delayed so
that no token sees its future). The paper gives no settings but "default configurations": base 16 layers, width 410, 10
heads, MLP 2,100, segments and memory of 150, dropout 0.1; large 18, 1,024, 16, 4,096, 384, dropout 0.2; Adam 2.5e-4
with cosine. Words by adaptive softmax (20,000, 40,000, 200,000); input and output tables are not tied here. Text as
DATA/{train,valid,test}.txt: WikiText-103 (huggingface.co/datasets/Salesforce/wikitext), or the Penn Treebank for a
quick try.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import weft
from experiments.tokens import encoded
from weft.layers import FeedForward, TransformerXLAttention

PAPER = {
    "base": {"baseline": 24.0, "MT": 23.99, "RMT": 23.95, "GRC": 22.9},
    "large": {"baseline": 18.3, "GRC": 17.9},
}
SIZES = {
    "base": dict(layers=16, dim=410, heads=10, mlp_dim=2100, segment=150, dropout=0.1),
    "large": dict(layers=18, dim=1024, heads=16, mlp_dim=4096, segment=384, dropout=0.2),
    "tiny": dict(layers=2, dim=32, heads=2, mlp_dim=64, segment=16, dropout=0.0),
}
TOKENS = 10  # memory tokens of MT and RMT


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dim: int, mlp_dim: int, dropout: float):
        super().__init__()
        self.attention, self.feedforward = attention, FeedForward(dim, mlp_dim, dropout=dropout)
        self.norms, self.dropout = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)]), nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Any) -> tuple[Tensor, Any]:
        found = self.attention(self.norms[0](x), memory) if memory is not False else self.attention(self.norms[0](x))
        y, memory = found if isinstance(found, tuple) else (found, False)
        x = x + self.dropout(y)
        return x + self.dropout(self.feedforward(self.norms[1](x))), memory


class XL(nn.Module):
    """`model(ids, state)` -> vectors (B, L, dim) and the state for the next segment."""

    def __init__(self, kind: str, vocab: int, *, layers: int, dim: int, heads: int, mlp_dim: int, segment: int,
                 dropout: float):  # fmt: skip
        super().__init__()
        self.kind, self.layers = kind, layers
        self.fifo = kind in ("baseline", "MT")
        self.embed, self.dropout = nn.Embedding(vocab, dim), nn.Dropout(dropout)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.tokens = nn.Parameter(torch.randn(TOKENS, dim) * 0.02) if kind in ("MT", "RMT") else None
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            attention: nn.Module = TransformerXLAttention(dim, heads, segment if self.fifo else 0, dropout=dropout)
            if kind == "GRC":
                attention = weft.CachedAttention(
                    attention, 0.5, segment, delayed=True, scope="stream", eval_update=True
                )
            self.blocks.append(Block(attention, dim, mlp_dim, dropout))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        x = self.dropout(self.embed(ids) * math.sqrt(self.embed.embedding_dim))
        B, L = ids.shape
        front = back = 0
        if self.tokens is not None:
            memory = self.tokens.to(x.dtype).expand(B, -1, -1)
            if self.kind == "RMT":
                memory, back = state if state is not None else memory, TOKENS
                x = torch.cat([memory, x, memory], 1)
            else:
                x = torch.cat([memory, x], 1)
            front = TOKENS
        kept = []
        before = state if self.fifo and state is not None else [None if self.fifo else False] * self.layers
        for block, memory in zip(self.blocks, before, strict=True):
            x, memory = block(x, memory)
            kept.append(memory)
        x = self.norm(x)
        following = x[:, front + L :] if back else kept if self.fifo else None
        return x[:, front : front + L], following


class Text:
    """A text as streams side by side."""

    def __init__(self, ids: Any, rows: int, segment: int, device: torch.device):
        self.count = (len(ids) - 1) // (rows * segment)
        if not self.count:
            raise SystemExit(f"{len(ids)} words are not enough for {rows} streams of {segment}")
        whole, size = torch.as_tensor(ids, dtype=torch.int32), self.count * segment
        self.x, self.y = (whole[a : a + rows * size].view(rows, self.count, segment).to(device) for a in (0, 1))

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.x[:, number % self.count].long(), self.y[:, number % self.count].long()


@torch.no_grad()
def perplexity(model: XL, head: nn.AdaptiveLogSoftmaxWithLoss, text: Text) -> float:
    """Segment after segment, memories carried on; nothing is kept for training afterwards."""
    held = [{k: v.clone() for k, v in m.cache.state_dict().items()} for m in caches(model)]
    for layer in caches(model):
        layer.reset()
    model.eval()
    total, count, state = 0.0, 0, None
    for number in range(text.count):
        x, y = text[number]
        with torch.autocast(x.device.type, torch.bfloat16):
            found, state = model(x, state)
        total += head(found.float().flatten(0, 1), y.flatten()).loss.item() * y.numel()
        count += y.numel()
    model.train()
    for layer, kept in zip(caches(model), held, strict=True):
        layer.reset()
        layer.cache.load_state_dict(kept)
    return math.exp(min(50.0, total / count))


def caches(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, weft.CachedAttention)]


def detached(state: Any) -> Any:
    return state.detach() if isinstance(state, Tensor) else state  # a FIFO memory comes out detached


def train(kind: str, texts: dict[str, Text], vocab: int, o: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(o.seed)
    settings = SIZES[o.size]
    model = XL(kind, vocab, **settings).to(device)  # type: ignore[arg-type]
    cutoffs = [c for c in (20_000, 40_000, 200_000) if c < vocab] or [vocab // 2]
    head = nn.AdaptiveLogSoftmaxWithLoss(settings["dim"], vocab, cutoffs, div_value=1.0).to(device)  # type: ignore
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=o.learning_rate)
    state, began, losses, seconds, looks = None, time.perf_counter(), [], 0.0, []
    limit = 60 * o.minutes if o.minutes else math.inf
    unroll = 2 if kind == "RMT" else 1  # what it writes is only read a segment later
    steps = max(1, o.steps // unroll)
    for step in range(steps):
        done = max(step / steps, seconds / limit)
        rate = min((step + 1) / o.warmup, 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = o.learning_rate * rate
        loss = torch.zeros((), device=device)
        for number in range(unroll * step, unroll * (step + 1)):
            if number and number % texts["train"].count == 0:  # the text begins again
                state = None
                for layer in caches(model):
                    layer.reset()
            x, y = texts["train"][number]
            with torch.autocast(device.type, torch.bfloat16):
                found, state = model(x, state)
            loss = loss + head(found.float().flatten(0, 1), y.flatten()).loss / unroll
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()
        state = detached(state)
        if (step + 1) % o.look_every == 0 or step + 1 == steps:
            losses.append(round(loss.item(), 4))
            seconds += time.perf_counter() - began
            looks.append([step + 1, round(seconds, 1), round(perplexity(model, head, texts["valid"]), 3)])
            print(f"{kind}: step {step + 1}, {seconds:.0f} s, validation perplexity {looks[-1][2]}", flush=True)
            began = time.perf_counter()
            if seconds >= limit:
                break
    return {
        "parameters": sum(p.numel() for p in parameters),
        "steps": step + 1,
        "seconds": round(seconds, 1),
        "loss": losses,
        "valid_step_seconds_perplexity": looks,
        "test_perplexity": round(perplexity(model, head, texts["test"]), 3),
        "paper": PAPER.get(o.size, {}).get(kind),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/cached-table-5"))
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--kinds", nargs="+", default=["baseline", "MT", "RMT", "GRC"])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, help="at most so many for each; the rate then follows the clock")
    parser.add_argument("--batch", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--look-every", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids, vocab = encoded(o.data, 0)
    segment = int(SIZES[o.size]["segment"])
    texts = {part: Text(ids[part], o.batch if part == "train" else 10, segment, device) for part in ids}
    o.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(o).items()}}
    for kind in o.kinds:
        results[kind] = train(kind, texts, vocab, o, device)
        (o.out / "result.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{kind}: {results[kind]}", flush=True)


if __name__ == "__main__":
    main()
