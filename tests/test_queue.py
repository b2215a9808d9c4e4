"""The queue of full-length runs: what is done, and what fits into a portion of GPU time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.queue import Entry, is_done, job_of, pick, queue  # noqa: E402


def test_every_entry_names_one_cell_and_no_two_are_alike():
    jobs = [job_of(entry, "", None) for entry in queue()]  # job_of refuses a name that matches several cells
    assert len({job.folder for job in jobs}) == len(jobs)


def test_a_complete_run_is_done_and_another_seed_or_a_cut_one_is_not():
    entry = Entry("wide/listops", "linear/wide*", 6)
    assert is_done(job_of(entry, "", None))
    assert not is_done(job_of(Entry("wide/listops", "linear/wide*", 6, seed=7), "", None))
    assert not is_done(job_of(Entry("wide/listops", "full/deep*", 20), "", None))  # run to 4,000 steps only


def test_a_portion_holds_what_fits_in_order():
    entries = [Entry("t", name, minutes) for name, minutes in (("a", 10), ("b", 14), ("c", 9), ("d", 8), ("e", 1))]
    assert [entry.cell for entry, _ in pick([(entry, None) for entry in entries], 20)] == ["a", "c", "e"]


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
        assert 0 < layer["entropy"] <= 1 and -1 <= layer["alike"] <= 1
        assert all(layer[name] > 0 for name in ("largest_logit", "gradient", "stream", "update"))
