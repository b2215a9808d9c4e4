"""Tests against other libraries stay on the CPU, whatever device the other tests are asked to run on."""

import pytest
import torch


@pytest.fixture(autouse=True)
def on_cpu():
    with torch.device("cpu"):
        yield
