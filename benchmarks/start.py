"""From the start of a new process to the first token, or to a server that is ready.

    TMPDIR=/dev/shm python benchmarks/start.py --shape llama-2-7b
    TMPDIR=/dev/shm python benchmarks/start.py --shape llama-3-8b --reserve 64x1024
    TMPDIR=/dev/shm python benchmarks/start.py --shape llama-3-8b --serve --backend torch

The checkpoint, with random weights, lies in TMPDIR. Processes start one after another: the first
compiles, the others find what Triton and JAX have kept in a folder made for this run. With
`--serve` each is `dualinfer serve`, until `/ready` answers. Where Python may not keep its bytecode
each of them compiles all imports: unset PYTHONDONTWRITEBYTECODE, and set PYTHONPYCACHEPREFIX where
the sources' folders cannot be written.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

PROMPT, TOKENS = 128, 64
LIMIT = 180.0  # seconds until a server has to be ready


def start(folder: str, backend: str, dtype: str, room: str, began: float) -> None:
    """Print the seconds since `began` after each part; what the new process does."""

    def say(what: str) -> None:
        print(f"  {time.time() - began:6.2f} s {what}", flush=True)

    say("Python")
    if backend == "jax":
        import jax

        jax.devices()
    else:
        import torch

        torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    say(f"{backend} and its devices")
    from dualinfer import init_inference

    how = {"dtype": dtype, "replace_with_kernel_inject": True}
    engine = init_inference(folder, backend=backend, **how)
    say(f"engine ({'; '.join(engine.report().notes)})")
    if room:
        sequences, tokens = map(int, room.split("x"))
        engine.reserve(sequences, tokens, cache_tokens=sequences * tokens, prepare=True)
        say(f"room for {room} tokens, in blocks, and all that serves it")
    stream = engine.stream(
        [[5] * PROMPT], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    next(stream)
    say("first token")
    count = 1 + sum(1 for _ in stream)
    say(f"{count} tokens")
    drawn = {"do_sample": True, "top_k": 50, "top_p": 0.9, "seed": 5}
    engine.generate([[5] * PROMPT], max_new_tokens=TOKENS, eos_token_id=None, **drawn)
    say(f"as many that are drawn; {engine.report().compilations} programs or graphs")


def serve(folder: str, backend: str, dtype: str) -> None:
    """Print the seconds until a server's address is there, and until it is ready; end it."""
    command = [sys.executable, "-m", "dualinfer", "serve", folder, "--port", "0"]
    command += ["--backend", backend, "--dtype", dtype]
    began = time.time()
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stderr=said) as server:
        try:
            url = None
            while True:
                said.seek(0)
                text = said.read()
                if server.poll() is not None or time.time() - began > LIMIT:
                    raise SystemExit(f"It was not ready after {LIMIT:.0f} s:\n{text}")
                if url is None and (found := re.search(r"listening on (http://[\d.:]+)", text)):
                    url = found[1]
                    print(f"  {time.time() - began:6.2f} s {url}", flush=True)
                with suppress(OSError):
                    if url and urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200:
                        break
                time.sleep(0.05)
            print(f"  {time.time() - began:6.2f} s ready", flush=True)
        finally:
            server.terminate()


def main() -> None:
    """Write the checkpoint and start the processes."""
    parser = argparse.ArgumentParser(description="Start of an engine or a server, part by part.")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--backend", choices=("torch", "jax"), default="jax")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--reserve", default="", metavar="SEQUENCESxTOKENS")
    parser.add_argument("--serve", action="store_true", help="start servers, until /ready answers")
    options = parser.parse_args()
    from dualinfer.bench.local_server import word_tokenizer
    from dualinfer.bench.random_weights import checkpoint
    from dualinfer.bench.shapes import open_model

    model, kind = open_model(options.shape), (options.backend, options.dtype)
    with checkpoint(model, options.dtype) as folder, tempfile.TemporaryDirectory() as cache:
        if options.serve:
            word_tokenizer(model.config.vocab_size).save_pretrained(folder)
        os.environ |= {"XDG_CACHE_HOME": cache, "TRITON_CACHE_DIR": str(Path(cache, "triton"))}
        for _ in range(options.starts):
            print(f"{options.shape}, {', '.join(kind)}:", flush=True)
            if options.serve:
                serve(str(folder), *kind)
                continue
            how = *kind, options.reserve, str(time.time())
            command = [sys.executable, __file__, str(folder), *how]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 6 and not sys.argv[1].startswith("-"):
        start(*sys.argv[1:5], began=float(sys.argv[5]))
    else:
        main()
