"""GPTQ: codes of 4 or 8 bits in words along the inputs, groups of inputs, act-order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...system.patterns import Patterns
from ..scheme import BlockScheme
from .stored import FLOATS, Checkpoint, Opener, StoredMatrix, Tensors, blocks, check_fields, refuse

METHOD = "gptq"
# Where AutoGPTQ and AutoAWQ say it, of which older ones say nothing in config.json.
FILES = ("quantize_config.json", "quant_config.json")
AGAIN = "Quantize the plain model again by GPTQ with 4 or 8 bits, or pass it as it is."
# What says how the weights were made or are run, and not what they mean. `sym`, `desc_act` and
# `true_sequential` are among them: the zeros and the groups of the columns are stored.
HARMLESS = """
    act_group_aware adapter auto_forward_data_parallel backend batch_size block_name_to_quantize
    cache_block_outputs calibration_data_min_length compute_device_filter damp_auto_increment
    damp_percent dataset dense_vram_strategy desc_act device disable_exllama exllama_config
    exllama_version failsafe fallback foem gc_mode gptaq gptaq_alpha hessian hyb_act
    is_marlin_format kernel max_input_length meta method model_file_base_name model_name_or_path
    model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize moe moe_vram_strategy mse
    offload_to_disk offload_to_disk_path pack_impl pad_token_id parallel_packing process quantizer
    rotation static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama v2 vram_strategy
    wait_for_submodule_finalizers zero_point
""".split()
# Those that auto-round writes besides; and what would change what the weights mean, with the values
# that do not.
HARMLESS += """
    act_data_type act_dynamic act_group_size act_sym amp autoround_version enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps iters low_gpu_mem_usage
    lr minmax_lr model_free nsamples provider quant_block_list scale_dtype seqlen supported_types
    to_quant_block_names
""".split()
_ONLY = {"data_type": ("int",), "act_bits": (16, 32), "super_bits": (), "rotation_configs": ()}


class PackedWords(StoredMatrix):
    """Codes in words of 32 bits, `[in, out]` as GPTQ and AWQ store them.

    `along_inputs` says which way words run (GPTQ) or that they hold outputs (AWQ). Where all zeros
    are the middle the codes are signed and there are none.
    """

    inputs_first = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        module: str,
        bits: int,
        group_size: int,
        *,
        along_inputs: bool,
        raised: bool = False,
        with_zeros: bool = True,
    ):
        self._from, self._bits = checkpoint, bits
        self._along_inputs, self._raised = along_inputs, raised
        self._held = 32 // bits  # codes in a word
        words, scales, zeros = (f"{module}.{n}" for n in ("qweight", "scales", "qzeros"))
        indices = f"{module}.g_idx"
        shape = checkpoint.check(words, ("int32", "uint32"))
        if len(shape) != 2 or 0 in shape:
            raise checkpoint.error(f"{words} has the shape {shape}, expected a matrix.")
        n, k = shape[1], shape[0] * self._held
        self.stored = (words, scales, zeros)
        if not along_inputs:
            n, k = shape[1] * self._held, shape[0]
        elif indices in checkpoint.names:
            self.stored += (indices,)
            given = checkpoint.check(indices, ("int32", "int64"))
            k = given[0] if len(given) == 1 else k
            if blocks(k, self._held) != shape[0] or len(given) != 1:
                raise checkpoint.error(f"{indices} has {given} columns, {words} {shape}.")
        self.shape = (n, k)
        group_size = 0 if group_size >= k else group_size
        groups = blocks(k, group_size)
        self._group = None
        if indices in self.stored:
            group = checkpoint.read(indices).astype(np.int32)
            ordered = np.arange(k, dtype=np.int32) // (group_size or k)
            if not np.array_equal(group, ordered):
                found = checkpoint.check(scales, FLOATS)
                groups = found[0] if found else 0
                if group.min() < 0 or group.max() >= groups:
                    raise checkpoint.error(f"{indices} names groups that {scales} does not have.")
                self._group = group
        checkpoint.check(scales, FLOATS, (groups, n))
        middle = 1 << (bits - 1)
        if with_zeros or zeros in checkpoint.names:
            checkpoint.check(zeros, ("int32", "uint32"), (groups, blocks(n, self._held)))
            zero = self._unpack_rows(self._zero_words(zeros))[:, :n]
            self._zero = None if (zero == middle).all() else np.ascontiguousarray(zero.T)
        else:
            self.stored, self._zero = (words, scales), None
        self._middle = middle if self._zero is None else 0
        codes = {(4, True): "int4", (4, False): "uint4", (8, True): "int8", (8, False): "uint8"}
        self.scheme = BlockScheme(
            codes[bits, bool(self._middle)],
            columns=group_size,
            scale_dtype=checkpoint.source.dtype(scales),  # type: ignore[arg-type]
            zeros=not self._middle,
            groups=0 if self._group is None else groups,
        )

    def _zero_words(self, name: str) -> np.ndarray:
        words = np.ascontiguousarray(self._from.read(name)).view(np.uint32)
        if self._raised:  # by one less, in the whole word, so that a borrow is undone as well
            words = words + np.uint32(0x11111111 if self._bits == 4 else 0x01010101)
        return words

    def _split(self, words: np.ndarray) -> np.ndarray:
        """Codes [..., in a word], the lowest bits first, of words."""
        octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
        if self._bits == 8:
            return octets
        codes = np.empty((*words.shape, 4, 2), np.uint8)
        codes[..., 0], codes[..., 1] = octets & 15, octets >> 4
        return codes.reshape(*words.shape, 8)

    def _unpack_rows(self, words: np.ndarray) -> np.ndarray:
        """Codes of words that hold outputs."""
        codes = self._split(words)
        if not self._along_inputs:
            codes = codes[..., _AWQ_ORDER]
        return codes.reshape(len(words), words.shape[1] * self._held)

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        (n0, n1, _), (k0, k1, _) = rows.indices(self.shape[0]), columns.indices(self.shape[1])
        held, name = self._held, self.stored[0]
        if self._along_inputs:
            first = k0 // held
            words = self._from.read(name, slice(first, blocks(k1, held)), slice(n0, n1))
            codes = self._split(words).transpose(1, 0, 2)
            codes = codes.reshape(words.shape[1], len(words) * held)
            codes = codes[:, k0 - first * held : k1 - first * held]
        else:
            first = n0 // held
            words = self._from.read(name, slice(k0, k1), slice(first, blocks(n1, held)))
            codes = self._unpack_rows(words)[:, n0 - first * held : n1 - first * held].T
        if self._middle:
            codes = (codes - np.uint8(self._middle)).view(np.int8)
        return np.ascontiguousarray(codes)

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix."""
        return np.ascontiguousarray(self._from.scale(self.stored[1]).T)

    def zero(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._zero

    def group(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return self._group


# Where AWQ keeps the outputs 0, 1, .. 7 in a word: it packs them as 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_ORDER = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


def check_words(config: Mapping[str, Any], method: str, known: Iterable[str]) -> None:
    """Raise UnsupportedError for fields that change what the words mean, or that nobody knows."""
    check_fields(config, method, (*known, *_ONLY, *HARMLESS))
    for field, values in _ONLY.items():
        if config.get(field) and config[field] not in values:
            raise refuse(method, field, config[field], AGAIN)


def group_size_of(value: Any, method: str) -> int:
    """The group size of a config, 0 for a whole row."""
    if type(value) is not int or (value < 1 and value != -1):
        raise refuse(method, "group_size", value, "Expected a number of inputs, or -1.")
    return 0 if value == -1 else value


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of a GPTQ checkpoint."""
    known = ("bits", "group_size", "checkpoint_format", "format", "lm_head", "dynamic")
    check_words(config, METHOD, (*known, "pack_dtype"))
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise refuse(METHOD, "checkpoint_format", form, "Save it in the format gptq or gptq_v2.")
    if config.get("is_marlin_format"):
        raise refuse(METHOD, "is_marlin_format", True, "Save it in the format gptq or gptq_v2.")
    if config.get("pack_dtype") not in (None, "int32"):
        raise refuse(METHOD, "pack_dtype", config["pack_dtype"], "Save it with pack_dtype=int32.")
    rule_of = _rules(config.get("dynamic"))
    defaults = {"bits": config.get("bits"), "group_size": config.get("group_size", 128)}
    _numbers(defaults)
    checkpoint = Checkpoint(source, METHOD)

    def open_matrix(name: str) -> PackedWords | None:
        module = name.removesuffix(".weight")
        if f"{module}.qweight" not in checkpoint.names:
            return None
        found = rule_of(module)
        if found is None or (
            module.endswith("lm_head") and not config.get("lm_head") and not found
        ):
            raise checkpoint.error(
                f"{module}.qweight is there, but quantization_config says that {module} is not "
                "quantized."
            )
        bits, group_size = _numbers({**defaults, **found})
        return PackedWords(
            checkpoint, module, bits, group_size, along_inputs=True, raised=form == "gptq"
        )

    return Opener(open_matrix)


def _numbers(config: Mapping[str, Any]) -> tuple[int, int]:
    bits = config["bits"]
    if bits not in (4, 8):
        raise refuse(METHOD, "bits", bits, AGAIN)
    return bits, group_size_of(config["group_size"], METHOD)


_Rule = dict[str, Any] | None  # changed fields, or None for left out


def _rules(dynamic: Any) -> Callable[[str], _Rule]:
    """The rule of `dynamic` for a module: the first whose pattern its name begins with."""
    if dynamic is None or dynamic is False:
        dynamic = {}
    if not isinstance(dynamic, Mapping):
        raise refuse(METHOD, "dynamic", dynamic, "Expected rules by pattern.")
    texts, rules = [], list[_Rule]()
    for text, fields in dynamic.items():
        sign, pattern = (text[0], text[2:]) if text[:2] in ("-:", "+:") else ("+", text)
        texts.append(pattern)
        if sign == "-":
            rules.append(None)
            continue
        if not isinstance(fields, Mapping):
            raise refuse(METHOD, "dynamic", dynamic, "Expected fields for each pattern.")
        check_words(fields, f"{METHOD}, dynamic", ("bits", "group_size"))
        rules.append(dict(fields))
    patterns = Patterns(texts, f"The model's quantization_config ({METHOD}), dynamic,")

    def rule_of(module: str) -> _Rule:
        found = patterns.find(module)
        return rules[found[0]] if found else {}

    return rule_of
