"""Write this folder's matrices with gptqmodel: what it packs, and what it takes that for.

gptqmodel needs more packages than the tests have: install it elsewhere, as

    pip install --no-deps --target SITE gptqmodel optimum pypcre tokenicer logbar device-smi \
        defuser threadpoolctl dill
    PYTHONPATH=SITE GPTQMODEL_DISABLE_PACK_EXT=1 python tests/data/gptq/make.py

They were written by gptqmodel 7.7.0. A file holds the tensors of one module, `expected`, its matrix
[out, in] as gptqmodel dequantizes it to float16, and in its header the quantization_config.
"""

import json
from math import ceil
from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file

# name: bits, group size, symmetric, act-order, format, outputs, inputs
CASES = {
    "gptq-v1": (4, 32, True, False, "gptq", 24, 80),  # the last group is shorter
    "gptq-v1-asymmetric": (4, 16, False, False, "gptq", 40, 48),
    "gptq-v2": (4, 16, False, False, "gptq_v2", 24, 48),
    "gptq-act-order": (4, 16, False, True, "gptq", 24, 64),
    "gptq-act-order-v2": (4, 32, True, True, "gptq_v2", 16, 80),
    "gptq-8-bits": (8, -1, True, False, "gptq", 24, 44),
    "gptq-8-bits-asymmetric": (8, 16, False, False, "gptq", 20, 48),
    "awq": (4, 16, False, False, "gemm", 40, 48),
    "awq-one-group": (4, -1, False, False, "gemm", 24, 36),
}


def make(bits, group_size, symmetric, act_order, form, n, k, seed):
    """The tensors and the expected matrix of a case."""
    random = torch.Generator().manual_seed(seed)
    size = k if group_size == -1 else group_size
    groups = ceil(k / size)
    scales = torch.rand(n, groups, generator=random) * 0.2 + 0.05
    scales = scales.half().float()
    zeros = torch.randint(0, 1 << bits, (n, groups), generator=random).float()
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    g_idx = torch.arange(k, dtype=torch.int32) // size
    if act_order:
        g_idx = g_idx[torch.randperm(k, generator=random)]
    codes = torch.randint(0, 1 << bits, (n, k), generator=random)
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data = (codes - zeros[:, g_idx]) * scales[:, g_idx]
    fields = {
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": act_order,
        "in_features": k,
        "out_features": n,
    }
    if form == "gemm":
        module = AwqTorchLinear(**fields, register_buffers=True)
        module.pack(linear, scales, zeros, g_idx)
        names = ("qweight", "qzeros", "scales")
        config = {"quant_method": "awq", "version": "gemm", "zero_point": True}
        expected = module._dequantize_weight_for_inference(torch.zeros(1, k), dtype=torch.float16)
    else:
        module = TorchLinear(**fields, register_buffers=True)
        module.pack_original(linear, scales, zeros, g_idx)
        module.post_init()
        names = ("qweight", "qzeros", "scales", "g_idx")
        config = {"quant_method": "gptq", "checkpoint_format": form, "desc_act": act_order}
        config["sym"] = symmetric
        expected = module.dequantize_weight()
        if form == "gptq":
            convert_gptq_v2_to_v1_format_module(
                module, QuantizeConfig(bits=bits, group_size=group_size)
            )
    tensors = {f"layer.{name}": getattr(module, name).contiguous() for name in names}
    tensors["expected"] = expected.T.half().contiguous()
    assert tensors["expected"].shape == (n, k)
    return tensors, {**config, "bits": bits, "group_size": group_size}


if __name__ == "__main__":
    for seed, (name, case) in enumerate(CASES.items()):
        tensors, config = make(*case, seed)
        path = Path(__file__).parent / f"{name}.safetensors"
        save_file(tensors, path, {"quantization_config": json.dumps(config)})
