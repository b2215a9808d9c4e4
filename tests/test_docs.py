"""The docs: tables agree with the registry, links are valid, examples run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import weft
from weft.cli import app
from weft.cli.attentions import COLUMNS, SHORT, markdown
from weft.core import registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*/README.md")])


@pytest.mark.parametrize(("page", "columns"), [("README.md", SHORT), ("docs/mechanisms.md", COLUMNS)])
def test_the_tables_list_every_mechanism(page, columns):
    text = (ROOT / page).read_text()
    missing = [line for line in markdown(columns).splitlines() if line not in text]
    assert not missing, f"{page} lacks these rows (`weft attentions --markdown`):\n" + "\n".join(missing)
    named = re.findall(r"^\| `([a-z-]+)` \|", text, re.M)
    assert not [n for n in named if n not in weft.attentions()]
    counts = re.findall(r"(\d+) (?:attention )?mechanisms\b", text)
    assert set(counts) <= {str(len(weft.attentions()))}, f"{page} counts {counts}"


def test_the_readme_and_the_site_recommend_the_same():
    readme, site = (
        re.findall(r"^\| .* \|$", (ROOT / page).read_text().partition("| situation |")[2].partition("\n\n")[0], re.M)
        for page in ("README.md", "docs/which.md")
    )
    assert readme == site and len(site) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_are_valid(page):
    docs = ROOT / "docs"
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text()):
        found = (page.parent / target).resolve()
        assert found.exists(), f"{page.name} links to {target}"
        assert docs not in page.parents or docs in found.parents, f"{target} of {page.name} is not on the site"


def anchors(page):
    """The addresses of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_headings(page):
    for target, heading in re.findall(r"\]\(([^)#:\s]*\.md|)#([^)\s]+)\)", page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert heading in anchors(found), f"{page.name} links to #{heading} of {found.name}"


ELSEWHERE = {"CONTRIBUTING.md", "docs/lab.md", "docs/scale.md"}  # below, in test_plugins, and for several processes
EXAMPLES = [p for p in PAGES if "```python" in p.read_text() and str(p.relative_to(ROOT)) not in ELSEWHERE]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_examples_run(page, tmp_path, monkeypatch):
    _alone(tmp_path, monkeypatch)
    namespace: dict = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        for library in ("timm", "transformers"):
            if f"import {library}" in code or f"from {library}" in code:
                pytest.importorskip(library)
        exec(compile(code, page.name, "exec"), namespace)


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebooks_run(notebook, tmp_path, monkeypatch):
    for library in ("transformers", "lightning"):
        pytest.importorskip(library)
    _alone(tmp_path, monkeypatch)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "clear the outputs before you commit"
    namespace: dict = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), namespace)


def _alone(folder, monkeypatch):
    """Run in an empty folder; forget the mechanisms that are registered."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("_classes", "_infos"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def test_the_commands_have_these_arguments():
    """Parses every `weft` command of the pages, without running it. The settings of `weft train` fit together."""
    from typer.main import get_command

    from weft.tasks import make_config

    count, weft_command = 0, get_command(app)
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r" && | \| ", line):
                    words = shlex.split(part, comments=True)
                    if words[:1] != ["weft"] or "…" in line:
                        continue
                    command, name, words = weft_command, "weft", [w for w in words[1:] if w not in "<>"]
                    while hasattr(command, "commands"):
                        name, words = words[0], words[1:]
                        assert name in command.commands, f"{page.name}: {line}"
                        command = command.commands[name]
                    try:
                        given = command.make_context(name, words).params
                        if name == "train" and not given.pop("resume") and ".py" not in given["task"]:
                            make_config(**{key: value for key, value in given.items() if value is not None})
                    except Exception as error:
                        raise AssertionError(f"{page.name}: {line}: {error}") from None
                    count += 1
    assert count > 50


def test_ensembles_are_of_models_trained_on_samples():
    """`weft eval --ensemble` refuses a model without subsampled attention."""
    count = 0
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
            for run in re.findall(r"weft eval (\S+) --ensemble", block):
                (training,) = re.findall(rf"weft train .*--out {re.escape(run)}\b.*", block)
                assert "subsample" in training, f"{page.name}: {training}"
                count += 1
    assert count


def test_the_pictures_of_the_papers_are_up_to_date():
    sys.path.insert(0, str(ROOT / "docs" / "papers"))
    try:
        from pictures import PICTURES
    finally:
        sys.path.pop(0)
    for name, draw in PICTURES.items():
        assert (ROOT / "docs" / "papers" / f"{name}.svg").read_text() == draw(), "python docs/papers/pictures.py"


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


def test_import_weft_is_enough_for_every_part():
    parts = "adapt huggingface inspect lab layers models parallel tasks timm".split()
    subprocess.run([sys.executable, "-c", f"import weft; [getattr(weft, n) for n in {parts}]"], check=True, cwd=ROOT)


@pytest.mark.parametrize(("part", "library"), [("huggingface", "transformers"), ("timm", "timm")])
def test_a_part_names_the_extra_that_it_needs(part, library):
    code = f"import sys; sys.modules['{library}'] = None; import weft; weft.{part}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert f"pip install 'weft[{part}]'" in done.stderr


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in pages if f": {name}\n" not in navigation} == set()
