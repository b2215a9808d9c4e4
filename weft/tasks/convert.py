"""Convert data sets from the layouts in which their makers distribute them to the layouts that the tasks read.

    weft data convert NAME SOURCE --data DATA

    wikitext-103   folder with wiki.{train,valid,test}.tokens, or Parquet files train*, validation*, test* with "text"
    wiki40b        Parquet files train*, validation*, test* with "text"; markers like _NEWLINE_ become line breaks
    c4             c4-train.*.json.gz and c4-validation.*.json.gz; the last tenth of validation is the test part
    iwslt          train.tags.SRC-TGT.{SRC,TGT} and IWSLT*.{dev,tst}*.SRC-TGT.{SRC,TGT}.xml; the name of the target is
                   iwslt14.SRC-TGT, or iwslt15 for files of 2015
    aan            lra_release's folder with new_aan_pairs.{train,eval,test}.tsv
    flowers        102flowers.tgz or jpg/image_*.jpg, imagelabels.mat, setid.mat (needs scipy); the makers' test part is
                   the larger
    pets           images.tar.gz and annotations.tar.gz, or images/*.jpg, annotations/trainval.txt, annotations/test.txt
    imagenet       ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz (needs scipy); or
                   LOC_val_solution.csv and ILSVRC/Data/CLS-LOC/{train,val} (Kaggle's); or train/CLASS/*.JPEG with
                   val/*.JPEG and LOC_val_solution.csv, or with val/CLASS/*.JPEG
    pcqm4mv2       pcqm4m-v2.zip, or its unpacked folder
    coco           train2017.zip, val2017.zip, annotations_trainval2017.zip, or their unpacked folders

SOURCE may also be a zip or tar archive of such a folder. Nothing is written unless all of it can be. Images are
hard-linked where the file system allows it.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from .base import DataMissing
from .files import DamagedData, lines_of, new_folder, read_parquet, read_text

PARTS = {"train": "train", "validation": "valid", "test": "test"}
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
PACKED = {"flowers": ("102flowers.tgz",), "pets": ("images.tar.gz", "annotations.tar.gz")}  # beside other files


def convert(name: str, source: Path, data: Path) -> Path:
    """Convert the data set; returns its new folder."""
    if name not in CONVERTERS:
        raise DataMissing(f"unknown data set {name!r}; weft converts {', '.join(CONVERTERS)}")
    if not source.exists():
        raise DataMissing(f"{source} does not exist: pass the file or folder that the makers of {name} distribute")
    archives = [source] if source.is_file() else [source / part for part in PACKED.get(name, ())]
    archives = [path for path in archives if path.is_file()]
    if not archives or name == "pcqm4mv2":
        return CONVERTERS[name](source, data)
    with TemporaryDirectory(dir=_made(data), prefix=".unpacked-") as place:
        folder = Path(place)
        for path in archives:
            _extract(path, folder)
        if source.is_dir():
            for path in source.iterdir():
                if path not in archives and not (folder / path.name).exists():
                    (folder / path.name).symlink_to(path.resolve())
        inside = list(folder.iterdir())
        return CONVERTERS[name](inside[0] if len(inside) == 1 and inside[0].is_dir() else folder, data)


def wikitext(source: Path, data: Path) -> Path:
    with new_folder(data / "wikitext-103") as folder:
        for theirs, ours in PARTS.items():
            plain = source / f"wiki.{ours}.tokens"
            lines = [read_text(plain)] if plain.is_file() else (f"{text}\n" for text in _texts(source, theirs, plain))
            _write(folder / f"{ours}.txt", lines, source)
    return data / "wikitext-103"


def wiki40b(source: Path, data: Path) -> Path:
    marks = re.compile(r"\n?_(START_ARTICLE|START_SECTION|START_PARAGRAPH|NEWLINE)_\n?")
    with new_folder(data / "wiki40b") as folder:
        for theirs, ours in PARTS.items():
            texts = _texts(source, theirs, source / f"{theirs}*.parquet")
            _write(folder / f"{ours}.txt", (marks.sub("\n", text).strip() + "\n\n" for text in texts), source)
    return data / "wiki40b"


def c4(source: Path, data: Path) -> Path:
    train, held = (sorted(source.rglob(f"c4-{part}.*.json.gz")) for part in ("train", "validation"))
    if not train or not held:
        raise DamagedData(source, "it must have c4-train.*.json.gz and c4-validation.*.json.gz")
    with new_folder(data / "c4") as folder:
        _write(folder / "train.txt", (f"{text.strip()}\n\n" for text in _json_texts(train)), source)
        documents = [f"{text.strip()}\n\n" for text in _json_texts(held)]
        cut = len(documents) - max(1, len(documents) // 10)
        _write(folder / "valid.txt", documents[:cut], source)
        _write(folder / "test.txt", documents[cut:], source)
    return data / "c4"


def iwslt(source: Path, data: Path) -> Path:
    found = [re.fullmatch(r"train\.tags\.(\w+)-(\w+)\.\1", path.name) for path in sorted(source.glob("train.tags.*"))]
    pair = next((match.groups() for match in found if match), None)
    if pair is None:
        raise DamagedData(source, "it has no train.tags.SOURCE-TARGET.SOURCE, as in IWSLT's archives")
    name = f"{pair[0]}-{pair[1]}"
    xml = sorted(source.glob(f"IWSLT*.{name}.*.xml"))
    year = "15" if any(path.name.startswith("IWSLT15") for path in xml) else "14"
    with new_folder(data / f"iwslt{year}.{name}") as folder:
        sides = [_tagged(source / f"train.tags.{name}.{side}") for side in pair]
        _pairs(folder, "train", pair, sides, source)
        for part, key in (("valid", ".dev"), ("test", ".tst")):
            sides = [[t for path in xml if key in path.name and path.name.endswith(f".{side}.xml") for t in _xml(path)]
                     for side in pair]  # fmt: skip
            _pairs(folder, part, pair, sides, source)
    return data / f"iwslt{year}.{name}"


def aan(source: Path, data: Path) -> Path:
    from .matching import read_pairs

    with new_folder(data / "aan") as folder:
        for part in ("train", "eval", "test"):
            name = f"new_aan_pairs.{part}.tsv"
            path = next(iter(source.rglob(name)), None)
            if path is None:
                raise DamagedData(source, f"it has no {name}")
            read_pairs(path, 1)  # checks every line
            _link(path, folder / name)
    return data / "aan"


def flowers(source: Path, data: Path) -> Path:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataMissing("reading .mat files needs scipy: pip install scipy") from error
    try:
        labels = loadmat(source / "imagelabels.mat")["labels"].ravel()
        split = loadmat(source / "setid.mat")
        parts = {"train": [*split["trnid"].ravel(), *split["valid"].ravel()], "val": split["tstid"].ravel()}
    except Exception as error:  # scipy raises many kinds
        raise DamagedData(source, f"imagelabels.mat or setid.mat cannot be read ({error!r})") from error
    with new_folder(data / "flowers102") as folder:
        for part, numbers in parts.items():
            for number in numbers:
                if not 1 <= number <= len(labels):
                    raise DamagedData(source / "setid.mat", f"it names image {number}; there are {len(labels)} labels")
                picture = source / "jpg" / f"image_{number:05d}.jpg"
                _link(picture, folder / part / f"{labels[number - 1]:03d}" / picture.name)
    return data / "flowers102"


def pets(source: Path, data: Path) -> Path:
    with new_folder(data / "pets") as folder:
        for part, name in (("train", "trainval.txt"), ("val", "test.txt")):
            path = source / "annotations" / name
            for number, line in enumerate(_lines(path), 1):
                words = line.split()
                if line.startswith("#") or not words:
                    continue
                kind = words[0].rpartition("_")[0]
                if len(words) != 4 or not words[1].isdigit() or not kind:
                    what = f"line {number} must be BREED_NUMBER CLASS SPECIES BREED-ID, got {line!r}"
                    raise DamagedData(path, what)
                _link(source / "images" / f"{words[0]}.jpg", folder / part / kind / f"{words[0]}.jpg")
            if not (folder / part).exists():
                raise DamagedData(path, "it names no images")
    return data / "pets"


def imagenet(source: Path, data: Path) -> Path:
    if (source / "ILSVRC2012_img_train.tar").is_file():
        return _imagenet_archives(source, data)
    table, names = source / "LOC_val_solution.csv", {}
    if table.exists():
        reader = csv.DictReader(_lines(table))
        for row in reader:
            try:
                names[row["ImageId"]] = row["PredictionString"].split()[0]
            except (KeyError, IndexError, AttributeError):
                what = f"line {reader.line_num} must have ImageId and PredictionString 'CLASS x y x y', got {row}"
                raise DamagedData(table, what) from None
    images = source / "ILSVRC" / "Data" / "CLS-LOC"
    images = images if images.is_dir() else source
    with new_folder(data / "imagenet") as folder:
        for picture in _pictures(images / "train"):
            _link(picture, folder / "train" / picture.parent.name / picture.name)
        for picture in _pictures(images / "val"):
            kind = names.get(picture.stem) or (picture.parent.name if picture.parent != images / "val" else "")
            if not kind:
                way_out = f"Put that file into {source}."
                raise DamagedData(picture, "LOC_val_solution.csv has no class for it", way_out)
            if not (folder / "train" / kind).exists():
                raise DamagedData(picture, f"its class is {kind}, but there is no train/{kind}")
            _link(picture, folder / "val" / kind / picture.name)
    return data / "imagenet"


def _imagenet_archives(source: Path, data: Path) -> Path:
    """image-net.org's files: an archive of an archive per class, and a number per validation image."""
    with TemporaryDirectory(dir=_made(data), prefix=".unpacked-") as place:
        _extract(source / "ILSVRC2012_devkit_t12.tar.gz", Path(place))
        kit = next(iter(Path(place).glob("*/data")), Path(place))
        truth = kit / "ILSVRC2012_validation_ground_truth.txt"
        kinds = _wordnet_ids(kit / "meta.mat")
        numbers = _lines(truth)
    with new_folder(data / "imagenet") as folder:
        with _tar(source / "ILSVRC2012_img_train.tar") as classes:
            for member in classes:
                inner = classes.extractfile(member)
                if inner is None:
                    continue
                try:
                    with tarfile.open(fileobj=inner) as images:
                        images.extractall(folder / "train" / Path(member.name).stem, filter="data")
                except tarfile.TarError as error:
                    what = f"{member.name} in it is not an archive of the images of a class"
                    raise DamagedData(source / "ILSVRC2012_img_train.tar", what) from error
            if not (folder / "train").exists():
                raise DamagedData(source / "ILSVRC2012_img_train.tar", "it has no archives of classes")
        with _tar(source / "ILSVRC2012_img_val.tar") as images:
            members = sorted((m for m in images if m.isfile()), key=lambda member: member.name)
            if len(members) != len(numbers):
                raise DamagedData(truth, f"it has {len(numbers)} lines, but there are {len(members)} images")
            for line, (member, number) in enumerate(zip(members, numbers, strict=True), 1):
                if number.strip() not in kinds:
                    raise DamagedData(truth, f"line {line} must be the number of a class in meta.mat, got {number!r}")
                member.name = Path(member.name).name
                images.extract(member, folder / "val" / kinds[number.strip()], filter="data")
    return data / "imagenet"


def _wordnet_ids(path: Path) -> dict[str, str]:
    """The WordNet id of every class number, from the development kit."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataMissing("reading .mat files needs scipy: pip install scipy") from error
    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        return {str(int(one["ILSVRC2012_ID"])): str(one["WNID"]) for one in synsets if not int(one["num_children"])}
    except Exception as error:  # scipy raises many kinds
        raise DamagedData(path, f"its synsets cannot be read ({error!r})") from error


def pcqm4mv2(source: Path, data: Path) -> Path:
    with new_folder(data / "pcqm4m-v2") as folder:
        _unpack(source, folder, "pcqm4m-v2/")
        table = folder / "raw" / "data.csv.gz"
        if not table.exists():
            raise DamagedData(source, "it has no raw/data.csv.gz")
        first = next(_gz_lines(table), "").strip()
        if not {"smiles", "homolumogap"} <= set(first.split(",")):
            raise DamagedData(source, f"line 1 of data.csv.gz must name smiles and homolumogap, got {first!r}")
    return data / "pcqm4m-v2"


def coco(source: Path, data: Path) -> Path:
    from .detection import read_truth

    with new_folder(data / "coco") as folder:
        for name in ("train2017", "val2017", "annotations"):
            archive = source / ("annotations_trainval2017.zip" if name == "annotations" else f"{name}.zip")
            _unpack(archive if archive.exists() else source / name, folder / name, f"{name}/")
        for part in ("train2017", "val2017"):
            truth = folder / "annotations" / f"instances_{part}.json"
            if not truth.exists():
                raise DamagedData(source, f"annotations/instances_{part}.json is missing")
            for image in read_truth(truth)["images"]:
                if not (folder / part / image["file_name"]).exists():
                    raise DamagedData(source, f"{part}/{image['file_name']} is missing; {truth.name} names it")
    return data / "coco"


CONVERTERS: dict[str, Callable[[Path, Path], Path]] = {
    "wikitext-103": wikitext, "wiki40b": wiki40b, "c4": c4, "iwslt": iwslt, "aan": aan, "flowers": flowers,
    "pets": pets, "imagenet": imagenet, "pcqm4mv2": pcqm4mv2, "coco": coco,
}  # fmt: skip


def _texts(source: Path, part: str, expected: Path) -> Iterator[str]:
    files = sorted(source.rglob(f"{part}*.parquet"))
    if not files:
        raise DamagedData(source, f"it has neither {expected.name} nor {part}*.parquet")
    for path in files:
        for row, text in enumerate(read_parquet([path], ["text"])["text"]):
            if not isinstance(text, str):
                raise DamagedData(path, f"row {row} has the text {text!r}, which is not a string")
            yield text


def _json_texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        for number, line in enumerate(_gz_lines(path), 1):
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError(f"text is {text!r}")
            except (ValueError, KeyError, TypeError) as error:
                what = f"line {number} must be a JSON object with a string text ({error!r})"
                raise DamagedData(path, what) from error
            yield text


def _gz_lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield line
                number += 1
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise DamagedData(path, f"after line {number}, it is not UTF-8 text compressed by gzip ({error})") from error


def _tagged(path: Path) -> list[str]:
    """Sentences of a file in which lines with XML tags are not text."""
    return [line.strip() for line in _lines(path) if not line.lstrip().startswith("<")]


def _xml(path: Path) -> list[str]:
    try:
        return [" ".join((seg.text or "").split()) for seg in ElementTree.parse(path).iter("seg")]
    except ElementTree.ParseError as error:
        raise DamagedData(path, f"line {error.position[0]} is not XML ({error})") from error


def _pairs(folder: Path, part: str, names: tuple[str, ...], sides: list[list[str]], source: Path) -> None:
    if not sides[0] or len(sides[0]) != len(sides[1]):
        what = f"its {part} part has {len(sides[0])} sentences in {names[0]} and {len(sides[1])} in {names[1]}"
        raise DamagedData(source, what)
    for name, lines in zip(names, sides, strict=True):
        _write(folder / f"{part}.{name}", (f"{line}\n" for line in lines), source)


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DamagedData(path, "it does not exist")
    return lines_of(read_text(path))


def _pictures(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".jpeg", ".jpg", ".png")]
    if not found:
        raise DamagedData(folder, "it has no images")
    return found


def _write(path: Path, parts: Iterable[str], source: Path) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(parts)
        if not file.tell():
            raise DamagedData(source, f"its part {path.stem} has no text")


def _link(source: Path, target: Path) -> None:
    if not source.is_file():
        raise DamagedData(source, "it does not exist")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _tar(path: Path) -> Iterator[tarfile.TarFile]:
    if not path.is_file():
        raise DamagedData(path, "it does not exist")
    try:
        with tarfile.open(path) as archive:
            yield archive
            while archive.fileobj and archive.fileobj.read(2**20):
                pass  # to the checksum at the end of a compressed file, where tarfile does not look
    except (*UNREADABLE, tarfile.TarError) as error:
        first = str(error).split("\n")[0].rstrip(":")
        raise DamagedData(path, f"it is neither a folder nor a whole zip or tar archive ({first})") from error


def _extract(path: Path, folder: Path) -> None:
    if zipfile.is_zipfile(path):
        _unpack(path, folder, "")
        return
    with _tar(path) as archive:
        archive.extractall(folder, filter="data")


def _unpack(source: Path, target: Path, inside: str) -> None:
    """A zip file, or the folder that it would become, into `target`, without the leading folder `inside`."""
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                _link(path, target / path.relative_to(source))
        return
    try:
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                name = entry.filename.removeprefix(inside)
                place = (target / name).resolve()
                if entry.is_dir() or not name:
                    continue
                if not place.is_relative_to(target.resolve()):
                    raise DamagedData(source, f"it has a file outside of its folder, {entry.filename!r}")
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as file, open(place, "wb") as copy:
                    shutil.copyfileobj(file, copy)
    except (*UNREADABLE, zipfile.BadZipFile, RuntimeError) as error:  # the last if it is encrypted
        raise DamagedData(source, f"it cannot be unpacked ({error})") from error
