"""The embedded model: a small Llama that has read Python's standard library, as a HF folder.

How it was trained is in `training.json`; the script is `training/train_embedded.py`.
"""

from pathlib import Path


def path() -> Path:
    """The folder of the embedded model's checkpoint and tokenizer."""
    return Path(__file__).parent
