"""Changed models that are saved and restored, in this process and in a fresh one."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import weft

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
TOWERS = "vision-text-dual-encoder/VisionTextDualEncoderModel"


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 3).eval()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, *inputs: torch.Tensor) -> None:
    """Fills caches, and changes the initial parameters."""
    model.train()
    out = model(*inputs)
    out = getattr(out, "logits", getattr(out, "last_hidden_state", out))
    out.square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval()


def test_a_description_can_be_applied_again():
    model, x = encoder(), noise(2, 9, 24)
    assert weft.describe(model) == {}
    weft.swap(model, "linformer", where="layers.0.*", max_length=12, rank=4)
    weft.swap(model, "performer", where="layers.1.*")
    weft.cache(model, 0.5, where="layers.[12].*", length=5)
    train(model, x)
    description = json.loads(json.dumps(weft.describe(model)))
    assert set(description["swapped"]) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert set(description["cached"]) == {"layers.1.self_attn", "layers.2.self_attn"}
    again = encoder()
    reports = weft.apply(again, description)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x), **CLOSE)
    assert weft.describe(again) == weft.describe(model)
    for report in reversed(reports):
        report.undo()
    assert weft.describe(again) == {}


def test_a_description_of_another_model_is_refused():
    with pytest.raises(ValueError, match="matches none of the layers|no such layer"):
        weft.apply(encoder(), {"swapped": {"blocks.7.attn": {"to": "linear"}}})
    with pytest.raises(ValueError, match="'swapped' and 'cached'"):
        weft.apply(encoder(), {"swaped": {}})


@pytest.mark.parametrize("change", ["swap", "cache", "swap and cache", "one layer"])
@pytest.mark.parametrize("name", ["llama/LlamaForCausalLM", "bert/BertModel", "vit/ViTModel"])
def test_transformers(name, change, tmp_path):
    transformers = pytest.importorskip("transformers")
    import zoo

    transformers.logging.set_verbosity_error()
    model = zoo.build(name, "sdpa")
    inputs = {"pixel_values": zoo.noise(2, 3, 32, 32)} if "vit" in name else {"input_ids": zoo.tokens()}
    plain = zoo.outputs(model, inputs)
    if "swap" in change or change == "one layer":
        weft.swap(model, "combiner-fixed", block_size=4, where="*1.*" if change == "one layer" else None)
    if "cache" in change:
        weft.cache(model, 0.5)
        model.train()
        model(**inputs)
        for key, parameter in model.named_parameters():
            if key.endswith(".lam"):
                parameter.data.fill_(0.5)
        model.eval()
    expected = zoo.outputs(model, inputs)
    assert not torch.allclose(expected, plain, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["weft"] == weft.describe(model)
    with pytest.warns(UserWarning, match=r"weft.huggingface.load\(folder\)"):
        type(model).from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = weft.huggingface.load(tmp_path)
    torch.testing.assert_close(zoo.outputs(again, inputs), expected, **CLOSE)
    assert weft.describe(again) == weft.describe(model)


@pytest.mark.parametrize("change", [partial(weft.swap, to="linear"), partial(weft.cache, ratio=0.5)])
@pytest.mark.parametrize("wrap", [torch.nn.Sequential, partial(torch.compile, backend="eager")])
def test_a_model_that_is_changed_through_a_wrapper(wrap, change, tmp_path):
    pytest.importorskip("transformers")
    import zoo

    model, inputs = zoo.build("mistral/MistralForCausalLM", "sdpa"), {"input_ids": zoo.tokens()[:, :5]}
    change(wrap(model), **({"max_length": 5} if "to" in change.keywords else {}))
    model.save_pretrained(tmp_path)
    again = weft.huggingface.load(tmp_path)
    assert weft.describe(again) == weft.describe(model) != {}
    torch.testing.assert_close(zoo.outputs(again, inputs), zoo.outputs(model, inputs), **CLOSE)


@pytest.mark.parametrize("wrap_first", [False, True])
def test_layers_in_wrappers(wrap_first, tmp_path):
    pytest.importorskip("transformers")
    import zoo
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, ids = zoo.build("llama/LlamaForCausalLM", "sdpa"), zoo.tokens()
    if not wrap_first:
        weft.swap(model, "linear")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    if wrap_first:
        weft.swap(model, "linear")
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(weft.huggingface.load(tmp_path).eval()(ids)[0], model(ids)[0])


@pytest.mark.parametrize("name", ["llava/LlavaForConditionalGeneration", "tipsv2/Tipsv2Model", TOWERS])
def test_two_towers_with_the_same_numbers(name, tmp_path):
    """save_pretrained writes layers under other names, in LLaVA `language_model.model.layers.0`."""
    transformers = pytest.importorskip("transformers")
    import zoo

    transformers.logging.set_verbosity_error()
    if not hasattr(transformers, name.split("/")[1]):
        pytest.skip(f"this transformers has no {name}")
    model = zoo.build(name, "sdpa")
    weft.swap(model, "linear")
    weft.cache(model, 0.5)
    for parameter in (p for key, p in model.named_parameters() if ".cached." in key):
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    for _ in range(2):  # and saved again
        again = weft.huggingface.load(tmp_path)
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key
        again.save_pretrained(tmp_path)


@pytest.mark.parametrize("whole", ["", "before", "after"])
def test_parts_of_a_model_that_are_changed_alone(whole, tmp_path):
    """Their configs describe the changes; the latest counts."""
    transformers = pytest.importorskip("transformers")
    import zoo

    transformers.logging.set_verbosity_error()
    model = zoo.build("clip/CLIPModel", "sdpa")
    if whole == "before":
        weft.swap(model, "local", block_size=4)
    weft.swap(model.vision_model, "linformer", max_length=40, rank=4)
    if whole == "after":
        weft.swap(model, "local", block_size=4)
    model.save_pretrained(tmp_path)
    again = weft.huggingface.load(tmp_path)
    description = weft.describe(again)
    assert description == weft.describe(model)
    assert {s["to"] for path, s in description["swapped"].items() if "vision" in path} == {
        "local" if whole == "after" else "linformer"
    }
    assert whole == "" or any("text" in path for path in description["swapped"])
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "name, to",
    [("bert/BertModel", "linformer"), ("llama/LlamaForCausalLM", "synthesizer"), ("bert/BertModel", "routing")],
)
def test_learned_mechanisms_in_transformers(name, to, cached, tmp_path):
    """They belong to the layers: created like them, trained, saved and restored."""
    pytest.importorskip("transformers")
    import zoo

    model, ids = zoo.build(name, "sdpa").to(torch.float64), zoo.tokens()
    plain, keys = zoo.outputs(model, {"input_ids": ids}), model.state_dict().keys()
    options = {} if to == "routing" else {"max_length": 16}
    report = weft.swap(model, to, **options)
    assert report.replaced and not report.left
    mine = {key: p for key, p in model.named_parameters() if ".weft." in key}
    assert all(p.dtype == torch.float64 for p in mine.values()) and (mine or to == "routing")
    if cached:
        second = weft.cache(model, 0.5)
    train(model, ids)
    assert all(p.grad is not None and p.grad.any() for p in mine.values())
    expected = zoo.outputs(model, {"input_ids": ids})
    model.save_pretrained(tmp_path)
    again = weft.huggingface.load(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(zoo.outputs(again, {"input_ids": ids}), expected, **CLOSE)
    if cached:
        second.undo()
    report.undo()
    assert model.state_dict().keys() == keys and zoo.outputs(model, {"input_ids": ids}).shape == plain.shape


def test_transformers_in_a_fresh_process(tmp_path):
    pytest.importorskip("transformers")
    import zoo

    model, ids = zoo.build("llama/LlamaForCausalLM", "sdpa"), zoo.tokens()
    weft.swap(model, "performer")
    weft.cache(model, 0.5)
    model.train()(ids)
    model.eval().save_pretrained(tmp_path)
    torch.save({"ids": ids, "logits": zoo.outputs(model, {"input_ids": ids})}, tmp_path / "expected.pt")
    code = (
        "import sys, warnings, weft; assert 'transformers' not in sys.modules;"
        "from transformers import LlamaForCausalLM; warnings.simplefilter('error', UserWarning)\n"
        "try: LlamaForCausalLM.from_pretrained(sys.argv[1])\n"
        "except UserWarning as warning: assert 'weft.huggingface.load' in str(warning)\n"
        "else: raise AssertionError('no warning')\n"
        "import torch; model = weft.huggingface.load(sys.argv[1]).eval();"
        "kept = torch.load(sys.argv[1] + '/expected.pt');"
        "torch.testing.assert_close(model(kept['ids']).logits.detach(), kept['logits'])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


@pytest.mark.parametrize("to", ["linear", "synthesizer"])
@pytest.mark.parametrize("change_base, save_base", [(True, False), (False, True)])
def test_a_base_model_that_is_changed_or_saved_alone(to, change_base, save_base, tmp_path):
    """It shares its config with the model around it, but its paths are shorter."""
    pytest.importorskip("transformers")
    import zoo

    model, ids = zoo.build("llama/LlamaForCausalLM", "sdpa"), zoo.tokens()
    weft.swap(model.model if change_base else model, to, max_length=64)
    weft.cache(model.model if change_base else model, 0.5)
    model.train()(ids)
    model.eval()
    saved = model.model if save_base else model
    saved.save_pretrained(tmp_path)
    again = weft.huggingface.load(tmp_path).eval()
    torch.testing.assert_close(again(ids)[0], saved(ids)[0], **CLOSE)


def test_the_settings_of_generation_are_kept(tmp_path):
    """Also if the model has tensors of a mechanism, and so is not loaded by from_pretrained alone."""
    pytest.importorskip("transformers")
    import zoo

    model = zoo.build("llama/LlamaForCausalLM", "sdpa")
    model.generation_config.update(eos_token_id=7, max_new_tokens=5, num_beams=3)
    weft.swap(model, "synthesizer", max_length=64)
    model.save_pretrained(tmp_path)
    again = weft.huggingface.load(tmp_path).generation_config
    assert (again.eos_token_id, again.max_new_tokens, again.num_beams) == (7, 5, 3)


def test_models_that_share_a_config_are_saved_with_their_own_changes(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=40)
    models = {to: transformers.LlamaForCausalLM(config).eval() for to in ("plain", "linear", "local")}
    for to in ("linear", "local"):
        weft.swap(models[to], to)
    for to, model in models.items():
        model.save_pretrained(save_directory=tmp_path / to)
        stored = json.loads((tmp_path / to / "config.json").read_text())
        assert stored.get("weft", {}) == weft.describe(model) and bool(weft.describe(model)) == (to != "plain")


def test_a_pickled_model_can_be_swapped_in_a_fresh_process(tmp_path):
    """It runs there, and mechanisms of an earlier swap are not taken for those of the next one."""
    pytest.importorskip("transformers")
    code = (
        "import copy, sys, torch, weft; from transformers import LlamaConfig, LlamaForCausalLM\n"
        "path, ids = sys.argv[1], torch.arange(24)[None]\n"
        "sizes = {'num_hidden_layers': 2, 'num_attention_heads': 2, 'vocab_size': 40}\n"
        "if sys.argv[2] == 'save':\n"
        "    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, **sizes)).eval()\n"
        "    plain = copy.deepcopy(model)\n"
        "    weft.swap(model, 'local', block_size=4), model(ids), weft.swap(plain, 'linear')\n"
        "    torch.save([model, model(ids).logits.detach(), plain(ids).logits.detach()], path)\n"
        "else:\n"
        "    model, before, expected = torch.load(path, weights_only=False)\n"
        "    torch.testing.assert_close(model(ids).logits.detach(), before)\n"
        "    weft.swap(model, 'linear')\n"
        "    torch.testing.assert_close(model(ids).logits.detach(), expected)\n"
    )
    for what in ("save", "load"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt"), what], check=True, timeout=120)


def test_undo_removes_the_description(tmp_path):
    pytest.importorskip("transformers")
    import zoo

    model = zoo.build("llama/LlamaForCausalLM", "sdpa")
    report = weft.swap(model, "linear")
    assert model.config.weft["swapped"]["model.layers.0.self_attn"]["to"] == "linear"
    report.undo()
    assert not hasattr(model.config, "weft")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="describes no swap or cache"):
        weft.huggingface.load(tmp_path)


def test_timm(tmp_path):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes)
    images = noise(2, 3, 64, 64)
    weft.swap(model, "linformer", where="blocks.0.*", max_length=17, rank=4)
    weft.swap(model, "local", where="blocks.1.*", block_size=4, prefix=1)
    weft.cache(model, 0.5, where="blocks.1.*", length=17)
    train(model, images)
    weft.timm.save(model, tmp_path, **sizes)
    again = weft.timm.load(tmp_path).eval()
    torch.testing.assert_close(again(images), model(images), **CLOSE)


@pytest.mark.parametrize("kind", ["layers", "mixed", "crate"])
def test_subsampled_models_of_weft_can_be_described(kind):
    def build():
        if kind == "crate":
            return weft.models.CRATE(dim=8, heads=2, layers=2, classes=2, image_size=8, patch=4)
        mechanisms = ["full", "full"] if kind == "mixed" else "full"
        return weft.models.LanguageModel(
            30, max_length=16, dim=16, heads=4, head_dim=4, layers=2, mlp_dim=16, attention=mechanisms
        )

    x = torch.rand(2, 3, 8, 8) if kind == "crate" else torch.randint(30, (2, 16))
    model, copied = build(), build()
    report = weft.subsample(model, "S1-L2", sigma=(0.1, 0.3), keep=0.5)
    weft.apply(copied, json.loads(json.dumps(weft.describe(model))))
    copied.load_state_dict(model.state_dict())
    outputs = []
    for each in (model, copied):
        torch.manual_seed(0)
        outputs.append(each.train()(x))
    assert torch.equal(*outputs)
    report.undo()
    assert weft.describe(model) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_random_features_do_not_depend_on_the_default_dtype(dtype):
    drawn = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            torch.manual_seed(0)
            drawn.append(weft.make_attention("reformer", heads=2, head_dim=8).rotations.double())
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*drawn)
