"""Sequences that give their slots to others: what they had cached waits in the host's memory."""

import logging
import weakref
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..backends.base import GRAIN, Request, Runner, Saved
from ..errors import UnsupportedError
from ..model.spec import ModelSpec
from .sequence import Live

_log = logging.getLogger(__name__)
SWAP_GIB = 4.0


class Paused(NamedTuple):
    """A sequence without a slot: its new tokens, what is told of them, and what was `saved`.

    Where nothing was saved, it is read again as a longer prompt.
    """

    done: tuple[int, ...]
    told: list[np.ndarray]
    saved: Saved | None


class Pauses:
    """Saves what sequences have cached, together in at most `most` bytes."""

    def __init__(self, runner: Runner, most: int) -> None:
        self._runner, self._most = runner, most
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def run_by(self, runner: Runner) -> None:
        """See `Loop.run_by`."""
        self._runner = runner

    def save(self, live: Live, start: int = 0) -> Saved | None:
        """Save the cache of a sequence whose tokens have all come; None where it is read again.

        So is what is short, and what has no room. Whole grains of places, whose rest is read again,
        and states as they stand: behind all tokens but the last, which was not fed back. Without
        the first `start`, whole grains, which others have as well.
        """
        spec, request = self._runner.spec, live.request
        is_simple = request.embeds is None and request.sampling.repetition_penalty == 1
        count = len(request.tokens) + len(live.tokens) - 1
        if live.unread is not None or not live.tokens or count - start < GRAIN:
            return None
        if not (is_simple and spec.keeps_beginnings):
            return None
        count = count // GRAIN * GRAIN if spec.keeps_places else count
        held = sum(saved.nbytes for saved in self._saved)
        try:
            what = (count, start) if start else (count,)
            if held + self._runner.saved_bytes(*what) > self._most:
                return None
            saved = self._runner.save(live.slot, *what)
        except Exception:
            _log.warning("What a sequence had cached was not saved.", exc_info=True)
            return None
        self._saved.add(saved)
        return saved

    def restore(self, live: Live, request: Request) -> Request:
        """The request of a sequence, after what was saved of it was put in its slot."""
        saved, live.saved = live.saved, None
        if saved is None or saved.is_stale:
            return request
        self._saved.discard(saved)
        try:
            self._runner.restore(live.slot, saved)
        except Exception:
            _log.warning("What a sequence had cached was not put back.", exc_info=True)
            return request
        return replace(request, kept=saved.tokens)

    def forget(self) -> None:
        """Let nothing be put back: weights, or the pool, are others."""
        for saved in self._saved:
            saved.is_stale = True
        self._saved.clear()


def pause_of(spec: ModelSpec, request: Request, chosen: bool) -> int:
    """New tokens after which a sequence begins anew, by other rotary angles; 0 for never.

    The pass over `original` tokens is the last one by the short angles, and gives one more.
    Raises UnsupportedError for what cannot begin anew: embeddings, and tokens `chosen` by the
    caller.
    """
    original, prompt = spec.original, len(request.prompt)
    if original is None or prompt > original:
        return 0
    pause = original + 1 - prompt
    if pause >= request.max_new_tokens:
        return 0
    if request.embeds is not None or chosen:
        what = (
            "Prompts of inputs_embeds are"
            if request.embeds is not None
            else "Tokens chosen on the host (output_scores, output_logits, processors) are"
        )
        raise UnsupportedError(
            f"{what} not served past {original} tokens, prompt included: there this model "
            "turns to other rotary angles, and reads a sequence again from its ids. Ask for at "
            f"most {pause} new tokens, or generate from ids alone without these options."
        )
    return pause
