"""A CRATE and a ViT of the same size, from scratch on CIFAR-10, in the same minutes of one device.

    python experiments/crate/cifar10.py --data data --minutes 4 --out runs/crate-cifar10

Both are trained alike: Lion (timm's), weight decay 0.5, label smoothing 0.1, random crops and mirrorings, a linear
warm-up and a cosine, bfloat16. Writes result.json, the weights, and for the CRATE the page of `weft.inspect`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import CLASSES, Data, accuracy, fit, machine, normalised, parameters, smoothed, write
from safetensors.torch import save_file
from torch import nn

from weft.inspect import report
from weft.models import CRATE


def make_crate(options: argparse.Namespace) -> nn.Module:
    return CRATE(
        dim=options.dim, heads=options.dim // 64 or 1, layers=options.layers, classes=10, image_size=32, patch=4
    )


def make_vit(options: argparse.Namespace) -> nn.Module:
    """Half as wide: 12 d² weights a layer where a CRATE has 3 d²."""
    from timm.models.vision_transformer import VisionTransformer

    d = options.dim // 2
    return VisionTransformer(
        img_size=32, patch_size=4, embed_dim=d, depth=options.layers, num_heads=d // 64 or 1, num_classes=10
    )


MODELS = {"crate": make_crate, "vit": make_vit}


def train(name: str, data: Data, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from timm.optim import Lion

    torch.manual_seed(options.seed)
    model = MODELS[name](options).to(device)
    optimizer = Lion(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=options.weight_decay)
    kept: list[tuple[str, dict[str, torch.Tensor]]] = []

    def see(step: int, steps: int) -> None:
        kept.append((f"step {step}", {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}))
        if step:
            found = accuracy(model, data.test_images, data.test_labels)
            print(f"{name}: step {step} of {steps}, test accuracy {found:.4f}", flush=True)

    def loss(fast: nn.Module, generator: torch.Generator) -> torch.Tensor:
        images, labels = data.batch(options.batch, generator)
        return smoothed(fast(images), labels)

    begun = time.perf_counter()
    found = fit(
        model,
        optimizer,
        loss,
        minutes=options.minutes,
        steps=options.steps,
        warmup=options.warmup,
        seed=options.seed,
        compile=options.compile,
        see=see,
    )
    found |= {
        "parameters": parameters(model),
        "images_per_second": round(found["steps"] * options.batch / found["seconds"]),
        "epochs": round(found["steps"] * options.batch / len(data.images), 2),
        "test_accuracy": accuracy(model, data.test_images, data.test_labels),
        "train_accuracy": accuracy(model, data.images[:10_000], data.labels[:10_000]),
        "wall_seconds": round(time.perf_counter() - begun, 1),
    }
    save_file(kept[-1][1], options.out / f"{name}.safetensors")
    if name == "crate":
        n = options.measure
        report(
            model,
            normalised(data.test_images[:n]),
            out=options.out / "crate.html",
            title=f"CRATE, {found['parameters'] / 1e6:.2f} M, CIFAR-10",
            classes=CLASSES,
            targets=[CLASSES[i] for i in data.test_labels[:6].tolist()],
            splits={"train": [normalised(data.images[:n])], "test": [normalised(data.test_images[:n])]},
            checkpoints=kept,
            facts=[("test accuracy", f"{found['test_accuracy']:.2%}")],
            examples=6,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder that holds cifar-10-batches-bin or cifar10.parquet")
    parser.add_argument("--sheets", type=Path, help="or a folder of sheets, 10,000 images each, as WebP")
    parser.add_argument("--out", type=Path, default=Path("runs/crate-cifar10"))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each model")
    parser.add_argument("--steps", type=int, help="in place of the minutes: the same seed then gives the same run")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2.4e-4)
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    parser.add_argument("--dim", type=int, default=384, help="width of the CRATE; the ViT has half")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=1000, help="images of each split to measure the layers on")
    parser.add_argument("--limit", type=int, help="use only this many images of each split, for a quick try")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    data = Data(options.data, options.sheets, device)
    if options.limit:
        for name in ("images", "labels", "test_images", "test_labels"):
            setattr(data, name, getattr(data, name)[: options.limit])
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    found: dict[str, Any] = {"settings": settings, **machine(device)}
    for name in options.models:
        found[name] = train(name, data, options, device)
        write(options.out / "result.json", found)
    for name in options.models:
        r = found[name]
        print(
            f"{name:6} {r['parameters']:>10,} parameters  {r['steps']:>6} steps in {r['seconds']:.0f} s "
            f"({r['epochs']} epochs, {r['images_per_second']:,} images/s)  test accuracy {r['test_accuracy']:.4f}"
        )


if __name__ == "__main__":
    main()
