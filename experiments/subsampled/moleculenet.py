"""MoleculeNet: solubility, hydration energy and lipophilicity with EGT-Simple, with and without dropped source nodes.

    weft sweep experiments/subsampled/moleculenet.py               data/delaney.parquet, freesolv.parquet, lipo.parquet

Not in the paper (The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705). The published figures are from
MoleculeNet's best graph models (https://arxiv.org/abs/1703.00564): MPNN for ESOL and FreeSolv, graph convolutions for
lipophilicity. Both use random splits of 80/10/10 %, theirs three and ours one (`weft.tasks.molecules.divided`); our
tests have 65 (FreeSolv), 113 and 420 molecules. The loss is the absolute error, and the checkpoint with the smallest
one on the validation molecules is tested. RDKit reads atoms and bonds: pip install 'weft[graphs]'
"""

from __future__ import annotations

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "MoleculeNet: source nodes dropped in training"
METRIC = "rmse"

COLUMNS = {  # task, steps, RMSE of MoleculeNet's best graph model
    "FreeSolv": ("freesolv", 2000, 1.15),
    "ESOL": ("esol", 3000, 0.58),
    "Lipophilicity": ("lipophilicity", 5000, 0.655),
}


def cells() -> list[Cell]:
    return [
        Cell(
            f"{drop:g} dropped",
            column,
            make_config(
                task, attention_dropout=drop, steps=steps, batch_size=64, warmup=steps // 10, eval_every=250,
                checkpoint_every=1000, precision="bf16-mixed",
            ),
            published,
        )
        for column, (task, steps, published) in COLUMNS.items()
        for drop in (0.0, 0.1)
    ]  # fmt: skip
