"""Changed models in averages of weights, distributed training, export, quantisation, trainers and pipelines."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft

CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def vit(name: str = "vit_tiny_patch16_224"):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, img_size=64, depth=2, embed_dim=48, num_heads=4)


def model_of(name: str, to: str | None = None, **options):
    """A tiny transformers model, swapped."""
    pytest.importorskip("transformers")
    import zoo

    made = zoo.build(name, "sdpa")
    if to is not None:
        weft.swap(made, to, **options)
    return made, zoo.tokens()


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ModelEmaV3", "AveragedModel", "AveragedModel with buffers"])
@pytest.mark.parametrize("delayed", [False, True])
def test_averages_of_cached_models(kind, delayed):
    """The length of a cache is known after the first step, when the copy already exists."""
    timm = pytest.importorskip("timm")
    model = vit()
    weft.cache(model, 0.5, delayed=delayed)
    if kind == "ModelEmaV3":
        average = timm.utils.ModelEmaV3(model, decay=0.0)  # the copy is the model
        update = average.update
    else:
        average = torch.optim.swa_utils.AveragedModel(
            model, avg_fn=lambda old, new, n: new, use_buffers=kind.endswith("buffers")
        )
        update = average.update_parameters
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (2, 2, 3):  # the last batch has another size, and so have pending tokens
        model.train()(noise(rows, 3, 64, 64)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        update(model)
    x = noise(2, 3, 64, 64)
    torch.testing.assert_close(average.eval()(x), model.eval()(x), **CLOSE)
    for _ in range(2):  # from here on, the copy goes its own way
        average.train()(noise(4, 3, 64, 64))
        model.train()(noise(2, 3, 64, 64))
    assert not torch.equal(average.eval()(x), model.eval()(x))


def test_copies_of_cached_models_are_independent():
    """A copy from before the first step trains like the original would alone, and a later copy keeps its state."""
    model, alone = vit(), vit()
    for each in (model, alone):
        weft.cache(each, 0.5, delayed=True)
    copied = copy.deepcopy(model)
    model.train()(noise(2, 3, 64, 64))
    for rows in (3, 4):
        torch.testing.assert_close(copied.train()(noise(rows, 3, 64, 64)), alone.train()(noise(rows, 3, 64, 64)))
    snapshot = copy.deepcopy(model)
    expected = {key: value.clone() for key, value in snapshot.state_dict().items()}
    model(noise(5, 3, 64, 64))
    assert all(torch.equal(value, expected[key]) for key, value in snapshot.state_dict().items())


class Hooked:
    """What accelerate.hooks.add_hook_to_module does to a layer."""

    def __init__(self, module: nn.Module, device: str):
        module._hf_hook, self.execution_device = self, device
        module._old_forward = module.forward
        module.forward = functools.partial(self.forward, module)

    def forward(self, module, *args, **kwargs):
        return module._old_forward(*args, **kwargs)


def test_layers_with_accelerates_hooks():
    """Their forward is an attribute of the instance, which a new class does not change."""
    model, x = vit().eval(), noise(2, 3, 64, 64)
    for block in model.blocks:
        Hooked(block.attn, "cpu")
    before = model(x)
    report = weft.swap(model, "linear")
    assert len(report.replaced) == 2 and not torch.allclose(model(x), before, atol=1e-6)
    report.undo()
    assert torch.equal(model(x), before)
    model.blocks[0].attn.to("meta")  # offloaded to disk
    weft.cache(model, 0.5)
    added = [p for key, p in model.named_parameters() if ".inner." not in key]
    assert not any(p.is_meta for p in added)
    strange = vit()
    strange.blocks[0].attn.forward = lambda x, **more: x
    with pytest.warns(UserWarning, match="blocks.0.attn: its forward was replaced on the instance"):
        weft.swap(strange, "linear")


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_offload_by_accelerate(kind, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    (model, ids), (plain, _) = (model_of("llama/LlamaForCausalLM") for _ in range(2))
    for each in (model, plain):
        if each is model and kind == "disk":
            accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
        elif each is model:
            accelerate.cpu_offload(model, execution_device="cpu")
        weft.swap(each, "linear")
        weft.cache(each, 0.5)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, **CLOSE)


@pytest.mark.parametrize("name", ["reformer", "synthesizer", "weft's own layer"])
def test_no_parameter_is_unused_in_data_parallel_training(name, one_process):
    if name == "reformer":  # does not read k
        model, ids = model_of("bert/BertModel", "reformer")
        inputs, used = (ids,), [p for key, p in model.named_parameters() if "pooler" not in key]
        for p in model.pooler.parameters():
            p.requires_grad_(False)
    elif name == "weft's own layer":
        model, inputs = weft.MultiheadAttention(24, 4, attention="local", rope=True, qk_norm=True), (noise(2, 9, 24),)
        weft.swap(model, "reformer")
        used = list(model.parameters())
    else:  # "random" reads neither q nor k
        model = nn.MultiheadAttention(24, 4, batch_first=True, kdim=20, vdim=24)
        weft.swap(model, "synthesizer", max_length=9, kind="random")
        inputs = (noise(2, 9, 24), noise(2, 9, 20), noise(2, 9, 24))
        used = list(model.parameters())
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the second iteration fails if the first has missed a gradient
        out = parallel(*inputs)
        out = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
        out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in used)


def test_fully_sharded(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, outs = noise(2, 3, 64, 64), []
    for shard in (False, True):
        model = vit()
        weft.swap(model, "linformer", max_length=17, rank=4)
        weft.cache(model, 0.5, where="blocks.1.*")
        if shard:
            mesh = init_device_mesh("cpu", (1,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        outs.append(model.eval()(x))
    torch.testing.assert_close(*outs, **CLOSE)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_gradient_checkpointing(name):
    gradients = []
    for checkpoint in (False, True):
        model = vit(name)
        weft.swap(model, "local", block_size=4)
        model.set_grad_checkpointing(checkpoint)
        model.train()(noise(2, 3, 64, 64)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, **CLOSE)


FORMS = [(name, causal) for name in weft.attentions() for causal in (False, True)]
FORMS = [f for f in FORMS if (weft.attention_info(f[0]).causal if f[1] else weft.attention_info(f[0]).bidirectional)]


@pytest.mark.parametrize("name, causal", FORMS)
def test_export_with_dynamic_length_is_exact_or_refused(name, causal):
    options = {"block_size": 8} if "block_size" in weft.attention_info(name).options else {}
    attn = weft.make_attention(name, heads=2, head_dim=8, causal=causal, max_length=64, **options).eval()
    length = torch.export.Dim("length", min=4, max=64)
    q, k, v = noise(3, 1, 2, 24, 8)
    arguments = {"dynamic_shapes": ({2: length},) * 3, "strict": False}
    if not attn.exports_any_length:
        with pytest.raises(ValueError, match="cannot be exported with a dynamic length"):
            torch.export.export(attn, (q, k, v), **arguments)
        if name == "local":
            with pytest.raises(Exception, match="cannot be exported with a dynamic length"):
                torch.export.export(attn, (q, k, v), **{**arguments, "strict": True})
        return
    arguments["dynamic_shapes"] += ({1: length},)
    exported = torch.export.export(attn, (q, k, v, torch.arange(24)[None] < 20), **arguments).module()
    for other in (5, 24, 64):
        q, k, v = noise(3, 1, 2, other, 8)
        mask = torch.arange(other)[None] < other - 2
        torch.testing.assert_close(exported(q, k, v, mask), attn(q, k, v, mask), **CLOSE)


def test_export_of_a_model():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0), 1).eval()
    report = weft.swap(model, "linear")
    length, x = torch.export.Dim("length", min=4, max=64), noise(1, 9, 24)
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: length},), strict=False).module()
    torch.testing.assert_close(exported(noise(1, 23, 24)), model(noise(1, 23, 24)), **CLOSE)
    report.undo()
    local = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0), 1).eval()
    weft.swap(local, "local", block_size=4)
    fixed = torch.export.export(local, (x,), strict=False).module()
    torch.testing.assert_close(fixed(x), local(x), **CLOSE)


def test_export_of_a_transformers_model():
    """Without an attention mask, transformers takes the sequences of a traced model for packed ones."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    weft.swap(model, "combiner-fixed", block_size=4)
    ids = torch.randint(20, (1, 9))
    given = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    exported = torch.export.export(model, (ids,), given).module()
    torch.testing.assert_close(exported(ids, **given).logits, model(ids, **given).logits, **CLOSE)
    with pytest.raises(ValueError, match="unless they get an attention_mask: pass it"):
        torch.export.export(model, (ids,), {"use_cache": False})


@pytest.mark.parametrize("name", ["full", "linear", "performer", "linformer", "subsampled"])
@pytest.mark.parametrize("kind", ["layer", "swapped"])
def test_onnx_with_dynamic_length(kind, name):
    pytest.importorskip("onnxscript"), pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    length, x = torch.export.Dim("length", min=4, max=64), noise(1, 9, 24)
    options = {"max_length": 64} if name == "linformer" else {}
    if kind == "layer":
        model = weft.MultiheadAttention(24, 4, attention=name, **options).eval()
    else:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0), 1).eval()
        weft.swap(model, name, **options)
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=({1: length},), verbose=False)
    for other in (5, 9, 23):
        (out,) = program(noise(1, other, 24))
        torch.testing.assert_close(out, model(noise(1, other, 24)), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["local", "combiner-fixed", "longformer"])
def test_onnx_with_a_fixed_length(name):
    """A dynamic length is refused, a fixed one is exported."""
    pytest.importorskip("onnxscript"), pytest.importorskip("onnxruntime")
    model, x = weft.MultiheadAttention(24, 4, attention=name, causal=True).eval(), noise(1, 9, 24)
    length = torch.export.Dim("length", min=4, max=64)
    with pytest.raises(Exception, match="cannot be exported with a dynamic length"):
        torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=({1: length},), verbose=False)
    (out,) = torch.onnx.export(model, (x,), dynamo=True, verbose=False)(x)
    torch.testing.assert_close(out, model(x), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_swapped_layers_are_leaves_in_fx(name):
    model, x = vit(name).eval(), noise(2, 3, 64, 64)
    weft.swap(model, "local", block_size=4)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if str(node.target).endswith(".attn")] == [
        "blocks.0.attn",
        "blocks.1.attn",
    ]
    assert torch.equal(traced(x), model(x))


def test_compiled_encoder_decoder():
    torch._dynamo.reset()
    model, ids = model_of("bart/BartModel")
    del model.encoder.layers[1], model.decoder.layers[1]
    weft.huggingface.register()
    model.set_attn_implementation("weft:linear")
    mask = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="call it once before torch.compile"):
        compiled(**inputs, use_cache=False)
    expected = model(**inputs, use_cache=False)[0]
    torch.testing.assert_close(compiled(**inputs, use_cache=False)[0], expected, **CLOSE)


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = model_of("llama/LlamaForCausalLM", "linear")
    model.save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    expected = tuned.eval()(ids).logits
    tuned.save_pretrained(tmp_path / "adapter")
    base = weft.huggingface.load(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(ids).logits, expected, **CLOSE)
    torch.testing.assert_close(again.merge_and_unload()(ids).logits, expected, **CLOSE)


def test_a_mechanisms_parameters_beside_lora():
    """PEFT puts a wrapper with a trainable copy around the modules in `modules_to_save`."""
    peft = pytest.importorskip("peft")
    model, ids = model_of("llama/LlamaForCausalLM", "synthesizer", max_length=64)
    for parameter in model.model.layers[0].self_attn.weft.parameters():
        parameter.data += 1  # no longer those that the layer's number seeds
    expected = model(ids).logits
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], modules_to_save=["weft"])
    tuned = peft.get_peft_model(model, config)
    torch.testing.assert_close(tuned(ids).logits, expected, **CLOSE)
    tuned(ids, labels=ids).loss.backward()
    copies = {key: p.grad for key, p in tuned.named_parameters() if "modules_to_save" in key}
    assert len(copies) == 4 and all(gradient is not None for gradient in copies.values())


@pytest.mark.parametrize("name", ["linear", "combiner-fixed"])
def test_int8(name):
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = model_of("llama/LlamaForCausalLM", name)
    expected = model(ids).logits
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    torch.testing.assert_close(model(ids).logits, expected, atol=0.05, rtol=0.1)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    again = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(generated, again)


def test_swap_of_an_int8_model():
    quantization = pytest.importorskip("torchao.quantization")
    outs = []
    for first in ("swap", "quantize"):
        model, ids = model_of("llama/LlamaForCausalLM")
        for step in (first, "swap" if first == "quantize" else "quantize"):
            if step == "swap":
                assert len(weft.swap(model, "linear").replaced) == 2
            else:
                quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        outs.append(model(ids).logits)
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("change", ["cache", "synthesizer"])
def test_trainer(change, tmp_path):
    """Trained, loaded, and continued from a checkpoint to the same weights."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    def changed():
        if change == "cache":
            model, ids = model_of("llama/LlamaForCausalLM", "linear")
            weft.cache(model, 0.5)
            return model, ids
        return model_of("llama/LlamaForCausalLM", "synthesizer", max_length=64)

    (model, ids), (again, _) = changed(), changed()
    before = model.lm_head.weight.detach().clone()
    limits = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": []}
    arguments = transformers.TrainingArguments(str(tmp_path), **limits)
    data = [{"input_ids": row, "labels": row} for row in ids] * 4
    transformers.Trainer(model, arguments, train_dataset=data).train()
    assert not torch.equal(model.lm_head.weight, before)
    loaded = weft.huggingface.load(tmp_path / "checkpoint-4").eval()
    torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, **CLOSE)
    trainer = transformers.Trainer(again, arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(again.eval()(ids).logits, model(ids).logits, **CLOSE)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = vit()
            weft.swap(self.model, "linformer", max_length=17, rank=4)
            weft.cache(self.model, 0.5)

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    task = Task()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(max_steps=2, **quiet, enable_checkpointing=False)
        trainer.fit(task, torch.utils.data.DataLoader(noise(4, 3, 64, 64), batch_size=2))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        again = Task.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    x = noise(2, 3, 64, 64)
    torch.testing.assert_close(again.eval().model(x), task.eval().model(x), **CLOSE)


def test_pipeline(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    model, _ = model_of("bert/BertModel", "linear")
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer, device="cpu")
    together = pipe(["a b c d a b", "c d"], batch_size=2, tokenize_kwargs={"padding": True})
    (alone,) = pipe("c d")  # padding in the batch has no effect
    torch.testing.assert_close(torch.tensor(together[1][0])[:4], torch.tensor(alone), **CLOSE)
