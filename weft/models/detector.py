"""Mask R-CNN and RetinaNet (torchvision's) on a PVT backbone, plain or cached.

Cached Transformers, https://arxiv.org/abs/2312.12742, Tables 3 and 7.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ..core.softmax import without_cudnn

DIMS = (64, 128, 320, 512)


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
        with without_cudnn(images):  # nearly every batch has a new size
            stages = self.body.stages(images)  # type: ignore[operator]
        for stage, tokens in enumerate(stages):
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
        made = RetinaNet(backbone, 91, anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5), **options)
        made.register_forward_pre_hook(as_floats)
        return made
    anchors = AnchorGenerator(((32,), (64,), (128,), (256,), (512,)), ((0.5, 1.0, 2.0),) * 5)
    names = [str(i) for i in range(4)]
    pools = {"box_roi_pool": MultiScaleRoIAlign(names, 7, 2), "mask_roi_pool": MultiScaleRoIAlign(names, 14, 2)}
    made = MaskRCNN(backbone, 91, rpn_anchor_generator=anchors, **pools, **options)
    made.register_forward_pre_hook(as_floats)
    return made


def as_floats(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Images come as bytes and boxes as the bits of float32: mixed precision rounds every float on its way in."""
    images, *targets = args
    given = [[{**t, "boxes": t["boxes"].view(torch.float32)} for t in ts] for ts in targets if ts is not None]
    return [x.float() / 255 for x in images], *given
