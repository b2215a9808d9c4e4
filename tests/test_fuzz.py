"""A small fixed set of random calls of tests/fuzz.py, and earlier failures."""

from __future__ import annotations

import fuzz
import pytest

import weft

EACH = 2  # cases of every check with every mechanism

FAILED = [
    ("biases", "axial", 457973136),  # a bias of -inf for all keys of a query
    ("biases", "local", 809495745),  # a bias asked outside the sequence
    ("checkpointing", "combiner-routing", 1013257605),  # centroids moved before the forward was repeated
    ("checkpointing", "linear", 1),  # a cache that took one forward for another
    ("checkpointing", "routing", 8),
    ("compositions", "longformer", 342704015),  # mechanisms mixed under one ALiBi
    ("compositions", "subsampled", 28),  # an ensemble's empty batch
    ("decoding", "full", 881820775),  # buffers that are used again
    ("decoding", "linear", 698468491),  # steps under autocast
    ("gradient", "performer", 818117243),  # the stabiliser's gradient
    ("large", "combiner-axial", 716),  # a sum of keys over float16's range
    ("large", "combiner-routing", 345568073),  # summaries at masked tokens over float16's range
    ("large", "routing", 20349092),  # an empty batch
    ("layer_decoding", "combiner-axial", 734600431),  # a cache around a mechanism that reads the layer's input
    ("masked", "full", 1058789046),  # a masked query so large that the fused backward gives NaN
    ("masked", "sparse", 737653973),  # NaN in a masked query
    ("meta", "sparse", 389874681),  # position tables that are not in the state dict
    ("modes", "axial", 889482128),  # strided queries without gradients
    ("modes", "combiner-axial-horizontal", 151),
    ("modes", "combiner-mixture", 40),  # weights() that learned
    ("padded_layers", "longformer", 245415766),  # NaN in padded tokens of a layer
    ("padded_layers", "reformer", 481008073),  # a cached branch that read padded queries as keys
    ("precision", "combiner-axial-horizontal", 690685574),  # autocast without gradients
    ("precision", "reformer", 825515613),  # float32 out of autocast
    ("reference", "reformer", 181730554),  # a bias of -inf
    ("reference", "reformer", 266785464),
    ("surgery", "full", 701856219),  # eval() while swapped
    ("surgery", "reformer", 526528610),  # double() while swapped
    ("wrong_calls", "logsparse", 438869953),  # a bias with the wrong number of heads
    ("wrong_options", "sinkhorn", 709085783),  # a negative number of blocks
    ("wrong_steps", "combiner-axial", 880159615),
    ("wrong_steps", "linear", 294148239),  # a bias that was ignored
]


def run(check: str, mechanism: str, case: int) -> None:
    try:
        fuzz.run_case(check, mechanism, case)
    except Exception as error:
        error.add_note(fuzz.again(check, mechanism, case))
        raise


@pytest.mark.parametrize("check", fuzz.CHECKS)
@pytest.mark.parametrize("mechanism", weft.attentions())
def test_random_calls(check, mechanism):
    for case in range(EACH):
        run(check, mechanism, case)


@pytest.mark.parametrize(("check", "mechanism", "case"), FAILED)
def test_earlier_failures(check, mechanism, case):
    run(check, mechanism, case)
