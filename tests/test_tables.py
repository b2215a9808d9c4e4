"""The tables of measured times equal the measurements."""

from __future__ import annotations

import pytest

import weft
from benchmarks import gpu_timing, tables


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_are_those_of_the_measurements(page):
    text = (tables.ROOT / page).read_text()
    assert tables.MARKED.search(text)
    assert tables.written(text) == text, "run python -m benchmarks.tables"


def test_the_registry_knows_the_crossovers():
    found = tables.crossovers()
    assert found
    for name, length in found.items():
        info = weft.attention_info(name)
        assert (info.faster_from or 0) - (info.slower_up_to or 0) == length


def test_a_run_is_continued_only_on_the_same_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_timing.torch.cuda, "get_device_name", lambda: "GPU")
    runs = []
    for commit, resume in (("a", False), ("a", True), ("b", True), ("b", False)):
        monkeypatch.setattr(gpu_timing, "commit", lambda commit=commit: commit)
        results = gpu_timing.Results(tmp_path / "results.json", "gpu_attention", resume)
        runs.append((len(results.runs), results.has("rows", L=1, name="x")))
        results.add("rows", {"L": 1, "name": "x", "ms": 2.0})
    assert runs == [(1, False), (1, True), (2, False), (3, False)]
    assert [len(run["rows"]) for run in results.runs] == [1, 1, 2]  # newest first
