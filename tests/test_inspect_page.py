"""The page, as text and in a real browser."""

from __future__ import annotations

import html
import json
import re

import pytest
import torch
from browser import browser, payload, run_browser, shown, unpacked

import weft
from weft import inspect
from weft.cli.inspect import words
from weft.inspect.gather import attention, coherences, layer_name, pack
from weft.models import CRATE, TextClassifier, TextMatcher
from weft.models.translation import Translator
from weft.models.words import WordModel
from weft.tasks import TaskData

EVIL = ["</script><script>document.title='taken'</script>", "<img src=x onerror=\"document.title='taken'\">", "{{js}}"]
WORDS = ["a", "terrible", *EVIL, "film & more", "\u2028", "'quoted\"", "é"]


@pytest.fixture(scope="module")
def text_page(tmp_path_factory):
    torch.manual_seed(0)
    model = TextClassifier(12, 2, max_length=12, dim=16, heads=48, head_dim=4, layers=2, mlp_dim=8)
    ids = torch.arange(1, 10)[None].repeat(2, 1)
    ids[1, 6:] = 0
    return inspect.report(
        model,
        ids,
        out=tmp_path_factory.mktemp("text") / "page.html",
        title=f"run {EVIL[0]}",
        tokens=[WORDS, WORDS],
        classes=["good", EVIL[1]],
        targets=["good", EVIL[0]],
    )


@pytest.fixture(scope="module")
def crate_page(tmp_path_factory):
    torch.manual_seed(0)
    model = CRATE(dim=16, heads=2, layers=3, classes=4, image_size=8, patch=2)
    images = torch.rand(6, 3, 8, 8)
    model.blocks[0].mssa.lam = torch.nn.Parameter(torch.tensor([-1.0, 1.0]))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    later = {name: value * 0.5 for name, value in start.items()}
    page = inspect.report(
        model,
        images,
        out=tmp_path_factory.mktemp("crate") / "page.html",
        splits={"train": [images], "validation": [images[:3]]},
        checkpoints=[("step 1", later), ("step 2", start)],
    )
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    return page


def test_nothing_from_data_becomes_markup(text_page):
    page = text_page.read_text("utf-8")
    assert page.count("<script") == 2 and page.count("</script") == 2
    assert "<img" not in page and "taken'</script>" not in page.split("<style>")[0]
    data = payload(page)
    assert data["attention"]["examples"][0]["tokens"] == ["[CLS]", *WORDS]
    assert data["title"] == f"run {EVIL[0]}"
    assert html.escape(EVIL[0]) in page.split("<style>")[0]


def test_page_loads_nothing(text_page, crate_page):
    for path in (text_page, crate_page):
        page = path.read_text("utf-8")
        assert "default-src 'none'" in page
        code = page.replace(json.dumps(payload(page)), "")
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|\bsrc=(?!x)|@import|url\(|fetch\(", code.split('id="data"')[0]
        )
        script = code.rsplit("<script>", 1)[1]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|fetch\(|import\(|XMLHttp", script)


def test_padding_is_excluded(text_page):
    data = payload(text_page.read_text("utf-8"))
    layer = data["attention"]["layers"][0]
    assert layer["examples"][0]["row"]["shape"] == [48, 10]
    assert layer["examples"][1]["row"]["shape"] == [48, 7]
    assert layer["examples"][1]["map"]["shape"] == [48, 7, 7]
    assert data["attention"]["examples"][1]["tokens"] == ["[CLS]", *WORDS[:6]]


@pytest.mark.parametrize("length", [6, 7, 9])
def test_every_layer_of_a_translator_has_its_own_tokens(length):
    """Also if source and target have (almost) the same length; the first row is that of the last real token."""
    model = Translator(30, dim=16, heads=2, layers=1, mlp_dim=32).eval()
    source, target = torch.randint(3, 30, (1, 6)), torch.randint(3, 30, (1, length))
    source[0, 4:] = 0
    texts = [[f"s{i}" for i in range(6)], [f"t{i}" for i in range(length)]]
    how = dict(pictures=None, targets=None, classes=None, examples=1)
    found = attention(model, [source, target], tokens=[texts], map_up_to=64, **how)
    assert found["examples"][0]["tokens"] == texts[0][:4]
    encoder, decoder, cross = (layer["examples"][0] for layer in found["layers"])
    assert (encoder["tokens"], decoder["tokens"], cross["tokens"]) == ("shared", texts[1], "shared")
    assert cross["queries"] == texts[1] and cross["map"]["shape"] == [2, length, 4]
    for view in (encoder, decoder, cross):
        torch.testing.assert_close(unpacked(view["row"]), unpacked(view["map"])[:, -1], atol=0.02, rtol=0)
    long = attention(model, [source, target], tokens=[texts], map_up_to=3, **how)["layers"]
    for layer, view in zip(long, (encoder, decoder, cross), strict=True):
        torch.testing.assert_close(unpacked(layer["examples"][0]["row"]), unpacked(view["row"]), atol=1e-6, rtol=0)


def test_slots_are_read_by_the_second_document():
    model = TextMatcher(19, max_length=6, dim=16, heads=2, head_dim=8, layers=1, mlp_dim=8)
    weft.cache(model)
    pair = [torch.tensor([[1, 2, 3, 0]]), torch.tensor([[4, 5, 6, 0]])]
    model(*pair)
    how = dict(pictures=None, targets=None, classes=None, examples=1, map_up_to=64)
    layers = attention(model, pair, tokens=None, **how)["layers"]
    assert [layer["name"] for layer in layers][1::2] == ["layer 1 · memory", "layer 1 · memory · call 2"]
    assert layers[3]["examples"][0]["queries"] == ["4", "5", "6"]


def test_a_target_may_be_shorter_than_its_source(tmp_path):
    model = Translator(30, dim=16, heads=2, layers=1, mlp_dim=32)
    inputs = [torch.randint(3, 30, (1, n)) for n in (9, 4)]
    data = payload(inspect.report(model, inputs, out=tmp_path / "page.html").read_text("utf-8"))
    assert data["heatmaps"]["examples"][0]["tokens"] == [0, 1, 2, 3]


def test_the_padding_of_a_source_does_not_hide_tokens_of_the_target():
    model = Translator(30, dim=16, heads=2, layers=1, mlp_dim=32)
    source, target = torch.randint(3, 30, (1, 4)), torch.randint(3, 30, (1, 6))
    more = torch.nn.functional.pad(source, (0, 2))
    rates = [inspect.measure(model, [s, target])["rate"] for s in (source, more)]
    torch.testing.assert_close(*rates, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [4, 6])
def test_the_padding_of_a_target_is_excluded(length):
    model = Translator(30, dim=16, heads=2, layers=2, mlp_dim=32)
    source, target = torch.randint(3, 30, (1, 6)), torch.randint(3, 30, (1, length))
    source[0, 5:] = 0
    more = torch.nn.functional.pad(target, (0, 2))
    rates = [inspect.measure(model, [source, t])["rate"] for t in (target, more)]
    torch.testing.assert_close(*rates, rtol=1e-5, atol=1e-5)
    assert max(inspect.tokens_per_layer(model, [source, more])[1]) < length
    how = dict(tokens=None, pictures=None, targets=None, classes=None, examples=1, map_up_to=64)
    pairs = zip(*(attention(model, [source, t], **how)["layers"] for t in (target, more)), strict=True)
    for (one,), (padded,) in ((a["examples"], b["examples"]) for a, b in pairs):
        for part in ("row", "map"):
            torch.testing.assert_close(unpacked(padded[part]), unpacked(one[part]), atol=0.02, rtol=0)
        assert padded["tokens"] == one["tokens"] and padded.get("queries") == one.get("queries")


def test_words_belong_to_their_tokens():
    """Also with padding on the left, and in models that read vectors; a wrong number of words is an error."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    weft.swap(llama, "full")
    ids, mask = torch.randint(1, 20, (1, 6)), torch.tensor([[0, 0, 1, 1, 1, 1]])
    how = dict(pictures=None, targets=None, classes=None, examples=1, map_up_to=64)
    for text in ("abcd", "__abcd"):
        found = attention(llama, [ids, mask], tokens=[list(text)], **how)
        assert found["examples"][0]["tokens"] == list("abcd")
    with pytest.raises(ValueError, match="3 words for 4 tokens .6 with padding.: give one for each"):
        attention(llama, [ids, mask], tokens=[list("abc")], **how)
    with pytest.raises(ValueError, match="3 words for 6 tokens"):
        attention(llama, [ids], tokens=[list("abc")], **how)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    weft.swap(encoder, "full")
    found = attention(encoder, [torch.randn(1, 4, 16)], tokens=[list("abcd")], **how)
    assert found["examples"][0]["tokens"] == list("abcd")


@pytest.mark.parametrize("given", [{"tokens": [["a"] * 4]}, {"targets": ["good"]}])
def test_too_few_words_or_targets_are_an_error(tmp_path, given):
    model = TextClassifier(19, 2, max_length=9, dim=8, heads=2, layers=1)
    with pytest.raises(ValueError, match="has 1 entries for 2 examples: give one for each"):
        inspect.report(model, torch.ones(2, 4, dtype=torch.long), out=tmp_path / "page.html", **given)


def test_losses_of_tokens_are_no_prediction():
    sizes = dict(dim=16, heads=2, head_dim=8, layers=1, mlp_dim=8, dropout=0.0, attention_dropout=0.0)
    model, ids = WordModel(30, 8, attention="full", **sizes), torch.randint(30, (1, 9))
    how = dict(pictures=None, targets=None, classes=None, examples=1, map_up_to=64)
    found = attention(model, [ids[:, :-1], ids[:, 1:]], tokens=None, **how)
    assert found["examples"][0]["prediction"] == ""


def test_slots_are_shown_for_real_queries():
    model = TextClassifier(19, 2, max_length=9, dim=16, heads=2, head_dim=8, layers=1, mlp_dim=8)
    weft.cache(model)
    ids = torch.tensor([[1, 2, 3, 4, 0, 0, 0, 0]])
    model(ids)
    how = dict(pictures=None, targets=None, classes=None, examples=1, map_up_to=64)
    own, memory = (layer["examples"][0] for layer in attention(model, [ids], tokens=None, **how)["layers"])
    assert own["map"]["shape"] == [2, 5, 5] and memory["map"]["shape"] == [2, 5, 9]


def test_packed_numbers_are_close_to_the_originals():
    values = torch.randn(3, 7) * torch.tensor([[1.0], [1e-3], [0.0]])
    packed = pack(values)
    assert ((unpacked(packed) - values).abs() <= 0.02 * values.abs().amax(1, keepdim=True)).all()


def test_names_of_layers():
    assert layer_name("encoder.blocks.3.attention", 0) == "layer 4"
    assert layer_name("blocks.0.attention.memory", 5) == "layer 1 · memory"
    assert layer_name("attention", 1) == "layer 2"
    assert layer_name("stages.0.blocks.2.attn", 0) == "layer 1.3"
    assert layer_name("block4.1.attn.memory", 0) == "layer 4.2 · memory"
    assert layer_name("encoder.blocks.0.attention (call 2)", 3) == "layer 1 · call 2"
    assert layer_name("encoder.layers.encoder_layer_0.self_attention", 0) == "layer 1"


@browser
def test_text_page_in_a_browser(tmp_path, text_page):
    dom = run_browser(
        tmp_path,
        text_page,
        """
        const report = {heads: document.querySelectorAll('.head').length, title: document.title};
        document.querySelector('[data-head="20"]').click();
        report.large = document.querySelector('.card b').textContent;
        const words = [...document.querySelectorAll('.text span')];
        report.words = words.map(w => w.textContent);
        words[3].click();
        report.asked = document.querySelector('.text .query').textContent;
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
        document.querySelector('.text').focus(); press('End'); press('ArrowLeft');
        report.moved = [document.querySelector('.text .query').textContent, document.activeElement.role,
          document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).ariaSelected];
        report.unnamed = [...document.querySelectorAll('canvas, svg')].filter(c =>
          !c.ariaLabel && c.getAttribute('aria-hidden') !== 'true').length;
        [...document.querySelectorAll('button')].find(b => b.textContent === 'whole maps').click();
        report.map = document.querySelector('[data-head="20"] canvas').height;
        [...document.querySelectorAll('button')].find(b => b.textContent === '2').click();
        report.second = document.querySelectorAll('.text span').length;
        report.verdict = document.querySelector('#verdict').textContent;
        report.images = document.images.length;
        document.querySelector('header button').click();
        const out = document.createElement('pre'); out.id = 'report'; out.textContent = JSON.stringify(report);
        document.body.append(out);
        """,
    )
    found = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1]))
    assert found["heads"] == 49  # 48 and their mean
    assert found["title"] == f"run {EVIL[0]}" and found["images"] == 0
    assert found["large"] == "head 21, full"
    assert found["words"] == ["[CLS]", *WORDS]
    assert found["asked"] == WORDS[2] and found["map"] == 10 and found["second"] == 7
    assert found["moved"] == [WORDS[-2], "listbox", "true"] and found["unnamed"] == 0
    assert found["verdict"].endswith(f"true {EVIL[0]}")


@browser
def test_crate_page_in_a_browser(tmp_path, crate_page):
    dom = run_browser(tmp_path, crate_page, "")
    for heading in ("Attention", "Layer by layer", "Tokens", "Subspaces", "Cache"):
        assert f"<h2>{heading}</h2>" in dom
    assert (
        len(re.findall('<polyline(?![^>]*class="band")', dom)) == 4 * 4
    )  # four measurements, two checkpoints, two splits
    assert "step 1, validation" in dom and "Weight of the cache, by head. σ(λ)" in dom
    assert len(re.findall(r"\d % non-zero</figcaption>", dom)) == 3


def test_command_on_a_run(tmp_path, monkeypatch):
    """A run of the lab, from its folder to the page; several checkpoints, pixels drawn as an image."""
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    from typer.testing import CliRunner

    from weft.cli import app
    from weft.lab import make_config, train

    small = dict(layers=2, heads=2, head_dim=4, dim=8, mlp_dim=8, batch_size=8, warmup=1)
    same = dict(pooling="cls", accelerator="cpu")
    config = make_config(
        "digits", steps=4, checkpoint_every=2, eval_every=2, out=str(tmp_path / "run"), **small, **same
    )
    train(config)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--count", "5", "--examples", "2"])
    assert done.exit_code == 0, done.output
    data = payload((tmp_path / "run" / "inspect.html").read_text("utf-8"))
    assert data["title"] == "run" and ["task", "digits"] in data["facts"]
    lines = data["curves"]["charts"][0]["series"]
    assert [(s["checkpoint"], s["split"]) for s in lines] == [
        (step, split) for step in ("step 2", "step 4") for split in ("train", "validation")
    ]
    example = data["attention"]["examples"][1]
    assert example["grid"] == [8, 8] and example["picture"]["width"] == 8
    assert example["tokens"][:2] == ["[CLS]", "row 1, column 1"] and example["target"].isdigit()
    refused = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--image", "a.png"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and "use --text TEXT" in re.sub(r"[\s│]+", " ", refused.output)
    missing = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert missing.exit_code == 2 and "it has no config.json" in re.sub(r"[\s│]+", " ", missing.output)
    _, *others = weft.lab.load_run(tmp_path / "run")
    monkeypatch.setattr(weft.lab, "load_run", lambda *_, **__: (torch.nn.Linear(1, 1), *others))
    without = CliRunner().invoke(app, ["inspect", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert without.exit_code == 2, without.exception
    assert "models of digits have no attention" in without.output


def test_command_shows_the_weights_that_were_tested(tmp_path):
    pytest.importorskip("sklearn")
    from typer.testing import CliRunner

    from weft.cli import app
    from weft.lab import make_config, train

    run = tmp_path / "run"
    small = dict(layers=1, heads=1, head_dim=4, dim=4, mlp_dim=4, batch_size=8, warmup=1, accelerator="cpu")
    train(make_config("digits", steps=1, test_on="last", out=str(run), **small))
    best = run / "checkpoints" / "best.safetensors"  # a link to the last one
    best.unlink()
    best.write_bytes(b"damaged")
    done = CliRunner().invoke(app, ["inspect", str(run), "--count", "2", "--examples", "1"])
    assert done.exit_code == 0, done.output


def test_your_own_text_and_image(tmp_path):
    """Runs of a language model and of an image classifier, on examples that are not in their data."""
    pytest.importorskip("lightning")
    from PIL import Image
    from runs import tiny, weft

    from weft.lab import make_config, train

    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat. " * 200)
    train(tiny(tmp_path / "lm", "lm", data=str(book), max_length=32, steps=2))
    book.unlink()  # not needed
    done = weft("inspect", tmp_path / "lm", "--text", "a big cat")
    assert done.exit_code == 0, done.output
    data = payload((tmp_path / "lm/inspect.html").read_text("utf-8"))
    assert data["attention"]["examples"][0]["tokens"] == list("a big cat")
    assert data["curves"]["counts"] == {"these examples": 1}
    done = weft("inspect", tmp_path / "lm", "--text", "a big cat " * 4)
    assert "1 of 1 texts have more than 32 tokens (up to 40) and are cut" in done.stderr
    refused = weft("predict", tmp_path / "lm", __file__)
    assert refused.exit_code == 2 and "no answers to predict; use weft generate" in " ".join(refused.output.split())
    for part in ("train", "val"):
        for colour in ("red", "blue"):
            (tmp_path / "images" / part / colour).mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", (16, 16), colour).save(tmp_path / "images" / part / colour / f"{i}.png")
    pictures = dict(data=str(tmp_path / "images"), image_size=16, patch=4, steps=2)
    train(tiny(tmp_path / "run", "imagefolder", **pictures))
    Image.new("RGB", (40, 30), "blue").save(tmp_path / "mine.png")
    done = weft("inspect", tmp_path / "run", "--image", tmp_path / "mine.png")
    assert done.exit_code == 0, done.output
    example = payload((tmp_path / "run/inspect.html").read_text("utf-8"))["attention"]["examples"][0]
    assert example["picture"]["width"] == 16 and example["prediction"].split()[0] in ("red", "blue")
    refused = weft("inspect", tmp_path / "run", "--text", "red")
    assert refused.exit_code == 2 and "use --image FILE" in refused.output
    pyramid = dict(data=str(tmp_path / "images"), image_size=32, steps=1, eval_every=1, accelerator="cpu")
    train(make_config("imagefolder", model="pvt-tiny", batch_size=2, out=str(tmp_path / "pvt"), **pyramid))
    done = weft("inspect", tmp_path / "pvt", "--image", tmp_path / "mine.png")
    assert done.exit_code == 0, done.output
    data = payload((tmp_path / "pvt/inspect.html").read_text("utf-8"))
    assert ["model", "pvt-tiny"] in data["facts"] and ["attention layers", "8"] in data["facts"]


@pytest.mark.parametrize(
    "task, ids, expected",
    [
        ("imdb-byte", [[73, 34, 0]], [["H", "!", "▒"]]),
        ("text", [[72, 33, 0]], [["H", "!", "\x00"]]),
        ("masked", [[72, 256]], [["H", "▒"]]),
        ("imdb-byte", [[*(b + 1 for b in "é·".encode()), 0xE9 + 1, 73]], [["é", "‿", "·", "‿", "�", "H"]]),
        ("text", [[0xE2, 0x82]], [["�", "�"]]),
        ("listops", [[0]], [["<pad>"]]),
        ("digits", [[1, 2]], None),
    ],
)
def test_ids_in_readable_form(task, ids, expected):
    data = TaskData({}, {}, {}, length=3)
    assert words(task, [torch.tensor(ids)], data) == expected
    data.vocabulary = ["<pad>", "a", "b"]
    if task == "text":
        pair = [torch.tensor([[1, 2]]), torch.tensor([[2, 9]])]
        assert words(task, pair, data) == [(["a", "b"], ["b", "9"])]


@pytest.mark.parametrize(("task", "shift"), [("classify", 1), ("glue", 0), ("multi30k-de-en", 0), ("lm", 0)])
def test_pieces_in_readable_form(task, shift):
    pytest.importorskip("tokenizers")
    from weft.tasks.translation import pieces

    made = pieces([("ein Hund", "a dog")])
    data = TaskData({}, {}, {}, length=3, tokenizer=made.to_str())
    ids = torch.tensor([[made.token_to_id("<begin>"), *made.encode("a dog").ids]]) + shift
    assert "".join(words(task, [ids], data)[0]) == "<begin> a dog"


@pytest.mark.parametrize("weight", ["plain", "computed"])
def test_coherence_of_a_single_layer_or_computed_weights(weight):
    layer = weft.MSSA(12, 3)
    if weight == "computed":
        torch.nn.utils.parametrizations.weight_norm(layer.subspaces)
    (found,) = coherences(layer)
    assert found["heads"] == 3 and found["chance"] == pytest.approx((2 / (torch.pi * 12)) ** 0.5)


def test_a_single_layer_and_a_timm_model(tmp_path):
    """A model without a list of blocks shows its attention; timm's sequential blocks count as a list."""
    page = inspect.report(weft.MultiheadAttention(8, 2), torch.randn(1, 5, 8), out=tmp_path / "layer.html")
    data = payload(page.read_text("utf-8"))
    assert data["curves"]["charts"] == [] and len(data["attention"]["layers"]) == 1
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_classes=3)
    weft.swap(model, "full")
    weft.cache(model, length=4)
    model(torch.rand(1, 3, 32, 32))
    data = payload(inspect.report(model, torch.rand(1, 3, 32, 32), out=tmp_path / "timm.html").read_text("utf-8"))
    assert ["attention layers", "2"] in data["facts"] and len(data["attention"]["layers"]) == 4  # with memories
    assert data["attention"]["examples"][0]["grid"] == [2, 2]
    assert [len(s["mean"]) for s in data["curves"]["charts"][0]["series"]] == [2]


def test_a_mask_of_integers_is_no_document():
    """The tokens of an OPT, whose layers are in a `decoder`, and those of an encoder and a decoder."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=40, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16)
    opt = transformers.OPTModel(transformers.OPTConfig(hidden_size=8, word_embed_proj_dim=8, **sizes))
    weft.swap(opt, "full")
    ids, mask = torch.tensor([[7, 8, 9, 10, 0]]), torch.tensor([[1, 1, 1, 1, 0]])
    assert shown(opt, [ids, mask])["examples"][0]["tokens"] == ["7", "8", "9", "10"]
    sizes = dict(vocab_size=40, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
    config = transformers.BartConfig(encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    bart = transformers.BartModel(config)
    weft.swap(bart, "full")
    target = ["11", "12", "13"]
    layers = shown(bart, [ids, mask, torch.tensor([[11, 12, 13]])])["layers"]
    assert [layer["name"] for layer in layers] == ["layer 1", "layer 1 · decoder", "layer 1 · decoder · cross"]
    encoder, decoder, cross = (layer["examples"][0] for layer in layers)
    assert encoder["tokens"] == cross["tokens"] == "shared"
    assert decoder["tokens"] == cross["queries"] == target
    _, decoder, cross = (layer["examples"][0] for layer in shown(bart, [ids])["layers"])  # reads shifted ids
    assert decoder["tokens"] == cross["queries"] == [f"token {i}" for i in range(1, 6)]


def test_padding_does_not_hide_the_map():
    model = TextClassifier(19, 2, max_length=60, dim=16, heads=2, head_dim=8, layers=1, mlp_dim=8, attention="local")
    ids = torch.zeros(2, 40, dtype=torch.long)
    ids[0, :9], ids[1, :6] = 3, 4
    (expected,), _ = inspect.attention_views(model, ids, map_up_to=64)
    (view,), _ = inspect.attention_views(model, ids, map_up_to=12)
    torch.testing.assert_close((view.map, view.row), (expected.map, expected.row))
    for too_long in (ids.clamp(min=1), torch.nn.functional.pad(ids, (0, 9))):
        assert inspect.attention_views(model, too_long, map_up_to=12)[0][0].map is None
