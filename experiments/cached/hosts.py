"""The paper's image models on ImageNet, plain and with a cache around every attention; shared by the tables.

224 pixels, 300 epochs, ratio 0.5, as many slots as tokens, weight decay 0.05, cosine; batch size and learning rate are
those of the original models (here 1,024 and 1e-3). As in the paper, cached layers add a positional encoding (a 3 x 3
convolution, as in its code), and in PVT and Swin the caches of the first two stages are pooled by 4 and 2. Images in
data/imagenet/{train,val}/CLASS (image-net.org, after registration), augmented by timm: random resized crops, flips and
colour jitter, as the paper says.
"""

import json
from typing import Any

from weft.tasks import TrainConfig, make_config

PICTURES = 1_281_167 - 10_000  # without those held out for validation
HOSTS = {
    "ViT-S": "timm:vit_small_patch16_224",
    "PVT-Tiny": "pvt-tiny",
    "PVT-Small": "pvt-small",
    "PVT-Medium": "pvt-medium",
    "Swin-T": "timm:swin_tiny_patch4_window7_224",
    "PVTv2-B2": "timm:pvt_v2_b2",
    "PVTv2-B3": "timm:pvt_v2_b3",
    "PVTv2-B4": "timm:pvt_v2_b4",
}


PYRAMIDS = ("PVT-", "Swin")  # their first two stages pool the caches; PVTv2 reduces them like its tokens


def caches(name: str) -> dict[str, Any]:
    """Options of the caches of a model."""
    if name.startswith(PYRAMIDS):
        return {"position": "conv", "pool": [4, 2]}
    return {"position": "conv", "memory_attention": "same", **({"prefix": 1} if name.startswith("ViT") else {})}


def host(name: str, ratio: float = 0.0, *, task: str = "imagenet", epochs: int = 300, **given: Any) -> TrainConfig:
    """`ratio` of the channels is cached; 0 for the plain model."""
    recipe: dict[str, Any] = dict(
        model=HOSTS[name], cache=ratio, cache_options=json.dumps(caches(name)) if ratio else "",
        steps=epochs * PICTURES // 1024, batch_size=1024, optimizer="adamw", learning_rate=1e-3, weight_decay=0.05,
        schedule="cosine", warmup=6250, label_smoothing=0.0, clip=0.0, precision="bf16-mixed", compile=True,
        eval_every=1250, checkpoint_every=1250, augmentation="color",
    )  # fmt: skip
    return make_config(task, **{**recipe, **given})
