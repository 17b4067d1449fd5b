"""Drafts of what comes next, from what a text has said before: HF's prompt lookup."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np


def draft(tokens: Sequence[int], most: int, longest: int) -> list[int]:
    """At most `most` tokens that may follow; none where the text has not ended so before.

    They are what came behind the last place before that has the text's last tokens: `longest` of
    them, or the most that are found.
    """
    text = np.asarray(tokens)
    for size in range(min(longest, len(text) - 1), 0, -1):
        starts = np.ones(len(text) - size, bool)
        for i in range(size):
            starts &= text[i : len(text) - size + i] == text[len(text) - size + i]
        if len(found := np.flatnonzero(starts)):
            behind = int(found[-1]) + size
            return text[behind : behind + most].tolist()
    return []


class Drafts:
    """The logits of tokens that were read before they were chosen, as long as they are right.

    At most `most` drafts are read at a time, and they are found by up to `longest` tokens.
    Sequences that have ended go on with the id `fill`. Whoever reads `to_read` gives the logits by
    `take`; before that those that are `right` are taken, once.
    """

    def __init__(self, texts: Sequence[Sequence[int]], most: int, longest: int, fill: int) -> None:
        self._texts = [list(text) for text in texts]
        self._most, self._longest, self._fill = most, longest, fill
        self._read_tokens = np.zeros((len(texts), 0), np.int64)
        self._taken = 0  # of these: what was chosen
        self._found: Any = None  # the logits after the newest tokens
        self._logits: deque[Any] = deque()
        self.to_read: np.ndarray | None = None  # the newest tokens and drafts [B, K]
        self.right: np.ndarray | None = None  # the first ones of what was read last, [B, K]
        self.counts = (0, 0)  # drafts that were read, and that were right

    def are_there(self, newest: np.ndarray, going: np.ndarray, left: int) -> bool:
        """True if `logits` has those after the `newest` tokens [B], or will: once they are read.

        `going` [B] are the sequences that have not ended, and `left` how many tokens may follow.
        """
        for text, token in zip(self._texts, newest.tolist(), strict=True):
            text.append(token)
        self._found = None
        if self._logits:
            found = self._logits.popleft()
            if (newest == self._read_tokens[:, self._taken]).all():
                self._found = found
                self._taken += 1
                self.counts = self.counts[0], self.counts[1] + 1
                if not self._logits:
                    self._settle()
                return True
        self._settle()
        most = min(self._most, left)
        found = [
            draft(x, most, self._longest) for x, on in zip(self._texts, going, strict=True) if on
        ]
        count = min(map(len, found), default=0)
        if not count:
            return False
        drafts = np.full((len(newest), count), self._fill, np.int64)
        drafts[going] = [tokens[:count] for tokens in found]
        self.to_read = np.column_stack((newest, drafts))
        return True

    @property
    def is_there(self) -> bool:
        """True if `logits` has those after the newest tokens."""
        return self._found is not None

    def take(self, logits: Any) -> None:
        """Have the logits [B, K, V] after each of the tokens to read."""
        assert self.to_read is not None
        self._read_tokens, self.to_read = self.to_read, None
        count = self._read_tokens.shape[1] - 1
        self._found = logits[:, 0]
        self._logits = deque(logits[:, i] for i in range(1, count + 1))
        self._taken, self.counts = 1, (self.counts[0] + count, self.counts[1])

    def logits(self) -> Any:
        """The logits [B, V] after the newest tokens, which have been read."""
        found, self._found = self._found, None
        return found

    def _settle(self) -> None:
        """Say in `right` which drafts are to be taken, and forget the others."""
        self._logits.clear()
        if self._taken:
            self.right = self._read_tokens[:, : self._taken]
        self._taken = 0
