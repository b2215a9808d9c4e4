"""Models of transformers and timm on own data: trained, resumed, loaded without the data, and exported."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import weft
from weft.tasks import get_task, make_config
from weft.tasks.base import Known
from weft.tasks.hosts import _source
from weft.tasks.tokens import Pieces

pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")
TINY = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
STEPS = dict(steps=4, warmup=1, eval_every=4, checkpoint_every=2, batch_size=4, accelerator="cpu")
CASES = {
    "bert": ("classify", dict(model="hf:bert", attention="longformer", tokenizer="words", max_length=12)),
    "llama": ("regress", dict(model="hf:{config}", attention="linear", cache=0.5, max_length=16)),
    "gpt2": ("lm", dict(model="hf:gpt2", subsample="S1-L2", tokenizer="bpe:300", max_length=16)),
    "roberta": ("tag", dict(model="hf:roberta", tokenizer="bpe:300", max_length=16)),
    "unigram": ("classify", dict(model="hf:bert", tokenizer="unigram:300", max_length=16)),
    "vit": ("images", dict(model="hf:vit", attention="linformer", image_size=16)),
    "timm": ("images", dict(model="timm:deit_tiny_patch16_224", attention="local", cache=0.5, image_size=16)),
}
OPTIONS = {
    "gpt2": dict(n_embd=16, n_layer=2, n_head=2),
    "vit": {**TINY, "patch_size": 8},
    "timm": dict(depth=2, embed_dim=16, num_heads=2, patch_size=8),
}


@pytest.fixture
def data(tmp_path):
    texts = [f"{word} film {i}" for i in range(20) for word in ("lovely", "dull")]
    (tmp_path / "classify.jsonl").write_text("".join(json.dumps({"text": t, "label": t[0]}) + "\n" for t in texts))
    (tmp_path / "regress.jsonl").write_text(
        "".join(json.dumps({"text": t, "label": i / 9}) + "\n" for i, t in enumerate(texts))
    )
    (tmp_path / "tag.conll").write_text("Ada B-PER\nsleeps O\n\n" * 20 + "Rome B-LOC\nburns O\n\n" * 20)
    (tmp_path / "lm.txt").write_text("Longtemps, je me suis couché de bonne heure. " * 60)
    transformers.LlamaConfig(**TINY).save_pretrained(tmp_path / "llama")
    from PIL import Image

    for kind, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (20, 16 + i), colour).save(tmp_path / "images" / kind / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_hosted_model_resumes_predicts_and_is_exported(case, data):
    from weft.lab import evaluate_run, train

    if case == "timm":
        pytest.importorskip("timm")
    task, options = CASES[case]
    source = next(data.glob(f"{task}*"))
    options = {**options, "model": options["model"].format(config=data / "llama/config.json")}
    if "config" not in CASES[case][1]["model"]:
        options["model_options"] = json.dumps(OPTIONS.get(case, TINY))
    run, again = data / "run", data / "again"
    train(make_config(task, data=str(source), out=str(run), **options, **STEPS))
    shutil.copytree(run, again)
    (again / "result.json").unlink()
    (again / "checkpoints/step-00000004.safetensors").unlink()
    (again / "checkpoints/best.safetensors").unlink()
    shutil.rmtree(data / "llama")  # the run has the config
    train(make_config(task, data=str(source), out=str(again), **options, **STEPS), resume=True)
    losses = [[json.loads(line).get("loss") for line in open(r / "metrics.jsonl")] for r in (run, again)]
    assert losses[0] == losses[1]
    model = weft.load(run)
    folder = model.export(data / "exported")
    other = weft.load(folder)
    assert evaluate_run(folder, data=str(source), accelerator="cpu") == evaluate_run(run, accelerator="cpu")
    if task == "lm":
        ids = torch.tensor([[65, 66, 67]])
        assert torch.equal(model(ids), other(ids))
        new = model.model.generate(ids, 4, seed=0)
        assert torch.equal(new, other.model.generate(ids, 4, seed=0)) and new.shape == (1, 7)
        inner = weft.huggingface.load(folder).eval()
        assert torch.equal(inner(ids).logits, model(ids))
    else:
        examples = sorted(data.rglob("*.png"))[:3] if task == "images" else ["Ada sleeps", "a dull film"]
        assert model.predict(examples) == other.predict(examples)
    if case == "roberta":  # nothing is swapped: the library opens it alone, with its tokenizer
        plain = transformers.AutoModelForTokenClassification.from_pretrained(folder)
        ids = transformers.AutoTokenizer.from_pretrained(folder)("Ada sleeps", return_tensors="pt").input_ids
        assert plain.config.id2label == {0: "B-LOC", 1: "B-PER", 2: "O"}
        assert torch.allclose(plain(ids).logits, other(ids), atol=1e-6)
    if case == "unigram":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        known = Known({}, tokenizer=(run / "tokenizer.json").read_text(), length=16)
        texts = ["a dull film", "zürich"]  # two letters are unknown
        rows = tokenizer(texts, padding="max_length", max_length=16).input_ids
        assert rows == get_task(task).encode(texts, known)["ids"].tolist()


def test_exported_words_are_those_of_training(data):
    """The \\w of tokenizers has combining marks, which that of Python, and so older vocabularies, have not."""
    from weft.lab.hosted import save_tokenizer
    from weft.tasks.hosts import Hosted

    text = "हिन्दी cafe\u0301 noir, ²_x"
    known = Known({}, ["<pad>", "<unk>", "ह", "न", "द", "cafe", "noir", "²_x"], length=16)
    save_tokenizer(Hosted(torch.nn.Identity(), pad=0), known, data)
    ours = get_task("classify").encode([text], known)["ids"][0]
    theirs = transformers.AutoTokenizer.from_pretrained(data)(text).input_ids
    assert theirs == ours[ours > 0].tolist() == [2, 3, 4, 5, 6, 7]
    known = Known({}, ["<pad>", "<unk>", "हिन्दी", "cafe\u0301", "noir", "²_x"], length=16)
    save_tokenizer(Hosted(torch.nn.Identity(), pad=0), known, data)
    ours = get_task("classify").encode([text], known)["ids"][0]
    theirs = transformers.AutoTokenizer.from_pretrained(data)(text).input_ids
    assert theirs == ours[ours > 0].tolist() == [2, 3, 4, 5]
    tokens = ["Ada", ",", "U.N.", "हिन्दी"]
    known = Known({}, ["<pad>", "<unk>", *tokens], length=16)
    tagger = transformers.BertForTokenClassification(transformers.BertConfig(**TINY, vocab_size=9))
    save_tokenizer(Hosted(tagger, pad=0), known, data)
    theirs = transformers.AutoTokenizer.from_pretrained(data)(tokens, is_split_into_words=True).input_ids
    assert theirs == get_task("tag").encode([tokens], known)["ids"][0, :4].tolist() == [2, 3, 4, 5]
    known, tokens = Known({}, ["<pad>", "<unk>", "<pad>", "<unk>", "Ada"], length=16), ["Ada", "Bob", "<unk>", "<pad>"]
    save_tokenizer(Hosted(tagger, pad=0), known, data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(data)
    theirs = tokenizer(tokens, is_split_into_words=True).input_ids
    assert theirs == get_task("tag").encode([tokens], known)["ids"][0, :4].tolist() == [4, 1, 3, 2]
    assert tokenizer.pad_token_id == 0


def test_a_text_longer_than_the_table_of_positions_is_refused(data):
    for kind, options in (("gpt2", {**OPTIONS["gpt2"], "n_positions": 18}), ("llama", TINY)):
        options = json.dumps({"max_position_embeddings": 18, **options})
        config = make_config("lm", data=str(data / "lm.txt"), model=f"hf:{kind}", model_options=options, max_length=16)
        task = get_task("lm")
        model = task.model(config, task.load(config)).eval()
        assert model.model.config.max_position_embeddings == 18
        prompt = torch.ones(1, 12, dtype=torch.long)
        assert model.generate(prompt, 7, temperature=0).shape == (1, 19)
        if kind == "llama":
            assert model.generate(prompt, 8, temperature=0).shape == (1, 20)
            continue
        with pytest.raises(ValueError, match="a prompt of 12 tokens and 8 new ones exceed the 18 positions"):
            model.generate(prompt, 8, temperature=0)


@pytest.mark.parametrize("kind", ["ema", "average"])
def test_averages_include_tied_weights(kind, data):
    """GPT-2's output layer is its embedding: one parameter with two names."""
    from weft.lab import evaluate_run, train
    from weft.lab.checkpoint import read

    if kind == "ema":
        pytest.importorskip("timm")
    options = dict(model="hf:gpt2", model_options=json.dumps(OPTIONS["gpt2"]), max_length=16, learning_rate=0.01)
    options |= dict(ema=0.7) if kind == "ema" else dict(test_on="average")
    run, name = data / "run", "model.transformer.wte.weight"
    found = train(make_config("lm", data=str(data / "lm.txt"), out=str(run), **options, **STEPS))
    (first, _), (last, _) = (read(run / f"checkpoints/step-0000000{i}.safetensors") for i in (2, 4))
    mean = last[f"average/{name}"] if kind == "ema" else (first[f"model/{name}"] + last[f"model/{name}"]) / 2
    assert torch.allclose(dict(weft.load(run).model.named_parameters())[name], mean)
    assert evaluate_run(run)[0] == found.test
    if kind == "ema":
        assert evaluate_run(run, split="val")[0] == found.val  # measured in training, on the average


def test_weights_of_a_folder_are_the_start(data):
    config = transformers.BertConfig(**TINY, vocab_size=320)
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(data / "bert")
    settings = dict(data=str(data / "classify.jsonl"), model=f"hf:{data / 'bert'}", **STEPS)
    from weft.lab.build import build_model
    from weft.tasks import get_task

    with pytest.raises(ValueError, match="no tokenizer.json: set the tokenizer with --tokenizer"):
        get_task("classify").load(make_config("classify", **settings))
    chosen = make_config("classify", tokenizer="bytes", **settings)
    built = build_model(chosen, get_task("classify").load(chosen)).model
    assert torch.equal(built.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)
    long = make_config("classify", tokenizer="bytes", max_length=600, **settings)
    with pytest.raises(ValueError, match="600 is more than the 512 positions"):
        get_task("classify").load(long)


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "llama"])
def test_no_piece_of_a_file_is_padding(kind, data):
    """The default padding of these models is a piece of another vocabulary, or outside of it."""
    from weft.tasks.tokens import Pieces

    task = get_task("classify")
    (data / "tokenizer.json").write_text(Pieces.of(["lovely film", "dull film"], 300).tokenizer)
    options = json.dumps(OPTIONS.get(kind, {**TINY, "num_key_value_heads": 2}))
    config = make_config("classify", data=str(data / "classify.jsonl"), model=f"hf:{kind}", model_options=options,
                         tokenizer=str(data / "tokenizer.json"), max_length=24)  # fmt: skip
    found = task.load(config)
    model = task.model(config, found)
    assert model.pad < model.model.config.vocab_size < 300
    assert task.loss(model, {name: column[:8] for name, column in found.train.items()}, config).isfinite()
    known = Known(found.facts, tokenizer=found.tokenizer, length=found.length)
    for end in "!#":  # the first pieces, with ids that are special in other vocabularies
        rows = [task.encode([text], known) for text in ("dull", "dull" + end)]
        one, other = (model.eval()(*task.inputs(row)) for row in rows)
        assert not torch.allclose(one, other)


def test_options_of_a_model_set_what_follows_from_them():
    """Llama has as many key heads as heads, unless it is told otherwise."""
    config = make_config("lm", model="hf:llama", model_options='{"num_attention_heads": 2}')
    assert _source(config)[0]["num_key_value_heads"] == 2


def test_errors_of_hosted_models(tmp_path):
    cases = {
        "there is no file or folder": dict(model=f"hf:{tmp_path}/nothing"),
        "did you mean 'hidden_size'": dict(model="hf:llama", model_options='{"hiden_size": 8}'),
        "--layers has no effect on --model hf:llama": dict(model="hf:llama", layers=9),
        "has no SequenceClassification model for 'vit'": dict(model="hf:vit"),
        "not a transformers config": dict(model=f"hf:{tmp_path}"),
    }
    from weft.lab.build import build_model
    from weft.tasks import get_task

    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "a,x\nb,y\n" * 10)
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            config = make_config("classify", data=str(path), **options)
            build_model(config, get_task("classify").load(config))
    with pytest.raises(ValueError, match="supports --model"):
        make_config("listops", model="hf:bert")


def test_a_run_stores_where_its_model_and_tokenizer_are(data, tmp_path_factory, monkeypatch):
    """Before the first checkpoint, it needs them to start again, from any folder."""
    from weft.lab import train
    from weft.lab.run import Run
    from weft.lab.sweep import changed

    transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, vocab_size=300)).save_pretrained(
        data / "own"
    )
    (data / "pieces.json").write_text(Pieces.of(["lovely film", "dull film"], 300).tokenizer)
    run, elsewhere = data / "run", tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(data)
    given = dict(data="classify.jsonl", model="hf:own", tokenizer="pieces.json", max_length=8, **STEPS)
    config = make_config("classify", out=str(run), **given)
    test = train(config).test
    stored = Run(run).config()
    assert (stored.model, stored.tokenizer) == (f"hf:{data / 'own'}", str(data / "pieces.json"))
    assert not changed(stored, config) and not changed(config, stored)
    stored.out = str(run)
    for place, continued in ((data, config), (elsewhere, stored)):
        monkeypatch.chdir(place)
        (run / "result.json").unlink()
        assert train(continued, resume=True).test == test
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    assert train(stored, resume=True).test == pytest.approx(test)
    weft.load(run).export(elsewhere / "exported")
    assert not any(
        str(data) in p.read_text(errors="replace") for p in (elsewhere / "exported").rglob("*") if p.is_file()
    )


def test_names_of_tokenizers_are_no_paths(monkeypatch, tmp_path):
    from weft.tasks.config import absolute

    for name in ("words", "bytes", "bert"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    for tokenizer in ("words", "bytes", "bpe:300", ""):
        config = make_config("classify", tokenizer=tokenizer, model="hf:gpt2")
        assert (absolute(config).tokenizer, absolute(config).model) == (tokenizer, "hf:gpt2")
