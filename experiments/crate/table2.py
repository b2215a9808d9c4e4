"""Tables 2 and 3: CRATE-B on ImageNet-1k with other hyper-parameters, and with the paper's other blocks.

    weft sweep experiments/crate/table2.py --only "MSSA*"

White-Box Transformers via Sparse Rate Reduction, https://arxiv.org/abs/2306.01129; data and recipe as in Table 1.
Constants of Table 3 that the paper does not give: γ = 1 for equations 11 and 12, and for equation 92 the ε that makes
α = 1 at 197 tokens.
"""

from __future__ import annotations

import json
import math
from typing import Any

from recipe import pretraining

from weft.lab.sweep import Cell
from weft.models.crate import SIZES

TITLE = "Tables 2 and 3: CRATE-B, hyper-parameters and variants"
METRIC = "accuracy"

# row -> options of the model, changes to the recipe, the paper's accuracy
PAPER: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "default": ({}, {}, 70.8),
    "eta 0.02": ({"ista": {"step": 0.02}}, {}, 70.7),
    "eta 0.5": ({"ista": {"step": 0.5}}, {}, 66.7),
    "lambda 0.02": ({"ista": {"threshold": 0.02}}, {}, 70.8),
    "lambda 0.5": ({"ista": {"threshold": 0.5}}, {}, 70.5),
    "90 epochs": ({}, {"epochs": 90}, 69.5),
    "300 epochs": ({}, {"epochs": 300}, 70.9),
    "decay 1.0": ({}, {"weight_decay": 1.0}, 70.3),
    "decay 0.05": ({}, {"weight_decay": 0.05}, 70.2),
    "rate 4.8e-4": ({}, {"learning_rate": 4.8e-4}, 70.2),
    "rate 1.2e-4": ({}, {"learning_rate": 1.2e-4}, 70.3),
    "MSSA by eqs 11 and 12": ({"tied": True, "gamma": 1.0, "scale": 1.0}, {}, 63.3),
    "ISTA by eq 92": ({"ista": {"variant": "mm", "epsilon": math.sqrt(SIZES["base"]["dim"] / 197)}}, {}, 68.6),
}


def cells() -> list[Cell]:
    return [
        Cell(row, "CRATE-B", pretraining("crate-base", model_options=json.dumps(options), **changes), figure)
        for row, (options, changes, figure) in PAPER.items()
    ]
