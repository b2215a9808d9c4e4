"""Large vocabularies, overlapping windows, and sequences of two segments."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.lab.build import build_model
from weft.models.language import TwoSegments
from weft.models.words import AdaptiveWords, WordModel
from weft.tasks import TaskData, get_task, make_config
from weft.tasks.text import evaluated
from weft.tasks.tokens import two_segments

SMALL = dict(dim=16, heads=2, head_dim=8, layers=1, mlp_dim=16, dropout=0.0)


def test_adaptive_softmax_is_a_distribution_with_tied_tables() -> None:
    torch.manual_seed(0)
    words = AdaptiveWords(50, 32, (10, 30)).double()
    x = torch.randn(4, 32, dtype=torch.float64)
    every = torch.arange(50).expand(4, -1)
    p = torch.exp(-words.nll(x[:, None].expand(-1, 50, -1), every))
    torch.testing.assert_close(p.sum(1), torch.ones(4, dtype=torch.float64))
    head = torch.cat([x @ words.tables[0].weight.T, x @ words.bands.weight.T], 1).softmax(1)
    inside = (x @ words.widen[2].weight @ words.tables[2].weight.T).softmax(1)  # the input's table and projection
    torch.testing.assert_close(p[:, 30:], head[:, 11:12] * inside)
    expected = math.sqrt(32) * words.tables[1].weight[5] @ words.widen[1].weight.T
    torch.testing.assert_close(words(torch.tensor([15]))[0], expected)


def test_the_paper_model_for_wikitext_103_has_its_size() -> None:
    """246.9 M parameters: tied tables and projections, and no norm after the last block."""
    options = dict(dim=1024, heads=8, head_dim=128, layers=16, mlp_dim=4096, attention="full", attention_dropout=0.1)
    with torch.device("meta"):
        model = WordModel(267_744, 3072, dropout=0.3, **options)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 246.9


@pytest.mark.parametrize(("task", "preset"), [("wikitext103", ""), ("enwik8", "pathways")])
def test_the_paper_models_have_three_rates_of_dropout(task: str, preset: str) -> None:
    config = make_config(task, preset, dim=16, heads=2, head_dim=8, layers=1, mlp_dim=16)
    block = get_task(task).model(config, TaskData({}, {}, {}, 8, {"vocab": 30})).blocks[0]
    assert (block.dropout.p, block.attention.attention.dropout, block.feedforward.dropout.p) == (0.3, 0.1, 0.1)


def test_the_paper_model_for_wikitext_103_starts_with_smaller_projections() -> None:
    sizes = dict(dim=64, heads=2, head_dim=32, layers=1, mlp_dim=64, dropout=0.0, attention_dropout=0.0)
    layer = WordModel(30, 8, attention="full", **sizes).blocks[0].attention
    found = [linear.weight.abs().max().item() for linear in (layer.q, layer.k, layer.v, layer.out)]
    bound = math.sqrt(6 / 128)  # of Xavier's uniform distribution
    assert found == pytest.approx([bound / math.sqrt(2)] * 3 + [bound], rel=0.01)


def test_the_paper_model_for_enwik8_can_start_with_the_authors_weights() -> None:
    sizes = dict(dim=64, heads=2, head_dim=32, layers=1, mlp_dim=64, max_length=8, dropout=0.0, attention_dropout=0.0)
    config = make_config("enwik8", "pathways", initial="authors", **sizes, mlp_dropout=0.0)
    usual, model = (
        build_model(dataclasses.replace(config, initial=initial), TaskData({}, {}, {}, 8, {"vocab": 256}))
        for initial in ("", "authors")
    )
    layer, bound = model.blocks[0].attention, math.sqrt(6 / 128)
    found = [linear.weight.abs().max().item() for linear in (layer.q, layer.k, layer.v, layer.out)]
    assert found == pytest.approx([bound / math.sqrt(2)] * 3 + [bound], rel=0.01)
    assert model.embed.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    ids = torch.arange(256)
    torch.testing.assert_close(model.embed(ids), 8 * model.embed.weight)
    for name, weight in usual.state_dict().items():
        same = not any(part in name for part in ("embed", ".q.", ".k.", ".v.")) or not weight.any()
        assert torch.equal(weight, model.state_dict()[name]) == same, name
    with pytest.raises(ValueError, match="initial has no effect on the task text"):
        make_config("text", initial="authors")


@pytest.mark.parametrize("count", [17, 18, 99, 100, 9])
@pytest.mark.parametrize("stride", [0, 1, 4, 16])
def test_overlapping_windows_score_every_target_once_with_more_context(count: int, stride: int) -> None:
    found = evaluated(torch.arange(count), 16, stride)
    rows, counts = found["bytes"], found["counts"]
    assert rows[:, 1:][counts].tolist() == list(range(1, count))
    if stride and len(rows) > 1:
        assert counts[1:].int().argmax(1).min() >= 16 - stride  # the context of the first that counts
    again = get_task("text").overlapping(found, 3)
    assert again["bytes"][:, 1:][again["counts"]].tolist() == list(range(1, count))


@pytest.mark.parametrize("task", ["wiki40b", "wikitext103"])
def test_an_evaluation_with_overlap_is_the_loss_of_those_targets(tmp_path, task: str) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path / {"wiki40b": "wiki40b", "wikitext103": "wikitext-103"}[task]
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"{part}.txt").write_text("one two three four five six seven \n" * 12)
    settings = dict(**SMALL, max_length=8, eval_stride=3, eval_batches=0, batch_size=4)
    config = make_config(task, data=str(tmp_path), **settings)
    found, kind = get_task(task).load(config), get_task(task)
    torch.manual_seed(0)
    model = kind.model(config, found).eval()
    sums = kind.score(model, found.test)
    rows = found.test["bytes"].long()
    if task == "wiki40b":
        losses = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
    else:
        losses = model(rows[:, :-1], rows[:, 1:])
    torch.testing.assert_close(sums["loss"].sum(), losses[found.test["counts"]].sum())
    text = found.train["bytes"].untyped_storage().nbytes() // 4  # the three parts are equal
    assert sums["count"].tolist()[:-1] == [8, *[3] * (len(rows) - 2)] and sums["count"].sum() == text - 1
    plain = get_task(task).load(make_config(task, data=str(tmp_path), **{**settings, "eval_stride": 0}))
    later = kind.overlapping(plain.test, 3)  # the same windows from the rows of a run without overlap
    assert torch.equal(later["bytes"], found.test["bytes"]) and torch.equal(later["counts"], found.test["counts"])
    with pytest.raises(ValueError, match="between 1 and the length of a window, 8, got 9"):
        kind.overlapping(plain.test, 9)
    with pytest.raises(ValueError, match="at most max_length, 8"):
        make_config(task, **{**settings, "eval_stride": 9})


def test_sequences_have_at_most_two_segments() -> None:
    """0 is the line break and 1 a space here: documents of 8, 9 and 4 tokens with the empty lines that end them."""
    ids = np.array([5, 6, 7, 0, 0, 1, 0, 0, 2, 3, 4, 1, 6, 7, 0, 1, 0, 8, 9, 0, 0])
    kinds = np.arange(18) < 2, np.arange(18) == 0
    documents = [8, 17, 21]
    rows = two_segments(ids, *kinds, 8)
    real = rows["segment"] > 0
    assert rows["bytes"][real].tolist() == ids.tolist()  # nothing is lost or repeated
    at = 0
    for kind, count in zip(rows["segment"].tolist(), real.sum(1).tolist(), strict=True):
        owner = [sum(place >= end for end in documents) for place in range(at, at + count)]
        assert len(set(owner)) <= 2 and kind[:count] == [1 + (o != owner[0]) for o in owner]
        at += count
    assert two_segments(np.arange(1, 18), *kinds, 8)["segment"].tolist() == [[1] * 8, [1] * 8, [1] + [0] * 7]


def test_masked_segments_hide_real_tokens_in_proportion(tmp_path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "c4").mkdir()
    text = "a few words \n \n" + "some longer text with many words \n" * 9 + " \n"  # spaces as in WikiText
    for part in ("train", "valid", "test"):
        (tmp_path / "c4" / f"{part}.txt").write_text(text * 3)
    config = make_config("c4-masked", data=str(tmp_path), max_length=40, **SMALL)
    task = get_task("c4-masked")
    data = task.load(config)
    assert set(data.train["segment"].unique().tolist()) <= {0, 1, 2} and (data.train["segment"] == 2).any()
    batch = task.batch(data.train, config, torch.Generator().manual_seed(0), training=True)
    real = data.train["segment"] > 0
    hidden = real.gather(1, batch["chosen"])[batch["counts"]]
    assert hidden.all() and batch["counts"].sum(1).tolist() == [max(1, round(0.15 * n)) for n in real.sum(1).tolist()]
    assert (batch["ids"] != data.train["bytes"]).sum() <= batch["counts"].sum()
    model = task.model(config, data)
    assert isinstance(model, TwoSegments)
    loss = task.loss(model, batch, config)
    loss.backward()
    assert loss.isfinite() and model.kind.weight.grad[2].abs().max() > 0
    other = {**batch, "segment": batch["segment"].clamp(max=1)}
    assert not torch.equal(model(*task.inputs(other)), model(*task.inputs(batch)))


@pytest.mark.parametrize("name", ["masked", "c4-masked"])
def test_evaluations_hide_the_same_tokens_in_every_batch(name):
    task, config = get_task(name), make_config(name)
    rows = {"bytes": torch.randint(1, 256, (5, 40)), "segment": (torch.arange(40) < torch.tensor([[40]] * 4 + [[9]]))}

    def batch(at, training=False, seed=0):
        part = {key: column[at].int() for key, column in rows.items()}
        return task.batch(part, config, torch.Generator().manual_seed(seed), training)

    whole, parts = batch(slice(5)), [batch(slice(2), seed=1), batch(slice(2, 5), seed=2)]
    for key, column in whole.items():
        assert torch.equal(column, torch.cat([part[key] for part in parts]))
    assert len({tuple(row) for row in whole["chosen"].tolist()}) == 5
    assert not torch.equal(batch(slice(5), training=True)["ids"], batch(slice(5), training=True, seed=1)["ids"])
