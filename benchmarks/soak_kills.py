"""Kill a run at random moments, again and again, and compare it with one that nobody touched: to the last bit.

    python benchmarks/soak_kills.py --kills 200 --workers 16

Each round starts the real command and sends it SIGKILL (now and then SIGTERM) after a random time, in the middle of a
step, an evaluation or a write, then starts it again with --resume. When all kills are spent the run is left to finish.
Every loss, rate and metric of its log and every tensor of its last checkpoint must equal the undisturbed run's.

Workers share out the kills; each is a process with a run, a folder and a seed of its own, and one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from weft.lab.checkpoint import Checkpoints, read

SETTINGS = dict(
    layers=1, heads=2, head_dim=8, dim=16, mlp_dim=16, batch_size=8, dropout=0.2, clip=1.0, eval_batches=2, warmup=5,
    log_every=3, eval_every=11, checkpoint_every=4, accelerator="cpu",
    schedule="constant", learning_rate=1e-3,
)  # fmt: skip
NEVER = 10**6  # steps that no run reaches before it is killed
AFTER = 20  # steps after the last kill
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Soak:
    """One worker's share."""

    worker: int
    kills: int
    seed: int
    attention: str
    cache: float
    folder: Path

    def command(self, out: Path, steps: int) -> list[str]:
        settings = {**SETTINGS, "steps": steps, "attention": self.attention, "cache": self.cache, "out": out}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return [sys.executable, "-m", "weft.cli", "train", "digits", "--resume", *options]

    def start(self, out: Path, steps: int, log: Any) -> subprocess.Popen:
        environment = {**os.environ, **ONE_THREAD}
        return subprocess.Popen(self.command(out, steps), stdout=log, stderr=log, env=environment)


def entries(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_once(soak: Soak, rng: random.Random, killed: Path, log: Any) -> int:
    """Start the run, kill it at a random moment, and return its exit code."""
    before = size(killed / "metrics.jsonl")
    process = soak.start(killed, NEVER, log)
    # Most kills come while it trains; some while it still starts, reads or rewinds.
    early = rng.random() < 0.1
    limit = time.perf_counter() + (rng.uniform(0, 8) if early else 120)
    while process.poll() is None and time.perf_counter() < limit:
        if not early and size(killed / "metrics.jsonl") != before:
            break
        time.sleep(0.001)
    time.sleep(0 if early else rng.uniform(0, 0.6))
    process.send_signal(signal.SIGTERM if rng.random() < 0.1 else signal.SIGKILL)
    return process.wait(timeout=120)


def run(soak: Soak) -> dict[str, Any]:
    """Spend the kills, finish, compare."""
    torch.set_num_threads(1)
    rng = random.Random(soak.seed)
    soak.folder.mkdir(parents=True)
    killed, whole = soak.folder / "killed", soak.folder / "whole"
    codes: Counter[str] = Counter()
    with open(soak.folder / "output.txt", "wb") as log:
        for number in range(soak.kills):
            code = kill_once(soak, rng, killed, log)
            codes[str(code)] += 1
            saved = max(Checkpoints(killed / "checkpoints").steps(), default=0)
            print(
                f"worker {soak.worker}, kill {number + 1}/{soak.kills}: exit {code}, saved up to step {saved}",
                flush=True,
            )
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 75):
                raise RuntimeError(f"the run ended by itself with {code}: {tail(soak)}")
        reached = max(Checkpoints(killed / "checkpoints").steps(), default=0) + AFTER
        for out in (killed, whole):  # the constant rate lets a run end anywhere
            code = soak.start(out, reached, log).wait()
            if code:
                raise RuntimeError(f"{out.name} ended with {code}: {tail(soak)}")
    ours, theirs = entries(killed), entries(whole)
    x, y = (read(Checkpoints(out / "checkpoints").path(reached))[0] for out in (killed, whole))
    return {
        "worker": soak.worker,
        "seed": soak.seed,
        "kills": soak.kills,
        "exit_codes": dict(codes),
        "steps": reached,
        "lines_compared": len(theirs),
        "lines_different": sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs)),
        "tensors_compared": len(y),
        "tensors_different": sum(name not in y or not torch.equal(x[name], y[name]) for name in x)
        + len(set(y) - set(x)),
    }


def tail(soak: Soak) -> str:
    lines = (soak.folder / "output.txt").read_text(errors="replace").splitlines()
    return " | ".join(lines[-3:]) or "it said nothing"


def shares(kills: int, workers: int) -> list[int]:
    """Kills per worker, as even as can be."""
    return [kills // workers + (worker < kills % workers) for worker in range(workers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1, help="soaks side by side, each on one core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", default="full")
    parser.add_argument("--cache", type=float, default=0.5, help="the cache is module state that must survive too")
    parser.add_argument("--out", default="", help="also write the outcome as JSON")
    args = parser.parse_args()
    if args.kills < 1 or args.workers < 1:
        parser.error("--kills and --workers must be at least 1")
    workers = min(args.workers, args.kills)
    begin = time.perf_counter()
    done: list[dict[str, Any]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for worker, kills in enumerate(shares(args.kills, workers)):
                place = Path(folder) / f"worker-{worker}"
                soak = Soak(worker, kills, args.seed + worker, args.attention, args.cache, place)
                jobs[pool.submit(run, soak)] = worker
            for job in as_completed(jobs):
                try:
                    done.append(job.result())
                except Exception as error:  # the other workers' outcome still counts
                    failed.append(f"worker {jobs[job]}: {type(error).__name__}: {error}")
                    print(failed[-1], flush=True)
    done.sort(key=lambda outcome: outcome["worker"])
    codes: Counter[str] = Counter()
    for outcome in done:
        codes.update(outcome["exit_codes"])
    counted = ("kills", "steps", "lines_compared", "lines_different", "tensors_compared", "tensors_different")
    report = {name: sum(outcome[name] for outcome in done) for name in counted}
    report |= {"exit_codes": dict(codes), "failed": failed, "minutes": round((time.perf_counter() - begin) / 60, 1)}
    report["workers"] = done
    print(json.dumps({**report, "workers": workers}, indent=2))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    if failed:
        raise SystemExit(f"{len(failed)} of {workers} workers did not finish")
    if report["lines_different"] or report["tensors_different"]:
        raise SystemExit("a killed run differs from the undisturbed one")
    print(f"{report['kills']} kills, no difference")


if __name__ == "__main__":
    main()
