"""Prompts that begin alike share what is read of them: the loop's side of `Prefixes`."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends.base import GRAIN, Piece, Pool, Request, Runner
from ..backends.blocks import Blocks, lying
from ..serving.prefixes import Prefixes, Snapshots, chain, cuts, shared_by, waits

_log = logging.getLogger(__name__)


class Sharing:
    """The prefixes of a runner's `pool`. `counts` has the tokens asked for, and those found."""

    def __init__(self, runner: Runner, pool: Pool, book: "Prefixes | Snapshots") -> None:
        self._runner = runner
        self._most = pool.tokens - 1  # in the last place of a full slot others' steps write a token
        self._book: Any = book

    def run_by(self, runner: Runner) -> None:
        """See `Loop.run_by`."""
        self._runner = runner

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of prompts so far, and those of them that were there."""
        return self._book.asked, self._book.found

    def begun(self, slot: int, request: Request) -> Request:
        """The request, after what is held of its prompt was copied to its slot."""
        if request.kept or not _is_shared(request):
            return request
        source, count = self._book.longest(request.tokens)
        if count and source != slot and not self._copied(source, slot, count):
            return request
        self._book.use(source, count, len(request.tokens))
        self._fill(slot, request.tokens[:count])
        return replace(request, kept=count) if count else request

    def meet(self, requests: Sequence[Request]) -> None:
        """Be told of all whose prompts are to be read, before some of them are."""

    def waits(self, piece: Piece, reading: Sequence[Piece]) -> bool:
        """True if prompts that are being read will have more of a new one than there is."""
        if not piece.is_first or not _is_shared(piece.request):
            return False
        ids = piece.request.tokens
        _, count = self._book.longest(ids)
        others = [x for x in reading if x.request.embeds is None]
        return waits(ids, count, (x.request.tokens for x in others if self._gives(x, ids)))

    def found(self, request: Request) -> tuple[int, int]:
        """A slot that holds what a prompt begins with, and how many tokens: 0 for none."""
        if request.kept or not _is_shared(request):
            return 0, 0
        source, count = self._book.longest(request.tokens)
        return max(source, 0), count

    def lend(self, slot: int, request: Request, count: int) -> bool:
        """Let a slot have the first `count` tokens of a prompt; False where nobody has them."""
        source, found = self.found(request)
        return found >= count and (source == slot or self._copied(source, slot, count))

    def give_up(self, book: Blocks) -> bool:
        """Let go of what a spare slot holds, if that frees blocks; False where none does."""
        for slot in self._book.kept():
            if book.alone(slot):
                self.drop(slot)
                self._runner.release([slot])
                return True
        return False

    def _gives(self, piece: Piece, ids: np.ndarray) -> bool:
        """True if a piece that is read will give what a prompt begins with."""
        return True

    def until(self, piece: Piece) -> Piece:
        """The piece, or as much of it as is to be read at once."""
        return piece

    def read(self, piece: Piece) -> None:
        """Note that a piece is on its way to its slot."""
        if piece.request.embeds is None:
            self._fill(piece.slot, piece.request.tokens[: piece.stop])

    def _fill(self, slot: int, ids: np.ndarray) -> None:
        self._book.fill(slot, ids)

    def keep(self, slot: int, request: Request, read: int | None, new: Sequence[int]) -> None:
        """Keep in a spare slot what a sequence that ends has cached.

        That is its prompt, or the tokens `read` of it, and its `new` ones but for the last.
        """
        self._book.drop(slot)
        if request.embeds is not None:
            return
        ids = request.tokens[:read]
        if len(new) > 1:
            ids = np.append(ids, np.array(new[:-1], ids.dtype))
        ids = ids[: min(self._most, len(ids)) // GRAIN * GRAIN]
        if (spare := self._book.keep(ids)) is not None:
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
        self._book.drop(slot)

    def forget(self) -> None:
        """Forget what every slot holds."""
        kept = list(self._book.kept())
        self._book.clear()
        if kept and self._runner.blocks is not None:
            try:
                self._runner.release(kept)
            except Exception:
                _log.warning("Blocks of prompts' beginnings were not given back.", exc_info=True)


class StateSharing(Sharing):
    """The same where recurrences keep states, each of which stands at one length alone.

    So do the last tokens of a sequence, where layers of blocks keep no others. A prompt is read up
    to where others part from it, and to its last whole grain; what the slot has there is copied to
    a spare one. What steps made is not shared: a state has another rounding.
    """

    def __init__(self, runner: Runner, pool: Pool, book: Snapshots) -> None:
        super().__init__(runner, pool, book)
        self._chains: dict[int, tuple[np.ndarray, list[int]]] = {}  # by the id of their tokens
        self._met: Counter[int] = Counter()
        self._stops: dict[int, list[int]] = {}  # of what is read in a slot

    def meet(self, requests: Sequence[Request]) -> None:
        """See `Sharing.meet`."""
        known, self._chains = self._chains, {}
        for tokens in (x.tokens for x in requests if _is_shared(x)):
            self._chains[id(tokens)] = known.get(id(tokens)) or (tokens, [*chain(tokens[:-1])])
        self._met = Counter(key for x in requests if _is_shared(x) for key in self._chain_of(x))

    def _chain_of(self, request: Request) -> list[int]:
        return self._chains[id(request.tokens)][1]

    def _gives(self, piece: Piece, ids: np.ndarray) -> bool:
        return _is_shared(piece.request) and piece.start < shared_by(piece.request.tokens, ids)

    def until(self, piece: Piece) -> Piece:
        """See `Sharing.until`."""
        if not _is_shared(piece.request):
            return piece
        keys = self._chain_of(piece.request)
        known = {key: self._met[key] - 1 + self._book.beginning_with(key) for key in keys}
        stops = self._stops[piece.slot] = [x for x in cuts(keys, known) if x > piece.start]
        return replace(piece, stop=min(piece.stop, *stops)) if stops else piece

    def read(self, piece: Piece) -> None:
        """See `Sharing.read`."""
        if piece.stop in self._stops.pop(piece.slot, ()):
            ids = piece.request.tokens[: piece.stop]
            if (spare := self._book.keep(ids)) is not None:
                self._copied(piece.slot, spare, len(ids))

    def _fill(self, slot: int, ids: np.ndarray) -> None:
        pass

    def keep(self, slot: int, request: Request, read: int | None, new: Sequence[int]) -> None:
        """See `Sharing.keep`; nothing."""

    def forget(self) -> None:
        """See `Sharing.forget`."""
        super().forget()
        self._stops.clear()


def sharing_of(runner: Runner, pool: Pool) -> Sharing | None:
    """The object that shares beginnings of prompts in a pool; None where the model cannot."""
    if runner.spec.keeps_places and not lying(pool, runner.spec).near:
        return Sharing(runner, pool, Prefixes(pool.slots, pool.spare))
    if runner.spec.keeps_beginnings and pool.spare:
        return StateSharing(runner, pool, Snapshots(pool.slots, pool.spare))
    return None


def _is_shared(request: Request) -> bool:
    """True if a prompt may begin with what another one left.

    A repetition penalty asks for each token where it is read.
    """
    return request.embeds is None and request.sampling.repetition_penalty == 1
