"""A Hugging Face model: swapped in one line, generating, and restored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..adapt.surgery import swap
from ..pages import code, table, text
from .long import bits, fit
from .story import Scale, Story, windows

TO, LENGTH, NEW = "combiner-fixed", 256, 60
TITLE = "A Hugging Face model, changed in one line"
PROVES = "weft.swap changes the attention of a transformers model and keeps its weights; generate() and undo() work."


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def seconds(model: Any, prompt: Tensor) -> float:
    """For the prompt and 16 more tokens."""
    begin = time.perf_counter()
    model.generate(prompt, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
    return time.perf_counter() - begin


def tell(out: Path, scale: Scale) -> Story:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return Story(
            TITLE, PROVES, "left out: pip install 'weft[huggingface]'", [text("transformers is not installed.")]
        )
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    # Bytes; the ids of transformers' special tokens are bytes too.
    config = LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, max_position_embeddings=8192, **sizes)  # type: ignore[arg-type]
    model: Any = LlamaForCausalLM(config)
    train, held_out = windows(LENGTH)
    fit(Logits(model), train, scale.text)
    prompt = torch.tensor([list(b"def forward(self, x: Tensor")])
    long = held_out.flatten()[None, : scale.prompt]

    def row(name: str) -> list[str]:
        with torch.no_grad():
            score = float(bits(Logits(model), held_out[:32]))
        return [name, f"{score:.3f}", f"{seconds(model, long):.2f}", written(use_cache=True)]

    def written(use_cache: bool) -> str:
        found = model.generate(
            prompt, max_new_tokens=NEW, do_sample=False, use_cache=use_cache, attention_mask=torch.ones_like(prompt)
        )
        return bytes(found[0].tolist()).decode("utf-8", errors="replace")

    rows = [row("as it was")]
    report = swap(model, to=TO)
    rows.append(row("swapped"))
    fit(Logits(model), train, max(1, scale.text // 4), rate=1e-3)
    rows.append(row("swapped, and trained a little"))
    same = written(use_cache=True) == written(use_cache=False)
    report.undo()
    plain: Any = LlamaForCausalLM(config).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        restored = torch.equal(model(prompt).logits, plain(prompt).logits)
    rows.append(row("undone"))
    verdict = "the same tokens with and without its cache" if same else "other tokens without its cache"
    return Story(
        TITLE,
        PROVES,
        f"{len(report.replaced)} layers swapped; {verdict}; {rows[0][2]} s to continue {scale.prompt:,} tokens, "
        f"{rows[2][2]} s swapped",
        [
            code(f'report = weft.swap(model, to="{TO}")\nmodel.generate(ids, max_new_tokens={NEW})\nreport.undo()'),
            text(
                f"A Llama of two layers was trained on weft's source code for {scale.text} steps with its own "
                f"attention. After the swap it has the same weights, and generates {verdict}; undo() gives back the "
                "original attention with the weights trained since."
            ),
            table(
                ["attention", "bits per byte", f"s for {scale.prompt:,} + 16 tokens", "the text it continues"],
                rows,
                "Llama",
            ),
        ],
        holds=same and restored,
    )
