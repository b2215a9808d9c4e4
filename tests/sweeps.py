"""A small sweep and a stand-in for its runs, shared by tests."""

import sys
from pathlib import Path

from weft.lab.sweep import Sweep, load_sweep

FILE = '''
"""A sweep of the tests.

With a second paragraph."""

from common import TINY

from weft.lab import make_config
from weft.lab.sweep import Cell

TITLE = "Digits, small"
METRIC = "accuracy"
SEEDS = (0, 1)


def cells() -> list[Cell]:
    return [
        Cell(row=row, column=column, config=make_config("digits", attention=row, heads=heads, **TINY), paper=paper)
        for row, paper in (("full", 90.0), ("linear", None))
        for column, heads in (("1×2", 2), ("wide, 1x4", 4))
    ]
'''
COMMON = """
TINY = dict(
    layers=1, head_dim=8, dim=16, mlp_dim=16, steps=12, batch_size=8, eval_every=5, checkpoint_every=3, log_every=1,
    warmup=2, eval_batches=2, accelerator="cpu",
)
"""
# Stands for `weft resume FOLDER` where only the sweep is tested: no torch, done in an instant, or slowly if it has 500
# steps or more. Fails in a folder that has a file "broken", and the first time in one that has a file "large".
STAND_IN = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
steps = json.loads((folder / "config.json").read_text())["steps"]
kept = folder / "checkpoints"
kept.mkdir(exist_ok=True)
first = max([int(path.stem[5:]) for path in kept.glob("step-*")], default=0) + 1
start = {"commit": "1234567", "torch": "2", "time": "now", "weft": "0", "python": "3", "platform": "x"}
(folder / "environment.json").write_text(json.dumps([start]))
if (folder / "broken").exists():
    print("reading")
    print("weft: the data is missing", file=sys.stderr)
    sys.exit(66)
if (folder / "large").exists():
    (folder / "large").unlink()
    print("weft: out of memory", file=sys.stderr)
    sys.exit(73)
with open(folder / "metrics.jsonl", "a") as log:
    for step in range(first, steps + 1):
        entry = {"kind": "train", "step": step, "loss": 1 / step, "lr": 1, "tokens_per_s": 5.0}
        log.write(json.dumps(entry) + "\\n")
        log.flush()
        time.sleep(0.02 if steps >= 500 else 0)
        if stop:
            (kept / f"step-{step:08d}.safetensors").touch()
            sys.exit(75)
    log.write(json.dumps({"kind": "val", "step": step, "accuracy": 0.25}) + "\\n")
result = {"step": step, "best_step": step, "val": {"accuracy": 0.25}, "test": {"accuracy": 0.5}, "parameters": 7}
(folder / "result.json").write_text(json.dumps(result | {"tokens_per_s": 5.0}))
"""


def write_sweep(folder: Path, name: str = "small", file: str = FILE) -> Sweep:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(file)
    (folder / "common.py").write_text(COMMON)
    return load_sweep(folder / f"{name}.py")


def stand_in(folder: Path) -> list[str]:
    script = folder / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, "-S", str(script)]
