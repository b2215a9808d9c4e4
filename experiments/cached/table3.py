"""Tables 3 and 7: COCO detection with a PVT backbone, plain and cached, in Mask R-CNN and RetinaNet.

    python -m experiments.cached.table3 --data data/coco --detector mask-rcnn --size tiny --cached --weights RUN

Cached Transformers, https://arxiv.org/abs/2312.12742: a backbone pre-trained on ImageNet (a run of Table 1 by
--weights), its caches emptied, 12 epochs of 16 pictures, AdamW 1e-4, decay 0.05 for the backbone's kind, shorter side
800, longer at most 1,333; the rate falls tenfold after 8 and 11 epochs. The detectors are torchvision's. COCO 2017
(cocodataset.org) as DATA/{train2017,val2017}/*.jpg and DATA/annotations/instances_{train,val}2017.json. AP needs: pip
install pycocotools
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from experiments.images import weights_of
from weft.layers import CachedAttention
from weft.models.pvt import pvt

PAPER = {  # AP of boxes, plain and cached; for Mask R-CNN also of masks. Table 3, Table 7
    "mask-rcnn": {
        "tiny": (36.7, 41.0, 35.1, 38.3),
        "small": (40.4, 44.5, 36.3, 41.0),
        "medium": (42.0, 46.6, 39.0, 42.3),
    },
    "retinanet": {"tiny": (36.7, 40.2), "small": (40.4, 44.0), "medium": (41.9, 45.7)},
}
DIMS = (64, 128, 320, 512)


class Backbone(nn.Module):
    """The pyramid's four maps through a feature pyramid; its class token and head are left out."""

    out_channels = 256

    def __init__(self, body: nn.Module, retina: bool):
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


def detector(kind: str, size: str, cached: bool, weights: Path | None = None, **options: Any) -> nn.Module:
    body = pvt(size, cached=cached)
    if weights is not None:
        body.load_state_dict(weights_of(weights))
    for layer in body.modules():
        if isinstance(layer, CachedAttention):
            layer.reset()
    backbone = Backbone(body, retina=kind == "retinanet")
    options = {"min_size": 800, "max_size": 1333, **options}
    if kind == "retinanet":
        sizes = tuple((x, int(x * 2 ** (1 / 3)), int(x * 2 ** (2 / 3))) for x in (32, 64, 128, 256, 512))
        anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5)
        return RetinaNet(backbone, 91, anchor_generator=anchors, size_divisible=32, **options)
    anchors = AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    names = [str(i) for i in range(4)]
    return MaskRCNN(
        backbone,
        91,
        rpn_anchor_generator=anchors,
        box_roi_pool=MultiScaleRoIAlign(names, 7, 2),
        mask_roi_pool=MultiScaleRoIAlign(names, 14, 2),
        size_divisible=32,
        **options,
    )


class Coco(torch.utils.data.Dataset):
    def __init__(self, data: Path, part: str, masks: bool):
        about = json.loads((data / "annotations" / f"instances_{part}.json").read_text())
        self.folder, self.masks = data / part, masks
        self.objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for found in about["annotations"]:
            if not found["iscrowd"] and min(found["bbox"][2:]) >= 1:
                self.objects[found["image_id"]].append(found)
        self.images = [i for i in about["images"] if self.objects[i["id"]] or part.startswith("val")]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        from PIL import Image

        image = self.images[number]
        pixels = np.asarray(Image.open(self.folder / image["file_name"]).convert("RGB"))
        objects = self.objects[image["id"]]
        boxes = torch.tensor([o["bbox"] for o in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        target = {"boxes": boxes, "labels": torch.tensor([o["category_id"] for o in objects], dtype=torch.int64)}
        target["image_id"] = torch.tensor(image["id"])
        if self.masks:
            shapes = [outline(o["segmentation"], pixels.shape[0], pixels.shape[1]) for o in objects]
            target["masks"] = torch.from_numpy(np.stack(shapes)) if shapes else torch.zeros(0, *pixels.shape[:2])
        x = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255
        if torch.rand(()) < 0.5 and not self.folder.name.startswith("val"):
            x, width = x.flip(2), pixels.shape[1]
            target["boxes"] = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
            if self.masks:
                target["masks"] = target["masks"].flip(2)
        return x, target


def side_by_side(batch: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*batch, strict=True))


def outline(polygons: Any, height: int, width: int) -> np.ndarray:
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (width, height))
    for polygon in polygons:
        if len(polygon) >= 6:
            ImageDraw.Draw(canvas).polygon(polygon, fill=1)
    return np.asarray(canvas, np.uint8).copy()


@torch.no_grad()
def average_precision(model: nn.Module, data: Path, masks: bool, device: torch.device) -> dict[str, float]:
    from pycocotools import mask as coding
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    found: list[dict[str, Any]] = []
    model.eval()
    for x, target in Coco(data, "val2017", False):  # type: ignore[attr-defined]
        answer = {k: v.cpu() for k, v in model([x.to(device)])[0].items()}
        boxes = answer["boxes"].clone()
        boxes[:, 2:] -= boxes[:, :2]
        for i, box in enumerate(boxes.tolist()):
            entry = {"image_id": int(target["image_id"]), "category_id": int(answer["labels"][i]), "bbox": box}
            entry["score"] = float(answer["scores"][i])
            if masks:
                code = coding.encode(np.asfortranarray((answer["masks"][i, 0] > 0.5).numpy().astype(np.uint8)))
                entry["segmentation"] = {**code, "counts": code["counts"].decode()}
            found.append(entry)
    truth = COCO(str(data / "annotations" / "instances_val2017.json"))
    result = {}
    for kind in ("bbox", "segm") if masks else ("bbox",):
        judge = COCOeval(truth, truth.loadRes(found), kind)
        judge.evaluate(), judge.accumulate(), judge.summarize()
        names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
        result |= {f"{kind} {name}": round(100 * float(v), 2) for name, v in zip(names, judge.stats[:6], strict=True)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--detector", choices=list(PAPER), default="mask-rcnn")
    parser.add_argument("--size", choices=list(PAPER["mask-rcnn"]), default="tiny")
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--weights", type=Path, help="the run of table1.py that trained the backbone")
    parser.add_argument("--out", type=Path, default=Path("runs/cached-table-3"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=8)
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    masks = o.detector == "mask-rcnn"
    model = detector(o.detector, o.size, o.cached, o.weights).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    loader = torch.utils.data.DataLoader(
        Coco(o.data, "train2017", masks), o.batch, True, num_workers=o.workers, collate_fn=side_by_side
    )
    steps = 0
    for epoch in range(o.epochs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (0.1 if epoch >= 8 else 1.0) * (0.1 if epoch >= 11 else 1.0)
        model.train()
        for images, targets in loader:
            placed = [{k: v.to(device) for k, v in t.items()} for t in targets]
            loss = sum(model([x.to(device) for x in images], placed).values())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
        print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)
    name = f"{o.detector}-{o.size}{'-cached' if o.cached else ''}"
    o.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), o.out / f"{name}.pt")
    found = {"steps": steps, **average_precision(model, o.data, masks, device)}
    found["paper's AP"] = PAPER[o.detector][o.size][int(o.cached) :: 2]
    (o.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
