"""Accuracy of half precision on both backends, beside HF in the same invocation.

    python benchmarks/accuracy.py --shape llama-2-7b --out results.json

Makes a random checkpoint of the shape (see `dualinfer bench decode --help`) in its half precision,
and runs the same prompts through HF in float32 (the reference, no TF32), HF in half precision and
both backends in half precision, each in a process of its own so that each has the whole card.
Prints, for every one, the relative RMS error of the logits against float32. Speed is
`dualinfer bench decode`'s.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dualinfer.bench.random_weights import checkpoint
from dualinfer.bench.runs import worker_environment
from dualinfer.bench.shapes import open_model

PROMPTS, PROMPT_TOKENS = 8, 128


def run_hf(folder: Path, class_name: str, dtype: str, ids: np.ndarray) -> np.ndarray:
    """Logits of HF's own forward, a prompt at a time."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(transformers, class_name)
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    rows = torch.from_numpy(ids).to(device)
    with torch.no_grad():
        return np.stack([model(row[None]).logits[0].float().cpu().numpy() for row in rows])


def run_engine(
    folder: Path, backend: str, dtype: str, kernels: bool, ids: np.ndarray
) -> np.ndarray:
    """Logits of one of our backends, a prompt at a time."""
    import dualinfer

    options = {"dtype": dtype, "replace_with_kernel_inject": kernels}
    with dualinfer.init_inference(folder, backend=backend, **options) as engine:
        print(engine.report(), file=sys.stderr)
        return np.stack([np.float32(engine(row[None]).logits[0]) for row in ids])


def relative_rms(value: np.ndarray, reference: np.ndarray) -> float:
    """RMS of the difference over RMS of the reference, over all prompts."""
    difference = value.astype(np.float64) - reference
    return float(np.sqrt((difference**2).mean() / (reference.astype(np.float64) ** 2).mean()))


def stage(name: str, shape: str, folder: Path, kernels: bool, out: Path) -> None:
    """One process's work: the logits of one system."""
    system, _, dtype = name.partition(":")
    model = open_model(shape)
    ids = np.random.default_rng(0).integers(0, model.vocab, (PROMPTS, PROMPT_TOKENS))
    if system == "hf":
        np.save(out, run_hf(folder, model.class_name, dtype, ids))
    else:
        np.save(out, run_engine(folder, system, dtype, kernels, ids))


def main() -> None:
    """Run every stage in its own process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--dtype", help="float16 or bfloat16; unset: the shape's own")
    parser.add_argument("--backend", choices=["torch", "jax", "both"], default="both")
    parser.add_argument("--no-kernels", action="store_true", help="plain operations")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        stage(args.stage, args.shape, args.folder, not args.no_kernels, args.logits)
        return
    model = open_model(args.shape)
    dtype = args.dtype or model.dtype or "bfloat16"
    backends = ["torch", "jax"] if args.backend == "both" else [args.backend]
    names = ["hf:float32", f"hf:{dtype}", *(f"{backend}:{dtype}" for backend in backends)]
    results: dict[str, dict[str, object]] = {}
    with checkpoint(model, dtype) as folder, tempfile.TemporaryDirectory() as temporary:
        logits = {name: Path(temporary) / f"{i}.npy" for i, name in enumerate(names)}
        for name in names:
            command = [sys.executable, __file__, "--stage", name, "--shape", args.shape]
            command += ["--folder", str(folder), "--logits", str(logits[name])]
            command += ["--no-kernels"] if args.no_kernels else []
            start = time.perf_counter()
            subprocess.run(command, env=worker_environment(), check=True)
            results[name] = {"stage_s": time.perf_counter() - start}
        reference = np.load(logits["hf:float32"])
        for name in names[1:]:
            value = np.load(logits[name])
            per_prompt = [relative_rms(a, b) for a, b in zip(value, reference, strict=True)]
            results[name] |= {
                "relative_rms": relative_rms(value, reference),
                "relative_rms_per_prompt": per_prompt,
            }
    own = float(str(results[names[1]]["relative_rms"]))
    print(f"\n{args.shape}, {PROMPTS} prompts of {PROMPT_TOKENS} tokens, against HF float32")
    print(f"{'':16}{'rel. RMS':>10}{'/ HF':>10}")
    for name in names[1:]:
        error = float(str(results[name]["relative_rms"]))
        print(f"{name:16}{error:10.5f}{error / own:10.3f}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
