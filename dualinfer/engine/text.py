"""Text in, text out: prompts and chats by the model's tokenizer, whole or as they come."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Unpack, overload

from ..errors import ArgumentError, UnsupportedError, a_type, shown
from ..parallel.spmd import Call, Turns
from .arguments import GenerationArguments, with_arguments
from .options import config_dict

DEFAULT_TEXT_TOKENS = 256  # as HF's pipelines, where nobody asks for a length
_CONTEXT = 8  # tokens decoded before the new ones, since a tokenizer may join words by a blank
_ROLES = ("system", "developer", "user", "assistant", "tool")

# Arguments of `generate` that calls of text do without, and why.
_OF_IDS = "the prompt is a text here. Call generate() with token ids"
_NOT_OF_TEXT = {
    "streamer": "a call of text takes none. stream_text() and stream_chat() give it as it comes",
    **dict.fromkeys(("input_ids", "inputs", "inputs_embeds", "attention_mask"), _OF_IDS),
}

Messages = Sequence[Mapping[str, Any]]


class TextStream:
    """Text of a growing sequence, handed out in whole characters: a token may be part of one."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._read = len(self._ids)
        self._start = max(0, self._read - _CONTEXT)

    def push(self, *tokens: int) -> str:
        """The text that `tokens` complete; empty while a character is unfinished."""
        self._ids += map(int, tokens)
        return self._take(finished=False)

    def finish(self) -> str:
        """What is left, with U+FFFD in place of a character that never ended."""
        return self._take(finished=True)

    def _take(self, finished: bool) -> str:
        old = self._decode(self._ids[self._start : self._read])
        new = self._decode(self._ids[self._start :])
        if new.endswith("\ufffd") and not finished:
            return ""
        self._read = len(self._ids)
        self._start = max(0, self._read - _CONTEXT)
        return new[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class Sequences(NamedTuple):
    """Sequences under way: what each begins with, and then, step by step, each one's new token.

    A sequence that has ended has None in the steps after it.
    """

    prompts: Sequence[Sequence[int]]
    steps: Generator[Sequence[int | None], None, None]


class TextCalls:
    """What every engine offers over its tokens. An engine says how it begins sequences."""

    device: Any
    runner: Any
    generation_config: Any
    _about: Any
    _turns: Turns
    _call: Callable[..., Call]
    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The model's HF tokenizer, loaded when it is first asked for; it may be set.

        It is looked for in the checkpoint's folder, and for a live module in the folder that it was
        loaded from. Raises CheckpointError or UnsupportedError where there is none.
        """
        if self._tokenizer is None:
            if self._about.load_tokenizer is None:
                raise UnsupportedError(
                    "This engine knows no tokenizer: its model was not loaded from a folder on "
                    "this machine. Pass tokenizer=AutoTokenizer.from_pretrained(...), or set "
                    "engine.tokenizer once."
                )
            self._tokenizer = self._about.load_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = None if value is None else _checked(value)

    def _begin(
        self,
        rows: list[list[int]],
        config: Any,
        tokenizer: Any,
        arguments: dict[str, Any],
        whole: bool,
    ) -> Sequences:
        """Sequences that continue `rows`; checked at once, run with the first step.

        `whole` says that nobody waits for single steps. Where nobody asks for a length, at most
        DEFAULT_TEXT_TOKENS, less where the limit comes before.
        """
        raise NotImplementedError

    @overload
    def generate_text(
        self,
        prompt: str,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> str: ...

    @overload
    def generate_text(
        self,
        prompt: Sequence[str] | None = ...,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> Any: ...

    @with_arguments
    def generate_text(
        self,
        prompt: str | Sequence[str] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Any:
        """The text that continues `prompt`, without the prompt; a list of texts gives a list.

        Arguments are those of `generate`. Where none of them, nor the model, gives a length, at
        most 256 new tokens. `tokenizer` is the engine's own where None. With
        `num_return_sequences` above 1 a list, each prompt's texts next to one another. Where
        several processes share the model, those that pass None take rank 0's prompt.
        """
        return self._whole(prompt, _texts, generation_config, tokenizer, dict(arguments))

    @with_arguments
    def stream_text(
        self,
        prompt: str | Sequence[str] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]:
        """An iterator of the text of `generate_text` as it comes, a piece for each token.

        A piece is empty while a character is unfinished; several sequences give lists of pieces.
        Arguments are checked at once, the work starts with the first `next`, and leaving the loop
        or `close()` on the iterator frees what it holds.
        """
        return self._pieces(prompt, _texts, generation_config, tokenizer, dict(arguments))

    @with_arguments
    def chat(
        self,
        messages: Messages | Sequence[Messages] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        template_options: Mapping[str, Any] | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Any:
        """The answer to a chat, by the tokenizer's chat template; a list of chats gives a list.

        `messages` are dicts with `role` and `content`, as in HF; `template_options` go to
        `apply_chat_template`: tools, enable_thinking and the like. The rest as in `generate_text`;
        an answer ends at the tokenizer's EOS, too.
        """
        how = _Chats(template_options)
        return self._whole(messages, how, generation_config, tokenizer, dict(arguments))

    @with_arguments
    def stream_chat(
        self,
        messages: Messages | Sequence[Messages] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        template_options: Mapping[str, Any] | None = None,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]:
        """The answer of `chat` as it comes, piece by piece, as `stream_text` gives it."""
        how = _Chats(template_options)
        return self._pieces(messages, how, generation_config, tokenizer, dict(arguments))

    def _started(
        self,
        prompts: Any,
        encode_all: Callable[[Any, Any], list[list[int]]],
        config: Any,
        given: Any,
        arguments: dict[str, Any],
        whole: bool,
    ) -> tuple[Any, Sequences]:
        """The tokenizer, and the sequences that continue `prompts`; None takes rank 0's."""
        for name, why in _NOT_OF_TEXT.items():
            if arguments.get(name) is not None:
                raise ArgumentError(f"{name}: {why}.")
        with self._turns.together("The prompts"):
            tokenizer = self.tokenizer if given is None else _checked(given)
            rows = None if prompts is None else encode_all(tokenizer, prompts)
        with self._call("generate_text()", {"prompts": rows}) as call:
            rows = call.inputs["prompts"]
        if rows is None:
            raise ArgumentError("The prompt is missing; pass a text, or the messages of a chat.")
        if isinstance(encode_all, _Chats):
            arguments = self._ending(config, tokenizer, arguments)
        return tokenizer, self._begin(rows, config, tokenizer, arguments, whole)

    def _ending(self, config: Any, tokenizer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the tokenizer's EOS beside the model's, unless the caller names one.

        A chat's turn ends with a token of the template's, which many models' configs do not name.
        """
        turn = getattr(tokenizer, "eos_token_id", None)
        asked = config_dict(config).get("eos_token_id") is not None or "eos_token_id" in arguments
        if turn is None or asked:
            return arguments
        own = config_dict(self.generation_config).get("eos_token_id")
        known = own if isinstance(own, list | tuple) else [] if own is None else [own]
        return {**arguments, "eos_token_id": list(dict.fromkeys([*known, turn]))}

    def _whole(
        self, prompts: Any, encode_all: Any, config: Any, given: Any, arguments: dict[str, Any]
    ) -> Any:
        tokenizer, begun = self._started(prompts, encode_all, config, given, arguments, whole=True)
        tokens: list[list[int]] = [[] for _ in begun.prompts]
        with closing(begun.steps) as steps:
            for step in steps:
                for row, token in zip(tokens, step, strict=True):
                    if token is not None:
                        row.append(token)
        texts = []
        for prompt, row in zip(begun.prompts, tokens, strict=True):
            stream = TextStream(tokenizer, prompt)
            texts.append(stream.push(*row) + stream.finish())
        several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
        if several and isinstance(encode_all, _Chats):
            several = not _is_chat(prompts)
        return texts if several or len(texts) > 1 else texts[0]

    def _pieces(
        self, prompts: Any, encode_all: Any, config: Any, given: Any, arguments: dict[str, Any]
    ) -> Iterator[Any]:
        tokenizer, begun = self._started(prompts, encode_all, config, given, arguments, whole=False)
        return _as_they_come(tokenizer, begun)


def _as_they_come(tokenizer: Any, begun: Sequences) -> Iterator[Any]:
    streams = [TextStream(tokenizer, prompt) for prompt in begun.prompts]
    one = len(streams) == 1
    with closing(begun.steps) as steps:
        for step in steps:
            pairs = zip(streams, step, strict=True)
            pieces = ["" if token is None else stream.push(token) for stream, token in pairs]
            yield pieces[0] if one else pieces
    rest = [stream.finish() for stream in streams]
    if any(rest):
        yield rest[0] if one else rest


def _texts(tokenizer: Any, prompts: Any) -> list[list[int]]:
    """The ids of one text or of several."""
    if isinstance(prompts, str):
        return [encode(tokenizer, prompts)]
    is_several = isinstance(prompts, Sequence) and not isinstance(prompts, bytes | Mapping)
    if not is_several or not prompts:
        raise ArgumentError(f"prompt is {shown(prompts)}; expected a str, or a list of several.")
    return [encode(tokenizer, text) for text in prompts]


class _Chats:
    """The ids of one chat or of several, by the chat template with these options."""

    def __init__(self, options: Mapping[str, Any] | None):
        if options is not None and not isinstance(options, Mapping):
            raise ArgumentError(
                f"template_options is {a_type(options)}; expected a dict of what "
                "apply_chat_template takes."
            )
        self._options = options

    def __call__(self, tokenizer: Any, messages: Any) -> list[list[int]]:
        chats = [messages] if _is_chat(messages) else messages
        if not isinstance(chats, Sequence) or not chats or not all(map(_is_chat, chats)):
            raise ArgumentError(
                f"messages is {shown(messages)}; expected dicts such as "
                '{"role": "user", "content": "Hello"}, or a list of lists of them.'
            )
        return [encode_chat(tokenizer, chat, self._options) for chat in chats]


def encode(tokenizer: Any, text: Any) -> list[int]:
    """Token ids of a prompt, with what the tokenizer puts around it; ArgumentError for none."""
    if not isinstance(text, str):
        raise ArgumentError(f"A prompt is {a_type(text)}; expected a str.")
    ids = ids_of(tokenizer, text)
    if not ids:
        raise ArgumentError("The prompt is empty; there is nothing to continue.")
    return ids


def ids_of(tokenizer: Any, text: str, most: int | None = None, name: str = "prompt") -> list[int]:
    """Token ids of a text, at most so many, with what the tokenizer puts around it; maybe none."""
    try:
        cut = {} if most is None else {"truncation": True, "max_length": most}
        return list(tokenizer(text, **cut)["input_ids"])
    except Exception as error:  # tokenizers raises many kinds
        why = f"The tokenizer does not take the {name} {shown(text)}: {error}"
        if any("\ud800" <= char <= "\udfff" for char in text):
            why = f"The {name} {shown(text)} was read from bytes that are no UTF-8. Pass text."
        raise ArgumentError(why) from error


def encode_chat(
    tokenizer: Any, messages: Messages, options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat up to where the answer begins.

    Raises ArgumentError without a chat template, and for messages that are none.
    """
    template = (options or {}).get("chat_template") or getattr(tokenizer, "chat_template", None)
    if not template:
        raise ArgumentError(
            "The tokenizer has no chat template, as those of base models have none. Continue a "
            "text with generate_text() instead, or set tokenizer.chat_template."
        )
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", str(template))
    settings: dict[str, Any] = {"add_generation_prompt": True, **(options or {})}
    try:
        text = tokenizer.apply_chat_template(list(messages), **(settings | {"tokenize": False}))
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # jinja and the template itself raise many kinds
        raise ArgumentError(f"The chat template does not take these messages: {error}") from error
    if not ids:
        raise ArgumentError("The chat template makes no text of these messages.")
    return ids


def _check_message(message: Mapping[str, Any], name: str, template: str) -> None:
    """Raise ArgumentError for what a template would pass over or print as Python shows it.

    A role or a form of content that is not usual must be one that the template reads.
    """
    role, content = message["role"], message.get("content")
    known = isinstance(role, str) and (
        role in _ROLES or f"'{role}'" in template or f'"{role}"' in template
    )
    if not known:
        raise ArgumentError(
            f"{name} has the role {shown(role)}, which the chat template does not read. Usual are "
            f"{', '.join(_ROLES)}."
        )
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, Mapping) and "content is mapping" in template:  # what a tool gave
        return
    if content is None:
        raise ArgumentError(f"{name}, the {role}'s, has no content. Give it a text as content.")
    parts = content if isinstance(content, list | tuple) and "type" in template else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if isinstance(content, Mapping) or not all(map(_is_text, texts)):
        raise ArgumentError(
            f"{name}, the {role}'s, has content that is no text: {shown(content)}. A str is "
            "expected."
        )


def _is_text(value: Any) -> bool:
    """True for a str that is Unicode throughout; half a surrogate pair is none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_chat(messages: Any) -> bool:
    """True for one chat: dicts with a role."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    return is_list and all(isinstance(m, Mapping) and "role" in m for m in messages)


def _checked(tokenizer: Any) -> Any:
    if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ArgumentError(
            f"tokenizer is {a_type(tokenizer)}; expected a HF tokenizer, such as "
            "AutoTokenizer.from_pretrained(...) gives."
        )
    return tokenizer
