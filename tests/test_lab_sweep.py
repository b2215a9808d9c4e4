"""Sweeps: files, folders, and a runner that skips complete runs, continues others and survives failures."""

import dataclasses
import io
import json
import math
import os
import shutil
import signal
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("lightning")

from sweeps import COMMON, FILE, stand_in, write_sweep

from weft.cli import app
from weft.lab import make_config, train
from weft.lab.kept import OtherData
from weft.lab.run import Run, RunExists
from weft.lab.sweep import changed, check_folder, is_sweep, jobs_of, load_sweep, parse_override
from weft.lab.sweep.jobs import DONE, FAILED, IN_USE, RUNNING, STOPPED, WAITING, Local, Process, run_jobs, survey
from weft.lab.sweep.results import gather
from weft.lab.sweep.view import View, failures, line, table
from weft.tasks.config import to_json


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "papers" / "one")


@pytest.fixture
def command(tmp_path):
    return stand_in(tmp_path)


def names(states, *wanted):
    return [state.job.folder.name for state in states if state.state in wanted]


def test_the_file_is_read(sweep):
    assert (sweep.title, sweep.metric, sweep.seeds, sweep.name) == ("Digits, small", "accuracy", (0, 1), "small")
    assert sweep.show(0.5) == "50.0" and dataclasses.replace(sweep, unit="", scale=1).show(2e-6) == "2e-06"
    assert [cell.slug for cell in sweep.cells] == ["full-1x2", "full-wide-1x4", "linear-1x2", "linear-wide-1x4"]
    assert [cell.paper for cell in sweep.cells] == [90.0, 90.0, None, None]
    assert sweep.show(0.9) == "90.0" and sweep.unit == "%"  # accuracies are percentages
    assert "common" not in sys.modules  # another folder's file of that name is another one


def test_two_folders_may_each_have_a_common_file(sweep, tmp_path):
    other = tmp_path / "papers" / "two"
    other.mkdir()
    (other / "common.py").write_text(COMMON.replace("steps=12", "steps=13"))
    (other / "small.py").write_text(FILE)
    assert load_sweep(other / "small.py").cells[0].config.steps == 13
    assert load_sweep(sweep.file).cells[0].config.steps == 12


@pytest.mark.parametrize(
    "old, new, error, says",
    [
        ("TITLE", "HEADING", ValueError, "must define TITLE"),
        ('"wide, 1x4"', '"1x2"', ValueError, "share the folder full-1x2"),
        ("SEEDS = (0, 1)", "SEEDS = ()", ValueError, "no seeds"),
        ("SEEDS = (0, 1)", "SEEDS = 2", ValueError, r"such as \(0, 1, 2\), got 2"),
        ("column=column", "column=512", ValueError, "must be strings, got 'full', 512"),
        ("    return [", "    return 3\n    [", ValueError, "must return a list of Cell, got 3"),
        ("Cell(row=row", "dict(row=row", ValueError, "list of Cell"),
    ],
)
def test_invalid_sweep_files_are_refused(sweep, old, new, error, says):
    sweep.file.write_text(FILE.replace(old, new))
    with pytest.raises(error, match=says):
        load_sweep(sweep.file)


def test_sweeps_are_recognised_without_running_them(sweep, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('this was run')\nTITLE = METRIC = ''\n")
    assert is_sweep(sweep.file) and not is_sweep(script) and not is_sweep(sweep.file.with_name("common.py"))
    script.write_text("raise SystemExit('this was run')\nfrom x import SEEDS, cells\nTITLE, METRIC = 'a', 'b'\n")
    assert is_sweep(script)


def test_every_cell_with_the_first_seed_then_with_the_next(sweep):
    jobs = jobs_of(sweep)
    assert [job.folder.name for job in jobs[:5]] == [
        "full-1x2-s0", "full-wide-1x4-s0", "linear-1x2-s0", "linear-wide-1x4-s0", "full-1x2-s1",
    ]  # fmt: skip
    assert all(job.folder.parent == sweep.file.parent / "runs" / "small" for job in jobs)
    assert [job.config.seed for job in jobs] == [0] * 4 + [1] * 4
    assert [job.config.seed for job in jobs_of(sweep, seeds=[7])] == [7] * 4


@pytest.mark.parametrize(
    "only, count", [(["full"], 2), (["1×2"], 2), (["*1x4"], 2), (["linear/wide*"], 1), (["full", "linear/1×2"], 3)]
)
def test_only_some_cells(sweep, only, count):
    assert len(jobs_of(sweep, seeds=[0], only=only)) == count


def test_overrides_change_the_folder(sweep, tmp_path):
    job = jobs_of(sweep, overrides={"steps": 100, "data": "elsewhere"})[0]
    assert job.folder == sweep.runs() / "small+steps=100" / "full-1x2-s0" and job.variant == "steps=100"
    assert (job.config.steps, job.config.data) == (100, "elsewhere")
    # these change nothing that is computed, or nothing at all
    assert jobs_of(sweep, overrides={"compile": True, "steps": 12})[0].folder == sweep.runs() / "small" / "full-1x2-s0"
    assert jobs_of(sweep, out=tmp_path / "far")[0].folder == tmp_path / "far" / "one" / "small" / "full-1x2-s0"


def test_the_value_of_an_override_may_contain_a_plus(sweep, command):
    overrides = {"attention": "full+linear", "diverge_at": 2e20}
    (state,) = run_jobs(jobs_of(sweep, seeds=[0], only=["full/1×2"], overrides=overrides), Local(1, command))
    assert state.state == DONE and state.job.folder.parent.name == "small+attention=full+linear"
    (record,) = gather(sweep)
    assert record.overrides == {"attention": "full+linear"} and not record.differs(sweep.cells[0].config)


def test_invalid_selections_are_refused(sweep):
    with pytest.raises(ValueError, match="its cells: full/1×2"):
        jobs_of(sweep, only=["fulll"])
    with pytest.raises(ValueError, match="use --seeds"):
        jobs_of(sweep, overrides={"seed": 3})
    with pytest.raises(ValueError, match="dropout must be in"):
        jobs_of(sweep, overrides={"dropout": 2.0})


def test_overrides_have_the_types_of_their_fields():
    assert parse_override("steps=100") == ("steps", 100)
    assert parse_override("learning-rate=1e-3") == ("learning_rate", 1e-3)
    assert parse_override("compile=false") == ("compile", False)
    assert parse_override("attention_dropout=none") == ("attention_dropout", None)
    assert parse_override('attention_options={"block_size": 5}') == ("attention_options", '{"block_size": 5}')
    for wrong, says in (("stepz=3", "a field of TrainConfig"), ("steps", "field=value"), ("steps=many", "type int")):
        with pytest.raises(ValueError, match=says):
            parse_override(wrong)


def test_settings_that_may_differ_between_runs():
    config = make_config("digits", batch_size=32)
    free = dataclasses.replace(config, data="x", out="y", compile=True, batch_size=8, accumulate=4)
    assert changed(config, free) == []
    assert changed(config, dataclasses.replace(config, batch_size=16)) == ["examples per step: 32 -> 16"]
    assert changed(config, dataclasses.replace(config, learning_rate=1.0)) == ["learning_rate: 0.008 -> 1.0"]
    assert changed(config, dataclasses.replace(config, keep=5)) == []


def test_the_kept_checkpoints_count_if_their_average_is_tested(sweep):
    cells = [dataclasses.replace(c, config=dataclasses.replace(c.config, test_on="average")) for c in sweep.cells]
    average = dataclasses.replace(sweep, cells=tuple(cells))
    for change, folder in (({"keep": 5}, "small+keep=5"), ({"checkpoint_every": 7}, "small+checkpoint_every=7")):
        assert {job.folder.parent.name for job in jobs_of(average, overrides=change)} == {folder}
        assert {job.folder.parent.name for job in jobs_of(sweep, overrides=change)} == {"small"}
        assert len(changed(cells[0].config, dataclasses.replace(cells[0].config, **change))) == 1


def test_a_folder_with_another_run_is_refused(sweep, command):
    job = jobs_of(sweep)[0]
    other = dataclasses.replace(job.config, dim=24)
    Run(job.folder).write("config.json", to_json(other))
    check_folder(job)  # nothing was computed there
    (job.folder / "metrics.jsonl").touch()
    with pytest.raises(RunExists, match=r"dim: 24 -> 16.*another --out"):
        run_jobs(jobs_of(sweep), Local(1, command))
    assert not jobs_of(sweep)[1].folder.exists()  # refused before the first one began
    assert json.loads((job.folder / "config.json").read_text())["dim"] == 24
    listed = CliRunner().invoke(app, ["sweep", str(sweep.file), "--dry-run"])
    assert listed.exit_code == 2 and "dim: 24 -> 16" in listed.output  # another run is not that of the cell


def test_a_run_may_be_extended_only_if_the_schedule_allows(sweep):
    job = jobs_of(sweep)[0]
    shorter = dataclasses.replace(job.config, steps=6)
    Run(job.folder).write("config.json", to_json(shorter))
    (job.folder / "metrics.jsonl").touch()
    with pytest.raises(RunExists, match="steps: 6 -> 12"):  # cosine
        check_folder(job)
    constant = dataclasses.replace(job, config=dataclasses.replace(job.config, schedule="constant"))
    Run(job.folder).write("config.json", to_json(dataclasses.replace(shorter, schedule="constant")))
    check_folder(constant)
    Run(job.folder).write("config.json", to_json(dataclasses.replace(constant.config, steps=24)))
    with pytest.raises(RunExists, match="steps: 24 -> 12"):
        check_folder(constant)


def test_a_failed_run_does_not_stop_the_sweep_and_is_tried_again(sweep, command, capsys):
    jobs = jobs_of(sweep, seeds=[0])
    broken = jobs[2].folder
    broken.mkdir(parents=True)
    (broken / "broken").touch()
    view = View(live=False)
    states = run_jobs(jobs, Local(2, command), view=view, pause=0.01)
    assert names(states, FAILED) == ["linear-1x2-s0"] and len(names(states, DONE)) == 3
    assert states[2].why == "weft: the data is missing (exit code 66)"
    assert json.loads((broken / "outcome.json").read_text())["log"] == ["reading", "weft: the data is missing"]
    assert "linear / 1×2 / seed 0 failed" in failures(states) and "    reading" in failures(states)
    said = capsys.readouterr().out
    assert "failed   linear / 1×2 / seed 0: weft: the data is missing (exit code 66)" in said
    assert "done     full / 1×2 / seed 0: test accuracy 50.0 %" in said
    before = (jobs[0].folder / "log.txt").read_text()
    (broken / "broken").unlink()
    states = run_jobs(jobs, Local(1, command), pause=0.01)
    assert names(states, DONE) == [job.folder.name for job in jobs]
    assert (jobs[0].folder / "log.txt").read_text() == before  # what was done was not run again
    assert not (broken / "outcome.json").exists()


def test_a_complete_run_without_the_metric_says_so(sweep, command):
    (job,) = jobs_of(sweep, seeds=[0], only=["full/1×2"])
    other = dataclasses.replace(job, sweep=dataclasses.replace(sweep, metric="f1"))
    says = "done     full / 1×2 / seed 0: no f1 among accuracy"
    for _ in range(2):  # after the run, and when it is found complete
        assert [line(state) for state in run_jobs([other], Local(1, command))] == [says]
    result = json.loads((job.folder / "result.json").read_text())
    result["test"]["accuracy"] = math.nan
    (job.folder / "result.json").write_text(json.dumps(result))
    assert line(survey([job])[0]).endswith(": accuracy is not a number")


def test_a_run_starts_only_from_a_complete_run(sweep, command):
    first, second = sweep.cells[0], dataclasses.replace(sweep.cells[1], start=sweep.cells[0].slug)
    sweep = dataclasses.replace(sweep, cells=(first, second), seeds=(0,))
    before, after = jobs_of(sweep)
    Run(before.folder).write("config.json", to_json(before.config))
    Run(before.folder).checkpoints.mkdir()
    (before.folder / "checkpoints/step-00000003.safetensors").touch()  # interrupted
    (state,) = run_jobs([after], Local(1, command))
    assert (state.state, after.folder.exists()) == (FAILED, False)
    assert failures([state]).endswith("full-1x2-s0, which is not complete: run it first")
    assert names(run_jobs([after, before], Local(2, command)), DONE) == ["full-wide-1x4-s0", "full-1x2-s0"]
    shutil.rmtree(after.folder)
    assert run_jobs([after], Local(1, command))[0].state == DONE


def test_a_run_from_weights_that_were_trained_again_is_not_done(sweep, command):
    first, second = sweep.cells[0], dataclasses.replace(sweep.cells[1], start=sweep.cells[0].slug)
    jobs = jobs_of(dataclasses.replace(sweep, cells=(first, second), seeds=(0,)))

    def begin(job, hour):
        start = {"commit": "1234567", "torch": "2", "time": f"2026-01-01T{hour}:00:00+0000"}
        (job.folder / "environment.json").write_text(json.dumps([start, {**start, "time": "2026-02-01T00:00:00+0000"}]))

    assert names(run_jobs(jobs, Local(1, command)), DONE) == [job.folder.name for job in jobs]
    begin(jobs[0], 10), begin(jobs[1], 11)
    assert names(run_jobs(jobs, Local(1, command)), DONE) == [job.folder.name for job in jobs]
    shutil.move(jobs[0].folder, sweep.file.parent / "before")
    with pytest.raises(RunExists, match=f"{jobs[1].folder} started from an earlier run of .*full-1x2-s0: move"):
        run_jobs(jobs, Local(1, command))  # it would be trained now
    assert not jobs[0].folder.exists()
    assert run_jobs(jobs[:1], Local(1, command))[0].state == DONE
    begin(jobs[0], 12)
    with pytest.raises(RunExists, match="started from an earlier run"):
        run_jobs(jobs[1:], Local(1, command))
    shutil.move(jobs[1].folder, sweep.file.parent / "after")
    assert run_jobs(jobs, Local(1, command))[1].state == DONE


def test_runs_on_other_data_are_not_done(tmp_path):
    task = '"text", data="texts/a.txt", max_length=8, positions="rope"'
    file = FILE.replace('"digits"', task).replace("accuracy", "bits_per_byte").replace("SEEDS = (0, 1)", "")
    sweep = write_sweep(tmp_path / "papers", file=file)
    for name, text in (("a", "one two " * 99), ("b", "one too " * 99), ("same", "one two " * 99)):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"texts/{name}.txt").write_text(text)
    only, texts = dict(only=["full/1×2"]), tmp_path / "texts"
    (job,) = jobs_of(sweep, **only, overrides={"data": str(texts / "a.txt")})
    train(job.config)
    for name in ("a", "same", "gone"):
        (job,) = jobs_of(sweep, **only, overrides={"data": str(texts / f"{name}.txt")})
        assert run_jobs([job], Local(1, ["false"]))[0].state == DONE
    (job,) = jobs_of(sweep, **only, overrides={"data": str(texts / "b.txt")})
    with pytest.raises(OtherData, match=r"b.txt is not what .*full-1x2-s0 was trained on"):
        run_jobs([job], Local(1, ["false"]))


def test_the_number_of_parallel_runs_is_limited(sweep, command):
    most = []
    run_jobs(
        jobs_of(sweep), Local(3, command), pause=0.01,
        view=lambda states, changed: most.append(len(names(states, RUNNING))),
    )  # fmt: skip
    assert max(most) == 3


def test_a_run_without_memory_starts_again_beside_fewer(sweep, command, capsys):
    jobs = jobs_of(sweep, seeds=[0])
    jobs[0] = jobs_of(sweep, seeds=[0], overrides={"steps": 500})[0]  # slow
    large = jobs[1].folder
    large.mkdir(parents=True)
    (large / "large").touch()
    engine = Local(2, command)
    states = run_jobs(jobs, engine, view=View(live=False), pause=0.01)
    assert names(states, DONE) == [job.folder.name for job in jobs] and engine.limit == 1
    said = capsys.readouterr().out
    assert "waiting  full / wide, 1x4 / seed 0: out of memory beside 1 other run, starts again later" in said
    (large / "result.json").unlink()
    (large / "large").touch()
    alone = run_jobs(jobs[1:2], Local(2, command), pause=0.01)
    assert alone[0].state == FAILED and alone[0].why == "weft: out of memory (exit code 73)"


def test_minutes_stop_a_sweep_and_a_second_one_continues(sweep, command):
    jobs = jobs_of(sweep, seeds=[0], overrides={"steps": 500})
    states = run_jobs(jobs, Local(2, command), minutes=1 / 60, pause=0.01)
    assert len(names(states, STOPPED)) == 2 and len(names(states, WAITING)) == 2
    step = states[0].step
    assert 0 < step < 500 and states[0].why == f"saved at step {step} of 500"
    assert json.loads((jobs[0].folder.parent / "overrides.json").read_text()) == {"steps": 500}
    found = survey(jobs)
    assert [state.state for state in found] == [WAITING] * 4 and found[0].step == step
    for _ in range(20):  # a busy machine may need several times to reach a step
        states = run_jobs(jobs[:1], Local(1, command), minutes=0.4 / 60, pause=0.01)
        if states[0].step > step:
            break
    steps = [json.loads(entry)["step"] for entry in Run(jobs[0].folder).metrics.read_text().splitlines()]
    assert steps == list(range(1, states[0].step + 1)) and states[0].step > step


def test_two_sweeps_do_not_share_a_folder(sweep, command):
    job = jobs_of(sweep, overrides={"steps": 500})[0]
    Run(job.folder).write("config.json", to_json(job.config))
    first = Process(job.folder, command)
    try:
        states = run_jobs([job], Local(1, command), pause=0.01)
        assert states[0].state == IN_USE
    finally:
        first.stop()
        first.child.wait()


def test_files_of_the_working_folder_hide_no_module(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise ImportError('this is not queue')\n")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    process = Process(tmp_path / "run")
    process.child.wait()
    assert "is not a run" in (tmp_path / "run" / "log.txt").read_text()


def test_a_killed_sweep_lets_its_runs_save(sweep, command):
    if sys.platform != "linux":
        pytest.skip("only Linux tells a child that its parent has died")
    job = jobs_of(sweep, overrides={"steps": 5000})[0]
    Run(job.folder).write("config.json", to_json(job.config))
    parent = os.fork()
    if parent == 0:
        Process(job.folder, command)
        time.sleep(600)
        os._exit(1)
    try:
        until(lambda: (job.folder / "metrics.jsonl").exists())
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    until(lambda: list(job.folder.glob("checkpoints/step-*")))


def test_markup_in_a_title_is_literal(sweep, command):
    sweep.file.write_text(FILE.replace("Digits, small", "a [/x] [bold]b"))
    states = survey(jobs_of(load_sweep(sweep.file)))
    found = io.StringIO()
    Console(file=found, width=150).print(table(states))
    assert "a [/x] [bold]b" in found.getvalue()
    shown = CliRunner().invoke(app, ["sweep", str(sweep.file), "--dry-run"], env={"COLUMNS": "150"})
    assert shown.exit_code == 0 and "a [/x] [bold]b" in shown.output


@pytest.mark.parametrize(
    "given, says",
    [("--jobs=-1", "--jobs must be at least 0, got -1"), ("--minutes=-1", "--minutes must be at least 0, got -1"),
     ("--cpus=0", "--cpus must be at least 1, got 0"), ("--gpus=-7", "--gpus must be at least 0, got -7"),
     ("--on=here", "local, ray or slurm"), ("--seeds=x", "whole numbers such as 0,1,2; got 'x'"),
     ("--seeds=0-4", "such as 0,1,2; got '0-4'")],
)  # fmt: skip
def test_invalid_options_start_nothing(sweep, given, says):
    said = CliRunner().invoke(app, ["sweep", str(sweep.file), given])
    assert said.exit_code == 2 and says in said.output and not (sweep.file.parent / "runs").exists()


def test_the_live_table(sweep, command):
    jobs = jobs_of(sweep, seeds=[0])
    jobs[1].folder.mkdir(parents=True)
    (jobs[1].folder / "broken").touch()
    states = run_jobs(jobs[:3], Local(2, command), pause=0.01) + survey(jobs[3:])
    console = Console(width=160, record=True, file=open(os.devnull, "w"))
    console.print(table(states))
    shown = console.export_text()
    assert "1 failed, 1 waiting, 2 done" in shown and "test accuracy 50.0 %" in shown
    assert "the data is missing" in shown and "12/12" in shown
    console.print(table(states, height=2))
    assert "… 2 more" in console.export_text()
    states[0].state, states[0].left, states[0].tokens_per_s = RUNNING, 3725.0, 52_000.0
    assert line(states[0]).endswith("step 12/12, loss 0.0833, 52.00 k tokens/s, 1:02:05 left")


def test_a_real_run_is_stopped_by_a_signal_and_continued(sweep):
    """With the real `weft resume`: stopped by a signal after some steps, then continued."""
    longer = {"steps": 250, "eval_every": 250, "checkpoint_every": 250}
    job = jobs_of(sweep, seeds=[0], only=["full/1×2"], overrides=longer)[0]
    sent = []

    def view(states, changed):
        if states[0].step >= 3 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    states = run_jobs([job], Local(1), view=view, pause=0.01)
    assert states[0].state == STOPPED and 3 <= states[0].step < 250, states[0]
    assert "stopped by a signal" in states[0].log[-1]
    train(job.config, resume=True)  # as `weft resume` does
    assert survey([job])[0].state == DONE
    steps = [entry["step"] for entry in Run(job.folder).entries("train")]
    assert steps == list(range(1, 251))  # each once; that they are the same steps is tested with the loop


def test_the_command_line(sweep, tmp_path):
    runner = CliRunner()
    shown = runner.invoke(app, ["sweep", str(sweep.file), "--dry-run", "--steps", "9", "--seeds", "3"])
    assert shown.exit_code == 0 and "in every config: steps=9" in shown.output and "4 waiting" in shown.output
    for options, says in (
        (["--on", "moon"], "local, ray or slurm"),
        (["--set", "stepz=3"], "--set takes field=value"),
        (["--only", "nothing"], "no cell of small.py"),
    ):
        refused = runner.invoke(app, ["sweep", str(sweep.file), *options])
        assert refused.exit_code == 2 and says in refused.output, options
    assert not sweep.runs().exists()


def test_exit_codes(sweep, command, monkeypatch):
    import weft.lab.sweep.jobs as module

    monkeypatch.setattr(module, "Local", lambda jobs: Local(jobs, command))
    runner = CliRunner()
    assert runner.invoke(app, ["sweep", str(sweep.file), "--minutes", "0.0001", "--jobs", "2"]).exit_code == 75
    assert runner.invoke(app, ["sweep", str(sweep.file), "--jobs", "2"]).exit_code == 0
    broken = sweep.runs() / "small" / "full-1x2-s5"
    broken.mkdir()
    (broken / "broken").touch()
    failed = runner.invoke(app, ["sweep", str(sweep.file), "--seeds", "5", "--only", "full"])
    assert failed.exit_code == 1 and "1 done, 1 failed, 0 left" in failed.output


def short_and_long(sweep):
    """Runs of 12, 5,000 and 5,000 steps, and a view that sends SIGTERM while the second one runs."""
    long = jobs_of(sweep, seeds=[0], overrides={"steps": 5000})
    seen = []

    def view(states, changed):
        if states[0].state == DONE and states[1].step and not seen:
            seen.append([state.shown for state in states])
            os.kill(os.getpid(), signal.SIGTERM)

    return [jobs_of(sweep, seeds=[0])[0], long[0], long[1]], view, seen


def test_on_a_ray_cluster(sweep, command):
    """Each run fills the cluster: one completes; of two others, one is stopped while running and one in the queue."""
    ray = pytest.importorskip("ray")
    from weft.lab.sweep.remote import RayEngine

    (short, *long), _, _ = short_and_long(sweep)
    seen = []

    def view(states, changed):
        if any(state.step for state in states) and not seen:
            seen.append(sorted(state.shown for state in states))
            os.kill(os.getpid(), signal.SIGTERM)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        done = run_jobs([short], RayEngine(gpus=0, command=command), view=lambda states, changed: None, pause=0.05)
        states = run_jobs(long, RayEngine(gpus=0, command=command), view=view, pause=0.05)
    finally:
        ray.shutdown()
    assert [state.state for state in done] == [DONE]
    assert seen == [["queued", "running"]]
    assert [state.state for state in states] == [STOPPED, STOPPED]
    first, second = sorted(states, key=lambda state: -state.step)
    assert first.why == f"saved at step {first.step} of 5000"
    assert second.why == "before its first checkpoint"


def test_through_submitit(sweep, command, tmp_path):
    pytest.importorskip("submitit")
    from weft.lab.sweep.remote import SlurmEngine

    jobs, view, seen = short_and_long(sweep)
    engine = SlurmEngine(1, tmp_path / "slurm", cluster="local", command=command)
    states = run_jobs(jobs, engine, view=view, pause=0.05)
    assert [state.state for state in states] == [DONE, STOPPED, WAITING]
    assert states[1].why == f"saved at step {states[1].step} of 5000"
    with pytest.raises(ValueError, match="whole number of GPUs"):
        SlurmEngine(0, tmp_path / "slurm", cluster="local", gpus=0.5)


def until(true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
