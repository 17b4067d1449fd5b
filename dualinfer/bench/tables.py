"""The output of a bench command: a table with a row for each system, and a bar chart."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column

from ..system.tables import Table

Row = dict[str, Any]

_WIDE = 1000

_TITLES = {
    "decode": "Decode: the first token taken off, sampling included, medians",
    "prefill": "Prefill: from the prompt to its first token, medians",
    "forward": "One forward pass over whole sequences, medians",
    "embed": "Vectors of texts of many lengths, medians",
    "serve": "Many requests at once: times in ms, medians and 99th percentiles",
    "ops": "Single ops, medians",
}


def _share(row: Row) -> str:
    return f"{row['of_limit']:.1%}"


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]:.3f}" if row[name] < 10 else f"{row[name]:.1f}"


def _gb(*names: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if any(row[name] is None for name in names):
            return "-"
        return f"{sum(row[name] for name in names) / 1e9:.3g}"

    return show


_WORKLOAD: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "dtype": lambda row: row["dtype"] or "",
    "weights": lambda row: _held(row),
    "cache": lambda row: row.get("kv_cache") or row["dtype"] or "",
    "states": lambda row: row.get("states") or "float32",
    "batch x\ntokens": lambda row: f"{row['batch']} x {row['tokens']}",
}
_LOADS: dict[str, Callable[[Row], str]] = {
    "model": _WORKLOAD["model"],
    "dtype": _WORKLOAD["dtype"],
    "weights": _WORKLOAD["weights"],
    "cache": _WORKLOAD["cache"],
    "states": _WORKLOAD["states"],
    "requests": lambda row: f"{row['load']['requests']} of {row['what']}" if "what" in row else "",
}


def _spans(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if f"median_{name}_ms" not in row:
            return "-"
        return f"{_short(row[f'median_{name}_ms'])} {_short(row[f'p99_{name}_ms'])}"

    return show


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _known(name: str, show: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: show(row[name]) if name in row else "-"


_FIGURES: dict[str, dict[str, Callable[[Row], str]]] = {
    "decode": {
        "ms/token": _ms("ms_per_token"),
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "of\nlimit": _share,
        "streamed,\nGB": lambda row: _gb("streamed_bytes")({"streamed_bytes": None, **row}),
        "first\ntoken, ms": _ms("first_token_ms"),
        "to read,\nGB": _gb("weight_bytes", "kv_bytes"),
        "peak,\nGB": _gb("peak_bytes"),
    },
    "prefill": {
        "ms": _ms("ms"),
        "TFLOP": lambda row: f"{row['flops'] / 1e12:.3g}",
        "TFLOP/s": lambda row: f"{row['tflops']:.4g}",
        "of\nlimit": _share,
        "peak,\nGB": _gb("peak_bytes"),
    },
    "forward": {
        "ms": _ms("ms"),
        "limit,\nms": _ms("limit_ms"),
        "of\nlimit": _share,
        "first\ncall, ms": _ms("first_call_ms"),
        "peak,\nGB": _gb("peak_bytes"),
    },
    "embed": {
        "ms": _ms("ms"),
        "texts/s": lambda row: f"{row['texts_per_s']:,.0f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "of\nlimit": _share,
        "peak,\nGB": _gb("peak_bytes"),
    },
    "serve": {
        "tokens/s": lambda row: f"{row['output_throughput']:,.0f}",
        "failed": lambda row: str(row["failed"]) if row["failed"] else "-",
        "first\ntoken": _spans("ttft"),
        "between\ntokens": _spans("itl"),
        "bare\nstep": _known("bare_step_ms", _short),
        "of\nbare": _known("of_bare", "{:.1%}".format),
        "of\nlimit": _known("of_limit", "{:.1%}".format),
        "good\n/s": _known("request_goodput", "{:.3g}".format),
        "requests\n/s": lambda row: f"{row['request_throughput']:.3g}",
        "each\ntoken": _spans("tpot"),
        "whole": _spans("e2el"),
    },
    "ops": {
        "by": lambda row: _whose(row),
        "µs": lambda row: f"{row['us']:.2f}",
        "GB/s": lambda row: f"{row['gb_per_s']:,.0f}",
        "TFLOP/s": lambda row: f"{row['tflops']:.3g}",
        "of\nlimit": _share,
    },
}


def _held(row: Row) -> str:
    """The scheme of most layers' weights, and the head's; of plain ones the dtype says all."""
    if row.get("scheme"):
        return f"{row['scheme']};\nhead {row['head']}" if row["head"] else row["scheme"]
    return row.get("quant") or row["dtype"] or ""


def _workload(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """The columns that say what was run; those of weights, cache and states where some differ."""
    columns = _LOADS if any(row["kind"] == "serve" for row in rows) else _WORKLOAD
    quantized = any(row.get("scheme") or row.get("quant") for row in rows)
    shown = {"weights": quantized, "cache": any(row.get("kv_cache") for row in rows)}
    shown["states"] = any(row.get("states") for row in rows)
    return {name: show for name, show in columns.items() if shown.get(name, True)}


def label(row: Row) -> str:
    """The system of a row, in words."""
    if row["system"] == "url":
        return row["url"]
    if row["system"] not in ("torch", "jax"):
        return row["system"]
    over = f" on {row['tp']}" if row.get("tp", 1) > 1 else ""
    over += f", ep {row['ep']}" if row.get("ep", 1) > 1 else ""
    over += f", {row['by']}" if row.get("by") and row["kind"] != "ops" else ""
    over += ", no HTTP" if row.get("over_http") is False else ""
    return f"dualinfer {row['system']}{over}" + ("" if row["kernels"] else ", no kernels")


def side_by_side(rows: Sequence[Row]) -> list[Row]:
    """The rows with the systems of one workload next to each other, in the order they came."""

    def workload(row: Row) -> tuple[object, ...]:
        names = ("model", "batch", "tokens", "op", "description", "what")
        return tuple(row.get(name) for name in names)

    first: dict[tuple[object, ...], int] = {}
    for row in rows:
        first.setdefault(workload(row), len(first))
    return sorted(rows, key=lambda row: first[workload(row)])


def make_table(kind: str, rows: Sequence[Row], width: int = _WIDE) -> Table:
    """The rows that were measured; those that failed, or cannot run here, say so.

    What is the same in all rows stands in the caption. Where `width` is too narrow, the last
    columns go, and the caption names them.
    """
    if kind == "ops":
        lead: dict[str, Callable[[Row], str]] = {
            "op": lambda row: row.get("op", row["model"]),
            "size": lambda row: row.get("description", ""),
            "dtype": lambda row: row["dtype"] or "",
        }
    else:
        lead = {"system": label, **_workload(rows)}
    first = next(iter(lead))
    caption = []
    for column in [column for column in lead if column not in (first, "size")]:
        values = {lead[column](row) for row in rows if lead[column](row)}
        if len(values) <= 1:
            show = lead.pop(column)
            caption += [f"{_line(column)} {_line(show(row))}" for row in rows[:1] if values]
    figures = dict(_FIGURES[kind])
    shown = [row for row in rows if "error" not in row and "skipped" not in row]
    figures = {n: f for n, f in figures.items() if not shown or {f(row) for row in shown} != {"-"}}
    left_out: list[str] = []
    table = _filled(kind, rows, lead, figures)
    while len(figures) > 1 and _width_of(table) > width:
        left_out.insert(0, _line(figures.popitem()[0]))
        table = _filled(kind, rows, lead, figures)
    if left_out:
        caption.append(f"no room for: {'; '.join(left_out)}")
    table.caption = escape("; ".join(caption)) or None
    return table


def _filled(
    kind: str,
    rows: Sequence[Row],
    lead: dict[str, Callable[[Row], str]],
    figures: dict[str, Callable[[Row], str]],
) -> Table:
    table = Table(title=_TITLES[kind], box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in lead:
        table.add_column(column, no_wrap=column != "size")
    for column in figures:
        table.add_column(column, justify="left" if column == "by" else "right", no_wrap=True)
    for row in rows:
        first = [escape(show(row)) for show in lead.values()]
        if "error" in row:
            table.add_row(*first, "[red]failed[/]")
        elif "skipped" in row:
            table.add_row(*first, escape(_whose(row)), "[dim]skipped[/]")
        else:
            table.add_row(*first, *(show(row) for show in figures.values()))
    return table


def _line(text: str) -> str:
    return text.replace("\n", " ")


def _width_of(table: Table) -> int:
    """Columns that the table takes where nothing is cut; sizes of ops may be folded."""
    console = Console(width=_WIDE)
    widths = [console.measure(cell).maximum for cell in map(_least_wide, table.columns)]
    return sum(widths) + 2 * len(widths)


def _least_wide(column: Column) -> str:
    cells = [str(column.header), *map(str, column.cells)]
    if not column.no_wrap:
        cells = [word for cell in cells for word in cell.split()]
    return "\n".join(cells)


def limit_lines(rows: Iterable[Row]) -> list[str]:
    """The limits that the fractions are of, as measured in the rows' processes."""
    lines = {
        f"{row['device']}, {row['dtype']}, measured by "
        f"{'torch' if row['system'].startswith(('torch', 'hf')) else 'jax'}: "
        f"reads {row['read_bandwidth'] / 1e12:.3g} TB/s, "
        f"multiplies {row['matrix_rate'] / 1e12:.3g} TFLOP/s" + _copies(row)
        for row in rows
        if "read_bandwidth" in row
    }
    return sorted(lines)


def failure_lines(rows: Iterable[Row]) -> list[str]:
    """Why requests failed, were cut short or not sent in time, and what was not measured."""
    lines = []
    for row in rows:
        start = label(row) + (f", {row['what']}" if "what" in row else "")
        lines += [f"{start}: {n} x {what}" for what, n in row.get("errors", {}).items()]
        if row.get("at_most"):
            lines.append(
                f"{start}: all tokens took no longer than one, so that the time of a token is at "
                "most the one shown; measure more of them (--new-tokens)"
            )
        if row.get("short"):
            lines.append(f"{start}: {row['short']} answers are shorter than was asked for")
        if "bare_error" in row:
            lines.append(f"{start}: the steps alone were not measured: {row['bare_error']}")
    return lines


def _copies(row: Row) -> str:
    return f", copies {row['host_rate'] / 1e9:.3g} GB/s from the host" if "host_rate" in row else ""


def write_plot(kind: str, rows: Sequence[Row], path: Path) -> None:
    """A bar for each row that was measured: the fraction of the limit, with its time."""
    from matplotlib.figure import Figure

    if kind == "serve":
        _plot_latencies(rows, path)
        return
    shown = [row for row in rows if "of_limit" in row]
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    names = [_bar_name(row, kind, shown) for row in shown]
    shares = [row["of_limit"] * 100 for row in shown]
    peers = [row["system"] not in ("torch", "jax") or _by(row) != "dualinfer" for row in shown]
    colours = ["#9aa5b1" if peer else "#2563eb" for peer in peers]
    bars = axes.barh(range(len(shown)), shares, color=colours)
    axes.bar_label(bars, [_bar_text(kind, row) for row in shown], padding=4, fontsize=8)
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(115.0, *(share * 1.2 for share in shares)) if shares else 100)
    axes.set_xlabel("% of the limit measured in the same process")
    axes.set_title(", ".join(sorted({row["device"] for row in shown})), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def _plot_latencies(rows: Sequence[Row], path: Path) -> None:
    """Of each row how many requests, or tokens, took at most so long."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if "curves" in row]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    titles = {"ttft": "until the first token", "itl": "between tokens", "e2el": "of a request"}
    panels = figure.subplots(1, len(titles), sharey=True)
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for row in shown:
            if name in row["curves"]:
                text = f"{label(row)}, {row['what']}: {row['output_throughput']:,.0f} tokens/s"
                axes.plot(row["curves"][name], range(101), label=text)
        axes.set_xscale("log")
        axes.set_xlabel(f"ms {title}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% that took at most so long")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", fontsize=8)
    figure.suptitle(", ".join(sorted({row["device"] for row in shown if "device" in row})))
    figure.savefig(path, dpi=160)


def _by(row: Row) -> str:
    return row.get("by", "dualinfer")


def _whose(row: Row) -> str:
    """Who measured an op: ours of which backend, or whose else."""
    return label(row) if _by(row) == "dualinfer" else row["by"]


def _bar_name(row: Row, kind: str, rows: Sequence[Row]) -> str:
    """The system, and what tells its row from the others."""
    if kind == "ops":
        return f"{row['op']} {row['description']}: {_whose(row)}"
    shows = _workload(rows).values()
    varying = [show for show in shows if len({show(other) for other in rows}) > 1]
    return ", ".join([label(row), *(_line(show(row)) for show in varying)])


def _bar_text(kind: str, row: Row) -> str:
    time = {"decode": "ms_per_token", "ops": "us"}.get(kind, "ms")
    unit = {"decode": "ms/token", "ops": "µs"}.get(kind, "ms")
    return f"{row['of_limit']:.0%}, {row[time]:.3g} {unit}"
