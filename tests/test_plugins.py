"""Custom tasks: from a file, an entry point or a call."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from sweeps import stand_in
from typer.testing import CliRunner

import weft.core.registry as mechanisms
import weft.tasks.registry as registry
from weft.cli import app
from weft.lab import evaluate_run, load_run, make_config, train
from weft.lab.checkpoint import Checkpoints, read
from weft.lab.run import Run
from weft.lab.sweep import jobs_of, load_sweep
from weft.lab.sweep.cells import keep_sweep
from weft.lab.sweep.jobs import DONE, FAILED, RUNNING, Local, run_jobs
from weft.tasks import get_task, tasks
from weft.tasks.digits import Digits

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

FILE = '''
"""Digits again, from a file that is also a sweep."""

from helper import SMALL

from weft.lab.sweep import Cell
from weft.tasks import make_config
from weft.tasks.digits import Digits

TITLE, METRIC = "Digits from a file", "accuracy"


class Mine(Digits):
    name = "mine"

    def begin(self, model, weights):
        model.load_state_dict({k: 0 * v for k, v in weights.items()})
        return True


TASKS = [Mine()]


def cells():
    return [
        Cell("second", "x", make_config("mine", **SMALL), start="first-x"),
        Cell("first", "x", make_config("mine", **SMALL)),
    ]
'''
SMALL = dict(layers=1, heads=2, head_dim=4, dim=8, mlp_dim=8, steps=2, batch_size=8, warmup=1, accelerator="cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    registry.tasks()  # registers weft's own
    monkeypatch.setattr(registry, "_tasks", dict(registry._tasks))
    monkeypatch.setattr(registry, "_files", dict(registry._files))


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper.py").write_text(f"SMALL = {SMALL!r}")
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_a_file_trains_evaluates_and_shows(file, tmp_path, monkeypatch):
    def weft(*arguments) -> str:
        monkeypatch.setattr(registry, "_tasks", {k: v for k, v in registry._tasks.items() if k != "mine"})
        monkeypatch.setattr(registry, "_files", {})  # as in another process
        done = CliRunner().invoke(app, [str(a) for a in arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    flags = [text for key, value in SMALL.items() for text in (f"--{key.replace('_', '-')}", value)]
    weft("train", file, *flags, "--out", tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["task_file"] == str(file.resolve())
    weft("train", "mine", "--task-file", file, *flags, "--out", tmp_path / "b")
    assert "accuracy" in weft("eval", tmp_path / "a")
    weft("inspect", tmp_path / "a", "--count", 4, "--examples", 1)
    weft("export", tmp_path / "a", tmp_path / "exported")
    assert "- Needs `mine.py`" in (tmp_path / "exported" / "README.md").read_text()
    assert (tmp_path / "exported" / "mine.py").read_text() == file.read_text()
    weft("resume", tmp_path / "b")
    file.unlink()
    monkeypatch.setattr(registry, "_tasks", {k: v for k, v in registry._tasks.items() if k != "mine"})
    monkeypatch.setattr(registry, "_files", {})
    with pytest.raises(FileNotFoundError, match="correct task_file in the run's config.json"):
        load_run(tmp_path / "a")


def test_a_sweep_brings_its_tasks_and_a_run_starts_from_another(file):
    sweep = load_sweep(file)
    load_sweep(file)  # loading the same file twice is allowed
    jobs = jobs_of(sweep)
    assert jobs[0].config.init_from == str(jobs[1].folder)
    for job in reversed(jobs):
        train(job.config)
    first = json.loads((jobs[0].folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(10), abs=1e-5)  # all weights are zero: `begin` was called
    table = CliRunner().invoke(app, ["report", str(file), "--out", str(file.parent / "report")])
    assert table.exit_code == 0 and "not run" not in table.output, table.output
    lone = dataclasses.replace(sweep.cells[0], start="nobody")
    file.write_text(FILE.replace('start="first-x"', f"start={lone.start!r}"))
    with pytest.raises(ValueError, match="starts from nobody, not one of second-x, first-x"):
        load_sweep(file)


MEAN = """
import weft
from weft.lab.sweep import Cell
from weft.tasks import make_config

TITLE, METRIC = "An own mechanism", "accuracy"


class Mean(weft.Attention):
    def attend(self, q, k, v, mask, bias):
        return v.mean(2, keepdim=True).expand_as(v)


weft.register("my-mean", Mean, naive=None, paper="", cost="L")


def cells():
    return [Cell("a", "b", make_config(f"{__file__}:digits", attention="my-mean", **SMALL))]
"""


def test_a_file_registers_a_mechanism(tmp_path, monkeypatch):
    """A task of weft with it: trained, evaluated, swept and reported, each as in another process."""
    file = tmp_path / "mean.py"
    file.write_text(f"SMALL = {SMALL!r}{MEAN}")

    def forget():
        monkeypatch.setattr(registry, "_ran", {})
        for known in (mechanisms._classes, mechanisms._infos):
            known.pop("my-mean", None)

    config = make_config(f"{file}:digits", attention="my-mean", out=str(tmp_path / "run"), **SMALL)
    result = train(config)
    forget()
    assert evaluate_run(tmp_path / "run")[0]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)
    forget()
    (job,) = jobs_of(load_sweep(file))
    keep_sweep(job.sweep)
    load_sweep(file)  # registers the same class again
    train(job.config)
    forget()
    table = CliRunner().invoke(app, ["report", str(file), "--out", str(tmp_path / "report")])
    assert table.exit_code == 0 and "(n=1)" in table.output, table.output
    forget()
    file.unlink()
    with pytest.raises(FileNotFoundError, match="restore the file"):
        load_run(tmp_path / "run")


def test_a_run_waits_for_the_one_it_starts_from(file, tmp_path):
    ended = []
    view = lambda states, changed: ended.append(changed.job.cell.row) if changed and changed.state != RUNNING else None  # noqa: E731
    jobs, command = jobs_of(load_sweep(file)), stand_in(tmp_path)
    jobs[1].folder.mkdir(parents=True)
    (jobs[1].folder / "broken").touch()
    states = run_jobs(jobs, Local(2, command), pause=0.01)
    assert [state.state for state in states] == [FAILED, FAILED]
    assert "it starts from first-x-s0, which is failed" in states[0].why
    (jobs[1].folder / "broken").unlink()
    states = run_jobs(jobs, Local(2, command), view=view, pause=0.01)
    assert [state.state for state in states] == [DONE, DONE] and ended == ["first", "second"]


def test_entry_points(monkeypatch):
    class Theirs(Digits):
        name = "theirs"

    monkeypatch.setattr(__import__(__name__), "Theirs", Theirs, raising=False)
    entry = EntryPoint("theirs", f"{__name__}:Theirs", "weft.tasks")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert "theirs" in tasks() and get_task("theirs").name == "theirs" and make_config("theirs").task_file == ""


def test_the_example_of_the_documentation_trains(tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "lab.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "TASKS" in code)
    (tmp_path / "my_task.py").write_text(code)
    config = make_config(str(tmp_path / "my_task.py"), out=str(tmp_path / "run"), **SMALL)
    assert config.task == "dark-digits" and math.isfinite(train(config).test["loss"])


def test_what_is_wrong_with_a_file(tmp_path):
    (tmp_path / "none.py").write_text("")
    with pytest.raises(ValueError, match="set TASKS to a list"):
        make_config(str(tmp_path / "none.py"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        make_config(str(tmp_path / "gone.py"))
    base = "from weft.tasks.digits import Digits\nTASKS = []\n"
    for name in ("one", "two"):
        base += f"class {name.title()}(Digits):\n    name = '{name}'\nTASKS.append({name.title()}())\n"
    (tmp_path / "both.py").write_text(base)
    with pytest.raises(ValueError, match="choose one as .*both.py:NAME"):
        make_config(str(tmp_path / "both.py"))
    assert make_config(f"{tmp_path}/both.py:two").task == "two"
    with pytest.raises(ValueError, match="does not define the task 'three'; it defines one, two"):
        make_config(f"{tmp_path}/both.py:three")
    (tmp_path / "other.py").write_text(base)
    with pytest.raises(ValueError, match="there is already a task named 'one'"):
        make_config(f"{tmp_path}/other.py:one")


def test_average_of_the_checkpoints_kept(tmp_path):
    same = dict(checkpoint_every=1, keep=2, steps=3, test_on="average", eval_every=0)
    result = train(make_config("digits", out=str(tmp_path), **{**SMALL, **same}))
    kept = Checkpoints(Run(tmp_path).checkpoints)
    assert kept.steps() == [2, 3]
    name = "model/" + next(iter(dict(load_run(tmp_path)[0].named_parameters())))
    mean = torch.stack([read(kept.path(step))[0][name] for step in (2, 3)]).mean(0)
    torch.testing.assert_close(load_run(tmp_path)[0].state_dict()[name.removeprefix("model/")], mean)
    assert evaluate_run(tmp_path)[0]["loss"] == pytest.approx(result.test["loss"], rel=1e-6)


def test_an_ensemble_is_evaluated_like_its_model(tmp_path):
    (tmp_path / "text").write_bytes(b"the same few words and then the same few words again " * 60)
    same = dict(subsample="Sall-L2", max_length=32, layers=2, data=str(tmp_path / "text"), learning_rate=0.02, steps=30)
    train(make_config("text", out=str(tmp_path / "run"), **{**SMALL, **same}))
    dense, ten = (evaluate_run(tmp_path / "run", ensemble=n)[0]["bits_per_byte"] for n in (0, 10))
    assert dense != ten and abs(dense - ten) < 1
