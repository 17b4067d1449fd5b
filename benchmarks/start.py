"""From the start of a new process to the first token, on JAX: what each part of it takes.

    TMPDIR=/dev/shm python benchmarks/start.py --shape llama-2-7b

The checkpoint, with random weights, lies in TMPDIR. Processes start one after another: the first
compiles, the others find what JAX has kept in a folder made for this run. Where Python may not keep
its bytecode each of them compiles all imports: unset PYTHONDONTWRITEBYTECODE, and set
PYTHONPYCACHEPREFIX where the sources' folders cannot be written.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

PROMPT, TOKENS = 128, 64


def start(folder: str, dtype: str, began: float) -> None:
    """Print the seconds since `began` after each part; what the new process does."""

    def say(what: str) -> None:
        print(f"  {time.time() - began:6.2f} s {what}", flush=True)

    say("Python")
    import jax

    jax.devices()
    say("JAX and its devices")
    from dualinfer import init_inference

    engine = init_inference(folder, backend="jax", dtype=dtype, replace_with_kernel_inject=True)
    say(f"engine ({'; '.join(engine.report().notes)})")
    stream = engine.stream(
        [[5] * PROMPT], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    next(stream)
    say("first token")
    count = 1 + sum(1 for _ in stream)
    say(f"{count} tokens")


def main() -> None:
    """Write the checkpoint and start the processes."""
    parser = argparse.ArgumentParser(description="Start of a JAX engine, part by part.")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    from dualinfer.bench.random_weights import checkpoint
    from dualinfer.bench.shapes import open_model

    model = open_model(options.shape)
    with checkpoint(model, options.dtype) as folder, tempfile.TemporaryDirectory() as cache:
        for _ in range(options.starts):
            print(f"{options.shape}, {options.dtype}:", flush=True)
            command = [sys.executable, __file__, str(folder), options.dtype, str(time.time())]
            subprocess.run(command, env=os.environ | {"XDG_CACHE_HOME": cache}, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        start(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    else:
        main()
