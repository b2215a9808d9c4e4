"""The table of `enwik8.json`, for the log and for docs/convert.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STAGES = ("after swap", "after transfer", "after fine-tuning")


def conversions() -> str:
    """The table of the stored results, and where they come from."""
    result = json.loads(Path(__file__).with_name("enwik8.json").read_text())
    source = f"{result['gpu']}, shared with other processes; torch {result['torch'].split('+')[0]}"
    source += f", transformers {result['transformers']}, commit {result['commit']}, {result['date']}."
    return f"{table(result)}\n\n{source}"


def table(result: dict[str, Any]) -> str:
    dense, speeds = result["dense"], result["training"]

    def speed(name: str) -> str:
        found = speeds.get(name)
        return f"{found['tokens_per_second']:,.0f} | {found['peak_gib']:.1f}" if found else "– | –"

    lines = [
        f"Dense: {dense['bits_at_1024']:.3f} bits per byte at 1,024 tokens after {dense['steps']:,} steps in "
        f"{dense['minutes']:.1f} minutes. At 8,192 tokens:",
        "",
        "|  | after swap | after transfer | after fine-tuning | of it the last 1,024 bytes | minutes of training "
        "| tokens/s in training | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    before = f"{dense['bits_at_8192']:.3f} | {dense['bits_at_8192_by_eighth'][-1]:.3f}"
    lines.append(f"| dense, as it was | – | – | {before} | – | {speed('dense')} |")
    for name, found in result["conversions"].items():
        cells = [f"{found['bits'][stage]:.3f}" if stage in found["bits"] else "–" for stage in STAGES]
        cells += [f"{found['bits_by_eighth'][-1]:.3f}", f"{found['minutes']:.1f}"]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {speed(name)} |")
    return "\n".join(lines)
