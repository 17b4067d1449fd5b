r"""DeepSpeed's own MoE layers and their checkpoints, on a CPU: run by hand.

    python tests/real_deepspeed_moe.py FOLDER

with DeepSpeed in FOLDER as `real_deepspeed.py` says. Its layers are compared with the stand-ins of
`deepspeed_moe.py`, which the test suite takes, and with engines over them, over one process and
over two by gloo, which with ep_size=2 hold a part of the experts each, with what its
save_checkpoint writes; and in HF models with engines of fused mode on both backends. Tried with
DeepSpeed 0.19.8.
"""

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = [
    {"k": k, "use_residual": residual, "drop_tokens": drops, "expert": expert}
    for k in (1, 2, 4)
    for residual in (False, True)
    for drops in (False, True)
    for expert in ("Mlp", "Odd")
]
EXACT = {"use_rts": False, "top2_2nd_expert_sampling": False, "eval_capacity_factor": 0.7}


def start(rank, world):
    """Import DeepSpeed as a rank of a job over gloo; its MoE layer."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in place.items()})
    import deepspeed
    from deepspeed.moe.layer import MoE

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile one
    deepspeed.init_distributed("gloo")
    return MoE


def error(one, other):
    """Relative RMS."""
    return float((one - other).double().square().mean().sqrt() / other.double().std())


def single():
    """Each case in one process: DeepSpeed's own, the stand-in, and an engine over both."""
    import torch

    import dualinfer
    from tests import deepspeed_moe

    own = start(0, 1)
    ids = torch.randperm(37, generator=torch.Generator().manual_seed(1))[:24].reshape(2, 12)
    for case in CASES:
        fields = {**case, **EXACT, "num_experts": 6, "min_capacity": 1}
        fields["expert"] = getattr(deepspeed_moe, case["expert"])
        real = deepspeed_moe.make_model(make=own, **fields)
        stand_in = deepspeed_moe.make_model(**fields)
        stand_in.load_state_dict(real.state_dict())
        for layer in real.layers:
            layer.moe.set_deepspeed_parallelism()
        with torch.no_grad():
            expected, found = real(ids), [stand_in(ids)]
        drops = {"drop_tokens": case["drop_tokens"]}
        losses = [copy.deepcopy(layer.losses) for layer in real.layers]
        for model in (stand_in, real):
            with dualinfer.init_inference(model, dtype="fp32", moe=drops) as engine:
                found.append(engine(ids))
                for layer, [(loss, counts)] in zip(model.layers, losses, strict=True):
                    torch.testing.assert_close(layer.losses[0][0], loss)
                    assert torch.equal(layer.losses[0][1], counts)
                assert torch.isfinite(engine(ids[:1, :1])).all()  # one token, as in decoding
        errors = [error(x, expected) for x in found]
        print(case, " ".join(f"{x:.1e}" for x in errors))
        assert max(errors) < 1e-5, case


def fused(out):
    """HF models with DeepSpeed's own layers, and their checkpoints, in fused mode."""
    import numpy as np
    import torch

    from tests import test_deepspeed_moe_fused as suite

    own = start(0, 1)
    import deepspeed

    suite.MoE = lambda *given, **fields: own(*given, **fields, **EXACT)
    ids = suite.IDS.numpy()
    for case in suite.CASES:
        model = suite.make(case)
        optimizer = torch.optim.SGD(
            [
                {"params": [p], "moe": "deepspeed_experts" in n, "name": "ep_size_1"}
                for n, p in model.named_parameters()
            ],
            lr=0.0,
        )
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        config["zero_force_ds_cpu_optimizer"] = False
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        with torch.no_grad():
            expected = model.eval()(suite.IDS).logits
        place = Path(out) / case
        engine.save_checkpoint(place, tag="step1")
        errors = []
        for backend in ("torch", "jax"):
            for more in ({}, {"checkpoint": place}):
                given = suite.make(case, seed=1) if more else model
                with suite.serve(given, backend, **more) as served:
                    found = torch.tensor(np.asarray(served(ids).logits))
                    errors.append(error(found, expected))
        print(f"fused, {case}:", " ".join(f"{x:.1e}" for x in errors))
        assert max(errors) < 1e-5, case


def shared(rank, world, out, ep_size):
    """A job of ranks: DeepSpeed's expert parallelism, its checkpoint, and engines over both."""
    import torch

    import dualinfer
    from tests import deepspeed_moe

    own = start(rank, world)
    ids = torch.arange(24).reshape(2, 12)
    import deepspeed

    for k, residual in ((1, False), (2, True), (4, False)):
        fields = {"num_experts": 6, "k": k, "use_residual": residual, **EXACT, "drop_tokens": False}
        real = deepspeed_moe.make_model(make=own, ep_size=ep_size, **fields)
        if ep_size > 1:  # experts of a rank are its own
            torch.manual_seed(10 + rank)
            for name, parameter in real.named_parameters():
                if "deepspeed_experts" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
        optimizer = torch.optim.SGD(
            [
                {"params": [p], "moe": "experts" in n, "name": f"ep_size_{ep_size}"}
                for n, p in real.named_parameters()
            ],
            lr=0.0,
        )
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        config["zero_force_ds_cpu_optimizer"] = False
        engine, *_ = deepspeed.initialize(model=real, optimizer=optimizer, config=config)
        real.eval()
        with torch.no_grad():
            expected = real(ids)
        place = Path(out) / f"k{k}"
        engine.save_checkpoint(place, tag="step1")
        if rank == 0 and k == 1:
            print(*sorted(path.name for path in (place / "step1").iterdir()))
        moe = {"ep_size": world, "moe_experts": 6, "type": "residual" if residual else "standard"}
        ways = {"tensor_parallel": {"tp_size": world}, "moe": moe, "dtype": "fp32"}
        empty = deepspeed_moe.make_model(seed=3, ep_size=ep_size, **fields)
        with dualinfer.init_inference(empty, checkpoint=place, **ways) as served:
            filled = error(served(ids), expected)
        with dualinfer.init_inference(real, **ways) as served:
            live = error(served(ids), expected)
            held = real.layers[0].moe.deepspeed_moe.experts.deepspeed_experts
            assert len(held._modules) == fields["num_experts"] // world
        print(f"rank {rank} of {world}, ep_size {ep_size}, k {k}: {filled:.1e} {live:.1e}")
        assert max(filled, live) < 1e-5
        if rank == 0:
            whole = deepspeed_moe.make_model(seed=4, **fields)
            with dualinfer.init_inference(whole, checkpoint=place, dtype="fp32") as served:
                alone = error(served(ids), expected)
            print(f"loaded by one process: {alone:.1e}")
            assert alone < 1e-5


def main(folder):
    """See the module."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "MASTER_PORT": "29657"}
    environment |= {"PYTHONPATH": f"{folder}:{Path(__file__).parents[1]}"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(*jobs):
        started = [
            subprocess.Popen([sys.executable, __file__, "", *map(str, job)], env=environment)
            for job in jobs
        ]
        assert [job.wait(timeout=300) for job in started] == [0] * len(jobs)

    run(("single",))
    with tempfile.TemporaryDirectory() as place:
        run(("fused", f"{place}/fused"))
        run(("shared", 0, 1, f"{place}/1", 1))
        for ep_size in (1, 2):
            run(*(("shared", rank, 2, f"{place}/2-{ep_size}", ep_size) for rank in range(2)))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    elif sys.argv[2] == "single":
        single()
    elif sys.argv[2] == "fused":
        fused(sys.argv[3])
    else:
        shared(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
