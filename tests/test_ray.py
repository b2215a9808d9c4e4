"""A sweep on a real Ray cluster that loses a machine gives the results of a local sweep."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("ray")

SWEEP = """
from weft.lab import make_config
from weft.lab.sweep import Cell

TITLE, METRIC = "Digits", "accuracy"
SETTINGS = dict(
    layers=1, heads=2, head_dim=8, dim=16, mlp_dim=16, steps=600, batch_size=8, eval_every=200, checkpoint_every=20,
    log_every=5, warmup=2, eval_batches=2, accelerator="cpu",
)

def cells():
    return [Cell(row=name, column="1x2", config=make_config("digits", attention=name, **SETTINGS))
            for name in ("full", "linear")]
"""


def sweep(folder: Path, *options: str) -> subprocess.Popen:
    folder.mkdir()
    (folder / "digits.py").write_text(SWEEP)
    command = [sys.executable, "-m", "weft.cli", "sweep", str(folder / "digits.py"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def results(folder: Path) -> dict[str, tuple]:
    """Test metrics, best step and all training losses of every run."""
    found = {}
    for run in sorted((folder / "runs" / "digits").glob("*/result.json")):
        result = json.loads(run.read_text())
        lines = [json.loads(line) for line in (run.parent / "metrics.jsonl").read_text().splitlines()]
        losses = [(e["step"], e["loss"]) for e in lines if e["kind"] == "train"]
        found[run.parent.name] = result["test"], result["best_step"], losses
    return found


def test_a_cluster_that_loses_a_machine_gives_the_results_of_a_local_sweep(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    local = sweep(tmp_path / "local", "--jobs", "2")
    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    try:
        workers = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
        process = sweep(tmp_path / "ray", "--on", "ray", "--address", cluster.address)
        runs = tmp_path / "ray" / "runs" / "digits"

        def saved() -> int:
            return len({path.parent for path in runs.glob("*/checkpoints/step-*.safetensors")})

        stop = time.monotonic() + 120
        while saved() < 2 and process.poll() is None and time.monotonic() < stop:
            time.sleep(0.01)
        assert saved() == 2 and not list(runs.glob("*/result.json")), "both runs must be under way"
        cluster.remove_node(workers[0], allow_graceful=False)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0 and "2 done, 0 failed" in output, output
    finally:
        cluster.shutdown()
    assert "resuming" in "".join(path.read_text() for path in runs.glob("*/log.txt"))
    output, _ = local.communicate(timeout=240)
    assert local.returncode == 0, output
    assert len(results(tmp_path / "local")) == 2
    assert results(tmp_path / "ray") == results(tmp_path / "local")
