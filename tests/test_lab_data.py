"""Invalid data is refused with its name, what was expected and what to do."""

import gzip
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("lightning")
pytest.importorskip("pyarrow")

from PIL import Image
from runs import weft

from weft.lab import make_config
from weft.lab.kept import describe, fingerprint
from weft.tasks import DataMissing, files, get_task
from weft.tasks.registry import task_of


def load(task, data):
    return get_task(task).load(make_config(task, data=str(data)))


def parquet(path, **columns):
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path)


def png(side: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (side, side)).save(content, "png")
    return content.getvalue()


def corpus(folder, first):
    """The training text changes with each call; the other parts stay the same."""
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text(f"{first} " * (270 // len(first)) + "\n" + "one two three four\n" * 40)
    for part in ("valid", "test"):
        (folder / f"{part}.txt").write_text("four three two one five\n" * 40)


def translations(folder, first):
    (folder / "iwslt14.de-en").mkdir(parents=True)
    for side in ("de", "en"):
        (folder / "iwslt14.de-en" / f"train.{side}").write_text(f"{first} {first}ly\n" * 40 + "eins zwei drei\n" * 9)
        for part in ("valid", "test"):
            (folder / "iwslt14.de-en" / f"{part}.{side}").write_text("drei zwei eins\n" * 9)


def molecules(folder, first):
    rows = [f"{'C' * (1 + i % 3)}O,{i}" for i in range(40)] + [f"C,{len(first)}", f"{'C' * len(first)},4"]
    (folder / "pcqm4m-v2" / "raw").mkdir(parents=True)
    with gzip.open(folder / "pcqm4m-v2" / "raw" / "data.csv.gz", "wt") as file:
        file.write("\n".join(["smiles,homolumogap", *rows]) + "\n")


def sentiments(folder, first):
    folder.mkdir(parents=True)
    train, test = [f"{first} {i}" for i in range(20)], [f"bee {i}" for i in range(20)]
    parquet(folder / "imdb.parquet", text=train + test, label=[0, 1] * 20, split=["train"] * 20 + ["test"] * 20)


def pictures(folder, first):
    for part, names in (("train", (first, "m", "n")), ("val", ("m", "n"))):
        for name in names:
            (folder / "pets" / part / name).mkdir(parents=True)
            (folder / "pets" / part / name / "0.png").write_bytes(png(8))


PLUGINS = Path(__file__).parent.parent / "experiments"


@pytest.mark.parametrize(
    "task, make, settings",
    [
        ("imdb-token", sentiments, {}),
        ("wiki40b", corpus, {"max_length": 8}),
        ("c4-masked", corpus, {"max_length": 8}),
        ("wikitext103", corpus, {"max_length": 8}),
        (f"{PLUGINS}/cached/table5.py:transformer-xl-baseline", corpus, {"max_length": 8, "batch_size": 2}),
        ("iwslt14-de-en", translations, {}),
        ("pcqm4mv2", molecules, {}),
    ],
)  # fmt: skip
def test_a_run_reads_other_data_with_its_own_vocabulary(tmp_path, monkeypatch, task, make, settings):
    """With other training data, the run still reads the test data in the same way."""
    pytest.importorskip("rdkit" if make is molecules else "tokenizers")
    for name in ("sacrebleu", "sacrebleu.metrics"):  # nothing is scored here
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(BLEU=object))
    make(tmp_path / "own", "bee")
    make(tmp_path / "other", "aardvark")
    config = make_config(task, data=str(tmp_path / "own"), **settings)
    own = task_of(config).load(config)
    kept = describe(own)
    config.data = str(tmp_path / "other")
    again = task_of(config).load_again(config, kept.known)
    meaning = [{k: v for k, v in describe(data).record.items() if k not in ("rows", "sha256")} for data in (own, again)]
    assert meaning[0] == meaning[1] and fingerprint(own.train) != fingerprint(again.train)
    if make is not molecules:
        assert kept.vocabulary is not None or kept.tokenizer is not None
        assert fingerprint(own.test) == fingerprint(again.test)
        assert fingerprint(task_of(config).load(config).test) != fingerprint(own.test)  # with its own words


def test_class_indices_stay_the_same(tmp_path):
    pictures(tmp_path / "own", "z")
    config = make_config("pets", data=str(tmp_path / "own"), image_size=8)
    own = get_task("pets").load(config)
    assert own.classes == ["m", "n", "z"] and describe(own).record["classes"] == own.classes
    pictures(tmp_path / "other", "a")
    config.data = str(tmp_path / "other")
    with pytest.raises(DataMissing, match="classes that are not in train/: a"):
        get_task("pets").load_again(config, describe(own).known)
    shutil.rmtree(tmp_path / "other" / "pets" / "train" / "a")
    (tmp_path / "other" / "pets-train-8.npy").touch()
    again = get_task("pets").load_again(config, describe(own).known)
    assert fingerprint(again.test) == fingerprint(own.test)
    (tmp_path / "own" / "pets" / "val" / "m" / "1.png").write_bytes(b"no picture")
    config.data = str(tmp_path / "own")
    with pytest.raises(DataMissing, match="m/1.png cannot be used"):
        get_task("pets").load(config)


@pytest.mark.parametrize(
    "task, says",
    [("text", "it is empty"), ("masked", "it is empty"), ("imdb-byte", "neither a Parquet file nor the folder"),
     ("imagefolder", "not a folder with train/"), ("wiki40b", "is a file"), ("matching", "is missing")],
)  # fmt: skip
def test_an_empty_file_instead_of_the_data(tmp_path, task, says):
    (tmp_path / "given").touch()
    with pytest.raises(DataMissing, match=f"given.*{says}"):
        load(task, tmp_path / "given")


def test_a_changed_corpus_is_encoded_again(tmp_path):
    corpus(tmp_path / "own", "bee")
    config = make_config("wiki40b", data=str(tmp_path / "own"), max_length=8)

    def digest():
        return describe(get_task("wiki40b").load(config)).digest

    first = digest()
    (tmp_path / "own" / "train.txt").write_text("a text that somebody has written anew\n" * 40)
    changed = digest()
    ids = tmp_path / "own" / "pieces32000-train.npy"
    ids.write_bytes(ids.read_bytes()[:200])
    mended = digest()
    assert first != changed == mended


@pytest.mark.parametrize(
    "label, text, says",
    [
        ([1, 2], ["a", "b"], "the label of row 1 is 2; labels must be from 0 to 1"),
        ([-1, 1], ["a", "b"], "the label of row 0 is -1"),
        ([0.5, 1.0], ["a", "b"], "the label of row 0 is 0.5"),
        ([0, 1], ["a", None], "the text of row 1 is None"),
    ],
)
def test_reviews(tmp_path, label, text, says):
    parquet(tmp_path / "imdb.parquet", text=text * 2, label=label * 2, split=["train", "train", "test", "test"])
    with pytest.raises(DataMissing, match=says) as refused:
        load("imdb-byte", tmp_path)
    assert "Remove it" not in str(refused.value) and "imdb.parquet" in str(refused.value)


def test_text_in_another_encoding_is_refused_with_file_and_line(tmp_path):
    for split in ("train", "test"):
        for kind in ("neg", "pos"):
            (tmp_path / "aclImdb" / split / kind).mkdir(parents=True)
            (tmp_path / "aclImdb" / split / kind / "0_1.txt").write_text("fine")
    (tmp_path / "aclImdb" / "test" / "pos" / "0_1.txt").write_bytes("one\ncaf\u00e9".encode("latin1"))
    with pytest.raises(DataMissing, match=r"pos/0_1.txt cannot be used: line 2 is not UTF-8 \(byte 0xe9\).*iconv"):
        load("imdb-byte", tmp_path)


@pytest.mark.parametrize(
    "image, label, says",
    [
        (png(28), 1, "28 x 28 pixels, not 32 x 32"),
        (b"no picture", 1, "row 0 is not a readable image"),
        (None, 1, "the image of row 0 is None"),
        (png(32), 10, "the label of row 0 is 10"),
        (png(32), -1, "the label of row 0 is -1"),
    ],
)
def test_invalid_cifar_images(tmp_path, image, label, says):
    cells = [image or png(32)] * 2 if image else [None, png(32)]
    parquet(tmp_path / "cifar10.parquet", image=cells, label=[label] * 2, split=["train", "test"])
    with pytest.raises(DataMissing, match=says):
        load("cifar10", tmp_path)


def bomb() -> bytes:
    """A small file whose header claims 10^10 pixels."""
    content = bytearray(png(4))
    content[16:24] = (100_000).to_bytes(4, "big") * 2
    return bytes(content)


def cut() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(content, "jpeg")
    return content.getvalue()[:900]


@pytest.mark.parametrize("content", [bomb(), cut(), b"", b"GIF89a", png(4)[:40]])
def test_images_that_cannot_be_decoded(tmp_path, content):
    for part in ("train", "val"):
        for kind in ("a", "b"):
            (tmp_path / part / kind).mkdir(parents=True)
            (tmp_path / part / kind / "0.png").write_bytes(png(8))
    (tmp_path / "val" / "b" / "0.png").write_bytes(content)
    with pytest.raises(DataMissing, match="val/b/0.png cannot be used"):
        load("imagefolder", tmp_path)


def test_archives(tmp_path, monkeypatch):
    path = tmp_path / "t.zip"
    for names in ((), ("a", "b")):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "text")
        with pytest.raises(DataMissing, match=f"it has {len(names)} files, not one"):
            load("text", path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(2**24))
    assert path.stat().st_size < 2**16
    monkeypatch.setattr(files, "free_memory", lambda: 2**24)
    with pytest.raises(DataMissing, match="Use a part of it"):
        load("text", path)
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(DataMissing, match="t.zip cannot be used"):
        load("text", path)


@pytest.mark.parametrize("name", ["t.tar.gz", "t.tar", "t.tar.xz"])
def test_packed_text_that_is_not_unpacked_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"text") * 999)
    for task in ("text", "lm"):
        with pytest.raises(DataMissing, match="it is a packed file. Unpack it"):
            load(task, tmp_path / name)


def test_invalid_numbers_of_examples(tmp_path):
    for name, count in (("listops", -5), ("pathfinder32-easy", -5), ("pathfinder32-easy", 3)):
        said = weft("data", "make", name, "--data", tmp_path, "--count", count)
        assert said.exit_code == 2 and str(count) in said.output and not list(tmp_path.iterdir())


def test_a_killed_generator_leaves_nothing_behind(tmp_path):
    """After SIGTERM at once; after SIGKILL when the next one starts."""
    command = [sys.executable, "-m", "weft.cli", "data", "make", "pathfinder128-hard", "--data", str(tmp_path)]
    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        process = subprocess.Popen([*command, "--workers", "1"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not list(tmp_path.glob(".*.tmp/images.npy")):
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(timeout=60)
        assert len(list(tmp_path.iterdir())) == left
    with files.new_folder(tmp_path / "pathfinder128-hard") as mine:
        assert [p.name for p in tmp_path.iterdir()] == [mine.name]
    assert str(os.getpid()) in mine.name
