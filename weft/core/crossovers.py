"""From which length on eager training was measured to be faster than cuDNN's full attention, on one H200.

`python -m benchmarks.tables` writes the table from benchmarks/results/gpu_eager.json: the shortest measured length from
which a forward and backward takes less time, at every longer measured length too. None: at no measured length.
"""

from __future__ import annotations

# table crossovers
FASTER_FROM: dict[str, int | None] = {
    "combiner-fixed": 2048,
    "linear": 2048,
    "local": 2048,
    "longformer": 2048,
}
# end
