"""Time and memory of causal Combiners over length: `weft bench scaling` with their names.

    python benchmarks/attention_scaling.py --plot scaling.png

Takes all options of `weft bench scaling`.
"""

import sys

from weft.cli import app

COMBINERS = (
    "combiner-fixed",
    "combiner-axial",
    "combiner-axial-vertical",
    "combiner-axial-horizontal",
    "combiner-logsparse",
    "combiner-mixture",
    "combiner-routing",
)

if __name__ == "__main__":
    lengths = ",".join(str(2**p) for p in range(10, 16))
    names = ",".join(("full", *COMBINERS))
    app(["bench", "scaling", "--causal", f"--attentions={names}", f"--lengths={lengths}", *sys.argv[1:]])
