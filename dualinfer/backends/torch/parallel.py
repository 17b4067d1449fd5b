"""The processes that share a model: joining them, what they say to each other, what they sum."""

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from ...config.nested import TensorParallelConfig
from ...errors import ConfigError, DistributedError
from ...sharding import Plan

_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LENGTH, _SHORT = 8, 248  # bytes
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

T = TypeVar("T")

_joined: "weakref.WeakSet[Ranks]" = weakref.WeakSet()  # those that hold groups


class Ranks:
    """This process among those that share a model: `rank` of `size`, and their groups.

    `members` are their global ranks. `host` is the group that carries messages, `group` the one
    that carries tensors of `device`; `timeout` is in seconds.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        host: Any,
        group: Any,
        device: torch.device,
        timeout: float = 0.0,
        owned: Sequence[Any] = (),
    ) -> None:
        self.members, self.rank, self.size = tuple(members), rank, len(members)
        self.host, self.group, self.device, self.timeout = host, group, device, timeout
        self.copy = 0  # see `agreement.Peers`
        self._owned = list(owned)
        self._lost = False  # a rank that missed a call would take the next one's values for its
        if host is not None:
            _joined.add(self)

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, in order; see `agreement.Peers`."""
        if self.size == 1:
            return [message]
        # Most are short: their length and they themselves go together.
        head = len(message).to_bytes(_LENGTH, "little") + message[:_SHORT]
        heads = self._gather(head, _LENGTH + _SHORT)
        sizes = [int.from_bytes(found[:_LENGTH], "little") for found in heads]
        found = [short[_LENGTH:] for short in heads]
        if max(sizes) > _SHORT:
            rests = self._gather(message[_SHORT:], max(sizes) - _SHORT)
            found = [short + rest for short, rest in zip(found, rests, strict=True)]
        return [padded[:size] for padded, size in zip(found, sizes, strict=True)]

    def _gather(self, message: bytes, width: int) -> list[bytes]:
        padded = bytearray(message.ljust(width, b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8)

        def gather() -> list[torch.Tensor]:
            on_host = "cpu:" in dist.get_backend_config(self.host)  # else a caller's NCCL group
            placed = own if on_host else own.to(self.device)
            found = [torch.empty_like(placed) for _ in self.members]
            dist.all_gather(found, placed, group=self.host)
            return found

        return [bytes(tensor.cpu().numpy()) for tensor in self._talk(gather)]

    def _talk(self, work: Callable[[], T]) -> T:
        """A collective; what breaks it off is told as what it is."""
        if self._lost:
            raise DistributedError(
                f"Rank {self.rank} of {self.size} lost the others in a call before. Make the "
                "engines anew, in every process."
            )
        if not dist.is_initialized():
            self._lost = True
            raise DistributedError(
                f"Rank {self.rank} of {self.size}: torch.distributed was shut down "
                "(destroy_process_group) while this engine needed it. Close engines first; this "
                "one cannot go on."
            )
        try:
            return work()
        except RuntimeError as error:  # gloo's, and torch.distributed's own
            self._lost = True
            raise DistributedError(
                f"Rank {self.rank} of {self.size} lost the others: a process ended, or did not "
                f"come within the timeout: it may have failed or stopped in code of the caller's. "
                f"Its own output says why. ({_brief(error)})"
            ) from error

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        if self.size == 1:
            return x
        # gloo rounds each of its sums to the tensors' own dtype.
        wide = x.float() if x.device.type == "cpu" else x.contiguous()
        self._talk(lambda: dist.all_reduce(wide, group=self.group))
        return wide.to(x.dtype)

    def join_last(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Every rank's `x` [..., width] side by side along the last axis, [..., sum of widths]."""
        if self.size == 1:
            return x
        widest = max(widths)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        found = own.new_empty(self.size, *own.shape)
        self._talk(lambda: _gather_single(found.view(-1), own.view(-1), group=self.group))
        parts = [part[..., :width] for part, width in zip(found, widths, strict=True)]
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Give up the groups that were made for this engine."""
        owned, self._owned = self._owned, []
        for group in owned:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.let_go()

    def let_go(self) -> None:
        """Hold no group any longer: one that outlives torch.distributed aborts some exits."""
        self.host = self.group = None
        self._lost = True


class Split(NamedTuple):
    """How one rank's ops are joined with the others': `vocab` are the rows of each rank's share.

    `first` is the token of the first row of this one's.
    """

    ranks: Ranks
    first: int
    vocab: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Ranks, plan: Plan) -> Self | None:
        """The seams of a plan; None where one rank has everything."""
        if plan.size == 1:
            return None
        shares = [shard.shares["vocab"] for shard in plan.shards]
        return cls(ranks, shares[ranks.rank].start, tuple(share.extent for share in shares))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        return self.ranks.sum(x)

    def gather_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] from each rank's share of the vocabulary."""
        return self.ranks.join_last(x, self.vocab)

    def is_here(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of each id in this rank's share of the vocabulary, and whether it is there."""
        rows = ids - self.first
        count = self.vocab[self.ranks.rank]
        return rows.clamp(0, count - 1), (rows >= 0) & (rows < count)


def one(device: torch.device) -> Ranks:
    """A process that shares its model with nobody."""
    return Ranks((0,), 0, None, None, device)


def degree_of(settings: TensorParallelConfig) -> int:
    """The number of processes that the config asks to share a model.

    Raises ConfigError where its fields say different numbers.
    """
    said = {"tensor_parallel.tp_size": settings.tp_size} if settings.tp_size > 1 else {}
    if settings.mpu is not None:
        size = _call("tensor_parallel.mpu", settings.mpu, "get_model_parallel_world_size")
        said["tensor_parallel.mpu"] = int(size)
    if settings.tp_group is not None:
        size = _call("tensor_parallel.tp_group", settings.tp_group, "size")
        said["tensor_parallel.tp_group"] = int(size)
    if not settings.enabled:
        return 1
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{name} says {size}" for name, size in said.items())
        raise ConfigError(f"How many processes share the model? {listed}. Leave out all but one.")
    return next(iter(said.values()), 1)


def _call(name: str, group: Any, method: str) -> Any:
    found = getattr(group, method, None)
    if not callable(found):
        raise ConfigError(f"{name} is a {type(group).__name__}, which has no {method}().")
    return found()


def join(settings: TensorParallelConfig, device: torch.device) -> Ranks:
    """This process's place among those that share the model; every process of the job must call it.

    Groups are made for this engine alone, and given up with it: several engines of different
    degrees live in one job. Consecutive ranks share a model, `tp_size` at a time, so that a job of
    8 with tp_size 4 runs two copies; `mpu` or `tp_group` name another set. Starts torch.distributed
    from torchrun's environment if nobody has. Raises ConfigError or DistributedError.
    """
    degree = degree_of(settings)
    if degree == 1:
        return one(device)
    if not dist.is_available():
        raise ConfigError("tensor_parallel.tp_size: this build of torch has no torch.distributed.")
    timeout = timedelta(seconds=settings.timeout)
    if not dist.is_initialized():
        _start(degree, device, timeout)
    given = settings.tp_group
    if given is None and settings.mpu is not None:
        given = _call("tensor_parallel.mpu", settings.mpu, "get_model_parallel_group")
    if given is not None:
        return _join_given(given, device, timeout)
    return _join_world(degree, device, timeout)


def _start(degree: int, device: torch.device, timeout: timedelta) -> None:
    """torch.distributed, from the environment that torchrun makes."""
    missing = [name for name in _STARTED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"tensor_parallel.tp_size={degree} needs {degree} processes, and this one was started "
            f"alone ({', '.join(missing)} not set). Start the script with `dualinfer launch --tp "
            f"{degree} SCRIPT` or `torchrun --nproc-per-node {degree} SCRIPT`."
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise ConfigError(
                f"The environment has {name}={os.environ[name]!r}, and a number is expected there. "
                f"Start the script with `dualinfer launch --tp {degree} SCRIPT` or torchrun."
            )
    _check_world(degree, int(os.environ["WORLD_SIZE"]))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        # It names the groups, and stays behind in processes that tried in vain; a later attempt
        # would wait for names that the others do not use. destroy_process_group resets it likewise.
        dist.distributed_c10d._world.group_count = 0
        raise DistributedError(
            f"The processes of the job did not come together within {timeout.total_seconds():.0f} "
            f"seconds. Did all {os.environ['WORLD_SIZE']} start? ({_first_line(error)})"
        ) from error
    atexit.register(_stop)


def forget_graphs_at_exit(runner: Any) -> None:
    """Drop the graphs of a runner that is still open when the process ends.

    NCCL waits without end for graphs that have captured its calls. The groups are `_stop`'s.
    """
    alive = weakref.ref(runner)

    def forget() -> None:
        found = alive()
        if found is not None and found.device.type == "cuda":
            with torch.cuda.device(found.device):
                found.forget_graphs()

    atexit.register(forget)


def _stop() -> None:
    """Give up torch.distributed: with gloo's threads alive, two of three exits abort."""
    for ranks in list(_joined):
        ranks.let_go()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_world(degree: int, world: int) -> None:
    if world % degree:
        way = f"set tp_size to {world}" if world > 1 else "leave tp_size unset"
        raise ConfigError(
            f"tensor_parallel.tp_size={degree}, but {world} process{'es' if world > 1 else ''} "
            f"run{'' if world > 1 else 's'} in this job. Start {degree} (or a multiple), or {way}."
        )


def _join_world(degree: int, device: torch.device, timeout: timedelta) -> Ranks:
    """One of the sets of consecutive ranks; all of the world make all groups."""
    world, me = dist.get_world_size(), dist.get_rank()
    _check_world(degree, world)
    _meet(degree, timeout)
    mine = None
    for first in range(0, world, degree):
        members = range(first, first + degree)
        # Two groups, so that a message never meets a sum of a rank that went another way.
        host: Any = dist.new_group(members, backend="gloo", timeout=timeout)
        carrier = "nccl" if device.type == "cuda" else "gloo"
        group: Any = dist.new_group(members, backend=carrier, timeout=timeout)
        if me in members:
            seconds = timeout.total_seconds()
            mine = Ranks(members, me - first, host, group, device, seconds, [host, group])
            mine.copy = me // degree
    assert mine is not None
    return mine


def _meet(degree: int, timeout: timedelta) -> None:
    """Wait until every process of the job is here, making its engine of the same number.

    Making a group would wait without end. Raises DistributedError that names who is missing, and
    ConfigError where their degrees differ.
    """
    try:
        _meet_by(dist.distributed_c10d._get_default_store(), degree, timeout)
    except RuntimeError as error:
        if isinstance(error, DistributedError):
            raise
        raise DistributedError(
            "The processes of the job cannot find each other: the one of rank 0 is gone. Its own "
            f"output says why. ({_first_line(error)})"
        ) from error


def _meet_by(store: Any, degree: int, timeout: timedelta) -> None:
    """The same by the store that rank 0 holds for all."""
    me = dist.get_rank()
    count = store.add(f"dualinfer/{me}", 1)
    keys = [f"dualinfer/{count}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[me], str(degree))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        store.delete_key(keys[me])
        store.add(f"dualinfer/{me}", -1)
        raise DistributedError(
            f"Rank {me} waited {timeout.total_seconds():.0f} seconds for rank {', '.join(missing)} "
            "to make this engine. Every process of the job must call init_inference() for the same "
            "engines, in the same order."
        ) from error
    degrees = [int(store.get(key)) for key in keys]
    if len(set(degrees)) > 1:
        listed = ", ".join(f"rank {r}: {d}" for r, d in enumerate(degrees))
        raise ConfigError(
            f"tensor_parallel.tp_size differs between the processes of the job: {listed}. Every "
            "process must make the same engines, in the same order."
        )


def _join_given(given: Any, device: torch.device, timeout: timedelta) -> Ranks:
    """The caller's own group; messages go through it, too."""
    me, members = dist.get_rank(), dist.get_process_group_ranks(given)
    if me not in members:
        raise ConfigError(
            f"tensor_parallel.tp_group holds the ranks {members}, and this is rank {me}. Pass each "
            "process the group that it belongs to."
        )
    carries = dist.get_backend_config(given)  # such as cpu:gloo,cuda:nccl
    if device.type == "cuda" and "cuda:nccl" not in carries:
        raise ConfigError(
            f"tensor_parallel.tp_group carries {carries}, and the model runs on {device}, whose "
            "sums go through NCCL. Make the group with backend='nccl' or 'cpu:gloo,cuda:nccl'."
        )
    return Ranks(members, members.index(me), given, given, device, timeout.total_seconds())


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _brief(error: BaseException) -> str:
    """The first line, which says where, and the last, in which NCCL says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys(lines[:1] + lines[-1:]))
