"""What fewer bits cost the embedded model: loss and KL divergence on text that is new to it.

    python benchmarks/quantized_accuracy.py --windows 40

The text is the held-out part of this Python's standard library (training/train_embedded.py), in
windows of 512 tokens. KL is of the next token's distribution, from float32 weights to quantized
ones, in nats a position.
"""

import argparse
import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

import dualinfer
from dualinfer import embedded

LENGTH = 512
PER_FILE = 3000  # characters
SCHEMES: dict[str, Any] = {
    "int8": "int8",
    "fp8": "fp8",
    "int4, groups of 64": "int4",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}


def held_out(windows: int) -> np.ndarray:
    """Token ids [windows, LENGTH]."""
    from transformers import AutoTokenizer

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        digest = hashlib.sha256(name.encode()).hexdigest()
        if "site-packages" not in path.parts and int(digest[:8], 16) % 25 == 0:
            texts.append(path.read_text(encoding="utf-8", errors="ignore")[:PER_FILE])
    tokenizer = AutoTokenizer.from_pretrained(embedded.path(), model_max_length=1 << 30)
    ids = tokenizer("\n".join(texts))["input_ids"][: windows * LENGTH]
    return np.array(ids[: len(ids) // LENGTH * LENGTH], np.int32).reshape(-1, LENGTH)


def log_probabilities(ids: np.ndarray, **options: Any) -> np.ndarray:
    """Of every next token: float32 [windows, LENGTH, V]."""
    with dualinfer.init_inference(embedded.path(), dtype="fp32", **options) as engine:
        logits = np.concatenate(
            [np.asarray(engine(ids[i : i + 4]).logits) for i in range(0, len(ids), 4)]
        )
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def loss(log_p: np.ndarray, ids: np.ndarray) -> float:
    """Mean loss in nats a token."""
    return -float(np.take_along_axis(log_p[:, :-1], ids[:, 1:, None].astype(np.int64), -1).mean())


def compare(log_p: np.ndarray, exact: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """How much the loss rises, as a fraction, KL in nats, and how often the best token stays."""
    kl = (np.exp(exact) * (exact - log_p)).sum(-1)
    return {
        "loss": loss(log_p, ids) / loss(exact, ids) - 1,
        "mean KL": float(kl.mean()),
        "same best token": float((log_p.argmax(-1) == exact.argmax(-1)).mean()),
    }


def main() -> None:
    """Print a row for each scheme."""
    parser = argparse.ArgumentParser(description="What fewer bits cost the embedded model.")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--backend", default="torch")
    options = parser.parse_args()
    ids = held_out(options.windows)
    exact = log_probabilities(ids, backend=options.backend)
    print(f"loss {loss(exact, ids):.4f} nats a token over {ids.size:,} tokens")
    for name, quant in SCHEMES.items():
        log_p = log_probabilities(ids, backend=options.backend, quant=quant)
        found = compare(log_p, exact, ids)
        print(
            f"{name:20} loss {100 * found['loss']:+.2f} %, mean KL {found['mean KL']:.5f}, "
            f"same best token {100 * found['same best token']:.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
