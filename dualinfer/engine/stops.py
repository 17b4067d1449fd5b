"""Stop strings: texts that end the sequence in which they come."""

from collections.abc import Sequence
from typing import Any

from .text_stream import Detokenizer, TextStream


class StopStrings:
    """Tells for each sequence whether its newest token completes a stop string.

    As in HF, the string may begin in the prompt, and must end within the newest token. Special
    tokens count as text, and nothing is cleaned up.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self._strings = strings
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, eager=True)

    def watch(self, prompt: Sequence[int]) -> "StopWatch":
        """A watch over the sequence that continues `prompt`."""
        return StopWatch(self._strings, self._detokenizer.stream(prompt))


class StopWatch:
    """One sequence's text, as much of it as a stop string may begin in."""

    def __init__(self, strings: Sequence[str], stream: TextStream):
        self._strings, self._stream, self._text = strings, stream, stream.before
        self._longest = max(map(len, strings))

    def is_completed(self, token: int) -> bool:
        """True if a stop string ends within `token`, the next one of the sequence."""
        old = len(self._text)
        self._text += self._stream.push(token)
        found = any(self._text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self._strings)
        self._text = self._text[-self._longest :]
        return found
