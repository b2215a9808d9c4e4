"""The papers' tables: every file loads, every cell can be built, and some really train a few steps on made-up data."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.lab.build import build_model
from weft.lab.loop import train
from weft.lab.sweep import is_sweep, load_sweep
from weft.tasks import TaskData, listops
from weft.tasks.config import field_types, make_config

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `experiments` is no installed package: its modules run from the repository's root

SWEEPS = sorted(p for p in ROOT.glob("experiments/*/*.py") if is_sweep(p))
TABLES = {  # module -> the metric's sane range, in the paper's unit
    "wide.table5": (90, 100),
    "combiner.table2": (10, 30),
    "combiner.table6": (3, 20),
    "cached.table1": (70, 100),
    "cached.table2": (70, 90),
    "cached.table10": (70, 90),
    "subsampled.wikitext103": (15, 25),
    "subsampled.swin": (75, 90),
    "subsampled.cifar10_generation": (2, 4),
    "crate.table1": (60, 100),
    "crate.table2": (60, 75),
}
RANGES = {"accuracy": (10, 100), "bits_per_byte": (0.9, 5)}
SMALL = dict(dim=16, head_dim=4, mlp_dim=16, steps=2, warmup=1, batch_size=2, accelerator="cpu", compile=False)


def module(name: str):
    needed = {"timm": ("wide", "cached", "crate", "subsampled.swin"), "torchvision": ("cached.table3",)}
    for package, users in needed.items():
        if name.startswith(users):
            pytest.importorskip(package)
    return importlib.import_module(f"experiments.{name}")


def test_every_folder_has_its_tables_and_says_what_was_run():
    for folder in ("wide", "combiner", "cached", "subsampled", "crate"):
        text = (ROOT / "experiments" / folder / "README.md").read_text()
        assert "not been run" in text or "not run" in text
        for file in (ROOT / "experiments" / folder).glob("*.py"):
            assert file.name in text, f"{folder}/README.md does not name {file.name}"
    assert {p.parent.name for p in SWEEPS} == {"wide", "combiner", "cached", "subsampled"}


@pytest.mark.parametrize("file", SWEEPS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_sweeps_can_be_built(file):
    sweep = load_sweep(file)
    names = [(cell.row, cell.column) for cell in sweep.cells]
    assert len(set(names)) == len(names)
    assert "arxiv.org" in sweep.about
    low, high = RANGES[sweep.metric]
    assert all(cell.paper is None or low <= cell.paper <= high for cell in sweep.cells)
    assert any(cell.paper for cell in sweep.cells)
    built = set()
    for cell in sweep.cells:
        config = cell.config
        config.check()
        what = (config.task, config.attention, config.attention_options, config.cache, config.subsample, config.pooling)
        if what in built:
            continue
        built.add(what)
        heads = 8 if config.attention == "mixed" else 2
        layers = 16 if config.subsample else 1
        small = dataclasses.replace(config, **SMALL, heads=heads, layers=layers)
        pair = config.task == "matching"
        facts = {"vocab": 257, "classes": 10}
        build_model(small, TaskData({}, {}, {}, 64, facts, documents=2 if pair else 1))


def test_the_listops_sweep_is_the_papers():
    sweep = load_sweep(ROOT / "experiments/wide/listops.py")
    cell = next(c for c in sweep.cells if (c.row, c.column) == ("full", "wide 1x48"))
    c = cell.config
    assert (c.layers, c.heads, c.head_dim, c.dim, c.mlp_dim, c.batch_size) == (1, 48, 64, 512, 2048, 32)
    assert (c.steps, c.warmup, c.learning_rate, c.schedule, c.optimizer) == (10_000, 1000, 0.05, "inverse_sqrt", "adam")
    assert cell.paper == 37.2 and sweep.seeds == (0, 1, 2)
    whole = load_sweep(ROOT / "experiments/wide/table4.py")
    figures = {(c.row, c.config.layers): c.paper for c in whole.cells if c.config.task == "listops"}
    assert all(c.paper in (None, figures.get((c.row, c.config.layers))) for c in sweep.cells)


@pytest.mark.parametrize("name", TABLES)
def test_tables_name_their_rows_once_and_their_settings_exist(name):
    table = module(name)
    rows = table.rows()
    assert len({row.slug for row in rows}) == len(rows)
    assert len({row.task().name for row in rows}) == len(rows)
    low, high = TABLES[name]
    assert all(low <= figure <= high for row in rows for figure in row.paper.values())
    recipe = getattr(table, "RECIPE", None) or table.PRETRAIN
    for settings in (recipe, *(row.config for row in rows)):
        assert set(settings) - {"epochs"} <= set(field_types())
    config = make_config("imagefolder", **{k: v for k, v in recipe.items() if k != "epochs"})
    assert config.precision == "bf16-mixed"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few trees and pictures in the makers' layouts."""
    folder = tmp_path_factory.mktemp("data")
    listops.make(folder, sizes={"train": 8, "val": 4, "test": 4})
    generator = np.random.default_rng(0)
    cifar = folder / "cifar-10-batches-bin"
    cifar.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = np.concatenate([np.arange(8)[:, None] % 10, generator.integers(0, 256, (8, 3072))], 1)
        (cifar / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    text = "the same few words and then the same few words again \n" * 40
    (folder / "words").mkdir()
    for part in ("train", "valid", "test"):
        (folder / "words" / f"{part}.txt").write_text(text)
    (folder / "text").write_bytes(text.encode() * 4)
    return folder


@pytest.mark.parametrize(
    ("file", "row", "column", "changes"),
    [
        ("wide/listops", "linear", "wide 1x48", dict(heads=4)),
        ("cached/listops", "reformer", "cached", dict(layers=1, heads=2, max_length=96)),
        ("combiner/table1", "Combiner-Mixture", "CIFAR-10", dict(layers=1, heads=2, max_length=96, data="text")),
        ("subsampled/enwik8", "25 % + dense finish", "biased", dict(layers=2, heads=2, max_length=64, task="text",
                                                                    data="text", eval_batches=1)),
    ],
)  # fmt: skip
def test_cells_train(data, tmp_path, file, row, column, changes):
    sweep = load_sweep(ROOT / "experiments" / f"{file}.py")
    cell = next(c for c in sweep.cells if (c.row, c.column) == (row, column))
    changes = {**changes, "data": str(data / changes.get("data", ""))}
    if changes["data"].endswith("text"):
        changes["attention_options"] = ""
    config = dataclasses.replace(cell.config, **SMALL, precision="32-true", out=str(tmp_path / "run"))
    config = dataclasses.replace(config, preset="", **changes)
    result = train(config)
    assert math.isfinite(result.test[sweep.metric]) and result.steps == 2


def run_table(name, data, out, *arguments, **rows):
    table = module(name)
    from experiments.table import run

    metrics = {"perplexity": 1} if "table2" in name and "combiner" in name else {"accuracy": 100}
    recipe = getattr(table, "RECIPE", None) or table.PRETRAIN
    arguments = ["--data", str(data), "--out", str(out), *arguments, "accelerator=cpu", "compile=no"]
    return run("A table", table.rows(**rows), about="", metrics=metrics, recipe=recipe, arguments=arguments)


def test_tables_train_and_stand_beside_the_papers_figures(data, tmp_path):
    small = ["--set", "steps=2", "batch_size=2", "warmup=1", "layers=1", "dim=16", "heads=2", "head_dim=4",
             "mlp_dim=16", "max_length=32", "eval_batches=1"]  # fmt: skip
    arguments = ["--rows", "Combiner-Fixed-2k", *small]
    found = run_table("combiner.table2", data, tmp_path, *arguments, corpus="words", pieces=300)
    assert set(found) == {"Combiner-Fixed-2k"}
    text = (tmp_path / "table.md").read_text()
    assert "| 17.7 |" in text and "| Transformer-2k | not run | 17.26 |" in text
    before = (tmp_path / "combiner-fixed-2k-s0" / "metrics.jsonl").read_text()
    run_table("combiner.table2", data, tmp_path, *arguments, corpus="words", pieces=300)  # done: nothing runs again
    assert (tmp_path / "combiner-fixed-2k-s0" / "metrics.jsonl").read_text() == before


def test_image_tables_train(data, tmp_path):
    pytest.importorskip("timm")
    from experiments.images import Images, continued, weights_of
    from experiments.table import Row, run
    from weft.models import CRATE

    def make(size, classes):
        return CRATE(dim=16, heads=2, layers=1, image_size=size, patch=4, classes=classes, tied=True, scale=1.0)

    row = Row("tied", lambda: Images("test-tied", make, source="cifar10", size=16), paper={"accuracy": 63.3})
    arguments = ["--data", str(data), "--out", str(tmp_path), "--seeds", "0", "1", "--set", "accelerator=cpu"]
    recipe = dict(epochs=1, batch_size=6, optimizer="lion", learning_rate=1e-4, warmup=1)
    found = run("A table", [row], about="", metrics={"accuracy": 100}, recipe=recipe, arguments=arguments)
    assert [r["step"] for r in found["tied"]] == [6, 6]  # 36 of the 40 pictures train
    assert 0 <= found["tied"][0]["test"]["accuracy"] <= found["tied"][0]["test"]["top5"] <= 1
    assert "±" in (tmp_path / "table.md").read_text()
    trained = continued(make, tmp_path / "tied-s0")(16, 3)  # for another task: all but the head
    kept = weights_of(tmp_path / "tied-s0")
    assert trained.head.out_features == 3 and torch.equal(trained.blocks[0].ista.weight, kept["blocks.0.ista.weight"])
    with pytest.raises(ValueError, match="another model"):
        continued(lambda size, classes: torch.nn.Linear(2, 2), tmp_path / "tied-s0")(16, 3)


def test_a_folder_of_pictures_is_decoded_once(tmp_path):
    from PIL import Image

    images = importlib.import_module("experiments.images")
    for part, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("dark", "light")):
            (tmp_path / "pets" / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 30), (200 * label,) * 3).save(tmp_path / "pets" / part / name / f"{i}.png")
    found = images.load(str(tmp_path), "pets", 16, 4)
    assert found.facts["classes"] == 2 and (found.rows("train"), found.rows("val"), found.rows("test")) == (5, 1, 4)
    for split in (found.train, found.val, found.test):
        assert torch.equal((split["image"].float().mean((1, 2, 3)) > 100).long(), split["label"])
    assert (tmp_path / "pets-train-16.npy").exists()


def test_wide_pvt_has_the_papers_size():
    table = module("wide.table5")
    from experiments.images import timm_model

    sizes = {}
    for name, (options, _) in table.MODELS.items():
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in timm_model("pvt_v2_b1", **options)(224, 10).parameters())
    assert sizes["baseline"] == 13_501_130 and sizes["wide"] == 7_718_858


def test_the_attention_based_cache_sees_the_step_before():
    models = module("cached.models")
    from weft.models.pvt import SpatialReductionAttention

    layer = models.PreviousStep(SpatialReductionAttention(8, 2, reduction=2))
    x, other = torch.randn(2, 1, 16, 8)
    layer(other, (4, 4))
    changed = layer(x, (4, 4))
    again = models.both_steps(layer.inner, x, x, (4, 4))  # the same tokens twice change nothing
    plain = layer.eval()(x, (4, 4))
    assert torch.allclose(again, plain, atol=1e-6) and not torch.allclose(changed, plain, atol=1e-4)
    vit = pytest.importorskip("timm.layers").Attention(8, 2)
    assert torch.allclose(models.both_steps(vit, x, x), vit(x), atol=1e-6)


def test_swin_samples_the_last_layers_of_its_first_stages():
    table = module("subsampled.swin")
    for sampled in (0, 6, 10):
        model = table.Swin(64, 10, sampled=sampled, biased=False, dim=24)
        layers = [block.attention for stage in model.stages for block in stage]
        assert [layer.sampling is None for layer in layers] == [False] * (10 - sampled) + [True] * sampled + [False] * 2
    x = torch.randn(1, 3, 64, 64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    with torch.device("meta"):
        whole = table.Swin(224, 1000, sampled=10, biased=True)
    assert 28.2e6 < sum(p.numel() for p in whole.parameters()) < 28.6e6


def test_pictures_as_bytes_are_cut_between_pictures(data, monkeypatch):
    script = importlib.import_module("experiments.combiner.make_bytes")
    monkeypatch.setattr(sys, "argv", ["make_bytes", "--data", str(data)])
    script.main()
    content = (data / "cifar10.bytes").read_bytes()
    assert len(content) == 40 * 3072  # 38 training and 2 test pictures
    raw = np.frombuffer((data / "cifar-10-batches-bin" / "test_batch.bin").read_bytes(), np.uint8)[1:3073]
    first_test = np.frombuffer(content, np.uint8)[len(content) * 95 // 100 :][:3072].reshape(32, 32, 3)
    assert np.array_equal(first_test, raw.reshape(3, 32, 32).transpose(1, 2, 0))


def test_enwik8_trains_all_four_and_repeats_itself(data, tmp_path, monkeypatch):
    script = importlib.import_module("experiments.combiner.enwik8")
    small = "--length 24 --batch 2 --dim 16 --heads 2 --layers 2 --slots 4 --looks 1 --samples 2 --no-compile".split()
    small += "--ensemble-segments 1 --test-segments 1".split()
    for out in ("a", "b"):
        models = ["dense", "subsampled", "combiner-fixed", "cached"] if out == "a" else ["cached"]
        arguments = ["--text", str(data / "text"), "--out", str(tmp_path / out), "--steps", "6", "--models", *models]
        monkeypatch.setattr(sys, "argv", ["enwik8", *arguments, *small])
        script.main()
    found, again = (json.loads((tmp_path / out / "result.json").read_text())["models"] for out in ("a", "b"))
    assert found["cached"]["train_bits"] == again["cached"]["train_bits"]
    assert found["subsampled"]["before_dense_finish"]["step"] == 5
    assert "part, ensemble of 2" in found["subsampled"]["test"] and "part" not in found["dense"]["test"]
    assert found["cached"]["parameters"] > found["dense"]["parameters"] == found["subsampled"]["parameters"]
    assert all(r["train_bits"][-1] < r["train_bits"][0] for r in found.values())


def test_streams_read_on_where_they_stopped():
    script = importlib.import_module("experiments.combiner.enwik8")
    text = script.Streams(bytes(range(100)), rows=3, length=8, device=torch.device("cpu"))
    assert text.count == 4
    (x, y), (after, _) = text.segment(0), text.segment(1)
    assert torch.equal(y[:, :-1], x[:, 1:]) and torch.equal(after[:, 0], y[:, -1])


def test_transformer_xl_writes_its_memories(data, tmp_path):
    table = importlib.import_module("experiments.cached.table5")
    arguments = ["--size", "tiny", "--steps", "2", "--batch", "2", "--look-every", "2", "--out", str(tmp_path)]
    table.main(["--data", str(data / "words"), *arguments])
    found = json.loads((tmp_path / "result.json").read_text())
    assert all(math.isfinite(found[kind]["test_perplexity"]) for kind in ("baseline", "MT", "RMT", "GRC"))
    model = table.XL("RMT", 20, **table.SIZES["tiny"])
    ids = torch.randint(20, (2, 16))
    _, state = model(ids)
    model(ids, state)[0].sum().backward()
    assert model.tokens.grad.abs().sum() > 0 and state.shape == (2, table.TOKENS, 32)


def test_smiles():
    graph = importlib.import_module("experiments.subsampled.molecules")
    names = graph.ELEMENTS
    atoms, charges, bonds = graph.read_smiles("CC(=O)[O-]")
    assert [names[a] for a in atoms] == ["C", "C", "O", "O"] and charges == [0, 0, 0, -1]
    assert bonds == [(0, 1, 1), (1, 2, 2), (1, 3, 1)]
    atoms, _, bonds = graph.read_smiles("Clc1ccccc1C#N")
    assert len(atoms) == 9 and names[atoms[0]] == "Cl"
    assert sum(kind == 4 for *_, kind in bonds) == 6 and (1, 6, 4) in bonds and bonds[-1] == (7, 8, 3)
    nodes, edges = graph.graph("C1CC1.O")
    assert nodes.shape == (4, 2) and edges[0, 3] == 4 + graph.FAR and edges[0, 2] == 1 and edges[1, 1] == 4
