"""A field of the spec serves several families: what one alone needs is of a class in `blocks/`."""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from dualinfer.cli.tiny import tiny_config
from dualinfer.errors import ModelError
from dualinfer.model import spec
from dualinfer.model.families import describe_model, served_modules
from dualinfer.model.families.multimodal import WRAPPERS  # whose text is of another family

from .test_check import family_config

FAMILIES = Path(__file__).parents[1] / "dualinfer" / "model" / "families"
# Fields that one family sets, or a single file, and why they are not of a block: nothing comes to
# this list without a reason, and what leaves it is taken out.
_IN_KERNELS = "attention's kernels, or those that turn heads, take it"
ALONE = {
    "Attention.alibi_rounded": _IN_KERNELS,
    "Rope.rounded": _IN_KERNELS,
    "Router.jitter": "the router's kernel takes it",
    "Experts.blended": "a layer of DeepSpeed's, of no family, which kernels know as an expert",
}
SHARED = ("heads.py", "rope.py")  # what any family's config may ask for
TABLE = 3  # a file of more model types is a table, whose rows are families
OWN: Any = {x for x in vars(spec).values() if isinstance(x, type) and is_dataclass(x)}


def settings(own: Any) -> Iterator[str]:
    """The fields of a spec, and of the common parts within, that have a value of their own."""
    if isinstance(own, tuple):
        for part in own:
            yield from settings(part)
    elif type(own) in OWN:
        for one in fields(own):
            value = getattr(own, one.name)
            if one.default is MISSING or value != one.default:
                yield f"{type(own).__name__}.{one.name}"
                yield from settings(value)


def families_by_field() -> dict[str, set[str]]:
    """The families that set each field: of small configs as HF has them by default."""
    found: dict[str, set[str]] = {}
    for module in served_modules():
        for name in module.CLASSES:
            if name in WRAPPERS or name not in hf.CONFIG_MAPPING:
                continue
            config = tiny_config(family_config(name)).to_dict()
            own = describe_model(config)[0]
            family = name if len(module.CLASSES) > TABLE else module.__name__
            for part in (own, own.encoder):
                for field in set(settings(part)):
                    found.setdefault(field, set()).add(family)
    return found


def files_by_name() -> dict[str, set[str]]:
    """The files of families that name a field, as a keyword or in a dict, whatever its class.

    What `SHARED` ones name counts twice.
    """
    found: dict[str, set[str]] = {}
    for path in FAMILIES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.arg] if isinstance(node, ast.keyword) else []
            if isinstance(node, ast.Dict):  # of fields to be replaced
                names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            for name in names:
                shared = [f"{path.name} of others"] if path.name in SHARED else []
                found.setdefault(str(name), set()).update([path.name, *shared])
    return found


def test_a_field_is_set_by_two_families_or_more():
    families, files = families_by_field(), files_by_name()
    alone = {
        f"{kind.__name__}.{one.name}"
        for kind in OWN
        for one in fields(kind)
        if len(families.get(f"{kind.__name__}.{one.name}", ())) < 2
        and len(files.get(one.name, ())) < 2
    }
    assert alone == set(ALONE)


@pytest.mark.parametrize(("part", "name"), [("attending", "attention"), ("feeding", "mlp")])
def test_a_layer_without_a_part_says_so(part, name):
    layer = spec.Layer(None, None, spec.Norm("rms", 1e-6), "pre")
    with pytest.raises(ModelError, match=rf"without .*Layer\.{name}"):
        getattr(layer, part)
