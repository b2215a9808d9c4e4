"""Random calls of every mechanism, checked against the guarantees of weft. A case depends only on its seed.

    python tests/fuzz.py --minutes 120 --seed 7                                  # for two hours
    python tests/fuzz.py --check masked --mechanism routing --case 1234          # repeat one case
    WEFT_TEST_DEVICE=cuda python tests/fuzz.py --minutes 5                       # on a GPU, its kernels included

tests/test_fuzz.py runs a small fixed set in the suite.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import time
import traceback
import warnings

import fuzz_layers  # noqa: F401  (adds checks)
import fuzz_refusals  # noqa: F401
import torch
from fuzz_checks import CHECKS, Skip
from fuzz_draw import DEVICE

import weft


def run_case(check: str, mechanism: str, case: int) -> str | None:
    """Run one case and return a description of the call, or None if the check does not apply to the mechanism."""
    r = random.Random(f"{check} {mechanism} {case}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return CHECKS[check](r, mechanism)
        except Skip:
            return None


def again(check: str, mechanism: str, case: int) -> str:
    device = "" if DEVICE == "cpu" else f"WEFT_TEST_DEVICE={DEVICE} "
    return f"{device}python tests/fuzz.py --check {check} --mechanism {mechanism} --case {case}"


def main() -> int:
    torch.set_default_device(DEVICE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the sequence of cases")
    parser.add_argument("--check", action="append", choices=sorted(CHECKS), help="only these; may be repeated")
    parser.add_argument("--mechanism", action="append", choices=weft.attentions(), help="only these; may be repeated")
    parser.add_argument("--case", type=int, help="run this case of one check and one mechanism, and nothing else")
    parser.add_argument("--show", type=int, default=1, help="failures to print for each check and mechanism")
    args = parser.parse_args()
    checks, mechanisms = args.check or list(CHECKS), args.mechanism or weft.attentions()
    if args.case is not None:
        print(run_case(checks[0], mechanisms[0], args.case))
        return 0
    order, end = random.Random(args.seed), time.monotonic() + 60 * args.minutes
    ran, failed, pairs = 0, collections.Counter(), []
    while time.monotonic() < end:
        if not pairs:  # every check with every mechanism, then all of them again
            pairs = [(c, m) for c in checks for m in mechanisms]
            order.shuffle(pairs)
        check, mechanism = pairs.pop()
        case = order.randrange(1 << 30)
        try:
            ran += run_case(check, mechanism, case) is not None
        except Exception as error:
            ran += 1
            failed[check, mechanism] += 1
            if failed[check, mechanism] <= args.show:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(str(error).split())[:600]
                print(f"{type(error).__name__} at {os.path.relpath(where.filename)}:{where.lineno}: {text}")
                print(f"    {again(check, mechanism, case)}", flush=True)
    print(f"{ran} cases on {DEVICE}, torch {torch.__version__}, seed {args.seed}: {sum(failed.values())} failed")
    for (check, mechanism), count in sorted(failed.items()):
        print(f"    {check} {mechanism}: {count}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
