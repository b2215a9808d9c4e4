"""CRATE's layers and models: agreement with the authors' code, published sizes, masks, and every mechanism."""

from __future__ import annotations

import copy
import json

import golden
import pytest
import torch
import torch.nn.functional as F

import weft
from weft.inspect.rates import attention_step, heads_rate
from weft.models import CRATE, CRATEMAE, CRATELayer, CRATEText, crate
from weft.models.blocks import blocks
from weft.models.crate_mae import CRATEDecoderLayer, normalise
from weft.tasks import TaskData, get_task, make_config

FILE = "crate.npz"
IMAGE = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
AGREE = {"rtol": 1e-9, "atol": 1e-9}
PARTS = {  # the authors' names, ours
    "transformer.layers": "blocks",
    ".0.norm.": ".norm1.",
    ".0.fn.qkv.": ".mssa.subspaces.",
    ".0.fn.to_out.0.": ".mssa.out.",
    ".1.norm.": ".norm2.",
    ".1.fn.": ".ista.",
    "pos_embedding": "positions",
    "cls_token": "cls",
    "to_patch_embedding.1": "patches.embed.0",
    "to_patch_embedding.2": "patches.embed.1",
    "to_patch_embedding.3": "patches.embed.2",
    "mlp_head.0": "norm",
    "mlp_head.1": "head",
}
DECODER = {".0.fn.": ".dictionary.", ".1.fn.qkv.": ".mssa.subspaces.", ".1.fn.to_out.0.": ".mssa.out."}


def renamed(case: dict, prefix: str, parts: dict[str, str]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in case.items():
        if key.startswith(prefix):
            key = key[len(prefix) :]
            for theirs, ours in parts.items():
                key = key.replace(theirs, ours)
            found[key] = torch.from_numpy(value)
    return found


def depth(weights: dict) -> int:
    return 1 + max(int(key.split(".")[1]) for key in weights if key.startswith(("layers.", "blocks.")))


def stack(layers: list[torch.nn.Module], weights: dict) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(layers)
    model.double().load_state_dict(weights)
    return model


def check_mssa(name: str, case: dict) -> None:
    weights = renamed(case, "w/", {"qkv": "subspaces", "to_out.0": "out"})
    width, dim = weights["subspaces.weight"].shape
    heads = 1 if name.endswith("_h1") else 3 if name.endswith("_ns") else 4
    layer = weft.MSSA(dim, heads, head_dim=width // heads).double()
    layer.load_state_dict(weights)
    close(layer(torch.from_numpy(case["x"])), case["y"])


def check_ista(name: str, case: dict) -> None:
    weights = renamed(case, "w/", {})
    layer = weft.ISTA(weights["weight"].shape[0], step=0.5 if name.endswith("_eta05") else 0.1).double()
    layer.load_state_dict(weights)
    close(layer(torch.from_numpy(case["x"])), case["y"])


def check_trans(name: str, case: dict) -> None:
    weights = renamed(case, "w/", PARTS)
    model = stack([CRATELayer(16, 4) for _ in range(depth(weights))], weights)
    x = torch.from_numpy(case["x"])
    for i, layer in enumerate(model.layers):
        w = layer.mssa.project(layer.norm1(x))[0]
        close(w.transpose(1, 2).flatten(2), case["qkv_per_layer"][i])
        rate = heads_rate(w, normalise=True)
        close(torch.stack([rate.mean(), rate.std()]), case["coding_rate_mean_std"][i])
        x = layer(x)
        close(x, case["ista_out_per_layer"][i])
        zeros = (x == 0).double().mean((1, 2))
        close(torch.stack([zeros.mean(), zeros.std(correction=0)]), case["zero_fraction_mean_std"][i])
    close(x, case["y"])


def check_net(name: str, case: dict) -> None:
    weights = renamed(case, "w/", PARTS)
    image = torch.from_numpy(case["img"])
    model = CRATE(
        dim=16,
        heads=4,
        layers=depth(weights),
        classes=5,
        image_size=tuple(image.shape[2:]),
        patch=4,
        pooling=name.removeprefix("net_"),
    ).double()
    model.load_state_dict(weights)
    logits = model(image)
    close(logits, case["logits"])
    loss = F.cross_entropy(logits, torch.tensor([0, 3, 4]))
    close(loss, case["ce_loss_targets_0_3_4"])
    loss.backward()
    expected = renamed(case, "grad/", PARTS)
    assert expected.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        close(parameter.grad, expected[key])


def check_ae_enc(name: str, case: dict) -> None:
    model = stack([CRATELayer(16, 4, ista={"threshold": 0.5})], renamed(case, "w/", PARTS))
    close(model.layers[0](torch.from_numpy(case["x"])), case["y"])


def check_ae_dec(name: str, case: dict) -> None:
    model = stack([CRATEDecoderLayer(16, 4)], renamed(case, "w/", {**DECODER, **PARTS}))
    close(model.layers[0](torch.from_numpy(case["x"])), case["y"])


def check_rate(name: str, case: dict) -> None:
    rate = heads_rate(torch.from_numpy(case["X_bhmd"]), normalise=True)
    close(torch.stack([rate.mean(), rate.std()]), case["mean_std"])


KINDS = {
    "mssa": check_mssa,
    "ista": check_ista,
    "trans": check_trans,
    "net": check_net,
    "ae_enc": check_ae_enc,
    "ae_dec": check_ae_dec,
    "rate": check_rate,
}


@pytest.mark.parametrize("name", golden.names(FILE))
def test_golden(name):
    case = golden.case(FILE, name)
    kind = next(kind for kind in KINDS if name.startswith(kind))
    KINDS[kind](name, case)


def close(actual: torch.Tensor, expected) -> None:
    torch.testing.assert_close(actual.detach(), torch.as_tensor(expected), **AGREE)


# What the golden file has no cases for: the worked numbers of the specification.


def test_literal_equations_on_worked_numbers():
    z = torch.tensor([[1.0, 0.0], [0.6, 0.8]]).double()[None]
    layer = weft.MSSA(2, 2, tied=True, scale=1.0).double()
    layer.subspaces.weight.data = torch.eye(2).double()
    rows = torch.tensor([[0.839475, 0.4], [0.823885, 0.523803]]).double()
    torch.testing.assert_close(layer(z)[0].detach(), rows, atol=1e-6, rtol=0)
    D = torch.tensor([[0.8, -0.6], [0.6, 0.8]]).double()
    for options, rows in (
        ({}, [[0.97, 0.0], [0.626, 0.738]]),
        ({"variant": "mm", "epsilon": 0.5**0.5}, [[0.896296, 0.0], [1.08, 0.299259]]),
    ):
        ista = weft.ISTA(2, **options).double()
        ista.weight.data = D
        torch.testing.assert_close(ista(z)[0].detach(), torch.tensor(rows).double(), atol=1e-6, rtol=0)


def test_an_adapter_changes_both_sides_of_a_tied_layer():
    class Adapter(torch.nn.Module):
        """A low-rank adapter as peft's, which shows the weight that it is added to."""

        def __init__(self, base):
            super().__init__()
            self.base, self.weight = base, base.weight
            self.low = torch.nn.Sequential(torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8, bias=False))

        def forward(self, x):
            return self.base(x) + self.low(x)

    layer = weft.MSSA(8, 2, tied=True).double()
    merged = copy.deepcopy(layer)
    layer.subspaces = Adapter(layer.subspaces).double()
    merged.subspaces.weight.data += layer.subspaces.low[1].weight @ layer.subspaces.low[0].weight
    x = torch.randn(2, 5, 8).double()
    torch.testing.assert_close(layer(x), merged(x), **AGREE)


def test_tied_layer_with_kappa_is_the_paper_step():
    layer = CRATELayer(8, 2, tied=True, gamma=0.5, scale=1.0, kappa=0.3).double()
    layer.norm1 = torch.nn.Identity()
    x = torch.randn(2, 5, 8).double()
    epsilon = (4 / (5 * 0.5)) ** 0.5  # γ = p / (N ε²)
    expected = attention_step(x, layer.mssa.bases, 0.3, epsilon)
    torch.testing.assert_close(layer.compress(x), expected, **AGREE)


@pytest.mark.parametrize(
    "size, count", [("tiny", 6_090_856), ("small", 13_116_328), ("base", 22_796_008), ("large", 77_641_192)]
)
def test_published_sizes(size, count):
    with torch.device("meta"):
        model = crate(size)
    assert sum(p.numel() for p in model.parameters()) == count
    if size == "base":
        with torch.device("meta"):
            tied = crate("base", tied=True)
        assert sum(p.numel() for p in tied.parameters()) == 15_708_904


def test_size_command_prints_the_papers_values():
    from typer.testing import CliRunner

    from weft.cli import app

    done = CliRunner().invoke(app, ["size", "crate"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    lines = [line.strip("│").split("│") for line in done.output.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert [row[0] for row in rows] == ["CRATE-Tiny", "CRATE-Small", "CRATE-Base", "CRATE-Large"]
    assert [row[3] for row in rows] == ["6,090,856", "13,116,328", "22,796,008", "77,641,192"]
    for column in (4, 5):
        assert [row[column] for row in rows] == ["6.09", "13.12", "22.80", "77.64"]
    assert CliRunner().invoke(app, ["size", "crate", "--heads", "3"]).exit_code == 2


def test_initial_values():
    torch.manual_seed(0)
    model = crate("tiny", layers=1, classes=10)
    assert abs(model.positions.std().item() - 1) < 0.02
    D = model.blocks[0].ista.weight
    bound = (6 / 384) ** 0.5
    assert 0.99 * bound < D.abs().max().item() <= bound
    assert model.blocks[0].mssa.subspaces.weight.abs().max().item() <= 384**-0.5
    mae = CRATEMAE(dim=384, heads=6, head_dim=64, layers=1, image_size=32, patch=4)
    weights = mae.blocks[0].ista.weight, mae.decoder[0].dictionary.weight, mae.decoder[0].mssa.subspaces.weight
    for weight, most in zip(weights, (bound, bound, bound / 2**0.5), strict=True):
        assert 0.99 * most < weight.abs().max().item() <= most


def text_model(name: str, **options) -> CRATEText:
    causal = not weft.attention_info(name).bidirectional
    torch.manual_seed(3)
    pool = {"causal": True, "pooling": "mean"} if causal else {}
    return CRATEText(23, 3, dim=12, heads=2, layers=2, max_length=24, attention=name, **{**pool, **options}).eval()


@pytest.mark.parametrize("name", ["full", "combiner-fixed", "linear"])
def test_text_models_keep_masks(name):
    """Padded ids do not affect the scores, and all gradients are finite."""
    model = text_model(name).double()
    ids = torch.randint(1, 23, (2, 17))
    ids[1, 9:] = 0
    scores = model(ids)
    poisoned = ids.clone()
    poisoned[1, 9:] = torch.randint(1, 23, (8,))
    torch.testing.assert_close(model(poisoned, mask=ids != 0), scores, rtol=0, atol=1e-12)
    if not weft.attention_info(name).length_dependent:
        torch.testing.assert_close(model(ids[1:, :9]), scores[1:], rtol=1e-9, atol=1e-9)
    scores.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert model.blocks[0].mssa.subspaces.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", weft.attentions())
def test_mssa_is_the_mechanism_with_one_vector(name):
    info = weft.attention_info(name)
    layer = weft.MSSA(12, 3, attention=name, causal=not info.bidirectional, max_length=9).double().eval()
    x = torch.randn(2, 9, 12).double()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:] = False
    w = (x @ layer.subspaces.weight.T).unflatten(-1, (3, 4)).transpose(1, 2)
    expected = layer.out(layer.attention(w, w, w, mask).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask), expected, **AGREE)
    applied = layer.merge(layer.weights(x, mask) @ w.masked_fill(~mask[:, None, :, None], 0))
    torch.testing.assert_close(layer(x, mask), applied, **AGREE)


def test_mssa_passes_its_input_to_mechanisms_that_read_it():
    options = dict(attention="combiner-axial", key_summary="proj", input_dim=12, block_size=3)
    layer = weft.MSSA(12, 3, causal=True, **options).double().eval()
    x = torch.randn(2, 9, 12).double()
    y = layer(x)
    out, state = layer.prefill(x[:, :5])
    for t in range(5, 9):
        token, state = layer.step(x[:, t : t + 1], state)
        out = torch.cat([out, token], 1)
    torch.testing.assert_close(out, y, **AGREE)
    packed = layer(x[:1], segments=torch.tensor([[1] * 4 + [2] * 5]))
    torch.testing.assert_close(packed[:, 4:], layer(x[:1, 4:]), **AGREE)
    torch.testing.assert_close(layer.merge(layer.weights(x) @ layer.project(x)[2]), y, **AGREE)


def test_mm_counts_real_tokens_only():
    layer = weft.ISTA(6, variant="mm", epsilon=0.5).double()
    x = torch.randn(1, 7, 6).double()
    mask = torch.tensor([[True] * 4 + [False] * 3])
    torch.testing.assert_close(layer(x, mask)[:, :4], layer(x[:, :4]), **AGREE)
    assert layer(x, torch.zeros_like(mask)).isfinite().all()


IMAGES = dict(dim=16, heads=2, layers=2, image_size=8, patch=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_in_is_dtype_out(dtype):
    images, ids = torch.randn(2, 3, 8, 8, dtype=dtype), torch.randint(0, 9, (2, 5))
    assert CRATE(**IMAGES, dtype=dtype)(images).dtype == dtype
    assert CRATEText(9, 2, dim=8, heads=2, layers=1, dtype=dtype)(ids).dtype == dtype
    loss, prediction, _ = CRATEMAE(**IMAGES, dtype=dtype)(images)
    assert loss.dtype == prediction.dtype == dtype and loss.isfinite()


def test_models_compile_without_a_break():
    images, ids, hidden = torch.randn(2, 3, 8, 8), torch.randint(0, 9, (2, 5)), torch.eye(4)[:2] < 1
    for model, inputs in (
        (CRATE(**IMAGES, tied=True, scale=1.0), [images]),
        (CRATEText(9, 2, dim=8, heads=2, layers=2, pooling="mean", ista={"variant": "mm", "epsilon": 1.0}), [ids]),
    ):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    mae = CRATEMAE(**IMAGES)
    compiled = torch.compile(mae, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images, hidden), mae(images, hidden))


def test_masked_autoencoder_looks_at_hidden_patches_only():
    torch.manual_seed(0)
    model = CRATEMAE(dim=16, heads=2, layers=2, image_size=(8, 12), patch=4).double()
    images = torch.randn(2, 3, 8, 12).double()
    hidden = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 1]]).bool()
    loss, prediction, _ = model(images, hidden)
    patches = model.patches.cut(images)
    error = (prediction - normalise(patches)).pow(2).mean(-1)
    torch.testing.assert_close(loss, error[hidden].mean(), **AGREE)
    # The encoder does not see what is hidden: other pixels there give the same prediction.
    noise = torch.randn_like(patches) * hidden[..., None]
    other = images + F.fold(
        noise.unflatten(2, (4, 4, 3)).permute(0, 1, 4, 2, 3).flatten(2).mT, (8, 12), kernel_size=4, stride=4
    )
    torch.testing.assert_close(model.patches.cut(other), patches + noise, **AGREE)
    torch.testing.assert_close(model(other, hidden)[1], prediction, rtol=0, atol=1e-12)
    assert model(images)[2].sum(1).tolist() == [4, 4]  # three quarters of six, rounded
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_autoencoder_encoder_in_a_classifier():
    model = CRATEMAE(dim=16, heads=2, layers=1, image_size=8, patch=4).double()
    images = torch.randn(2, 3, 8, 8).double()
    classifier = model.classifier(5)
    torch.testing.assert_close(classifier.features(images), model.encode(images))
    probe = classifier.new_head(7, probe=True)
    assert probe(images).shape == (2, 7)
    assert [name for name, p in probe.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: weft.MSSA(10, 3), "head_dim"),
        (lambda: weft.MSSA(8, 2, gamma=2.0), "tied=True"),
        (lambda: weft.MSSA(8, 2, scale=0.0), "positive"),
        (lambda: weft.ISTA(8, variant="mm"), "epsilon"),
        (lambda: weft.ISTA(8, epsilon=0.1), "epsilon"),
        (lambda: weft.ISTA(8, variant="mm", epsilon=0.1, step=0.2), "step"),
        (lambda: weft.ISTA(8, variant="lasso"), "'ista'"),
        (lambda: CRATEMAE(**IMAGES)(torch.zeros(1, 3, 8, 8), torch.zeros(1, 4).bool()), "at least one True"),
        (lambda: CRATELayer(8, 2, causal=True, ista={"variant": "mm", "epsilon": 0.1}), "causal"),
        (lambda: CRATELayer(8, 2, kappa=0.5), "tied=True"),
        (lambda: crate("huge"), "tiny, small, base, large"),
        (lambda: CRATE(dim=8, heads=2, layers=1, image_size=10, patch=4), "must be divisible"),
        (lambda: CRATEText(9, 2, dim=8, heads=2, layers=1, causal=True), "pooling='mean'"),
        (lambda: CRATEMAE(dim=8, heads=2, layers=1, ratio=1.0), "between 0 and 1"),
    ],
)
def test_errors_say_what_to_do(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_layers_of_a_random_mechanism_draw_differently():
    drawn = [name for name in weft.attentions() if "seed" in weft.attention_info(name).options]
    for name in drawn:
        seeds = [block.mssa.attention.seed for block in text_model(name).blocks]
        assert len(set(seeds)) == 2, name


def test_swap_cache_and_subsample_crate():
    """Swap, subsample and cache every layer with one call, and undo it."""
    torch.manual_seed(0)
    model = CRATE(dim=16, heads=2, layers=3, classes=3, image_size=16, patch=4).eval()
    images = torch.randn(2, 3, 16, 16)
    before = model(images)
    report = weft.swap(model, to="combiner-fixed", block_size=4)
    assert {b.mssa.attention.name for b in model.blocks} == {"combiner-fixed"}
    assert not torch.allclose(model(images), before, atol=1e-4)
    report.undo()
    report = weft.swap(model, to="full")
    torch.testing.assert_close(model(images), before)
    report.undo()
    report = weft.subsample(model, "S2-L4")
    assert [b.mssa.attention.name for b in model.blocks] == ["full", "subsampled", "subsampled"]
    report.undo()
    report = weft.cache(model, ratio=0.5)
    model.train()(images)
    assert all(int(b.mssa.cache.updates) == 1 for b in model.blocks)
    report.undo()
    assert torch.equal(model.eval()(images), before)


@pytest.mark.parametrize("task, facts", [("digits", {"vocab": 6}), ("listops", {"vocab": 17}), ("cifar10", IMAGE)])
def test_options_of_the_model_reach_it_in_every_task(task, facts):
    options = {"tied": True, "kappa": 0.5, "ista": {"threshold": 0.2}, "pooling": "mean"}
    config = make_config(task, model="crate", layers=1, model_options=json.dumps(options))
    model = get_task(task).model(config, TaskData({}, {}, {}, 64, {"classes": 10, **facts}))
    (layer,) = blocks(model)
    assert (layer[1].mssa.tied, layer[1].step, layer[1].ista.threshold) == (True, 0.5, 0.2)
    assert getattr(model, "model", model).pooling == "mean"
