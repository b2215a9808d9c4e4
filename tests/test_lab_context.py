"""Runs that split their sequences over processes have the losses of one process.

WEFT_TEST_CLUSTER=1 (`make test-cluster`) adds torchrun with a process that is killed, and two data ranks of two
processes each.
"""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from weft.lab import evaluate_run, make_config, train
from weft.lab.checkpoint import Checkpoints

SETTINGS = dict(
    layers=2, heads=2, head_dim=8, dim=16, mlp_dim=16, steps=8, eval_every=4, checkpoint_every=2, log_every=1,
    warmup=2, eval_batches=2, accelerator="cpu", dropout=0.0, clip=1.0, schedule="constant", learning_rate=2e-3,
    max_length=31, attention="combiner-fixed", positions="rope", batch_size=4,
)  # fmt: skip

# One launch for both strategies. In torchrun's first attempt the last process dies in step 6 of the FSDP run: torchrun
# starts all processes again, the DDP run is complete, and the FSDP run continues after its last checkpoint.
SCRIPT = """
import json, os, signal, sys
from weft.lab import loop, make_config, train

settings = json.loads(sys.argv[1])
update = loop.Training._update

def dying(self, number):
    last = self.fabric.global_rank == self.fabric.world_size - 1
    if self.config.strategy == "fsdp" and number == 6 and last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    update(self, number)

loop.Training._update = dying
for strategy, steps in (("ddp", 4), ("fsdp", settings["steps"])):
    config = {**settings, "strategy": strategy, "out": f"{settings['out']}-{strategy}", "steps": steps}
    train(make_config("text", **config), resume=True)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    words = random.Random(0).choices(["attention", "cache", "rank", "sequence", "mesh"], k=900)
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text(" ".join(words))
    return str(file)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(make_config("text", out=str(out), data=data, **SETTINGS))
    return out


def losses(out: Path) -> dict[str, dict[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {kind: {e["step"]: e["loss"] for e in lines if e["kind"] == kind} for kind in ("train", "val", "test")}


def same(out: Path, alone: Path) -> None:
    for kind, expected in losses(alone).items():
        found = losses(out)[kind]
        assert found.keys() == expected.keys()
        a, b = (torch.tensor(list(x.values())) for x in (found, expected))
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def torchrun(script: Path, given: str, processes: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--max-restarts=1"]
    done = subprocess.run([*command, "--standalone", script, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming" in done.stdout and "after step 4" in done.stdout


def without_torchrun(script: Path, given: str, processes: int) -> None:
    """The same processes and variables, without the agent, which takes seconds to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}
    env |= {"TORCHELASTIC_RESTART_COUNT": 1, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    started = []
    for rank in range(processes):
        own = {name: str(value) for name, value in {**env, "RANK": rank, "LOCAL_RANK": rank}.items()}
        command = [sys.executable, script, given]
        started.append(subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=300)[1][-3000:] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(said)


cluster = pytest.mark.skipif(not os.environ.get("WEFT_TEST_CLUSTER"), reason="slow: make test-cluster")


@pytest.mark.parametrize(
    "launch, processes",
    [(without_torchrun, 2), pytest.param(torchrun, 2, marks=cluster), pytest.param(torchrun, 4, marks=cluster)],
)
def test_parts_of_sequences_give_the_losses_of_one_process(tmp_path, data, alone, launch, processes):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    size = SETTINGS["batch_size"] * 2 // processes
    settings = {
        **SETTINGS, "out": str(tmp_path / "run"), "data": data, "context_parallel": 2, "batch_size": size,
        "checkpoint_activations": True, "offload": True,
    }  # fmt: skip
    launch(script, json.dumps(settings), processes)
    same(tmp_path / "run-fsdp", alone)
    result = json.loads((tmp_path / "run-fsdp" / "result.json").read_text())
    assert evaluate_run(tmp_path / "run-fsdp")[0] == pytest.approx(result["test"], rel=1e-5)

    # One process continues the run of several.
    assert Checkpoints(tmp_path / "run-ddp" / "checkpoints").steps()[-1] == 4
    train(make_config("text", out=str(tmp_path / "run-ddp"), data=data, **SETTINGS), resume=True)
    same(tmp_path / "run-ddp", alone)


def test_settings_that_do_not_fit_are_refused(data):
    given = {**SETTINGS, "data": data}
    with pytest.raises(ValueError, match="context_parallel: digits .* cannot split its sequences.* enwik8 or lm"):
        make_config("digits", context_parallel=2)
    with pytest.raises(ValueError, match="context_parallel does not support --compile"):
        make_config("text", context_parallel=2, compile=True, **given)
    with pytest.raises(ValueError, match="offload needs --checkpoint-activations"):
        make_config("text", offload=True, **given)
    with pytest.raises(ValueError, match="context_parallel=3 needs a multiple of 3 processes, got 1"):
        train(make_config("text", context_parallel=3, out=data + "-run", **given))
