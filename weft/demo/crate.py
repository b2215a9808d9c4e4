"""CRATE: each layer is one step of an objective, so its effect can be measured."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..inspect import measure
from ..lab import load_run
from ..lab.build import build_model
from ..pages import Curve, chart, table, text
from .digits import HEAD, row
from .story import Scale, Story


def tell(out: Path, scale: Scale) -> Story:
    run = out / "crate"
    model, config, data = load_run(run)
    ids = data.val["ids"].long()
    before, after = measure(build_model(config, data).eval(), [ids]), measure(model, [ids])

    def curve(name: str, values: Tensor) -> Curve:
        return Curve(name, [(i, float(v)) for i, v in enumerate(values.mean(1), 1)])

    rates = [curve("untrained", before["subspace_rate"]), curve("trained", after["subspace_rate"])]
    dense = [curve("untrained", 100 * before["nonzero"]), curve("trained", 100 * after["nonzero"])]
    first, last = (after["subspace_rate"].mean(1)[i].item() for i in (0, -1))
    return Story(
        "CRATE: a network whose layers say what they do",
        "Each layer of CRATE is a step that compresses tokens into subspaces and makes them sparse, and both can be "
        "measured in the trained model.",
        f"coding rate from {first:.0f} in the first layer to {last:.0f} in the last; {dense[1].points[-1][1]:.0f} % of "
        "the last layer's values are not zero",
        [
            text(
                "The rate of the tokens in the layer's subspaces, in nats (Rᶜ, the lower the more compressed), and the "
                "share of values that the ISTA step leaves non-zero, for 200 validation images."
            ),
            chart("Coding rate after compression", rates, x="layer", y="nats"),
            chart("Values that are not zero", dense, x="layer", y="%"),
            table(HEAD, [row("CRATE", run)], "Handwritten digits"),
            text(f"Every head and subspace: weft inspect {run}", soft=True),
        ],
        "Yu et al., White-Box Transformers via Sparse Rate Reduction, 2023",
    )
