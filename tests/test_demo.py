"""The demo, on a handful of images."""

from __future__ import annotations

import sys

import pytest
import torch
from typer.testing import CliRunner

from weft import demo
from weft.cli import app
from weft.models import TextClassifier


def few(images: int) -> demo.Digits:
    data = demo.load_digits()
    return demo.Digits(*(t[:images] for t in (data.train_ids, data.train_labels, data.test_ids, data.test_labels)))


def test_digits_are_split_without_overlap():
    pytest.importorskip("sklearn")
    data = demo.load_digits()
    assert len(data.train_ids) + len(data.test_ids) == 1797 and len(data.test_ids) == 359
    assert data.train_ids.shape[1] == 64
    assert data.train_ids.min() == 1 and data.train_ids.max() == data.vocab - 1  # 0 stays padding
    assert set(data.test_labels.tolist()) == set(range(data.classes))
    again = demo.load_digits()
    assert torch.equal(data.test_ids, again.test_ids)


def test_training_learns():
    pytest.importorskip("sklearn")
    data = few(16)
    torch.manual_seed(0)
    model = TextClassifier(data.vocab, data.classes, max_length=64, dim=16, heads=2, head_dim=8, layers=1, mlp_dim=16,
                           pooling="mean", dropout=0.0)  # fmt: skip
    losses = list(demo.train(model, data, 100))
    assert losses[-1] < 0.5 * losses[0] and not model.training


def test_demo_prints_its_table(monkeypatch):
    pytest.importorskip("sklearn")
    data, threads = few(16), torch.get_num_threads()
    monkeypatch.setattr(demo, "load_digits", lambda: data)
    monkeypatch.setattr(demo, "ATTENTIONS", {"full": {}, "linear": {}})
    outputs = []
    for _ in range(2):
        result = CliRunner().invoke(app, ["demo", "--epochs", "1"], env={"COLUMNS": "120"})
        assert result.exit_code == 0, result.output
        rows = [line.strip("│").split("│") for line in result.output.splitlines() if line.startswith("│")]
        outputs.append([[cell.strip() for cell in row] for row in rows])
    assert [row[:2] for row in outputs[0]] == [[a, s] for a in demo.ATTENTIONS for s in ("deep 4x2", "wide 1x8")]
    assert [row[:4] for row in outputs[0]] == [row[:4] for row in outputs[1]]  # all but the latency repeats
    assert torch.get_num_threads() == threads


def test_demo_says_how_to_get_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "120"})
    assert result.exit_code == 2 and "pip install 'weft[lab]'" in result.output
