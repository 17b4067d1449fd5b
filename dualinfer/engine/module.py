"""ModuleEngine: the user's own module, with the contract's guard around its own generate."""

import inspect
import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays import kind_of, to_kind, to_numpy
from ..backends.base import ModuleRunner
from ..errors import ArgumentError, LengthError, UnsupportedError, a_type
from .arguments import check_beams, refuse_foreign, refuse_outputs
from .base import About, InferenceEngine
from .checks import by_name, check_ids, read_array, refuse_text
from .options import DEFAULT_NEW_TOKENS, check_values, config_dict, over_limit
from .prompts import make_prompts
from .report import Report
from .text import DEFAULT_TEXT_TOKENS, Sequences
from .tokenizing import held_tokenizer

_OF_TOKENS = (
    *("attention_mask", "position_ids", "token_type_ids", "labels"),
    *("decoder_attention_mask", "decoder_position_ids"),
)
_MAIN = ("0", "input_ids", "inputs")  # by its position or its names
_PATIENCE = 1.0  # seconds for a thread to end; it may wait for a turn that its reader has


class ModuleEngine(InferenceEngine):
    """Module mode: what the caller's module computes, cast and placed, without gradients."""

    _mode = "module"

    def __init__(self, runner: ModuleRunner, about: About) -> None:
        super().__init__(runner, about)
        self._architecture = type(runner.module).__name__

    def _absent(self, name: str) -> AttributeError:
        """The error for an attribute that neither the engine has nor its module."""
        from .fused import FusedEngine

        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name.startswith("_") or not hasattr(FusedEngine, name):
            return AttributeError(text)
        return AttributeError(
            f"{text}: this engine is in module mode, and fused engines alone have it. Pass "
            "replace_with_kernel_inject=True to init_inference(), with an HF model, a checkpoint "
            "or a hub id."
        )

    @property
    def generation_config(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The module's own, which its generate reads."""
        return getattr(self.runner.module, "generation_config", None)

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        if value is not self.generation_config:
            self.runner.module.generation_config = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns for these arguments."""
        return self._run("forward", args, kwargs)

    def refresh(self) -> None:
        """Take the weights that the caller's module has now.

        On torch it is his own module that runs, so that there is nothing to do. On JAX the engine
        keeps arrays of its own until this is called, and nothing is compiled again; a Linen
        module's variables are values, and a checkpoint that the module was made of is not read
        again: UnsupportedError. Raises ModelError where the module is gone or has other parts or
        shapes.
        """
        if self._about.made_here:
            raise UnsupportedError(
                f"This {self._architecture} was made of {self._about.source}, which module mode "
                "does not read again. Make a new engine with init_inference()."
            )
        with self._turns:
            runner = self.runner
            with self._turns.together("Reading the weights again"):
                runner.refresh()

    def can_generate(self) -> bool:
        """True if the module says so; where it does not say, if it has a generate."""
        module = self.runner.module
        own = getattr(module, "can_generate", None)
        return bool(own()) if callable(own) else hasattr(module, "generate")

    @property
    def generate(self) -> Any:
        """The module's own generate, refused where the contract does; absent if it has none.

        UnsupportedError for beams, in whatever way they are asked for; LengthError if prompt and
        new tokens exceed `max_out_tokens`. `engine.module.generate` is without this guard.
        """
        if self._runner is not None and not hasattr(self._runner.module, "generate"):
            raise AttributeError(f"{self._architecture} has no generate, so the engine has none.")
        return self._generate

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("input_ids")
        if (named := by_name(first)) is not None:
            args, kwargs = args[1:], {k: v for k, v in named.items() if v is not None} | kwargs
            kwargs["input_ids"] = named["input_ids"]
        if kwargs.get("tokenizer") is not None:
            kwargs = kwargs | {"tokenizer": held_tokenizer(kwargs["tokenizer"])}
        return self._run("generate", args, kwargs)

    def _begin(
        self,
        rows: list[list[int]],
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        whole: bool,
    ) -> Sequences:
        refuse_outputs("What gives text", arguments)
        module = self.runner.module
        if not self.can_generate():
            raise UnsupportedError(
                f"{self._architecture} has no generate that takes token ids, so that it makes no "
                "text. Pass a causal or encoder-decoder model of HF's."
            )
        own = [getattr(module, name, None) for name in ("generate", "forward")]
        named = [inspect.signature(call).parameters for call in own if call is not None]
        refuse_foreign(arguments, [name for names in named for name in names])
        if arguments.pop("seed", None) is not None:
            raise UnsupportedError(
                "seed: in module mode the module's own generate draws. Call torch.manual_seed, or "
                "transformers.set_seed, before it."
            )
        is_pair = _is_pair(module)
        asked = _options(self.generation_config) | _options(config) | arguments
        check_values(_options(config) | arguments, greedy=not asked.get("do_sample"))
        ends = _ends(asked)
        inputs = self._padded(rows, asked)
        width = max(map(len, rows))
        if all(asked.get(name) is None for name in ("max_new_tokens", "max_length")):
            limit = self.inference_config.max_out_tokens or width + DEFAULT_TEXT_TOKENS
            room = limit - (1 if is_pair else width)
            arguments["max_new_tokens"] = max(1, min(DEFAULT_TEXT_TOKENS, room))
        if asked.get("stop_strings") is not None:
            arguments["tokenizer"] = tokenizer
        if config is not None:
            arguments["generation_config"] = config
        with self._turns:
            self._check((), {**inputs, **arguments})
        count = int(asked.get("num_return_sequences") or 1)
        prompts = [[] if is_pair else row for row in rows for _ in range(count)]

        def run(**more: Any) -> Any:
            return self._generate(**inputs, **arguments, **more)

        if whole:
            return Sequences(prompts, _steps_of(run, 1 if is_pair else width, ends))
        return Sequences(prompts, _streamed_steps(run, ends))

    def _padded(self, rows: Sequence[Sequence[int]], asked: Mapping[str, Any]) -> dict[str, Any]:
        """Rows of any lengths as ids and mask: those of a decoder alone begin with the padding."""
        is_pair = _is_pair(self.runner.module)
        width = max(map(len, rows))
        fill = next((i for i in (asked.get("pad_token_id"), *_ends(asked)) if i is not None), 0)
        ids = np.full((len(rows), width), fill, np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            place = slice(None, len(row)) if is_pair else slice(width - len(row), None)
            ids[i, place], mask[i, place] = row, 1
        return {"input_ids": self._placed(ids), "attention_mask": self._placed(mask)}

    def _placed(self, array: Any) -> Any:
        """An array of the backend's framework where the module is."""
        if self.inference_config.backend == "torch":
            return to_kind(array, "torch").to(self.device)
        return to_kind(array, "jax")

    def _with_arrays(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a HF model with torch's tensors in place of lists and others' arrays.

        Lists are those that hold token ids, masks and the like. In generate their rows may differ
        in length, as in fused mode. Raises ArgumentError for what cannot be token ids.
        """
        module = self.runner.module
        if self.inference_config.backend != "torch" or not _is_hf(module):
            return given
        main = getattr(module, "main_input_name", "input_ids")
        keys = [key for key in _MAIN if given.get(key) is not None]
        ids = given[keys[0]] if keys and main == "input_ids" else None
        if (ids is None or kind_of(ids) == "torch") and not any(
            kind_of(value) in ("list", "numpy", "jax") for value in given.values()
        ):
            return given
        vocab = getattr(module.config, "vocab_size", None) or 2**31
        if method == "generate" and kind_of(ids) == "list":
            asked = _options(self.generation_config)
            asked |= _options(given.get("generation_config")) | given
            rows = make_prompts(ids, given.get("attention_mask"), vocab, 0, ()).rows
            padded = self._padded([row.tolist() for row in rows], asked)
            given = given | {keys[0]: padded.pop("input_ids")} | padded
        return {
            name: self._array(main if name in ("0", "inputs") else name, value, vocab)
            for name, value in given.items()
        }

    def _array(self, name: str, value: Any, vocab: int) -> Any:
        """An argument of a HF model by its name; what is a tensor, or no array, stays as it is."""
        kind = kind_of(value)
        if kind == "torch" or value is None:
            return value
        if name in ("input_ids", "decoder_input_ids"):
            return self._placed(check_ids(value, name, vocab))
        if kind in ("numpy", "jax") or (kind == "list" and name in _OF_TOKENS):
            array = read_array(value, name, "rows differ in length; pad them.")
            if array.dtype.kind not in "biufcV":
                raise ArgumentError(f"{name} has dtype {array.dtype}; expected numbers.")
            return self._placed(array[None] if name in _OF_TOKENS and array.ndim == 1 else array)
        return value

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the runner's method; a process that has no arrays for it takes rank 0's."""
        named = {str(i): value for i, value in enumerate(args)} | kwargs
        wrong = None
        try:
            if method == "generate" and _takes_length(self.runner.module):
                refuse_text(named.get("0", named.get("input_ids")))
            named = self._with_arrays(method, named)
        except ArgumentError as error:
            wrong = error
        with self._call(f"{method}()", named, _is_array) as call:
            if wrong is not None:
                raise wrong
            count = sum(name.isdecimal() for name in call.inputs)
            args = tuple(call.inputs.pop(str(i)) for i in range(count))
            kwargs = call.inputs | (self._check(args, call.inputs) if method == "generate" else {})
            call.meet(lambda: (args, sorted(i for i in kwargs.items() if i[0] != "streamer")))
            try:
                return getattr(self.runner, method)(args, kwargs)
            except (AttributeError, TypeError) as error:
                self._refuse_foreign(named, error)
                raise

    def _refuse_foreign(self, given: Mapping[str, Any], error: Exception) -> None:
        """Raise ArgumentError if the module failed at what is no array of the backend's."""
        backend = self.inference_config.backend
        odd = [
            f"{'argument ' if name.isdecimal() else ''}{name}, {a_type(value)}"
            for name, value in given.items()
            if _is_foreign(name, value, backend)
        ]
        if odd:
            raise ArgumentError(
                f"{self._architecture} does not take {', nor '.join(odd)}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Pass arrays of {backend}."
            ) from error

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Raise for what the contract's guard refuses, before anything runs.

        Gives max_new_tokens where the caller asked for no length and the default is over the limit.
        """
        module = self.runner.module
        own = inspect.signature(module.generate).parameters
        if kwargs.get("grammar") is not None and "grammar" not in own:
            raise UnsupportedError(
                "grammar is served in fused mode alone: here the module's own generate chooses "
                "tokens. Pass a logits_processor of llguidance or another library."
            )
        named = _named(module.generate, args, kwargs)
        own = _options(getattr(module, "generation_config", None))
        given = _options(named.get("generation_config")) | named
        asked = {name: value for name, value in given.items() if value is not None}
        check_beams(own | asked, "num_beams=1, or engine.module.generate, which has no guard")
        limit = self.inference_config.max_out_tokens
        if limit is None:
            return {}
        width = self._prompt_width(module, args[0] if args else None, named, limit)
        by_caller = {"max_new_tokens", "max_length"} & asked.keys()
        if not by_caller and not _takes_length(module):
            new = 0  # how many it makes is its own affair
        else:
            new = _new_tokens(asked if by_caller else own, width)
        capped = {}
        if not by_caller and width < limit < width + new:
            new = limit - width
            capped["max_new_tokens"] = new
        if width + new > limit:
            raise LengthError(over_limit(width, new if by_caller else 0, "max_out_tokens", limit))
        return capped

    def _prompt_width(self, module: Any, first: Any, kwargs: Mapping[str, Any], limit: int) -> int:
        """Tokens that the generated sequence begins with: the decoder's, where there are two."""
        prompt, is_text = first, False
        for name in ("inputs", "input_ids", "inputs_embeds"):
            if prompt is None:
                prompt, is_text = kwargs.get(name), name == "inputs_embeds"
        is_text = is_text or _is_ids(prompt)
        if _is_pair(module):
            if is_text and _width(prompt) > limit:
                raise LengthError(
                    f"The encoder's input has {_width(prompt)} tokens, over max_out_tokens "
                    f"({limit}). Shorten it, or set a larger max_out_tokens."
                )
            for name in ("decoder_input_ids", "prompt_ids"):  # Whisper's prompt is the second
                if kwargs.get(name) is not None:
                    return _width(kwargs[name])
            return 1
        return _width(prompt) if is_text else 0

    def _watch(self, runner: Any, enabled: bool, use_cuda_events: bool) -> None:
        super()._watch(runner, enabled, use_cuda_events)
        runner.watch(self._profiler)

    def report(self) -> Report:
        """Report what runs, where, and what it holds."""
        return self._make_report(
            family="",
            architecture=self._architecture,
            layers=0,
            max_tokens=self.inference_config.max_out_tokens or 0,
        )

    def _name(self) -> str:
        return self._architecture


def _is_hf(module: Any) -> bool:
    return hasattr(getattr(module, "config", None), "to_dict")


def _is_pair(module: Any) -> bool:
    """True for an encoder and a decoder."""
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _ends(asked: Mapping[str, Any]) -> list[int]:
    end = asked.get("eos_token_id")
    return to_numpy(np.array([] if end is None else end, np.int64)).reshape(-1).tolist()


def _is_foreign(name: str, value: Any, backend: str) -> bool:
    """True for an input, or numbers, in a form that a module on `backend` may not take."""
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    numbers = first is not value and isinstance(first, int | float)
    other = kind_of(first) in ("numpy", "jax") and backend == "torch"
    return numbers or other or (name in _MAIN and isinstance(value, str | Mapping))


def _is_array(value: Any) -> bool:
    return kind_of(value) in ("torch", "jax", "numpy")


def _steps_of(
    run: Callable[..., Any], width: int, ends: Sequence[int]
) -> Generator[list[int | None], None, None]:
    """The new tokens of a generate, step by step, behind the `width` columns of the prompts."""
    result = run()
    columns = to_numpy(getattr(result, "sequences", result))[:, width:].T
    yield from _until_the_end(columns, ends)


def _until_the_end(columns: Any, ends: Sequence[int]) -> Generator[list[int | None], None, None]:
    """Columns of tokens, None in the place of what fills a row up after its end."""
    ended: list[bool] = []
    for column in columns:
        ended = ended or [False] * len(column)
        yield [None if over else int(token) for over, token in zip(ended, column, strict=True)]
        ended = [over or int(token) in ends for over, token in zip(ended, column, strict=True)]


class _Left(Exception):
    """Raised into a generate whose reader has gone."""


class _Columns:
    """HF's streamer protocol, read by another thread: the columns of new tokens."""

    def __init__(self) -> None:
        self.left, self._columns, self._begun = False, queue.SimpleQueue(), False

    def put(self, value: Any) -> None:
        """The prompts first, which nobody waits for, then a column at a time."""
        if self.left:
            raise _Left
        if self._begun:
            self._columns.put(to_numpy(value).reshape(-1))
        self._begun = True

    def end(self) -> None:
        """The end is what `run` returns."""

    def run(self, generate: Callable[..., Any]) -> None:
        """Generate, then let the reader know that, and how, it ended."""
        try:
            generate(streamer=self)
            self._columns.put(None)
        except BaseException as error:  # the reader's to raise
            self._columns.put(error)

    def __iter__(self) -> Generator[np.ndarray, None, None]:
        while (column := self._columns.get()) is not None:
            if isinstance(column, BaseException):
                raise column
            yield column


def _streamed_steps(
    run: Callable[..., Any], ends: Sequence[int]
) -> Generator[list[int | None], None, None]:
    """As `_steps_of`, while they are made: a thread runs the module's generate."""
    columns = _Columns()
    thread = threading.Thread(target=columns.run, args=(run,), daemon=True)
    thread.start()
    try:
        yield from _until_the_end(columns, ends)
    finally:
        columns.left = True
        thread.join(_PATIENCE)


def _named(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, as far as `function` tells."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself will say what is wrong
        return dict(kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named


def _options(generation_config: Any) -> dict[str, Any]:
    """HF's GenerationConfig or a dict as a dict; anything else is the module's own affair."""
    is_known = isinstance(generation_config, Mapping) or hasattr(generation_config, "to_dict")
    return config_dict(generation_config) if is_known else {}


def _takes_length(module: Any) -> bool:
    """True if the module's generate knows `max_new_tokens`, as HF's does."""
    if hasattr(getattr(module, "generation_config", None), "to_dict"):
        return True
    try:
        return "max_new_tokens" in inspect.signature(module.generate).parameters
    except (TypeError, ValueError):
        return False


def _shape(prompt: Any) -> tuple[int, ...]:
    """Shape of an array, or of lists as far as their first items tell."""
    if isinstance(prompt, list | tuple):
        return (len(prompt), *_shape(prompt[0])) if len(prompt) > 0 else (0,)
    return tuple(getattr(prompt, "shape", ()))


def _width(prompt: Any) -> int:
    """Tokens of a prompt [T], [B, T] or [B, T, E]; HF starts with one where there is none."""
    if isinstance(prompt, list | tuple) and any(isinstance(row, list | tuple) for row in prompt):
        return max(len(row) for row in prompt)
    shape = _shape(prompt)
    if not shape:
        return 1
    return int(shape[min(1, len(shape) - 1)])


def _is_ids(prompt: Any) -> bool:
    """False for features, which a limit on tokens does not concern: noise, sound, pictures."""
    if prompt is None:
        return True
    first = prompt
    while isinstance(first, list | tuple) and first:
        first = first[0]
    is_int = isinstance(first, int) or "int" in str(getattr(first, "dtype", ""))
    return len(_shape(prompt)) <= 2 and is_int


def _new_tokens(values: Mapping[str, Any], width: int) -> int:
    if values.get("max_new_tokens") is not None:
        return int(values["max_new_tokens"])
    if values.get("max_length") is not None:
        return max(0, int(values["max_length"]) - width)
    return DEFAULT_NEW_TOKENS
