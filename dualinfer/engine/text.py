"""Text in, text out: prompts and chats by the model's tokenizer, whole or as they come."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Unpack, overload

from ..errors import ArgumentError, UnsupportedError, a_type, shown
from ..parallel.spmd import Call, Turns
from .arguments import GenerationArguments, TextArguments, with_arguments
from .chat import Messages, encode_chat
from .options import config_dict
from .text_stream import Detokenizer
from .tokenizing import encode, tokenizer_of

DEFAULT_TEXT_TOKENS = 256  # as HF's pipelines, where nobody asks for a length

# Arguments of `generate` that calls of text do without, and why.
_OF_IDS = "the prompt is a text here. Call generate() with token ids"
_NOT_OF_TEXT = {
    "streamer": "a call of text takes none. stream_text() and stream_chat() give it as it comes",
    **dict.fromkeys(("input_ids", "inputs", "inputs_embeds", "attention_mask"), _OF_IDS),
}


class Sequences(NamedTuple):
    """Sequences under way: what each begins with, and then, step by step, each one's new token.

    A sequence that has ended has None in the steps after it.
    """

    prompts: Sequence[Sequence[int]]
    steps: Generator[Sequence[int | None], None, None]


class TextCalls:
    """Calls that every engine offers over its tokens. An engine says how it begins sequences."""

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

        A processor may be set in its place: its tokenizer and its chat template are taken.
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
        if value is not None:
            tokenizer_of(value)  # raises for what is none
        self._tokenizer = value

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
        skip_special_tokens: bool = ...,
        **arguments: Unpack[TextArguments],
    ) -> str: ...

    @overload
    def generate_text(
        self,
        prompt: str,
        generation_config: Any = ...,
        *,
        num_return_sequences: int | None,
        tokenizer: Any = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[TextArguments],
    ) -> str | list[str]: ...

    @overload
    def generate_text(
        self,
        prompt: list[str] | tuple[str, ...],
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> list[str]: ...

    @overload
    def generate_text(
        self,
        prompt: Sequence[str] | None = ...,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> Any: ...

    @with_arguments
    def generate_text(
        self,
        prompt: str | Sequence[str] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        skip_special_tokens: bool = True,
        **arguments: Unpack[GenerationArguments],
    ) -> Any:
        """The text that continues `prompt`, without the prompt; a list of texts gives a list.

        Examples:
            >>> engine.generate_text("import os", max_new_tokens=16)
            >>> engine.generate_text(["One", "Two"], do_sample=True, temperature=0.7, seed=1)

        Arguments are those of `generate`. Where none of them, nor the model, gives a length, at
        most 256 new tokens. `tokenizer` is the engine's own where None; it may be a processor.
        Special tokens are left out of the text unless `skip_special_tokens` is False. With
        `num_return_sequences` above 1 a list, each prompt's texts next to one another. Where
        several processes share the model, those that pass None take rank 0's prompt.
        """
        how = _How(_texts, generation_config, tokenizer, skip_special_tokens)
        return self._whole(prompt, how, dict(arguments))

    @overload
    def stream_text(
        self,
        prompt: str,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[TextArguments],
    ) -> Iterator[str]: ...

    @overload
    def stream_text(
        self,
        prompt: Sequence[str] | None = ...,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]: ...

    @with_arguments
    def stream_text(
        self,
        prompt: str | Sequence[str] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        skip_special_tokens: bool = True,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]:
        """An iterator of the text of `generate_text` as it comes, a piece for each token.

        Examples:
            >>> for piece in engine.stream_text("import os", max_new_tokens=16):
            ...     print(piece, end="", flush=True)

        Joined, the pieces are that text. A piece is empty while the next tokens may still change
        what it would say, as where a character is unfinished; several sequences give lists of
        pieces. Arguments are checked at once, the work starts with the first `next`, and leaving
        the loop or `close()` on the iterator frees what it holds.
        """
        how = _How(_texts, generation_config, tokenizer, skip_special_tokens)
        return self._pieces(prompt, how, dict(arguments))

    @overload
    def chat(
        self,
        messages: Messages,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        template_options: Mapping[str, Any] | None = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[TextArguments],
    ) -> str: ...

    @overload
    def chat(
        self,
        messages: Messages,
        generation_config: Any = ...,
        *,
        num_return_sequences: int | None,
        tokenizer: Any = ...,
        template_options: Mapping[str, Any] | None = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[TextArguments],
    ) -> str | list[str]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        template_options: Mapping[str, Any] | None = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> list[str]: ...

    @overload
    def chat(
        self,
        messages: None = ...,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        template_options: Mapping[str, Any] | None = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> Any: ...

    @with_arguments
    def chat(
        self,
        messages: Messages | Sequence[Messages] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        template_options: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        **arguments: Unpack[GenerationArguments],
    ) -> Any:
        """The answer to a chat, by the tokenizer's chat template; a list of chats gives a list.

        Examples:
            >>> engine.chat([{"role": "user", "content": "Name three rivers."}], max_new_tokens=64)

        `messages` are dicts with `role` and `content`, as in HF, a str or a list of parts that are
        texts; what the template would lose of them is refused. `template_options` go to
        `apply_chat_template`: tools, enable_thinking and the like, and `chat_template`, which may
        be the path of a file; those that the template does not read are refused. The rest as in
        `generate_text`; an answer ends at the tokenizer's EOS, too.
        """
        chats = _Chats(template_options)
        how = _How(chats, generation_config, tokenizer, skip_special_tokens)
        return self._whole(messages, how, dict(arguments))

    @overload
    def stream_chat(
        self,
        messages: Messages,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        template_options: Mapping[str, Any] | None = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[TextArguments],
    ) -> Iterator[str]: ...

    @overload
    def stream_chat(
        self,
        messages: Messages | Sequence[Messages] | None = ...,
        generation_config: Any = ...,
        *,
        tokenizer: Any = ...,
        template_options: Mapping[str, Any] | None = ...,
        skip_special_tokens: bool = ...,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]: ...

    @with_arguments
    def stream_chat(
        self,
        messages: Messages | Sequence[Messages] | None = None,
        generation_config: Any = None,
        *,
        tokenizer: Any = None,
        template_options: Mapping[str, Any] | None = None,
        skip_special_tokens: bool = True,
        **arguments: Unpack[GenerationArguments],
    ) -> Iterator[Any]:
        """The answer of `chat` as it comes, piece by piece, as `stream_text` gives it.

        Examples:
            >>> for piece in engine.stream_chat([{"role": "user", "content": "Hello"}]):
            ...     print(piece, end="", flush=True)
        """
        chats = _Chats(template_options)
        how = _How(chats, generation_config, tokenizer, skip_special_tokens)
        return self._pieces(messages, how, dict(arguments))

    def _started(
        self, prompts: Any, how: "_How", arguments: dict[str, Any], whole: bool
    ) -> tuple[Detokenizer, Sequences]:
        """The decoder of text, and the sequences that continue `prompts`; None: rank 0's."""
        for name, why in _NOT_OF_TEXT.items():
            if arguments.get(name) is not None:
                raise ArgumentError(f"{name}: {why}.")
        if not isinstance(how.skips, bool):
            raise ArgumentError(f"skip_special_tokens={shown(how.skips)}; expected True or False.")
        with self._turns.together("The prompts"):
            given = self.tokenizer if how.tokenizer is None else how.tokenizer
            tokenizer = tokenizer_of(given)
            rows = None if prompts is None else how.encode(given, prompts)
        with self._call("generate_text()", {"prompts": rows}) as call:
            rows = call.inputs["prompts"]
        if rows is None:
            raise ArgumentError("The prompt is missing; pass a text, or the messages of a chat.")
        if isinstance(how.encode, _Chats):
            arguments = self._ending(how.config, tokenizer, arguments)
        begun = self._begin(rows, how.config, tokenizer, arguments, whole)
        cleans = arguments.get("grammar") is None
        return Detokenizer(tokenizer, how.skips, cleans=cleans), begun

    def _ending(self, config: Any, tokenizer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the tokenizer's EOS beside the model's, unless the caller names one.

        A chat's turn ends with a token of the template's, which many models' configs do not name.
        """
        asked = config_dict(config).get("eos_token_id") is not None or "eos_token_id" in arguments
        if asked or getattr(tokenizer, "eos_token_id", None) is None:
            return arguments
        return {**arguments, "eos_token_id": chat_endings(self.generation_config, tokenizer)}

    def _whole(self, prompts: Any, how: "_How", arguments: dict[str, Any]) -> Any:
        detokenizer, begun = self._started(prompts, how, arguments, whole=True)
        tokens: list[list[int]] = [[] for _ in begun.prompts]
        with closing(begun.steps) as steps:
            for step in steps:
                for row, token in zip(tokens, step, strict=True):
                    if token is not None:
                        row.append(token)
        texts = []
        for prompt, row in zip(begun.prompts, tokens, strict=True):
            stream = detokenizer.stream(prompt)
            texts.append(stream.push(*row) + stream.finish())
        several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
        if several and isinstance(how.encode, _Chats):
            several = not _is_chat(prompts)
        return texts if several or len(texts) > 1 else texts[0]

    def _pieces(self, prompts: Any, how: "_How", arguments: dict[str, Any]) -> Iterator[Any]:
        detokenizer, begun = self._started(prompts, how, arguments, whole=False)
        return _as_they_come(detokenizer, begun)


def endings(config: Any) -> list[int]:
    """The ids that end a text by a model's generation config."""
    own = config_dict(config).get("eos_token_id")
    return list(own) if isinstance(own, list | tuple) else [] if own is None else [own]


def chat_endings(config: Any, tokenizer: Any) -> list[int]:
    """The ids that end a turn of a chat: the model's, and the tokenizer's."""
    turn = getattr(tokenizer, "eos_token_id", None)
    return list(dict.fromkeys([*endings(config), *([] if turn is None else [turn])]))


class _How(NamedTuple):
    """The means of a call from prompts to text: what makes ids of them, and what text of ids."""

    encode: Callable[[Any, Any], list[list[int]]]
    config: Any
    tokenizer: Any
    skips: Any


def _as_they_come(detokenizer: Detokenizer, begun: Sequences) -> Iterator[Any]:
    streams = [detokenizer.stream(prompt) for prompt in begun.prompts]
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


def _is_chat(messages: Any) -> bool:
    """True for one chat: dicts with a role."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    return is_list and all(isinstance(m, Mapping) and "role" in m for m in messages)
