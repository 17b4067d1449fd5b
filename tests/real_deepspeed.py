r"""Files that DeepSpeed itself writes on a CPU, loaded by dualinfer: run by hand.

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target FOLDER \
        deepspeed hjson msgpack psutil py-cpuinfo ninja einops
    python tests/real_deepspeed.py FOLDER

DeepSpeed wants torch while it is installed, so that the test suite does not depend on it; there
`tests/deepspeed_files.py` writes by DeepSpeed's rules. Here DeepSpeed saves a training of each
stage of ZeRO, and models with its kernels injected, in one process and in two. Its kernels do not
run on a CPU; what it saves is made before they would. Tried with DeepSpeed 0.19.8 and transformers
5.23: BLOOM and GPT-NeoX it does not inject any more.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = np.arange(3, 19)[None]
_START = """
import argparse, os, sys, torch, deepspeed, transformers as hf
rank, world, out, kind = sys.argv[1:5]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1")
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile one
torch.manual_seed(0)
model = hf.AutoModelForCausalLM.from_pretrained(kind, dtype=torch.float32)
"""
TRAIN = (
    _START
    + """
stage = int(sys.argv[5])
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ids = torch.arange(3, 19)[None]
engine.backward(engine(input_ids=ids, labels=ids).loss)
engine.step()
engine.save_checkpoint(out, tag="step1", client_state={"args": argparse.Namespace(a=1)})
"""
)
INJECT = (
    _START
    + """
from unittest.mock import MagicMock
from deepspeed.ops.transformer.inference.op_binding import base
base.BaseOp.inference_module = MagicMock()  # kernels that no CPU has; none is called
how = {"dtype": torch.float32, "replace_with_kernel_inject": True}
deepspeed.init_inference(
    model.eval(), save_mp_checkpoint_path=out, tensor_parallel={"tp_size": int(world)}, **how
)
"""
)


def configs():
    """HF configs of tiny models, by name."""
    import transformers as hf

    llama = {"intermediate_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}
    opt = {"ffn_dim": 128, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    return {
        "llama": hf.LlamaConfig(**SIZES, num_key_value_heads=4, **llama),
        "opt": hf.OPTConfig(**SIZES, **opt),
        "gpt2": hf.GPT2Config(**SIZES, n_positions=64),
    }


def run(folder, text, world, *arguments):
    """The script as `world` processes of one job that imports DeepSpeed from `folder`."""
    own = {"PYTHONPATH": folder, "DS_ACCELERATOR": "cpu", "MASTER_PORT": "29655"}
    environment = {**os.environ, **own, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(rank), str(world), *map(str, arguments)],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    assert [job.wait(timeout=300) for job in jobs] == [0] * world


def check(what, path, config, expected):
    """Both backends give the logits, from the files of `path` in an empty module."""
    import torch
    import transformers as hf

    import dualinfer

    for backend in ("torch", "jax"):
        with torch.device("meta"):
            empty = hf.AutoModelForCausalLM.from_config(config)
        how = {"dtype": "fp32", "replace_with_kernel_inject": True, "checkpoint": path}
        with dualinfer.init_inference(empty, backend=backend, **how) as engine:
            found = np.asarray(engine(IDS).logits)
        error = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
        print(f"{what}, {backend}: relative RMS {error:.1e}")
        assert error < 1e-5


def main(folder):
    """See the module."""
    import torch
    import transformers as hf

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name, config in configs().items():
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(config).eval()
            model.save_pretrained(place / name)
            with torch.no_grad():
                expected = model(torch.from_numpy(IDS)).logits.numpy()
            for world in (1, 2):
                saved = place / f"{name}-{world}"
                run(folder, INJECT, world, saved, place / name)
                check(f"{name}, injected in {world}", saved, config, expected)
            for stage in (0, 1, 3) if name == "llama" else ():
                saved = place / f"trained-{stage}"
                run(folder, TRAIN, 1, saved, place / name, stage)
                if stage == 3:
                    script = [sys.executable, "zero_to_fp32.py", ".", "OUT"]
                    own = {**os.environ, "PYTHONPATH": folder, "DS_ACCELERATOR": "cpu"}
                    subprocess.run(script, cwd=saved, env=own, check=True, capture_output=True)
                    saved = saved / "OUT"
                check(f"{name}, trained with stage {stage}", saved, config, expected)


if __name__ == "__main__":
    main(sys.argv[1])
