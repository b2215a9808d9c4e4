"""CRATE as a masked autoencoder on CIFAR-10, then what its encoder knows: a linear probe and fine-tuning.

    python experiments/crate/mae.py --data data --minutes 4 --out runs/crate-mae

Pre-training hides three quarters of the patches (AdamW, no labels). The probe trains one linear layer on the frozen
encoder; fine-tuning trains all of it as published (AdamW, learning rate 5e-5, weight decay 0.01, RandAugment). Each
takes a quarter of the minutes. Writes result.json and the pre-trained weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import Data, accuracy, fit, machine, parameters, smoothed, write
from safetensors.torch import save_file
from torch import nn

from weft.models import CRATEMAE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder that holds cifar-10-batches-bin or cifar10.parquet")
    parser.add_argument("--sheets", type=Path, help="or a folder of sheets, 10,000 images each, as WebP")
    parser.add_argument("--out", type=Path, default=Path("runs/crate-mae"))
    parser.add_argument("--minutes", type=float, default=4.0, help="of pre-training")
    parser.add_argument("--steps", type=int, help="in place of the minutes")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=5e-4, help="of pre-training")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use only this many images of each split, for a quick try")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    data = Data(options.data, options.sheets, device)
    if options.limit:
        for name in ("images", "labels", "test_images", "test_labels"):
            setattr(data, name, getattr(data, name)[: options.limit])
    common: dict[str, Any] = dict(warmup=0.05, seed=options.seed, compile=options.compile)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    found: dict[str, Any] = {"settings": settings, **machine(device)}

    torch.manual_seed(options.seed)
    heads = options.dim // 64 or 1
    mae = CRATEMAE(dim=options.dim, heads=heads, layers=options.layers, image_size=32, patch=4).to(device)

    def reconstruction(fast: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return fast(data.batch(options.batch, generator)[0])[0]

    optimizer = torch.optim.AdamW(mae.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.05)
    found["pretrain"] = fit(mae, optimizer, reconstruction, minutes=options.minutes, steps=options.steps, **common)
    found["pretrain"]["parameters"] = parameters(mae)
    print(f"pre-training: loss {found['pretrain']['loss'][0]} → {found['pretrain']['loss'][-1]}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().cpu().clone() for k, v in mae.state_dict().items()}, options.out / "mae.safetensors")

    for name, probe, lr in (("probe", True, 1e-3), ("finetune", False, 5e-5)):
        model = mae.classifier(10, pooling="mean")
        if probe:
            model.new_head(10, probe=True)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr, weight_decay=0.01)

        def labelled(fast: nn.Module, generator: torch.Generator, richly: bool = not probe) -> torch.Tensor:
            images, labels = data.batch(options.batch, generator, randaugment=richly)
            return smoothed(fast(images), labels)

        shorter = options.minutes / 4
        found[name] = fit(model, optimizer, labelled, minutes=shorter, steps=options.steps, **common)
        found[name]["test_accuracy"] = accuracy(model, data.test_images, data.test_labels)
        print(f"{name}: test accuracy {found[name]['test_accuracy']:.4f}", flush=True)
        write(options.out / "result.json", found)


if __name__ == "__main__":
    main()
