"""The one list of what users see when something fails: cause and way on, by the error's class.

docs/troubleshooting.md on the site is made of it, and `DualinferError.help` leads there.
`seen` is how the message reads, with `...` for what differs; a test finds each in the code.
"""

from typing import NamedTuple

from . import errors as e


class Symptom(NamedTuple):
    """One thing that users see."""

    error: type[e.DualinferError]
    seen: str
    cause: str
    way: str


def anchor(error: type[e.DualinferError]) -> str:
    """The name of an error's place on the page."""
    return error.__name__.lower()


SYMPTOMS = (
    Symptom(
        e.ConfigError,
        "unknown key ...; did you mean ...",
        "A keyword argument of `init_inference`, or a key of its config, is no field. No unknown "
        "field is passed over, since it would change nothing.",
        "Take the name that the message offers, or look the field up by what you want to do. The "
        "device is chosen by the environment, not by a field.",
    ),
    Symptom(
        e.ConfigError,
        "... differ; give one of them",
        "The same field was given twice, in `config` and as a keyword argument or by an older "
        "name, with two meanings.",
        "Leave one of them out. Nested dicts are merged key by key.",
    ),
    Symptom(
        e.ConfigError,
        "tensor_parallel.tp_size=... needs ... processes, and this one was started alone",
        "On torch each device has a process of its own, and fewer or more of them run than "
        "`tp_size` says.",
        "Start the script by `dualinfer launch --tp N script.py` or torchrun, with N as `tp_size`.",
    ),
    Symptom(
        e.ConfigNotFoundError,
        "there is no such file",
        "`config` is the path of a JSON file that is not there. It is read from the folder in "
        "which Python was started.",
        "Pass a whole path, or a dict.",
    ),
    Symptom(
        e.BackendNotAvailableError,
        "backend=... needs ..., which is not installed",
        "The framework of this backend is not installed in the Python that runs.",
        'Install `"dualinfer[torch]"` or `"dualinfer[jax]"`, or choose the other backend. '
        "`dualinfer env` lists what is there.",
    ),
    Symptom(
        e.ModelError,
        "expected the folder of a HF checkpoint",
        "The first argument is none of what makes an engine: a folder, a hub id, a module.",
        "Pass the path as a str or Path, or the model itself, not its config or state_dict.",
    ),
    Symptom(
        e.UnservedError,
        "config.json has ..., which the ... family does not honour",
        "dualinfer's own decoder does not know the model, or a field of its config that changes "
        "the result. A wrong text would be worse than none.",
        "On torch leave `replace_with_kernel_inject` unset: transformers' own model runs then, in "
        "module mode. Or add the family: the page *Add a family* shows how.",
    ),
    Symptom(
        e.CheckpointNotFoundError,
        "... is no folder here, and the local cache ... does not hold it whole",
        "The model's name is neither a folder, seen from the one in which Python was started, nor "
        "a model of the hub that could be fetched.",
        "Check the spelling. The message says whether the network failed or `HF_HUB_OFFLINE=1` "
        "forbade to fetch, and the `hf download` that fetches it.",
    ),
    Symptom(
        e.CheckpointNotFoundError,
        "... was not fetched",
        "A folder or a file of it is missing, or the hub could not be reached.",
        "Check the spelling and the network; `HF_HUB_OFFLINE=1` forbids to fetch. Gated models "
        "need `hf auth login`.",
    ),
    Symptom(
        e.CheckpointError,
        "... cannot be read: ... Is it damaged?",
        "A file was cut short or changed, as by a download that was interrupted.",
        "Fetch it again. Pickled files that hold more than tensors are refused on purpose.",
    ),
    Symptom(
        e.ArgumentError,
        "... is ..., outside the vocabulary of ...",
        "An id is larger than the model's table of embeddings, as where another model's tokenizer "
        "made it.",
        "Take the tokenizer of the model's own folder: `engine.tokenizer`, or give the text to "
        "`engine.generate_text`.",
    ),
    Symptom(
        e.ArgumentError,
        "The tokenizer has no chat template",
        "The model is a base model, which continues texts and has not been trained to answer.",
        "Use `generate_text`, or take the variant of the model that was trained for chats "
        "(its name often ends in Instruct).",
    ),
    Symptom(
        e.ArgumentError,
        "... does not support ...",
        "An argument of forward, generate or a call of text has a wrong shape, dtype or value, or "
        "a name that is not served.",
        "The message names what is expected. `help(engine.generate)` lists all arguments.",
    ),
    Symptom(
        e.UnsupportedError,
        "This engine knows no tokenizer",
        "The model was made in memory, so that nobody knows where its tokenizer lies.",
        "Set `engine.tokenizer` once, or pass `tokenizer=` to the call.",
    ),
    Symptom(
        e.UnsupportedError,
        "... and stays so; asked was ...",
        "An engine is made for one device and one dtype; `.to()` and `.half()` would change them.",
        "Make another engine with the dtype; choose the device before the process starts.",
    ),
    Symptom(
        e.LengthError,
        "A prompt of ... and ... new ones ..., over ...",
        "Prompt and new tokens together are more than the model's positions or `max_out_tokens`.",
        "Shorten the prompt, ask for fewer new tokens, or raise `max_out_tokens` if it is set.",
    ),
    Symptom(
        e.OutOfMemoryError,
        "... bytes ..., and ... are free",
        "Weights or cache need more memory than the device has free. It is told before anything "
        "is allocated.",
        '`quant="int4"` quarters the weights, `kv_cache_dtype="fp8"` halves the cache, '
        "`keep_module_on_host=True` streams layers, `tensor_parallel` shares them. Fewer sequences "
        "or tokens at a time take a smaller cache. `dualinfer plan MODEL` computes all of it.",
    ),
    Symptom(
        e.StaleWeightsError,
        "The model that this engine was made of has changed since",
        "The live model was trained, moved or loaded after the engine had read its weights.",
        "Call `engine.refresh()` after each change, or make the engine of a copy.",
    ),
    Symptom(
        e.ClosedError,
        "This engine was closed",
        "A call came after `close()` or behind a `with` block, or in a process that was forked.",
        "Make the engine in the process that uses it, and keep it open while it is used.",
    ),
    Symptom(
        e.DistributedError,
        "... differ: rank ... from rank 0",
        "Processes that share a model made different calls, or one of them failed.",
        "Make the same calls everywhere, with the same values, or None for rank 0's. What the "
        "other process said is in its own output.",
    ),
    Symptom(
        e.StepError,
        "A step failed, and with it its sequences",
        "Work on the device failed while several sequences shared it; the cause stands behind it.",
        "Read the cause. The engine goes on with new calls.",
    ),
    Symptom(
        e.DeadlineError,
        "The deadline of a request passed",
        "`deadline=` of `generate_async`, or a client's, passed before the text had ended.",
        'Give it more time, ask for fewer tokens, or let it in first by `priority="high"`.',
    ),
    Symptom(
        e.GraphError,
        "... cannot be captured into a CUDA graph",
        "A module's forward looks at the values of tensors, or copies from or to the host.",
        "Leave `enable_cuda_graph` unset, or set it to False.",
    ),
    Symptom(
        e.ProfilingError,
        "Model profiling is off",
        "`model_times()` was called before `profile_model_time()`.",
        "Call `engine.profile_model_time()` first, then run the model.",
    ),
)
