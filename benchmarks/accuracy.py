"""Accuracy and plain decode speed of both backends on a GPU, beside HF in the same invocation.

    python benchmarks/accuracy.py --shape llama-2-7b --out results.json

Makes a random model of the shape in bfloat16, writes it as a HF checkpoint, and runs the same
prompts through HF in float32 (the reference, no TF32), HF in bfloat16 and both backends in
bfloat16, each in a process of its own so that each has the whole card. Prints, for every one, the
relative RMS error of the logits against float32 and, from a 128-token prompt, the milliseconds per
token with the fraction of the read bandwidth measured in the same process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHAPES = {
    "llama-2-7b": dict(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
    ),
    "tiny": dict(
        vocab_size=1001,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
    ),
}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, REPEATS = 8, 128, 128, 5


def make_checkpoint(shape: str, folder: Path) -> None:
    """A random model in bfloat16, and the prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], eos_token_id=None, bos_token_id=None)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    np.save(folder / "ids.npy", rng.integers(0, config.vocab_size, (PROMPTS, PROMPT_TOKENS)))


def read_bandwidth() -> float | None:
    """Bytes per second of a read-only stream over 4 GB, by torch; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    x = torch.rand(2**30, device="cuda")
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return x.nbytes / statistics.median(times)


def time_decode(generate, ids: np.ndarray) -> dict[str, float]:
    """Milliseconds per new token and to the first, medians; `generate(ids, n)` must wait."""

    def median(tokens: int) -> float:
        times = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            generate(ids[:1], tokens)
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    first, whole = median(1), median(NEW_TOKENS)
    return {
        "ms_per_token": (whole - first) * 1e3 / (NEW_TOKENS - 1),
        "first_token_ms": first * 1e3,
    }


def run_hf(folder: Path, dtype: str) -> dict[str, float]:
    """HF's own forward; float32 writes the reference logits, bfloat16 is also timed."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    ids = torch.from_numpy(np.load(folder / "ids.npy")).to(device)
    with torch.no_grad():
        logits = np.stack([model(row[None]).logits[0].float().cpu().numpy() for row in ids])
    np.save(folder / f"hf-{dtype}.npy", logits)
    if dtype == "float32":
        return {}

    def generate(prompt: np.ndarray, tokens: int) -> None:
        tensor = torch.from_numpy(prompt).to(device)
        mask = torch.ones_like(tensor)
        model.generate(tensor, attention_mask=mask, max_new_tokens=tokens, do_sample=False).cpu()

    return time_decode(generate, np.load(folder / "ids.npy"))


def run_engine(folder: Path, backend: str, dtype: str) -> dict[str, float]:
    """One of our backends."""
    import dualinfer

    start = time.perf_counter()
    with dualinfer.init_inference(folder, backend=backend, dtype=dtype) as engine:
        loaded = time.perf_counter() - start
        ids = np.load(folder / "ids.npy")
        logits = np.stack([np.float32(engine(row[None]).logits[0]) for row in ids])
        np.save(folder / f"{backend}-{dtype}.npy", logits)

        def generate(prompt: np.ndarray, tokens: int) -> None:
            engine.generate(prompt, max_new_tokens=tokens, do_sample=False)

        result = time_decode(generate, ids)
        report = engine.report()
        spec = engine.runner.spec
        table = spec.vocab * spec.embed * report.parameter_bytes // report.parameters
        result |= {"load_s": loaded, "read_bytes": report.parameter_bytes - table}
    return result


def stage(name: str, folder: Path, shape: str) -> dict[str, float]:
    """One process's work."""
    if name == "make":
        make_checkpoint(shape, folder)
        return {}
    bandwidth = read_bandwidth() if name != "jax" else None
    system, _, dtype = name.partition(":")
    result = run_hf(folder, dtype) if system == "hf" else run_engine(folder, system, dtype)
    return result | ({"read_bandwidth": bandwidth} if bandwidth else {})


def relative_rms(value: np.ndarray, reference: np.ndarray) -> float:
    """RMS of the difference over RMS of the reference, over all prompts."""
    difference = value.astype(np.float64) - reference
    return float(np.sqrt((difference**2).mean() / (reference.astype(np.float64) ** 2).mean()))


def main() -> None:
    """Run every stage in its own process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        result = stage(args.stage, args.folder, args.shape)
        print("RESULT " + json.dumps(result))
        return
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = ["make", "hf:float32", "hf:bfloat16", "torch:bfloat16", "jax:bfloat16"]
        for name in names:
            command = [sys.executable, __file__, "--stage", name, "--shape", args.shape]
            environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            start = time.perf_counter()
            run = subprocess.run(
                [*command, "--folder", str(folder)],
                capture_output=True,
                text=True,
                env=environment,
                check=False,
            )
            line = next((x for x in run.stdout.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                raise SystemExit(f"{name} failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
            results[name] = json.loads(line.removeprefix("RESULT "))
            results[name]["stage_s"] = time.perf_counter() - start
            print(f"{name}: {results[name]}", flush=True)
        reference = np.load(folder / "hf-float32.npy")
        for name in names[2:]:
            logits = np.load(folder / f"{name.replace(':', '-')}.npy")
            per_prompt = [relative_rms(a, b) for a, b in zip(logits, reference, strict=True)]
            results[name]["relative_rms"] = relative_rms(logits, reference)
            results[name]["relative_rms_per_prompt"] = per_prompt
    own = results["hf:bfloat16"]["relative_rms"]
    print(f"\n{args.shape}, {PROMPTS} prompts of {PROMPT_TOKENS} tokens, against HF float32")
    print(f"{'':16}{'rel. RMS':>10}{'/ HF bf16':>10}{'ms/token':>10}{'tokens/s':>10}{'of read':>9}")
    bandwidth = results["hf:bfloat16"].get("read_bandwidth")
    for name in names[2:]:
        r = results[name]
        size = results["torch:bfloat16"]["read_bytes"]
        share = size / (r["ms_per_token"] / 1e3) / bandwidth if bandwidth else float("nan")
        print(
            f"{name:16}{r['relative_rms']:10.5f}{r['relative_rms'] / own:10.3f}"
            f"{r['ms_per_token']:10.2f}{1e3 / r['ms_per_token']:10.1f}{share:9.1%}"
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
