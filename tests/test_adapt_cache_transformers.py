"""weft.cache on models of Hugging Face transformers."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft

transformers = pytest.importorskip("transformers")

SIZE = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 40, "initializer_range": 0.3, "max_position_embeddings": 64, "pad_token_id": 0}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**more: Any) -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZE, **TEXT, **DRY, **more))


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SIZE, **DRY, image_size=16, patch_size=4))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 64, "initializer_range": 0.3}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dry, **tokens))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, **TEXT, num_key_value_heads=2))


def t5() -> nn.Module:
    """Heads that are not as wide as the model, and relative positions."""
    sizes = {"d_model": 24, "d_kv": 5, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 40}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens))


def bart() -> nn.Module:
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 40, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "forced_eos_token_id": None, "init_std": 0.3}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **heads, **tokens, dropout=0.0))


MODELS = {"bert": bert, "vit": vit, "gpt2": gpt2, "llama": llama, "t5": t5, "bart": bart}
CAUSAL = ("gpt2", "llama")


def make(name: str, implementation: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.set_attn_implementation(implementation)
    return model


def words(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


def inputs(name: str, seed: int = 1, padding: str | None = "right") -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}
    given = {"input_ids": words(2, 9, seed=seed)}
    if padding is not None:
        given["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        given["attention_mask"][1, slice(6, None) if padding == "right" else slice(0, 3)] = 0
    if name in ("t5", "bart"):
        given["labels"] = words(2, 5, seed=seed + 7)
    return given


def result(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    out = model(**given)
    values = out.logits if "logits" in out else out.last_hidden_state
    mask = given.get("attention_mask")
    return values if mask is None or "labels" in given else values[mask.bool()]


def caches(model: nn.Module) -> list[weft.CachedAttention]:
    return [m for m in model.modules() if isinstance(m, weft.CachedAttention)]


@pytest.fixture(autouse=True)
def quiet():
    """An untrained cache warns when it is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_closed_gate_changes_nothing_and_undo_restores(name, implementation, padding):
    model, given = make(name, implementation), inputs(name, padding=padding)
    with torch.no_grad():
        before = result(model, given)
    modules, state = [id(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    report = weft.cache(model, lambda_init=-math.inf)
    assert len(report.replaced) == len(caches(model)) == 2
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            torch.testing.assert_close(result(model, given), before, atol=1e-5, rtol=1e-5)
    assert [int(c.cache.updates) for c in caches(model)] == [1, 1]
    report.undo()
    assert [id(m) for m in model.modules()] == modules
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(result(model, given), before)


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_is_trained_read_and_restored_from_a_checkpoint(name, tmp_path):
    model, given = make(name), inputs(name)
    before = result(model, given)
    weft.cache(model)
    model.train()
    for step in range(3):
        model.zero_grad()
        result(model, inputs(name, seed=step + 3)).square().mean().backward()
    for cached in caches(model):
        assert cached.lam.grad is not None and cached.lam.grad.abs().max() > 0
        assert cached.cache.update_gate.weight.grad.abs().max() > 0
        assert torch.equal(cached.share, torch.full((4,), 0.5)) and int(cached.cache.updates) == 3
    model.eval()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh = make(name)
    for parameter in fresh.parameters():
        parameter.data += 1
    weft.cache(fresh)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with torch.no_grad():
        after = result(model, given)
        assert not torch.allclose(after, before, atol=1e-3)
        assert torch.equal(result(fresh.eval(), given), after)
        for cached in caches(model):
            cached.reset()
        assert not torch.allclose(result(model, given), after, atol=1e-5)  # what was remembered was in the output


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "weft:linear"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_padded_tokens_never_enter_the_cache(name, padding, implementation):
    if implementation == "weft:linear":
        if name == "t5":
            pytest.skip("relative positions need a matrix of logits")
        weft.huggingface.register("linear")
    model, given = make(name, implementation), inputs(name, padding=padding)
    weft.cache(model, length=7)
    changed = dict(given, input_ids=given["input_ids"].where(given["attention_mask"].bool(), 5))
    assert not torch.equal(changed["input_ids"], given["input_ids"])
    states, outs = [], []
    for each in (given, changed):
        other = copy.deepcopy(model).train()
        outs.append([result(other, each) for _ in range(2)])
        states.append(other.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    torch.testing.assert_close(outs[0], outs[1])
    unmasked = copy.deepcopy(model).train()
    result(unmasked, {key: value for key, value in given.items() if key != "attention_mask"})
    result(unmasked, given)
    key = next(key for key in states[0] if key.endswith(("cache.pending", "cache.cache")))
    assert not torch.equal(unmasked.state_dict()[key], states[0][key])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("options", [{}, {"scope": "stream"}])
def test_causal_models_carry_the_cache_between_segments_without_leaks(name, options):
    ids = words(2, 12)
    start = make(name)
    weft.cache(start, length=4, **options)
    start.train()

    def read(ids: Tensor) -> Tensor:
        model = copy.deepcopy(start)
        return torch.cat([model(segment).logits for segment in ids.split(6, 1)], 1)

    with torch.no_grad():
        reference, carried = read(ids), False
        for j in range(12):
            changed = ids.clone()
            changed[0, j] = 3 + (changed[0, j] - 2) % 37
            got = read(changed)
            end = (j // 6 + 1) * 6
            assert torch.equal(got[:, :j], reference[:, :j]), j
            assert torch.equal(got[1, :end], reference[1, :end]), j
            carried |= not torch.equal(got[0, end:], reference[0, end:])
    assert carried


def test_layers_that_are_causal_by_their_mask_alone_are_refused():
    text = {**SIZE, "vocab_size": 40, "max_position_embeddings": 64}
    for implementation in ("eager", "sdpa"):
        model = transformers.CLIPTextModel(transformers.CLIPTextConfig(**text, eos_token_id=2)).train()
        model.set_attn_implementation(implementation)
        report = weft.cache(model)
        assert report.replaced
        with pytest.raises(ValueError, match="delayed=True"):
            model(words(2, 9))
        report.undo()
        weft.cache(model, delayed=True)
        model(words(2, 9))
    decoder = bert(is_decoder=True).train()
    assert all(row.now.endswith("delayed") for row in weft.cache(decoder).rows)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_with_and_without_past_keys_gives_the_same_tokens(name, beams):
    model = make(name)
    weft.cache(model, ratio=1.0)
    model.train()
    for step in range(3):
        model(**inputs(name, seed=step))
    given = inputs(name, padding="left")
    given.pop("labels", None)
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "eos_token_id": None, "pad_token_id": 0}
    model.eval()
    with_past, without = (model.generate(**given, **settings, use_cache=use) for use in (True, False))
    assert torch.equal(with_past, without) and with_past.shape[1] >= 6
    if beams == 1:
        assert torch.equal(model.generate(**given, **settings, cache_implementation="static"), without)
    assert all(int(c.cache.updates) == 3 for c in caches(model))
    if name in CAUSAL:
        model.train()
        with pytest.raises(ValueError, match="call model.eval\\(\\) before generate"):
            model.generate(**given, **settings, use_cache=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_writes_once_and_changes_no_gradient(name, reentrant):
    plain = make(name)
    weft.cache(plain, length=5)
    plain.train()
    saved = copy.deepcopy(plain)
    saved.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        saved.enable_input_require_grads() if name != "vit" else None
    for step in range(3):
        for model in (plain, saved):
            model.zero_grad()
            result(model, inputs(name, seed=step)).square().mean().backward()
    for a, b in zip(caches(plain), caches(saved), strict=True):
        torch.testing.assert_close(b.cache.cache, a.cache.cache)
        assert int(b.cache.updates) == 3
    if reentrant and name == "vit":
        return  # without inputs that need a gradient, PyTorch gives a reentrant checkpoint none
    for (key, p), q in zip(plain.named_parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=key)


def test_windows_of_an_image():
    """Swin's layers get several windows per sample, and a mask for each window of an image."""
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2]}
    torch.manual_seed(0)
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=4)).eval()
    pixels = torch.randn(2, 3, 32, 32)
    before = model(pixels).last_hidden_state
    report = weft.cache(model, lambda_init=-math.inf)
    assert len(report.replaced) == 4 and not report.left
    torch.testing.assert_close(model(pixels).last_hidden_state, before)
    model.train()(pixels)
    assert [(int(c.cache.updates), c.cache.cache.shape[1]) for c in caches(model)] == [(1, 16)] * 4
    report.undo()
    assert torch.equal(model.eval()(pixels).last_hidden_state, before)


def test_skipped_layers_and_reasons():
    report = weft.cache(make("t5"))
    assert [path for path in report.replaced] == [f"encoder.block.{i}.layer.0.SelfAttention" for i in (0, 1)]
    assert "another sequence" in report.left["decoder.block.0.layer.1.EncDecAttention"]
    assert "paper caches only the encoder" in report.left["decoder.block.0.layer.0.SelfAttention"]
    report = weft.cache(make("bart"), delayed=True, where="*decoder*self_attn")
    assert report.replaced == ["model.decoder.layers.0.self_attn"]
    report = weft.cache(make("llama"), delayed=False)
    assert not report.replaced and all("delayed=True" in why for why in report.left.values())
    model = make("bert")
    weft.cache(model, where="*.0.*")
    again = weft.cache(model)
    assert "already" in again.left["encoder.layer.0.attention.self.cached.inner"] and len(again.replaced) == 1
    odd = transformers.T5Config(d_model=20, d_kv=8, d_ff=32, num_layers=1, num_heads=6, vocab_size=40)
    assert "are not divisible" in next(iter(weft.cache(transformers.T5EncoderModel(odd)).left.values()))


@pytest.mark.skipif(not hasattr(transformers, "ZayaModel"), reason="this transformers has no Zaya")
@pytest.mark.filterwarnings("ignore:.*keep their own attention")
def test_layers_that_take_images_or_a_dictionary_of_masks_keep_their_attention():
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}
    image = {"image_size": 32, "pretrain_image_size": 32, "patch_size": 8, "window_size": 0}
    vision = transformers.Sam3ViTModel(
        transformers.Sam3ViTConfig(hidden_size=32, intermediate_size=32, global_attn_indexes=[0], **image, **layers)
    )
    sizes = {"hidden_size": 24, "head_dim": 8, "vocab_size": 300, "moe_intermediate_size": 16, "num_experts": 2}
    text = transformers.ZayaModel(transformers.ZayaConfig(num_key_value_heads=2, **sizes, **layers))
    for model, x, why in (
        (vision, torch.randn(1, 3, 32, 32), "takes images"),
        (text, torch.arange(6)[None], "its mask is a dictionary"),
    ):
        report = weft.cache(model)
        assert not report.replaced and why in next(iter(report.left.values()))
        model.train()(x)


@pytest.mark.skipif(not hasattr(transformers, "T5Gemma2Model"), reason="this transformers has no T5Gemma 2")
def test_decoders_that_attend_to_the_encoder_in_the_same_layer():
    """The layer is not marked causal, and its mask covers both sequences."""
    import zoo

    model = zoo.build("t5gemma2/T5Gemma2Model", "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = weft.cache(model, 0.5)
    assert "its mask is merged_attention_mask" in report.refused["decoder.layers.0.self_attn"] and report.replaced
    for module in caches(model):
        module.cache.train()
        nn.init.constant_(module.lam, 0.5)
    given = {"input_ids": zoo.tokens(), "decoder_input_ids": zoo.tokens(2)}
    zoo.outputs(model, given)
    future = {**given, "decoder_input_ids": torch.cat([given["decoder_input_ids"][:, :-3], zoo.tokens(3)[:, :3]], 1)}
    first, second = (zoo.outputs(copy.deepcopy(model), each)[:, :-3] for each in (given, future))
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("first", ["swap", "cache"])
def test_a_mechanism_inside_a_cache(first):
    model, given = make("llama"), inputs("llama")
    with torch.no_grad():
        before = result(model, given)

        def operate(which: str):
            return weft.cache(model) if which == "cache" else weft.swap(model, "linear")

        one = operate(first)
        between = result(model, given)
        two = operate("cache" if first == "swap" else "swap")
        assert len(two.replaced) == 2
        assert not torch.allclose(result(model, given), between, atol=1e-4)
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        tokens = [model.generate(words(2, 9), **settings, use_cache=use) for use in (True, False)]
        assert torch.equal(*tokens)
        two.undo(), one.undo()
        assert torch.equal(result(model, given), before)


def test_attributes_outputs_and_views():
    model, given = make("bert", "eager"), inputs("bert")
    weft.cache(model)
    layer = model.encoder.layer[0].attention.self
    assert layer.num_attention_heads == 4 and layer.is_causal is False and torch.equal(layer.share, torch.ones(4) / 2)
    assert not hasattr(layer, "nonsense")
    out = model(**given, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2 and len(out.hidden_states) == 3 and out.attentions[0].shape == (2, 4, 9, 9)
    assert len(model(**given, return_dict=False)) == 2
    maps = weft.layers.branch_maps(model, **given)
    assert len(maps) == 2 and torch.equal(maps[0].valid, given["attention_mask"].bool())
    twin = copy.deepcopy(model).to(torch.bfloat16).train()
    assert twin(**given).last_hidden_state.dtype == torch.bfloat16
    assert caches(twin)[0].cache.cache.dtype == torch.float32


def test_compiled():
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZE, "num_hidden_layers": 1}, **TEXT, use_cache=False)
    model, given = transformers.LlamaModel(config).train(), inputs("llama")
    weft.cache(model, length=5)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for step in range(2):
        torch.testing.assert_close(result(compiled, given), result(model, given))
        torch.testing.assert_close(caches(other)[0].cache.cache, caches(model)[0].cache.cache)
        assert int(caches(other)[0].cache.updates) == step + 1
