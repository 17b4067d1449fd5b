"""parity.compare: what it measures, and that it notices what it must."""

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dualinfer
from dualinfer.cli.parity import compare, difference, first_difference
from dualinfer.model.outputs import make_outputs

from .checkpoints import write_llama
from .test_encoder_decoders import engine_of

VOCAB = 211


class Shifted:
    """An engine whose results are changed on the way out."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change
        self.inference_config, self.config = engine.inference_config, engine.config

    def forward(self, *args, **kwargs):
        outputs = self.engine.forward(*args, **kwargs)
        fields = {"logits": outputs.logits.copy(), "hidden_states": outputs.hidden_states}
        self.change(fields["logits"])
        return make_outputs(fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), VOCAB)


@pytest.fixture(scope="module")
def engines(folder):
    with (
        dualinfer.init_inference(folder, backend="torch", dtype="fp32") as torch,
        dualinfer.init_inference(folder, backend="jax", dtype="fp32") as jax,
    ):
        yield torch, jax


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(1).integers(3, VOCAB, (3, 17))


def test_compare_reads_both_stacks_of_an_encoder_decoder(ids):
    engine = engine_of("bart", "torch")
    result = compare(engine, engine, ids % 90 + 3)
    stacks = {"encoder": 3, "decoder": 2}
    names = [
        f"{s} {x}"
        for s, n in stacks.items()
        for x in ("embedding", *map("layer {}".format, range(n)))
    ]
    assert [x.name for x in result.layers] == names
    assert result.equal and result.positions == 3 * 17


def test_compare_measures_every_layer_and_logits(engines, ids):
    torch, jax = engines
    result = compare(jax, torch, ids)
    assert [x.name for x in result.layers] == ["embedding", "layer 0", "layer 1"]
    assert result.layers[0].max_error == 0
    assert all(x.relative_rms < 1e-5 for x in (*result.layers, result.logits))
    assert result.positions == 3 * 17
    assert result.tokens_agree
    assert result.equal


def test_compare_counts_a_token_that_differs_by_more_than_rounding(engines, ids):
    torch, jax = engines

    def spoil(logits):
        logits[2, 3, 7] = logits[2, 3].max() + 1

    result = compare(Shifted(jax, spoil), torch, ids)
    assert (result.differing, result.ties) == (1, 0)
    assert not result.equal


def test_compare_takes_candidates_closer_than_rounding_as_a_tie(engines, ids):
    torch, jax = engines

    def tie(shift):
        def change(logits):
            logits[0, 0, :] = 0
            logits[0, 0, 5] = 1 + shift
            logits[0, 0, 6] = 1

        return change

    result = compare(Shifted(jax, tie(1e-7)), Shifted(torch, tie(-1e-7)), ids)
    assert (result.differing, result.ties) == (0, 1)
    assert result.tokens_agree


@pytest.mark.parametrize("gaps", [(1, 1e-7), (1e-7, 1)])
def test_compare_takes_no_tie_where_one_engine_is_clear(engines, ids, gaps):
    torch, jax = engines

    def prefer(best, other, gap):
        def change(logits):
            logits[0, 0, :] = 0
            logits[0, 0, best], logits[0, 0, other] = 1 + gap, 1

        return change

    one, two = Shifted(jax, prefer(5, 6, gaps[0])), Shifted(torch, prefer(6, 5, gaps[1]))
    result = compare(one, two, ids)
    assert (result.differing, result.ties) == (1, 0)


def test_compare_never_passes_nan(engines, ids):
    torch, jax = engines

    def spoil(logits):
        logits[0, 0, 0] = np.nan

    result = compare(Shifted(jax, spoil), torch, ids)
    assert math.isnan(result.logits.relative_rms)
    assert not result.equal


def test_compare_refuses_engines_of_unlike_models(engines, ids, tmp_path):
    with (
        dualinfer.init_inference(write_llama(tmp_path, VOCAB + 1), dtype="fp32") as other,
        pytest.raises(dualinfer.ArgumentError, match="not of one architecture"),
    ):
        compare(engines[0], other, ids)


def test_compare_widens_rounding_with_the_shorter_dtype(engines, folder, ids):
    with dualinfer.init_inference(folder, backend="jax", dtype="bf16") as short:
        result = compare(short, engines[0], ids)
    assert 1e-4 < result.logits.relative_rms < result.rounding
    assert result.equal


def test_difference_reads_bfloat16_and_empty_arrays():
    one = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert difference("x", one, one).relative_rms == 0
    assert difference("x", one + 1, one).max_error == 1
    assert difference("x", one[:0], one[:0]).max_error == 0
    assert difference("x", one, one * 0).relative_rms == math.inf


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_difference_is_where_sequences_part(a, b, at):
    assert first_difference(a, b) == at


def test_equal_needs_both_tokens_and_nearness(engines, ids):
    result = compare(*engines, ids)
    assert not replace(result, differing=1).equal
    assert not replace(result, logits=replace(result.logits, relative_rms=1e-3)).equal
    assert replace(result, ties=3).equal
