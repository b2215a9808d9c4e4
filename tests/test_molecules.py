"""Molecules: RDKit's reading of SMILES, the stored graphs, splits, and EGT-Simple."""

from __future__ import annotations

import csv
import gzip
import sys
import zipfile

import numpy as np
import pytest
import torch

from weft.models.egt import EGT
from weft.tasks import DataMissing, get_task, make_config
from weft.tasks.graphs import ATOM_SIZES, BOND_SIZES, FAR, FIRST_BOND, graphs, molecule, pair_features
from weft.tasks.molecules import divided, read_table

SMALL = dict(dim=16, heads=2, mlp_dim=16, layers=2, batch_size=4)


def needs_rdkit() -> None:
    pytest.importorskip("rdkit")


def bond(code: int) -> list[int]:
    return pair_features()[code].tolist()


def test_elements_charges_and_hydrogens_are_the_molecules() -> None:
    needs_rdkit()
    for smiles, number in (("[Be]", 4), ("[Cu]", 29), ("[Sn]", 50), ("[Cl-]", 17), ("[Se]", 34)):
        assert molecule(smiles)[0][0, 0] == number
    atoms, pairs = molecule("CC(=O)[O-]")
    assert atoms[:, 0].tolist() == [6, 6, 8, 8] and (atoms[:, 3].astype(int) - 5).tolist() == [0, 0, 0, -1]
    assert atoms[:, 4].tolist() == [3, 0, 0, 0]  # hydrogens
    assert bond(pairs[0, 1])[1] == 1 and bond(pairs[1, 2])[1] == 2 and pairs[0, 2] == 1 + 2
    atoms, pairs = molecule("Clc1ccccc1C#N")
    ring = [i for i, a in enumerate(atoms) if a[7]]
    assert len(ring) == 6 and all(atoms[i, 8] for i in ring) and bond(pairs[7, 8])[1] == 3
    assert sum(bond(pairs[i, j])[1] == 4 for i in ring for j in ring) == 12
    apart = molecule("C1CC1.O")[1]
    assert apart[0, 3] == 1 + FAR and apart[1, 1] == 1 and apart[0, 2] >= FIRST_BOND
    assert molecule("*C")[0][0, 0] == 119 and molecule("C" * 30)[1].max() < len(pair_features())
    with pytest.raises(ValueError, match="'C1CC'"):
        molecule("C1CC")


def test_graphs_are_stored_once_and_then_need_no_rdkit(tmp_path, monkeypatch) -> None:
    needs_rdkit()
    table = tmp_path / "some.csv"
    table.write_text("smiles,lipo\nC,1\nCCO,2\n")
    first = graphs(table, ["C", "CCO"])
    assert first["nodes"].shape == (2, 3, 9)
    assert (first["nodes"][0, 1:] == 0).all() and (first["pairs"][0, 1:] == 0).all()
    (tmp_path / "read-only").mkdir()
    other = tmp_path / "read-only" / table.name
    other.write_bytes(table.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr("weft.tasks.graphs.os.access", lambda *_: False)
        assert np.array_equal(graphs(other, ["C", "CCO"])["pairs"], first["pairs"])
    assert [file.name for file in other.parent.iterdir()] == [table.name]
    table.write_text("smiles,lipo\nCCO,2\nC,1\n")  # as large as before, in another order
    swapped = graphs(table, ["CCO", "C"])
    assert all(np.array_equal(first[key][::-1], swapped[key]) for key in first)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    again = graphs(table, ["CCO", "C"])
    assert all(np.array_equal(swapped[key], again[key]) for key in first)
    table.write_text("smiles,lipo\nC,1\nCCO,2\nN,3\n")
    with pytest.raises(DataMissing, match=r"weft\[graphs\]"):
        graphs(table, ["C", "CCO", "N"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("smiles,other\nC,1\n", "line 1 must name the columns smiles and lipo; lipo is missing"),
        ("smiles,lipo\nC,1\nCC\nCCC,3\n", "line 3: lipo must be a number or empty, got None"),
        ("smiles,lipo\nC,1\nCC,inf\n", "line 3: lipo must be a number or empty, got 'inf'"),
        ("smiles,lipo\nC,1\nCC,high\n", "line 3: lipo must be a number or empty, got 'high'"),
        ("smiles,lipo\nC,1\nC1CC,2\n", "row 2: RDKit cannot read the SMILES 'C1CC'"),
    ],
)
def test_bad_tables_name_the_place(tmp_path, content: str, says: str) -> None:
    needs_rdkit()
    (tmp_path / "lipo.csv").write_text(content)
    with pytest.raises(DataMissing, match=says):
        get_task("lipophilicity").load(make_config("lipophilicity", data=str(tmp_path)))


def test_tables_may_begin_with_a_byte_order_mark(tmp_path) -> None:
    (tmp_path / "lipo.csv").write_text("smiles,lipo\nC,1\nCC,2\n", encoding="utf-8-sig")
    assert read_table(tmp_path / "lipo.csv", "lipo")[0] == ["C", "CC"]


def test_scaffolds_stay_together() -> None:
    needs_rdkit()
    smiles = [ring + "C" * i for ring in ("c1ccccc1", "C1CCCC1", "c1ccncc1", "C1CC1") for i in range(1, 6)]
    parts = divided(smiles, np.arange(20), "scaffold")
    assert sorted(np.concatenate(parts).tolist()) == list(range(20)) and [len(p) for p in parts] == [10, 5, 5]
    families = [{row // 5 for row in part.tolist()} for part in parts]
    assert [len(family) for family in families] == [2, 1, 1]
    with pytest.raises(DataMissing, match="2 scaffolds, too few for three parts"):
        divided(smiles, np.arange(10), "scaffold")
    shuffled = divided(smiles, np.arange(20), "random")
    assert all(np.array_equal(a, b) for a, b in zip(shuffled, divided(smiles, np.arange(20), "random"), strict=True))


def test_the_makers_split_of_pcqm4mv2(tmp_path) -> None:
    """Test molecules have no target; training never sees the makers' validation part."""
    needs_rdkit()
    folder = tmp_path / "pcqm4m-v2" / "raw"
    folder.mkdir(parents=True)
    with gzip.open(folder / "data.csv.gz", "wt", newline="") as file:
        rows = [(i, "C" * (1 + i % 4), "" if i >= 16 else i) for i in range(20)]
        csv.writer(file).writerows([("idx", "smiles", "homolumogap"), *rows])
    split = {"train": np.arange(10), "valid": np.arange(10, 16), "test-dev": np.arange(16, 20)}
    torch.save(split, tmp_path / "new.pt")
    place = tmp_path / "pcqm4m-v2" / "split_dict.pt"
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(place, "w") as old:
        for name in new.namelist():  # as NumPy 1 wrote it for them
            old.writestr(name, new.read(name).replace(b"numpy._core", b"numpy.core"))
    data = get_task("pcqm4mv2").load(make_config("pcqm4mv2", data=str(tmp_path)))
    assert sorted(torch.cat([data.train["target"], data.val["target"]]).tolist()) == list(range(10))
    assert data.test["target"].tolist() == list(range(10, 16))


def test_energies_are_in_electronvolts(tmp_path) -> None:
    needs_rdkit()
    (tmp_path / "qm9.csv").write_text("smiles,gap\n" + "CCO,0.25\n" * 10)
    data = get_task("qm9-gap").load(make_config("qm9-gap", data=str(tmp_path)))
    assert abs(float(data.test["target"][0]) - 6.8028) < 1e-3


def test_egt_simple_has_the_papers_size() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in EGT(ATOM_SIZES, BOND_SIZES, FAR + 1).parameters())
    assert round(count / 1e6) == 11


def test_values_do_not_depend_on_padding_or_the_order_of_atoms(tmp_path) -> None:
    needs_rdkit()
    (tmp_path / "lipo.csv").write_text("smiles,lipo\n" + "".join(f"{'C' * i}O,{i}\n" for i in range(1, 11)))
    task, config = get_task("lipophilicity"), make_config("lipophilicity", data=str(tmp_path), **SMALL)
    data = task.load(config)
    torch.manual_seed(0)
    model = task.model(config, data).eval()
    every = {key: torch.cat([part[key] for part in (data.train, data.val, data.test)]) for key in data.train}
    rows = task.batch(every, config, torch.Generator(), False)
    together = model(*task.inputs(rows))
    for i in range(10):
        one = task.batch({key: value[i : i + 1] for key, value in every.items()}, config, torch.Generator(), False)
        torch.testing.assert_close(model(*task.inputs(one))[0], together[i], rtol=1e-4, atol=1e-5)
    n = int((one["nodes"][..., 0] > 0).sum())
    order = torch.randperm(n)
    nodes, distances, bonds = task.inputs(one)
    moved = model(nodes[:, order], distances[:, order][:, :, order], bonds[:, order][:, :, order])
    torch.testing.assert_close(moved, together[-1:], rtol=1e-4, atol=1e-5)
    model.train()
    assert not torch.equal(model(*task.inputs(rows)), model(*task.inputs(rows)))  # sources are dropped
