"""Count which tests of the kernels passed on a GPU, from pytest's output.

    export WEFT_TEST_DEVICE=cuda
    python3 -m pytest tests/kernels -o addopts= -q --collect-only > all.txt
    python3 -m pytest tests/kernels -o addopts= -v > log.txt
    python3 -m benchmarks.gpu_tests all.txt COMMIT=log.txt ... --gpu "NVIDIA H200" --torch 2.11.0

Of several logs, oldest first, the newest result of each test counts. Failures for lack of memory count as not run.
`python -m benchmarks.tables` writes the table of the documentation.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import weft

OUT = Path(__file__).parent / "results/gpu_tests.json"
KINDS = {"dropout": "dropout", "packed": "packed", "steps": "steps", "call_modes": "call modes"}  # by file
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/kernels/.*?)\s*$", re.M)
FAILURE = re.compile(r"^_+ (test_.*?) _+$", re.M)  # the heading of a traceback


def place(test: str) -> tuple[str, str]:
    """Mechanism and kind of a test."""
    file, _, case = test.partition("::")
    case = case.partition("[")[2]
    names = sorted((name for name in weft.attentions() if weft.attention_info(name).kernel), key=len, reverse=True)
    name = next((name for name in names if re.match(rf"{name}\b", case)), "others")
    if "test_backends_agree" in test:
        kind = "grouped" if "grouped=" in case else "heads of 256" if " D256 " in case else ""
        return name, kind or next(dtype for dtype in ("bfloat16", "float16", "float32") if f" {dtype} " in case)
    kind = next((kind for part, kind in KINDS.items() if part in file), "other")
    return ("others", "other") if name == "others" or kind == "other" else (name, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collected", type=Path)
    parser.add_argument("logs", nargs="+", metavar="COMMIT=LOG")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--torch", required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    tests = [line for line in args.collected.read_text().splitlines() if line.startswith("tests/kernels/")]
    found: dict[str, tuple[str, str]] = {}
    for commit, _, log in (entry.partition("=") for entry in args.logs):
        text = Path(log).read_text()
        _, *failures = FAILURE.split(text)
        starved = {name for name, trace in zip(failures[::2], failures[1::2], strict=True) if "OutOfMemory" in trace}
        for outcome, test in OUTCOME.findall(text):
            if outcome != "SKIPPED" and test.partition("::")[2] not in starved:
                found[test] = outcome, commit
    counts: Counter[tuple[str, ...]] = Counter()
    for test in tests:
        outcome, commit = found.get(test, ("", ""))
        counts[*place(test), {"PASSED": "passed", "": "not run"}.get(outcome, "failed"), commit] += 1
    rows: list[dict[str, Any]] = [
        {"name": name, "kind": kind, "outcome": outcome, "commit": commit, "tests": n}
        for (name, kind, outcome, commit), n in sorted(counts.items())
    ]
    failed = sorted(test for test in tests if found.get(test, ("PASSED", ""))[0] != "PASSED")
    about = {"gpu": args.gpu, "torch": args.torch, "command": "WEFT_TEST_DEVICE=cuda python3 -m pytest tests/kernels"}
    commits = [entry.partition("=")[0] for entry in args.logs]
    args.out.write_text(json.dumps({**about, "commits": commits, "failed": failed, "rows": rows}, indent=1) + "\n")
    for outcome in ("passed", "failed", "not run"):
        print(outcome, sum(row["tests"] for row in rows if row["outcome"] == outcome))


if __name__ == "__main__":
    main()
