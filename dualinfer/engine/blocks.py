"""Sequences that share the blocks of one cache: who gets some, and who waits until others end.

Nobody owns blocks that he has not come to need, so that they may run out. Who came first is served
first, urgent ones before others: for them others give up what prompts began with, and then the one
that came last its own, and is read again, or put back, once there are blocks for it. Those that
cannot be read again have all of theirs from the start, and never so many that another one would not
fit beside them. So the first one always goes on, and all come to their end.
"""

from bisect import bisect_left
from collections.abc import Sequence

from ..backends.base import GRAIN, Piece, Request, Saved
from ..backends.blocks import AHEAD, Blocks
from ..backends.slots import needed
from ..errors import LengthError, StepError
from .pausing import Pauses
from .reading import first_of
from .sequence import Live
from .slots import Slots


class BlockSlots(Slots):
    """Slots that take blocks of a cache as their sequences grow, where the pool counts in these."""

    _pauses: Pauses
    yields = 0  # times that a sequence gave its blocks to others

    @property
    def blocks(self) -> Blocks | None:
        """The book of the pool's blocks; None where it does not count in them."""
        return None if self.pool is None or not self.pool.blocks else self._runner.blocks

    @property
    def most_ahead(self) -> int | None:
        """The most tokens of a sequence that a pass may read of drafts; None for any number.

        Layers that forget have room for no more of all sequences.
        """
        return None if self.blocks is None or self.blocks.near is None else AHEAD

    def hand_out_next(self) -> bool:
        """Wait for the oldest steps under way, and hand out their tokens; False without any."""
        raise NotImplementedError

    def fits(self, requests: Sequence[Request]) -> bool:
        """See `Slots`; those that begin with embeddings stay to the end, and cannot wait."""
        if not super().fits(requests):
            return False
        book = self.blocks
        stays = [r.cache_tokens for r in requests if r.embeds is not None]
        return book is None or sum(map(book.of, stays)) <= book.count

    def _has_blocks(self, requests: Sequence[Request], chosen: bool) -> bool:
        """See `Slots`: what stays in its slots to the end must leave room for each of the others.

        LengthError where it never does.
        """
        if (book := self.blocks) is None:
            return True
        self.finish([x for x in list(self._live.values()) if x.ended])
        new = [(request, chosen) for request in requests]
        stays = [book.of(r.cache_tokens) for r in requests if chosen or r.embeds is not None]
        if sum(stays) > book.count:
            raise LengthError(
                f"A call of {len(stays)} sequences may come to need {sum(stays)} blocks of cache, "
                f"and {book.count} were reserved. Its sequences cannot wait for each other, as "
                "their tokens are chosen on the host, or they begin with embeddings. Pass fewer at "
                "a time, ask for fewer new tokens, or reserve more cache_tokens."
            )
        if not _leave_room(book, new, list(self._live.values())):
            return False
        return not chosen or sum(stays) <= book.free + book.kept

    def has_blocks_for(
        self, new: Sequence[tuple[Request, bool]], leaving: Sequence[Live] = ()
    ) -> bool:
        """True if the prompts of new requests have room, and a block more for each.

        Whether a request's tokens are chosen on the host stands beside it. What sequences under way
        are yet to read comes first; those that are `leaving` give their blocks back. Where it is
        True `_has_blocks` is too, so that who lets them in need not wait there.
        """
        if self.blocks is None:
            return True
        with self._turns:
            if (book := self.blocks) is None:
                return True
            there = book.free + book.kept + sum(book.alone(x.slot) for x in leaving)
            lives = [x for x in list(self._live.values()) if not (x.ended or x in leaving)]
            for live in lives:
                if live.unread is not None:
                    there -= max(0, self.needs(live.unread.request) - book.held(live.slot))
            if sum(self.needs(request, whole) for request, whole in new) > there:
                return False
            return _leave_room(book, new, lives)

    def needs(self, request: Request, whole: bool = False, shares: bool = True) -> int:
        """Blocks that must be free for a prompt and its first new tokens.

        Those that others have of it now are not counted if it `shares` them.
        """
        book = self.blocks
        assert book is not None
        most = book.of(request.cache_tokens)
        if whole or request.embeds is not None:
            return most
        sharing = self.sharing if shares else None
        found = (0, 0) if sharing is None else sharing.found(request)
        return min(book.of(len(request.prompt)) + 1, most) - book.served(*found)

    def needs_saved(self, live: Live, request: Request) -> int | None:
        """Blocks that must be free to put back what was saved; None where what it lacks is gone."""
        book, saved, sharing = self.blocks, live.saved, self.sharing
        assert book is not None and saved is not None
        if not saved.start:
            return self.needs(request, shares=False)
        source, count = (0, 0) if sharing is None else sharing.found(request)
        if count < saved.start:
            return None
        most = book.of(request.cache_tokens)
        own = min(book.of(len(request.prompt)) + 1, most)
        return own - book.served(source, saved.start)

    def _claims(self) -> "Claims | None":
        """Begin to count the blocks of a pass over prompts; None where the pool has no blocks."""
        return None if self.blocks is None else Claims(self, self.blocks)

    def _by_rank(self) -> list[Live]:
        """The sequences under way: urgent ones first, and then who came first."""
        lives = [x for x in list(self._live.values()) if not x.ended]
        return sorted(lives, key=lambda x: not x.urgent)

    def _make_room(self, steps: int) -> int:
        """Let every sequence have blocks for steps, or give up its own until later: how many steps.

        These are so many, or as many as there are blocks for: who ends in them leaves his to the
        others, of whom none has to wait then.
        """
        if self.blocks is None:
            return steps
        self.finish([x for x in list(self._live.values()) if x.ended])
        while lacking := self._runner.lacks(steps):
            if not self.give_up(self.blocks.free + lacking):
                if not self._runner.lacks(1):
                    return bisect_left(range(2, steps), True, key=self._lacks) + 1
                if not self.hand_out_next():
                    self._put_off_last()
                self.finish([x for x in list(self._live.values()) if x.ended])
        return steps

    def _lacks(self, steps: int) -> bool:
        return self._runner.lacks(steps) > 0

    def _make_room_to_read(self) -> bool:
        """Let the first prompt be read, for which others give up their blocks; False without one.

        That is where all wait to be read, and none has the blocks that it needs.
        """
        lives = [x for x in self._by_rank() if not x.chosen]
        if self.blocks is None or not lives or any(x.unread is None for x in lives):
            return False
        self.finish([x for x in list(self._live.values()) if x.ended])
        claims, piece = Claims(self, self.blocks), lives[0].unread
        assert piece is not None
        while not claims.allows(lives[0], piece, piece.stop - piece.start):
            self._put_off_last(besides=lives[0])
        return True

    def _put_off_last(self, besides: Live | None = None) -> None:
        """Take the blocks of the last sequence that has some and can go on later."""
        book = self.blocks
        assert book is not None
        able = [x for x in self._by_rank() if not _stays(x) and x is not besides]
        able = [x for x in able if book.held(x.slot)]
        if not able:
            raise StepError("No block of the cache is free, and no sequence can give up any.")
        self._put_off(able[-1])

    def _put_off(self, live: Live) -> None:
        """Take the blocks of a sequence, all of whose tokens have come; it is read again later."""
        if live.progress is not None and live.allowed() is None:  # its grammar fails, and it ends
            return
        with self._undisturbed():
            live.saved = live.saved or self._save(live)
        live.unread, live.is_again = Piece.whole(live.part(), live.slot), True
        live.queued = len(live.tokens) + 1
        self._runner.release([live.slot])
        if self.sharing is not None:
            self.sharing.drop(live.slot)
        self.yields += 1

    def _save(self, live: Live) -> Saved | None:
        """See `Pauses.save`; blocks that others have too are theirs to keep, and not saved."""
        book, sharing, start = self.blocks, self.sharing, 0
        if book is not None and book.near is None and sharing is not None:
            sharing.drop(live.slot)
            source, count = sharing.found(live.request)
            start = min(count, book.shared(live.slot, source) * GRAIN)
        return self._pauses.save(live, start)

    def give_up(self, free: int) -> bool:
        """Let go of kept beginnings of prompts until so many blocks are free; True if it helped.

        Who was asked for longest ago goes first, if that frees something.
        """
        book, sharing = self.blocks, self.sharing
        assert book is not None
        while book.free < free:
            if sharing is None or not book.kept or not sharing.give_up(book):
                return False
        return True


class Claims:
    """The blocks that prompts need which are to be read together."""

    def __init__(self, slots: BlockSlots, book: Blocks) -> None:
        self._slots, self._book = slots, book
        self._needs: dict[int, int] = {}  # blocks of each slot

    def allows(self, live: Live, piece: Piece, left: int) -> bool:
        """True if there are blocks for a piece, of which at most about `left` tokens are read.

        Of one that begins, for the whole prompt and what comes first behind it. What was saved of a
        sequence has blocks of its own: where there are too few of these, and others have what it
        begins with, it is read again.
        """
        book = self._book
        if not piece.is_first or book.held(live.slot):
            own = book.of(needed(first_of(piece, left)))
            return self._are_there(max(own - book.held(live.slot), 0))
        needs, request = self._slots.needs, piece.request
        if live.saved is not None:
            saved = self._slots.needs_saved(live, request)
            if saved is not None and self._are_there(saved):
                return True
        is_room = self._are_there(needs(request))
        live.saved = None if is_room else live.saved
        return is_room

    def _are_there(self, own: int) -> bool:
        """True if there are so many blocks beside those that are claimed."""
        book = self._book
        others = sum(max(n - book.held(slot), 0) for slot, n in self._needs.items())
        return own + others <= book.free + book.kept

    def take_saved(self, live: Live) -> None:
        """Free the blocks for what was saved of a sequence, which gets those that it lacks."""
        if (saved := live.saved) is None or live.unread is None:
            return
        sharing, request = self._slots.sharing, live.unread.request
        if saved.start and not (sharing and sharing.lend(live.slot, request, saved.start)):
            live.saved = None
            return
        self._slots.give_up(self._book.more({live.slot: saved.tokens}))

    def take(self, pieces: Sequence[Piece]) -> None:
        """Free the blocks for pieces."""
        wanted = {piece.slot: needed(piece) for piece in pieces}
        self._slots.give_up(self._book.more(wanted))

    def add(self, piece: Piece) -> None:
        """Count what a piece takes, whose prompt has all that others had of it."""
        own = needed(piece)
        if piece.is_first and piece.request.embeds is None:
            own = min(len(piece.request.prompt) + 1, piece.request.cache_tokens)
        self._needs[piece.slot] = self._book.of(own)


def _leave_room(book: Blocks, new: Sequence[tuple[Request, bool]], lives: Sequence[Live]) -> bool:
    """True if those that keep their blocks to the end leave room for each of the others.

    Of `new` requests beside `lives`; whether a request's tokens are chosen stands beside it.
    """
    pairs = [(x.request, x.chosen) for x in lives]
    pairs += new
    sizes = [(book.of(r.cache_tokens), chosen or r.embeds is not None) for r, chosen in pairs]
    stay = sum(size for size, stays in sizes if stays)
    return stay + max((size for size, stays in sizes if not stays), default=0) <= book.count


def _stays(live: Live) -> bool:
    """True if a sequence cannot be read again."""
    return live.chosen or live.request.embeds is not None
