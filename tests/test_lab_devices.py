"""Two processes equal one process with twice the batch, and one process can resume their checkpoints."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from weft.lab import evaluate_run, fabric, make_config, train
from weft.lab.checkpoint import Checkpoints, read

SETTINGS = dict(
    layers=2, heads=2, head_dim=8, dim=16, mlp_dim=16, steps=10, eval_every=4, checkpoint_every=3, log_every=1,
    warmup=2, eval_batches=2, accelerator="cpu", dropout=0.0, clip=1.0,
    schedule="constant", learning_rate=2e-3,
)  # fmt: skip
ROUTING = dict(steps=5, attention="routing", attention_options='{"clusters": 4, "capacity": 8, "decay": 0.5}')

# One launch for both strategies, because starting processes takes most of the time. For each, a complete run whose
# first process is slow to mark the best checkpoint. Then a run that draws masks in evaluations, runs that move
# centroids, a shorter run with DDP, and one with FSDP in which rank 1 dies in step 8: the other must not hang, and
# nothing may be lost.
SCRIPT = """
import json, os, sys, time
from weft.lab import loop, make_config, train
from weft.lab.checkpoint import Checkpoints

mark = Checkpoints.mark_best
Checkpoints.mark_best = lambda self, step: (time.sleep(0.3), mark(self, step))
settings = json.loads(sys.argv[1])

def run(strategy, name, task="digits", **changes):
    out = f"{settings['out']}-{strategy}{name}"
    train(make_config(task, **{**settings, "strategy": strategy, "out": out, **changes}))

for strategy in ("ddp", "fsdp"):
    run(strategy, "-whole", eval_every=9)
run("ddp", "-masked", "masked", steps=2, max_length=32, data=sys.argv[2])
for strategy in ("ddp", "fsdp"):
    run(strategy, "-routing", **json.loads(sys.argv[3]))
run("ddp", "", steps=6)
update = loop.Training._update

def dying(self, number):
    if number == 8 and self.fabric.global_rank == 1:
        os._exit(9)
    update(self, number)

loop.Training._update = dying
run("fsdp", "")
"""


def curve(out: Path) -> dict[str, list[tuple[int, float]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {kind: [(e["step"], e["loss"]) for e in lines if e["kind"] == kind] for kind in ("train", "val", "test")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(make_config("digits", out=str(out), batch_size=16, **SETTINGS))
    return out


def test_two_processes_equal_one_with_twice_the_batch(tmp_path, alone):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    given = json.dumps({**SETTINGS, "out": str(tmp_path / "run"), "batch_size": 8})
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["attention", "cache", "rank", "mesh"], k=900)))
    done = subprocess.run(
        [*torchrun, given, str(text), json.dumps(ROUTING)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0 and (tmp_path / "run-fsdp").exists(), done.stderr[-3000:]
    for strategy in ("ddp", "fsdp"):
        compare(tmp_path / f"run-{strategy}", tmp_path / f"run-{strategy}-whole", alone)
    train(make_config("digits", out=str(tmp_path / "routing"), **{**SETTINGS, "batch_size": 16, **ROUTING}))
    for strategy in ("ddp", "fsdp"):
        for kind, values in curve(tmp_path / "routing").items():
            assert curve(tmp_path / f"run-{strategy}-routing")[kind] == [
                (step, pytest.approx(loss, rel=2e-5)) for step, loss in values
            ]
    test = json.loads((tmp_path / "run-ddp-masked" / "result.json").read_text())["test"]
    assert evaluate_run(tmp_path / "run-ddp-masked")[0] == pytest.approx(test, rel=1e-6)  # the same masks


@pytest.mark.parametrize(("task", "more"), [("text-streams", {}), ("digits", {"time_budget": 1.0})])
def test_torchrun_with_a_run_that_needs_one_process_is_refused(task, more, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="needs a single process, but torchrun has started 2"):
        train(make_config(task, data=__file__, out=str(tmp_path / "run"), accelerator="cpu", **more))


def compare(out: Path, complete: Path, alone: Path) -> None:
    result = json.loads((complete / "result.json").read_text())
    found, step = evaluate_run(complete)
    assert step == result["best_step"] and found == pytest.approx(result["test"], rel=1e-6)
    assert Checkpoints(out / "checkpoints").steps()[-1] == 6
    tensors, _ = read(Checkpoints(out / "checkpoints").path(6))
    whole, _ = read(Checkpoints(alone / "checkpoints").path(10))
    assert {k: t.shape for k, t in tensors.items()} == {k: t.shape for k, t in whole.items()}

    # One process resumes the checkpoint of two, sharded or not.
    train(make_config("digits", out=str(out), batch_size=16, **SETTINGS), resume=True)
    ours, theirs = curve(out), curve(alone)
    ours["val"] = [entry for entry in ours["val"] if entry[0] != 6]  # the shorter run has evaluated its last step
    for kind in theirs:
        assert [step for step, _ in ours[kind]] == [step for step, _ in theirs[kind]]
        a, b = (torch.tensor([loss for _, loss in c[kind]]) for c in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_accumulation_equals_the_larger_batch(tmp_path, alone):
    out = tmp_path / "run"
    train(make_config("digits", out=str(out), batch_size=4, accumulate=4, **SETTINGS))
    a, b = (torch.tensor([loss for _, loss in curve(o)["train"]]) for o in (out, alone))
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_accumulation_weighs_tokens_of_sentences_of_any_length(tmp_path):
    """The mean over the tokens of a step, not the mean of the means of its parts."""
    rng = random.Random(0)
    rows = [[rng.choice(("Ada", "sleeps")) for _ in range(rng.choice((1, 2, 14)))] for _ in range(60)]
    text = "\n\n".join("\n".join(f"{word} {'B-PER' if word == 'Ada' else 'O'}" for word in row) for row in rows)
    (tmp_path / "names.conll").write_text(text)
    given = {**SETTINGS, "data": str(tmp_path / "names.conll"), "tokenizer": "words", "max_length": 16, "eval_every": 0}
    for size in (8, 2):
        train(make_config("tag", out=str(tmp_path / str(size)), batch_size=size, accumulate=8 // size, **given))
    a, b = (torch.tensor([loss for _, loss in curve(tmp_path / name)["train"]]) for name in ("8", "2"))
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_activation_checkpointing_changes_nothing(tmp_path, alone, monkeypatch):
    """With dropout, so that the second forward must draw the same numbers."""
    runs = []
    for name, on in (("off", False), ("on", True)):
        out = tmp_path / name
        settings = {**SETTINGS, "dropout": 0.3, "steps": 4, "checkpoint_activations": on}
        train(make_config("digits", out=str(out), batch_size=4, **settings))
        runs.append(curve(out))
    assert runs[0] == runs[1]


def test_activation_checkpointing_recomputes():
    config = make_config("digits", **{k: v for k, v in SETTINGS.items()})
    from weft.tasks import get_task

    task = get_task("digits")
    data = task.load(config)
    model = task.model(config, data)
    calls = []
    block = model.encoder.blocks[0]
    block.attention.register_forward_hook(lambda *_: calls.append(1))
    fabric.checkpoint_activations(model)
    model.train()
    model(data.train["ids"][:2].long()).sum().backward()
    assert len(calls) == 2


def test_settings_that_change_the_examples_of_a_step_are_refused(alone):
    with pytest.raises(ValueError, match="uses 16 examples per step, these settings 8"):
        train(make_config("digits", out=str(alone), batch_size=8, **{**SETTINGS, "steps": 12}), resume=True)
    with pytest.raises(ValueError, match="fsdp needs several processes"):
        train(make_config("digits", out=str(alone) + "x", strategy="fsdp", **SETTINGS))
