"""Find, verify and atomically write data files.

A generated data set is a folder of .npy files with a manifest.json that has the SHA-256 of each file. The folder is
written under a temporary name and renamed; reading it verifies the manifest.
"""

from __future__ import annotations

import ctypes
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .base import DataMissing


def find(data: str, names: tuple[str, ...], what_to_do: str) -> Path:
    """The first of `names` inside the folder `data`; `data` may also be the file or folder itself."""
    root = Path(data)
    if root.name in names and root.exists():
        return root
    for name in names:
        if (root / name).exists():
            return root / name
    if root.is_file():
        return root
    raise DataMissing(f"no {' or '.join(names)} in {root}{'' if root.exists() else ' (no such folder)'}: {what_to_do}")


def files_of(folder: Path) -> list[Path]:
    """Its files in order of name, also in linked folders, without hidden ones such as .DS_Store and those in .git/."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        real = os.path.realpath(place)
        if real in seen:  # links may form a circle
            folders.clear()
        else:
            found += [Path(place, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(filter(Path.is_file, found))


def free_memory() -> int:
    """Available memory in bytes, of the machine or of the container, whichever is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" means no limit
            group = Path("/sys/fs/cgroup")
            free = min(free, int((group / limit).read_text()) - int((group / used).read_text()))
    return max(0, free)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on success and removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        with suppress(OSError):  # keep the original error
            temporary.unlink(missing_ok=True)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """One process at a time: the others wait, and find what the first has made."""
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_left_over(temporary: Path) -> bool:
    """Whether the process that created this temporary file has ended. Its pid is the last but one part of the name."""
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
    """Yield a temporary folder that is renamed to `folder` when it is complete on disk."""
    if folder.exists():
        raise DataMissing(f"{folder} already exists: choose another folder, or remove this one first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    for stray in folder.parent.glob(f".{folder.name}.*.tmp"):  # left by a kill
        if is_left_over(stray):
            shutil.rmtree(stray, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in filter(Path.is_file, temporary.iterdir()):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end on the first error, and together with their parent process."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    sums = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({**about, "sha256": sums}, indent=2) + "\n")


MADE = "Move it away and generate it again with weft data make."


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after verifying every file against it."""
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
    """Data that exists but is invalid. It may be the user's own, so never advise removing it."""

    def __init__(self, path: Path, what: str, way_out: str = "Fix it, or use other data."):
        super().__init__(f"{path} cannot be used: {what}. {way_out}")


def decoded(source: Any, path: Path, mode: str, what: str = "it", flat: bool = False) -> Any:
    """Decode an image from a file or from bytes. Errors include its name. `flat`: see `_flattened`."""
    from PIL import Image

    try:
        with Image.open(source) as image:
            width, height = image.size
            if width * height > (Image.MAX_IMAGE_PIXELS or 2**27):
                raise ValueError(f"it has {width:,} x {height:,} pixels, which is too large")
            return (_flattened(image) if flat else image).convert(mode)
    except Exception as error:  # decoders raise many kinds of errors
        raise DamagedData(path, f"{what} is not a readable image ({error})") from error


def _flattened(image: Any) -> Any:
    """Upright as its EXIF data says, transparent parts on white, and more than 8 bits per pixel scaled to 8."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, np.float64)
        top = 65535.0 if image.mode.startswith("I;") else max(float(values.max()), 1e-9)
        if image.mode == "I":  # 32 bits may hold the values of 8 or 16
            top = next((bits for bits in (255.0, 65535.0) if top <= bits), top)
        return Image.fromarray((values.clip(0, top) * (255 / top)).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def as_labels(values: Iterable[Any], classes: int, path: Path) -> np.ndarray:
    """Labels as 8 or 16 bit integers, after checking that each is a class."""
    found = list(values)
    for row, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < classes:
            raise DamagedData(path, f"the label of row {row} is {value!r}; labels must be from 0 to {classes - 1}")
    return np.array(found, np.uint8 if classes <= 256 else np.int16)


def read_text(path: Path) -> str:
    """Read UTF-8 text, also of a .gz file, without a byte order mark; for other encodings, the error names file and
    line."""
    content = unpacked(path, gzip.open) if path.suffix.lower() == ".gz" else path.read_bytes()
    return as_utf8(path, content).removeprefix("\ufeff")


def unpacked(path: Path, opener: Any) -> bytes:
    """Unpack in pieces: a small file may unpack to more than the memory."""
    parts, size = [], 0
    try:
        with opener(path) as file:
            while part := file.read(2**26):
                parts.append(part)
                size += len(part)
                must_fit(path, size)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DamagedData(path, f"it cannot be read ({error})") from error
    return b"".join(parts)


def kind_of(path: Path) -> tuple[str, str]:
    """The name without its ending, and the ending in lower case, both without .gz."""
    inner = Path(path.stem) if path.suffix.lower() == ".gz" else path
    return inner.stem, inner.suffix.lower()


def lines_of(text: str) -> list[str]:
    """The lines of a text. `str.splitlines` would also break at characters such as U+2028, which texts contain."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def as_utf8(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if content.startswith(b"\x1f\x8b"):
            raise DamagedData(path, "it is packed by gzip", "Unpack it, or pass it alone, as a .gz file.") from None
        line, byte = content[: error.start].count(b"\n") + 1, content[error.start]
        encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        way_out = f"Convert it: iconv -f {encoding} -t utf-8 {path.name} > converted{path.suffix}"
        raise DamagedData(path, f"line {line} is not UTF-8 (byte {byte:#04x})", way_out) from None


def must_fit(path: Path, size: int) -> None:
    """Raise an error before reading data that does not fit into memory."""
    free = free_memory()
    if 2 * size > free:  # once as it is read, once as rows
        what = f"it has {size / 2**30:.1f} GiB, loading it needs twice that, and {free / 2**30:.1f} GiB are free"
        raise DamagedData(path, what, "Use a part of it.")


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
    """Rows of ids, truncated or zero-padded to `length`."""
    out = np.zeros((len(rows), length), dtype)
    for i, row in enumerate(rows):
        out[i, : min(len(row), length)] = row[:length]
    return out


def as_ids(text: bytes, length: int) -> np.ndarray:
    """Byte b -> id b + 1, because 0 is padding; id 256 needs more than a byte."""
    return np.frombuffer(text[:length], np.uint8).astype(np.int16) + 1


def split_off(count: int, held_out: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of a training set into training and validation rows, always in the same way."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
    return order[held_out:], order[:held_out]  # shuffled: the original files are sorted by class
