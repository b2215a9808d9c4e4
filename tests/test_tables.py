"""The tables of measured times equal the measurements."""

from __future__ import annotations

import pytest

import weft
from benchmarks import tables


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_are_those_of_the_measurements(page):
    text = (tables.ROOT / page).read_text()
    assert tables.MARKED.search(text)
    assert tables.written(text) == text, "run python -m benchmarks.tables"


def test_the_registry_knows_the_crossovers():
    found = tables.crossovers()
    assert found
    for name, length in found.items():
        assert weft.attention_info(name).faster_from == (length or None)
