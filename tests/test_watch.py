"""The live page of running jobs."""

import json
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from browser import CHROMIUM, browser, payload
from runs import weft

from weft.lab.report import name_of, read_run, report
from weft.lab.run import Run
from weft.lab.watch import find_runs, serve, state_of
from weft.tasks import make_config
from weft.tasks.config import to_json


def put(folder, steps, **extra):
    folder.mkdir(parents=True)
    run = Run(folder)
    run.write("config.json", to_json(make_config("digits", steps=10)))
    entries = [{"kind": "train", "step": i, "loss": steps / i, "lr": 1.0} for i in range(1, steps + 1)]
    run.log([*entries, {"kind": "val", "step": steps, "loss": 1.0, "accuracy": 0.5}])
    run.close()
    for name, text in extra.items():
        run.write(name, text)
    return folder


@pytest.fixture
def server(tmp_path):
    put(tmp_path / "sweep" / "a", 10, **{"result.json": json.dumps(
        {"step": 10, "best_step": 10, "val": {}, "test": {"accuracy": 0.75}, "parameters": 7})})  # fmt: skip
    put(tmp_path / "b", 4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")  # not a run
    with Run(tmp_path / "b") as run, serve([tmp_path], 0) as server:
        run.lock()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def fetch(server, path, host="localhost"):
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", headers={"Host": host})
    return urllib.request.urlopen(request, timeout=10).read().decode()


def test_the_page_follows_the_runs(server, tmp_path):
    table, loss, _ = json.loads(fetch(server, "/data.json"))["parts"]
    rows = {row[0]: row for row in table["rows"]}
    assert rows["a"][1] == "complete" and "75.00" in rows["a"]
    assert rows["b"][1] == "running" and "4 of 10" in rows["b"] and "unfinished" in rows["b"]
    assert {s["name"] for s in loss["series"]} == {"a", "b"}
    Run(tmp_path / "b").log([{"kind": "train", "step": 5, "loss": 0.1, "lr": 1.0}])
    assert "5 of 10" in fetch(server, "/data.json")
    (tmp_path / "b" / ".lock").unlink()
    assert state_of(tmp_path / "b") == "stopped"
    assert {run.name for run in find_runs([tmp_path])} == {"a", "b"}


def test_a_stopped_run_is_not_running_if_another_process_has_its_number(tmp_path):
    with Run(put(tmp_path / "run", 4)) as run:
        run.lock()  # by this process, which does not end
        assert state_of(run.folder) == "running"
    assert state_of(tmp_path / "run") == "stopped"


def test_runs_of_the_same_name_have_the_names_of_their_folders(tmp_path, monkeypatch):
    runs = [tmp_path / name for name in ("one/a/run", "one/b/run", "other")]
    assert [name_of(run, runs) for run in runs] == ["a/run", "b/run", "other"]
    assert name_of(runs[0], [runs[0]] * 2) == "run"
    for run in runs[:2]:
        put(run, 4)
    monkeypatch.chdir(runs[0])
    assert name_of(Path("."), [Path(".")]) == "run"
    page = report(runs[:2], tmp_path / "page.html").read_text()
    assert '"a/run"' in page and '"b/run"' in page
    for run, version in zip(runs[:2], ("2.10", "2.11"), strict=True):
        Run(run).write("environment.json", json.dumps([{"torch": version}]))
    page = report(runs[:2], tmp_path / "page.html").read_text()
    assert '"footer": "a/run: torch 2.10; b/run: torch 2.11"' in page


def test_a_report_of_an_exported_model_is_refused(tmp_path):
    put(tmp_path / "model", 4, **{"model.safetensors": ""})
    with pytest.raises(ValueError, match="pass the folder of its run"):
        report([tmp_path / "model"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_metric_is_the_tasks_own(tmp_path):
    config = make_config("tag", data="x")
    run = Run(put(tmp_path / "run", 3))
    run.write("config.json", to_json(config))
    run.log([{"kind": "val", "step": 3, "loss": 1.0, "accuracy": 0.9, "f1": 0.5}])
    assert read_run(run.folder)["metric"] == "f1" and read_run(run.folder)["val"] == [(3, 0.5)]
    config.task, config.task_file = "gone", str(tmp_path / "gone.py")
    run.write("config.json", to_json(config))
    assert read_run(run.folder)["metric"] == "accuracy"


def test_ports_that_are_in_use_or_do_not_exist_are_named(server, tmp_path):
    taken = weft("watch", tmp_path, "--port", server.server_port)
    assert (taken.exit_code, f"port {server.server_port} cannot be used" in taken.output) == (2, True)
    assert "choose another with --port" in taken.output
    assert weft("watch", tmp_path, "--port", 99999).exit_code == 2


def test_only_this_machine_is_served(server):
    assert server.server_address[0] == "127.0.0.1"
    for path, host, code in (("/", "evil.example", 403), ("/../config.json", "localhost", 404)):
        with pytest.raises(urllib.error.HTTPError) as error:
            fetch(server, path, host)
        assert error.value.code == code
    assert "connect-src 'self'" in fetch(server, "/")


@browser
def test_the_page_in_a_browser(server, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
    command = [CHROMIUM, *flags.split(), "--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}"]
    url = f"http://localhost:{server.server_port}/"
    dom = subprocess.run([*command, url], capture_output=True, text=True, timeout=120).stdout
    assert "1 running, 1 complete." in dom and dom.count("<polyline") == 2 and 'role="status"></small>' in dom


def test_rows_say_what_was_trained(tmp_path):
    """Not the layers and heads of a config whose model does not read them."""
    runs = [put(tmp_path / name, 2) for name in "abc"]
    Run(runs[1]).write("config.json", to_json(make_config("digits", subsample="S1-L4", steps=10)))
    Run(runs[2]).write("config.json", to_json(make_config("images", data="x", model="pvt-tiny", cache=0.5, steps=10)))
    for run, hour in zip(runs, (10, 11, 12), strict=True):
        run.joinpath("environment.json").write_text(json.dumps([{"torch": "2", "time": f"2026-01-01T{hour}:00"}]))
    page = payload(report(runs, tmp_path / "page.html").read_text())
    assert [row[2:5] for row in page["parts"][0]["rows"]] == [
        ["transformer", "2x4", "full"],
        ["transformer", "2x4", "full, subsampled"],
        ["pvt-tiny", "", "full, cache 0.5"],
    ]
    assert page["footer"] == "torch 2, 2026-01-01"
