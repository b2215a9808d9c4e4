"""The demo with fewer steps. Its processes are forked from one that has imported everything, to save time."""

import importlib
from types import SimpleNamespace

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("lightning")

from runs import weft

from benchmarks.faults import Forked

demo = importlib.import_module("weft.cli.demo")  # `weft.cli.demo` is the function


def test_the_demo_kills_resumes_and_writes_its_page(tmp_path, monkeypatch):
    def start(command, **_):
        assert command[1:3] == ["-m", "weft.cli"]
        return Forked(tmp_path, *command[3:])

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(Popen=start))
    out = tmp_path / "demo"
    done = weft("demo", "--steps", "20", "--out", out)
    assert done.exit_code == 0, done.output
    assert "20 of 20 losses are bit-identical" in " ".join(done.output.split())
    page = (out / "report.html").read_text()
    assert page.count("<polyline") == 6 and "killed" in page
    assert "://" not in page and "<script" not in page  # self-contained, and the policy forbids loading anything
    assert "default-src 'none'" in page
    assert (out / "deep-killed" / "result.json").exists()
    # A folder without a demo is not touched.
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert weft("demo", "--out", other).exit_code == 2
    assert (other / "thesis.txt").exists()
