"""Milliseconds per token of transformers' `generate()`, and the memory of its cache, with each attention.

    python benchmarks/hf_generation.py [--lengths 8192 65536] [--only linear ...] [--device cuda] [--static] [--batch 4]

Four random layers of Llama, with 8 heads of 32 on the CPU and 32 heads of 128 on the GPU (bfloat16), continue a context
of the given length by greedy decoding. weft's mechanisms process a random prompt; the cache of sdpa is filled with
random keys and values, which cost the same per token. The attentions take turns, and each counts with the median time
of its tokens (CPU: one thread, CPU time). --static uses static caches, which transformers compiles on the GPU.

On a GPU, PyTorch's default for a growing cache is cuDNN, which prepares a plan for every new length. "sdpa, flash" uses
PyTorch's flash attention instead. Speedups are those over the faster one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, DynamicCache, StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import weft
from weft.adapt.decoding import StateLayer
from weft.core.decoding_state import tree_bytes
from weft.lab.run import commit

NAMES = ("linear", "longformer", "local", "combiner-fixed", "combiner-axial")
FLASH = "sdpa, flash"
VOCABULARY, LAYERS = 1000, 4


class Clock(transformers.StoppingCriteria):
    """Notes the time of every token."""

    def __init__(self, device: str):
        self.device, self.times = device, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() if self.device == "cuda" else time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def ms(self) -> list[float]:
        return [1e3 * (b - a) for a, b in zip(self.times, self.times[1:], strict=False)]


class Run:
    """One model with a cache of `length` tokens, which grows with every turn."""

    def __init__(self, name: str, length: int, options: argparse.Namespace):
        self.options, self.times, self.flash = options, [], name == FLASH
        name = "sdpa" if self.flash else name
        heads, head_dim = (32, 128) if options.device == "cuda" else (8, 32)
        room = length + 8 + options.tokens * options.rounds
        config = transformers.LlamaConfig(
            hidden_size=heads * head_dim, intermediate_size=4 * heads * head_dim, num_hidden_layers=LAYERS,
            num_attention_heads=heads, num_key_value_heads=heads, vocab_size=VOCABULARY, max_position_embeddings=room,
            bos_token_id=1, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        with torch.device(options.device):
            self.model = transformers.LlamaForCausalLM._from_config(
                config, attn_implementation=name, dtype=dtype
            ).eval()
        self.ids = torch.randint(2, VOCABULARY, (options.batch, length), device=options.device)
        self.cache: Cache = StaticCache(config, room) if options.static else DynamicCache(config=config)
        start = time.perf_counter()
        if name == "sdpa":
            for layer in range(LAYERS):
                past = torch.randn(2, options.batch, heads, length, head_dim, device=options.device, dtype=dtype)
                self.cache.update(past[0], past[1], layer)
        else:
            with torch.no_grad():
                self.model.model(self.ids, past_key_values=self.cache)
            assert all(isinstance(layer, StateLayer) for layer in self.cache.layers), "it does not decode with states"
        if options.device == "cuda":
            torch.cuda.synchronize()
        self.prompt_s = time.perf_counter() - start
        self.ids = torch.cat([self.ids, self.ids[:, :1]], 1)
        self.bytes = sum(
            tree_bytes(layer.state.inner) if isinstance(layer, StateLayer) else 2 * layer.keys.nbytes
            for layer in self.cache.layers
        )

    def turn(self) -> None:
        clock = Clock(self.options.device)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash else nullcontext():
            self.ids = self.model.generate(
                self.ids,
                past_key_values=self.cache,
                max_new_tokens=self.options.tokens,
                do_sample=False,
                stopping_criteria=[clock],
            )
        self.times += clock.ms()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--only", nargs="+", default=NAMES)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--static", action="store_true", help="static caches")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    weft.huggingface.register()
    rows = []
    for length in options.lengths:
        baselines = ["sdpa"] if options.static or options.device == "cpu" else ["sdpa", FLASH]
        runs = {name: Run(name, length, options) for name in (*baselines, *(f"weft:{n}" for n in options.only))}
        for _ in range(options.rounds):
            for run in runs.values():
                run.turn()
        sdpa, reference = runs["sdpa"], min(statistics.median(runs[name].times) for name in baselines)
        for name, run in runs.items():
            ms = statistics.median(run.times)
            rows.append({"length": length, "attention": name, "ms_per_token": ms, "speedup": reference / ms})
            rows[-1] |= {"cache_bytes": run.bytes, "cache_share": run.bytes / sdpa.bytes, "prompt_s": run.prompt_s}
            print(
                f"{length:>7} {name:<20} {ms:8.2f} ms/token  {reference / ms:6.2f} x  cache {run.bytes / 2**20:7.2f} "
                f"MiB, {100 * run.bytes / sdpa.bytes:6.2f} % of sdpa's  prompt {run.prompt_s:.1f} s",
                flush=True,
            )
    if options.out:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        about = {"torch": torch.__version__, "device": gpu or "cpu", "commit": commit(), "batch": options.batch}
        options.out.write_text(json.dumps({**about, "static": options.static, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
