"""Data on disk: found, checked, and written whole or not at all.

A generated data set is a folder of .npy files with a manifest.json that gives each file's SHA-256. The folder is
filled under a temporary name and renamed, and the manifest is checked when it is read.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .base import DataMissing


def find(data: str, names: tuple[str, ...], what_to_do: str) -> Path:
    """The first of `names` inside the folder `data`; `data` may also be the thing itself."""
    root = Path(data)
    if root.name in names and root.exists():
        return root
    for name in names:
        if (root / name).exists():
            return root / name
    if root.is_file():
        return root
    raise DataMissing(f"no {' or '.join(names)} in {root}{'' if root.exists() else ' (no such folder)'}: {what_to_do}")


def free_memory() -> int:
    """Bytes that can still be used: of the machine, or of the container where that has less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" where there is no limit
            group = Path("/sys/fs/cgroup")
            free = min(free, int((group / limit).read_text()) - int((group / used).read_text()))
    return max(0, free)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` if all goes well, and vanishes if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        with suppress(OSError):  # the error that brought us here counts
            temporary.unlink(missing_ok=True)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time: the others wait, and find what the first has made."""
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_left_over(temporary: Path) -> bool:
    """Whether the process that made this temporary name is gone. Its number is the last but one part."""
    try:
        owner = int(temporary.name.split(".")[-2])
        os.kill(owner, 0)
    except ProcessLookupError:
        return True
    except (ValueError, IndexError, OSError):
        return False
    return owner == os.getpid()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when all of it is on the disk."""
    if folder.exists():
        raise DataMissing(f"{folder} is already there: remove it first, or choose another --data")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    for stray in folder.parent.glob(f".{folder.name}.*.tmp"):  # left by a kill
        if is_left_over(stray):
            shutil.rmtree(stray, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Workers that end at once when something goes wrong, and with the process that started them."""
    pool = ProcessPoolExecutor(count, initializer=_as_worker)
    try:
        yield pool
    except BaseException:
        for worker in list((pool._processes or {}).values()):
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _as_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    sums = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({**about, "sha256": sums}, indent=2) + "\n")


MADE = "Move it away and make it again with weft data make."


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after every file has been compared with it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        sums = manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedData(folder, f"its manifest.json cannot be read ({error})", MADE) from error
    for name, expected in sums.items():
        path = folder / name
        if not path.exists():
            raise DamagedData(folder, f"{name} is missing", MADE)
        if sha256(path) != expected:
            raise DamagedData(folder, f"{name} does not match its checksum", MADE)
    return manifest


class DamagedData(DataMissing):
    """Data that is there but cannot be used. It may be the user's own: never tell them to remove it."""

    def __init__(self, path: Path, what: str, way_out: str = "Mend it, or give other data by --data."):
        super().__init__(f"{path} cannot be used: {what}. {way_out}")


def decoded(source: Any, path: Path, mode: str, what: str = "it") -> Any:
    """A picture (a file, or what holds its bytes), decoded. Whatever is wrong with it is said with its name."""
    from PIL import Image

    try:
        with Image.open(source) as image:
            width, height = image.size
            if width * height > (Image.MAX_IMAGE_PIXELS or 2**27):
                raise ValueError(f"it unpacks to {width:,} x {height:,} pixels")
            return image.convert(mode)
    except Exception as error:  # decoders raise whatever comes to them
        raise DamagedData(path, f"{what} is not a picture that can be read ({error})") from error


def as_labels(values: Iterable[Any], classes: int, path: Path) -> np.ndarray:
    """Labels as bytes or 16 bits, after each has been seen to name a class."""
    found = list(values)
    for row, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < classes:
            raise DamagedData(path, f"the label of row {row} is {value!r}; labels are numbers from 0 to {classes - 1}")
    return np.array(found, np.uint8 if classes <= 256 else np.int16)


def read_text(path: Path) -> str:
    """A UTF-8 text; one in another encoding is refused by file and line."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line, byte = content[: error.start].count(b"\n") + 1, content[error.start]
        way_out = f"Convert it: iconv -f latin1 -t utf-8 {path.name}"
        raise DamagedData(path, f"line {line} is not UTF-8 (byte {byte:#04x})", way_out) from None


def must_fit(path: Path, size: int) -> None:
    """Refuse what would not fit into memory, before it is read."""
    free = free_memory()
    if 2 * size > free:  # once as it is read, once as rows
        what = f"it holds {size / 2**30:.1f} GiB, read whole it takes twice that, and {free / 2**30:.1f} GiB are free"
        raise DamagedData(path, what, "Give a part of it.")


def read_array(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", allow_pickle=False)


def read_parquet(paths: list[Path], columns: list[str]) -> dict[str, list[Any]]:
    """Columns of one or several Parquet files, as lists."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataMissing("reading Parquet files needs pyarrow: pip install 'weft[lab]'") from error
    found: dict[str, list[Any]] = {name: [] for name in columns}
    for path in paths:
        try:
            table = parquet.read_table(path, columns=columns)
        except Exception as error:  # pyarrow raises many kinds
            raise DamagedData(path, f"its columns {', '.join(columns)} cannot be read ({error})") from error
        for name in columns:
            found[name] += table.column(name).to_pylist()
    return found


def pad_rows(rows: list[np.ndarray], length: int, dtype: Any = np.int16) -> np.ndarray:
    """Rows of ids, cut at `length` and filled up with 0."""
    out = np.zeros((len(rows), length), dtype)
    for i, row in enumerate(rows):
        out[i, : min(len(row), length)] = row[:length]
    return out


def as_ids(text: bytes, length: int) -> np.ndarray:
    """Byte b -> id b + 1, so that 0 is free for padding; 255 + 1 needs more than a byte."""
    return np.frombuffer(text[:length], np.uint8).astype(np.int16) + 1


def split_off(count: int, held_out: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a training set stay in it and which become validation data: always the same ones."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    return order[held_out:], order[:held_out]  # shuffled: the makers' files are sorted by class
