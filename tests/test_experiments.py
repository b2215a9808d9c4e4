"""The papers' tables: every file loads, and one tiny step of every kind of cell is trained on made-up data."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.lab.bench.exaflop import exaflop
from weft.lab.build import build_model
from weft.lab.loop import train
from weft.lab.report import report
from weft.lab.run import Run
from weft.lab.sweep import Cell, Sweep, is_sweep, load_sweep
from weft.tasks import TaskData, get_task, listops, make_config, pathfinder
from weft.tasks.base import StudyTask, TextClassification
from weft.tasks.registry import run_file
from weft.tasks.streams import in_streams
from weft.tasks.text import Bytes

pytest.importorskip("lightning")
ROOT = Path(__file__).resolve().parent.parent / "experiments"
FILES = sorted(ROOT.glob("*/*.py"))
SWEEPS = [file for file in FILES if is_sweep(file)]
RANGES = {"accuracy": (10, 100), "bits_per_byte": (0.9, 5), "bits_per_dimension": (2, 5), "perplexity": (3, 30),
          "box_ap": (30, 50), "box_ap50": (0, 100), "bleu": (25, 45), "mae": (0, 1), "rmse": (0.5, 2)}  # fmt: skip
SMALL = dict(
    dim=16, heads=2, head_dim=4, mlp_dim=16, layers=1, steps=1, warmup=0, batch_size=2, accumulate=1, eval_every=0,
    eval_batches=1, checkpoint_every=1, keep=1, finetune_dense_at=0.0, time_budget=0.0, ensemble=0, accelerator="cpu",
    compile=False, precision="32-true", preset="",
)  # fmt: skip
# Hosts whose width is not the config's, made small.
HOSTS = {
    "timm:vit": dict(depth=1, embed_dim=24, num_heads=2),
    "timm:swin": dict(depths=[1, 1, 1, 1], embed_dim=8, num_heads=[1, 2, 2, 2], window_size=2),
    "timm:pvt": dict(depths=[1, 1, 1, 1], embed_dims=[8, 8, 8, 8], num_heads=[1, 2, 2, 2]),
    "crate-": dict(dim=16, heads=2, layers=1),
    "swin": dict(dim=24, window=2),
}
# beginnings of tasks, models or optimizers -> the package they need
NEEDED = {
    ("timm:", "lion"): "timm",
    ("coco", "cifar10-mae-finetune"): "torchvision",
    ("coco",): "pycocotools",
    ("iwslt", "multi30k", "wiki40b", "c4"): "tokenizers",
    ("iwslt", "multi30k"): "sacrebleu",
    ("qm9", "multi30k", "esol", "freesolv", "lipo", "tiny-imagenet"): "pyarrow",
    ("qm9", "pcqm4mv2", "esol", "freesolv", "lipo"): "rdkit",
}


def module(name: str):
    return run_file(ROOT / f"{name}.py")


@cache
def sweep_of(file: Path) -> Sweep:
    return load_sweep(file)


def kind(cell: Cell) -> tuple:
    """Cells of one kind run the same code: the task, the family of the model, and what is done to it."""
    c = cell.config
    host = c.model.split("_")[0].partition("-")[0] if c.model.startswith(("timm", "pvt", "crate")) else c.model
    sampled = "subsampled" in c.attention or bool(c.subsample)
    task = {"tiny-imagenet-50": "imagenet", "pets": "flowers102"}.get(c.task, c.task)  # the same models
    name = "iwslt" if task.startswith("iwslt") else task
    return type(get_task(task)).__name__, name, host, bool(c.cache), sampled, bool(cell.start)


@cache
def kinds() -> dict[tuple, tuple[Path, Cell]]:
    found: dict[tuple, tuple[Path, Cell]] = {}
    for file in SWEEPS:
        for cell in sweep_of(file).cells:
            found.setdefault(kind(cell), (file, cell))
    # A cell that starts from other weights also runs all that the same cell runs without them.
    return {key: at for key, at in found.items() if key[-1] or (*key[:-1], True) not in found}


def test_every_experiment_file_is_used_and_documented():
    for file in FILES:
        text = (file.parent / "README.md").read_text()
        assert file.name in text, f"{file.parent.name}/README.md does not name {file.name}"
        assert "not been run" in text or "not run" in text
        loaded = run_file(file)
        assert is_sweep(file) or not hasattr(loaded, "main") or file.parent.name == "convert"  # no training run
        for task in getattr(loaded, "TASKS", ()):
            assert make_config(f"{file}:{task.name}").task == task.name  # its own settings are sound


@pytest.mark.parametrize("file", SWEEPS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_cell_of_every_sweep_builds_a_model(file):
    sweep = sweep_of(file)
    names = [(cell.row, cell.column) for cell in sweep.cells]
    assert len(set(names)) == len(names)
    assert "arxiv.org" in sweep.about
    low, high = RANGES[sweep.metric]
    assert all(cell.paper is None or low <= cell.paper <= high for cell in sweep.cells)
    built = set()
    for cell in sweep.cells:
        if "/" in cell.start:
            other, _, slug = cell.start.rpartition("/")
            assert slug in {c.slug for c in sweep_of(file.with_name(f"{other}.py")).cells}
        config, task = cell.config, get_task(cell.config.task)
        what = (config.task, config.attention, config.attention_options, config.cache, config.subsample, config.pooling)
        if what in built or not isinstance(task, (StudyTask, TextClassification, Bytes)) or config.task_file:
            continue
        built.add(what)
        heads, layers = 8 if config.attention == "mixed" else 2, 16 if config.subsample else 1
        small = dataclasses.replace(config, **{**SMALL, "heads": heads, "layers": layers})
        documents = 2 if config.task == "matching" else 1
        build_model(small, TaskData({}, {}, {}, 64, {"vocab": 257, "classes": 10}, documents=documents))


def test_listops_sweep_matches_the_paper():
    sweep = load_sweep(ROOT / "wide/listops.py")
    cell = next(c for c in sweep.cells if (c.row, c.column) == ("full", "wide 1x48"))
    c = cell.config
    assert (c.layers, c.heads, c.head_dim, c.dim, c.mlp_dim, c.batch_size) == (1, 48, 64, 512, 2048, 32)
    assert (c.steps, c.warmup, c.learning_rate, c.schedule, c.optimizer) == (10_000, 1000, 0.05, "inverse_sqrt", "adam")
    assert cell.paper == 37.2 and sweep.seeds == (0, 1, 2)
    whole = load_sweep(ROOT / "wide/table4.py")
    figures = {(c.row, c.config.layers): c.paper for c in whole.cells if c.config.task == "listops"}
    assert all(c.paper in (None, figures.get((c.row, c.config.layers))) for c in sweep.cells)


def test_density_model_has_the_cost_of_table_7():
    """Table 7 of the subsampled paper: 23.8 exaFLOP for the dense model, 100,000 steps of 128 images."""
    sweep = sweep_of(ROOT / "subsampled/cifar10_generation.py")
    config = next(cell.config for cell in sweep.cells if cell.row == "S16-L4")
    with torch.device("meta"):
        facts = TaskData({}, {}, {}, length=3072, facts={"vocab": get_task(config.task).vocab})
        model = get_task(config.task).model(config, facts).eval()
        cost = exaflop(model, (torch.zeros(1, 3072, dtype=torch.long),), config.steps * config.batch_size)
    assert abs(cost - 23.8) < 0.1


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A little of everything, in the makers' layouts."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    listops.make(folder, sizes={"train": 4, "val": 2, "test": 2})
    pathfinder.make(folder, size=32, difficulty="medium", seed=0, count=20, workers=1)
    for part in ("train", "test"):
        for label in ("pos", "neg"):
            (folder / "aclImdb" / part / label).mkdir(parents=True)
            for i in range(10):
                (folder / "aclImdb" / part / label / f"{i}_7.txt").write_text(f"a film about {label} {i} films")
    (folder / "aan").mkdir()
    for part in ("train", "eval", "test"):
        rows = [f"{i % 2}.0\t{i}\t{i + 1}\tb'one paper'\tb'another paper'" for i in range(4)]
        (folder / "aan" / f"new_aan_pairs.{part}.tsv").write_text("\n".join(rows) + "\n")
    cifar = folder / "cifar-10-batches-bin"
    cifar.mkdir()
    (folder / "cifar-100-binary").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = np.concatenate([np.arange(4)[:, None], generator.integers(0, 256, (4, 3072))], 1)
        (cifar / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    for name in ("train", "test"):
        rows = np.concatenate([np.arange(20)[:, None]] * 2 + [generator.integers(0, 256, (20, 3072))], 1)
        (folder / "cifar-100-binary" / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    (folder / "imagenet64").mkdir()
    for name in (*(f"train_data_batch_{i}" for i in range(1, 11)), "val_data"):
        np.savez(folder / "imagenet64" / f"{name}.npz", data=generator.integers(0, 256, (1, 12_288)).astype(np.uint8))
    text = "the same few words and then the same few words again \n" * 30
    for corpus in ("wiki40b", "c4", "wikitext-103"):
        (folder / corpus).mkdir()
        for part in ("train", "valid", "test"):
            (folder / corpus / f"{part}.txt").write_text(text)
    (folder / "text").write_bytes(text.encode() * 2)
    for corpus, classes in (("imagenet", 3), ("imagenet22k", 2), ("flowers102", 2), ("pets", 2)):
        for part, count in (("train", 3), ("val", 1)):
            for label in range(classes):
                (folder / corpus / part / str(label)).mkdir(parents=True)
                for i in range(count):
                    picture = Image.new("RGB", (40, 36), (80 * label,) * 3)
                    picture.save(folder / corpus / part / str(label) / f"{i}.png")
    (folder / "iwslt14.de-en").mkdir()
    for part in ("train", "valid", "test"):
        for side in ("de", "en"):
            (folder / "iwslt14.de-en" / f"{part}.{side}").write_text(f"the {side} of it\n" * 4)
    (folder / "pcqm4m-v2" / "raw").mkdir(parents=True)
    with gzip.open(folder / "pcqm4m-v2" / "raw" / "data.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("idx", "smiles", "homolumogap")] + [(i, "C" * (1 + i % 3) + "O", i) for i in range(20)])
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        values = [float(i) for i in range(20)]
        for name, column in (("qm9", "gap"), ("delaney", "logSolubility"), ("freesolv", "freesolv"), ("lipo", "lipo")):
            table = {"smiles": ["C" * (1 + i % 3) for i in range(20)], column: values}
            parquet.write_table(arrow.table(table), folder / f"{name}.parquet")
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), (90, 0, 0)).save(buffer, "PNG")
        pictures = {"image": [buffer.getvalue()] * 8, "label": [i % 4 for i in range(8)]}
        parts = arrow.table({**pictures, "split": ["train"] * 6 + ["val"] * 2})
        parquet.write_table(parts, folder / "tiny-imagenet-50.parquet")
        captions = {"split": ["train"] * 4 + ["validation"] * 2 + ["test"] * 2, "de": ["ein Hund"] * 8}
        parquet.write_table(arrow.table({**captions, "en": ["a dog"] * 8}), folder / "multi30k.parquet")
    except ImportError:
        pass
    (folder / "coco" / "annotations").mkdir(parents=True)
    for part in ("train2017", "val2017"):
        (folder / "coco" / part).mkdir()
        images = [{"id": i, "file_name": f"{i}.jpg", "width": 64, "height": 48} for i in range(4)]
        box = {"bbox": [8, 8, 24, 24], "segmentation": [[8, 8, 32, 8, 32, 32, 8, 32]], "category_id": 1, "area": 576}
        objects = [{"id": i + 1, "image_id": i, "iscrowd": 0, **box} for i in range(4)]
        about = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "box"}], "info": {}}
        (folder / "coco" / "annotations" / f"instances_{part}.json").write_text(json.dumps(about))
        for image in images:
            Image.new("RGB", (64, 48), (200, 0, 0)).save(folder / "coco" / part / image["file_name"])
    return folder


def shrunk(cell: Cell, data: Path):
    """The cell's config, small enough for one step on one core."""
    config, place = cell.config, data
    changes: dict = {name: value for name, value in SMALL.items() if name not in get_task(config.task).unread(config)}
    if config.task.startswith("enwik8"):  # which is refused when it is not whole
        changes |= {"task": config.task.replace("enwik8", "text"), "max_length": 32}
    if changes.get("task", config.task).startswith(("text", "masked")):
        place = data / "text"
    if config.task.startswith(("listops", "imdb", "matching", "wiki", "c4", "iwslt", "multi30k", "text")):
        changes["max_length"] = 64 if config.task == "imdb-token" else 32
    if config.eval_stride:
        changes["eval_stride"] = 8
    if config.task.startswith("transformer-xl"):
        changes["max_length"] = 8
    if config.subsample:
        changes["layers"] = 2
        changes["subsample"] = "Sall-L2"
    if config.attention == "mixed":
        changes["heads"] = 8
    if config.task.startswith(("wiki", "c4", "text", "enwik8")):
        changes["attention_options"] = ""
    if config.cache and "length" in config.options("cache_options") and config.task.startswith("enwik8"):
        changes["cache_options"] = json.dumps({**config.options("cache_options"), "length": 8})
    for name, options in HOSTS.items():
        if config.model.startswith(name):
            changes["model_options"] = json.dumps({**config.options("model_options"), **options})
    if config.model.startswith(("timm", "pvt", "crate-", "swin")):
        changes["image_size"] = 32
    if config.model == "swin":
        changes["image_size"] = 64
    if config.model.startswith("timm:vit") and "patch_size" not in config.model_options:
        changes["image_size"] = 32
    if config.task.startswith("coco"):
        options = {"min_size": 64, "max_size": 64}
        if "mask-rcnn" in config.task:
            fewer = ("rpn_post_nms_top_n_train", "rpn_post_nms_top_n_test", "box_detections_per_img")
            options |= dict.fromkeys(fewer, 8)
        changes |= {"image_size": 32, "model_options": json.dumps(options)}
    return dataclasses.replace(config, data=str(place), **changes)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Train the small form of a cell, and before it the one it starts from; the result and where it lies."""
    done: dict = {}
    out = tmp_path_factory.mktemp("runs")

    def once(file: Path, cell: Cell):
        if (file, cell.slug) not in done:
            config = shrunk(cell, data)
            config.out = str(out / f"{file.parent.name}-{file.stem}-{cell.slug}")
            if cell.start:
                other, _, slug = cell.start.rpartition("/")
                there = file.with_name(f"{other}.py") if other else file
                first = next(c for c in sweep_of(there).cells if c.slug == slug)
                config.init_from = str(once(there, first).folder)
            done[file, cell.slug] = train(config)
        return done[file, cell.slug]

    return once


@pytest.mark.parametrize("key", kinds(), ids=lambda key: "-".join(str(part) for part in key))
def test_every_kind_of_cell_trains_one_step(run, key):
    file, cell = kinds()[key]
    for prefixes, package in NEEDED.items():
        if any(text.startswith(prefixes) for text in (cell.config.model, cell.config.task, cell.config.optimizer)):
            pytest.importorskip(package)
    result = run(file, cell)
    metric = get_task(cell.config.task).metric
    assert result.steps == 1 and math.isfinite(result.test[metric])
    loss = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert math.isfinite(loss)
    shown = report([result.folder], result.folder / "report.html").read_text("utf-8")
    assert ("Detected objects" in shown) == cell.config.task.startswith("coco")


def test_fine_tuning_starts_from_pretrained_weights(run):
    pytest.importorskip("timm")
    from weft.lab.saving import saved_weights

    file = ROOT / "crate/table1.py"
    cells = {(cell.row, cell.column): cell for cell in sweep_of(file).cells}
    first, second = (
        saved_weights(Run(run(file, cells["CRATE-T", column]).folder), "last")[0] for column in ("ImageNet", "CIFAR-10")
    )
    name = "model/model.blocks.0.ista.weight"
    assert (first[name] - second[name]).abs().max() < 1e-3  # one step away
    head = next(name for name in first if name.startswith("model/model.head") and name.endswith("weight"))
    assert first[head].shape[0] == 3 and second[head].shape[0] == 10


def test_wide_pvt_has_the_papers_size():
    pytest.importorskip("timm")
    from weft.tasks.images import timm_model

    sizes = {}
    for name, (options, _) in module("wide/table5").MODELS.items():
        with torch.device("meta"):
            model = timm_model("pvt_v2_b1", 224, num_classes=10, **options)
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert sizes["baseline"] == 13_501_130 and sizes["wide"] == 7_718_858


def test_crate_and_vit_have_equal_size():
    pytest.importorskip("timm")
    facts = {"size": 32, "classes": 10, "mean": [0.5] * 3, "std": [0.5] * 3}
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in get_task("cifar10").model(c.config, TaskData({}, {}, {}, 64, facts)).parameters())
            for c in sweep_of(ROOT / "crate/cifar10.py").cells
        ]
    assert sizes[:2] == [5_381_098, 5_362_762]


def test_attention_cache_reads_the_previous_step():
    models = module("cached/table2")
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
    table = module("subsampled/swin")
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


def test_the_dense_finish_begins_at_the_step_of_the_authors():
    for name, first in (("wikitext103", 52_500), ("enwik8", 7200)):
        configs = [cell.config for cell in sweep_of(ROOT / f"subsampled/{name}.py").cells]
        assert {c.steps * c.finetune_dense_at for c in configs} == {0, first}


def test_swin_starts_with_the_weights_of_swin():
    torch.manual_seed(0)
    model = module("subsampled/swin").Swin(64, 10, sampled=10, biased=True)
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(layer.weight.std().item() == pytest.approx(0.02, rel=0.05) for layer in linear)
    assert not any(layer.bias.any() for layer in linear if layer.bias is not None)


def test_swin_trains_as_swin_does():
    """300 epochs, 20 of them for the warm-up, and a cosine to a hundredth."""
    for cell in sweep_of(ROOT / "subsampled/swin.py").cells:
        config = cell.config
        assert config.warmup / config.steps == pytest.approx(20 / 300, rel=1e-4) and config.steps == 372_412
        assert (config.learning_rate, config.final_learning_rate, config.schedule) == (1e-3, 1e-5, "cosine")


def test_streams_resume_at_their_position():
    rows = in_streams(np.arange(100), streams=3, length=8)
    assert rows.shape == (12, 9)
    first, second = rows[:3], rows[3:6]
    assert torch.equal(second[:, 0], first[:, -1]) and torch.equal(first[:, 0], torch.tensor([0, 32, 64]))


@pytest.mark.parametrize("kind", ["baseline", "RMT", "GRC"])
def test_transformer_xl_memory_survives_evaluation(kind):
    file = ROOT / "cached/table5.py"
    table = module("cached/table5")
    cell = next(c for c in sweep_of(file).cells if c.column == kind)
    config = dataclasses.replace(cell.config, **SMALL)
    task = next(t for t in table.TASKS if t.kind == kind)
    model = table.XL(kind, 20, config, 8)
    ids = torch.randint(20, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = {"bytes": ids[:, :9]}, {"bytes": ids[:, 8:]}
    task.loss(model, batch[0], config).backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        remembering = model(*task.inputs(batch[1]))
        model.load_state_dict(before)
        with task.evaluating(model):
            forgetful = model(*task.inputs(batch[1]))
    assert not torch.allclose(remembering, forgetful, atol=1e-6)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    task.restart(model)
    assert not len(model.memory)
    if kind == "RMT":  # what is written is read by the next segment, with a gradient
        model.zero_grad()
        model.train()(ids[:, :16], ids[:, 1:])[:, 8:].sum().backward()
        assert model.tokens.grad.abs().sum() > 0


def test_stateful_models_resume_exactly(data, tmp_path):
    """Its memory is saved with it, and an evaluation in between leaves no trace."""
    cell = next(c for c in sweep_of(ROOT / "cached/table5.py").cells if c.column == "baseline")
    small = dataclasses.replace(shrunk(cell, data), schedule="constant", dropout=0.1)
    whole = dataclasses.replace(small, steps=4, out=str(tmp_path / "whole"))
    cut = dataclasses.replace(small, steps=2, eval_every=1, out=str(tmp_path / "cut"))
    train(whole)
    train(cut)
    train(dataclasses.replace(cut, steps=4), resume=True)
    losses = [[entry["loss"] for entry in Run(tmp_path / name).entries("train")] for name in ("whole", "cut")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_picture_is_predicted_from_a_start_token(data):
    task, config = get_task("cifar10-density"), make_config("cifar10-density", data=str(data))
    found = task.load(config)
    assert found.length == 3072 and found.rows("test") == 4
    raw = np.frombuffer((data / "cifar-10-batches-bin" / "test_batch.bin").read_bytes(), np.uint8)[1:3073]
    batch = task.batch(found.test, config, torch.Generator(), training=False)
    assert batch["bytes"].shape == (4, 3073) and int(batch["bytes"][0, 0]) == 256
    picture = batch["bytes"][0, 1:].reshape(32, 32, 3).numpy()
    assert np.array_equal(picture, raw.reshape(3, 32, 32).transpose(1, 2, 0))


def test_image_grids(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    from weft.tasks import cifar

    (tmp_path / "cifar10").mkdir()
    images = np.random.default_rng(1).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    sheet = images.reshape(2, 20, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 640, 3)
    for name in ("train_0", "train_1", "test"):
        Image.fromarray(sheet).save(tmp_path / "cifar10" / f"{name}.webp", lossless=True)
    np.save(tmp_path / "cifar10" / "train_labels.npy", np.arange(80))
    np.save(tmp_path / "cifar10" / "test_labels.npy", np.arange(40))
    (train, _), (test, labels) = cifar.read(str(tmp_path), 10)
    assert np.array_equal(train, np.concatenate([images, images])) and np.array_equal(test, images)
    assert np.array_equal(labels, np.arange(40))


def test_image_folders_are_decoded_once(data):
    found = get_task("pets").load(make_config("pets", data=str(data), image_size=16))
    assert found.facts["classes"] == 2 and (found.rows("train"), found.rows("val"), found.rows("test")) == (5, 1, 2)
    for split in (found.train, found.val, found.test):
        assert torch.equal((split["image"].float().mean((1, 2, 3)) > 40).long(), split["label"])
    assert (data / "pets-train-16.npy").exists()
