"""One InferenceConfig from an object, a dict or a JSON file, and keyword arguments."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError, ConfigNotFoundError, a_type, shown
from .fields import InferenceConfig
from .model import GATHERED, Gathering, Source


def make_config(
    config: InferenceConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
) -> InferenceConfig:
    """One InferenceConfig from `config` (object, dict or a JSON file's path) and keyword arguments.

    Nested dicts are merged key by key. The same field may be given twice with the same meaning, and
    None for a field whose default is None is not given. Raises ConfigError with every problem
    there is: conflicts, unknown keys, bad values. The caller's dicts stay as they are.
    """
    sources = [Source(_as_dict(config), "in config"), Source(overrides, "as a keyword argument")]
    gathering = Gathering(InferenceConfig, sources)
    built = None
    try:
        built = InferenceConfig.model_validate(gathering.values, context=GATHERED)
    except ValidationError as error:
        gathering.add(error)
    if built is None or gathering.problems:
        texts = [f"{p.text}{'' if p.text.endswith('?') else '.'}" for p in gathering.problems]
        head = [f"The config has {len(texts)} problems:"] if len(texts) > 1 else []
        raise ConfigError("\n- ".join([*head, *texts]))
    gathering.warn()
    return built


def default_inference_config() -> dict[str, Any]:
    """A fresh dict of the defaults, JSON-able, to change and pass as `config`.

    Without `backend`, which is an argument of `init_inference`, and without the fields that have
    one harmless value only. A field that is None counts as not given.
    """
    return InferenceConfig().model_dump(mode="json", exclude={"backend"})


def _as_dict(config: Any) -> Mapping[Any, Any]:
    if config is None:
        return {}
    fields = InferenceConfig.unfold(config)
    if fields is not None:
        return fields
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config is {a_type(config)}; expected a dict, an InferenceConfig or the path "
            "of a JSON file."
        )
    path = Path(config).expanduser()
    twice: list[str] = []
    try:
        if not path.exists():
            raise ConfigNotFoundError(f"config={str(config)!r}: there is no such file.")
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=partial(_object, twice=twice))
    except ConfigNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"config={shown(config)} cannot be read as a file: {reason}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    if twice:
        raise ConfigError(f"{path} names {', '.join(twice)} twice in one object. Remove one.")
    return value


def _object(pairs: list[tuple[str, Any]], twice: list[str]) -> dict[str, Any]:
    """An object of JSON; names that stand in it more than once are added to `twice`."""
    fields = dict(pairs)
    names = [name for name, _ in pairs]
    twice += [name for name in fields if names.count(name) > 1]
    return fields
