"""Train, record the attention of every layer at every step, and find the first tensor that is not finite.

    python -m experiments.watch --data data --out runs/watched --set layers=6 heads=8 steps=1000 packed=true

Per step: the loss and the gradient norm before clipping. Per layer: the largest |value| of the attention's inputs and
output and of their gradients, and a bound on its logits, max |q| · max |k| / √D. If one of them is not finite, training
stops, and the attention of the first such layer is computed again from the same tensors by each implementation that
PyTorch has. `--cudnn` trains as weft did before it avoided cuDNN: packed `full` attention in padded groups.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft import MultiheadAttention
from weft.attention.full import FullAttention
from weft.core import packing, softmax
from weft.core.segments import Segments
from weft.lab.divergence import Diverged
from weft.lab.loop import Interrupted, Training
from weft.lab.sweep import parse_override
from weft.tasks import make_config

PARTS = ("inputs", "output", "logits", "output_gradient", "inputs_gradient")  # in the order of their computation


class NotFinite(Diverged):
    """A watched tensor is not finite."""


class Watch:
    """Records `training`, whose model has weft's own attention layers."""

    def __init__(self, training: Training, seconds: float = math.inf):
        self.training, self.ends = training, time.monotonic() + seconds
        self.layers = [m for m in training.raw.modules() if isinstance(m, MultiheadAttention)]
        self.rows: list[dict[str, Any]] = []
        self.first: dict[str, Any] | None = None  # the first tensor that was not finite
        for number, layer in enumerate(self.layers):
            # Compiled packed models call only the mechanism, except in the last layer, of which one token is read.
            layer.register_forward_hook(self._hook(number))
            layer.attention.register_forward_hook(self._hook(number))
        self._clear()
        update, backward = training._update, training.fabric.backward

        def watched_backward(loss: Tensor) -> None:
            backward(loss)
            gradients = [p.grad.norm() for p in training.raw.parameters() if p.grad is not None]
            self.norm = torch.stack(gradients).norm()

        def watched_update(step: int) -> None:
            self._clear()
            update(step)
            self._read(step)
            if time.monotonic() > self.ends:
                raise Interrupted(f"stopped after step {step}: the time is up")

        training.fabric.backward = watched_backward
        training._update = watched_update  # type: ignore[method-assign]

    def _clear(self) -> None:
        zero = torch.zeros((), device=self.training.fabric.device)
        self.found = [dict.fromkeys(PARTS, zero) for _ in self.layers]
        self.kept: list[dict[str, Any]] = [{} for _ in self.layers]

    def _hook(self, number: int) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
            if not torch.is_grad_enabled() or not out.requires_grad or torch.compiler.is_compiling():
                return
            found, kept = self.found[number], self.kept[number]
            tensors = [x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()]
            if module is not self.layers[number]:
                q, k, v = inputs[:3]
                widest = q.detach().norm(dim=-1).amax() * k.detach().norm(dim=-1).amax()
                found["logits"] = widest.float() / q.shape[-1] ** 0.5
                documents = next((x for x in inputs if isinstance(x, Segments)), None)
                kept.update(q=q.detach(), k=k.detach(), v=v.detach(), documents=documents)
                out.register_hook(lambda gradient: kept.update(gradient=gradient))
            for name, x in [*(("inputs", x) for x in tensors), ("output", out)]:
                found[name] = torch.maximum(found[name], x.detach().abs().amax().float())
                if x.requires_grad:
                    x.register_hook(lambda gradient, name=name: self._gradient(number, name, gradient))

        return hook

    def _gradient(self, number: int, name: str, gradient: Tensor) -> None:
        found = self.found[number]
        found[f"{name}_gradient"] = torch.maximum(found[f"{name}_gradient"], gradient.abs().amax().float())

    def _read(self, step: int) -> None:
        parts = [found[part] for found in self.found for part in PARTS]
        loss, norm, *values = torch.stack([self.training.pending[-1].float(), self.norm, *parts]).tolist()
        table = [values[i : i + len(PARTS)] for i in range(0, len(values), len(PARTS))]
        row = {"step": step, "loss": loss, "gradient": norm}
        self.rows.append(row | {part: [layer[i] for layer in table] for i, part in enumerate(PARTS)})
        if all(map(math.isfinite, (loss, norm, *values))):
            return
        self.first = {"step": step, **self._where(table, loss)}
        raise NotFinite(f"step {step}: {self.first}")

    def _where(self, table: list[list[float]], loss: float) -> dict[str, Any]:
        forward = [(i, part) for i in range(len(table)) for part in (0, 1)]
        order = [*forward, *((i, part + 3) for i, part in sorted(forward, key=lambda place: -place[0]))]
        for at, (i, part) in enumerate(order):
            if at == len(forward) and not math.isfinite(loss):
                return {"tensor": "loss"}
            if not math.isfinite(table[i][part]):
                again = recomputed(**self.kept[i]) if "gradient" in self.kept[i] else {}
                return {"layer": i + 1, "tensor": PARTS[part], "again": again}
        odd = [name for name, p in self.training.raw.named_parameters() if not p.isfinite().all()]
        return {"tensor": "the gradient of a parameter", "after the update": odd[:9]}


def recomputed(q: Tensor, k: Tensor, v: Tensor, documents: Segments | None, gradient: Tensor) -> dict[str, Any]:
    """Full attention of the same tensors, without dropout, by every implementation: how many values of its output and
    gradients are not finite; and the smallest of the largest logits of a query."""
    rows = [slice(0, q.shape[2])]
    if documents is not None:
        rows = [slice(s, s + n) for s, n in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)]
    bound = min((q[:, :, r].float() @ k[:, :, r].float().mT / q.shape[-1] ** 0.5).amax(-1).min().item() for r in rows)
    result: dict[str, Any] = {"smallest_row_maximum": bound, "by": {}}
    longest = max(r.stop - r.start for r in rows)
    room = -(-longest // 128) * 128

    def padded(x: Tensor, length: int) -> Tensor:
        return torch.cat([F.pad(x[:1, :, r], (0, 0, 0, length - r.stop + r.start)) for r in rows])

    half = torch.bfloat16 if q.is_cuda else torch.float32
    kinds = {"float32": (SDPBackend.MATH, torch.float32), "efficient": (SDPBackend.EFFICIENT_ATTENTION, half)}
    kinds["cudnn"] = SDPBackend.CUDNN_ATTENTION, half
    for length in (room, room + 64):
        real = torch.stack([torch.arange(length, device=q.device) < r.stop - r.start for r in rows])[:, None, None]
        for name, (backend, dtype) in kinds.items():
            own = [padded(x, length).to(dtype).requires_grad_() for x in (q, k, v)]
            try:
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(*own, attn_mask=real)
                gradients = torch.autograd.grad(out, own, padded(gradient, length).to(dtype))
            except RuntimeError as error:
                result["by"][f"{name}, {length} keys"] = str(error).splitlines()[0][:80]
                continue
            result["by"][f"{name}, {length} keys"] = [int((~x.isfinite()).sum()) for x in (out, *gradients)]
    return result


def use_cudnn() -> None:
    """Packed `full` attention as before weft avoided cuDNN."""
    FullAttention.packs = False
    packing.without_cudnn = lambda x: nullcontext()  # type: ignore[assignment]
    aligned = softmax.aligned

    def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(aligned(q), aligned(k), aligned(v), **options)

    softmax.fused = fused


def summary(watch: Watch, ended: str, every: int = 50) -> dict[str, Any]:
    """What is kept of a run: every n-th row and the last two, with three digits."""

    def short(x: Any) -> Any:
        return [short(y) for y in x] if isinstance(x, list) else float(f"{x:.3g}") if isinstance(x, float) else x

    rows = [row for i, row in enumerate(watch.rows) if row["step"] % every == 0 or i + 3 > len(watch.rows)]
    means = [watch.rows[i : i + every] for i in range(0, len(watch.rows), every)]
    val = [[e["step"], e["loss"], e.get("accuracy")] for e in watch.training.folder.entries("val")]
    return {
        "steps": len(watch.rows),
        "ended": ended,
        "first": watch.first,
        "validation": [[round(x, 4) if isinstance(x, float) else x for x in row] for row in val],
        "loss": [[part[-1]["step"], round(sum(r["loss"] for r in part) / len(part), 4)] for part in means],
        "largest_gradient": short(max((r["gradient"] for r in watch.rows), default=0.0)),
        "rows": [{name: short(x) for name, x in row.items()} for row in rows],
    }


def watched(config: Any, seconds: float = math.inf) -> dict[str, Any]:
    """Train with this config and return the summary."""
    training, ended = Training(config), "complete"
    watch = Watch(training, seconds)
    try:
        training.run()
    except (Diverged, Interrupted) as error:
        ended = f"{type(error).__name__}: {error}"[:200]
    return summary(watch, ended)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="listops")
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", required=True, help="folder of the run; watch.json is written there")
    parser.add_argument("--preset", default="")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="settings of the run")
    parser.add_argument("--cudnn", action="store_true", help="full attention by cuDNN, in padded groups")
    given = parser.parse_args()
    if given.cudnn:
        use_cudnn()
    settings = dict(parse_override(text) for text in given.set)
    config = make_config(given.task, preset=given.preset, data=given.data, out=given.out, **settings)
    found = watched(config)
    (Path(given.out) / "watch.json").write_text(json.dumps(found) + "\n")
    print(f"{found['steps']} steps, {found['ended']}, largest gradient {found['largest_gradient']}")


if __name__ == "__main__":
    main()
