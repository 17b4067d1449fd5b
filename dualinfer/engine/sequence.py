"""One sequence that is being generated: its tokens, and what its slot is asked for."""

import threading
from dataclasses import dataclass, field, replace

import numpy as np

from ..backends.base import Piece, Progress, Request, Saved
from ..errors import StepError


@dataclass(eq=False)
class Live:
    """One sequence being generated in a slot. `queued` counts tokens that were asked for.

    `error` says why tokens that it should have will never come. The slot ends once there are
    `pause` tokens, where that is not 0: the sequence then begins anew, as a longer prompt. Of a
    prompt that is read in pieces `unread` is the rest. `told` has what `sampling.tell` says of each
    token, where the request `tells`. Where it follows a grammar, `progress` is where it is there,
    and `accepts` tells of each token whether the text is a whole one with it. The tokens of one
    that is `chosen` come from its `owner`, a thread. `kept` tokens of its prompt were there before.
    Where blocks of a cache run out, those that are `urgent` keep theirs before others; one that
    gave up its own `is_again` to be read.
    """

    request: Request
    slot: int
    pause: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    queued: int = 1
    error: Exception | None = None
    pauses: bool = False
    unread: Piece | None = None
    told: list[np.ndarray] = field(default_factory=list)
    progress: Progress | None = None
    accepts: list[bool] = field(default_factory=list)
    chosen: bool = False
    kept: int = 0
    saved: Saved | None = None
    urgent: bool = False
    is_again: bool = False
    owner: int = field(default_factory=threading.get_ident)

    def part(self) -> Request:
        """The request that the slot gets now: all, or what comes up to the pause."""
        whole, done = self.request, len(self.tokens)
        if whole.grammar is not None:
            self.progress = self.progress or whole.grammar.begin()
            whole = replace(whole, allowed=self.progress.words())
        if not done and not self.pause:
            return whole
        return replace(
            whole,
            first=None,
            done=(),
            hidden_at_first=whole.hidden_at_first if not done else (),
            tokens=np.append(whole.tokens, np.array(self.tokens, whole.tokens.dtype)),
            max_new_tokens=(self.pause or whole.max_new_tokens) - done,
            min_new_tokens=max(0, whole.min_new_tokens - done),
            generated=whole.generated + done,
        )

    def resume(self) -> None:
        """Book the tokens that are done; the error that they are none of its own."""
        request = self.request
        if request.grammar is not None:
            self.progress = request.grammar.begin()
        for token in request.done:
            self.take(token)
        if self.ended:
            raise self.error or StepError("A sequence was to go on that had ended.")
        if request.tells:
            self.told = [np.zeros(0, np.float32)] * len(request.done)
        self.queued, self.pauses = len(self.tokens) + 1, False
        if self.pause <= len(self.tokens):  # it is read as a prompt beyond it
            self.pause = 0

    def take(self, token: int, told: np.ndarray | None = None) -> None:
        """Book a token; the sequence ends where it ends on the device."""
        if told is not None and self.request.tells:
            self.told.append(told)  # before its token, which another thread may look at
        count = len(self.tokens) + 1
        full = count >= self.request.max_new_tokens
        if full and self.request.last is not None:
            token = self.request.last
        if self.progress is not None:
            self._follow(self.progress, token)
        self.tokens.append(token)
        self.pauses = count == self.pause
        self.ended = self.ended or full or token in self.request.eos_ids

    def _follow(self, progress: Progress, token: int) -> None:
        """Take a token in the grammar, which may end the sequence."""
        try:
            progress.take(token)
        except Exception as error:
            self.error, self.ended = error, True
        self.accepts.append(progress.accepts)
        self.ended = self.ended or progress.is_over

    def allowed(self) -> np.ndarray | None:
        """The words of the tokens that may come next; None where the grammar fails, and it ends."""
        assert self.progress is not None
        try:
            return self.progress.words()
        except Exception as error:
            self.error, self.ended = error, True
            return None

    @property
    def is_whole(self) -> bool:
        """True where it ended because its grammar, or its EOS, says so."""
        if self.progress is not None and self.progress.is_over:
            return True
        return bool(self.tokens) and self.tokens[-1] in self.request.eos_ids

    def may_stop_at(self, index: int) -> bool:
        """True if a stop string may end it with this token: not amid a grammar's text."""
        return self.progress is None or self.accepts[index]
