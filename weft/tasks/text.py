"""Language modelling by bytes: enwik8, any text file, and masked language modelling on any text.

    text, enwik8   predict byte t + 1 from the bytes up to t; metric bits per byte
    masked         hide 15 % of the bytes (80 % masked, 10 % replaced, 10 % unchanged) and predict them

The text is cut into windows of max_length; 90 % train, 5 % validation, 5 % test, in this order. enwik8 is the first
10^8 bytes of English Wikipedia in 2006, split into 90/5/5 MB (mattmahoney.net/dc/textdata).
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attention_info
from .base import Columns, DataMissing, Known, Task, TaskData, block_options
from .config import TrainConfig
from .files import DamagedData, files_of, find, must_fit, unpacked
from .registry import add_task

NOTHING = -100  # a target that cross_entropy ignores
PACKED = (".tar.gz", ".bz2", ".zst", ".7z", ".tar", ".tgz", ".tar.xz", ".txz")
ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"


def read_bytes(path: Path) -> bytes:
    """A plain, .gz, .xz or .zip file, or the plain files of a folder in order of name."""
    try:
        if path.is_dir():
            files = files_of(path)
            must_fit(path, sum(p.stat().st_size for p in files))
            return b"\n".join(p.read_bytes() for p in files)
        if path.name.lower().endswith(PACKED):
            raise DamagedData(
                path, "it is a packed file", "Unpack it; of packed files, only .gz, .xz and .zip are read."
            )
        must_fit(path, path.stat().st_size)
        if path.suffix == ".xz":
            return unpacked(path, lzma.open)
        if path.suffix.lower() == ".gz":
            return unpacked(path, gzip.open)
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                inside = [entry for entry in archive.infolist() if not entry.is_dir()]
                if len(inside) != 1:
                    raise DamagedData(path, f"it has {len(inside)} files, not one", "Unpack it and pass the folder.")
                must_fit(path, inside[0].file_size)
                return archive.read(inside[0])
        return path.read_bytes()
    except (
        OSError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
    ) as error:
        raise DamagedData(path, f"it cannot be read ({error})") from error


def windows(content: bytes, length: int, extra: int) -> Tensor:
    """(n, length + extra): consecutive windows, each with `extra` bytes of the next. A view without copies."""
    whole = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    if len(whole) < length + extra:
        raise DataMissing(f"a part of the text has {len(whole)} bytes, one window needs {length + extra}: "
                          "lower --max-length or use a longer text")  # fmt: skip
    return whole.unfold(0, length + extra, length)


def evaluated(whole: Tensor, length: int, stride: int = 0) -> Columns:
    """Windows (n, length + 1) of a whole text that start every `stride` tokens, by default without overlap, and which
    of their targets count: every token but the first, once. The last window is padded with zeros."""
    step = stride or length
    count = 1 + max(0, -(-(len(whole) - 1 - length) // step))
    last = (count - 1) * step
    rows = F.pad(whole, (0, last + length + 1 - len(whole))).unfold(0, length + 1, step)
    counts = unseen(count, length, step)
    counts[-1] &= torch.arange(last + 1, last + length + 1) < len(whole)
    return {"bytes": rows, "counts": counts}


def one_part(ids: Tensor, length: int, facts: dict[str, Any], tokenizer: str | None = None) -> TaskData:
    """A whole text as the test part."""
    if len(ids) < 2:
        raise DataMissing(f"the text has {len(ids)} tokens; at least 2 are needed, because the first is not predicted")
    return only_test(evaluated(ids, length), length, facts, tokenizer)


def only_test(test: Columns, length: int, facts: dict[str, Any], tokenizer: str | None = None) -> TaskData:
    none = {name: column[:0] for name, column in test.items()}
    return TaskData(none, none, test, length, facts, tokenizer=tokenizer, whole=True)


def unseen(count: int, length: int, stride: int) -> Tensor:
    """(count, length): the targets of each window that no earlier window has: all of the first, the last of others."""
    new = torch.arange(length) >= length - (stride or length)
    return torch.cat([torch.ones(1, length, dtype=torch.bool), new.expand(count - 1, -1)])


def counted(losses: Tensor, counts: Tensor) -> dict[str, Tensor]:
    return {"loss": (losses * counts).sum(1), "count": counts.sum(1).to(losses.dtype)}


def ids_of(text: str, known: Known) -> list[int]:
    """The tokens of a text that goes on, in a run's code: pieces, words or bytes."""
    if known.tokenizer is not None:
        from .tokens import Pieces

        found = Pieces(known.tokenizer).bpe.encode(text)
        ids, special = found.ids, found.special_tokens_mask
        while len(ids) > 1 and special[len(ids) - 1]:  # the end that some tokenizers add
            ids.pop()
        return ids
    if known.vocabulary is not None:
        number = {word: i for i, word in enumerate(known.vocabulary)}
        return [number.get(word, number["<unk>"]) for word in text.replace("\n", " <eos> ").split()]
    return list(text.encode())


class Bytes(Task):
    name = "text"
    about = "predict the next byte of any text: --data FILE"
    metric, higher_is_better = "bits_per_byte", False
    length, overlap, vocab = 1024, 1, 256
    splits = True
    reads = frozenset({"max_length", "norm", "qk_norm", "mlp_dropout"})
    defaults: Mapping[str, Any] = dict(
        layers=6, heads=8, dim=512, head_dim=64, mlp_dim=2048, dropout=0.1, steps=10_000, batch_size=16,
        optimizer="adam", learning_rate=1e-3, schedule="cosine", warmup=1000, beta2=0.999, eps=1e-8, clip=1.0,
        positions="alibi", eval_every=500, eval_batches=50,
    )  # fmt: skip

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.positions == "alibi" and not config.hosted:
            names = config.mechanisms()
            for name in [names] if isinstance(names, str) else names:
                if name != "mixed" and not attention_info(name).bias:
                    raise ValueError(f"{name} does not support ALiBi: use --positions rope, learned, sinusoid or none")

    def content(self, config: TrainConfig) -> bytes:
        path = Path(config.data)
        if not path.exists():
            raise DataMissing(f"{path} does not exist: pass a text file, or a folder of text files, with --data")
        content = read_bytes(path)
        if not content:
            raise DamagedData(path, "it is empty")
        return content

    def parts(self, content: bytes) -> tuple[bytes, bytes, bytes]:
        a, b = len(content) * 90 // 100, len(content) * 95 // 100
        return content[:a], content[a:b], content[b:]

    def load(self, config: TrainConfig) -> TaskData:
        length = config.max_length or self.length
        parts = self.parts(self.content(config))
        train, val, test = ({"bytes": windows(part, length, self.overlap)} for part in parts)
        return TaskData(train, val, test, length=length, facts={"vocab": self.vocab})

    def load_again(self, config: TrainConfig, known: Known) -> TaskData:
        if not known.whole or type(self).load is not Bytes.load or not self.undivided:
            return self.load(config)
        content, length, facts = self.content(config), config.max_length or self.length, {"vocab": self.vocab}
        if not self.overlap:
            return only_test({"bytes": windows(content, length, 0)}, length, facts)
        return one_part(torch.from_numpy(np.frombuffer(content, np.uint8).copy()), length, facts)

    @property
    def undivided(self) -> bool:
        """Whether the text is the user's, which has no parts of its own."""
        return type(self).parts is Bytes.parts

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        from ..models.language import LanguageModel

        return LanguageModel(
            data.facts["vocab"],
            max_length=data.length,
            causal=bool(self.overlap),
            positions=config.positions or "alibi",  # type: ignore[arg-type]  # the model checks it
            **block_options(config),
        )

    def inputs(self, batch: Columns) -> tuple[Any, ...]:
        ids = batch["bytes"][:, :-1].long()
        return (ids, None, batch["segments"][:, :-1]) if "segments" in batch else (ids,)

    def encode(self, examples: Sequence[Any], known: Known) -> Columns:
        """Texts of the same number of tokens; of a long one, the end."""
        found = [ids_of(text, known) for text in examples]
        rows = [ids[-known.length :] for ids in found]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"{self.name} takes one text at a time, or texts with the same number of tokens")
        if not rows[0]:
            raise ValueError("the text is empty: pass at least one token")
        return {**self.as_inputs(torch.tensor(rows)), "tokens": torch.tensor([len(ids) for ids in found])}

    def as_inputs(self, ids: Tensor) -> Columns:
        return {"bytes": F.pad(ids, (0, 1))}  # the last token is only a target

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        target, smoothing = self._targets(batch), config.label_smoothing
        if config.hosted:  # models of transformers return logits only
            logits = model(*self.inputs(batch)).float()
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing)
        each = model(*self.inputs(batch), targets=target, label_smoothing=smoothing)
        return each.sum() / self.count(batch).clamp(min=1)

    def part(self, batch: Columns, tokens: slice) -> Columns:
        """The tokens, and the next one as the target of the last."""
        and_next = slice(tokens.start, tokens.stop + 1)
        return {name: column[:, tokens if name == "counts" else and_next] for name, column in batch.items()}

    def count(self, batch: Columns) -> Tensor:
        return (self._targets(batch) != NOTHING).sum()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        logits, target = model(*self.inputs(batch)).float(), self._targets(batch)
        loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        return counted(loss, batch["counts"] if "counts" in batch else target != NOTHING)

    def overlapping(self, rows: Columns, stride: int) -> Columns:
        """The text of these rows in windows that start every `stride` tokens; each target counts once, in the window
        where it has most context."""
        windows = rows["bytes"]
        length = windows.shape[1] - 1
        if set(rows) - {"bytes", "counts"} or self.overlap != 1 or self.streams:
            raise ValueError(f"{self.name} has no text that could be cut into overlapping windows: remove --stride")
        if not 1 <= stride <= length:
            raise ValueError(f"the stride must be between 1 and the length of a window, {length}, got {stride}")
        whole = torch.empty(0, dtype=windows.dtype).set_(windows.untyped_storage())[windows.storage_offset() :]
        if "counts" in rows:  # the last window may be padded
            whole = whole[: (len(windows) - 1) * windows.stride(0) + int(rows["counts"][-1].nonzero().max()) + 2]
        return evaluated(whole, length, stride)

    def _targets(self, batch: Columns) -> Tensor:
        """The next byte; NOTHING at padding and at the last byte of a packed document."""
        target = batch["bytes"][:, 1:].long()
        if "segments" not in batch:
            return target
        here, there = batch["segments"][:, :-1], batch["segments"][:, 1:]
        return target.masked_fill((here != there) | (here == 0), NOTHING)

    def next_command(self, run: str) -> str:
        generates = self.overlap and self.answers == "logits"
        return f'weft generate {run} --prompt "…"' if generates else super().next_command(run)

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["count"]
        value = math.exp(min(loss, 50.0)) if self.metric == "perplexity" else loss / math.log(2)  # bits per something
        return {"loss": loss, self.metric: value}


class Enwik8(Bytes):
    name = "enwik8"
    about = "predict the next byte of enwik8"
    length = 4096
    reads = Bytes.reads | {"initial"}
    # Subsampled attention's language model (The Information Pathways Hypothesis, 2306.01705), 202 M parameters.
    presets = {
        "pathways": dict(
            layers=16, heads=8, head_dim=128, dim=1024, mlp_dim=4096, steps=10_000, warmup=4000, schedule="linear",
            learning_rate=1e-3, final_learning_rate=5e-4, batch_size=64, dropout=0.3, attention_dropout=0.1,
            mlp_dropout=0.1, clip=0.1,
        )
    }  # fmt: skip

    def model(self, config: TrainConfig, data: TaskData) -> nn.Module:
        model = super().model(config, data)
        if config.initial:  # as in that paper's code: the models of its two texts start alike
            from ..models.language import LanguageModel
            from ..models.words import ScaledEmbedding, small_projections

            assert isinstance(model, LanguageModel)
            small_projections(model)
            model.embed = ScaledEmbedding(model.vocab, config.dim)
        return model

    def content(self, config: TrainConfig) -> bytes:
        how = "download it with: weft data get enwik8, or put enwik8.zip (mattmahoney.net/dc/textdata) there"
        path = find(config.data, ("enwik8", "enwik8.zip", "enwik8.xz"), how)
        content = read_bytes(path)
        if len(content) != 10**8:
            raise DamagedData(path, f"it has {len(content):,} bytes, enwik8 has 100,000,000")
        if hashlib.md5(content).hexdigest() != ENWIK8_MD5:
            raise DamagedData(path, "its md5 is not the published one")
        return content

    def parts(self, content: bytes) -> tuple[bytes, bytes, bytes]:
        return content[:90_000_000], content[90_000_000:95_000_000], content[95_000_000:]


class Masked(Bytes):
    name = "masked"
    about = "predict masked bytes of any text: --data FILE"
    metric, higher_is_better = "bits_per_byte", False
    length, overlap, vocab, mask = 512, 0, 257, 256  # id 256 is the mask
    splits = False
    reads = frozenset({"max_length", "mask_rate"})
    defaults = {**Bytes.defaults, "positions": "learned"}

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if not config.mask_rate:
            raise ValueError("mask_rate must be more than 0: without masked tokens, there is nothing to predict")

    def batch(self, rows: Columns, config: TrainConfig, generator: torch.Generator, training: bool) -> Columns:
        """Hide the same number of bytes in every row, so that a mean over rows is a mean over bytes."""
        hide = self.hide if training else self.hide_each
        return hide(rows["bytes"].long(), None, config.mask_rate, generator)

    def hide_each(self, target: Tensor, real: Tensor | None, rate: float, generator: torch.Generator) -> Columns:
        """`hide` for evaluations: what is hidden in a row depends on its tokens, not on the batch."""
        seeds = (target * torch.arange(1, target.shape[1] + 1, device=target.device)).sum(1).tolist()
        rows = [(target[i : i + 1], None if real is None else real[i : i + 1]) for i in range(len(target))]
        drawn = [self.hide(*row, rate, generator.manual_seed(seed)) for row, seed in zip(rows, seeds, strict=True)]
        return {name: torch.cat([columns[name] for columns in drawn]) for name in drawn[0]}

    def hide(self, target: Tensor, real: Tensor | None, rate: float, generator: torch.Generator) -> Columns:
        """Hide tokens of target (B, L), only where `real` is True; of short rows, in proportion fewer count."""
        B, L = target.shape
        count = max(1, round(rate * L))
        draw: dict[str, Any] = {"generator": generator, "device": target.device}
        order = torch.rand(B, L, **draw)
        chosen = (order if real is None else order.masked_fill(~real, 2.0)).argsort(1)[:, :count]
        fate = torch.rand(B, count, **draw)
        other = torch.randint(0, self.mask, (B, count), **draw)
        true = target.gather(1, chosen)
        shown = torch.where(fate < 0.8, self.mask, torch.where(fate < 0.9, other, true))
        if real is None:
            return {"ids": target.scatter(1, chosen, shown), "chosen": chosen, "target": true}
        few = (rate * real.sum(1, keepdim=True)).round().clamp(min=1)
        counts = torch.arange(count, device=target.device) < few
        shown = torch.where(counts, shown, true)
        return {"ids": target.scatter(1, chosen, shown), "chosen": chosen, "target": true, "counts": counts}

    def inputs(self, batch: Columns) -> tuple[Tensor, ...]:
        return (batch["ids"],)

    def as_inputs(self, ids: Tensor) -> Columns:
        return {"ids": ids}

    def loss(self, model: nn.Module, batch: Columns, config: TrainConfig) -> Tensor:
        logits, target = self._hidden(model, batch).flatten(0, 1), batch["target"].flatten()
        if "counts" not in batch:
            return F.cross_entropy(logits, target, label_smoothing=config.label_smoothing)
        each = F.cross_entropy(logits, target, label_smoothing=config.label_smoothing, reduction="none")
        return (each * batch["counts"].flatten()).sum() / batch["counts"].sum()

    def score(self, model: nn.Module, batch: Columns) -> dict[str, Tensor]:
        logits, target = self._hidden(model, batch), batch["target"]
        loss = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        counts = batch.get("counts", torch.ones_like(target, dtype=torch.bool))
        correct = ((logits.argmax(-1) == target) & counts).sum(1)
        return {"loss": (loss * counts).sum(1), "correct": correct, "count": counts.sum(1)}

    def summary(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {**super().summary(sums), "accuracy": sums["correct"] / sums["count"]}

    def _hidden(self, model: nn.Module, batch: Columns) -> Tensor:
        """Logits at the masked positions only, (B, count, vocab)."""
        logits = model(*self.inputs(batch))
        return logits.gather(1, batch["chosen"][..., None].expand(-1, -1, logits.shape[-1])).float()


add_task(Bytes())
add_task(Enwik8())
add_task(Masked())
