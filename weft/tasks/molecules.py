"""Properties of molecules by EGT-Simple: QM9, the small MoleculeNet sets, PCQM4Mv2.

    qm9-TARGET, esol, freesolv, lipophilicity    tables of SMILES and targets (moleculenet.org), CSV or Parquet; random
                                                 80/10/10 split, as MoleculeNet recommends for these sets
    pcqm4mv2                                     pcqm4m-v2/raw/data.csv.gz with the makers' split_dict.pt next to raw/
                                                 (ogb.stanford.edu); tested on their validation part, because the
                                                 targets of their test parts are not public

`attention_dropout` is the share of source nodes dropped in training: subsampled attention on graphs
(https://arxiv.org/abs/2306.01705). `--model-options '{"split": "scaffold"}'` keeps molecules with the same Bemis-Murcko
scaffold in one part; the largest groups of scaffolds are for training.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .base import BuiltFromData, Columns, DataMissing, Known, Task, TaskData
from .config import TrainConfig
from .files import DamagedData, find, read_parquet
from .graphs import ATOM_SIZES, BOND_SIZES, FAR, graphs, pair_features, scaffold
from .registry import add_task

EV = 27.211386  # electronvolts per hartree, the unit of QM9's energies
QM9 = {
    "mu": ("dipole moment, D", 1.0), "alpha": ("polarisability, a0^3", 1.0), "homo": ("HOMO, eV", EV),
    "lumo": ("LUMO, eV", EV), "gap": ("HOMO-LUMO gap, eV", EV), "r2": ("spatial extent, a0^2", 1.0),
    "zpve": ("zero-point energy, eV", EV), "cv": ("heat capacity, cal/(mol K)", 1.0),
    "u0": ("internal energy at 0 K, eV", EV), "u298": ("internal energy at 298 K, eV", EV),
    "h298": ("enthalpy at 298 K, eV", EV), "g298": ("free energy at 298 K, eV", EV),
}  # fmt: skip
SPLITS = ("random", "scaffold")


class Molecules(BuiltFromData, Task):
    metric, higher_is_better, answers = "mae", False, "values"
    reads = frozenset()
    models = ("egt",)
    defaults = dict(
        model="egt", layers=6, heads=32, dim=512, head_dim=16, mlp_dim=512, dropout=0.0, attention_dropout=0.1,
        steps=20_000, batch_size=128, optimizer="adam", learning_rate=2e-4, beta2=0.999, eps=1e-8, schedule="cosine",
        warmup=1000, clip=1.0, eval_every=1000, checkpoint_every=1000,
    )  # fmt: skip

    def __init__(self, name: str, about: str, places: tuple[str, ...], target: str, unit: float = 1.0):
        self.name, self.about = name, about  # type: ignore[misc]
        self.places, self.target, self.unit = places, target, unit

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        options = config.options("model_options")
        if set(options) - {"split", "edge_dim", "virtual"} or options.get("split", "random") not in SPLITS:
            raise ValueError(
                f"model_options of {self.name} may have split ({' or '.join(SPLITS)}), edge_dim and virtual; "
                f"got {config.model_options}"
            )
        if config.dim % config.heads:
            raise ValueError(f"dim={config.dim} must be divisible by heads={config.heads}")

    def unread(self, config: TrainConfig) -> tuple[str, ...]:
        return "attention", "attention_options", "head_dim", "positions", "label_smoothing"

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        path = find(config.data, self.places, f"put a table of molecules there, with columns smiles and {self.target}")
        smiles, targets = read_table(path, self.target)
        stored = graphs(path, smiles)
        there = np.isfinite(targets)  # PCQM4Mv2 has no targets for its test molecules
        split = config.options("model_options").get("split", "random")
        parts = made_split(path, len(smiles)) or divided(smiles, np.flatnonzero(there), split)
        columns = {**stored, "target": (targets * self.unit).astype(np.float32)}
        train, val, test = ({name: torch.from_numpy(c[part]) for name, c in columns.items()} for part in parts)
        values = train["target"].double()
        facts = known.facts if known else {"mean": float(values.mean()), "deviation": float(values.std())}
        length = known.length if known else stored["nodes"].shape[1]  # the model accepts any number of atoms
        return TaskData(train, val, test, length=length, facts=facts)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.egt import EGT

        options = {k: v for k, v in config.options("model_options").items() if k != "split"}
        model = EGT(
            ATOM_SIZES, BOND_SIZES, FAR + 1, dim=config.dim, heads=config.heads, layers=config.layers,
            mlp_dim=config.mlp_dim, source_dropout=config.attention_dropout or 0.0, dropout=config.dropout, **options,
        )  # fmt: skip
        return Rescaled(model, data.facts["mean"], data.facts["deviation"])

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        most = max(1, int((rows["nodes"][..., 0] > 0).sum(1).max()))
        features = torch.from_numpy(pair_features()).to(rows["pairs"].device)[rows["pairs"][:, :most, :most].long()]
        pairs = {"distances": features[..., 0], "bonds": features[..., 1:]}
        return {"nodes": rows["nodes"][:, :most], "target": rows["target"], **pairs}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["nodes"], batch["distances"], batch["bonds"]

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        """The mean absolute error, in deviations of the training targets."""
        inner: Any = getattr(model, "module", model)
        return (model(*self.inputs(batch)).float() - batch["target"]).abs().mean() / inner.deviation

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        off = model(*self.inputs(batch)).float() - batch["target"]
        return {"loss": off.abs(), "squares": off.square(), "count": torch.ones_like(off)}

    def next_command(self, run: str) -> str:
        return f"weft eval {run} --ensemble 10"

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        mae = sums["loss"] / sums["count"]
        return {"loss": mae, "mae": mae, "rmse": math.sqrt(sums["squares"] / sums["count"])}


class Rescaled(nn.Module):
    """Converts normalised predictions (mean 0, deviation 1) to the unit of the target."""

    def __init__(self, model: nn.Module, mean: float, deviation: float):
        super().__init__()
        self.model, self.mean, self.deviation = model, mean, deviation

    def forward(self, *graph: Tensor) -> Tensor:
        return self.model(*graph).float() * self.deviation + self.mean


def read_table(path: Path, target: str) -> tuple[list[str], np.ndarray]:
    """SMILES, and targets with NaN where there is none."""
    if path.suffix == ".parquet":
        table = read_parquet([path], ["smiles", target])
        return table["smiles"], np.array([math.nan if t is None else t for t in table[target]], np.float64)
    opener: Any = gzip.open if path.suffix == ".gz" else open
    smiles, targets = [], []
    with opener(path, "rt", newline="", encoding="utf-8-sig") as file:  # Excel writes a byte order mark
        reader = csv.DictReader(file)
        missing = {"smiles", target} - set(reader.fieldnames or ())
        if missing:
            what = f"line 1 must name the columns smiles and {target}; {', '.join(missing)} is missing"
            raise DamagedData(path, what)
        for row in reader:
            try:
                targets.append(math.nan if row[target] == "" else float(row[target]))
                if math.isinf(targets[-1]):
                    raise ValueError
            except (TypeError, ValueError):  # the first for a line that is too short
                what = f"line {reader.line_num}: {target} must be a number or empty, got {row[target]!r}"
                raise DamagedData(path, what) from None
            smiles.append(row["smiles"])
    return smiles, np.array(targets)


def made_split(path: Path, count: int) -> list[np.ndarray] | None:
    """The makers' split of PCQM4Mv2 if it is there: a fiftieth of train for validation, their validation for tests."""
    place = path.parent.parent / "split_dict.pt"
    if path.name != "data.csv.gz" or not place.exists():
        return None
    from numpy._core.multiarray import _reconstruct  # type: ignore[attr-defined]

    # NumPy 1, which wrote the makers' file, had another name for the first.
    allowed: list[Any] = [(_reconstruct, "numpy.core.multiarray._reconstruct")]
    allowed += [_reconstruct, np.ndarray, np.dtype, type(np.dtype(np.int64)), type(np.dtype(np.int32))]
    try:
        with torch.serialization.safe_globals(allowed):
            split = torch.load(place, weights_only=True)
        train, test = (np.asarray(split[name]) for name in ("train", "valid"))
    except Exception as error:  # pickles raise many kinds
        raise DamagedData(place, f"its split cannot be read ({error})") from error
    if max(train.max(), test.max()) >= count:
        raise DamagedData(place, f"it names row {max(train.max(), test.max())}, but the table has {count} rows")
    order = np.random.Generator(np.random.PCG64(0)).permutation(train)
    cut = len(order) - max(1, len(order) // 50)
    return [order[:cut], order[cut:], test]


def divided(smiles: list[str], rows: np.ndarray, split: str) -> list[np.ndarray]:
    """Rows of the three parts, 80, 10 and 10 %: shuffled, or by scaffold, as near to this as whole groups allow."""
    a, b = len(rows) * 8 // 10, len(rows) * 9 // 10
    if split == "random":
        rows = np.random.Generator(np.random.PCG64(0)).permutation(rows)
    else:
        groups = defaultdict(list)
        for row in rows.tolist():
            groups[scaffold(smiles[row])].append(row)
        if len(groups) < 3:
            raise DataMissing(f"the molecules have {len(groups)} scaffolds, too few for three parts: use split random")
        ordered = sorted(groups.values(), key=lambda g: (-len(g), g[0]))
        ends = np.cumsum([len(group) for group in ordered])
        first = int(np.abs(ends[:-2] - a).argmin())
        second = first + 1 + int(np.abs(ends[first + 1 : -1] - b).argmin())
        rows, a, b = np.array([r for group in ordered for r in group]), int(ends[first]), int(ends[second])
    return [rows[:a], rows[a:b], rows[b:]]


for key, (what, unit) in QM9.items():
    add_task(Molecules(f"qm9-{key}", f"{what}, of the molecules of QM9", ("qm9.parquet", "qm9.csv"), key, unit))
for key, files, column, what in (
    ("esol", ("delaney.parquet", "delaney.csv"), "logSolubility", "log solubility of molecules, ESOL"),
    ("freesolv", ("freesolv.parquet", "freesolv.csv"), "freesolv", "hydration free energy of molecules, FreeSolv"),
    ("lipophilicity", ("lipo.parquet", "lipo.csv"), "lipo", "lipophilicity of molecules"),
):
    add_task(Molecules(key, what, files, column))
add_task(Molecules("pcqm4mv2", "HOMO-LUMO gap of PCQM4Mv2, eV", ("pcqm4m-v2/raw/data.csv.gz",), "homolumogap"))
