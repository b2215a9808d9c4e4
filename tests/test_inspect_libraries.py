"""Inspection of models of transformers, timm and PyTorch."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import inspect
from weft.inspect.views import attention_views, outermost


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_views_of_transformers_models():
    """Their mechanisms exist after the first call, and do not belong to the state dict."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager")).eval()
    ids = torch.randint(20, (2, 9))
    expected = model(ids, output_attentions=True).attentions
    with pytest.raises(ValueError, match="add one with weft.swap"):
        attention_views(model, [ids])
    weft.swap(model, to="full")
    for view, wanted in zip(attention_views(model, [ids])[0], expected, strict=True):
        torch.testing.assert_close(view.map, wanted, atol=1e-6, rtol=1e-5)
    weft.swap(model, to="linear")
    views = attention_views(model, [ids])[0]
    assert [(view.path, *view.mechanisms) for view in views] == [
        (f"model.layers.{i}.self_attn", "linear", "linear") for i in range(2)
    ]
    assert [mechanism.name for _, mechanism in outermost(model)] == ["linear", "linear"]


def test_views_of_mechanisms_that_the_first_call_creates():
    """The layer was bidirectional, and is called with a causal mask."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    weft.swap(layer, to="linear")
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    (view,), _ = attention_views(layer, [torch.randn(1, 9, 16), mask])
    assert (view.map.triu(1) == 0).all() and (view.map[0, 0].tril() > 0).sum() == 45


def test_a_layer_that_also_returns_its_weights_is_one_view():
    """`need_weights` is the default of nn.MultiheadAttention."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    model = Model().eval()
    weft.swap(model, to="full")
    (view,), _ = attention_views(model, torch.randn(1, 9, 16))
    assert view.path == "attention"


def test_pairwise_biases_of_swapped_layers_are_shown():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    x, bias = torch.randn(1, 9, 16), torch.randn(9, 9).masked_fill(torch.eye(9).bool(), float("-inf"))
    expected, [_, weights] = layer(x, bias), layer.self_attn(x, x, x, attn_mask=bias, average_attn_weights=False)
    weft.swap(layer, to="full")
    [view], out = attention_views(layer, [x, bias])
    torch.testing.assert_close(view.map, weights)
    torch.testing.assert_close(out, expected)


def small(**more):
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    return sizes | more


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "modernbert", "bert"])
def test_full_attention_of_transformers_is_the_models_own(kind):
    """Also with sliding windows, for which a swapped model uses no mechanism unless somebody looks."""
    transformers = pytest.importorskip("transformers")
    more = {"modernbert": {"local_attention": 4}, "bert": {}}.get(kind, dict(sliding_window=4, num_key_value_heads=1))
    config = transformers.AutoConfig.for_model(kind, **small(pad_token_id=0, head_dim=8, **more))
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(1, 20, (1, 9))
    expected = model(ids, output_attentions=True)
    weft.swap(model, to="full")
    views, out = attention_views(model, [ids])
    torch.testing.assert_close(out[0], expected[0])
    for view, weights in zip(views, expected.attentions, strict=True):
        torch.testing.assert_close(view.map, weights)


def test_full_attention_with_relative_positions_of_transformers_is_shown():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    model = transformers.T5EncoderModel._from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(1, 20, (1, 9))
    expected = model(ids, output_attentions=True).attentions
    weft.swap(model, to="full")
    for view, weights in zip(attention_views(model, [ids])[0], expected, strict=True):
        torch.testing.assert_close(view.map, weights)


def test_attention_without_a_mechanism_is_an_error():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(**small(num_key_value_heads=1, head_dim=8, num_local_experts=4))
    model = transformers.GptOssForCausalLM(config).eval()
    weft.swap(model, to="full")
    with pytest.raises(ValueError, match="no mechanism of this model was called: full attention with sinks"):
        attention_views(model, [torch.randint(20, (1, 9))])


class Foreign(torch.nn.Module):
    """PyTorch's layers in a list or in their encoder, whose padding masks are True at padding, or BERT."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.embed = kind, torch.nn.Embedding(30, 16)
        layers = [torch.nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        if kind == "bert":
            transformers = pytest.importorskip("transformers")
            sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
            self.inner = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16))
        elif kind == "encoder":
            self.inner = torch.nn.TransformerEncoder(layers[0], 2, enable_nested_tensor=False)
        else:
            self.inner = torch.nn.ModuleList(layers)

    def forward(self, ids):
        if self.kind == "bert":
            return self.inner(ids, attention_mask=(ids > 0).long())[0]
        x, pad = self.embed(ids), ids == 0
        for layer in [self.inner] if self.kind == "encoder" else self.inner:
            x = layer(x, None, pad)
        return x


@pytest.mark.parametrize("kind", ["list", "encoder", "bert", "swapped bert"])
def test_padding_of_other_libraries_layers_is_not_measured(kind):
    torch.manual_seed(0)
    model, ids = Foreign(kind.split()[-1]), torch.randint(1, 30, (4, 4))  # as many rows as tokens
    if "swapped" in kind:
        weft.swap(model, "full")
    weft.cache(model)
    model.train()(ids)
    rates = [inspect.measure(model.eval(), x)["rate"] for x in (ids, torch.nn.functional.pad(ids, (0, 3)))]
    torch.testing.assert_close(*rates, rtol=1e-4, atol=1e-4)
    assert rates[0].min() > 1
    assert len(inspect.tokens_per_layer(model, torch.nn.functional.pad(ids, (0, 3)))[1]) == 4


def _rate(z: torch.Tensor) -> torch.Tensor:
    z = z / z.norm(dim=-1, keepdim=True)
    return torch.logdet(torch.eye(len(z), dtype=z.dtype) + z.shape[1] / (len(z) * 0.01) * z @ z.T) / 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_blocks_of_transformers_models_are_measured(swapped, padded):
    """They keep their mechanisms outside of their modules, and create them in their first call."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    ids = torch.randint(1, 30, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: states.append(output.detach().double()))
    model(ids, mask)
    expected = [[_rate(z[real.bool()]) for z, real in zip(layer, mask, strict=True)] for layer in states]
    if swapped:
        weft.swap(model, "full")
    else:
        weft.huggingface.register()
        model.set_attn_implementation("weft:full")
    found = inspect.measure(model, [ids, mask])["rate"]
    torch.testing.assert_close(found, torch.stack([torch.stack(row) for row in expected]), rtol=1e-5, atol=1e-5)
    z, tokens, _ = inspect.tokens_per_layer(model, [ids, mask])
    assert z.shape == (2, len(tokens), 16) and len(tokens) == 7 - 3 * padded
