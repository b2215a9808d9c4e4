"""`weft watch`: a live page of running jobs, for browsers on this machine only."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .. import pages
from . import lock
from .report import charts, name_of, read_run, runs_table

SHOWN = 20  # runs on the page, the newest


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs in these folders, newest first."""
    found = {config.parent for folder in folders for config in folder.rglob("config.json")}
    started = {run: _age(run) for run in found}
    return sorted((run for run, age in started.items() if age is not None), key=lambda run: started[run] or 0)


def _age(run: Path) -> float | None:
    """Seconds since the last line of its log."""
    try:
        return time.time() - (run / "metrics.jsonl").stat().st_mtime
    except OSError:
        return None


def state_of(run: Path) -> str:
    """complete, running or stopped."""
    if (run / "result.json").exists():
        return "complete"
    try:
        who = json.loads((run / lock.NAME).read_text())
        if who["host"] != platform.node():
            return "running" if (_age(run) or 0) < 600 else "stopped"
        with suppress(PermissionError):  # another user's process
            os.kill(who["pid"], 0)
        return "stopped" if lock.is_free(run) else "running"  # the number may be another process's by now
    except (OSError, ValueError, KeyError, TypeError):
        return "stopped"


class Watch:
    """The data of the page; unchanged runs are not read again."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self._read: dict[Path, tuple[Any, dict[str, Any]]] = {}

    def data(self) -> dict[str, Any]:
        found = find_runs(self.folders)
        runs, states = [], []
        for folder in sorted(found[:SHOWN]):  # always in the same order: colours stay
            try:
                runs.append(self._run(folder, found))
                states.append(state_of(folder))
            except (OSError, ValueError, KeyError):  # a file that is being written, or not a run
                continue
        parts = [pages.text("No runs yet.")]
        if runs:
            table = runs_table(runs)
            table["head"].insert(1, "state")
            for row, state in zip(table["rows"], states, strict=True):
                row.insert(1, state)
            parts = [table, *charts(runs)]
        more = f"; the newest {SHOWN} of {len(found)} runs" if len(found) > SHOWN else ""
        lead = f"{states.count('running')} running, {states.count('complete')} complete{more}."
        return {"title": "weft watch", "lead": lead, "facts": [], "parts": parts, "footer": ""}

    def _run(self, folder: Path, found: Sequence[Path]) -> dict[str, Any]:
        metrics, result = folder / "metrics.jsonl", folder / "result.json"
        state = (metrics.stat().st_mtime_ns, metrics.stat().st_size, result.exists())
        if self._read.get(folder, (None,))[0] != state:
            self._read[folder] = (state, read_run(folder))
        return {**self._read[folder][1], "name": name_of(folder, found)}

    def page(self) -> str:
        return pages.live(self.data())


def serve(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1; port 0 chooses a free one."""
    watch = Watch(folders)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in ("localhost", "127.0.0.1"):
                self.send_error(403, "open it as localhost")  # another site's name may point to this machine
                return
            answers = {
                "/": ("text/html; charset=utf-8", watch.page),
                "/data.json": ("application/json", lambda: json.dumps(watch.data(), allow_nan=False)),
            }
            if self.path not in answers:
                self.send_error(404)
                return
            kind, make = answers[self.path]
            body = make().encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
