"""Prompts that are read in pieces, while others have steps between them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..backends.base import GRAIN, Piece, Request, Runner
from .pausing import Pauses
from .sequence import Live
from .sharing import Sharing

PIECE = 2048  # tokens that are read at a time where others wait; an H100 takes 50 ms for 8B


class Claims(Protocol):
    """Says which pieces have blocks of a cache, one after another; see `blocks.Claims`."""

    def allows(self, live: Live, piece: Piece, left: int) -> bool:
        """True if there are blocks for a piece, of which at most about `left` tokens are read."""
        ...

    def take_saved(self, live: Live) -> None:
        """Free the blocks for what was saved of a sequence, before it is put back."""
        ...

    def add(self, piece: Piece) -> None:
        """Count what a piece takes."""
        ...

    def take(self, pieces: Sequence[Piece]) -> None:
        """Free the blocks for pieces."""
        ...


def kind(request: Request) -> tuple[bool, ...]:
    """The kind of a prompt: one pass reads prompts of one kind."""
    return request.embeds is None, request.source is None, request.is_encoded


def first_of(piece: Piece, most: int) -> Piece:
    """The first tokens of a piece, about `most`."""
    grains = max(most // GRAIN, 1) * GRAIN
    return replace(piece, stop=min(piece.stop, piece.start + grains))


def plan(lives: Sequence[Live], parts: Sequence[Request], _: object = None) -> None:
    """Let prompts wait for pieces of them to be read."""
    for live, part in zip(lives, parts, strict=True):
        live.unread = Piece.whole(part, live.slot)


def plan_whole(
    runner: Runner, pauses: Pauses, lives: Sequence[Live], parts: Sequence[Request], running: bool
) -> list[Piece]:
    """The pieces to read at once of new prompts: all, or, beside others `running`, some of each.

    So all of the prompts have their room.
    """
    for live, part in zip(lives, parts, strict=True):
        live.unread = Piece.whole(pauses.restore(live, part), live.slot)
    pieces = [live.unread for live in lives if live.unread is not None]
    if running and runner.spec.reads_pieces:
        pieces = [first_of(piece, PIECE // len(pieces)) for piece in pieces]
    return pieces


def next_pieces(
    open_ones: Sequence[Live],
    sharing: Sharing | None,
    pauses: Pauses,
    served: list[Live],
    left: int,
    claims: Claims | None = None,
) -> list[Piece]:
    """The pieces to read next of open sequences, `left` tokens of them where others wait.

    Whose they are is added to `served`. The prompt that came first is first; ids and embeddings go
    apart. One waits where another that is read now begins as it does, and with `claims` all wait
    behind the first one that has no blocks.
    """
    unread = [(x, x.unread) for x in open_ones if x.unread is not None]
    waiting = len(unread) < len(open_ones)
    pieces: list[Piece] = []
    if sharing is not None:
        sharing.meet([piece.request for _, piece in unread])
    for live, piece in unread:
        if left <= 0:
            break
        if sharing is not None and sharing.waits(piece, pieces):
            continue
        if (piece.request.embeds is None) != (unread[0][1].request.embeds is None):
            continue
        if claims is not None and not claims.allows(live, piece, left if waiting else 1 << 30):
            break
        served.append(live)
        if piece.is_first and (sharing is not None or claims is not None):
            if claims is not None:
                claims.take_saved(live)
            request = pauses.restore(live, piece.request)
            if sharing is not None:
                request = sharing.begun(live.slot, request)
            piece = Piece.whole(request, live.slot)
            live.kept = live.kept if live.is_again else piece.start
        if sharing is not None:
            piece = sharing.until(piece)
        if claims is not None:
            claims.add(piece)
        pieces.append(first_of(piece, left) if waiting else piece)
        left -= pieces[-1].stop - piece.start if waiting else 0
    if claims is not None:
        claims.take(pieces)
    return pieces


def booked(lives: Sequence[Live], pieces: Sequence[Piece], sharing: Sharing | None) -> list[Live]:
    """Book pieces that are read; return the sequences whose prompt is read whole."""
    ended = []
    for live, piece in zip(lives, pieces, strict=False):
        rest = Piece.whole(piece.request, live.slot)
        live.unread = None if piece.ends else replace(rest, start=piece.stop)
        if sharing is not None:
            sharing.read(piece)
        if piece.ends:
            ended.append(live)
    return ended


def keep(lives: Sequence[Live], sharing: Sharing | None) -> None:
    """Keep what sequences that end have cached, where a prompt may begin so."""
    for live in lives if sharing is not None else ():
        assert sharing is not None
        if live.chosen or live.error is not None:
            sharing.drop(live.slot)
        else:
            piece, new = live.unread, live.tokens
            request, new = (live.request, new) if piece is None else (piece.request, [])
            sharing.keep(live.slot, request, None if piece is None else piece.start, new)
