"""Images per second with and without a cache, in training and in evaluation: Table 9 of the cache paper.

Cached Transformers: Improving Transformers with Differentiable Memory Cache, https://arxiv.org/abs/2312.12742

PVT is weft's own; the paper's other models come from timm and get their cache from `weft.cache`, with the options of
experiments/cached. Plain and cached models alternate, with one training step (AdamW) or one evaluation batch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .report import Line, Report, Table, cell
from .timing import Call, How, forget, ratio, reason, take_turns

# Table 9, images per second of one V100: plain and cached in training, plain and cached in evaluation.
TABLE_9 = {
    "pvt-tiny": ((313, 257), (930, 768)),
    "pvt-small": ((181, 146), (689, 561)),
    "pvt-medium": ((101, 84), (393, 319)),
}
TIMM = {  # other models of Table 1; the paper does not print their speed
    "vit-small": "vit_small_patch16_224",
    "swin-tiny": "swin_tiny_patch4_window7_224",
    "pvtv2-b2": "pvt_v2_b2",
    "pvtv2-b3": "pvt_v2_b3",
    "pvtv2-b4": "pvt_v2_b4",
}
MODELS = (*TABLE_9, *TIMM)
CACHES: dict[str, dict[str, Any]] = {"vit": {"memory_attention": "same", "prefix": 1}, "swin": {"pool": [4, 2]}}


def build(name: str, cached: bool, share: float = 0.5) -> nn.Module:
    """A model with 1,000 classes for images of 224 x 224; the fraction `share` of its channels is cached."""
    if name in TABLE_9:
        from ...models.pvt import pvt

        return pvt(name.removeprefix("pvt-"), cached=cached, ratio=share)
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"{name} needs timm: pip install 'weft[timm]'") from error
    model = timm.create_model(TIMM[name])
    if cached:
        from ...adapt.surgery import cache

        options = CACHES.get(name.partition("-")[0], {"memory_attention": "same"})
        cache(model, share, position="conv", **options)
    return model


def batch_of(model: nn.Module, train: bool, how: How, batch: int) -> Call:
    """One training step, or one evaluation, of a batch of random images."""
    run = how.place(model.train(train))
    images = torch.randn(batch, 3, 224, 224, device=how.device, dtype=how.dtype)
    if not train:
        model.train()
        with torch.no_grad():
            run(images)  # write the cache once; an evaluation only reads it
        model.eval()

        def evaluate() -> None:
            with torch.no_grad():
                run(images)

        return evaluate
    labels = torch.randint(0, 1000, (batch,), device=how.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=how.device == "cuda")

    def step() -> None:
        F.cross_entropy(run(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(models: Sequence[str], how: How, report: Report, *, batch: int) -> None:
    """Add one record per model."""
    with Line(2 * len(models)) as line:
        for name in models:
            record: dict[str, Any] = {"model": name, "batch": batch}
            for place, kind in enumerate(("train", "test")):
                line.next(f"{name}, plain and cached, {kind}")
                record[kind] = _compare(name, kind == "train", how, batch)
                if name in TABLE_9:
                    plain, cached = TABLE_9[name][place]
                    record[kind]["paper"] = {"plain": plain, "cached": cached, "ratio": cached / plain}
                forget(how)
            report.add(record)


def _compare(name: str, train: bool, how: How, batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        with torch.device(how.device):
            nets = {"plain": build(name, False), "cached": build(name, True)}
        found = take_turns({key: batch_of(net, train, how, batch) for key, net in nets.items()}, how)
    except Exception as error:  # show failures in the table
        return {"error": reason(error)}
    rates: dict[str, Any] = {}
    for key, timing in found.items():
        rates[key] = timing.record()
        if not timing.error:
            rates[key]["images_per_s"] = batch / timing.median
    rates["ratio"] = ratio(*(rates[key].get("images_per_s") for key in ("cached", "plain")))
    return rates


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    headings = ["", "plain, images/s", "cached, images/s", "cached / plain", "paper", "memory, cached / plain"]
    made = []
    for kind, title in (("train", "training steps"), ("test", "evaluation")):
        table = Table(f"{title}, images of 224 x 224", headings)
        for record in records:
            found = record[kind]
            sides = [found.get(key, {}) for key in ("plain", "cached")]
            trouble = found.get("error") or sides[0].get("error") or sides[1].get("error")
            theirs = cell(found.get("paper", {}).get("ratio"), 2)
            if trouble:
                table.rows.append([record["model"], trouble, "", "", theirs, ""])
                continue
            rates = [cell(side["images_per_s"]) for side in sides]
            memory = ratio(sides[1].get("peak_mib"), sides[0].get("peak_mib"))
            table.rows.append([record["model"], *rates, cell(found["ratio"], 2), theirs, cell(memory, 2)])
        made.append(table)
    return made
