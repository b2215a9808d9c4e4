"""Data sets by name: which are present, and how to generate or download them."""

from __future__ import annotations

import hashlib
import io
import os
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import listops, pathfinder, translation
from .base import DataMissing
from .files import atomic
from .text import ENWIK8_MD5

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and its possible names in the data folder."""

    name: str
    places: tuple[str, ...]
    how: str
    checksum: str = ""  # of the original archive


SOURCES = (
    Source(
        "listops",
        ("listops", "listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000"),
        "weft data make listops",
    ),
    *(
        Source(
            f"pathfinder{size}-{level}",
            (f"pathfinder{size}-{level}", f"pathfinder{size}/{pathfinder.OFFICIAL[level]}"),
            f"weft data make pathfinder{size}-{level}",
        )
        for size in pathfinder.STYLES
        for level in pathfinder.DASHES
    ),
    Source("imdb", ("imdb.parquet", "aclImdb"), "weft data get imdb", "md5 7c2ac02c03563afcf9b574c7e56c153a"),
    Source(
        "cifar10",
        ("cifar-10-batches-bin", "cifar10.parquet", "cifar10"),
        "weft data get cifar10",
        "md5 c32a1d4ab5d03f1284b67883e8d87530",
    ),
    Source(
        "cifar100",
        ("cifar-100-binary", "cifar100.parquet", "cifar100"),
        "weft data get cifar100",
        "md5 03b5dce01913d631647c71ecec9e9cb8",
    ),
    Source("enwik8", ("enwik8", "enwik8.zip", "enwik8.xz"), "weft data get enwik8", f"md5 {ENWIK8_MD5} (unpacked)"),
    Source(
        "matching",
        ("matching", "aan", "lra_release/tsv_data", "lra_release/lra_release/tsv_data", "tsv_data"),
        "weft data convert aan lra_release",
    ),
    *(
        Source(name, (name,), f"weft data convert {made} FOLDER")
        for name, made in {
            "imagenet": "imagenet", "flowers102": "flowers", "pets": "pets", "coco": "coco",
            "wikitext-103": "wikitext-103", "wiki40b": "wiki40b", "c4": "c4",
        }.items()
    ),
    Source("imagenet22k", ("imagenet22k",), "by hand: imagenet22k/{train,val}/CLASS/*"),
    Source("imagenet64", ("imagenet64",), "by hand: imagenet64/*.npz"),
    Source("tiny-imagenet-50", ("tiny-imagenet-50.parquet",), "by hand: tiny-imagenet-50.parquet"),
    *(
        Source(
            f"{corpus}-{a}-{b}",
            (f"{corpus}.{a}-{b}", f"{corpus}.{b}-{a}", f"{corpus}.parquet"),
            "by hand: multi30k.parquet" if corpus == "multi30k" else "weft data convert iwslt FOLDER",
        )
        for corpus, pairs in translation.CORPORA.items()
        for a, b in (pair.split("-") for pair in pairs)
    ),
    *(
        Source(name, (f"{file}.parquet", f"{file}.csv"), f"by hand: {file}.parquet or {file}.csv")
        for name, file in {"qm9": "qm9", "esol": "delaney", "freesolv": "freesolv", "lipophilicity": "lipo"}.items()
    ),
    Source("pcqm4mv2", ("pcqm4m-v2/raw/data.csv.gz",), "weft data convert pcqm4mv2 pcqm4m-v2.zip"),
)  # fmt: skip

HUB: dict[str, tuple[str, dict[str, str]]] = {
    # our name: the hub's, and the hub's columns by ours
    "imdb": ("stanfordnlp/imdb", {"text": "text", "label": "label"}),
    "cifar10": ("uoft-cs/cifar10", {"image": "img", "label": "label"}),
    "cifar100": ("uoft-cs/cifar100", {"image": "img", "label": "fine_label"}),
}


def present(source: Source, data: Path) -> Path | None:
    return next((data / place for place in source.places if (data / place).exists()), None)


def make(name: str, data: Path, *, seed: int = 0, workers: int = 0, count: int = 0) -> Path:
    """Generate a data set; `count` is the number of training examples (ListOps) or of all images (Pathfinder)."""
    workers = workers or os.cpu_count() or 1
    if count < 0 or workers < 1 or seed < 0:
        raise ValueError(f"--count, --workers and --seed must not be negative, got {count}, {workers}, {seed}")
    if name == "listops":
        sizes = {**listops.SIZES, "train": count} if count else listops.SIZES
        return listops.make(data, seed=seed, workers=workers, sizes=sizes)
    if name.startswith("pathfinder") and "-" in name:
        size, difficulty = name.removeprefix("pathfinder").split("-", 1)
        if size.isdigit() and int(size) in pathfinder.STYLES and difficulty in pathfinder.DASHES:
            number = count or pathfinder.COUNT
            return pathfinder.make(
                data, size=int(size), difficulty=difficulty, seed=seed, count=number, workers=workers
            )
    known = [source.name for source in SOURCES if source.how.startswith("weft data make")]
    raise DataMissing(f"cannot generate {name!r}; available: {', '.join(known)}")


def get(name: str, data: Path) -> Path:
    """Download a data set and write it atomically."""
    target = data / ("enwik8" if name == "enwik8" else f"{name}.parquet")
    if target.exists():
        raise DataMissing(f"{target} already exists: remove it to download it again")
    if name == "enwik8":
        content = _fetch_enwik8()
        with atomic(target) as temporary:
            temporary.write_bytes(content)
    elif name in HUB:
        table = _fetch_hub(name)
        import pyarrow.parquet as parquet

        with atomic(target) as temporary:
            parquet.write_table(table, temporary)
    else:
        raise DataMissing(f"cannot download {name!r}; available: {', '.join([*HUB, 'enwik8'])}")
    return target


def _fetch_enwik8() -> bytes:
    try:
        with urllib.request.urlopen(ENWIK8_URL, timeout=60) as answer:
            archive = zipfile.ZipFile(io.BytesIO(answer.read()))
            content = archive.read("enwik8")
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise DataMissing(f"could not download {ENWIK8_URL} ({error}): download it yourself") from error
    if hashlib.md5(content).hexdigest() != ENWIK8_MD5:
        raise DataMissing(f"the download from {ENWIK8_URL} does not have enwik8's md5: try again")
    return content


def _fetch_hub(name: str) -> Any:
    """A table with a column `split`, from the Hugging Face hub."""
    try:
        import datasets
    except ImportError as error:
        raise DataMissing("downloads from the Hugging Face hub need: pip install 'weft[hub]'") from error
    import pyarrow as arrow

    hub_name, columns = HUB[name]
    tables = []
    try:
        for split in ("train", "test"):
            part = datasets.load_dataset(hub_name, split=split)
            table = part.data.table if hasattr(part.data, "table") else part.data
            picked = arrow.table({ours: table.column(theirs) for ours, theirs in columns.items()})
            tables.append(picked.append_column("split", arrow.array([split] * picked.num_rows)))
    except (OSError, ConnectionError, ValueError) as error:
        raise DataMissing(f"could not download {hub_name} from the Hugging Face hub ({error})") from error
    return arrow.concat_tables(tables)
