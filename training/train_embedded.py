"""Train the embedded model: a small Llama that has read the Python standard library.

One run collects the corpus, trains the tokenizer and the model, and writes a Hugging Face
checkpoint small enough to ship inside the package, next to `training.json`, which records how it
came to be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when transformers is imported: nothing here comes from the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZE_LIMIT_BYTES = 7_800_000
VOCAB = 2048
CONTEXT = 1024
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0
PAD, PAD_ID = "<|pad|>", 1

# About 3.67 M parameters, 7.3 MB in float16. 256 and 768 are multiples of 128 so that quantization
# groups and tensor-parallel splits come out even.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": PAD_ID,
}

# Words and punctuation take the one space before them; line breaks take the indentation after
# them, so that "newline and eight spaces" is one token and the word after it starts clean.
WORDS = (
    r" ?_*\p{L}+"
    r"| ?\p{N}{1,3}"
    r"|\n+[ \t]*"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+"
)

PROMPTS = (
    "def read_json(path):\n    ",
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\n\ndef main(",
    "    def test_empty_list(self):\n        ",
)

# Steps between which the time of one is measured; the first ones are slow.
CALIBRATION = (20, 60)
EVALUATIONS = 20

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Document:
    """One source file: its path below the library's folder, with forward slashes, and its text."""

    path: str
    text: str


def is_excluded(path: Path) -> bool:
    """Whether the file at this relative path is no part of the library's own, valid source."""
    parts = path.parts
    if {"site-packages", "dist-packages", "__pycache__"} & set(parts):
        return True
    # Written when Python is built, so they differ between machines and name local folders.
    if path.name.startswith("_sysconfigdata") or parts[0].startswith("config-"):
        return True
    # Files that are wrong on purpose: they would teach syntax errors.
    return parts[:3] == ("lib2to3", "tests", "data") or path.name.startswith("bad")


def read_corpus(stdlib: Path) -> list[Document]:
    """The library's distinct, non-empty UTF-8 `.py` files, sorted by path.

    Of identical files the first stays. Line endings are kept as they are.
    """
    paths = sorted(
        (path.relative_to(stdlib) for path in stdlib.rglob("*.py")), key=lambda p: p.as_posix()
    )
    documents, seen = [], set()
    for path in paths:
        if is_excluded(path):
            continue
        try:
            text = (stdlib / path).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            documents.append(Document(path.as_posix(), text))
    if not documents:
        raise SystemExit(f"{stdlib} has no .py files; pass a Python's library folder as --stdlib.")
    return documents


def is_held_out(document: Document) -> bool:
    """True for about 4 % of all paths; depends on the path alone."""
    return int(hashlib.sha256(document.path.encode()).hexdigest()[:8], 16) % 25 == 0


def corpus_record(documents: Iterable[Document]) -> dict[str, Any]:
    """Number of files, bytes, and a sha256 over every path and text in order."""
    digest, files, size = hashlib.sha256(), 0, 0
    for document in documents:
        data = document.text.encode()
        digest.update(document.path.encode() + b"\0" + data + b"\0")
        files, size = files + 1, size + len(data)
    return {"files": files, "bytes": size, "sha256": digest.hexdigest()}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB` entries, whose decoder gives back any text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(
            f"The tokenizer has {tokenizer.get_vocab_size()} entries instead of {VOCAB}: "
            "the corpus is too small."
        )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Tensor:
    """All documents as one int16 tensor, each preceded by the end-of-text id.

    Raises where a text does not survive encoding and decoding.
    """
    documents = list(documents)
    ids: list[int] = []
    for document, encoding in zip(
        documents, tokenizer.encode_batch([d.text for d in documents]), strict=True
    ):
        if tokenizer.decode(encoding.ids, skip_special_tokens=False) != document.text:
            raise RuntimeError(f"The tokenizer does not give back {document.path} exactly.")
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int16)


def make_model(device: torch.device) -> LlamaForCausalLM:
    """A freshly initialised float32 model on the device."""
    model = LlamaForCausalLM(LlamaConfig(**ARCHITECTURE))
    nn.Module.to(model, device)  # The override of transformers is typed wrongly.
    return model


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over all targets but -100, in nats; the softmax is in float32."""
    logits = F.linear(hidden, head).float()
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


class Network:
    """A model and its loss, compiled where that works."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._loss: Callable[[Tensor, Tensor, Tensor], Tensor] = next_token_loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Summed loss in nats of int64 `inputs` [B, T] against `targets` [B, T]."""
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return self._loss(hidden, self.model.lm_head.weight, targets)

    def try_compile(self, batch: int, length: int, autocast: Autocast) -> bool:
        """Whether layers and loss now run compiled, which a training and an evaluation pass prove.

        Each layer is compiled alone: inside one graph for the whole model, transformers builds an
        explicit causal mask, which takes attention off its fast path.
        """
        device = self.model.device
        tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
        layers: list[nn.Module] = list(self.model.model.layers)
        try:
            for layer in layers:
                layer.compile()
            self._loss = torch.compile(next_token_loss)
            with autocast():
                self.loss(tokens, tokens).backward()
                with torch.no_grad():  # Evaluation compiles apart from training.
                    self.loss(tokens, tokens)
            compiled = True
        except Exception as error:  # A missing compiler or an unsupported GPU: go on without.
            print(f"torch.compile failed, going on without it: {error}")
            for layer in layers:
                layer._compiled_call_impl = None
            self._loss = next_token_loss
            compiled = False
        self.model.zero_grad(set_to_none=True)
        return compiled


def make_autocast(device: torch.device) -> Autocast:
    """A maker of bfloat16 autocast contexts on CUDA, of empty contexts elsewhere."""
    if device.type == "cuda":
        return lambda: torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext


def sample_windows(
    tokens: Tensor, batch: int, length: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each int64 [batch, length], from uniformly drawn offsets."""
    steps = torch.arange(length + 1, device=tokens.device)
    while True:
        starts = torch.randint(
            len(tokens) - length, (batch, 1), generator=generator, device=tokens.device
        )
        windows = tokens[starts + steps].long()
        yield windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def held_out_loss(
    network: Network, tokens: Tensor, batch: int, length: int, autocast: Autocast = nullcontext
) -> float:
    """Mean loss in nats per token; every token but the first is predicted exactly once.

    Windows do not overlap, so the first tokens of each see little context and the figure is
    somewhat pessimistic.
    """
    inputs, targets = tokens[:-1].long(), tokens[1:].long()
    # Whole batches only, so that compiled code sees a single shape.
    missing = -len(inputs) % (batch * length)
    inputs = F.pad(inputs, (0, missing), value=PAD_ID).view(-1, batch, length)
    targets = F.pad(targets, (0, missing), value=-100).view(-1, batch, length)
    total = 0.0
    for window, target in zip(inputs, targets, strict=True):
        with autocast():
            total += network.loss(window, target).item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def round_parameters(model: nn.Module) -> None:
    """Rounds every parameter to float16 in place; dtypes, and the rotary buffer, stay float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norm weights alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """The rate of this step: linear warm-up to `peak`, then a cosine to zero at `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def train(
    network: Network, data: Tensor, held_out: Tensor, args: argparse.Namespace
) -> dict[str, Any]:
    """Trains in place, leaves the weights of the best held-out loss, returns the record.

    Where `args.steps` do not fit in `args.max_seconds`, by the time that the first ones take, the
    schedule is for as many as fit.
    """
    model, device = network.model, data.device
    autocast = make_autocast(device)
    started = time.monotonic()
    compiled = device.type == "cuda" and network.try_compile(args.batch, args.length, autocast)

    def evaluate() -> float:
        return held_out_loss(network, held_out, args.batch, args.length, autocast)

    optimizer = make_optimizer(model, args.weight_decay)
    generator = torch.Generator(device=device).manual_seed(args.seed)
    windows = sample_windows(data, args.batch, args.length, generator)
    targets_per_step = args.batch * args.length

    evaluation_started = time.monotonic()
    best = evaluate()
    loop_started = time.monotonic()
    best_step, best_state = 0, {k: v.clone() for k, v in model.state_dict().items()}
    curve = [{"step": 0, "train_loss": None, "held_out_loss": round(best, 4)}]
    print(f"step 0: held-out {best:.4f}, compiled {compiled}, {loop_started - started:.0f} s")

    steps: int = args.steps
    train_loss, since, step = torch.zeros((), device=device), 0, 0
    calibration_started = loop_started
    while step < steps:
        rate = learning_rate(step, steps, args.warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = next(windows)
        with autocast():
            loss = network.loss(inputs, targets) / targets_per_step
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        train_loss += loss.detach()
        step, since = step + 1, since + 1

        if step in CALIBRATION:
            train_loss.item()  # Waits for the device, so that the clock is right.
            now = time.monotonic()
            if step == CALIBRATION[0]:
                calibration_started = now
            else:
                step_seconds = (now - calibration_started) / (CALIBRATION[1] - CALIBRATION[0])
                left = args.max_seconds - (now - started)
                left -= EVALUATIONS * (loop_started - evaluation_started)
                # 5 % is kept for a machine that slows down.
                steps = min(steps, step + max(1, int(0.95 * left / step_seconds)))
                print(f"{step_seconds * 1e3:.2f} ms a step, {steps} steps")

        is_late = time.monotonic() - started > 1.1 * args.max_seconds
        if not (is_late or step == steps or step % -(-steps // EVALUATIONS) == 0):
            continue
        held, mean = evaluate(), train_loss.item() / since
        if not math.isfinite(held):
            raise RuntimeError(f"The held-out loss is {held} at step {step}; lower --lr.")
        curve.append({"step": step, "train_loss": round(mean, 4), "held_out_loss": round(held, 4)})
        seconds = time.monotonic() - started
        print(f"step {step}: train {mean:.4f}, held-out {held:.4f}, lr {rate:.2e}, {seconds:.0f} s")
        train_loss.zero_()
        since = 0
        if held < best:
            best, best_step = held, step
            best_state = {k: v.clone() for k, v in model.state_dict().items()}
        if is_late:
            print(f"stopping early, over --max-seconds={args.max_seconds}")
            break

    model.load_state_dict(best_state)
    return {
        "compiled": compiled,
        "steps": step,
        "best_step": best_step,
        "tokens_seen": step * targets_per_step,
        "epochs": round(step * targets_per_step / len(data), 2),
        "wall_seconds": round(time.monotonic() - started, 1),
        "curve": curve,
    }


def write_json(path: Path, value: Any) -> None:
    """Writes indented UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, record: dict[str, Any], out: Path) -> None:
    """Writes the float16 checkpoint, the tokenizer and `training.json` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(out)
    special = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    write_json(out / "generation_config.json", special | {"pad_token_id": PAD_ID})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    # Written by hand: save_pretrained names a class that only transformers 5 knows.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "padding_side": "left",
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    write_json(out / "training.json", record)


def continuation(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """The prompt and what the model adds to it greedily."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
    )
    return tokenizer.decode(out[0].tolist(), skip_special_tokens=False)


def parse_args() -> argparse.Namespace:
    """The command line, with the values of `--smoke` filled in."""
    parser = argparse.ArgumentParser(description=__doc__)
    root = Path(__file__).resolve().parent.parent
    add = parser.add_argument
    add("--out", type=Path, default=root / "dualinfer" / "embedded", help="folder to write")
    add(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="library folder of a Python (default: that of the one that runs this)",
    )
    add("--steps", type=int, default=4000, help="optimizer steps, if --max-seconds allows")
    add("--max-seconds", type=float, default=300.0, help="limit to the time of training")
    add("--batch", type=int, default=64, help="sequences a step")
    add("--length", type=int, default=CONTEXT, help="tokens a sequence")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=int, default=200, help="steps of linear warm-up")
    # High, because the corpus is read 27 times: in a run with 0.1, the usual value, the held-out
    # loss turned up after 15 passes, at 1.69; with 2.0 it falls to the end, to 1.55.
    add("--weight-decay", type=float, default=2.0)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--smoke", action="store_true", help="a few tiny steps on a twentieth of the corpus")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.warmup, args.batch, args.length, args.device = 20, 4, 4, 128, "cpu"
    if args.length > CONTEXT:
        parser.error(f"--length {args.length} is over the model's {CONTEXT} positions")
    return args


def main() -> None:
    """Runs the whole pipeline and prints samples of what it made."""
    args = parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    documents = read_corpus(args.stdlib)[:: 20 if args.smoke else 1]
    training = [d for d in documents if not is_held_out(d)]
    held_out = [d for d in documents if is_held_out(d)]
    records = {"train": corpus_record(training), "held_out": corpus_record(held_out)}
    print(f"corpus: {json.dumps(records)}")

    started = time.monotonic()
    tokenizer = train_tokenizer(d.text for d in training)
    data, held_out_data = (encode(tokenizer, d).to(device) for d in (training, held_out))
    for part, tokens in (("train", data), ("held_out", held_out_data)):
        records[part]["tokens"] = len(tokens)
    bytes_per_token = records["train"]["bytes"] / len(data)
    print(f"tokenizer: {time.monotonic() - started:.0f} s, {bytes_per_token:.2f} bytes a token")

    model = make_model(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {parameters} parameters on {device}")
    training_record = train(Network(model), data, held_out_data, args)

    # A fresh model, so that the figures come from plain float32 and not from the compiled layers.
    state = model.state_dict()
    model = make_model(device).eval()
    model.load_state_dict(state)
    losses = {}
    for name in ("float32", "float16"):
        if name == "float16":
            round_parameters(model)
        nats = held_out_loss(Network(model), held_out_data, args.batch, args.length)
        # The end-of-text tokens count among the nats and not among the bytes.
        bits = nats * (len(held_out_data) - 1) / math.log(2) / records["held_out"]["bytes"]
        losses[name] = {"nats_per_token": round(nats, 5), "bits_per_byte": round(bits, 5)}
        print(f"held-out with {name} weights: {nats:.4f} nats/token, {bits:.4f} bits/byte")

    script = Path(__file__).resolve()
    command = ["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]]
    hyperparameters = ("batch", "length", "lr", "warmup", "weight_decay", "seed", "max_seconds")
    record = {
        "command": shlex.join(command),
        "parameters": parameters,
        "held_out_loss": losses,
        "corpus": {"stdlib": args.stdlib.name} | records,
        "hyperparameters": {name: getattr(args, name) for name in hyperparameters}
        | {"optimizer": "AdamW", "betas": [0.9, 0.95], "grad_clip": 1.0, "schedule": "cosine"},
        "training": training_record,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    for prompt in PROMPTS:
        print(f"{'-' * 80}\n{continuation(model, tokenizer, prompt, 4 if args.smoke else 100)}")
    print("-" * 80)

    save(model, tokenizer, record, args.out)
    sizes = {path.name: path.stat().st_size for path in sorted(args.out.glob("*.*"))}
    print(f"wrote {args.out}: {json.dumps(sizes)}, {sum(sizes.values())} bytes together")
    if sum(sizes.values()) > SIZE_LIMIT_BYTES:
        raise SystemExit(f"{sum(sizes.values())} bytes are over {SIZE_LIMIT_BYTES}.")


if __name__ == "__main__":
    main()
