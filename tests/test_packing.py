"""Packed documents: in every mechanism, layer and model, each document is computed as if it were alone."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
from promises import DEVICE, HEAD_DIM, HEADS, noise, qkv, sweep
from test_promises import Largest
from torch.utils.checkpoint import checkpoint

import weft
from weft.core.segments import PADDING, ROUND
from weft.models.crate import CRATELayer

# One token; equal lengths; padding before, between and after documents; a row of padding.
PACKED = torch.tensor(
    [
        [1] * 9 + [5] + [2] * 13 + [7] * 4 + [0] * 2,
        [0] * 29,
        [0] * 3 + [9] * 4 + [0] * 2 + [8] * 17 + [0] * 3,
    ],
    device=DEVICE,
)


def documents(segments):
    """Row and tokens of every document."""
    for row, numbers in enumerate(segments.tolist()):
        for number in dict.fromkeys(n for n in numbers if n):
            start = numbers.index(number)
            yield row, slice(start, start + numbers.count(number))


def compare(packed, alone, tensors, parameters, segments, mask=None, time=2):
    """`packed(*tensors)` against `alone(row, tokens, *tensors)` of each document: outputs and all gradients."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(5)  # random samples are those of the document alone
    out = packed(*tensors)
    real = (segments > 0) if mask is None else (segments > 0) & mask
    real = real.view(*real.shape, 1) if time == 1 else real[:, None, :, None]
    probe = noise(*out.shape, seed=1).to(out.dtype) * real
    inputs = [*tensors, *parameters]
    found = [out * real, *torch.autograd.grad(out, inputs, probe, materialize_grads=True)]
    expected = [torch.zeros_like(x) for x in found]
    for row, at in documents(segments):
        here = (slice(row, row + 1), *[slice(None)] * (time - 1), at)
        own = [x[here].detach().requires_grad_() for x in tensors]
        torch.manual_seed(5)
        answer = alone(row, at, *own)
        grads = torch.autograd.grad(answer, [*own, *parameters], probe[here], materialize_grads=True)
        for whole, part in zip(expected[: len(own) + 1], [answer * real[here], *grads], strict=False):
            whole[here] = part
        for total, part in zip(expected[len(own) + 1 :], grads[len(own) :], strict=True):
            total += part
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    padding = (segments == 0).view(*segments.shape, 1) if time == 1 else (segments == 0)[:, None, :, None]
    assert (out * padding == 0).all()


def compare_mechanism(attn, segments, mask=None, bias=None):
    parameters = [*attn.parameters(), *(bias.parameters() if bias is not None else ())]
    start = {name: value.clone() for name, value in attn.state_dict().items()}

    def alone(row, at, q, k, v):
        attn.load_state_dict(start)  # routing's clusters follow the keys
        return attn(q, k, v, None if mask is None else mask[row : row + 1, at], bias)

    tensors = qkv(segments.shape[1], B=segments.shape[0], H=attn.heads, D=attn.head_dim)
    compare(lambda *x: attn(*x, mask, bias, segments), alone, tensors, parameters, segments, mask)


@sweep()
def test_each_document_equals_the_document_alone(case):
    attn = case.make(**{"max_length": 17} if case.info.needs_max_length else {})  # of a document, not of a row
    compare_mechanism(attn, PACKED)
    bias = weft.RelativeBias(attn.heads, 6).double() if case.info.bias else None
    compare_mechanism(attn.train(), PACKED, noise(*PACKED.shape, seed=2) > -1, bias)


def test_subsampled_samples_where_full_attention_has_variable_lengths(monkeypatch):
    """As on a GPU in half precision."""
    monkeypatch.setattr("weft.core.packing.flash_runs", lambda x, width: True)
    monkeypatch.setattr("weft.attention.full.fused_packed", lambda q, k, v, documents, **options: v)
    attn = weft.make_attention("subsampled", heads=HEADS, head_dim=HEAD_DIM)
    q, k, v = qkv(20)
    segments = weft.Segments.from_lengths([[20]] * len(q), device=q.device)
    torch.manual_seed(0)
    out = attn(q, k, v, segments=segments)
    torch.manual_seed(0)
    torch.testing.assert_close(out, attn(q, k, v))
    assert torch.equal(attn.eval()(q, k, v, segments=segments), v)


def test_a_bias_is_not_asked_beyond_the_longest_document(monkeypatch):
    """On a GPU, documents are padded to a multiple of 64 tokens."""
    monkeypatch.setitem(ROUND, DEVICE, 64)
    attn = weft.make_attention("full", heads=2, head_dim=4).double()
    values = noise(2, 9, 9, seed=3)

    def bias(i, j):
        assert max(i.max(), j.max()) < 9
        return values[torch.arange(2).view(1, 2, 1, 1), i, j]

    q, k, v = qkv(14, B=1, H=2, D=4)
    out = attn(q, k, v, bias=bias, segments=weft.Segments.from_lengths([9, 5], device=q.device))
    for at in (slice(0, 9), slice(9, 14)):
        alone = attn(q[:, :, at], k[:, :, at], v[:, :, at], bias=bias)
        torch.testing.assert_close(out[:, :, at], alone, atol=1e-9, rtol=1e-9)


def test_groups_have_few_shapes_for_kernels(monkeypatch):
    """Triton compiles a kernel again for lengths and addresses that are no multiples of 16."""
    monkeypatch.setitem(ROUND, "cpu", 64)
    monkeypatch.setitem(PADDING, "cpu", 5)
    documents = weft.Segments.from_lengths([[2001], [1990], [700], [130]])
    plan = documents.plan(lambda length: None, None, most=2001)
    assert plan.shapes == [(1, 2000), (1, 704), (1, 192), (1, 2001)]


def test_mechanisms_share_groups_only_if_they_may_be_padded_alike(monkeypatch):
    """193 tokens are four blocks of 64 or of 50, but 256 tokens are four and six."""
    monkeypatch.setitem(ROUND, DEVICE, 64)
    q, k, v = qkv(193)
    segments = weft.Segments.from_lengths([[193]] * len(q), device=q.device)
    for block_size in (64, 50):
        attn = weft.make_attention("bigbird", heads=HEADS, head_dim=HEAD_DIM, block_size=block_size).double()
        torch.testing.assert_close(attn(q, k, v, segments=segments), attn(q, k, v))


LENGTHS = {"routing": 600, "combiner-routing": 600, "sparse": 2100}  # where the default of a longer document differs


@pytest.mark.parametrize("name", [n for n in weft.attentions() if "default" in weft.attention_info(n).length_dependent])
def test_defaults_follow_the_length_of_each_document(name):
    long = LENGTHS.get(name, 8300)
    attn = weft.make_attention(name, heads=1, head_dim=2, causal=True).double().eval()  # centroids move in training
    assert attn.pattern_for(long) != attn.pattern_for(40)
    segments = weft.Segments.from_lengths([40, long, 30])
    q, k, v = qkv(long + 70, B=1, H=1, D=2)
    with torch.no_grad():
        out = attn(q, k, v, segments=segments)
        for at in (slice(0, 40), slice(40, 40 + long), slice(40 + long, None)):
            alone = attn(q[:, :, at], k[:, :, at], v[:, :, at])
            torch.testing.assert_close(out[:, :, at], alone, atol=1e-9, rtol=1e-9)


@sweep(first_setting=True)
def test_weights_of_packed_documents(case, monkeypatch):
    attn, (q, k, v) = case.make(), qkv(29, B=3)
    for multiple in (1, 64):  # lengths of groups as on a CPU, and as on a GPU
        monkeypatch.setitem(ROUND, "cpu", multiple)
        packed = PACKED.clone()  # plans are kept with the tensor
        w = attn.weights(q, k, v, segments=packed)
        torch.testing.assert_close(w @ v, attn(q, k, v, segments=packed), atol=1e-9, rtol=1e-9)
        assert (w * (packed[:, None, :, None] != packed[:, None, None]) == 0).all()


@pytest.mark.parametrize("name", ("linear", "local", "combiner-fixed", "full"))
def test_cost_follows_the_tokens(name):
    """No pairs between documents, and little padding, whatever the lengths."""
    lengths = random.Random(0).choices(range(20, 400), k=40)
    L = sum(lengths)
    q, k, v = qkv(L, B=1, H=1, D=4, dtype=torch.float32, grad=True)
    attn = weft.make_attention(name, heads=1, head_dim=4, causal=True)
    segments = weft.Segments.from_lengths(lengths)
    with Largest() as largest:
        attn(q, k, v, segments=segments).sum().backward()
    assert largest.numel < 400 * L
    for plan in segments.plans.values():
        assert len(plan.index) - L < max(L / 4, PADDING[DEVICE])  # on a GPU, fewer groups are worth more padding


def test_a_batch_without_documents_is_zero():
    attn = weft.make_attention("full", heads=2, head_dim=6)
    q, k, v = qkv(5, grad=True, dtype=torch.float32)
    out = attn(q, k, v, segments=torch.zeros(2, 5, dtype=torch.long))
    out.sum().backward()
    assert (out == 0).all() and (v.grad == 0).all()
    with torch.autocast(q.device.type, torch.bfloat16):
        assert attn(q, k, v, segments=torch.zeros(2, 5, dtype=torch.long)).dtype is torch.bfloat16


def test_routing_learns_once_and_again_under_checkpointing():
    """Several groups are one training call, and a repeated call uses the centroids of the first."""
    found = []
    for repeated in (False, True):
        torch.manual_seed(0)
        attn = weft.make_attention("routing", heads=1, head_dim=6, causal=True, clusters=3).double().train()
        for step in range(3):
            q, k, v = qkv(29, B=3, H=1, seed=step, grad=True)
            if repeated:
                out = checkpoint(attn, q, k, v, segments=PACKED, use_reentrant=False)
            else:
                out = attn(q, k, v, segments=PACKED)
            found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        found.append((attn.clusters.centroids, attn.clusters.count))
    assert found[3][1].sum() == (PACKED > 0).sum()
    for once, again in zip(found[:4], found[4:], strict=True):
        for a, b in zip(once, again, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("same", [False, True])
def test_routing_repeats_packed_forwards_in_flight(same):
    found = []
    for repeated in (False, True):
        torch.manual_seed(0)
        attn = weft.make_attention("routing", heads=1, head_dim=6, clusters=3, decay=0.5).double().train()
        qkvs = [qkv(29, B=3, H=1, seed=0 if same else n, grad=True) for n in range(4)]
        projected = [[2 * x for x in each] for each in qkvs]
        call = functools.partial(checkpoint, attn, use_reentrant=False) if repeated else attn
        outs = [call(*each, segments=PACKED) for each in projected]
        found.append(torch.autograd.grad(sum(out.square().sum() for out in outs), [x for each in qkvs for x in each]))
    for once, again in zip(*found, strict=True):
        torch.testing.assert_close(once, again)


def test_nan_in_padding_has_no_effect():
    segments = torch.tensor([[1, 1, 1, 0, 2, 2]])
    for causal in (False, True):
        layer = weft.MultiheadAttention(8, 2, attention="linear", causal=causal)
        x = torch.randn(1, 6, 8)
        dirty = x.clone()
        dirty[:, 3] = float("nan")
        found = []
        for tokens in (x, dirty):
            layer.zero_grad()
            out = layer(tokens, segments=segments)
            out[segments > 0].sum().backward()
            found.append([out[segments > 0], *(p.grad.clone() for p in layer.parameters())])
        for clean, poisoned in zip(*found, strict=True):
            torch.testing.assert_close(clean, poisoned)


def test_segments_that_were_changed_are_read_again():
    """Also through memory that NumPy shares, which has no version."""
    attn, tokens = weft.make_attention("local", heads=HEADS, head_dim=HEAD_DIM), qkv(6)
    segments = torch.tensor([[1, 1, 1, 2, 2, 0]] * 2, device=DEVICE)
    shared = segments.numpy() if DEVICE == "cpu" else segments
    attn(*tokens, segments=segments)
    shared[:, 2] = 2
    torch.testing.assert_close(attn(*tokens, segments=segments), attn(*tokens, segments=segments.clone()))


@pytest.mark.parametrize("kind", ("numbers", "lengths"))
def test_training_after_the_same_segments_in_inference_mode(kind):
    """Their tables are kept, and some are saved for the backward."""
    segments = PACKED.clone() if kind == "numbers" else weft.Segments.from_lengths([[9, 13], [20], [3, 4]], 29, DEVICE)
    attn = weft.make_attention("linear", heads=HEADS, head_dim=HEAD_DIM)
    text = weft.models.LanguageModel(9, max_length=29, dim=8, heads=2, head_dim=4, layers=1, mlp_dim=8).to(DEVICE)
    ids = torch.zeros_like(PACKED)
    with torch.inference_mode():
        attn(*qkv(29, B=3), segments=segments), text(ids, segments=segments)
    attn(*(x.requires_grad_() for x in qkv(29, B=3)), segments=segments).sum().backward()
    text(ids, segments=segments).sum().backward()


def test_lengths_give_the_same_documents_as_numbers():
    numbers = torch.tensor([[3, 3, 3, 1, 1, 0], [2, 2, 2, 2, 2, 2]])
    made, read = weft.Segments.from_lengths([[3, 2], [6]]), weft.Segments.from_tensor(numbers)
    for a, b in ((made.numbers, read.numbers), (made.positions, read.positions), (made.mask, read.mask)):
        assert torch.equal(a, b)
    assert made.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert weft.Segments.from_tensor(numbers) is read  # read from the GPU only once
    for lengths in (np.array([[3, 2], [6, 1]]), torch.tensor([[3, 2], [6, 1]]), [list(np.array([3, 2])), [6, 1]]):
        assert weft.Segments.from_lengths(lengths).lengths.tolist() == [3, 2, 6, 1]
    numbers[0, 5] = 1
    assert weft.Segments.from_tensor(numbers).lengths.tolist() == [3, 3, 6]


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        (torch.tensor([[1, 1, 2, 1]]), ValueError, "segment 1 occurs twice in row 0, again at token 3"),
        (torch.tensor([[1, -1, 0, 0]]), ValueError, "got -1"),
        (torch.ones(1, 5, dtype=torch.long), ValueError, r"\(1, 4\) like the tokens, got \(1, 5\)"),
        (torch.ones(4, dtype=torch.long), ValueError, "must be \\(B, L\\)"),
        (torch.ones(1, 4), TypeError, "integers"),
        (torch.ones(1, 4, dtype=torch.bool), TypeError, "use mask="),
        ([[1, 1, 1, 1]], TypeError, "weft.Segments, got list"),
        (torch.ones(1, 4, dtype=torch.long, device="meta"), ValueError, "export without segments"),
    ],
)
def test_what_cannot_be_segments_is_refused(segments, error, message):
    attn = weft.make_attention("full", heads=2, head_dim=6)
    with pytest.raises(error, match=message):
        attn(*qkv(4, B=1), segments=segments)


def test_cross_attention_is_refused():
    attn, (q, k, v) = weft.make_attention("full", heads=2, head_dim=6), qkv(4, B=1)
    with pytest.raises(ValueError, match="self-attention"):
        attn(q[:, :, :2], k, v, segments=torch.ones(1, 4, dtype=torch.long))
    layer, x = weft.MultiheadAttention(8, 2), torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match="remove context="):
        layer(x, context=x, segments=torch.ones(1, 4, dtype=torch.long))


def test_a_bias_of_single_rows_is_refused():
    """Documents are gathered into other rows."""

    def bias(i, j):
        return (i - j) * noise(2, HEADS, 1, 1, seed=1)

    q, _, _ = qkv(10, B=2)
    attn = weft.make_attention("full", heads=HEADS, head_dim=HEAD_DIM)
    segments = torch.tensor([[1] * 6 + [0] * 4, [1] * 10], device=q.device)
    for call in (attn, attn.weights):
        with pytest.raises(ValueError, match="same for all rows, but this one has values for 2"):
            call(q, q, q, None, bias, segments)


def test_lengths_that_cannot_be_are_refused():
    for lengths, more, message in (
        ([0, 3], {}, "of at least 1, got"),
        ([2.5], {}, "integers"),
        (torch.tensor([2.5]), {}, "integers"),
        ([3, 4], {"length": 6}, "7 tokens in total, more than length=6"),
        ([], {}, "length, the tokens of a row, must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            weft.Segments.from_lengths(lengths, **more)
    for one in (5, torch.tensor(5)):
        with pytest.raises(TypeError, match=r"a list of tokens per document, such as \[5\], got 5"):
            weft.Segments.from_lengths(one)


def test_a_compiled_model_packs_outside_its_graphs():
    attn = weft.make_attention("combiner-fixed", heads=2, head_dim=6, causal=True).double()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attn(*x[:3], segments=x[3]) * 2, backend="aot_eager")
    for numbers in ([1, 1, 2, 2, 2], [1, 1, 1, 1, 2], [0, 3, 3, 3, 3]):
        segments = torch.tensor([numbers])
        tensors = qkv(5, B=1)
        torch.testing.assert_close(compiled(*tensors, segments), 2 * attn(*tensors, segments=segments))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="compile without fullgraph=True"):
        torch.compile(lambda *x: attn(*x[:3], segments=x[3]), backend="aot_eager", fullgraph=True)(*tensors, segments)


# Layers and models.


def layers():
    dim = {"dim": 8, "heads": 2}
    return {
        "rotary": weft.MultiheadAttention(**dim, attention="linear", causal=True, rope=True),
        "grouped": weft.MultiheadAttention(**dim, kv_heads=1, attention="longformer", window=4),
        "input": weft.MultiheadAttention(
            **dim, attention="combiner-axial", block_size=3, key_summary="wsum_proj", input_dim=8
        ),
        "mixed": weft.MixedAttention(**dim, attentions=["local", ("logsparse", {})]),
        "mssa": weft.MSSA(**dim, attention="bigbird", block_size=2),
        "block": weft.layers.EncoderBlock(8, weft.MultiheadAttention(**dim, attention="logsparse"), mlp_dim=16),
        "crate": CRATELayer(**dim),
        "cached": weft.CachedAttention(weft.MultiheadAttention(**dim, attention="bigbird", block_size=2), length=5),
    }


@pytest.mark.parametrize("kind", layers())
def test_layers_take_segments(kind):
    torch.manual_seed(0)
    layer = layers()[kind].double()
    if kind == "cached":
        layer(torch.randn(2, 7, 8).double())  # fill the cache
    layer.eval()
    mask = noise(*PACKED.shape, seed=2) > -1
    compare(
        lambda x: layer(x, mask, segments=PACKED) * (PACKED > 0)[..., None],
        lambda row, at, x: layer(x, mask[row : row + 1, at]),
        [noise(3, 29, 8)],
        list(layer.parameters()),
        PACKED,
        mask,
        time=1,
    )


@pytest.mark.parametrize("kind", [*layers(), "first", "crate text"])
@pytest.mark.parametrize("wrong", ["floats", "too short"])
def test_layers_check_a_mask_before_documents_read_it(kind, wrong):
    """A mask that is too short would hide tokens of other rows."""
    mask = torch.ones(3, 29) if wrong == "floats" else torch.ones(3, 28, dtype=torch.bool)
    x, options = torch.randn(3, 29, 8), {"segments": PACKED}
    if kind == "crate text":
        layer, x = readers()["crate"], torch.randint(11, PACKED.shape)
    elif kind == "first":
        layer, options = weft.MultiheadAttention(8, 2, attention="local", block_size=4), {**options, "first": True}
    else:
        layer = layers()[kind]
    with pytest.raises(TypeError if wrong == "floats" else ValueError, match="mask must be"):
        layer(x, mask, **options)


def test_each_document_is_a_sample_of_the_cache():
    """Training on packed documents writes what training on one document per row writes."""
    made = weft.CachedAttention(weft.MultiheadAttention(8, 2), length=5).double()
    x = noise(3, 29, 8)
    packed, apart = made, copy.deepcopy(made)
    packed(x, segments=PACKED)
    rows = torch.zeros(6, 17, 8).double()
    mask = torch.zeros(6, 17, dtype=torch.bool)
    for number, (row, at) in enumerate(documents(PACKED)):
        rows[number, : at.stop - at.start], mask[number, : at.stop - at.start] = x[row, at], True
    apart(rows, mask)
    torch.testing.assert_close(packed.cache.cache, apart.cache.cache)
    stream = weft.CachedAttention(weft.MultiheadAttention(8, 2), scope="stream")
    with pytest.raises(ValueError, match="one document per row"):
        stream(x.float(), segments=PACKED)


@pytest.mark.parametrize("positions", ("alibi", "rope", "learned", "sinusoid", "none"))
def test_language_models_start_again_with_each_document(positions):
    torch.manual_seed(0)
    model = weft.models.LanguageModel(
        11, max_length=17, dim=8, heads=2, head_dim=4, layers=2, mlp_dim=16, attention="local", positions=positions
    )
    model.double().eval()
    ids = torch.randint(11, PACKED.shape)
    with torch.no_grad():
        logits = model(ids, segments=PACKED)
        for row, at in documents(PACKED):
            torch.testing.assert_close(logits[row, at], model(ids[row : row + 1, at])[0], atol=1e-9, rtol=1e-9)
    with pytest.raises(ValueError, match="18 tokens exceed max_length=17"):
        model(ids[:, :18], segments=torch.ones(3, 18, dtype=torch.long))


def readers():
    small = {"dim": 8, "heads": 2, "layers": 2}
    text = {**small, "head_dim": 4, "mlp_dim": 16, "max_length": 18}
    return {
        "cls": weft.models.TextClassifier(11, 3, **text, attention="logsparse"),
        "first": weft.models.TextClassifier(11, 3, **text, pooling="first", positions="learned"),
        "mean": weft.models.TextClassifier(11, 3, **text, pooling="mean", attention="bigbird"),
        "crate": weft.models.CRATEText(11, 3, **small, attention="logsparse"),
        "crate mean": weft.models.CRATEText(11, 3, **small, pooling="mean"),
    }


@pytest.mark.parametrize("kind", readers())
def test_classifiers_answer_for_each_document(kind):
    torch.manual_seed(0)
    model = readers()[kind].double().eval()
    ids = torch.randint(11, PACKED.shape)  # 0 is padding within a document
    with torch.no_grad():
        logits = model(ids, segments=PACKED)
        alone = [model(ids[row : row + 1, at])[0] for row, at in documents(PACKED)]
        torch.testing.assert_close(logits, torch.stack(alone), atol=1e-9, rtol=1e-9)
        assert model(ids, segments=torch.zeros_like(PACKED)).shape == (0, 3)


def test_matchers_pair_documents():
    torch.manual_seed(0)
    model = weft.models.TextMatcher(11, max_length=18, dim=8, heads=2, head_dim=4, layers=1, mlp_dim=16).double().eval()
    first, second = torch.randint(1, 11, (2, 1, 9))
    a, b = (torch.tensor([numbers]) for numbers in ([1] * 4 + [2] * 5, [1] * 7 + [2] * 2))
    with torch.no_grad():
        logits = model(first, second, first_segments=a, second_segments=b)
        alone = [model(first[:, :4], second[:, :7])[0], model(first[:, 4:], second[:, 7:])[0]]
        torch.testing.assert_close(logits, torch.stack(alone), atol=1e-9, rtol=1e-9)
        with pytest.raises(ValueError, match="same number of documents, got 2 and 1"):
            model(first, second, first_segments=a)


def test_language_model_tasks_predict_within_documents():
    from weft.lab import make_config
    from weft.tasks.text import Bytes

    torch.manual_seed(0)
    model = weft.models.LanguageModel(256, max_length=17, dim=8, heads=2, head_dim=4, layers=1, mlp_dim=16).eval()
    task, config, rows = Bytes(), make_config("text"), torch.randint(256, PACKED.shape).to(torch.uint8)
    with torch.no_grad():
        loss = task.loss(model, {"bytes": rows, "segments": PACKED}, config)
        scores = task.score(model, {"bytes": rows, "segments": PACKED})
        alone = [
            task.score(model, {"bytes": rows[row : row + 1, at]})
            for row, at in documents(PACKED)
            if at.stop - at.start > 1
        ]
    for name in ("loss", "count"):
        torch.testing.assert_close(scores[name].sum(), sum(score[name].sum() for score in alone))
    torch.testing.assert_close(loss, scores["loss"].sum() / scores["count"].sum())
