"""`dualinfer check`: a small random model of a family, by transformers and by both backends."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console

from .. import backends
from ..api import init_inference
from ..arrays import to_numpy
from ..checkpoint.described.hf_config import read_config, read_other_config, read_written
from ..errors import (
    ArgumentError,
    BackendNotAvailableError,
    DualinferError,
    ModelError,
    shown,
)
from ..model.families import default_class, served_types
from ..system.tables import Table
from .parity import difference, first_difference, states_of
from .tiny import VOCAB, has_towers, text_config, tiny_config

_ROWS, _TOKENS, _SHORT, _NEW = 2, 17, 9, 12
_TABLES = ("wte.weight", "shared.weight", "relative_attention_bias.weight")


def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FAMILY|FOLDER...",
            help="A family by transformers' model_type (llama), or a folder with a config.json.",
        ),
    ],
    tolerance: Annotated[
        float,
        typer.Option(metavar="NUMBER", min=0, help="The most relative RMS error, in float32."),
    ] = 1e-5,
) -> None:
    """Compare a small random model with transformers', layer by layer.

    Its sizes are odd and its weights random, so a folder needs no weights. Both backends run it in
    float32: whole sequences, a batch padded on the left, and greedy text. Encoders of pairs are
    padded on the right.
    """
    for name in backends.BACKENDS:
        try:
            backends.check_backend(name)
        except BackendNotAvailableError as error:
            raise BackendNotAvailableError(f"check compares both backends. {error}") from error
    console = Console()
    wrong = [target for target in targets if not _check(console, target, tolerance)]
    if wrong:
        console.print(f"[red]Not as transformers has it: {', '.join(wrong)}.[/]")
        raise typer.Exit(1)


def _check(console: Console, target: str, tolerance: float) -> bool:
    """Print how far one family lies from transformers; True if it does not."""
    try:
        model = _make_model(target)
        given = _Given.of(model.config)
        wanted = _of_transformers(model, given)
    except DualinferError:
        raise
    except Exception as error:  # of code that is not ours
        raise ModelError(
            f"transformers' own model of {target} does not run with a small config: {error}"
        ) from error
    columns: dict[str, dict[str, float | str]] = {}
    for backend in backends.BACKENDS:
        try:
            found = _of_backend(model, backend, given, "text" in wanted)
        except DualinferError as error:
            console.print(f"{target} on {backend}: {error}", markup=False, highlight=False)
            columns[backend] = {}
            continue
        columns[backend] = _differences(model, given, found, wanted)
    table = Table("", *backends.BACKENDS, box=SIMPLE, pad_edge=False)
    table.title = f"{target} ({type(model).__name__}): relative RMS beside transformers"
    names = [*wanted["states"], *(name for name in ("logits", "padded", "text") if name in wanted)]
    passed = True
    for name in names:
        cells = [columns[backend].get(name, "-") for backend in backends.BACKENDS]
        passed &= all(_is_right(cell, tolerance) for cell in cells)
        table.add_row(name, *(cell if isinstance(cell, str) else f"{cell:.1e}" for cell in cells))
    console.print(table)
    return passed


class _Given(NamedTuple):
    """The inputs of models: whole sequences, the same padded, and of these the prompts of text.

    `real` are the logits of a padded batch that mean something.
    """

    whole: dict[str, np.ndarray]
    padded: dict[str, np.ndarray]
    prompts: dict[str, np.ndarray]
    real: slice

    @classmethod
    def of(cls, config: Any) -> "_Given":
        """For a model of this config."""
        random = np.random.default_rng(0)
        ids = random.integers(3, VOCAB, (_ROWS, _TOKENS))
        mask = np.ones_like(ids)
        if has_towers(config):
            images = cls.of(config.vision_config).whole
            # CLIP reads a text's vector at the largest id, if the end of a text is 2.
            ids = np.minimum(ids, VOCAB - 2)
            ids[:, -1] = VOCAB - 1
            mask[-1, :-_SHORT] = 0
            whole = {"input_ids": ids, **images}
            return cls(whole, {**whole, "attention_mask": mask}, whole, slice(None))
        if hasattr(config, "num_patches"):  # whose images are given as patches
            shape = _ROWS, _TOKENS, config.num_channels * config.patch_size**2
            mask[:, -1] = mask[0, 6:] = 0
            images: dict[str, np.ndarray] = {
                "pixel_values": random.standard_normal(shape).astype(np.float32),
                "spatial_shapes": np.array([[2, 3], [4, 4]])[:_ROWS],
                "pixel_attention_mask": mask,
            }
            return cls(images, images, images, slice(None))
        if getattr(config, "patch_size", None) is not None and not hasattr(config, "vocab_size"):
            shape = _ROWS, config.num_channels, config.image_size, config.image_size
            images = {"pixel_values": random.standard_normal(shape).astype(np.float32)}
            return cls(images, images, images, slice(None))
        if not getattr(config, "is_encoder_decoder", False):
            mask[-1, :-_SHORT] = 0
            padded = {"input_ids": ids, "attention_mask": mask}
            return cls({"input_ids": ids}, padded, padded, slice(-_SHORT, None))
        begins = {"decoder_input_ids": random.integers(3, VOCAB, (_ROWS, _SHORT))}
        mask[-1, _SHORT:] = 0
        source, padding = {"input_ids": ids}, {"attention_mask": mask}
        if config.model_type == "vision-encoder-decoder":
            source, padding = cls.of(config.encoder).whole, {}
        if config.model_type == "speech_to_text":
            shape = _ROWS, 4 * _TOKENS, config.input_feat_per_channel
            source = {"input_features": random.standard_normal(shape).astype(np.float32)}
            padding = {"attention_mask": mask.repeat(4, 1)}
        if config.model_type == "moonshine":  # samples of as many tokens
            shape = _ROWS, 384 * _TOKENS + 600
            source = {"input_values": random.standard_normal(shape).astype(np.float32)}
            mask = np.ones(shape, np.int64)
            mask[-1, 384 * _SHORT :] = 0
            padding = {"attention_mask": mask}
        if hasattr(config, "num_mel_bins"):
            shape = _ROWS, config.num_mel_bins, 2 * config.max_source_positions
            source = {"input_features": random.standard_normal(shape).astype(np.float32)}
            padding = {}
        padded = source | padding
        return cls(source | begins, padded | begins, padded, slice(None))


def _is_right(cell: float | str, tolerance: float) -> bool:
    return cell == "equal" if isinstance(cell, str) else cell <= tolerance


def _make_model(target: str) -> Any:
    """A small random HF model of a family or of a folder's config."""
    import torch
    import transformers

    if (Path(target) / "config.json").is_file():
        folder = Path(target)
        is_served = read_written(folder).get("model_type") in served_types()
        config = (read_config if is_served else read_other_config)(folder)
    elif target in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[target]()
    else:
        raise ArgumentError(
            f"{shown(target)} is no folder with a config.json, and transformers has no such "
            "model_type. Pass a family such as llama, or a checkpoint's folder."
        )
    config = text_config(config)
    named = config.architectures or []
    name = next((n for n in named if hasattr(transformers, n)), default_class(config.model_type))
    tiny = tiny_config(config)
    torch.manual_seed(0)
    known: Any = None if name is None else getattr(transformers, name)
    auto: Any = transformers.AutoModelForCausalLM
    make = auto.from_config if known is None else known._from_config
    model = make(tiny, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if not p.requires_grad and "embed_positions" in parameter_name:
                continue  # what is computed stays so
            if p.ndim > 1:
                is_table = "emb" in parameter_name or parameter_name.endswith(_TABLES)
                spread = 0.7 if is_table else 1.5 / max(p.shape) ** 0.5
                if parameter_name.endswith("Attention.q.weight"):  # T5's, which scale no scores
                    spread *= tiny.d_kv**-0.5
                p.normal_(0, spread)
            else:  # from where they begin, so that norms that add 1 stay norms
                p.add_(torch.empty_like(p).uniform_(-0.4, 0.4))
    model.tie_weights()
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if getattr(tiny, "is_encoder_decoder", False):
            model.generation_config.decoder_start_token_id = 2
            # Of beams and of what an encoder read the text is not compared.
            model.generation_config.num_beams = 1
            model.generation_config.encoder_no_repeat_ngram_size = 0
    return model


def _of_transformers(model: Any, given: _Given) -> dict[str, Any]:
    """The results of HF's model: hidden states by name, logits, those of the padded batch, text."""
    import torch

    options: dict[str, Any] = {"return_dict": True}
    if getattr(model.config, "is_encoder_decoder", False):
        options["use_cache"] = False  # with which HF's FSMT sees later tokens
    with torch.no_grad():
        whole = model(**_tensors(given.whole), output_hidden_states=True, **options)
        padded = model(**_tensors(given.padded), **options)
        wanted = _named(whole, padded)
        if model.can_generate():
            how: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NEW}
            ids = model.generate(**_tensors(given.prompts), **how)
            wanted["text"] = to_numpy(ids)
    return wanted


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _of_backend(model: Any, backend: str, given: _Given, speaks: bool) -> dict[str, Any]:
    how: dict[str, Any] = {"dtype": "float32", "replace_with_kernel_inject": True}
    with closing(init_inference(model, backend=backend, **how)) as engine:
        options: dict[str, Any] = {"return_dict": True, "return_tuple": True}
        whole = engine.forward(**given.whole, output_hidden_states=True, **options)
        padded = engine.forward(**given.padded, **options)
        found = _named(whole, padded)
        if speaks:
            new: dict[str, Any] = {"do_sample": False, "max_new_tokens": _NEW}
            found["text"] = to_numpy(engine.generate(**given.prompts, **new))
    return found


def _named(whole: Any, padded: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"states": states_of(whole)}
    for name in ("logits", "logits_per_text"):
        if getattr(whole, name, None) is not None:
            found |= {"logits": to_numpy(whole[name]), "padded": to_numpy(padded[name])}
    return found


def _differences(
    model: Any, given: _Given, found: dict[str, Any], wanted: dict[str, Any]
) -> dict[str, float | str]:
    """Relative RMS errors by name, and of the text whether it is the same, ties aside."""
    pairs = {name: (found["states"][name], own) for name, own in wanted["states"].items()}
    errors: dict[str, float | str]
    errors = {name: difference(name, *pair).relative_rms for name, pair in pairs.items()}
    if "logits" in wanted:
        errors["logits"] = difference("", found["logits"], wanted["logits"]).relative_rms
        real = [part["padded"][-1, given.real] for part in (found, wanted)]
        errors["padded"] = difference("", real[0], real[1]).relative_rms
    if "text" in wanted:
        errors["text"] = _text_of(model, given, found["text"], wanted["text"])
    return errors


def _text_of(model: Any, given: _Given, found: np.ndarray, wanted: np.ndarray) -> str:
    import torch

    pairs = getattr(model.config, "is_encoder_decoder", False)
    first = 1 if pairs else _TOKENS  # new column

    for row, (ours, theirs) in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
        at = first_difference(ours, theirs)
        if at is None:
            continue
        start = 0 if row < _ROWS - 1 or pairs else _TOKENS - _SHORT
        before = torch.tensor([theirs[start:at]])
        source = _tensors({name: array[row, None] for name, array in given.prompts.items()})
        inputs = source | {"decoder_input_ids": before} if pairs else {"input_ids": before}
        with torch.no_grad():
            scores = model(**inputs).logits[0, -1].double()
        gap = (scores[theirs[at]] - scores[ours[at]]).abs() / scores.square().mean().sqrt()
        if gap > 1e-4:
            return f"differs at {at - first}"
    return "equal"
