"""Images per second of PVT, plain and cached, training and test, bfloat16, one GPU: `weft bench throughput`.

python benchmarks/cached_pvt.py [--models pvt-tiny] [--batch 1024] [--compile]
"""

import sys

from weft.cli import app

if __name__ == "__main__":
    given = ["--device=cuda", "--precision=bf16-mixed", "--models=pvt-tiny", "--batch=1024", *sys.argv[1:]]
    app(["bench", "throughput", *given])
