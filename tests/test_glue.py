"""GLUE's files, and a classifier that starts from a masked language model."""

import numpy as np
import pytest
import torch
from runs import tiny
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.lab import train
from weft.tasks import DataMissing, Known, get_task, make_config
from weft.tasks.glue import LABELS, SCORES, correlation, examples, pairs, ranks
from weft.tasks.text import ids_of
from weft.tasks.tokens import Pieces

BRIEF = dict(steps=40, learning_rate=1e-2, eval_every=40, checkpoint_every=40)
LAYOUTS = {  # heading, a line, its texts and label
    "SST-2": ("sentence\tlabel", 'a "fine" film \t1', ('a "fine" film ',), "1"),
    "CoLA": (None, "gj04\t0\t*\tThey drank the pub.", ("They drank the pub.",), "0"),
    "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t7\t8\tHe "no\tShe', ('He "no', "She"), "1"),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\tWhy?\tHow?\t0", ("Why?", "How?"), "0"),
    "QNLI": ("index\tquestion\tsentence\tlabel", "0\tWhen?\tIn May.\tentailment", ("When?", "In May."), "entailment"),
    "MNLI": ("index\tsentence1\tsentence2\tlabel1\tgold_label", "0\tA\tB\tneutral\tneutral", ("A", "B"), "neutral"),
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tmain\tMSRvid\t2012\t1\tnone\tnone\tA\x85plane.\tA jet.\t3.750", ("A\x85plane.", "A jet."), "3.750",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_makers_layouts_are_read(tmp_path, name):
    heading, line, texts, label = LAYOUTS[name]
    path = tmp_path / "train.tsv"
    path.write_text("\n".join([heading, line] if heading else [line]) + "\n")
    assert examples(path, SCORES if name == "STS-B" else LABELS) == [(texts, label)]
    path.write_text("\n".join([heading or "no\tsuch", line, "short"]) + "\n")
    with pytest.raises(DataMissing, match="train.tsv.*line (1 names|2 has 4 values|3 has 1 values)"):
        examples(path)


def test_a_few_broken_lines_of_qqp_are_left_out(tmp_path):
    heading, line, *_ = LAYOUTS["QQP"]
    path = tmp_path / "train.tsv"
    for broken in (2, 3):
        path.write_text("\n".join([heading, *[line] * 2000, *["of a question"] * broken]) + "\n")
        if broken == 2:
            assert len(examples(path)) == 2000
    with pytest.raises(DataMissing, match="line 2004 has 1 values"):
        examples(path)


def test_csv_with_quotes_is_read(tmp_path):
    (tmp_path / "dev.csv").write_text('sentence1,sentence2,label\n"a, ""b""",c,yes\n')
    assert examples(tmp_path / "dev.csv") == [(('a, "b"', "c"), "yes")]


def test_labels_that_the_run_does_not_have_are_named(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "a fine film\t1\na dull film\t0\n" * 10)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine\t2\n")
    task, config = get_task("glue"), make_config("glue", data=str(tmp_path), tokenizer="bpe:300")
    with pytest.raises(DataMissing, match="the label '2' is not in train.tsv"):
        task.load(config)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine\t1\n")
    data = task.load(config)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfine\t2\n")
    with pytest.raises(DataMissing, match="the label '2' is not among the classes of the run"):
        task.load_again(config, Known(data.facts, None, data.classes, data.tokenizer, data.length))


def test_scores_are_predicted_and_correlated(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 4, (2, 50)).astype(float)
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert ranks(np.array([3.0, 1, 1, 2])).tolist() == [3, 0.5, 0.5, 2]
    heading = "index\tsentence1\tsentence2\tscore"
    for part in ("train", "dev"):
        rows = [f"{i}\t{'good' if i % 2 else 'bad'} film {i}\tfilm\t{5 * (i % 2)}.0" for i in range(60)]
        (tmp_path / f"{part}.tsv").write_text("\n".join([heading, *rows]))
    config = tiny(tmp_path / "run", "sts-b", data=str(tmp_path), max_length=16, **BRIEF)
    test = train(config).test
    assert test["pearson"] > 0.9 and test["spearman"] > 0.8
    good, bad = weft.load(tmp_path / "run").predict([("good film 7", "film"), ("bad film 8", "film")])
    assert good["answer"] > bad["answer"] + 2
    with pytest.raises(DataMissing, match="For scores, use weft train sts-b"):
        get_task("glue").load(make_config("glue", data=str(tmp_path)))
    (tmp_path / "dev.tsv").write_text(f"{heading}\n0\ta\tb\thigh\n")
    with pytest.raises(DataMissing, match="dev.tsv.*line 2 has the score 'high'"):
        get_task("sts-b").load(make_config("sts-b", data=str(tmp_path)))


@pytest.mark.parametrize("name", ["sts-b", "coco-retinanet"])
def test_an_evaluation_forgets_one_that_was_interrupted(name, monkeypatch):
    """Tasks that keep predictions until `summary` must not mix those of two evaluations."""
    task = get_task(name)
    monkeypatch.setattr(task, "found", {7: (1.0, 2.0)})
    with task.evaluating(torch.nn.Identity()):
        assert task.found == {}


def test_the_longer_text_is_cut_and_each_has_its_kind():
    code = Pieces.of(["a b c d e f g h"], 300)
    rows = pairs(code, [("a b c d e f", "g h"), ("a",)], 6)
    assert rows["kinds"].tolist()[1][1:] == [0] * 5 and rows["kinds"][1, 0] == 1
    kinds = rows["kinds"][0].tolist()
    assert kinds == [1, 1, 1, 1, 2, 2]  # "g" and " h" stay whole
    assert code.bpe.decode(rows["ids"][0, 4:].tolist()) == "g h"


def test_the_padding_and_truncation_of_a_tokenizer_file_are_not_used():
    text = "a film with a long name"
    code = Pieces.of([text], 300)
    true, plain = code.bpe.encode(text).ids, code.tokenizer
    code.bpe.enable_padding(length=64)
    code.bpe.enable_truncation(3)
    padded = code.bpe.to_str()
    for tokenizer in (plain, padded):
        assert ids_of(text, Known({}, tokenizer=tokenizer)) == true  # the prompt of `weft generate`
        assert pairs(Pieces(tokenizer), [(text,)], 32)["kinds"].sum() == len(true)


def test_a_masked_model_is_fine_tuned_and_predicts(tmp_path):
    (tmp_path / "c4").mkdir()
    for part in ("train", "valid", "test"):
        text = "\n\n".join(f"good film {i}\nbad film {i}" for i in range(60))
        (tmp_path / "c4" / f"{part}.txt").write_text(text)
    mlm = tmp_path / "mlm"
    train(tiny(mlm, "c4-masked", data=str(tmp_path), max_length=24, steps=2, learning_rate=1e-3))
    folder = tmp_path / "RTE"
    folder.mkdir()
    for part in ("train", "dev"):
        rows = [f"{i}\t{word} film {i}\tfilm\t{word}" for i in range(30) for word in ("good", "bad")]
        (folder / f"{part}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *rows]))
    settings = dict(data=str(folder), init_from=str(mlm), max_length=16, steps=80, learning_rate=5e-3, eval_every=40)
    config = tiny(tmp_path / "fine", "glue", **settings)
    task = get_task("glue")
    data = task.load(config)
    model = task.model(config, data)
    from weft.lab.run import Run
    from weft.lab.saving import saved_weights

    weights = {k.removeprefix("model/"): v for k, v in saved_weights(Run(mlm), "last")[0].items()}
    assert task.begin(model, {k: v for k, v in weights.items() if not k.startswith("optimizer")})
    assert torch.equal(model.encoder.embed.weight, weights["embed.weight"])
    assert torch.equal(model.encoder.positions, weights["positions"][:16])
    assert train(config).test["accuracy"] > 0.9
    (tmp_path / "test.tsv").write_text('index\tsentence1\tsentence2\n0\tgood "film\tfilm\n1\tbad film\tfilm\n')
    answers = CliRunner().invoke(app, ["predict", str(tmp_path / "fine"), str(tmp_path / "test.tsv")]).stdout
    assert [line.split(",")[3] for line in answers.splitlines()] == ["answer", "good", "bad"]
    found = weft.load(tmp_path / "fine").predict([("good film 99", "film"), "bad film 98"])
    assert [one["answer"] for one in found] == ["good", "bad"]
    with pytest.raises(ValueError, match=r"has another model; use --layers 1 --heads 2 --head-dim 8 --dim 16"):
        make_config("glue", data=str(folder), init_from=str(mlm))
