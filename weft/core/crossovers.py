"""From which length on eager training was measured to be faster than cuDNN's full attention, on one H200.

`python -m benchmarks.tables` writes the table from benchmarks/results/gpu_attention.json: the shortest measured length
from which a forward and backward takes less time, at every longer measured length too. SLOWER_UP_TO has the longest
measured length of mechanisms that were slower there.
"""

from __future__ import annotations

# table crossovers
FASTER_FROM: dict[str, int] = {
    "axial": 2048,
    "bigbird": 2048,
    "combiner-axial": 2048,
    "combiner-axial-horizontal": 16384,
    "combiner-axial-vertical": 16384,
    "combiner-fixed": 2048,
    "combiner-logsparse": 16384,
    "combiner-mixture": 16384,
    "combiner-routing": 16384,
    "linear": 2048,
    "linformer": 16384,
    "local": 2048,
    "logsparse": 2048,
    "longformer": 2048,
    "performer": 16384,
    "reformer": 16384,
    "routing": 2048,
    "sinkhorn": 2048,
    "sparse": 2048,
    "subsampled": 2048,
}
SLOWER_UP_TO: dict[str, int] = {
    "synthesizer": 16384,
}
# end
