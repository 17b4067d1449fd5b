"""A hook of mkdocs: the repository's own files as pages, the table of models, links between them.

`python docs/site.py` writes the pages that are made of the code: config-by-purpose.md from the
fields' docstrings, and troubleshooting.md from dualinfer/symptoms.py; and tpu.md's table of ops.
"""

import ast
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from dualinfer.config.fields import InferenceConfig
from dualinfer.config.model import is_stale, nested_model
from dualinfer.model.families import served_modules
from dualinfer.symptoms import SYMPTOMS, anchor

ROOT = Path(__file__).parents[1]
# Files of the repository that are pages of the site, too.
TAKEN = {
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "contributing/benchmarks.md",
    "benchmarks/results.md": "contributing/results.md",
}
_BEGIN, _END = "<!-- by docs/site.py -->\n", "<!-- to here -->\n"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]*)(#[^)\s]*)?(?=\))")
_PURPOSES = {
    "Choose where and how the model runs": "backend replace_with_kernel_inject use_triton "
    "kernels enable_cuda_graph triton_autotune dtype",
    "Use less memory": "quant kv_cache_dtype state_dtype keep_module_on_host resident_layers zero",
    "Bound what is generated": "max_out_tokens min_out_tokens",
    "Use several devices": "tensor_parallel moe injection_policy",
    "Load other weights": "checkpoint adapter base_dir config",
    "Write the model, shape what comes back": "save_mp_checkpoint_path return_tuple",
}


def on_files(files: Any, config: Any) -> Any:
    """The site's files with those that are made here."""
    made = {target: (ROOT / source).read_text("utf-8") for source, target in TAKEN.items()}
    for target, text in made.items():
        files.append(File.generated(config, target, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        target = f"contributing/results/{picture.name}"
        files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A page with the table of models, and links that lead to pages, or to the repository."""
    target = page.file.src_uri
    source = next((s for s, t in TAKEN.items() if t == target), f"docs/{target}")
    if target == "models.md":
        markdown = with_table(markdown)
    return _LINK.sub(lambda m: _link(m, source, target, config.repo_url), markdown)


def _link(match: Any, source: str, target: str, repository: str) -> str:
    path, place = match[1], match[2] or ""
    whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
    if whole == "docs/classes.md":
        whole, place = "docs/models.md", "#families"
    inside = TAKEN.get(whole) or (whole.removeprefix("docs/") if whole[:5] == "docs/" else None)
    if whole.startswith("benchmarks/results/") and whole.endswith(".png"):
        inside = f"contributing/{whole.removeprefix('benchmarks/')}"
    if inside is None or inside.endswith(".py"):
        return f"{repository}/blob/HEAD/{whole}{place}"
    return posixpath.relpath(inside, posixpath.dirname(target) or ".") + place


def with_table(markdown: str) -> str:
    """The page of models with one row for each model_type, and the notes below the table."""
    begin, end = (runpy.run_path(str(ROOT / "docs" / "families.py"))[n] for n in ("_BEGIN", "_END"))
    before, rest = markdown.split(begin)
    before = before.replace(
        "Which of HF's\nclasses each has is in [classes.md](classes.md).",
        "A number\nleads to what else to know of a `model_type`.",
    )
    table, after = rest.split(end)
    groups = [line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:]]
    number = {name: i for i, (names, _) in enumerate(groups, 1) for name in names.split(", ")}
    classes = {name: own for module in served_modules() for name, own in module.CLASSES.items()}
    rows = "".join(
        f"| `{name}` | {', '.join(f'`{own}`' for own in classes[name])} | "
        f"[{number[name]}](#note-{number[name]}) |\n"
        for name in sorted(classes)
    )
    notes = "".join(
        f"{i}. {{#note-{i}}} **{names.split(', ')[0]}**"
        f"{' and relatives' if ', ' in names else ''}: {note}\n"
        for i, (names, note) in enumerate(groups, 1)
    )
    notes = re.sub(
        r"^(\d+)\. \{#note-(\d+)\} (.*)$", r"<a id='note-\2'></a>**\1.** \3\n", notes, flags=re.M
    )
    field = (
        '<input class="filter" id="find-model" type="search" '
        'placeholder="Find a model: qwen, whisper, ForSequenceClassification ..." '
        'aria-label="Find a model">\n\n'
    )
    head = "| model_type | classes in fused mode | note |\n|---|---|---|\n"
    return (
        f"{before}{field}<div class='models' markdown='1'>\n\n{head}{rows}\n</div>\n\n"
        f"### Notes\n\n{notes}{after}"
    )


def ways_of_ops() -> str:
    """The page of TPUs with the table of ops, of what each backend's ops say of themselves."""
    from dualinfer.backends.jax.ops.pallas import PallasOps
    from dualinfer.backends.jax.ops.pallas_gpu import PallasGpuOps
    from dualinfer.backends.jax.ops.plain import IMPLEMENTATIONS

    ways = PallasOps.implementations, PallasGpuOps.implementations, IMPLEMENTATIONS
    head = "| op | Pallas on a TPU | Pallas on an NVIDIA GPU | plain XLA |\n|---|---|---|---|\n"
    rows = "".join(
        f"| {op} | {' | '.join(own[op] if own[op] != plain else 'as plain' for own in ways[:2])} "
        f"| {plain} |\n"
        for op, plain in IMPLEMENTATIONS.items()
    )
    before, rest = (ROOT / "docs" / "tpu.md").read_text("utf-8").split(_BEGIN)
    return f"{before}{_BEGIN}{head}{rows}{_END}{rest.split(_END)[1]}"


def docs_of(path: Path) -> dict[tuple[str, str], str]:
    """The docstring behind each field of the classes of a file, by class and field."""
    found = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    name = ast.unparse(field.target)
                    found[node.name, name] = str(ast.literal_eval(text.value))
    return found


def by_purpose() -> str:
    """The page of the config's fields by what a user wants."""
    folder = ROOT / "dualinfer" / "config"
    docs = docs_of(folder / "fields.py") | docs_of(folder / "nested.py")
    listed = {name for names in _PURPOSES.values() for name in names.split()}
    live = {name for name, field in InferenceConfig.model_fields.items() if not is_stale(field)}
    if listed != live:
        raise ValueError(f"docs/site.py has no purpose for {listed ^ live}")
    text = [
        "# Config, by what you want\n",
        "Every field may be a keyword argument of `init_inference`, or stand in its `config`: a "
        "dict, a JSON file or an `InferenceConfig`. [Field by field](config.md) says more: how "
        "they are merged, what DeepSpeed's old names become, how modes and devices differ.\n",
    ]
    for purpose, names in _PURPOSES.items():
        text.append(f"## {purpose}\n")
        for name in names.split():
            text += _field(InferenceConfig, name, docs, "")
    return "\n".join(text)


def _field(kind: Any, name: str, docs: Any, before: str) -> list[str]:
    field, own = kind.model_fields[name], nested_model(kind.model_fields[name])
    alias = f", also `{field.validation_alias}`" if field.validation_alias else ""
    default = field.get_default(call_default_factory=True)
    shown = "a block" if own is not None and default is not None else f"`{default!r}`"
    if name == "backend":
        shown = "what is installed"
    holder = next(c for c in kind.__mro__ if (c.__name__, name) in docs)
    words = " ".join(docs[holder.__name__, name].split())
    words = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", words)
    if before:
        line = [f"- `{before}{name}`{alias}, default {shown}: {words}"]
    else:
        line = [f"### {name}\n", f"Default {shown}{alias}.\n", f"{words}\n"]
    if own is not None:
        for inner in own.model_fields:
            line += _field(own, inner, docs, f"{before}{name}.")
        line += [""] if not before else []
    return line


def troubleshooting() -> str:
    """The page of errors by symptom."""
    text = [
        "# Troubleshooting, by symptom\n",
        "Every error that dualinfer raises on purpose is a `DualinferError`, and one of Python's "
        "own kinds as well, so that `except ValueError` catches it. Its `help` is the address of "
        "its place on this page. `print(engine.report())` and `dualinfer env` answer most "
        "questions that have no error.\n",
        "| you see | it is a |\n|---|---|",
    ]
    text += [f"| {s.seen} | [{s.error.__name__}](#{anchor(s.error)}) |" for s in SYMPTOMS]
    for error in dict.fromkeys(s.error for s in SYMPTOMS):
        kinds = [c.__name__ for c in error.__mro__[1:] if c.__module__ == "builtins"]
        kinds = [k for k in kinds if k not in ("object", "Exception", "BaseException")]
        text.append(f"\n## {error.__name__}\n")
        text.append(f"{' '.join((error.__doc__ or '').split())} Also a {', '.join(kinds)}.\n")
        for s in SYMPTOMS:
            if s.error is error:
                text.append(f"**{s.seen}**\n\n: *Cause*: {s.cause}\n\n: *Way on*: {s.way}\n")
    return "\n".join(text).replace("\n\n: *", "\n\n*")


def pages() -> dict[Path, str]:
    """What the three pages should hold."""
    made = {"config-by-purpose.md": by_purpose(), "troubleshooting.md": troubleshooting()}
    made["tpu.md"] = ways_of_ops()
    return {ROOT / "docs" / name: f"{text.rstrip()}\n" for name, text in made.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, "utf-8")
