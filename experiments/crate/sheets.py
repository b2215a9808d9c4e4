"""CIFAR-10 from sheets of 10,000 images (see `common.read_sheets`) into the makers' binary layout, as tasks read it.

python experiments/crate/sheets.py SHEETS DATA          writes DATA/cifar-10-batches-bin
"""

import sys
from pathlib import Path

import numpy as np
from common import read_sheets


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    sheets, folder = Path(sys.argv[1]), Path(sys.argv[2]) / "cifar-10-batches-bin"
    (images, labels), (test_images, test_labels) = read_sheets(sheets)
    folder.mkdir(parents=True)
    parts = {f"data_batch_{i + 1}": slice(10_000 * i, 10_000 * (i + 1)) for i in range(5)}
    for name, part in parts.items():
        write(folder / f"{name}.bin", images[part], labels[part])
    write(folder / "test_batch.bin", test_images, test_labels)
    print(f"{folder}: {len(labels):,} training and {len(test_labels):,} test images")


def write(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    rows = np.concatenate([labels.reshape(-1, 1), images.reshape(len(images), -1)], 1)
    path.write_bytes(rows.astype(np.uint8).tobytes())


if __name__ == "__main__":
    main()
