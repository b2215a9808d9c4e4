"""Whole classifiers of the wide-attention study's published code, rebuilt from our parts: same weights, same logits.

A case's attention, sizes, pooling and head are read from its arrays, so a new case of a known kind needs no new code.
Where the published code has a bug that we do not repeat, the case is skipped with that reason; for Sinkhorn the bugs
are put back here, to show that nothing else differs.
"""

from __future__ import annotations

import re

import golden
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.attention import Attention
from weft.attention.bigbird import random_plan
from weft.models import TextClassifier, TextMatcher

FILE = "lra_linen.npz"

INERT_SORT = "the published Sinkhorn adds up all blocks whatever its sort says, and averages over padding; ours sorts"
NOT_REPEATED = {
    "local_mean": "the published code counts block padding as real keys and averages over padding",
    "bigbird_pad": "the published code counts block padding as real keys",
    "sinkhorn_mean": INERT_SORT,
    "sinkhorn_mean_more_blocks_than_max": INERT_SORT,
    "sinkhorn_sinkhornact": INERT_SORT,
}
# The published code gives these no padding mask; with every token taken as real, ours must agree.
MASKLESS = ("linear", "linformer", "performer", "synthesizer without dot product")

PUBLISHED_SINKHORN = {"sinkhorn_mean": 4, "sinkhorn_mean_more_blocks_than_max": 2}  # block sizes

Case = dict[str, np.ndarray]


class PublishedSinkhorn(Attention):
    """The published Sinkhorn: own block plus the sum of all blocks; padding counts as real."""

    def __init__(self, block: int, columns: int, **contract):
        super().__init__(**contract)
        self.block, self.sort = block, nn.Parameter(torch.zeros(self.head_dim, columns))  # the sort is never used

    def forward(self, q, k, v, mask=None, bias=None):
        L, D = q.shape[2:]
        fill = -L % self.block
        q, k, v = (F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, self.block)) for x in (q, k, v))
        real = F.pad(mask, (0, fill), value=True).unflatten(1, (-1, self.block))[:, None]
        pair = real[..., :, None] & real[..., None, :]

        def attend(k: Tensor, v: Tensor, pair: Tensor) -> Tensor:
            return ((q / D**0.5) @ k.transpose(-1, -2) + torch.where(pair, 0.0, -1e10)).softmax(-1) @ v

        summed = (x.sum(2, keepdim=True) for x in (k, v))
        out = attend(k, v, pair) + attend(*summed, pair.any(2, keepdim=True))
        return out.flatten(2, 3)[:, :, :L]


def attention_of(name: str, case: Case, weights: Case):
    """Kind, registered name and options of a case, from the published module's name and the arrays' shapes."""
    modules = {part for key in weights for part in key.split("/") if part.endswith("SelfAttention_0")}
    module = next(iter(modules - {"SelfAttention_0"}), "none")
    first = {key.split(f"{module}/")[1]: w for key, w in weights.items() if f"block_0/{module}/" in key}
    if module == "MaskedSelfAttention_0" and not any("GenericBlock_0" in key for key in weights):
        return "full", "full", {}
    if module == "MaskedSelfAttention_0" and "projection_per_layer_in_apply" in case:
        return "performer", "performer", {"features": case["projection_per_layer_in_apply"].shape[1]}
    if module == "MaskedSelfAttention_0" and "generalized" in name:
        return "performer", "performer", {"kernel": "relu"}
    if module == "LinearSelfAttention_0":
        return "linear", "linear", {}
    if module == "LinformerSelfAttention_0":
        return "linformer", "linformer", {"rank": first["lr_kernel"].shape[1]}
    if module == "LocalSelfAttention_0":
        return "local", "local", {"block_size": 4}
    if module == "LongformerSelfAttention_0":
        window = re.search(r"_w(\d+)", name)
        return "longformer", "longformer", {"window": int(window[1]) if window else 4}
    if module == "SynthesizerSelfAttention_0":
        dot = "query/kernel" in first
        kind = "synthesizer" if dot else "synthesizer without dot product"
        return kind, "synthesizer", {"kind": "factorized", "rank": first["random1"].shape[2], "dot": dot}
    if module == "SparseSelfAttention_0":
        sizes = re.search(r"default(\d+)_(\d+)", name)
        block, columns = (int(sizes[1]), int(sizes[2])) if sizes else (4, 2)
        options = {"block_size": block, "columns": columns, "leading_column": True, "cls": True, "one_way": True}
        return "sparse", "sparse", options
    if module == "SinkhornSelfAttention_0":
        block, columns = PUBLISHED_SINKHORN[name], first["DenseGeneral_0/kernel"].shape[1]
        heads, head_dim = first["query/kernel"].shape[1:]
        return "sinkhorn", lambda layer: PublishedSinkhorn(block, columns, heads=heads, head_dim=head_dim), None
    if module == "BigBirdSelfAttention_0":
        return "bigbird", "bigbird", {"block_size": 4, "random_blocks": 3}  # seeded with the layer's number
    pytest.fail(
        f"golden case {name} is of a kind this test does not know ({module}): teach it, or say why it is skipped"
    )


def build(name: str, case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Our model with the case's weights, and its arguments."""
    weights = {key.removeprefix("w/"): w for key, w in case.items() if key.startswith("w/")}
    weights = {re.sub(r"^(encoder|GenericEncoder_0)/|GenericBlock_0/", "", key): w for key, w in weights.items()}
    kind, attention, options = attention_of(name, case, {key: w for key, w in case.items() if key.startswith("w/")})
    length, dim, heads, inner, mlp_dim, layers, vocab = (int(x) for x in case["cfg_L_E_H_qkv_M_layers_vocab"])
    dual, cls = "inputs2" in case, "cls" in weights
    common = dict(
        max_length=length + cls,
        dim=dim,
        heads=heads,
        head_dim=inner // heads,
        layers=layers,
        mlp_dim=mlp_dim,
        attention=attention,
        attention_options=options,
        pooling="cls" if cls else ("first" if dual else "mean"),
        dtype=torch.float64,
    )
    classes = case["logits"].shape[1]
    if dual:
        model: nn.Module = TextMatcher(vocab, classes, **common)
    else:
        model = TextClassifier(vocab, classes, head_width=mlp_dim if "mlp/kernel" in weights else 0, **common)
    state = {our_name(key): torch.tensor(ours_shape(key, w)) for key, w in weights.items() if "_global/" not in key}
    for layer, projection in enumerate(case.get("projection_per_layer_in_apply", ())):
        state[f"encoder.blocks.{layer}.attention.attention.projection"] = torch.tensor(projection)
    head = [m for m in ("mlp", "mlp2", "logits") if f"{m}/kernel" in weights]
    for key in list(state):  # the head's layers by number, the ReLUs between them counted
        if key.split(".")[0] in head:
            state[f"head.{2 * head.index(key.split('.')[0])}.{key.split('.')[1]}"] = state.pop(key)
    model.load_state_dict(state)  # strict: every parameter of ours is given, every published weight is used
    ids = [torch.tensor(case[key]) for key in ("inputs", "inputs2") if key in case]
    masks = [torch.ones_like(x, dtype=torch.bool) for x in ids] if kind in MASKLESS else []
    return model.eval(), (*ids, *masks)


def our_name(key: str) -> str:
    """A Flax path as the name of our parameter."""
    layer = re.match(r"encoderblock_(\d+)/", key)
    part = key[layer.end() :] if layer else key
    part = re.sub(r"^MaskedSelfAttention_0/", "", part)
    part = re.sub(r"^\w*SelfAttention_0/", "attention/", part)
    part = part.replace("_sliding_window/", "/")
    for theirs, ours in {
        "Embed_0/embedding": "embed/weight",
        "encoder_norm/": "norm/",
        "LayerNorm_0/": "attention_norm/",
        "LayerNorm_1/": "feedforward_norm/",
        "MlpBlock_0/Dense_0/": "feedforward/up/",
        "MlpBlock_0/Dense_1/": "feedforward/down/",
        "attention/query/": "attention/q/",
        "attention/key/": "attention/k/",
        "attention/value/": "attention/v/",
        "attention/lr_kernel": "attention/attention/kernel",
        "attention/DenseGeneral_0/kernel": "attention/attention/sort",
        "attention/random1": "attention/attention/factors/0",
        "attention/random2": "attention/attention/factors/1",
        "/scale": "/weight",
    }.items():
        part = part.replace(theirs, ours)
    part = re.sub(r"/kernel$", "/weight", part) if not part.endswith("attention/attention/kernel") else part
    if part.split("/")[0] in ("mlp", "mlp2", "logits"):
        return part.replace("/", ".")
    return f"encoder.{f'blocks.{layer[1]}.' if layer else ''}{part.replace('/', '.')}"


def ours_shape(key: str, w: np.ndarray) -> np.ndarray:
    """Flax kernels are [in…, out…]; ours are [out, in]."""
    if key == "cls":
        return w.reshape(-1)
    if not key.endswith("/kernel") or "DenseGeneral_0" in key:
        return w
    if "SelfAttention_0" in key:
        return w.reshape(-1, w.shape[-1]).T if "/out/" in key else w.reshape(w.shape[0], -1).T
    return w.T


@pytest.mark.parametrize("name", [n for n in golden.names(FILE) if n != "bigbird_plan"])
def test_same_logits_as_the_published_code(name):
    case = golden.case(FILE, name)
    if name in NOT_REPEATED:
        pytest.skip(f"{name}: {NOT_REPEATED[name]}")
    model, arguments = build(name, case)
    with torch.no_grad():
        got = model(*arguments)
    torch.testing.assert_close(got, torch.tensor(case["logits"]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PUBLISHED_SINKHORN)
def test_published_sinkhorn_differs_only_in_its_bugs(name):
    case = golden.case(FILE, name)
    model, (ids,) = build(name, case)
    with torch.no_grad():
        vectors, _ = model.encoder.tokens(ids)
        got = model.head(vectors.mean(1))  # over padding too
    torch.testing.assert_close(got, torch.tensor(case["logits"]), rtol=0, atol=1e-9)


def test_same_random_blocks_as_the_published_code():
    for name, plan in golden.case(FILE, "bigbird_plan").items():
        seed, length, block, r, heads = map(int, re.findall(r"\d+", name))
        np.testing.assert_array_equal(random_plan(length, block, r, heads, seed), plan, err_msg=name)
