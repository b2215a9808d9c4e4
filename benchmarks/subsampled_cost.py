"""Does subsampled attention pay? Attention alone, forward and backward, dense against sampled: `weft bench cost`.

python benchmarks/subsampled_cost.py --threads 1 --cpu-time --repeats 10
python benchmarks/subsampled_cost.py --length 8192 --windows 8
"""

import sys

from weft.cli import app

if __name__ == "__main__":
    app(["bench", "cost", "--part=attention", "--device=cpu", "--length=4096", "--budget=60", *sys.argv[1:]])
