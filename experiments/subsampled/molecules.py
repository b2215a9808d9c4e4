"""PCQM4Mv2 and QM9: properties of molecules with EGT-Simple, with source dropout instead of attention dropout.

    weft sweep experiments/subsampled/molecules.py --only "*/PCQM4Mv2"          data/pcqm4m-v2/raw/data.csv.gz
    weft sweep experiments/subsampled/molecules.py --only "*/QM9 gap"           data/qm9.parquet
    weft eval experiments/subsampled/runs/molecules/0.1-dropped-qm9-gap-s0 --ensemble 10

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705 (a table that we could not access; other
listings give a validation MAE of 0.0876 eV, and 0.0865 with the ensemble). EGT-Simple has 6 layers, 11 M parameters and
no 3-D coordinates. QM9 is not in the paper. RDKit reads atoms and bonds: pip install 'weft[graphs]'
"""

from __future__ import annotations

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Molecules: source nodes dropped in training"
METRIC = "mae"

COLUMNS = {  # task, steps, warm-up, batch, learning rate, note
    "PCQM4Mv2": (
        "pcqm4mv2", 1_000_000, 60_000, 512, 2e-4, "the paper, from other listings: 0.0876 eV, 0.0865 with the ensemble"
    ),
    "QM9 gap": ("qm9-gap", 5000, 300, 512, 5e-4, "SchNet, with 3-D coordinates: 0.063 eV"),
}  # fmt: skip


def cells() -> list[Cell]:
    return [
        Cell(
            f"{drop:g} dropped",
            column,
            make_config(
                task,
                attention_dropout=drop,
                steps=steps,
                batch_size=batch,
                learning_rate=rate,
                warmup=warmup,
                precision="bf16-mixed",
            ),
            note=note,
        )
        for drop in (0.0, 0.1, 0.3)
        for column, (task, steps, warmup, batch, rate, note) in COLUMNS.items()
    ]
