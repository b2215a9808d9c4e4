"""A weft name on a transformers model is exact or refused: never silently wrong, never ignored.

`--every-model` sweeps everything that transformers can build from a tiny config.
"""

from __future__ import annotations

import copy
import traceback
import warnings

import pytest
import torch

import weft

transformers = pytest.importorskip("transformers")
import zoo  # noqa: E402

from weft.adapt import guard  # noqa: E402

transformers.logging.set_verbosity_error()

# What weft:linear and weft:full come to in a few models of each kind. Everything else is for --every-model.
WORKS = ["llama/LlamaForCausalLM", "gpt2/GPT2LMHeadModel", "bert/BertModel", "bert/BertLMHeadModel", "bart/BartModel"]
WORKS += ["roberta/RobertaForCausalLM", "opt/OPTForCausalLM", "qwen3_moe/Qwen3MoeForCausalLM", "vit/ViTModel"]
WORKS += ["clip_text_model/CLIPTextModel", "electra/ElectraModel", "gpt_neox/GPTNeoXForCausalLM", "dinov2/Dinov2Model"]
WORKS += ["distilbert/DistilBertModel", "pegasus/PegasusModel", "siglip_vision_model/SiglipVisionModel"]
FULL_ONLY = ["mistral/MistralForCausalLM", "gemma3_text/Gemma3ForCausalLM", "modernbert/ModernBertModel"]
FULL_ONLY += ["t5/T5Model", "llama4_text/Llama4ForCausalLM", "olmo3/Olmo3ForCausalLM", "cohere2/Cohere2ForCausalLM"]
FULL_ONLY += ["gpt_oss/GptOssForCausalLM", "gemma2/Gemma2ForCausalLM"]
REFUSED = ["bloom/BloomForCausalLM", "codegen/CodeGenForCausalLM", "xglm/XGLMForCausalLM", "mpnet/MPNetModel"]
REFUSED += ["gpt_neox_japanese/GPTNeoXJapaneseForCausalLM", "trocr/TrOCRForCausalLM", "mvp/MvpModel"]
REFUSED += ["roformer/RoFormerForCausalLM", "rembert/RemBertForCausalLM", "megatron-bert/MegatronBertForCausalLM"]
REFUSED += ["rembert/RemBertModel", "big_bird/BigBirdModel", "deberta/DebertaModel", "deberta-v2/DebertaV2Model"]
REFUSED += ["xlnet/XLNetModel", "swinv2/Swinv2Model", "falcon/FalconForCausalLM", "gptj/GPTJForCausalLM"]
REFUSED += ["gpt_neo/GPTNeoForCausalLM", "mpt/MptForCausalLM", "longformer/LongformerModel", "git/GitForCausalLM"]
REFUSED += ["bigbird_pegasus/BigBirdPegasusModel", "doge/DogeForCausalLM", "mamba/MambaForCausalLM", "fnet/FNetModel"]
REFUSED += ["gemma4_audio/Gemma4AudioModel"] if "gemma4_audio/Gemma4AudioModel" in zoo.every() else []
EXPECTED = {(model, to): "exact" for model in WORKS for to in ("full", "linear")}
EXPECTED |= {(model, to): "refused" for model in REFUSED for to in ("full", "linear")}
EXPECTED |= {(model, "full"): "exact" for model in FULL_ONLY} | {(model, "linear"): "refused" for model in FULL_ONLY}


def pytest_generate_tests(metafunc):
    if "sweep_case" in metafunc.fixturenames:
        cases = list(EXPECTED)
        if metafunc.config.getoption("--every-model"):
            cases = [(model, to) for model in zoo.every() for to in ("full", "linear")]
        metafunc.parametrize("sweep_case", cases, ids=lambda case: "-".join(case))


@pytest.fixture(autouse=True, scope="module")
def everything_registered():
    weft.huggingface.register()


def test_exact_or_refused(sweep_case):
    model, to = sweep_case
    try:
        zoo.reference(model)
    except (ValueError, MemoryError) as error:
        assert sweep_case not in EXPECTED, error
        pytest.skip(str(error)[:200])
    found = outcome(model, to)
    assert found == EXPECTED.get(sweep_case, found)


def outcome(model: str, to: str) -> str:
    """ "exact" or "refused"; AssertionError otherwise."""
    plain, inputs = zoo.reference(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = zoo.build(model, f"weft:{to}").to(zoo.DEVICE)
            calls = guard._calls
            out = zoo.outputs(ours, inputs)
    except Exception as error:
        assert is_a_refusal(error), f"{model}: not weft's error, but {error!r}"
        return "refused"
    assert guard._calls > calls, f"{model} has ignored weft:{to}"
    if to == "full":
        torch.testing.assert_close(out, zoo.outputs(plain, inputs), atol=1e-4, rtol=1e-3, equal_nan=True)
    for what, first, second, kept in zoo.perturbed(inputs):
        try:
            before, after = (zoo.outputs(plain, each)[kept] for each in (first, second))
        except Exception:
            continue  # transformers' own model does not take this mask
        try:
            mine, moved = (zoo.outputs(ours, each)[kept] for each in (first, second))
        except Exception as error:
            assert is_a_refusal(error), f"{model} with {what}: not weft's error, but {error!r}"
            continue
        if torch.allclose(before, after, atol=1e-5, equal_nan=True):
            torch.testing.assert_close(mine, moved, atol=1e-4, rtol=1e-3, equal_nan=True, msg=f"{model} reads {what}")
        if to == "full":
            torch.testing.assert_close(mine, before, atol=1e-4, rtol=1e-3, equal_nan=True)
    return "exact"


def is_a_refusal(error: BaseException | None) -> bool:
    """A ValueError that was raised in weft's own code."""
    while error is not None:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, ValueError) and "/weft/" in raised_in:
            return True
        error = error.__cause__
    return False


IN_PARTS = ["grounding-dino/GroundingDinoModel", "pocket_tts_audio_tokenizer/PocketTTSAudioTokenizerModel"]
IN_PARTS += ["mistral3/Mistral3Model", "mimi/MimiModel"]  # texts and images; windows that short sound does not fill


@pytest.mark.parametrize("model", [model for model in IN_PARTS if model in zoo.every()])
def test_a_swap_reaches_every_part_of_a_model(model):
    _, inputs = zoo.reference(model)
    ours = zoo.build(model, "eager")
    with pytest.warns(UserWarning, match="keep their own attention"):
        report = weft.swap(ours, to="linear")
    assert not report.replaced
    zoo.outputs(ours, inputs)


def test_a_swap_is_tested_with_a_padding_mask():
    """Aimv2's texts are causal only if they have one."""
    config = transformers.Aimv2TextConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    model = transformers.Aimv2TextModel(config)
    with pytest.warns(UserWarning, match="bigbird.* causal"):
        assert not weft.swap(model, to="bigbird").replaced


def test_errors_name_the_model_the_reason_and_an_alternative():
    with pytest.raises(ValueError, match="BloomForCausalLM .* BloomAttention does not use .*'eager'"):
        zoo.build("bloom/BloomForCausalLM", "weft:linear")
    with pytest.raises(ValueError, match="MambaModel .* none of its layers calls"):
        model = zoo.build("mamba/MambaModel", "weft:linear")
        model(zoo.tokens())
    with pytest.raises(ValueError, match="DogeForCausalLM .* DogeAttention computes with the attention mask itself"):
        model = zoo.build("doge/DogeForCausalLM", "weft:linear")
        model(zoo.tokens())


def test_models_that_exist_are_checked_too():
    model = zoo.build("bloom/BloomForCausalLM", "eager")
    with pytest.raises(ValueError, match="BloomAttention"):
        model.set_attn_implementation("weft:linear")
    model = zoo.build("mamba/MambaModel", "eager")
    model.set_attn_implementation(attn_implementation="weft:linear")
    with pytest.raises(ValueError, match="none of its layers"):
        model(zoo.tokens())
    assert model.config._attn_implementation == "weft:linear"
    with pytest.raises(ValueError, match="none of its layers"):  # every time
        model(zoo.tokens())


def test_checks_are_removed_after_the_first_forward():
    model = zoo.build("llama/LlamaForCausalLM", "weft:linear")
    hooks = lambda m: [h for part in m.modules() for h in (*part._forward_hooks.values(),)]  # noqa: E731
    assert hooks(model)
    again = copy.deepcopy(model)
    model(zoo.tokens())
    assert not hooks(model) and hooks(again)
    again.generate(zoo.tokens(), max_new_tokens=2, do_sample=False)
    assert not hooks(again)


def test_a_mask_that_is_passed_but_not_read():
    from weft.adapt.masks import mask_function_of, read, says_causal

    padding = torch.arange(5) < torch.tensor([[5], [3]])
    mask = mask_function_of("weft:linear", False)(2, 5, 5, attention_mask=padding)
    assert mask.shape == (2, 1, 5, 5) and says_causal(mask)
    assert torch.equal(read(mask[:, :, -1:, :].to("cpu").detach().clone()), padding)
    for use in (lambda m: m + 1, lambda m: 1.0 + m, lambda m: ~m, lambda m: m == 0, lambda m: m.any(), bool):
        with pytest.raises(ValueError, match="computes with the attention mask itself"):
            use(mask)
    scores = torch.zeros(2, 4, 5, 5)
    for use in (torch.add, torch.Tensor.masked_fill_, torch.Tensor.masked_fill, torch.where):
        with pytest.raises(ValueError, match="computes with the attention mask itself"):
            use(scores, mask, *[0.0] * (use is not torch.add))
    with pytest.raises(ValueError, match="computes with the attention mask itself"):
        torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama/LlamaForCausalLM", "bert/BertLMHeadModel", "gpt2/GPT2LMHeadModel"])
def test_gradient_checkpointing(name, reentrant):
    """Llama passes its mask to its layers by name, BERT and GPT-2 by position."""
    model = zoo.build(name, "weft:linear").train()
    mask = torch.ones(2, zoo.L, dtype=torch.long)
    mask[1, :4] = 0

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)
        model(zoo.tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()].square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for a, b in zip(gradients(), before, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_on_another_device_get_the_mask():
    """Like accelerate's hooks for device_map, which move every argument of a layer."""
    accelerate = pytest.importorskip("accelerate")
    model, plain = (zoo.build("llama/LlamaForCausalLM", "weft:linear") for _ in range(2))
    mask = torch.ones(2, zoo.L, dtype=torch.long)
    mask[1, :4] = 0
    accelerate.cpu_offload(model, execution_device="cpu")
    out, expected = (m(zoo.tokens(), attention_mask=mask).logits[mask.bool()] for m in (model, plain))
    torch.testing.assert_close(out, expected)


def test_compiled_models_are_refused_as_well():
    torch._dynamo.reset()
    model = torch.compile(zoo.build("doge/DogeForCausalLM", "weft:linear"), backend="aot_eager")
    with pytest.raises(Exception, match="computes with the attention mask itself"):
        model(zoo.tokens(), attention_mask=torch.ones(2, zoo.L, dtype=torch.long), use_cache=False)


SWAPPED = [*WORKS, *FULL_ONLY, *REFUSED, "swin/SwinModel", "beit/BeitModel", "segformer/SegformerModel"]
SWAPPED += ["paligemma/PaliGemmaModel", "siglip/SiglipModel", "whisper/WhisperModel", "wav2vec2/Wav2Vec2Model"]
SPEECH = ("lasr_ctc/LasrForCTC", "lasr_encoder/LasrEncoder", "parakeet_encoder/ParakeetEncoder")
SWAPPED += [model for model in SPEECH if model in zoo.every()]


@pytest.mark.parametrize("model", SWAPPED)
def test_what_swap_reports_as_replaced_works(model):
    """Swapped layers run and follow masks like the model; skipped layers are unchanged."""
    plain, inputs = zoo.reference(model)
    ours = zoo.build(model, "eager").to(zoo.DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = weft.swap(ours, "linear")
        except ValueError as error:
            assert is_a_refusal(error)
            return
    out, expected = zoo.outputs(ours, inputs), zoo.outputs(plain, inputs)
    assert report.replaced or torch.allclose(out, expected, atol=1e-5)
    assert model not in WORKS or (not report.left and not torch.allclose(out, expected, atol=1e-5))
    assert all(report.refused.values()) and (report.replaced or report.refused)
    for what, first, second, kept in zoo.perturbed(inputs):
        if torch.allclose(*(zoo.outputs(plain, each)[kept] for each in (first, second)), atol=1e-5):
            mine, moved = (zoo.outputs(ours, each)[kept] for each in (first, second))
            torch.testing.assert_close(mine, moved, atol=1e-4, rtol=1e-3, msg=f"{model} reads {what}")
    report.undo()
    torch.testing.assert_close(zoo.outputs(ours, inputs), expected)


def test_pooling_heads_read_another_sequence():
    """SigLIP's head has one learned query."""
    model = zoo.build("siglip_vision_model/SiglipVisionModel", "eager")
    inputs = {"pixel_values": zoo.noise(2, 3, 32, 32)}
    for change in (lambda: weft.swap(model, "local"), lambda: weft.cache(model, 0.5)):
        with pytest.warns(UserWarning, match="1 of 3 .* head.attention"):
            report = change()
        assert list(report.refused) == ["head.attention"]
        model.train()(**inputs)
        report.undo()


@pytest.mark.skipif(
    not hasattr(transformers, "Qwen2_5_VisionTransformerPretrainedModel"), reason="transformers 5.17 does not export it"
)
def test_packed_images_cannot_be_cached():
    model = zoo.build("qwen2_5_vl_vision/Qwen2_5_VisionTransformerPretrainedModel", "eager")
    with pytest.warns(UserWarning, match="no batch dimension"):
        assert not weft.cache(model, 0.5).replaced


def test_swap_refuses_windows_that_the_model_can_outgrow():
    model = zoo.build("mistral/MistralForCausalLM", "sdpa")  # a window of 5, and 64 positions
    with pytest.warns(UserWarning, match="2 of 2 attention layers keep their own attention.*model.layers.0.self_attn"):
        report = weft.swap(model, "linear")
    assert not report.replaced and "refused: " in str(report) and "2 of them refused" in str(report)
    with pytest.warns(UserWarning, match="2 of 2"):
        assert not weft.swap(torch.nn.Sequential(model), "linear").replaced
    assert weft.swap(model, "linear", max_length=5).replaced  # never longer than the window
    model(zoo.tokens()[:, :5])
    gemma = zoo.build("gemma3_text/Gemma3ForCausalLM", "sdpa")  # one layer with a window, one without
    with pytest.warns(UserWarning, match="1 of 2"):
        report = weft.swap(gemma, "linear")
    assert report.replaced == ["model.layers.1.self_attn"] and list(report.refused) == ["model.layers.0.self_attn"]
