"""Readers read the published layouts, and damaged data is rejected."""

import io
import itertools
import json
import lzma
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.lab import make_config
from weft.tasks import (
    DataMissing,
    TaskData,
    cifar,
    density,
    fetch,
    get_task,
    images,
    imdb,
    tasks,
    text,
)
from weft.tasks.registry import file_of

SMALL = dict(layers=1, heads=2, head_dim=4, dim=8, mlp_dim=8, batch_size=2, dropout=0.0)


def write_reviews(root: Path, n: int = 20) -> None:
    for split in ("train", "test"):
        for kind in ("neg", "pos"):
            folder = root / "aclImdb" / split / kind
            folder.mkdir(parents=True)
            for i in range(n):
                (folder / f"{i}_{7 if kind == 'pos' else 2}.txt").write_text(f"A {kind} film, no. {i}: café_{split}")


def test_imdb_from_folder_and_from_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    write_reviews(tmp_path)
    train, test = imdb.read(str(tmp_path))
    (tmp_path / "p").mkdir()
    rows = [(t, y, "train") for t, y in train] + [(t, y, "test") for t, y in test]
    columns = dict(zip(("text", "label", "split"), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table({k: list(v) for k, v in columns.items()}), tmp_path / "p" / "imdb.parquet")
    assert imdb.read(str(tmp_path / "p")) == (train, test)

    data = get_task("imdb-byte").load(make_config("imdb-byte", data=str(tmp_path), max_length=12))
    assert [data.rows(s) for s in ("train", "val", "test")] == [36, 4, 40]
    row = data.test["ids"][0]
    assert bytes((row[row > 0] - 1).tolist()) == test[0][0].encode()[:12]

    data = get_task("imdb-token").load(make_config("imdb-token", data=str(tmp_path), max_length=4))
    words = data.vocabulary
    assert words[:2] == ["<pad>", "<unknown>"] and "café_train" in words and "café_test" not in words
    assert [words[i] for i in data.test["ids"][0]] == ["A", "neg", "film", "no"]
    assert data.facts["vocab"] == len(words)


def test_imdb_missing_and_damaged(tmp_path):
    with pytest.raises(DataMissing, match="no such folder.*weft data get imdb"):
        imdb.read(str(tmp_path / "nowhere"))
    write_reviews(tmp_path)
    for file in (tmp_path / "aclImdb" / "test" / "pos").iterdir():
        file.unlink()
    with pytest.raises(DataMissing, match="test/pos has no reviews"):
        imdb.read(str(tmp_path))
    (tmp_path / "imdb.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataMissing, match="damaged"):
        imdb.read(str(tmp_path))


def test_matching_reads_pairs(tmp_path):
    folder = tmp_path / "aan"
    folder.mkdir()
    for part in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{part}.tsv").write_text("1.0\tA\tB\tone text\tanother\n0.0\tC\tD\tx\tyz\n")
    config = make_config("matching", data=str(tmp_path), max_length=6, **SMALL)
    task = get_task("matching")
    data = task.load(config)
    assert bytes((data.val["first"][0] - 1).tolist()) == b"one te" and data.val["label"].tolist() == [1, 0]
    assert data.val["second"][1].tolist() == [ord("y") + 1, ord("z") + 1, 0, 0, 0, 0]
    logits = task.model(config, data)(*task.inputs(data.test))
    assert logits.shape == (2, 2)
    (folder / "new_aan_pairs.test.tsv").write_text("1.0\tA\tB\tone text\n")
    with pytest.raises(DataMissing, match="line 1 has 4 columns"):
        task.load(config)


def write_cifar(root: Path, n: int = 12) -> np.ndarray:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (6 * n, 3073), dtype=np.uint8)
    rows[:, 0] = np.arange(6 * n) % 10
    for i, name in enumerate([*(f"data_batch_{j}.bin" for j in range(1, 6)), "test_batch.bin"]):
        (folder / name).write_bytes(rows[i * n : (i + 1) * n].tobytes())
    return rows


def test_cifar_as_pixels_and_as_images(tmp_path):
    rows = write_cifar(tmp_path)
    data = get_task("cifar10-pixels").load(make_config("cifar10-pixels", data=str(tmp_path)))
    red, green, blue = (rows[60, 1 + c * 1024].astype(float) for c in range(3))
    assert abs(int(data.test["ids"][0, 0]) - 1 - (0.2989 * red + 0.587 * green + 0.114 * blue)) <= 0.51
    task = get_task("cifar10")
    config = make_config("cifar10", data=str(tmp_path), patch=8, **SMALL)
    data = task.load(config)
    assert torch.equal(data.test["image"][3].flatten(), torch.from_numpy(rows[63, 1:]))
    assert data.rows("train") + data.rows("val") == 60
    model = task.model(config, data).eval()
    assert model(*task.inputs(data.test)).shape == (12, 10)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(b"cut off")
    with pytest.raises(DataMissing, match="data_batch_3.bin cannot be used"):
        task.load(config)


def test_cifar100_and_parquet(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa
    from PIL import Image

    rows = np.random.default_rng(1).integers(0, 100, (20, 3074), dtype=np.uint8)
    (tmp_path / "cifar-100-binary").mkdir()
    for name in ("train.bin", "test.bin"):
        (tmp_path / "cifar-100-binary" / name).write_bytes(rows.tobytes())
    (images_, labels), _ = cifar.read(str(tmp_path), 100)
    assert np.array_equal(labels, rows[:, 1]) and np.array_equal(images_[0].ravel(), rows[0, 2:])

    def encoded(picture):
        file = io.BytesIO()
        Image.fromarray(picture.transpose(1, 2, 0)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    table = {
        "image": [encoded(p) for p in images_] * 2,
        "label": labels.tolist() * 2,
        "split": ["train"] * 20 + ["test"] * 20,
    }
    (tmp_path / "p").mkdir()
    pq.write_table(pa.table(table), tmp_path / "p" / "cifar100.parquet")
    (again, same), _ = cifar.read(str(tmp_path / "p"), 100)
    assert np.array_equal(again, images_) and np.array_equal(same, labels)


def test_crop_and_flip_transforms_whole_images():
    picture = torch.arange(8 * 8).view(1, 1, 8, 8).expand(64, 3, 8, 8).to(torch.uint8) + 1
    moved = images.crop_and_flip(picture, torch.Generator().manual_seed(0))
    seen = set()
    for row in moved[:, 0]:
        inner = row[1:7, 1:7].int()
        step = int(inner[0, 1] - inner[0, 0])
        assert step in (1, -1) and (inner[1:] - inner[:-1] == 8).all()
        seen.add((step, int(inner[0, 0])))
    assert len(seen) > 9  # shifts by up to one pixel each way, mirrored or not: 18 in all


def test_imagefolder(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, n in (("train", 20), ("val", 3)):
        for kind in ("cat", "dog"):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            for i in range(n):
                Image.fromarray(rng.integers(0, 256, (10, 14, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    task = get_task("imagefolder")
    config = make_config("imagefolder", data=str(tmp_path), image_size=8, **SMALL)
    data = task.load(config)
    assert [data.rows(s) for s in ("train", "val", "test")] == [38, 2, 6]
    assert task.model(config, data)(data.test["image"]).shape == (6, 2)
    (tmp_path / "val" / "cat" / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataMissing, match="0.png cannot be used"):
        task.load(config)


def test_text_windows_cover_the_text_and_are_views(tmp_path):
    content = bytes(range(256)) * 8
    (tmp_path / "some.txt").write_bytes(content)
    config = make_config("text", data=str(tmp_path / "some.txt"), max_length=16, **SMALL)
    data = get_task("text").load(config)
    rows = data.train["bytes"]
    assert bytes(rows[:, :16].flatten().tolist()) == content[: rows.shape[0] * 16]
    assert torch.equal(rows[0, 16], rows[1, 0])  # each window also sees the byte it must predict last
    assert rows.untyped_storage().nbytes() <= len(content)
    with pytest.raises(DataMissing, match="lower --max-length"):
        get_task("text").load(make_config("text", data=str(tmp_path / "some.txt"), max_length=4096, **SMALL))


@pytest.mark.parametrize("kind", ["plain", "xz", "zip"])
def test_compressed_text_is_read(tmp_path, kind):
    content = b"the quick brown fox " * 50
    path = tmp_path / {"plain": "t", "xz": "t.xz", "zip": "t.zip"}[kind]
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("t", content)
    else:
        path.write_bytes(lzma.compress(content) if kind == "xz" else content)
    assert text.read_bytes(path) == content


def test_a_modified_enwik8_is_rejected(tmp_path):
    (tmp_path / "enwik8").write_bytes(b"x" * 1000)
    with pytest.raises(DataMissing, match="1,000 bytes, enwik8 has 100,000,000"):
        get_task("enwik8").load(make_config("enwik8", data=str(tmp_path)))


def test_masking_hides_the_chosen_tokens():
    task = get_task("masked")
    config = make_config("masked", mask_rate=0.25)
    rows = {"bytes": torch.randint(0, 256, (400, 40)).to(torch.uint8)}
    batch = task.batch(rows, config, torch.Generator().manual_seed(0), training=True)
    assert batch["chosen"].shape == (400, 10)
    assert torch.equal(rows["bytes"].long().gather(1, batch["chosen"]), batch["target"])
    shown = batch["ids"].gather(1, batch["chosen"])
    assert abs((shown == 256).float().mean() - 0.8) < 0.03
    assert abs((shown == batch["target"]).float().mean() - 0.1) < 0.03
    untouched = torch.ones(400, 40).scatter(1, batch["chosen"], 0).bool()
    assert torch.equal(batch["ids"][untouched], rows["bytes"].long()[untouched])
    for name in ("masked", "c4-masked"):
        with pytest.raises(ValueError, match="mask_rate must be more than 0"):
            make_config(name, mask_rate=0.0)


def test_fetching_from_the_hub(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")

    def load_dataset(name, split):
        assert name == "stanfordnlp/imdb"
        table = pa.table({"text": [f"{split} {i}" for i in range(4)], "label": [0, 1, 0, 1]})
        return types.SimpleNamespace(data=types.SimpleNamespace(table=table))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    fetch.get("imdb", tmp_path)
    train, test = imdb.read(str(tmp_path))
    assert train[1] == ("train 1", 1) and len(test) == 4
    with pytest.raises(DataMissing, match="already exists"):
        fetch.get("imdb", tmp_path)
    with pytest.raises(DataMissing, match="cannot download"):
        fetch.get("matching", tmp_path)
    with pytest.raises(DataMissing, match="cannot generate"):
        fetch.make("imdb", tmp_path)


def test_every_task_has_a_config_and_an_error_without_data(tmp_path):
    for name in (name for name in tasks() if not file_of(name)):  # other tests may have loaded files
        task = get_task(name)
        for preset in ["", *task.presets]:
            config = make_config(name, preset=preset, data=str(tmp_path / "none"))
        if name == "digits":
            continue
        with pytest.raises(DataMissing):
            task.load(config)
    with pytest.raises(ValueError, match="did you mean 'listops'"):
        get_task("listop")
    with pytest.raises(TypeError, match="did you mean 'layers'"):
        make_config("digits", layer=3)
    with pytest.raises(ValueError, match="its presets: deep, wide"):
        make_config("digits", preset="tall")


@pytest.mark.parametrize(
    "task, given",
    [
        ("multi30k-de-en", {"attention": "linear"}),
        ("multi30k-de-en", {"positions": "rope"}),
        ("coco-mask-rcnn", {"attention": "linear"}),
        ("coco-retinanet", {"label_smoothing": 0.1}),
        ("qm9-gap", {"head_dim": 8}),
        ("cifar10", {"layers": 3, "model": "crate-tiny"}),
        ("cifar10", {"patch": 8, "model": "pvt-tiny"}),
        ("cifar10", {"pooling": "mean", "model": "timm:vit_tiny_patch16_224"}),
        ("cifar10", {"attention_dropout": 0.3, "model": "crate"}),
        ("imdb-token", {"model_options": '{"depth": 3}'}),
    ],
)
def test_settings_that_a_model_does_not_read_are_refused(task, given):
    with pytest.raises(ValueError, match=f"--{next(iter(given)).replace('_', '-')} has no effect on --model"):
        make_config(task, **given)


def test_distribution_augmentation_sets_the_start_token():
    """Jun et al. 2020: p(f(x) | f) in training, f = identity in evaluation."""
    task = get_task("cifar10-density-augmented")
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 32, 32)).astype(np.uint8)
    rows = {"bytes": density.as_rows(np.repeat(image, 400, 0))}
    config, generator = make_config(task.name), torch.Generator().manual_seed(0)
    same = task.batch(rows, config, generator, training=False)["bytes"]
    assert (same[:, 0] == 256).all() and torch.equal(same[:, 1:], rows["bytes"].long())
    found = task.batch(rows, config, generator, training=True)["bytes"]
    seen = {}
    for row in found:
        picture = row[1:].view(32, 32, 3).numpy()
        assert seen.setdefault(int(row[0]), picture.tobytes()) == picture.tobytes()
    assert set(seen) == set(range(256, 304)) and len(set(seen.values())) == 48
    plain = image[0].transpose(1, 2, 0).astype(np.int64)
    turned = {
        np.ascontiguousarray(flip(np.rot90(plain, k))[..., list(order)]).tobytes()
        for k in range(4)
        for flip in (lambda a: a, lambda a: a.transpose(1, 0, 2))
        for order in itertools.permutations(range(3))
    }
    assert set(seen.values()) == turned and seen[256] == plain.tobytes()


@pytest.mark.parametrize("attention", ["full", "combiner-fixed", "linear"])
def test_images_are_sampled_with_the_decoding_form(attention):
    """At temperature 0, every byte is the most likely one after the bytes before it."""
    from weft.models import LanguageModel

    torch.manual_seed(0)
    sizes = dict(dim=16, heads=2, head_dim=8, layers=2, mlp_dim=16, dropout=0.0)
    model = LanguageModel(257, max_length=12, positions="learned", attention=attention, **sizes).double().eval()
    model.scores.weight.data *= 50
    images = density.draw(model, 2, 3, 0.0)
    assert images.shape == (3, 2, 2, 3) and torch.equal(images[0], images[1])
    content = images[:1].view(1, 12).long()
    logits = model(torch.cat([torch.full((1, 1), density.START), content[:, :-1]], 1))
    assert torch.equal(logits[..., :256].argmax(-1), content)
    varied = density.draw(model, 2, 40, 1.0, torch.Generator().manual_seed(0))
    assert len({bytes(image.numpy()) for image in varied}) > 5
    page = np.asarray(density.sheet(images))
    assert page.shape == (7, 7, 3) and np.array_equal(page[1:3, 4:6], images[1].numpy()) and (page[4:, 4:] == 255).all()
    data = TaskData({}, {}, {"bytes": content.to(torch.uint8).expand(20, -1)}, 12)
    (gallery,) = density.Density("tiny", "", 2).galleries(model, data, make_config("cifar10-density"))
    (samples, _), (real, _) = gallery.images
    assert samples.shape == real.shape == (13, 13, 3) and torch.equal(real[1:3, 4:6], images[0])


def test_samples_go_to_a_new_folder_and_bad_names_are_refused_before_drawing(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    from PIL import Image
    from runs import weft

    from weft.lab import trained
    from weft.models import LanguageModel

    model = LanguageModel(257, max_length=12, positions="learned", dim=8, heads=2, head_dim=4, layers=1, mlp_dim=8)
    found = types.SimpleNamespace(model=model.eval(), task=density.Density("tiny", "", 2))
    monkeypatch.setattr(trained, "load", lambda run, which, device: found)
    (tmp_path / "run").mkdir()
    command = ["sample", tmp_path / "run", "--count", 4, "--device", "cpu", "--out"]
    made = weft(*command, tmp_path / "new" / "four.png")
    assert made.exit_code == 0, made.output
    assert Image.open(tmp_path / "new" / "four.png").size == (7, 7)
    monkeypatch.setattr(density, "draw", lambda *given: pytest.fail("images were drawn"))
    for name in ("new", "four", "four.pgn"):
        refused = weft(*command, tmp_path / name)
        assert refused.exit_code == 2 and "must be an image file" in refused.output


def test_tiny_imagenet_from_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from PIL import Image
    from pyarrow.parquet import write_table

    def jpeg(shade, side=64):
        file = io.BytesIO()
        Image.new("RGB", (side, side), (shade,) * 3).save(file, "JPEG")
        return file.getvalue()

    columns = {
        "image": [jpeg(5 * i) for i in range(24)],
        "label": [i % 3 for i in range(24)],
        "split": ["train"] * 20 + ["val"] * 4,
    }
    table = arrow.table(columns).replace_schema_metadata({"classes": json.dumps(["a", "b", "c"] + ["x"] * 47)})
    path = tmp_path / "tiny-imagenet-50.parquet"
    write_table(table, path)
    config = make_config("tiny-imagenet-50", data=str(tmp_path), **SMALL)
    data = get_task("tiny-imagenet-50").load(config)
    assert [data.rows(part) for part in ("train", "val", "test")] == [19, 1, 4]
    assert data.classes[:3] == ["a", "b", "c"] and data.test["label"].tolist() == [2, 0, 1, 2]
    shade = data.test["image"].float().mean((1, 2, 3))
    assert torch.allclose(shade, torch.tensor([100.0, 105, 110, 115]), atol=3)
    both = torch.cat([data.train["image"], data.val["image"]]).float().mean((1, 2, 3)).div(5).round().sort().values
    assert both.tolist() == list(range(20))
    columns["image"][3] = jpeg(9, side=32)
    write_table(arrow.table(columns), path)
    with pytest.raises(DataMissing, match="row 3 has 32 x 32 pixels"):
        get_task("tiny-imagenet-50").load(config)
