"""The lab's parts: config and command line, schedules, order of the data, evaluation, and the options of a run."""

import contextlib
import json
import math
import shutil
import subprocess
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

import runs
from runs import SHORT, killed_run, short, train_losses, weft

from weft.lab import TrainConfig, evaluate_run, load_run, loop, make_config, train
from weft.lab.build import build_model
from weft.lab.data import Order, Rows, seed_of
from weft.lab.evaluate import evaluate
from weft.lab.optim import learning_rate, make_optimizer
from weft.lab.run import Run
from weft.layers.cached import RecurrentCache
from weft.tasks import get_task
from weft.tasks.config import FREE_ON_RESUME, field_help, from_json, to_json


def test_a_config_from_python_takes_paths_and_dictionaries_but_no_wrong_types():
    config = make_config("digits", out=Path("runs") / "a", attention="local", attention_options={"block_size": 8})
    assert (config.out, config.attention_options) == ("runs/a", '{"block_size": 8}')
    for wrong in (dict(steps="10"), dict(batch_size=8.0), dict(augment=1), dict(data=None)):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be of type (int|bool|str), got"):
            make_config("digits", **wrong)


def test_every_field_is_explained_and_on_the_command_line():
    names = {field.name for field in fields(TrainConfig)}
    assert set(field_help()) == names and all(len(text) > 8 for text in field_help().values())
    assert names >= FREE_ON_RESUME
    shown = weft("train", "--help")
    assert shown.exit_code == 0
    for name in names - {"task"}:
        assert "--" + name.replace("_", "-") in shown.output, name


def test_config_precedence_and_round_trip():
    config = make_config("listops", preset="1x48", head_dim=32)
    assert (config.layers, config.heads, config.head_dim, config.steps, config.warmup) == (1, 48, 32, 10_000, 1000)
    assert (config.learning_rate, config.beta2, config.optimizer, config.batch_size) == (0.05, 0.98, "adam", 32)
    assert from_json(to_json(config)) == config
    matching = make_config("matching", preset="1x16")
    assert (matching.dim, matching.head_dim, matching.mlp_dim, matching.warmup) == (128, 32, 512, 8000)


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("layers", 0, "layers must be at least 1"),
        ("dropout", 1.0, "dropout must be in"),
        ("optimizer", "sgd", "adam, adamw, lion"),
        ("schedule", "step", "inverse_sqrt"),
        ("attention", "fulll", "did you mean 'full'"),
        ("attention_options", "block=3", "must be JSON"),
        ("finetune_dense_at", 0.5, "needs subsampled attention"),
        ("positions", "rotary", "rope"),
        ("cache_options", '{"length": 8}', "no effect without a cache"),
    ],
)
def test_invalid_configs_are_refused(field, value, says):
    with pytest.raises(ValueError, match=says):
        make_config("digits", **{field: value})


def test_schedules():
    inverse = TrainConfig(schedule="inverse_sqrt", learning_rate=0.05, warmup=1000, steps=10_000)
    for t in (1, 10, 1000, 1001, 5000):
        assert learning_rate(inverse, t) == pytest.approx(0.05 * min(1, t / 1000) / math.sqrt(max(t, 1000)))
    assert learning_rate(inverse, 1000) == pytest.approx(1.58e-3, rel=2e-3)  # the peaks the study's recipe gives
    assert learning_rate(TrainConfig(warmup=8000), 8000) == pytest.approx(5.59e-4, rel=1e-3)
    linear = TrainConfig(schedule="linear", learning_rate=1e-3, final_learning_rate=5e-4, warmup=4000, steps=10_000)
    assert [learning_rate(linear, t) for t in (2000, 4000, 7000, 10_000)] == pytest.approx([5e-4, 1e-3, 7.5e-4, 5e-4])
    cosine = TrainConfig(schedule="cosine", learning_rate=1.0, final_learning_rate=0.2, warmup=0, steps=100)
    assert [learning_rate(cosine, t) for t in (0, 50, 100)] == pytest.approx([1.0, 0.6, 0.2])
    constant = TrainConfig(schedule="constant", learning_rate=0.3, warmup=10, steps=100)
    assert [learning_rate(constant, t) for t in (5, 10, 90)] == pytest.approx([0.15, 0.3, 0.3])


@pytest.mark.parametrize("name", ["adam", "adamw", "lion"])
def test_weight_decay_is_for_matrices(name):
    if name == "lion":
        pytest.importorskip("timm")
    config = TrainConfig(optimizer=name, weight_decay=0.1, beta1=0.9, beta2=0.99)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    optimizer = make_optimizer(model, config)
    assert [(len(g["params"]), g["weight_decay"], tuple(g["betas"])) for g in optimizer.param_groups] == [
        (1, 0.1, (0.9, 0.99)),
        (3, 0.0, (0.9, 0.99)),
    ]


def test_order_depends_only_on_seed_and_step():
    cpu = torch.device("cpu")
    order, again = Order(23, 5, 7, cpu), Order(23, 5, 7, cpu)
    steps = [order(step) for step in range(12)]
    for step in (9, 0, 4, 11):  # in any order
        assert torch.equal(again(step), steps[step])
    epoch = torch.cat(steps[:4])
    assert len(epoch.unique()) == 20
    assert not torch.equal(torch.cat(steps[:4]), torch.cat(steps[4:8]))
    assert not torch.equal(Order(23, 5, 8, cpu)(0), steps[0])
    with pytest.raises(ValueError, match="lower --batch-size"):
        Order(4, 5, 0, cpu)


def test_overlapping_rows_are_not_expanded():
    text = torch.arange(100, dtype=torch.uint8)
    rows = Rows({"bytes": text.unfold(0, 11, 10)}, torch.device("cpu"))
    assert torch.equal(rows.take(torch.tensor([2]))["bytes"][0], text[20:31])
    moved = Rows({"bytes": text.unfold(0, 11, 10)}, torch.device("meta"))
    assert moved.columns["bytes"].untyped_storage().nbytes() == 100
    assert moved.columns["bytes"].shape == (9, 11)


def test_evaluation_counts_every_row_once(tmp_path):
    """For any batch size, including an incomplete last batch: 300 test rows, batches of 7 and 300."""
    train(short(tmp_path / "run"))
    found, step = evaluate_run(tmp_path / "run", batch_size=7)
    again, _ = evaluate_run(tmp_path / "run", batch_size=300)
    saved = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found == pytest.approx(again)
    assert found == pytest.approx(saved["test"])
    assert step == saved["best_step"]
    model, config, data = load_run(tmp_path / "run")
    logits = model(data.test["ids"].long())
    assert (logits.argmax(-1) == data.test["label"]).double().mean().item() == pytest.approx(found["accuracy"])


def test_streams_are_evaluated_as_they_were_trained(tmp_path, recwarn):
    """With as many streams, and with what the caches hold unless they are written in eval()."""
    (tmp_path / "text").write_text("a text to predict. " * 200)
    small = dict(task="text-streams", data=str(tmp_path / "text"), max_length=16, batch_size=2, cache=0.5)
    train(short(tmp_path / "run", **small))
    with pytest.raises(ValueError, match="text-streams reads a text as batch_size streams.* batch_size 2"):
        evaluate_run(tmp_path / "run", batch_size=1)
    kept = short(tmp_path / "kept", **small, cache_options='{"scope": "stream", "eval_update": true}')
    train(kept)
    for out, written in (("run", True), ("kept", False)):
        model, config, _ = load_run(tmp_path / out)
        caches = [m for m in model.modules() if isinstance(m, RecurrentCache)]
        with get_task(config.task).evaluating(model):
            assert [bool(cache.updates) for cache in caches] == [written] * config.layers
        assert all(cache.updates for cache in caches)
    assert not [w for w in recwarn if "never written" in str(w.message)]


def test_partial_evaluation_is_spread_over_the_split(tmp_path):
    """Data sorted by class: five batches of ten rows must cover all five classes."""
    label = torch.arange(100) // 20

    class Echo(torch.nn.Module):
        def forward(self, ids):
            return torch.nn.functional.one_hot(ids[:, 0] * 0 + 3, 5).float()

    task, cpu = get_task("digits"), torch.device("cpu")
    rows = Rows({"ids": label[:, None], "label": label}, cpu)
    one = types.SimpleNamespace(world_size=1, global_rank=0)
    found = evaluate(one, Echo(), task, rows, TrainConfig(batch_size=10), batches=5)
    assert found["accuracy"] == 0.2


@pytest.mark.parametrize(("batch_size", "world"), [(64, 1), (7, 1), (200, 1), (5, 3)])
def test_partial_evaluation_depends_on_no_batch_size(monkeypatch, batch_size, world):
    """Two batches of the task's 64, of 300 rows."""
    task, seen = get_task("digits"), []
    score = lambda model, batch: seen.extend(batch["ids"][:, 0].tolist()) or {"loss": batch["ids"][:, 0]}  # noqa: E731
    monkeypatch.setattr(task, "score", score)
    monkeypatch.setattr(task, "summary", dict)
    rows, one = Rows({"ids": torch.arange(300)[:, None]}, torch.device("cpu")), types.SimpleNamespace(world_size=1)
    sums = []
    for rank in range(world):
        split = types.SimpleNamespace(world=world, rank=rank, region=contextlib.nullcontext, part=lambda _, rows: rows)
        config = TrainConfig(batch_size=batch_size)
        sums.append(evaluate(one, torch.nn.Identity(), task, rows, config, batches=2, split=split)["loss"])
    assert set(seen) == {*range(64), *range(128, 192)}
    assert sum(sums) == sum(set(seen)) and len(seen) - 128 < batch_size * world


def test_a_run_can_be_extended_if_the_schedule_allows(tmp_path):
    same = dict(schedule="constant", eval_every=0, dropout=0.1)
    train(short(tmp_path / "long", steps=9, **same))
    train(short(tmp_path / "grown", steps=5, **same))
    train(short(tmp_path / "grown", steps=9, **same), resume=True)
    assert (
        train_losses(tmp_path / "grown") == train_losses(tmp_path / "long")
        and len(train_losses(tmp_path / "long")) == 9
    )
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("grown", "long")]
    assert results[0]["step"] == results[1]["step"] == 9
    with pytest.raises(Exception, match="steps: 9 -> 12"):
        train(short(tmp_path / "cosine", steps=9, schedule="cosine"))
        train(short(tmp_path / "cosine", steps=12, schedule="cosine"), resume=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_commit_is_that_of_the_code_not_of_a_project_around_it(tmp_path, monkeypatch):
    from weft.lab import run

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / ".gitignore").write_text(".venv\n")
    place = tmp_path / ".venv" / "run.py"
    place.parent.mkdir()
    place.touch()
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "project"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(run, "__file__", str(place))
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    assert run.commit() == ""
    subprocess.run([*git, "add", "-f", str(place)], check=True)
    assert len(run.commit().removesuffix("+changes")) == 40


def test_an_extended_run_that_was_stopped_has_no_result(tmp_path, monkeypatch):
    from weft.lab.report import read_run, runs_table

    train(short(tmp_path / "a", schedule="constant"))
    killed_run(monkeypatch, short(tmp_path / "a", schedule="constant", steps=24), 18, resume=True)
    (row,) = runs_table([read_run(tmp_path / "a")])["rows"]
    assert row[5:7] == ["17 of 24", "unfinished"]
    assert Run(tmp_path / "a").result() is None


def test_a_failed_run_that_was_continued_has_not_failed(tmp_path, monkeypatch):
    from weft.lab.sweep.results import read_folder

    config = short(tmp_path / "full-1x2-s0", checkpoint_every=1)
    killed_run(monkeypatch, config, 3)
    Run(tmp_path / "full-1x2-s0").write("outcome.json", '{"state": "failed", "why": "out of memory"}')
    assert read_folder(tmp_path / "full-1x2-s0", "accuracy").state == "failed"
    killed_run(monkeypatch, config, 5, resume=True)
    assert read_folder(tmp_path / "full-1x2-s0", "accuracy").state == "cut"


def test_init_from_loads_the_weights_of_another_run(tmp_path):
    train(short(tmp_path / "a", steps=2, eval_every=0))
    train(short(tmp_path / "b", steps=1, learning_rate=0.0, weight_decay=0.0, init_from=str(tmp_path / "a"), seed=5))
    (a, _, _), (b, _, _) = load_run(tmp_path / "a", "last"), load_run(tmp_path / "b", "last")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    with pytest.raises(ValueError, match="belongs to another model"):
        train(short(tmp_path / "c", layers=2, init_from=str(tmp_path / "a")))


def test_the_best_checkpoint_is_tested(tmp_path, monkeypatch):
    scores = iter([0.3, 0.9, 0.5])

    def fake(fabric, model, task, rows, config, **how):
        return {"loss": 1.0, "accuracy": next(scores, 0.0)}

    monkeypatch.setattr(loop, "evaluate", fake)
    train(short(tmp_path / "run", eval_every=2))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["best_step"] == 4


def test_the_command_line_trains_evaluates_and_refuses(tmp_path):
    out, options = tmp_path / "run", runs.options(**SHORT)
    first = weft("train", "digits", "--out", out, "--attention", "linear", "--seed", "3", *options)
    assert first.exit_code == 0, first.output
    assert Run(out).config().attention == "linear"
    assert "accuracy" in weft("eval", out, "--split", "val").output
    assert weft("train", "digits", "--out", out, *options).exit_code == 2
    assert weft("train", "listops", "--data", tmp_path, "--out", tmp_path / "other").exit_code == 66
    assert weft("train", "digits", "--nonsense", "1").exit_code == 2
    shown = weft("list").output
    assert "listops" in shown and "pathfinder128-hard" in shown and "linformer" in shown
    assert "weft data make listops" in weft("data", "list").output


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": 0.5},
        {"subsample": "Sall-L4", "finetune_dense_at": 0.5},
        {"attention": "local+linear"},
        {"optimizer": "lion", "learning_rate": 1e-3},
        {"optimizer": "adamw", "accumulate": 2, "label_smoothing": 0.1, "checkpoint_activations": True},
        {"precision": "bf16-mixed", "optimizer": "adam"},
    ],
    ids=["cache", "subsample", "mixed", "lion", "adamw", "bf16"],
)
def test_resume_restores_module_state(tmp_path, monkeypatch, changes):
    """Caches are saved, pathways are drawn per step, and a dense finish stays dense."""
    if changes.get("optimizer") == "lion":
        pytest.importorskip("timm")
    changes = {"dropout": 0.1, **changes}
    train(short(tmp_path / "whole", **changes))
    runs.killed_run(monkeypatch, short(tmp_path / "killed", **changes), 6)
    train(short(tmp_path / "killed", **changes), resume=True)
    assert train_losses(tmp_path / "killed") == train_losses(tmp_path / "whole")
    assert Run(tmp_path / "killed").result()["test"] == Run(tmp_path / "whole").result()["test"]


def test_dense_finish_changes_the_losses_from_its_step_on(tmp_path):
    train(short(tmp_path / "a", subsample="Sall-L4", dropout=0.0))
    train(short(tmp_path / "b", subsample="Sall-L4", dropout=0.0, finetune_dense_at=0.5))
    a, b = train_losses(tmp_path / "a"), train_losses(tmp_path / "b")
    assert a[:3] == b[:3] and a[3] != b[3]


@pytest.mark.parametrize("positions", ["alibi", "rope", "learned", "sinusoid", "none"])
def test_language_models_train_and_are_causal(tmp_path, positions):
    (tmp_path / "t.txt").write_bytes(b"all work and no play makes jack a dull boy. " * 120)
    config = short(tmp_path / "run", task="text", data=str(tmp_path / "t.txt"), max_length=24, positions=positions)
    result = train(config)
    assert 0 < result.test["bits_per_byte"] == pytest.approx(result.test["loss"] / math.log(2))
    model, _, data = load_run(tmp_path / "run")
    rows = data.test["bytes"][:2, :24].long()
    changed = rows.clone()
    changed[:, 15:] = 7
    assert torch.equal(model(rows)[:, :15], model(changed)[:, :15])


def test_an_unsupported_bias_is_refused_early(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"0123456789" * 200)
    with pytest.raises(ValueError, match="--positions rope, learned"):
        train(short(tmp_path / "run", task="text", data=str(tmp_path / "t.txt"), max_length=8, attention="linear"))


def test_masked_language_model_trains(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"abcdefgh" * 400)
    config = short(tmp_path / "run", task="masked", data=str(tmp_path / "t.txt"), max_length=16, steps=60, warmup=10,
                  learning_rate=1e-2, eval_every=60, checkpoint_every=60, dropout=0.0)  # fmt: skip
    result = train(config)
    curve = train_losses(tmp_path / "run")
    assert sum(curve[-5:]) < 0.7 * sum(curve[:5]) and set(result.test) == {"loss", "bits_per_byte", "accuracy"}


def test_crate_trains_on_digits_and_images(tmp_path):
    assert (
        type(build_model(short(tmp_path, model="crate"), get_task("digits").load(short(tmp_path)))).__name__
        == "CRATEText"
    )
    result = train(
        make_config(
            "digits", model="crate", out=str(tmp_path / "run"), steps=80, layers=2, accelerator="cpu", eval_every=40
        )
    )
    assert train_losses(tmp_path / "run")[-1] < 2.25 < math.log(10) and result.parameters > 0
    config = make_config("imagefolder", model="crate", layers=1, heads=2, head_dim=8, dim=16, image_size=8)
    facts = {"classes": 3, "size": 8, "mean": [0.5] * 3, "std": [0.25] * 3}
    model = get_task("imagefolder").model(config, types.SimpleNamespace(facts=facts))
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model(images), model.model((images / 255 - 0.5) / 0.25))
    with pytest.raises(ValueError, match="single mechanism"):
        build_model(short(tmp_path, model="crate", attention="full+local"), get_task("digits").load(short(tmp_path)))


def test_tensorboard_is_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(short(tmp_path / "run", logger="tensorboard"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(train_losses(tmp_path / "run"))
    assert events.Scalars("val/accuracy")


def test_a_missing_logger_is_refused_before_the_run_exists(tmp_path, monkeypatch):
    from weft.lab import metrics

    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="--logger wandb needs the package wandb: pip install wandb"):
        train(short(tmp_path / "run", logger="wandb"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="logger must be one of tensorboard, wandb; got 'mlflow'"):
        short(tmp_path, logger="mlflow")


def test_seeds_differ_by_every_part():
    assert len({seed_of("a", 1, 2), seed_of("a", 12), seed_of("a", 2, 1), seed_of("b", 1, 2)}) == 4
    assert get_task("digits").load(make_config("digits")).rows("train") == 1297


def test_causal_layers_can_be_cached(tmp_path):
    from weft.layers import CachedAttention

    (tmp_path / "text").write_bytes(bytes(range(32, 120)) * 40)
    small = dict(layers=2, heads=2, head_dim=8, dim=16, mlp_dim=16, max_length=64)
    config = make_config("text", data=str(tmp_path / "text"), cache=0.5, **small)
    model = build_model(config, get_task("text").load(config))
    assert sum(isinstance(layer, CachedAttention) for layer in model.modules()) == 2


def test_a_model_without_cacheable_layers_is_refused(monkeypatch):
    decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(16, 2, batch_first=True), 1)
    task = get_task("digits")
    monkeypatch.setattr(type(task), "model", lambda self, config, data: decoder)  # not cached by default
    config = make_config("digits", cache=0.5)
    with pytest.raises(ValueError, match="remove --cache"):
        build_model(config, task.load(config))


@pytest.mark.parametrize("command", [["attentions"], ["list"], ["data", "list"]], ids=" ".join)
def test_tables_cut_no_name_and_no_command_on_a_narrow_terminal(command):
    from typer.testing import CliRunner

    import weft
    from weft.cli import app
    from weft.tasks.fetch import SOURCES

    shown = CliRunner(env={"COLUMNS": "60"}).invoke(app, command).output
    wanted = [source.how for source in SOURCES] if command[0] == "data" else weft.attentions()
    assert "…" not in shown and all(f" {text} " in shown for text in wanted)
