"""Patterns of a checkpoint mean what Python's `re` says, and none of them takes for ever."""

import random
import re
import time
from contextlib import suppress

import numpy as np
import pytest

from dualinfer.errors import DualinferError, UnsupportedError
from dualinfer.quantization.formats import METHODS
from dualinfer.system.patterns import Patterns

from .models import A_SECOND

# As tools write them, from public configs: GPTQModel's dynamic, llm-compressor's targets and
# ignore, peft's rank_pattern, transformers' modules_to_not_convert.
OF_TOOLS = (
    *(
        r".*\.(?:1[0-5])\..*",
        r".*\.18\..*gate.*",
        r"mtp\..*",
        r".*shared_expert.*",
        "lm_head.weight",
    ),
    *(".*down.*", r"model.layers.(1[6-9]|20|21)\.", ".*lm_head", "lm_head", r".*mlp\.gate$"),
    *(r".*self_attn\.(q|k|v|o)_proj$", "^(?!.*experts).*$", r"^(?!.*\.mlp\.experts(?:\.|$)).*$"),
    *(r"^(?!.*language_model\.model\.layers\.)", r"(?!(?:mtp|visual))(?:.*gate)", ".*visual.*"),
    r"^(?!.*(?:self_attn\.(?:q_proj|k_proj)|vision_tower\..*|mm_projector\..*)$).*$",
    *(r"^model\.layers\.\d+\.mlp\.(gate|up)_proj$", r"(.*\.)?(layers\.[0-3]\.self_attn\.q_proj)$"),
    *(
        r"(?:.*?(?:language|text).*?(?:mlp|attn).*?(?:k_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,})",
    ),
    *("layer.*", "(?i:LM)_head", r"[\w.]+_proj", r"(?<=m)odel", r".*(?<!q)_proj", "a|", ""),
)
NAMES = (
    *("lm_head", "lm_head.weight", "model.lm_head", "visual.blocks.0.attn", "mtp.layers.0.x"),
    *(f"model.layers.{i}.mlp.gate{end}" for i in (1, 12, 18, 20) for end in ("", "_proj")),
    *(f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 3, 17) for x in "qko"),
    *("model.language_model.model.layers.3.mlp.experts.17.down_proj", "vision_tower.a", "a\nb"),
    *("model.text.layers.9.mlp.shared_expert.v_proj", "mm_projector.0", "odel", "é.x", "layer.11"),
)


def test_patterns_of_tools_match_as_re_does():
    patterns = Patterns(OF_TOOLS, "here")
    matched = set()
    for name in NAMES:
        found = patterns.find(name)
        assert found == [i for i, text in enumerate(OF_TOOLS) if re.match(text, name)], name
        matched |= set(found)
    assert len(matched) > 0.8 * len(OF_TOOLS)


def drawn(draw: random.Random, depth: int = 0) -> str:
    """A pattern of all that is in Python's, but for references."""
    kind = draw.random()
    if depth > 3 or kind < 0.35:
        return draw.choice(("a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "[b-d]", "_"))
    inner = drawn(draw, depth + 1)
    if kind < 0.55:
        return inner + drawn(draw, depth + 1)
    if kind < 0.7:
        return f"(?:{inner}|{drawn(draw, depth + 1)})"
    if kind < 0.85:
        return f"({inner})" + draw.choice(("*", "+", "?", "{1,2}", "*?", "{2}", "{0,3}", "{,2}"))
    if kind < 0.9:
        return draw.choice(("^", "$", r"\b", r"\A", r"\Z", "(?:)"))
    if kind < 0.97:
        return f"({draw.choice(('?=', '?!'))}{inner})"
    return f"({draw.choice(('?<=', '?<!'))}{draw.choice('ab.')})"


def test_random_patterns_match_as_re_does():
    draw, both = random.Random(41), [0, 0]
    for _ in range(400):
        text = drawn(draw)
        pattern, theirs = Patterns([text], "here"), re.compile(text)
        for _ in range(12):
            name = "".join(draw.choice("abc._1\n") for _ in range(draw.randint(0, 7)))
            expected = theirs.match(name) is not None
            assert bool(pattern.find(name)) == expected, (text, name)
            both[expected] += 1
    assert min(both) > 500


LONG = "a" * 3000
SLOW = (
    *("(a+)+$", "(a|a)*$", ".*a.*a.*a.*a.*a.*a.*b", "(a?){900}a{900}", "(?:(?=(?:a*)*b).)*"),
    *("(?:" * 90 + "a" + ")*" * 90 + "b", ".*" * 2000 + "b", "(?=.*b)" * 300, r"(?:\b.|\B.)*b"),
    *(
        "((?:){1000000}){1000000}",
        "(?:(?:(?:a{1,20}){1,20}){1,20}){1,20}b",
        "(" * 5000 + ")" * 5000,
    ),
    *("(?:(?!.*(?:(?!.*(?:(?!.*b).)*c).)*d).)*", "|".join("a" * i for i in range(90)), LONG, "(?:"),
    *(r"(a)\1", "(?>a+)b", "a++b", "(a)?(?(1)b|c)", "a{99999999999}", "(?s:.)*" * 500 + "c"),
)


@pytest.mark.parametrize("text", SLOW, ids=lambda text: text[:30])
def test_a_hostile_pattern_takes_no_second(text):
    start, refusal = time.process_time(), None
    try:
        patterns = Patterns([text], "config.json")
        for name in (LONG, "a" * 40 + "b", *(f"{i}.{'a' * 200}" for i in range(20))):
            patterns.find(name)
    except UnsupportedError as error:
        refusal = str(error)
    assert time.process_time() - start < A_SECOND
    said = r"config\.json has the pattern .* is not tried: .*Name the"
    assert refusal is None or re.search(said, refusal)


class Any:
    """A source that holds all that any format would ask for of one module."""

    description, metadata = "a source", {"tensor_names": "[]"}

    def __init__(self, module: str, dtype: str):
        ends = "qweight qzeros scales weight weight_scale weight_packed SCB".split()
        self.kinds = {f"{module}.{end}": dtype for end in ends}
        self.metadata = {f"{module}.weight": '{"_type": "Int8Tensor"}', "tensor_names": "[]"}
        if module.endswith(".experts"):
            self.kinds = {f"{module}.down_proj_{part}": "uint8" for part in ("blocks", "scales")}

    def names(self):
        return self.kinds.keys()

    def dtype(self, name):
        return self.kinds[name]

    def shape(self, name):
        return (8, 8)

    def read(self, name, index=None):
        return np.zeros((8, 8), self.kinds[name])[index or ...]


EVIL = r"(.+)+\.(.+)+!"
FIELDS = {
    "awq": ({"modules_to_not_convert": [EVIL]}, "int32"),
    "bitnet": ({"modules_to_not_convert": ["lm_head", EVIL]}, "uint8"),
    "bitsandbytes": ({"load_in_8bit": True, "llm_int8_skip_modules": [EVIL]}, "int8"),
    "compressed-tensors": ({"ignore": ["re:" + EVIL]}, "int8"),
    "fp8": ({"ignored_layers": [EVIL]}, "float8_e4m3fn"),
    "gptq": ({"bits": 4, "dynamic": {"-:" + EVIL: {}}}, "int32"),
    "modelopt": ({"quant_algo": "FP8", "exclude_modules": ["*a" * 40 + "!"]}, "float8_e4m3fn"),
    "mxfp4": ({"modules_to_not_convert": [EVIL]}, "uint8"),
    "torchao": ({"modules_to_not_convert": [EVIL]}, "int8"),
}
GROUPS = {
    "g": {"targets": ["re:" + EVIL, "Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
}


@pytest.mark.parametrize("method", METHODS)
def test_no_format_takes_long_over_a_pattern(method, monkeypatch):
    """Each letter more would take `re` twice as long; the module has 900."""
    tried = []
    find = Patterns.find
    monkeypatch.setattr(
        Patterns, "find", lambda self, name: [tried.append(name), find(self, name)][1]
    )
    fields, dtype = FIELDS[method]
    if method == "compressed-tensors":
        fields = fields | {"config_groups": GROUPS, "format": "int-quantized"}
    name = {"mxfp4": ".experts", "bitnet": "layers.0.mlp.up_proj"}.get(method, ".q")
    module = "a" * 900 + ("." if method == "bitnet" else "") + name
    start = time.process_time()
    with suppress(DualinferError):
        opened = METHODS[method]({"quant_method": method, **fields}, Any(module, dtype))
        opened(f"{module}.0.down_proj.weight" if method == "mxfp4" else f"{module}.weight")
    assert time.process_time() - start < A_SECOND
    assert any(module in name for name in tried) or method == "modelopt"  # fnmatch tries its own
