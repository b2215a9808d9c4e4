"""Tables and charts of the pages, in a real browser."""

import html
import json
import re

from browser import browser, payload, run_browser

from weft import pages

EVIL = "</script><img src=x onerror=\"document.title='taken'\">"
PNG = bytes.fromhex(  # two pixels
    "89504e470d0a1a0a0000000d49484452000000020000000108020000007b40e8dd0000000f494441"
    "54789c633c11c0c5c0c00000067601249936b98a0000000049454e44ae426082"
)
LOSS = [(float(step), 2.3 * 0.993**step) for step in range(1, 301)]


def example(title: str = "weft") -> str:
    """A page with every part and the difficult cases: one point, no points, curves that hide each other."""
    parts = [
        pages.table(
            ["model", "accuracy, %", "parameters"],
            [["full", "97.1", "9,800"], ["linear", "—", "11,434"], [EVIL, "8.25 ± 0.1", "12"]],
            "Results",
        ),
        pages.chart("Loss", [pages.Curve("whole", LOSS), pages.Curve("killed", LOSS, [(150, "killed")])], y="loss"),
        pages.heading("More"),
        pages.text(EVIL),
        pages.notes(["a note"]),
        pages.code("weft train digits"),
        pages.gallery("Images", [(PNG, EVIL)], "Two pixels."),
        pages.chart("Accuracy", [pages.Curve("full", [(200, 97.06)])], y="accuracy, %"),
        pages.chart("Nothing", [pages.Curve("full", [(1, float("nan"))])]),
        pages.chart(
            "Time",
            [
                pages.Curve(name, [(2.0**n, scale * 2.0 ** (n * power)) for n in range(9, 15)])
                for name, scale, power in (("full", 1e-6, 2), ("combiner-fixed", 1e-5, 1.5), ("linear", 1e-4, 1))
            ],
            x="tokens",
            y="ms",
            log="xy",
        ),
    ]
    return pages.page(title, parts, lead="One line.", facts=[("task", "digits")], footer="weft")


def test_data_never_becomes_markup():
    page = example(EVIL)
    assert page.count("<script") == 2 and "<img" not in page
    assert payload(page)["title"] == EVIL and html.escape(EVIL) in page


@browser
def test_tables_and_charts(tmp_path):
    (tmp_path / "page.html").write_text(example(), "utf-8")
    dom = run_browser(
        tmp_path,
        tmp_path / "page.html",
        """
        const texts = query => [...document.querySelectorAll(query)].map(node => node.textContent);
        const report = {title: document.title, charts: texts('.chart h2, .chart h3'), before: texts('.table tbody th')};
        const heads = document.querySelectorAll('.table thead button');
        heads[1].focus(); heads[1].click(); report.accuracy = texts('.table tbody th');
        report.sorted = document.querySelectorAll('.table thead th')[1].getAttribute('aria-sort');
        heads[2].click(); heads[2].click(); report.parameters = texts('.table tbody th');
        const [loss, accuracy, time] = document.querySelectorAll('.chart');
        report.names = [...document.querySelectorAll('.plot svg')].map(s => s.getAttribute('aria-label'));
        report.note = loss.querySelector('p').textContent; report.band = loss.querySelectorAll('.band').length;
        report.looks = new Set([...loss.querySelectorAll('polyline:not(.band)')].map(l =>
          l.getAttribute('stroke-dasharray') + l.style.stroke)).size;
        report.ticks = [...document.querySelectorAll('.plot')].map(p =>
          [...p.querySelectorAll('svg text')].map(t => t.textContent));
        report.point = accuracy.querySelectorAll('.plot svg path').length;
        const slider = loss.querySelector('input');
        slider.focus(); slider.value = 9; slider.dispatchEvent(new Event('input'));
        report.reading = slider.getAttribute('aria-valuetext'); report.tip = loss.querySelector('.tip').textContent;
        loss.querySelector('.legend button').click();
        const image = document.querySelector('.gallery img'); report.image = [image.naturalWidth, image.alt];
        report.left = loss.querySelectorAll('polyline').length;
        const out = document.createElement('pre'); out.id = 'report'; out.textContent = JSON.stringify(report);
        document.body.append(out);
        """,
    )
    found = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom, re.S)[1]))
    assert found["title"] == "weft" and found["charts"] == ["Loss", "Accuracy", "Time"]
    assert found["before"] == ["full", "linear", EVIL]
    assert found["accuracy"] == ["full", EVIL, "linear"] and found["sorted"] == "descending"
    assert found["parameters"] == [EVIL, "full", "linear"]
    assert found["names"][0] == "Loss. loss by step: whole from 2.28 to 0.280; killed from 2.28 to 0.280."
    assert found["note"] == "“killed” lies on “whole”." and found["band"] == 1 and found["looks"] == 2
    loss, accuracy, time = found["ticks"]
    assert loss[:5] == ["0", "0.5", "1", "1.5", "2"] and "killed" in loss
    assert accuracy.count("200") == 1 and "97.06" in accuracy and found["point"] == 1
    assert {"4,096", "16,384", "0.1", "10", "tokens", "ms"} <= set(time)
    assert found["reading"] == "step 10: whole 2.14, killed 2.14" and "whole 2.14" in found["tip"]
    assert found["left"] == 1 and found["image"] == [2, EVIL]
