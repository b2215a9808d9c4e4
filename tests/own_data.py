"""Helpers to test the tasks for your own data."""

from __future__ import annotations

from weft.tasks import get_task, make_config

TINY = dict(
    layers=1, heads=2, dim=16, head_dim=8, mlp_dim=16, steps=3, warmup=1, eval_every=3, batch_size=8, max_length=24,
    accelerator="cpu",
)  # fmt: skip


def load(task, path, **options):
    return get_task(task).load(make_config(task, data=str(path), **options))
