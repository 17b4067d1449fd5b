"""The processes that share a model: what they say to each other, and what they sum."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from ...errors import DistributedError
from ...model.spec import ModelSpec
from ...parallel.agreement import Peers
from ...parallel.sharding import ShardingPlan

_LENGTH, _SHORT = 8, 248  # bytes
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

T = TypeVar("T")

_joined: "weakref.WeakSet[Ranks]" = weakref.WeakSet()  # those that hold groups


class Ranks(Peers):
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
        self._owned = list(owned)
        self._name = "" if host is None else host.group_name
        self._lost = False  # a rank that missed a call would take the next one's values for its
        if host is not None:
            _joined.add(self)

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, in order; see `agreement.Peers`."""
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
            tensors = [torch.empty_like(placed) for _ in self.members]
            dist.all_gather(tensors, placed, group=self.host)
            return tensors

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
                f"Rank {self.rank} of {self.size} lost the others: {self._why(error)} "
                f"({_brief(error)})"
            ) from error
        except BaseException:  # of the others some may have what this one has not
            self._lost = True
            raise

    def leave(self, message: bytes, reason: str) -> None:
        """Go without waiting for the others, and tell them the reason; see `agreement.Peers`.

        They learn it at once, since a group of ours ends with it. A group of the caller's stays,
        and those that wait in it wait until this process ends.
        """
        host, self._lost = self.host, True
        if self.size == 1 or host is None or not dist.is_initialized():
            return
        with suppress(RuntimeError):  # the store may be gone
            job_store().set(self._reason_key(self.members[self.rank]), reason)
        if host in self._owned:
            self._owned.remove(host)
            self.host = None
            dist.destroy_process_group(host)

    def _why(self, error: RuntimeError) -> str:
        """The reasons that lost members left; after a timeout the store might not answer either."""
        reasons = []
        if "timed out" not in str(error).lower():
            with suppress(RuntimeError, ValueError):
                store = job_store()
                for rank, member in enumerate(self.members):
                    key = self._reason_key(member)
                    if store.check([key]):
                        reasons.append(f"rank {rank} left: {store.get(key).decode()}.")
        return " ".join(reasons) or (
            "a process ended, or did not come within the timeout: it may have failed or stopped "
            "in code of the caller's. Its own output says why."
        )

    def _reason_key(self, member: int) -> str:
        return f"dualinfer/left/{self._name}/{member}"

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        if self.size == 1:
            return x
        # gloo rounds each of its sums to the tensors' own dtype.
        wide = x.float() if x.device.type == "cpu" else x.contiguous()
        self._talk(lambda: dist.all_reduce(wide, group=self.group))
        return wide.to(x.dtype)

    def most(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of every rank's `x`, element by element, which may be overwritten."""
        if self.size > 1:
            x = x.contiguous()
            self._talk(lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group))
        return x

    def join_last(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Every rank's `x` [..., width] side by side along the last axis, [..., sum of widths]."""
        if self.size == 1:
            return x
        widest = max(widths)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        shares = own.new_empty(self.size, *own.shape)
        self._talk(lambda: _gather_single(shares.view(-1), own.view(-1), group=self.group))
        parts = [part[..., :width] for part, width in zip(shares, widths, strict=True)]
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Give up the groups that were made for this engine."""
        groups, self._owned = self._owned, []
        for group in groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.let_go()

    def let_go(self) -> None:
        """Hold no group any longer: one that outlives torch.distributed aborts some exits."""
        self.host = self.group = None
        self._lost = True


class Split(NamedTuple):
    """The seams that join one rank's ops with the others', by `plan`.

    `vocab` are the rows of each rank's share, `first` is the token of the first row of this one's.
    """

    ranks: Ranks
    first: int
    vocab: tuple[int, ...]
    plan: ShardingPlan | None = None

    @classmethod
    def of(cls, ranks: Ranks, plan: ShardingPlan) -> Self | None:
        """The seams of a plan; None where one rank has everything."""
        if plan.size == 1:
            return None
        shares = [shard.share("vocab") for shard in plan.shards]
        return cls(ranks, shares[ranks.rank].start, tuple(share.extent for share in shares), plan)

    def whole(self, spec: ModelSpec, index: int) -> tuple[int, int, float] | None:
        """See `contract.LayerAttention`; of a layer of `spec`, the model's or its encoder's."""
        assert self.plan is not None
        layer = self.plan.table.spec.number(spec, index)
        a = self.plan.table.spec.all_layers[layer].attending
        if a.qk_norm is None or a.qk_norm_over != "all":
            return None
        return *a.qkv_sizes[:2], self.plan.key_parts(layer)[self.ranks.rank]

    def own_experts(self, count: int) -> tuple[int, int] | None:
        """This rank's of a layer's `count` experts, from which to before which number.

        None where it has all.
        """
        shares = None if self.plan is None else self.plan.own_experts(count)
        if shares is None:
            return None
        own = shares[self.ranks.rank]
        return own.start, own.stop

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, which may be overwritten."""
        return self.ranks.sum(x)

    def most(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of every rank's `x`, element by element, which may be overwritten."""
        return self.ranks.most(x)

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


def let_all_go() -> None:
    """Have nobody hold a group any longer."""
    for ranks in list(_joined):
        ranks.let_go()


def job_store() -> Any:
    """The store that all of a job's processes reach."""
    return dist.distributed_c10d._get_default_store()


def _brief(error: BaseException) -> str:
    """The first line, which says where, and the last, in which NCCL says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys(lines[:1] + lines[-1:]))
