"""Fewer bits cost the embedded model no more than a few thousandths, and wrong scales do."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from dualinfer.quantization.quantize import Quantizing

_FILE = Path(__file__).parents[1] / "benchmarks" / "quantized_accuracy.py"
_SPEC = importlib.util.spec_from_file_location("quantized_accuracy", _FILE)
accuracy = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(accuracy)
LIMITS = {"int8": 0.005, "fp8": 0.01, "int4": 0.03, "nvfp4": 0.04, "mxfp4": 0.05}


@pytest.fixture(scope="module")
def exact():
    ids = accuracy.held_out(12)
    assert ids.shape == (12, 512)
    return accuracy.log_probabilities(ids), ids


@pytest.mark.parametrize("scheme", LIMITS)
def test_the_loss_of_held_out_text_rises_little(scheme, exact):
    log_p, ids = exact
    found = accuracy.compare(accuracy.log_probabilities(ids, quant=scheme), log_p, ids)
    assert 0 < found["mean KL"] < 3 * LIMITS[scheme]
    assert found["loss"] < LIMITS[scheme]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_scales_in_the_wrong_order_break_the_limit(scheme, exact, monkeypatch):
    log_p, ids = exact
    own = Quantizing.take_blocks
    monkeypatch.setattr(Quantizing, "take_blocks", lambda *given: np.roll(own(*given), 1, 0))
    found = accuracy.compare(accuracy.log_probabilities(ids[:4], quant=scheme), log_p[:4], ids[:4])
    assert found["loss"] > LIMITS[scheme]
