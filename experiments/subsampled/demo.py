"""Train on random pathways, finish dense, predict with the ensemble: a small byte-level language model.

    weft sweep experiments/subsampled/demo.py --data enwik8                  any file; minutes on a CPU
    weft eval experiments/subsampled/runs/demo/sall-l4-256-bytes-s0 --ensemble 10

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705, which has no such table. Three models of width
128, 4 layers, with ALiBi train on the same windows of 256 bytes for the same number of steps: dense; Sall-L4 (4 windows
in every layer); Sall-L4 with a dense finish. Larger: --set max_length=1024 --set dim=512 --steps 4000.
"""

from typing import Any

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Random pathways at small scale"
METRIC = "bits_per_byte"
SEEDS = (0, 1)

SAMPLED: dict[str, Any] = dict(subsample="Sall-L4", sigma=0.1, sigma_last=0.225)
ROWS: dict[str, dict[str, Any]] = {
    "dense": {},
    "Sall-L4": SAMPLED,
    "Sall-L4 + dense finish": dict(SAMPLED, finetune_dense_at=0.82),
}


def cells() -> list[Cell]:
    return [
        Cell(
            row,
            "256 bytes",
            make_config(
                "text",
                layers=4,
                heads=4,
                head_dim=32,
                dim=128,
                mlp_dim=512,
                max_length=256,
                dropout=0.0,
                steps=300,
                batch_size=16,
                optimizer="adamw",
                learning_rate=2e-3,
                final_learning_rate=4e-5,
                warmup=15,
                beta2=0.98,
                weight_decay=0.01,
                eval_every=100,
                test_on="last",
                **settings,
            ),
        )  # fmt: skip
        for row, settings in ROWS.items()
    ]
