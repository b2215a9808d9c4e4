"""Tables 3 and 7: COCO detection with a PVT backbone, plain and cached, in Mask R-CNN and RetinaNet.

    weft sweep experiments/cached/table1.py --only "PVT-Tiny/*"              the backbones that the cells start from
    weft sweep experiments/cached/table3.py --only "* tiny/*"

Cached Transformers, https://arxiv.org/abs/2312.12742: a backbone pre-trained on ImageNet, its caches emptied, 12 epochs
of 16 images, AdamW 1e-4, decay 0.05, shorter side 800, longer at most 1,333; learning rate / 10 after 8 and 11 epochs.
The detectors are torchvision's. COCO 2017 (cocodataset.org) as DATA/coco/{train2017,val2017}/*.jpg and
DATA/coco/annotations/instances_{train,val}2017.json; a hundredth of the training images is validation data. AP needs:
pip install 'weft[detection]'
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hosts import caches
from torch import Tensor, nn

from weft.lab.sweep import Cell
from weft.layers import CachedAttention
from weft.models.pvt import pvt
from weft.tasks import Task, TaskData, TrainConfig, make_config
from weft.tasks.base import Columns
from weft.tasks.files import find

TITLE = "Tables 3 and 7: COCO, plain and cached PVT"
METRIC = "box_ap"
UNIT, SCALE = "%", 100

PAPER = {  # AP of boxes, plain and cached; for Mask R-CNN also of masks. Table 3, Table 7
    "mask-rcnn": {
        "tiny": (36.7, 41.0, 35.1, 38.3),
        "small": (40.4, 44.5, 36.3, 41.0),
        "medium": (42.0, 46.6, 39.0, 42.3),
    },
    "retinanet": {"tiny": (36.7, 40.2), "small": (40.4, 44.0), "medium": (41.9, 45.7)},
}
DIMS = (64, 128, 320, 512)
PICTURES = 117_266 * 99 // 100


class Backbone(nn.Module):
    """A feature pyramid on the four maps of PVT, without its class token and head."""

    out_channels = 256

    def __init__(self, body: nn.Module, retina: bool):
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

        super().__init__()
        self.body = body
        extra: Any = LastLevelP6P7(256, 256) if retina else LastLevelMaxPool()
        self.first = 1 if retina else 0
        self.pyramid = FeaturePyramidNetwork(list(DIMS[self.first :]), 256, extra)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        height, width = images.shape[2] // 4, images.shape[3] // 4
        maps: OrderedDict[str, Tensor] = OrderedDict()
        for stage, tokens in enumerate(self.body.stages(images)):  # type: ignore[operator]
            size = height // 2**stage, width // 2**stage
            image = tokens[:, tokens.shape[1] - size[0] * size[1] :].transpose(1, 2).unflatten(2, size)
            if stage >= self.first:
                maps[str(stage)] = image
        return self.pyramid(maps)


def detector(kind: str, body: nn.Module, **options: Any) -> nn.Module:
    from torchvision.models.detection import MaskRCNN, RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    backbone = Backbone(body, retina=kind == "retinanet")
    options = {"min_size": 800, "max_size": 1333, "size_divisible": 32, **options}
    if kind == "retinanet":
        sizes = tuple((x, int(x * 2 ** (1 / 3)), int(x * 2 ** (2 / 3))) for x in (32, 64, 128, 256, 512))
        return RetinaNet(backbone, 91, anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5), **options)
    anchors = AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    names = [str(i) for i in range(4)]
    pools = {"box_roi_pool": MultiScaleRoIAlign(names, 7, 2), "mask_roi_pool": MultiScaleRoIAlign(names, 14, 2)}
    return MaskRCNN(backbone, 91, rpn_anchor_generator=anchors, **pools, **options)


class Part:
    """The images of one part of COCO and their annotations; row `number` of the task's data is `pictures[number]`."""

    def __init__(self, folder: Path, part: str):
        self.folder, self.truth = folder / part, folder / "annotations" / f"instances_{part}.json"
        about = json.loads(self.truth.read_text())
        self.objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for found in about["annotations"]:
            if not found["iscrowd"] and min(found["bbox"][2:]) >= 1:
                self.objects[found["image_id"]].append(found)
        self.pictures = [i for i in about["images"] if self.objects[i["id"]] or part.startswith("val")]

    def read(self, number: int, masks: bool) -> dict[str, np.ndarray]:
        from PIL import Image

        picture = self.pictures[number]
        pixels = np.asarray(Image.open(self.folder / picture["file_name"]).convert("RGB"))
        objects = self.objects[picture["id"]]
        boxes = np.array([o["bbox"] for o in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        found = {"image": pixels.transpose(2, 0, 1), "boxes": boxes}
        found["labels"] = np.array([o["category_id"] for o in objects], np.int64)
        if masks:
            shapes = [outline(o["segmentation"], *pixels.shape[:2]) for o in objects]
            found["masks"] = np.stack(shapes) if shapes else np.zeros((0, *pixels.shape[:2]), np.uint8)
        return {**found, "size": np.array(pixels.shape[:2])}


def outline(polygons: Any, height: int, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (width, height))
    for polygon in polygons:
        if len(polygon) >= 6:
            ImageDraw.Draw(canvas).polygon(polygon, fill=1)
    return np.asarray(canvas, np.uint8).copy()


def padded(arrays: list[np.ndarray]) -> Tensor:
    """Arrays of the same number of dimensions, padded with zeros and stacked."""
    sizes = [max(sides) for sides in zip(*(a.shape for a in arrays), strict=True)]
    found = np.zeros((len(arrays), *sizes), arrays[0].dtype)
    for row, array in zip(found, arrays, strict=True):
        row[tuple(slice(side) for side in array.shape)] = array
    return torch.from_numpy(found)


class Detection(Task):
    """A row is the number of an image (test images follow the training images); images are read on demand."""

    metric = "box_ap"
    models = ("pvt-tiny", "pvt-small", "pvt-medium", "pvt-large")
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

    def load(self, config: TrainConfig) -> TaskData:
        folder = find(config.data, ("coco",), "put COCO 2017 there (cocodataset.org)")
        self.train, self.test = (Part(folder, part) for part in ("train2017", "val2017"))
        count, total = len(self.train.pictures), len(self.train.pictures) + len(self.test.pictures)
        cut = count - max(1, count // 100)
        splits = ({"number": torch.arange(a, b)} for a, b in ((0, cut), (cut, count), (count, total)))
        return TaskData(*splits, length=1)

    def where(self, number: int) -> tuple[Part, int]:
        count = len(self.train.pictures)
        return (self.train, number) if number < count else (self.test, number - count)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
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
            read = list(pool.map(lambda place: place[0].read(place[1], self.masks and training), places))
        batch = {name: padded([one[name] for one in read]).to(device) for name in read[0]}
        flip = torch.rand(len(numbers), generator=generator, device=device) < (0.5 if training else 0.0)
        return {**rows, **batch, "flip": flip}

    def pictures(self, batch: Columns) -> list[Tensor]:
        return [x[:, :h, :w].float() / 255 for x, (h, w) in zip(batch["image"], batch["size"].tolist(), strict=True)]

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
            targets.append({"boxes": boxes, "labels": batch["labels"][i, kept]})
            if masks is not None:
                targets[-1]["masks"] = masks
        return torch.stack(list(model(images, targets).values())).sum()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        """Detections are kept until `summary`: average precision is not a sum over images."""
        answers = model(self.pictures(batch))
        for number, answer in zip(batch["number"].tolist(), answers, strict=True):
            part, place = self.where(number)
            self.found[number] = entries(answer, part.pictures[place]["id"], self.masks)
        return {"count": torch.ones_like(batch["number"])}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        if torch.distributed.is_initialized():
            everywhere: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everywhere, self.found)
            self.found = {number: entry for found in everywhere for number, entry in found.items()}
        found, self.found = self.found, {}
        return average_precision(found, self.where, self.masks)


def entries(answer: Mapping[str, Tensor], picture: int, masks: bool) -> list[dict[str, Any]]:
    """An image's boxes and masks in COCO's format."""
    answer = {key: value.float().cpu() for key, value in answer.items()}
    boxes = answer["boxes"].clone()
    boxes[:, 2:] -= boxes[:, :2]
    found = []
    for i, box in enumerate(boxes.tolist()):
        entry = {"image_id": picture, "category_id": int(answer["labels"][i]), "bbox": box}
        entry["score"] = float(answer["scores"][i])
        if masks:
            from pycocotools import mask as coding

            code = coding.encode(np.asfortranarray((answer["masks"][i, 0] > 0.5).numpy().astype(np.uint8)))
            entry["segmentation"] = {**code, "counts": code["counts"].decode()}
        found.append(entry)
    return found


def average_precision(found: dict[int, list[dict[str, Any]]], where: Any, masks: bool) -> dict[str, float]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ImportError("average precision needs pycocotools: pip install 'weft[detection]'") from error

    part = where(next(iter(found)))[0]
    truth, everything = COCO(str(part.truth)), [entry for entries in found.values() for entry in entries]
    kinds = {"box": "bbox", "mask": "segm"} if masks else {"box": "bbox"}
    result = {f"{kind}_{name}": 0.0 for kind in kinds for name in ("ap", "ap50", "ap75")}
    if not everything:
        return result
    for kind, theirs in kinds.items():
        judge = COCOeval(truth, truth.loadRes(everything), theirs)
        judge.params.imgIds = sorted({part.pictures[where(number)[1]]["id"] for number in found})
        judge.evaluate(), judge.accumulate(), judge.summarize()
        names = (f"{kind}_ap", f"{kind}_ap50", f"{kind}_ap75")
        result |= {name: max(0.0, float(v)) for name, v in zip(names, judge.stats[:3], strict=True)}
    return result


TASKS = [Detection(kind) for kind in PAPER]


def cells() -> list[Cell]:
    found = []
    make = partial(make_config, precision="bf16-mixed")
    for kind, sizes in PAPER.items():
        for size, figures in sizes.items():
            for i, (column, ratio) in enumerate((("plain", 0.0), ("cached", 0.5))):
                options = json.dumps(caches("PVT-")) if ratio else ""
                config = make(f"coco-{kind}", model=f"pvt-{size}", cache=ratio, cache_options=options)
                note = f"mask AP in the paper: {figures[2 + i]}" if kind == "mask-rcnn" else ""
                start = f"table1/pvt-{size}-{column}"
                found.append(Cell(f"{kind} {size}", column, config, figures[i], note, start=start))
    return found
