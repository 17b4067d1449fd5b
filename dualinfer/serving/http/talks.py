"""Rules to read the answers of one chat template, and what a request asks of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...engine.chat import find_template
from ...engine.tokenizing import tokenizer_of
from .call_grammars import calls_grammar, style_of, thoughts_grammar
from .calls import CHANNELS, MARKS, THINK, Reply
from .channels import ChannelReply, final_grammar
from .protocol import ChatRequest, RequestError, Tool

NONE = "none"  # a parser that is switched off
THOUGHTS = "think"  # the parser of `<think>`
_LAST = 8  # tokens at the end of a prompt, in which thoughts may be opened


class Talk(NamedTuple):
    """The format of calls, if one is known, whether thoughts are marked, and what else differs."""

    tokenizer: Any
    style: str | None
    thinks: bool
    has_args: bool  # Mistral's template writes a name before its arguments
    has_channels: bool  # all of an answer stands in channels, whether or not calls are read

    @classmethod
    def of_template(
        cls, given: Any, options: Mapping[str, Any], calls: str | None, thoughts: str | None
    ) -> "Talk":
        """By the template's text, except where `calls` or `thoughts` name a parser."""
        source = find_template(given, options) or ""
        own = style_of(source)
        style = own if calls is None else None if calls == NONE else calls
        thinks = THINK[1] in source if thoughts is None else thoughts == THOUGHTS
        has_channels = CHANNELS in (own, style)
        if has_channels:
            thinks = thoughts != NONE
        return cls(tokenizer_of(given), style, thinks, "[ARGS]" in source, has_channels)

    def of(self, ids: Sequence[int], body: ChatRequest, tools: Sequence[Tool]) -> "TalkOf":
        """With the prompt, and the tools that may be called."""
        tail = self.tokenizer.decode(list(ids[-_LAST:]), skip_special_tokens=False)
        opened = self.thinks and not self.has_channels and tail.rstrip().endswith(THINK[0])
        return TalkOf(self, opened, body, tools)


class TalkOf(NamedTuple):
    """The rules by which the answers of one request are read."""

    talk: Talk
    opened: bool
    body: ChatRequest
    tools: Sequence[Tool]

    @property
    def reads(self) -> bool:
        """True if the text may have calls or thoughts."""
        return bool(self.tools) or self.talk.thinks or self.talk.has_channels

    def reply(self) -> Reply:
        """A reader of one answer."""
        names = {tool.function.name: tool.function.parameters for tool in self.tools}
        if self.talk.has_channels:
            return ChannelReply(names, self.talk.thinks)
        style = self.talk.style if self.tools else None
        how = {"one": self.body.calls_one, "must": bool(self.tools) and self.body.must_call}
        return Reply(style, names, self.talk.thinks, self.opened, **how)

    @property
    def silent(self) -> list[int]:
        """Special tokens that are no text: all but the marks that are read."""
        style = self.talk.style if self.tools else None
        style = CHANNELS if self.talk.has_channels else style
        marks = {*(MARKS[style] if style else ()), *(THINK if self.talk.thinks else ())}
        added = self.talk.tokenizer.added_tokens_decoder
        return [x for x, token in added.items() if token.special and str(token) not in marks]

    def grammar(self, asked: tuple[str, dict[str, Any]] | None) -> tuple[str, Any] | None:
        """The field that says what the answer must be, and that; `asked` is the request's own."""
        made, name = asked[1] if asked else None, asked[0] if asked else ""
        is_strict = any(tool.function.strict for tool in self.tools)
        if self.tools and (self.body.must_call or is_strict or made is not None):
            must = self.body.must_call or made is not None
            calls = {"lark": self._calls(must)}
            if made is not None and not self.body.must_call:
                if self.talk.has_channels:
                    raise RequestError(
                        f"{name}: an answer in channels cannot be held to a call or a format. "
                        "Leave tools out, or make a call certain by tool_choice.",
                        name,
                    )
                made = {"any": [calls, made]}
            else:
                made, name = calls, "tools"
        if made is None:
            return None
        if self.talk.has_channels:
            if name != "tools":
                made = {**made, "prefix": final_grammar(self._token)}
        elif self.talk.thinks:
            made = {**made, "prefix": thoughts_grammar(self.opened)}
        return name or "tools", made

    def _calls(self, must: bool) -> str:
        """A grammar of calls."""
        style = self.talk.style
        if style is None:
            raise RequestError("tools: no format of calls is known.", "tools")
        tools = [tool.function.model_dump(exclude_none=True) for tool in self.tools]
        how = {"one": self.body.calls_one, "has_args": self.talk.has_args}
        try:
            return calls_grammar(style, tools, must=must, token=self._token, **how)
        except ValueError as error:
            raise RequestError(f"tools: {error}", "tools") from error

    def _token(self, mark: str) -> str:
        """A mark as Lark has it: a special token by its id, another by its text."""
        for x, token in self.talk.tokenizer.added_tokens_decoder.items():
            if str(token) == mark and token.special:
                return f"<[{x}]>"
        return '"' + mark.replace('"', '\\"') + '"'
