"""Disturb real runs (kills, full disks, damaged files, …) and compare them bit by bit with an undisturbed run.

    python benchmarks/faults.py                         every fault once, about a minute on two cores
    python benchmarks/faults.py --hours 2 --workers 16  random kills for two hours, then every fault once
    python benchmarks/faults.py --kills 200             200 random kills, then every fault once
    python benchmarks/faults.py --only sigterm,disk     some of them
    python benchmarks/faults.py --task "text --data=README.md --max-length=16" --skip ray     on another task

Each fault starts the real command, disturbs it, continues it with --resume, and compares every line of the log, every
tensor of the last checkpoint and the result with the undisturbed run. Or it damages a file of a complete run and
expects the same metric or an error message, never a traceback and never another metric. Exits with 1 if any fault
fails.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.lab.checkpoint import Checkpoints, DamagedCheckpoint, read

STEPS = 60
SETTINGS: dict[str, Any] = dict(
    steps=STEPS, layers=1, heads=2, head_dim=8, dim=16, mlp_dim=16, batch_size=8, dropout=0.2, clip=1.0, warmup=5,
    log_every=3, eval_every=11, checkpoint_every=4, accelerator="cpu", schedule="constant", learning_rate=1e-3,
    cache=0.5,
)  # fmt: skip
TASK = ["digits"]  # and its own options
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SAVED, CANNOT_SAVE = 75, 74


class Failed(Exception):
    """A fault changed the result."""


@dataclass
class Bench:
    """A folder to work in, and the undisturbed run."""

    folder: Path
    seed: int = 0

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def new(self, name: str) -> Path:
        return self.folder / name

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.whole, self.new(name)))


def start(*args: Any) -> subprocess.Popen[str]:
    """The command `weft`, its output in one pipe."""
    command = [sys.executable, "-m", "weft.cli", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _weft(args: list[str], log: str, limit: int, humble: bool) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if humble:  # root may write anywhere: drop its capabilities
        version_3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(version_3, none)
    sys.argv = ["weft", *args]
    from weft.cli import app

    app(args)


class Forked:
    """The same command, forked from a process with all imports done, so that it starts quickly.

    `Process.start` and `exitcode` read the exit codes of all children, and each can be read only once: if two threads
    do so at once, one of them gets 255. So they take turns.
    """

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.cli", "weft.lab.loop", "lightning.fabric", "sklearn.datasets"])
    numbers = itertools.count()
    turn = threading.Lock()

    def __init__(self, folder: Path, *args: Any, limit: int = 0, humble: bool = False):
        self.log = folder / f"output-{next(self.numbers)}.txt"
        self.log.touch()
        given = ([str(arg) for arg in args], str(self.log), limit, humble)
        self.process = self.context.Process(target=_weft, args=given)
        with self.turn:
            self.process.start()

    @property
    def pid(self) -> int:
        return int(self.process.pid or 0)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self.turn:
            return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        until(self, lambda: False, timeout)
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            raise Failed(f"it did not end within {timeout:.0f} s")
        return self.log.read_text(errors="replace"), None


def settings(out: Path, **changes: Any) -> list[str]:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **changes}.items()]
    return ["train", TASK[0], "--resume", f"--out={out}", *given, *TASK[1:]]


def train(out: Path, **how: int) -> Forked:
    return Forked(out.parent, *settings(out), **how)


def end(process: Forked | subprocess.Popen[str], *codes: int, says: str = "") -> str:
    """Wait for the process and return its output if the exit code is as expected."""
    text, _ = process.communicate(timeout=300)
    if "Traceback" in text:
        raise Failed(f"a traceback: {text.strip().splitlines()[-1]}")
    if process.returncode not in (codes or (0,)) or says not in text:
        tail = " | ".join(text.strip().splitlines()[-2:])
        raise Failed(f"exit code {process.returncode}, wanted {codes or (0,)} {says!r}: {tail}")
    return text


def same(out: Path, whole: Path) -> str:
    """Compare log, tensors and results of two runs, and return a summary."""
    ours, theirs = (lines(folder) for folder in (out, whole))
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise Failed(f"the log differs from line {at + 1}")
    (x, _), (y, _) = (read(Checkpoints(folder / "checkpoints").path(STEPS)) for folder in (out, whole))
    different = [name for name in {*x, *y} if name not in x or name not in y or not torch.equal(x[name], y[name])]
    if different:
        raise Failed(f"{len(different)} tensors differ")
    results = [json.loads((folder / "result.json").read_text()) for folder in (out, whole)]
    if any(results[0][name] != results[1][name] for name in ("step", "best_step", "val", "test")):
        raise Failed("the result differs")
    return f"{len(theirs)} lines, {len(y)} tensors and the result are equal"


def lines(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "seconds")} for entry in entries]


def until(process: Forked | subprocess.Popen[str], ready: Callable[[], bool], limit: float = 120) -> None:
    stop = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < stop and not ready():
        time.sleep(0.001)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


FAULTS: dict[str, Callable[[Bench], str]] = {}


def fault(function: Callable[[Bench], str]) -> Callable[[Bench], str]:
    FAULTS[function.__name__] = function
    return function


def signalled(bench: Bench, name: str, number: int, ready: Callable[[Path], bool], code: int) -> str:
    out = bench.new(name)
    process = train(out)
    until(process, lambda: ready(out))
    began = time.monotonic()
    process.send_signal(number)
    end(process, code, 0)
    took = time.monotonic() - began
    end(train(out))
    return f"{same(out, bench.whole)}; it ended after {took:.1f} s"


@fault
def kill_in_a_step(bench: Bench) -> str:
    return signalled(bench, "step", signal.SIGKILL, lambda out: size(out / "metrics.jsonl") > 2000, -signal.SIGKILL)


@fault
def kill_in_a_checkpoint(bench: Bench) -> str:
    """While the temporary file of a checkpoint exists."""
    writing = lambda out: any((out / "checkpoints").glob(".step-*.tmp"))  # noqa: E731
    return signalled(bench, "checkpoint", signal.SIGKILL, writing, -signal.SIGKILL)


@fault
def kill_in_an_evaluation(bench: Bench) -> str:
    """After the checkpoint of an evaluated step, before its evaluation is logged."""
    ready = lambda out: (out / "checkpoints" / "step-00000022.safetensors").exists()  # noqa: E731
    return signalled(bench, "evaluation", signal.SIGKILL, ready, -signal.SIGKILL)


@fault
def sigterm(bench: Bench) -> str:
    return signalled(bench, "term", signal.SIGTERM, lambda out: size(out / "metrics.jsonl") > 1000, SAVED)


@fault
def sighup_in_an_evaluation(bench: Bench) -> str:
    ready = lambda out: (out / "checkpoints" / "step-00000022.safetensors").exists()  # noqa: E731
    return signalled(bench, "hup", signal.SIGHUP, ready, SAVED)


@fault
def closed_pipe(bench: Bench) -> str:
    process = start(*settings(bench.new("pipe")))
    assert process.stdout is not None
    process.stdout.close()
    if process.wait(timeout=300):
        raise Failed(f"exit code {process.returncode}")
    return same(bench.new("pipe"), bench.whole)


@fault
def disk_full(bench: Bench) -> str:
    """Limit the file size, first to half a checkpoint, then to half a log."""
    out, limits = bench.new("full"), (size(Checkpoints(bench.whole / "checkpoints").path(STEPS)) // 2, 4000)
    for limit in limits:
        end(train(out, limit=limit), CANNOT_SAVE)
        shutil.rmtree(out, ignore_errors=True)
    process = train(out)
    until(process, lambda: size(out / "metrics.jsonl") > 1500)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2500, 2500))
    end(process, CANNOT_SAVE)
    end(train(out))
    return same(out, bench.whole)


@fault
def read_only(bench: Bench) -> str:
    """A read-only run can be evaluated but not continued."""
    out = bench.copy("readonly")
    (out / "result.json").unlink()
    found = [out, *out.rglob("*")]
    for path in found:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        text = end(Forked(bench.folder, "eval", out, "--accelerator=cpu", humble=True))
        end(Forked(bench.folder, "resume", out, humble=True), CANNOT_SAVE)
    finally:
        for path in found:
            path.chmod(0o755 if path.is_dir() else 0o644)
    return figure(text, bench.whole)


def figure(text: str, whole: Path) -> str:
    expected = json.loads((whole / "result.json").read_text())["test"]["loss"]
    if f"loss {expected:.4f}" not in text:
        raise Failed(f"another figure: {' '.join(text.split())}")
    return f"test loss {expected:.4f}, as it was"


@fault
def two_processes(bench: Bench) -> str:
    out = bench.new("two")
    first = train(out)
    until(first, lambda: size(out / "metrics.jsonl") > 500)
    first.send_signal(signal.SIGSTOP)  # paused in the middle of its work
    try:
        end(train(out), 2, says=f"in use by process {first.pid}")
    finally:
        first.send_signal(signal.SIGCONT)
    end(first)
    return same(out, bench.whole)


@fault
def readers_beside(bench: Bench) -> str:
    """Read checkpoints repeatedly while a run writes."""
    out, reads = bench.new("readers"), 0
    process = train(out)
    while process.poll() is None:
        if size(out / "metrics.jsonl"):
            Checkpoints(out / "checkpoints", say=lambda text: None).newest()
            reads += 1
    end(process)
    return f"{same(out, bench.whole)} after {reads} reads"


@fault
def damaged_bytes(bench: Bench) -> str:
    """Damage bytes of each kind of file: `weft eval` gives the same metric or an error message."""
    rng, told = random.Random(bench.seed), Counter[str]()
    out = bench.copy("damaged")
    files = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name not in (".lock", "log.txt")]
    jobs = []
    for number, path in enumerate(files):
        place = Path(shutil.copytree(out, bench.new(f"damaged-{number}"), copy_function=shutil.copy))
        target = place / path.relative_to(out)
        content = bytearray(target.read_bytes())
        how = rng.choice(("cut", "flip", "empty"))
        at = rng.randrange(len(content))
        content = {"cut": content[:at], "empty": bytearray()}.get(how, content)
        if how == "flip":
            content[at] ^= 1 << rng.randrange(7)
        target.write_bytes(content)
        jobs.append((path.name, how, place))
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda job: end(Forked(bench.folder, "eval", job[2], "--accelerator=cpu"), 0, 2, 66), jobs)
        for (name, how, place), text in zip(jobs, texts, strict=True):
            if "weft: " in text:
                told["refused"] += 1
            else:
                try:
                    figure(text, bench.whole)
                except Failed as error:
                    raise Failed(f"{name}, {how}: {error}") from None
                told["the same figure"] += 1
            shutil.rmtree(place)
    return ", ".join(f"{count} x {what}" for what, count in told.items())


@fault
def damaged_checkpoint(bench: Bench) -> str:
    """Truncate the newest checkpoint: the run continues from the one before it."""
    out = bench.new("cut")
    process = train(out)
    until(process, lambda: size(out / "metrics.jsonl") > 3000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = Checkpoints(out / "checkpoints").path(Checkpoints(out / "checkpoints").steps()[-1])
    content = newest.read_bytes()
    newest.unlink()  # the best checkpoint may be a hard link to it
    newest.write_bytes(content[: len(content) // 2])
    end(train(out), says="trying the one before it")
    return same(out, bench.whole)


def killed_rank(bench: Bench, strategy: str) -> str:
    """Kill one of two processes: the run ends, and one process continues it."""
    out = bench.new(strategy)
    process = start(*settings(out, devices=2, batch_size=4, strategy=strategy))
    until(process, lambda: size(out / "metrics.jsonl") > 1500)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    process.communicate(timeout=120)
    if process.returncode == 0:
        raise Failed("the run ended before the kill")
    saved = Checkpoints(out / "checkpoints").steps()[-1]
    end(train(out))
    text = end(Forked(bench.folder, "eval", out, "--accelerator=cpu"))
    mine = json.loads((out / "result.json").read_text())["test"]["loss"]
    if f"loss {mine:.4f}" not in text:
        raise Failed("result.json differs from weft eval")
    return f"continued after step {saved}; the result equals weft eval"


@fault
def ddp_with_a_killed_rank(bench: Bench) -> str:
    return killed_rank(bench, "ddp")


@fault
def fsdp_with_a_killed_rank(bench: Bench) -> str:
    return killed_rank(bench, "fsdp")


SWEEP = """
from weft.lab import make_config
from weft.lab.sweep import Cell
TITLE, METRIC = "faults", "accuracy"
def cells():
    return [Cell(row="one", column="x", config=make_config("digits", **{settings}))]
"""


@fault
def ray_with_a_killed_worker(bench: Bench) -> str:
    try:
        import ray  # noqa: F401
    except ImportError:
        return "skipped: Ray is not installed"
    file = bench.new("ray") / "faults.py"
    file.parent.mkdir()
    file.write_text(SWEEP.replace("{settings}", repr(SETTINGS)))
    out = file.parent / "runs" / "faults" / "one-x-s0"
    process = start("sweep", file, "--on=ray")
    until(process, lambda: size(out / "metrics.jsonl") > 1000)
    holder = json.loads((out / ".lock").read_text())["pid"]
    os.kill(int(Path(f"/proc/{holder}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    end(process, 0)
    return same(out, bench.whole)


def random_kills(bench: Bench, worker: int, enough: Callable[[int], bool]) -> dict[str, Any]:
    """Kill runs at random moments until `enough`, and compare each complete run."""
    rng, codes, runs, kills = random.Random(f"{bench.seed}/{worker}"), Counter[int](), 0, 0
    while not enough(kills):
        out = bench.new(f"random-{worker}-{runs}")
        for _ in range(12):
            process, before = train(out), size(out / "metrics.jsonl")
            early = rng.random() < 0.1
            until(
                process,
                lambda before=before, out=out: size(out / "metrics.jsonl") != before,
                rng.uniform(0, 8) if early else 120,
            )
            time.sleep(0 if early else rng.uniform(0, 0.4))
            process.send_signal(rng.choice([signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGHUP]))
            process.communicate(timeout=300)
            codes[process.returncode] += 1
            kills += 1
            if process.returncode not in (0, SAVED, *(-number for number in (1, 9, 15))):
                raise Failed(f"unexpected exit code {process.returncode}")
            if enough(kills):
                break
        end(train(out))
        same(out, bench.whole)
        shutil.rmtree(out)
        runs += 1
    return {"kills": kills, "runs": runs, "codes": dict(codes)}


def attempt(name: str, act: Callable[[], Any]) -> tuple[str, bool, str, float]:
    began = time.monotonic()
    try:
        told, good = str(act()), True
    except (Failed, DamagedCheckpoint, subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        told, good = f"{type(error).__name__}: {error}", False
    return name, good, told, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"comma-separated names: {', '.join(FAULTS)}")
    parser.add_argument("--skip", default="", help="comma-separated names")
    parser.add_argument("--task", default="digits", help="with its options, as for `weft train`")
    parser.add_argument("--kills", type=int, default=0, help="number of random kills before the other faults")
    parser.add_argument("--hours", type=float, default=0.0, help="hours of random kills before the other faults")
    parser.add_argument("--workers", type=int, default=2, help="number of faults at the same time, each on one core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="also write the outcome as JSON")
    args = parser.parse_args()
    wanted = [name for name in FAULTS if not args.only or any(part in name for part in args.only.split(","))]
    wanted = [name for name in wanted if not args.skip or not any(part in name for part in args.skip.split(","))]
    TASK[:] = shlex.split(args.task)
    os.environ |= ONE_THREAD
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(args.workers) as pool:
        bench = Bench(Path(place), args.seed)
        end(train(bench.whole))
        jobs = []
        if args.kills or args.hours:
            share = -(-args.kills // args.workers)
            stop = began + 3600 * args.hours
            enough = lambda kills: kills >= share and time.monotonic() >= stop  # noqa: E731
            for worker in range(args.workers):
                act = lambda worker=worker: random_kills(bench, worker, enough)  # noqa: E731
                jobs.append(pool.submit(attempt, f"random kills {worker}", act))
        jobs += [pool.submit(attempt, name, lambda name=name: FAULTS[name](bench)) for name in wanted]
        found = []
        for job in jobs:
            name, good, told, took = job.result()
            found.append({"fault": name, "survived": good, "told": told, "seconds": round(took, 1)})
            print(
                f"{'survived' if good else 'FAILED  '}  {name.replace('_', ' '):28} {took:5.1f} s  {told}", flush=True
            )
    lost = [entry for entry in found if not entry["survived"]]
    print(f"{len(found) - len(lost)} of {len(found)} survived in {time.monotonic() - began:.0f} s")
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=2) + "\n")
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
