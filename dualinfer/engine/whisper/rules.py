"""The tokens of a transcript that may come next: HF's rules of timestamps, and suppressed ids."""

from collections.abc import Collection

import numpy as np

from .settings import Settings


class TokenRule:
    """A `stepwise.Rule`: HF's WhisperTimeStampLogitsProcessor where there are timestamps.

    Timestamps come in pairs, but before an end, and do not go back; the first token is one, at most
    max_initial_timestamp_index. Ids of `suppressed` never come, those `at_first` not as the first.
    """

    def __init__(
        self,
        settings: Settings,
        suppressed: Collection[int],
        at_first: Collection[int],
        eos: int,
    ) -> None:
        self._begin, self._eos = settings.first_stamp, eos
        self._most = settings.fields.get("max_initial_timestamp_index")
        self._stamps = settings.timestamps
        self.log_probs = settings.log_prob is not None
        names = {"return_timestamps": self._stamps, "logprob_threshold": self.log_probs}
        self.names = tuple(name for name, there in names.items() if there)
        together = settings.fields.get("_detect_timestamp_from_logprob", True)
        self.outweigh = self._begin if self._stamps and together else None
        self._always = np.zeros(settings.vocab, bool)
        self._always[list(suppressed)] = True
        self._at_first = np.zeros(settings.vocab, bool)
        self._at_first[list(at_first)] = True
        if self._stamps:
            self._always[self._begin - 1] = True  # <|notimestamps|>

    def hidden(self, ids: np.ndarray) -> np.ndarray:
        """See `stepwise.Rule`."""
        hidden = np.repeat(self._always[None], len(ids), axis=0)
        if not ids.shape[1]:
            hidden |= self._at_first
        if not self._stamps:
            return hidden
        begin = self._begin
        for row, tokens in zip(hidden, ids, strict=True):
            is_stamp = tokens >= begin
            after_one = len(tokens) >= 1 and is_stamp[-1]
            after_two = len(tokens) < 2 or is_stamp[-2]  # or after one that stands alone at first
            if after_one and after_two:
                row[begin:] = True
            elif after_one:
                row[: self._eos] = True
            if is_stamp.any():
                last = tokens[is_stamp][-1]
                row[begin : last if after_one and not after_two else last + 1] = True
        if not ids.shape[1]:
            hidden[:, :begin] = True
            if self._most is not None:
                hidden[:, begin + self._most + 1 :] = True
        return hidden
