"""A model's own windows, biases, caps and sinks are honoured by mechanisms, or refused with the layer's name."""

from __future__ import annotations

import warnings

import pytest
import torch

import weft

transformers = pytest.importorskip("transformers")
import zoo  # noqa: E402

transformers.logging.set_verbosity_error()
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
WINDOWED = ["mistral/MistralForCausalLM", "gemma3_text/Gemma3ForCausalLM", "modernbert/ModernBertModel"]
WINDOWED += ["olmo3/Olmo3ForCausalLM", "cohere2/Cohere2ForCausalLM"]
BIASED = ["bloom/BloomForCausalLM", "mpt/MptForCausalLM", "t5/T5EncoderModel", "swin/SwinModel", "beit/BeitModel"]


@pytest.fixture(autouse=True, scope="module")
def everything_registered():
    weft.huggingface.register()


def built(model: str):
    """A tiny model with attention that is not flat, and inputs with padding."""
    made, inputs = zoo.build(model, "eager"), dict(zoo.reference(model)[1])
    if model == "beit/BeitModel":
        config = transformers.BeitConfig(**{**made.config.to_dict(), "use_relative_position_bias": True})
        made = transformers.BeitModel._from_config(config, attn_implementation="eager").eval()
    for name, parameter in made.named_parameters():
        if any(part in name for part in ("relative_position_bias_table", "relative_attention_bias", "sinks")):
            torch.nn.init.normal_(parameter, std=2.0, generator=torch.Generator().manual_seed(2))
        elif name.endswith(("q_proj.weight", "k_proj.weight", "Wqkv.weight", "query_key_value.weight", "q.weight")):
            parameter.data *= 5
    if "attention_mask" in inputs:
        inputs["attention_mask"] = inputs["attention_mask"].clone()
        inputs["attention_mask"][1, :4] = 0
    return made, inputs


def real(out: torch.Tensor, inputs: dict) -> torch.Tensor:
    return out[inputs["attention_mask"].bool()] if "attention_mask" in inputs else out


@pytest.mark.parametrize("model", WINDOWED)
def test_longformer_is_the_models_window(model):
    subject, inputs = built(model)
    expected = real(zoo.outputs(subject, inputs), inputs)
    has_window = [getattr(m, "sliding_window", None) or model.startswith("mistral") for m in layers(subject)]
    report = weft.swap(subject, "longformer", where=lambda path, layer: has_window[layers(subject).index(layer)])
    assert report.replaced and not report.refused
    torch.testing.assert_close(real(zoo.outputs(subject, inputs), inputs), expected, **CLOSE)
    report.undo()
    weft.swap(subject, "longformer", window=3)  # smaller than the model's
    assert not torch.allclose(real(zoo.outputs(subject, inputs), inputs), expected, atol=1e-4)


def layers(model) -> list:
    return [m for m in model.modules() if type(m).__name__.endswith("Attention")]


def test_windows_under_a_registered_name_and_with_caches():
    (plain, inputs), ids = built("mistral/MistralForCausalLM"), zoo.tokens()
    expected = real(zoo.outputs(plain, inputs), inputs)
    settings = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    tokens = plain.generate(ids, **settings)
    plain.set_attn_implementation("weft:longformer")
    torch.testing.assert_close(real(zoo.outputs(plain, inputs), inputs), expected, **CLOSE)
    for use_cache in (True, False):
        assert torch.equal(plain.generate(ids, **settings, use_cache=use_cache), tokens)
    plain.set_attn_implementation("weft:linear")
    with pytest.raises(ValueError, match="MistralAttention 0 needs a sliding window of 5 tokens.*weft:longformer"):
        zoo.outputs(plain, inputs)
    weft.huggingface.register("longformer", as_="weft:global", global_tokens=1)
    plain.set_attn_implementation("weft:global")  # a global token would see beyond the model's window
    with pytest.raises(ValueError, match="needs a sliding window"):
        zoo.outputs(plain, inputs)


def test_mechanisms_without_a_state_do_not_continue_a_sliding_cache():
    """It has the keys of the last tokens, but the queries of all."""
    model = zoo.build("mistral/MistralForCausalLM", "weft:reformer")  # a window of 5
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(zoo.tokens(), use_cache=False, num_beams=3, **settings).shape == (2, zoo.L + 3)
    for beams in (1, 3):
        with pytest.raises(ValueError, match="set use_cache=False"):
            model.generate(zoo.tokens(), num_beams=beams, **settings)


def test_other_mechanisms_stay_in_the_window():
    """Blocks of 8 tokens and windows of 5, in one layer: each query sees what both allow."""
    subject, _ = built("mistral/MistralForCausalLM")
    del subject.model.layers[1]
    ids = zoo.tokens()[:1]
    weft.swap(subject, "local", block_size=8)
    embedded = subject.get_input_embeddings()(ids).detach().requires_grad_()
    out = subject(inputs_embeds=embedded, use_cache=False).logits
    for i in range(zoo.L):
        (gradient,) = torch.autograd.grad(out[0, i].square().sum(), embedded, retain_graph=True)
        seen = gradient[0].abs().amax(-1) > 0
        assert seen.nonzero().flatten().tolist() == [j for j in range(zoo.L) if i - 5 < j <= i and i // 8 == j // 8]


@pytest.mark.parametrize("model", BIASED)
def test_biases_are_position_biases(model):
    """A window that covers everything is full attention, also in the gradients of the bias."""
    subject, inputs = built(model)
    expected = real(zoo.outputs(subject, inputs), inputs)

    def gradients() -> list[torch.Tensor]:
        subject.zero_grad()
        first = subject(**inputs)[0]
        real(first, inputs).square().mean().backward()
        return [p.grad for p in subject.parameters() if p.grad is not None]

    before, keys = gradients(), subject.state_dict().keys()
    for to, options in (("full", {}), ("longformer", {"window": 99})):
        report = weft.swap(subject, to, **options)
        assert report.replaced and not report.left
        torch.testing.assert_close(real(zoo.outputs(subject, inputs), inputs), expected, **CLOSE)
        for mine, theirs in zip(gradients(), before, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)
        report.undo()
    report = weft.swap(subject, "local", block_size=3)
    assert not torch.allclose(real(zoo.outputs(subject, inputs), inputs), expected, atol=1e-5)
    report.undo()
    assert subject.state_dict().keys() == keys
    assert torch.equal(real(zoo.outputs(subject, inputs), inputs), expected)
    with pytest.warns(UserWarning, match="position bias|a mask of pairs"):
        assert not weft.swap(subject, "linear").replaced


@pytest.mark.parametrize("model", ["bloom/BloomForCausalLM", "mpt/MptForCausalLM"])
def test_alibi_models_generate_and_are_saved(model, tmp_path):
    (subject, inputs), ids = built(model), zoo.tokens()
    settings = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = subject.generate(ids, **settings)
    report = weft.swap(subject, "full")
    assert torch.equal(subject.generate(ids, **settings), plain)
    report.undo()
    first = weft.swap(subject, "local", block_size=4, where="*.0.*")  # the others go through weft as well
    tokens = [subject.generate(ids, **settings, use_cache=c) for c in (True, False)]
    assert torch.equal(*tokens)
    expected = zoo.outputs(subject, inputs)
    subject.save_pretrained(tmp_path)
    torch.testing.assert_close(zoo.outputs(weft.huggingface.load(tmp_path).eval(), inputs), expected)
    first.undo()
    assert torch.equal(subject.generate(ids, **settings), plain)


@pytest.mark.parametrize("model", ["bloom/BloomForCausalLM", "mpt/MptForCausalLM"])
@pytest.mark.parametrize("to, options", [("subsampled", {}), ("synthesizer", {"max_length": 64}), ("routing", {})])
def test_alibi_models_hold_mechanisms_as_parts_of_their_layers(model, to, options):
    subject, inputs = built(model)
    expected = real(zoo.outputs(subject, inputs), inputs)
    report = weft.swap(subject, to, **options)
    assert len(report.replaced) == 2 and any(".weft." in name for name, _ in subject.named_modules())
    for _, first, second, kept in zoo.perturbed(inputs):
        torch.testing.assert_close(zoo.outputs(subject, first)[kept], zoo.outputs(subject, second)[kept])
    report.undo()
    torch.testing.assert_close(real(zoo.outputs(subject, inputs), inputs), expected)


@pytest.mark.parametrize("model", ["bloom/BloomForCausalLM", "mpt/MptForCausalLM"])
def test_caches_of_alibi_models_need_a_swap(model):
    subject, inputs = built(model)
    with pytest.warns(UserWarning, match="swap it first"):  # the cache could not read its mask
        assert not weft.cache(subject, 0.5).replaced
    weft.swap(subject, "full")
    assert len(weft.cache(subject, 0.5).replaced) == 2
    subject.train()
    for _ in range(2):
        subject(**inputs).logits.sum().backward()


@pytest.mark.parametrize("model", ["gemma2/Gemma2ForCausalLM", "gpt_oss/GptOssForCausalLM"])
def test_full_keeps_caps_and_sinks(model):
    subject, inputs = built(model)
    expected = real(zoo.outputs(subject, inputs), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = weft.swap(subject, "full")
    torch.testing.assert_close(real(zoo.outputs(subject, inputs), inputs), expected, **CLOSE)
    report.undo()
    with pytest.warns(UserWarning, match="layers.0.self_attn.*a soft cap or sinks"):
        assert not weft.swap(subject, "longformer").replaced


def test_full_keeps_the_sinks_of_each_query():
    if "inkling2_text/Inkling2ForCausalLM" not in zoo.every():
        pytest.skip("this transformers has no Inkling2")
    subject, inputs = built("inkling2_text/Inkling2ForCausalLM")
    expected = real(zoo.outputs(subject, inputs), inputs)
    with pytest.warns(UserWarning, match="does not know .*AttentionResidual"):  # no attention layer
        report = weft.swap(subject, "full")
    assert len(report.replaced) == 2
    torch.testing.assert_close(real(zoo.outputs(subject, inputs), inputs), expected, **CLOSE)
    report.undo()
    with pytest.warns(UserWarning, match="attention sinks"):
        assert not weft.swap(subject, "local", where="*.self_attn").replaced


def test_full_keeps_the_chosen_blocks_of_keys():
    if "minimax_m3_vl_text/MiniMaxM3VLForCausalLM" not in zoo.every():
        pytest.skip("this transformers has no MiniMax M3")
    config = zoo._tiny(transformers.MiniMaxM3VLTextConfig, "MiniMaxM3VLForCausalLM")
    config.layer_types = ["minimax_m3_sparse", "full_attention"]
    config.index_block_size = config.index_topk_blocks = 2  # 4 of 11 tokens
    torch.manual_seed(0)
    subject = transformers.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    inputs = {"input_ids": zoo.tokens()}
    expected = zoo.outputs(subject, inputs)
    report = weft.swap(subject, "full")
    torch.testing.assert_close(zoo.outputs(subject, inputs), expected, **CLOSE)
    ids = [subject.generate(zoo.tokens(), max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False)]
    assert torch.equal(*ids)
    report.undo()
    with pytest.warns(UserWarning, match="1 of 2.*layers.0.self_attn.*a choice of keys"):
        assert weft.swap(subject, "linear").replaced == ["model.layers.1.self_attn"]
