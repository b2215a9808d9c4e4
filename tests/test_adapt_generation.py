"""`generate()` of transformers with decoding states in its caches. tests/test_adapt_huggingface.py compares its tokens
with and without a cache for every mechanism."""

from __future__ import annotations

import copy

import pytest
import torch

import weft

transformers = pytest.importorskip("transformers")

from test_adapt_huggingface import bart, generate, gpt2, hf, llama, mistral, padding, registered, tokens  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from weft.adapt.decoding import HISTORY, StateLayer  # noqa: E402
from weft.core.decoding_state import tree_bytes  # noqa: E402

DECODES = [n for n in hf.available() if weft.attention_info(n).steps and n != "full"]


@pytest.fixture(autouse=True, scope="module")
def everything_registered():
    hf.register()


def keeps_states(cache) -> bool:
    layers = getattr(cache, "self_attention_cache", cache).layers
    return all(isinstance(layer, StateLayer) and not hasattr(layer, "keys") for layer in layers)


def without_a_cache(model, ids, new: int = 8) -> torch.Tensor:
    return generate(model, ids, torch.ones_like(ids), use_cache=False, new=new).sequences


@pytest.mark.parametrize("name", DECODES)
def test_beams_samples_and_drafts(name):
    """Reordered, sampled, and cropped after drafts of another model and of the prompt itself."""
    model, ids, mask = llama(registered(name), num_hidden_layers=1), tokens(2), padding("left", 2)
    first, second = (generate(model, ids, mask, use_cache=c, beams=3, new=6) for c in (True, False))
    assert keeps_states(first.past_key_values)
    assert torch.equal(first.sequences, second.sequences)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        sampled.append(model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=6, use_cache=use_cache))
    assert torch.equal(*sampled)
    ids = tokens(1)
    expected, assistant = without_a_cache(model, ids), llama(registered(name), num_hidden_layers=1)
    with torch.no_grad():
        assistant.lm_head.weight += 0.1 * torch.randn(
            assistant.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)
        )
    for drafts in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        drafted = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **drafts)
        assert keeps_states(drafted.past_key_values)
        assert torch.equal(drafted.sequences, expected)


@pytest.mark.parametrize("name", DECODES)
def test_static_caches_hold_states(name):
    model, ids, mask = gpt2(registered(name), n_layer=1), tokens(2), padding("left", 2)
    expected = generate(model, ids, mask, use_cache=False, new=6).sequences
    static = {"cache_implementation": "static", "disable_compile": True}
    found = generate(model, ids, mask, use_cache=True, new=6, **static)
    assert keeps_states(found.past_key_values)
    assert torch.equal(found.sequences, expected)


def test_a_static_cache_of_layers_that_are_not_marked_causal():
    """BigBirdPegasus has is_causal=False in its decoder, and its masks are causal."""
    import zoo

    model, ids, mask = zoo.build("bigbird_pegasus/BigBirdPegasusForCausalLM", "eager"), zoo.tokens(), padding("left", 2)
    weft.swap(model, to="linear", where="*.self_attn")
    static = {"cache_implementation": "static", "disable_compile": True}
    first, second = (generate(model, ids, mask, use_cache=c, **more) for c, more in ((True, static), (False, {})))
    torch.testing.assert_close(torch.stack(first.logits), torch.stack(second.logits), atol=1e-5, rtol=1e-5)


def test_static_caches_compile():
    """Once for all steps and calls."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ids, mask = llama(registered("combiner-fixed"), num_hidden_layers=1), tokens(2), padding("left", 2)
    how = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    how._compile_all_devices = True
    expected = generate(model, ids, mask, use_cache=False).sequences
    for _ in range(2):
        found = generate(model, ids, mask, use_cache=True, cache_implementation="static", compile_config=how)
        assert torch.equal(found.sequences, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_states_are_small():
    """And do not depend on what created the cache."""
    model, ids = llama("weft:linear"), tokens(1, 60)
    with torch.no_grad():
        caches = [model(ids, use_cache=True).past_key_values, DynamicCache()]
        model(ids, past_key_values=caches[1])
        plain = llama("sdpa")(ids, use_cache=True).past_key_values
    for cache in caches:
        assert keeps_states(cache) and cache.get_seq_length() == 60
        assert sum(tree_bytes(x.state.inner) for x in cache.layers) < sum(2 * x.keys.nbytes for x in plain.layers) / 3


@pytest.mark.parametrize("chunk", [1, 4])
def test_long_prompts_in_chunks(chunk):
    model, ids = llama(registered("combiner-fixed")), tokens(2)
    found = model.generate(ids, max_new_tokens=6, do_sample=False, prefill_chunk_size=chunk)
    assert torch.equal(found, without_a_cache(model, ids, new=6))


@pytest.mark.parametrize("name", ["linear", "combiner-fixed", "longformer"])
def test_caches_may_be_copied_cropped_selected_and_reset(name):
    model, a = llama(registered(name)), tokens(3, 9)
    with torch.no_grad():
        expected = model(a, use_cache=False).logits
        cache = DynamicCache()
        cache.activate_past_recording()
        model(a[:, :7], past_key_values=cache)
        copied = copy.deepcopy(cache)
        chunk = model(a[:, 7:], past_key_values=cache).logits
        torch.testing.assert_close(chunk, expected[:, 7:], atol=1e-5, rtol=1e-5)
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([True, False, True]))
        cache.batch_repeat_interleave(2)
        chunk = model(a[[0, 0, 2, 2], 6:], past_key_values=cache).logits
        torch.testing.assert_close(chunk, expected[[0, 0, 2, 2], 6:], atol=1e-5, rtol=1e-5)
        step = model(a[:, 7:8], past_key_values=copied).logits
        torch.testing.assert_close(step, expected[:, 7:8], atol=1e-5, rtol=1e-5)
        copied.reset()
        plain = llama("sdpa")
        torch.testing.assert_close(plain(a, past_key_values=copied).logits, plain(a).logits)


def test_a_returned_cache_can_be_continued():
    model, ids = llama(registered("combiner-fixed")), tokens(2)
    expected = without_a_cache(model, ids)
    first = generate(model, ids, torch.ones_like(ids), use_cache=True, new=4)
    mask = torch.ones_like(first.sequences)
    second = generate(model, first.sequences, mask, use_cache=True, new=4, past_key_values=first.past_key_values)
    assert torch.equal(second.sequences, expected)


def test_a_changed_part_of_a_model():
    """The other layers run full attention over their keys."""
    model, ids, mask = llama("sdpa"), tokens(), padding("left")
    weft.swap(model, to="linear", where="model.layers.1.*")
    expected = generate(model, ids, mask, use_cache=False).sequences
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        found = generate(model, ids, mask, use_cache=True, **more)
        assert [isinstance(layer, StateLayer) for layer in found.past_key_values.layers] == [False, True]
        assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("pad", [0, 4, 8])
def test_a_changed_part_of_a_model_with_sliding_windows(part, pad):
    """All layers share a mask, but only the unchanged ones have a window in their cache instead of all tokens."""
    model, ids = mistral("sdpa", 6).double(), tokens()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 20
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        weft.swap(model, to="longformer", where=f"model.layers.{part}.*")
        cache, found = DynamicCache(config=model.config), []
        for end in (8, 10, 11):
            start = cache.get_seq_length()
            call = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
            found.append(model(ids[:, start:end], **call).logits)
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [part == 0, part == 1]
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()], atol=1e-9, rtol=1e-9)
    beams = [generate(model, ids, mask, use_cache=c, beams=3).sequences for c in (True, False)]
    assert torch.equal(*beams)


def test_encoder_decoder_models():
    first, second = (generate(bart("weft:linear"), tokens(), padding("right"), use_cache=c) for c in (True, False))
    assert keeps_states(first.past_key_values)
    assert torch.equal(first.sequences, second.sequences)


@pytest.mark.parametrize("model", ["diffllama/DiffLlamaForCausalLM", "mllama/MllamaForCausalLM"])
def test_models_that_use_their_keys_and_values_twice(model):
    """DiffLlama attends twice with the same keys and other values; Mllama looks at the keys in its cache."""
    import zoo

    made, ids, mask = zoo.build(model, "weft:linear"), zoo.tokens(), torch.ones(2, zoo.L, dtype=torch.long)
    mask[1, :4] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    first, second = (made.generate(ids, attention_mask=mask, use_cache=c, **settings) for c in (True, False))
    assert torch.equal(first, second)


@pytest.mark.skipif(not hasattr(transformers, "HrmTextConfig"), reason="this transformers has no HRM")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_layers_that_run_several_times(cache):
    """HRM runs its layers in cycles, each with its own part of the cache."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 64}
    torch.manual_seed(0)
    model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weft.swap(model, "linear")
    ids, mask = tokens(), padding("left")
    more = {} if cache == "dynamic" else {"cache_implementation": "static"}
    first = generate(model, ids, mask, use_cache=True, **more)
    assert keeps_states(first.past_key_values)
    assert torch.equal(first.sequences, generate(model, ids, mask, use_cache=False).sequences)


@pytest.mark.parametrize("name, window", [("longformer", 14), ("local", 14), ("linear", 64)])
def test_sliding_windows_are_outgrown(name, window):
    """A prompt of 11 tokens fits into the model's window, and the result does not."""
    model = mistral(f"weft:{name}", window)
    first, second = (generate(model, tokens(), padding("left"), use_cache=c, new=12) for c in (True, False))
    assert keeps_states(first.past_key_values)
    assert torch.equal(first.sequences, second.sequences)


def test_what_a_state_cannot_do_is_refused():
    model, ids, mask = llama("weft:linear"), tokens(), padding("left")

    def cache(**more):
        with torch.no_grad():
            return model(ids, use_cache=True, **more).past_key_values

    one = ids[:, :1]
    with torch.no_grad():
        with pytest.raises(ValueError, match="another attention reads it"):
            llama("sdpa")(one, past_key_values=cache())
        with pytest.raises(ValueError, match="was filled by weft:linear"):
            llama("weft:local")(one, past_key_values=cache())
        with pytest.raises(ValueError, match="output_attentions"):
            model(one, past_key_values=cache(), output_attentions=True)
        with pytest.raises(ValueError, match="other padding"):
            model(one, past_key_values=cache(attention_mask=mask))
        late = torch.cat([mask, mask[:, -1:]], 1)
        with pytest.raises(ValueError, match="other padding"):
            model(one, past_key_values=cache(), attention_mask=late)
        with pytest.raises(ValueError, match=f"activate_past_recording.* at most {HISTORY}"):
            cache().crop(-1)
        pairs = torch.ones(3, 1, 1, 12, dtype=torch.bool)
        with pytest.raises(ValueError, match="pairwise"):
            model(one, past_key_values=cache(), attention_mask=pairs)
        with pytest.raises(AttributeError, match="keeps a decoding state instead of keys: set use_cache=False"):
            list(cache())
        broken = cache()
        broken.update(*torch.zeros(2, 3, 2, 1, 6), 0)
        with pytest.raises(ValueError, match="did not finish"):
            model(one, past_key_values=broken)
    with pytest.raises(ValueError, match="no_grad"):
        model(one, past_key_values=cache())


def test_training_keeps_no_state():
    """Calls with gradients or dropout work as without a cache."""
    model = llama("weft:full", attention_dropout=0.5)
    model.set_attn_implementation("weft:local")
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    with torch.no_grad():
        cache = model.train()(tokens(), use_cache=True).past_key_values
    assert not any(isinstance(layer, StateLayer) for layer in cache.layers)
