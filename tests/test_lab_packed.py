"""`--packed`: the documents of a batch side by side give the losses of the padded batch, and resume exactly."""

import json
import random

import numpy as np
import pytest
import runs
import torch

pytest.importorskip("lightning")

import weft
from weft.lab import make_config, train
from weft.lab.compiled import compile_model
from weft.lab.data import Packing
from weft.layers.dropout import HashedDropout


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Texts of different lengths."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc", k=draw.randint(1, 40))) for _ in range(120)]
    path = tmp_path_factory.mktemp("texts") / "texts.csv"
    path.write_text("text,label\n" + "".join(f"{text},{'ab'[text.count('a') % 2]}\n" for text in texts))
    return path


def config(out, table, **changes):
    settings = dict(data=str(table), max_length=40, dropout=0.0, precision="64-true", eval_batches=0)
    return runs.tiny(out, "classify", **{**settings, **changes})


def curve(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


def with_an_empty_text(table, folder):
    lines = table.read_text().splitlines(keepends=True)
    (folder / "texts.csv").write_text("".join([*lines[:4], ",a\n", *lines[5:]]))
    return folder / "texts.csv"


CASES = [
    dict(attention="linear", pooling="cls"),
    dict(attention="local", attention_options='{"block_size": 4}', pooling="mean"),
    dict(attention="local", attention_options='{"block_size": 4}', pooling="cls"),
    dict(attention="combiner-fixed", pooling="first"),
    dict(attention="linear", pooling="cls", model="crate"),
]


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_packed_batches_give_the_losses_of_padded_ones(tmp_path, table, chosen, empty):
    if empty:
        table = with_an_empty_text(table, tmp_path)
    for packed in (False, True):
        train(config(tmp_path / str(packed), table, packed=packed, **chosen))
    for mine, theirs in zip(curve(tmp_path / "True"), curve(tmp_path / "False"), strict=True):
        assert mine[:2] == theirs[:2] and mine[2] == pytest.approx(theirs[2], rel=1e-9)


def test_packed_runs_count_the_tokens_of_the_steps_they_time(tmp_path, table):
    """The first step is not timed."""
    train(config(tmp_path / "run", table, packed=True, steps=4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = [line["computed_tokens_per_s"] / line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    assert len(shares) == 3 and max(shares) < 0.8  # texts of 1 to 40 letters, padded to 40


def test_fillers_are_no_samples_of_a_cache(tmp_path, table, monkeypatch):
    train(config(tmp_path / "filled", table, cache=0.5, packed=True))
    monkeypatch.setattr(Packing, "fillers", lambda self, lengths: [])
    train(config(tmp_path / "plain", table, cache=0.5, packed=True))
    found, expected = (np.array([loss for *_, loss in curve(tmp_path / name)]) for name in ("filled", "plain"))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("free", [0, 1])
def test_fillers_leave_few_shapes(free):
    draw, shapes = np.random.default_rng(0), set()
    for _ in range(300):
        lengths = draw.integers(500, 2000, 32)
        more = Packing(free).fillers(lengths)
        shapes.add(int(lengths.sum()) + sum(more) + free * (32 + len(more)))
        assert 1 <= min(more) and max(more) <= lengths.max()
    assert len(shapes) < 12 and all(tokens % 1024 == 0 for tokens in shapes)
    assert Packing.of(torch.nn.Linear(1, 1)) == Packing(0)
    routing = weft.MultiheadAttention(8, 2, attention="routing", max_length=16)
    assert not Packing.of(routing).fillers(lengths)  # they would move the centroids


def test_a_packed_run_resumes_in_the_middle_of_an_epoch(tmp_path, monkeypatch, table):
    settings = dict(attention="linear", packed=True, dropout=0.2, checkpoint_every=5)
    train(config(tmp_path / "whole", table, **settings))
    runs.killed_run(monkeypatch, config(tmp_path / "run", table, **settings), 8)
    train(config(tmp_path / "run", table, **settings), resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    "changes, count",
    [
        # Before, between and after all attentions; again in eval mode, to compare losses.
        (dict(packed=True, layers=3), 6),
        (dict(packed=True, attention="local", attention_options='{"block_size": 4}', pooling="mean", empty=True), 6),
        (dict(packed=True, checkpoint_activations=True), None),
        (dict(layers=6), 2),  # a block, and again in eval mode
        (dict(layers=6, attention="full", subsample="Sall-L4", sigma=0.1, sigma_last=0.2), 3),  # blocks that differ
    ],
)
def test_compiled_parts_serve_all_lengths_and_blocks(tmp_path, table, monkeypatch, changes, count):
    settings = dict(attention="linear", layers=2, eval_every=4) | changes
    if settings.pop("empty", False):
        table = with_an_empty_text(table, tmp_path)
    train(config(tmp_path / "eager", table, **settings))
    graphs, compile_ = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, options: compile_(function, backend=backend))
    train(config(tmp_path / "compiled", table, compile=True, **settings))
    assert graphs and count in (len(graphs), None)
    for mine, theirs in zip(curve(tmp_path / "compiled"), curve(tmp_path / "eager"), strict=True):
        assert mine == (*theirs[:2], pytest.approx(theirs[2], rel=1e-9))


def test_tasks_without_documents_and_other_models_refuse_it(tmp_path, table):
    with pytest.raises(ValueError, match="--model hf:bert does not support --packed"):
        make_config("classify", data=str(table), model="hf:bert", packed=True)
    with pytest.raises(ValueError, match="packed has no effect on the task digits"):
        runs.tiny(tmp_path, packed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_models_have_the_cheaper_dropout(packed):
    model = weft.models.TextClassifier(
        20, 2, max_length=16, dim=8, heads=2, head_dim=4, layers=2, mlp_dim=8, dropout=0.1
    )
    before = sum(type(module) is torch.nn.Dropout for module in model.modules())
    compile_model(model, packed)
    kinds = [type(module) for module in model.modules()]
    assert before and kinds.count(HashedDropout) == before and torch.nn.Dropout not in kinds
