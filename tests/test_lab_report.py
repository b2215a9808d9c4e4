"""Reports of sweeps: means over seeds next to the paper's values, without mixing different runs."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lightning")

from browser import payload
from sweeps import FILE, write_sweep

from weft.cli import app
from weft.lab.run import Run, environment
from weft.lab.sweep import jobs_of
from weft.lab.sweep.cells import keep_sweep
from weft.lab.sweep.results import POINTS, gather, read_results, results_file, thin, write_results
from weft.lab.sweep.tables import report_sweeps, sweep_folders, tables
from weft.tasks.config import to_json


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "papers" / "one")


def put(job, accuracy, *, step=None, commit="1111111aaaa", failed="", torch="2.11", gpu="NVIDIA H200", **other):
    """The folder of a run: complete, or interrupted after `step`."""
    run, steps = Run(job.folder), step or job.config.steps
    config = dataclasses.replace(job.config, accelerator="auto")
    run.write("config.json", to_json(config))
    start = {"commit": commit, "torch": torch, "gpu": gpu, "time": "2026-01-01", "host": "secret", "command": ["x"]}
    start |= other
    run.write("environment.json", json.dumps([start]))
    entries = [{"kind": "train", "step": i, "loss": 1 / i, "lr": 1.0, "tokens_per_s": 5.0} for i in range(1, steps + 1)]
    entries += [{"kind": "val", "step": i, "loss": 1.0, "accuracy": accuracy} for i in range(5, steps + 1, 5)]
    run.metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"kind": "tr')
    if failed:
        run.write("outcome.json", json.dumps({"state": "failed", "why": failed}))
    elif step is None:
        test = {"loss": 1.0, "accuracy": accuracy}
        result = {"step": steps, "best_step": 5, "val": test, "test": test, "parameters": 7, "tokens_per_s": 5.0}
        run.write("result.json", json.dumps(result))


def test_runs_name_an_apple_gpu(sweep, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    (job,) = jobs_of(sweep, only=["full/1×2"], seeds=[0])
    put(job, 0.5, gpu=environment()["gpu"])
    (record,) = gather(sweep)
    assert record.starts[0].device == "Apple GPU"


def cell(made, row, column):
    line = next(line for line in made.rows if line[0] == row)
    return line[made.head.index(column)]


def test_mean_and_sample_deviation_next_to_the_papers_value(sweep):
    for job, accuracy in zip(jobs_of(sweep, only=["full/1×2"], seeds=[0, 1, 2]), (0.5, 0.52, 0.57), strict=True):
        put(job, accuracy)
    (made,) = tables(sweep, gather(sweep))
    assert made.head == ["accuracy (%)", "1×2", "paper", "wide, 1x4", "paper"]
    assert made.rows[0] == ["full", "53.0 ± 3.6 (n=3)", "90.0", "—", "90.0"]
    assert made.rows[1] == ["linear", "—", "", "—", ""]
    assert made.notes == ["All runs: commit 1111111, NVIDIA H200, torch 2.11."]


def test_a_seed_that_is_not_a_number_stays_in_the_mean(sweep):
    jobs = jobs_of(sweep, only=["full/1×2"], seeds=[0, 1, 2])
    for job, accuracy in zip(jobs, (0.5, 0.52, float("nan")), strict=True):
        put(job, accuracy)
    put(*jobs_of(sweep, only=["linear/1×2"], seeds=[0]), float("nan"), step=7)
    for _ in range(2):  # from the runs, then from the results, where it is null
        records = gather(sweep)
        (made,) = tables(sweep, records)
        assert cell(made, "full", "1×2") == "nan (n=3)"
        assert cell(made, "linear", "1×2") == "nan at step 7 of 12 (validation of step 5, n=1)"
        write_results(results_file(sweep), sweep, records)
        shutil.rmtree(sweep.runs(), ignore_errors=True)


def test_results_without_news_are_not_written_again(sweep):
    put(*jobs_of(sweep, only=["full/1×2"], seeds=[0]), 0.5)
    kept = results_file(sweep)
    write_results(kept, sweep, gather(sweep))
    older = kept.read_text().replace('"data": "", ', "")  # a field that was added later
    kept.write_text(older)
    shutil.rmtree(sweep.runs())
    report_sweeps([sweep.file], sweep.file.parent / "report")
    assert '"data"' not in older and kept.read_text() == older


def test_a_seed_may_be_negative(sweep):
    for job, accuracy in zip(jobs_of(sweep, only=["full/1×2"], seeds=[-1, 1]), (0.5, 0.6), strict=True):
        put(job, accuracy)
    (made,) = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == "55.0 ± 7.1 (n=2)"


def test_interrupted_runs_show_their_step_and_are_not_averaged(sweep):
    jobs = jobs_of(sweep, only=["full/1×2"], seeds=[0, 1, 2, 3])
    put(jobs[0], 0.5)
    put(jobs[1], 0.6)
    put(jobs[2], 0.1, step=7)
    put(jobs[3], 0.2, step=3)  # before the first evaluation
    (made,) = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == (
        "55.0 ± 7.1 (n=2); 10.0 at step 7 of 12 (validation of step 5, n=1); no accuracy at step 3 of 12"
    )


def test_failed_runs_show_the_reason(sweep):
    put(jobs_of(sweep)[0], 0.5, step=7, failed="the loss of step 7 is nan (exit code 70)")
    (made,) = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == "failed at step 7 of 12"
    assert made.notes[0] == "full, 1×2, seed 0 failed at step 7 of 12: the loss of step 7 is nan (exit code 70)"


def test_runs_of_another_config_are_excluded_and_listed(sweep):
    jobs = jobs_of(sweep, only=["full/1×2"])
    put(jobs[0], 0.5)
    put(dataclasses.replace(jobs[1], config=dataclasses.replace(jobs[1].config, dim=24)), 0.9)
    (made,) = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == "50.0 (n=1)"
    assert made.notes[0] == (
        "Excluded from full, 1×2: seed 1, run with different settings (dim: 24 -> 16); result: 90.0."
    )


def test_overridden_runs_get_their_own_table(sweep):
    put(jobs_of(sweep)[0], 0.5)
    short = jobs_of(sweep, overrides={"steps": 6})[0]
    put(short, 0.3)
    (short.folder.parent / "overrides.json").write_text('{"steps": 6}')
    own, other = tables(sweep, gather(sweep))
    assert cell(own, "full", "1×2") == "50.0 (n=1)" and cell(other, "full", "1×2") == "30.0 (n=1)"
    assert other.head[0] == "accuracy (%), with steps=6"


def test_results_with_a_setting_that_no_longer_exists(sweep):
    put(jobs_of(sweep)[0], 0.5)
    (record,) = gather(sweep)
    old = dataclasses.replace(record, config={**record.config, "width": 2}, overrides={"width": 2})
    shutil.rmtree(sweep.runs())
    write_results(results_file(sweep), sweep, [old])
    _, made = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == "—" and "(width: 2 -> no such setting); result: 50.0" in made.notes[0]


def test_different_commits_and_devices_are_marked(sweep):
    jobs = jobs_of(sweep, seeds=[0, 1])
    put(jobs[0], 0.5)
    put(jobs[4], 0.6, commit="2222222bbbb+changes")  # the same cell
    put(jobs[1], 0.7, gpu="NVIDIA A100", gpu_share=12.5)
    (made,) = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == "55.0 ± 7.1 (n=2) [a, b]"
    assert cell(made, "full", "wide, 1x4") == "70.0 (n=1) [c]"
    assert made.notes == [
        "full, 1×2 combines runs of different origin: seed 0 [a], seed 1 [b].",
        "[a] commit 1111111, NVIDIA H200, torch 2.11",
        "[b] commit 2222222 with changes, NVIDIA H200, torch 2.11",
        "[c] commit 1111111, 12.5 % of one NVIDIA A100, torch 2.11",
    ]


def test_runs_on_different_data_are_named(sweep):
    jobs = jobs_of(sweep, only=["full"])
    for job, rows in zip(jobs[:3], ("a", "b", "a"), strict=True):  # of two cells
        put(job, 0.5)
        Run(job.folder).write("data.json", json.dumps({"sha256": {"train": rows}}))
    (made,) = tables(sweep, gather(sweep))
    note = "On other data (8630e63a) than other runs (2ec0cb3d): full, wide, 1x4, seed 0."
    assert [n for n in made.notes if "data" in n] == [note]
    write_results(results_file(sweep), sweep, gather(sweep))
    shutil.rmtree(sweep.runs())
    assert tables(sweep, gather(sweep)) == [made]


def test_tables_can_be_made_again_without_the_runs(sweep):
    for number, job in enumerate(jobs_of(sweep)):
        put(job, 0.5 + number / 100)
    place = sweep.file.parent / "report"
    text = report_sweeps([sweep.file], place)
    shutil.rmtree(sweep.runs())
    assert report_sweeps([sweep.file], place) == text
    kept = results_file(sweep).read_text()
    assert "secret" not in kept and str(sweep.file.parent) not in kept  # nothing of the machine but its device
    assert len(kept) < 20_000 and len(kept.splitlines()) == 8 + 3


def test_curves_of_another_metric_are_not_shown(sweep):
    put(jobs_of(sweep)[0], 0.5)
    write_results(results_file(sweep), sweep, gather(sweep))
    shutil.rmtree(sweep.runs())
    assert gather(sweep)[0].curve and not gather(dataclasses.replace(sweep, metric="loss"))[0].curve


def test_results_round_trip(sweep, tmp_path):
    put(jobs_of(sweep)[0], 0.5)
    put(jobs_of(sweep)[1], float("nan"), step=9)
    records = gather(sweep)
    write_results(tmp_path / "x.json", sweep, records)
    found = read_results(tmp_path / "x.json")
    assert found[0].config == records[0].config and found[0].test == records[0].test
    assert found[0].starts == records[0].starts and [tuple(p) for p in found[0].loss] == records[0].loss
    assert "NaN" not in (tmp_path / "x.json").read_text() and math.isnan(found[1].val["accuracy"])
    assert tables(sweep, found) == tables(sweep, records)
    (tmp_path / "x.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        read_results(tmp_path / "x.json")


def test_a_short_run_does_not_replace_saved_results(sweep):
    job = jobs_of(sweep)[0]
    put(job, 0.5)
    write_results(results_file(sweep), sweep, gather(sweep))
    shutil.rmtree(job.folder)
    put(job, 0.1, step=5)
    assert gather(sweep)[0].test["accuracy"] == 0.5
    put(job, 0.1, step=job.config.steps)  # stopped in its test
    assert gather(sweep)[0].test["accuracy"] == 0.5
    put(job, 0.6)  # complete again: now it counts
    assert [record.test["accuracy"] for record in gather(sweep)] == [0.6]
    write_results(results_file(sweep), sweep, gather(sweep))
    sweep.file.write_text(FILE.replace("**TINY", "dropout=0.25, **TINY"))
    (made,) = tables(write_sweep(sweep.file.parent, file=sweep.file.read_text()), gather(sweep))
    assert cell(made, "full", "1×2") == "—" and "dropout: 0.0 -> 0.25" in made.notes[0]


def test_a_stopped_run_of_fixed_time_does_not_replace_a_complete_one_with_fewer_steps(tmp_path):
    sweep = write_sweep(tmp_path / "timed", file=FILE.replace("**TINY", "time_budget=1.0, **TINY"))
    job = jobs_of(sweep)[0]
    put(job, 0.5)
    (made,) = tables(sweep, gather(sweep))
    assert cell(made, "full", "1×2") == "50.0 (12 steps, n=1)"
    write_results(results_file(sweep), sweep, gather(sweep))
    shutil.rmtree(job.folder)
    faster = dataclasses.replace(job, config=dataclasses.replace(job.config, steps=20))
    put(faster, 0.1, step=15)
    assert gather(sweep)[0].test["accuracy"] == 0.5


def test_curves_are_thinned_by_means():
    points = [(float(i), float(i % 2)) for i in range(1, 1001)]
    thinned = thin(points)
    assert len(thinned) == POINTS and thinned[-1][0] == 1000
    assert all(abs(y - 0.5) < 0.05 for _, y in thinned)
    assert thin([(1.0, 2.0), (2.0, float("nan"))]) == [(1.0, 2.0)]


def test_the_page_has_the_tables_and_curves(sweep):
    title = "Digits <script>alert(1)</script> & more"
    sweep.file.write_text(FILE.replace('"Digits, small"', repr(title)))
    for job in jobs_of(sweep):
        put(job, 0.5)
    shown = {"kind": "gallery", "title": "Samples", "note": "", "images": []}
    Run(job.folder).write("gallery.json", json.dumps([shown]))
    text = report_sweeps([sweep.file], sweep.file.parent / "report")
    page = (sweep.file.parent / "report.html").read_text("utf-8")
    assert (sweep.file.parent / "report.md").read_text("utf-8") == text
    assert page.count("<script") == 2 and "default-src 'none'" in page
    parts = payload(page)["parts"]
    assert parts[0] == {"kind": "heading", "text": title}
    charts = [part for part in parts if part["kind"] == "chart"]
    assert [chart["title"] for chart in charts] == [
        f"{column}: {what}" for column in ("1×2", "wide, 1x4") for what in ("validation accuracy", "training loss")
    ]
    assert all(
        [s["name"] for s in chart["series"]] == ["full", "full", "linear", "linear"] for chart in charts
    )  # a line per seed
    assert charts[0]["y"]["label"] == "accuracy, %" and charts[0]["series"][0]["points"][0] == [5, 50.0]
    (table,) = (part for part in parts if part["kind"] == "table")
    assert table["rows"][0][1] == "50.0 ± 0.0 (n=2)"
    assert parts[-1] == {**shown, "title": f"{job.folder.name}: Samples"}


def test_folders_of_folders_and_single_files(sweep, tmp_path):
    other = write_sweep(tmp_path / "papers" / "two", "more")
    (tmp_path / "papers" / "two" / "script.py").write_text("raise SystemExit('was run')")
    found = sweep_folders([tmp_path / "papers"])
    assert {place.parent.name: [f.name for f in files] for place, files in found.items()} == {
        "one": ["small.py"],
        "two": ["more.py"],
    }
    put(jobs_of(other)[0], 0.5)
    runner = CliRunner()
    shown = runner.invoke(app, ["report", str(tmp_path / "papers"), "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0 and "50.0 (n=1)" in shown.output
    written = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*"))
    assert written == ["one/report.html", "one/report.md", "two/more.results.json", "two/report.html", "two/report.md"]
    assert runner.invoke(app, ["report", str(other.file)]).exit_code == 0
    assert (other.file.parent / "more.report.md").exists() and not (other.file.parent / "report.md").exists()
    nothing = runner.invoke(app, ["report", str(tmp_path / "out")])
    assert nothing.exit_code == 2 and "contains no run" in nothing.output
    inside = jobs_of(other)[0].folder
    for paths, says in (([inside.parent], "a folder of runs"), ([inside, "none"], "none does not exist"),
                        ([inside, tmp_path / "papers"], "is a run, but not all paths are")):  # fmt: skip
        refused = runner.invoke(app, ["report", *map(str, paths)])
        assert refused.exit_code == 2 and says in refused.output
    (inside.parent / "overrides.json").write_text("{}")
    paths = [*map(str, inside.parent.iterdir()), "--out", str(tmp_path / "runs.html")]  # FOLDER/*, as that error says
    shown = runner.invoke(app, ["report", *paths])
    assert shown.exit_code == 0 and "runs.html" in shown.output


def test_reports_of_folders_with_the_same_name(tmp_path):
    for version, accuracy in (("v1", 0.5), ("v2", 0.6)):
        put(jobs_of(write_sweep(tmp_path / version / "one"))[0], accuracy)
    paths = [str(tmp_path / version / "one") for version in ("v1", "v2")]
    assert CliRunner().invoke(app, ["report", *paths, "--out", str(tmp_path / "out")]).exit_code == 0
    texts = [(tmp_path / "out" / version / "one" / "report.md").read_text() for version in ("v1", "v2")]
    assert ["50.0 (n=1)" in text for text in texts] == [True, False]


def test_runs_in_another_folder(sweep, tmp_path):
    put(jobs_of(sweep, out=tmp_path / "far")[0], 0.5)
    assert len(gather(sweep, tmp_path / "far")) == 1 and not gather(sweep)
    namesake = write_sweep(tmp_path / "papers" / "two")  # of the same name, in another folder
    assert not gather(namesake, tmp_path / "far")
    write_results(results_file(sweep), sweep, gather(sweep, tmp_path / "far"))
    for place, says in (("far", "50.0 (n=1)"), ("near", "has no runs of small"), ("far/one", "has no runs of small")):
        shown = CliRunner().invoke(app, ["report", str(sweep.file), "--runs", str(tmp_path / place)])
        assert says in shown.output


def test_a_report_does_not_run_the_file_if_its_cells_are_saved(sweep, capsys):
    put(jobs_of(sweep)[0], 0.5)
    text = report_sweeps([sweep.file], sweep.file.parent / "report")
    assert "running" in capsys.readouterr().err
    keep_sweep(sweep)
    (sweep.file.parent / "common.py").write_text("raise SystemExit('this was run')")
    assert report_sweeps([sweep.file], sweep.file.parent / "report") == text
    assert capsys.readouterr().err == ""
    sweep.file.write_text(sweep.file.read_text() + "# changed")
    with pytest.raises(SystemExit):
        report_sweeps([sweep.file], sweep.file.parent / "report")
