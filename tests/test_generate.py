"""Layers and language models decode as they compute in parallel; `generate` and `weft generate`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import weft
import weft.lab.trained
from weft.cli import app
from weft.cli.generate import code_of
from weft.layers import MSSA, MixedAttention
from weft.models import LanguageModel
from weft.models.generate import sample
from weft.tasks.base import Known
from weft.tasks.config import make_config

EXACT = {"rtol": 1e-9, "atol": 1e-9}
SIZES = {"dim": 16, "heads": 4, "head_dim": 4, "layers": 2, "mlp_dim": 24, "dropout": 0.0}
PADDED = torch.arange(14) >= torch.tensor([0, 3, 5])[:, None]


def cached() -> nn.Module:
    layer = weft.CachedAttention(weft.MultiheadAttention(16, 4, causal=True, rope=True), delayed=True, length=4)
    layer.double()(torch.randn(3, 6, 16, dtype=torch.float64))
    return layer


LAYERS = {
    "rotary": lambda: weft.MultiheadAttention(
        16, 4, kv_heads=2, attention="local", block_size=4, causal=True, rope=True
    ),
    "mixed": lambda: MixedAttention(16, 4, ["full", ("longformer", {"window": 3})], causal=True, rope=True),
    "cached": cached,
    "subspaces": lambda: MSSA(16, 4, attention="combiner-fixed", block_size=3, causal=True, tied=True, scale=0.7),
    "reads its input": lambda: weft.MultiheadAttention(
        16, 4, attention="combiner-axial", key_summary="proj", block_size=4, input_dim=16, causal=True
    ),
}


@pytest.mark.parametrize("max_length", [None, 20])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers_decode_as_in_parallel(name, max_length):
    torch.manual_seed(0)
    layer = LAYERS[name]().double().eval()
    x, rows = torch.randn(3, 14, 16, dtype=torch.float64), torch.tensor([1, 1, 2])
    wanted = layer(x, PADDED)
    real = PADDED[..., None]
    out, state = layer.prefill(x[:, :6], PADDED[:, :6], state=layer.start(3, max_length=max_length, history=2))
    torch.testing.assert_close(out.where(real[:, :6], 0), wanted[:, :6].where(real[:, :6], 0), **EXACT)
    for t in (6, 7):
        _, state = layer.step(x[:, t : t + 1].flip(0), state)
    state = layer.reorder(layer.crop(state, 2), rows)
    for t in range(6, 14):
        out, state = layer.step(x[rows, t : t + 1], state)
        torch.testing.assert_close(out, wanted[rows, t : t + 1], **EXACT)


def model(attention="full", positions="rope", max_length=40, **changes) -> LanguageModel:
    torch.manual_seed(0)
    made = LanguageModel(
        30, max_length=max_length, attention=attention, positions=positions, **{**SIZES, **changes}
    ).double()
    for p in made.parameters():  # larger weights, so that the most likely token depends on the context
        nn.init.normal_(p, std=0.3)
    return made.eval()


def prompts(B: int = 3, L: int = 14) -> Tensor:
    return torch.randint(0, 30, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", ["alibi", "rope", "learned", "sinusoid", "none"])
@pytest.mark.parametrize("attention", ["full", ["local", "axial"]])
@torch.no_grad()
def test_the_model_decodes_as_in_parallel(attention, positions):
    net, ids = model(attention, positions), prompts()
    wanted = net(ids, PADDED)
    logits, state = net.prefill(ids[:, :7], PADDED[:, :7], state=net.start(3, history=1))
    torch.testing.assert_close(logits[:, -1], wanted[:, 6], **EXACT)
    _, state = net.step(ids[:, 13:], state)
    state = net.crop(state, 1)
    for t in range(7, 14):
        logits, state = net.step(ids[:, t : t + 1], state)
        torch.testing.assert_close(logits, wanted[:, t : t + 1], **EXACT)


@pytest.mark.parametrize("max_length", [None, 20])
@pytest.mark.parametrize("attention", [["full", "linear"], lambda layer: ["full", "linear"][layer]])
@torch.no_grad()
def test_a_refused_crop_changes_nothing(attention, max_length):
    """One of the mechanisms could drop the tokens, another cannot."""
    net, ids = model(attention), prompts()
    logits, state = net.prefill(ids[:, :9], state=net.start(3, max_length=max_length))
    with pytest.raises(ValueError, match="linear sums up or overwrites earlier tokens"):
        net.crop(state, 2)
    logits, state = net.step(ids[:, 9:10], state)
    torch.testing.assert_close(logits, net(ids[:, :10])[:, -1:], **EXACT)


@pytest.mark.parametrize("attention", ["full", "linear", "combiner-fixed"])
@torch.no_grad()
def test_greedy_is_the_most_likely_token_of_the_whole_sequence(attention):
    net, ids = model(attention, max_length=30), prompts()
    got = net.generate(ids, 8, temperature=0, mask=PADDED)
    for _ in range(8):
        mask = nn.functional.pad(PADDED, (0, ids.shape[1] - 14), value=True)
        ids = torch.cat([ids, net(ids, mask)[:, -1:].argmax(-1)], 1)
    assert torch.equal(got, ids)


@torch.no_grad()
def test_padded_prompts_continue_as_alone():
    """With relative positions the padding does not matter."""
    net, ids = model(), prompts()
    together = net.generate(ids, 8, temperature=0, mask=PADDED)
    for row, first in enumerate((0, 3, 5)):
        alone = net.generate(ids[row : row + 1, first:], 8, temperature=0)
        assert torch.equal(alone[0, -8:], together[row, -8:])


@torch.no_grad()
def test_a_long_text_drops_its_oldest_quarter():
    net, ids = model(max_length=16), prompts(L=20)
    got = net.generate(ids, 9, temperature=0)
    held = ids[:, -12:]
    for _ in range(9):
        new = net(held)[:, -1:].argmax(-1)
        ids, held = torch.cat([ids, new], 1), torch.cat([held, new], 1)
        held = held[:, -12:] if held.shape[1] > 16 else held
    assert torch.equal(got, ids)
    _, state = net.prefill(ids[:, :16])
    with pytest.raises(ValueError, match=r"17 tokens exceed max_length=16.*generate\(\)"):
        net.step(ids[:, :1], state)


@torch.no_grad()
def test_rows_end_with_their_stop_token():
    net, ids = model(), prompts()
    free = net.generate(ids, 12, temperature=0)[:, 14:]
    stop = int(free[0, 2])
    heard: list[Tensor] = []
    got = net.generate(ids, 12, temperature=0, stop=[stop], stream=heard.append)[:, 14:]
    assert torch.equal(torch.stack(heard, 1), got)
    for row, wanted in zip(got, free, strict=True):
        ends = (wanted == stop).nonzero()
        n = len(row) if not len(ends) else min(int(ends[0]), len(row))
        assert torch.equal(row[:n], wanted[:n]) and bool((row[n:] == stop).all())
    one = net.generate(ids[:1], 12, temperature=0, stop=stop)
    assert one.shape[1] == 14 + int((free[0] == stop).nonzero()[0]) + 1


@torch.no_grad()
def test_samples_follow_the_seed_and_the_limits():
    net, ids = model(), prompts()
    assert torch.equal(net.generate(ids, 9, seed=3), net.generate(ids, 9, seed=3))
    assert not torch.equal(net.generate(ids, 9, seed=3), net.generate(ids, 9, seed=4))
    greedy = net.generate(ids, 9, temperature=0)
    assert torch.equal(net.generate(ids, 9, top_k=1), greedy)
    assert torch.equal(net.generate(ids, 9, top_p=1e-6), greedy)
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log().expand(4000, -1)
    drawn = torch.bincount(sample(logits, generator=torch.Generator().manual_seed(0)), minlength=4) / 4000
    torch.testing.assert_close(drawn, torch.tensor([0.5, 0.1, 0.3, 0.1]), atol=0.03, rtol=0)
    for temperature in (1e-300, 1e-40, 1e-37):  # logits divided by these overflow
        assert sample(logits[:9], temperature).tolist() == [0] * 9
    assert set(sample(logits, top_p=0.7).tolist()) == {0, 2} == set(sample(logits, top_k=2).tolist())


@pytest.mark.parametrize(
    "change, says",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": 30}, "0 … 29"),
        ({"mask": PADDED.flip(1)}, "on the left"),
        ({"mask": PADDED[:, 1:]}, "like ids"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"ids": prompts().float()}, "integers"),
        ({"ids": prompts() + 30}, "0 … 29"),
        ({"seed": 1, "generator": torch.Generator()}, "not both"),
    ],
)
def test_generate_refuses(change, says):
    with pytest.raises(ValueError, match=says):
        model().generate(**{"ids": prompts(), "max_new_tokens": 4, **change})


def test_tokens_and_states_of_the_wrong_form_are_refused():
    model = LanguageModel(9, max_length=8, dim=8, heads=2, head_dim=4, layers=1, mlp_dim=8).eval()
    ids = torch.ones(2, 1, dtype=torch.long)
    for call in (lambda: model.prefill(ids[:, 0]), lambda: model.step(ids[:, 0], model.start(2))):
        with pytest.raises(ValueError, match=r"ids must be integers \(B, L\), got torch.int64 \(2,\)"):
            call()
    for state in (None, model.prefill(ids)):
        with pytest.raises(TypeError, match=r"state must be the second result of prefill\(\) or step\(\), got "):
            model.step(ids, state)
    for layer in (weft.MultiheadAttention(8, 2, causal=True), weft.MSSA(8, 2, causal=True)):
        with pytest.raises(ValueError, match=r"x must be \(B, L, 8\), got \(2, 8\)"):
            layer.step(torch.ones(2, 8), layer.start(2))


def test_models_that_cannot_generate_say_why():
    with pytest.raises(ValueError, match="causal=True"):
        model(causal=False).generate(prompts(), 4)
    with pytest.raises(ValueError, match=r"eval\(\)"):
        model().train().generate(prompts(), 4)
    with pytest.raises(ValueError, match="use one of: .*combiner-fixed"):
        model("routing").generate(prompts(), 4)


@pytest.fixture(scope="module", params=["bytes", "bpe:300"])
def run(request, tmp_path_factory):
    from weft.lab import train

    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("generate")
    letters = random.Random(0)
    (folder / "text").write_text("".join(letters.choice("abcdefgh äöü.\n") for _ in range(6000)))
    small = dict(layers=1, heads=2, head_dim=4, dim=8, mlp_dim=8, steps=2, batch_size=2, max_length=32, eval_every=2)
    small |= dict(accelerator="cpu", tokenizer=request.param)
    out = folder / "run"
    train(make_config("lm", data=str(folder / "text"), out=str(out), attention="full", eval_batches=1, **small))
    return out


def test_the_command_continues_a_prompt(run, tmp_path):
    words = ["generate", str(run), "--tokens", "40", "--seed", "1", "--device", "cpu"]
    found = CliRunner().invoke(app, [*words, "--prompt", "abc ä"])
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("abc ä")
    assert "40 tokens in" in found.stderr and "tokens/s (full, cpu)" in found.stderr
    (tmp_path / "prompt").write_text("abc ä")
    for more, given in (([], "abc ä"), (["--file", "-"], "abc ä"), (["--file", str(tmp_path / "prompt")], None)):
        assert CliRunner().invoke(app, [*words, *more], input=given).stdout == found.stdout


@pytest.mark.parametrize(("device", "says"), [
    ("npu9x", "must be cpu, cuda, mps or auto"), ("cuda", "finds no NVIDIA GPU"), ("gpu", "finds no NVIDIA GPU"),
])  # fmt: skip
def test_the_command_refuses_other_devices(run, device, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(app, ["generate", str(run), "--prompt", "abc", "--accelerator", device])
    assert found.exit_code == 2 and says in " ".join(found.stderr.replace("│", "").split())


def test_the_command_counts_the_tokens_of_a_text_that_ends_early(run, monkeypatch):
    whole = LanguageModel.generate
    monkeypatch.setattr(LanguageModel, "generate", lambda model, ids, n, *a, **named: whole(model, ids, 3, *a, **named))
    found = CliRunner().invoke(app, ["generate", str(run), "--tokens", "40", "--prompt", "abc", "--device", "cpu"])
    assert "3 tokens in" in found.stderr


def test_the_space_after_a_prompt_is_printed():
    """Decoders of SentencePiece's kind drop the space before the first token."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁Once": 0, "▁upon": 1, "▁a": 2}))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    encode, writer = code_of(Known({}, tokenizer=made.to_str()))
    write = writer(encode("Once upon"))
    assert [write(2), write(0)] == [" a", " Once"]


def test_a_prompt_has_no_end():
    """BERT's tokenizer, for one, puts [CLS] before a text and [SEP] after it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "Once": 2, "upon": 3}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = dict(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.post_processor = tokenizers.processors.TemplateProcessing(**template)
    encode, _ = code_of(Known({}, tokenizer=made.to_str()))
    assert encode("Once upon") == [0, 2, 3] and encode("") == [0]


def test_the_command_refuses(run, tmp_path, monkeypatch):
    def refusal(*words: str, given: str | None = None) -> str:
        found = CliRunner().invoke(app, ["generate", *words], input=given, env={"COLUMNS": "400"})
        assert found.exit_code != 0 and not found.stdout
        return found.output

    assert "top_p must be in (0, 1], got 2.0" in refusal(str(run), "--prompt", "a", "--top-p", "2")
    assert "Overflow" in refusal(str(run), "--prompt", "a", "--seed", str(2**70))
    assert "the prompt is empty" in refusal(str(run), given="")
    assert "not both" in refusal(str(run), "--prompt", "a", "--file", "b")
    assert "does not exist" in refusal(str(run), "--file", str(tmp_path / "none"))
    assert str(tmp_path) in refusal(str(tmp_path), "--prompt", "a")
    (tmp_path / "texts.txt").write_text("a\nbcd\n")
    other = CliRunner().invoke(app, ["predict", str(run), str(tmp_path / "texts.txt")], env={"COLUMNS": "400"})
    assert other.exit_code == 2 and "weft generate" in other.output
    trained = weft.load(run)
    trained.model, trained.config = nn.Linear(1, 1), make_config("digits")
    monkeypatch.setattr(weft.lab.trained, "load", lambda *given: trained)
    assert "has a Linear trained on 'digits'" in refusal(str(run), "--prompt", "a")


@pytest.mark.parametrize("attention", ["full", ["full", "linear"]])
def test_prefill_refuses_another_max_length_than_that_of_the_state(attention):
    decoder = model(attention, positions="rope")
    with pytest.raises(ValueError, match="the state has max_length=20, got max_length=30; pass only one"):
        decoder.prefill(prompts(), state=decoder.start(3, max_length=20), max_length=30)
    _, state = decoder.prefill(prompts()[:, :4], max_length=20)
    decoder.prefill(prompts()[:, 4:], state=state, max_length=20)
