"""Pages in a real browser, and the data inside them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess

import pytest
import torch

from weft.inspect.gather import attention

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def payload(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def shown(model, inputs, **more) -> dict:
    """The data of the section "Attention"."""
    how = dict(tokens=None, pictures=None, targets=None, classes=None, examples=1, map_up_to=64)
    return attention(model, inputs, **how | more)


def unpacked(packed: dict) -> torch.Tensor:
    """The numbers that `weft.inspect.gather.pack` has packed."""
    q = torch.tensor(list(base64.b64decode(packed["bytes"])), dtype=torch.uint8).view(torch.int8)
    q = q.view(packed["shape"]) / 127
    return torch.tensor(packed["max"]).view(-1, *[1] * (q.dim() - 1)) * q.sign() * q.square()


def run_browser(tmp_path, page, script: str) -> str:
    """The document after the page's script and the given one have run; errors are in data-error."""
    catch = "<script>addEventListener('error', e => document.documentElement.dataset.error = e.message)</script>"
    text = page.read_text("utf-8")
    edited = tmp_path / "edited.html"
    edited.write_text(
        text.replace("<title>", catch + "<title>", 1).replace("</body>", f"<script>{script}</script></body>")
    )
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=3000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", edited.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "</html>" in done.stdout, done.stderr[-2000:]
    assert "data-error" not in done.stdout, re.search(r'data-error="([^"]*)', done.stdout)[1]
    return done.stdout
