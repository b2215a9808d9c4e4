"""Your own data: tables and texts in, a trained model out that predicts without them."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from browser import payload
from own_data import TINY, load

import weft
from weft.lab.start import load_data
from weft.tasks import DataMissing, Known, get_task, make_config, own
from weft.tasks.tables import read_table
from weft.tasks.tokens import Pieces

pytest.importorskip("lightning")


def reviews(count: int = 40) -> list[tuple[str, str]]:
    kinds = {"good": 'lovely, "warm"\nand short', "bad": "dull; long"}
    return [(f"{kinds[kind]} {i}", kind) for i in range(count // 2) for kind in kinds]


@pytest.fixture
def table(tmp_path):
    with open(tmp_path / "reviews.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "label"])
        writer.writerows((i, *row) for i, row in enumerate(reviews()))
    return tmp_path / "reviews.csv"


def test_a_run_predicts_without_its_data_and_survives_export(table, tmp_path, capsys):
    from weft.lab import train

    config = make_config("classify", data=str(table), out=str(tmp_path / "run"), tokenizer="words", **TINY)
    train(config)
    texts = [text for text, _ in reviews(6)]
    table.unlink()
    model = weft.load(tmp_path / "run")
    answers = model.predict(texts, batch_size=4)
    assert model.classes == ["bad", "good"] and not model.training
    assert all(a["answer"] in model.classes and 0 < a["probability"] <= 1 for a in answers) and len(answers) == 6
    again = weft.load(model.export(tmp_path / "exported"))
    assert again.predict(texts) == answers
    assert again.known.length == 24 and "Classes: bad, good" in (tmp_path / "exported/README.md").read_text()
    start = tmp_path / "run" / "environment.json"
    start.write_text(json.dumps([{**json.loads(start.read_text())[0], "commit": "123456789abcdef+changes"}]))
    weft.load(tmp_path / "run", "last").export(tmp_path / "last")
    weft.load(tmp_path / "last").export(tmp_path / "again")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("exported", "last", "again")]
    assert ["- Test: loss" in card for card in cards] == [True, False, False]  # the best weights were tested
    assert ["commit 123456789abc+changes)" in card for card in cards] == [False, True, True]
    capsys.readouterr()
    model.predict([*texts, "warm " * 25], batch_size=4)
    assert capsys.readouterr().err.startswith("note: 1 of 7 texts have more than 24 tokens (up to 25) and are cut")
    with pytest.raises(TypeError, match="put a single text in a list"):
        model.predict("one text")
    with pytest.raises(TypeError, match="takes a list of texts"):
        model.predict([3])
    assert model.predict(iter(texts)) == answers
    import pyarrow

    for columns in ({"text": texts}, pyarrow.table({"text": texts})):
        with pytest.raises(TypeError, match="of a table, pass a column"):
            model.predict(columns)
    with pytest.raises(FileNotFoundError, match="neither a run nor an exported model"):
        weft.load(tmp_path)
    with pytest.raises(ValueError, match="which must be best, last or average, got 'newest'"):
        weft.load(tmp_path / "run", "newest")


def test_predictions_compute_only_the_token_that_is_read(table, tmp_path):
    from weft.lab import train

    train(make_config("classify", data=str(table), out=str(tmp_path / "run"), pooling="cls", **TINY))
    model, texts, shapes = weft.load(tmp_path / "run"), [text for text, _ in reviews(4)], []
    model.model.encoder.blocks[-1].register_forward_hook(lambda module, inputs, out: shapes.append(out.shape))
    with torch.no_grad():
        whole = model(model.task.encode(texts, model.known)["ids"]).softmax(-1).amax(1)
    found = [answer["probability"] for answer in model.predict(texts)]
    assert found == pytest.approx(whole.tolist(), abs=1e-6) and shapes == [(4, 25, 16), (4, 16)]


def test_a_run_that_was_tested_as_an_ensemble_answers_as_one(table, tmp_path):
    from weft.lab import train

    config = make_config(
        "regress", data=str(numbered(table)), out=str(tmp_path / "run"), subsample="Sall-L4", ensemble=3, **TINY
    )
    tested, model = train(config).test["mae"], weft.load(tmp_path / "run")
    test, (mean, deviation) = load("regress", numbered(table), max_length=24).test, model.known.facts["scale"]

    def error() -> float:
        found = torch.tensor([answer["answer"] for answer in model.predict(test["ids"])])
        return float((found - test["label"] * deviation - mean).abs().mean())

    assert error() == pytest.approx(tested)
    model.config.ensemble = 0
    assert error() != pytest.approx(tested)


def test_the_commands_predict_and_export(table, tmp_path):
    from typer.testing import CliRunner

    from weft.cli import app
    from weft.lab import train

    train(make_config("regress", data=str(numbered(table)), out=str(tmp_path / "run"), **TINY))
    out = tmp_path / "new folder" / "out.csv"
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(table), "--out", str(out)])
    assert done.exit_code == 0, done.output
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 40 and rows[0]["text"] == reviews()[0][0] and float(rows[0]["answer"]) == float(rows[0]["answer"])
    )
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(out)])
    again = list(csv.DictReader(done.stdout.splitlines(keepends=True)))
    assert [row["answer"] for row in again] == [row["predicted_answer"] for row in again]
    assert [{k: v for k, v in row.items() if k != "predicted_answer"} for row in again] == rows
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "fine", "more": {"kept": [1]}}\n')
    (tmp_path / "linked.jsonl").symlink_to(lines)
    for same, what in ((lines, "is the input"), (tmp_path / "linked.jsonl", "is the input"), (tmp_path, "is a folder")):
        refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(lines), "--out", str(same)])
        assert refused.exit_code == 2 and what in refused.output and '"kept": [1]' in lines.read_text()
    (tmp_path / "picture.PNG").touch()
    for other, what in ((tmp_path, "is a folder"), (tmp_path / "picture.PNG", "is an image")):
        refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(other)])
        assert refused.exit_code == 2 and what in " ".join(refused.output.split())
    (tmp_path / "empty.csv").touch()
    refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(tmp_path / "empty.csv")])
    assert "the first line must name the columns" in refused.output and "--data" not in refused.output
    (tmp_path / "empty.csv").write_text("id,text\n")
    refused = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(tmp_path / "empty.csv")])
    assert refused.exit_code and "it has no examples" in refused.output
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "an export")])
    assert done.exit_code == 0 and f"next: weft predict '{tmp_path / 'an export'}' FILE" in done.output
    scores = [
        CliRunner().invoke(app, ["eval", str(tmp_path / name), "--data", str(numbered(table))]).stdout.splitlines()
        for name in ("run", "an export")
    ]
    assert scores[0][1:] == scores[1][1:] and "mae" in scores[0][2]
    for command, more in (("eval", []), ("predict", [str(table)]), ("inspect", ["--text", "fine"])):
        refused = CliRunner().invoke(app, [command, str(tmp_path / "an export"), *more, "--which", "last"])
        assert refused.exit_code and "remove --which last" in refused.output
    assert CliRunner().invoke(app, ["--version"]).output == f"weft {weft.__version__}\n"


@pytest.mark.parametrize("least, unit", [(1000, 1), (1.7e9, 0.01), (0, 1e36), (0, 1e-9)])
def test_numbers_of_any_scale_are_learned(table, tmp_path, capsys, least, unit):
    from typer.testing import CliRunner

    from weft.cli import app
    from weft.lab import train
    from weft.lab.report import read_run, runs_table

    path = table.with_name("prices.jsonl")
    rows = [{"text": text, "label": least + 100 * unit * (kind == "good")} for text, kind in reviews()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**TINY, "steps": 20, "learning_rate": 0.02, "tokenizer": "words"}
    found = train(make_config("regress", data=str(path), out=str(tmp_path / "run"), **settings))
    mae = found.test["mae"]
    assert 0 < mae < 20 * unit
    printed = capsys.readouterr().out.split("test mae ")[1].split()[0]
    said = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--device", "cpu"]).output
    shown = runs_table([read_run(tmp_path / "run")])["rows"][0][6]
    for text in (printed, said.split("  mae ")[1].split()[0], shown):
        assert float(text) == pytest.approx(mae, rel=1e-2) and len(text) < 12
    model = weft.load(weft.load(tmp_path / "run").export(tmp_path / "exported"))
    for row, answer in zip(rows[:4], model.predict([row["text"] for row in rows[:4]]), strict=True):
        assert abs(answer["answer"] - row["label"]) < 20 * unit
    mean, deviation = model.known.facts["scale"]
    assert f"{mean} + {deviation} × the model's output" in (tmp_path / "exported/README.md").read_text()
    for given in ([], ["--text", rows[0]["text"]]):
        CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--examples", "1", *given])
        (shown,) = payload((tmp_path / "run/inspect.html").read_text())["attention"]["examples"]
        assert abs(float(shown["prediction"]) - float(shown["target"] or rows[0]["label"])) < 20 * unit + 1e-3 * least
    task, known = get_task("regress"), model.known
    assert found.test["rmse"] == pytest.approx(found.test["loss"] ** 0.5 * known.facts["scale"][1])
    del known.facts["scale"]  # as in runs of older versions
    again = task.load_again(make_config("regress", data=str(path)), known).train
    assert "deviation" not in again and again["label"].max() == torch.tensor(rows[0]["label"], dtype=torch.float32)
    assert task.decode(torch.ones(1, 1), {}, known) == [{"answer": 1.0}]


def test_empty_texts_are_not_inspected(tmp_path):
    from typer.testing import CliRunner

    from weft.cli import app
    from weft.lab import train

    path, run = tmp_path / "some.csv", str(tmp_path / "run")
    path.write_text("text,label\n" + "".join(f"{'a' if i % 3 else ''},{i % 2}\n" for i in range(80)))
    train(make_config("classify", data=str(path), out=run, tokenizer="words", **TINY))
    assert CliRunner().invoke(app, ["inspect", run]).exit_code == 0
    shown = payload((tmp_path / "run/inspect.html").read_text())["attention"]["examples"]
    assert len(shown) == 3 and all(example["tokens"] for example in shown)
    refused = CliRunner().invoke(app, ["inspect", run, "--text", "?!"])
    assert refused.exit_code == 2 and "the texts are empty" in refused.output


def numbered(table):
    path = table.with_name("numbers.jsonl")
    path.write_text("".join(json.dumps({"text": text, "label": i / 7}) + "\n" for i, (text, _) in enumerate(reviews())))
    return path


def test_rows_are_split_once_and_by_a_column(table, tmp_path):
    data = load("classify", table)
    assert [data.rows(split) for split in ("train", "val", "test")] == [33, 3, 4]
    again = load("classify", table)
    assert torch.equal(data.test["ids"], again.test["ids"])
    path = tmp_path / "split.jsonl"
    splits = ["train"] * 30 + ["validation"] * 6 + ["test"] * 4
    path.write_text(
        "".join(
            json.dumps({"text": t, "label": y, "split": s}) + "\n" for (t, y), s in zip(reviews(), splits, strict=True)
        )
    )
    assert [load("classify", path).rows(split) for split in ("train", "val", "test")] == [30, 6, 4]
    path.write_text(path.read_text().replace('"split"', '"Split "'))  # as other columns, in any case
    assert [load("classify", path).rows(split) for split in ("train", "val", "test")] == [30, 6, 4]


def test_all_processes_use_the_tokenizer_of_the_first(table, monkeypatch):
    """The training of a unigram tokenizer is not deterministic."""
    config = make_config("classify", data=str(table), tokenizer="unigram:300")

    def process(rank, *received):
        fabric = SimpleNamespace(broadcast=lambda value: next(answers, value))
        answers = iter(received)
        return load_data(get_task("classify"), config, None, None, SimpleNamespace(fabric=fabric, rank=rank), print)[1]

    first = process(0)
    monkeypatch.setitem(own.MADE, "unigram", Pieces.of)  # gives another tokenizer
    assert process(1).tokenizer != first.tokenizer
    assert process(1, first.known, first.digest) == first


def test_the_order_of_classes_is_always_the_same():
    same = [f"{'0' * zeros}1" for zeros in reversed(range(10))]
    assert get_task("classify").names(["2", *same, "-3"] * 2) == ["-3", *same, "2"]


def test_labels_that_look_like_numbers_are_classes(tmp_path):
    path = tmp_path / "labels.csv"
    for labels, names in ((("10", "9", "-1"), ["-1", "9", "10"]), (("5", "--5", "²"), ["--5", "5", "²"])):
        path.write_text("text,label\n" + "".join(f"a,{labels[i % 3]}\n" for i in range(40)))
        assert load("classify", path).classes == names


def test_sentences_of_an_unknown_split_are_refused(tmp_path):
    path = tmp_path / "tags.jsonl"
    rows = [{"tokens": ["Ada"], "tags": ["O", "B"][i % 2 :][:1], "split": "holdout" if i > 20 else "train"}
            for i in range(40)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataMissing, match="line 22: column 'split' must be train, validation or test, got 'holdout'"):
        load("tag", path)
    path.write_text(path.read_text().replace("holdout", "test"))
    assert load("tag", path).rows("test") == 19


def test_parquet_and_folders_are_read(table, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "folder"
    folder.mkdir()
    rows = [{"sentence": text, "category": kind} for text, kind in reviews()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[:4]), folder / "test.parquet")
    data = load("classify", folder, tokenizer="bpe:300")
    assert data.rows("test") == 4 and data.rows("train") == 36 and data.tokenizer


def test_errors_name_the_file_the_line_and_the_column(table, tmp_path, monkeypatch):
    content = table.read_text()
    cases = {
        "missing.csv": (
            content + '99,"no label",\n',
            r"missing.csv, line 62: column 'label' is empty.*--skip-unlabelled",
        ),
        "ragged.csv": (content + "99,a,b,c\n", r"ragged.csv.*line 62 has 4 values, but there are 3 columns"),
        "quotes.csv": (content + '99,"open,good\n', r"quotes.csv.*line 62"),
        "broken.jsonl": ('{"text": "a", "label": 1}\n{"text":\n', r"broken.jsonl.*line 2 is not valid JSON"),
        "pretty.json": ('{\n  "text": "a",\n  "label": 1\n}\n', r"pretty.json.*line 1.*one whole object per line"),
        "half.jsonl": ('{"text": "a"}\n{"text": "\\ud83d"}', r"half.jsonl.*line 2 has half of a surrogate pair"),
        "columns.csv": ("a,b\n1,2\n", r"columns.csv.*no column is named 'text'.*--text-column: a, b"),
        "twice.csv": ("text,text,label\na,b,x\n", r"twice.csv.*several columns are named 'text'"),
        "one.csv": ("text,label\n" + "a,x\n" * 40, "1 class"),
        "table.xlsx": ("text,label\n", r"table.xlsx.*not a .csv"),
    }
    for name, (text, message) in cases.items():
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(DataMissing, match=message):
            load("classify", path)
        assert path.exists()
    assert load("classify", tmp_path / "missing.csv", skip_unlabelled=True).rows("train") == 33
    (tmp_path / "nan.jsonl").write_text("".join(f'{{"text": "a", "label": {y}}}\n' for y in [1, 2] * 20 + ["NaN"]))
    for task in ("classify", "regress"):
        with pytest.raises(DataMissing, match="nan.jsonl, line 41: column 'label' is empty"):
            load(task, tmp_path / "nan.jsonl")
        assert load(task, tmp_path / "nan.jsonl", skip_unlabelled=True).rows("train") == 33
    with pytest.raises(DataMissing, match="line 2: the label must be a number, got 'good'"):
        load("regress", table)
    with pytest.raises(ValueError, match="label_smoothing has no effect on regression"):
        make_config("regress", label_smoothing=0.1)
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    with pytest.raises(DataMissing, match="^data does not exist: pass a .csv"):
        load("classify", "data")
    with pytest.raises(DataMissing, match="does not exist"):
        load("classify", tmp_path / "nothing.csv")
    with pytest.raises(ValueError, match="--tokenizer must be .* bpe:SIZE, unigram:SIZE or a tokenizer.json"):
        load("classify", table, tokenizer="sentencepiece")


def test_tables_with_semicolons_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "excel.csv"
    path.write_text('\ufefftext;label\n"a; b";x\n', encoding="utf-8")
    assert read_table(path).rows == [{"text": "a; b", "label": "x"}]


def test_a_text_may_be_longer_than_the_limit_of_the_csv_module(tmp_path):
    path = tmp_path / "books.csv"
    path.write_text(f"text,label\n{'a' * 200_000},x\n")
    limit = csv.field_size_limit(131_072)  # the default, which other readers may have raised
    try:
        assert len(read_table(path).rows[0]["text"]) == 200_000
    finally:
        csv.field_size_limit(limit)


def test_a_language_model_of_a_french_text(tmp_path):
    path = tmp_path / "livre.txt"
    path.write_text("Longtemps, je me suis couché\nde bonne heure. Où êtes-vous, <unk> ?\n\n" * 80, encoding="utf-8")
    bytes_ = load("lm", path, max_length=32)
    assert bytes_.facts["vocab"] == 256
    from tokenizers import Tokenizer

    for kind in ("bpe", "unigram"):
        pieces = load("lm", path, max_length=16, tokenizer=f"{kind}:300")
        assert 20 < pieces.facts["vocab"] <= 300
        assert pieces.train["bytes"].shape[1] == 17
        text = Tokenizer.from_str(pieces.tokenizer).decode(pieces.train["bytes"][:4, :16].flatten().tolist())
        assert "couché\nde bonne" in text, kind
        made = Tokenizer.from_str(pieces.tokenizer)
        for text in ("  Où me  couché ? ", " ", "Longtemps", "\n\n me\n", "vous, <unk>"):
            assert made.decode(made.encode(text).ids) == text, kind


def test_hidden_files_of_a_folder_are_no_texts(tmp_path):
    for name, content in (("b/2.txt", b"two" * 99), ("1.txt", b"one"), (".DS_Store", b"\xff"), (".git/HEAD", b"ref")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    data = load("lm", tmp_path, max_length=4)
    assert bytes(data.train["bytes"][:2, :4].flatten().tolist()) == b"one\ntwot"


def test_linked_folders_are_read_once(tmp_path):
    (tmp_path / "disk/more").mkdir(parents=True)
    (tmp_path / "disk/more/2.txt").write_text("two" * 99)
    (tmp_path / "disk/back").symlink_to(tmp_path / "texts")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/1.txt").write_text("one")
    (tmp_path / "texts/linked").symlink_to(tmp_path / "disk")
    data = load("lm", tmp_path / "texts", max_length=4)
    assert bytes(data.train["bytes"][:2, :4].flatten().tolist()) == b"one\ntwot"


def test_two_files_of_the_same_part_are_refused(table, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train.csv", "dev.csv", "valid.csv"):
        shutil.copy(table, tmp_path / "data" / name)
    with pytest.raises(DataMissing, match="dev.csv and valid.csv are the same part of the data"):
        load("classify", tmp_path / "data")
    for name in ("train.conll", "Train.txt"):
        (tmp_path / "data" / name).write_text("a O\n\nb B-X\n\n" * 20)
    with pytest.raises(DataMissing, match="Train.txt and train.conll are the same part"):
        load("tag", tmp_path / "data")


@pytest.mark.parametrize("task, columns", [("classify", "text,label"), ("tag", "tokens,tags")])
def test_rows_in_the_file_of_another_part_are_refused(tmp_path, task, columns):
    rows = [f"text {i},{'ab'[i % 2]} {'ab'[i % 2]}" for i in range(30)]
    table = [f"{row},{'test' if i >= 20 else 'train'}" for i, row in enumerate(rows)]
    (tmp_path / "train.csv").write_text("\n".join([f"{columns},split", *table]))
    with pytest.raises(DataMissing, match=r"train.csv, line 22: .*says test, but its file is the train part"):
        load(task, tmp_path)
    assert len(load(task, tmp_path / "train.csv").test["ids"]) == 10
    (tmp_path / "train.csv").write_text("\n".join([f"{columns},split", *table[:20]]))
    (tmp_path / "test.csv").write_text("\n".join([f"{columns},split", *table[20:]]))
    assert len(load(task, tmp_path).test["ids"]) == 10


@pytest.mark.parametrize("label", [["a", "b"], {"name": "a"}])
def test_several_labels_are_no_class(tmp_path, label):
    rows = [{"text": f"text {i}", "label": label if i % 2 else "c"} for i in range(30)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with pytest.raises(DataMissing, match="entry 2: column 'label' must be one label"):
        load("classify", tmp_path / "rows.json")


def test_whole_numbers_are_one_class_in_every_notation(tmp_path):
    rows = [{"text": f"text {i}", "label": (0, 1, 0.0, 1.0, 0.5)[i % 5]} for i in range(30)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    data = load("classify", path)
    assert data.classes == ["0", "0.5", "1"]
    assert load("regress", path).facts["scale"][0] == pytest.approx(0.5, abs=0.2)
    path.write_text(json.dumps([{**row, "label": float(row["label"])} for row in rows]))
    older = Known(data.facts, None, ["0.0", "0.5", "1.0"], None, data.length)
    again = get_task("classify").load_again(make_config("classify", data=str(path)), older)
    assert torch.equal(again.train["label"], data.train["label"])


def test_packed_tables_and_texts_are_read(table, tmp_path):
    from weft.cli.predict import read_examples

    plain = load("classify", table)
    for name in ("reviews.csv.gz", "train.CSV.GZ"):
        (tmp_path / "packed").mkdir(exist_ok=True)
        (tmp_path / "packed" / name).write_bytes(gzip.compress(table.read_bytes()))
    for path in (tmp_path / "packed/reviews.csv.gz", tmp_path / "packed"):  # the folder has a train part
        found = load("classify", path)
        assert torch.equal(found.train["ids"], plain.train["ids"]) and torch.equal(
            found.test["label"], plain.test["label"]
        )
    assert read_examples(tmp_path / "packed/reviews.csv.gz", "", "", tokens=False) == read_examples(
        table, "", "", tokens=False
    )
    (tmp_path / "text.txt").write_text("one two " * 99)
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"one two " * 99))
    (tmp_path / "tags.conll.gz").write_bytes(gzip.compress(b"Ada B-PER\nhere O\n\n" * 20))
    for task in ("lm", "text"):
        texts = [load(task, tmp_path / name, max_length=8).train["bytes"] for name in ("text.txt", "text.txt.gz")]
        assert torch.equal(*texts)
    assert load("tag", tmp_path / "tags.conll.gz").classes == ["B-PER", "O"]
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(table.read_bytes())[:-20])
    shutil.copy(tmp_path / "text.txt.gz", tmp_path / "named.csv")
    for name, why in (("cut.csv.gz", "cannot be read"), ("named.csv", "is packed by gzip")):
        with pytest.raises(DataMissing, match=f"{name}.* it {why}"):
            load("classify", tmp_path / name)


def test_texts_and_labels_that_cannot_be_learned_are_refused(tmp_path):
    for text, tokenizer, why in (("", "bytes", "; choose"), ("?!", "words", "tokenizer words finds no word; ch")):
        (tmp_path / "empty.csv").write_text("text,label\n" + "".join(f"{text},{i % 2}\n" for i in range(40)))
        with pytest.raises(DataMissing, match=f"empty.csv: the training texts have no tokens.*{why}"):
            load("classify", tmp_path / "empty.csv", tokenizer=tokenizer)
    (tmp_path / "large.csv").write_text("text,label\n" + "".join(f"a,{(-1) ** i}.7e308\n" for i in range(40)))
    with pytest.raises(DataMissing, match=r"large.csv: labels up to 1.7e\+308 are too large"):
        load("regress", tmp_path / "large.csv")
    (tmp_path / "columns.json").write_text(json.dumps({"text": ["a"] * 400, "label": [0, 1] * 200}))
    with pytest.raises(DataMissing, match="column 'text' must be text, got .{60}$"):
        load("classify", tmp_path / "columns.json")


def test_other_columns_are_kept_as_json(tmp_path):
    from weft.cli.predict import _joined

    row = {"tokens": ["Ada", "here"], "answer": ["B-PER", None], "at": [1, None, 2.5], "meta": {"é": [True]}, "n": 3}
    wanted = {"tokens": "Ada here", "answer": "B-PER ", "at": "[1, null, 2.5]", "meta": '{"é": [true]}', "n": 3}
    assert _joined(row) == wanted


def test_texts_in_other_encodings_name_file_and_line(tmp_path):
    text = "Bonjour.\nL'été à la mer.\n" * 100
    (tmp_path / "latin.txt").write_bytes(text.encode("latin1"))
    (tmp_path / "wide.csv").write_bytes("text,label\n".encode("utf-16"))
    with pytest.raises(DataMissing, match=r"latin.txt.*line 2 is not UTF-8 \(byte 0xe9\).*iconv -f latin1"):
        load("lm", tmp_path / "latin.txt")
    with pytest.raises(DataMissing, match=r"wide.csv.*line 1.*iconv -f utf-16"):
        load("classify", tmp_path / "wide.csv")
