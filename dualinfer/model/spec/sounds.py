"""A kind of sounds owns all that an encoder of them needs, so that nobody else knows of it."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


class Sounds:
    """The input of an encoder of sounds: frames of numbers, or samples, as HF's processor has it.

    A kind is a frozen dataclass in a file of `blocks/`, and its docstring tells what it computes.
    Sounds of any length are given token by token: each has all of the sound that makes it, and
    behind that a 1 where layers see the token, or a 0. Sounds of one length are given as they are.
    """

    name: ClassVar[str]  # HF's argument
    of_one_length: ClassVar[bool] = False  # as long as the encoder has positions
    stride: ClassVar[int] = 1  # the frames of sounds of one length that make a token
    transcribes: ClassVar[bool] = False  # HF's class goes through long ones by windows

    @property
    def frame_width(self) -> int:
        """Numbers of a frame; 0 of samples."""
        return 0

    def axes(self, embed: int) -> Mapping[str, int]:
        """Elements of the axes of its own weights, by their names, in an encoder of `embed`."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Numbers of one token as it is given."""
        raise NotImplementedError

    def tokens(self, count: int) -> int:
        """Tokens of so many frames, or samples."""
        raise NotImplementedError

    def visible(self, mask: np.ndarray) -> np.ndarray:
        """Tokens [B, S] that are real, where frames or samples [B, F] are, as HF has it."""
        raise NotImplementedError

    def cut(self, sounds: Any, tokens: int, xp: Any) -> Any:
        """Sounds float32 [B, F, ...] as tokens [B, S, ...], without what shows them.

        `xp` is the arrays' module, and the last axes are `width` - 1 numbers together.
        """
        raise NotImplementedError

    def embed(self, ops: Any, w: Mapping[str, Any], x: Any) -> Any:
        """The encoder's tokens [B, S, E], of sounds as they are given, with the weights by name."""
        raise NotImplementedError
