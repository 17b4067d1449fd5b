"""Options that several commands share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from ..system.command_options import KvCacheOption, QuantOption, StateOption

One = Literal["torch", "jax"]
Choice = Literal["torch", "jax", "both"]

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A checkpoint's folder, a GGUF file or a model of the hub."
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        min=2,
        help="Tokens of a prompt and its answer; unset: the model's, at most 8,192.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="float32, float16 or bfloat16; unset: as in generate."),
]
BackendOption = Annotated[
    One | None,
    typer.Option(
        metavar="torch|jax",
        show_default=False,
        help="What runs the model; unset: what is installed, torch first.",
    ),
]

KernelsOption = Annotated[
    bool | None,
    typer.Option(
        "--kernels/--no-kernels",
        show_default=False,
        help="Fused kernels, which need a GPU, or plain operations; unset: kernels where they run.",
    ),
]

RevisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="A branch, a tag or a commit of the hub's model; unset: main."
    ),
]

AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FOLDER",
        help="An adapter of peft (LoRA), or its name on the hub, to merge into the model; may be "
        "given several times.",
    ),
]


def factors_of(adapters: Sequence[str] | None) -> dict[str, float]:
    """The adapters of the command line as the config has them."""
    return dict.fromkeys(adapters or (), 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of commands that open a model for others; None leaves one to the model."""

    dtype: DtypeOption = None
    quant: QuantOption = None
    adapter: AdapterOption = None
    kv_cache_dtype: KvCacheOption = None
    state_dtype: StateOption = None
    kernels: KernelsOption = None
    revision: RevisionOption = None

    @property
    def config(self) -> dict[str, Any]:
        """The fields of the config that they are."""
        names = "dtype", "quant", "kv_cache_dtype", "state_dtype"
        given = {name: getattr(self, name) for name in names}
        return given | {"replace_with_kernel_inject": self.kernels}


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options of commands that make text; None leaves one to the model and the device."""

    temperature: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Sample; below 1 it prefers likely tokens more."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT", help="Sample among this many best tokens; unset: 50, as in HF."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Sample among the best tokens of this total probability."
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Sample from this seed: the same text every time."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Above 1, it avoids tokens that are there already."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End after this text; may be given several times."),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A chat template in place of the model's: a file (Jinja or JSON), or the name of "
            "one of its several.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, float16 or bfloat16; unset or auto: the checkpoint's own, but float16 "
            "for float32 on a GPU, and float32 on a CPU.",
        ),
    ] = None
    quant: QuantOption = None
    adapter: AdapterOption = None
    kv_cache_dtype: KvCacheOption = None
    state_dtype: StateOption = None
    kernels: KernelsOption = None
    revision: RevisionOption = None

    @property
    def samples(self) -> bool:
        """True if an option shapes sampling, and so asks for it."""
        shapes = (self.temperature, self.top_k, self.top_p, self.seed)
        return any(value is not None for value in shapes)

    @property
    def template_options(self) -> dict[str, Any]:
        """The settings of the chat template that the options ask for."""
        return {"chat_template": self.chat_template} if self.chat_template else {}

    def of_models(self) -> dict[str, Any]:
        """The options that say how a model is loaded, or its template, by their names."""
        names = ("chat_template", "dtype", "quant", "adapter", "kv_cache_dtype")
        names = (*names, "state_dtype", "kernels", "revision")
        given = {name: getattr(self, name) for name in names}
        return {f"--{name.replace('_', '-')}": value or None for name, value in given.items()}

    def arguments(self) -> dict[str, Any]:
        """The arguments of generate that the options ask for."""
        names = ("temperature", "top_k", "top_p", "seed", "repetition_penalty")
        asked = {name: getattr(self, name) for name in names} | {"stop_strings": self.stop or None}
        if self.samples:
            asked["do_sample"] = True
        return {name: value for name, value in asked.items() if value is not None}
