"""The text encoder, classifier and matcher, and the study's sizes."""

from __future__ import annotations

from functools import partial

import promises
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.attention import make_attention
from weft.layers import MixedAttention
from weft.models import (
    CRATE,
    CRATEMAE,
    CRATEText,
    ImageClassifier,
    LanguageModel,
    TextClassifier,
    TextEncoder,
    TextMatcher,
    lra,
)
from weft.models.language import SegmentClassifier, TwoSegments
from weft.models.presets import MIXED, STUDY_ATTENTIONS, TASKS
from weft.models.sizes import SizeRow, checkpoint_size, study_rows
from weft.models.tagger import TokenClassifier

VOCAB, CLASSES = 13, 3
SMALL = dict(max_length=40, dim=8, heads=2, head_dim=6, layers=2, mlp_dim=10)


def classifier(*, seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> TextClassifier:
    torch.manual_seed(seed)
    return TextClassifier(VOCAB, CLASSES, **{**SMALL, **options}).to(dtype).eval()


def documents(*lengths: int, width: int | None = None, seed: int = 0) -> torch.Tensor:
    """Random documents of these lengths, padded on the right with zeros to `width`."""
    g = torch.Generator("cpu").manual_seed(seed)
    ids = torch.zeros(len(lengths), width or max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, VOCAB, (length,), generator=g, device="cpu")
    return ids


def bidirectional(keep=lambda info: True) -> list[tuple[str, dict]]:
    """Every mechanism that an encoder can use, with the small settings of the registry's sweeps."""
    return [(c.name, dict(c.options)) for c in promises.cases(causal=False) if keep(c.info)]


ALL = bidirectional()
FIXED_PATTERN = bidirectional(lambda info: not info.length_dependent)


def every_choice_and_pooling(choices: list[tuple[str, dict]]) -> list[tuple[tuple[str, dict], str]]:
    return [(choice, "mean") for choice in choices] + [(("full", {}), pooling) for pooling in ("cls", "first")]


# The encoder.


def test_encoder_equals_pytorchs_own():
    """The same model in another library: PyTorch's pre-norm layers with our weights."""
    torch.manual_seed(0)
    E, H, A = 12, 3, 4
    ours = TextEncoder(
        VOCAB, max_length=20, dim=E, heads=H, head_dim=A, layers=2, mlp_dim=16, pooling="mean", dtype=torch.float64
    ).eval()
    ids = documents(9, 6)
    positions = weft.layers.sinusoids(9, E, dtype=torch.float64)
    x = ours.embed(ids) + positions
    for block in ours.blocks:
        theirs = nn.TransformerEncoderLayer(
            E,
            H,
            16,
            0.0,
            lambda t: F.gelu(t, approximate="tanh"),
            layer_norm_eps=1e-6,
            batch_first=True,
            norm_first=True,
            dtype=torch.float64,
        )
        inner = block.attention
        with torch.no_grad():
            theirs.self_attn.in_proj_weight.copy_(torch.cat([inner.q.weight, inner.k.weight, inner.v.weight]))
            theirs.self_attn.out_proj.weight.copy_(inner.out.weight)
            theirs.self_attn.in_proj_bias.zero_()
            theirs.self_attn.out_proj.bias.zero_()
        for mine, its in (
            (block.feedforward.up, theirs.linear1),
            (block.feedforward.down, theirs.linear2),
            (block.attention_norm, theirs.norm1),
            (block.feedforward_norm, theirs.norm2),
        ):
            its.load_state_dict(mine.state_dict())
        x = theirs(x, src_key_padding_mask=ids == 0)
    x = ours.norm(x)
    expected = torch.stack([x[0, :9].mean(0), x[1, :6].mean(0)])
    torch.testing.assert_close(ours(ids), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("choice", "pooling"), every_choice_and_pooling(FIXED_PATTERN))
def test_padding_and_batch_mates_do_not_change_logits(choice, pooling):
    model = classifier(attention=choice, pooling=pooling)
    alone = documents(11)
    batch = torch.cat([F.pad(alone, (0, 8)), documents(19, 1, seed=1)])
    torch.testing.assert_close(model(batch)[:1], model(alone), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("choice", "pooling"), every_choice_and_pooling(ALL))
def test_empty_document_is_finite_and_leaves_the_others_alone(choice, pooling):
    model = classifier(attention=choice, pooling=pooling)
    ids = documents(0, 9)
    logits = model(ids)
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(logits[1:], model(ids[1:]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("packed", (False, True), ids=("padded", "packed"))
@promises.sweep(first_setting=True, causal=False)
def test_the_token_that_is_read_does_not_need_the_others(case, packed):
    """Outputs and gradients in training, where the last block computes only this token, are those of all tokens."""
    lengths = (17, 5, 11)
    ids, options = documents(*lengths), {}
    if packed:
        ids, options = ids[ids > 0][None], {"segments": weft.Segments.from_lengths(list(lengths))}
    choice, found = (case.name, dict(case.options)), []
    for read in (lambda model: model(ids, **options), lambda model: model.tokens(ids, **options)[0][:, 0]):
        torch.manual_seed(0)
        encoder = TextEncoder(
            VOCAB, **SMALL, attention=choice[0], attention_options=choice[1], dropout=0.0, dtype=torch.float64
        )
        out = read(encoder.train())
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in encoder.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found)
    encoder.eval()
    outputs = []
    for encoder.only_read in (False, True):
        torch.manual_seed(0)
        outputs.append(encoder(ids, **options))
    torch.testing.assert_close(*outputs)


def test_a_mask_takes_the_place_of_nonzero_ids():
    model = classifier()
    ids = documents(5, 9)
    torch.testing.assert_close(model(ids, ids > 0), model(ids), rtol=0, atol=0)
    everything = torch.ones_like(ids, dtype=torch.bool)
    assert (model(ids, everything)[0] - model(ids)[0]).abs().max() > 1e-6


@promises.sweep(first_setting=True, causal=False)
def test_documents_without_padding_need_no_mask(case):
    options = {"attention": case.name, "attention_options": dict(case.options), "dtype": torch.float64}
    encoder, ids = TextEncoder(VOCAB, **SMALL, **options).eval(), documents(17, 17)
    outputs = []
    for encoder.padded in (True, False):
        torch.manual_seed(0)
        outputs.append(encoder(ids))
    torch.testing.assert_close(*outputs)
    assert encoder._embedded(ids, None, None)[2] is None and encoder.tokens(ids)[1].all()


def test_cls_is_masked_with_the_first_token():
    encoder = classifier().encoder
    _, mask = encoder.tokens(torch.tensor([[0, 4, 5], [4, 5, 0]]))
    assert mask.tolist() == [[False, False, True, True], [True, True, True, False]]


@pytest.mark.parametrize("attention", ["bigbird", ("sparse", {"cls": True})])
@pytest.mark.parametrize("packed", [False, True])
def test_a_masked_class_token_alone_is_that_of_all_tokens(attention, packed):
    encoder = classifier(attention=attention).encoder
    ids = torch.tensor([[0, 0, 4, 5, 6], [4, 5, 7, 0, 0]])
    segments = torch.tensor([[1, 1, 1, 1, 2]]).expand(2, -1) if packed else None
    wanted = encoder(ids, segments=segments)
    encoder.only_read = True  # as in training
    torch.testing.assert_close(encoder(ids, segments=segments), wanted)


def test_errors_say_what_to_do():
    model = classifier(max_length=10)
    model(documents(9))
    with pytest.raises(ValueError, match="and the CLS token exceed max_length=10: truncate the documents to 9"):
        model(documents(10))
    without = classifier(max_length=10, pooling="mean")
    without(documents(10))
    with pytest.raises(ValueError, match="truncate the documents to 10"):
        without(documents(11))
    with pytest.raises(ValueError, match="integers"):
        model(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="integers"):
        model(torch.ones(5, dtype=torch.long))
    with pytest.raises(ValueError, match="row of zeros"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="mask must be boolean"):
        model(documents(5), torch.ones(1, 5))
    with pytest.raises(ValueError, match="mask must be boolean"):
        model(documents(5), torch.ones(1, 6, dtype=torch.bool))
    for options, error, match in (
        ({"pooling": "max"}, ValueError, "pooling must be"),
        ({"positions": "alibi"}, ValueError, "positions must be"),
        ({"attention": "fulll"}, ValueError, "did you mean 'full'"),
        ({"attention_options": {"width": 3}}, TypeError, "no option 'width'"),
        ({"atention": "full"}, TypeError, "atention"),
        ({"layers": 0}, ValueError, "at least 1"),
        ({"causal": True}, ValueError, "pooling='mean'"),
        ({"attention": ["full", "linear"], "attention_options": {"rank": 2}}, TypeError, "is a list"),
        ({"attention": lambda layer: "full", "attention_options": {"rank": 2}}, TypeError, "is a function"),
        ({"attention": make_attention("full", heads=2, head_dim=6)}, TypeError, "share one mechanism"),
    ):
        with pytest.raises(error, match=match):
            classifier(**options)
    with pytest.raises(ValueError, match="linear does not support ALiBi.*choose positions rope"):
        LanguageModel(20, max_length=8, attention="linear", dim=8, heads=2, layers=1)


def test_learned_positions():
    model = classifier(positions="learned")
    fixed = classifier()
    count = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in fixed.parameters())
    assert count == SMALL["max_length"] * SMALL["dim"]
    table = model.encoder.positions
    assert 0.01 < table.std() < 0.03
    model(documents(9)).sum().backward()
    used = table.grad.abs().sum(1) > 0
    assert used[:10].all() and not used[10:].any()  # nine tokens and CLS


@pytest.mark.parametrize("positions", ["rope", "none"])
def test_modern_encoder_reads_positions_only_in_attention(positions):
    model = classifier(positions=positions, norm="rms", qk_norm=True, pooling="mean", attention="full")
    assert isinstance(model.encoder.norm, nn.RMSNorm) and model.encoder.blocks[0].attention.q_norm is not None
    ids = documents(9, 6)
    turned = torch.stack([ids[0].flip(0), torch.cat([ids[1, :6].flip(0), ids[1, 6:]])])
    assert torch.allclose(model(ids), model(turned)) == (positions == "none")  # without positions: a bag of words
    packed = torch.cat([ids[0], ids[1, :6]])[None]
    segments = torch.tensor([[1] * 9 + [2] * 6])
    torch.testing.assert_close(model(packed, segments=segments), model(ids))


@pytest.mark.parametrize("positions", ["sinusoid", "rope", "none"])
def test_the_class_token_starts_with_a_gradient_like_the_others(positions):
    torch.manual_seed(0)
    model = classifier(positions=positions, norm="rms", qk_norm=True, pooling="cls", attention="full")
    model(documents(9)).square().sum().backward()
    assert 0 < model.encoder.cls.grad.norm() < 10 * model.encoder.embed.weight.grad.norm()


def test_start_values():
    torch.manual_seed(0)
    model = TextClassifier(200, 2, max_length=8, dim=64, heads=16, head_dim=8, layers=1, mlp_dim=32)
    encoder, block = model.encoder, model.encoder.blocks[0]
    assert abs(encoder.embed.weight.std() - 1) < 0.05 and (encoder.cls == 0).all()
    assert 0 < block.feedforward.up.bias.abs().max() < 1e-5
    bound = (6 / (64 + 128)) ** 0.5  # Xavier: the bound shrinks as the layer gets wider
    assert 0.95 * bound < block.attention.q.weight.abs().max() <= bound
    assert abs(model.head[0].weight.std() - 64**-0.5) < 0.01 and (model.head[0].bias == 0).all()


# What `attention` may be.


def test_each_layer_draws_its_own_random_blocks():
    seeds = [b.attention.attention.seed for b in classifier(attention="bigbird", layers=3).encoder.blocks]
    assert seeds == [0, 1, 2]
    shifted = classifier(attention=("bigbird", {"seed": 7}), layers=2)
    assert [b.attention.attention.seed for b in shifted.encoder.blocks] == [7, 8]
    exact = classifier(attention=lambda layer: ("bigbird", {"seed": 5}), layers=2)
    assert [b.attention.attention.seed for b in exact.encoder.blocks] == [5, 5]


def test_a_function_chooses_per_layer():
    def choose(layer):
        return ["full", ("local", {"block_size": 3}), ["full", "linear"]][layer]

    first, second, third = (b.attention for b in classifier(attention=choose, layers=3).encoder.blocks)
    assert first.attention.name == "full" and second.attention.block_size == 3
    assert isinstance(third, MixedAttention)
    ready = classifier(attention=lambda layer: make_attention("full", heads=2, head_dim=6), layers=2)
    torch.testing.assert_close(ready(documents(7)), classifier()(documents(7)), rtol=0, atol=0)


def test_head_can_be_one_linear_layer():
    assert [type(m) for m in classifier(head_width=0).head] == [nn.Linear]
    assert [m.out_features for m in classifier(head_width=4).head if isinstance(m, nn.Linear)] == [4, CLASSES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_in_is_dtype_out(dtype):
    exact, rounded = classifier(), classifier(dtype=dtype)
    ids = documents(9, 5)
    got = rounded(ids)
    assert got.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(got.double(), exact(ids), rtol=tolerance, atol=tolerance)


def test_compiles_without_a_break():
    model = classifier(attention="linear", layers=1)
    ids = documents(9, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids))


# Two documents.


def test_matcher_encodes_both_documents_with_one_encoder():
    torch.manual_seed(0)
    model = TextMatcher(VOCAB, **SMALL, dtype=torch.float64).eval()
    a, b = documents(9, 4), documents(6, 12, seed=1)
    x, _ = model.encoder.tokens(a)
    y, _ = model.encoder.tokens(b)
    expected = model.head(torch.cat([x[:, 0], y[:, 0]], -1))
    torch.testing.assert_close(model(a, b), expected, rtol=0, atol=0)
    assert (model(a, b) - model(b, a)).abs().max() > 1e-6
    padded = F.pad(a, (0, 5))
    torch.testing.assert_close(model(padded, b), model(a, b))
    torch.testing.assert_close(model(padded, b, padded > 0, b > 0), model(a, b))
    with pytest.raises(ValueError, match="same number of documents"):
        model(a, b[:1])


# The study's models.

COUNTS = {  # byte 6-8, byte 1-48, Listops 6-8, Listops 1-48, matching 4-4, matching 1-16
    "full": (20_089_858, 9_581_058, 19_983_370, 9_474_570, 1_087_618, 690_946),
    "linformer": (20_185_954, 9_597_074, 20_175_466, 9_506_586, 1_343_618, 754_946),
    "longformer": (24_808_450, 14_299_650, 24_701_962, 14_193_162, 1_284_226, 887_554),
    "sinkhorn": (19_045_250, 8_528_450, 18_926_474, 8_409_674, 1_090_818, 691_746),
    "synthesizer": (20_019_202, 9_510_402, 26_130_442, 15_621_642, 5_183_618, 4_786_946),
}


@pytest.mark.parametrize("attention", STUDY_ATTENTIONS)
def test_exact_parameter_counts(attention):
    rows = [row for task in ("imdb-byte", "listops", "matching") for row in study_rows(task, [attention])]
    assert tuple(row.published for row in rows) == COUNTS.get(attention, COUNTS["full"])
    if attention not in ("longformer", "sinkhorn"):
        assert all(row.parameters == row.published for row in rows)
    if attention == "longformer":  # without the projections that nothing uses
        assert tuple(row.parameters for row in rows) == COUNTS["full"]


TABLE_8 = """
bigbird 779 659 230 110 229 109 13 8.0
linear 779 659 230 110 229 109 13 8.0
linformer 780 659 232 110 231 109 16 8.7
local 779 659 230 110 229 109 13 8.0
longformer 833 713 284 164 283 163 15 11
performer 779 659 230 110 229 109 13 8.0
sinkhorn 767 647 218 98 217 97 13 8.0
sparse 779 659 230 110 229 109 13 8.0
synthesizer 761 641 230 109 300 179 60 55
full 779 659 230 110 229 109 13 8.0
"""


def run_size(*arguments: str) -> str:
    from typer.testing import CliRunner

    from weft.cli import app

    result = CliRunner().invoke(app, ["size", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def cells_of(output: str) -> list[list[str]]:
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_size_command_prints_table_8():
    rows = cells_of(run_size())
    assert len(rows) == 80
    for line in TABLE_8.split("\n")[1:-1]:
        name, *printed = line.split()
        mine = [row for row in rows if row[0] == name]
        assert [row[4] for row in mine] == printed  # exactly, by the published code's count
        assert [row[5] for row in mine] == printed
        assert [row[6] == "1.000" for row in mine] == [True, False] * 4
        if name != "longformer":
            assert all(abs(float(row[3]) - float(p)) <= 1 for row, p in zip(mine, printed, strict=True))


def test_size_command_takes_any_shape_and_refuses_the_unknown():
    from typer.testing import CliRunner

    from weft.cli import app

    shapes = [row[1] for row in cells_of(run_size("listops", "--attention", "linear", "--all"))]
    assert shapes == ["6x8", "3x16", "2x24", "1x48"]
    (row,) = cells_of(run_size("imdb-byte", "--attention", "full", "--layers", "2", "--heads", "3"))
    with torch.device("meta"):
        count = sum(p.numel() for p in lra("imdb-byte", "full", 2, 3).parameters())
    assert row[:3] == ["full", "2x3", f"{count:,}"] and row[5] == "-"
    for wrong in (["nonsense"], ["--attention", "nonsense"], ["--layers", "3"]):
        assert CliRunner().invoke(app, ["size", *wrong]).exit_code == 2


def test_sizes_are_rounded_up():
    mib = 2**20 / 12
    assert [checkpoint_size(round(x * mib)) for x in (7.91, 8.64, 9.85, 9.95, 12.01)] == [
        "8.0",
        "8.7",
        "9.9",
        "10",
        "13",
    ]
    assert SizeRow("x", "1x1", 1, 1).printed == ""


def test_study_models_have_the_studys_parts():
    with torch.device("meta"):
        listops, text, pair = lra("listops", "performer"), lra("imdb-byte", "performer"), lra("matching", "sinkhorn")
        sinkhorn, mixed = lra("imdb-token", "sinkhorn", 1, 48), lra("matching", "mixed", 1, 16)
        longer = lra("listops", "local", attention_options={"block_size": 10}, vocab=20, dropout=0.0)
    assert isinstance(pair, TextMatcher) and isinstance(listops, TextClassifier)
    assert listops.encoder.blocks[0].attention.attention.projection.shape == (2, 64)
    assert text.encoder.blocks[0].attention.attention.kernel == "relu"
    assert sinkhorn.encoder.cls is None and sinkhorn.encoder.pooling == "mean" and len(sinkhorn.head) == 1
    assert sinkhorn.encoder.max_length == 500 and text.encoder.max_length == 1001 and pair.encoder.max_length == 4000
    assert [b.attention.name for b in mixed.encoder.blocks[0].attention.blocks] == list(MIXED)
    assert {b.heads for b in mixed.encoder.blocks[0].attention.blocks} == {2} and len(MIXED) == 8
    assert longer.encoder.blocks[0].attention.attention.block_size == 10 and longer.encoder.vocab == 20
    assert lra("matching", "bigbird", 2, 2).encoder.blocks[1].attention.attention.dropout == 0.0
    with pytest.raises(ValueError, match="unknown task"):
        lra("imdb")
    with pytest.raises(ValueError, match="both layers and heads"):
        lra("listops", layers=2)
    with pytest.raises(ValueError, match="must be divisible"), torch.device("meta"):
        lra("matching", "mixed", 4, 4)


def test_another_kernel_or_pattern_replaces_the_studys_options_of_its_own():
    with torch.device("meta"):
        relu = lra("listops", "performer", 1, 1, attention_options={"kernel": "relu"})
        strided = lra("listops", "sparse", 1, 1, attention_options={"pattern": "strided"})
    assert relu.encoder.blocks[0].attention.attention.kernel == "relu"
    sparse = strided.encoder.blocks[0].attention.attention
    assert sparse.pattern == "strided" and sparse.block_size == 50 and sparse.cls and sparse.one_way
    with pytest.raises(ValueError, match="remove features=4"):
        lra("listops", "performer", 1, 1, attention_options={"kernel": "relu", "features": 4})


@pytest.mark.parametrize("attention", [*STUDY_ATTENTIONS, "mixed"])
def test_every_study_model_runs(attention):
    """Padding and packing do not change the scores if the pattern does not depend on the length."""
    torch.manual_seed(0)
    small = dict(dim=16, head_dim=4, mlp_dim=16, dtype=torch.float64)
    for task in TASKS:
        model = lra(task, attention, 1, 8, vocab=VOCAB, **{**small, "max_length": 130}).eval()
        ids = documents(70, 120)
        arguments = (ids, ids.flip(0)) if TASKS[task].pairs else (ids,)
        logits = model(*arguments)
        assert logits.shape == (2, TASKS[task].classes) and logits.isfinite().all()
        longer = [F.pad(x, (0, 5)) for x in arguments]
        if attention != "mixed":
            torch.testing.assert_close(model(*longer), logits, rtol=1e-8, atol=1e-10)
        if attention != "mixed" and len(arguments) == 1:
            packed = model(ids[ids > 0][None], True, weft.Segments.from_lengths((ids > 0).sum(1).tolist()))
            torch.testing.assert_close(packed, logits, rtol=1e-8, atol=1e-10)


def test_models_are_made_on_the_given_device_and_in_the_given_dtype():
    size = dict(dim=16, heads=2, layers=1)
    text = dict(vocab=VOCAB, max_length=20, head_dim=8, mlp_dim=32, **size)
    ids, images = torch.randint(1, VOCAB, (2, 9)), torch.rand(2, 3, 16, 16)
    calls = [
        (partial(TextClassifier, classes=3, **text), ids),
        (partial(TextMatcher, **text), ids, ids),
        (partial(LanguageModel, **text), ids),
        (partial(TwoSegments, **text), ids, torch.ones_like(ids)),
        (partial(SegmentClassifier, classes=3, **text), ids, torch.ones_like(ids)),
        (partial(TokenClassifier, classes=3, **text), ids),
        (partial(CRATEText, VOCAB, 3, **size), ids),
        (partial(CRATE, classes=3, image_size=16, patch=4, **size), images),
        (partial(CRATEMAE, image_size=16, patch=4, **size), images),
        (partial(ImageClassifier, 16, 3, head_dim=8, mlp_dim=32, **size), images),
        (partial(ImageClassifier, 16, 3, head_dim=8, mlp_dim=32, positions="sinusoid", **size), images),
    ]
    for make, *given in calls:
        on_meta, half = make(device="meta"), make(dtype=torch.bfloat16)
        assert all(x.is_meta for x in [*on_meta.parameters(), *on_meta.buffers()]), make
        assert all(x.dtype == torch.bfloat16 for x in half.parameters()), make
        found = half(*(x.bfloat16() if x.is_floating_point() else x for x in given))
        assert (found[0] if isinstance(found, tuple) else found).dtype == torch.bfloat16, make
