"""Run the jobs of a sweep: skip complete runs, continue interrupted ones, and survive failures.

Each run is a separate process `weft resume FOLDER` that logs to `FOLDER/log.txt`. An engine starts these commands:
`Local` here, Ray and Slurm in `remote`. To stop, a run gets SIGTERM; it saves and exits with code 75, and the next
`weft sweep` continues it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...tasks.augment import cpus
from .. import lock
from ..errors import INTERRUPTED, NO_MEMORY
from ..run import Run
from ..signals import Signals
from .cells import Job, check_folders, result_of, started, write_config

BUSY = -1000  # not an exit code: another process has locked the folder
WAITING, RUNNING, DONE, FAILED, STOPPED, IN_USE = "waiting", "running", "done", "failed", "stopped", "in use"


class Handle(Protocol):
    def started(self) -> bool:
        """Whether the run has left the queue of its engine."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def stop(self) -> None:
        """Tell the run to save and exit."""


class Engine(Protocol):
    limit: int  # maximum number of runs at a time
    one_device: bool  # whether all runs share a device

    def start(self, folder: Path) -> Handle: ...

    def close(self) -> None: ...


@dataclass
class State:
    """The state of a job."""

    job: Job
    state: str = WAITING
    step: int = 0
    loss: float = math.nan
    tokens_per_s: float = 0.0
    left: float = math.nan  # seconds
    value: float = math.nan  # the test metric of a complete run, else the last validation metric
    why: str = ""
    code: int = 0  # exit code
    log: list[str] = field(default_factory=list)
    handle: Handle | None = None
    watch: Watch | None = None

    @property
    def steps(self) -> int:
        return started(self.job).steps

    @property
    def shown(self) -> str:
        return "queued" if self.handle is not None and not self.handle.started() else self.state


class Watch:
    """Reads a growing metrics.jsonl incrementally."""

    def __init__(self, folder: Path, metric: str):
        self.path, self.metric = Run(folder).metrics, metric
        self.place, self.file = 0, 0  # bytes read, inode
        self.step, self.loss, self.tokens_per_s, self.value = 0, math.nan, 0.0, math.nan
        self.began: tuple[float, int] | None = None

    def look(self) -> None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return
        if found.st_ino != self.file or found.st_size < self.place:  # cut back on resume
            self.place, self.file = 0, found.st_ino
        with open(self.path, "rb") as file:
            file.seek(self.place)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self.place += whole
        for line in text[:whole].splitlines():
            try:
                entry = json.loads(line)
                self.step = int(entry["step"])
                if entry["kind"] == "train":
                    self.loss, self.tokens_per_s = float(entry["loss"]), entry.get("tokens_per_s", self.tokens_per_s)
                elif entry["kind"] == "val":
                    self.value = entry.get(self.metric, math.nan)
            except (ValueError, KeyError, TypeError):
                continue  # truncated by a kill; the run will write it again

    def left(self, steps: int) -> float:
        """Estimated seconds to the end, from the speed since the first look that saw a step."""
        now = time.perf_counter()
        if not self.step:
            return math.nan
        if self.began is None:
            self.began = (now, self.step)
        since, done = now - self.began[0], self.step - self.began[1]
        return since / done * (steps - self.step) if done > 0 else math.nan


class Local:
    """Processes on this machine, all on the same device. `command` replaces `weft resume`. If a run does not get enough
    memory beside others, it is started again, and fewer run at a time."""

    one_device = True

    def __init__(self, jobs: int = 1, command: Sequence[str] = ()):
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {jobs}")
        self.limit, self.command = jobs, command

    def start(self, folder: Path) -> Handle:
        threads = max(1, cpus() // self.limit) if self.limit > 1 else 0
        return Process(folder, self.command, threads=threads)

    def close(self) -> None:
        return None


class Process:
    """`weft resume FOLDER`. The folder's lock passes to the child, which holds it even if the sweep is killed."""

    def __init__(self, folder: Path, command: Sequence[str] = (), *, threads: int = 0, cwd: str | None = None):
        self.child: subprocess.Popen[bytes] | None = None
        environment = dict(os.environ)
        if threads:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        # Without -P, a queue.py in the working folder would hide Python's own; weft itself may be there.
        safe = () if {"", cwd or os.getcwd()} & {*sys.path} else ("-P",)
        command = [*(command or (sys.executable, *safe, "-m", "weft.cli", "resume")), str(folder)]
        try:
            held = lock.take(folder)
        except lock.InUse:
            return
        environment[lock.INHERITED] = str(held)
        with os.fdopen(held), open(folder / "log.txt", "ab") as log:
            log.write(f"\n$ weft resume {folder}    {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            # In its own session, so that Ctrl-C reaches only the sweep, which then stops each run once.
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                pass_fds=(held,),
                preexec_fn=_save_when_the_parent_dies,
            )

    def poll(self) -> int | None:
        return BUSY if self.child is None else self.child.poll()

    def started(self) -> bool:
        return True

    def stop(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)


def survey(jobs: Sequence[Job]) -> list[State]:
    """The states of all jobs before anything is started."""
    states = []
    for job in jobs:
        state, result = State(job), result_of(job)
        watch = Watch(job.folder, job.sweep.metric)
        watch.look()
        state.step, state.loss = watch.step, watch.loss
        if result is not None:
            state.step = result["step"]
            _finish(state, result["test"])
        states.append(state)
    return states


def _finish(state: State, test: dict[str, float]) -> None:
    """The run is complete, with these figures."""
    metric = state.job.sweep.metric
    state.state, state.value = DONE, test.get(metric, math.nan)
    if math.isnan(state.value):
        state.why = f"{metric} is not a number" if metric in test else f"no {metric} among {', '.join(test)}"


def run_jobs(
    jobs: Sequence[Job],
    engine: Engine,
    *,
    minutes: float = 0.0,
    view: Callable[[Sequence[State], State | None], None] = lambda states, changed: None,
    pause: float = 0.2,
) -> list[State]:
    """Run all jobs. `view` is called regularly with all states, and with the state that has changed, if any."""
    check_folders(jobs)  # before the first run starts
    states = survey(jobs)
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    heard, late = 0, False
    with Signals() as signals:
        try:
            for state in states:
                if state.state == DONE:
                    view(states, state)
            while True:
                if time.monotonic() > deadline and not late:
                    late = True
                    _stop(states)
                if signals.count > heard:  # a second signal is forwarded too and ends a run that ignored the first
                    heard = signals.count
                    _stop(states)
                running = [state for state in states if state.state == RUNNING]
                if not late and not heard:
                    waiting = [state for state in states if state.state == WAITING and _ready(state, states)]
                    for state in waiting[: max(0, engine.limit - len(running))]:
                        _start(state, engine)
                        running += [state] if state.state == RUNNING else []
                        view(states, state)
                for state in running:
                    if _look(state, stopping=late or heard > 0):
                        if state.code == NO_MEMORY and engine.one_device:
                            _wait_for_memory(state, running, engine)
                        view(states, state)
                view(states, None)
                running = [state for state in states if state.state == RUNNING]
                if not running and (late or heard or not any(state.state == WAITING for state in states)):
                    return states
                time.sleep(pause)
        finally:
            _stop(states)
            engine.close()


def _ready(state: State, states: Sequence[State]) -> bool:
    """Whether the run it starts from is complete. If that run failed, this one fails too, and also if that run is not
    among these and not complete."""
    job = state.job
    first = next((other for other in states if str(other.job.folder) == job.config.init_from), None)
    if first is not None and first.state in (FAILED, STOPPED, IN_USE):
        state.state, state.why = first.state, f"it starts from {first.job.folder.name}, which is {first.state}"
    elif first is None and job.cell.start and not saved_step(job.folder) and not _complete(Path(job.config.init_from)):
        state.state, state.why = FAILED, f"it starts from {job.config.init_from}, which is not complete: run it first"
    return state.state == WAITING and (first is None or first.state == DONE)


def _complete(folder: Path) -> bool:
    run = Run(folder)
    result = run.result()
    return result is not None and result["step"] >= run.config().steps


def _start(state: State, engine: Engine) -> None:
    folder = state.job.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.close(lock.take(folder))  # only a check before writing; the process that runs the job takes the lock
    except lock.InUse as error:
        state.state, state.why = IN_USE, str(error)
        return
    write_config(state.job)
    (folder / "outcome.json").unlink(missing_ok=True)
    state.watch = Watch(folder, state.job.sweep.metric)
    state.handle = engine.start(folder)
    state.state = RUNNING


def _look(state: State, stopping: bool) -> bool:
    """Update the state. Returns True if the run has ended."""
    job, watch, handle = state.job, state.watch, state.handle
    assert watch is not None and handle is not None
    code = handle.poll()
    watch.look()
    state.step, state.loss, state.tokens_per_s, state.value = watch.step, watch.loss, watch.tokens_per_s, watch.value
    state.left = watch.left(state.steps)
    if code is None:
        return False
    state.handle, state.code = None, code
    if code == BUSY:
        state.state, state.why = IN_USE, f"in use by {lock.holder(job.folder)}"
        return True
    result = result_of(job)
    state.log = last_lines(job.folder / "log.txt")
    if code == 0 and result is not None:
        _finish(state, result["test"])
    elif code == INTERRUPTED or (stopping and code != 0):
        saved = saved_step(job.folder)
        state.state = STOPPED
        state.why = f"saved at step {saved} of {state.steps}" if saved else "before its first checkpoint"
    else:
        state.state = FAILED
        state.why = f"{state.log[-1] if state.log else 'no output'} (exit code {code})"
    if state.state != DONE:
        kept = {"state": state.state, "exit": code, "step": state.step, "why": state.why, "log": state.log}
        Run(job.folder).write("outcome.json", json.dumps(kept, indent=2) + "\n")
    return True


def _wait_for_memory(state: State, running: Sequence[State], engine: Engine) -> None:
    """Start the run again when one of the others has ended. Alone, it has failed."""
    others = sum(other.state == RUNNING for other in running)
    if others:
        engine.limit, state.state = others, WAITING
        state.why = f"out of memory beside {others} other run{'s' * (others > 1)}, starts again later"


def _stop(states: Sequence[State]) -> None:
    for state in states:
        if state.handle is not None:
            state.handle.stop()


def saved_step(folder: Path) -> int:
    from ..checkpoint import Checkpoints

    return max(Checkpoints(Run(folder).checkpoints).steps(), default=0)


def last_lines(log: Path, count: int = 12) -> list[str]:
    """The last lines of the last launch."""
    if not log.exists():
        return []
    lines = log.read_text(errors="replace")[-20_000:].splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ weft resume ")]
    lines = lines[starts[-1] + 1 :] if starts else lines
    return [line.rstrip() for line in lines if line.strip()][-count:]


def _save_when_the_parent_dies() -> None:
    """On Linux, a run gets SIGTERM from the kernel if its sweep is killed; on other systems it continues."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before the fork
