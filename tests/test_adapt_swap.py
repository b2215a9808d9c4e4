"""weft.swap on existing models, and undo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import weft
from weft.models.pvt import PVT

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoder(**changes) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    settings = {"d_model": 24, "nhead": 4, "dim_feedforward": 32, "batch_first": True, "dropout": 0.0, **changes}
    layer = nn.TransformerEncoderLayer(**settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=settings["batch_first"]).eval()


class Ours(nn.Module):
    """Two of weft's own layers."""

    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([weft.MultiheadAttention(24, 4, **settings) for _ in range(2)])

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


def timm_model(name: str, **settings):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **settings).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("qkv.weight", "q.weight", "kv.weight")):
            parameter.data *= 10  # or attention would be flat, and every mechanism the same
    return model


def vit():
    return timm_model("vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4)


def swin():
    """64 x 64 pixels in windows of 4 x 4 patches: with shifted windows, so that their mask is tested."""
    sizes = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 2)}
    model = timm_model("swin_tiny_patch4_window7_224", **sizes)
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:
            parameter.data *= 50
    return model


def pvt():
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "num_heads": (1, 2, 2, 2)}
    return timm_model("pvt_v2_b0", **sizes)


def pvt_linear():
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "num_heads": (1, 2, 2, 2)}
    return timm_model("pvt_v2_b2_li", **sizes)


def own_pvt():
    torch.manual_seed(0)
    sizes = {"dims": (8, 16, 16, 16), "heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)}
    model = PVT(image_size=64, classes=5, **sizes).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q.weight", "kv.weight")):
            parameter.data *= 10
    return model


def images() -> torch.Tensor:
    return noise(2, 3, 64, 64)


MODELS = {
    "timm ViT": (vit, images),
    "timm Swin": (swin, images),
    "timm PVTv2": (pvt, images),
    "timm PVTv2 linear": (pvt_linear, images),
    "weft PVT": (own_pvt, images),
    "nn.TransformerEncoder": (encoder, lambda: noise(2, 9, 24)),
    "nn.TransformerEncoder, seq first": (lambda: encoder(batch_first=False), lambda: noise(9, 2, 24)),
    "weft": (lambda: Ours(attention="local", block_size=4), lambda: noise(2, 9, 24)),
}


@pytest.mark.parametrize("model", MODELS)
def test_full_changes_nothing_and_undo_restores(model):
    build, inputs = MODELS[model]
    if model == "weft":
        build = Ours
    subject, x = build(), inputs()
    with torch.no_grad():
        before = subject(x)
    modules = list(subject.modules())
    state = copy.deepcopy(subject.state_dict())
    report = weft.swap(subject, to="full")
    assert report.replaced and not report.left
    for grad in (False, True):  # without gradients PyTorch has fast paths that must not pass us by
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(subject(x), before, **CLOSE)
    assert subject.state_dict().keys() == state.keys()
    report.undo()
    assert [id(m) for m in subject.modules()] == [id(m) for m in modules]
    with torch.no_grad():
        assert torch.equal(subject(x), before)


@pytest.mark.parametrize("model", MODELS)
def test_another_mechanism_changes_the_output(model):
    build, inputs = MODELS[model]
    subject, x = build(), inputs()
    with torch.no_grad():
        before = subject(x)
        bias = model == "timm Swin"
        report = weft.swap(subject, "local", block_size=3) if bias else weft.swap(subject, "linear")
        assert report.replaced
        assert not torch.allclose(subject(x), before, atol=1e-5)
        report.undo()
        assert torch.equal(subject(x), before)


@pytest.mark.parametrize("model", MODELS)
def test_training_after_undo_equals_training_without_swap(model):
    """The same weights, the same random numbers, the same gradients."""

    def steps(operate: bool) -> list[torch.Tensor]:
        build, inputs = MODELS[model]
        subject, x = build(), inputs()
        torch.manual_seed(3)
        if operate:
            to = "performer" if model != "timm Swin" else "longformer"
            report = weft.swap(subject, to)
            subject.train()  # while swapped: undo must not bring back eval()
            report.undo()
        subject.train()
        optimizer = torch.optim.SGD(subject.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            subject(x).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in subject.parameters()]

    for with_surgery, without in zip(steps(True), steps(False), strict=True):
        assert torch.equal(with_surgery, without)


def test_weights_trained_while_swapped_stay():
    subject, x = encoder(), noise(2, 9, 24)
    report = weft.swap(subject, "full")
    subject(x).square().mean().backward()
    torch.optim.SGD(subject.parameters(), 0.1).step()
    trained = subject(x).detach()
    report.undo()
    torch.testing.assert_close(subject(x), trained, **CLOSE)


@pytest.mark.parametrize("to", weft.attentions())
def test_every_mechanism_is_swapped_in_or_skipped_with_a_reason(to):
    info = weft.attention_info(to)
    for model, (build, inputs) in MODELS.items():
        subject, x = build(), inputs()
        report = weft.swap(subject, to, max_length=600)
        reduced, biased = "PVT" in model, model == "timm Swin"
        able = info.bidirectional and (info.bias or not biased)
        if reduced and able and not info.cross:
            whole = 0 if "linear" in model else 1  # stages, of four, whose keys are not reduced
            assert (len(report.replaced), len(report.left)) == (whole, 4 - whole)
        else:
            assert bool(report.replaced) == able and bool(report.left) == (not able)
        if report.replaced and not reduced:
            subject.train()
            out = subject(x)
            out.square().mean().backward()
            assert out.isfinite().all()
        report.undo()


@pytest.mark.parametrize("model", ["timm ViT", "timm Swin", "timm PVTv2", "nn.TransformerEncoder"])
def test_dropout_that_is_set_after_the_swap(model):
    build, inputs = MODELS[model]
    subject, x = build(), inputs()
    weft.swap(subject, "full")
    for p in (0.5, 0.0):
        for module in subject.modules():
            if hasattr(module, "attn_drop"):
                module.train().attn_drop.p = p
            elif isinstance(module, nn.MultiheadAttention):
                module.train().dropout = p
        assert torch.equal(subject(x), subject(x)) == (p == 0)


def test_undo_in_reverse_order():
    subject, x = encoder(), noise(2, 9, 24)
    before = subject(x)
    first = weft.swap(subject, "full")
    second = weft.swap(subject, "linear")
    linear = subject(x)
    with pytest.raises(ValueError, match="undo the later change first"):
        first.undo()
    assert torch.equal(subject(x), linear)  # a refusal changes nothing
    second.undo()
    torch.testing.assert_close(subject(x), before, **CLOSE)
    first.undo()
    assert torch.equal(subject(x), before)
    with pytest.raises(ValueError, match="already undone"):
        first.undo()


def test_layers_of_one_encoder_swapped_one_by_one():
    """Shared settings (nested tensors) are restored with the last layer."""
    subject = encoder()
    first = weft.swap(subject, "linear", where="layers.0.*")
    second = weft.swap(subject, "linear", where="layers.1.*")
    with pytest.raises(ValueError, match="undo the later change first"):
        first.undo()
    second.undo()
    first.undo()
    assert subject.use_nested_tensor


def test_where_and_the_report():
    subject = encoder()
    report = weft.swap(subject, "linear", where="layers.1.*")
    assert report.replaced == ["layers.1.self_attn"]
    assert report.left == {"layers.0.self_attn": "not chosen"}
    text = str(report)
    assert "layers.1.self_attn" in text and "linear" in text and "left: not chosen" in text
    assert "1 replaced, 1 left" in text
    report.undo()
    assert weft.swap(subject, "linear", where=lambda path, layer: "0" in path).replaced == ["layers.0.self_attn"]
    with pytest.raises(ValueError, match="matches none of the layers: layers.0.self_attn, layers.1.self_attn"):
        weft.swap(subject, "linear", where="blocks.*")


def test_unsupported_layers_are_skipped_with_a_reason():
    left = weft.swap(swin(), "linear").left
    assert len(left) == 4 and all("position bias" in why for why in left.values())
    report = weft.swap(pvt(), "local")
    assert [path for path in report.replaced] == ["stages.3.blocks.0.attn"]  # the only one without reduction
    assert all("self-attention only" in why for why in report.left.values())
    assert "does not support that" in weft.swap(Ours(causal=True), "bigbird").left["layers.0"]
    odd = nn.MultiheadAttention(24, 4, add_zero_attn=True)
    assert "extra keys" in weft.swap(odd, "linear").left[""]
    with pytest.raises(ValueError, match="no attention layer"):
        weft.swap(nn.Linear(3, 3), "linear")
    with pytest.raises(TypeError, match="no option"):
        weft.swap(encoder(), "local", blok_size=3)
    with pytest.raises(ValueError, match="max_length"):
        weft.swap(encoder(), "linformer")


def test_unknown_layers_are_reported():
    class StrangeAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(3, 3)

    report = weft.swap(nn.ModuleDict({"a": encoder(), "b": StrangeAttention()}), "linear")
    assert len(report.replaced) == 2 and "does not know" in report.left["b"]
    timm = pytest.importorskip("timm")
    with pytest.raises(ValueError, match=r"Cait has no .* \(TalkingHeadAttn, .*ClassAttn are not known"):
        weft.swap(timm.create_model("cait_xxs24_224", depth=1), "linear")
    with pytest.raises(ValueError, match="Linear has no attention layer that weft knows: register"):
        weft.swap(nn.Linear(3, 3), "linear")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_pytorch_masks_keep_their_meaning(batch_first, kind):
    subject = encoder(batch_first=batch_first)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True  # True: ignored
    if kind == "float":
        padding = torch.zeros(2, 9).masked_fill(padding, float("-inf"))
    x = noise(2, 9, 24)

    def run(t: torch.Tensor) -> torch.Tensor:
        t = t if batch_first else t.transpose(0, 1)
        with torch.no_grad():
            out = subject(t, src_key_padding_mask=padding)
        return out if batch_first else out.transpose(0, 1)

    before = run(x)
    report = weft.swap(subject, "full")
    torch.testing.assert_close(run(x)[0], before[0], **CLOSE)
    torch.testing.assert_close(run(x)[1, :6], before[1, :6], **CLOSE)
    report.undo()
    weft.swap(subject, "linear")
    changed = x.clone()
    changed[1, 6:] += 1
    torch.testing.assert_close(run(x)[1, :6], run(changed)[1, :6], **CLOSE)
    assert not torch.allclose(run(x)[1, :6], before[1, :6], atol=1e-4)


def test_causal_masks_of_pytorch():
    subject, x = encoder(), noise(2, 9, 24)
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    before = subject(x, mask=causal)
    weft.swap(subject, "full")
    for mask in (causal, causal < 0):
        torch.testing.assert_close(subject(x, mask=mask), before, **CLOSE)
        torch.testing.assert_close(subject(x, mask=mask, is_causal=True), before, **CLOSE)
    window = (torch.arange(9)[:, None] - torch.arange(9)).abs() > 2
    plain = encoder()
    torch.testing.assert_close(subject(x, mask=window), plain(x, mask=window), **CLOSE)
    weft.swap(subject, "linear")
    changed = x.clone()
    changed[:, 5:] += noise(2, 4, 24)
    torch.testing.assert_close(subject(x, mask=causal)[:, :5], subject(changed, mask=causal)[:, :5], **CLOSE)
    heads = subject.layers[0].self_attn.num_heads
    torch.testing.assert_close(subject(x, mask=causal.expand(2 * heads, -1, -1)), subject(x, mask=causal), **CLOSE)
    assert not torch.allclose(subject(x)[:, :5], subject(changed)[:, :5], atol=1e-3)
    with pytest.raises(ValueError, match="use 'full'"):
        subject(x, mask=window)


def test_decoder_layers_and_their_memory():
    torch.manual_seed(0)
    settings = {"d_model": 24, "nhead": 4, "dim_feedforward": 32, "batch_first": True, "dropout": 0.0}
    subject = nn.TransformerDecoder(nn.TransformerDecoderLayer(**settings), 2).eval()
    x, memory = noise(2, 7, 24), noise(2, 5, 24, seed=2)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    before = subject(x, memory, tgt_mask=causal)
    report = weft.swap(subject, "full")
    assert len(report.replaced) == 4
    torch.testing.assert_close(subject(x, memory, tgt_mask=causal), before, **CLOSE)
    report.undo()
    report = weft.swap(subject, "local", block_size=3)
    assert report.replaced == ["layers.0.self_attn", "layers.1.self_attn"]
    changed = x.clone()
    changed[:, 4:] += 1
    first, second = (subject(t, memory, tgt_mask=causal)[:, :4] for t in (x, changed))
    torch.testing.assert_close(first, second, **CLOSE)


def test_causal_masks_over_a_padded_memory():
    """The padding of the memory says nothing about the queries, even if there are as many."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval()
    plain = nn.TransformerDecoder(layer, 2)
    x, memory, causal = torch.randn(2, 6, 32), torch.randn(2, 6, 32), torch.ones(6, 6).triu(1).bool()
    masks = {
        "tgt_mask": causal,
        "memory_mask": causal,
        "memory_key_padding_mask": torch.arange(6) >= torch.tensor([[4], [6]]),
    }
    subject = copy.deepcopy(plain)
    weft.swap(subject, "full")
    torch.testing.assert_close(subject(x, memory, **masks), plain(x, memory, **masks))
    other = copy.deepcopy(plain)
    weft.swap(other, "linear")
    with pytest.raises(ValueError, match="use 'full'"):
        other(x, memory, **masks)
    attn = nn.MultiheadAttention(32, 4, batch_first=True)
    box = nn.ModuleDict({"attn": copy.deepcopy(attn)})
    weft.swap(box, "full")
    given = {"attn_mask": causal, "key_padding_mask": masks["memory_key_padding_mask"]}
    torch.testing.assert_close(box["attn"](x, memory, memory, **given), attn(x, memory, memory, **given))


def test_weights_of_multihead_attention():
    """need_weights gives the effective matrix; full gives PyTorch's own, per head and averaged."""
    torch.manual_seed(0)
    subject, x = nn.MultiheadAttention(24, 4, batch_first=True, kdim=20, vdim=12), noise(2, 9, 24)
    k, v = noise(2, 5, 20), noise(2, 5, 12)
    for average in (True, False):
        before = subject(x, k, v, average_attn_weights=average)
        report = weft.swap(subject, "full")
        after = subject(x, k, v, average_attn_weights=average)
        torch.testing.assert_close(after, before, **CLOSE)
        torch.testing.assert_close(subject(x[0], k[0], v[0])[0], before[0][0], **CLOSE)
        report.undo()


def test_learned_mechanisms_add_parameters():
    subject, x = encoder(), noise(2, 9, 24)
    plain = copy.deepcopy(subject.state_dict())
    report = weft.swap(subject, "linformer", max_length=12, rank=4)
    extra = [key for key in subject.state_dict() if key not in plain]
    assert len(extra) == 2 and all("weft" in key for key in extra)
    subject(x).sum().backward()
    assert all(p.grad is not None for name, p in subject.named_parameters() if ".weft." in name)
    subject.load_state_dict(plain)  # a checkpoint from before loads as it is
    report.undo()
    assert subject.state_dict().keys() == plain.keys()


def transformers_models():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"vocab_size": 40, "initializer_range": 0.3, "max_position_embeddings": 64}
    torch.manual_seed(0)
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2)).eval()
    yield transformers.BertModel(transformers.BertConfig(**size)).eval()
    bart = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 40}
    bart |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.3}
    yield transformers.BartModel(transformers.BartConfig(**bart, pad_token_id=0, decoder_start_token_id=1)).eval()
    t5 = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 40, "pad_token_id": 0}
    yield transformers.T5EncoderModel(transformers.T5Config(**t5)).eval()


def test_transformers_models():
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0

    def run(subject):
        with torch.no_grad():
            return subject(ids, attention_mask=mask)[0][mask.bool()]

    for subject in transformers_models():
        before, keys = run(subject), subject.state_dict().keys()
        report = weft.swap(subject, "full")
        assert report.replaced and not report.left
        torch.testing.assert_close(run(subject), before, **CLOSE)
        report.undo()
        assert torch.equal(run(subject), before)
        report = weft.swap(subject, "linear")
        if "T5" in type(subject).__name__:
            assert not report.replaced and "position bias" in next(iter(report.left.values()))
            continue
        assert report.replaced and not torch.allclose(run(subject), before, atol=1e-4)
        report.undo()
        assert torch.equal(run(subject), before) and subject.state_dict().keys() == keys
        assert not any(m._forward_pre_hooks or "_weft" in m.__dict__ for m in subject.modules())


def test_undo_casts_a_learned_mechanism_that_a_later_swap_removed():
    subject = next(transformers_models())
    weft.swap(subject, "synthesizer", max_length=16)
    second = weft.swap(subject, "linear")
    subject.bfloat16().train()
    second.undo()
    assert {p.dtype for p in subject.parameters()} == {torch.bfloat16} and all(m.training for m in subject.modules())


def test_training_after_a_first_call_in_inference_mode():
    subject = next(transformers_models())
    weft.swap(subject, "performer", probe=False)
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        subject(ids)
    subject(ids).logits.sum().backward()


def test_undo_keeps_an_implementation_that_was_set_later():
    subject = next(transformers_models())
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    before = subject(ids).logits
    first, second = (weft.swap(subject, "linear", where=f"*layers.{i}.*") for i in range(2))
    subject.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="undo the later change first"):
        first.undo()
    weft.swap(subject, "local", where="*layers.1.*", block_size=4).undo()
    second.undo()
    first.undo()
    assert subject.config._attn_implementation == "eager" and not hasattr(subject.config, "weft")
    assert not any("_weft" in m.__dict__ for m in subject.modules())
    torch.testing.assert_close(subject(ids).logits, before, **CLOSE)


def test_one_layer_of_a_transformers_model():
    subject = next(transformers_models())
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    before = subject(ids).logits
    first = weft.swap(subject, "linear", where="*layers.1.*")
    assert first.replaced == ["model.layers.1.self_attn"]
    hidden = subject(ids, output_hidden_states=True).hidden_states
    subject.set_attn_implementation("sdpa")
    plain = subject(ids, output_hidden_states=True).hidden_states
    subject.set_attn_implementation("weft:swapped")
    torch.testing.assert_close(hidden[1], plain[1], **CLOSE)  # the first layer is as it was
    assert not torch.allclose(hidden[2], plain[2], atol=1e-4)
    second = weft.swap(subject, "local", where="*layers.0.*", block_size=4)
    with pytest.raises(ValueError, match="undo the later change first"):
        first.undo()
    with torch.no_grad():
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        tokens = [subject.generate(ids, **settings, use_cache=c) for c in (True, False)]
    assert torch.equal(*tokens)
    second.undo(), first.undo()
    assert torch.equal(subject(ids).logits, before)


def test_compiled():
    torch._dynamo.reset()
    subject, x = encoder(), noise(2, 9, 24)
    weft.swap(subject, "linear")
    subject.train()
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    compiled = torch.compile(subject, backend="aot_eager", fullgraph=True)
    out, expected = (m(x, src_key_padding_mask=padding) for m in (compiled, subject))
    torch.testing.assert_close(out[~padding], expected[~padding], **CLOSE)


def test_compiled_before_the_swap():
    """`compile()` changes how a module is called, but the test of the layers is not compiled."""
    pytest.importorskip("transformers")
    import zoo

    subject = zoo.build("llama/LlamaForCausalLM", "sdpa")
    subject.compile(backend="eager")
    report = weft.swap(subject, "linear")
    assert len(report.replaced) == 2
