"""Converters: a small file in each maker's layout becomes what the task reads; bad input names file and line."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from weft.tasks import DataMissing, get_task, make_config, tasks
from weft.tasks.convert import CONVERTERS, convert
from weft.tasks.fetch import SOURCES


def picture(path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (90, 0, 0)).save(path)


def parquet(path, texts) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"text": texts}), path)


def wikitext(source) -> str:
    for part in ("train", "valid", "test"):
        (source / f"wiki.{part}.tokens").write_text(" = A title = \n some words \n")
    return "wikitext-103/valid.txt"


def wiki40b(source) -> str:
    for part in ("train", "validation", "test"):
        article = "\n_START_ARTICLE_\nName\n_START_PARAGRAPH_\nOne._NEWLINE_Two."
        parquet(source / f"{part}-00000-of-00001.parquet", [article, article])
    return "wiki40b/train.txt"


def c4(source) -> str:
    for part, count in (("train", 3), ("validation", 11)):
        with gzip.open(source / f"c4-{part}.00000-of-00001.json.gz", "wt") as file:
            file.writelines(json.dumps({"text": f"document {i}\nwith two lines"}) + "\n" for i in range(count))
    return "c4/test.txt"


def iwslt(source) -> str:
    for side, text in (("de", "Hallo"), ("en", "Hello")):
        (source / f"train.tags.de-en.{side}").write_text(f"<url>x</url>\n{text}\u2028one\n{text} two\n")
        for name in ("dev2010", "tst2010", "tst2011"):
            segments = f"<mteval><srcset><doc><seg id='1'> {text}\n{name} </seg></doc></srcset></mteval>"
            (source / f"IWSLT14.TED.{name}.de-en.{side}.xml").write_text(segments)
    return "iwslt14.de-en/test.en"


def aan(source) -> str:
    (source / "lra_release").mkdir()
    for part in ("train", "eval", "test"):
        (source / "lra_release" / f"new_aan_pairs.{part}.tsv").write_text("1.0\ta\tb\tb'one'\tb'two'\n")
    return "aan/new_aan_pairs.eval.tsv"


def flowers(source) -> str:
    io = pytest.importorskip("scipy.io")
    for i in range(1, 7):
        picture(source / "jpg" / f"image_{i:05d}.jpg")
    io.savemat(source / "imagelabels.mat", {"labels": np.array([[1, 1, 2, 2, 1, 2]])})
    split = {"trnid": np.array([[1, 3]]), "valid": np.array([[2]]), "tstid": np.array([[4, 5, 6]])}
    io.savemat(source / "setid.mat", split)
    return "flowers102/val/002/image_00006.jpg"


def pets(source) -> str:
    (source / "annotations").mkdir()
    for name, lines in (("trainval", ["Maine_Coon_1 1 1 1", "pug_1 2 2 1"]), ("test", ["pug_2 2 2 1"])):
        (source / "annotations" / f"{name}.txt").write_text("#Image CLASS-ID\n" + "\n".join(lines) + "\n")
    for name in ("Maine_Coon_1", "pug_1", "pug_2"):
        picture(source / "images" / f"{name}.jpg")
    return "pets/train/Maine_Coon/Maine_Coon_1.jpg"


def imagenet(source) -> str:
    images = source / "ILSVRC" / "Data" / "CLS-LOC"
    for kind in ("n01", "n02"):
        picture(images / "train" / kind / f"{kind}_1.JPEG")
    picture(images / "val" / "ILSVRC2012_val_00000001.JPEG")
    rows = "ImageId,PredictionString\nILSVRC2012_val_00000001,n02 1 2 3 4 \n"
    (source / "LOC_val_solution.csv").write_text(rows)
    return "imagenet/val/n02/ILSVRC2012_val_00000001.JPEG"


def pcqm4mv2(source) -> str:
    with zipfile.ZipFile(source / "pcqm4m-v2.zip", "w") as archive:
        archive.writestr("pcqm4m-v2/raw/data.csv.gz", gzip.compress(b"idx,smiles,homolumogap\n0,CO,5.5\n"))
    return "pcqm4m-v2/raw/data.csv.gz"


def coco(source) -> str:
    for part in ("train2017", "val2017"):
        picture(source / part / "1.jpg")
        truth = {"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [], "categories": []}
        (source / "annotations").mkdir(exist_ok=True)
        (source / "annotations" / f"instances_{part}.json").write_text(json.dumps(truth))
    with zipfile.ZipFile(source / "val2017.zip", "w") as archive:
        archive.write(source / "val2017" / "1.jpg", "val2017/1.jpg")
    return "coco/val2017/1.jpg"


MAKERS = {make.__name__: make for make in (wiki40b, c4, iwslt, aan, flowers, pets, imagenet, pcqm4mv2, coco)}
MAKERS["wikitext-103"] = wikitext


@pytest.mark.parametrize("name", CONVERTERS)
def test_the_makers_layout_becomes_ours(tmp_path, name: str) -> None:
    source, data = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    there = MAKERS[name](source)
    made = convert(name, source / "pcqm4m-v2.zip" if name == "pcqm4mv2" else source, data)
    assert (data / there).is_file() and made == data / there.split("/")[0]
    with pytest.raises(DataMissing, match="already exists"):
        convert(name, source / "pcqm4m-v2.zip" if name == "pcqm4mv2" else source, data)


def test_contents(tmp_path) -> None:
    for name in ("wiki40b", "c4", "iwslt"):
        (tmp_path / name).mkdir()
        MAKERS[name](tmp_path / name)
        convert(name, tmp_path / name, tmp_path / "data")
    assert (tmp_path / "data/wiki40b/valid.txt").read_text() == "Name\nOne.\nTwo.\n\n" * 2
    assert (tmp_path / "data/c4/test.txt").read_text() == "document 10\nwith two lines\n\n"
    assert (tmp_path / "data/iwslt14.de-en/train.de").read_text() == "Hallo\u2028one\nHallo two\n"
    assert (tmp_path / "data/iwslt14.de-en/test.en").read_text() == "Hello tst2010\nHello tst2011\n"


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_archives(tmp_path, kind: str) -> None:
    (tmp_path / "in" / "wikitext-103").mkdir(parents=True)
    wikitext(tmp_path / "in" / "wikitext-103")
    archive = shutil.make_archive(str(tmp_path / "wikitext"), kind, tmp_path / "in")
    convert("wikitext-103", Path(archive), tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["wikitext-103"]
    (tmp_path / "plain").write_text("no archive")
    with pytest.raises(DataMissing, match="neither a folder nor a whole zip or tar archive"):
        convert("iwslt", tmp_path / "plain", tmp_path / "data")


@pytest.mark.parametrize("kind", ["zip", "gztar", "xztar"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_archives_are_refused(tmp_path, kind: str, damage: str) -> None:
    """tarfile takes the first header that it cannot read for the end of the archive, and checks no checksum."""
    (tmp_path / "in").mkdir()
    wikitext(tmp_path / "in")
    (tmp_path / "in" / "more").write_bytes(np.random.default_rng(0).bytes(5000))
    archive = Path(shutil.make_archive(str(tmp_path / "wikitext"), kind, tmp_path / "in"))
    content = archive.read_bytes()
    middle = len(content) // 2
    end = b"" if damage == "cut" else bytes([content[middle] ^ 255]) + content[middle + 1 :]
    archive.write_bytes(content[:middle] + end)
    with pytest.raises(DataMissing, match=f"{archive.name} cannot be used: it (cannot be|is neither)"):
        convert("wikitext-103", archive, tmp_path / "data")
    assert not list((tmp_path / "data").glob("*"))


def test_the_archives_of_image_net_org(tmp_path) -> None:
    io = pytest.importorskip("scipy.io")
    source, kit = tmp_path / "source", tmp_path / "ILSVRC2012_devkit_t12" / "data"
    source.mkdir()
    kit.mkdir(parents=True)
    kinds = np.array(
        [(1, "n02", 0), (2, "n01", 0), (3, "n09", 2)], [("ILSVRC2012_ID", int), ("WNID", "O"), ("num_children", int)]
    )
    io.savemat(kit / "meta.mat", {"synsets": kinds})
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n")
    with tarfile.open(source / "ILSVRC2012_img_train.tar", "w") as train:
        for kind in ("n01", "n02"):
            picture(tmp_path / kind / f"{kind}_1.JPEG")
            with tarfile.open(tmp_path / f"{kind}.tar", "w") as inner:
                inner.add(tmp_path / kind / f"{kind}_1.JPEG", f"{kind}_1.JPEG")
            train.add(tmp_path / f"{kind}.tar", f"{kind}.tar")
    with tarfile.open(source / "ILSVRC2012_img_val.tar", "w") as val:
        for i in (2, 1):
            val.add(tmp_path / "n01" / "n01_1.JPEG", f"ILSVRC2012_val_0000000{i}.JPEG")
    with tarfile.open(source / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        archive.add(kit.parent, kit.parent.name)
    made = convert("imagenet", source, tmp_path / "data")
    found = sorted(str(path.relative_to(made)) for path in made.rglob("*.JPEG"))
    val = [f"val/n0{3 - i}/ILSVRC2012_val_0000000{i}.JPEG" for i in (2, 1)]
    assert found == ["train/n01/n01_1.JPEG", "train/n02/n02_1.JPEG", *val]


def test_image_folders_of_other_places(tmp_path) -> None:
    imagenet(tmp_path / "kaggle")
    source = (tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC").rename(tmp_path / "source")
    with pytest.raises(DataMissing, match=r"LOC_val_solution.csv has no class for it. Put that file into .*source"):
        convert("imagenet", source, tmp_path / "data")
    (source / "val" / "n01").mkdir()
    name = "ILSVRC2012_val_00000001.JPEG"
    (source / "val" / name).rename(source / "val" / "n01" / name)
    assert (convert("imagenet", source, tmp_path / "data") / "val" / "n01" / name).is_file()


def test_archives_beside_other_files(tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    there = pets(source)
    for name in ("images", "annotations"):
        shutil.make_archive(str(source / name), "gztar", source, name)
        shutil.rmtree(source / name)
    convert("pets", source, tmp_path / "data")
    assert (tmp_path / "data" / there).is_file()


def test_the_task_reads_what_was_converted(tmp_path) -> None:
    (tmp_path / "pets").mkdir()
    pets(tmp_path / "pets")
    convert("pets", tmp_path / "pets", tmp_path / "data")
    found = get_task("pets").load(make_config("pets", data=str(tmp_path / "data"), image_size=8))
    assert found.classes == ["Maine_Coon", "pug"] and found.rows("test") == 1


C4, AAN = "c4-train.00000-of-00001.json.gz", "lra_release/new_aan_pairs.eval.tsv"
COCO = "annotations/instances_val2017.json"


def truth(images: str, annotations: str = "") -> bytes:
    return f'{{"images": [{images}], "annotations": [{annotations}], "categories": []}}'.encode()


BAD = [
    ("wikitext-103", "wiki.valid.tokens", b"", "part valid has no text"),
    ("c4", C4, gzip.compress(b'{"text": "a"}\n{"no": 1}\n'), "line 2 .*JSON"),
    ("c4", C4, gzip.compress(b'{"text": "a"}\n{"text": null}\n'), "line 2 .*a string text"),
    ("c4", C4, gzip.compress(b'{"text": "a"}\n' * 99)[:-9], f"{C4} .*after line \\d+, it is not"),
    ("c4", C4, b"text", f"{C4} .*after line 0, it is not"),
    ("aan", AAN, b"1.0\ta\tb\tc\td\n1.0\ta\n", "line 2 has 2 columns; expected five"),
    ("aan", AAN, b"1.0\ta\tb\tc\td\nyes\ta\tb\tc\td\n", "line 2 has the label 'yes'"),
    ("flowers", "setid.mat", b"x", "setid.mat cannot be read"),
    ("pets", "annotations/test.txt", b"pug_2 two 2 1\n", "line 1 must be BREED_NUMBER CLASS"),
    ("pets", "annotations/test.txt", b"#nothing\n", "test.txt .*names no images"),
    ("imagenet", "LOC_val_solution.csv", b"ImageId,PredictionString\na,\n", "line 2 must have ImageId"),
    ("imagenet", "LOC_val_solution.csv", b"ImageId,PredictionString\n\xff,n02 1\n", "line 2 is not UTF-8"),
    ("iwslt", "IWSLT14.TED.dev2010.de-en.de.xml", b"<a>\n<b>\n</a>", "line 3 is not XML"),
    ("pcqm4mv2", "raw/data.csv.gz", b"idx,smiles,homolumogap\n", "data.csv.gz .*after line 0, it is not"),
    ("coco", COCO, truth('{"id": 1, "file_name": "2.jpg"}'), "val2017/2.jpg is missing"),
    ("coco", COCO, b'{"images": [\n1,\n', f"{COCO} .*line 3 is not JSON"),
    ("coco", COCO, truth('{"id": 1}'), r"images\[0\] must have id and file_name"),
    ("coco", COCO, truth("", '{"bbox": [1, 2, 3, 4]}'), r"annotations\[0\] must have an id"),
]


@pytest.mark.parametrize(("name", "place", "content", "says"), BAD, ids=[f"{name}-{says}" for name, _, _, says in BAD])
def test_bad_input_names_the_file_and_the_line_and_leaves_nothing(tmp_path, name, place, content, says) -> None:
    source = tmp_path / "source"
    source.mkdir()
    MAKERS[name](source)
    (source / place).parent.mkdir(exist_ok=True)
    (source / place).write_bytes(content)
    with pytest.raises(DataMissing, match=says):
        convert(name, source, tmp_path / "data")
    assert not list((tmp_path / "data").glob("*"))


def test_rows_without_a_text_are_named(tmp_path) -> None:
    wiki40b(tmp_path)
    parquet(tmp_path / "test-00000-of-00001.parquet", ["a", None])
    with pytest.raises(DataMissing, match=r"test-00000.*row 1 has the text None"):
        convert("wiki40b", tmp_path, tmp_path / "data")


def test_unknown_names(tmp_path) -> None:
    with pytest.raises(DataMissing, match="wikitext-103, wiki40b"):
        convert("ptb", tmp_path, tmp_path)
    with pytest.raises(DataMissing, match="does not exist"):
        convert("c4", tmp_path / "none", tmp_path)


def test_the_list_of_data_sets_has_what_every_task_reads(tmp_path) -> None:
    listed = {frozenset(source.places) for source in SOURCES}
    for name in tasks():
        try:
            get_task(name).load(make_config(name, data=str(tmp_path)))
        except DataMissing as error:  # "no A or B in FOLDER: what to do", except for tasks with your own data
            wanted = re.match(rf"no (.+) in {re.escape(str(tmp_path))}: ", str(error))
            if wanted and name != "imagefolder" and not name.startswith("pathfinder"):
                assert frozenset(wanted[1].split(" or ")) in listed, name
