"""What watching a live model costs, and engine.refresh(), at the size of a Llama-2-7B.

    python benchmarks/live.py --backend torch
    python benchmarks/live.py --backend jax --layers 2 --hidden 64      # tiny, on a CPU

Prints the time of one check, of a token with it and without, of refresh(), and whether a load is
refused, then followed, without another graph or executable.
"""

import argparse
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dualinfer
from dualinfer.model.live import Watch


def make_model(layers: int, hidden: int, device: torch.device, dtype: torch.dtype):
    """A random Llama, made where it is to lie."""
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        vocab_size=32000 if hidden >= 1024 else 1000,
        hidden_size=hidden,
        intermediate_size=11008 * hidden // 4096,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    fill(model, 1)
    return model.eval()


@torch.no_grad()
def fill(model: LlamaForCausalLM, seed: int) -> None:
    """Other random weights, in place, as an optimizer's step would leave them."""
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.ndim > 1:
            p.normal_(0, p.shape[-1] ** -0.5)
        else:
            p.fill_(1 + seed / 8)


def best(work, repeats: int = 7) -> float:
    """The least of a few times, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = make_model(asked.layers, asked.hidden, device, dtype)

    def make_engine():
        how = {"dtype": str(dtype).removeprefix("torch."), "replace_with_kernel_inject": True}
        return dualinfer.init_inference(model, backend=asked.backend, **how)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    engine = make_engine()
    ids = torch.arange(3, 19)[None]
    print(engine.report().device_name, asked.backend, f"{len(list(model.parameters()))} tensors")

    watch = Watch(model)
    for _ in range(20):
        watch.change()
        wait()
    for waited in (True, False) if on_gpu else (True,):
        spent = []
        for _ in range(300):
            start = time.perf_counter()
            assert watch.change() is None
            spent.append(time.perf_counter() - start)
            if waited:
                wait()  # else the last comparison is still under way, and no other is begun
        name = "check" if waited else "check while the GPU compares"
        print(f"{name}: {np.median(spent) * 1e6:.1f} us, at most {max(spent) * 1e6:.0f}")
    print(f"look (at init and refresh): {best(watch.look) * 1e3:.1f} ms")
    watch.close()

    def generate() -> None:
        engine.generate(ids, max_new_tokens=asked.tokens, min_new_tokens=asked.tokens)

    def stream() -> None:
        for _ in engine.stream(ids, max_new_tokens=asked.tokens, min_new_tokens=asked.tokens):
            pass

    def forward() -> None:
        np.asarray(torch.as_tensor(engine(ids).logits).float().cpu())

    works = {"generate": generate, "stream": stream, "forward": forward}
    for work in works.values():
        work(), work()
    with_check = {name: best(work) for name, work in works.items()}
    origin = engine._origin
    check, late = origin.check, origin.check_late
    origin.check = origin.check_late = lambda: None
    without = {name: best(work) for name, work in works.items()}
    origin.check, origin.check_late = check, late
    for name in works:
        count = 1 if name == "forward" else asked.tokens
        found = with_check[name] / count * 1e3, without[name] / count * 1e3
        print(f"{name}: {found[0]:.4f} ms a token or pass, {found[1]:.4f} without the check")

    def refresh() -> None:
        engine.refresh()
        wait()

    print(f"refresh, nothing changed: {best(refresh, 3):.3f} s")
    engine(ids), engine.generate(ids, max_new_tokens=16)
    compiled = engine.report().compilations
    state = {name: t.clone() for name, t in model.state_dict().items()}
    fill(model, 2)
    for call in (engine, engine.generate):
        try:
            call(ids)
        except dualinfer.StaleWeightsError as error:
            print(f"refused: {str(error)[:110]} ...")
        else:
            raise SystemExit("a changed model was served")
    print(f"refresh, all changed: {best(refresh, 1):.3f} s")
    found = torch.as_tensor(np.asarray(torch.as_tensor(engine(ids).logits).float().cpu()))
    generate(), forward()
    print(f"captures or compilations: {compiled} before, {engine.report().compilations} after")
    with torch.no_grad():
        theirs = model(ids.to(device)).logits.float().cpu()
    error = ((found - theirs).pow(2).mean() / theirs.pow(2).mean()).sqrt()
    print(f"relative error to HF in the same dtype: {error:.2e}")
    for parameter in model.parameters():
        parameter.data.mul_(2)  # leaves no version behind
    calls = 0
    while True:
        calls += 1
        try:
            engine(ids)
            wait()
        except dualinfer.StaleWeightsError:
            break
        if calls > 9:
            raise SystemExit("a write through .data was not seen")
    print(f"written through .data: seen by call {calls}")
    for parameter in model.parameters():
        parameter.data.div_(2)
    engine.refresh()
    again = torch.as_tensor(np.asarray(torch.as_tensor(engine(ids).logits).float().cpu()))
    text = torch.as_tensor(
        np.asarray(torch.as_tensor(engine.generate(ids, max_new_tokens=16)).cpu())
    )
    engine.close()
    with make_engine() as new:
        fresh = torch.as_tensor(np.asarray(torch.as_tensor(new(ids).logits).float().cpu()))
        new_text = torch.as_tensor(
            np.asarray(torch.as_tensor(new.generate(ids, max_new_tokens=16)).cpu())
        )
        print(
            f"equal to a new engine: logits {torch.equal(again, fresh)}, "
            f"text {torch.equal(text, new_text)}"
        )
        model.load_state_dict(state, assign=True)
        before = new.report().compilations
        print(f"refresh, other tensors: {best(lambda: (new.refresh(), wait()), 1):.3f} s")
        new(ids), new.generate(ids, max_new_tokens=16)
        print(f"captures or compilations: {before} before, {new.report().compilations} after")


if __name__ == "__main__":
    main()
