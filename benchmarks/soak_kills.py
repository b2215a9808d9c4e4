"""Kill a run at random moments, again and again, and compare it with one that nobody touched: to the last bit.

    python benchmarks/soak_kills.py --kills 200

Each round starts the real command and sends it SIGKILL (now and then SIGTERM) after a random time, in the middle of a
step, an evaluation or a write, then starts it again with --resume. When all kills are spent the run is left to finish.
Every loss, rate and metric of its log and every tensor of its last checkpoint must equal the undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from weft.lab.checkpoint import Checkpoints, read

SETTINGS = dict(
    layers=1, heads=2, head_dim=8, dim=16, mlp_dim=16, batch_size=8, dropout=0.2, clip=1.0, eval_batches=2, warmup=5,
    log_every=3, eval_every=11, checkpoint_every=4, accelerator="cpu",
    schedule="constant", learning_rate=1e-3,
)  # fmt: skip


def command(out: Path, steps: int, attention: str, cache: float) -> list[str]:
    settings = {**SETTINGS, "steps": steps, "attention": attention, "cache": cache, "out": out}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "weft.cli", "train", "digits", "--resume", *options]


def log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default="full")
    parser.add_argument("--cache", type=float, default=0.5, help="the cache is module state that must survive too")
    parser.add_argument("--out", default="", help="also write the outcome as JSON")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    steps = 10**6  # never reached

    with tempfile.TemporaryDirectory() as folder:
        killed, whole = Path(folder) / "killed", Path(folder) / "whole"
        outcomes: dict[str, int] = {}
        begin = time.perf_counter()
        for number in range(args.kills):
            before = lines(killed / "metrics.jsonl")
            process = subprocess.Popen(
                command(killed, steps, args.attention, args.cache),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            # Most kills come while it trains; some while it still starts, reads or rewinds.
            early = rng.random() < 0.1
            limit = time.perf_counter() + (rng.uniform(0, 8) if early else 120)
            while process.poll() is None and time.perf_counter() < limit:
                if not early and lines(killed / "metrics.jsonl") != before:
                    break
                time.sleep(0.001)
            time.sleep(0 if early else rng.uniform(0, 0.6))
            process.send_signal(signal.SIGTERM if rng.random() < 0.1 else signal.SIGKILL)
            code = process.wait(timeout=120)
            outcomes[str(code)] = outcomes.get(str(code), 0) + 1
            saved = Checkpoints(killed / "checkpoints").steps()
            print(
                f"kill {number + 1}/{args.kills}: exit {code}, saved up to step {saved[-1] if saved else 0}", flush=True
            )
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 75):
                raise SystemExit(f"the run ended by itself with {code}")
        reached = max(Checkpoints(killed / "checkpoints").steps(), default=0)
        for out in (killed, whole):  # the constant rate lets a run end anywhere
            subprocess.run(
                command(out, reached + 20, args.attention, args.cache), stdout=subprocess.DEVNULL, check=True
            )
        ours, theirs = log(killed), log(whole)
        different = sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
        x, y = (read(Checkpoints(out / "checkpoints").path(reached + 20))[0] for out in (killed, whole))
        odd = sum(name not in y or not torch.equal(x[name], y[name]) for name in x) + len(set(y) - set(x))
        report = {
            "kills": args.kills,
            "exit_codes": outcomes,
            "steps": reached + 20,
            "lines_compared": len(theirs),
            "lines_different": different,
            "tensors_compared": len(y),
            "tensors_different": odd,
            "minutes": round((time.perf_counter() - begin) / 60, 1),
        }
        print(json.dumps(report, indent=2))
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
        if different or odd:
            raise SystemExit("the killed run differs from the undisturbed one")
        print(f"{args.kills} kills, no difference")


if __name__ == "__main__":
    main()
