"""Packed batches in transformers models: every document as if it were alone."""

from __future__ import annotations

import pytest
import torch
from test_adapt_huggingface import gpt2, hf, llama, mistral, registered, tokens, transformers

import weft

hf.register()
LENGTHS = [4, 1, 8, 4]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
OFFSETS = torch.tensor([0, 4, 5, 13, 17], dtype=torch.int32)
FLASH = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 8, "max_length_k": 8}
CAUSAL = [name for name in hf.available() if weft.attention_info(name).causal]


def alone(model, ids):
    return torch.cat([model(document, use_cache=False).logits for document in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("name", CAUSAL)
def test_each_document_equals_the_document_alone(name):
    model, ids = llama(registered(name), num_hidden_layers=1).double(), tokens(1, 17)
    found = []
    for logits in (model(ids, position_ids=POSITIONS, use_cache=False).logits, alone(model, ids)):
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()), materialize_grads=True)
        found.append([logits, *grads])
    for packed, apart in zip(*found, strict=True):
        torch.testing.assert_close(packed, apart, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ("linear", "full", "combiner-fixed"))
def test_however_the_model_says_it(name):
    model, ids = llama(f"weft:{name}").double(), tokens(1, 17)
    expected = alone(model, ids)
    whole = torch.ones_like(ids)
    for said in (
        {"use_cache": True},  # transformers' own mask does not separate documents here
        {"use_cache": False, "attention_mask": whole},
        {"use_cache": False, **FLASH},
    ):
        logits = model(ids, position_ids=POSITIONS, **said).logits
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)
    rows = model(ids.expand(2, -1), position_ids=POSITIONS.expand(2, -1), use_cache=False).logits
    torch.testing.assert_close(rows, expected.expand(2, -1, -1), atol=1e-9, rtol=1e-9)
    weights = model(ids, position_ids=POSITIONS, use_cache=False, output_attentions=True).attentions[0]
    assert (weights[:, :, 4:, :4] == 0).all() and (weights[:, :, 5:13, 5:13].sum(-1) > 0).all()


def test_full_equals_sdpa():
    ids = tokens(1, 17)
    for make in (llama, gpt2):
        ours, theirs = (make(i)(ids, position_ids=POSITIONS, use_cache=False).logits for i in ("weft:full", "sdpa"))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_full_separates_documents_in_chunks():
    """With a cache, transformers counts chunks from the start of the row."""
    settings = {"hidden_size": 24, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "pad_token_id": 0}
    settings |= {"attention_chunk_size": 6, "layer_types": ["chunked_attention"], "moe_layers": []}
    model, ids = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**settings)).eval(), tokens(1, 17)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            parameter.data *= 20
    expected = model(ids, position_ids=POSITIONS, use_cache=False).logits
    weft.swap(model, to="full")
    for more in ({}, FLASH):
        logits = model(ids, position_ids=POSITIONS, use_cache=False, **more).logits
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="Llama4TextAttention has chunks.*use_cache=False"):
        model(ids, position_ids=POSITIONS, **FLASH)


@pytest.mark.parametrize("name", ("longformer", "full", "local"))
def test_sliding_windows_within_documents(name):
    model, ids = mistral(f"weft:{name}", 3).double(), tokens(1, 17)
    packed = model(ids, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(packed, alone(model, ids), atol=1e-9, rtol=1e-9)


def test_the_padding_free_collator_trains_on_each_document():
    model = llama("weft:linear").double()
    documents = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(1, 17)[0].split(LENGTHS)]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents)
    model(**batch, use_cache=False).loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    targets = sum(n - 1 for n in LENGTHS)
    for row in documents:
        ids = torch.tensor([row["input_ids"]])
        if ids.shape[1] > 1:
            (model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1) / targets).backward()
    for mine, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, atol=1e-9, rtol=1e-9)


def test_swapped_models():
    model, ids = llama("sdpa").double(), tokens(1, 17)
    weft.swap(model, "combiner-fixed")
    packed = model(ids, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(packed, alone(model, ids), atol=1e-9, rtol=1e-9)


def test_positions_that_only_jump_are_one_document():
    model, ids = llama("weft:linear"), tokens(1, 8)
    with torch.no_grad():
        jumps = model(ids, position_ids=2 * torch.arange(8)[None], attention_mask=torch.ones_like(ids)).logits
        later = ids.clone()
        later[0, 0] = (later[0, 0] + 1) % 40
        changed = model(later, position_ids=2 * torch.arange(8)[None], attention_mask=torch.ones_like(ids)).logits
    assert (jumps[:, -1] - changed[:, -1]).abs().max() > 1e-6  # the last token still sees the first


def test_what_cannot_be_packed_is_refused():
    model, ids = llama("weft:linear"), tokens(1, 17)
    with pytest.raises(ValueError, match="need one row"):
        model(ids.expand(2, -1), use_cache=False, **FLASH)
    with pytest.raises(ValueError, match="not decrease"):
        model(ids, use_cache=False, cu_seq_lens_q=torch.tensor([0, 9, 5, 17]))
    with torch.no_grad():
        past = model(ids, position_ids=POSITIONS, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="cached tokens"):  # which document should the new token continue?
            model(ids[:, :1], past_key_values=past, position_ids=torch.tensor([[4]]))
    weft.cache(model, delayed=True)
    with pytest.raises(ValueError, match="one sample per row"):
        model.train()(ids, position_ids=POSITIONS, use_cache=False)
