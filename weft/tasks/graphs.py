"""Molecules as graphs: SMILES through RDKit, with the atom and bond features of the Open Graph Benchmark.

    atoms   atomic number, chirality, degree, charge, hydrogens, radical electrons, hybridisation, aromatic, in a ring
    pairs   the number of bonds between two atoms, 17 for 17 and more or none; for bonded pairs the bond's kind, its
            stereochemistry and whether it is conjugated

A pair is stored as one byte: 0 for padding, 1 + distance, or FIRST_BOND + the number of the bond's features. Graphs
are read once and stored next to the table of molecules, if that folder is writable; RDKit is needed only for that.
"""

from __future__ import annotations

import functools
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .base import DataMissing
from .files import DamagedData, alone, atomic

FAR = 17
FIRST_BOND = FAR + 2
# Numbers of values of each feature, with one more for "other"; atomic number 0 is padding.
ATOM_SIZES = (120, 5, 12, 12, 10, 6, 7, 2, 2)
BOND_SIZES = (6, 7, 3)  # 0: no bond
CHIRALITY = ("CHI_UNSPECIFIED", "CHI_TETRAHEDRAL_CW", "CHI_TETRAHEDRAL_CCW", "CHI_OTHER")
HYBRIDISATION = ("S", "SP", "SP2", "SP3", "SP3D", "SP3D2")
BOND = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
STEREO = ("STEREONONE", "STEREOZ", "STEREOE", "STEREOCIS", "STEREOTRANS")
CODES = [(b, s, c) for b in range(len(BOND) + 1) for s in range(len(STEREO) + 1) for c in range(2)]

NUMBER = {features: number for number, features in enumerate(CODES)}


def pair_features() -> np.ndarray:
    """(codes, 1 + bond features): the distance, and the bond features (0 without a bond), of every stored byte."""
    table = np.zeros((FIRST_BOND + len(CODES), 4), np.uint8)
    table[1:FIRST_BOND, 0] = np.arange(FAR + 1)
    table[FIRST_BOND:, 0] = 1
    table[FIRST_BOND:, 1:] = np.array(CODES) + 1
    return table


def molecule(smiles: str) -> tuple[np.ndarray, np.ndarray]:
    """Atoms (n, 9) and pairs (n, n) of a molecule. Raises ValueError for SMILES that RDKit does not accept."""
    Chem = rdkit()
    mol = Chem.MolFromSmiles(smiles)
    if mol is None or not mol.GetNumAtoms():
        raise ValueError(f"RDKit cannot read the SMILES {smiles!r}")
    atoms = [
        (
            min(atom.GetAtomicNum(), 118) or 119,  # 119: a wildcard
            place(atom.GetChiralTag(), CHIRALITY),
            min(atom.GetTotalDegree(), 11),
            min(max(atom.GetFormalCharge() + 5, 0), 11),
            min(atom.GetTotalNumHs(), 9),
            min(atom.GetNumRadicalElectrons(), 5),
            place(atom.GetHybridization(), HYBRIDISATION),
            int(atom.GetIsAromatic()),
            int(atom.IsInRing()),
        )
        for atom in mol.GetAtoms()
    ]
    pairs = 1 + np.minimum(Chem.GetDistanceMatrix(mol), FAR).astype(np.uint8)
    for bond in mol.GetBonds():
        features = (
            place(bond.GetBondType(), BOND),
            place(bond.GetStereo(), STEREO),
            int(bond.GetIsConjugated()),
        )
        i, j = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        pairs[i, j] = pairs[j, i] = FIRST_BOND + NUMBER[features]
    return np.array(atoms, np.uint8), pairs


def graphs(path: Path, smiles: list[str]) -> dict[str, np.ndarray]:
    """All molecules of a table: "nodes" (m, N, 9) and "pairs" (m, N, N), padded with 0; stored next to `path`."""
    target = path.with_name(f"{path.name}.graphs.npz")
    state = np.array([path.stat().st_size, len(smiles), zlib.crc32("\n".join(map(str, smiles)).encode())])
    found = _read(target, state)
    if found is None:
        rdkit()
        if not os.access(path.parent, os.W_OK):
            return _build(path, smiles)
        with alone(target.with_suffix(".lock")):
            found = _read(target, state)
            if found is None:
                found = _build(path, smiles)
                with atomic(target) as temporary, open(temporary, "wb") as file:
                    np.savez_compressed(file, state=state, nodes=found["nodes"], pairs=found["pairs"])
    return found


def _build(path: Path, smiles: list[str]) -> dict[str, np.ndarray]:
    read = []
    for number, text in enumerate(smiles):
        try:
            read.append(molecule(text))
        except ValueError as error:
            raise DamagedData(path, f"row {number + 1}: {error}", "Correct or remove this row.") from error
    most = max(len(atoms) for atoms, _ in read)
    nodes, pairs = np.zeros((len(read), most, 9), np.uint8), np.zeros((len(read), most, most), np.uint8)
    for i, (a, p) in enumerate(read):
        nodes[i, : len(a)], pairs[i, : len(a), : len(a)] = a, p
    return {"nodes": nodes, "pairs": pairs}


def _read(target: Path, state: np.ndarray) -> dict[str, np.ndarray] | None:
    try:
        with np.load(target, allow_pickle=False) as stored:
            if not np.array_equal(stored["state"], state):
                return None
            return {"nodes": stored["nodes"], "pairs": stored["pairs"]}
    except (OSError, KeyError, ValueError, EOFError):
        return None


def scaffold(smiles: str) -> str:
    """The Bemis-Murcko scaffold of a molecule, as SMILES."""
    rdkit()
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    return MurckoScaffoldSmiles(smiles=smiles)


def rdkit() -> Any:
    """RDKit's Chem, without its messages about single molecules."""
    try:
        from rdkit import Chem, rdBase
    except ImportError as error:
        raise DataMissing("reading molecules needs RDKit: pip install 'weft[graphs]'") from error
    rdBase.DisableLog("rdApp.*")
    return Chem


@functools.cache
def place(value: Any, known: tuple[str, ...]) -> int:
    """The number of RDKit's value among the known names; the one after the last for others."""
    return known.index(str(value)) if str(value) in known else len(known)
