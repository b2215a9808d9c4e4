"""Detection: COCO's files, what the detector is given, and average precision."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from weft.inspect import report
from weft.lab.fabric import make_fabric
from weft.models.detector import as_floats
from weft.tasks import DataMissing, Known, get_task, make_config
from weft.tasks.detection import average_precision, entries, outline

BOXES = [[4, 6, 20, 10], [30, 8, 12, 24]]


@pytest.fixture()
def coco(tmp_path):
    """Three pictures of 48 x 40, each with two rectangles, in COCO's layout."""
    pytest.importorskip("pycocotools")
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    for part in ("train2017", "val2017"):
        (tmp_path / "coco" / part).mkdir()
        images, objects = [], []
        for i in range(3):
            pixels = np.zeros((40, 48, 3), np.uint8)
            for number, (x, y, w, h) in enumerate(BOXES):
                pixels[y : y + h, x : x + w] = 90 + 100 * number
                corners = [x, y, x + w - 1, y, x + w - 1, y + h - 1, x, y + h - 1]
                what = {"bbox": [x, y, w, h], "category_id": 1 + 2 * number, "area": w * h, "segmentation": [corners]}
                objects.append({"id": len(objects) + 1, "image_id": 10 + i, "iscrowd": 0, **what})
            Image.fromarray(pixels).save(tmp_path / "coco" / part / f"{i}.png")
            images.append({"id": 10 + i, "file_name": f"{i}.png", "width": 48, "height": 40})
        kinds = [{"id": 1, "name": "grey"}, {"id": 3, "name": "white"}]
        about = {"images": images, "annotations": objects, "categories": kinds, "info": {}}
        (tmp_path / "coco" / "annotations" / f"instances_{part}.json").write_text(json.dumps(about))
    return tmp_path


class Seen(nn.Module):
    def forward(self, images, targets=None):
        self.images, self.targets = as_floats(self, (images, targets))
        return {"loss": self.images[0].sum()}


def test_boxes_and_masks_follow_the_picture_when_it_is_flipped(coco) -> None:
    task, config = get_task("coco-mask-rcnn"), make_config("coco-mask-rcnn", data=str(coco))
    data = task.load(config)
    assert (data.rows("train"), data.rows("val"), data.rows("test")) == (2, 1, 3)
    assert task.load(replace(config, data=str(coco / "coco"))).rows("train") == 2  # the folder itself
    batch = task.batch(data.train, config, torch.Generator().manual_seed(0), training=True)
    batch["flip"] = torch.tensor([False, True])
    model = Seen()
    task.loss(model, batch, config)
    for image, target in zip(model.images, model.targets, strict=True):
        assert image.shape == (3, 40, 48) and target["labels"].tolist() == [1, 3]
        for box, mask, value in zip(target["boxes"].int().tolist(), target["masks"], (90, 190), strict=True):
            inside = image[0] == value / 255  # the rectangle by its colour
            rows, columns = torch.nonzero(inside.any(1))[:, 0], torch.nonzero(inside.any(0))[:, 0]
            assert box == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert torch.equal(mask.bool(), inside)
    assert model.targets[0]["boxes"][0].tolist() == [4, 6, 24, 16]
    assert model.targets[1]["boxes"][0].tolist() == [24, 6, 44, 16]


def test_the_truth_has_an_average_precision_of_one(coco) -> None:
    task = get_task("coco-mask-rcnn")
    task.load(make_config("coco-mask-rcnn", data=str(coco)))
    boxes = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in BOXES]).float()
    corners = [[x, y, x + w - 1, y, x + w - 1, y + h - 1, x, y + h - 1] for x, y, w, h in BOXES]
    masks = torch.from_numpy(np.stack([outline([c], 40, 48) for c in corners]))[:, None].float()
    answer = {"boxes": boxes, "labels": torch.tensor([1, 3]), "scores": torch.ones(2), "masks": masks}
    found = {3 + i: entries(answer, 10 + i, masks=True) for i in range(3)}
    result = average_precision(found, task.where, masks=True)
    assert result["box_ap"] == result["box_ap50"] == pytest.approx(1) and result["mask_ap50"] == pytest.approx(1)
    wrong = {**answer, "labels": torch.tensor([3, 1])}
    assert average_precision({3: entries(wrong, 10, masks=True)}, task.where, masks=True)["box_ap"] == 0


def test_average_precision_is_that_of_torchmetrics(coco) -> None:
    detection = pytest.importorskip("torchmetrics.detection")
    task = get_task("coco-retinanet")
    task.load(make_config("coco-retinanet", data=str(coco)))
    generator = torch.Generator().manual_seed(0)
    theirs, found = detection.MeanAveragePrecision(), {}
    for i in range(3):
        truth = {"boxes": torch.tensor([[x, y, x + w, y + h] for x, y, w, h in BOXES]).float()}
        truth["labels"] = torch.tensor([1, 3])
        boxes = truth["boxes"].repeat(4, 1) + torch.randn(8, 4, generator=generator)
        answer = {"boxes": boxes, "labels": torch.tensor([1, 3, 1, 3, 1, 3, 3, 1])}
        answer["scores"] = torch.rand(8, generator=generator)
        theirs.update([answer], [truth])
        found[3 + i] = entries(answer, 10 + i, masks=False)
    ours, expected = average_precision(found, task.where, masks=False), theirs.compute()
    for name, key in (("box_ap", "map"), ("box_ap50", "map_50"), ("box_ap75", "map_75")):
        assert ours[name] == pytest.approx(float(expected[key]), abs=1e-6) and 0 < ours[name] < 1


def test_a_missing_package_is_named_before_training(coco, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(DataMissing, match=r"weft\[detection\]"):
        get_task("coco-retinanet").load(make_config("coco-retinanet", data=str(coco)))


def test_bad_annotations_are_named(coco) -> None:
    truth = coco / "coco" / "annotations" / "instances_val2017.json"
    whole = json.loads(truth.read_text())
    lists, values = "lists images, annotations and categories", r"annotations\[0\] must have an id, .*iscrowd 0 or 1"
    for says, names in ((lists, ("annotations", "categories")), (values, ("id", "area", "iscrowd"))):
        for name in names:  # some are read only by pycocotools, after training
            about = whole | {"annotations": [whole["annotations"][0].copy()]}
            del (about if says is lists else about["annotations"][0])[name]
            truth.write_text(json.dumps(about))
            with pytest.raises(DataMissing, match=f"instances_val2017.json .*{says}"):
                get_task("coco-retinanet").load(make_config("coco-retinanet", data=str(coco)))


@pytest.mark.parametrize("segmentation", [None, [], [[1, 2]]])
def test_objects_without_masks_are_named_before_training(coco, segmentation) -> None:
    truth = coco / "coco" / "annotations" / "instances_val2017.json"
    about = json.loads(truth.read_text())
    about["annotations"][1]["segmentation"] = segmentation
    truth.write_text(json.dumps(about))
    with pytest.raises(DataMissing, match=r"instances_val2017.json .*annotations\[1\] .* a segmentation .*retinanet"):
        get_task("coco-mask-rcnn").load(make_config("coco-mask-rcnn", data=str(coco)))
    assert get_task("coco-retinanet").load(make_config("coco-retinanet", data=str(coco))).rows("test") == 3


def test_masks_that_are_not_polygons_are_named(coco) -> None:
    truth = coco / "coco" / "annotations" / "instances_train2017.json"
    about = json.loads(truth.read_text())
    for found in about["annotations"]:
        found["segmentation"] = {"size": [4, 4], "counts": [0, 16]}
    truth.write_text(json.dumps(about))
    task = get_task("coco-mask-rcnn")
    config = make_config("coco-mask-rcnn", data=str(coco))
    rows = {"number": task.load(config).train["number"][:2]}
    with pytest.raises(DataMissing, match=r"instances_train2017.json .*must have a segmentation of polygons"):
        task.batch(rows, config, torch.Generator(), training=True)


def test_an_untrained_detector_answers_in_the_pictures_coordinates(coco) -> None:
    for package in ("torchvision", "pycocotools"):
        pytest.importorskip(package)
    small = dict(model_options='{"min_size": 64, "max_size": 64}', image_size=32, cache=0.5, batch_size=2)
    task, config = get_task("coco-retinanet"), make_config("coco-retinanet", data=str(coco), **small)
    data = task.load(config)
    torch.manual_seed(0)
    model = task.model(config, data)
    batch = task.batch(data.train, config, torch.Generator(), training=True)
    fabric = make_fabric(replace(config, precision="bf16-mixed", accelerator="cpu"))  # it rounds floats on their way in
    loss = task.loss(fabric.setup_module(model).train(), batch, config)
    fabric.backward(loss)
    assert loss.isfinite() and model.backbone.body.block1[0].attn.lam.grad is not None
    with torch.no_grad():
        task.score(model.eval(), task.batch(data.test, config, torch.Generator(), training=False))
    assert set(task.found) == {3, 4, 5}
    assert 0 <= task.summary({})["box_ap"] < 0.5


def test_the_page_shows_images_with_true_and_found_boxes(coco, tmp_path) -> None:
    class Sure(nn.Module):
        """Finds the first object, and has doubts about another."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, images):
            boxes = torch.tensor([[4.0, 6, 24, 16], [0, 0, 5, 5]])
            return [{"boxes": boxes, "labels": torch.tensor([1, 3]), "scores": torch.tensor([0.9, 0.2])}] * len(images)

    task, config = get_task("coco-mask-rcnn"), make_config("coco-mask-rcnn", data=str(coco))
    data = task.load(config)
    model = Sure()
    (gallery,) = task.galleries(model, data, config)
    assert [caption for _, caption in gallery.images] == ["1 found, 2 true"] * 3
    image = gallery.images[0][0]
    assert image.shape == (40, 48, 3) and image[16, 10].tolist() == [230, 110, 20]  # the found box
    assert image[32, 35].tolist() == [255] * 3 and image[2, 2].tolist() == [0] * 3  # a missed one; a doubtful one
    own = task.own_gallery(model, [coco / "coco" / "val2017" / "0.png"], Known({}, classes=data.classes))
    assert own.images[0][1] == "0.png: 1 found" and own.images[0][0][16, 10].tolist() == [230, 110, 20]
    assert data.classes[1] == "grey" and data.classes[3] == "white"
    page = report(model, [], out=tmp_path / "page.html", galleries=[gallery.part()]).read_text("utf-8")
    assert '"caption": "1 found, 2 true"' in page and '"title": "Detected objects"' in page
