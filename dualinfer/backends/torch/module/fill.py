"""Filling a module, on the meta device or not, from a source of named tensors: whole or not at all.

Everything is read and checked first; what fails leaves the module as it was.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ....arrays import from_numpy, same_tensor, to_numpy
from ....checkpoint.reader import Oddities
from ....errors import CheckpointError, DualinferError, counted
from ....model.load_plan import TensorSource, prefix_hint
from .mixtures import mixture_layers

_QUANTIZED = ("int8", "uint8", "int32")  # what quantizers pack weights into
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Slot(NamedTuple):
    """The place of one tensor in a module: in `owner`'s parameters, buffers or plain attributes."""

    name: str
    owner: torch.nn.Module
    kind: str
    key: str

    @property
    def place(self) -> dict[str, Any]:
        """The dict that holds the tensor under `key`."""
        return vars(self.owner) if self.kind == "__dict__" else getattr(self.owner, self.kind)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self.place[self.key]

    @property
    def is_transient(self) -> bool:
        """True for a buffer that is in no state dict."""
        return self.kind == "_buffers" and self.key in self.owner._non_persistent_buffers_set

    @property
    def in_state(self) -> bool:
        """True for what a state dict holds."""
        return self.kind != "__dict__" and not self.is_transient

    def put(self, tensor: torch.Tensor) -> None:
        """Hold `tensor` instead, a parameter as one that needs gradients where the old one did."""
        if self.kind == "_parameters":
            tensor.requires_grad_(self.tensor.requires_grad)
        self.place[self.key] = tensor


def slots(module: torch.nn.Module) -> Iterator[Slot]:
    """Every place that holds a tensor; a tied or shared one once for each of its names."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers", "__dict__"):
            entries = vars(owner) if kind == "__dict__" else getattr(owner, kind)
            for key, tensor in entries.items():
                if isinstance(tensor, torch.Tensor):
                    yield Slot(f"{prefix}.{key}".lstrip("."), owner, kind, key)


def on_meta(module: torch.nn.Module) -> list[str]:
    """Names of what lies on the meta device and holds no values."""
    return [slot.name for slot in slots(module) if slot.tensor.is_meta]


def is_hf(module: torch.nn.Module) -> bool:
    """True for a PreTrainedModel of transformers, told without importing it."""
    hf = sys.modules.get("transformers")
    return isinstance(module, getattr(hf, "PreTrainedModel", ()))


def check_values(module: torch.nn.Module) -> None:
    """Raise CheckpointError if part of the module lies on the meta device."""
    names = on_meta(module)
    if names:
        raise CheckpointError(
            f"The {type(module).__name__} has tensors on the meta device, which hold no values: "
            f"{counted(names)}. Pass checkpoint=..., the folder of a HF checkpoint or a state-dict "
            "file, or load the weights first."
        )


def fill(module: torch.nn.Module, source: TensorSource, dtype: torch.dtype) -> list[str]:
    """Put the source's tensors into `module`, floating ones in `dtype`; notes for the report.

    A HF model takes what transformers takes: names of older files, merged weights, buffers that are
    in no file. Another module's names must be the source's, with no exception. Tied tensors stay
    tied. The caller is warned of parameters that hold NaN or inf. Raises CheckpointError that names
    what is missing, left over or misshaped.
    """
    _check_dtypes(source, is_hf(module))
    odd = Oddities(source, str(dtype).removeprefix("torch."))
    by_config = is_hf(module) and not mixture_layers(module)  # which no config tells of
    way = _fill_hf if by_config else _fill_by_name
    notes = way(module, source, dtype, odd)
    return [*notes, *odd.notes()]


def _check_dtypes(source: TensorSource, floats: bool) -> None:
    """Raise CheckpointError for quantized weights, which mean nothing without their scales.

    `floats` says that the module's weights are such; another's may be ints by themselves.
    """
    odd = [
        name
        for name in source.names()
        if source.dtype(name).startswith("float8")
        or (floats and source.dtype(name) in _QUANTIZED and name.endswith("weight"))
    ]
    if odd:
        kinds = " and ".join(sorted({source.dtype(name) for name in odd}))
        raise CheckpointError(
            f"{source.description} holds {kinds} weights, which mean nothing without their scales, "
            f"{counted(odd)}. Quantized checkpoints are not read in this version."
        )


def _read(source: TensorSource, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    tensor = source.read(name)
    if not isinstance(tensor, torch.Tensor):
        tensor = from_numpy(tensor, "torch")
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _fill_hf(module: Any, source: TensorSource, dtype: torch.dtype, odd: Oddities) -> list[str]:
    """Let transformers fill another model of the same config, and take its tensors over.

    `odd` looks at parameters; a buffer may well hold NaN or inf.
    """
    state = {name: _read(source, name) for name in source.names()}
    buffers = {slot.name for slot in slots(module) if slot.kind != "_parameters"}
    for name in state.keys() - buffers:
        odd.look(name, to_numpy(state[name]))
    # What is drawn to initialise it is not taken from the caller's generator.
    with _quiet(), _marked_memory(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        try:
            model, info = type(module).from_pretrained(
                None,
                config=module.config,
                state_dict=state,
                dtype=dtype,
                ignore_mismatched_sizes=True,  # reported below, with the names
                output_loading_info=True,
            )
        except DualinferError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise CheckpointError(
                f"transformers could not load {source.description} into a "
                f"{type(module).__name__}: {error}"
            ) from error
    misshaped = [
        f"{name} is {tuple(shape)}, expected {tuple(expected)}"
        for name, shape, expected in sorted(info["mismatched_keys"])
    ]
    problems = {"missing": sorted(info["missing_keys"]), "misshaped": misshaped}
    hint = prefix_hint(problems["missing"], info["unexpected_keys"])
    _refuse(module, source, problems, hint)
    new = {slot.name: slot for slot in slots(model)}
    unset = [s.name for s in new.values() if not s.in_state and _is_unset(s.tensor)]
    if unset:
        raise CheckpointError(
            f"{type(module).__name__} has tensors that are in no checkpoint, and its _init_weights "
            f"does not compute them: {counted(unset)}. Make the model outside of "
            "torch.device('meta')."
        )
    own = [s for s in slots(module) if s.in_state or s.tensor.is_meta]  # the rest has its values
    for slot in own:
        other = new.get(slot.name)
        if other is None or other.tensor.shape != slot.tensor.shape:
            raise CheckpointError(
                f"{slot.name} {tuple(slot.tensor.shape)} of this {type(module).__name__} is not "
                "what its config makes, so that transformers cannot fill it. Load the weights "
                "before the model is changed."
            )
    for slot in own:
        slot.put(new[slot.name].tensor)
    left = sorted(info["unexpected_keys"])
    return [f"tensors of {source.description} without use here, {counted(left)}"] if left else []


def _fill_by_name(
    module: torch.nn.Module, source: TensorSource, dtype: torch.dtype, odd: Oddities
) -> list[str]:
    """Each tensor from that of its name, or of a name that it is tied to; `odd` as above."""
    slot_of = {slot.name: slot for slot in slots(module)}
    state = module.state_dict(keep_vars=True)
    _check_state(module, slot_of, state)
    stored = set(source.names())
    values: dict[str, torch.Tensor] = {}
    missing, misshaped, mistyped, torn = [], [], [], []
    for names in _ties(state):
        matches = [name for name in names if name in stored]
        if not matches:
            missing += names
            continue
        own = state[matches[0]]
        wrong = [n for n in matches if tuple(source.shape(n)) != tuple(own.shape)]
        misshaped += [f"{n} is {source.shape(n)}, expected {tuple(own.shape)}" for n in wrong]
        expected = _FLOATS if own.is_floating_point() else (str(own.dtype).split(".")[1],)
        other = [n for n in matches if source.dtype(n) not in expected]
        mistyped += [f"{n} is {source.dtype(n)}, expected {' or '.join(expected)}" for n in other]
        if wrong or other:
            continue
        tensor = _read(source, matches[0])
        if isinstance(own, torch.nn.Parameter):
            odd.look(matches[0], to_numpy(tensor))
        values[names[0]] = value = tensor.to(dtype) if tensor.is_floating_point() else tensor
        torn += [
            f"{twin} and {matches[0]}"
            for twin in matches[1:]
            if not same_tensor(value, _read(source, twin, dtype))
        ]
    problems = {"missing": missing, "misshaped": misshaped, "of another dtype": mistyped}
    problems |= {"tied in the module, but different": torn}
    left = sorted(stored - state.keys())
    hint = prefix_hint(missing, left)
    _refuse(module, source, {**problems, "left over": left}, hint)
    for names in _ties(state):
        value = values[names[0]]
        if isinstance(state[names[0]], torch.nn.Parameter):
            value = torch.nn.Parameter(value, state[names[0]].requires_grad)
        for name in names:
            slot_of[name].put(value)
    return []


def _check_state(
    module: torch.nn.Module, named: Mapping[str, Slot], wanted: Mapping[str, Any]
) -> None:
    """Raise for what no state dict can fill, and for a state that is not the module's tensors."""
    kind = type(module).__name__
    loose = [s.name for s in named.values() if s.tensor.is_meta and not s.in_state]
    if loose:
        raise CheckpointError(
            f"The {kind} has tensors on the meta device that are in no state dict, so that no "
            f"checkpoint can fill them: {counted(loose)}. Make the module outside of "
            "torch.device('meta'), or set them first."
        )
    odd = [n for n, t in wanted.items() if n not in named or named[n].tensor is not t]
    if odd:
        raise CheckpointError(
            f"The state dict of the {kind} holds what are no tensors of its own: {counted(odd)}. "
            "Load it with its load_state_dict() first, and leave checkpoint unset."
        )


def _ties(state: Mapping[str, Any]) -> list[list[str]]:
    """The names of a state dict, those of one tensor together."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _refuse(
    module: torch.nn.Module,
    source: TensorSource,
    problems: Mapping[str, Sequence[str]],
    hint: str,
) -> None:
    """Raise CheckpointError that lists what there is of each kind of problem, and the hint."""
    texts = [f"{kind} {counted(names)}" for kind, names in problems.items() if names]
    if texts:
        raise CheckpointError(
            f"The weights of {source.description} do not fit the {type(module).__name__}: "
            f"{'; '.join(texts)}.{hint}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' progress bar and table of keys off: what is wrong is raised with its names."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.log_levels["critical"])
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Fresh memory holds NaN or the largest integer, so that what nobody set can be told."""
    memory: Any = torch.utils.deterministic
    on, before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(on, warn_only=warn)


def _is_unset(tensor: torch.Tensor) -> bool:
    """True if `tensor` has no values, or what `_marked_memory` put there; a bool tells nothing."""
    if tensor.is_meta:
        return True
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())
