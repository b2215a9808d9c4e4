"""Table 4: translation, a Transformer with and without caches in its encoder.

    python experiments/cached/table4.py --data data/iwslt14.de-en --source de --target en
    python experiments/cached/table4.py --data data/multi30k.parquet --source de --target en --steps 6000

Cached Transformers, https://arxiv.org/abs/2312.12742: pre-norm, 6 + 6 layers, rate 1.5e-3 with inverse-root decay,
ratio 0.5, 64 slots, caches in the encoder only, valid tokens only, the last ten checkpoints averaged. What the paper
leaves open is fairseq's IWSLT recipe: width 512, MLP 1,024, 4 heads, dropout 0.3, smoothing 0.1, 4,096 tokens a step;
a joint BPE of 10,000 pieces. Greedy decoding here: compare the two rows with each other. For BPE and
sacreBLEU: `pip install 'weft[translation]'`. IWSLT (wit3.fbk.eu) as train.de, train.en, valid.de, …; or a Parquet
file with columns split, de, en.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.layers import sinusoids

PAPER = {  # BLEU, plain and cached
    "IWSLT14 De-En": (35.5, 36.0),
    "IWSLT14 Es-En": (41.4, 41.8),
    "IWSLT14 En-Fr": (41.5, 41.7),
    "IWSLT15 De-En": (36.1, 36.3),
    "IWSLT15 En-Vi": (29.8, 30.2),
    "IWSLT15 Cs-En": (28.8, 29.4),
}
PAD, BEGIN, END = 0, 1, 2
KEPT = 10  # checkpoints that are averaged
Pairs = list[tuple[list[int], list[int]]]


class Translator(nn.Module):
    def __init__(self, vocab: int, o: argparse.Namespace):
        super().__init__()
        self.embed = nn.Embedding(vocab, o.dim, padding_idx=PAD)
        nn.init.normal_(self.embed.weight, std=o.dim**-0.5)
        self.core = nn.Transformer(
            o.dim, o.heads, o.layers, o.layers, o.mlp_dim, o.dropout, batch_first=True, norm_first=True
        )
        self.dropout = nn.Dropout(o.dropout)

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

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.write(self.read(source), source, target)

    @torch.no_grad()
    def translate(self, source: Tensor, longest: int) -> Tensor:
        """Greedy; every step decodes the whole prefix again."""
        memory = self.read(source)
        found = source.new_full((source.shape[0], 1), BEGIN)
        ended = torch.zeros_like(found[:, 0], dtype=torch.bool)
        for _ in range(longest):
            token = self.write(memory, source, found)[:, -1].argmax(-1).masked_fill(ended, PAD)
            found, ended = torch.cat([found, token[:, None]], 1), ended | (token == END)
            if ended.all():
                break
        return found[:, 1:]


def read_pairs(data: Path, source: str, target: str) -> dict[str, list[tuple[str, str]]]:
    if data.suffix == ".parquet":
        import pyarrow.parquet as parquet

        table = parquet.read_table(data, columns=["split", source, target]).to_pylist()
        names = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}
        found: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
        for row in table:
            part = next((to for name, to in names.items() if row["split"].startswith(name)), None)
            if part:
                found[part].append((row[source], row[target]))
        return found
    texts = {p: [(data / f"{p}.{side}").read_text("utf-8").splitlines() for side in (source, target)] for p in
             ("train", "valid", "test")}  # fmt: skip
    return {part: list(zip(*sides, strict=True)) for part, sides in texts.items()}


def pieces(pairs: list[tuple[str, str]], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    return tokenizer


def batches(pairs: Pairs, tokens: int, device: torch.device, generator: torch.Generator | None = None):
    """Pairs of like length together, as many as fit; in random order with a generator."""
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][1]), len(pairs[i][0]), i))
    groups: list[list[int]] = [[]]
    for i in order:
        longest = max(len(pairs[i][0]), len(pairs[i][1]))
        if groups[-1] and longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(i)
    numbers = torch.randperm(len(groups), generator=generator).tolist() if generator else range(len(groups))
    for number in numbers:
        chosen = [pairs[i] for i in groups[number]]
        yield groups[number], *(padded([pair[side] for pair in chosen]).to(device) for side in (0, 1))


def padded(rows: list[list[int]]) -> Tensor:
    found = torch.full((len(rows), max(map(len, rows))), PAD)
    for i, row in enumerate(rows):
        found[i, : len(row)] = torch.tensor(row)
    return found


def train(kind: str, data: dict[str, Pairs], texts: Any, tokenizer: Any, o: argparse.Namespace, device: torch.device):
    from sacrebleu import corpus_bleu  # asked for now, not after hours of training

    torch.manual_seed(o.seed)
    model = Translator(tokenizer.get_vocab_size(), o).to(device)
    if kind == "cached":
        print(weft.cache(model.core.encoder, 0.5, length=64))
    optimizer = torch.optim.Adam(model.parameters(), lr=o.learning_rate, betas=(0.9, 0.98))
    generator, step, kept, began = torch.Generator().manual_seed(o.seed), 0, [], time.perf_counter()
    every = max(1, o.steps // (2 * KEPT))
    losses = []
    while step < o.steps:
        for _, source, target in batches(data["train"], o.tokens, device, generator):
            rate = o.learning_rate * min((step + 1) / o.warmup, math.sqrt(o.warmup / (step + 1)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(source, target[:, :-1])
            loss = F.cross_entropy(
                logits.float().flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % every == 0:
                losses.append(round(loss.item(), 4))
                print(f"{kind}: step {step} of {o.steps}, loss {losses[-1]}", flush=True)
                kept = [*kept, {n: p.detach().clone() for n, p in model.named_parameters()}][-KEPT:]
            if step == o.steps:
                break
    with torch.no_grad():  # weights only: the cache is state, and stays the last one
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.stack([weights[name] for weights in kept]).mean(0) if kept else parameter)
    model.eval()
    found = {"parameters": sum(p.numel() for p in model.parameters()), "steps": step, "loss": losses}
    found["seconds"] = round(time.perf_counter() - began, 1)
    for part in ("valid", "test"):
        guessed = [""] * len(data[part])
        for numbers, source, _ in batches(data[part], 4 * o.tokens, device):
            with torch.autocast(device.type, torch.bfloat16):
                rows = model.translate(source, longest=int(1.5 * source.shape[1]) + 10)
            for i, row in zip(numbers, rows.tolist(), strict=True):
                guessed[i] = tokenizer.decode([t for t in row if t not in (PAD, BEGIN, END)])
        found[f"{part} BLEU"] = round(corpus_bleu(guessed, [[b for _, b in texts[part]]]).score, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", default="de")
    parser.add_argument("--target", default="en")
    parser.add_argument("--out", type=Path, default=Path("runs/cached-table-4"))
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pieces", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--mlp-dim", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=512)
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = read_pairs(o.data, o.source, o.target)
    tokenizer = pieces(texts["train"], o.pieces)

    def encode(text: str) -> list[int]:
        return [BEGIN, *tokenizer.encode(text).ids[: o.longest - 2], END]

    data = {part: [(encode(a), encode(b)) for a, b in pairs] for part, pairs in texts.items()}
    o.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(o).items()}}
    for kind in ("plain", "cached"):
        results[kind] = train(kind, data, texts, tokenizer, o, device)
        (o.out / "result.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{kind}: {results[kind]}", flush=True)


if __name__ == "__main__":
    main()
