"""Wrong data, damaged files, two processes, full disks and signals give an error message and exit code."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("pyarrow")

from runs import before_step, options, tiny, weft

from weft.lab import Interrupted, evaluate_run, load_run, loop, make_config, train
from weft.lab import evaluate as evaluate_
from weft.lab.checkpoint import Checkpoints
from weft.lab.kept import EditedConfig, OtherData, read_kept
from weft.lab.run import Run, RunExists
from weft.lab.say import plain
from weft.lab.trained import load
from weft.tasks import get_task


def reviews(folder: Path, changed: bool = False) -> Path:
    """Reviews whose label depends on one word; `changed` adds a word to the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["dull", "fine"]
    rows = [(f"{words[i % 2]} {words[i % 2]} film number {i % 7}", i % 2, part) for part in ("train", "test")
            for i in range(120)]  # fmt: skip
    if changed:
        rows[0] = ("aardvark " + rows[0][0], *rows[0][1:])
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    text, label, split = zip(*rows, strict=True)
    parquet.write_table(arrow.table({"text": text, "label": label, "split": split}), folder / "imdb.parquet")
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory, one_thread) -> Path:
    """A complete run, to be copied and damaged."""
    out = tmp_path_factory.mktemp("done") / "run"
    train(tiny(out))
    return out


@pytest.fixture
def run(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """A complete run on words."""
    base = tmp_path_factory.mktemp("words")
    train(tiny(base / "run", "imdb-token", data=str(reviews(base / "data")), max_length=8, steps=60, learning_rate=1e-2,
               schedule="constant", eval_every=30, dropout=0.0))  # fmt: skip
    return base


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder except the lock, to check that nothing was written."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_run_is_evaluated_with_its_own_vocabulary(words, tmp_path, capsys):
    other = reviews(tmp_path / "other", changed=True)
    own, _ = evaluate_run(words / "run", split="train")
    assert own["accuracy"] == 1.0
    found, _ = evaluate_run(words / "run", split="train", data=str(other))
    assert found["accuracy"] == 1.0 and "not the data the run was trained on" in capsys.readouterr().err
    assert load_run(words / "run")[2].vocabulary == read_kept(words / "run").vocabulary


def test_other_data_is_refused_before_anything_is_written(words, tmp_path):
    run = Path(shutil.copytree(words / "run", tmp_path / "run"))
    config = tiny(run, "imdb-token", data=str(reviews(tmp_path / "other", changed=True)), max_length=8, steps=90,
                  learning_rate=1e-2, schedule="constant", eval_every=30, dropout=0.0)  # fmt: skip
    before = content(run)
    with pytest.raises(OtherData, match="train: 108 rows"):
        train(config, resume=True)
    assert content(run) == before
    config.data = str(words / "data")
    assert train(config, resume=True).steps == 90


def test_changed_data_in_the_same_place_is_refused(words, tmp_path):
    base = Path(shutil.copytree(words, tmp_path / "all"))
    config = json.loads((base / "run" / "config.json").read_text())
    (base / "run" / "config.json").write_text(json.dumps(config | {"data": str(reviews(base / "data", changed=True))}))
    for command in (["eval", base / "run"], ["inspect", base / "run"]):
        done = weft(*command)
        assert done.exit_code == 66 and "pass its folder with --data" in done.output


def test_different_classes_are_refused(tmp_path):
    from PIL import Image

    def pictures(folder, names):
        for part in ("train", "val"):
            for name in names:
                (folder / part / name).mkdir(parents=True)
                for i in range(12):
                    Image.new("RGB", (8, 8), (i * 20, 9, 9)).save(folder / part / name / f"{i}.png")
        return folder

    settings = dict(image_size=8, patch=4, layers=1, heads=2, dim=16, mlp_dim=16, head_dim=8)
    own, other = pictures(tmp_path / "own", "ab"), pictures(tmp_path / "other", "ac")
    train(tiny(tmp_path / "run", "imagefolder", data=str(own), **settings))
    assert read_kept(tmp_path / "run").known.classes == ["a", "b"]
    done = weft("eval", tmp_path / "run", "--data", other)
    assert done.exit_code == 66 and "classes that are not in train/: c" in done.output
    (own / "val" / "new").mkdir()
    done = weft("train", "imagefolder", "--data", own, "--out", tmp_path / "second", *options(**settings))
    assert done.exit_code == 66 and "new" in done.output and not (tmp_path / "second").exists()


@pytest.mark.parametrize("field, value", [("seed", 5), ("heads", 1), ("dropout", 0.5)])
def test_an_edited_config_is_refused(run, field, value):
    config = json.loads((run / "config.json").read_text())
    # head_dim too, so that all shapes stay as they are
    changes = {field: value, **({"head_dim": 16} if field == "heads" else {})}
    (run / "config.json").write_text(json.dumps(config | changes | {"out": str(run)}))
    (run / "result.json").unlink()
    with pytest.raises(EditedConfig, match=f"{field}: .* -> {value}"):
        train(Run(run).config(), resume=True)
    with pytest.raises(EditedConfig, match=field):
        evaluate_run(run)


def test_reading_a_run_writes_nothing(run):
    (run / "checkpoints" / ".step-00000099.safetensors.1.tmp").write_bytes(b"another process is writing this")
    newest = Checkpoints(run / "checkpoints").path(12)
    newest.write_bytes(newest.read_bytes()[:100])
    before = content(run)
    load_run(run, which="last")
    evaluate_run(run, which="last")
    assert weft("inspect", run, "--out", run.parent / "page.html").exit_code == 0
    assert content(run) == before


def test_only_temporary_files_of_dead_processes_are_removed(run):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for owner in (dead.pid, os.getppid()):
        (run / "checkpoints" / f".step-00000099.safetensors.{owner}.tmp").write_bytes(b"half")
    Checkpoints(run / "checkpoints").tidy(12)
    assert [p.name.split(".")[-2] for p in (run / "checkpoints").glob(".*.tmp")] == [str(os.getppid())]


def test_two_processes_that_start_together(tmp_path, monkeypatch):
    """The folder does not exist yet: the process whose first step comes later is refused."""
    inner = []

    def start_another(training):
        if not inner:
            inner.append(1)
            train(tiny(tmp_path / "run"))

    before_step(monkeypatch, None, start_another)
    with pytest.raises(RunExists, match="already contains a run"):
        train(tiny(tmp_path / "run"))


def test_a_damaged_best_checkpoint_is_noted_in_the_result(tmp_path, monkeypatch):
    scores = iter([0.9, 0.1, 0.2])

    def fake(fabric, model, task, rows, config, batches=0, **how):
        if batches:
            return {"loss": 1.0, "accuracy": next(scores, 0.25)}
        return real(fabric, model, task, rows, config)

    real = evaluate_.evaluate
    look = loop.Training._look

    def damaging(self):
        look(self)
        if self.step == 9:
            path = self.checkpoints.best
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            path.unlink()
            path.write_bytes(content)

    monkeypatch.setattr(loop, "evaluate", fake)
    monkeypatch.setattr(loop.Training, "_look", damaging)
    result = train(tiny(tmp_path / "run"))
    saved = Run(tmp_path / "run").result()
    assert saved["best_step"] == 12 and saved["val"]["accuracy"] == result.val["accuracy"] == 0.25
    assert "best.safetensors" in saved["note"]
    found, step = evaluate_run(tmp_path / "run")
    assert step == 12 and found == pytest.approx(saved["test"])


def test_a_signal_stops_the_last_evaluation_at_once(tmp_path, monkeypatch, done):
    score, calls = type(get_task("digits")).score, []

    def signalled(self, model, batch):
        calls.append(1)
        if len(calls) == 50:  # in the test, after 16 in each of three evaluations
            os.kill(os.getpid(), signal.SIGHUP)
        return score(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(type(get_task("digits")), "score", signalled)
        with pytest.raises(Interrupted):
            train(tiny(tmp_path / "run"))
    assert len(calls) == 50
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 12
    train(tiny(tmp_path / "run"), resume=True)

    def lines(folder):
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in entry.items() if k not in ("tokens_per_s", "seconds")} for entry in entries]

    assert lines(tmp_path / "run") == lines(done)
    timing = {"tokens_per_s": 0, "seconds": 0}
    assert {**Run(tmp_path / "run").result(), **timing} == {**Run(done).result(), **timing}


def test_a_failed_start_leaves_no_folder(tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_bytes(b"0123456789" * 300)
    given = ["train", "text", "--data", tmp_path / "t.txt", "--out", tmp_path / "run", *options(max_length=8)]
    done = weft(*given, "--attention", "linear")
    assert done.exit_code == 2 and not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_update", lambda self, number: [][1])
        assert weft(*given).exit_code == 1 and not (tmp_path / "run").exists()
    assert weft(*given, "--attention", "linear", "--positions", "rope").exit_code == 0
    assert make_config("digits", model="crate").folder() != make_config("digits").folder()


def test_a_damaged_environment_is_not_fatal(run):
    (run / "environment.json").write_text("{")
    (run / "result.json").write_text("")
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"kind": "train", "st')
    page = weft("report", run, "--out", run.parent / "page.html")
    assert page.exit_code == 0 and "is truncated and was skipped" in page.output and "unfinished" in page.output
    done = weft("resume", run)
    assert done.exit_code == 0 and Run(run).result()["step"] == 12 and len(Run(run).starts()) == 1


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("config.json", b"", "config.json: it is empty"),
        ("config.json", b'{"task": "digits",\n "seed": 0', "line 2 is not JSON"),
        ("config.json", b'{"task": "caf\xe9"}', "line 1 is not utf-8"),
        ("config.json", b'{"task": "digits", "layers": "two"}', "layers must be of type int, got 'two'"),
        ("config.json", b"[1]", "must be an object"),
        ("data.json", b"", "data.json cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "resume"])
def test_damaged_files_are_named_in_the_error(run, command, name, text, says):
    (run / name).write_bytes(text)
    (run / "result.json").unlink()
    done = weft(command, run)
    assert done.exit_code == 2 and says in done.output and str(run) in done.output.replace("\n", "")


@pytest.mark.parametrize("field", ["rows", "sha256", "facts", "length", "classes", "vocabulary"])
def test_an_edited_data_file_is_an_error(run, field):
    record = json.loads((run / "data.json").read_text())
    for edited in ({**record, field: 1.5}, {name: value for name, value in record.items() if name != field}):
        (run / "data.json").write_text(json.dumps(edited))
        done = weft("eval", run)
        assert done.exit_code == 2 and "data.json cannot be read" in done.output and field in done.output


def test_a_file_instead_of_a_folder_is_an_error(run, tmp_path):
    (tmp_path / "file").touch()
    for given in (["eval", tmp_path / "file"], ["report", run, "--out", tmp_path]):
        done = weft(*given)
        assert done.exit_code == 2 and "Use another path" in done.output and "disk" not in done.output


@pytest.mark.parametrize("command", [["eval"], ["inspect"]])
def test_a_damaged_checkpoint_is_an_error(run, command):
    best = run / "checkpoints" / "best.safetensors"
    content = bytearray(best.read_bytes())
    best.unlink()
    best.write_bytes(content[:-9])
    done = weft(*command, run)
    assert done.exit_code == 66 and "--which last" in done.output
    assert weft(*command, run, "--which", "last").exit_code == 0


@pytest.mark.parametrize("name", ["config.json", "data.json", "tokenizer.json", "model.safetensors", "checkpoints/x"])
@pytest.mark.parametrize("more", [{}, {"resume": True}])
def test_files_of_others_are_not_replaced(tmp_path, name, more):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(RunExists, match=f"is not a run, .* its {name.split('/')[0]}: choose another --out"):
        train(tiny(tmp_path, steps=2), **more)
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_an_export_to_a_full_disk_and_a_damaged_one_are_errors(run, tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # of every file
    try:
        done = weft("export", run, tmp_path / "exported")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert done.exit_code == 74 and "Is the disk full" in done.output and not (tmp_path / "exported").exists()
    weights = load(run).export(tmp_path / "exported") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    done = weft("eval", tmp_path / "exported")
    assert done.exit_code == 2 and "model.safetensors is damaged" in done.output.replace("\n", "")


def test_a_checkpoint_of_another_width_is_an_error(run, tmp_path):
    train(tiny(tmp_path / "wide", dim=32, steps=2))
    for name in ("best.safetensors",):
        shutil.copy(tmp_path / "wide" / "checkpoints" / name, run / "checkpoints" / name)
    done = weft("eval", run)
    assert done.exit_code == 2 and "dim: 32 -> 16" in done.output
    done = weft("train", "digits", "--init-from", tmp_path / "wide", "--out", tmp_path / "x", *options())
    assert done.exit_code == 2 and "in the checkpoint and" in done.output


@pytest.mark.parametrize(
    "given, says",
    [
        (["--attention=local", '--attention-options={"blok_size": 3}'], "did you mean 'block_size'"),
        (["--attention=local", '--attention-options={"block_size": "x"}'], "block_size must be an integer, got 'x'"),
        (["--attention=local", '--attention-options={"block_size": -1}'], "block_size must be at least 1, got -1"),
        (["--batch-size=-1"], "batch_size must be at least 1, got -1"),
        (["--data="], "data is empty"),
        (["--beta1=1"], "beta1 must be in [0, 1), got 1.0"),
        (["--eps=inf"], "eps must be a number that is not negative, got inf"),
        (["--devices=99"], "lower --devices"),
        (["--nodes=9"], "torchrun"),
        (["--max-length=5"], "has no effect"),
        (["--image-size=8"], "has no effect"),
        (['--cache-options={"length": 8}'], "has no effect without a cache"),
        (["--sigma=0.3"], "has no effect without --subsample"),
        (["--sigma-last=0.3", "--attention=subsampled"], "has no effect without --subsample"),
    ],
)
def test_invalid_options_are_refused(tmp_path, given, says):
    done = weft("train", "digits", "--out", tmp_path / "run", *options(), *given)
    assert done.exit_code == 2 and says in done.output and not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["device", "accelerator"])
def test_a_missing_device_is_refused(name, tmp_path):
    done = weft("train", "digits", "--out", tmp_path / "run", *options(**{name: "cuda"}))
    assert done.exit_code == 2 and "use --device cpu" in done.output


def test_a_step_that_cannot_fit_into_memory_is_refused(tmp_path, monkeypatch):
    from weft.lab import memory

    monkeypatch.setattr(memory, "free_memory", lambda: 2**20)
    done = weft("train", "digits", "--out", tmp_path / "run", *options(batch_size=512))
    assert done.exit_code == 73 and "--accumulate" in done.output and not (tmp_path / "run").exists()
    assert weft("train", "digits", "--out", tmp_path / "run", *options(batch_size=1)).exit_code == 0
    monkeypatch.setattr(memory, "kept_for_backward", lambda *given, **more: 2**12)
    config, model = tiny(tmp_path, batch_size=10**12), torch.nn.Linear(1, 1)  # refused at once, not after counting
    fabric = SimpleNamespace(device=torch.device("cpu"), world_size=1, strategy=SimpleNamespace(num_nodes=1))
    with pytest.raises(memory.TooLarge, match="--batch-size 128 --accumulate"):
        memory.check_memory(fabric, model, None, {"x": torch.zeros(1)}, config)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("CUDA error: out of memory")]
)
def test_out_of_memory_suggests_options(tmp_path, monkeypatch, error):
    def full(training):
        raise error

    before_step(monkeypatch, 1, full)
    done = weft("train", "digits", "--out", tmp_path / "run", *options())
    assert done.exit_code == 73 and "--batch-size" in done.output and "--checkpoint-activations" in done.output


def test_weft_debug_shows_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DEBUG", "1")
    done = weft("eval", tmp_path)
    assert done.exit_code == 2 and "Traceback" in done.output


def test_control_codes_are_escaped_and_markup_is_literal(tmp_path):
    assert plain("a\x1b[31mb\x9bc\nd") == "a\\x1b[31mb\\x9bc\nd"
    done = weft("eval", tmp_path / "\x1b[31mred[/x]")
    assert "\x1b" not in done.output and "\\x1b[31mred[/x]" in done.output
    assert "pip install 'weft[lab]'" in weft("data", "list").output


def test_ctrl_c_during_imports_shows_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.cli", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert b"Traceback" not in said
