"""AWQ, version gemm: codes of 4 bits in words along the outputs, groups of inputs, zero points."""

from collections.abc import Mapping
from typing import Any

from .gptq import AGAIN, PackedWords, check_words, group_size_of
from .stored import Checkpoint, LeftOut, Opener, Tensors, name_list, refuse

METHOD = "awq"
KNOWN = (
    "bits w_bit group_size q_group_size zero_point version format modules_to_not_convert".split()
)
FUSED = "do_fuse fuse_max_seq_len modules_to_fuse lm_head".split()


def is_own(fields: Mapping[str, Any]) -> bool:
    """True if the fields of a file beside config.json are AutoAWQ's, and not AutoGPTQ's."""
    return str(fields.get("version")).lower().startswith("gem") or not fields.keys().isdisjoint(
        ("w_bit", "q_group_size")
    )


def opener(config: Mapping[str, Any], source: Tensors) -> Opener:
    """Opens the matrices of an AWQ checkpoint."""
    check_words(config, METHOD, (*KNOWN, *FUSED))
    version = config.get("version") or config.get("format") or "gemm"
    if str(version).lower() != "gemm" or config.get("backend") == "llm-awq":
        instead = "Save it in the version gemm (AutoAWQ: quant_config={'version': 'GEMM'})."
        raise refuse(METHOD, "version", version, instead)
    bits = config.get("bits", config.get("w_bit", 4))
    if bits != 4:
        raise refuse(METHOD, "bits", bits, f"AWQ's version gemm has 4 bits. {AGAIN}")
    size = group_size_of(config.get("group_size", config.get("q_group_size", 128)), METHOD)
    skipped = LeftOut(name_list(config, METHOD, "modules_to_not_convert"), METHOD)
    checkpoint = Checkpoint(source, METHOD)

    def open_matrix(name: str) -> PackedWords | None:
        module = name.removesuffix(".weight")
        if f"{module}.qweight" not in checkpoint.names:
            return None
        if module in skipped:
            raise checkpoint.error(
                f"{module}.qweight is there, but modules_to_not_convert says that {module} is not "
                "quantized."
            )
        zeros = bool(config.get("zero_point", True))  # else they may be left out
        return PackedWords(checkpoint, module, bits, size, along_inputs=False, with_zeros=zeros)

    return Opener(open_matrix)
