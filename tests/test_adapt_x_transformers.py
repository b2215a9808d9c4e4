"""x-transformers: `full` computes the same, all mechanisms follow the masks, and other weights are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import weft

x_transformers = pytest.importorskip("x_transformers")


def model(kind=x_transformers.Decoder, **options):
    torch.manual_seed(0)
    layers = kind(dim=32, depth=2, heads=4, attn_dim_head=8, verbose=False, **options)
    return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers).eval()


def tokens(length: int = 19) -> torch.Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(1))


DECODERS = [{}, {"attn_flash": True}, {"rotary_pos_emb": True}, {"attn_kv_heads": 2}, {"attn_one_kv_head": True}]
DECODERS += [{"attn_qk_norm": True}, {"alibi_pos_bias": True}, {"rel_pos_bias": True}, {"attn_max_attend_past": 4}]
DECODERS += [{"attn_gate_values": True, "attn_head_scale": True}, {"attn_laser": True}]
DECODERS += [{"alibi_pos_bias": True, "attn_flash": True}]
KINDS = [(x_transformers.Decoder, options) for options in DECODERS]
KINDS += [(x_transformers.Encoder, options) for options in ({}, {"attn_flash": True}, {"rel_pos_bias": True})]
BIASED = ("alibi_pos_bias", "rel_pos_bias", "attn_max_attend_past")


@pytest.mark.parametrize("kind, options", KINDS, ids=lambda x: x.__name__ if isinstance(x, type) else "+".join(x))
def test_full_is_the_same_and_others_follow_the_masks(kind, options):
    net, ids = model(kind, **options), tokens()
    mask = torch.arange(19) < torch.tensor([[19], [12]])
    expected = net(ids, mask=mask)
    report = weft.swap(net, "full")
    assert len(report.replaced) == 2 and not report.left
    torch.testing.assert_close(net(ids, mask=mask)[mask], expected[mask], atol=1e-5, rtol=1e-4)
    report.undo()
    torch.testing.assert_close(net(ids, mask=mask), expected)
    if set(BIASED) & set(options):
        with pytest.warns(UserWarning, match="position bias, which linear does not support"):
            assert not weft.swap(net, "linear").replaced
    report = weft.swap(net, "local", block_size=4)
    assert len(report.replaced) == 2
    out, changed = net(ids, mask=mask), ids.clone()
    assert "max_attend_past" in str(options) or not torch.allclose(out[mask], expected[mask], atol=1e-3)
    changed[1, 12:] = 7
    torch.testing.assert_close(net(changed, mask=mask)[mask], out[mask])
    if kind is x_transformers.Decoder:
        out, changed = net(ids), ids.clone()
        changed[:, 10:] = 7
        torch.testing.assert_close(net(changed)[:, :10], out[:, :10])
    net.train()(ids).square().mean().backward()
    assert all(p.grad is not None for p in net.attn_layers.layers[0][1].to_out.parameters())


def test_encoder_and_decoder():
    torch.manual_seed(0)
    net = x_transformers.XTransformer(
        dim=32, enc_num_tokens=50, enc_depth=1, enc_heads=4, enc_max_seq_len=64, enc_attn_dim_head=8,
        dec_num_tokens=50, dec_depth=1, dec_heads=4, dec_max_seq_len=64, dec_attn_dim_head=8,
    ).eval()  # fmt: skip
    decoder, source, target = net.decoder.net, tokens(), tokens(11)
    encoded = net.encoder(source, return_embeddings=True)
    expected = decoder(target, context=encoded)
    weft.swap(net, "full")
    torch.testing.assert_close(decoder(target, context=encoded), expected, atol=1e-5, rtol=1e-4)
    with pytest.warns(UserWarning, match="1 of 3 .*self-attention only"):
        report = weft.swap(net, "combiner-fixed", block_size=4)
    assert len(report.replaced) == 2
    out, changed = decoder(target, context=encoded), target.clone()
    changed[:, 6:] = 7
    torch.testing.assert_close(decoder(changed, context=encoded)[:, :6], out[:, :6])


REFUSED = [{"attn_pre_talking_heads": True}, {"attn_post_talking_heads": True}, {"attn_sparse_topk": 3}]
REFUSED += [{"attn_sigmoid": True}, {"attn_l2_distance": True}, {"attn_num_mem_kv": 2}, {"attn_add_zero_kv": True}]
REFUSED += [{"attn_softclamp_logits": True}, {"attn_head_learned_sink": True}, {"attn_selective": True}]
REFUSED += [{"attn_value_dim_head": 4}, {"attn_use_cope": True}, {"attn_hard": True}]


@pytest.mark.parametrize("options", REFUSED, ids="+".join)
def test_other_weights_are_refused(options):
    try:
        net = model(**options)
    except (AssertionError, TypeError):
        pytest.skip("this version of x-transformers does not have the option")
    with pytest.warns(UserWarning, match="it uses .*, which no mechanism supports"):
        assert not weft.swap(net, "full").replaced


def test_saved_copied_and_generated():
    net, ids = model(rotary_pos_emb=True), tokens()
    report = weft.swap(net, "linear")
    expected = net(ids)
    again = model(rotary_pos_emb=True)
    weft.apply(again, weft.describe(net))
    again.load_state_dict(net.state_dict())
    for other in (again, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(other(ids), expected)
    wrapper = x_transformers.AutoregressiveWrapper(net)
    greedy = {"temperature": 0.0, "cache_kv": False}
    made = wrapper.generate(ids, 3, **greedy)
    assert torch.equal(made[:, 0], expected[:, -1].argmax(-1))
    with pytest.raises(ValueError, match="cache_kv=False"):
        wrapper.generate(ids, 3, temperature=0.0)
    report.undo()
    weft.swap(net, "full")
    assert torch.equal(wrapper.generate(ids, 3, temperature=0.0), wrapper.generate(ids, 3, **greedy))


def test_dropout_over_memories():
    """Without dropout, two passes over the same tokens and memories are equal."""
    layers = x_transformers.Decoder(
        dim=32, depth=1, heads=4, attn_dim_head=8, attn_dropout=0.5, rel_pos_bias=True, verbose=False
    )
    net = x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=64, max_mem_len=8, attn_layers=layers)
    ids = tokens()
    _, memories = net.eval()(ids, return_mems=True)
    weft.swap(net, "full")
    first, second = (net(ids, mems=memories, return_mems=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    net.train()
    first, second = (net(ids, mems=memories, return_mems=True)[0] for _ in range(2))
    assert not torch.allclose(first, second, atol=1e-3)
