"""Write the pages that `make check-pages` opens: python tests/example_pages.py FOLDER"""

import sys
from pathlib import Path

import torch
from test_pages import example

import weft
from weft import inspect
from weft.lab.sweep.tables import report_sweeps, sweep_folders
from weft.models import CRATE, TextClassifier

ROOT = Path(__file__).parent.parent


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parts.html").write_text(example(), "utf-8")
    torch.manual_seed(0)
    text = TextClassifier(300, 2, max_length=80, dim=16, heads=12, head_dim=4, layers=1, mlp_dim=8)
    with torch.no_grad():
        for weight in text.encoder.blocks[0].attention.parameters():
            weight *= 8  # focused heads: the colours of large weights
    tokens = list("A film · très long, and it shows;\n a second line.")
    ids = torch.arange(1, len(tokens) + 1)[None].repeat(2, 1)
    split = {"train": [ids], "validation": [ids + 1]}
    both = {"classes": ["negative", "positive"], "targets": ["positive", "negative"]}
    words = [f"word{i}" for i in range(len(tokens))]
    inspect.report(text, ids, out=folder / "text.html", splits=split, tokens=[words, words], **both)
    crate = CRATE(dim=16, heads=2, layers=3, classes=4, image_size=8, patch=2)
    crate.blocks[0].mssa.lam = torch.nn.Parameter(torch.tensor([-1.0, 1.0]))
    images = torch.rand(6, 3, 8, 8)
    steps = [("step 1", {k: v * 0.5 for k, v in crate.state_dict().items()}), ("step 2", dict(crate.state_dict()))]
    splits = {"train": [images], "validation": [images[:3]]}
    inspect.report(crate, images, out=folder / "crate.html", splits=splits, checkpoints=steps)
    cached = TextClassifier(300, 2, max_length=80, dim=16, heads=4, head_dim=4, layers=2, mlp_dim=8)
    weft.cache(cached, ratio=0.5)
    cached(ids)
    inspect.report(cached, ids, out=folder / "cached.html", tokens=[tokens, tokens], splits=split)
    for place, files in sweep_folders([ROOT / "experiments" / "wide"]).items():
        report_sweeps(files, folder / place.name)  # the saved results


if __name__ == "__main__":
    write(Path(sys.argv[1]))
