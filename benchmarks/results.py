"""One page of all results: `python benchmarks/results.py` writes results.md from results/*.json.

A row is a workload: ours on both backends, each with its share of the limit that was measured in
the same run, and the peers of that run. The newest run of a workload counts. How many commits have
changed the code that a row measured since then is told where git knows it.
"""

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "results.md"
OURS = "torch", "jax"
TIMES = {
    "decode": "ms_per_token",
    "prefill": "ms",
    "forward": "ms",
    "embed": "ms",
    "serve": "output_throughput",
}
TITLES = {
    "decode": "Decode: ms a token, sampling included",
    "prefill": "Prefill: ms to the first token",
    "forward": "One pass over whole sequences: ms",
    "embed": "Vectors of texts: ms of all texts",
    "serve": "Many requests at once: new tokens a second",
}
CODE = ("kernels", "ops", "decoder", "engine")  # folders whose changes may move a figure
HEAD = """# Results

`python benchmarks/results.py` writes this page from the files in [results](results), which
`dualinfer bench ... --json` makes; what they mean stands in [README.md](README.md). Each figure is
the newest one of its workload, a median, with its share of the limit measured in the same run: the
bytes that must be read over the read-only stream, or FLOPs over the rate of a large product. Peers
are of the run of a row of ours.
"""
Row = dict[str, Any]


def runs(found: Any) -> Iterator[Row]:
    """The runs of `dualinfer bench` in a file, which may hold several."""
    if isinstance(found, dict) and "rows" in found and "command" in found:
        yield found
    elif isinstance(found, dict):
        yield from runs(found.get("runs", []))
    elif isinstance(found, list):
        for one in found:
            yield from runs(one)


def workload(row: Row) -> tuple[Any, ...]:
    """What is measured, by whatever system."""
    held = row.get("quant") or row.get("scheme") or row["dtype"]
    parts = [str(held), *(f"{n} {row[n]}" for n in ("tp", "ep") if (row.get(n) or 1) > 1)]
    parts += [f"cache {row['kv_cache']}"] if row.get("kv_cache") else []
    parts += [f"states {row['states']}"] if row.get("states") else []
    parts += ["layers on the host"] if row.get("resident") is not None else []
    parts += [] if row.get("kernels", True) else ["no kernels"]
    device = row["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    size = (f"{row['batch']} x {row['tokens']}",) if "load" not in row else ()
    if not size:
        over = "" if row["over_http"] else ", without HTTP"
        size = (f"{row['load']['requests']} of {row['what']}{over}",)
    return row["kind"], row["model"], ", ".join(parts), *size, device


def newest(folder: Path = FOLDER) -> dict[tuple[Any, ...], dict[str, tuple[str, Row, Row]]]:
    """By workload and system: date, row and run of the newest figure.

    A peer counts in the newest run of ours alone.
    """
    found: dict[tuple[Any, ...], dict[str, tuple[str, Row, Row]]] = {}
    every = [
        run for path in sorted(folder.glob("*.json")) for run in runs(json.loads(path.read_text()))
    ]
    dated = [(row.get("measured", run["date"]), run, row) for run in every for row in run["rows"]]
    for date, run, row in sorted(dated, key=lambda one: one[0]):
        if row["kind"] not in TIMES or row.get(TIMES[row["kind"]]) is None:
            continue
        own = found.setdefault(workload(row), {})
        own[row["system"]] = (date, row, run)
    for own in found.values():
        ours = [run for system, (_, _, run) in own.items() if system in OURS]
        for system in [s for s in own if s not in OURS]:
            if ours and not any(own[system][2] is run for run in ours):
                del own[system]
    return {key: own for key, own in found.items() if any(system in own for system in OURS)}


def since(date: str, system: str) -> str:
    """Commits after `date` that changed what `system` runs; "" where git does not know."""
    folders = [f"dualinfer/{name}" for name in (*CODE, f"backends/{system}")]
    command = ["git", "log", f"--since={date}", "--format=%h", "--", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode else str(len(done.stdout.split()))


def figure(kind: str, row: Row) -> str:
    """A time and its share of the limit."""
    value = row[TIMES[kind]]
    digits = 0 if kind == "serve" else 3 if value < 10 else 1
    return f"{value:,.{digits}f} ({row['of_limit']:.1%})"


def command(run: Row) -> str:
    """The command line, without where its file went."""
    words = list(run["command"])
    words[0] = "dualinfer"
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(words)


def page(folder: Path = FOLDER, marks: bool = True) -> str:
    """The page; without `marks` the column of commits is empty."""
    found, text, commands = newest(folder), HEAD, []
    for kind, title in TITLES.items():
        keys = sorted(
            (key for key in found if key[0] == kind), key=lambda key: [str(x) for x in key]
        )
        if not keys:
            continue
        text += f"\n## {title}\n\n"
        text += "| model | weights | sequences x tokens | device | torch | JAX | peers, same run "
        text += "| measured | commits since | command |\n" + "|---" * 10 + "|\n"
        for key in keys:
            own = found[key]
            ours = [(system, *own[system]) for system in OURS if system in own]
            peers = [f"{s} {figure(kind, own[s][1])}" for s in own if s not in OURS]
            numbers = []
            for _, _, _, run in ours:
                line = command(run)
                commands += [] if line in commands else [line]
                numbers.append(f"[{commands.index(line) + 1}]")
            cells = [*key[1:5]]
            cells += [figure(kind, own[s][1]) if s in own else "" for s in OURS]
            cells += [", ".join(peers)]
            cells += [", ".join(dict.fromkeys(date[:10] for _, date, _, _ in ours))]
            counts = (since(date, system) for system, date, _, _ in ours)
            cells += [", ".join(dict.fromkeys(counts)) if marks else ""]
            cells += [", ".join(dict.fromkeys(numbers)).replace("[", "").replace("]", "")]
            text += "| " + " | ".join(map(str, cells)) + " |\n"
    text += "\n## Commands\n\n```\n"
    text += "\n".join(f"{i + 1:3}  {line}" for i, line in enumerate(commands))
    return text + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: {datetime.now():%Y-%m-%d}, {len(newest())} workloads")
