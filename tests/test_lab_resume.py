"""A run that is killed, stopped, damaged or starved of disk goes on as if nothing had happened."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from safetensors import safe_open

from weft.lab import Diverged, Interrupted, checkpoint, loop, make_config, train
from weft.lab.checkpoint import CannotSave, Checkpoints, DamagedCheckpoint, read, write
from weft.lab.run import Run, RunExists

TINY = dict(
    layers=1, heads=2, head_dim=8, dim=16, mlp_dim=16, steps=12, batch_size=8, eval_every=5, checkpoint_every=3,
    log_every=4, warmup=2, eval_batches=2, accelerator="cpu", dropout=0.2, clip=1.0,
)  # fmt: skip


class Killed(BaseException):
    """Stands for a kill inside one process: nothing catches it, nothing is cleaned up by the loop."""


def tiny(out: Path, **changes):
    return make_config("digits", out=str(out), **{**TINY, **changes})


def losses(out: Path) -> list[tuple]:
    """Everything that must not differ: every loss, rate and metric, to the last bit."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [tuple((k, v) for k, v in line.items() if k != "tokens_per_s") for line in lines]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_at(monkeypatch, step: int) -> None:
    update = loop.Training._update

    def dying(self, number):
        if number == step:
            raise Killed
        update(self, number)

    monkeypatch.setattr(loop.Training, "_update", dying)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """To the last bit means: added up in the same order, however many threads the machine has to spare just now."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(out))
    return out


@pytest.mark.parametrize("step", [1, 4, 6, 11])
def test_a_killed_run_resumes_to_the_last_bit(tmp_path, monkeypatch, whole, step):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            train(tiny(out))
    assert not (out / "result.json").exists()
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)
    assert (
        json.loads((out / "result.json").read_text())["test"] == json.loads((whole / "result.json").read_text())["test"]
    )


def test_all_weights_and_optimizer_state_are_equal_after_a_kill(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, 8)
        with pytest.raises(Killed):
            train(tiny(out))
    train(tiny(out), resume=True)
    ours, numbers = read(Checkpoints(out / "checkpoints").path(12))
    theirs, expected = read(Checkpoints(whole / "checkpoints").path(12))
    assert numbers == expected
    assert set(ours) == set(theirs) and any(name.startswith("optimizer/") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_kill_between_the_checkpoint_and_its_best_link_is_mended(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"

    def dying(self, step):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "mark_best", dying)
        with pytest.raises(Killed):
            train(tiny(out))
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)
    assert read(out / "checkpoints" / "best.safetensors")[1] == read(whole / "checkpoints" / "best.safetensors")[1]


def test_a_line_cut_by_a_kill_is_written_again(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, 11)
        with pytest.raises(Killed):
            train(tiny(out))
    with open(out / "metrics.jsonl", "a") as metrics:
        metrics.write('{"kind": "train", "step": 11, "lo')
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "header"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, monkeypatch, whole, damage, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, 11)
        with pytest.raises(Killed):
            train(tiny(out))
    kept = Checkpoints(out / "checkpoints")
    newest = kept.path(kept.steps()[-1])
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "bit":
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


def test_sigterm_saves_and_stops(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"
    update = loop.Training._update

    def signalled(self, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_update", signalled)
        with pytest.raises(Interrupted):
            train(tiny(out))
    assert Checkpoints(out / "checkpoints").steps()[-1] == 7
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, whole):
    out = tmp_path / "run"
    save = checkpoint.save_file

    def full(tensors, path, metadata):
        if "00000009" in str(path):
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(CannotSave, match="No space left"):
            train(tiny(out))
    kept = Checkpoints(out / "checkpoints")
    assert kept.steps() == [5, 6] and not list(kept.folder.glob(".*"))
    read(kept.path(6))
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, monkeypatch):
    out = tmp_path / "run"
    update = loop.Training._update

    def poisoned(self, number):
        if number == 8:
            next(self.raw.parameters()).data.fill_(float("nan"))
        update(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_update", poisoned)
        with pytest.raises(Diverged, match="step 6, is kept"):
            train(tiny(out))
    tensors, _ = read(Checkpoints(out / "checkpoints").path(6))
    assert all(torch.isfinite(t).all() for t in tensors.values())


def test_poisoned_weights_are_never_saved(tmp_path, monkeypatch):
    out = tmp_path / "run"
    update = loop.Training._update

    def poisoned(self, number):
        update(self, number)
        if number == 6:  # after a loss that was fine, right before a checkpoint
            next(self.raw.parameters()).data.fill_(float("inf"))

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_update", poisoned)
        with pytest.raises(Diverged, match="weights after step 6"):
            train(tiny(out))
    assert Checkpoints(out / "checkpoints").steps() == [3, 5]


def test_a_diverging_loss_stops_the_run(tmp_path):
    config = tiny(tmp_path / "run", steps=200, learning_rate=300.0, schedule="constant", warmup=0, clip=0.0)
    with pytest.raises(Diverged, match="Try a lower learning rate"):
        train(config)


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


def test_a_real_sigkill_and_a_real_sigterm(tmp_path, whole):
    """The whole command, killed from outside; the soak script does this many more times."""
    out = tmp_path / "run"
    options = [f"--{k.replace('_', '-')}={v}" for k, v in TINY.items()]
    command = [sys.executable, "-m", "weft.cli", "train", "digits", f"--out={out}", "--resume", *options]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # as `one_thread` has it here
    for number, wanted in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=alone)
        seen = size(out / "metrics.jsonl")
        while process.poll() is None and size(out / "metrics.jsonl") <= seen:
            time.sleep(0.002)
        process.send_signal(number)
        assert process.wait(timeout=120) in (wanted, 0)
    train(tiny(out), resume=True)
    assert losses(out) == losses(whole)
