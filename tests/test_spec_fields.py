"""A field of the spec serves several families: what one alone needs is of a class in `blocks/`."""

import ast
from dataclasses import MISSING, fields
from pathlib import Path

from dualinfer.model.spec import Attention, Experts, Layer, Mlp, ModelSpec

FAMILIES = Path(__file__).parents[1] / "dualinfer" / "model" / "families"
# Those that one file of families sets, or none. No name may come to this list: an oddity is an
# object with a file of its own (docs/architecture.md). One that leaves it is taken out.
RARE = {
    "ModelSpec": "dropped masks_labels prefixes embedders layers_ids shifts own_vocab towers mel "
    "projected",
    "Layer": "sub_norms",
    "Attention": "clip_normed alibi_rounded chunk",
    "Mlp": "",
    "Experts": "offset weighs_input blended",
}


def test_no_field_more_is_of_one_family_alone():
    setters: dict[str, set[str]] = {}
    for path in FAMILIES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.arg] if isinstance(node, ast.keyword) else []
            if isinstance(node, ast.Dict):  # of fields to be replaced
                names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            for name in names:
                setters.setdefault(str(name), set()).add(path.name)
    found = {
        kind.__name__: " ".join(
            field.name
            for field in fields(kind)
            if field.default is not MISSING and len(setters.get(field.name, ())) < 2
        )
        for kind in (ModelSpec, Layer, Attention, Mlp, Experts)
    }
    assert found == RARE
