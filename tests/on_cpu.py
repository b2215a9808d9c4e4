"""Tests against other libraries stay on the CPU, whatever device the other tests are asked to run on."""

import pytest
import torch


@pytest.fixture(autouse=True)
def on_cpu():
    default = torch.get_default_device()
    torch.set_default_device(None)  # no device mode at all: it would stand in the way of torch.compile
    yield
    torch.set_default_device(default)
