"""Exchanges between the GPUs of one process that need no collective of XLA's: their mailboxes."""

import contextlib
import ctypes
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import DistributedError
from .executables import Executables
from .forks import is_forked
from .mesh import ManyDevices, Place

# Float32 values of one device in one exchange; the vocabulary's if that is larger.
CAPACITY = 1 << 17
_POLLS = 1_000_000  # a second, about: each reads memory
_TRIAL = 10.0  # seconds
_ALLOCATORS = ("default", "bfc", "platform")  # whose memory XLA lets peers write to


class Exchange:
    """Mailboxes of the devices of `place`, for small sums and gathers over them, each one launch.

    They serve one runner, and are an argument of no step: kernels find them by `table`, int32
    [devices, ...] split over the devices, a `row` of kernels/triton/exchange.py for each as pairs
    of words, the low one first. A device waits `timeout` seconds.

    Exchanges must be traced in one order: each takes the array `order` from the one before it, and
    gives it back. All devices run them, with arrays of one shape and each with its own row.
    """

    def __init__(self, place: ManyDevices, vocab: int, timeout: float) -> None:
        from ...kernels.xla.launches import capability_of

        self.size, self.capacity = place.size, max(CAPACITY, vocab)
        self.patience = min(int(timeout * _POLLS), 2**31 - 1)
        self._capability = capability_of(place.device)
        self._name, self._timeout = place.name, timeout
        shape = (place.size, self._state // 4 + 4)
        lies = place.sharding(place.over_devices)
        make = jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=lies)
        # They must be zero before a peer writes.
        boxes = jax.block_until_ready(make())
        shards = {shard.device: shard.data for shard in boxes.addressable_shards}
        addresses = [shards[d].unsafe_buffer_pointer() for d in place.mesh.devices.flat]
        self.table = place.share(self._table(addresses), place.over_devices)
        self._boxes: jax.Array | None = boxes
        self._last: Any = None  # flags

    @property
    def _state(self) -> int:
        """The offset of the kernels' state in a device's memory, in bytes: behind the words."""
        return 16 * self.size * self.capacity

    def _table(self, addresses: Sequence[int]) -> np.ndarray:
        """int32 [devices, 2 (devices + 3)], of each device's memory."""
        from ...kernels.triton.exchange import row

        rows = [row(rank, addresses, own + self._state) for rank, own in enumerate(addresses)]
        return np.array(rows, np.int64).view(np.int32)

    def serves(self, values: int) -> bool:
        """True if an exchange of so many values of each device fits."""
        return 0 < values <= self.capacity

    def sum(
        self,
        x: jax.Array,
        row: jax.Array,
        order: jax.Array,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
        dtype: Any = None,
        *,
        pdl: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """residual + the sum of every device's x + bias, in `dtype`; and `order`.

        As in kernels/triton/exchange.py.
        """
        from ...kernels.triton.exchange import sum_ranks

        return self._exchange(sum_ranks, x, row, order, bias, residual, dtype, pdl=pdl)

    def gather(
        self, x: jax.Array, row: jax.Array, order: jax.Array, columns: int, *, pdl: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The first `columns` of all devices' x [..., width] side by side; and `order`.

        Every device has some of them, so that none ends before all have begun.
        """
        from ...kernels.triton.exchange import gather_ranks

        firsts = np.minimum(np.arange(self.size + 1) * x.shape[-1], columns).astype(np.int32)
        widths = np.diff(firsts).tolist()
        return self._exchange(gather_ranks, x, row, order, firsts, widths, pdl=pdl)

    def given_up(self, row: jax.Array, order: jax.Array, *, pdl: bool = False) -> jax.Array:
        """int32 [1]: not 0 once this device gave up an exchange of those that made `order`."""
        from ...kernels.triton.exchange import given_up
        from ...kernels.xla.launches import call

        return call(given_up, self._mailbox(row, order), pdl=pdl, capability=self._capability)[0]

    def _exchange(
        self, kernel: Any, x: jax.Array, row: jax.Array, order: jax.Array, *how: Any, pdl: bool
    ) -> tuple[jax.Array, jax.Array]:
        from ...kernels.xla.launches import call

        mailbox, capability = self._mailbox(row, order), self._capability
        y, (order,) = call(
            kernel, x, mailbox, *how, pdl=pdl, capability=capability, written=(order,)
        )
        return y, order

    def _mailbox(self, row: jax.Array, order: jax.Array) -> Any:
        from ...kernels.triton.exchange import Mailbox

        return Mailbox(None, self.size, self.capacity, self.patience, row, order=order)

    def note(self, flags: jax.Array) -> None:
        """Hold on to `given_up` of the step dispatched last, which ends after those before it."""
        self._last = flags

    def check(self, flags: jax.Array | None = None) -> None:
        """Raise DistributedError if an exchange was given up before `flags` were computed.

        Without them it looks at those noted last, if they are there already.
        """
        if flags is None and self._last is not None and self._last.is_ready():
            flags = self._last
        if flags is not None and np.asarray(flags).any():
            raise self.error()

    def error(self) -> DistributedError:
        """The error to raise when a device gave up an exchange."""
        return DistributedError(
            f"A device of {self._name} gave up an exchange: another one did not come to it within "
            f"about {self._timeout:g} seconds. What was computed since is wrong. Another program "
            "may hold that device, or a step may have failed there; make the engine anew."
        )

    def close(self) -> None:
        """Free the mailboxes, once no step may write to them any more."""
        if is_forked():  # they are the parent's
            return
        if self._last is not None:
            with contextlib.suppress(Exception):  # of a failed step
                jax.block_until_ready(self._last)
        self._last = self._boxes = None

    def __del__(self) -> None:
        """A runner that nobody closed."""
        if getattr(self, "_boxes", None) is not None:
            self.close()


def open_exchange(place: ManyDevices, vocab: int, timeout: float) -> Exchange | str:
    """An exchange over the devices, or why there is none, for people."""
    obstacle = find_obstacle(place)
    if obstacle is not None:
        return obstacle
    with place.context():
        try:
            exchange = Exchange(place, vocab, timeout)
            if _is_right(exchange, place):
                return exchange
        except jax.errors.JaxRuntimeError as error:  # of the compiler
            return str(error).splitlines()[0]
    return "a first sum over the GPUs' memory came out wrong"


def find_obstacle(place: Place) -> str | None:
    """Why the devices of `place` cannot write into each other's memory; None if they can."""
    if not isinstance(place, ManyDevices) or place.size == 1:
        return "there is one device"
    if place.mesh.is_multi_process:
        return "the devices belong to several processes"
    if place.mesh.size != place.size:
        return "the mesh has other axes"
    if place.device.platform != "gpu":
        return "the devices are no GPUs"
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in _ALLOCATORS:
        return f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}"
    return _peers_obstacle(list(place.mesh.devices.flat))


def _peers_obstacle(devices: Sequence[jax.Device]) -> str | None:
    """CUDA's reason against peer access, if there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 cannot be opened"
    can = ctypes.c_int()
    numbers: list[Any] = []
    for device in devices:
        number = ctypes.c_int()
        ordinal = device.local_hardware_id
        if ordinal is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(number), ordinal):
            return f"CUDA does not know {device}"
        numbers.append(number)
    for (a, first), (b, second) in itertools.permutations(zip(devices, numbers, strict=True), 2):
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(can), first, second) or not can.value:
            return f"{a} has no access to the memory of {b}"
    return None


def _is_right(exchange: Exchange, place: ManyDevices) -> bool:
    """True if two sums in a row, one in each half of the mailboxes, give what they should."""
    patience = exchange.patience
    exchange.patience = min(patience, int(_TRIAL * _POLLS))
    x = np.arange(1019, dtype=np.float32)  # of two programs

    def sums(table: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        share = lax.axis_index(place.axis).astype(jnp.float32) + 1
        order = jnp.zeros(1, jnp.int32)
        for _ in range(2):
            x, order = exchange.sum(x * share, table[0], order)
        return x[None], exchange.given_up(table[0], order)

    over = place.over_devices
    run = place.spread(sums, (over, place.sharding().spec), (over, over))
    totals, flags = Executables(launching=place.devices, joined=False).run(
        "trial", run, exchange.table, place.put(x)
    )
    exchange.patience = patience
    factor = place.size * (place.size + 1) // 2
    expected = np.broadcast_to(x * factor**2, totals.shape)
    return not np.asarray(flags).any() and np.array_equal(np.asarray(totals), expected)
