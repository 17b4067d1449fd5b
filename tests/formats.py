"""What tests of quantized checkpoints share: the values of a matrix, and tiny checkpoints."""

import shutil
from pathlib import Path

import numpy as np

import dualinfer
from dualinfer.checkpoint.described.hf_config import read_written
from dualinfer.checkpoint.sources import open_checkpoint
from dualinfer.quantization.formats import METHODS, find_method

from .models import random_ids, relative_rms

ALL = slice(None)
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def open_folder(folder: Path, **changes):
    """The opener of a quantized checkpoint's folder, with `changes` to its config."""
    config = read_written(folder)["quantization_config"] | changes
    return METHODS[find_method(config)](config, open_checkpoint(folder))


def values(matrix, rows=ALL, columns=ALL):
    """What a part of a QuantizedMatrix means, in float32."""
    n, k = matrix.shape
    scheme = matrix.scheme
    decoded = scheme.code.decode(matrix.codes(rows, columns))
    i = np.arange(n)[rows] // (scheme.rows or n)
    j = np.arange(k)[columns] // (scheme.columns or k)
    if scheme.groups:
        j = matrix.group()[columns]
    scale = matrix.scale()
    assert scale.dtype.name == scheme.scale_dtype
    if scheme.zeros:
        decoded = decoded - matrix.zero().astype(np.float32)[i][:, j]
    else:
        assert matrix.zero() is None
    wide = scale.astype(np.float32)[i][:, j]
    if scheme.outer:
        wide = wide * matrix.outer()[rows, None]
    return decoded * wide


def check_slices(matrix):
    """A part of a matrix is that part of the whole, wherever it begins and ends."""
    whole = values(matrix)
    assert whole.shape == matrix.shape
    for rows in (ALL, slice(0, 3), slice(5, 14), slice(7, None)):
        for columns in (ALL, slice(1, 2), slice(3, 21), slice(13, None), slice(4, 4)):
            np.testing.assert_array_equal(values(matrix, rows, columns), whole[rows, columns])


def dense_model(folder: Path):
    """The HF model of a quantized folder, with what its matrices mean in float32."""
    import torch
    import transformers as hf

    config = hf.AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    opener, source = open_folder(folder), open_checkpoint(folder)
    state = {}
    for name in model.state_dict():
        matrix = opener(name) if name.endswith(".weight") else None
        array = source.read(name) if matrix is None else values(matrix)
        state[name] = torch.from_numpy(np.asarray(array, np.float32))
    model.load_state_dict(state)
    return model


def check_logits(folder: Path, backend: str, model=None, **settings):
    """Logits, and what is decoded with the cache, are those of the dequantized weights on HF.

    `model` is that HF model where it must round its inputs, too.
    """
    import torch

    model, ids = model or dense_model(folder), random_ids(2, 9)
    with (
        torch.no_grad(),
        dualinfer.init_inference(str(folder), backend=backend, dtype="fp32", **settings) as engine,
    ):
        expected = model(torch.as_tensor(ids)).logits.numpy()
        assert relative_rms(engine(ids).logits, expected) < 1e-5
        tokens = model.generate(torch.as_tensor(ids), **GREEDY)
        np.testing.assert_array_equal(np.asarray(engine.generate(ids, **GREEDY)), tokens.numpy())
        return engine.report()


def edit(folder: Path, change, described=()) -> Path:
    """A copy of a checkpoint whose dict of tensors `change` has changed in place.

    `described` is written over what the header says beside them.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    copy = folder.parent / f"{folder.name}-edited"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = {**file.metadata(), **dict(described)}
    change(tensors)
    save_file(tensors, path, metadata)
    return copy


class Reshaped:
    """A source one of whose tensors is another array."""

    def __init__(self, source, name, array):
        self._source, self._name, self._array = source, name, array
        self.description, self.metadata = "reshaped", getattr(source, "metadata", {})

    def names(self):
        return self._source.names()

    def dtype(self, name):
        return self._source.dtype(name)

    def shape(self, name):
        return self._array.shape if name == self._name else self._source.shape(name)

    def read(self, name, index=None):
        if name != self._name:
            return self._source.read(name, index)
        return self._array[index or ...]


def reshaped(array):
    """The array in other shapes: cut, doubled, turned, flat."""
    for axis, size in enumerate(array.shape):
        for few in {1, size - 1, size // 2} - {0, size}:
            yield array.take(range(few), axis)
        yield np.concatenate([array, array], axis)
    yield array[(slice(0, 1),) * array.ndim]
    yield array.T
    yield array.reshape(-1)
    yield array[None]
    yield np.stack([array, array])


def check_shapes(folder: Path, name: str):
    """What stands in a weight's place has one shape: another one is told, or means the same."""
    config, source = read_written(folder)["quantization_config"], open_checkpoint(folder)
    check_shapes_in(METHODS[find_method(config)], config, source, name)


def check_shapes_in(method, config, source, name: str):
    """As `check_shapes`, by a method's opener."""
    matrix = method(config, source)(name)
    meant, told = values(matrix), 0
    for part in matrix.stored:
        array = np.asarray(source.read(part))
        for other in reshaped(array):
            if other.shape == array.shape:
                continue
            try:
                found = method(config, Reshaped(source, part, other))(name)
                is_same = found.shape != meant.shape or np.array_equal(values(found), meant)
                assert is_same, f"{part}: {array.shape} as {other.shape}"
            except (dualinfer.CheckpointError, dualinfer.UnsupportedError):
                told += 1
    assert told > 4
