"""Your own sentences with tags: training, prediction and the score of entities."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from own_data import TINY, load

import weft
from weft.tasks import DataMissing, get_task, make_config
from weft.tasks.base import Known
from weft.tasks.tags import read_columns
from weft.tasks.tokens import Pieces

pytest.importorskip("lightning")


def spans(tags):
    """Entities as (type, first, last), token by token."""
    found, kind, first = set(), None, 0
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        if kind and (tag == "O" or prefix in "BSU" or name != kind):
            found.add((kind, first, i - 1))
            kind = None
        if tag != "O" and kind is None:
            kind, first = name, i
        if kind and prefix in "ESLU":
            found.add((kind, first, i))
            kind = None
    return found


@pytest.mark.parametrize("prefixes", ["BI", "BEIS", "BILU"])
def test_entity_f1_equals_counting_spans(prefixes, tmp_path):
    import random

    draw = random.Random(0)
    names = sorted(["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("LOC", "PER"))])
    sentences = [[draw.choice(names) for _ in range(draw.randint(1, 9))] for _ in range(60)]
    path = tmp_path / "tags.jsonl"
    path.write_text("".join(json.dumps({"tokens": ["é"] * len(s), "tags": s}) + "\n" for s in sentences))
    data = load("tag", path, max_length=32)
    assert data.classes == names
    rows = data.train

    def model(ids):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*ids.shape, len(names), generator=generator)

    task = get_task("tag")
    found = task.summary({k: float(v.sum()) for k, v in task.score(model, rows).items()})
    guess = model(rows["ids"]).argmax(-1)
    hits = gold = guessed = 0
    for tags, guesses in zip(rows["tags"], guess, strict=True):
        real = tags >= 0
        a, b = (spans([names[i] for i in t[real].tolist()]) for t in (tags, guesses))
        hits, gold, guessed = hits + len(a & b), gold + len(a), guessed + len(b)
    assert hits > 10
    assert found["f1"] == pytest.approx(2 * hits / (gold + guessed))
    assert found["recall"] == pytest.approx(hits / gold)


def test_tags_are_trained_and_predicted(tmp_path):
    from weft.lab import train

    path = tmp_path / "names.conll"
    path.write_text("-DOCSTART- X O\n\n" + "Zoé X B-PER\nsleeps X O\n\nNew X B-LOC\nYork X I-LOC\n\n" * 20)
    train(make_config("tag", data=str(path), out=str(tmp_path / "run"), **{**TINY, "steps": 20, "learning_rate": 0.01}))
    model = weft.load(tmp_path / "run")
    answers = model.predict(["Zoé sleeps", ["New", "York"], "a " * 30])
    assert answers[:2] == [{"answer": ["B-PER", "O"]}, {"answer": ["B-LOC", "I-LOC"]}]
    assert answers[2]["answer"][12:] == [None] * 18  # beyond 24 bytes
    path.write_text(path.read_text() + "alone\n")
    with pytest.raises(DataMissing, match=r"names.conll.*line 123 has a token without a tag, 'alone'"):
        load("tag", path)
    other = tmp_path / "uneven.jsonl"
    other.write_text('{"tokens": ["a", "b"], "tags": ["O"]}\n')
    with pytest.raises(DataMissing, match="uneven.jsonl, line 1: column 'tokens' has 2 tokens, but 'tags' has 1 tags"):
        load("tag", other)


@pytest.mark.parametrize("tokenizer", ["words", "bpe:300"])
def test_tokens_that_are_numbers_are_predicted_as_trained(tokenizer, tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text('{"tokens": ["Call", 911], "tags": ["O", "B"]}\n' * 20)
    data = load("tag", path, tokenizer=tokenizer)
    known = Known(data.facts, data.vocabulary, data.classes, data.tokenizer, data.length)
    assert torch.equal(get_task("tag").encode([["Call", 911]], known)["ids"][0], data.train["ids"][0])


def test_words_have_their_combining_marks(tmp_path):
    rows = [{"text": "यह हिन्दी है, cafe\u0301 ❤\ufe0f! \u0301", "label": "ab"[i % 2]} for i in range(20)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = load("classify", path, tokenizer="words")
    assert [data.vocabulary[i] for i in data.train["ids"][0] if i] == ["यह", "हिन्दी", "है", "cafe\u0301"]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tokens_are_read_in_the_pieces_of_words_inside_of_a_text(kind, tmp_path):
    path, tokens = tmp_path / "names.jsonl", ["Ada", "lives", "in", "London"]
    path.write_text((json.dumps({"tokens": tokens, "tags": ["B", "O", "O", "B"]}) + "\n") * 20)
    data = load("tag", path, tokenizer=f"{kind}:300")
    ids = Pieces(data.tokenizer).bpe.encode(" ".join(tokens)).ids
    assert (data.train["ids"][0][: len(ids) + 1] - 1).tolist() == [*ids, -1]
    assert (data.train["tags"][0] >= 0).sum() == len(tokens)


def test_a_token_may_contain_a_no_break_space(tmp_path):
    (tmp_path / "prices.conll").write_text("10\u00a0000 X  B-NUM\r\n€ X O \n\u00a0 X O\n", encoding="utf-8")
    row = {"tokens": ["10\u00a0000", "€", "\u00a0"], "tags": ["B-NUM", "O", "O"]}
    assert read_columns(tmp_path / "prices.conll").rows == [row]


def test_a_sentence_may_begin_with_a_number_sign(tmp_path):
    (tmp_path / "signs.conll").write_text("# newdoc\n# text = # 1 O\n# O\n1 B-NUM\n\n# B-SIGN\n")
    rows = [{"tokens": ["#", "1"], "tags": ["O", "B-NUM"]}, {"tokens": ["#"], "tags": ["B-SIGN"]}]
    assert read_columns(tmp_path / "signs.conll").rows == rows


def test_tags_of_a_data_set_are_its_class_names(tmp_path, monkeypatch):
    """`datasets` stores tags as numbers, and their names in the features."""

    names = SimpleNamespace(names=["O", "B-PER", "I-PER"])
    for feature in (SimpleNamespace(feature=names), [names]):  # new and old versions

        class Rows(list):
            features = {"tokens": SimpleNamespace(feature=SimpleNamespace(dtype="string")), "ner_tags": feature}
            column_names = ["tokens", "ner_tags"]

        rows = Rows([{"tokens": ["Ada", "Byron", "sleeps"], "ner_tags": [1, 2, 0]}] * 20)
        library = SimpleNamespace(load_from_disk=lambda path, rows=rows: {"train": rows})
        monkeypatch.setitem(sys.modules, "datasets", library)
        (tmp_path / "dataset_dict.json").touch()
        assert load("tag", tmp_path).classes == ["B-PER", "I-PER", "O"]


def test_the_number_for_no_label_is_no_class(tmp_path):
    """`datasets` writes -1 for examples without a label, such as the tests of GLUE."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    label = {"names": ["neg", "pos"], "_type": "ClassLabel"}
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": label}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    for part, labels in (("train", [0, 1] * 20), ("test", [-1] * 5)):
        table = pa.table({"text": ["a"] * len(labels), "label": labels}).replace_schema_metadata(about)
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    with pytest.raises(DataMissing, match="test.parquet, row 0: column 'label' is empty"):
        load("classify", tmp_path)
    data = load("classify", tmp_path, skip_unlabelled=True)
    assert data.classes == ["0", "1"] and data.rows("test") == 4  # held out of the training rows
    tags = {"tags": [["O", None]] * 20, "tokens": [["a", "b"]] * 20}
    parquet.write_table(pa.table(tags), tmp_path / "tags.parquet")
    with pytest.raises(DataMissing, match="row 0: column 'tags' must be a list of tokens, got"):
        load("tag", tmp_path / "tags.parquet")


@pytest.mark.parametrize("old", [False, True])
def test_tags_of_a_parquet_file_are_their_names(old, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    kind = {"names": ["O", "B-PER", "I-PER"], "_type": "ClassLabel"}
    features = {"tokens": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
                "ner_tags": [kind] if old else {"feature": kind, "_type": "List"}}  # fmt: skip
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"tokens": [["Ada", "Byron", "sleeps"]] * 20, "ner_tags": [[1, 2, 0]] * 20})
    parquet.write_table(table.replace_schema_metadata(about), tmp_path / "tags.parquet")
    assert load("tag", tmp_path / "tags.parquet").classes == ["B-PER", "I-PER", "O"]
    parquet.write_table(table.replace_schema_metadata({"huggingface": "broken"}), tmp_path / "tags.parquet")
    assert load("tag", tmp_path / "tags.parquet").classes == ["0", "1", "2"]
