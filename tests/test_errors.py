"""Every error that a user can run into: its kind, what it names, and that nothing else happened."""

import copy
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import dualinfer
from dualinfer import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    LengthError,
    ModelError,
    UnservedError,
    errors,
)
from dualinfer.checkpoint.files.pieces import INDEX
from dualinfer.checkpoint.sources import open_checkpoint

from .cases import make_model
from .cases.decoders import CASES
from .models import BACKENDS, VOCAB, random_ids

CAUSAL, ENCODER = "llama-mqa", "bert-types"


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def idle(monkeypatch, engine_of):
    """A function to an engine whose runner must not be asked to compute anything."""

    def get(name=CAUSAL, backend="torch"):
        engine = engine_of(name, backend)

        def refuse(*args, **kwargs):
            raise AssertionError("the runner ran")

        for method in ("forward", "prefill", "decode"):
            monkeypatch.setattr(engine.runner, method, refuse)
        return engine

    return get


@pytest.fixture
def folder(tmp_path, hf_model):
    """A function from a case's name to a checkpoint folder of its own."""

    def make(name=CAUSAL):
        path = tmp_path / name
        hf_model(name).save_pretrained(path)
        return path

    return make


def change_config(folder, **changes):
    """Write fields into config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_weights(folder, change):
    """Apply `change` to the dict of a folder's tensors."""
    path = folder / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_every_error_can_be_caught_by_its_name():
    kinds = {
        n
        for n, v in vars(errors).items()
        if isinstance(v, type) and v.__module__ == errors.__name__
    }
    assert kinds <= set(dualinfer.__all__) and "DistributedError" in kinds
    assert all(issubclass(getattr(dualinfer, kind), dualinfer.DualinferError) for kind in kinds)


class _Counted(ValueError):
    def __init__(self, *, count):
        super().__init__(f"{count} are too many")
        self.count = count


def test_a_copy_of_an_error_says_the_same_and_has_a_traceback_of_its_own():
    damaged, cause = UnicodeDecodeError("utf-8", b"x", 0, 1, "no letter"), ValueError("why")
    for error in (_Counted(count=3), errors.CheckpointNotFoundError("none"), damaged):
        error.__cause__ = cause
        error.add_note("a note")
        made = errors.copied(error)
        assert made is not error and type(made) is type(error)
        assert (str(made), made.__dict__) == (str(error), error.__dict__)
        assert made.__cause__ is cause
        with pytest.raises(type(error)):
            raise made
        assert made.__traceback__ is not None and error.__traceback__ is None


def test_what_a_reader_meets_is_the_cause_of_our_error():
    says = r"a\.x cannot be read: IndexError: 3"
    with pytest.raises(CheckpointError, match=says) as told, errors.blamed_on("a.x"):
        raise IndexError(3)
    assert isinstance(told.value.__cause__, IndexError)
    for kind in (LengthError, MemoryError, KeyboardInterrupt):  # ours, and no fault of the file
        with pytest.raises(kind, match="as it is"), errors.blamed_on("a.x"):
            raise kind("as it is")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", 3])
def test_an_index_that_names_no_path_is_told(name, folder):
    path = folder()
    (path / "model.safetensors").unlink()
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match="where it should name a file"):
        dualinfer.init_inference(path)


# --- token ids, masks, positions -----------------------------------------------------------------

BAD_IDS = {
    "empty list": ([], "no token"),
    "empty rows": ([[], []], "empty"),
    "one empty row": ([[5, 6], []], r"Prompt 1 is empty"),
    "empty array": (np.zeros((0, 3), int), "no token"),
    "empty tensor": (torch.zeros((2, 0), dtype=torch.int64), "no token"),
    "outside the vocabulary": ([[5, VOCAB]], rf"{VOCAB}.*vocabulary of {VOCAB}"),
    "negative": (np.array([[5, -1]]), r"\[0, 1\] is -1"),
    "beyond 32 bits": (np.array([[5, 2**40]]), "vocabulary"),
    "float list": ([[5.0, 6.0]], "float64.*integers"),
    "float tensor": (torch.tensor([[5.0]]), "float32.*integers"),
    "half tensor": (torch.tensor([[5.0]], dtype=torch.bfloat16), "bfloat16.*integers"),
    "bool": (np.array([[True]]), "bool.*integers"),
    "three axes": (np.ones((2, 3, 4), int), r"\(2, 3, 4\)"),
    "three axes in lists": ([[[5, 6], [7, 8]]], "shape"),
    "no axis": (np.array(5), "shape"),
    "strings": (["hello", "world"], "input_ids"),
    "one string": ("hello", "str"),
    "none in a list": ([[5, None]], "input_ids"),
    "a number": (5, "int"),
    "a dict": ({"ids": [[5]]}, "dict"),
    "list mixed with numbers": ([[5, 6], 7], "input_ids"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids_are_refused_before_anything_runs(case, idle):
    ids, message = BAD_IDS[case]
    engine = idle()
    for call in (engine.generate, engine.stream):
        with pytest.raises(ArgumentError, match=message):
            call(ids)
    message = {"empty rows": "no token", "one empty row": "length"}.get(case, message)
    with pytest.raises(ArgumentError, match=message) as error:
        engine(ids)
    assert isinstance(error.value, ValueError)


def test_missing_ids_are_refused(idle):
    none = {"bos_token_id": None}  # with one, generate starts from it as HF's does
    for call, arguments in ((idle(), {}), (idle().generate, none), (idle().stream, none)):
        with pytest.raises(ArgumentError, match="input_ids is missing"):
            call(**arguments)


BAD_MASKS = {
    "too short": (np.ones((2, 3)), r"\(2, 3\).*\(2, 4\)"),
    "too few rows": (np.ones((1, 4)), r"\(1, 4\).*\(2, 4\)"),
    "four axes": (np.ones((2, 1, 4, 4)), r"\(2, 1, 4, 4\)"),
    "one axis": (np.ones(4), r"\(4,\)"),
    "other values": (np.full((2, 4), 2), "other values than 0 and 1"),
    "additive": (torch.full((2, 4), -1e9), "other values"),
    "nan": (np.full((2, 4), np.nan), "other values"),
    "a number": (1, "int"),
    "a string": ("left", "str"),
    "ragged": ([[1, 1], [1]], "length"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_bad_masks_are_refused_before_anything_runs(case, idle):
    mask, message = BAD_MASKS[case]
    engine = idle()
    for call in (engine, engine.generate, engine.stream):
        with pytest.raises(ArgumentError, match=message):
            call(random_ids(2, 4), attention_mask=mask)


def test_prompt_that_is_masked_throughout_is_refused(idle):
    ids, mask = random_ids(3, 4), np.ones((3, 4))
    mask[1] = 0
    with pytest.raises(ArgumentError, match="Prompt 1 is empty"):
        idle().generate(ids, attention_mask=mask)
    with pytest.raises(ArgumentError, match="Prompt 2 is empty"):
        idle().generate(np.array([[5, 0], [6, 7], [0, 0]]))  # the pad id
    with pytest.raises(ArgumentError, match="Prompt 1 is empty"):
        idle().generate([[5, 6], [7]], attention_mask=[[1, 0], [0]])


def test_masks_of_lists_must_fit_each_row(idle):
    for mask in ([[1, 1], [1, 1]], [[1, 1]], np.ones((2, 2)), 1):
        with pytest.raises(ArgumentError, match="attention_mask"):
            idle().generate([[5, 6], [7, 8, 9]], attention_mask=mask)


BAD_POSITIONS = {
    "wrong shape": (np.arange(3)[None], r"\(1, 3\).*\(2, 4\)"),
    "too many rows": (np.zeros((3, 4), int), r"\(3, 4\)"),
    "negative": (np.array([-1, 0, 1, 2]), "-1"),
    "float": (np.arange(4.0), "integers"),
    "beyond the table": (np.array([0, 1, 2, 63]), "63"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
def test_bad_position_ids_are_refused(case, idle):
    positions, message = BAD_POSITIONS[case]
    with pytest.raises(ArgumentError, match=f"position_ids.*{message}"):
        idle(ENCODER)(random_ids(2, 4), position_ids=positions)


@pytest.mark.parametrize("types", [np.full((2, 4), 3), np.full((2, 4), -1), np.zeros((2, 3), int)])
def test_bad_token_types_are_refused(types, idle):
    with pytest.raises(ArgumentError, match="token_type_ids"):
        idle(ENCODER)(random_ids(2, 4), token_type_ids=types)


def test_token_types_of_a_family_without_them_are_refused(idle):
    with pytest.raises(ArgumentError, match=r"llama.*token_type_ids"):
        idle()(random_ids(2, 4), token_type_ids=np.ones((2, 4), int))


def test_forward_beyond_learned_positions_is_refused(idle):
    for name, limit in ((ENCODER, 63), ("gpt2", 128)):
        with pytest.raises(LengthError, match=f"{limit + 1} tokens.*{limit} positions"):
            idle(name)(random_ids(1, limit + 1))


def test_unsupported_forward_arguments_are_named(idle):
    ids = random_ids(2, 4)
    for arguments in (
        {"past_key_values": ((torch.zeros(1),),)},
        {"head_mask": np.ones(5)},
        {"output_attentions": True},
        {"cache_position": np.arange(4)},
        {"use_cache": True},
        {"attention_maks": np.ones((2, 4))},
    ):
        with pytest.raises(ArgumentError, match=next(iter(arguments))):
            idle()(ids, **arguments)
    with pytest.raises(TypeError):
        idle()(ids, None, None)


def test_token_types_that_say_nothing_are_taken_by_a_family_without_them(engine_of):
    """Many tokenizers give them to models that have none."""
    ids = random_ids(2, 4)
    for name in (CAUSAL, "gpt2"):
        engine = engine_of(name, "torch")
        types = np.zeros_like(ids)
        if name == CAUSAL:
            np.testing.assert_array_equal(engine(ids, token_type_ids=types).logits, engine(ids)[0])
            with_types = engine.generate(ids, token_type_ids=types, max_new_tokens=3)
            np.testing.assert_array_equal(with_types, engine.generate(ids, max_new_tokens=3))
        else:  # here they are ids of the vocabulary's table, and a zero says something
            assert (engine(ids, token_type_ids=types).logits != engine(ids).logits).any()
            with pytest.raises(ArgumentError, match="token_type_ids"):
                engine.generate(ids, token_type_ids=types, max_new_tokens=3)


def test_forward_arguments_that_ask_for_nothing_are_taken(engine_of):
    engine = engine_of(CAUSAL, "torch")
    ids = random_ids(2, 4)
    out = engine(ids, labels=None, output_attentions=False, past_key_values=None, use_cache=False)
    np.testing.assert_array_equal(out.logits, engine(ids).logits)


# --- lengths -------------------------------------------------------------------------------------


def test_max_out_tokens_is_checked_however_ids_are_passed(backend, hf_model, monkeypatch):
    engine = dualinfer.init_inference(
        hf_model(CAUSAL), backend=backend, kernel_inject=True, max_out_tokens=12
    )
    ids = random_ids(2, 8)
    text = np.asarray(engine.generate(ids, max_new_tokens=4))
    assert text.shape == (2, 12) and engine.report().max_tokens == 12

    def refuse(*args, **kwargs):
        raise AssertionError("the runner ran")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", refuse)
        for call in (engine.generate, engine.stream):
            for arguments, options in (
                ((ids,), {"max_new_tokens": 5}),
                ((torch.tensor(ids),), {"max_new_tokens": 5}),
                ((ids.tolist(),), {"max_new_tokens": 5}),
                (([[5], ids[0].tolist()],), {"max_new_tokens": 5}),
                (((), ids.tolist())[1:], {"max_new_tokens": 5}),
                ((), {"input_ids": ids, "max_new_tokens": 5}),
                ((), {"inputs": ids, "max_new_tokens": 5}),
                ((ids,), {"max_length": 13}),
                ((ids, {"max_new_tokens": 5}), {}),
                ((ids,), {"generation_config": hf.GenerationConfig(max_new_tokens=5)}),
                ((random_ids(1, 12),), {}),
                ((random_ids(1, 40),), {"max_new_tokens": 1}),
            ):
                with pytest.raises(LengthError, match=r"max_out_tokens \(12\)") as error:
                    call(*arguments, **options)
                assert isinstance(error.value, (RuntimeError, ValueError))
    np.testing.assert_array_equal(engine.generate(ids, max_new_tokens=4), text)
    assert engine(random_ids(1, 40)).logits.shape == (1, 40, VOCAB)  # forward is not bound by it
    padded = np.concatenate((np.zeros((2, 20), int), ids), axis=1)  # padding takes no room
    assert np.asarray(engine.generate(padded, max_new_tokens=4)).shape == (2, 32)


def test_models_own_limit_is_checked(idle):
    with pytest.raises(LengthError, match=r"128"):
        idle("gpt2").generate(random_ids(1, 100), max_new_tokens=30)
    with pytest.raises(LengthError, match=r"512.* or set a larger max_out_tokens"):
        idle().generate(random_ids(1, 500), max_new_tokens=14)


def test_max_out_tokens_beyond_learned_positions_does_not_lift_them(hf_model):
    engine = dualinfer.init_inference(hf_model("gpt2"), kernel_inject=True, max_out_tokens=500)
    with pytest.raises(LengthError, match=r"positions \(128\).*or shorten the prompt\."):
        engine.generate(random_ids(1, 100), max_new_tokens=30)


def test_max_length_that_the_prompt_fills_is_refused(idle):
    with pytest.raises(ValueError, match="max_length=8"):
        idle().generate(random_ids(1, 8), max_length=8)


# --- generate's arguments ------------------------------------------------------------------------

UNSUPPORTED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "penalty_alpha": 0.6,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "force_words_ids": [[5]],
    "constraints": [object()],
    "guidance_scale": 1.5,
    "watermarking_config": {"greenlist_ratio": 0.2},
    "token_healing": True,
    "dola_layers": "high",
    "assistant_model": object(),
    "assistant_early_exit": 1,
    "cache_implementation": "quantized",
    "output_attentions": True,
    "output_hidden_states": True,
    "negative_prompt_ids": torch.tensor([[5]]),
    "past_key_values": ((torch.zeros(1),),),
    "position_ids": torch.tensor([[0, 1, 2, 3]]),
    "token_type_ids": np.ones((1, 4), int),
    "custom_generate": "somebody/something",
    "max_new_token": 5,
    "temprature": 0.5,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_generate_argument_is_named(name, idle):
    value = UNSUPPORTED[name]
    with pytest.raises((ArgumentError, dualinfer.UnsupportedError), match=name) as error:
        idle().generate(random_ids(1, 4), **{name: value})
    assert isinstance(error.value, NotImplementedError) == (name == "num_beams")
    assert len(str(error.value)) < 700
    if not callable(value) and name not in (
        *("constraints", "assistant_model", "past_key_values", "position_ids"),
        *("negative_prompt_ids", "token_type_ids", "custom_generate", "max_new_token"),
        *("temprature", "assistant_early_exit"),
        *("force_words_ids", "num_beam_groups", "diversity_penalty", "penalty_alpha"),
        *("dola_layers", "watermarking_config"),
    ):
        config = hf.GenerationConfig(max_new_tokens=3)
        setattr(config, name, value)
        with pytest.raises((ArgumentError, dualinfer.UnsupportedError), match=name):
            idle().generate(random_ids(1, 4), config)


def test_misspelled_argument_is_refused_whatever_its_value(idle):
    for name, value in (("do_smaple", False), ("max_new_token", None), ("do_sampel", 0)):
        with pytest.raises(ArgumentError, match=name):
            idle().generate(random_ids(1, 4), **{name: value})


def test_beams_of_the_models_own_generation_config_are_refused(hf_model):
    model = make_model(CAUSAL)
    model.generation_config.num_beams = 4
    engine = dualinfer.init_inference(model, kernel_inject=True)
    with pytest.raises(NotImplementedError, match="num_beams=4"):
        engine.generate(random_ids(1, 4))
    assert engine.generate(random_ids(1, 4), num_beams=1, max_new_tokens=2).shape == (1, 6)


BAD_VALUES = [
    ("max_new_tokens", 0),
    ("max_new_tokens", -3),
    ("max_new_tokens", 2.5),
    ("max_new_tokens", "5"),
    ("max_new_tokens", True),
    ("max_length", 0),
    ("min_new_tokens", -1),
    ("min_length", -1),
    ("do_sample", "yes"),
    ("do_sample", 1),
    ("temperature", 0),
    ("temperature", -1.0),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("eos_token_id", "</s>"),
    ("eos_token_id", 2.0),
    ("eos_token_id", [2, "x"]),
    ("pad_token_id", "pad"),
    ("pad_token_id", -2),
    ("num_return_sequences", 0),
    ("stop_strings", [""]),
    ("stop_strings", 5),
    ("stop_strings", [5]),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("seed", True),
    ("seed", "abc"),
    ("seed", [1, 2]),
    ("seed", []),
    ("seed", [None]),
    ("seed", np.array([1.5])),
    ("seed", np.array([[1]])),
    ("seed", torch.tensor([1.5])),
    ("generation_config", 5),
    ("generation_config", "greedy"),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES, ids=lambda v: str(v)[:20])
def test_bad_value_is_refused_by_name(name, value, idle):
    options = {} if name == "do_sample" else {"do_sample": True}
    with pytest.raises(ArgumentError, match=name):
        idle().generate(random_ids(1, 4), **{**options, name: value}, tokenizer=object())


def test_stop_strings_need_a_tokenizer(idle):
    with pytest.raises(ArgumentError, match=r"stop_strings.*tokenizer"):
        idle().generate(random_ids(1, 4), stop_strings=["x"])


def test_ragged_prompts_without_any_pad_id_are_refused(hf_model):
    model = make_model(CAUSAL, eos_token_id=None, pad_token_id=None)
    engine = dualinfer.init_inference(model, kernel_inject=True)
    with pytest.raises(ArgumentError, match="pad_token_id"):
        engine.generate([[5, 6], [7]], max_new_tokens=2)
    assert engine.generate([[5, 6], [7]], max_new_tokens=2, pad_token_id=0).shape == (2, 4)
    assert engine.generate([[5, 6], [7, 8]], max_new_tokens=2).shape == (2, 4)


def test_ids_given_twice_are_refused(idle):
    ids = random_ids(1, 4)
    with pytest.raises(ArgumentError, match="inputs and input_ids"):
        idle().generate(ids, inputs=ids)


@pytest.mark.parametrize("name", ["bert-masked", "llama-headless", "gpt2-headless"])
def test_model_that_cannot_generate_says_so(name, idle):
    architecture = CASES[name].model.__name__
    for call in (idle(name).generate, idle(name).stream):
        with pytest.raises(NotImplementedError, match=f"{architecture} cannot generate"):
            call(random_ids(1, 4))


def test_engine_is_usable_after_every_error(engine_of, backend):
    engine = engine_of(CAUSAL, backend)
    ids = random_ids(2, 4)
    text = np.asarray(engine.generate(ids, max_new_tokens=5))
    for options in (
        {"num_beams": 3},
        {"max_new_tokens": 10**6},
        {"attention_mask": np.zeros((2, 4))},
        {"seed": [1, 2, 3]},
        {"eos_token_id": "x"},
    ):
        with pytest.raises(dualinfer.DualinferError):
            engine.generate(ids, **options)
        np.testing.assert_array_equal(engine.generate(ids, max_new_tokens=5), text)


# --- closing -------------------------------------------------------------------------------------


def test_closed_engine_refuses_everything(hf_model, backend):
    engine = dualinfer.init_inference(hf_model(CAUSAL), backend=backend, kernel_inject=True)
    ids = random_ids(1, 4)
    unstarted, opened = (engine.stream(ids, max_new_tokens=9) for _ in range(2))
    next(opened)
    engine.close()
    for use in (
        lambda: engine(ids),
        lambda: engine.generate(ids),
        lambda: engine.stream(ids),
        lambda: engine.report(),
        lambda: engine.runner,
        lambda: engine.model_times(),
        lambda: next(unstarted),
        lambda: list(opened),
    ):
        with pytest.raises(dualinfer.ClosedError, match="closed"):
            use()
    assert "closed" in repr(engine)
    engine.close()


def test_engine_is_a_context_manager(hf_model):
    with dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True) as engine:
        engine(random_ids(1, 2))
    with pytest.raises(RuntimeError, match="closed"):
        engine(random_ids(1, 2))


# --- the model -----------------------------------------------------------------------------------


def describe(name, **changes):
    """The spec of a case with changed config fields, without weights."""
    from dualinfer.model.families import describe_model

    case = CASES[name]
    config = {**case.make_config().to_dict(), **changes}
    return describe_model(config, [case.model.__name__])[0]


UNSUPPORTED_FIELDS = [
    ("llama-gqa", {"hidden_act": "gelu_10"}, "hidden_act='gelu_10'"),
    ("llama-gqa", {"logit_scale": 0.5}, "logit_scale=0.5"),
    ("llama-gqa", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("llama-gqa", {"num_experts": 8}, "num_experts=8"),
    ("llama-gqa", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("llama-gqa", {"add_cross_attention": True}, "add_cross_attention"),
    ("llama-gqa", {"output_attentions": True}, "output_attentions"),
    ("llama-gqa", {"residual_multiplier": 0.2, "logit_scale": 2}, "residual_multiplier=0.2"),
    ("llama-gqa", {"hidden_size": "96"}, "hidden_size='96'"),
    ("llama-gqa", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ("llama-gqa", {"num_key_value_heads": 4}, "no multiple of 4"),
    ("llama-gqa", {"head_dim": 15}, "head_dim=15"),
    ("llama-gqa", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("llama-gqa", {"rope_parameters": None}, "rope_parameters"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    ("mistral", {"mlp_bias": True}, "mlp_bias"),
    ("mistral-window", {"sliding_window": 0}, "sliding_window=0"),
    ("llama-gqa", {"sliding_window": 4}, "sliding_window=4"),
    ("llama-gqa", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ("mistral-window", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen2", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias"),
    ("qwen3", {"qk_layernorm": True}, "qk_layernorm"),
    ("gpt2", {"activation_function": "mish"}, "activation_function='mish'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"rotary_dim": 8}, "rotary_dim=8"),
    ("gpt2", {"n_head": 7}, "n_embd=60.*n_head=7"),
    ("gpt2", {"is_decoder": True}, "is_decoder"),
    ("bert", {"is_decoder": True}, "is_decoder=True"),
    ("bert", {"add_cross_attention": True}, "add_cross_attention"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ("bert", {"hidden_act": "swiglu"}, "hidden_act='swiglu'"),
    ("bert", {"embedding_size": 128}, "embedding_size=128"),
    ("bert", {"num_attention_heads": 7}, "num_attention_heads=7"),
    ("bert", {"num_attention_heads": 0}, "num_attention_heads=0; expected a positive int"),
]


@pytest.mark.parametrize(("name", "changes", "message"), UNSUPPORTED_FIELDS, ids=str)
def test_config_field_that_is_not_honoured_is_named(name, changes, message):
    with pytest.raises(ModelError, match=message):
        describe(name, **changes)


def test_a_format_that_is_not_read_is_refused_in_every_mode():
    with pytest.raises(dualinfer.UnsupportedError, match="hqq"):
        describe("llama-gqa", quantization_config={"quant_method": "hqq", "bits": 4})


@pytest.mark.parametrize("method", ["gptq", "hqq"])
def test_a_quantized_text_model_within_another_is_not_taken_for_a_plain_one(method, tmp_path):
    text = {"model_type": "opt", "quantization_config": {"quant_method": method, "bits": 4}}
    config = {"model_type": "blip-2", "text_config": text}
    config["architectures"] = ["Blip2ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(dualinfer.UnsupportedError, match=rf"quantization_config \({method}\)"):
        dualinfer.init_inference(str(tmp_path), backend="torch")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic"}, "without factor; 'dynamic' needs it"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, "alpha"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "original_max_position_embeddings=None; longrope needs",
        ),
        ({"rope_type": "proportional"}, "'proportional'"),
        ({"rope_type": "nonsense"}, "'nonsense'.*Honoured: default, linear"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.1}, "attention_factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "freq_factor"),
        ({"rope_type": "default", "rope_theta": None}, "rope_theta"),
    ],
    ids=str,
)
def test_rope_that_is_not_honoured_is_named(rope, message):
    with pytest.raises(ModelError, match=message):
        describe("llama-gqa", rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "llama-gqa",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "rope_type='proportional'",
        ),
        ("bert", {"is_decoder": True}, "is_decoder"),
    ],
)
def test_folder_with_a_field_that_fused_mode_does_not_honour(folder, name, fields, message):
    """It runs as transformers' own model does, with a warning; what asks for fused mode fails."""
    path = folder(name)
    change_config(path, **fields)
    ids = random_ids(2, 9)
    with pytest.warns(UserWarning, match=f"in module mode, .*{message}"):
        engine = dualinfer.init_inference(path, dtype="fp32")
    with engine, torch.no_grad():
        assert engine.report().mode == "module"
        assert any("module mode, with" in n and message in n for n in engine.report().notes)
        theirs = hf.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
        if name == "bert":
            np.testing.assert_allclose(
                engine(torch.from_numpy(ids))[0], theirs(torch.from_numpy(ids))[0]
            )
        else:
            ours = engine(torch.from_numpy(ids), output_hidden_states=True).hidden_states[-1]
            np.testing.assert_allclose(ours, theirs(torch.from_numpy(ids))[0])
    for options, way in (
        ({"kernel_inject": True}, "Without replace_with_kernel_inject"),
        ({"backend": "jax"}, "With backend='torch'"),
    ):
        with pytest.raises(UnservedError, match=rf"{message}.*{way} transformers' own \w+ runs"):
            dualinfer.init_inference(path, **options)


def test_fields_of_older_configs_are_read(folder, hf_model, engine_of):
    """rope_theta and rope_scaling at the top, torch_dtype: as transformers 4 wrote them."""
    path = folder("llama-yarn")
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    change_config(
        path,
        rope_parameters=None,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        torch_dtype="float32",
        dtype=None,
    )
    engine = dualinfer.init_inference(path)
    ids = random_ids(1, 9)
    np.testing.assert_array_equal(engine(ids).logits, engine_of("llama-yarn", "torch")(ids).logits)


def test_unknown_family_names_the_supported_ones(folder, backend, tmp_path):
    sizes = {"vocab_size": 50, "d_model": 16, "d_inner": 16}
    model = hf.XLNetLMHeadModel(hf.XLNetConfig(**sizes, n_layer=1, n_head=2))
    model.save_pretrained(tmp_path / "xlnet")
    for source in (model, tmp_path / "xlnet"):
        with pytest.raises(ModelError, match=r"'xlnet'.*bert, .*bloom, .*gpt2, .*llama, .*qwen3"):
            dualinfer.init_inference(source, backend=backend, kernel_inject=True)
    path = folder()
    for model_type in ("", 5, None, ["llama"], "llama\n"):
        change_config(path, model_type=model_type)
        with pytest.raises(ModelError, match="model_type"):
            dualinfer.init_inference(path, backend=backend)


def test_unsupported_class_of_a_supported_family_is_named(folder, backend):
    model = hf.BertForNextSentencePrediction(CASES["bert"].make_config())
    with pytest.raises(ModelError, match=r"BertForNextSentencePrediction.*BertForMaskedLM"):
        dualinfer.init_inference(model, backend=backend, kernel_inject=True)
    path = folder()
    change_config(path, architectures=["LlamaForMultipleChoice"])
    with pytest.raises(ModelError, match=r"ForMultipleChoice.*Nor does module mode.*has no model"):
        dualinfer.init_inference(path, backend=backend, kernel_inject=True)


def test_subclass_of_a_served_class_is_served(hf_model):
    class Mine(hf.LlamaForCausalLM):
        pass

    mine = Mine(CASES[CAUSAL].make_config()).eval()
    mine.load_state_dict(hf_model(CAUSAL).state_dict())
    engine = dualinfer.init_inference(mine, kernel_inject=True)
    assert engine.report().architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("model", [None, 5, object(), torch.nn.Linear(2, 2), {}, b"path"])
def test_what_is_no_model_is_refused(model, backend):
    with pytest.raises(ModelError, match=type(model).__name__):
        dualinfer.init_inference(model, backend=backend, kernel_inject=True)


@pytest.mark.parametrize("whole", [True, False])
def test_module_on_the_meta_device_is_refused(whole, backend):
    if whole:
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(CASES[CAUSAL].make_config())
    else:
        model = make_model(CAUSAL)
        model.model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises(CheckpointError, match="meta device"):
        dualinfer.init_inference(model, backend=backend, kernel_inject=True)


# --- checkpoints ---------------------------------------------------------------------------------


def test_missing_folder_and_files_are_named(tmp_path, folder):
    for path in ("no/such/folder", str(tmp_path / "nothing"), "meta-llama/Llama-3-8B"):
        with pytest.raises(FileNotFoundError, match=re.escape(path)):
            dualinfer.init_inference(path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        dualinfer.init_inference(tmp_path)
    path = folder()
    with pytest.raises(FileNotFoundError, match="is a file"):
        dualinfer.init_inference(path / "config.json")
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors.*pytorch_model.bin"):
        dualinfer.init_inference(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', "\x00\xff"])
def test_broken_config_json_is_named(text, folder):
    path = folder()
    (path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        dualinfer.init_inference(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]"])
def test_broken_generation_config_is_named(text, folder):
    path = folder()
    (path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        dualinfer.init_inference(path)


WEIGHTS = {
    "missing": (
        lambda t: (t.pop("model.layers.0.self_attn.k_proj.weight"), t.pop("model.norm.weight")),
        r"missing 2: .*(k_proj\.weight.*model\.norm|model\.norm\.weight.*k_proj)",
    ),
    "left over": (
        lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}),
        r"left over 1: model\.layers\.7\.mlp\.up_proj\.weight",
    ),
    "left over bias": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.eye(1, 60)[0]}),
        r"left over 1: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "quantization scales": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.zeros(1)}),
        r"left over 1: .*weight_scale",
    ),
    "misshaped": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(5, 60)}),
        r"misshaped 1: model\.layers\.0\.mlp\.up_proj\.weight is \(5, 60\), expected \(100, 60\)",
    ),
    "transposed": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(100, 60)}),
        r"misshaped 1: .*down_proj\.weight is \(100, 60\), expected \(60, 100\)",
    ),
    "another vocabulary": (
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(1002, 60)}),
        r"misshaped 1: model\.embed_tokens\.weight is \(1002, 60\), expected \(1001, 60\)",
    ),
    "all at once": (
        lambda t: t.update({"x": torch.zeros(1), "model.norm.weight": torch.zeros(3)}),
        r"misshaped 1: model\.norm\.weight.*left over 1: x",
    ),
    "integers": (
        lambda t: t.update(
            {"model.layers.0.mlp.up_proj.weight": torch.ones(100, 60, dtype=torch.int8)}
        ),
        r"up_proj\.weight.*int8",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit_are_named(case, folder, backend):
    change, message = WEIGHTS[case]
    path = folder()
    change_weights(path, change)
    with pytest.raises(CheckpointError, match=message) as error:
        dualinfer.init_inference(path, backend=backend)
    assert str(path) in str(error.value)


def test_many_missing_weights_are_counted_and_not_all_listed(folder):
    path = folder()
    change_config(path, num_hidden_layers=9)
    with pytest.raises(CheckpointError, match=r"missing 72: .* and 64 more") as error:
        dualinfer.init_inference(path)
    assert len(str(error.value)) < 1500


def test_live_module_with_changed_layers_is_refused(backend):
    model = make_model(CAUSAL)
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(60, 7, bias=False)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is \(7, 60\)"):
        dualinfer.init_inference(model, backend=backend, kernel_inject=True)
    model = make_model(CAUSAL)
    model.model.layers[0].self_attn.q_proj.lora = torch.nn.Linear(60, 2)
    with pytest.raises(CheckpointError, match=r"left over 2: .*lora"):
        dualinfer.init_inference(model, backend=backend, kernel_inject=True)


@pytest.mark.parametrize("size", [0, 5, 100, 0.5, 0.999])
def test_truncated_safetensors_file_is_named(size, folder, backend):
    path = folder()
    file = path / "model.safetensors"
    content = file.read_bytes()
    size = size if isinstance(size, int) else int(len(content) * size)
    file.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors \({size} bytes\)"):
        dualinfer.init_inference(path, backend=backend)


def sharded(folder_path, model):
    model.save_pretrained(folder_path, max_shard_size="60KB")
    return folder_path / "model.safetensors.index.json"


def test_missing_and_truncated_shards_are_named(tmp_path, hf_model):
    index = sharded(tmp_path, hf_model(CAUSAL))
    name = sorted(set(json.loads(index.read_text())["weight_map"].values()))[1]
    shard = tmp_path / name
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=name):
        dualinfer.init_inference(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=name):
        dualinfer.init_inference(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/tmp/x.safetensors", "a/../../x.safetensors", "..\\x", "C:x"]
)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_index_that_points_outside_the_folder_is_refused(file, form, tmp_path, hf_model):
    index = sharded(tmp_path / "model", hf_model(CAUSAL))
    (tmp_path / "x.safetensors").write_bytes(b"never read")
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = file
    if form == "bin":
        index.unlink()
        index = index.parent / "pytorch_model.bin.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="outside the checkpoint's folder"):
        dualinfer.init_inference(tmp_path / "model")


@pytest.mark.parametrize("file", [5, None, [], {}, "", "x" * 5000, "\0", "."])
@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_index_entry_that_is_no_file_is_told(file, form, tmp_path):
    index = tmp_path / f"{form}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match=r"should name a file|is not there") as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 500


HOSTILE = {
    "nested": ("[" * 100_000 + "]" * 100_000, "more than 100 deep"),
    "nested a little": ("[" * 150 + "]" * 150, "more than 100 deep"),
    "number of many digits": ("1" * 6000, "is not JSON.*digits"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize(
    "file",
    [
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("pytorch_model.bin.index.json", INDEX),
    ],
)
def test_json_that_no_reader_could_take_is_refused(case, file, tmp_path, folder):
    text, message = HOSTILE[case]
    path = folder()
    if "index" in file:
        (path / "model.safetensors").unlink()
    (path / file).write_text(f'{{"a": {text}}}')
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)} .*{message}"):
        dualinfer.init_inference(path)


@pytest.mark.parametrize(
    "file",
    ["config.json", "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"],
)
def test_pointer_of_git_lfs_is_told(file, folder):
    path = folder()
    (path / "model.safetensors").unlink()
    oid = "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    (path / file).write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 12345\n")
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)} is a Git LFS pointer.*lfs pull"):
        dualinfer.init_inference(path)


@pytest.mark.parametrize("path", ["x" * 5000, "\0", "~no-such-user/x"])
def test_paths_that_no_system_takes_are_not_there(path, hf_model):
    with pytest.raises(FileNotFoundError, match="does not exist") as error:
        dualinfer.init_inference(path)
    assert isinstance(error.value, CheckpointError) and len(str(error.value)) < 500
    with pytest.raises(CheckpointError, match="does not exist"):
        dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True, checkpoint=path)


@pytest.mark.parametrize("prefix", ["net.", "learner.network."])
def test_prefix_of_all_names_is_told(prefix, folder, hf_model):
    def change(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    path = folder()
    change_weights(path, change)
    message = rf"missing \d+: .*names in the file begin with '{re.escape(prefix)}'"
    with pytest.raises(CheckpointError, match=message):
        dualinfer.init_inference(path)
    if prefix == "net.":
        with pytest.raises(CheckpointError, match=message):
            dualinfer.init_inference(hf_model(CAUSAL), checkpoint=path)
        own = torch.nn.Linear(2, 3)
        save_file({f"net.{n}": t for n, t in own.state_dict().items()}, path / "own.safetensors")
        with pytest.raises(CheckpointError, match=message):
            dualinfer.init_inference(own, checkpoint=path / "own.safetensors")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 5}'])
def test_broken_index_is_named(text, tmp_path, hf_model):
    index = sharded(tmp_path, hf_model(CAUSAL))
    index.write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        dualinfer.init_inference(tmp_path)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["pickle", "torch", "legacy"])
def test_bin_file_with_code_does_not_run_it(form, folder, tmp_path, backend):
    path = folder()
    (path / "model.safetensors").unlink()
    target, file = tmp_path / "exploded", path / "pytorch_model.bin"
    content = {"model.norm.weight": torch.zeros(60), "x": Bomb(target)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(Bomb(target)))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(CheckpointError, match=r"no file of torch|beside tensors"):
        dualinfer.init_inference(path, backend=backend)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"not a file of torch", [1, 2], torch.zeros(3), 5])
def test_bin_file_that_holds_no_state_dict_is_named(content, folder):
    path = folder()
    (path / "model.safetensors").unlink()
    file = path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        dualinfer.init_inference(path)


def test_truncated_bin_file_is_named(folder, hf_model):
    path = folder()
    (path / "model.safetensors").unlink()
    file = path / "pytorch_model.bin"
    torch.save(hf_model(CAUSAL).state_dict(), file)
    file.write_bytes(file.read_bytes()[:9999])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        dualinfer.init_inference(path)


# --- config --------------------------------------------------------------------------------------


def test_unknown_backend_is_refused(hf_model):
    for backend in ("tensorflow", "", "Torch", 5):
        with pytest.raises(ConfigError, match="backend"):
            dualinfer.init_inference(hf_model(CAUSAL), backend=backend, kernel_inject=True)


def test_conflict_of_config_and_arguments_is_refused(hf_model):
    for config, arguments, name in (
        ({"dtype": "fp16"}, {"dtype": "fp32"}, "dtype"),
        ({"backend": "jax"}, {"backend": "torch"}, "backend"),
        ({"max_tokens": 5}, {"max_out_tokens": 6}, "max_out_tokens"),
        ({"kernel_inject": True}, {"replace_with_kernel_inject": False}, "replace_with"),
    ):
        before = copy.deepcopy(config)
        with pytest.raises(ConfigError, match=name):
            dualinfer.init_inference(hf_model(CAUSAL), config, **arguments)
        assert config == before


def test_unknown_key_is_refused_with_the_nearest_known_one(hf_model):
    for key, near in (
        ("max_out_token", "max_out_tokens"),
        ("dtpye", "dtype"),
        ("replace_with_kernel_injection", "replace_with_kernel_inject"),
        ("return_tuples", "return_tuple"),
    ):
        for config, arguments in (({key: 1}, {}), (None, {key: 1})):
            with pytest.raises(ConfigError, match=f"'{key}'; did you mean '{near}'"):
                dualinfer.init_inference(hf_model(CAUSAL), config, **arguments)
    with pytest.raises(ConfigError, match=r"tensor_parallel\.tp_sizes.*did you mean 'tp_size'"):
        dualinfer.init_inference(hf_model(CAUSAL), tensor_parallel={"tp_sizes": 1})


# --- what is left alone --------------------------------------------------------------------------


def test_live_module_is_not_changed(backend):
    model = make_model(CAUSAL).train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    pointers = {k: v.data_ptr() for k, v in model.state_dict().items()}
    config = model.config.to_dict(), model.generation_config.to_dict()
    flags = [(m.training, type(m)) for m in model.modules()]
    for dtype in ("fp32", "bf16") if backend == "torch" else ("fp32",):
        engine = dualinfer.init_inference(model, backend=backend, dtype=dtype, kernel_inject=True)
        engine(random_ids(2, 5))
        engine.generate(random_ids(2, 5), max_new_tokens=3)
        engine.close()
    after = model.state_dict()
    assert after.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(after[name], value) and after[name].dtype == value.dtype
        assert after[name].data_ptr() == pointers[name]
    assert flags == [(m.training, type(m)) for m in model.modules()]
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == config


def test_module_in_training_mode_gives_the_answers_of_evaluation(backend):
    model = make_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    engine = dualinfer.init_inference(model, backend=backend, kernel_inject=True)
    ids = random_ids(1, 5)
    with torch.no_grad():
        reference = model.eval()(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(engine(ids).logits, reference, rtol=1e-4, atol=1e-4)


def test_weights_are_shared_on_torch_where_layouts_agree(hf_model):
    model = hf_model("llama-gqa")
    engine = dualinfer.init_inference(model, kernel_inject=True)
    own = {p.data_ptr() for p in engine.module.parameters()}
    shared = {n for n, p in model.named_parameters() if p.data_ptr() in own}
    assert "model.embed_tokens.weight" in shared and "lm_head.weight" in shared
    fused = re.compile(r"(q|k|v|gate|up)_proj")
    assert shared == {n for n, _ in model.named_parameters() if not fused.search(n)}
    other = dualinfer.init_inference(model, kernel_inject=True, dtype="bf16")
    assert not own & {p.data_ptr() for p in other.module.parameters()}


def test_gradients_are_neither_needed_nor_made(hf_model):
    engine = dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True)
    assert not engine(torch.tensor(random_ids(1, 3))).logits.requires_grad


def test_first_call_in_inference_mode_does_not_spoil_later_ones(hf_model):
    ids = random_ids(2, 5)
    with torch.inference_mode():
        engine = dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True)
        first = engine.generate(ids, max_new_tokens=4, repetition_penalty=1.2)
        logits = engine(ids).logits
    np.testing.assert_array_equal(
        engine.generate(ids, max_new_tokens=4, repetition_penalty=1.2), first
    )
    np.testing.assert_array_equal(engine(ids).logits, logits)
    with torch.no_grad(), torch.inference_mode():
        np.testing.assert_array_equal(
            engine.generate(ids, max_new_tokens=4, repetition_penalty=1.2), first
        )


def test_callers_torch_defaults_do_not_matter(hf_model):
    ids = random_ids(2, 5)
    engine = dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True)
    options = {"max_new_tokens": 6, "do_sample": True, "temperature": 4.0, "seed": 1, "top_p": 0.9}
    expected, logits = engine.generate(ids, **options), engine(ids).logits
    torch.set_default_dtype(torch.float64)
    try:
        other = dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True)
        for e in (engine, other):
            np.testing.assert_array_equal(e.generate(ids, **options), expected)
            np.testing.assert_array_equal(e(ids).logits, logits)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_callers_autocast_does_not_matter(dtype, hf_model):
    ids = torch.tensor(random_ids(2, 5))
    engine = dualinfer.init_inference(hf_model(CAUSAL), kernel_inject=True, dtype=dtype)
    logits, text = engine(ids).logits, engine.generate(ids, max_new_tokens=4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(engine(ids).logits, logits)
        assert torch.equal(engine.generate(ids, max_new_tokens=4), text)
        assert torch.is_autocast_enabled("cpu")


def test_engines_of_different_backends_and_configs_share_a_process(hf_model):
    ids = random_ids(2, 6)
    engines = [
        dualinfer.init_inference(hf_model(name), backend=backend, kernel_inject=True, **config)
        for name, backend, config in (
            (CAUSAL, "torch", {}),
            (CAUSAL, "jax", {"return_tuple": False}),
            (CAUSAL, "torch", {"dtype": "bf16", "max_out_tokens": 20}),
            ("gpt2", "torch", {}),
        )
    ]
    options = {"do_sample": True, "temperature": 4.0, "seed": 9, "max_new_tokens": 8}
    alone = [np.asarray(e.generate(ids, **options)) for e in engines]
    streams = [e.stream(ids, **options) for e in engines]
    steps = [[] for _ in engines]
    for _ in range(8):
        for step, stream, engine in zip(steps, streams, engines, strict=True):
            step.append(next(stream))
            engine(ids)
    for text, step in zip(alone, steps, strict=True):
        np.testing.assert_array_equal(np.array(step).T, text[:, 6:])
    np.testing.assert_array_equal(alone[0], alone[1])
    assert (alone[0] != alone[3]).any()
    engines[0].close()
    np.testing.assert_array_equal(engines[1].generate(ids, **options), alone[1])
    np.testing.assert_array_equal(engines[3].generate(ids, **options), alone[3])
