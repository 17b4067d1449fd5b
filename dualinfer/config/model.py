"""The base of the config models: reads names, aliases, old names and several sources into one."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..errors import shown, warn_caller

KeyPath = tuple[str, ...]  # ("tensor_parallel", "tp_size")

GATHERED = "gathered"
"""The validation context of values that a Gathering has read already."""


class Model(BaseModel):
    """Frozen; unknown keys are refused with the nearest known one; "auto" means unset."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_by_name=True,
        validate_by_alias=True,
    )

    moved: ClassVar[Mapping[str, KeyPath]] = MappingProxyType({})
    """Deprecated names, and where their values go."""

    elsewhere: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that stale documents use, and what to use instead."""

    arguments: ClassVar[tuple[str, ...]] = ()
    """Names of arguments that `init_inference` takes beside the config."""

    hints: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that are often tried, and how what they ask for is done."""

    @classmethod
    def places(cls) -> dict[str, KeyPath]:
        """Every key that may be given here, and the place that it names."""
        fields = cls.model_fields.items()
        aliases = {str(a): (name,) for name, field in fields if (a := field.validation_alias)}
        return {**{name: (name,) for name in cls.model_fields}, **aliases, **cls.moved}

    @classmethod
    def unfold(cls, value: Any) -> Mapping[Any, Any] | None:
        """The keys that `value`, a dict or an instance, gives; None if it is neither."""
        if isinstance(value, Mapping):
            return value
        if not isinstance(value, cls):
            return None
        # An instance without arguments was made on purpose: QuantizationConfig() asks for it.
        names = value.model_fields_set or {"enabled"} & cls.model_fields.keys()
        return {name: getattr(value, name) for name in names}

    @model_validator(mode="wrap")
    @classmethod
    def _gathered(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if info.context is GATHERED or not isinstance(data, Mapping):
            return handler(data)
        gathering = Gathering(cls, [Source(data)])
        built = None
        try:
            built = handler(gathering.values)
        except ValidationError as error:
            if not gathering.problems:
                raise
            gathering.add(error)
        if built is None or gathering.problems:
            raise gathering.error()
        gathering.warn()
        return built


@dataclass(frozen=True)
class Source:
    """One place that gives values."""

    values: Mapping[Any, Any]
    origin: str = ""  # "in config"


@dataclass(frozen=True)
class Problem:
    """One thing wrong, as a whole sentence with its key and values."""

    place: tuple[int | str, ...]
    given: Any
    text: str


@dataclass(frozen=True)
class _Given:
    """One value for one field, as the user wrote it."""

    key: str
    value: Any
    origin: str

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)} {self.origin}".rstrip()


class Gathering:
    """The values that several sources give to one model.

    `values` are nested and keyed by field names, ready to be validated with the context GATHERED;
    `problems` are unknown keys, keys given twice, conflicts, and what `add` reads from pydantic.
    """

    def __init__(self, model: type[Model], sources: Iterable[Source]):
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._model = model
        self._warnings: dict[str, tuple[type[Warning], str]] = {}
        self._given: dict[KeyPath, list[_Given]] = {}
        sources = list(sources)
        self._strict = self._read_strict(sources)
        for source in sources:
            self._read(model, source, source.values, (), "")
        for place in self._given:
            self._settle(place)

    def add(self, error: ValidationError, place: KeyPath = (), given: _Given | None = None) -> None:
        """Take over pydantic's errors on `values`, or on the one value given for `place`."""
        for e in error.errors(include_url=False):
            loc = (*place[:-1], *e["loc"])
            text = e["msg"].removeprefix("Value error, ")
            if e["type"] != "value_error":
                text = text[:1].lower() + text[1:]
            if loc:
                dotted, one = _dotted(loc), given or self._given_at(loc)
                alias = f" (given as {one.key})" if one and not dotted.startswith(one.key) else ""
                text = f"{dotted}={shown(e['input'])}{alias}: {text}"
            self._refuse(loc, e["input"], text)

    def _given_at(self, loc: tuple[int | str, ...]) -> _Given | None:
        """The value that the user gave for the field that an error is about."""
        heads = (tuple(map(str, loc[:n])) for n in range(len(loc), 0, -1))
        return next((self._given[head][0] for head in heads if head in self._given), None)

    def error(self) -> ValidationError:
        """All problems in pydantic's form."""
        details = [
            InitErrorDetails(
                type=PydanticCustomError("gathered", "{text}", {"text": p.text}),
                loc=p.place,
                input=p.given,
            )
            for p in self.problems
        ]
        return ValidationError.from_exception_data(self._model.__name__, details)

    def warn(self) -> None:
        """Say once for each field what is deprecated or has no effect."""
        for category, text in self._warnings.values():
            warn_caller(text, category)

    def _read_strict(self, sources: list[Source]) -> bool:
        """The reserved key: whether "auto" is a value like any other."""
        values = [source.values["strict"] for source in sources if "strict" in source.values]
        for value in values:
            if not isinstance(value, bool) or value != values[0]:
                text = (
                    f"strict={shown(value)}: expected True or False, the same wherever it is given"
                )
                self._refuse(("strict",), value, text)
        return True in values

    def _read(
        self,
        model: type[Model],
        source: Source,
        values: Mapping[Any, Any],
        parent: KeyPath,
        path: str,
    ) -> None:
        """Book what `values` give to `model`, whose place is `parent`, written as `path`."""
        places = model.places()
        seen: dict[tuple[KeyPath, bool], str] = {}
        for key, value in values.items():
            if key == "strict" and not parent:
                continue
            if key not in places:
                self._refuse((*parent, str(key)), value, _unknown(model, path, key))
                continue
            is_old = key in model.moved
            place, given = (*parent, *places[key]), _Given(f"{path}{key}", value, source.origin)
            if _is_auto(key, value) and not self._strict:
                continue
            first = seen.setdefault((place, is_old), key)
            if first != key:
                text = f"{_dotted(place)}: given twice, as {first} and as {key}; give one"
                self._refuse(place, value, text)
            elif _is_auto(key, value) and len(place) > 1:
                # A nested model, which knows nothing of `strict`, would take it as unset.
                self._refuse(place, value, f"{given}: with strict=True this is no valid value")
            elif is_old:
                self._read_moved(key, place, given)
            else:
                self._read_field(model, source, place, given)

    def _read_moved(self, key: str, place: KeyPath, given: _Given) -> None:
        if given.value is not None:
            text = f"{key} is deprecated: it is {_dotted(place)} now."
            self._warnings[key] = (DeprecationWarning, text)
            self._book(place, given)

    def _read_field(
        self, model: type[Model], source: Source, place: KeyPath, given: _Given
    ) -> None:
        field, size = model.model_fields[place[-1]], len(self.problems) + len(self._given)
        nested = nested_model(field)
        if given.value is None and (field.default is None or is_stale(field)):
            pass  # not given
        elif nested is not None:
            self._read_nested(nested, source, place, given)
        elif is_stale(field):
            self._canonical(place, given)
        else:
            self._book(place, given)
        is_harmless = size == len(self.problems) + len(self._given)
        if is_stale(field) and is_harmless:
            text = f"{given.key}={shown(given.value)} has no effect and can be removed."
            self._warnings[place[-1]] = (UserWarning, text)

    def _read_nested(
        self, nested: type[Model], source: Source, place: KeyPath, given: _Given
    ) -> None:
        values = nested.unfold(given.value)
        if values is None:
            bools = "a bool, " if nested.unfold(True) else ""
            words = "a str, " if nested.unfold("") else ""
            text = f"{given}: expected {bools}{words}a dict or a {nested.__name__}"
            self._refuse(place, given.value, text)
        elif isinstance(given.value, bool | str):  # moe=True, not moe.enabled=True, was given
            self._book((*place, *values), given)
        else:
            self._read(nested, source, values, place, f"{given.key}.")

    def _book(self, place: KeyPath, given: _Given) -> None:
        copied = replace(given, value=_own_copy(given.value))
        self._given.setdefault(place, []).append(copied)

    def _settle(self, place: KeyPath) -> None:
        """Put the value of one field into `values`; all that were given must mean the same."""
        given = self._given[place]
        value = given[0].value
        if len(given) > 1:
            pairs = [(v, g) for g in given for v in self._canonical(place, g) if v is not None]
            if not pairs:
                return
            value, first = pairs[0]
            for other, g in pairs[1:]:
                value = self._joined(place, (value, other), (first, g))
        target = self.values
        for part in place[:-1]:
            target = target.setdefault(part, {})
        target[place[-1]] = value

    def _canonical(self, place: KeyPath, given: _Given) -> list[Any]:
        """The value as its field holds it, in a list, which is empty if it is bad."""
        owner = self._model
        for part in place[:-1]:
            owner = nested_model(owner.model_fields[part])
            assert owner is not None
        try:
            built = owner.model_validate({place[-1]: given.value}, context=GATHERED)
        except ValidationError as error:
            self.add(error, place, given)
            return []
        return [getattr(built, place[-1])]

    def _joined(self, place: KeyPath, values: tuple[Any, Any], given: tuple[_Given, _Given]) -> Any:
        """One value from two; dicts are joined key by key."""
        a, b = values
        if isinstance(a, dict) and isinstance(b, dict):
            joined = {**b, **a}
            for key in a.keys() & b.keys():
                pair = a[key], b[key]
                first, second = (
                    replace(g, key=f"{g.key}.{key}", value=v)
                    for g, v in zip(given, pair, strict=True)
                )
                joined[key] = self._joined((*place, key), pair, (first, second))
            return joined
        if not _is_same(a, b):
            first, second = given
            text = f"{_dotted(place)}: {first} and {second} differ; give one of them"
            self._refuse(place, first.value, text)
        return a

    def _refuse(self, place: tuple[Any, ...], given: Any, text: str) -> None:
        self.problems.append(Problem(place, given, text))


def nested_model(field: FieldInfo) -> type[Model] | None:
    """The model that a field holds, if it holds one."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Model):
            return kind
    return None


def is_stale(field: FieldInfo) -> bool:
    """True if a field of DeepSpeed's has one harmless value only; dumps leave such fields out."""
    return field.exclude is True


def _dotted(place: Iterable[int | str]) -> str:
    return ".".join(map(str, place))


def _is_auto(key: Any, value: Any) -> bool:
    return isinstance(value, str) and value == "auto" and key != "replace_method"


def _is_same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # arrays and the like; whatever their == raises, they are not known as equal
        return False


def _own_copy(value: Any) -> Any:
    """Dicts and lists copied all the way down, so that the caller's can change; the rest as is."""
    if isinstance(value, Mapping):
        return {key: _own_copy(inner) for key, inner in value.items()}
    return [_own_copy(inner) for inner in value] if isinstance(value, list) else value


def _unknown(model: type[Model], path: str, key: Any) -> str:
    """A message on a key that `model` does not have; `path` is what the user wrote before it."""
    places, fields = model.places(), model.model_fields.items()
    inner = [(name, nested_model(field)) for name, field in fields if not is_stale(field)]
    near = [f"{name}.{key}" for name, nested in inner if nested and key in nested.places()]
    if key in model.elsewhere:
        near = [model.elsewhere[key]]
    live = [k for k, place in places.items() if not is_stale(model.model_fields[place[0]])]
    near = near or difflib.get_close_matches(str(key), [*live, *model.arguments], 1, 0.54)
    if key in model.hints:
        hint = model.hints[key]
    elif key in model.arguments:
        hint = f"{key} is an argument of init_inference, beside the config"
    elif near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        known = [k for k in live if len(places[k]) == 1] + [*model.arguments]
        hint = f"known are {', '.join(sorted(known))}"
    return f"unknown key {shown(f'{path}{key}')}; {hint}"
