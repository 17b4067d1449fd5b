"""Draws the plots of docs/performance.md from benchmarks/results: `python docs/plots.py`."""

import runpy
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
NEWEST = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["newest"]()
MODELS = ["gpt2", "llama-3.2-1b", "gemma-3-4b", "opt-6.7b", "llama-2-7b", "llama-3-8b"]
MODELS += ["gemma-3-12b", "command-r:16"]
SCHEMES = ["bfloat16", "int8", "fp8", "nvfp4", "mxfp4", "int4"]
mpl.rcParams |= {"svg.hashsalt": "dualinfer", "font.size": 10, "svg.fonttype": "none"}


def figures(model, weights, name):
    """A figure of torch and of JAX for one sequence on an H100; 0 where none was measured."""
    for (kind, of, held, size, device), row in NEWEST.items():
        if (kind, of, held, size, device) == ("decode", model, weights, "1 x 128", "H100"):
            return [row[s][1][name] if s in row else 0 for s in ("torch", "jax")]
    return [0, 0]


def draw(name, labels, pairs, title, form):
    """Two bars beside each other for each label."""
    drawn, axes = plt.subplots(figsize=(7, 0.5 * len(labels) + 1))
    places = range(len(labels))
    for i, (system, color) in enumerate((("torch", "#ee4c2c"), ("JAX", "#3f51b5"))):
        at, values = [p + 0.4 * i for p in places], [pair[i] for pair in pairs]
        axes.barh(at, values, 0.38, label=system, color=color)
        for place, value in zip(at, values, strict=True):
            if value:
                axes.text(value, place, f" {value:{form}}", va="center", fontsize=8)
    axes.set_yticks([p + 0.2 for p in places], labels)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.margins(x=0.12)
    drawn.patch.set_facecolor("white")
    path = ROOT / "docs" / "assets" / f"{name}.svg"
    drawn.savefig(path, bbox_inches="tight", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    kinds = {"gpt2": "float16", "opt-6.7b": "float16"}
    shares = [figures(m, kinds.get(m, "bfloat16"), "of_limit") for m in MODELS]
    percent = [[100 * share for share in pair] for pair in shares]
    title = "Decoding one sequence on an H100: % of the rate at which weights are read"
    draw("decode-share", MODELS, percent, title, ".0f")
    times = [figures("llama-3-8b", s, "ms_per_token") for s in SCHEMES]
    title = "Llama-3-8B's shape, one sequence, H100: ms for a token"
    draw("quantized", SCHEMES, times, title, ".2f")
