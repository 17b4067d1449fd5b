"""The bodies of requests: which fields are taken, what they may be, and why others are refused."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from ...errors import (
    ArgumentError,
    ClosedError,
    DualinferError,
    LengthError,
    OutOfMemoryError,
    UnsupportedError,
    shortened,
    shown,
)

_log = logging.getLogger("dualinfer.serve")
MOST_SEQUENCES = 128  # of one request
_MOST_TEXTS = 2048  # to embed at a time; OpenAI's number
_MOST_IDS = 2**20  # far beyond what any model reads
_NO_TOOLS = "Tools are for /v1/chat/completions."
_NOT_SERVED = "It is not served. Leave it out."

# Fields that are known and not served: values that ask for nothing, and why others are refused.
# None asks for nothing in every field.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), "Use tools, which took its place."),
    "function_call": (("none", "auto"), "Use tool_choice, which took its place."),
    "modalities": ((["text"],), "Only text is served."),
    "suffix": (("",), "The model continues a prompt; it fills no gaps. Leave it out."),
    "best_of": ((1,), "Every sequence is returned. Use n."),
}


class RequestError(Exception):
    """A request that is refused: the HTTP status, and what OpenAI's error object says."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API gives it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "authentication_error" if self.status == 401 else kind
        param = None if self.param is None else _writable(self.param)
        error = {"message": _writable(self.message), "type": kind, "param": param}
        error["code"] = self.code
        return {"error": error}


def _writable(text: str) -> str:
    """A text of the client's that UTF-8 can write."""
    return text.encode("utf-8", "backslashreplace").decode()


class _Body(BaseModel):
    """The fields of one route. Values have the type that JSON gives them; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Says what a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_Share = Annotated[float, Field(ge=0, le=1)]
_Likely = Annotated[int, Field(ge=0, le=20)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_Stop = Annotated[str, Field(min_length=1, max_length=1000)]
# One error of a list is told, and no more are made: a body may have millions of elements.
_Ids = Annotated[list[_Id], Field(fail_fast=True, max_length=_MOST_IDS)]
_Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]


_Choices = Annotated[list[str], Field(fail_fast=True)]
_Schema = dict[str, Any] | str
_GUIDED = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}  # vLLM's names


class JsonSchema(_Body):
    """OpenAI's wrapping of a schema; it is kept to whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """Says what the text must be, as OpenAI's API does."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> dict[str, Any] | None:
        """As `generate` takes it."""
        if self.type != "json_schema" and self.json_schema is not None:
            raise RequestError(
                f"response_format has the type {self.type}, and json_schema belongs to the type "
                "json_schema. Send that type, or leave json_schema out.",
                "response_format",
            )
        if self.json_schema is None:
            if self.type == "json_schema":
                raise RequestError(
                    "response_format.json_schema is missing; the type json_schema needs it.",
                    "response_format",
                )
            return {"json": True} if self.type == "json_object" else None
        if self.json_schema.schema_ is None:
            raise RequestError("response_format.json_schema.schema is missing.", "response_format")
        return {"json": self.json_schema.schema_}


class StructuredOutputs(_Body):
    """Says what the text must be, as vLLM's API does; `grammar` is Lark's notation or GBNF's."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None
    json_object: bool | None = None

    @property
    def grammar(self) -> dict[str, Any]:
        """As `generate` takes it."""
        given = {
            "json": self.json_ if not self.json_object else True,
            "regex": self.regex,
            "choice": self.choice,
            "lark": self.grammar_,
        }
        asked = {key: value for key, value in given.items() if value is not None}
        if len(asked) != 1 or (self.json_object and self.json_ is not None):
            raise RequestError(
                "structured_outputs: expected one of json, regex, choice, grammar, json_object.",
                "structured_outputs",
            )
        return asked


class Generation(_Body):
    """The fields that routes of new text share. None leaves a field to its default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=64, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    stop_token_ids: Annotated[list[_Id], Field(max_length=1024, fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: _Likely | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    # Read and ignored: they are about OpenAI's own bookkeeping.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    DEFAULT_LENGTH: ClassVar[int]

    @property
    def stops(self) -> list[str]:
        """The texts that end a sequence."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def asked_length(self) -> int | None:
        """The number of new tokens that were asked for."""
        return self.max_tokens

    @property
    def grammar(self) -> tuple[str, dict[str, Any]] | None:
        """The field that says what the new text must be, and that as `generate` takes it."""
        asked: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (made := self.response_format.grammar):
            asked["response_format"] = made
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs.grammar
        for kind, key in _GUIDED.items():
            if (value := getattr(self, f"guided_{kind}")) is not None:
                asked[f"guided_{kind}"] = {key: value}
        if len(asked) > 1:
            first, second = [*asked][:2]
            raise RequestError(
                f"{second}: {first} says already what the text must be. Send one of both.", second
            )
        return next(iter(asked.items()), None)

    @property
    def told(self) -> int | None:
        """As `likely`, of the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def likely(self) -> int | None:
        """Of how many likeliest tokens each step is to tell; None for no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` that say how tokens are chosen.

        Those of the model's own generation config do not count.
        """
        bias = None
        if self.logit_bias:
            bias = {_id(name): value for name, value in self.logit_bias.items()}
        temperature = 1.0 if self.temperature is None else self.temperature
        chosen: dict[str, Any] = {
            "do_sample": temperature > 0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "presence_penalty": self.presence_penalty or None,
            "frequency_penalty": self.frequency_penalty or None,
            "logit_bias": bias,
            "min_new_tokens": self.min_tokens or None,
            "logprobs": self.likely,
        }
        if (self.priority or 0) < 0:  # as in vLLM, where lower ones are earlier
            chosen["priority"] = "high"
        if temperature > 0:
            chosen |= {
                "temperature": temperature,
                "top_k": max(0, self.top_k or 0),
                "top_p": self.top_p or 1.0,
                "min_p": self.min_p or None,
                "seed": None if self.seed is None else self.seed % 2**64,
            }
        return chosen


def _id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 11):
        raise RequestError(
            f"logit_bias has the key {shown(name)}; expected a token id.", "logit_bias"
        )
    return int(name)


class Function(_Body):
    """A function that the model may call; with `strict` its arguments follow the schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class _Name(_Body):
    name: str


class NamedTool(_Body):
    """The function that must be called."""

    type: Literal["function"]
    function: _Name


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    messages: _Messages
    logprobs: bool | None = None
    top_logprobs: _Likely | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    DEFAULT_LENGTH: ClassVar[int] = 1024

    @property
    def asked_length(self) -> int | None:
        """The number of new tokens that were asked for, by the new name or the old."""
        new = self.max_completion_tokens
        return self.max_tokens if new is None else new

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        tools, choice = self.tools or [], self.tool_choice
        if choice in ("required",) and not tools:
            raise RequestError("tool_choice is required, and there are no tools.", "tool_choice")
        if len({tool.function.name for tool in tools}) < len(tools):
            raise RequestError("tools: two have the same name.", "tools")
        if not isinstance(choice, NamedTool):
            return [] if choice == "none" else tools
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise RequestError(
                f"tool_choice names {shown(choice.function.name)}, which is not in tools.",
                "tool_choice",
            )
        return named

    @property
    def must_call(self) -> bool:
        """True where the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def calls_one(self) -> bool:
        """True where it may be one call at most."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    @property
    def template_options(self) -> dict[str, Any]:
        """The options that the chat template is told."""
        made = dict(self.chat_template_kwargs or {})
        if "chat_template" in made or "tools" in made:
            raise RequestError(
                "chat_template_kwargs: chat_template is the server's, a client's own is not run; "
                "tools have a field of their own.",
                "chat_template_kwargs",
            )
        for name in ("reasoning_effort", "add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        if made.get("continue_final_message") is False:
            del made["continue_final_message"]
        if tools := self.tools if self.tool_choice != "none" else None:
            made["tools"] = [tool.shown() for tool in tools]
        return made

    @property
    def likely(self) -> int | None:
        """As two fields ask for it."""
        if not self.logprobs and self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind_of_prompt(given: Any) -> str:
    """By the first element, so that no other kind is tried."""
    first = given[0] if isinstance(given, list) and given else given
    kinds = {str: "texts", list: "prompts"}
    return "text" if isinstance(given, str) else kinds.get(type(first), "ids")


_Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(max_length=MOST_SEQUENCES, fail_fast=True), Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[_Ids], Field(max_length=MOST_SEQUENCES, fail_fast=True), Tag("prompts")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    prompt: _Prompt
    echo: bool | None = None
    logprobs: _Likely | None = None

    DEFAULT_LENGTH: ClassVar[int] = 16  # OpenAI's

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text, or ids."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)

    @property
    def likely(self) -> int | None:
        """As the field says."""
        return self.logprobs

    @property
    def told(self) -> int | None:
        """With echo the prompt's are told like those of new tokens."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((x for x in asked if x is not None), default=None)


class TokenizeRequest(_Body):
    """The body of /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: _Ids


_IdsOfText = Annotated[_Ids, Field(min_length=1)]
_Texts = Field(min_length=1, max_length=_MOST_TEXTS, fail_fast=True)
_Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], _Texts, Tag("texts")]
    | Annotated[_IdsOfText, Tag("ids")]
    | Annotated[list[_IdsOfText], _Texts, Tag("prompts")],
    Discriminator(_kind_of_prompt),
]


class EmbeddingRequest(_Body):
    """The body of /v1/embeddings."""

    model: str
    input: _Input
    encoding_format: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Any = None

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The texts to embed, or their ids."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


_B = TypeVar("_B", bound=_Body)


def read(body: bytes, kind: type[_B]) -> _B:
    """The request in a body; RequestError, which names the field, where it cannot be honoured."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is no JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise RequestError("The body is no JSON object.")
    kept = {name: value for name, value in fields.items() if _is_served(name, value, kind)}
    for name in ("response_format", "structured_outputs"):  # nulls are left out
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if value is not None}
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False), kept) from error
    except RecursionError as error:
        raise RequestError("The body is nested too deeply.") from error


def _refusal(errors: Sequence[Any], body: Mapping[str, Any]) -> RequestError:
    """The fault of the first wrong field: one of those that its kinds of values find.

    The kind that reads deepest into the value is what was meant; of those that read it alike one
    that takes its type.
    """
    name = str(errors[0]["loc"][0])
    found = [(_place(e, body), e) for e in errors if str(e["loc"][0]) == name]
    place = max((place for place, _ in found), key=len)
    here = [e for at, e in found if at == place]
    here = [e for e in here if not e["type"].endswith(("_type", "literal_error"))] or here
    where, first = shortened(".".join(place)), here[0]
    if first["type"] == "missing":
        return RequestError(f"{where} is missing.", name)
    if first["type"] == "extra_forbidden":
        return RequestError(f"{where}: there is no such field. Leave it out.", name)
    wanted = ", or ".join(dict.fromkeys(map(_wanted, here)))
    if place in (["prompt"], ["input"]) and first["type"].endswith("_type"):
        wanted = "a text, a list of texts, a list of token ids, or a list of such lists"
    return RequestError(f"{where} is {shown(first['input'])}; expected {wanted}.", name)


def _place(error: Mapping[str, Any], body: Any) -> list[str]:
    """Where in the body an error is, without pydantic's names of kinds of values."""
    place, loc = [], error["loc"]
    for i, part in enumerate(loc):
        is_missing = error["type"] == "missing" and i == len(loc) - 1
        if isinstance(body, dict) and (part in body or is_missing):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        place.append(str(part))
    return place


_WANTED = {
    "string_type": "a text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "{min_length} or more characters",
    "string_too_long": "at most {max_length:,} characters",
    "too_short": "{min_length} or more elements",
    "too_long": "at most {max_length:,} elements",
    "string_pattern_mismatch": "a text that matches {pattern}",
}


def _wanted(error: Mapping[str, Any]) -> str:
    """What is taken where pydantic found an error."""
    known = _WANTED.get(error["type"])
    return error["msg"] if known is None else known.format(**error.get("ctx", {}))


def _is_served(name: str, value: Any, kind: type[_Body]) -> bool:
    """Whether the route takes a field; RequestError for one that asks for what it does not do."""
    if name in kind.model_fields:
        return True
    neutral, why = _REFUSED.get(name, ((), _NOT_SERVED))
    if value is None or any(type(value) is type(x) and value == x for x in neutral):
        return False
    raise RequestError(f"{shortened_name(name)}: {why}", name)


def shortened_name(name: str) -> str:
    """A field's name for a message."""
    return name if len(name) <= 60 else f"{name[:60]}..."


def content_of(messages: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages without the keys that clients send as null."""
    return [
        {
            key: _calls(value) if key == "tool_calls" else value
            for key, value in message.items()
            if (value is not None or key == "content") and not (key == "tool_calls" and not value)
        }
        for message in messages
    ]


def _calls(given: Any) -> Any:
    """Calls of an assistant's message, their arguments as templates take them: no text, an object.

    Clients send the text that they got.
    """
    made = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                "messages: tool_calls are objects with a function, which has a name and arguments.",
                "messages",
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def as_refused(error: Exception) -> RequestError:
    """An error as a client is told of it."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, LengthError):
        return RequestError(str(error), code="context_length_exceeded")
    if isinstance(error, ArgumentError | UnsupportedError):
        return RequestError(str(error))
    if isinstance(error, OutOfMemoryError | ClosedError):
        return RequestError(str(error), status=503)
    _log.error("A request failed.", exc_info=error)
    if isinstance(error, DualinferError):
        return RequestError(str(error), status=500)
    return RequestError("The server failed; its log says how.", status=500)
