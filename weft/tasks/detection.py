"""Object detection and instance segmentation in COCO's layout: average precision of boxes and masks.

    DATA/coco/{train2017,val2017}/*.jpg and DATA/coco/annotations/instances_{train,val}2017.json (cocodataset.org),
    or DATA itself in this layout

Tests are on val2017, and a hundredth of the training images is validation data. The recipe is the 1x schedule of the
paper (https://arxiv.org/abs/2312.12742): 12 epochs of 16 images, shorter side 800, longer at most 1,333. A run may
start from an image classifier with `--init-from`; its caches are emptied. `--model-options '{"min_size": 400}'` sets
options of torchvision's detector. Needs: pip install 'weft[detection]'
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..layers import CachedAttention
from .base import SIZES, Columns, DataMissing, Gallery, Known, Task, TaskData
from .config import TrainConfig
from .files import DamagedData, decoded, find
from .registry import add_task

PICTURES = 117_266 * 99 // 100
CLASSES = 91  # COCO numbers its 80 categories from 1 to 90
KEPT = 512  # images of a set that is kept in memory
SHOWN, SURE = 8, 0.5  # images on a page, and the score from which an object is drawn


class Part:
    """The images of one part of COCO and their annotations; row `number` of the task's data is `pictures[number]`."""

    def __init__(self, folder: Path, part: str, masks: bool):
        self.folder, self.truth = folder / part, folder / "annotations" / f"instances_{part}.json"
        about = read_truth(self.truth, masks)
        self.names = {kind["id"]: kind["name"] for kind in about["categories"]}
        self.objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for found in about["annotations"]:
            if not found["iscrowd"] and min(found["bbox"][2:]) >= 1:
                self.objects[found["image_id"]].append(found)
        self.kept: dict[tuple[int, bool, torch.device], Columns] = {}
        self.pictures = [i for i in about["images"] if self.objects[i["id"]] or part.startswith("val")]

    def read(self, number: int, masks: bool, device: torch.device) -> Columns:
        """Small sets are decoded once, and kept on the device."""
        if len(self.pictures) > KEPT:
            return self._decode(number, masks)
        key = (number, masks, device)
        if key not in self.kept:
            self.kept[key] = {name: column.to(device) for name, column in self._decode(number, masks).items()}
        return self.kept[key]

    def _decode(self, number: int, masks: bool) -> Columns:
        picture = self.pictures[number]
        path = self.folder / picture["file_name"]
        pixels = np.asarray(decoded(path, path, "RGB"))
        objects = self.objects[picture["id"]]
        boxes = np.array([o["bbox"] for o in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        found = {"image": pixels.transpose(2, 0, 1), "boxes": boxes}
        found["labels"] = np.array([o["category_id"] for o in objects], np.int64)
        if masks:
            strange = next((o for o in objects if not isinstance(o.get("segmentation"), list)), None)
            if strange is not None:
                what = f"an object of image {picture['id']} must have a segmentation of polygons, got {strange!r:.200}"
                raise DamagedData(self.truth, what, "Convert its masks, or train coco-retinanet, which needs none.")
            shapes = [outline(o["segmentation"], *pixels.shape[:2]) for o in objects]
            found["masks"] = np.stack(shapes) if shapes else np.zeros((0, *pixels.shape[:2]), np.uint8)
        found["size"] = np.array(pixels.shape[:2])
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


def read_truth(path: Path, masks: bool = False) -> dict[str, Any]:
    """A file of COCO's annotations; what is used of it, here and by pycocotools, is checked."""
    try:
        about = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise DamagedData(path, f"line {error.lineno} is not JSON ({error})") from error
    except (OSError, ValueError) as error:
        raise DamagedData(path, f"it cannot be read ({error})") from error
    lists = ("images", "annotations", "categories")
    if not (isinstance(about, dict) and all(isinstance(about.get(key), list) for key in lists)):
        raise DamagedData(path, "it must be an object with the lists images, annotations and categories")
    pictures = set()
    for number, image in enumerate(about["images"]):
        if not isinstance(image, dict) or not {"id", "file_name"} <= set(image):
            raise DamagedData(path, f"images[{number}] must have id and file_name, got {image!r:.200}")
        pictures.add(image["id"])
    for number, found in enumerate(about["annotations"]):
        try:
            sides = [float(side) for side in found["bbox"]]
            sound = len(sides) == 4 and 0 < found["category_id"] < CLASSES and found["image_id"] in pictures
            sound = sound and "id" in found and float(found["area"]) >= 0 and found["iscrowd"] in (0, 1)
            sound = sound and (not masks or is_shape(found["segmentation"]))
        except (KeyError, IndexError, TypeError, ValueError):
            sound = False
        if not sound:
            what = f"annotations[{number}] must have an id, the image_id of an image, a category_id from 1 to "
            what += f"{CLASSES - 1}, bbox [x, y, width, height], area, and iscrowd 0 or 1"
            what += ", and a segmentation (coco-retinanet needs none)" if masks else ""
            raise DamagedData(path, f"{what}; got {found!r:.200}")
    return about


def is_shape(found: Any) -> bool:
    """Whether it is a mask as run lengths or as polygons."""
    return {"size", "counts"} <= set(found) if isinstance(found, dict) else len(found[0]) >= 4


def outline(polygons: Any, height: int, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (width, height))
    for polygon in polygons:
        if len(polygon) >= 6:
            ImageDraw.Draw(canvas).polygon(polygon, fill=1)
    return np.asarray(canvas, np.uint8).copy()


def with_boxes(
    image: Tensor, truth: Tensor, boxes: Tensor, labels: Tensor, scores: Tensor, names: Mapping[int, str]
) -> Tensor:
    """An image (3, height, width) with true and found boxes drawn into it, (height, width, 3)."""
    from PIL import Image, ImageDraw

    canvas = Image.fromarray(np.ascontiguousarray(image.cpu().numpy().transpose(1, 2, 0)))
    pen = ImageDraw.Draw(canvas)
    for box in truth.tolist():
        pen.rectangle(box, outline="white", width=1)
    for box, label, score in zip(boxes.tolist(), labels.tolist(), scores.tolist(), strict=True):
        pen.rectangle(box, outline=(230, 110, 20), width=2)
        what = f"{names.get(label, label)} {score:.2f}"
        place = (box[0] + 3, max(0.0, box[1] - 12))
        pen.rectangle(pen.textbbox(place, what), fill=(230, 110, 20))
        pen.text(place, what, fill="white")
    return torch.from_numpy(np.array(canvas))


def padded(parts: list[Tensor]) -> Tensor:
    """Tensors of the same number of dimensions, padded with zeros and stacked."""
    sizes = [max(sides) for sides in zip(*(part.shape for part in parts), strict=True)]
    found = parts[0].new_zeros(len(parts), *sizes)
    for row, part in zip(found, parts, strict=True):
        row[tuple(slice(side) for side in part.shape)] = part
    return found


class Detection(Task):
    """A row is the number of an image (test images follow the training images); images are read on demand."""

    metric, draws = "box_ap", True
    models = ("pvt-tiny", "pvt-small", "pvt-medium", "pvt-large")
    reads = frozenset({"image_size", "augment"})
    defaults = dict(
        model="pvt-tiny", steps=12 * PICTURES // 16, batch_size=16, optimizer="adamw", learning_rate=1e-4, beta2=0.999,
        eps=1e-8, weight_decay=0.05, schedule="steps", warmup=500, clip=1.0, test_on="last", eval_every=5000,
        eval_batches=20, checkpoint_every=1000,
    )  # fmt: skip

    def __init__(self, kind: str):
        self.name, self.about, self.kind = f"coco-{kind}", f"COCO by {kind}", kind  # type: ignore[misc]
        self.masks = kind == "mask-rcnn"
        self.found: dict[int, list[dict[str, Any]]] = {}

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.compile:
            raise ValueError("detectors use images of any size: remove --compile")

    def unread(self, config: TrainConfig) -> tuple[str, ...]:
        return *SIZES, "attention", "attention_options", "label_smoothing"

    def load(self, config: TrainConfig) -> TaskData:
        coco_tools()  # fail now rather than after training
        folder = Path(config.data)
        if not (folder / "annotations").is_dir():
            folder = find(config.data, ("coco",), "put COCO 2017 there (cocodataset.org)")
        self.train, self.test = (Part(folder, part, self.masks) for part in ("train2017", "val2017"))
        count, total = len(self.train.pictures), len(self.train.pictures) + len(self.test.pictures)
        cut = count - max(1, count // 100)
        train, val, test = ({"number": torch.arange(a, b)} for a, b in ((0, cut), (cut, count), (count, total)))
        classes = [self.train.names.get(i, str(i)) for i in range(CLASSES)]
        return TaskData(train, val, test, length=1, classes=classes)

    def where(self, number: int) -> tuple[Part, int]:
        count = len(self.train.pictures)
        return (self.train, number) if number < count else (self.test, number - count)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.detector import detector
        from ..models.pvt import pvt

        size, cache = config.model.removeprefix("pvt-"), config.options("cache_options") if config.cache else None
        ratio, side = config.cache or 0.5, config.image_size or 224
        body = pvt(size, cached=bool(config.cache), ratio=ratio, cache=cache, image_size=side)
        return detector(self.kind, body, **config.options("model_options"))

    def begin(self, model: nn.Module, weights: Columns) -> bool:
        """Load the backbone of an image classifier, with empty caches."""
        body: Any = model.backbone.body  # type: ignore[union-attr]
        theirs = {k.removeprefix("model."): v for k, v in weights.items() if not k.startswith("model.head.")}
        body.load_state_dict({**{k: v for k, v in body.state_dict().items() if k.startswith("head.")}, **theirs})
        for layer in body.modules():
            if isinstance(layer, CachedAttention):
                layer.reset()
        return True

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        numbers, device = rows["number"].tolist(), rows["number"].device
        places = [self.where(number) for number in numbers]
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(lambda place: place[0].read(place[1], self.masks and training, device), places))
        batch = {name: padded([one[name] for one in read]).to(device) for name in read[0]}
        share = 0.5 if training and config.augment else 0.0
        flip = torch.rand(len(numbers), generator=generator, device=device) < share
        return {**rows, **batch, "flip": flip}

    def pictures(self, batch: Columns) -> list[Tensor]:
        return [x[:, :h, :w] for x, (h, w) in zip(batch["image"], batch["size"].tolist(), strict=True)]

    def inputs(self, batch: Columns) -> tuple[Any, ...]:
        return (self.pictures(batch),)

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        images, targets = self.pictures(batch), []
        for i, flip in enumerate(batch["flip"].tolist()):
            kept = batch["labels"][i] > 0
            height, width = images[i].shape[1:]
            boxes = batch["boxes"][i, kept]
            masks = batch["masks"][i, kept, :height, :width] if self.masks else None
            if flip:
                images[i] = images[i].flip(2)
                boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
                masks = masks.flip(2) if masks is not None else None
            targets.append({"boxes": boxes.view(torch.int32), "labels": batch["labels"][i, kept]})
            if masks is not None:
                targets[-1]["masks"] = masks
        return torch.stack(list(model(images, targets).values())).sum()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        self.found = {}  # without those of an evaluation that was interrupted
        yield

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        """Detections are kept until `summary`: average precision is not a sum over images."""
        answers = model(self.pictures(batch))
        for number, answer in zip(batch["number"].tolist(), answers, strict=True):
            part, place = self.where(number)
            self.found[number] = entries(answer, part.pictures[place]["id"], self.masks)
        return {"count": torch.ones_like(batch["number"])}

    @torch.no_grad()
    def own_gallery(self, model: nn.Module, files: Sequence[Path], known: Known) -> Gallery:
        device, images = next(model.parameters()).device, []
        names = dict(enumerate(known.classes or []))
        for file in files:
            picture = torch.from_numpy(np.array(decoded(file, file, "RGB"))).permute(2, 0, 1)
            (answer,) = model.eval()([picture.to(device)])
            sure = answer["scores"] >= SURE
            boxes, labels, scores = (answer[key][sure].cpu() for key in ("boxes", "labels", "scores"))
            drawn = with_boxes(picture, torch.zeros(0, 4), boxes, labels, scores, names)
            images.append((drawn, f"{file.name}: {int(sure.sum())} found"))
        return Gallery("Detected objects", f"Objects with a score of at least {SURE}, and their scores.", images)

    @torch.no_grad()
    def galleries(self, model: nn.Module, data: TaskData, config: TrainConfig) -> list[Gallery]:
        rows = {"number": data.test["number"][:SHOWN]}
        batch = self.batch(rows, config, torch.Generator(), training=False)
        device = next(model.parameters()).device
        pictures = self.pictures(batch)
        answers = model.eval()([picture.to(device) for picture in pictures])
        images = []
        for i, (picture, answer) in enumerate(zip(pictures, answers, strict=True)):
            sure = answer["scores"] >= SURE
            boxes, labels, scores = (answer[key][sure].cpu() for key in ("boxes", "labels", "scores"))
            true = batch["labels"][i] > 0
            drawn = with_boxes(picture, batch["boxes"][i, true], boxes, labels, scores, self.test.names)
            images.append((drawn, f"{int(sure.sum())} found, {int(true.sum())} true"))
        note = f"Test images. White: the truth. Orange: objects with a score of at least {SURE}, and their scores."
        return [Gallery("Detected objects", note, images)]

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        if torch.distributed.is_initialized():
            everywhere: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everywhere, self.found)
            self.found = {number: entry for found in everywhere for number, entry in found.items()}
        found, self.found = self.found, {}
        return average_precision(found, self.where, self.masks)


def entries(answer: Mapping[str, Tensor], picture: int, masks: bool) -> list[dict[str, Any]]:
    """An image's boxes and masks in COCO's format."""
    answer = {key: (value > 0.5 if key == "masks" else value.float()).cpu() for key, value in answer.items()}
    boxes = answer["boxes"].clone()
    boxes[:, 2:] -= boxes[:, :2]
    found = []
    for i, box in enumerate(boxes.tolist()):
        entry = {"image_id": picture, "category_id": int(answer["labels"][i]), "bbox": box}
        entry["score"] = float(answer["scores"][i])
        if masks:
            from pycocotools import mask as coding

            code = coding.encode(np.asfortranarray(answer["masks"][i, 0].numpy().astype(np.uint8)))
            entry["segmentation"] = {**code, "counts": code["counts"].decode()}
        found.append(entry)
    return found


def coco_tools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise DataMissing("average precision needs pycocotools: pip install 'weft[detection]'") from error
    return COCO, COCOeval


def average_precision(found: dict[int, list[dict[str, Any]]], where: Any, masks: bool) -> dict[str, float]:
    COCO, COCOeval = coco_tools()
    part = where(next(iter(found)))[0]
    everything = [entry for entries in found.values() for entry in entries]
    kinds = {"box": "bbox", "mask": "segm"} if masks else {"box": "bbox"}
    result = {f"{kind}_{name}": 0.0 for kind in kinds for name in ("ap", "ap50", "ap75")}
    if not everything:
        return result
    with redirect_stdout(io.StringIO()):
        truth = COCO(str(part.truth))
        answers = truth.loadRes(everything)
    for kind, theirs in kinds.items():
        with redirect_stdout(io.StringIO()):
            judge = COCOeval(truth, answers, theirs)
            judge.params.imgIds = sorted({part.pictures[where(number)[1]]["id"] for number in found})
            judge.evaluate(), judge.accumulate(), judge.summarize()
        names = (f"{kind}_ap", f"{kind}_ap50", f"{kind}_ap75")
        result |= {name: max(0.0, float(v)) for name, v in zip(names, judge.stats[:3], strict=True)}
    return result


add_task(Detection("mask-rcnn"))
add_task(Detection("retinanet"))
