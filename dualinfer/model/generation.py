"""The generation fields of HF's configs: their names, and the types of their values."""

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError, shown

# HF takes these from config.json as defaults of generation, where generation_config.json is not.
GENERATION = frozenset(
    """assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bad_words_ids begin_suppress_tokens cache_config cache_implementation
    compile_config constraints continuous_batching_config decoder_start_token_id disable_compile
    diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
    length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens
    max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits
    output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values
    renormalize_logits repetition_penalty return_dict_in_generate sequence_bias speculation_type
    stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k top_p
    typical_p use_mtp watermarking_config""".split()
)
_TYPES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("do_sample",), (bool,), "true or false"),
    (("temperature", "top_p", "min_p", "repetition_penalty"), (int, float), "a number"),
    (("max_length", "max_new_tokens", "min_length", "min_new_tokens"), (int,), "an int"),
    (("num_return_sequences", "pad_token_id", "top_k"), (int,), "an int"),
    (("bos_token_id", "eos_token_id"), (int, list), "an int or a list of ints"),
    (("stop_strings",), (str, list), "a string or a list of them"),
)


def check_types(values: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first generation argument that is of a wrong type.

    Its value is none of this check's affair: HF takes some, as a temperature of 0, while it does
    not read them.
    """
    for names, kinds, expected in _TYPES:
        for name in names:
            value = values.get(name)
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if isinstance(value, list) and fits:
                fits = all(isinstance(one, kinds[0]) for one in value)
            if value is not None and not fits:
                raise ArgumentError(f"{name}={shown(value)}; expected {expected}.")
