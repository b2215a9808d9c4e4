"""Tables 2 and 9: Swin-T on ImageNet-1k, with 14 x 14 windows of which a quarter is sampled in training.

    weft sweep experiments/subsampled/swin.py --only "10 layers*"

The Information Pathways Hypothesis, https://arxiv.org/abs/2306.01705. Ten or six of the twelve layers are sampled
(never the 7 x 7 maps of the last stage), σ = 0.75 windows; the unbiased form keeps a random quarter of each window. The
dense finish takes the last 18 % of the steps, as in the paper's language models; the paper does not say. Images in
data/imagenet/{train,val}/CLASS (image-net.org, after registration), 300 epochs of 1,024, AdamW 1e-3 after 20 epochs of
warm-up, cosine to 1e-5, decay 0.05, with Swin's augmentation: RandAugment, mixup, CutMix, smoothing 0.1, gradients
clipped at 1. Random erasing is missing, and the tables of relative positions have weight decay, unlike Swin's; that of
the last stage is of a 14 x 14 window, of which its 7 x 7 maps read the middle.
"""

from __future__ import annotations

import json

from torch import Tensor, nn

from weft.lab.sweep import Cell
from weft.layers import FeedForward, SubsampledWindowAttention
from weft.tasks import TrainConfig, make_config
from weft.tasks.imagenet import StoredImages

TITLE = "Tables 2 and 9: Swin-T, sampled windows"
METRIC = "accuracy"

PAPER = {  # sampled layers, biased, dense finish -> accuracy
    (0, True, False): None,
    (10, True, False): 80.56,
    (10, True, True): 81.15,
    (10, False, False): 80.21,
    (10, False, True): 80.80,
    (6, True, False): 81.23,
    (6, True, True): 81.60,
    (6, False, False): 81.21,
    (6, False, True): 81.36,
}
EPOCH = (1_281_167 - 10_000) / 1024  # steps; 10,000 training images are for validation
DEPTHS, HEADS = (2, 2, 6, 2), (3, 6, 12, 24)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, *, window: int, shift: int, biased: bool, sampled: bool, drop: float):
        from timm.layers import DropPath

        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.attention = SubsampledWindowAttention(dim, heads, window=window, shift=shift, biased=biased)
        if not sampled:
            self.attention.sampling = False
        self.feedforward, self.drop = FeedForward(dim, 4 * dim), DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norms[0](x)))
        return x + self.drop(self.feedforward(self.norms[1](x)))


class Swin(nn.Module):
    """Swin-T of channels-last maps; `sampled` layers of the first three stages sample in training."""

    def __init__(self, size: int, classes: int, *, sampled: int, biased: bool, dim: int = 96, window: int = 14):
        super().__init__()
        first = 10 - sampled  # dense layers before the sampled ones
        self.embed, self.norm_in = nn.Conv2d(3, dim, 4, 4), nn.LayerNorm(dim)
        self.stages, self.merge = nn.ModuleList(), nn.ModuleList()
        number, side = 0, size // 4
        for stage, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True)):
            width = dim * 2**stage
            blocks = nn.ModuleList()
            for i in range(depth):
                shift = window // 2 if i % 2 and side > window else 0
                use = stage < 3 and number >= first
                drop = 0.2 * number / 11
                blocks.append(Block(width, heads, window=window, shift=shift, biased=biased, sampled=use, drop=drop))
                number += 1
            self.stages.append(blocks)
            side //= 2
            if stage < 3:
                self.merge.append(nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)))
        self.norm, self.head = nn.LayerNorm(8 * dim), nn.Linear(8 * dim, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm_in(self.embed(images).permute(0, 2, 3, 1))
        for stage, blocks in enumerate(self.stages):
            for block in blocks:
                x = block(x)
            if stage < 3:
                x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)
                x = self.merge[stage](x)
        return self.head(self.norm(x).mean((1, 2)))


class SampledSwin(StoredImages):
    """ImageNet by the Swin above; the number of sampled layers and the local bias are model options."""

    defaults = {**StoredImages.defaults, "model": "swin", "model_options": '{"sampled": 10, "biased": true}'}

    def check(self, config: TrainConfig) -> None:
        if config.model != "swin":
            raise ValueError(f"{self.name} supports --model swin; got {config.model!r}")

    def host(self, config: TrainConfig, size: int, classes: int) -> nn.Module:
        return Swin(size, classes, **config.options("model_options"))


TASKS = [SampledSwin("imagenet-swin", "ImageNet-1k (image-net.org)", "imagenet")]


def cells() -> list[Cell]:
    found = []
    for (sampled, biased, finish), figure in PAPER.items():
        # The lab makes mechanisms of this name dense at the end.
        dense_finish = {"attention": "subsampled", "finetune_dense_at": 0.82} if finish else {}
        config = make_config(
            "imagenet-swin",
            model="swin",
            model_options=json.dumps({"sampled": sampled, "biased": biased}),
            steps=int(300 * EPOCH),
            batch_size=1024,
            learning_rate=1e-3,
            final_learning_rate=1e-5,
            weight_decay=0.05,
            warmup=round(20 * EPOCH),
            augmentation="rand-m9-mstd0.5-inc1",
            mixup=0.8,
            cutmix=1.0,
            eval_every=1250,
            checkpoint_every=1250,
            precision="bf16-mixed",
            compile=True,
            **dense_finish,
        )
        row = f"{sampled} layers{' +FT' if finish else ''}" if sampled else "dense"
        found.append(Cell(row, "biased" if biased else "unbiased", config, figure))
    return found
