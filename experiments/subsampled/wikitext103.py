"""Tables 1, 8 and 10, WikiText-103: sampled training, dense finish, and the ensemble of sub-models, in perplexity.

    python -m experiments.subsampled.wikitext103 --data data --rows S16-L4

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705: 16 layers, width 1,024, 8 heads, ALiBi, 3,072
words, adaptive input and softmax (cutoffs 20,000 and 60,000), 64,000 steps of 64, rate 1e-3 after 16,000 of warm-up,
cosine; σ from 0.2 to 0.35 with depth; the dense finish from step 52,500 on. The text
(huggingface.co/datasets/Salesforce/wikitext, wikitext-103-v1) as data/wikitext-103/{train,valid,test}.txt. Perplexity
of segments that do not overlap; the paper's is lower, probably by a sliding window. The input and output tables are
not tied here. `--ensemble 50` evaluates the finished runs as ensembles (Table 10).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.table import Row, add_once, run
from experiments.tokens import Tokens
from weft.attention.subsampled import Subsampling
from weft.lab import load_run
from weft.layers import ALiBi
from weft.layers.encoder import NORM_EPS
from weft.models.build import encoder_blocks
from weft.tasks import TaskData
from weft.tasks.base import Columns, block_options
from weft.tasks.config import TrainConfig

# row -> schedule, dense finish, the paper's test perplexity, and that of an ensemble of 50 (Table 10)
PAPER: dict[str, tuple[str, float, float | None, float | None]] = {
    "S0, dense": ("", 0.0, None, None),
    "S16-L2": ("S16-L2", 0.0, 17.84, None),
    "S16-L2 +FT": ("S16-L2", 0.82, 17.68, None),
    "S16-L4": ("S16-L4", 0.0, 18.13, None),
    "S16-L4 +FT": ("S16-L4", 0.82, 17.60, None),
    "S16-L6": ("S16-L6", 0.0, 18.30, 17.80),
    "S16-L6 +FT": ("S16-L6", 0.82, 17.86, 17.53),
    "S12-L8": ("S12-L8", 0.0, 18.69, 18.10),
    "S12-L8 +FT": ("S12-L8", 0.82, 17.92, 17.69),
    "S16-L2 unbiased": ("S16-L2U", 0.0, 18.18, None),
    "S16-L2 unbiased +FT": ("S16-L2U", 0.82, 17.69, None),
    "S16-L4 unbiased": ("S16-L4U", 0.0, 20.15, None),
    "S16-L4 unbiased +FT": ("S16-L4U", 0.82, 18.69, None),
}
RECIPE: dict[str, Any] = dict(
    layers=16, heads=8, head_dim=128, dim=1024, mlp_dim=4096, dropout=0.3, attention_dropout=0.1, steps=64_000,
    batch_size=64, warmup=16_000, learning_rate=1e-3, final_learning_rate=1e-5, schedule="cosine", optimizer="adam",
    beta2=0.999, eps=1e-8, clip=0.1, sigma=0.2, sigma_last=0.35, precision="bf16-mixed", eval_every=2000,
    eval_batches=20, checkpoint_every=1000,
)  # fmt: skip
CUTOFFS = (20_000, 60_000)


class WordModel(nn.Module):
    """`model(ids, targets)`: the negative log-likelihood of every target (B, L)."""

    def __init__(self, vocab: int, length: int, options: dict[str, Any]):
        super().__init__()
        dim, self.cuts = options["dim"], [0, *(c for c in CUTOFFS if c < vocab), vocab]
        widths = [max(8, dim // 4**i) for i in range(len(self.cuts) - 1)]
        sizes = [b - a for a, b in zip(self.cuts[:-1], self.cuts[1:], strict=True)]
        self.tables = nn.ModuleList([nn.Embedding(n, w) for n, w in zip(sizes, widths, strict=True)])
        self.widen = nn.ModuleList([nn.Linear(w, dim, bias=False) for w in widths])
        for table in self.tables:
            nn.init.normal_(table.weight, std=table.embedding_dim**-0.5)
        self.bias, self.dropout = ALiBi(options["heads"]), nn.Dropout(options["dropout"])
        self.blocks = encoder_blocks(
            options["layers"],
            options["attention"],
            dim,
            options["heads"],
            options=None,
            head_dim=options["head_dim"],
            causal=True,
            max_length=length,
            mlp_dim=options["mlp_dim"],
            dropout=options["dropout"],
            attention_dropout=options["attention_dropout"],
            place={},
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        inner = self.cuts[1:-1] or [max(1, vocab // 2)]
        self.head = nn.AdaptiveLogSoftmaxWithLoss(dim, vocab, inner, div_value=4.0)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = 0.0
        for table, widen, a, b in zip(self.tables, self.widen, self.cuts[:-1], self.cuts[1:], strict=True):
            here = ((ids >= a) & (ids < b))[..., None]
            x = x + widen(table((ids - a).clamp(0, b - a - 1))) * here
        x = self.dropout(x * math.sqrt(self.norm.normalized_shape[0]))
        for block in self.blocks:
            x = block(x, None, self.bias)
        with torch.autocast(ids.device.type, enabled=False):  # the adaptive head sorts targets into tables
            return -self.head(self.norm(x).float().flatten(0, 1), targets.flatten()).output.view_as(targets)


class Words(Tokens):
    """WikiText's words through the adaptive model."""

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        return WordModel(data.facts["vocab"], data.length, block_options(config))

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        return model(batch["bytes"][:, :-1].long(), batch["bytes"][:, 1:].long()).mean()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        loss = model(batch["bytes"][:, :-1].long(), batch["bytes"][:, 1:].long())
        return {"loss": loss.sum(1), "count": torch.full_like(loss[:, 0], loss.shape[1])}


@torch.no_grad()
def ensembled(folder: Path, samples: int, device: torch.device) -> float:
    """Test perplexity from the mean probability of each word over `samples` sub-models."""
    model, config, data = load_run(folder)
    model.to(device)
    for module in model.modules():
        if isinstance(module, Subsampling):
            module.sampling = True
    total = count = 0.0
    for row in data.test["bytes"]:
        ids = row.long()[None].to(device)
        found = []
        for _ in range(samples):
            with torch.autocast(device.type, torch.bfloat16):
                found.append(-model(ids[:, :-1], ids[:, 1:]).double())
        total -= (torch.stack(found).logsumexp(0) - math.log(samples)).sum().item()
        count += ids.shape[1] - 1
    return math.exp(total / count)


def rows(corpus: str = "wikitext-103", length: int = 3072) -> list[Row]:
    return [
        Row(
            name,
            lambda name=name: Words(f"wikitext103-{name.lower()}", corpus, length=length, pieces=0),
            paper={"perplexity": figure} if figure else {},
            config={"subsample": schedule, "finetune_dense_at": finish},
        )
        for name, (schedule, finish, figure, _) in PAPER.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ensemble", type=int, default=0, help="evaluate the finished runs with so many sub-models")
    parser.add_argument("--out", type=Path, default=Path("runs/subsampled-wikitext103"))
    given, rest = parser.parse_known_args(arguments)
    about, all_rows = __doc__ or "", rows()
    if not given.ensemble:
        run("Subsampled, WikiText-103", all_rows, about=about, metrics={"perplexity": 1}, recipe=RECIPE,
            arguments=[*rest, "--out", str(given.out)])  # fmt: skip
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for row in all_rows:
        folder = given.out / f"{row.slug}-s0"
        if (folder / "result.json").exists() and row.config["subsample"]:
            add_once(row.task())
            found[row.name] = {"ensemble": ensembled(folder, given.ensemble, device), "paper": PAPER[row.name][3]}
            print(row.name, found[row.name], flush=True)
            (given.out / f"ensemble{given.ensemble}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
