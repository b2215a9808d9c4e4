"""Translation: beam search with a cache of keys equals scoring with the whole prefix, and the command."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.models.translation import BEGIN, END, PAD, Translator
from weft.tasks import DataMissing, get_task, make_config
from weft.tasks.translation import as_text, load_tokenizer, pieces, read_pairs

SIZES = dict(dim=16, heads=2, layers=2, mlp_dim=16, dropout=0.0)


def model(vocab: int = 12, **options) -> Translator:
    torch.manual_seed(0)
    made = Translator(vocab, **{**SIZES, **options}).double().eval()
    made.embed.weight.data *= 3  # peaked, so that searches differ
    return made


SOURCE = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 2, 0, 0], [1, 9, 10, 2, 0]])


def finished(ids: list[int]) -> list[int]:
    return ids[: ids.index(END) + 1] if END in ids else ids


def test_one_beam_is_greedy() -> None:
    net = model()
    found = net.translate(SOURCE, beam=1, longest=9)
    for row, source in zip(found.tolist(), SOURCE, strict=True):
        source, line = source[source != PAD][None], []
        while len(line) < 9 and (not line or line[-1] != END):
            scores = net(source, torch.tensor([[BEGIN, *line]]))[0, -1]
            scores[[PAD, BEGIN]] = -torch.inf
            line.append(int(scores.argmax()))
        assert finished(row) == line


def by_hand(net: Translator, source: torch.Tensor, beam: int, power: float, longest: int) -> list[int]:
    """Beam search that scores every prefix from the beginning."""
    lines, done = [(0.0, [])], []
    for t in range(longest):
        every = []
        for score, line in lines:
            p = net(source, torch.tensor([[BEGIN, *line]]))[0, -1].log_softmax(-1)
            every += [(score + float(p[i]), [*line, i]) for i in range(len(p)) if i not in (PAD, BEGIN)]
        every.sort(key=lambda entry: -entry[0])
        done += [(s / (t + 1) ** power, line) for s, line in every[:beam] if line[-1] == END]
        lines = [(s, line) for s, line in every[: 2 * beam] if line[-1] != END][:beam]
        if done and lines[0][0] / (t + 1) ** power <= max(done)[0]:
            break
    return max(done)[1] if done else lines[0][1]


@torch.no_grad()
@pytest.mark.parametrize(("beam", "power"), [(2, 1.0), (4, 0.0), (3, 2.0)])
def test_beam_search_equals_a_search_without_a_cache(beam: int, power: float) -> None:
    net = model()
    found = net.translate(SOURCE, beam, power, longest=8)
    for row, source in zip(found.tolist(), SOURCE, strict=True):
        assert finished(row) == by_hand(net, source[source != PAD][None], beam, power, 8)


def test_padding_and_other_rows_change_nothing() -> None:
    net = model()
    weft.cache(net, 0.5, where="encoder.*", length=4)
    net.train()
    net(SOURCE, SOURCE)
    caches = [m for m in net.modules() if isinstance(m, weft.CachedAttention)]
    assert len(caches) == 2 and all(int(c.cache.updates) == 1 and c.mix == "heads" for c in caches)
    net.eval()
    together = net(SOURCE)
    for i, row in enumerate(SOURCE):
        alone = net.translate(row[row != PAD][None], longest=together.shape[1])
        assert finished(alone[0].tolist()) == finished(together[i].tolist())


def test_a_line_without_an_end_is_as_long_as_alone() -> None:
    net = model()
    scores = net._scores
    net._scores = lambda y: scores(y).index_fill(-1, torch.tensor(END), -torch.inf)
    together = net.translate(SOURCE)
    for i, row in enumerate(SOURCE):
        alone = net.translate(row[row != PAD][None])[0].tolist()
        assert together[i].tolist() == alone + [PAD] * (together.shape[1] - len(alone))


@pytest.mark.filterwarnings("ignore:.*attention layers keep their own")
@pytest.mark.parametrize("delayed", [{}, {"delayed": True}])
def test_adapters_leave_cross_attention_out(delayed) -> None:
    cached, sampled, swapped = model(), model(), model()
    report = weft.cache(cached, **delayed)
    assert all(path.startswith("encoder") or delayed for path in report.replaced)
    reports = [report, weft.subsample(sampled, "Sall-L2"), weft.swap(swapped, "local", block_size=4)]
    assert not any("cross" in path for report in reports for path in report.replaced)
    for net in (cached, sampled, swapped):
        net.train()(SOURCE, SOURCE[:, :3]).sum().backward()
        assert net.eval().translate(SOURCE, longest=4).shape == (len(SOURCE), 4)


def test_files_that_are_not_pairs_are_refused(tmp_path) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.de").write_text("eins\nzwei\n")
        (tmp_path / f"{part}.en").write_text("one\ntwo\n")
    assert read_pairs(tmp_path, "de", "en")["val"] == [("eins", "one"), ("zwei", "two")]
    (tmp_path / "valid.en").write_text("one\n")
    with pytest.raises(DataMissing, match="valid.de has 2 lines, valid.en has 1"):
        read_pairs(tmp_path, "de", "en")


def test_text_survives_the_pieces() -> None:
    pytest.importorskip("tokenizers")
    made = pieces([("Ein Hund läuft.", "A dog runs.")] * 3)
    ids = made.encode("Ein Hund läuft.").ids
    assert as_text(made, [BEGIN, *ids, END, 5, 6]) == "Ein Hund läuft."


def test_names_of_special_pieces_in_a_text_are_text() -> None:
    pytest.importorskip("tokenizers")
    text = "An <end> and a <pad> in <begin> text"
    made = pieces([(text, text)] * 3)
    for tokenizer in (made, load_tokenizer(made.to_str())):
        ids = tokenizer.encode(text).ids
        assert not {PAD, BEGIN, END} & set(ids)
        assert as_text(tokenizer, [BEGIN, *ids, END]) == text


def test_bleu_says_what_it_needs(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataMissing, match=r"weft\[translation\]"):
        get_task("iwslt14-de-en").load(make_config("iwslt14-de-en", data=str(tmp_path)))


@pytest.mark.parametrize("length", [0, 1, 2])
def test_lengths_without_room_for_a_token_are_refused(length) -> None:
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        make_config("iwslt14-de-en", max_length=length)


def test_bleu_equals_sacrebleu_without_common_fourgrams(tmp_path) -> None:
    metrics = pytest.importorskip("sacrebleu.metrics")
    pytest.importorskip("tokenizers")
    folder = tmp_path / "iwslt14.de-en"
    folder.mkdir()
    truth = ["one cat is on the mat now", "the dog runs"]
    for part in ("train", "valid", "test"):
        for side in ("de", "en"):
            (folder / f"{part}.{side}").write_text("\n".join(truth) + "\n")
    task = get_task("iwslt14-de-en")
    batch = task.load(make_config("iwslt14-de-en", data=str(tmp_path))).test
    answers = ["the cat sat on a mat today", "a dog"]
    ids = [[*task.tokenizer.encode(text).ids, END] for text in answers]
    rows = torch.tensor([row + [PAD] * (40 - len(row)) for row in ids])

    def model(source, target=None):
        return rows if target is None else torch.zeros(*target.shape, task.tokenizer.get_vocab_size())

    batch = task.batch(batch, None, torch.Generator(), training=False)
    sums = {name: float(values.sum()) for name, values in task.score(model, batch).items()}
    expected = metrics.BLEU().corpus_score(answers, [truth]).score
    assert expected > 1
    assert task.summary(sums)["bleu"] == pytest.approx(expected)


def test_trains_and_translates_by_command(tmp_path) -> None:
    """Overfits a few sentences: BLEU 100, and the command prints them."""
    for package in ("sacrebleu", "tokenizers", "lightning"):
        pytest.importorskip(package)
    folder = tmp_path / "iwslt14.de-en"
    folder.mkdir()
    pairs = [("eins zwei drei vier", "one two three four"), ("vier drei zwei eins", "four three two one")]
    for part in ("train", "valid", "test"):
        for i, side in enumerate(("de", "en")):
            (folder / f"{part}.{side}").write_text("".join(pair[i] + "\n" for pair in pairs))
    how = dict(layers=1, dim=32, heads=2, mlp_dim=64, dropout=0.0, steps=40, warmup=10, learning_rate=0.03, keep=2,
               batch_size=2, checkpoint_every=40, eval_every=0, label_smoothing=0.0, accelerator="cpu")  # fmt: skip
    from weft.lab.loop import train

    config = make_config("iwslt14-de-en", data=str(tmp_path), out=str(tmp_path / "run"), test_on="last", **how)
    assert train(config).test["bleu"] > 99
    shutil.rmtree(folder)  # the run has the tokenizer
    command = ["translate", str(tmp_path / "run"), "--which", "last", "--device", "cpu"]
    result = CliRunner().invoke(app, command, input="vier drei zwei eins\n\neins zwei drei vier\n")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-3:] == ["four three two one", "", "one two three four"]
    result = CliRunner().invoke(app, command, input="vier\n" + "eins " * 599 + "eins")
    assert "note: 1 of 2 texts have more than 512 tokens (up to 602) and are cut" in result.stderr
