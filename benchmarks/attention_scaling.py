"""How time and memory of the Combiners grow with the length, causal: `weft bench scaling` with their names.

    python benchmarks/attention_scaling.py --plot scaling.png

All options of `weft bench scaling` can be given.
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
