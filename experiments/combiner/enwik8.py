"""Combiner, subsampled and cached attention on enwik8, ten minutes each.

    weft data get enwik8
    weft sweep experiments/combiner/enwik8.py

12 layers of width 512, rotary positions, 4,096 bytes of context, 16 streams, AdamW 1e-3 with 5 % warm-up and cosine
decay. Each model trains for as many steps as fit into ten minutes: cheaper attention gets more steps. Subsampled
attention (https://arxiv.org/abs/2306.01705) either ends with 18 % dense steps and is tested dense, or is tested as an
ensemble of 10 sub-models; the cache (https://arxiv.org/abs/2312.12742) has 512 slots per layer; Combiner:
https://arxiv.org/abs/2107.05768. The papers do not have these runs. `enwik8.json` has earlier runs of 54 seconds.
"""

from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "enwik8 in ten minutes"
METRIC = "bits_per_byte"

SAMPLED: dict[str, Any] = dict(subsample="Sall-L4", sigma=0.1, sigma_last=0.225)
ROWS: dict[str, dict[str, Any]] = {
    "dense": {},
    "subsampled, dense finish": dict(**SAMPLED, finetune_dense_at=0.82),
    "subsampled, ensemble of 10": dict(**SAMPLED, ensemble=10),
    "combiner-fixed": dict(attention="combiner-fixed"),
    "combiner-axial": dict(attention="combiner-axial"),
    "cached": dict(cache=0.5, cache_options='{"length": 512, "delayed": true, "scope": "stream", "eval_update": true}'),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            "10 min",
            make_config(
                "enwik8-streams",
                time_budget=10,
                steps=1000,  # only for the fractions of warm-up, evaluations and checkpoints
                warmup=50,
                eval_every=50,
                checkpoint_every=50,
                layers=12,
                heads=8,
                head_dim=64,
                dim=512,
                mlp_dim=2048,
                max_length=4096,
                positions="rope",
                dropout=0.0,
                batch_size=16,
                optimizer="adamw",
                learning_rate=1e-3,
                final_learning_rate=1e-5,
                beta2=0.98,
                weight_decay=0.01,
                eval_batches=2,
                test_on="last",
                precision="bf16-mixed",
                compile=True,
                **settings,
            ),
        )
        for row, settings in ROWS.items()
    ]
