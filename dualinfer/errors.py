"""The exceptions of dualinfer, each also the builtin that callers catch; warnings to the caller."""

import copy
import functools
import os
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

SITE = "https://dualinfer.example/"  # as in mkdocs.yml


class DualinferError(Exception):
    """Base of every error that dualinfer raises on purpose."""

    @property
    def help(self) -> str:
        """The address of the page that says what causes such an error, and the way on."""
        own = next(c for c in type(self).__mro__ if c.__module__ == __name__)
        return f"{SITE}troubleshooting/#{own.__name__.lower()}"


class ConfigError(DualinferError, ValueError):
    """An InferenceConfig field is unknown, malformed, in conflict, or cannot be honoured."""


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """The JSON file given as `config` does not exist."""


class ArgumentError(DualinferError, ValueError):
    """An argument of forward or generate has a wrong shape, dtype or value, or is not supported."""


class UnsupportedError(DualinferError, NotImplementedError):
    """A request that dualinfer knows and does not serve, with the reason and the way on."""


class LengthError(DualinferError, RuntimeError, ValueError):
    """A prompt, or a prompt and its new tokens, do not fit the limit.

    A RuntimeError as in DeepSpeed's guard and a ValueError as in HF's.
    """


class ModelError(DualinferError, ValueError):
    """The model is of no supported family, or its config holds a field that the family ignores."""


class UnservedError(ModelError):
    """Fused mode does not know the model, or a field of its config; transformers may serve it."""


class CheckpointError(DualinferError, ValueError):
    """A checkpoint is damaged, or its weights are missing, left over or misshaped."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint's folder, or a file that it needs, does not exist."""


class BackendNotAvailableError(DualinferError, ImportError):
    """The chosen backend's framework is not installed."""


class StepError(DualinferError, RuntimeError):
    """A step on the device failed in one call; other calls' sequences that it served ended."""


class DeadlineError(DualinferError, TimeoutError):
    """The deadline of a request passed before it had ended."""


class DistributedError(DualinferError, RuntimeError):
    """The processes that share a model disagree, or one of them failed or is gone."""


class ProfilingError(DualinferError, RuntimeError, AssertionError):
    """Model times were asked for while profiling was off; DeepSpeed asserts it."""


class OutOfMemoryError(DualinferError, RuntimeError, MemoryError):
    """The device's free memory is smaller than what is needed; told before it is allocated."""


class GraphError(DualinferError, RuntimeError):
    """A forward pass cannot be captured into a CUDA graph."""


class StaleWeightsError(DualinferError, RuntimeError):
    """The live model was changed after the engine had read its weights; nothing ran."""


class ClosedError(DualinferError, RuntimeError):
    """The engine was closed, or is another process's, from which this one was forked."""


# torch's decorators, such as no_grad, lie between functions of dualinfer.
_PASSED = (__name__.partition(".")[0], "pydantic", "torch")


def printable(text: str) -> str:
    """`text` as a terminal may show it: what controls terminals, or is no letter, is written out.

    Messages quote names from files that others made.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def shown(value: Any) -> str:
    """Repr of a value, cut to a length that fits a message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    try:
        return short.repr(value)
    except Exception:  # an int of thousands of digits, or a repr of the caller's own
        return f"<{type(value).__name__}>"


def a_type(value: Any) -> str:
    """The name of a value's type with its article: "an int", "an ndarray", "a dict"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' or name.startswith('nd') else 'a'} {name}"


def shortened(text: object, most: int = 200) -> str:
    """The text for a message, its middle left out where it is long."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most // 2]}...{whole[-most // 2 :]}"


@contextmanager
def told(make: Callable[[BaseException], DualinferError]) -> Iterator[None]:
    """Within it an error that is not ours is the cause of the one that `make` makes of it.

    An interrupt is none, nor is memory that runs out.
    """
    try:
        yield
    except (DualinferError, MemoryError):
        raise
    except BaseException as error:
        if not is_error(error):
            raise
        raise make(error) from error


def blamed_on(
    file: object, kind: type[DualinferError] = CheckpointError
) -> AbstractContextManager[None]:
    """Within it, what a stranger's file makes fail is an error of a `kind` that names the file.

    It stands around each reader: values that no reader expects fail in ways of their own, in
    libraries too. A mistake of dualinfer's own stays to be seen as the cause.
    """

    def make(error: BaseException) -> DualinferError:
        reason = shortened(error) or "it says no more"
        return kind(
            f"{shortened(file)} cannot be read: {type(error).__name__}: {reason}. Is it damaged? "
            "Fetch or save it again; if it is whole, report this as a bug of dualinfer."
        )

    return told(make)


_Error = TypeVar("_Error", bound=BaseException)


def copied(error: _Error) -> _Error:
    """An exception of the same type, text, cause and traceback, for one more caller to raise.

    A raise writes to the traceback of what it raises: callers who share an exception mix theirs.
    One that cannot be made again stays as it is.
    """
    for make in (copy.copy, _made_again):
        with suppress(Exception):
            made = make(error)
            if str(made) == str(error):
                made.__cause__, made.__context__ = error.__cause__, error.__context__
                made.__suppress_context__ = error.__suppress_context__
                return made.with_traceback(error.__traceback__)
    return error


def _made_again(error: _Error) -> _Error:
    """A copy whose __init__ did not run: it may want other arguments than those that are kept."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made


_Read = TypeVar("_Read", bound=Callable[..., Any])


def reads(file: str = "", kind: type[DualinferError] = CheckpointError) -> Callable[[_Read], _Read]:
    """A decorator of functions that read a path, their first argument, by `blamed_on`.

    `file` is what they read where that is a folder.
    """

    def decorate(read: Any) -> Any:
        @functools.wraps(read)
        def reading(path: Any, *arguments: Any, **named: Any) -> Any:
            is_folder = file and isinstance(path, str | os.PathLike) and os.path.isdir(path)
            with blamed_on(os.path.join(path, file) if is_folder else path, kind):
                return read(path, *arguments, **named)

        return reading

    return decorate


def listing(names: Sequence[str], most: int = 8) -> str:
    """The first few names, and how many more there are."""
    first = ", ".join(map(shortened, names[:most]))
    return first + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(names: Sequence[str]) -> str:
    """The number of names, and the first few of them."""
    return f"{len(names)}: {listing(names)}"


def is_error(error: BaseException) -> bool:
    """True unless it ends the program; a panic of a library in Rust is an error, too."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside of dualinfer, and of what calls it back."""
    frame, level = sys._getframe(), 1
    while frame.f_back and _package(frame) in _PASSED:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
