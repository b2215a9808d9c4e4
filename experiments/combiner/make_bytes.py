"""Pictures as bytes, row by row with the colours of a pixel together, for density estimation by the task `text`.

    python experiments/combiner/make_bytes.py --data data [--imagenet64 FOLDER]

The task cuts a file 90/5/5. So that the cuts fall between pictures and the last part is test pictures: N pictures,
N a multiple of 20, of which the last twentieth are from the test part. ImageNet-64 is read from its makers' files
(image-net.org, "Imagenet64": train_data_batch_1.npz … 10, val_data.npz).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.tasks.cifar import read


def parts(train: int, test: int) -> tuple[int, int]:
    """How many training and test pictures make 95 % and 5 %."""
    twentieth = min(train // 19, test)
    return 19 * twentieth, twentieth


def as_bytes(pictures: np.ndarray) -> bytes:
    """(n, 3, side, side) -> row, column, colour."""
    return np.ascontiguousarray(pictures.transpose(0, 2, 3, 1)).tobytes()


def imagenet64(folder: Path, names: list[str]) -> Iterator[np.ndarray]:
    for name in names:
        with np.load(folder / name, allow_pickle=False) as batch:
            yield batch["data"].reshape(-1, 3, 64, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="holds CIFAR-10, and takes the files")
    parser.add_argument("--imagenet64", type=Path, help="the folder of the .npz files")
    given = parser.parse_args()
    if given.imagenet64 is None:
        (pictures, _), (test, _) = read(str(given.data), 10)
        n, m = parts(len(pictures), len(test))
        target = given.data / "cifar10.bytes"
        target.write_bytes(as_bytes(pictures[:n]) + as_bytes(test[:m]))
        print(f"{target}: {n:,} training and {m:,} test pictures")
        return
    names = [f"train_data_batch_{i}.npz" for i in range(1, 11)]
    test = next(imagenet64(given.imagenet64, ["val_data.npz"]))
    left, m = 19 * len(test), len(test)  # 50,000 test pictures: 950,000 for training and validation
    target = given.data / "imagenet64.bytes"
    with open(target, "wb") as file:
        for pictures in imagenet64(given.imagenet64, names):
            file.write(as_bytes(pictures[:left]))
            left -= len(pictures[:left])
        if left:
            raise SystemExit(f"{given.imagenet64} has {left:,} training pictures too few")
        file.write(as_bytes(test))
    print(f"{target}: {19 * m:,} training and {m:,} test pictures")


if __name__ == "__main__":
    main()
