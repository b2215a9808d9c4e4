"""The demo with a few steps, and its page in a browser."""

from __future__ import annotations

import pytest
from browser import browser, payload, run_browser

pytest.importorskip("sklearn")
pytest.importorskip("lightning")

from runs import weft


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    done = weft("demo", "--quick", "--out", out)
    assert done.exit_code == 0, done.output
    return out, done.output


def test_the_demo_tells_seven_stories_and_ends_with_the_page(demo):
    out, output = demo
    assert "10 of 10 losses are bit-identical" in output
    assert "the same tokens with and without its cache" in output
    assert str((out / "demo.html").resolve()) in output.splitlines()[-1]
    assert all(f"{number}/7 " in output for number in range(1, 8))
    text = (out / "demo.html").read_text()
    assert "://" not in text.replace("http://www.w3.org", "") and "default-src 'none'" in text  # loads nothing
    parts = payload(text)["parts"]
    assert sum(part["kind"] == "heading" for part in parts) == 7
    cost = next(part for part in parts if part["kind"] == "chart")
    assert [len(curve["points"]) for curve in cost["series"]] == [2, 2]
    assert all(y > 0 for curve in cost["series"] for _, y in curve["points"])


@pytest.mark.parametrize("beside", ["", "deep", "demo.html"])
def test_other_files_are_not_removed(tmp_path, monkeypatch, beside):
    from weft.demo import long

    monkeypatch.setattr(long, "tell", lambda *given: pytest.fail("the demo began"))
    (tmp_path / "thesis.txt").write_text("years of work")
    if beside:
        (tmp_path / beside).mkdir()
    assert weft("demo", "--out", tmp_path).exit_code == 2
    assert (tmp_path / "thesis.txt").exists()


def test_an_earlier_demo_is_removed(demo, tmp_path):
    import shutil

    from weft.cli.demo import _empty

    shutil.copytree(demo[0], tmp_path / "again")
    _empty(tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["demo.html"]


@browser
def test_the_page_of_the_demo_draws_every_part(demo, tmp_path):
    script = """
      document.body.style.cssText = "width: 400px; margin: 0";
      const wide = [...document.querySelectorAll("body *")].filter(x => !x.closest(".scroll, pre, svg, .plot")
        && x.getBoundingClientRect().right > 401 && x.offsetWidth);
      document.documentElement.dataset.found = [document.querySelectorAll("h2").length,
        document.querySelectorAll(".chart svg").length > 8, wide.length].join()"""
    assert 'data-found="7,true,0"' in run_browser(tmp_path, demo[0] / "demo.html", script)
