"""The caller's arrays: which framework they are of, to NumPy, and back to that framework."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from .errors import ArgumentError

Kind = Literal["torch", "jax", "numpy", "list"]
_XLA_ALIGNMENT = 128  # bytes, of what executables take on a GPU; they fail at others


def kind_of(value: Any) -> Kind | None:
    """The framework of `value`, told without importing it; None if it is no array or sequence."""
    if isinstance(value, np.ndarray | np.generic):
        return "numpy"
    # Another thread may be importing a framework, which then has no such type yet.
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return "torch"
    if isinstance(value, getattr(sys.modules.get("jax"), "Array", ())):
        return "jax"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "list"
    return None


def to_numpy(value: Any) -> np.ndarray:
    """`value` as a NumPy array, without a copy where it lies in host memory; bfloat16 included.

    Raises ArgumentError for a torch tensor that is no plain block of values.
    """
    if kind_of(value) == "torch":
        import torch

        if value.is_meta or value.is_nested or value.is_quantized or value.layout != torch.strided:
            kinds = {"on the meta device": value.is_meta, "nested": value.is_nested}
            kinds |= {"quantized": value.is_quantized, "sparse": True}
            raise ArgumentError(
                f"The tensor is {next(kind for kind, found in kinds.items() if found)}, so that it "
                "holds no plain values. Pass a dense one."
            )
        host = value.detach().cpu()
        if host.dtype == torch.bfloat16:
            return host.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()
    return np.asarray(value)


def on_its_way(value: Any) -> Callable[[], np.ndarray]:
    """`value` as `to_numpy` gives it, later: a copy from the device begins now.

    The function that is returned waits for the copy, and for no work that is queued after it.
    """
    kind = kind_of(value)
    if kind == "torch" and value.is_cuda:
        import torch

        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        host.copy_(value.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(value.device))

        def wait() -> np.ndarray:
            copied.synchronize()
            return to_numpy(host)

        return wait
    if kind == "jax":
        value.copy_to_host_async()
    return lambda: to_numpy(value)


def from_numpy(array: np.ndarray, kind: Kind) -> Any:
    """`array` in a framework, in host memory (JAX: on its default device), in its own dtype."""
    if kind == "torch":
        return _numpy_to_torch(array)
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    return array


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype, or ml_dtypes', of a name such as `bfloat16`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def to_torch_dtype(dtype: Any) -> Any:
    """The torch.dtype of the same name as another framework's."""
    import torch

    return getattr(torch, str(dtype))


def same_tensor(one: Any, other: Any) -> bool:
    """True if two tensors hold the same values; tells shared memory apart without reading it."""
    if kind_of(one) == kind_of(other) == "torch":
        if one.shape != other.shape or one.data_ptr() == other.data_ptr():
            return one.shape == other.shape
        if one.device == other.device and one.dtype == other.dtype:
            return bool((one == other).all())  # where they lie
    a, b = to_numpy(one), to_numpy(other)
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(a, b))


def to_kind(array: Any, kind: Kind, like: Any = None) -> Any:
    """`array` (torch, JAX or NumPy) in the caller's framework.

    Between torch and JAX the memory is handed over through DLPack where both can address it, and
    copied through the host where they cannot. `list` gives `array` as it is. Integers become the
    framework's usual ones: int64 for torch and NumPy, int32 for JAX. `like`, a torch tensor, names
    the device that integer results go to.
    """
    if kind == "list" or array is None:
        return array
    own = kind_of(array)
    if kind == "numpy":
        result = to_numpy(array)
        if result.dtype.kind == "i":
            return result.astype(np.int64)
        return result if result.flags.writeable else result.copy()  # JAX lends its memory
    if kind == "torch":
        import torch

        if own == "jax":
            tensor = _jax_to_torch(array)
        elif own == "numpy":
            tensor = _numpy_to_torch(array)
        else:
            tensor = array
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            tensor = tensor.to(torch.int64)
            return tensor if like is None else tensor.to(like.device)
        return tensor
    import jax.numpy as jnp

    if own == "torch":
        return _torch_to_jax(array)
    result = array if own == "jax" else jnp.asarray(array)
    return result.astype(jnp.int32) if result.dtype.kind == "i" else result


def _numpy_to_torch(array: np.ndarray) -> Any:
    import torch

    array = np.asarray(array, order="C")
    if not array.flags.writeable:  # torch warns about memory that it must not write
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _jax_to_torch(array: Any) -> Any:
    import torch

    platform = next(iter(array.devices())).platform
    if len(array.devices()) == 1 and (platform == "cpu" or torch.cuda.is_available()):
        return torch.from_dlpack(array)
    return _numpy_to_torch(np.asarray(array))


def to_jax(value: Any, device: Any) -> Any:
    """`value` (torch, JAX or NumPy) as an array on a JAX device, row-major and aligned for XLA.

    A torch tensor that lies there so is shared, through DLPack, behind torch's work on it; another
    one on a device that JAX has is copied there, and only one elsewhere goes through the host. What
    was copied on the device may still be read when this returns: `value` stays as it is until the
    array is ready.
    """
    import jax

    if kind_of(value) == "torch":
        value = _shared(value) if _reaches(device, value) else to_numpy(value)
    return jax.device_put(value, device)


def ids_to_jax(ids: np.ndarray, device: Any) -> Any:
    """Integers of the host as an int32 array on a JAX device, whatever guard of transfers is on."""
    import jax

    with jax.transfer_guard("allow"):
        return jax.device_put(ids.astype(np.int32), device)


def _reaches(device: Any, tensor: Any) -> bool:
    """True if the JAX device's platform has the device on which a torch tensor lies."""
    import jax

    if device.platform != "gpu" or tensor.device.type != "cuda":
        return device.platform == tensor.device.type == "cpu"
    devices = jax.local_devices(backend=device.platform)
    return any(d.local_hardware_id == tensor.device.index for d in devices)


def _shared(tensor: Any) -> Any:
    """A torch tensor as a JAX array on its own device, in its memory if XLA can take that."""
    import jax

    tensor = tensor.detach().contiguous()
    if not tensor.is_cuda:
        return jax.dlpack.from_dlpack(tensor)
    import torch

    with torch.cuda.device(tensor.device):  # torch lends the current device's tensors only
        if tensor.data_ptr() % _XLA_ALIGNMENT:
            tensor = tensor.clone()
        return jax.dlpack.from_dlpack(tensor)


def _torch_to_jax(tensor: Any) -> Any:
    import jax

    device = jax.local_devices()[0]
    if _reaches(device, tensor):
        return _shared(tensor)
    return jax.numpy.asarray(to_numpy(tensor))
