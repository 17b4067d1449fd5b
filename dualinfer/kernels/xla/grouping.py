"""Launches that follow one another, as one call of XLA's: what a traced step becomes.

Only within one call can a kernel fetch weights before the kernel in front of it has ended, and XLA
spends its own time on each call.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from .launches import launches_p

_RESHAPES = ("reshape", "squeeze", "broadcast_in_dim", "expand_dims", "slice")
MOST_BYTES = 64 << 20  # that launches of a call hand on: all is in memory at the same time


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be traced, with its launches in as few calls as possible."""

    def run(*args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        if not _launches_in(jaxpr.jaxpr):
            # Its trace is thrown away: XLA's names for what is inside would be lost.
            return function(*args)
        results = jaxpr_as_fun(_closed(jaxpr))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _launches_in(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive is launches_p or any(map(_launches_in, _inner(eqn))) for eqn in jaxpr.eqns
    )


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    found = []
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, ClosedJaxpr | Jaxpr):
                found.append(x.jaxpr if isinstance(x, ClosedJaxpr) else x)
    return found


def _closed(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    return jaxpr.replace(jaxpr=_regrouped(jaxpr.jaxpr))


def _with_inner(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return _closed(value)
    if isinstance(value, Jaxpr):
        return _regrouped(value)
    if isinstance(value, tuple) and any(isinstance(x, ClosedJaxpr | Jaxpr) for x in value):
        return tuple(map(_with_inner, value))
    return value


def _regrouped(jaxpr: Jaxpr) -> Jaxpr:
    """The same computation; what reads nothing of a group comes before it."""
    if not _launches_in(jaxpr):
        return jaxpr
    last_use: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last_use |= {v: i for v in eqn.invars if isinstance(v, Var)}
    last_use |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
    eqns: list[JaxprEqn] = []
    group = _Group(last_use)

    def flush(i: int) -> None:
        nonlocal group
        eqns.extend(group.equations(i))
        group = _Group(last_use)

    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is launches_p:
            if not group.takes(i, eqn):
                flush(i)
            group.add(eqn)
        elif not group.reaches(eqn):
            params = {name: _with_inner(value) for name, value in eqn.params.items()}
            eqns.append(eqn.replace(params=params))
        elif _is_reshape(eqn):
            group.rename(eqn)
        else:
            flush(i)
            params = {name: _with_inner(value) for name, value in eqn.params.items()}
            eqns.append(eqn.replace(params=params))
    flush(len(jaxpr.eqns))
    return jaxpr.replace(eqns=eqns)


def _bytes(eqn: JaxprEqn) -> int:
    """Bytes of the results that are memory of their own."""
    changed = {place for _, place in eqn.params["aliases"]}
    made: Any = (v.aval for i, v in enumerate(eqn.outvars) if i not in changed)
    return sum(aval.size * aval.dtype.itemsize for aval in made)


def _is_reshape(eqn: JaxprEqn) -> bool:
    """True if an equation gives its one argument's elements in their order."""
    if eqn.primitive.name not in _RESHAPES or len(eqn.invars) != 1:
        return False
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[0].aval
    return before.size == after.size


class _Group:
    """Launches of one call, gathered from the equations that stood for each of them."""

    def __init__(self, last_use: dict[Var, int]) -> None:
        self._last_use = last_use
        self._eqns: list[JaxprEqn] = []
        self._renames: list[JaxprEqn] = []
        self._memory: dict[Var, Var] = {}  # of a reshaped result: the result itself
        self._made: dict[Var, None] = {}
        self._inputs: dict[Var, None] = {}
        self._before: dict[Var, Var] = {}  # of a changed array: what it was
        self._bytes = 0

    def _origin(self, v: Any) -> Var:
        origin: Any = self._memory.get(v, v)
        return origin

    def _is_read_after(self, v: Var, i: int) -> bool:
        """True if an equation behind number `i` reads a result, or a reshape of it."""
        names = (v, *(other for other, origin in self._memory.items() if origin is v))
        return any(self._last_use.get(name, -1) > i for name in names)

    def reaches(self, eqn: JaxprEqn) -> bool:
        """True if an equation reads what the group makes."""
        known = self._made.keys() | self._memory.keys()
        return any(isinstance(v, Var) and v in known for v in eqn.invars)

    def takes(self, i: int, eqn: JaxprEqn) -> bool:
        """True if equation number `i` may join: nothing reads an array as it was before a change.

        Such arrays would be overwritten within the call, where XLA cannot copy them first.
        """
        if self._bytes + _bytes(eqn) > MOST_BYTES:
            return False
        if self._eqns and eqn.params["capability"] != self._eqns[0].params["capability"]:
            return False
        overwritten = set(self._before.values())
        if any(self._origin(v) in overwritten for v in eqn.invars):
            return False
        for number, _ in eqn.params["aliases"]:
            v = eqn.invars[number]
            origin = self._origin(v)
            if origin in self._made and (v is not origin or self._is_read_after(origin, i)):
                return False
            if origin in self._inputs and sum(origin is self._origin(w) for w in eqn.invars) > 1:
                return False
        return True

    def add(self, eqn: JaxprEqn) -> None:
        """Let an equation join."""
        for v in eqn.invars:
            origin = self._origin(v)
            if origin not in self._made:
                self._inputs[origin] = None
        for number, place in eqn.params["aliases"]:
            self._before[eqn.outvars[place]] = self._origin(eqn.invars[number])
        self._made |= dict.fromkeys(eqn.outvars)
        self._eqns.append(eqn)
        self._bytes += _bytes(eqn)

    def rename(self, eqn: JaxprEqn) -> None:
        """A reshape of what the group makes: the same memory."""
        self._renames.append(eqn)
        self._memory[eqn.outvars[0]] = self._origin(eqn.invars[0])

    def equations(self, i: int) -> list[JaxprEqn]:
        """The call, and the reshapes that equations from number `i` on read."""
        if not self._eqns:
            return []
        superseded = {v for v in self._before.values() if v in self._made}
        final = [v for v in self._made if v not in superseded]
        inputs: list[Any] = list(self._inputs)
        numbers = {v: i for i, v in enumerate(inputs)}
        numbers |= {v: len(inputs) + i for i, v in enumerate(final)}
        last: dict[Var, Var] = {}  # of an array that is changed several times
        for after, before in reversed(self._before.items()):
            last[before] = last.get(after, after)
        numbers |= {v: numbers[last[v]] for v in superseded}
        out: list[Any] = [None] * len(final)
        launches = []
        for eqn in self._eqns:
            own = [*(numbers[self._origin(v)] for v in eqn.invars)]
            own += [numbers[v] for v in eqn.outvars]
            launches += [x.over(dict(enumerate(own))) for x in eqn.params["launches"]]
            for v, buffer in zip(eqn.outvars, eqn.params["out"], strict=True):
                out[numbers[v] - len(inputs)] = buffer
        aliases = tuple((numbers[v], numbers[last[v]] - len(inputs)) for v in inputs if v in last)
        params = {"launches": tuple(launches), "out": tuple(out), "aliases": aliases}
        call = self._eqns[0].replace(
            invars=inputs, outvars=final, params=self._eqns[0].params | params
        )
        kept: list[JaxprEqn] = []
        for eqn in reversed(self._renames):
            read = {later.invars[0] for later in kept}  # a reshape may be of another one
            if eqn.outvars[0] in read or self._last_use.get(eqn.outvars[0], -1) >= i:
                kept.append(eqn)
        return [call, *reversed(kept)]
