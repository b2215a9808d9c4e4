"""Runs of a sweep on a Ray cluster, or on Slurm through submitit: both queue `tend(folder)` on some machine.

The run's folder must be on a shared file system. To stop a run, the sweep writes `.stop` there, and `tend` sends
SIGTERM to the run. A run that is still queued is cancelled.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .jobs import INTERRUPTED, Handle, Process

STARTED, STOP = ".started", ".stop"
RETRIES = 3  # how often Ray starts a run again after it lost a machine or worker


def tend(folder: str, cwd: str, command: Sequence[str] = (), pause: float = 0.2) -> int:
    """Run `weft resume FOLDER` on this machine and return its exit code."""
    place = Path(folder)
    if (place / STOP).exists():
        return INTERRUPTED
    again = (place / STARTED).exists()  # the engine lost the first attempt, whose run may still be saving
    (place / STARTED).touch()
    process, asked, until = Process(place, command, cwd=cwd), 0, time.monotonic() + 60
    while again and process.child is None and time.monotonic() < until:
        time.sleep(pause)
        process = Process(place, command, cwd=cwd)
    try:
        while (code := process.poll()) is None:
            wanted = (place / STOP).stat().st_size if (place / STOP).exists() else 0
            if wanted > asked:  # one byte per request
                asked = wanted
                process.stop()
            time.sleep(pause)
        return code
    except BaseException:  # the engine ends this process: let the run save
        process.stop()
        if process.child is not None:
            process.child.wait()
        raise


class Queued:
    """A run that was submitted to an engine."""

    def __init__(self, folder: Path, poll: Callable[[], int | None], cancel: Callable[[], None]):
        self.folder, self._poll, self._cancel = folder, poll, cancel
        self._cancelled = False

    def started(self) -> bool:
        return (self.folder / STARTED).exists()

    def poll(self) -> int | None:
        try:
            return self._poll()
        except Exception as error:  # engines raise different errors when a run is lost
            if self._cancelled:
                return INTERRUPTED
            with open(self.folder / "log.txt", "a") as log:
                log.write(f"\nlost by the engine: {type(error).__name__}: {' '.join(str(error).split())[:2000]}\n")
            return 1

    def stop(self) -> None:
        with open(self.folder / STOP, "a") as stop:
            stop.write(".")
        if not self.started():
            self._cancelled = True
            self._cancel()


def clear(folder: Path) -> None:
    for name in (STARTED, STOP):
        (folder / name).unlink(missing_ok=True)


class RayEngine:
    """Ray gives each run `cpus` CPUs and `gpus` GPUs; with half a GPU, two runs share one. If it loses the machine or
    the worker of a run, it starts the run again elsewhere, from its last checkpoint."""

    one_device = False

    def __init__(
        self, jobs: int = 0, *, address: str = "", gpus: float = -1, cpus: int = 1, command: Sequence[str] = ()
    ):
        try:
            import ray
        except ImportError as error:
            raise ImportError("--on ray needs Ray: pip install 'weft[ray]'") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry by default
        self.ray: Any = ray
        self.command = tuple(command)
        self.limit = jobs or sys.maxsize
        self.mine = not ray.is_initialized()
        if self.mine:
            ray.init(address=address or None, log_to_driver=False, logging_level=logging.WARNING)
        have = ray.cluster_resources()
        self.gpus = gpus if gpus >= 0 else float(have.get("GPU", 0) > 0)
        self.cpus = cpus
        for name, wanted in (("GPU", self.gpus), ("CPU", cpus)):
            if wanted > have.get(name, 0):
                message = f"the cluster has {have.get(name, 0):g} {name} now, a run needs {wanted:g}: waiting for more"
                print(message, file=sys.stderr, flush=True)

    def start(self, folder: Path) -> Handle:
        ray = self.ray
        clear(folder)
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES)(tend)
        ticket = remote.remote(str(folder.resolve()), os.getcwd(), self.command)

        def poll() -> int | None:
            ready, _ = ray.wait([ticket], timeout=0)
            return int(ray.get(ticket)) if ready else None

        return Queued(folder, poll, lambda: ray.cancel(ticket))

    def close(self) -> None:
        if self.mine:
            self.ray.shutdown()


class SlurmEngine:
    """One Slurm job per run. `cluster` is submitit's: "slurm", or "local" for tests without Slurm."""

    one_device = False

    def __init__(
        self,
        jobs: int,
        folder: Path,
        *,
        gpus: float = -1,
        cpus: int = 1,
        minutes: float = 0,
        partition: str = "",
        cluster: str = "slurm",
        command: Sequence[str] = (),
    ):
        try:
            import submitit
        except ImportError as error:
            raise ImportError("--on slurm needs submitit: pip install 'weft[slurm]'") from error
        if gpus > 0 and gpus != int(gpus):
            raise ValueError(f"Slurm needs a whole number of GPUs, got {gpus}")
        self.limit, self.command = jobs or sys.maxsize, tuple(command)
        self.executor: Any = submitit.AutoExecutor(folder=folder, cluster=cluster)
        wanted: dict[str, Any] = {"cpus_per_task": cpus, "gpus_per_node": 1 if gpus < 0 else int(gpus), "name": "weft"}
        if minutes:  # the sweep stops its runs first; Slurm's limit applies if the sweep was killed
            wanted["timeout_min"] = int(minutes) + 10
        else:
            wanted["timeout_min"] = 24 * 60
        if partition:
            wanted["slurm_partition"] = partition
        if cluster == "local":
            wanted = {"timeout_min": wanted["timeout_min"]}
        self.executor.update_parameters(**wanted)

    def start(self, folder: Path) -> Handle:
        clear(folder)
        job = self.executor.submit(tend, str(folder.resolve()), os.getcwd(), self.command)
        return Queued(folder, lambda: int(job.result()) if job.done() else None, job.cancel)

    def close(self) -> None:
        return None
