"""Table 4: the best density estimates, Combiner-Axial in 128 layers on CIFAR-10 and 30 on ImageNet-64.

    weft sweep experiments/combiner/table4.py

Combiner, https://arxiv.org/abs/2107.05768: the Sparse Transformer's architecture (width 256, 2 heads of half that
width, MLP 512, dropout 0.25) for CIFAR-10, width 768 for ImageNet-64, 1,200,000 steps, cosine, no augmentation, three
runs. The paper gives no batch size and learning rate: we use 32 and 3e-4, and 12 heads for ImageNet-64. The table's
other values (PixelCNN++ 2.92, Image Transformer 2.90, PixelSNAIL 2.85, Sparse Transformer 2.80 and 3.44, Routing
Transformer 3.43) come from other papers. These runs take weeks on several devices.
"""

from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE = "Table 4: density estimation, Combiner-Axial"
METRIC = "bits_per_dimension"
SEEDS = (0, 1, 2)

COMMON = dict(
    attention="combiner-axial", positions="learned", steps=1_200_000, warmup=10_000, batch_size=32,
    learning_rate=3e-4, eval_every=10_000, checkpoint_every=5000, precision="bf16-mixed", compile=True,
)  # fmt: skip
CIFAR = dict(
    attention_options='{"block_size": 96}', layers=128, dim=256, heads=2,
    head_dim=64, mlp_dim=512, dropout=0.25, checkpoint_activations=True,
)  # fmt: skip
IMAGENET = dict(
    attention_options='{"block_size": 192}', layers=30, dim=768,
    heads=12, head_dim=64, mlp_dim=3072, dropout=0.0, checkpoint_activations=True,
)  # fmt: skip


def cells() -> list[Cell]:
    return [
        Cell("Combiner-Axial", "CIFAR-10", make_config("cifar10-density", **COMMON, **CIFAR), 2.77),
        Cell("Combiner-Axial", "ImageNet-64", make_config("imagenet64-density", **COMMON, **IMAGENET), 3.42),
    ]
