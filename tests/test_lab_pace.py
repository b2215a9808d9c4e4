"""`--time-budget` chooses the steps by timing a few, and again at every evaluation."""

import dataclasses
import json
from pathlib import Path

import pytest
import runs

pytest.importorskip("lightning")

from weft.lab import loop, pace, train
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
def seconds(monkeypatch):
    """A clock on which a step takes `seconds(step, dense)`: half a second, or one with dense attention."""
    found = {"now": 0.0, "step": lambda step, dense: 1.0 if dense else 0.5}
    update = loop.Training._update

    def timed(self, step):
        found["now"] += found["step"](step, self.is_dense)
        update(self, step)

    monkeypatch.setattr(loop.Training, "_update", timed)
    monkeypatch.setattr(pace, "_time", lambda trial: 1.0 if trial.is_dense else 0.5)
    monkeypatch.setattr(pace, "clock", lambda: found["now"])
    return found


def test_a_timed_run_equals_one_of_the_chosen_steps(tmp_path, seconds, monkeypatch):
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


@pytest.mark.parametrize("slow, steps", [(2.0, 35), (0.5, 110)])
def test_a_run_ends_in_time_at_another_speed_than_the_trial(tmp_path, seconds, monkeypatch, slow, steps):
    """30 s are 60 steps by the trial, with evaluations every 6. Other programs start or end after 10 steps."""
    seconds["step"] = lambda step, dense: 0.5 * (slow if step > 10 else 1)
    run = tmp_path / "run-s0"
    settings = dict(time_budget=0.5, steps=20, warmup=1, eval_every=2, schedule="cosine")
    found = train(runs.tiny(run, **settings))
    assert found.steps == steps == Run(run).config().steps and seconds["now"] == pytest.approx(30, rel=0.02)
    assert Run(run).entries("train")[-1]["lr"] == pytest.approx(0, abs=1e-8)
    assert read_folder(run, "accuracy").state == "complete"
    assert evaluate_run(run)[0] == found.test  # the best checkpoint has an earlier number of steps
    if slow > 1:
        seconds["now"] = 0.0
        runs.killed_run(monkeypatch, runs.tiny(tmp_path / "killed", **settings), 20)
        kept = Run(tmp_path / "killed").config().steps
        assert train(runs.tiny(tmp_path / "killed", **settings), resume=True).steps == kept < 60


def test_a_dense_finish_keeps_its_fraction_of_the_steps_and_ends_in_time(tmp_path, seconds):
    config = runs.tiny(tmp_path / "run", time_budget=0.5, subsample="Sall-L4", finetune_dense_at=0.75, eval_every=1)
    assert pace.seconds_per_step(config) == (0.5, 1.0)
    turned = []
    seconds["step"] = lambda step, dense: turned.append(dense) or (2.0 if dense else 1.0)  # half the speed
    found = train(config)
    assert found.steps == pytest.approx(24, abs=1) and seconds["now"] == pytest.approx(30, abs=2)
    assert turned.count(True) / found.steps == pytest.approx(0.25, abs=0.05)


def test_the_clock_measures_a_step(tmp_path, monkeypatch):
    waits = []

    def update(self, step):
        waits.append(step)
        pace.time.sleep(0.01)
        self.pending.append(pace.torch.zeros(()))

    monkeypatch.setattr("weft.lab.loop.Training._update", update)
    each, dense = pace.seconds_per_step(runs.tiny(tmp_path / "run", time_budget=1.0))
    assert 0.01 <= each == dense < 1
    assert waits == list(range(1, 2 * pace.WARM + pace.TIMED + 1)) and not list(tmp_path.iterdir())


def test_the_warm_up_of_inverse_sqrt_is_not_scaled():
    config = TrainConfig(steps=100, warmup=10, eval_every=0, checkpoint_every=30)
    found = pace.scaled(config, 10)
    assert (found.steps, found.warmup, found.eval_every, found.checkpoint_every) == (10, 10, 0, 3)


def test_packed_runs_count_as_padded_ones_unless_the_pattern_depends_on_the_padding():
    for attention, same in (("linear", True), ("combiner-fixed", True), ("bigbird", False), ("mixed", False)):
        old = TrainConfig(attention=attention)
        assert (not changed(old, TrainConfig(attention=attention, packed=True))) is same, attention
    assert changed(TrainConfig(cache=0.5), TrainConfig(cache=0.5, packed=True)) == ["packed: False -> True"]
    study = TrainConfig(task="listops", attention="bigbird")  # has the pattern of padded documents
    assert not changed(study, dataclasses.replace(study, packed=True))
    assert changed(TrainConfig(), TrainConfig(packed=True, steps=7)) == ["steps: 10000 -> 7"]


def test_an_ensemble_is_tested_at_the_end(tmp_path):
    settings = dict(subsample="Sall-L4", dropout=0.0, steps=2, eval_every=2)
    found = [train(runs.tiny(tmp_path / str(n), ensemble=n, **settings)).test["loss"] for n in (0, 3)]
    mine = evaluate_run(tmp_path / "3")[0]["loss"]
    assert evaluate_run(tmp_path / "3", ensemble=0)[0]["loss"] == pytest.approx(found[0])
    assert found[1] == pytest.approx(mine, rel=1e-6) and found[0] != pytest.approx(mine, rel=1e-6)
    with pytest.raises(ValueError, match="ensemble needs subsampled attention"):
        runs.tiny(tmp_path / "none", ensemble=3)
    with pytest.raises(ValueError, match="ensemble does not support caches with eval_update"):
        runs.tiny(tmp_path / "none", ensemble=3, **settings, cache=0.5, cache_options='{"eval_update": true}')


def test_the_steps_of_a_sweep_replace_its_time_budget():
    sweep = Sweep(Path("table.py"), "", "loss", (Cell("row", "column", TrainConfig(time_budget=10, steps=100)),))
    (job,) = jobs_of(sweep, overrides={"steps": 7})
    assert (job.config.steps, job.config.time_budget, job.variant) == (7, 0, "steps=7+time_budget=0.0")
    assert jobs_of(sweep, overrides={"compile": True, "checkpoint_every": 9})[0].variant == ""


def test_another_warmup_of_a_time_budget_is_another_run():
    sweep = Sweep(Path("table.py"), "", "loss", (Cell("row", "column", TrainConfig(time_budget=10, warmup=10)),))
    for name, value in (("warmup", 50), ("eval_every", 5)):
        assert jobs_of(sweep, overrides={name: value})[0].folder.parent.name == f"table+{name}={value}"
    assert jobs_of(sweep, overrides={"warmup": 10})[0].folder.parent.name == "table"


def test_a_run_that_starts_faster_than_its_trial_plans_again(tmp_path, seconds, monkeypatch):
    """The trial takes 14 of 30 s: the first plan is 4 steps. The run finds compiled code and has 16 s."""

    def slow(trial):
        seconds["now"] += 14
        return 0.5

    used = []
    monkeypatch.setattr(pace, "_time", slow)
    monkeypatch.setattr("weft.lab.loop.set_learning_rate", lambda optimizer, rate: used.append(rate))
    run = tmp_path / "run-s0"
    found = train(runs.tiny(run, time_budget=0.5, steps=20, warmup=4, eval_every=5, schedule="cosine"))
    assert [entry["lr"] for entry in Run(run).entries("train")] == used
    kept = Run(run).config()
    assert found.steps == 32 and (kept.warmup, kept.eval_every) == (6, 8) and seconds["now"] == pytest.approx(30)
