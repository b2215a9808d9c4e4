"""Token classification of your own texts: names, parts of speech.

    weft train tag --data train.conll       a token and its tag per line, an empty line after each sentence
    weft train tag --data sentences.jsonl   {"tokens": ["Ada", "lives", "here"], "tags": ["B-PER", "O", "O"]}

The metric is the F1 of whole entities, as conlleval computes it: an entity begins at B-X, at S-X, or at I-X after
another tag, E-X or S-X, and must have the right borders and type. A tag without such a prefix is an entity of one
token, except O; if no tag is O, the F1 is the accuracy. A token's tag is predicted at its first byte or piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Columns, DataMissing, Known, TaskData, block_options
from .config import TrainConfig
from .files import DamagedData, kind_of, lines_of, pad_rows, read_text
from .hosts import host_facts, hosted_model, longest
from .own import TextTable, cutting, from_file, meaning_of, tokens_of, undivided
from .registry import add_task
from .tables import Table, by_split, read_tables
from .text import NOTHING
from .tokens import Pieces

TOKENS, TAGS = ("tokens", "words", "sentence"), ("tags", "ner_tags", "labels", "label", "pos_tags", "ner")
COLUMNS = (".conll", ".bio", ".iob", ".iob2", ".txt", ".tsv")
PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")


def is_entity_tag(text: str) -> bool:
    return text == "O" or text.startswith(PREFIXES)


def read_columns(path: Path, tagged: bool = True) -> Table:
    """A file with a token and its tag per line: the first and the last column."""
    rows: list[dict[str, Any]] = []
    places: list[str] = []
    tokens: list[str] = []
    tags: list[str] = []
    first = 1
    for number, line in enumerate([*lines_of(read_text(path)), ""], 1):
        # Tokens may contain other kinds of white space, such as the no-break space in 10 000.
        columns = line.split("\t") if "\t" in line else [column for column in line.split(" ") if column]
        if not line.strip() or columns[0] == "-DOCSTART-":
            if tokens:
                rows.append({"tokens": tokens, "tags": tags})
                places.append(f"lines {first} to {number - 1}")
            tokens, tags, first = [], [], number + 1
        elif line.startswith("# ") and not tokens and not (len(columns) == 2 and is_entity_tag(columns[1])):
            first = number + 1
        elif tagged and (len(columns) < 2 or not columns[-1].strip()):
            what = f"line {number} has a token without a tag, {line.strip()!r:.40}"
            raise DamagedData(path, what, "Each line is a token and its tag.")
        else:
            tokens.append(columns[0])
            tags.append(columns[-1].strip())
    return Table(path, ["tokens", "tags"], rows, places)


def read_sentences(data: str, any_part: bool = False) -> dict[str, Table]:
    path = Path(data)
    if path.is_file() and kind_of(path)[1] in COLUMNS:
        return {"": read_columns(path)}
    if path.is_dir():
        found = by_split((kind_of(p)[0], p) for p in sorted(path.iterdir()) if kind_of(p)[1] in COLUMNS)
        if "train" in found or (any_part and found):
            return {split: read_columns(file) for split, file in found.items()}
    if not path.exists() and path.suffix.lower() in COLUMNS:
        raise DataMissing(f"{path} does not exist: pass a {', '.join(COLUMNS)} or .jsonl file with --data")
    return read_tables(data, any_part)


def encode_tokens(
    sentences: Sequence[Sequence[str]], known: Known
) -> tuple[list[np.ndarray], list[list[int]], list[int]]:
    """Ids without 0 of each sentence, the position of each token in them, -1 beyond the end, and how many ids it had
    before the cut."""
    rows, starts, counts = [], [], []
    pieces = None if known.tokenizer is None else cutting(known.tokenizer, known.length)
    number = {word: i for i, word in enumerate(known.vocabulary or ())}
    for tokens in sentences:
        at = [-1] * len(tokens)
        if pieces is not None:
            found = pieces.bpe.encode(list(tokens), is_pretokenized=True)
            ids, count = [i + 1 for i in found.ids], tokens_of(found)
            for place, word in reversed(list(enumerate(found.word_ids))):
                if word is not None:
                    at[word] = place
        elif number:
            ids, at, count = [number.get(token, 1) for token in tokens], list(range(len(tokens))), len(tokens)
        else:
            ids = []
            for n, token in enumerate(tokens):
                at[n] = len(ids)
                ids += [byte + 1 for byte in f"{token} ".encode()]
            count = len(ids)
        counts.append(count)
        rows.append(np.array(ids[: known.length], np.int32))
        starts.append([place if place < known.length else -1 for place in at])
    return rows, starts, counts


class Tag(TextTable):
    name = "tag"
    about = "tags of the tokens of your own texts: --data FILE.conll (.jsonl, .parquet, a folder)"
    metric, hosts = "f1", "TokenClassification"
    models = ("transformer",)
    uneven = True
    reads = frozenset({"max_length", "text_column", "label_column", "tokenizer", "norm", "qk_norm"})
    defaults = {**TextTable.defaults, "positions": "learned", "pooling": ""}

    def read(self, config: TrainConfig, known: Known | None) -> TaskData:
        whole = known is not None and known.whole
        found = {split: self._examples(t, config) for split, t in read_sentences(config.data, whole).items()}
        parts = self._split(found, whole)
        if known is None:
            length = longest(config, config.max_length or self.length)
            texts = [" ".join(tokens) for tokens, _, _ in parts["train"]]
            vocabulary, tokenizer = meaning_of(config, texts, spaced=True)
            if vocabulary is not None:
                vocabulary = ["<pad>", "<unk>", *sorted({t for tokens, _, _ in parts["train"] for t in tokens})]
            names = sorted({tag for part in parts.values() for _, tags, _ in part for tag in tags})
            if len(names) < 2:
                raise DataMissing(f"the sentences have only the tag {names[0]!r}; at least 2 are needed")
            vocab = len(Pieces(tokenizer)) + 1 if tokenizer else len(vocabulary or range(257))
            facts = {"vocab": vocab, "classes": len(names)}
            facts |= host_facts(config, None, length=length, vocab=vocab, classes=names,
                                from_file=from_file(config, tokenizer))  # fmt: skip
            known = Known(facts, vocabulary, names, tokenizer, length)
        assert known.classes is not None
        columns, tokens = {}, {}
        for split, part in parts.items():
            columns[split], tokens[split] = self._columns(part, known)
        return TaskData(columns["train"], columns["val"], columns["test"], known.length, known.facts,
                        known.vocabulary, classes=known.classes,
                        tokenizer=known.tokenizer, whole=whole and undivided(found), tokens=tokens)  # fmt: skip

    def _examples(self, table: Table, config: TrainConfig) -> list[tuple[Any, Any, str, str]]:
        columns = (
            table.column(config.text_column, TOKENS, "tokens", "--text-column"),
            table.column(config.label_column, TAGS, "tags", "--label-column"),
        )
        rows = []
        for row, place in zip(table.rows, table.places, strict=True):
            where, found = f"{table.path}, {place}", []
            for column in columns:
                value = row[column].split() if isinstance(row[column], str) else row[column]
                if not isinstance(value, list) or not value or None in value:
                    raise DataMissing(f"{where}: column {column!r} must be a list of tokens, got {row[column]!r:.60}")
                found.append([str(entry) for entry in value])
            tokens, tags = found
            if len(tokens) != len(tags):
                counts = f"{len(tokens)} tokens, but {columns[1]!r} has {len(tags)} tags"
                raise DataMissing(f"{where}: column {columns[0]!r} has {counts}")
            rows.append((tokens, tags, where, table.split(row, where)))
        if not rows:
            raise DamagedData(table.path, "it has no sentences")
        return rows

    def _columns(self, part: Sequence[tuple[Any, Any, str]], known: Known) -> tuple[Columns, list[int]]:
        ids, starts, counts = encode_tokens([tokens for tokens, _, _ in part], known)
        names = known.classes or []
        number = {name: i for i, name in enumerate(names)}
        label = np.full((len(part), known.length), NOTHING, np.int16)
        for row, ((_, tags, where), places) in enumerate(zip(part, starts, strict=True)):
            for tag, place in zip(tags, places, strict=True):
                if tag not in number:
                    raise DataMissing(f"{where}: the tag {tag!r} is not among those of the run: {', '.join(names)}")
                if place >= 0:
                    label[row, place] = number[tag]
        kinds = sorted({name[2:] if name.startswith(PREFIXES) else name for name in names if name != "O"})
        kind = [0 if n == "O" else 1 + kinds.index(n[2:] if n.startswith(PREFIXES) else n) for n in names]
        begins = [n != "O" and not n.startswith(("I-", "E-", "L-")) for n in names]
        ends = [n.startswith(("E-", "S-", "L-", "U-")) for n in names]
        columns = {
            "ids": torch.from_numpy(pad_rows(ids, known.length, np.int32)),
            "tags": torch.from_numpy(label),
            # the same in every row: the type of each class, 0 for O, and whether it always begins or ends an entity
            "kind": torch.tensor(kind, dtype=torch.int16).expand(len(part), -1),
            "begins": torch.tensor(begins).expand(len(part), -1),
            "ends": torch.tensor(ends).expand(len(part), -1),
        }
        return columns, counts

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.tagger import TokenClassifier

        if "hf" in data.facts:
            return hosted_model(config, data.facts, self.hosts, data.length)
        return TokenClassifier(
            data.facts["vocab"],
            data.facts["classes"],
            max_length=data.length,
            positions=config.positions or "learned",
            **block_options(config),
        )

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        logits = model(*self.inputs(batch)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["tags"].long().flatten(), ignore_index=NOTHING,
                               label_smoothing=config.label_smoothing)  # fmt: skip

    def count(self, batch: Columns) -> Tensor:
        return (batch["tags"] != NOTHING).sum()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        logits, label = model(*self.inputs(batch)).float(), batch["tags"].long()
        loss = F.cross_entropy(logits.transpose(1, 2), label, ignore_index=NOTHING, reduction="none")
        order = (label == NOTHING).int().argsort(dim=1, stable=True)  # the tokens first, in their order
        label, guess = label.gather(1, order), logits.argmax(-1).gather(1, order)
        real = label != NOTHING
        gold, found = (entities(tags.clamp(min=0), real, batch) for tags in (label, guess))
        hits = gold[0] & found[0] & (gold[1] == found[1]) & (gold[2] == found[2])
        return {
            "loss": loss.sum(1),
            "count": real.sum(1),
            "correct": ((guess == label) & real).sum(1),
            "gold": gold[0].sum(1),
            "found": found[0].sum(1),
            "hits": hits.sum(1),
        }

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        count, both = max(sums["count"], 1), max(sums["gold"] + sums["found"], 1)
        return {
            "loss": sums["loss"] / count,
            "accuracy": sums["correct"] / count,
            "f1": 2 * sums["hits"] / both,
            "precision": sums["hits"] / max(sums["found"], 1),
            "recall": sums["hits"] / max(sums["gold"], 1),
        }

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        """Lists of tokens, or texts, which are cut at white space."""
        sentences = [text.split() if isinstance(text, str) else [str(token) for token in text] for text in examples]
        ids, starts, tokens = encode_tokens(sentences, known)
        longest = max(map(len, starts), default=0)
        at = np.full((len(starts), longest), -2, np.int64)  # -1: beyond max_length, -2: no token
        for row, places in enumerate(starts):
            at[row, : len(places)] = places
        rows = torch.from_numpy(pad_rows(ids, known.length, np.int32))
        return {"ids": rows, "at": torch.from_numpy(at), "tokens": torch.tensor(tokens)}

    def decode(self, out: Tensor, rows: Columns, known: Known) -> list[dict[str, Any]]:
        """The tags of each example's tokens; None for tokens beyond max_length."""
        guess, names = out.argmax(-1), known.classes or []
        found = []
        for tags, places in zip(guess.tolist(), rows["at"].tolist(), strict=True):
            found.append({"answer": [names[tags[i]] if i >= 0 else None for i in places if i > -2]})
        return found


def entities(tags: Tensor, real: Tensor, batch: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """For tags (B, L): where an entity begins, its type, and the position of its last token."""
    kind = batch["kind"].long().gather(1, tags).masked_fill(~real, 0)
    begins, ends = (batch[name].gather(1, tags) for name in ("begins", "ends"))
    before, after = F.pad(kind, (1, 0))[:, :-1], F.pad(kind, (0, 1))[:, 1:]
    begin = (kind > 0) & (begins | (before != kind) | F.pad(ends, (1, 0))[:, :-1])
    next_begins = F.pad(begin, (0, 1))[:, 1:]
    end = (kind > 0) & (next_begins | (after != kind))
    L = tags.shape[1]
    places = torch.where(end, torch.arange(L, device=tags.device), L)
    return begin, kind, places.flip(1).cummin(1).values.flip(1)


add_task(Tag())
