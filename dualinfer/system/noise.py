"""Messages of other libraries' imports, which tell nothing to a person who typed a command."""

import logging
import os

_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}


class _Without(logging.Filter):
    """Passes what does not hold the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is shown."""
        return self._text not in record.getMessage()


_FILTERS = {name: _Without(text) for name, text in _NOISE.items()}


def leave_out_noise() -> None:
    """Show nothing of the kinds that are known to be of no use in a command."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    for name, own in _FILTERS.items():
        logging.getLogger(name).addFilter(own)
