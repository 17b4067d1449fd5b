"""Prompts that begin alike share what is read of them: the loop's side of `Prefixes`."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ..backends.base import Piece, Pool, Request, Runner
from ..serving.prefixes import Prefixes, waits

_log = logging.getLogger(__name__)


class Sharing:
    """The prefixes of a runner's `pool`. `counts` has the tokens asked for, and those found."""

    def __init__(self, runner: Runner, pool: Pool) -> None:
        self._runner = runner
        self._most = pool.tokens - 1  # in the last place of a full slot others' steps write a token
        self._prefixes = Prefixes(pool.slots, pool.spare)

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of prompts so far, and those of them that were there."""
        return self._prefixes.asked, self._prefixes.found

    def begun(self, slot: int, request: Request) -> Request:
        """The request, after what is held of its prompt was copied to its slot."""
        if not _is_shared(request):
            return request
        source, count = self._prefixes.longest(request.tokens)
        if count and source != slot and not self._copied(source, slot, count):
            return request
        self._prefixes.use(source, count, len(request.tokens))
        self._prefixes.fill(slot, request.tokens[:count])
        return replace(request, kept=count) if count else request

    def waits(self, piece: Piece, reading: Iterable[Request]) -> bool:
        """True if prompts that are being read will have more of a new one than there is."""
        if not piece.is_first or not _is_shared(piece.request):
            return False
        _, count = self._prefixes.longest(piece.request.tokens)
        return waits(piece.request.tokens, count, (x.tokens for x in reading if x.embeds is None))

    def read(self, piece: Piece) -> None:
        """Note that a piece is on its way to its slot."""
        if piece.request.embeds is None:
            self._prefixes.fill(piece.slot, piece.request.tokens[: piece.stop])

    def keep(self, slot: int, request: Request, read: int | None, new: Sequence[int]) -> None:
        """Keep in a spare slot what a sequence that ends has cached.

        That is its prompt, or the tokens `read` of it, and its `new` ones but for the last.
        """
        self._prefixes.drop(slot)
        if request.embeds is not None:
            return
        ids = request.tokens[:read]
        if len(new) > 1:
            ids = np.append(ids, np.array(new[:-1], ids.dtype))
        ids = ids[: self._most]
        if (spare := self._prefixes.keep(ids)) is not None:
            self._copied(slot, spare, len(ids))

    def _copied(self, source: int, target: int, tokens: int) -> bool:
        """Copy; False where that fails, and then nothing is held, and prompts are read again."""
        try:
            self._runner.copy(source, target, tokens)
        except Exception:
            _log.warning("What a sequence had cached was not copied.", exc_info=True)
            self.forget()
            return False
        return True

    def drop(self, slot: int) -> None:
        """Forget what a slot holds."""
        self._prefixes.drop(slot)

    def forget(self) -> None:
        """Forget what every slot holds."""
        self._prefixes.clear()


def _is_shared(request: Request) -> bool:
    """True if a prompt may begin with what another one left.

    A repetition penalty asks for each token where it is read.
    """
    return request.embeds is None and request.sampling.repetition_penalty == 1
