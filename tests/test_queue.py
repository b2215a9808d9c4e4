"""The queue of full-length runs: what is done, and what fits into a portion of GPU time."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lightning")

from weft.lab.sweep import Job
from weft.lab.sweep.jobs import Process
from weft.lab.sweep.results import results_file
from weft.tasks import TrainConfig, get_task
from weft.tasks.base import DataMissing

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.queue import Entry, Hold, is_done, job_of, left, limited, matches, pick, queue, results_of


@pytest.fixture(scope="module")
def jobs():
    return [(entry, job_of(entry, "", None)) for entry in queue()]  # job_of refuses names of several cells


def test_every_entry_names_one_cell_and_no_two_are_alike(jobs):
    assert len({job.folder for _, job in jobs}) == len(jobs)
    assert {entry.seed for entry, _ in jobs} == {0, 1, 2}
    assert [entry.seed for entry, _ in jobs] == sorted(entry.seed for entry, _ in jobs)


def test_every_entry_has_a_task_whose_data_has_a_known_place(jobs):
    """The config is valid, and without data its task says where the data comes from."""
    for config in {(job.config.task, job.config.model): job.config for _, job in jobs}.values():
        config.check()
        with pytest.raises(DataMissing, match=r"weft data|put|download|Parquet"):
            get_task(config.task).load(dataclasses.replace(config, data="/nowhere"))


def test_a_run_of_fixed_time_has_a_minute_for_start_and_test(jobs):
    for entry, job in jobs:
        assert entry.minutes >= job.config.time_budget + bool(job.config.time_budget)


def test_only_settings_that_change_no_result_can_be_set():
    entry = Entry("wide/listops", "linear/wide*", 6)
    assert not job_of(entry, "", None, compile=False, log_every=50).config.compile
    with pytest.raises(ValueError, match=r"steps=5 changes what the cells of wide/listops compute"):
        job_of(entry, "", None, steps=5)
    assert matches(entry, ["wide/listops linear/*"]) and not matches(entry, ["wide/imdb*", "*deep*"])


def test_a_complete_run_is_done_and_another_seed_or_a_cut_one_is_not():
    entry = Entry("wide/listops", "linear/wide*", 6)
    assert is_done(job_of(entry, "", None))
    assert not is_done(job_of(Entry("wide/listops", "linear/wide*", 6, seed=7), "", None))
    assert not is_done(job_of(Entry("wide/listops", "full/deep*", 20), "", None))  # run to 4,000 steps only


def test_a_cell_is_done_only_with_the_present_weights_of_its_start(monkeypatch):
    (first,) = [e for e in queue() if e.table == "crate/mae" and "pre-training" in e.cell and not e.seed]
    (probe,) = [e for e in queue() if e.table == "crate/mae" and "probe" in e.cell and not e.seed]
    sweep = job_of(first, "", None).sweep
    before = results_of(results_file(sweep))
    assert is_done(job_of(first, "", None)) and is_done(job_of(probe, "", None))
    again = [dataclasses.replace(r.starts[0], time="2027-01-01T00:00:00+0000") for r in before[:1]]
    for changed, done in (({"starts": again}, True), ({"state": "cut"}, False)):
        records = [dataclasses.replace(r, **changed) if r.cell.startswith("pre-training") else r for r in before]
        monkeypatch.setattr("experiments.queue.results_of", lambda file, records=records: records)
        assert is_done(job_of(first, "", None)) == done and not is_done(job_of(probe, "", None))


def test_a_portion_holds_what_fits_in_order(tmp_path):
    def waiting(*minutes, start=""):
        for i, each in enumerate(minutes):
            config = TrainConfig(out=str(tmp_path / "abcde"[i]), init_from=start and str(tmp_path / start) * (i == 2))
            yield Entry("t", "abcde"[i], each), Job(None, None, config)

    def cells(chosen):
        return [entry.cell for entry, _ in chosen]

    assert cells(pick(list(waiting(10, 14, 9, 8, 1)), 20)) == ["a", "c", "e"]
    assert cells(pick(list(waiting(30, 40)), 20)) == ["a"]  # none fits: it starts, and continues later
    assert cells(pick(list(waiting(30, 15, 5, start="a")), 20)) == ["b"]  # c starts from a
    assert cells(pick(list(waiting(10, 15, 5, start="a")), 20)) == ["a", "c"]
    shared = [(dataclasses.replace(entry, busy=4), job) for entry, job in waiting(10, 21, 8, 8, 8)]
    assert cells(pick(shared, 20, jobs=4)) == ["a", "c", "d", "e"]  # 34 of 80 minutes, 16 of 20 of the GPU
    assert cells(pick(shared, 13, jobs=4)) == ["a", "c", "d"]
    assert cells(pick(shared, 20, jobs=1)) == ["a", "c"]
    folder = tmp_path / "a" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-00007500.safetensors").touch()
    assert left(*next(waiting(30))) == 7.5


def test_a_share_of_the_gpu_slows_runs_of_fixed_steps():
    timed, steps = Entry("combiner/enwik8", "dense/10 min", 11), Entry("wide/listops", "full/wide*", 2, busy=1)
    for entry, share, expected in ((timed, 0.2, (11, 0.2)), (steps, 0.2, (5, 0.2)), (steps, 0.8, (2, 0.5))):
        found = limited(entry, job_of(entry, "", None), share)
        assert (found.minutes, found.share) == pytest.approx(expected)


def test_the_results_page_is_up_to_date():
    from experiments.results import page

    for file, content in page().items():
        if file.suffix == ".md":
            assert file.read_bytes() == content, "run python -m experiments.results"


def test_stability_reads_every_checkpoint(tmp_path):
    from experiments.stability import checkpoints
    from weft.lab.loop import train
    from weft.tasks import make_config

    config = make_config(
        "digits", steps=2, layers=2, heads=1, head_dim=4, dim=8, mlp_dim=8, checkpoint_every=1, eval_every=0,
        accelerator="cpu", out=str(tmp_path / "run"),
    )  # fmt: skip
    train(config)
    rows = checkpoints(tmp_path / "run", "", 3, "cpu")
    assert [row["step"] for row in rows] == [1, 2] and len(rows[0]["layers"]) == 2
    for layer in rows[1]["layers"]:
        assert 0 < layer["entropy"] <= 1 and 0 < layer["first_entropy"] <= 1 and -1 <= layer["alike"] <= 1
        assert 0 < layer["first_self"] < 1
        assert all(layer[name] > 0 for name in ("largest_logit", "gradient", "stream", "update"))


def test_watch_names_the_first_tensor_that_is_not_finite(tmp_path, monkeypatch):
    from experiments.watch import watched
    from weft.attention.full import FullAttention
    from weft.lab.loop import Training
    from weft.tasks import make_config

    plain, update, calls = FullAttention.attend, Training._update, []

    def broken(self, q, k, v, *others):
        calls.append(q)
        if len(calls) == 3:  # layer 1, step 2
            q.register_hook(lambda gradient: gradient * float("nan"))
        return plain(self, q, k, v, *others)

    def first(self, step):
        if step == 1:  # before, the need of memory was measured
            calls.clear()
        update(self, step)

    monkeypatch.setattr(FullAttention, "attend", broken)
    monkeypatch.setattr(Training, "_update", first)
    config = make_config(
        "digits", steps=4, layers=2, heads=1, head_dim=4, dim=8, mlp_dim=8, eval_every=0, accelerator="cpu",
        out=str(tmp_path / "run"),
    )  # fmt: skip
    found = watched(config)
    where = found["first"]
    assert found["steps"] == 2 and found["ended"].startswith("NotFinite")
    assert (where["step"], where["layer"], where["tensor"]) == (2, 1, "inputs_gradient")
    exact = [count for name, count in where["again"]["by"].items() if name.startswith("float32")]
    assert exact == [[0, 0, 0, 0]] * 2  # the same tensors give finite results
    logits, before = found["rows"][1]["logits"], found["rows"][0]
    assert min(logits) > 0 and before["gradient"] > 0 and min(before["inputs_gradient"]) > 0


def test_figures_of_claims_come_from_the_results(monkeypatch, tmp_path):
    from experiments import results

    (tmp_path / "a.json").write_text('{"b": {"c d": 1.23456}}')
    lines = {
        "| {{wide/listops linear/wide*}} against {{combiner/table1 Fixed/ImageNet-64}} |": "| 35.4 against not run |",
        "1,000 steps: {{wide/imdb_byte full/wide* steps=1000}}": "1,000 steps: 60.3",
        "{{wide/imdb_byte combiner-fixed/wide*}}": "not complete",
        "{{a.json b/c d}}": "1.235",
        "{{speedup eager_both_ms combiner-fixed 16384}}": "12.6",
        "{{ms both_ms sparse 65536}} and {{cudnn both_ms sparse 65536}}": "5.06 and 70.0",
        "{{training compiled combiner-fixed 8192}}": "1.49",
    }  # fmt: skip
    (tmp_path / "claims.md").write_text("\n".join(lines))
    monkeypatch.setattr(results, "HERE", tmp_path)
    assert results.claims().split("\n") == list(lines.values())


def test_every_table_with_results_has_a_section(monkeypatch):
    from experiments import results

    monkeypatch.setattr(results, "claims", lambda: "# Results\n")
    with pytest.raises(SystemExit, match="no section for cached/coco128.*### Overfitting COCO-128"):
        results.page()


def test_claims_are_short_and_have_a_verdict():
    from experiments.results import DOCS

    text = (DOCS / "results.md").read_text()
    verdicts = re.findall(r"\*([a-z ]+)\*: ", text.partition("| claim |")[0])
    rows = re.findall(r"^\| \*\*.*$", text, re.M)
    assert len(verdicts) == 5 and len(rows) > 20
    for row in rows:
        *_, verdict, conditions = (cell.strip() for cell in row.strip("|").split("|"))
        found = re.fullmatch(r"\[(.+)\]\(#.+\)", verdict)
        assert found and found[1] in verdicts, row
        assert conditions and len(row) < 350, row


def test_a_result_may_be_nan():
    from experiments import results

    sweep, runs = SimpleNamespace(metric="accuracy", show=str), [SimpleNamespace(test={"accuracy": math.nan})] * 2
    assert results.mean(sweep, runs)[1] == "not a number"


def test_runs_are_added_to_the_tables_and_incomplete_ones_are_named(monkeypatch, tmp_path, capsys):
    from sweeps import write_sweep
    from test_lab_report import put

    from experiments import queue, results
    from weft.lab.sweep import jobs_of

    sweep = write_sweep(tmp_path / "papers" / "one")
    monkeypatch.setattr(queue, "HERE", tmp_path / "papers")
    monkeypatch.setattr(results, "HERE", tmp_path / "papers")
    jobs = jobs_of(sweep, seeds=[0, 1], out=tmp_path / "runs")
    put(jobs[0], 0.5, gpu_share=12.5)
    put(jobs[4], 0.6, gpu_share=12.5, commit="1111111aaaa+changes")  # the same cell
    put(jobs[1], 0.7, step=7)
    put(dataclasses.replace(jobs[2], config=dataclasses.replace(jobs[2].config, learning_rate=0.5)), 0.8)
    for _ in range(2):  # adding twice changes nothing
        results.add(tmp_path / "runs")
    assert "full-1x2, seed 1: 60.0\n" in capsys.readouterr().out
    text, drawing = results.section(sweep)
    assert "1 of 4 cells complete" in text and b"validation accuracy" in drawing
    figures = "| full, 1×2 | 90 | 55.0 ± 7.1 | 0, 1 | 12 of 12 | –, – | -35.0 | "
    where = "12.5 % of one NVIDIA H200"
    assert f"{figures}1111111, {where}; 1111111+changes, {where} |" in text
    assert "- full, wide, 1x4, seed 0: 7 of 12 steps, validation accuracy 70.0 at 5; stopped" in text
    assert "- linear, 1×2, seed 0: 80.0 after 12 steps, with learning_rate 0.5 instead of 0." in text
    with pytest.raises(SystemExit, match="has no runs of a table"):
        results.add(tmp_path / "papers")


def test_only_incomplete_curves_are_called_incomplete(tmp_path):
    from sweeps import write_sweep
    from test_lab_report import put

    from experiments import results
    from weft.lab.sweep import jobs_of

    sweep = write_sweep(tmp_path / "one")
    stopped, complete = jobs_of(sweep, seeds=[0, 1], only=["linear/1×2"])
    put(stopped, 0.5, step=11)
    put(complete, 0.6)
    drawing = results.plot(sweep, [(stopped.cell, results.gather(sweep))]).decode()
    assert ">linear (not complete)<" in drawing and ">linear<" in drawing


def test_plateau_finds_the_token():
    from experiments.plateau import leaves_at

    step, _ = leaves_at("full", 1, None, 0, steps=300)
    assert step is not None and 30 < step < 300
    full, linear, scaled = (
        leaves_at(*choice, 0, steps=1)[1] for choice in (("full", 20, None), ("linear", 20, 1.0), ("linear", 20, 4.0))
    )
    assert 0 < linear < scaled < full


def test_runs_stand_still_while_the_file_exists(tmp_path):
    counter = "import itertools, sys, time\nfor n in itertools.count(): open(sys.argv[1] + '/n', 'w').write(str(n))"
    process, file, number = Process(tmp_path, (sys.executable, "-c", counter)), tmp_path / "alone", tmp_path / "n"
    shown = []
    hold, states = Hold(file, lambda *given: shown.append(given)), [SimpleNamespace(handle=process)]

    def moves() -> bool:
        before, end = number.read_text(), time.monotonic() + 0.5
        while time.monotonic() < end:
            if number.read_text() not in ("", before):
                return True
        return False

    try:
        wait_until(number.exists)
        hold(states, None)
        wait_until(moves)
        file.touch()
        hold(states, None)
        wait_until(lambda: not moves())
        hold(states, None)  # stops nothing twice
        file.unlink()
        hold(states, None)
        wait_until(moves)
        assert len(shown) == 4
        file.touch()
        hold(states, None)
        process.stop()
        hold.release()  # at the end of the queue: a run that stands still could not save
        assert process.child.wait(10) != 0
        hold(states, None)  # it has ended
    finally:
        process.child.kill()


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
