"""`weft.convert`: the teacher is the original layer, transfer and fine-tuning help, and a killed conversion continues
to the same weights."""

from __future__ import annotations

import copy
import dataclasses
import json
import os

import pytest
import torch
from torch import nn

import weft
from weft.attention.routing import Clusters
from weft.lab.checkpoint import Checkpoints
from weft.lab.conversion.convert import cross_entropy, language_model_loss
from weft.lab.conversion.parts import Parts
from weft.lab.conversion.transfer import Transfer, originals, teacher_of
from weft.lab.divergence import Diverged

DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")
QUIET = {"progress": False, "batch_size": 4, "validation_batches": 2}


def stream(n: int = 4000) -> torch.Tensor:
    """Tokens that repeat with a period of 12."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (12,), generator=generator).repeat(n // 12)
    return torch.where(torch.rand(len(ids), generator=generator) < 0.1, 1, ids)


def llama(**config):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**small, vocab_size=48, max_position_embeddings=64, num_key_value_heads=2, **config)
    )


def language_model():
    torch.manual_seed(0)
    sizes = {"dim": 32, "heads": 4, "head_dim": 8, "layers": 2, "mlp_dim": 48}
    return weft.models.LanguageModel(48, max_length=64, positions="rope", dropout=0.0, **sizes)


def trained(model, length: int = 32, steps: int = 60):
    optimizer, data = torch.optim.AdamW(model.parameters(), 5e-3), stream()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        at = torch.randint(len(data) - length, (8, 1), generator=generator)
        ids = data[at + torch.arange(length)].to(next(model.parameters()).device)
        language_model_loss(model, {"input_ids": ids}).backward()
        optimizer.step(), optimizer.zero_grad()
    return model


@pytest.mark.parametrize("build, precision", [(llama, ""), (language_model, ""), (language_model, "bf16-mixed")])
def test_transfer_and_fine_tuning_recover_the_loss(build, precision):
    model = trained(build().to(DEVICE))
    report = weft.convert(
        model, "linear", stream(), steps=40, length=48, transfer_length=32, transfer_learning_rate=3e-3,
        precision=precision, **QUIET,
    )  # fmt: skip
    losses, errors = report.losses, report.errors
    assert list(losses) == ["before", "after swap", "after transfer", "after fine-tuning"]
    assert losses["after swap"] > losses["before"] + 0.1, losses
    assert losses["after fine-tuning"] < (losses["before"] + losses["after swap"]) / 2, losses
    assert len(errors) == 2 and all(after < 0.9 * before for before, after in errors.values()), errors
    assert set(report.speed) == set(report.memory) == {"before", "after"} and min(report.memory.values()) > 0
    assert report.tokens == {"transfer": 20 * 4 * 32, "fine-tuning": 40 * 4 * 48}
    assert json.loads(json.dumps(report.as_dict()))["losses"] == losses
    assert "2 layers replaced" in str(report) and "loss after fine-tuning" in str(report)
    worse = dataclasses.replace(report, losses=losses | {"after fine-tuning": losses["after transfer"] + 1})
    assert "try a smaller learning_rate" in str(worse) and "try a smaller learning_rate" not in str(report)
    assert weft.describe(model)["swapped"] and model.training


TEACHERS = ["llama/LlamaForCausalLM", "mistral/MistralForCausalLM", "gemma2/Gemma2ForCausalLM", "bert/BertModel"]
TEACHERS += [
    "gpt2/GPT2LMHeadModel",
    "bloom/BloomForCausalLM",
    "gpt_oss/GptOssForCausalLM",
    "modernbert/ModernBertModel",
]


@pytest.mark.parametrize("name", TEACHERS)
def test_the_teacher_is_the_original_layer(name):
    """With its windows, biases, caps and sinks: the swapped model computes the original's output during transfer."""
    pytest.importorskip("transformers")
    import zoo

    model = zoo.build(name, "eager")
    mask = torch.ones(2, zoo.L, dtype=torch.long)
    mask[1, -3:] = 0
    inputs = {"input_ids": zoo.tokens(), "attention_mask": mask}
    expected = zoo.outputs(model, inputs)
    copies = originals(model, None)
    report = weft.swap(model, "full" if name.startswith(("gemma2", "gpt_oss")) else "longformer", probe=False)
    layers = dict(zip(report.replaced, report.layers, strict=True))
    assert layers
    transfer = Transfer(layers, {path: teacher_of(layer, copies[layer]) for path, layer in layers.items()})
    with transfer.on(mask, learn=False):
        out = zoo.outputs(model, inputs)
    real = mask.bool()
    torch.testing.assert_close(out[real], expected[real], atol=1e-4, rtol=1e-3)
    assert set(transfer.errors) == set(layers)


@pytest.mark.parametrize("name", TEACHERS[:1] + TEACHERS[3:5])
def test_the_teacher_of_a_swapped_layer_has_its_mechanism(name):
    pytest.importorskip("transformers")
    import zoo

    model, inputs = zoo.build(name, "eager"), {"input_ids": zoo.tokens()}
    weft.swap(model, "longformer", window=2, probe=False)
    expected, copies = zoo.outputs(model, inputs), originals(model, None)
    report = weft.swap(model, "linear", probe=False)
    layers = dict(zip(report.replaced, report.layers, strict=True))
    transfer = Transfer(layers, {path: teacher_of(layer, copies[layer]) for path, layer in layers.items()})
    with transfer.on(None, learn=False):
        torch.testing.assert_close(zoo.outputs(model, inputs), expected)


def test_later_layers_get_the_keys_of_the_original():
    """Gemma 3n: the last layers read the keys of an earlier one."""
    transformers = pytest.importorskip("transformers")
    import zoo

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma3nTextConfig(
        **sizes,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model, inputs = transformers.Gemma3nForCausalLM(config).eval(), {"input_ids": zoo.tokens(), "use_cache": False}
    expected, copies = model(**inputs).logits, originals(model, None)
    report = weft.swap(model, "longformer", probe=False)
    layers = dict(zip(report.replaced, report.layers, strict=True))
    for layer in report.layers[:2]:
        layer.k_norm.weight.data.mul_(2)
    transfer = Transfer(layers, {path: teacher_of(layer, copies[layer]) for path, layer in layers.items()})
    with transfer.on(None, learn=True):
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["torch", "timm"])
def test_teachers_in_other_libraries(kind):
    if kind == "timm":
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4).eval()
        x = torch.randn(2, 3, 64, 64)
    else:
        layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 9, 24)
    expected = model(x)
    copies = originals(model, None)
    report = weft.swap(model, "linear")
    layers = dict(zip(report.replaced, report.layers, strict=True))
    transfer = Transfer(layers, {path: teacher_of(layer, copies[layer]) for path, layer in layers.items()})
    with transfer.on(None, learn=True):
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-4)
    gradients = [p.grad for layer in layers.values() for p in layer.parameters()]
    assert all(g is not None for g in gradients) and transfer.mean > 1e-4
    assert not torch.allclose(model(x), expected, atol=1e-3)  # the layers are themselves again


def test_a_layer_that_transfer_makes_worse_gets_its_weights_back():
    """`longformer` with a window of the whole length is exact."""
    model = llama().to(DEVICE)
    before = copy.deepcopy(model.state_dict())
    report = weft.convert(
        model, "longformer", stream(), steps=0, transfer_steps=2, length=32, window=64, precision="32-true", **QUIET
    )
    assert all(after == first for first, after in report.errors.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Killed(BaseException):
    pass


def kill_after_saving(patch, step: int) -> None:
    def save_and_die(self, now, *rest):
        save(self, now, *rest)
        if now == step:
            raise Killed

    save = Checkpoints.save
    patch.setattr(Checkpoints, "save", save_and_die)


@pytest.mark.parametrize("kill_after", [4, 6, 10])
def test_a_killed_conversion_continues_to_the_same_weights(kill_after, tmp_path, monkeypatch):
    """In transfer, between the stages, and in fine-tuning; `routing` also has centroids that follow the keys."""
    settings = {"steps": 6, "transfer_steps": 6, "length": 32, "save_every": 2, **QUIET}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after_saving(patch, kill_after)
        weft.convert(language_model(), "routing", stream(), folder=tmp_path, **settings)
    again, straight = language_model(), language_model()
    continued = weft.convert(again, "routing", stream(), folder=tmp_path, **settings)
    report = weft.convert(straight, "routing", stream(), **settings)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert continued.losses == report.losses and continued.errors == report.errors
    assert continued.tokens == report.tokens
    done = weft.convert(language_model(), "routing", stream(), folder=tmp_path, **settings)  # nothing left to do
    assert done.losses == report.losses
    with pytest.raises(ValueError, match="other settings .*'steps': 6"):
        weft.convert(language_model(), "routing", stream(), folder=tmp_path, **{**settings, "steps": 7})
    with pytest.raises(ValueError, match="other weights"):
        weft.convert(again, "routing", stream(), folder=tmp_path, **settings)


def test_rows_and_batches(tmp_path):
    """Padded rows as dicts, or a tensor of rows; the mask keeps padding out of the errors."""
    rows = stream()[: 20 * 24].view(20, 24)
    report = weft.convert(llama(), "linear", rows, steps=2, **QUIET)
    assert report.settings["length"] == 24 and report.tokens["fine-tuning"] == 2 * 4 * 24
    mask = torch.ones_like(rows)
    mask[:, 20:] = 0
    first = [{"input_ids": rows[i : i + 4], "attention_mask": mask[i : i + 4]} for i in range(0, 20, 4)]
    second = [{**batch, "input_ids": batch["input_ids"] * batch["attention_mask"]} for batch in first]
    reports = [weft.convert(llama(), "local", batches, steps=4, block_size=4, **QUIET) for batches in (first, second)]
    for stage in reports[0].losses:
        torch.testing.assert_close(reports[0].losses[stage], reports[1].losses[stage], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(list(reports[0].errors.values()), list(reports[1].errors.values()), atol=1e-3, rtol=1e-2)


def test_the_validation_loss_is_the_mean_over_tokens():
    """The last batch of rows is smaller, and batches may have padding or other lengths."""
    model, rows = trained(llama()).eval(), stream()[: 180 * 20].view(180, 20).clone()
    rows[-1] = torch.randint(3, 40, (20,), generator=torch.Generator().manual_seed(1))
    last, mask = rows[-9:], torch.ones(9, 20, dtype=torch.long)
    mask[:8, 3:] = 0
    padded = [{"input_ids": last[part], "attention_mask": mask[part]} for part in (slice(8), slice(8, 9))]
    short = [last[:8, :5], last[8:]]
    losses, targets = [language_model_loss(model, {"input_ids": ids}) for ids in short], (8 * 4, 19)
    expected = [
        (None, language_model_loss(model, {"input_ids": last})),
        (padded, language_model_loss(model, {"input_ids": last, "attention_mask": mask})),
        (short, sum(n * loss for n, loss in zip(targets, losses, strict=True)) / sum(targets)),
    ]
    settings = {"steps": 0, "validation_batches": 2, "batch_size": 8, "progress": False, "precision": "32-true"}
    for validation, loss in expected:
        report = weft.convert(copy.deepcopy(model), "linear", rows, validation=validation, **settings)
        assert report.losses["before"] == pytest.approx(loss.item(), rel=1e-4)


def test_tokens_weigh_the_same_with_labels():
    """Of causal models the first label does not count; a row or a batch may have no label that does."""
    rows = stream()[: 20 * 24].view(20, 24)
    labels = rows.clone()
    labels[::2, 5:] = -100
    labels[1::4, 1:] = -100
    model = trained(llama()).eval()
    batches = [{"input_ids": rows[part], "labels": labels[part]} for part in (slice(7), slice(7, 8), slice(9, 10))]
    together = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    with torch.no_grad():
        expected = language_model_loss(model, together)
    settings = {"steps": 0, "progress": False, "precision": "32-true", "validation_batches": 3}
    report = weft.convert(copy.deepcopy(model), "linear", [together], validation=batches, **settings)
    assert report.losses["before"] == pytest.approx(expected.item(), rel=1e-5)
    for parts in (1, 2, 9):
        found = Parts(count=parts).sum(model, together, lambda b, share: language_model_loss(model, b).detach() * share)
        torch.testing.assert_close(found, expected)
    nothing = {"input_ids": rows[9:10], "labels": labels[9:10]}
    language_model_loss(model, nothing).backward()
    assert language_model_loss(model, nothing) == 0 and not any(p.grad.any() for p in model.parameters())
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertForMaskedLM(transformers.BertConfig(hidden_size=16, num_hidden_layers=1, vocab_size=48,
        num_attention_heads=2, intermediate_size=16)).eval()  # fmt: skip
    found = Parts(count=9).sum(bert, together, lambda b, share: language_model_loss(bert, b).detach() * share)
    torch.testing.assert_close(found, language_model_loss(bert, together).detach())


def test_speed_and_memory_are_those_of_training():
    """With sampled sources and recomputed blocks, but without a change of centroids."""

    def memory(model, to="subsampled", **options):
        return weft.convert(model, to, stream(), steps=0, length=64, **options, **QUIET).memory

    plain, recomputed = llama(), llama()
    recomputed.gradient_checkpointing_enable()
    dense = memory(plain, windows=16)
    assert dense["before"] != pytest.approx(dense["after"], rel=0.02)
    assert memory(recomputed)["before"] < 0.9 * dense["before"]
    memory(model := language_model(), "routing", clusters=2)
    centroids = [module for module in model.modules() if isinstance(module, Clusters)]
    assert centroids and not any(module.count.any() for module in centroids)


@pytest.mark.parametrize("build", [llama, language_model])
def test_new_mechanisms_have_the_mode_of_the_model(build):
    """A model in train() goes on sampling without another call of train()."""
    model = build().train()
    norm = (model.model if build is llama else model).norm.eval()
    weft.convert(model, "subsampled", stream(), steps=1, length=32, **QUIET)
    assert [module for module in model.modules() if not module.training] == [norm]


def test_a_batch_that_does_not_fit_is_split():
    """A pass of more than two rows runs out of memory; the result is that of whole batches."""
    rows = stream()[: 20 * 24].view(20, 24)
    mask = torch.ones_like(rows)
    mask[::2, 15:] = 0
    batches = [{"input_ids": rows[i : i + 4], "attention_mask": mask[i : i + 4]} for i in range(0, 20, 4)]
    fits = 9

    def loss(model, batch):
        if len(batch["input_ids"]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return language_model_loss(model, batch)

    def converted():
        return weft.convert(llama().to(DEVICE), "local", batches, steps=4, loss=loss, block_size=4, **QUIET)

    whole, fits = converted(), 2
    split = converted()
    torch.testing.assert_close(split.losses, whole.losses, atol=1e-3, rtol=1e-3)
    fits = 0
    with pytest.raises(torch.OutOfMemoryError, match="one sequence of 24 tokens does not fit"):
        converted()


def test_the_loss_in_chunks():
    logits, labels = torch.randn(20, 7, requires_grad=True), torch.randint(7, (20,))
    labels[::3] = -100
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), logits)
    (found,) = torch.autograd.grad(cross_entropy(logits, labels, largest=50), logits)
    torch.testing.assert_close(found, expected)


def test_other_models_need_their_loss():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=48, num_heads=4, num_classes=3)
    batches = [{"x": torch.randn(2, 3, 64, 64), "y": torch.tensor([0, 2])} for _ in range(4)]
    with pytest.raises(ValueError, match="takes x, .* but a batch has x, y"):
        weft.convert(model, "linear", batches, steps=2, **QUIET)
    report = weft.convert(
        model, "linear", batches, steps=2, loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), **QUIET
    )
    assert report.replaced == ["blocks.0.attn"] and report.losses["after fine-tuning"] > 0


def test_only_adapters_are_trained(tmp_path, monkeypatch):
    """They are merged at the end, and continued after a kill."""
    pytest.importorskip("peft")
    model = trained(llama())
    before = copy.deepcopy(model.state_dict())
    settings = {"steps": 8, "transfer_steps": 0, "length": 32, "lora": 4, "learning_rate": 3e-3, **QUIET}
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after_saving(patch, 4)
        weft.convert(copy.deepcopy(model), "linear", stream(), folder=tmp_path / "run", save_every=4, **settings)
    again = copy.deepcopy(model)
    weft.convert(again, "linear", stream(), folder=tmp_path / "run", save_every=4, **settings)
    report = weft.convert(model, "linear", stream(), **settings)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert len(changed) == 8 and all("self_attn" in name for name in changed)
    assert report.losses["after fine-tuning"] < report.losses["after swap"]
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    again = weft.huggingface.load(tmp_path / "model")
    ids = stream()[None, :32]
    torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits)


def test_the_command(tmp_path):
    from typer.testing import CliRunner

    from weft.cli import app

    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(bytes(stream().tolist()))
    command = ["convert", tmp_path / "model", "--to", "local", "--option", "block_size=8", "--data"]
    command += [tmp_path / "text.txt", "--out", tmp_path / "out", "--steps", 2, "--length", 32, "--device", "cpu"]
    refused = CliRunner().invoke(app, [str(each) for each in command])
    assert refused.exit_code == 2 and "no tokenizer" in refused.output and "--bytes" in refused.output
    missing = CliRunner().invoke(app, [str(each) for each in ["convert", tmp_path / "modle", *command[2:]]])
    assert missing.exit_code == 2 and "neither a folder of save_pretrained" in missing.output
    no_text = CliRunner().invoke(app, [str(tmp_path / "txt") if each == command[7] else str(each) for each in command])
    assert no_text.exit_code == 2 and no_text.output.endswith("txt does not exist\n") and "Errno" not in no_text.output
    for name in ("model", "modle"):
        with pytest.raises((ValueError, FileNotFoundError), match="weft.huggingface.load|does not exist"):
            weft.load(tmp_path / name)
    steep = ["--bytes", "--out", tmp_path / "steep", "--learning-rate", 1e30, "--steps", 10, "--transfer-steps", 0]
    diverged = CliRunner().invoke(app, [str(each) for each in [*command, *steep]])
    assert diverged.exit_code == 70 and "lower learning_rate" in diverged.output
    original = (tmp_path / "model" / "model.safetensors").read_bytes()
    onto = ["--bytes", "--out", tmp_path / "model"]
    kept = CliRunner().invoke(app, [str(each) for each in [*command, *onto]])
    assert kept.exit_code == 2 and "already has a model" in kept.output
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == original
    done = CliRunner().invoke(app, [str(each) for each in [*command, "--bytes"]])
    assert done.exit_code == 0, done.output
    assert "2 layers replaced" in done.output and (tmp_path / "out" / "conversion.json").exists()
    model = weft.huggingface.load(tmp_path / "out")
    assert weft.describe(model)["swapped"]["model.layers.0.self_attn"]["block_size"] == 8
    again = ["convert", tmp_path / "out", "--to", "full", "--bytes", *command[6:9], tmp_path / "again", *command[10:]]
    done = CliRunner().invoke(app, [str(each) for each in again])
    assert done.exit_code == 0, done.output
    first, second = (json.loads((tmp_path / name / "conversion.json").read_text()) for name in ("out", "again"))
    assert second["losses"]["before"] == pytest.approx(first["losses"]["after fine-tuning"])


def test_bad_input(tmp_path):
    data = stream()
    shuffled = torch.utils.data.DataLoader(data[:640].view(20, 32), batch_size=4, shuffle=True)
    for error, match, changes in [
        (ValueError, "shuffled again in each pass.* validation=", {"data": shuffled}),
        (ValueError, "no attention mechanism|unknown", {"to": "nothing"}),
        (ValueError, "steps must be an integer of at least 0, got -1", {"steps": -1}),
        (ValueError, "batch_size", {"batch_size": 0}),
        (ValueError, "^learning_rate must be a number that is not negative", {"learning_rate": -3e-4}),
        (ValueError, "transfer_learning_rate must be", {"transfer_learning_rate": float("nan")}),
        (ValueError, "precision must be one of", {"precision": "half"}),
        (TypeError, "integer tokens", {"data": torch.randn(9)}),
        (TypeError, "data must be a tensor", {"data": "text.txt"}),
        (ValueError, "fewer than one sequence", {"data": data[:20]}),
        (ValueError, "need 32 each", {"data": data[:40]}),
        (ValueError, "no batches", {"data": []}),
        (ValueError, "the token 79, but LlamaForCausalLM has the tokens 0", {"data": (data + 40).to(torch.uint16)}),
        (ValueError, "has the token -1, but", {"validation": data - 2}),
        (ValueError, "has the token 48, but", {"data": [{"input_ids": torch.full((2, 8), 48)}]}),
        (TypeError, "no option", {"block": 3}),
        (ValueError, "no layer of LlamaForCausalLM can use bigbird", {"to": "bigbird"}),
        (ValueError, "matches none", {"where": "blocks.*"}),
    ]:
        model = llama()
        before = model.state_dict()
        arguments = {"to": "linear", "data": data, "steps": 2, "length": 32, **QUIET, **changes}
        with pytest.raises(error, match=match), pytest.warns(UserWarning) if "bigbird" in match else _nothing():
            weft.convert(model, **arguments)
        assert not weft.describe(model) and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    weft.convert(llama(), "linear", shuffled, validation=data[640:], steps=1, length=32, **QUIET)
    frozen = llama().requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        weft.convert(frozen, "linear", data, steps=2, length=32, **QUIET)
    with pytest.raises(Diverged, match="lower learning_rate"):
        weft.convert(llama(), "linear", data, steps=10, transfer_steps=0, learning_rate=1e30, length=32, **QUIET)


def _nothing():
    import contextlib

    return contextlib.nullcontext()
