"""Mechanisms with parameters or centroids in transformers models."""

from __future__ import annotations

import pytest
import torch

import weft

transformers = pytest.importorskip("transformers")

import zoo  # noqa: E402
from test_adapt_huggingface import bert, generate, gpt2, hf, llama, padding, tokens, vit  # noqa: E402

CASES = [
    (bert, "linformer", {"max_length": 32, "rank": 4}),
    (vit, "linformer", {"max_length": 32, "rank": 4}),  # save_pretrained renames its layers
    (bert, "sinkhorn", {"max_length": 32, "block_size": 4}),
    (llama, "synthesizer", {"max_length": 64}),
    (llama, "routing", {"clusters": 4}),
    (llama, "combiner-routing", {"clusters": 4}),
    (gpt2, "combiner-fixed", {"block_size": 4, "summary": "deepsets-max"}),
]


def inputs(build) -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels} if build is vit else {"input_ids": tokens()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("build", "name", "options"), CASES)
def test_their_tensors_belong_to_the_model(build, name, options, dtype, tmp_path):
    transformers.logging.set_verbosity_error()
    model, before = build("sdpa").to(dtype), build("sdpa").state_dict()
    report = weft.swap(model, to=name, **options)
    assert len(report.replaced) == 2 and not report.left
    own = {key: value for key, value in model.state_dict().items() if key not in before}
    rounded = [x for key, x in own.items() if x.is_floating_point() and ".clusters." not in key]  # these stay float32
    assert own and all(x.dtype == dtype for x in rounded)
    first = {key: value.clone() for key, value in own.items()}
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    x = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs(build).items()}
    for _ in range(2):
        model(**x)[0].float().square().mean().backward()
        optimizer.step()
    learned = [key for key, value in first.items() if not torch.equal(value, model.state_dict()[key])]
    assert len({key.split(".weft.")[0] for key in learned}) == 2
    model.eval()
    model.save_pretrained(tmp_path)
    again = hf.load(tmp_path, dtype=dtype).eval()
    saved, loaded = model.state_dict(), again.state_dict()
    assert all(torch.equal(loaded[key], saved[key]) and loaded[key].dtype == saved[key].dtype for key in saved)
    if dtype == torch.float32:  # rotary frequencies, which are not saved, lose precision in a model that is cast
        with torch.no_grad():
            assert torch.equal(again(**x)[0], model(**x)[0])
    report.undo()
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize(("build", "name", "options"), CASES[3:])
def test_they_generate(build, name, options):
    model = build("sdpa")
    weft.swap(model, to=name, **options)
    first, second = (generate(model, tokens(), padding("left"), use_cache=c) for c in (True, False))
    assert torch.equal(first.sequences, second.sequences)


def test_a_second_swap_removes_them():
    model = llama("sdpa")
    plain = model.state_dict().keys()
    weft.swap(model, to="synthesizer", max_length=64)
    weft.swap(model, to="linear")
    assert model.state_dict().keys() == plain
    hf.register()
    torch.testing.assert_close(model(tokens()).logits, llama("weft:linear")(tokens()).logits)


def test_the_width_of_the_heads_may_not_divide_the_channels():
    """GLM-4.5 has 5,120 channels and 96 heads of 128."""
    sizes = {"hidden_size": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=1, intermediate_size=32, vocab_size=99)
    model = transformers.Qwen3ForCausalLM(config).eval()
    assert not weft.swap(model, to="synthesizer", max_length=64).left
    model(tokens())


@pytest.mark.skipif("rf_detr/RfDetrModel" not in zoo.every(), reason="transformers does not have it")
def test_layers_whose_heads_are_unknown_are_skipped():
    model = zoo.build("rf_detr/RfDetrModel", "eager")
    with pytest.warns(UserWarning, match="keep their own attention"):
        report = weft.swap(model, to="synthesizer", max_length=64)
    assert len(report.replaced) == 2 and all(path.startswith("backbone.") for path in report.replaced)
    assert report.refused["decoder.layers.0.self_attn"] == "cannot read its channels and heads"


def test_a_name_cannot_have_parameters():
    with pytest.raises(ValueError, match="no place to store them: use weft.swap"):
        hf.register("combiner-fixed", as_="weft:learned", summary="deepsets-max")
