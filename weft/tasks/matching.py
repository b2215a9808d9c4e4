"""Document matching: does one paper of the ACL Anthology cite another? Two documents of 4,000 bytes, yes or no.

Radev et al., The ACL Anthology Network corpus; pairs as made for the Long Range Arena, https://arxiv.org/abs/2011.04006

Reads the Long Range Arena's new_aan_pairs.{train,eval,test}.tsv: label, two ids, two texts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .base import Columns, StudyTask, TaskData
from .config import TrainConfig
from .files import DamagedData, as_ids, find, pad_rows
from .registry import add_task

FILES = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")


def read_pairs(path: Path, length: int) -> Columns:
    if not path.exists():
        raise DamagedData(path.parent, f"{path.name} is missing")
    csv.field_size_limit(2**28)
    first, second, labels = [], [], []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file, delimiter="\t")
        for row in _rows(reader, path):
            if len(row) != 5 or row[0] not in ("0", "1", "0.0", "1.0"):
                got = f"{len(row)} columns" if len(row) != 5 else f"the label {row[0]!r}"
                what = f"line {reader.line_num} has {got}; expected five: 0 or 1, two ids, two texts"
                raise DamagedData(path, what)
            labels.append(int(float(row[0])))
            first.append(as_ids(row[3].encode(), length))
            second.append(as_ids(row[4].encode(), length))
    if not labels:
        raise DamagedData(path, "it holds no pairs")
    return {
        "first": torch.from_numpy(pad_rows(first, length)),
        "second": torch.from_numpy(pad_rows(second, length)),
        "label": torch.tensor(labels, dtype=torch.uint8),
    }


def _rows(reader: Any, path: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise DamagedData(path, f"line {reader.line_num} is not tab-separated text ({error})") from error


class Matching(StudyTask):
    name = "matching"
    about = "does one paper cite the other? ACL Anthology pairs, two documents of 4k bytes"
    class_names = ("no citation", "citation")
    reads = StudyTask.reads - {"packed"}

    def load(self, config: TrainConfig) -> TaskData:
        names = ("matching", "aan", "lra_release/tsv_data", "lra_release/lra_release/tsv_data", "tsv_data")
        folder = find(
            config.data, names, "put the Long Range Arena's new_aan_pairs.{train,eval,test}.tsv into a folder 'aan'"
        )
        length = config.max_length or self.length
        train, val, test = (read_pairs(folder / name, length) for name in FILES)
        return TaskData(train, val, test, length=length, facts={"vocab": 257, "classes": 2}, documents=2)

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["first"].long(), batch["second"].long()


add_task(Matching())
