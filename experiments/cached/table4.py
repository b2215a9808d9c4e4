"""Table 4: translation, a Transformer with and without caches in its encoder.

    weft sweep experiments/cached/table4.py --only "IWSLT14 De-En/*"
    weft sweep experiments/cached/table4.py --only "Multi30k De-En/*" --steps 6000

Cached Transformers, https://arxiv.org/abs/2312.12742: pre-norm, 6 + 6 layers, learning rate 1.5e-3 with inverse-root
decay, ratio 0.5, 64 slots, caches in the encoder only, valid tokens only, the last ten checkpoints averaged. Settings
that the paper does not give follow fairseq's IWSLT recipe: width 512, MLP 1,024, 4 heads, dropout 0.3, smoothing 0.1, a
joint BPE of 10,000 pieces; 128 pairs per step instead of fairseq's 4,096 tokens. We decode greedily: compare the two
columns with each other. BPE and BLEU need: pip install 'weft[translation]'. IWSLT (wit3.fbk.eu) as
DATA/iwslt14.de-en/train.de, train.en, valid.de, …; Multi30k, which is not in the paper, as DATA/multi30k.parquet with
columns split, de, en.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.lab.sweep import Cell
from weft.layers import sinusoids
from weft.tasks import Known, Task, TaskData, TrainConfig, make_config
from weft.tasks.base import BuiltFromData, Columns
from weft.tasks.files import find, read_parquet

TITLE = "Table 4: translation, plain and cached"
METRIC = "bleu"
UNIT = "%"

PAPER = {  # BLEU, plain and cached
    "IWSLT14 De-En": (35.5, 36.0),
    "IWSLT14 Es-En": (41.4, 41.8),
    "IWSLT14 En-Fr": (41.5, 41.7),
    "IWSLT15 De-En": (36.1, 36.3),
    "IWSLT15 En-Vi": (29.8, 30.2),
    "IWSLT15 Cs-En": (28.8, 29.4),
    "Multi30k De-En": (None, None),
}
PAD, BEGIN, END = 0, 1, 2
PIECES = 10_000
NGRAMS = range(4)


class Translator(nn.Module):
    def __init__(self, vocab: int, config: TrainConfig):
        super().__init__()
        width = config.dim
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        sizes = (width, config.heads, config.layers, config.layers, config.mlp_dim, config.dropout)
        self.core = nn.Transformer(*sizes, batch_first=True, norm_first=True)
        self.dropout = nn.Dropout(config.dropout)

    def tokens(self, ids: Tensor) -> Tensor:
        width = self.embed.embedding_dim
        return self.dropout(math.sqrt(width) * self.embed(ids) + sinusoids(ids.shape[1], width, device=ids.device))

    def read(self, source: Tensor) -> Tensor:
        return self.core.encoder(self.tokens(source), src_key_padding_mask=source == PAD)

    def write(self, memory: Tensor, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        x = self.core.decoder(
            self.tokens(target), memory, tgt_mask=causal, memory_key_padding_mask=source == PAD, tgt_is_causal=True
        )
        return x @ self.embed.weight.T

    def forward(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits of every next piece of the target; without a target, a translation (B, pieces)."""
        if target is None:
            return self.translate(source, longest=int(1.5 * source.shape[1]) + 10)
        return self.write(self.read(source), source, target)

    @torch.no_grad()
    def translate(self, source: Tensor, longest: int) -> Tensor:
        """Greedy decoding; every step processes the whole prefix again."""
        memory = self.read(source)
        found = source.new_full((source.shape[0], 1), BEGIN)
        ended = torch.zeros_like(found[:, 0], dtype=torch.bool)
        for _ in range(longest):
            token = self.write(memory, source, found)[:, -1].argmax(-1).masked_fill(ended, PAD)
            found, ended = torch.cat([found, token[:, None]], 1), ended | (token == END)
            if ended.all():
                break
        return found[:, 1:]


def read_pairs(path: Path, source: str, target: str) -> dict[str, list[tuple[str, str]]]:
    if path.suffix == ".parquet":
        table = read_parquet([path], ["split", source, target])
        rows = list(zip(table["split"], table[source], table[target], strict=True))
        parts = {"train": "train", "val": "val", "test": "test"}
        return {part: [(a, b) for split, a, b in rows if split.startswith(name)] for part, name in parts.items()}
    names = {"train": "train", "val": "valid", "test": "test"}
    sides = {part: [(path / f"{name}.{side}").read_text("utf-8").splitlines() for side in (source, target)]
             for part, name in names.items()}  # fmt: skip
    return {part: list(zip(*both, strict=True)) for part, both in sides.items()}


def pieces(pairs: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        special_tokens=["<pad>", "<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return tokenizer


def as_rows(ids: list[list[int]], longest: int) -> Tensor:
    rows = [torch.tensor([BEGIN, *row[: longest - 2], END], dtype=torch.int32) for row in ids]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def cut(ids: Tensor) -> Tensor:
    """Remove columns that are padding in every row."""
    return ids[:, : int((ids != PAD).sum(1).max())].long()


class Translation(BuiltFromData, Task):
    metric = "bleu"
    defaults = dict(
        layers=6, heads=4, dim=512, mlp_dim=1024, dropout=0.3, steps=50_000, batch_size=128, learning_rate=0.095,
        warmup=4000, schedule="inverse_sqrt", label_smoothing=0.1, clip=1.0, max_length=512, eval_every=2500,
        eval_batches=2, checkpoint_every=2500, keep=10, test_on="average",
    )  # fmt: skip  # 0.095 / sqrt(4000) = 1.5e-3

    def __init__(self, row: str):
        corpus, pair = row.lower().split()
        self.source, self.target = pair.split("-")
        self.name, self.about = f"{corpus}-{pair}", f"translation, {row}"  # type: ignore[misc]
        self.places = (f"{corpus}.{pair}", f"{corpus}.parquet")

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        from sacrebleu.metrics import BLEU  # fail now, not after hours of training

        self.bleu, self.longest = BLEU(), config.max_length
        how = f"put train.{self.source}, train.{self.target}, valid.{self.source}, … there"
        texts = read_pairs(find(config.data, self.places, how), self.source, self.target)
        if known is None:
            self.tokenizer = pieces(texts["train"])
        else:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_str(known.tokenizer)
        self.texts = {}
        splits, at = [], 0
        for part, pairs in texts.items():
            sides = ([self.tokenizer.encode(pair[i]).ids for pair in pairs] for i in (0, 1))
            columns = {name: as_rows(ids, self.longest) for name, ids in zip(("source", "target"), sides, strict=True)}
            splits.append({**columns, "number": torch.arange(at, at + len(pairs))})
            if part != "train":
                self.texts |= {at + i: pair[1] for i, pair in enumerate(pairs)}
            at += len(pairs)
        vocab = self.tokenizer.get_vocab_size()
        words = [self.tokenizer.id_to_token(i) for i in range(vocab)]
        length = known.length if known else splits[0]["target"].shape[1]
        tokenizer = self.tokenizer.to_str()
        return TaskData(*splits, length=length, facts={"vocab": vocab}, vocabulary=words, tokenizer=tokenizer)

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        return Translator(data.facts["vocab"], config)

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        return {**rows, "source": cut(rows["source"]), "target": cut(rows["target"])}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return batch["source"], batch["target"][:, :-1]

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        logits, target = model(*self.inputs(batch)).float(), batch["target"][:, 1:]
        smoothing = config.label_smoothing
        return F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD, label_smoothing=smoothing)

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        """The statistics of BLEU: matching and total n-grams, and lengths."""
        found = []
        for number, ids in zip(batch["number"].tolist(), model(batch["source"]).tolist(), strict=True):
            text = self.tokenizer.decode([t for t in ids if t not in (PAD, BEGIN, END)])
            truth = self.texts.get(number)
            if truth is None:  # the training part
                truth = self.tokenizer.decode(batch["target"][len(found)].tolist())
            one = self.bleu.corpus_score([text], [[truth]])
            found.append([*one.counts, *one.totals, one.sys_len, one.ref_len])
        names = [f"{what}{n}" for what in ("matching", "all") for n in NGRAMS] + ["length", "true_length"]
        sums = torch.tensor(found, dtype=torch.float32, device=batch["source"].device)
        logits, target = model(*self.inputs(batch)).float(), batch["target"][:, 1:]
        loss = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD, reduction="none").sum(1)
        return {"loss": loss, "count": (target != PAD).sum(1), **dict(zip(names, sums.T, strict=True))}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        matching, everything = ([int(sums[f"{what}{n}"]) for n in NGRAMS] for what in ("matching", "all"))
        bleu = self.bleu.compute_bleu(matching, everything, int(sums["length"]), int(sums["true_length"]))
        return {"loss": sums["loss"] / sums["count"], "bleu": bleu.score}


TASKS = [Translation(row) for row in PAPER]


def cells() -> list[Cell]:
    encoder = '{"where": "core.encoder.*", "length": 64}'
    return [
        Cell(row, column, make_config(task.name, cache=ratio, cache_options=options, precision="bf16-mixed"), figure)
        for (row, figures), task in zip(PAPER.items(), TASKS, strict=True)
        for (column, ratio, options), figure in zip(
            (("plain", 0.0, ""), ("cached", 0.5, encoder)), figures, strict=True
        )
    ]
