"""Your own images: folders of classes."""

from __future__ import annotations

import shutil

import pytest
import torch
from own_data import load

from weft.cli.predict import read_examples
from weft.tasks import DataMissing, get_task, make_config

pytest.importorskip("lightning")


@pytest.fixture
def pictures(tmp_path):
    from PIL import Image

    for kind, colour in (("cat", (200, 0, 0)), ("dog", (0, 0, 200))):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (20, 10 + i), colour).save(tmp_path / f"pictures/{kind}/{i}.jpg")
    place = tmp_path / "pictures" / "cat"
    Image.new("RGBA", (12, 12), (0, 0, 0, 0)).save(place / "clear.png")
    Image.new("L", (12, 12), 128).save(place / "grey.webp")
    Image.new("RGB", (12, 12), (0, 200, 0)).convert("P").save(place / "palette.GIF")
    Image.fromarray(torch.full((12, 12), 32896, dtype=torch.int32).numpy().astype("uint16")).save(place / "deep.tif")
    (place / "notes.txt").write_text("not an image")
    return tmp_path / "pictures"


def test_a_folder_of_mixed_images(pictures, tmp_path):
    data = load("images", pictures, image_size=8)
    assert data.classes == ["cat", "dog"] and [data.rows(s) for s in ("train", "val", "test")] == [17, 1, 2]
    from weft.tasks.images import read_pictures

    names = ("clear.png", "grey.webp", "palette.GIF", "deep.tif", "0.jpg")
    shown = read_pictures([pictures / "cat" / name for name in names], 8)[:, :, 4, 4].tolist()
    expected = [(255, 255, 255), (128, 128, 128), (0, 204, 0), (128, 128, 128), (200, 0, 0)]
    assert all(abs(a - b) <= 6 for one, two in zip(shown, expected, strict=True) for a, b in zip(one, two, strict=True))
    split = tmp_path / "split"
    for part in ("train", "Validation"):
        shutil.copytree(pictures, split / part)
    assert [load("images", split, image_size=8).rows(s) for s in ("train", "val", "test")] == [18, 20, 2]


@pytest.mark.parametrize("top", [255, 65535, 2**31 - 1])
def test_integers_of_32_bits_are_scaled_by_the_bits_that_they_use(tmp_path, top):
    from PIL import Image

    from weft.tasks.images import read_pictures

    half = torch.full((8, 8), top // 2, dtype=torch.int32)
    half[0] = top
    Image.fromarray(half.numpy()).save(tmp_path / "one.tif")
    assert Image.open(tmp_path / "one.tif").mode == "I"
    assert read_pictures([tmp_path / "one.tif"], 8)[0, 0, ::7, 0].tolist() == [255, 127]


@pytest.mark.parametrize("task", ["images", "imagefolder", "pets"])
def test_hidden_folders_are_no_classes(task, pictures, tmp_path):
    for part in ("train", "val"):
        shutil.copytree(pictures, tmp_path / "split" / part)
        (tmp_path / "split" / part / ".ipynb_checkpoints").mkdir()
    data = load(task, tmp_path / "split", image_size=8)
    assert data.classes == ["cat", "dog"] and data.facts["classes"] == 2


def test_many_images_are_normalised_by_all_classes():
    image = torch.zeros(20_000, 3, 1, 1, dtype=torch.uint8)
    image[10_000:] = 255  # sorted by class, as folders are read
    rows = {"image": image, "label": torch.arange(20_000) // 10_000}
    facts = get_task("images").data(make_config("images", image_size=4), rows, rows, rows, 2).facts
    assert facts["mean"] == pytest.approx([0.5] * 3) and facts["std"] == pytest.approx([0.5] * 3, rel=1e-3)


def test_trains_are_a_class(pictures):
    (pictures / "dog").rename(pictures / "train")
    assert load("images", pictures, image_size=8).classes == ["cat", "train"]
    (pictures / "cat").rename(pictures / "val")
    with pytest.raises(DataMissing, match="train cannot be used: it has 0 sub-folders"):
        load("images", pictures)


def test_errors_of_image_folders(pictures, tmp_path):
    broken = pictures / "dog" / "broken.jpg"
    whole = (pictures / "dog" / "0.jpg").read_bytes()
    broken.write_bytes(whole[: len(whole) - 60])
    with pytest.raises(DataMissing, match=r"dog/broken.jpg cannot be used: it is not a readable image .*[Tt]runcated"):
        load("images", pictures)
    broken.unlink()
    (pictures / "fish").mkdir()
    with pytest.raises(DataMissing, match="fish cannot be used: it has no images"):
        load("images", pictures)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissing, match="one sub-folder per class, at least two"):
        load("images", tmp_path / "empty")
    with pytest.raises(DataMissing, match="is not a folder"):
        load("images", tmp_path / "nowhere")


def test_texts_are_no_images(pictures):
    from weft.tasks import Known

    task, known = get_task("images"), Known({"size": 8})
    assert task.encode([str(pictures / "dog/0.jpg"), pictures / "cat/0.jpg"], known)["image"].shape == (2, 3, 8, 8)
    with pytest.raises(DataMissing, match="images reads files of images, and '(long ){11}long is no file"):
        task.encode(["long " * 1000], known)


def test_hidden_images_are_not_read(pictures, tmp_path):
    count = load("images", pictures, image_size=8).rows("train")
    (pictures / "dog/.ipynb_checkpoints").mkdir()
    for i in range(8):
        shutil.copy(pictures / f"dog/{i}.jpg", pictures / f"dog/.ipynb_checkpoints/{i}.jpg")
    (pictures / "dog/._0.jpg").write_bytes(b"written by macOS")
    assert load("images", pictures, image_size=8).rows("train") == count
    assert len(read_examples(pictures, "", "", tokens=False)[1]) == 20


def test_two_folders_of_the_same_part_are_refused(pictures, tmp_path):
    for part in ("train", "test", "validation", "val"):
        shutil.copytree(pictures, tmp_path / "split" / part)
    with pytest.raises(DataMissing, match="val and validation are the same part"):
        load("images", tmp_path / "split", image_size=8)


def test_images_of_other_kinds_are_not_left_out(pictures):
    shutil.copy(pictures / "cat" / "0.jpg", pictures / "cat" / "saved.JFIF")
    data = load("images", pictures, image_size=8)
    assert sum(data.rows(split) for split in ("train", "val", "test")) == 21
    assert len(read_examples(pictures, "", "", tokens=False)[0]) == 21
    for name in ("phone.HEIC", "drawn.svg", "array.npy"):
        (pictures / "dog" / name).write_bytes(b"an image")
        with pytest.raises(DataMissing, match=f"{name} cannot be used: images of this kind are not read"):
            load("images", pictures, image_size=8)
        with pytest.raises(DataMissing, match=f"{name} cannot be used"):
            read_examples(pictures, "", "", tokens=False)
        (pictures / "dog" / name).unlink()
