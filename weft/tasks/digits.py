"""The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels, as row-major sequences of 64 tokens.

Real data that trains in seconds on a CPU, used by the demo and the tests. The 17 shades are rounded to five; id 0 is
padding, id s + 1 is shade s. Split by a fixed permutation: 1,297 train, 200 validation, 300 test.
"""

from __future__ import annotations

import numpy as np
import torch

from .base import DataMissing, TaskData, TextClassification
from .config import TrainConfig
from .registry import add_task

TRAIN, VAL = 1297, 200


class Digits(TextClassification):
    name = "digits"
    about = "handwritten digits, 8 x 8 pixels as 64 tokens; included in scikit-learn"
    class_names = tuple("0123456789")
    reads = frozenset({"pooling", "norm", "qk_norm"})
    defaults = dict(
        layers=2, heads=4, head_dim=8, dim=32, mlp_dim=64, pooling="mean", dropout=0.0, steps=300, batch_size=64,
        optimizer="adamw", learning_rate=8e-3, weight_decay=0.01, schedule="cosine", warmup=60, beta2=0.98, clip=1.0,
        eval_every=50, checkpoint_every=50, log_every=10,
    )  # fmt: skip
    presets = {"deep": dict(layers=4, heads=2), "wide": dict(layers=1, heads=8)}

    def load(self, config: TrainConfig) -> TaskData:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataMissing("the digits are part of scikit-learn: pip install 'weft[lab]'") from error
        images, labels = load_digits(return_X_y=True)
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(labels))
        ids = torch.from_numpy(np.rint(images[order] / 4).astype(np.uint8) + 1)
        label = torch.from_numpy(labels[order].astype(np.uint8))
        cuts = slice(0, TRAIN), slice(TRAIN, TRAIN + VAL), slice(TRAIN + VAL, None)
        train, val, test = ({"ids": ids[cut], "label": label[cut]} for cut in cuts)
        return TaskData(train, val, test, length=64, facts={"vocab": 6, "classes": 10})


add_task(Digits())
