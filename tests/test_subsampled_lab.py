"""weft.subsample, weft.subsampling and weft.ensemble on whole models."""

import copy

import pytest
import torch
from torch import nn

import weft
from weft.adapt.subsample import parse_schedule


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return x + self.attention(x)


class Classifier(nn.Module):
    def __init__(self, depth=4, dropout=0.0, **options):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(weft.MultiheadAttention(8, 2, dropout=dropout, **options)) for _ in range(depth)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x, *, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x).mean(1)) * scale


class Tagger(Classifier):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_schedule_names():
    plan = parse_schedule("S12-L8")
    assert (plan.layers, plan.windows, plan.biased) == (12, 8, True)
    for name in ("Sall-L4U", "S-all-L4U"):
        plan = parse_schedule(name)
        assert (plan.layers, plan.windows, plan.biased) == (None, 4, False)
    for name in ("S12", "L8-S12", "s12-l8", "S12-L0", "S12-L8-X"):
        with pytest.raises(ValueError, match="S12-L8"):
            parse_schedule(name)


def test_subsample_takes_the_last_layers_with_linear_sigma():
    model = Classifier(depth=16, dropout=0.1, causal=True, max_length=64)
    report = weft.subsample(model, "S12-L8", sigma=(0.2, 0.35))
    names = [block.attention.attention.name for block in model.blocks]
    assert names == ["full"] * 4 + ["subsampled"] * 12
    for index, block in enumerate(model.blocks[4:], 4):
        inner = block.attention.attention
        assert inner.sigma == pytest.approx(0.2 + 0.01 * index) and inner.windows == 8
        assert (inner.causal, inner.max_length, inner.dropout, inner.training) == (True, 64, 0.1, True)
    assert report.replaced == [f"blocks.{i}.attention" for i in range(4, 16)]
    assert "first 4 layers" in report.left["blocks.0.attention"] and "sigma=0.35" in str(report)


def test_undo_restores_the_same_objects():
    model = Classifier()
    before = [block.attention.attention for block in model.blocks]
    state = copy.deepcopy(model.state_dict())
    report = weft.subsample(model, "Sall-L4U")
    assert not any(block.attention.attention.biased for block in model.blocks)
    assert model.state_dict().keys() == state.keys()  # it has no parameters
    model.eval()
    report.undo()
    after = [block.attention.attention for block in model.blocks]
    assert all(a is b for a, b in zip(before, after, strict=True)) and not any(a.training for a in after)
    with pytest.raises(ValueError, match="undone"):
        report.undo()


def test_subsample_says_what_it_left_and_refuses_what_it_cannot():
    model = nn.ModuleDict(
        {
            "local": weft.MultiheadAttention(8, 2, attention="subsampled"),
            "mixed": weft.MixedAttention(8, 2, ["full", "full"]),
            "cross": weft.MultiheadAttention(8, 2, context_dim=6),
            "last": weft.MultiheadAttention(8, 2),
        }
    )
    report = weft.subsample(model, "S3-L2", sigma=(0.1, 0.3))
    assert report.replaced == ["mixed.blocks.0", "mixed.blocks.1", "last"]
    assert [model["mixed"].blocks[i].attention.sigma for i in (0, 1)] == pytest.approx([0.2, 0.2])  # layer 1 of 0..2
    assert "subsampled" in report.left["local"] and "another sequence" in report.left["cross"]
    report.undo()
    assert weft.subsample(model, "Sall-L2", where="l*").replaced == ["last"]
    with pytest.raises(ValueError, match="5 layers"):
        weft.subsample(Classifier(), "S5-L2")
    with pytest.raises(ValueError, match="MultiheadAttention"):
        weft.subsample(nn.Linear(2, 2), "S1-L2")
    fresh = Classifier()
    with pytest.raises(TypeError, match="no option"):
        weft.subsample(fresh, "Sall-L2", window=3)
    assert all(block.attention.attention.name == "full" for block in fresh.blocks)
    assert not weft.subsample(fresh, "S0-L2").replaced


def test_dense_finish_keeps_parameters_and_optimizer():
    model, x = Classifier(), torch.randn(2, 16, 8)
    dense = copy.deepcopy(model).eval()(x)
    weft.subsample(model, "Sall-L4")
    parameters = [id(p) for p in model.parameters()]
    assert not torch.equal(model(x), model(x))
    assert weft.make_dense(model) == 4 and model.training
    assert torch.allclose(model(x), dense, atol=1e-6) and [id(p) for p in model.parameters()] == parameters
    weft.subsampling(model, True)
    assert not torch.equal(model(x), model(x)) and torch.allclose(model.eval()(x), dense, atol=1e-6)
    with pytest.raises(ValueError, match="weft.subsample"):
        weft.make_dense(Classifier())


def test_switches_count_for_causal_masks_that_come_later():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), 2)
    x, causal = torch.randn(2, 16, 16), nn.Transformer.generate_square_subsequent_mask(16)
    dense = model.eval()(x, mask=causal)
    weft.subsample(model, "Sall-L4")
    assert weft.ensemble(model, 4, progress=False)(x, mask=causal).spread.max() > 0.01
    torch.testing.assert_close(model(x, mask=causal), dense)  # sampling ends with the ensemble
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), 2)
    weft.subsample(model, "Sall-L4")
    weft.make_dense(model)
    torch.testing.assert_close(model(x, mask=causal), model(x, mask=causal))


def test_ensemble_averages_probabilities_of_members():
    model, x = Classifier(dropout=0.5).double(), torch.randn(5, 16, 8, dtype=torch.float64)
    weft.subsample(model, "Sall-L4")
    found = weft.ensemble(model, samples=7, seed=3, progress=False)(x)
    assert model.training and all(block.attention.attention.sampling is None for block in model.blocks)
    members = []
    model.eval()
    for block in model.blocks:
        block.attention.attention.sampling = True
    for member in range(7):
        torch.manual_seed(3 + member)
        members.append(model(x).softmax(-1))
    members = torch.stack(members)
    assert (found.probabilities - members.mean(0)).abs().max() < 1e-12
    assert (found.log_probabilities - members.mean(0).log()).abs().max() < 1e-12
    assert (found.spread - members.std(0)).abs().max() < 1e-12 and found.spread.min() > 0
    entropies = -(members * members.log()).sum(-1)
    mean_entropy = -(members.mean(0) * members.mean(0).log()).sum(-1)
    assert (found.information - (mean_entropy - entropies.mean(0))).abs().max() < 1e-12


def test_micro_batches_change_nothing():
    model, x = Classifier(), torch.randn(5, 16, 8)
    weft.subsample(model, "Sall-L4")
    one, many = (weft.ensemble(model, 4, seed=1, progress=False, micro_batch=m)(x, scale=2.0) for m in (None, 2))
    assert (one.probabilities - many.probabilities).abs().max() < 1e-6 and many.spread.shape == (5, 3)


def test_ensemble_seeds_modes_and_outputs():
    model, x = Tagger(dropout=0.4, causal=True), torch.randn(2, 16, 8)
    weft.subsample(model, "S2-L4")
    model.eval()
    torch.manual_seed(0)
    first = weft.ensemble(model, 3, progress=False)(x)
    after = torch.rand(1)
    torch.manual_seed(0)
    again = weft.ensemble(model, 3, progress=False)(x)
    assert first.probabilities.shape == (2, 16, 3) and torch.equal(first.probabilities, again.probabilities)
    assert torch.equal(after, torch.rand(1)) and not model.training  # the global generator moves on by one draw
    wild = weft.ensemble(model, 3, progress=False, dropout=True, seed=0)(x)
    calm = weft.ensemble(model, 3, progress=False, seed=0)(x)
    assert wild.spread.mean() > calm.spread.mean()
    values = weft.ensemble(model, 3, progress=False, regression=True, seed=0)(x)
    assert values.mean.min() < 0 and values.information is None
    with pytest.raises(ValueError, match="regression"):
        values.probabilities  # noqa: B018
    weft.make_dense(model)  # an ensemble samples also with the switch off
    assert torch.equal(weft.ensemble(model, 3, progress=False, seed=0)(x).mean, calm.mean)
    assert all(block.attention.attention.sampling is False for block in model.blocks[2:])


def test_ensemble_refusals():
    with pytest.raises(ValueError, match="weft.subsample"):
        weft.ensemble(Classifier())
    with pytest.raises(ValueError, match="at least 1"):
        weft.ensemble(Classifier(), 0)
    model = Classifier()
    weft.subsample(model, "Sall-L4")
    with pytest.raises(TypeError, match="output"):
        weft.ensemble(nn.Sequential(model, _Tuple()), 2, progress=False)(torch.randn(1, 8, 8))


def test_an_ensemble_does_not_write_to_caches_and_centroids():
    torch.manual_seed(0)
    model, x = Classifier(2), torch.randn(3, 12, 8)
    model.blocks.append(Block(weft.MultiheadAttention(8, 2, attention="routing")))
    weft.subsample(model, "Sall-L4")
    weft.cache(model)
    model.train()(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for dropout in (False, True):
        first, again = (weft.ensemble(model, 3, progress=False, dropout=dropout, seed=0)(x).mean for _ in range(2))
        assert torch.equal(first, again)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    streams = Classifier(2)
    weft.subsample(streams, "Sall-L4")
    weft.cache(streams, scope="stream", eval_update=True)
    with pytest.raises(ValueError, match="without eval_update"):
        weft.ensemble(streams, 3)


class _Tuple(nn.Module):
    def forward(self, x):
        return x, x


def test_progress_bar_shows(capsys):
    model = Classifier(depth=1)
    weft.subsample(model, "Sall-L2")
    weft.ensemble(model, 2)(torch.randn(1, 8, 8))  # drawn and removed: must not disturb the answer or raise
