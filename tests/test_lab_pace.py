"""`--time-budget` chooses the steps by timing a few; the run is then like any run with these steps."""

import dataclasses
import json
from pathlib import Path

import pytest
import runs

pytest.importorskip("lightning")

from weft.lab import pace, train
from weft.lab.evaluate import evaluate_run
from weft.lab.run import Run
from weft.lab.sweep import Cell, Job, Sweep, changed, check_folder, jobs_of
from weft.lab.sweep.cells import result_of, started
from weft.lab.sweep.results import read_folder
from weft.tasks.config import TrainConfig


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


@pytest.fixture
def quick(monkeypatch):
    """One step takes half a second, on this clock; 0.2 minutes are 24 steps."""
    monkeypatch.setattr(pace, "_time", lambda trial: 1.0 if trial.is_dense else 0.5)


def test_a_timed_run_equals_one_of_the_chosen_steps(tmp_path, quick, monkeypatch):
    timed = runs.tiny(tmp_path / "timed-s0", time_budget=0.2, schedule="cosine")
    runs.killed_run(monkeypatch, timed, 13)
    assert not (tmp_path / "timed-s0" / "trial").exists()
    monkeypatch.setattr(pace, "_time", lambda trial: pytest.fail("timed again on resume"))
    assert train(timed, resume=True).steps == 24
    train(runs.tiny(tmp_path / "steps", steps=24, warmup=4, eval_every=8, checkpoint_every=4, schedule="cosine"))
    assert losses(tmp_path / "timed-s0") == losses(tmp_path / "steps")
    kept = Run(tmp_path / "timed-s0").config()
    assert (kept.steps, kept.warmup, kept.eval_every, kept.checkpoint_every, kept.time_budget) == (24, 4, 8, 4, 0.2)
    record = read_folder(tmp_path / "timed-s0", "accuracy")
    assert record.state == "complete" and [step for step, _ in record.clock] == [8, 16, 24]
    assert 0 < record.clock[0][1] < record.clock[2][1] <= record.seconds
    sweep = Sweep(tmp_path / "table.py", "", "accuracy", ())
    job = Job(sweep, Cell("row", "column", timed), timed)
    check_folder(job)
    assert result_of(job)["step"] == started(job).steps == 24 and not record.differs(timed)


def test_the_time_of_a_dense_finish_counts(quick):
    config = runs.tiny("unused", time_budget=1.0, subsample="Sall-L4", finetune_dense_at=0.75)
    assert pace.seconds_per_step(config) == 0.75 * 0.5 + 0.25 * 1.0


def test_the_clock_measures_a_step(tmp_path, monkeypatch):
    waits = []

    def update(self, step):
        waits.append(step)
        pace.time.sleep(0.01)
        self.pending.append(pace.torch.zeros(()))

    monkeypatch.setattr("weft.lab.loop.Training._update", update)
    assert 0.01 <= pace.seconds_per_step(runs.tiny(tmp_path / "run", time_budget=1.0)) < 1
    assert waits == list(range(1, 2 * pace.WARM + pace.TIMED + 1)) and not list(tmp_path.iterdir())


def test_the_warm_up_of_inverse_sqrt_is_not_scaled():
    config = TrainConfig(steps=100, warmup=10, eval_every=0, checkpoint_every=30)
    found = pace.scaled(config, 10)
    assert (found.steps, found.warmup, found.eval_every, found.checkpoint_every) == (10, 10, 0, 3)


def test_packed_runs_count_as_padded_ones_unless_the_pattern_depends_on_the_padding():
    for attention, same in (("linear", True), ("combiner-fixed", True), ("bigbird", False), ("mixed", False)):
        old = TrainConfig(attention=attention)
        assert (not changed(old, TrainConfig(attention=attention, packed=True))) is same, attention
    study = TrainConfig(task="listops", attention="bigbird")  # has the pattern of padded documents
    assert not changed(study, dataclasses.replace(study, packed=True))
    assert changed(TrainConfig(), TrainConfig(packed=True, steps=7)) == ["steps: 10000 -> 7"]


def test_an_ensemble_is_tested_at_the_end(tmp_path):
    settings = dict(subsample="Sall-L4", dropout=0.0, steps=2, eval_every=2)
    found = [train(runs.tiny(tmp_path / str(n), ensemble=n, **settings)).test["loss"] for n in (0, 3)]
    mine = evaluate_run(tmp_path / "3", ensemble=3)[0]["loss"]
    assert found[1] == pytest.approx(mine, rel=1e-6) and found[0] != pytest.approx(mine, rel=1e-6)
    with pytest.raises(ValueError, match="ensemble needs subsampled attention"):
        runs.tiny(tmp_path / "none", ensemble=3)


def test_the_steps_of_a_sweep_replace_its_time_budget():
    sweep = Sweep(Path("table.py"), "", "loss", (Cell("row", "column", TrainConfig(time_budget=10, steps=100)),))
    (job,) = jobs_of(sweep, overrides={"steps": 7})
    assert (job.config.steps, job.config.time_budget, job.variant) == (7, 0, "steps=7+time_budget=0.0")
    assert jobs_of(sweep, overrides={"compile": True})[0].variant == ""
