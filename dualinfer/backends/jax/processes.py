"""The processes of jax.distributed that share a model, and what they say to each other."""

from collections.abc import Sequence
from contextlib import suppress

import jax
from jax._src import distributed  # nothing public waits for a message for a limited time

from ...errors import ConfigError, DistributedError
from ...parallel.agreement import Peers
from .mesh import OneDevice, Place


class Processes(Peers):
    """This process among `members`, numbers of jax.distributed, whose devices share a model.

    Messages go through the coordinator's store, under `name`, which is the same in all of them.
    """

    def __init__(self, members: Sequence[int], name: str, timeout: float) -> None:
        self.members, self.size = tuple(members), len(members)
        self.rank = self.members.index(jax.process_index())
        self._name, self._timeout, self._count = name, timeout, 0

    def exchange(self, message: bytes) -> list[bytes]:
        """Every process's message, in the order of ranks; see `agreement.Peers`."""
        client = distributed.global_state.client
        if client is None:
            raise DistributedError("jax.distributed was shut down; engines cannot go on without.")
        self._count += 1
        messages, of = [], self.rank
        try:
            client.key_value_set_bytes(self._key(self._count, self.rank), message)
            for of in range(self.size):
                if of == self.rank:
                    messages.append(message)
                else:
                    key, patience = self._key(self._count, of), int(self._timeout * 1e3)
                    messages.append(client.blocking_key_value_get_bytes(key, patience))
            if self._count > 1:  # all have come here, so that all have read the message before
                client.key_value_delete(self._key(self._count - 1, self.rank))
        except jax.errors.JaxRuntimeError as error:
            raise DistributedError(self._absent(of, error)) from error
        return messages

    def leave(self, message: bytes, reason: str) -> None:
        """Leave the message where the others find it; see `agreement.Peers`."""
        client = distributed.global_state.client
        if client is None:
            return
        self._count += 1
        with suppress(jax.errors.JaxRuntimeError):  # the coordinator may be gone
            client.key_value_set_bytes(self._key(self._count, self.rank), message)

    def _absent(self, rank: int, error: Exception) -> str:
        reason = str(error).splitlines()[0]
        if rank == self.rank:
            return f"The coordinator of jax.distributed, process 0, cannot be reached. ({reason})"
        return (
            f"Process {self.members[rank]} of jax.distributed did not make this call within "
            f"{self._timeout:g} seconds, or is gone. The processes "
            f"{', '.join(map(str, self.members))} share the model, and each must make the same "
            f"calls in the same order. ({reason})"
        )

    def _key(self, count: int, rank: int) -> str:
        return f"{self._name}/{count}/{rank}"


def join(place: Place, timeout: float) -> Peers:
    """This process among those that have devices of `place`; each of them must call it.

    Raises DistributedError where one does not come, ConfigError where they ask for other devices.
    """
    if isinstance(place, OneDevice):
        return Peers()
    members = sorted({device.process_index for device in place.mesh.devices.flat})
    if len(members) == 1:
        return Peers()
    client = distributed.global_state.client
    if client is None:
        raise ConfigError(
            "tensor_parallel: the devices belong to several processes, which jax.distributed did "
            "not start. Call jax.distributed.initialize() first."
        )
    among = "-".join(map(str, members))
    count = client.key_value_increment(f"dualinfer/engines/{among}/{jax.process_index()}", 1)
    peers = Processes(members, f"dualinfer/engine/{among}/{count}", timeout)
    asked = {"axis": place.axis, "mesh": dict(place.mesh.shape), "devices": place.name}
    settings = peers.tell("Making an engine", asked=asked)["asked"]
    if any(other != asked for other in settings):
        listed = "; ".join(f"process {m}: {s}" for m, s in zip(members, settings, strict=True))
        raise ConfigError(
            f"tensor_parallel differs between the processes. {listed}. Each must make the same "
            "engines, in the same order."
        )
    return peers
