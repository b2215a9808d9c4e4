"""What happens inside a run: loss, gradients, logits and attention of every layer at every kept checkpoint.

    weft train listops --layers 6 --heads 8 --steps 2000 --checkpoint-every 100 --keep 99 --out runs/deep
    python -m experiments.stability runs/deep --data data --out stability.json

For each checkpoint, on the same training examples without dropout: the loss, its gradient norm, and per layer the norm
of the attention gradients, the largest |logit|, the entropy of the softmax over its maximum log(keys), the same of the
first token, which the classifier reads, and that token's weight of itself, the norm of the attention's output over that
of its input, the RMS of the residual stream, and how alike the examples are: the mean cosine of their first tokens. At
1 the layer has lost the difference between the examples. For `full` attention in weft's own encoder.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft import MultiheadAttention
from weft.lab.checkpoint import Checkpoints, read
from weft.lab.evaluate import load_run
from weft.lab.run import Run
from weft.lab.state import restore_model
from weft.layers.encoder import EncoderBlock
from weft.tasks.config import TrainConfig
from weft.tasks.registry import task_of


def alike(x: Tensor) -> float:
    """The mean cosine between different rows of x (examples, dim)."""
    x = nn.functional.normalize(x.detach().float(), dim=1)
    n = len(x)
    return ((x @ x.mT).sum() - n).item() / (n * (n - 1))


def look(model: nn.Module, config: TrainConfig, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The measurements of one checkpoint."""
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    seen: list[dict[str, float]] = []

    def watch(layer: Any, inputs: tuple[Tensor, Tensor], out: Tensor) -> None:
        x, mask = inputs[:2]
        q, k, _ = layer.project(x)
        logits = (q @ k.mT / layer.head_dim**0.5).float()
        hidden = ~mask[:, None, None]
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        entropy = torch.special.entr(weights).sum(-1) / mask.sum(1).clamp(min=2).log()[:, None, None]
        real = mask[:, None].expand(entropy.shape)
        seen.append(
            {
                "largest_logit": logits.masked_fill(hidden, 0).abs().amax().item(),
                "entropy": entropy[real].mean().item(),
                "first_entropy": entropy[:, :, 0].mean().item(),
                "first_self": weights[:, :, 0, 0].mean().item(),
                "update": (out[mask].norm() / x[mask].norm()).item(),
                "alike": alike(x[:, 0]),
            }
        )

    stream: list[float] = []

    def measure(norm: Any, inputs: tuple[Tensor]) -> None:
        stream.append(inputs[0].detach().float().pow(2).mean().sqrt().item())

    blocks = [module for module in model.modules() if isinstance(module, EncoderBlock)]
    handles = [layer.register_forward_hook(watch) for layer in layers]
    handles += [block.attention_norm.register_forward_pre_hook(measure) for block in blocks]
    try:
        with torch.enable_grad():
            loss = task_of(config).loss(model, batch, config)
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad()
    loss.backward()
    norms = [[p.grad.norm() for p in layer.parameters() if p.grad is not None] for layer in layers]
    whole = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    for row, parts, size in zip(seen, norms, stream, strict=True):
        row["gradient"], row["stream"] = torch.stack(parts).norm().item(), size
    return {"loss": loss.item(), "gradient": torch.stack(whole).norm().item(), "layers": seen}


def checkpoints(folder: Path, data: str, examples: int, device: str, every: int = 1) -> list[dict[str, Any]]:
    model, config, found = load_run(folder, "last", data=data)
    config.label_smoothing = 0.0
    model = model.to(device).eval()
    batch = {name: column[:examples].to(device) for name, column in found.train.items()}
    run, rows = Run(folder), []
    kept = Checkpoints(run.checkpoints)
    for step in kept.steps()[::every]:
        tensors, numbers = read(kept.path(step))
        restore_model(model, tensors, numbers.get("extra", {}))
        rows.append({"step": step, **look(model, config, batch)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", default="", help="folder of the data, if it has moved")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="look at every n-th checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the measurements of all runs")
    given = parser.parse_args()
    result = {}
    for folder in given.runs:
        result[folder.name] = rows = checkpoints(folder, given.data, given.examples, given.device, given.every)
        for row in rows:
            each = " ".join(f"{x['entropy']:.2f}/{x['largest_logit']:.0f}/{x['alike']:.2f}" for x in row["layers"])
            print(f"{folder.name} {row['step']:6} loss {row['loss']:.3f} gradient {row['gradient']:.2f}  {each}")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
