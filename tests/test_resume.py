"""Sequences that go on in another engine have the tokens that they have without a break."""

import asyncio

import numpy as np
import pytest

import dualinfer
from dualinfer.engine.asynchronous import Start
from dualinfer.engine.driver import Channel
from dualinfer.errors import StepError, UnsupportedError

PROMPT = "def copy_file(source"
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 7}
CASES = {
    "greedy": {"do_sample": False},
    "sampled": {**SAMPLED, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        **SAMPLED,
        "repetition_penalty": 1.3,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.9,
        "logit_bias": {"9": 2.0},
    },
    "held": {"do_sample": False, "logit_bias": {"0": 6.0}, "min_new_tokens": 9},
    "told": {**SAMPLED, "logprobs": 3},
    "hidden": {**SAMPLED, "suppress_tokens": [11], "begin_suppress_tokens": [12]},
    "grammar": {**SAMPLED, "grammar": {"regex": "[a-z]{3,9}(, [0-9]{2}){2,6}"}},
}


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.slow)])
def engine(request):
    with dualinfer.init_inference(
        dualinfer.embedded_model(), backend=request.param, dtype="fp32"
    ) as engine:
        engine.reserve(8, 128)
        yield engine


async def read(channel):
    """The tokens of a channel, what is told of them, and why it ended."""
    tokens = []
    while not channel.has_ended or channel.items:
        await channel.wait()
        while channel.items:
            tokens.append(channel.items.popleft())
    if channel.error is not None:
        raise channel.error
    return tokens, channel.told, channel.reason


def run(engine, arguments, *starts):
    async def main():
        channels = [Channel() for _ in starts]
        ids = engine.tokenizer(PROMPT)["input_ids"]
        engine.submit_sequences(ids, arguments, starts, channels)
        return await asyncio.gather(*map(read, channels))

    return asyncio.run(main())


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_without_a_break(engine, name):
    arguments = {"max_new_tokens": 24, "eos_token_id": [0], **CASES[name]}
    indices = (0, 2) if arguments["do_sample"] else (0,)
    for index, (tokens, told, reason) in zip(
        indices, run(engine, arguments, *map(Start, indices)), strict=True
    ):
        assert len(tokens) > 9
        for cut in (1, 8, len(tokens) - 1):
            ((rest, told_rest, why),) = run(engine, arguments, Start(index, tokens[:cut]))
            assert (tokens[:cut] + rest, why) == (tokens, reason)
            if "logprobs" in arguments:
                assert np.allclose(np.stack(told[cut:]), np.stack(told_rest), atol=1e-4)
    assert len({tuple(x[0]) for x in run(engine, arguments, *map(Start, indices))}) == len(indices)


def test_a_sequence_that_goes_on_is_shared_like_any_other(engine):
    arguments = {"max_new_tokens": 70, "do_sample": False}
    ((tokens, _, _),) = run(engine, arguments, Start(0))
    ((first, _, _),) = run(engine, arguments, Start(0, tokens[:60]))
    before = engine.prefix_counts().found
    ((again, _, _),) = run(engine, arguments, Start(0, tokens[:66]))
    assert tokens[60:] == first and tokens[66:] == again
    assert engine.prefix_counts().found - before == 64


def test_what_cannot_go_on_says_so(engine):
    plain = {"max_new_tokens": 24, "eos_token_id": [0], "do_sample": False}
    with pytest.raises(StepError, match="had ended"):
        run(engine, plain, Start(0, [5, 0]))
    with pytest.raises(StepError, match="the grammar does not allow"):
        run(engine, {**plain, "grammar": {"regex": "[0-9]+"}}, Start(0, [5, 6]))
    with pytest.raises(UnsupportedError, match="no_repeat_ngram_size"):
        run(engine, {**plain, "no_repeat_ngram_size": 3}, Start(0, [5]))
    engine._loop.check_idle()


class _Noted(Channel):
    """Notes the tokens of prompts that are read as the first token comes."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.reading = engine, None

    def waiting(self):
        self.reading = self.engine.traffic().reading if self.reading is None else self.reading
        return super().waiting()


@pytest.mark.parametrize("done", [(), (11, 12)])
def test_prompts_count_as_read_until_their_first_token(engine, done):
    """By that it is judged how long a turn may take, also where a text is read again."""

    async def main():
        channel, ids = _Noted(engine), engine.tokenizer(PROMPT)["input_ids"]
        how = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None}
        engine.submit_sequences(ids, how, [Start(0, done)], [channel])
        tokens, *_ = await read(channel)
        assert len(tokens) == 9 - len(done)
        assert channel.reading == len(ids) + len(done)
        assert engine.traffic().reading == 0

    asyncio.run(main())
