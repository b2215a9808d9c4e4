"""The docs: tables agree with the registry, links are valid, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.cli.attentions import COLUMNS, SHORT, markdown

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/README.md")])


@pytest.mark.parametrize(("page", "columns"), [("README.md", SHORT), ("docs/mechanisms.md", COLUMNS)])
def test_the_tables_list_every_mechanism(page, columns):
    text = (ROOT / page).read_text()
    missing = [line for line in markdown(columns).splitlines() if line not in text]
    assert not missing, f"{page} lacks these rows (`weft attentions --markdown`):\n" + "\n".join(missing)
    named = re.findall(r"^\| `([a-z-]+)` \|", text, re.M)
    assert not [n for n in named if n not in weft.attentions()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_are_valid(page):
    for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readmes_examples_run():
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        exec(compile(code, "README.md", "exec"), {})


SWEEP = """
import re, sys, types
from pathlib import Path
import pytest

page = Path("CONTRIBUTING.md").read_text()
code = re.search(r"```python\\n(.*?)```", page, re.S).group(1).replace("from ..", "from weft.")
module = sys.modules["mean"] = types.ModuleType("mean")  # where pickle finds the class
exec(compile(code, "CONTRIBUTING.md", "exec"), module.__dict__)


class OnlyTheExample:
    def pytest_collection_modifyitems(self, items):
        params = [(item, item.callspec.params if hasattr(item, "callspec") else {}) for item in items]
        items[:] = [item for item, p in params if "mean" in (p.get("name"), getattr(p.get("case"), "name", None))]
        assert len(items) > 100


files = [f"tests/test_{name}.py" for name in ("promises", "refusals", "hostile")]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files], plugins=[OnlyTheExample()]))
"""


def test_the_mechanism_of_contributing_passes_the_sweep():
    """Register the example and run the real sweeps on it."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SWEEP], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_importing_weft_is_light():
    """Neither the compiler nor any extra is imported before it is used."""
    heavy = "torch._dynamo lightning transformers timm matplotlib sklearn pyarrow triton".split()
    code = f"import sys, weft; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {name for name in pages if f": {name}\n" not in navigation} == set()
