"""Killed, stopped and damaged runs resume with the same results. benchmarks/faults.py does this to real processes."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

import runs
from runs import Killed, before_step, kill, killed_run, weft
from safetensors import safe_open

from weft.lab import Diverged, saving, train
from weft.lab.checkpoint import CannotSave, Checkpoints, DamagedCheckpoint, read, write
from weft.lab.divergence import LossMonitor
from weft.lab.optim import Average
from weft.lab.run import Run, RunExists
from weft.lab.trained import load

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = dict(eval_every=5, checkpoint_every=3, log_every=4, dropout=0.2, clip=1.0)


def tiny(out: Path, **changes):
    return runs.tiny(out, **{**SETTINGS, **changes})


def losses(out: Path) -> list[tuple]:
    """Every loss, learning rate and metric; all must be bit-identical."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [tuple((k, v) for k, v in line.items() if k not in ("tokens_per_s", "seconds")) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_thread) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(out))
    return out


@pytest.mark.parametrize("step", [1, 6, 11])
def test_a_killed_run_resumes_to_the_last_bit(tmp_path, monkeypatch, whole, step):
    out = tmp_path / "run"
    killed_run(monkeypatch, tiny(out), step)
    assert not (out / "result.json").exists()
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)
    assert Run(out).result()["test"] == Run(whole).result()["test"]
    ours, numbers = read(Checkpoints(out / "checkpoints").path(12))
    theirs, expected = read(Checkpoints(whole / "checkpoints").path(12))
    assert numbers == expected
    assert set(ours) == set(theirs) and any(name.startswith("optimizer/") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_averages_of_bfloat16_weights_resume_to_the_last_bit(tmp_path, monkeypatch):
    settings = dict(precision="bf16-true", ema=0.9)
    train(tiny(tmp_path / "whole", **settings))
    killed_run(monkeypatch, tiny(tmp_path / "killed", **settings), 6)
    train(tiny(tmp_path / "killed", **settings), resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    tensors, _ = read(Checkpoints(tmp_path / "killed" / "checkpoints").path(12))
    assert {t.dtype for name, t in tensors.items() if name.startswith("average/")} == {torch.float32}
    with pytest.raises(ValueError, match="whole has a moving average of its weights .*--which best or last"):
        saving.saved_weights(Run(tmp_path / "whole"), "average")


def test_a_run_that_is_moved_stops_and_continues_in_its_new_place(tmp_path, monkeypatch):
    train(tiny(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        before_step(patch, 5, lambda training: (tmp_path / "old").rename(tmp_path / "new"))
        with pytest.raises(CannotSave, match="old was moved or removed during the run"):
            train(tiny(tmp_path / "old"))
    assert not (tmp_path / "old").exists()
    assert weft("resume", tmp_path / "new").exit_code == 0
    assert losses(tmp_path / "new") == losses(tmp_path / "whole")


def test_averages_follow_their_formula():
    model = torch.nn.Linear(3, 2).bfloat16()
    average = Average(model, 0.999)
    expected = {}
    for step in range(1, 20):
        for name, p in model.named_parameters():
            p.data.add_(0.25)
            value = p.double()
            expected[name] = value if step == 1 else 0.999 * expected[name] + 0.001 * value
        average.update(model, step)
    for name, value in expected.items():
        torch.testing.assert_close(average.weights[name].double(), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("step", [3, 8])  # before the first checkpoint, and after it
def test_a_run_continues_from_another_folder(tmp_path, monkeypatch, step):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("book.txt").write_bytes(bytes(range(32, 120)) * 40)
    settings = dict(task="text", data="book.txt", max_length=32)
    train(tiny("first", **settings))
    killed_run(monkeypatch, tiny("run", **settings, init_from="first"), step)
    monkeypatch.chdir(tmp_path / "there")
    run = tmp_path / "here" / "run"
    if step == 8:
        Path("../here/book.txt").rename("book.txt")
        assert "pass a" in weft("resume", run).output
    assert weft("resume", run, *(["--data=book.txt"] if step == 8 else [])).exit_code == 0
    assert weft("eval", run).exit_code == 0
    assert weft("export", run, "exported").exit_code == 0
    assert str(tmp_path) not in Path("exported/config.json").read_text()


def test_the_run_it_starts_from_may_be_moved(tmp_path, monkeypatch):
    train(tiny(tmp_path / "first"))
    out = tmp_path / "run"
    killed_run(monkeypatch, tiny(out, init_from=str(tmp_path / "first")), 8)
    (tmp_path / "moved").mkdir()
    (tmp_path / "first").rename(tmp_path / "moved" / "first")
    with pytest.raises(RunExists, match="init_from"):
        train(tiny(out, init_from=str(tmp_path / "another")), resume=True)
    assert train(tiny(out, init_from=str(tmp_path / "moved" / "first")), resume=True).steps == 12


def test_a_run_may_start_from_an_exported_model(tmp_path):
    load(train(tiny(tmp_path / "first")).folder, "last").export(tmp_path / "exported")
    for name in ("first", "exported"):
        train(tiny(tmp_path / f"from {name}", init_from=str(tmp_path / name)))
    assert losses(tmp_path / "from first") == losses(tmp_path / "from exported")


def test_the_dense_finish_is_announced_once(tmp_path, monkeypatch, capsys):
    config = tiny(tmp_path / "run", subsample="Sall-L4", finetune_dense_at=0.5)
    killed_run(monkeypatch, config, 11)
    assert "dense from step 7" in capsys.readouterr().out
    train(config, resume=True)
    assert "dense from" not in capsys.readouterr().out


def test_a_run_cannot_end_before_the_step_it_has_reached(tmp_path, monkeypatch):
    out = tmp_path / "run"
    killed_run(monkeypatch, tiny(out, schedule="constant"), 11)
    with pytest.raises(ValueError, match="is at step 10: set --steps to at least that"):
        train(tiny(out, schedule="constant", steps=6), resume=True)
    assert Run(out).config().steps == 12 and Run(out).result() is None
    assert train(tiny(out, schedule="constant", steps=10), resume=True).steps == 10
    with pytest.raises(ValueError, match="is at step 10: set --steps to at least that"):  # complete
        train(tiny(out, schedule="constant", steps=6), resume=True)


def test_a_kill_before_the_best_checkpoint_is_linked(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "mark_best", lambda self, step: kill(self))
        with pytest.raises(Killed):
            train(tiny(out))
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)
    assert read(out / "checkpoints" / "best.safetensors")[1] == read(whole / "checkpoints" / "best.safetensors")[1]


def test_a_truncated_log_line_is_written_again(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"
    killed_run(monkeypatch, tiny(out), 11)
    with open(out / "metrics.jsonl", "a") as metrics:
        metrics.write('{"kind": "train", "step": 11, "lo')
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)


@pytest.mark.parametrize("damage", ["bit", "empty", "header"])
def test_a_damaged_checkpoint_is_skipped(tmp_path, monkeypatch, whole, damage, capsys):
    out = tmp_path / "run"
    killed_run(monkeypatch, tiny(out), 11)
    kept = Checkpoints(out / "checkpoints")
    newest = kept.path(kept.steps()[-1])
    content = bytearray(newest.read_bytes())
    if damage == "bit":
        content[-5] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        at = content.index(b'first_loss\\": ') + len(b'first_loss\\": ')
        content[at] = ord(b"9") if content[at] != ord(b"9") else ord(b"8")
    newest.write_bytes(content)
    train(tiny(out), resume=True)
    assert "trying the one before it" in capsys.readouterr().out
    assert losses(out) == losses(whole)


@pytest.mark.parametrize(
    ("step", "value", "says", "kept"),
    [(8, float("nan"), "step 6, is kept", [5, 6]), (6, float("inf"), "the loss of step 6", [3, 5])],
)
def test_a_model_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path, monkeypatch, step, value, says, kept):
    out = tmp_path / "run"
    before_step(monkeypatch, step, lambda training: next(training.raw.parameters()).data.fill_(value))
    with pytest.raises(Diverged, match=says):
        train(tiny(out))
    checkpoints = Checkpoints(out / "checkpoints")
    assert checkpoints.steps() == kept
    assert all(torch.isfinite(t).all() for t in read(checkpoints.path(kept[-1]))[0].values())


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """After a finite loss, right before a checkpoint."""
    monkeypatch.setattr(saving, "not_finite", lambda model, optimizer: "weights")
    with pytest.raises(Diverged, match="weights after step 3"):
        train(tiny(tmp_path / "run"))
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == []


def test_moments_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """The square of a gradient of 1e20 is infinite; the weights stay finite."""
    out = tmp_path / "run"

    def enlarge(training):
        training.raw.head[-1].bias.register_hook(lambda gradient: gradient * 1e25)

    before_step(monkeypatch, 6, enlarge)
    with pytest.raises(Diverged, match="the optimizer's moments after step 6 are not finite"):
        train(tiny(out, clip=0.0))
    assert Checkpoints(out / "checkpoints").steps() == [3, 5]


def test_a_diverging_loss_stops_the_run(tmp_path, capsys):
    config = tiny(tmp_path / "run", steps=200, learning_rate=300.0, schedule="constant", warmup=0, clip=0.0)
    with pytest.raises(Diverged, match="a longer warm-up, --clip 1 or --qk-norm"):
        train(config)
    assert "the warm-up has" not in capsys.readouterr().out


def test_negative_losses_that_fall_do_not_diverge():
    """As the negative log-likelihood of a density may be."""
    monitor = LossMonitor(5.0)
    assert not any(monitor.problem(step, -1 - step / 10) for step in range(100))
    assert monitor.problem(100, 1000.0)


def test_a_warm_up_longer_than_the_run_is_reported(tmp_path, capsys):
    train(tiny(tmp_path / "run", steps=2, learning_rate=8e-3, schedule="cosine", warmup=8))
    assert "ends at 0.002 instead of reaching 0.008; lower --warmup" in capsys.readouterr().out


def test_two_kept_besides_the_best_and_no_pickle(whole):
    folder = whole / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == [
        "best.json", "best.safetensors", "step-00000010.safetensors", "step-00000012.safetensors",
    ]  # fmt: skip
    with safe_open(str(folder / "best.safetensors"), framework="pt") as file:
        assert "sha256" in file.metadata()
    assert Run(whole).config() == tiny(whole)
    start = json.loads((whole / "environment.json").read_text())[0]
    assert start["torch"] == torch.__version__ and "commit" in start


def test_a_folder_in_use_is_refused(tmp_path, whole):
    with pytest.raises(RunExists, match="--resume"):
        train(tiny(whole))
    with pytest.raises(RunExists, match="learning_rate"):
        train(tiny(whole, learning_rate=1.0), resume=True)


def test_a_checkpoint_is_read_back_as_written(tmp_path):
    tensors = {
        "a": torch.randn(3, 5), "b": torch.tensor(7), "c": torch.randn(4).bfloat16(), "d": torch.zeros(0, 3),
        "e": torch.randn(6, 2).T, "f": torch.tensor([True, False]),
    }  # fmt: skip
    tensors["tied"] = tensors["a"]
    write(tmp_path / "x.safetensors", tensors, {"step": 3, "loss": 0.1})
    found, numbers = read(tmp_path / "x.safetensors")
    assert numbers == {"format": 1, "step": 3, "loss": 0.1}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_pickle_under_a_checkpoints_name_is_refused(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(DamagedCheckpoint):
        read(tmp_path / "x.safetensors")
