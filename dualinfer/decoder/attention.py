"""Parts of some layers in the place of `layer.attention`, or beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ..model.spec import Attention
from ..ops import heads
from ..ops.contract import Array, Epilogue, LatentQkv, NormOf, Unnormed
from . import layer as common
from .run import Run, SubLayer


class Projected(NamedTuple):
    """The input of attention, and what it was projected from: norm(x), where there is a norm.

    `beside` is what another projection gave, as a `Wiring` made it.
    """

    qkv: Array
    x: Array
    norm: NormOf | None
    beside: Any = None


Project: TypeAlias = Callable[[Run, Array, NormOf | None], Projected]
Change: TypeAlias = Callable[[Run, Array, Projected], Array]  # of queries, keys and values, or of y
Back: TypeAlias = Callable[[Run, Array, Projected, Epilogue], Array]


def attention_of(a: Attention, lends: bool) -> SubLayer:
    """The attention of a layer, whose keys and values others have if it `lends`."""
    wiring = a.wiring
    project: Project = _packed if a.latent is None else project_latent
    before, back = changes_of_qkv(a, lends), _project_back
    behind: list[Change] = []
    if wiring is not None:
        project = wiring.project if wiring.projects else project
        before.append(wiring.widen)
        behind.append(wiring.narrow)
        back = wiring.project_back
    if project is _packed and not before and not behind:
        return common.attention
    return _attention(project, before, behind, back)


def changes_of_qkv(a: Attention, lends: bool) -> list[Change]:
    """The changes to packed queries, keys and values before their heads are widened."""
    changes = []
    if a.clip is not None and not a.clips_normed:
        changes.append(_clip)
    if a.value_norm is not None:
        changes.append(_norm_values)
    if lends:
        changes.append(_lend)
    elif a.lender is not None:
        changes.append(_borrow)
    return changes


def _attention(
    project: Project, before: list[Change], behind: list[Change], back: Back
) -> SubLayer:
    def attention(
        run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        own = project(run, x, norm)
        qkv = own.qkv
        for change in before:
            qkv = change(run, qkv, own)
        y = run.attend(qkv)
        for change in behind:
            y = change(run, y, own)
        return back(run, y, own, Epilogue(residual=residual, spend=spend))

    return attention


def _project_back(run: Run, y: Array, own: Projected, epilogue: Epilogue) -> Array:
    return run.project_back("out", y, epilogue)


def _packed(run: Run, x: Array, norm: NormOf | None) -> Projected:
    return Projected(run.project("qkv", x, Epilogue(norm=norm)), x, norm)


def project_latent(
    run: Run, x: Array, norm: NormOf | None, query: Project | None = None
) -> Projected:
    """Queries, and what keys and values of all heads are made of.

    `query` makes queries, as `Projected.qkv`, of their latent vector and its norm, or of the input;
    None for the product `query`.
    """
    own, read = run.layer.attending.latent, (x, norm)
    assert own is not None
    shared = run.project("latent", x, Epilogue(norm=norm))
    if own.query_rank:
        x = run.project("query_latent", x, Epilogue(norm=norm))
        norm = NormOf.named(own.norm, run.w, "query_norm")
    made = query(run, x, norm) if query else Projected(_query(run, x, norm), x, norm)
    return Projected(LatentQkv(made.qkv, shared), *read, made.beside)


def _query(run: Run, x: Array, norm: NormOf | None) -> Array:
    return run.project("query", x, Epilogue(norm=norm))


def _clip(run: Run, qkv: Array, own: Projected) -> Array:
    clip = run.layer.attending.clip
    assert clip is not None
    return qkv.clip(-clip, clip)


def _norm_values(run: Run, qkv: Array, own: Projected) -> Array:
    a = run.layer.attending
    assert a.value_norm is not None
    norm = NormOf.named(a.value_norm, run.w, "v_norm")
    return heads.norm_values(run.ops.maths, a, qkv, norm)


def _lend(run: Run, qkv: Array, own: Projected) -> Array:
    """A copy of what is lent, since ops change it."""
    run.given.lent[run.number] = qkv
    return heads.with_keys_of(run.ops.maths, run.layer.attending, qkv, qkv)


def _borrow(run: Run, qkv: Array, own: Projected) -> Array:
    """Queries with the keys and values of a lender."""
    a = run.layer.attending
    assert a.lender is not None
    return heads.with_keys_of(run.ops.maths, a, qkv, run.given.lent[a.lender])


def _between(into: str, mix: Callable[[Run, Array], Array | Unnormed], out: str) -> SubLayer:
    """A sub-layer that mixes tokens between two projections, by their names."""

    def sublayer(
        run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        y, behind = mix(run, run.project(into, x, Epilogue(norm=norm))), None
        if isinstance(y, Unnormed):
            y, behind = y.y, y.norm
        return run.project_back(out, y, Epilogue(norm=behind, residual=residual, spend=spend))

    return sublayer


cross = _between("cross_q", Run.attend_across, "cross_out")
recurrence = _between("recurrence_in", Run.recur, "recurrence_out")


def beside_recurrence(attention: SubLayer) -> SubLayer:
    """Attention, and a recurrence of the same (Falcon-H1)."""

    def both(run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool) -> Array:
        y = attention(run, x, norm, None, False)
        y = run.ops.add(y, recurrence(run, x, norm, None, False))
        return y if residual is None else run.ops.add(residual, y)

    return both
