"""Joining the processes that share a model: starting torch.distributed, meeting, making groups."""

import atexit
import os
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ...config.nested import MoEConfig, TensorParallelConfig
from ...errors import ConfigError, DistributedError, a_type
from ...parallel.sharding import Place, make_places
from .device import number_of
from .parallel import Ranks, job_store, let_all_go, one

_STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def degree_of(settings: TensorParallelConfig) -> int:
    """The number of processes that the config asks to share a model.

    Raises ConfigError where its fields say different numbers.
    """
    sizes = {"tensor_parallel.tp_size": settings.tp_size} if settings.tp_size > 1 else {}
    if settings.mpu is not None:
        size = _call("tensor_parallel.mpu", settings.mpu, "get_model_parallel_world_size")
        sizes["tensor_parallel.mpu"] = int(size)
    if settings.tp_group is not None:
        size = _call("tensor_parallel.tp_group", settings.tp_group, "size")
        sizes["tensor_parallel.tp_group"] = int(size)
    if not settings.enabled:
        return 1
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name} says {size}" for name, size in sizes.items())
        raise ConfigError(f"How many processes share the model? {listing}. Leave out all but one.")
    return next(iter(sizes.values()), 1)


def _call(name: str, group: Any, method: str) -> Any:
    function = getattr(group, method, None)
    if not callable(function):
        raise ConfigError(f"{name} is {a_type(group)}, which has no {method}().")
    return function()


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
        _start(settings.asked_by, degree, device, timeout)
    group = settings.tp_group
    if group is None and settings.mpu is not None:
        group = _call("tensor_parallel.mpu", settings.mpu, "get_model_parallel_group")
    if group is not None:
        return _join_given(group, device, timeout)
    return _join_world(settings.asked_by, degree, device, timeout)


def _start(asked_by: str, degree: int, device: torch.device, timeout: timedelta) -> None:
    """torch.distributed, from the environment that torchrun makes."""
    missing = [name for name in _STARTED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{asked_by}={degree} needs {degree} processes, and this one was started alone "
            f"({', '.join(missing)} not set). Start the script with `dualinfer launch --tp "
            f"{degree} SCRIPT` or `torchrun --nproc-per-node {degree} SCRIPT`."
        )
    rank, world, port = (number_of(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not (0 <= rank < world and 0 < port < 2**16):
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={world}, MASTER_PORT={port}: no process of a job has these. "
            "`dualinfer launch` and torchrun set them; unset them, or start the script with one."
        )
    _check_world(asked_by, degree, world)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        # A launcher's store outlives torch.distributed, and keeps where the processes were before.
        count = store.add(f"dualinfer/starts/{rank}", 1)
        own = PrefixStore(f"dualinfer/start/{count}", store)
        try:
            dist.init_process_group(
                backend, store=own, rank=rank, world_size=world, timeout=timeout
            )
        except BaseException:
            with suppress(RuntimeError):  # it may be gone
                store.add(f"dualinfer/starts/{rank}", -1)
            raise
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
        owner = alive()
        if owner is not None and owner.device.type == "cuda":
            with torch.cuda.device(owner.device):
                owner.forget_graphs()

    atexit.register(forget)


def _stop() -> None:
    """Give up torch.distributed: with gloo's threads alive, two of three exits abort."""
    let_all_go()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_world(asked_by: str, degree: int, world: int) -> None:
    if world % degree:
        way = f"set it to {world}" if world > 1 else "leave it unset"
        raise ConfigError(
            f"{asked_by}={degree}, but {world} process{'es' if world > 1 else ''} "
            f"run{'' if world > 1 else 's'} in this job. Start {degree} (or a multiple), or {way}."
        )


def _join_world(asked_by: str, degree: int, device: torch.device, timeout: timedelta) -> Ranks:
    """One of the sets of consecutive ranks; all of the world make all groups."""
    world, me = dist.get_world_size(), dist.get_rank()
    _check_world(asked_by, degree, world)
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
        _meet_by(job_store(), degree, timeout)
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
        listing = ", ".join(f"rank {r}: {d}" for r, d in enumerate(degrees))
        raise ConfigError(
            f"tensor_parallel.tp_size differs between the processes of the job: {listing}. Every "
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


def find_places(moe: MoEConfig, parts: int, ranks: Ranks) -> list[Place]:
    """The part of the experts, of `parts`, and of their width that each rank has, in order.

    The caller's groups say it where they are given, which all ranks must then do. Raises
    ConfigError.
    """
    sizes = {"ep_group": parts, "ep_mp_group": ranks.size // parts}
    groups = {name: getattr(moe, name) for name in sizes if moe.enabled}
    if all(group is None for group in groups.values()):
        return make_places(ranks.size, parts)
    with ranks.together("Sharing out experts") as work:
        own = {
            name: None if group is None else _members(f"moe.{name}", group, sizes[name], ranks)
            for name, group in groups.items()
        }
        said = work.meet(None, **own)
    if ranks.size == 1:
        return make_places(1, 1)
    found: dict[str, list[list[int]]] = {}
    for name, members in said.items():
        if all(group is None for group in members):
            continue
        among: set[tuple[int, ...]] = {tuple(group or ()) for group in members}
        if sorted(rank for group in among for rank in group) != sorted(ranks.members):
            raise ConfigError(
                f"moe.{name} is {', '.join(map(str, members))} in the {ranks.size} processes that "
                "share the model. Pass each of them the one group that it belongs to."
            )
        found[name] = sorted(map(list, among))
    places = []
    for rank in ranks.members:
        width = part = 0
        if "ep_group" in found:  # which of them, and where in it
            width, part = _place_in(found["ep_group"], rank)
        if "ep_mp_group" in found:
            part, within = _place_in(found["ep_mp_group"], rank)
            width = width if "ep_group" in found else within
        places.append(Place(part, width))
    if len(set(places)) < len(places):
        raise ConfigError(
            f"moe.ep_group and moe.ep_mp_group, {found['ep_group']} and {found['ep_mp_group']}: "
            "two processes share one of each. A group that has all experts (ep_group) has one "
            "process of each group that has the same ones (ep_mp_group)."
        )
    return places


def _place_in(groups: list[list[int]], rank: int) -> tuple[int, int]:
    """The number of the group in which a rank is, and its place there."""
    return next((i, group.index(rank)) for i, group in enumerate(groups) if rank in group)


def _members(name: str, given: Any, size: int, ranks: Ranks) -> list[int]:
    """The global ranks of a caller's group, which has `size` of those that share the model."""
    try:
        members = dist.get_process_group_ranks(given)
        me = dist.get_rank() if ranks.size == 1 else ranks.members[ranks.rank]
    except Exception as error:
        raise ConfigError(
            f"{name} is {a_type(given)}; expected a process group of torch.distributed "
            "that this process belongs to."
        ) from error
    sharing = [me] if ranks.size == 1 else list(ranks.members)
    if me not in members or not set(members) <= set(sharing):
        raise ConfigError(
            f"{name} holds the ranks {members}; this is rank {me}, and {sharing} share the model. "
            "Pass each process the group of these that it belongs to."
        )
    if len(members) != size:
        raise ConfigError(
            f"{name} holds the ranks {members}; with moe.ep_size, the number of parts, "
            f"{size} of the {ranks.size} processes that share the model are expected."
        )
    return members


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
