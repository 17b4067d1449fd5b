"""Tiny checkpoints that compressed-tensors writes, with scales of the weights' min and max."""

import torch
import transformers as hf
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from .models import VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def calibrate(module, static):
    """Scales of a module's weight, in the places that compressed-tensors made for them."""
    args, weight = module.quantization_scheme.weights, module.weight.detach()
    n, k = weight.shape
    if args.strategy == "block":
        (r, c), pad = args.block_structure, torch.nn.functional.pad
        parts = pad(weight, (0, -k % c, 0, -n % r)).unflatten(1, (-1, c)).unflatten(0, (-1, r))
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        parts = {
            "tensor": weight.reshape(1, -1),
            "channel": weight[:, None],
            "group": weight.unflatten(1, (-1, args.group_size or 1)),
            "tensor_group": weight.unflatten(1, (-1, args.group_size or 1)),
        }[args.strategy]
        low, high = parts.amin(-1), parts.amax(-1)
    second = None
    if args.strategy == "tensor_group":
        second = generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data = second
    scale, zero = calculate_qparams(low, high, args, global_scale=second)
    shape = module.weight_scale.shape
    module.weight_scale.data = scale.reshape(shape).to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.reshape(shape).to(module.weight_zero_point.dtype)
    if hasattr(module, "input_scale"):
        module.input_scale.data = torch.full_like(module.input_scale, static)
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data = torch.full_like(module.input_global_scale, 448 * 6 / 3)


def write(
    folder, groups, *, ignore=("lm_head",), seed=0, dtype=torch.float32, static=0.02, **sizes
):
    """A tiny Llama's folder, quantized as the groups of a config say."""
    torch.manual_seed(seed)
    config = hf.LlamaConfig(**SIZES | sizes)
    model = hf.LlamaForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    wanted = QuantizationConfig(
        config_groups=groups,
        ignore=list(ignore),
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(model, wanted)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            calibrate(module, static)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder
