"""What the command `weft` prints: help without heavy imports, the task's defaults, nothing cut."""

import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from weft.cli import app
from weft.tasks.config import field_help

HEAVY = ("torch", "numpy", "lightning", "transformers", "rich.markdown")


def weft(*words: str, columns: int = 80):
    return CliRunner().invoke(app, [*words], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(words):
    code = f"""
import sys
sys.argv = ["/bin/weft", *{words!r}]
from weft.cli import app
from weft.tasks.config import field_help
try:
    app()
except SystemExit:
    pass
found = [name for name in {HEAVY!r} if name in sys.modules]
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_m_weft_is_the_command():
    command = [sys.executable, "-X", "importtime", "-m", "weft", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Usage: python -m weft [OPTIONS]")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "weft.cli" in imported and not imported & set(HEAVY)


def test_help_of_a_task_shows_its_defaults():
    pytest.importorskip("lightning")
    text = weft("train", "digits", "--help").output
    assert "number of weight updates [300]" in text and "[deep, wide]" in text
    assert "--text-column" not in text  # digits has no columns
    for words in (["digits", "--preset", "wide"], ["--preset", "wide", "digits"], ["--preset=wide", "digits"]):
        assert "heads per layer [8]" in weft("train", *words, "--help").output
    assert "weft train TASK --help" in weft("train", "--help").output
    assert "weft train TASK --help" in weft("train", "no-such-task", "--help").output


def test_help_cuts_nothing_at_80_columns():
    text = weft("train", "--help").output
    assert max(map(len, text.splitlines())) <= 80
    joined = "".join(text.split())
    for name, about in field_help().items():
        assert name == "task" or "--" + name.replace("_", "-") in text
        assert "".join(about.split()) in joined
    commands = "".join(weft("--help").output.split())
    for command in app.registered_commands:
        assert "".join((command.callback.__doc__ or "").split(".")[0].split())[:60] in commands


def test_train_prints_before_it_imports_torch():
    code = "import sys; sys.argv, sys.modules['torch'] = ['/bin/weft', 'train', 'digits'], None\n"
    code += "from weft.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "training digits: loading PyTorch …\n" and "torch" in done.stderr and done.returncode


def test_a_long_evaluation_shows_its_batches(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    import itertools

    from weft.lab import make_config, progress, train

    clock = itertools.count(step=3)  # seconds
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    small = dict(layers=1, heads=1, head_dim=4, dim=4, mlp_dim=4, batch_size=64, warmup=1, accelerator="cpu")
    train(make_config("digits", steps=1, out=str(tmp_path / "run"), **small))
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(" batch ")[0] for line in lines if " batch " in line} == {"validation", "test"}


def test_commands_that_run_a_model_know_both_names_of_the_device():
    def commands(group):
        for name, command in group.commands.items():
            yield from commands(command) if hasattr(command, "commands") else [(name, command)]

    flags = [(name, {flag for p in command.params for flag in p.opts}) for name, command in commands(get_command(app))]
    both = {"--device", "--accelerator"}
    assert all(both <= found or not both & found for _, found in flags)
    names = "train resume eval predict generate sample translate inspect convert advise latency scaling cost"
    assert set(names.split()) <= {name for name, found in flags if both <= found}
