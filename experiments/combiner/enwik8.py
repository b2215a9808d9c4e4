"""Combiner, subsampled and cached attention on enwik8, at a scale where runs of a minute are informative.

    weft data get enwik8
    weft sweep experiments/combiner/enwik8.py
    weft eval experiments/combiner/runs/enwik8/subsampled-sall-l4-54-s-s0 --ensemble 10

12 layers of width 512, rotary positions, 4,096 bytes of context, 16 streams, AdamW 1e-3 with 5 % warm-up and cosine
decay. Each model trains for the number of steps that fitted into 54 seconds on one H200 (enwik8.json): cheaper
attention gets more steps. Subsampled attention (https://arxiv.org/abs/2306.01705) ends with 18 % dense steps; the cache
(https://arxiv.org/abs/2312.12742) has 512 slots per layer; Combiner: https://arxiv.org/abs/2107.05768. The papers do
not have these runs.
"""

from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "enwik8 in 54 seconds"
METRIC = "bits_per_byte"

ROWS: dict[str, dict[str, Any]] = {
    "dense": dict(steps=596),
    "subsampled, Sall-L4": dict(steps=689, subsample="Sall-L4", sigma=0.1, sigma_last=0.225, finetune_dense_at=0.82),
    "combiner-fixed": dict(steps=801, attention="combiner-fixed"),
    "cached": dict(
        steps=447,
        cache=0.5,
        cache_options='{"length": 512, "delayed": true, "scope": "stream", "eval_update": true}',
    ),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            "54 s",
            make_config(
                "enwik8-streams",
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
                warmup=round(0.05 * settings["steps"]),
                beta2=0.98,
                weight_decay=0.01,
                eval_every=round(settings["steps"] / 10),
                eval_batches=2,
                test_on="last",
                precision="bf16-mixed",
                compile=True,
                **settings,
            ),
        )
        for row, settings in ROWS.items()
    ]
