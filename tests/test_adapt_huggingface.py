"""Mechanisms in transformers models, tiny and random: nothing is downloaded."""

from __future__ import annotations

import copy
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from promises import SMALL

import weft

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
hf = weft.huggingface

L, VOCABULARY = 11, 40
DECODER = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama(implementation: str, **changes):
    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 64, **DECODER, **changes}
    return make(transformers.LlamaForCausalLM, transformers.LlamaConfig(**settings), implementation)


def gpt2(implementation: str, **changes):
    settings = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, **DECODER, **changes}
    return make(transformers.GPT2LMHeadModel, transformers.GPT2Config(**settings), implementation)


def bert(implementation: str):
    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"vocab_size": VOCABULARY, "initializer_range": 0.3, "max_position_embeddings": 64}
    return make(transformers.BertModel, transformers.BertConfig(**settings), implementation)


def vit(implementation: str):
    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"image_size": 16, "patch_size": 4, "initializer_range": 0.3}
    return make(transformers.ViTModel, transformers.ViTConfig(**settings), implementation)


def bart(implementation: str, **changes):
    settings = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    settings |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCABULARY}
    settings |= {
        "max_position_embeddings": 64,
        "init_std": 0.3,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    }
    settings |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, **changes}
    return make(transformers.BartForConditionalGeneration, transformers.BartConfig(**settings), implementation)


def t5(implementation: str):
    settings = {"d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    settings |= {"decoder_start_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return make(transformers.T5ForConditionalGeneration, transformers.T5Config(**settings), implementation)


def make(cls, config, implementation: str):
    torch.manual_seed(0)
    return cls._from_config(config, attn_implementation=implementation).eval()


def test_training_does_not_repeat_grouped_heads(monkeypatch):
    monkeypatch.setattr("weft.adapt.huggingface.spread", None)  # the mechanisms read them as they are
    model, ids = llama("weft:local").train(), torch.randint(VOCABULARY, (2, L))
    model(input_ids=ids, labels=ids).loss.backward()


def tokens(batch: int = 3, length: int = L) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, batch: int = 3, length: int = L) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[1, :4] = 0
    if side == "right":
        mask[1, -4:] = 0
    return mask


def registered(name: str) -> str:
    """The mechanism with small blocks, so that short sequences cross their edges."""
    options, info = dict(SMALL.get(name, [{}])[0]), weft.attention_info(name)
    if "block_size" in info.options:
        options.setdefault("block_size", 4)
    if info.length_dependent:
        options["max_length"] = 32  # pins down other sizes that would follow the length
    return hf.register(name, as_=f"weft:small-{name}", **options)[0]


CAUSAL = [n for n in hf.available() if weft.attention_info(n).causal]
BOTH_WAYS = [n for n in hf.available() if weft.attention_info(n).bidirectional]


@pytest.fixture(autouse=True, scope="module")
def everything_registered():
    hf.register()


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_does_not_reach_the_past(name):
    model, ids = llama(registered(name)), tokens(1, 19)
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 7) % VOCABULARY
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :12], after[:, :12], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-2)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_padding_has_no_effect_in_decoders(name, side):
    model, ids, mask = llama(registered(name)), tokens(), padding(side)
    other = torch.where(mask.bool(), ids, (ids + 3) % VOCABULARY)
    first, second = (model(i, attention_mask=mask).logits[mask.bool()] for i in (ids, other))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_padding_has_no_effect_in_encoders(name, side):
    model, ids, mask = bert(registered(name)), tokens(), padding(side)
    other = torch.where(mask.bool(), ids, (ids + 3) % VOCABULARY)
    first, second = (model(i, attention_mask=mask).last_hidden_state[mask.bool()] for i in (ids, other))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    moved = ids.clone()  # and encoders do look ahead
    moved[:, -5] = (moved[:, -5] + 3) % VOCABULARY
    assert not torch.allclose(model(ids).last_hidden_state[:, -6], model(moved).last_hidden_state[:, -6], atol=1e-4)


def generate(model, ids, mask, *, use_cache: bool, beams: int = 1, new: int = 8, **more):
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        use_cache=use_cache,
        num_beams=beams,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )


@pytest.mark.parametrize("name", [n for n in CAUSAL if n != "routing"])
@pytest.mark.parametrize(("build", "side"), [(llama, "left"), (gpt2, "right")])
def test_generate_is_the_same_with_and_without_a_cache(build, name, side):
    model, ids, mask = build(registered(name)), tokens(), padding(side)
    with_cache, without = (generate(model, ids, mask, use_cache=c) for c in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)
    torch.testing.assert_close(torch.stack(with_cache.logits), torch.stack(without.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["full", "reformer"])
def test_beam_search_reorders_what_is_remembered(name):
    model, ids, mask = llama(registered(name)), tokens(), padding("left")
    with_cache, without = (generate(model, ids, mask, use_cache=c, beams=3) for c in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)


def test_the_beams_really_were_reordered():
    """Otherwise the test above would prove nothing."""
    out = generate(llama("weft:full"), tokens(), padding("left"), use_cache=True, beams=3)
    identity = torch.arange(9) % 3
    assert any(not torch.equal(step % 3, identity) for step in out.beam_indices.T[:-1])


@pytest.mark.parametrize("name", ["full", "reformer"])
def test_caches_may_be_copied_cropped_and_interleaved(name):
    model = llama(registered(name))
    a, b = tokens(2, 9), tokens(2, 9).flip(0)
    with torch.no_grad():
        first = model(a[:, :6], use_cache=True).past_key_values
        second = model(b[:, :6], use_cache=True).past_key_values
        copied = copy.deepcopy(first)
        chunk = model(a[:, 6:], past_key_values=first).logits
        torch.testing.assert_close(chunk, model(a, use_cache=False).logits[:, 6:], atol=1e-5, rtol=1e-5)
        chunk = model(b[:, 6:], past_key_values=second).logits
        torch.testing.assert_close(chunk, model(b, use_cache=False).logits[:, 6:], atol=1e-5, rtol=1e-5)
        copied.crop(-2)
        chunk = model(a[:, 4:], past_key_values=copied).logits
        torch.testing.assert_close(chunk, model(a, use_cache=False).logits[:, 4:], atol=1e-5, rtol=1e-5)


def test_a_cache_that_was_filled_elsewhere_is_refused():
    ids = tokens(1)
    with torch.no_grad():
        cache = llama("sdpa")(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="was not filled by this model"):
            llama("weft:linear")(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("name", [name for name in CAUSAL if weft.attention_info(name).length_dependent])
def test_sizes_that_follow_the_length_hold_still_in_a_decoder(name):
    """They follow the model's longest sequence, so that generate() works with default options."""
    model, ids, mask = llama(f"weft:{name}"), tokens(), padding("left")
    with_cache, without = (generate(model, ids, mask, use_cache=c) for c in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)


def test_a_pattern_that_follows_the_length_cannot_be_cached():
    """If the model does not define a maximum length."""
    model = llama("weft:sparse")
    model.config.__dict__["max_position_embeddings"] = None
    with pytest.raises(ValueError, match="use_cache=False"):
        generate(model, tokens(), padding("none"), use_cache=True)
    generate(model, tokens(), padding("none"), use_cache=False, new=2)
    with pytest.raises(ValueError, match="over max_length=64"):
        llama("weft:sparse")(tokens(length=65))


@pytest.mark.parametrize("build", [bart, t5])
def test_encoder_decoder_generation(build):
    model, ids, mask = build("weft:full"), tokens(), padding("right")
    with_cache, without = (generate(model, ids, mask, use_cache=c) for c in (True, False))
    assert torch.equal(with_cache.sequences, without.sequences)


def test_linear_attention_reads_an_encoder():
    model, ids, mask, target = bart("weft:linear"), tokens(), padding("right"), tokens(length=7)
    changed = torch.cat([target[:, :4], target[:, 4:].flip(1)], 1)
    first, second = (
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=t).logits[:, :4] for t in (target, changed)
    )
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_cross_attention_is_known_by_more_than_its_lengths():
    """Also with as many keys as queries."""
    ids = tokens()
    with pytest.raises(ValueError, match="does not support cross attention"):
        bart(registered("local"))(input_ids=ids, decoder_input_ids=ids)


def test_output_attentions():
    ids, mask = tokens(), padding("left")
    ours, theirs = (bert(i)(ids, attention_mask=mask, output_attentions=True) for i in ("weft:full", "eager"))
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    (first, _) = llama(registered("local"))(ids, output_attentions=True).attentions
    assert torch.equal(first[0, 0] > 0, torch.block_diag(*[torch.ones(n, n).tril() for n in (4, 4, 3)]) > 0)


def test_dropout_acts_in_training_only():
    model, ids = llama("weft:full", attention_dropout=0.5), tokens()
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["weft:full", "weft:linear"])
def test_autocast(name):
    """Rotary positions give q and k in single precision, with v in half."""
    model, ids = llama(name), tokens()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half, cached = model(ids).logits, model(ids[:, :6], use_cache=True).past_key_values
        chunk = model(ids[:, 6:], past_key_values=cached).logits
    torch.testing.assert_close(half[:, 6:], chunk, atol=0.3, rtol=0.1)
    torch.testing.assert_close(half.float(), model(ids).logits, atol=0.3, rtol=0.1)


def test_scaling_is_the_models():
    """GPT-2 can divide by the layer's number as well; T5, above, does not scale at all."""
    changes = {"scale_attn_by_inverse_layer_idx": True}
    ours, theirs = (gpt2(i, **changes)(tokens()).logits for i in ("weft:full", "sdpa"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    plain = gpt2("weft:full")(tokens()).logits
    assert not torch.allclose(ours, plain, atol=1e-3)


def mistral(implementation: str, window: int):
    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": window, **DECODER}
    return make(transformers.MistralForCausalLM, transformers.MistralConfig(**settings), implementation)


def test_sliding_windows():
    ids, mask = tokens(), padding("left")
    ours, theirs = (mistral(i, 4)(ids, attention_mask=mask).logits[mask.bool()] for i in ("weft:full", "sdpa"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(*(generate(mistral("weft:full", 4), ids, mask, use_cache=c).sequences for c in (True, False)))
    with pytest.raises(ValueError, match="a sliding window"):
        mistral("weft:linear", 4)(ids)
    roomy = mistral("weft:linear", 64)  # a window that holds everything is none
    assert torch.equal(*(generate(roomy, ids, mask, use_cache=c).sequences for c in (True, False)))


def test_static_caches():
    ids, mask = tokens(), padding("left")
    static = {"cache_implementation": "static", "disable_compile": True}
    with_cache = generate(llama("weft:full"), ids, mask, use_cache=True, **static)
    assert torch.equal(with_cache.sequences, generate(llama("weft:full"), ids, mask, use_cache=False).sequences)
    swapped = llama("sdpa")
    weft.swap(swapped, "reformer")  # it has no decoding state
    for model in (llama("weft:reformer"), swapped):
        with pytest.raises(ValueError, match="weft:reformer does not support a static cache"):
            generate(model, ids, mask, use_cache=True, **static)


def test_unsupported_features_are_refused():
    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, **DECODER}
    gemma = transformers.Gemma2Config(**settings, attn_logit_softcapping=5.0)
    with pytest.raises(ValueError, match="soft cap"):
        make(transformers.Gemma2ForCausalLM, gemma, "weft:linear")(tokens())
    oss = transformers.GptOssConfig(**settings, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="sinks"):
        make(transformers.GptOssForCausalLM, oss, "weft:linear")(tokens())
    with pytest.raises(ValueError, match="T5's relative positions"):
        t5("weft:linear")(input_ids=tokens(), decoder_input_ids=tokens())
    four = torch.ones(3, 1, L, L, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="no matrix of logits"):
        llama("weft:linear")(tokens(), attention_mask=four)
    ours, theirs = llama("weft:full")(tokens(), attention_mask=four).logits, llama("sdpa")(tokens()).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_full_has_soft_caps_and_sinks():
    settings = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, **DECODER}
    gemma = {**settings, "attn_logit_softcapping": 0.5, "sliding_window": 4}
    oss = {**settings, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    ids, mask = tokens(), padding("left")
    for cls, config in (
        (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**gemma)),
        (transformers.GptOssForCausalLM, transformers.GptOssConfig(**oss)),
    ):
        theirs, ours = (make(cls, copy.deepcopy(config), i) for i in ("eager", "weft:full"))
        for model in (theirs, ours):
            for key, parameter in model.named_parameters():
                if key.endswith("sinks"):
                    torch.nn.init.ones_(parameter)
        a, b = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (ours, theirs))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert torch.equal(*(generate(ours, ids, mask, use_cache=c).sequences for c in (True, False)))


def test_names_are_checked():
    with pytest.raises(ValueError, match="no place to store"):
        hf.register("linformer", max_length=16)
    with pytest.raises(TypeError, match="no option"):
        hf.register("local", blok_size=3)
    with pytest.raises(ValueError, match="special meaning"):
        hf.register("local", as_="weft/local")
    with pytest.raises(ValueError, match="special meaning"):
        hf.register("local", as_="sdpa")


def test_the_state_dict_is_unchanged():
    model, plain = llama("weft:performer"), llama("sdpa")
    model(tokens())
    assert model.state_dict().keys() == plain.state_dict().keys()
    again = llama("weft:performer")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)  # random features are the layer's, not the run's


def test_compiled():
    torch._dynamo.reset()
    model, ids, mask = llama("weft:linear", num_hidden_layers=1), tokens(), padding("left")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, attention_mask=mask, use_cache=False).logits, expected)
    with pytest.raises(Exception, match="pass an attention_mask"):  # it might be packed
        compiled(ids, use_cache=False)
    masks = None, mask, mask.roll(1, 0)
    expected = [model(ids, attention_mask=each, use_cache=False).logits for each in masks]
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for each, wanted in zip(masks, expected, strict=True):
        torch.testing.assert_close(model(ids, attention_mask=each, use_cache=False).logits, wanted)
