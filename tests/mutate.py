"""Do the tests notice? Small mutations of dualinfer, one at a time, and the tests that must fail.

    python tests/mutate.py --list            # the table: number, file, what a user would see
    python tests/mutate.py                   # all rows
    python tests/mutate.py --only 3 17 20-25
    python tests/mutate.py --jobs 2          # so many at once, each in a copy of its own
    python tests/mutate.py --whole           # what its own tests miss meets the whole CPU suite

Each row changes one place of the package, so that a user would see something wrong, and names the
tests that should fail, as arguments of pytest. The working tree is only read: it is copied, as it
is, to a temporary folder, and there each mutation is applied, tested and taken back. A row is

    killed      a test failed that passes without the mutation
    survived    all of its tests passed: they do not notice
    excused     survived, as its `excuse` explains
    stale       its text does not stand in the file exactly once, or its tests cannot be run
    no verdict  the tests took longer than --timeout seconds

Anything but killed and excused makes the exit code 1. To add a row, write down `old` as it stands
in the file (with `after`, the first place behind that text, which stands there once), `new`, what
goes wrong, and the quickest tests that should notice. If they do not, write one that does: of the
behaviour, not of the line. A mutation that changes nothing that anybody could see is no row.
"""

import argparse
import ast
import contextlib
import importlib.util
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
_WHOLE = '-n 2 --dist loadgroup -m "not gpu and not multi_gpu and not slow" tests'
_WHOLE_SECONDS = 3600
# Imported once, by the process that the tests' own are forked from: that takes most of the time.
_MODELS = ("llama", "gpt2", "bert", "bloom", "mistral", "qwen2", "qwen3", "gemma2", "opt")
_PRELOADED = [
    *("pytest", "torch", "transformers", "jax", "flax.nnx", "pydantic", "typer", "rich.table"),
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
]


class Row(NamedTuple):
    """One mutation: `old` becomes `new` in a file of dualinfer/, and `tests` should fail."""

    file: str
    old: str
    new: str
    harm: str
    tests: str
    after: str = ""
    excuse: str = ""


class Result(NamedTuple):
    """What became of one row; `by` is the test that killed it, or what else there is to say."""

    verdict: str
    by: str
    seconds: float


class Copy:
    """A copy of the working tree, to be changed."""

    def __init__(self, parent: Path, number: int):
        self.root = parent / str(number)
        self._process: Any = None
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, found.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def read(self, file: str) -> str:
        """A file of the package; nothing if it is not there."""
        path = self.root / "dualinfer" / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def write(self, file: str, text: str) -> None:
        """Replace a file of the package, and forget what Python compiled of it."""
        path = self.root / "dualinfer" / file
        path.write_text(text, encoding="utf-8")
        # A cache is told by seconds and size, which a quick change may leave as they are.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def pytest(self, tests: str, limit: float) -> tuple[int | None, list[str]]:
        """Exit code, None after `limit` seconds, and the tests that failed, not files."""
        fixed = ["-q", "--tb=no", "-rfE", "--no-header", "-p", "no:cacheprovider"]
        fixed += ["-W", "ignore:Module already imported so cannot be rewritten"]  # preloaded
        output = self.root.parent / f"{self.root.name}.txt"
        forked = multiprocessing.get_context("forkserver")
        args = str(self.root), [*fixed, *shlex.split(tests)], str(output)
        self._process = forked.Process(target=_run_pytest, args=args)
        self._process.start()
        self._process.join(limit)
        code = self._process.exitcode
        self.stop()  # tests start processes of their own, too
        self._process.join()
        failed = r"^(?:FAILED|ERROR) (tests/.*?::.*?)(?: - .*)?$"
        return code, re.findall(failed, output.read_text(errors="replace"), re.MULTILINE)

    def stop(self) -> None:
        """End the tests that run here."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _run_pytest(root: str, args: list[str], output: str) -> None:
    """Of a process of its own: pytest over the copy at `root`."""
    os.setsid()
    os.chdir(root)
    os.environ["PYTHONPATH"] = root
    sys.path[:] = [root, *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    with open(output, "w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import pytest

    sys.exit(pytest.main(args))


def set_environment(folder: str) -> None:
    """That of `make test`; what XLA has compiled for one row serves all others."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    multiprocessing.set_forkserver_preload(_PRELOADED)


def mutated(row: Row, text: str) -> str | None:
    """`text` with the row's change; None if there is no one place for it."""
    start = 0
    if row.after:
        if text.count(row.after) != 1:
            return None
        start = text.index(row.after) + len(row.after)
    elif text.count(row.old) != 1:
        return None
    at = text.find(row.old, start)
    if at < 0 or row.old == row.new:
        return None
    changed = text[:at] + row.new + text[at + len(row.old) :]
    try:
        ast.parse(changed)
    except SyntaxError:
        return None
    return changed


def run_row(row: Row, copy: Copy, whole: bool, limit: float) -> Result:
    """Apply a row to a copy, run its tests, and take it back."""
    start = time.monotonic()

    def result(verdict: str, by: str) -> Result:
        return Result(verdict, by, time.monotonic() - start)

    text = copy.read(row.file)
    changed = mutated(row, text)
    if changed is None:
        return result("stale", f"its text does not stand once in {row.file}")
    copy.write(row.file, changed)
    try:
        for tests in [f"-x {row.tests}"] + [f"-x {_WHOLE}"] * whole:
            code, failed = copy.pytest(tests, _WHOLE_SECONDS if tests.endswith(_WHOLE) else limit)
            if code is None:
                return result("no verdict", f"more than {limit:.0f} s")
            if failed:
                return result("killed", failed[0])
            if code:  # files that cannot be collected, too
                return result("stale", f"pytest ends with {code} for {row.tests}")
    finally:
        copy.write(row.file, text)
    return result("excused" if row.excuse else "survived", row.excuse)


def confirm(results: dict[int, Result], copy: Copy, limit: float) -> None:
    """Take back the verdict of each test that fails without a mutation, too."""
    killed = {number: r for number, r in results.items() if r.verdict == "killed"}
    killers = sorted({found.by for found in killed.values()})
    if not killers:
        return
    limit = max(limit, 60 * len(killers))
    code, failing = copy.pytest(shlex.join(killers), limit)
    for number, found in killed.items():
        if code is None:
            by = f"more than {limit:.0f} s without the mutations"
            results[number] = found._replace(verdict="no verdict", by=by)
        elif code not in (0, 1):  # nobody knows which of the tests ran
            by = f"pytest ends with {code} without the mutations"
            results[number] = found._replace(verdict="stale", by=by)
        elif found.by in failing:
            results[number] = found._replace(verdict="stale", by=f"fails anyway: {found.by}")


def chosen(only: Sequence[str]) -> list[int]:
    """Numbers of rows from words such as 3 and 20-25; all of them from none."""
    found = []
    for word in only:
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return [n for n in found if 1 <= n <= len(ROWS)] if only else [*range(1, len(ROWS) + 1)]


def main() -> int:
    """Run the rows that the arguments choose; 0 if each is killed or excused."""
    parser = argparse.ArgumentParser(description="Do the tests notice? See the file's beginning.")
    parser.add_argument("--list", action="store_true", help="show the table and run nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="N", help="rows, as 3 or 20-25")
    parser.add_argument("--jobs", type=int, default=1, help="rows at once")
    parser.add_argument("--whole", action="store_true", help="survivors meet the whole suite")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a row's tests")
    given = parser.parse_args()
    numbers = chosen(given.only)
    if given.list:
        for n in numbers:
            print(f"{n:3}  {ROWS[n - 1].file}: {ROWS[n - 1].harm}")
        return 0
    start = time.monotonic()
    results: dict[int, Result] = {}
    with tempfile.TemporaryDirectory(prefix="dualinfer-mutants-") as folder:
        set_environment(folder)
        all_copies = [Copy(Path(folder), i) for i in range(given.jobs)]
        copies: Queue[Copy] = Queue()
        for copy in all_copies:
            copies.put(copy)

        def work(n: int) -> None:
            copy = copies.get()
            try:
                found = run_row(ROWS[n - 1], copy, given.whole, given.timeout)
            finally:
                copies.put(copy)
            results[n] = found
            print(
                f"{n:3}  {found.verdict:10} {found.seconds:4.0f} s  {ROWS[n - 1].file:36} "
                f"{found.by.removeprefix('tests/')}",
                flush=True,
            )

        with ThreadPoolExecutor(given.jobs) as pool:
            try:
                list(pool.map(work, numbers))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in all_copies:
                    copy.stop()
                raise
        confirm(results, all_copies[0], given.timeout)
    unkilled = {n: r for n, r in sorted(results.items()) if r.verdict != "killed"}
    for n, found in unkilled.items():
        row = ROWS[n - 1]
        print(f"\n{n}: {found.verdict}. {row.file}: {row.harm}\n    {found.by or row.tests}")
    counts = Counter(r.verdict for r in results.values())
    listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"\n{len(results)} rows in {(time.monotonic() - start) / 60:.1f} min: {listed}")
    return int(any(r.verdict != "excused" for r in unkilled.values()))


ROWS: list[Row] = [
    # --- what both backends share
    Row(
        "backends/slots.py",
        "1 << (max(count, 1) - 1).bit_length()",
        "1 << max(count, 1).bit_length()",
        "Sizes that are powers of two take twice their room: caches, padding, executables.",
        "tests/test_runner.py -k bucket",
    ),
    Row(
        "backends/base.py",
        "s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s",
        "s.top_k > 0 or s.top_p < 1 for s",
        "min_p without top_k and top_p is ignored.",
        "tests/test_runner.py -k some_request",
    ),
    Row(
        "backends/base.py",
        "r.min_new_tokens > 0 and r.eos_ids for r",
        "r.min_new_tokens > 1 and r.eos_ids for r",
        "min_new_tokens=1 lets an EOS come first.",
        "tests/test_runner.py tests/kernels/test_sampling.py -k 'some_request or needs_only'",
    ),
    Row(
        "backends/slots.py",
        "min(self._reach[slot] + count, self._requests[slot].cache_tokens)",
        "self._reach[slot] + count",
        "A short answer beside a long one makes the cache grow beyond what it needs.",
        "tests/test_runner.py -k live_slots",
    ),
    Row(
        "backends/slots.py",
        "x.seed & 0xFFFFFFFF for x",
        "x.seed & 0x7FFFFFFF for x",
        "Seeds that differ in one bit give the same text.",
        "tests/test_runner.py -k columns",
    ),
    Row(
        "backends/slots.py",
        "np.array([x.return_index for x in s], np.int64)",
        "np.array([0 for x in s], np.int64)",
        "num_return_sequences=4 gives one text four times.",
        "tests/test_runner.py -k columns",
    ),
    # --- torch
    Row(
        "ops/cache_kinds.py",
        "m, at = self.maths, lengths.clip(max=self.capacity - 1)",
        "m, at = self.maths, lengths",
        "A slot whose cache is full fails the step of all others.",
        "tests/kernels/test_decode_attention.py",
        after="class FullCache(NamedTuple):",
    ),
    Row(
        "ops/attention.py",
        "visible = visible & (at >= count - window)",
        "visible = visible & (at > count - window)",
        "A step of a windowed layer forgets one token too many.",
        "tests/kernels/test_decode_attention.py",
    ),
    Row(
        "ops/attention.py",
        "return shown | ((at == own) & ~shown.any(-1, keepdims=True))",
        "return shown",
        "A query that sees padding alone becomes NaN.",
        "tests/kernels/test_attention.py -k 'hides or garbage'",
    ),
    Row(
        "ops/sampling.py",
        "held = (new < minimum)",
        "held = (new <= minimum)",
        "min_new_tokens holds the EOS back one token too long.",
        "tests/kernels/test_sampling.py -k hf_scores",
    ),
    Row(
        "ops/sampling.py",
        "m.softmax(ascending)[:, :-1].cumsum(-1)",
        "m.softmax(ascending).cumsum(-1)",
        "top_p=0 leaves no token, and fails.",
        "tests/kernels/test_sampling.py -k hf_keeps",
    ),
    Row(
        "backends/torch/runner.py",
        "            state.seen[slot] = False\n",
        "",
        "repetition_penalty punishes the tokens of whoever had the slot before.",
        "tests/test_generate.py -k repetition_penalty",
    ),
    Row(
        "backends/torch/slots.py",
        "rows = [slot for slot in slots if slot < size]",
        "rows = list(slots)",
        "Where the device has no room for more rows, an IndexError hides why.",
        "tests/test_limits.py -k does_not_fit",
    ),
    Row(
        "backends/slots.py",
        "StateSize(max(self.slots, other.slots), ",
        "StateSize(self.slots, ",
        "One row with more EOS ids after a batch with fewer fails.",
        "tests/test_generate.py -k 'many_and_with_few and torch or any_order'",
    ),
    Row(
        "ops/cache_kinds.py",
        "over(self, lambda x: self.maths.grow(x, more))",
        "over(self, lambda x: self.maths.grow(x * 0, more))",
        "When the cache grows, open sequences lose their values.",
        "tests/test_runner.py -k cache_grows",
    ),
    Row(
        "backends/torch/precision.py",
        "            if not self._users:\n                self._restore = _set_ieee()",
        "            self._restore = _set_ieee()",
        "Two threads at once leave the caller's TF32 switched off.",
        "tests/test_module_torch.py -k 'two_threads or before_outside'",
    ),
    Row(
        "backends/torch/parallel.py",
        "(rows >= 0) & (rows < count)",
        "(rows >= 0) & (rows <= count)",
        "At degree 2 the first token of the second share is embedded with another's row, too.",
        "tests/test_parallel_torch.py -k share_of_one",
    ),
    Row(
        "backends/torch/process_groups.py",
        "    if not settings.enabled:\n        return 1\n",
        "",
        "tensor_parallel.enabled=False is ignored: a process alone is refused.",
        "tests/test_limits.py -k ask_for_nothing",
    ),
    Row(
        "backends/torch/module/runner.py",
        "if any(part.training for part in self._parts):",
        "if self.module.training:",
        "A part that was put in training mode drops values at random.",
        "tests/test_module_torch.py -k 'eval or train'",
    ),
    Row(
        "backends/torch/module/runner.py",
        "        if callable(reset):\n            reset()\n",
        "",
        "A module's second generate goes on with the cache of the first.",
        "tests/test_module_torch.py -k 'reset or generate'",
    ),
    Row(
        "backends/torch/module/autotp/units.py",
        "tuple((Run(s.start, s.real), Run(ffn + s.start, s.real)) for s in shares)",
        "tuple((Run(2 * s.start, 2 * s.real),) for s in shares)",
        "A packed gate and up projection is cut across: ranks multiply parts that do not meet.",
        "tests/test_autotp.py -k table_says",
    ),
    Row(
        "backends/torch/module/autotp/miniature.py",
        "torch.equal(one, other)",
        "True",
        "A layer with other values in a buffer is not tried out, and may be split wrongly.",
        "tests/test_autotp_trust.py -k forward_reads",
    ),
    Row(
        "backends/torch/module/autotp/units.py",
        'if style in ("rowwise", "packed_rowwise")]',
        'if style == "rows"]',
        "Latent attention is gathered, layer by layer, though transformers says how it splits.",
        "tests/test_autotp.py -k latent",
    ),
    # --- JAX
    Row(
        "backends/slots.py",
        ">= tokens < request.cache_tokens",
        ">= tokens",
        "JAX compiles steps in the background that no sequence can reach.",
        "tests/test_compilation.py -k nothing_is_begun",
    ),
    Row(
        "backends/jax/runner.py",
        "            self._begin(2 * size)\n",
        "            pass\n",
        "A sequence that outgrows its cache on JAX waits for a compiler.",
        "tests/test_compilation.py -k next_size",
    ),
    Row(
        "backends/jax/sampler.py",
        "lambda: filtered(warm, *filters), lambda: warm)",
        "lambda: warm, lambda: warm)",
        "Top-k, top-p and min-p do nothing on JAX.",
        "tests/kernels/test_sampling.py -k 'hf_scores and jax'",
    ),
    Row(
        "backends/jax/padding.py",
        "if hides and size != (batch, tokens):",
        "if False:",
        "BERT attends to the zeros that fill a bucket up.",
        "tests/parity/test_logits.py -k 'unpadded and bert and jax'",
    ),
    Row(
        "backends/jax/padding.py",
        'if types is not None and spec.embedding.types != "vocab" and not types.any():',
        "if types is not None and not types.any():",
        "GPT-J and GPT-Neo on JAX leave out the embedding of token type 0.",
        "tests/parity/test_logits.py -k 'token_types_equal and jax'",
    ),
    Row(
        "backends/jax/sampler.py",
        "where = np.full(count, free, np.int32)",
        "where = np.zeros(count, np.int32)",
        "Three prompts, in a bucket of four: the fourth writes over the first one's cache.",
        "tests/test_generate.py -k 'greedy_equals_hf and jax'",
    ),
    Row(
        "backends/slots.py",
        "max(self.eos, other.eos), hides",
        "self.eos, hides",
        "A call beside an open stream fails, if one with more EOS ids has ended meanwhile.",
        "tests/test_generate.py -k 'side_by_side and jax'",
    ),
    Row(
        "backends/jax/maths.py",
        "if tokens <= _WHOLE or tokens % _WHOLE:",
        "if tokens <= _WHOLE:",
        "engine.apply of 1,500 tokens fails.",
        "tests/kernels/test_attention.py -k in_pieces",
    ),
    Row(
        "backends/jax/maths.py",
        "exact = lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None",
        "exact = None",
        "On a GPU float32 products are TF32.",
        "tests/test_jax_users.py -k asked_for_in_float32",
    ),
    Row(
        "backends/jax/mesh.py",
        "    if not settings.enabled:\n        return OneDevice(device)\n",
        "",
        "tensor_parallel.enabled=False is ignored: the model goes to several devices.",
        "tests/test_parallel_jax.py -k cannot_be_are_refused",
    ),
    Row(
        "backends/jax/params.py",
        "elif (array.shape, array.dtype) != (data.shape, data.dtype):",
        "elif array.shape != data.shape:",
        "apply takes parameters of another dtype without a word.",
        "tests/test_jax_users.py -k params",
    ),
    Row(
        "backends/jax/params.py",
        "sum(x.nbytes for x in leaves if x.sharding.is_fully_replicated)",
        "sum(x.nbytes for x in leaves)",
        "The report says of all weights that every device has them.",
        "tests/test_parallel_jax.py -k every_device_has",
    ),
    Row(
        "backends/jax/module/parts.py",
        """if "params" in variables or {"batch_stats", "cache"} & set(variables):""",
        """if "params" in variables:""",
        "A Linen module with batch statistics and no parameters gets them as its parameters.",
        "tests/test_module_jax.py -k without_parameters",
    ),
    Row(
        "kernels/xla/handler.py",
        "value.value = buffers[number] + offset",
        "value.value = buffers[number]",
        "A kernel on JAX reads the beginning of a buffer in the place of its part of it.",
        "tests/kernels/test_xla_ahead.py -k launch_has",
    ),
    Row(
        "kernels/xla/handler.py",
        "repr(launch[1:])",
        "repr(launch[2:])",
        "An executable that XLA kept runs a kernel over the grid of another one.",
        "tests/kernels/test_xla_ahead.py -k differ",
    ),
    Row(
        "ops/cache_kinds.py",
        "k, v = (m.grow(x, more) for x in self[:2])",
        "k, v = (m.grow(0 * x, more) for x in self[:2])",
        "A longer source empties that of an open stream.",
        "tests/test_encoder_decoders.py -k longer_source",
    ),
    Row(
        "backends/torch/prompts.py",
        "last if wholes is None else wholes)",
        "last)",
        "A long prompt that goes in pieces is turned by the length of each piece.",
        "tests/test_relatives.py -k 'kernels_give and cohere and dynamic and torch'",
    ),
    Row(
        "backends/jax/forward.py",
        "last = jnp.where(mask, positions, 0).max(1)",
        "last = positions.max(1)",
        "A text with padding behind it is turned by the length of the longest one beside it.",
        "tests/test_relatives.py -k 'whatever_is_beside and phi3 and jax'",
    ),
    Row(
        "model/families/bart.py",
        "outer.append(replace(bias, fixed=True))",
        "outer.append(bias)",
        "A step of training moves a buffer of HF's.",
        "tests/test_gradients.py -k 'of_hf and bart'",
    ),
    Row(
        "engine/pure.py",
        "if spec.tokens and shape[1] > spec.tokens:",
        "if spec.tokens and shape[1] >= spec.tokens:",
        "apply refuses a sequence that fills a model's positions.",
        "tests/test_jax_users.py -k inputs_that_do_not_fit",
    ),
    Row(
        "backends/jax/compilation_cache.py",
        """if values["jax_compilation_cache_dir"] or not values["jax_enable_compilation_cache"]:""",
        """if not values["jax_enable_compilation_cache"]:""",
        "The user's own folder for compiled programs gives way to ours.",
        "tests/test_compilation.py -k users_own",
    ),
    # --- kernels, interpreted
    Row(
        "ops/plain.py",
        "            k, v = cache.kept(k, v)\n",
        "",
        "With kv_cache_dtype a prompt's tokens see other keys than the tokens after them do.",
        "tests/test_kv_cache_dtype.py -k logits",
    ),
    Row(
        "kernels/triton/decode_attention_kernel.py",
        "score *= k_scale[None, :]",
        "score *= 1.0",
        "On a GPU with kv_cache_dtype attention weighs old tokens by codes without scales.",
        "tests/kernels/test_cache_codes.py -k codes_mean",
    ),
    Row(
        "kernels/triton/decode_attention_kernel.py",
        """there, -float("inf"), cache_modifier""",
        """there, 0.0, cache_modifier""",
        "With three splits and scores far below 0 a token's attention is NaN.",
        "tests/kernels/test_triton_decode_attention.py -k far_below",
    ),
    Row(
        "kernels/triton/latent.py",
        "seen = seen & (s[None, :] <= place[:, None])",
        "pass",
        "On a GPU drafts of models with latent vectors see the drafts behind them.",
        "tests/kernels/test_triton_latent.py -k rows_of_tokens",
    ),
    Row(
        "kernels/triton/blocks.py",
        "further = (second - block) * block_stride - SIZE * token_stride",
        "further = (second - block) * block_stride",
        "Layers with a window, over blocks on a GPU, see other tokens than theirs.",
        "tests/kernels/test_triton_decode_attention.py -k before_a_window",
    ),
    Row(
        "kernels/triton/thresholds.py",
        "ranked = (top_k > 0) & (top_k < vocab)",
        "ranked = (top_k > 1) & (top_k < vocab)",
        "top_k=1 is off on a GPU.",
        "tests/kernels/test_triton_sampling.py -k 'plain_sampler or the_reference'",
    ),
    Row(
        "kernels/triton/activation.py",
        "(x + 0.044715 * x * x * x)",
        "(x + 0.0447 * x * x * x)",
        "GPT-2's activation is off by a little on a GPU.",
        "tests/kernels/test_triton_activation.py -k is_the_reference",
    ),
    Row(
        "kernels/triton/exchange.py",
        "slot = ((number & 1) * SIZE + rank)",
        "slot = ((number & 0) * SIZE + rank)",
        "An exchange writes where the one before is still read, and nothing where it is awaited.",
        "tests/kernels/test_triton_exchange.py",
    ),
    Row(
        "kernels/triton/quantized_kernels.py",
        "p += tl.sum(other, 2) * _scale(s2, SCALES)",
        "p += tl.sum(other, 2) * _scale(s, SCALES)",
        "On a GPU every second group of an NVFP4 weight has its neighbour's scale.",
        "tests/kernels/test_triton_quantized.py -k 'float32 and nvfp4'",
    ),
    Row(
        "kernels/triton/quantized_kernels.py",
        'total += (_offset(j) + (8 if CODES == "int4" else 0)) * x[j]',
        "total += _offset(j) * x[j]",
        "On a GPU int4 weights are read as if all were larger by eight codes.",
        "tests/kernels/test_triton_quantized.py -k '16_bits and int4'",
    ),
    Row(
        "kernels/triton/quantized_kernels.py",
        "p -= z.to(tl.float32) * sums[None, :]",
        "p -= 0.0 * sums[None, :]",
        "On a GPU zero points of AWQ and GPTQ are ignored.",
        "tests/kernels/test_triton_quantized.py -k 'float32 and uint4'",
    ),
    Row(
        "kernels/triton/quantized.py",
        'unsigned = weight.codes == "int4" and weight.zero is not None',
        "unsigned = False",
        "On a GPU signed int4 weights with zero points are off by eight codes.",
        "tests/kernels/test_triton_quantized.py -k 'float32 and zeros'",
    ),
    Row(
        "kernels/triton/fragment_kernel.py",
        "d -= total * ADDED",
        "d -= total * (ADDED - 8)",
        "On a GPU few rows read int4 weights as if all were larger by eight codes.",
        "tests/kernels/test_triton_quantized.py -k 'registers and int4'",
    ),
    Row(
        "kernels/triton/fragment_kernel.py",
        "d = tl.where(slot == s, _chunk(w, x, zero, mask, B, CODES, BITS, HALF), d)",
        "d += _chunk(w, x, zero, mask, B, CODES, BITS, HALF)",
        "On a GPU one row's codes are multiplied with columns of another chunk, too.",
        "tests/kernels/test_triton_quantized.py -k '16_bits and int4'",
    ),
    Row(
        "checkpoint/views/adapters.py",
        'math.sqrt(rank) if self.config.get("use_rslora") else rank',
        "rank",
        "An adapter that was trained by rsLoRA is merged with a smaller scale.",
        "tests/test_adapters.py -k 'beside_a_model and torch and rslora'",
    ),
    Row(
        "checkpoint/views/adapted.py",
        "value *= factor[part[1]]",
        "value += factor[part[1]] * 0",
        "DoRA on GPT-2's layers leaves the weight's own length.",
        "tests/test_adapters.py -k 'beside_a_model and torch and conv1d'",
    ),
    Row(
        "checkpoint/views/adapted.py",
        "        self._untie(names)\n",
        "",
        "An adapter of an embedding changes the head that is tied to it.",
        "tests/test_adapters.py -k 'beside_a_model and torch and embedding'",
    ),
    Row(
        "checkpoint/views/adapted_names.py",
        "return not self.row.either and (change.old or marked)",
        "return False",
        "Experts whose two sizes are the same are adapted by the transposes.",
        "tests/test_adapters_of_mixtures.py -k square",
    ),
    Row(
        "checkpoint/views/adapters.py",
        "slice(place, None, self.count)",
        "own[0]",
        "Each expert's outputs have the factors of others.",
        "tests/test_adapters_of_mixtures.py -k 'merges_them and mixtral'",
    ),
    Row(
        "checkpoint/views/adapted_model.py",
        "            config.num_labels = size\n",
        "",
        "A reward adapter of one label is refused for the base's two.",
        "tests/test_adapted_models.py -k 'for_a_task and torch and qwen2'",
    ),
    Row(
        "checkpoint/views/adapted.py",
        "                    self._brought[shown_as] = self._brought[name]\n",
        "                    pass\n",
        "A tied head keeps the old vocabulary beside a longer embedding.",
        "tests/test_adapted_models.py -k 'by and rank and True and 96'",
    ),
    Row(
        "model/peft_modules.py",
        "and n not in layer.merged_adapters",
        "",
        "An adapter that peft has merged into a live model is merged once more.",
        "tests/test_adapters.py -k 'until_refresh and torch'",
    ),
    Row(
        "backends/torch/module/quantized.py",
        'scheme = HEAD if id(part) in heads else recipe.scheme_of(f"{path}.weight", (n, k))',
        'scheme = recipe.scheme_of(f"{path}.weight", (n, k))',
        "In module mode a head becomes int4, which costs more than all layers do.",
        "tests/test_quantize_on_load.py -k holds_what_fused_mode_does",
    ),
    Row(
        "backends/torch/module/quantized.py",
        "input, weight = SCHEMES.share_input(input, self.held, self.seam.most)",
        "weight = self.held",
        "A split module rounds inputs by the scales of a rank's own columns.",
        "tests/test_quantize_on_load.py -k 'split_module and activation'",
    ),
    Row(
        "bench/counts.py",
        "read = {name: row for name, row in held.items() if not _is_lookup(row)}",
        "read = dict(held)",
        "A quantized model's limit counts an embedding of which a token reads one row.",
        "tests/test_bench.py -k quantized_folder",
    ),
    Row(
        "kernels/triton/quantized_tiles.py",
        "byte // 16 * 32 + byte % 4 * 8 + nibble % 2 * 4 + byte % 16 // 4",
        "byte // 16 * 32 + byte % 4 * 8 + nibble % 2 * 4 + byte % 8 // 4",
        "Products of 17 to 128 rows with weights of 4 bits mix up columns.",
        "tests/kernels/test_triton_quantized.py -k more_rows",
    ),
    Row(
        "kernels/triton/quantized_tiles.py",
        "k = (first + turn) * COLUMNS + nibble * UNITS",
        "k = first * COLUMNS + nibble * UNITS",
        "Tiles of codes read the first turn's columns at every turn.",
        "tests/kernels/test_triton_quantized.py -k more_rows",
    ),
    Row(
        "kernels/triton/quantized_tiles.py",
        "u // 16 * 32 + u % 4 * 8 if BITS == 4 else u",
        "u // 16 * 16 + u % 4 * 8 if BITS == 4 else u",
        "Tiles of 4 bits take the scales of other groups.",
        "tests/kernels/test_triton_quantized.py -k more_rows",
    ),
    Row(
        "kernels/triton/decode_attention_kernel.py",
        "tl.where(length >= original, ROTARY // 2, 0)",
        "tl.where(length > original, ROTARY // 2, 0)",
        "The first token past longrope's length is turned by the short table in kernels.",
        "tests/kernels/test_triton_decode_attention.py -k second_table",
    ),
    Row(
        "kernels/triton/past.py",
        "channel, found[i + 2], mask",
        "channel, found[i + 1], mask",
        "On a GPU a token of Mamba-2 or of the delta rule leaves what came before where it was.",
        "tests/kernels/test_triton_state.py -k 'moves_the_slots and whole'",
    ),
    Row(
        "kernels/triton/rotary.py",
        "tl.where(tl.load(ends_ptr + b) >= original, PAIRS, 0)",
        "tl.where(tl.load(ends_ptr + b) > original, PAIRS, 0)",
        "A prompt that is just past longrope's length is turned by the short table in kernels.",
        "tests/kernels/test_triton_rotary.py -k second_table",
    ),
    # --- how JAX launches them
    Row(
        "kernels/xla/grouping.py",
        "if any(self._origin(v) in overwritten for v in eqn.invars):",
        "if False:",
        "On JAX a kernel that should read an array as it was reads it changed.",
        "tests/kernels/test_xla_launches.py -k before_a_change",
    ),
    Row(
        "kernels/xla/grouping.py",
        "return any(self._last_use.get(name, -1) > i for name in names)",
        "return False",
        "On JAX a result that is read later is overwritten by the kernel behind it.",
        "tests/kernels/test_xla_launches.py -k others_read",
    ),
    Row(
        "kernels/triton/ahead.py",
        "if not fact.offset:",
        "if True:",
        "A kernel on JAX reads 16 bytes at once from where it must not: CUDA ends the process.",
        "tests/kernels/test_xla_ahead.py -k every_kernel",
    ),
    Row(
        "kernels/triton/compiling.py",
        "        tasks.put(line)\n    os._exit(0)",
        "        tasks.put(line)",
        "A process that compiles kernels outlives the one that started it.",
        "tests/kernels/test_triton_processes.py -k ends_with",
    ),
    Row(
        "backends/torch/ops/kernel_base.py",
        "        own._counters = {}",
        "        pass",
        "Launches on torch count in tensors without memory, which a pass made ahead has left.",
        "tests/test_ahead_torch.py",
    ),
    Row(
        "kernels/xla/interpreter.py",
        "np.array(origins[i]) if i in origins",
        "np.zeros(b.shape, _numpy(b.dtype)) if i in origins",
        "Interpreted, what a kernel changes in place begins as zeros.",
        "tests/kernels/test_xla_launches.py -k in_place",
    ),
    Row(
        "backends/jax/__init__.py",
        '        return f"{KERNELS_NEED}, and this is a {kind}"\n    if not has_triton():\n',
        '        return f"{KERNELS_NEED}, and this is a {kind}"\n    if False:\n',
        "Where Triton is not installed JAX's engine fails instead of running plain XLA.",
        "tests/test_kernel_ops_jax.py -k without_triton",
    ),
    # --- families
    Row(
        "model/families/bloom.py",
        "series(2 * power)[::2]",
        "series(2 * power)[1::2]",
        "BLOOM with a number of heads that is no power of two weighs distances wrongly.",
        "tests/test_families.py -k slopes",
    ),
    Row(
        "model/families/rope.py",
        """if parameters.get("truncate", True):""",
        "if True:",
        "yarn with truncate=false has other frequencies than HF's.",
        "tests/test_families.py -k rotary_frequencies",
    ),
    Row(
        "model/families/rope.py",
        "    if low == high:\n        high += 0.001\n",
        "",
        "yarn whose two ends meet gives NaN.",
        "tests/test_families.py -k rotary_frequencies",
    ),
    Row(
        "model/families/llama.py",
        "isinstance(window, int) and window >= reach",
        "isinstance(window, int) and window > reach",
        "A Llama whose sliding_window is its whole length is refused.",
        "tests/test_families.py -k window_is_its_length",
    ),
    Row(
        "model/families/gptj.py",
        "if rotary_dim > head_dim or",
        "if rotary_dim >= head_dim or",
        "A GPT-J that turns its whole heads is refused.",
        "tests/test_families.py -k whole_heads",
    ),
    Row(
        "model/families/fields.py",
        "not isinstance(value, int) or value < 1",
        "not isinstance(value, int) or value < 0",
        "num_attention_heads=0 ends in a ZeroDivisionError.",
        "tests/test_errors.py -k config_field",
    ),
    Row(
        "model/families/rope.py",
        'short = {**parameters, "long_factor": parameters["short_factor"]}',
        'short = {**parameters, "long_factor": parameters["long_factor"]}',
        "Phi-3 turns short sequences by the long factors.",
        "tests/test_relatives.py -k longrope_turns",
    ),
    # --- sharding
    Row(
        "parallel/sharding.py",
        "extent = -(-size // (parts * grain)) * grain",
        "extent = -(-size // parts)",
        "On JAX tp_grain_size is ignored.",
        "tests/test_sharding.py -k grain",
    ),
    Row(
        "parallel/sharding.py",
        "slopes[query.start : query.stop]",
        "slopes[: query.real]",
        "Every device has the ALiBi slopes of the first one's heads.",
        "tests/test_sharding.py -k slopes",
    ),
    Row(
        "cli/plan_table.py",
        """if held > table.spec.extent("k", attending):""",
        """if held >= table.spec.extent("k", attending):""",
        "dualinfer plan says that devices share KV heads where none does.",
        "tests/test_cli_plan.py -k 'plan_prints or equal_layers'",
    ),
    Row(
        "cli/plan_table.py",
        "count=count, size=row.size * count",
        "count=count, size=row.size",
        "dualinfer plan shows one layer's bytes for all equal layers.",
        "tests/test_cli_plan.py -k 'plan_prints or equal_layers'",
    ),
    # --- the loop and what goes in
    Row(
        "engine/stops.py",
        "max(0, old - len(s) + 1)",
        "max(0, old - len(s))",
        "A prompt that ends with a stop string ends the text at its first token.",
        "tests/test_generate.py -k stop_string",
    ),
    Row(
        "engine/stops.py",
        "self._longest = max(map(len, strings))",
        "self._longest = 1",
        "A stop string of several tokens is missed.",
        "tests/test_text_stream.py -k stop_string",
    ),
    Row(
        "engine/generation.py",
        "                del live.tokens[count:]\n",
        "",
        "Text goes on behind a stop string.",
        "tests/test_generate.py -k stop_string",
    ),
    Row(
        "engine/loop.py",
        "            self._runner.release(slots)\n            raise",
        "            raise",
        "A prompt that failed keeps its slot, and every later step serves it.",
        "tests/test_generate.py -k failing_prefill",
    ),
    Row(
        "engine/preparing.py",
        "same = requests, options, seed is None",
        "same = options, seed is None",
        "Ranks that were given different seeds or prompts make different texts, without a word.",
        "tests/test_parallel_torch.py -k 'seed or differ'",
    ),
    Row(
        "engine/preparing.py",
        "if least_tokens > new_tokens:",
        "if least_tokens >= new_tokens:",
        "min_new_tokens = max_new_tokens warns that the maximum counts.",
        "tests/test_generate.py -k 'layout_and_options'",
    ),
    Row(
        "engine/forward.py",
        """(self._said("use_cache", True) if use_cache is None else use_cache)""",
        "(True if use_cache is None else use_cache)",
        "Packed sequences of a model with use_cache=false see each other.",
        "tests/parity/test_logits.py -k follow_use_cache",
    ),
    Row(
        "engine/requests.py",
        "0 <= value.__index__() < 2**64:",
        "0 <= value.__index__() < 2**63:",
        "Half of all seeds are refused.",
        "tests/test_generate.py -k 'published_noise and torch'",
    ),
    Row(
        "engine/text.py",
        "list(dict.fromkeys([*endings(config), *([] if turn is None else [turn])]))",
        "[] if turn is None else [turn]",
        "A chat goes on behind the end that the model's own config names.",
        "tests/test_text.py -k ends_at",
    ),
    Row(
        "engine/text.py",
        "return Detokenizer(tokenizer, how.skips, cleans=cleans), begun",
        "return Detokenizer(tokenizer, cleans=cleans), begun",
        "skip_special_tokens=False is accepted and does nothing.",
        "tests/test_text.py -k special",
    ),
    Row(
        "engine/text_stream.py",
        "{id for id, token in added if token.special} if skips else set()",
        "set()",
        "Special tokens stand in texts, streams and chats.",
        "tests/test_text.py tests/test_text_stream.py -k special",
    ),
    Row(
        "engine/text_stream.py",
        'decoder.decode(["", made] if minds_first else [made])',
        "decoder.decode([made])",
        "Words of an answer have no blanks between them.",
        "tests/test_text_stream.py -k 'blank or joined'",
    ),
    Row(
        "engine/text_stream.py",
        'return ["\\ufffd"] * len(run)',
        'return ["\\ufffd"]',
        "A stream has fewer marks of broken bytes than the whole text.",
        "tests/test_text_stream.py -k joined",
    ),
    Row(
        "engine/text_stream.py",
        "            at -= 1\n",
        "            break\n",
        "Behind a long prompt of bytes the first characters are broken.",
        "tests/test_text_stream.py -k long_run",
    ),
    Row(
        "engine/text_stream.py",
        "known = len(os.path.commonprefix((self._shown, text)))",
        "known = 0",
        "The last characters of a prompt are shown again as new text.",
        "tests/test_text_stream.py -k 'joined or prompt'",
    ),
    Row(
        "engine/text_stream.py",
        '            same = same.rstrip("\\ufffd")\n',
        "            pass\n",
        "Characters of several tokens are broken where a tokenizer decodes in a way of its own.",
        "tests/test_text_stream.py -k joined",
    ),
    Row(
        "engine/text_stream.py",
        "self._cleans = not eager and cleans and _cleans(tokenizer)",
        "self._cleans = False",
        "Blanks before marks stay in the texts of tokenizers that take them away.",
        "tests/test_text_stream.py -k joined",
    ),
    Row(
        "engine/text_stream.py",
        "settled = self._if_more + more[:same]",
        "settled = more[:same]",
        "Words run into one another in texts of OpenAI GPT's kind of vocabulary.",
        "tests/test_text_stream.py -k joined",
    ),
    Row(
        "engine/text_stream.py",
        "is_new, self._last = piece != self._last, piece",
        "is_new, self._last = True, piece",
        "Letters of CTC's are doubled.",
        "tests/test_text_stream.py -k joined",
    ),
    Row(
        "engine/tokenizing.py",
        "    with twin.lock:\n        yield twin.tokenizer",
        "    with twin.lock:\n        yield tokenizer",
        "A thread that truncates texts with the same tokenizer cuts those that embed() reads.",
        "tests/test_tokenizing.py",
    ),
    Row(
        "engine/tokenizing.py",
        "*map(repr, parts), *settings)",
        "*map(repr, parts))",
        "A tokenizer whose settings were changed gives the ids of before.",
        "tests/test_tokenizing.py -k changes",
    ),
    Row(
        "engine/tokenizing.py",
        "    return inner if _is_tokenizer(inner) else given",
        "    return given",
        "A prompt is taken for the address of an image.",
        "tests/test_chat.py -k processor",
    ),
    Row(
        "engine/chat.py",
        "return ids_of(self._tokenizer, self.text(messages), bare=True)",
        "return ids_of(self._tokenizer, self.text(messages))",
        "A chat begins with two BOS.",
        "tests/test_chat.py -k one_bos",
    ),
    Row(
        "engine/chat.py",
        "        if not losses:\n            return made",
        "        return made",
        "What users write is lost where the template reads another form of content.",
        "tests/test_chat.py -k said",
    ),
    Row(
        "engine/chat.py",
        '        if calls := message.get("tool_calls"):',
        "        if calls := None:",
        "Calls of tools are lost without a word.",
        "tests/test_chat.py -k 'calls or lost'",
    ),
    Row(
        "engine/chat.py",
        "if name in read or name in _OF_MESSAGES or is_off or is_default:",
        "if True:",
        "Options of a template that are misspelt do nothing.",
        "tests/test_chat.py -k does_nothing",
    ),
    Row(
        "engine/chat_limits.py",
        '                node.test = nodes.And(own("turn"), node.test)\n',
        "                pass\n",
        "A template of a stranger hangs a server.",
        "tests/test_chat.py -k 'stopped and passes'",
    ),
    Row(
        "engine/chat_limits.py",
        "        if size > self.chars or self._left < 0:",
        "        if size > self.chars:",
        "A template of a stranger fills the memory by many long texts.",
        "tests/test_chat.py -k 'stopped and held'",
    ),
    Row(
        "checkpoint/gguf/tokenizer.py",
        "models.BPE(_numbered(fields.tokens), pairs, ignore_merges=split.whole)",
        "models.BPE(_numbered(fields.tokens), pairs)",
        "Words of Llama 3's vocabulary are cut.",
        "tests/test_gguf_tokenizers.py -k cuts_text",
    ),
    Row(
        "checkpoint/gguf/tokenizer.py",
        "inner, bos = _byte_level(fields)",
        "inner, bos = _byte_level(fields)[0], False",
        "A GGUF file of Llama 3 has no BOS in front of prompts.",
        "tests/test_gguf_tokenizers.py -k cuts_text",
    ),
    Row(
        "checkpoint/gguf/tokenizer.py",
        "    if name not in SPLITS:\n        raise",
        "    if name not in SPLITS:\n        return SPLITS['gpt-2']\n        raise",
        "A GGUF file that splits text in an unknown way is split as GPT-2's.",
        "tests/test_gguf_tokenizers.py -k unknown",
    ),
    Row(
        "checkpoint/gguf/tokenizer.py",
        "if of == kind and inner.token_to_id(token) == i",
        "if of == kind",
        "Two blanks are a token beyond Gemma's vocabulary.",
        "tests/test_gguf_tokenizers.py -k scores",
    ),
    Row(
        "checkpoint/gguf/config.py",
        '    ends += _ends_of_turns(model) if model.token_id("eot") is None else []\n',
        "",
        "Chats of old GGUF files of Llama 3 do not end.",
        "tests/test_gguf_tokenizers.py -k special_ids",
    ),
    Row(
        "engine/options.py",
        "asked = {**config, **{k: v for k, v in kwargs.items() if k not in ignored}}",
        "asked = {**{k: v for k, v in kwargs.items() if k not in ignored}, **config}",
        "A generation_config beats the keyword arguments beside it.",
        "tests/test_generate.py -k generation_config_argument",
    ),
    Row(
        "engine/options.py",
        "return max(0, self.min_length - width)",
        "return self.min_length",
        "min_length does not count the prompt.",
        "tests/test_generate.py -k layout_and_options",
    ),
    Row(
        "engine/inputs.py",
        "prepend=positions[:, :1] - 1) != 1",
        "prepend=positions[:, :1] - 1) < 1",
        "Packed sequences whose positions go on higher see each other.",
        "tests/parity/test_logits.py -k 'packed and torch'",
    ),
    Row(
        "engine/module.py",
        "return max(len(row) for row in prompt)",
        "return len(prompt[0])",
        "A long prompt behind a short one passes max_out_tokens in module mode.",
        "tests/test_modules.py",
    ),
    Row(
        "engine/pausing.py",
        "pause = original + 1 - prompt",
        "pause = original + 2 - prompt",
        "Text that crosses longrope's length is read again a token too late.",
        "tests/test_relatives.py -k longrope_turns",
    ),
    Row(
        "engine/stepwise.py",
        "        if ended.any():\n            tokens = np.where(ended, self._fill, tokens)\n",
        "",
        "With the caller's processors a row that has ended goes on with tokens, not with padding.",
        "tests/test_caller_options.py -k end_early",
    ),
    Row(
        "engine/driver.py",
        "if not job.begun.is_ahead:",
        "if True:",
        "A job hands out one token a turn, whatever its drafts had right.",
        "tests/test_lookup.py -k 'together and torch'",
    ),
    Row(
        "engine/stepwise.py",
        "done = done | result",
        "done = done & result",
        "Of several stopping criteria none ends a row by itself.",
        "tests/test_caller_options.py -k criteria_end",
    ),
    Row(
        "engine/stepwise.py",
        "return logits.clone() if kind_of(logits)",
        "return logits if kind_of(logits)",
        "output_logits has the logits as processors left them.",
        "tests/test_caller_options.py -k 'scores_and_ids or what_hf_gives'",
    ),
    Row(
        "engine/whisper/rules.py",
        "else last + 1] = True",
        "else last] = True",
        "Whisper writes one timestamp again and again where it should write text.",
        "tests/test_speech.py -k 'timestamps and torch'",
    ),
    Row(
        "engine/whisper/windows.py",
        "settings.conditions and sure",
        "settings.conditions",
        "A window follows a text that was drawn at a high temperature.",
        "tests/test_speech.py -k read_again",
    ),
    Row(
        "engine/whisper/windows.py",
        "tokens[: max(1, len(tokens) - rest)]",
        "tokens",
        "Silence is heard where there is speech, and windows are passed over.",
        "tests/test_speech.py -k silence",
    ),
    Row(
        "engine/whisper/calls.py",
        "                ends = heard\n",
        "                ends = ends\n",
        "Of several long sounds the shorter ones go on with text of their padding.",
        "tests/test_speech.py -k 'windows_that_follow or follow'",
    ),
    # --- checkpoints
    Row(
        "checkpoint/files/inert.py",
        "not 5 <= len(said) <= 6 or any(said[5:])",
        "not 5 <= len(said) <= 6",
        "A view of a storage in a pickle is read as the whole storage.",
        "tests/test_deepspeed_checkpoints.py -k does_not_hold",
    ),
    Row(
        "checkpoint/files/inert.py",
        "if self.found.storages.setdefault(key, found) != found:",
        "if self.found.storages.setdefault(key, found) is None:",
        "Two tensors of a pickle say different things of one storage, and none is told.",
        "tests/test_deepspeed_checkpoints.py -k does_not_hold",
    ),
    Row(
        "checkpoint/gguf/config.py",
        'fields.number("attn_logit_softcapping", 50.0)',
        'fields.number("attn_logit_softcapping", 30.0)',
        "Gemma 2 of a GGUF file that leaves out its soft cap has another one.",
        "tests/test_gguf.py -k gemmas_are",
    ),
    Row(
        "checkpoint/gguf/config.py",
        'fields.number("attention.sliding_window_pattern", 6)',
        'fields.number("attention.sliding_window_pattern", 2)',
        "Gemma 3 of a GGUF file that leaves out its pattern has whole layers where it has windows.",
        "tests/test_gguf.py -k gemmas_are",
    ),
    Row(
        "checkpoint/described/sentence.py",
        "if name is not None and (not isinstance(name, str) or name not in prompts):",
        "if name is not None and not isinstance(name, str):",
        "A folder whose default prompt does not exist is embedded without one.",
        "tests/test_encoders.py -k default_prompt",
    ),
    Row(
        "model/load_plan.py",
        "absent = not any(find(part.name)",
        "absent = not all(find(part.name)",
        "A BERT with half a pooler loads without the pooler.",
        "tests/test_weights.py -k optional",
    ),
    Row(
        "checkpoint/reader.py",
        "held + waiting[0].size <= self._ahead",
        "held <= self._ahead",
        "Loading holds more of the model in memory than one layer ahead.",
        "tests/test_loading.py",
    ),
    Row(
        "checkpoint/files/pieces.py",
        "if held != whole.size:",
        "if held > whole.size:",
        "Where a piece is missing from the index, its weights are whatever was in memory.",
        "tests/test_sharded_checkpoint.py -k damaged",
    ),
    Row(
        "checkpoint/writing/saving.py",
        "config.architectures, config.dtype = [saved.spec.architecture], saved.dtype",
        "config.architectures = [saved.spec.architecture]",
        "The config.json of a saved checkpoint names another dtype than its weights have.",
        "tests/test_sharded_checkpoint.py -k dtype_is",
    ),
    Row(
        "system/memory.py",
        " - used + _droppable(cgroup / group))",
        " - used)",
        "In a container whose file cache is full, no cache finds room.",
        "tests/test_module_torch.py -k host_memory",
    ),
    # --- processes
    Row(
        "parallel/agreement.py",
        "for n, v in shared.items()} if asks else own",
        "for n, v in shared.items()}",
        "A rank's own prompts give way to rank 0's, without a word.",
        "tests/test_limits.py -k who_have_none",
    ),
    Row(
        "parallel/agreement.py",
        """digest.update(f"[{len(value)}".encode())""",
        """digest.update(b"[")""",
        "Ranks whose lists are nested differently are taken to agree.",
        "tests/test_limits.py -k nested",
    ),
    # --- config
    Row(
        "config/fields.py",
        "self.min_out_tokens > self.max_out_tokens:",
        "self.min_out_tokens >= self.max_out_tokens:",
        "min_out_tokens = max_out_tokens is refused.",
        "tests/test_config.py tests/test_limits.py -k 'out_tokens or round or room'",
    ),
    Row(
        "config/model.py",
        """value.model_fields_set or {"enabled"} & cls.model_fields.keys()""",
        "value.model_fields_set",
        "QuantizationConfig() asks for nothing, where it should be refused.",
        "tests/test_config.py -k quantization_config",
    ),
    Row(
        "config/values.py",
        """:\n        raise ValueError("expected a number, and no bool")""",
        ":\n        return value",
        "timeout=True is one second.",
        "tests/test_config.py -k bad_value",
    ),
    Row(
        "config/dtypes.py",
        """"" if value.__module__ == "builtins" else value.__name__""",
        "value.__name__",
        "dtype=float, which has 64 bits in NumPy and torch, is taken for float32.",
        "tests/test_config.py -k dtype",
    ),
    Row(
        "config/refusals.py",
        """if config.streams and (device != "cpu" or config.resident_layers is not None):""",
        "if False:",
        "CUDA graphs that were asked for are left out without a word where layers are streamed.",
        "tests/test_offload.py -k exclude_each_other",
    ),
    Row(
        "backends/streaming.py",
        "if not config.streams or (on_cpu and config.resident_layers is None):",
        "if not config.streams:",
        "On a CPU keep_module_on_host copies weights from the host to the host.",
        "tests/test_offload.py -k only_where_resident_layers",
    ),
    Row(
        "backends/torch/streaming.py",
        "following = (number + DEPTH) % len(self._order)",
        "following = (number + 1) % len(self._order)",
        "Layers are copied when they are needed, and the device waits for each.",
        "tests/test_offload.py -k before_it_is_asked_for",
    ),
    Row(
        "backends/jax/streaming.py",
        "wanted = number, (number + 1) % len(self._order)",
        "wanted = (number,)",
        "On JAX layers are copied when they are needed, and the device waits for each.",
        "tests/test_offload.py -k before_it_is_asked_for",
    ),
    Row(
        "backends/torch/runner.py",
        """asks = self.device.type == "cpu" or self._stream is not None""",
        "asks = False",
        "Texts that have ended cost passes, and streamed ones take seconds.",
        "tests/test_offload.py -k sequences_that_have_ended",
    ),
    Row(
        "config/refusals.py",
        "callable(size) and size() == 1",
        "callable(size)",
        "On JAX a process group of four is ignored.",
        "tests/test_limits.py -k groups_of_processes",
    ),
    Row(
        "checkpoint/described/auto_class.py",
        "inner = max((x for x in (*own, *known) if names[0].endswith(x)), key=len",
        "inner = min((x for x in (*own, *known) if names[0].endswith(x)), key=len",
        "A wrapper's name is taken for a class whose name is only the end of another.",
        "tests/test_auto_class.py",
    ),
    Row(
        "parallel/guard.py",
        'if any(mark.encode() in own.split(b":") for own in marks):',
        "if any(mark.encode() == own for own in marks):",
        "Ranks of a launch within another launch live on after the outer one.",
        "tests/test_launching.py -k one_another",
    ),
    Row(
        "parallel/guard.py",
        "                if is_late:\n                    os.kill(process, signal.SIGKILL)",
        "                if False:\n                    os.kill(process, signal.SIGKILL)",
        "A rank that ignores SIGTERM lives on after its launcher.",
        "tests/test_launching.py -k one_another",
    ),
    Row(
        "backends/leading.py",
        "            is_alike = self._failed == number",
        "            is_alike = True",
        "A server goes on while one of its ranks has failed, and hangs with the next step.",
        "tests/test_leading.py -k fails_alike",
    ),
    Row(
        "backends/leading.py",
        "weakref.finalize(result, self._dropped.append, self._number)",
        "pass",
        "What paused sequences had cached stays in the memory of all ranks but the first.",
        "tests/test_leading.py -k come_to_the_others",
    ),
    Row(
        "engine/likeness.py",
        "        if only_trainable:\n            return 0",
        "        if only_trainable:\n            pass",
        "A fused engine says that its weights are trained.",
        "tests/test_pipelines.py -k harnesses",
    ),
    Row(
        "backends/jax/gradients.py",
        "if key[0] and len(own) > 1]",
        "if key[0] and len(own) > 9]",
        "Layers that share a weight have gradients of their own.",
        "tests/test_gradients.py -k 'hf and albert'",
    ),
    Row(
        "backends/jax/gradients.py",
        "            whole = lax.psum(whole, self._axis)",
        "            pass",
        "Over devices what is held twice has a part of its gradient.",
        "tests/test_gradients.py -k 'over_devices_are and llama'",
    ),
    Row(
        "checkpoint/reader.py",
        '            most = span(scheme) * factors.get("scale", 0.0) * factors.get("outer", 1.0)',
        '            most = span(scheme) * factors.get("scale", 0.0)',
        "Codes that overflow by their outer scale are not told.",
        "tests/test_schemes.py -k not_finite_once",
    ),
    Row(
        "checkpoint/reader.py",
        "            (self.beyond if is_finite(array) else self.wrong)[name] = None",
        "            self.wrong[name] = None",
        "Values beyond float16 are told as NaN.",
        "tests/test_schemes.py -k told_apart",
    ),
    Row(
        "quantization/meaning.py",
        "                values = values - spread(by_row, zero[blocks], (count, k), group)",
        "                pass",
        "Codes that overflow by their zero points are not told.",
        "tests/test_schemes.py -k not_finite_once",
    ),
    Row(
        "ops/sampling.py",
        """return m.where(wrong, float("nan"), drawn)""",
        "return drawn",
        "A NaN among scores is drawn away.",
        "tests/kernels/test_sampling.py -k nan",
    ),
    Row(
        "checkpoint/views/peft_layers.py",
        '    names = {"weight", "bias"} if kind in _WITH_BIAS else {"weight"}',
        '    names = {"weight"}',
        "IA3 leaves biases as they were.",
        "tests/test_adapters.py -k 'change_biases and IA3'",
    ),
    Row(
        "checkpoint/views/peft_layers.py",
        "    if lacking := _lacking(model",
        "    if None and _lacking(model",
        "An adapter's file that lacks tensors is filled with what peft draws.",
        "tests/test_adapters.py -k every_tensor_of_their_kind",
    ),
    Row(
        "engine/pure.py",
        "        visible = tokens != spec.hidden",
        "        visible = None",
        "engine.apply reads padding that forward hides.",
        "tests/test_jax_users.py -k hidden_where",
    ),
    Row(
        "checkpoint/described/hf_config.py",
        "next((folder / name for name in BESIDE if os.path.isfile(folder / name)), None)",
        "None",
        "A GPTQ model whose config lies in a file of its own is read as a plain one.",
        "tests/test_gptq_awq.py -k file_beside",
    ),
    # --- the engine and what it says
    Row(
        "engine/base.py",
        "            _ = self.runner  # a closed engine says that it is\n",
        "",
        "A closed engine says that profiling is off.",
        "tests/test_errors.py -k closed_engine_refuses",
    ),
    Row(
        "api.py",
        "            stack.callback(runner.close)\n            if spec.can_generate:",
        "            if spec.can_generate:",
        "An engine that could not be made keeps its memory and its processes' groups.",
        "tests/test_limits.py -k could_not_be_made",
    ),
    Row(
        "engine/report.py",
        """if self.max_tokens else "no limit on tokens\"""",
        """if self.max_tokens >= 0 else "no limit on tokens\"""",
        "The report of a module says: at most 0 tokens.",
        "tests/test_modules.py -k report",
    ),
    Row(
        "cli/parity.py",
        "rounding = max(ROUNDING",
        "rounding = min(ROUNDING",
        "An engine in bfloat16 beside one in float32 is held to float32's rounding.",
        "tests/test_parity.py -k widens",
    ),
    # --- bench and the command line
    Row(
        "bench/measure.py",
        "return times[0], times[warm_ups:]",
        "return times[0], times",
        "The medians of bench count the warm-ups.",
        "tests/test_bench.py -k warm_ups",
    ),
    Row(
        "bench/tables.py",
        ".startswith(('torch', 'hf'))",
        ".startswith(('torch',))",
        "bench says that JAX measured the limits of Hugging Face's rows.",
        "tests/test_bench.py -k limits_are_said",
    ),
    Row(
        "bench/limits.py",
        "math.ceil(4 * cache_bytes / max(nbytes, 1))",
        "math.ceil(cache_bytes / max(nbytes, 1))",
        "Ops are measured with inputs that the GPU's cache still holds.",
        "tests/test_bench.py -k sets_of_inputs",
    ),
    Row(
        "cli/main.py",
        """({result.rounding:.0e}).[/]")\n        raise typer.Exit(1)""",
        """({result.rounding:.0e}).[/]")""",
        "dualinfer parity ends with 0 where the backends differ.",
        "tests/test_cli.py -k parity_fails",
    ),
    Row(
        "cli/main.py",
        "return (result.shape[1] - ids.shape[1]) /",
        "return result.shape[1] /",
        "The demo counts the prompt's tokens as generated ones.",
        "tests/test_cli.py -k speed_is",
    ),
    Row(
        "cli/check.py",
        "passed &= all(",
        "passed |= all(",
        "dualinfer check passes a family that differs from transformers.",
        "tests/test_check.py -k agrees_passes",
    ),
    # --- everywhere
    Row(
        "ops/rotary.py",
        "m.sin(radians) * rope.scaling",
        "m.sin(radians)",
        "yarn's factor reaches the cosines alone.",
        "tests/parity/test_logits.py -k 'unpadded and yarn and torch'",
    ),
    Row(
        "ops/rotary.py",
        "m.cos(radians) * rope.scaling",
        "m.cos(radians)",
        "yarn's factor reaches the sines alone.",
        "tests/parity/test_logits.py -k 'unpadded and yarn and jax'",
    ),
    Row(
        "backends/torch/prompts.py",
        "own, slots, starts, lengths, reach",
        "own, slots * 0, starts, lengths, reach",
        "A long prompt behind another one reads that one's cache.",
        "tests/test_prompts.py -k pieces",
    ),
    Row(
        "backends/torch/prompts.py",
        "[cache.room.slots] * more",
        "[0] * more",
        "What fills a panel up is written into another sequence's cache.",
        "tests/test_cache_kinds.py -k 'part_of_a_pool and torch'",
    ),
    Row(
        "backends/torch/process_groups.py",
        "mine.copy = me // degree",
        "mine.copy = 0",
        "Where a job runs two copies of a model, both write the checkpoint.",
        "tests/test_sharded_checkpoint.py tests/test_parallel_torch.py -k copies",
    ),
    Row(
        "engine/loop.py",
        "self._make_room(1 if one else min(steps, MAX_STEPS))",
        "self._make_room(min(steps, MAX_STEPS))",
        "model_times has one entry for many passes of generate.",
        "tests/test_engine.py -k 'every_pass_of_generate'",
    ),
    Row(
        "backends/blocks.py",
        "seen_from(tokens - (GRAIN - 1), window)",
        "seen_from(tokens + (GRAIN - 1), window)",
        "Layers with a window give back blocks that they see yet.",
        "tests/test_blocks.py -k 'blocks_behind_a_window'",
    ),
    Row(
        "ops/attention.py",
        "written = written & (at > starts[:, None] - sight)",
        "written = written & (at > starts[:, None] - (1 << 20))",
        "What lies behind a window, of nobody, makes NaN of a prompt's outputs.",
        "tests/test_blocks.py -k 'keep_the_last_tokens and torch-gemma3'",
    ),
    Row(
        "engine/slots.py",
        "        self.check(requests)  # none of these would ever have room\n",
        "",
        "A call that is longer than what was reserved in blocks waits for ever.",
        "tests/test_blocks.py -k 'no_blocks_is_refused and torch'",
    ),
    Row(
        "backends/slots.py",
        "[*(self._requests.keys() - self._chosen)] if slots is None else slots",
        "[*self._requests] if slots is None else slots",
        "Steps of others take the window of a sequence whose tokens the host chooses.",
        "tests/test_blocks.py -k 'leave_the_window and torch'",
    ),
    Row(
        "engine/blocks.py",
        "                if not self._runner.lacks(1):",
        "                if False:",
        "A sequence is read again, though another one ends in the steps that lack its block.",
        "tests/test_blocks.py -k 'steps_are_fewer'",
    ),
    Row(
        "engine/loop.py",
        "        self._allow()\n",
        "",
        "A grammar is followed in the first token alone.",
        "tests/test_grammar.py -k masked_logits",
    ),
    Row(
        "serving/prefixes.py",
        "return int(most if same.all() else same.argmin()) // GRAIN * GRAIN",
        "return int(most) // GRAIN * GRAIN",
        "A prompt begins with another one's keys where the first 64 tokens are alike.",
        "tests/test_sharing.py -m 'not slow' -k found_was",
    ),
    Row(
        "engine/sharing.py",
        "ids = ids[: min(self._most, len(ids)) // GRAIN * GRAIN]",
        "ids = ids[: (self._most - 64) // GRAIN * GRAIN]",
        "A turn of a chat reads more of the one before than it must.",
        "tests/test_sharing.py -m 'not slow' -k turn_of",
    ),
    Row(
        "engine/loop.py",
        "            self._forget()\n            self.finish(served)",
        "            self.finish(served)",
        "After a reading that failed on JAX a prompt begins with zeros.",
        "tests/test_sharing.py -m 'not slow' -k has_lost",
    ),
    Row(
        "engine/slots.py",
        "                if not self._is_busy:\n                    self._finish_left()",
        "                self._finish_left()",
        "A stream that is collected puts its text in the place of what was just found.",
        "tests/test_sharing.py -m 'not slow' -k collected",
    ),
    Row(
        "engine/slots.py",
        "as after an interrupt\n                self.leave(call.lives or [])",
        "as after an interrupt\n                pass",
        "After an interrupt the engine says for ever that a generation is under way.",
        "tests/test_sharing.py tests/test_beginning.py -m 'not slow' -k interrupt",
    ),
    Row(
        "engine/slots.py",
        "self._mates(ticket) if is_first else []",
        "[]",
        "Prompts of threads that begin together are read one after the other.",
        "tests/test_beginning.py -m 'not slow' -k 'read_together and torch'",
    ),
    Row(
        "engine/grammar.py",
        "if is_end and self.accepts:",
        "if is_end:",
        "A processor may end a text amid of its grammar, as whole.",
        "tests/test_grammar.py -k cannot_leave",
    ),
    Row(
        "backends/profiling.py",
        "times, self._times = self._times, []",
        "times = self._times",
        "model_times gives times that it has given before.",
        "tests/test_engine.py -k are_cleared",
    ),
    Row(
        "model/families/opt.py",
        'final = before and not fields.flag("_remove_final_layer_norm", False)',
        "final = before",
        "An OPT without a final norm is refused.",
        "tests/parity/test_logits.py -k 'unpadded and opt and torch'",
    ),
    Row(
        "config/merging.py",
        "if names.count(name) > 1",
        "if names.count(name) > 2",
        "Of a name that stands twice in a config file the first value is ignored.",
        "tests/test_config.py -k name_twice",
    ),
    Row(
        "checkpoint/writing/saving.py",
        "    elif target.exists():",
        "    elif False:",
        "save_mp_checkpoint_path that is a file is found out after loading.",
        "tests/test_sharded_checkpoint.py -k written_over",
    ),
    Row(
        "engine/module.py",
        "return len(_shape(prompt)) <= 2 and is_int",
        "return is_int",
        "The limit on tokens refuses pictures of integers.",
        "tests/test_modules.py",
    ),
    Row(
        "checkpoint/described/tokenizer.py",
        '"vocab.json", "vocab.txt", "spiece.model")',
        '"vocab.json", "spiece.model")',
        "A folder with BERT's vocabulary is said to hold no tokenizer.",
        "tests/test_text.py tests/test_cli.py -k tokenizer",
    ),
    Row(
        "bench/counts.py",
        "else attention.reach - 1",
        "else attention.reach",
        "The limit of a windowed model's step counts a token too many.",
        "tests/test_bench.py -k cached_bytes",
    ),
    Row(
        "ops/mixtures.py",
        "m.along(before, experts) < capacity",
        "m.along(before, experts) <= capacity",
        "An expert of Switch Transformers serves one token more than in HF.",
        "tests/kernels/test_mixtures.py -k full_gives",
    ),
    Row(
        "blocks/convolved.py",
        "self.activation, segments)",
        "self.activation, None)",
        "Packed texts reach into each other through DeBERTa-v2-xlarge's convolution.",
        "tests/test_encoders.py -k 'packed and xlarge and torch'",
    ),
    Row(
        "backends/jax/padding.py",
        "if segments is None and spec.reads_near and size != (batch, tokens):",
        "if False:",
        "MobileBERT on JAX reads what fills a bucket up as the token after the last.",
        "tests/test_encoders.py -k 'gives_what and mobilebert-masked-jax'",
    ),
    Row(
        "ops/sampling.py",
        "costs[:, 1:] * counts",
        "costs[:, 1:] * (counts > 0)",
        "A frequency penalty does not grow.",
        "tests/test_logprobs.py -k 'api and torch and device'",
    ),
    Row(
        "backends/slots.py",
        "r.tokens[len(r.tokens) - r.generated :]",
        "r.tokens[: r.generated]",
        "A sequence that begins anew counts its prompt.",
        "tests/test_logprobs.py -k 'begins_anew and torch'",
    ),
    Row(
        "engine/loop.py",
        "told[step, column]",
        "told[0, column]",
        "Each token of a chunk has the log-probability of its first.",
        "tests/test_logprobs.py -k 'api and torch and device'",
    ),
    Row(
        "backends/jax/steps.py",
        "rows = book(rows, token).counted(moved)",
        "rows = book(rows, token)",
        "On JAX the first token costs nothing.",
        "tests/test_logprobs.py -k 'api and jax and device'",
    ),
    Row(
        "kernels/pallas/ring.py",
        'y = y - own["zero"] * total',
        "y = y * 1",
        "A token's products on a GPU with kernels='pallas' are without the zeros of codes.",
        "tests/kernels/test_pallas.py -k ring",
    ),
    Row(
        "kernels/pallas/tiles.py",
        'found[part] = found[part] + scratch["sums"][other, part]',
        "found[part] = found[part] + 0",
        "What other warpgroups have summed is lost: products of few rows are wrong on a Hopper.",
        "tests/kernels/test_tiles.py",
    ),
    Row(
        "backends/jax/__init__.py",
        'hopper=str(capability) == "9.0"',
        "hopper=True",
        "kernels='pallas' fails on a Blackwell, which has other matrix units.",
        "tests/test_pallas_gpu_ops.py -m 'not slow'",
    ),
    Row(
        "kernels/pallas/token_attention.py",
        "first = jnp.maximum(length - read.window, 0)",
        "first = jnp.maximum(length - read.window, 1) - 1",
        "On a Hopper with kernels='pallas' a token sees one more than its window.",
        "tests/kernels/test_token_attention.py -k window",
    ),
    Row(
        "kernels/pallas/token_attention.py",
        "own[...] = jnp.where(seen(at, own.shape, 0), own[...], jnp.zeros((), dtype))",
        "own[...] = own[...]",
        "NaN that an earlier sequence left in a cache reaches those behind it.",
        "tests/kernels/test_token_attention.py -k slots",
    ),
    Row(
        "kernels/pallas/token_attention.py",
        "plgpu.barrier_wait(with_values.at[slot])",
        "pass",
        "A token's values are read while they are on their way to a Hopper's shared memory.",
        "tests/kernels/test_token_attention.py -k shared",
    ),
    Row(
        "kernels/pallas/token_attention.py",
        "(factor.sum(axis=2) + more)",
        "factor.sum(axis=2)",
        "Sinks take no share of a token's attention where several programs read its keys.",
        "tests/kernels/test_token_attention.py -k slots",
    ),
]

if __name__ == "__main__":
    sys.exit(main())
