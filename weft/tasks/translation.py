"""Translation: sacreBLEU of an encoder-decoder with beam search.

    DATA/<corpus>.<source>-<target>/{train,valid,test}.<language>       one sentence per line, as IWSLT after conversion
    DATA/<corpus>.parquet                                               columns split and one per language (Multi30k)

One byte-level BPE for both languages, trained on the training part. The cached encoder of Cached Transformers
(https://arxiv.org/abs/2312.12742, Table 4): `--cache 0.5 --cache-options '{"where": "encoder.*", "length": 64}'`. The
recipe is fairseq's for IWSLT. Tests use the average of the kept checkpoints. Needs: pip install 'weft[translation]'
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Columns, DataMissing, Known, Task, TaskData
from .config import TrainConfig
from .files import DamagedData, find, lines_of, read_parquet, read_text
from .registry import add_task

PAD, BEGIN, END = 0, 1, 2
SPECIAL = ["<pad>", "<begin>", "<end>"]
PIECES = 10_000
NGRAMS = range(4)
PARTS = {"train": "train", "val": "valid", "test": "test"}
CORPORA = {
    "iwslt14": ("de-en", "es-en", "en-fr"),
    "iwslt15": ("de-en", "en-vi", "cs-en"),
    "multi30k": ("de-en", "en-de"),
}


class Translation(Task):
    metric, uneven = "bleu", True
    reads = frozenset({"max_length"})
    defaults = dict(
        layers=6, heads=4, dim=512, mlp_dim=1024, dropout=0.3, steps=50_000, batch_size=128, learning_rate=0.095,
        warmup=4000, schedule="inverse_sqrt", label_smoothing=0.1, clip=1.0, max_length=512, eval_every=2500,
        eval_batches=2, checkpoint_every=2500, keep=10, test_on="average",
    )  # fmt: skip  # 0.095 / sqrt(4000) = 1.5e-3
    presets = {
        "small": dict(
            layers=3, dim=256, mlp_dim=512, steps=3000, batch_size=256, learning_rate=0.05, warmup=1000, eval_every=0,
            checkpoint_every=150, keep=5, max_length=64,
        )
    }  # fmt: skip

    def __init__(self, corpus: str, pair: str):
        self.source, self.target = pair.split("-")
        self.name, self.about = f"{corpus}-{pair}", f"translation, {corpus}, {pair}"  # type: ignore[misc]
        other = f"{corpus}.{self.target}-{self.source}"
        self.places = (f"{corpus}.{pair}", other, f"{corpus}.parquet")

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.max_length < 3:
            what = "a sentence needs its begin, its end and a token"
            raise ValueError(f"max_length must be at least 3 for {self.name}, got {config.max_length}: {what}")

    def unread(self, config: TrainConfig) -> tuple[str, ...]:
        return "attention", "attention_options", "head_dim", "attention_dropout", "positions"

    def load(self, config: TrainConfig) -> TaskData:
        return self._load(config, None)

    def load_again(self, config: TrainConfig, known: Known) -> TaskData:
        return self._load(config, known)

    def _load(self, config: TrainConfig, known: Known | None) -> TaskData:
        self.bleu = bleu()  # fail now rather than after training
        longest = config.max_length
        how = f"put train.{self.source}, train.{self.target}, valid.{self.source}, … there"
        texts = read_pairs(find(config.data, self.places, how), self.source, self.target)
        self.tokenizer = pieces(texts["train"]) if known is None else load_tokenizer(known.tokenizer or "")
        self.texts: dict[int, str] = {}
        splits, at = [], 0
        for part, pairs in texts.items():
            sides = ([found.ids for found in self.tokenizer.encode_batch([p[i] for p in pairs])] for i in (0, 1))
            columns = {name: as_rows(ids, longest) for name, ids in zip(("source", "target"), sides, strict=True)}
            splits.append({**columns, "number": torch.arange(at, at + len(pairs))})
            if part != "train":
                self.texts |= {at + i: pair[1] for i, pair in enumerate(pairs)}
            at += len(pairs)
        vocab = self.tokenizer.get_vocab_size()
        words = [self.tokenizer.id_to_token(i) for i in range(vocab)]
        length = known.length if known else splits[0]["target"].shape[1]
        train, val, test = splits
        return TaskData(train, val, test, length, {"vocab": vocab}, words, tokenizer=self.tokenizer.to_str())

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.translation import Translator

        sizes = dict(dim=config.dim, heads=config.heads, layers=config.layers, mlp_dim=config.mlp_dim)
        return Translator(data.facts["vocab"], **sizes, dropout=config.dropout, **config.options("model_options"))

    def next_command(self, run: str) -> str:
        return f"weft translate {run} < FILE"

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        return {**rows, "source": cut(rows["source"]), "target": cut(rows["target"])}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["source"], batch["target"][:, :-1]

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        logits, target = model(*self.inputs(batch)).flatten(0, 1).float(), batch["target"][:, 1:].flatten()
        return F.cross_entropy(logits, target, ignore_index=PAD, label_smoothing=config.label_smoothing)

    def count(self, batch: Columns) -> Tensor:
        return (batch["target"][:, 1:] != PAD).sum()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        """The statistics of BLEU: matching and all n-grams, and the lengths."""
        found: list[list[int]] = []
        for number, ids in zip(batch["number"].tolist(), model(batch["source"]).tolist(), strict=True):
            truth = self.texts.get(number)
            if truth is None:  # the training part
                truth = as_text(self.tokenizer, batch["target"][len(found)].tolist())
            one = self.bleu.corpus_score([as_text(self.tokenizer, ids)], [[truth]])
            found.append([*one.counts, *one.totals, one.sys_len, one.ref_len])
        names = [f"{what}{n}" for what in ("matching", "all") for n in NGRAMS] + ["length", "true_length"]
        sums = torch.tensor(found, dtype=torch.float32, device=batch["source"].device)
        logits, target = model(*self.inputs(batch)).float(), batch["target"][:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD, reduction="none").sum(1)
        return {"loss": loss, "count": (target != PAD).sum(1), **dict(zip(names, sums.T, strict=True))}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        matching, everything = ([int(sums[f"{what}{n}"]) for n in NGRAMS] for what in ("matching", "all"))
        lengths = int(sums["length"]), int(sums["true_length"])
        score = self.bleu.compute_bleu(matching, everything, *lengths, smooth_method=self.bleu.smooth_method)
        return {"loss": sums["loss"] / sums["count"], "bleu": score.score}


def bleu() -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise DataMissing("BLEU needs sacrebleu: pip install 'weft[translation]'") from error
    return BLEU()


def read_pairs(path: Path, source: str, target: str) -> dict[str, list[tuple[str, str]]]:
    """Sentences of the three parts. Multi30k has several test sets: the one of 2016 counts."""
    if path.suffix == ".parquet":
        table = read_parquet([path], ["split", source, target])
        rows = list(zip(table["split"], table[source], table[target], strict=True))
        test = "test_2016_flickr" if "test_2016_flickr" in table["split"] else "test"
        names = {"train": "train", "val": "val", "test": test}
        found = {part: [(a, b) for split, a, b in rows if split.startswith(name)] for part, name in names.items()}
    else:
        found = {}
        for part, name in PARTS.items():
            sides = [lines_of(read_text(path / f"{name}.{side}")) for side in (source, target)]
            if len(sides[0]) != len(sides[1]):
                what = f"{name}.{source} has {len(sides[0])} lines, {name}.{target} has {len(sides[1])}"
                raise DamagedData(path, what, "Lines are pairs: both files need the same number.")
            found[part] = list(zip(*sides, strict=True))
    for part, pairs in found.items():
        if not pairs:
            raise DamagedData(path, f"its part {part} is empty")
    return found


def pieces(pairs: list[tuple[str, str]]) -> Any:
    """A byte-level BPE of both languages."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataMissing("translation needs tokenizers: pip install 'weft[translation]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return load_tokenizer(tokenizer.to_str())


def load_tokenizer(text: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # a "<end>" in a text is text
    return tokenizer


def as_rows(ids: list[list[int]], longest: int) -> Tensor:
    rows = [torch.tensor([BEGIN, *row[: longest - 2], END], dtype=torch.int32) for row in ids]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def as_text(tokenizer: Any, ids: list[int]) -> str:
    """The text up to the first END."""
    ids = ids[: ids.index(END)] if END in ids else ids
    return tokenizer.decode([t for t in ids if t not in (PAD, BEGIN)]).strip()


def cut(ids: Tensor) -> Tensor:
    """Without the columns in which every row is padding."""
    return ids[:, : int((ids != PAD).sum(1).max())].long()


for corpus, directions in CORPORA.items():
    for direction in directions:
        add_task(Translation(corpus, direction))
