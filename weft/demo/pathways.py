"""Information pathways: trained on random parts of the attention, predicting with an ensemble of them."""

from __future__ import annotations

from pathlib import Path

from ..lab.evaluate import evaluate_run
from ..pages import code, table, text
from .story import Scale, Story


def tell(out: Path, scale: Scale) -> Story:
    run = out / "pathways"
    rows = []
    for name, members in (("one random pathway", 1), (f"ensemble of {scale.members}", scale.members), ("dense", 0)):
        scores, _ = evaluate_run(run, ensemble=members, accelerator="cpu")
        rows.append([name, f"{100 * scores['accuracy']:.1f}", f"{scores['loss']:.3f}"])
    return Story(
        "Random pathways: train on half of the attention, predict with several",
        "A model trained on random halves of its attention is many models in one, and averaging several of them lowers "
        "the test loss.",
        f"test loss {rows[0][2]} with one pathway, {rows[1][2]} with {scale.members}, {rows[2][2]} dense; accuracy "
        f"{rows[0][1]}, {rows[1][1]} and {rows[2][1]} %",
        [
            text(
                "A model of handwritten digits was trained with weft.subsample: in every step each layer attends to a "
                "random sample, in two windows, which halves the pairs of tokens that training computes. "
                "Prediction uses one such sample, the mean of several, or full attention. The paper prepares full "
                "attention by dense steps at the end of training (--finetune-dense-at); this run has none."
            ),
            code("weft.subsample(model, 'Sall-L2')\nweft.ensemble(model, samples=8)(ids).probabilities"),
            table(["prediction", "test accuracy, %", "test loss"], rows, "One model, three ways to predict"),
        ],
        "Hussain et al., The Information Pathways Hypothesis: Transformers are Dynamic Self-Ensembles, 2023",
    )
