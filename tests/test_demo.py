"""The demo, in full, with fewer steps."""

import pytest
from typer.testing import CliRunner

pytest.importorskip("sklearn")
pytest.importorskip("lightning")

from weft.cli import app


def test_the_demo_kills_resumes_and_writes_its_page(tmp_path):
    out = tmp_path / "demo"
    done = CliRunner().invoke(app, ["demo", "--steps", "20", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "20 of 20 losses are equal" in " ".join(done.output.split())
    page = (out / "report.html").read_text()
    assert page.count("<polyline") == 6 and "killed" in page
    assert "://" not in page and "<script" not in page  # nothing from outside, and nothing may come:
    assert "default-src 'none'" in page
    assert (out / "deep-killed" / "result.json").exists()
    # A folder that is no demo is left alone.
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert CliRunner().invoke(app, ["demo", "--out", str(other)]).exit_code == 2
    assert (other / "thesis.txt").exists()
