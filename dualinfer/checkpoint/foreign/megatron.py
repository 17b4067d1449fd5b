"""GPT-2 as Megatron-LM trains it: its names and layouts, and the shards of its ranks.

The facts are those of DeepSpeed's runtime/state_dict_factory.py and of transformers'
convert_megatron_gpt2_checkpoint.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import CheckpointError, counted, listing, shortened, shown
from ...model.load_plan import TensorSource
from .fitting import Wanted
from .merged import Merge, MergedSource, Shard, check_alike, cut, join, swap, take
from .shards import Shards

_LAYER = re.compile(r"^layers\.(\d+)\.(.+)\.(weight|bias)$")
_MODULES = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
_OUTER = {
    "word_embeddings.weight": "transformer.wte.weight",
    "position_embeddings.weight": "transformer.wpe.weight",
    "final_layernorm.weight": "transformer.ln_f.weight",
    "final_layernorm.bias": "transformer.ln_f.bias",
}
# What DeepSpeed looks for before it merges.
_EXPECTED = (
    "attention.dense.weight",
    "mlp.dense_4h_to_h.weight",
    "attention.query_key_value",
    "mlp.dense_h_to_4h.weight",
    "mlp.dense_h_to_4h.bias",
)
_WRAPPERS = re.compile(r"^(module\.|model\.|language_model\.|embedding\.|transformer\.|encoder\.)+")


def _bare(name: str) -> str:
    """A name of Megatron's without the modules that hold its parts."""
    return _WRAPPERS.sub("", name).replace("self_attention.", "attention.")


def is_megatron(names: Iterable[str], wanted: Wanted) -> bool:
    """True for names of Megatron's GPT, none of which is one of the model's."""
    names = list(names)
    if any(name in wanted.shapes for name in names):
        return False
    bare = [_bare(name) for name in names]
    has_layers = any(re.match(r"^layers\.\d+\.attention\.query_key_value\.", name) for name in bare)
    return has_layers and any(name in _OUTER for name in bare)


class MegatronShards(Shards):
    """The files of Megatron's ranks; `version` is that of its QKV layout, None as the files say."""

    def __init__(
        self,
        rounds: Sequence[Sequence[Any]],
        description: str,
        notes: Sequence[str] = (),
        version: float | None = None,
    ):
        super().__init__(rounds, description, notes)
        self._version = version

    def fit(self, wanted: Wanted) -> TensorSource:
        """GPT-2's tensors by HF's names."""
        kind = wanted.config.get("model_type")
        if kind != "gpt2":
            raise CheckpointError(
                f"{self.description} is Megatron's, which fills GPT-2 (model_type 'gpt2'), and "
                f"the model is {shown(kind)}. Convert it to HF's names first, or pass a "
                "GPT2LMHeadModel of its sizes."
            )
        self._check()
        version = self._find_version()
        tensors: dict[str, Merge] = {}
        notes, faults = list(self.notes), []
        for name, shards in self.shards.items():
            try:
                theirs, made = self._make(_bare(name), name, shards, wanted, version, notes)
            except ValueError as error:
                if isinstance(error, CheckpointError):
                    raise
                faults.append(f"{name} ({error})")
                continue
            if theirs in tensors:
                faults.append(f"{name} (another tensor is {theirs}, too)")
            tensors[theirs] = made
        if faults:
            raise CheckpointError(
                f"The shards of {self.description} do not make GPT-2's tensors, "
                f"{counted([shortened(fault) for fault in faults])}. Are all ranks' files listed, "
                "in order?"
            )
        notes.append(f"Megatron's names, its query, key and value of version {version:g}")
        return MergedSource(tensors, self.description, notes)

    def _check(self) -> None:
        """Raise CheckpointError for another number of files than ranks, or a part of a model."""
        for file in self.files:
            said = getattr(file, "facts", {}).get("mp_world_size")
            if said is not None and said != len(self.files):
                raise CheckpointError(
                    f"{self.description}: {file.path.name} says mp_world_size={shown(said)}, and "
                    f"there are {len(self.files)} files. List the file of each rank."
                )
        bare = [_bare(name) for name in self.shards]
        missing = [part for part in _EXPECTED if not any(part in name for name in bare)]
        if missing:
            raise CheckpointError(
                f"{self.description} holds no {listing(missing)}, which Megatron's GPT has in each "
                "layer. Is it of another model, or of a pipeline's stage?"
            )

    def _find_version(self) -> float:
        """The version of the QKV layout: the caller's, else the files', else 0 as Megatron says."""
        said = {getattr(file, "facts", {}).get("checkpoint_version") for file in self.files}
        own = said - {None}
        if len(own) > 1:
            listed = listing(sorted(map(str, own)))
            raise CheckpointError(
                f"{self.description}: its files say checkpoint_version {listed}. Are they of one "
                "checkpoint?"
            )
        version: Any = next(iter(own), None)
        if self._version is not None and version is not None and version != self._version:
            raise CheckpointError(
                f"{self.description} has version={self._version:g}, and its files say "
                f"checkpoint_version={shown(version)}. Write the files' version, or leave it out."
            )
        version = self._version if version is None else version
        version = 0.0 if version is None else version
        if isinstance(version, bool | str) or version not in (0, 1, 2):
            raise CheckpointError(
                f"{self.description} is of Megatron's checkpoint_version {shown(version)}; 0, 1.0 "
                "and 2.0 are known. Convert it with the tools of the Megatron that wrote it."
            )
        return float(version)

    def _make(
        self,
        bare: str,
        name: str,
        shards: Sequence[Shard],
        wanted: Wanted,
        version: float,
        notes: list[str],
    ) -> tuple[str, Merge]:
        """HF's name of a tensor, and how it is made; under its own name what HF has not."""
        if bare in _OUTER:
            theirs = _OUTER[bare]
            if bare != "word_embeddings.weight":
                return theirs, self._same(shards)
            made, expected = join(shards, 0), wanted.find(theirs)
            if expected and made.shape[0] > expected[0] and made.shape[1:] == expected[1:]:
                notes.append(
                    f"{made.shape[0] - expected[0]} rows that Megatron adds to the vocabulary of "
                    f"{expected[0]} were left out"
                )
                made = cut(made, expected[0])
            return theirs, made
        match = _LAYER.match(bare)
        module = _MODULES.get(match[2]) if match else None
        if match is None or module is None:
            return name, take(shards[0])
        theirs, kind = f"transformer.h.{int(match[1])}.{module}.{match[3]}", match[2]
        turned = match[3] == "weight" and "layernorm" not in kind
        if kind == "attention.query_key_value":
            made = _split_qkv(shards, wanted.config, version)
        elif kind == "mlp.dense_h_to_4h":
            made = join(shards, 0)
        elif turned:
            made = join(shards, 1)
        else:
            made = self._same(shards)
        return theirs, replace(made, turned=turned)

    def _same(self, shards: Sequence[Shard]) -> Merge:
        if len(shards) > 1:
            check_alike(shards, self.description)
        return take(shards[0])


def _split_qkv(shards: Sequence[Shard], config: Mapping[str, Any], version: float) -> Merge:
    """Query, key and value one after another, whatever the version has them like.

    By version the rows of a rank are [3, heads, D], [heads, D, 3] or [heads, 3, D].
    """
    total = sum(shard.shape[0] for shard in shards)
    if not version:
        return join(shards, 0, [total // 3] * 3)
    heads = config.get("n_head")
    if type(heads) is not int or heads < 1 or total % (3 * heads):
        raise ValueError(f"{total} rows for three times {heads} heads")
    head_dim = total // (3 * heads)
    if version == 1:
        order = swap(total, (heads, head_dim, 3), (2, 0, 1))
    else:
        order = swap(total, (heads, 3, head_dim), (1, 0, 2))
    return replace(join(shards, 0), order=order)
