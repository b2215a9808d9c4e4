"""`weft eval RUN --data OTHER`: what of other data counts, compared with predictions row by row."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_data import TINY
from test_own_data import reviews
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.lab import evaluate_run, train
from weft.tasks import DataMissing, get_task, make_config

pytest.importorskip("lightning")


def run_of(folder: Path, task: str, data: Path, **options) -> Path:
    train(make_config(task, data=str(data), out=str(folder / f"run-{task}"), **{**TINY, **options}))
    return folder / f"run-{task}"


def write(path: Path, rows, columns=("text", "label")) -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def score(run: Path, data: Path, name: str, **how) -> float:
    return evaluate_run(run, data=str(data), accelerator="cpu", **how)[0][name]


def test_all_rows_of_another_table_are_tested(tmp_path, capsys):
    rows = [(text + " at the end", kind) for text, kind in reviews(30)]
    run = run_of(tmp_path, "classify", write(tmp_path / "train.csv", reviews(80)))
    other = write(tmp_path / "other.csv", rows)
    answers = [a["answer"] for a in weft.load(run).predict([text for text, _ in rows])]
    right = sum(answer == kind for answer, (_, kind) in zip(answers, rows, strict=True)) / len(rows)
    assert score(run, other, "accuracy") == pytest.approx(right)
    assert f"{other} is not the data the run was trained on, and has no parts: all of it" in capsys.readouterr().err
    few = write(tmp_path / "few.csv", rows[:3])
    right = sum(answer == kind for answer, (_, kind) in zip(answers[:3], rows[:3], strict=True)) / 3
    assert score(run, few, "accuracy") == pytest.approx(right)
    with pytest.raises(DataMissing, match="no train examples in .*few.csv; .* choose its part test"):
        score(run, few, "accuracy", split="train")


def test_the_data_of_the_run_in_another_place_keeps_its_parts(tmp_path, capsys):
    own = write(tmp_path / "train.csv", reviews(80))
    run = run_of(tmp_path, "classify", own)
    (tmp_path / "text.txt").write_text("one two three " * 500)
    models = [(run_of(tmp_path, task, tmp_path / "text.txt", positions="learned"), "text.txt")
              for task in ("lm", "text", "masked", "text-streams")]  # fmt: skip
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/train.csv", reviews(60)), write(tmp_path / "folder/test.csv", reviews(10))
    parts = train(make_config("classify", data=str(tmp_path / "folder"), out=str(tmp_path / "parts"), **TINY)).folder
    for folder, name in ((run, "train.csv"), (parts, "folder"), *models):
        before = [evaluate_run(folder, split=split, accelerator="cpu")[0] for split in ("train", "val", "test")]
        there = shutil.move(tmp_path / name, tmp_path / f"moved-{name}")
        capsys.readouterr()
        for split, found in zip(("train", "val", "test"), before, strict=True):
            assert evaluate_run(folder, split=split, data=str(there), accelerator="cpu")[0] == found
        shutil.move(there, tmp_path / name)
        assert "not the data" not in capsys.readouterr().err


def test_the_parts_of_other_tables_are_kept(tmp_path):
    rows = [(text, kind, "test" if i % 3 else "validation") for i, (text, kind) in enumerate(reviews(12))]
    run = run_of(tmp_path, "classify", write(tmp_path / "train.csv", reviews(80)))
    parts = write(tmp_path / "parts.csv", rows, ("text", "label", "split"))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/test.csv", [row[:2] for row in rows if row[2] == "test"])
    write(tmp_path / "folder/validation.csv", [row[:2] for row in rows if row[2] == "validation"])
    for split in ("test", "val"):
        own = write(tmp_path / "own.csv", [row[:2] for row in rows if row[2].startswith(split)])
        wanted = score(run, own, "loss")
        assert score(run, parts, "loss", split=split) == pytest.approx(wanted)
        assert score(run, tmp_path / "folder", "loss", split=split) == pytest.approx(wanted)
    with pytest.raises(DataMissing, match="no train examples in .*parts.csv"):
        score(run, parts, "loss", split="train")


def test_all_of_other_numbers_and_tags_is_tested(tmp_path):
    numbers = [(text, i / 7) for i, (text, _) in enumerate(reviews(60))]
    run = run_of(tmp_path, "regress", write(tmp_path / "numbers.csv", numbers))
    other = [(f"{text}!", value + 1) for text, value in numbers[:7]]
    answers = weft.load(run).predict([text for text, _ in other])
    mean = sum(abs(a["answer"] - value) for a, (_, value) in zip(answers, other, strict=True)) / 7
    assert score(run, write(tmp_path / "other.csv", other), "mae") == pytest.approx(mean, rel=1e-4)
    (tmp_path / "tags.conll").write_text("Ada B-PER\nhere O\n\n" * 30)
    run = run_of(tmp_path, "tag", tmp_path / "tags.conll")
    (tmp_path / "other.conll").write_text("Bob B-PER\nis O\nhere O\n\nso O\n\n")
    found = weft.load(run).predict([["Bob", "is", "here"], ["so"]])
    right = [tag for answer in found for tag in answer["answer"]]
    accuracy = sum(a == b for a, b in zip(right, ["B-PER", "O", "O", "O"], strict=True)) / 4
    assert score(run, tmp_path / "other.conll", "accuracy") == pytest.approx(accuracy)


@pytest.mark.parametrize("task, options", [("text", {}), ("lm", {}), ("lm", {"tokenizer": "bpe:300"})])
@pytest.mark.parametrize("length", [3, 24, 25, 61])
def test_every_token_of_another_text_is_tested(tmp_path, task, options, length):
    (tmp_path / "text.txt").write_text("one two three " * 500)
    run = run_of(tmp_path, task, tmp_path / "text.txt", positions="rope", **options)
    other = "three, two; one! " * 20
    trained = weft.load(run)
    known, model = trained.known, trained.model
    if known.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(known.tokenizer)
        other = next(other[:n] for n in range(400) if len(tokenizer.encode(other[:n]).ids) >= length)
        ids = tokenizer.encode(other).ids
    else:
        other = other[:length]
        ids = list(other.encode())
    (tmp_path / "other.txt").write_text(other)
    losses = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 24):
            window = torch.tensor([ids[start : start + 25]])
            losses += F.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="none").tolist()
    assert len(losses) == len(ids) - 1
    assert score(run, tmp_path / "other.txt", "loss") == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    (tmp_path / "other.txt").write_text("o")
    with pytest.raises(DataMissing, match="the text has 1 tokens; at least 2 are needed"):
        score(run, tmp_path / "other.txt", "loss")


@pytest.mark.parametrize("task, windows", [("masked", 8), ("text-streams", 8)])
def test_all_windows_of_another_text_are_tested(tmp_path, task, windows, monkeypatch):
    (tmp_path / "text.txt").write_text("one two three " * 500)
    run = run_of(tmp_path, task, tmp_path / "text.txt", positions="learned")
    (tmp_path / "other.txt").write_text("three, two; one! " * 12)  # 204 bytes
    counts = []
    monkeypatch.setattr(type(get_task(task)), "summary", lambda self, sums: counts.append(sums["count"]) or {})
    evaluate_run(run, data=str(tmp_path / "other.txt"), accelerator="cpu")
    each = 4 if task == "masked" else 24  # 15 % of 24
    assert counts == [windows * each]


def test_all_of_another_folder_of_images_is_tested(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for place in ("own", "other", "parts/test"):
        for i in range(40 if place == "own" else 6):
            (tmp_path / place / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            colour = (255 * (i % 2), 3 * i, 40 * (place != "own"))
            image.new("RGB", (16, 16), colour).save(tmp_path / place / "ab"[i % 2] / f"{i}.png")
    (tmp_path / "other/b/1.png").unlink()
    options = {k: v for k, v in TINY.items() if k != "max_length"}
    train(make_config("images", data=str(tmp_path / "own"), out=str(tmp_path / "run"), image_size=16, **options))
    for place in ("other", "parts/test"):
        files = sorted((tmp_path / place).rglob("*.png"))
        answers = weft.load(tmp_path / "run").predict(files)
        loss = -sum(math.log(a["probability"] if a["answer"] == f.parent.name else 1 - a["probability"])
                    for f, a in zip(files, answers, strict=True)) / len(files)  # fmt: skip
        given = tmp_path / place.split("/")[0]
        assert score(tmp_path / "run", given, "loss") == pytest.approx(loss, rel=1e-4)


def test_columns_of_another_table_have_other_names(tmp_path):
    own = write(tmp_path / "train.csv", reviews(80), ("What They Said", "label"))
    run = run_of(tmp_path, "classify", own, text_column="What They Said")
    rows = reviews(6)
    other = write(tmp_path / "other.csv", [*rows, ("nothing", "")], ("body", "star"))
    options = ["--text-column", "body", "--label-column", "star", "--skip-unlabelled", "--device", "cpu"]
    said = CliRunner().invoke(app, ["eval", str(run), "--data", str(other), *options])
    assert said.exit_code == 0
    wanted = score(run, write(tmp_path / "same.csv", rows, ("What They Said", "label")), "loss")
    assert float(said.stdout.split("loss ")[1].split()[0]) == pytest.approx(wanted, rel=1e-3)
    answers = [CliRunner().invoke(app, ["predict", str(run), str(tmp_path / name), *more]).stdout.splitlines()[1:]
               for name, more in (("same.csv", []), ("other.csv", ["--text-column", "body"]))]  # fmt: skip
    assert answers[0] == answers[1][:-1] and len(answers[0]) == 9


@pytest.mark.parametrize("task, kind, counts", [
    ("classify", "bytes", (29, 59)), ("classify", "words", (10, 20)), ("classify", "special", (12, 22)),
    ("regress", "bpe:300", None), ("tag", "bytes", (30, 60)), ("tag", "words", (10, 20)),
])  # fmt: skip
def test_commands_say_what_they_cut(tmp_path, capsys, task, kind, counts):
    """10 and 20 words; 29 and 59 bytes, or 30 and 60 with a space after each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    if kind == "special":
        whole = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "ab": 2, "cd": 3}, unk_token="cd"))
        whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        whole.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
        )
        whole.save(str(tmp_path / "tokenizer.json"))
        kind = str(tmp_path / "tokenizer.json")
    texts = [" ".join(["ab", "cd"] * (5 if i % 3 else 10)) for i in range(60)]
    if task == "tag":
        data = tmp_path / "tags.conll"
        data.write_text("".join("".join(f"{t} {'OX'[t == 'ab']}\n" for t in text.split()) + "\n" for text in texts))
    else:
        data = write(tmp_path / "train.csv", [(text, i % 2) for i, text in enumerate(texts)])
    run = run_of(tmp_path, task, data, tokenizer=kind, max_length=8)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(said) == 1 and "60 of 60 texts have more than 8 tokens" in said[0] and "--max-length" in said[0]
    if counts:
        assert f"(up to {counts[1]})" in said[0]
        share = 1 - 60 * 8 / (40 * counts[0] + 20 * counts[1])
        assert f"leaves out {share:.1%} of all tokens" in said[0]
    file = tmp_path / "new.txt"
    file.write_text("ab cd ab cd ab cd ab cd ab\nab\n")
    said = CliRunner().invoke(app, ["predict", str(run), str(file), "--device", "cpu"])
    assert "note: 1 of 2 texts have more than 8 tokens" in said.stderr and "note" not in said.stdout
    said = CliRunner().invoke(app, ["eval", str(run), "--device", "cpu"])
    assert "note: 6 of 6 texts" in said.stderr and "note" not in said.stdout
    run = run_of(tmp_path / "long", task, data, tokenizer=kind, max_length=60)
    said = CliRunner().invoke(app, ["predict", str(run), str(file), "--device", "cpu"])
    assert "note" not in capsys.readouterr().out + said.stderr


def test_the_command_says_what_it_tests(tmp_path):

    run = run_of(tmp_path, "classify", write(tmp_path / "train.csv", reviews(80)))
    other = write(tmp_path / "other.csv", reviews(6))
    said = CliRunner().invoke(app, ["eval", str(run), "--data", str(other), "--device", "cpu"])
    assert f"step 3, test part of {other}:" in said.stdout and said.exit_code == 0
