"""ListOps and Pathfinder: the generators follow the papers, and the published layouts are read."""

import json

import numpy as np
import pytest

from weft.lab import make_config
from weft.tasks import (
    DataMissing,
    get_task,
    listops,
    pathfinder,
)
from weft.tasks.files import new_folder


def value_of(ids) -> int:
    """An independent reading of an expression, by a stack."""
    stack: list = []
    for token in (listops.VOCABULARY[i] for i in ids):
        if token in listops.OPERATORS:
            stack.append((token, []))
            continue
        if token == "]":
            operator, args = stack.pop()
            value = {"[MIN": min, "[MAX": max, "[MED": lambda a: int(np.median(a)), "[SM": lambda a: sum(a) % 10}[
                operator
            ](args)
            assert 2 <= len(args) <= 10
        else:
            value = int(token)
        if not stack:
            return value
        stack[-1][1].append(value)
        assert len(stack) < 10
    raise AssertionError("an open bracket")


@pytest.fixture(scope="module")
def expressions():
    return listops.generate(300, seed=5)


def test_listops_values_lengths_and_depth(expressions):
    ids, labels = expressions
    for row, label in zip(ids, labels, strict=True):
        n = int((row > 0).sum())
        assert 500 < n < 2000 and not row[n:].any()
        assert value_of(row[:n]) == label
    assert len({row.tobytes() for row in ids}) == len(ids)
    assert set(labels.tolist()) == set(range(10))


def test_listops_has_the_distribution_of_long_range_arena():
    """A plain recursive generator after the arena's definition, against ours: lengths and operators agree."""
    rng = np.random.default_rng(0)

    def tree(depth: int) -> list[str]:
        if depth == 10 or rng.random() > 0.25:
            return [str(rng.integers(10))]
        inner = [token for _ in range(rng.integers(2, 11)) for token in tree(depth + 1)]
        return [listops.OPERATORS[rng.integers(4)], *inner, "]"]

    levels = listops.grow(np.random.default_rng(1), 2000)
    ours = sum(np.bincount(level["tree"], 1 + (level["kind"] >= 0), minlength=2000) for level in levels)
    theirs: list[int] = []
    while len(theirs) < 500:
        found = tree(1)
        if len(found) > 1:  # ours begins with an operator
            theirs.append(len(found))
    for q in (0.25, 0.5, 0.75):
        a, b = np.quantile(ours, q), np.quantile(theirs, q)
        assert abs(np.log(a / b)) < 0.45, (q, a, b)


def test_listops_depends_only_on_the_seed(expressions):
    again, labels = listops.generate(300, seed=5, workers=2)
    assert np.array_equal(again, expressions[0]) and np.array_equal(labels, expressions[1])
    assert not np.array_equal(listops.generate(20, seed=6)[0], expressions[0][:20])


def test_listops_reads_the_official_files(tmp_path):
    folder = tmp_path / "listops-1000"
    folder.mkdir()
    for split in ("train", "val", "test"):
        lines = ["Source\tTarget", "( ( ( [MAX 2 ) ( ( ( [SM 7 ) 8 ) ] ) ) ] )\t5", "( ( ( [MED 3 ) 4 ) ] )\t3"]
        (folder / f"basic_{split}.tsv").write_text("\n".join(lines) + "\n")
    data = get_task("listops").load(make_config("listops", data=str(tmp_path), max_length=12))
    row = data.train["ids"][0]
    assert [listops.VOCABULARY[i] for i in row[row > 0]] == ["[MAX", "2", "[SM", "7", "8", "]", "]"]
    assert value_of(row[row > 0]) == data.train["label"][0] == 5
    (folder / "basic_val.tsv").write_text("Source\tTarget\n( [FOO 3 )\t3\n")
    with pytest.raises(DataMissing, match="line 2: not a ListOps expression"):
        get_task("listops").load(make_config("listops", data=str(tmp_path)))


def test_damaged_generated_data_is_rejected(tmp_path):
    folder = listops.make(tmp_path, sizes={"train": 6, "val": 2, "test": 2})
    config = make_config("listops", data=str(tmp_path))
    data = get_task("listops").load(config)
    assert data.rows("train") == 6 and data.train["ids"].shape == (6, 2000)
    assert data.facts["vocab"] == 17  # the size the study's parameter counts imply
    content = bytearray((folder / "train_ids.npy").read_bytes())
    content[500] ^= 1
    (folder / "train_ids.npy").write_bytes(content)
    with pytest.raises(DataMissing, match="train_ids.npy does not match its checksum"):
        get_task("listops").load(config)
    with pytest.raises(DataMissing, match="already exists"):
        listops.make(tmp_path, sizes={"train": 6, "val": 2, "test": 2})


def test_an_incomplete_data_set_is_not_used(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "listops") as temporary:
        (temporary / "train_ids.npy").write_bytes(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataMissing, match="weft data make listops"):
        get_task("listops").load(make_config("listops", data=str(tmp_path)))


def distance(points, start, end):
    way = end - start
    share = np.clip(((points - start) @ way) / max(way @ way, 1e-9), 0, 1)
    return np.linalg.norm(points - (start + share[..., None] * way), axis=-1)


@pytest.mark.parametrize("size, difficulty", [(32, "easy"), (32, "hard"), (128, "medium")])
def test_pathfinder_curves_and_discs(size, difficulty, monkeypatch):
    monkeypatch.setattr(pathfinder, "CHUNK", 96)
    pictures, labels, lines = pathfinder.draw(size, difficulty, seed=3, chunk=0)
    n, dashes = len(pictures), pathfinder.DASHES[difficulty]
    assert n > 5 and abs(int(labels.sum()) * 2 - n) <= 1
    style = pathfinder.STYLES[size]
    for i in range(n):
        first, second, discs = lines["first"][i], lines["second"][i], lines["discs"][i]
        assert first.shape == (dashes, 2, 2)
        # The dashes of a curve follow each other at the gap's distance ...
        assert np.allclose(np.linalg.norm(first[1:, 0] - first[:-1, 1], axis=-1), style.gap)
        # ... the two curves keep apart ...
        nearest = min(distance(second.reshape(-1, 2), a, b).min() for a, b in first)
        assert nearest > style.thickness
        # ... and the discs stand at both ends of one curve, or on one of each.
        assert np.array_equal(discs[0], first[0, 0])
        assert np.array_equal(discs[1], first[-1, 1] if labels[i] else second[0, 0])
        for y, x in np.rint(discs).astype(int):
            assert pictures[i, y, x] > 230
        middle = np.rint(first.mean(1)).astype(int)
        assert (pictures[i][middle[:, 0], middle[:, 1]] > 0).all()


def test_pathfinder_is_deterministic_and_reads_back(tmp_path, monkeypatch):
    monkeypatch.setattr(pathfinder, "CHUNK", 64)
    one = pathfinder.make(tmp_path / "a", size=32, difficulty="easy", count=40, workers=1)
    two = pathfinder.make(tmp_path / "b", size=32, difficulty="easy", count=40, workers=1)
    assert json.loads((one / "manifest.json").read_text()) == json.loads((two / "manifest.json").read_text())
    data = get_task("pathfinder32-easy").load(make_config("pathfinder32-easy", data=str(tmp_path / "a")))
    assert [data.rows(s) for s in ("train", "val", "test")] == [32, 4, 4]


def test_pathfinder_reads_the_official_layout(tmp_path):
    from PIL import Image

    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    lines = []
    for i in range(10):
        Image.fromarray(np.full((32, 32), i, np.uint8)).save(folder / "imgs" / "0" / f"sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    data = get_task("pathfinder32-hard").load(make_config("pathfinder32-hard", data=str(tmp_path)))
    assert data.train["pixels"][:, 0].tolist() == list(range(8)) and data.test["label"].tolist() == [1]
    assert get_task("pathfinder32-hard").inputs({"pixels": data.test["pixels"]})[0].unique().tolist() == [10]
