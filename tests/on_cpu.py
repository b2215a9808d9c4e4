"""Run tests against other libraries on the CPU, whatever the device of the other tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def on_cpu():
    default = torch.get_default_device()
    torch.set_default_device(None)  # no device mode at all: torch.compile would trace it
    yield
    torch.set_default_device(default)
