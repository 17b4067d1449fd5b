"""`engine.embed`: one vector of each text, of texts packed into rows without padding."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import numpy as np

from ..arrays import kind_of, on_its_way, to_jax, to_kind
from ..errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsupportedError,
    a_type,
    shown,
)
from ..model.embedding import (
    Dense,
    TextEmbedding,
    check_pooling,
    normalized,
    pooling_weights,
)
from ..model.spec import ModelSpec
from .arguments import is_on, is_same
from .base import InferenceEngine
from .checks import by_name, check_ids, check_length, check_mask, is_zero, refuse_prefix
from .packing import Pass, make_inputs, make_passes
from .tokenizing import ids_of, ids_of_each, tokenizer_of

_TOKENS, _TOKENS_ON_HOST = 16384, 2048  # of one pass
_CUT = "Cut it, or pass max_length with texts."
_AHEAD = 2  # passes that are enqueued before the result of the first is waited for


class EmbeddingCalls(InferenceEngine):
    """The calls of a fused engine over the last hidden state of whole texts."""

    _spec: ModelSpec
    _text_embedding: TextEmbedding | None = None

    @property
    def text_embedding(self) -> TextEmbedding:
        """The way texts become vectors by the model's folder; mean pooling if it says nothing.

        It is read when it is first asked for; what the hub's cache lacks is fetched then. Raises
        CheckpointError and UnsupportedError.
        """
        how = self._text_embedding
        if how is None:
            load = self._about.load_embedding
            how = TextEmbedding() if load is None else load()
            self._text_embedding = how
        return how

    def _check_model(self, alone: bool) -> None:
        raise NotImplementedError

    def embed(
        self,
        inputs: Any,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        tokenizer: Any = None,
        **unsupported: Any,
    ) -> np.ndarray:
        """Vectors float32 [N, E] of N texts, as sentence-transformers makes them; [E] of one str.

        Examples:
            >>> vectors = engine.embed(["a cat", "a dog", "a car"], normalize=True)  # [3, E]
            >>> vectors @ vectors.T  # how alike each pair is

        `inputs` are a str, texts (a list, tuple, array or column), lists of token ids of any
        lengths, ids [N, T], or what a HF tokenizer gives, with its mask. `pooling` ("cls", "mean",
        "max", "mean_sqrt_len_tokens", "weightedmean" or "lasttoken") and `normalize` are the model
        folder's own if None: those of modules.json, else mean pooling and no normalizing. With a
        `pooling` of the caller's the folder's Dense layers still follow. Of each vector the first
        `truncate_dim` numbers stay, by default as many as the folder says; those of
        `normalize=True` have length 1 after that. `prompt`, or the one that the model calls
        `prompt_name`, goes before each text. Texts are cut to `max_length` tokens, by default what
        the folder or the model's positions allow; ids are not cut. Texts are packed into rows,
        several passes of at most `batch_size` texts each, by default as many as fill the device.
        Vectors do not depend on what they are packed with. Raises ArgumentError and LengthError
        before anything runs, UnsupportedError for a model of an encoder and a decoder, and
        CheckpointNotFoundError where the files that say how the model embeds are not to be had and
        no `pooling` was passed.
        """
        if unsupported:
            raise ArgumentError(
                f"embed does not support {', '.join(sorted(unsupported))}. Supported: pooling, "
                "normalize, truncate_dim, prompt, prompt_name, batch_size, max_length, tokenizer."
            )
        if self._spec.towers:
            raise UnsupportedError(
                f"embed: {self._spec.architecture} has vectors of its own making. Call "
                "engine.get_text_features() or get_image_features(): their pooler_output."
            )
        if self._spec.encoder is not None:
            raise UnsupportedError(
                f"embed: {self._spec.architecture} has an encoder and a decoder, and embed reads "
                "models of one stack. Take encoder_last_hidden_state of engine.forward() and pool "
                "it."
            )
        inputs = _listed(inputs)
        names = {"inputs": inputs} if not isinstance(inputs, Mapping) else dict(inputs)
        with self._call("embed()", names) as call:
            self._check_model(alone=False)
            if self._spec.patches is not None:
                raise UnsupportedError(
                    f"{self._spec.architecture} reads images, and embed() texts. Call the engine "
                    "with pixel_values: its pooler_output or image_embeds are an image's vector."
                )
            how, layers = self._how(pooling, normalize)
            most = self._most_numbers(truncate_dim, how, layers)
            if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
                raise ArgumentError(f"batch_size={shown(batch_size)}; expected a positive int.")
            given = call.inputs if isinstance(inputs, Mapping) else call.inputs["inputs"]
            of_text = _is_text(given)
            if of_text:
                before = how.prompt(prompt, prompt_name)
                tokenizer = tokenizer_of(self.tokenizer if tokenizer is None else tokenizer)
                limit = self._most_tokens(max_length, tokenizer)
                skip = 0 if how.include_prompt else _length_of_prompt(tokenizer, before)
                single = isinstance(given, str)
                all_texts = [given] if single else list(given)
                ids = _encode(tokenizer, all_texts, before, limit, how.lower)
                for i, row in enumerate(ids):
                    if not len(row):
                        raise ArgumentError(
                            f"Text {i} is empty: the tokenizer makes no token of it. Leave it out."
                        )
                    check_length(self._spec, len(row), f"Text {i} has {len(row)} tokens", _CUT)
            else:
                if not (prompt is prompt_name is max_length is None):
                    raise ArgumentError(
                        "prompt, prompt_name and max_length are for texts, but token ids were "
                        "passed. Pass texts, or ids that have the prompt in front."
                    )
                single, skip, ids = False, 0, self._check_rows(given)
            weights = pooling_weights(how.pooling, list(map(len, ids)), skip)
            call.meet(lambda: (ids, weights, batch_size))
            parts = self._passes(ids, weights, batch_size, how.pooling == "max")
            vectors = _gathered(parts, len(ids))
            self._check_model(alone=True)
        if not len(ids):
            return np.zeros((0, most), np.float32)
        for layer in layers:
            vectors = normalized(vectors) if layer is None else layer(vectors)
        if most < vectors.shape[1]:
            vectors = vectors[:, :most]
            vectors = normalized(vectors) if normalize else vectors.copy()
        return vectors[0] if single else vectors

    def encode(
        self,
        inputs: Any,
        *,
        normalize_embeddings: bool = False,
        convert_to_tensor: bool = False,
        convert_to_numpy: bool = True,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        device: Any = None,
        **options: Any,
    ) -> Any:
        """`embed` by sentence-transformers' own name and arguments, for code that was written so.

        `prompt_name`, `prompt`, `batch_size` and `truncate_dim` are as in `embed`, and so are its
        other arguments. `normalize_embeddings=False` leaves what the model's folder says, as there.
        With `convert_to_tensor` the result is an array of the backend, on the engine's device.
        Raises ArgumentError for what `embed` does not do: another `output_value` or `precision`, a
        progress bar, another device.
        """
        kept = "sentence_embedding", "float32"
        asked = {
            "output_value": (output_value, is_same(output_value, kept[0])),
            "precision": (precision, precision is None or is_same(precision, kept[1])),
            "show_progress_bar": (show_progress_bar, not is_on(show_progress_bar)),
            "device": (device, device is None),
            "convert_to_numpy": (
                convert_to_numpy,
                is_on(convert_to_numpy) or is_on(convert_to_tensor),
            ),
        }
        for name, (value, is_served) in asked.items():
            if not is_served:
                raise ArgumentError(
                    f"encode: {name}={shown(value)} is not served. Vectors are of whole texts, in "
                    "float32, on the engine's device, as one array: NumPy's, or with "
                    "convert_to_tensor=True the backend's. Leave it out."
                )
        normalize = True if is_on(normalize_embeddings) else None
        vectors = self.embed(inputs, normalize=normalize, **options)
        if not is_on(convert_to_tensor):
            return vectors
        if self.inference_config.backend == "jax":
            return to_jax(vectors, self.device)
        return to_kind(vectors, "torch").to(self.device)

    def encode_query(self, inputs: Any, **arguments: Any) -> Any:
        """`encode` with the model's prompt "query", unless the caller passes or names one."""
        return self.encode(inputs, **self._prompted(inputs, "query", arguments))

    def encode_document(self, inputs: Any, **arguments: Any) -> Any:
        """`encode` with the model's prompt "document", likewise."""
        return self.encode(inputs, **self._prompted(inputs, "document", arguments))

    def _prompted(self, inputs: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`arguments` of a call, with the prompt of that name if the model has it."""
        given = arguments.get("prompt"), arguments.get("prompt_name")
        if given != (None, None) or not _is_text(_listed(inputs)):
            return arguments
        is_known = name in self.text_embedding.prompts
        return arguments | {"prompt_name": name} if is_known else arguments

    def _most_numbers(self, asked: Any, how: TextEmbedding, layers: Sequence[Dense | None]) -> int:
        """The number of a vector's elements that stay."""
        width = self._width(layers)
        if asked is None:
            return min(how.truncate_dim or width, width)
        if type(asked) is not int or not 1 <= asked <= width:
            raise ArgumentError(
                f"truncate_dim={shown(asked)}; expected an int from 1 to {width}, the numbers of a "
                "vector."
            )
        return asked

    def _how(
        self, pooling: str | None, normalize: bool | None
    ) -> tuple[TextEmbedding, Sequence[Dense | None]]:
        """The folder's way with what the caller wants of it, and the layers behind the pooling."""
        how = self.text_embedding
        if pooling is None and how.unknown:
            raise CheckpointNotFoundError(how.unknown)
        if pooling is not None:
            how = replace(how, pooling=check_pooling(pooling))
        layers = list(how.layers)
        if normalize is not None:
            if not isinstance(normalize, bool):
                raise ArgumentError(f"normalize={shown(normalize)}; expected True or False.")
            layers = [layer for layer in layers if layer is not None] + [None] * normalize
        width = self._width(())
        for layer in layers:
            if layer is not None and layer.weight.shape[1] != width:
                raise CheckpointError(
                    f"A Dense module of the model's folder reads {layer.weight.shape[1]} numbers, "
                    f"but gets {width}. Pass the folder that it was saved with."
                )
            width = width if layer is None else layer.weight.shape[0]
        return how, layers

    def _width(self, layers: Sequence[Dense | None]) -> int:
        dense = [layer.weight.shape[0] for layer in layers if layer is not None]
        spec = self._spec
        own = (spec.projects and spec.embedding.width) or spec.embed
        return dense[-1] if dense else own

    def _most_tokens(self, asked: int | None, tokenizer: Any) -> int:
        """Tokens to which a text is cut."""
        limit = self._spec.tokens or self._spec.max_positions
        if asked is None:
            if self._spec.most:  # longer ones are refused
                limit = self._spec.max_positions
            own = getattr(tokenizer, "model_max_length", None)  # 1e30 where nobody says
            return min(self.text_embedding.max_length or own or limit, limit)
        if type(asked) is not int or asked < 1:
            raise ArgumentError(f"max_length={shown(asked)}; expected a positive int.")
        check_length(self._spec, asked, f"max_length={asked}", f"Pass at most {limit}.")
        return asked

    def _check_rows(self, given: Any) -> list[np.ndarray]:
        """int32 ids of each text, without padding."""
        named, spec = by_name(given), self._spec
        if isinstance(given, Mapping) and named is None:
            raise ArgumentError(
                f"embed() was given {', '.join(map(str, given))}; a mapping needs input_ids."
            )
        mask = None
        if named is not None:
            given, mask = named.pop("input_ids"), named.pop("attention_mask")
            if named.pop("token_type_ids") is not None and spec.embedding.types == "prefix":
                refuse_prefix(spec)
            if more := [name for name, value in named.items() if not is_zero(value)]:
                raise ArgumentError(f"embed() reads ids alone. Leave {more[0]} out.")
        if kind_of(given) is None:
            raise ArgumentError(f"inputs is {a_type(given)}; expected a str, texts or token ids.")
        if mask is not None and _is_uneven(given) and _is_uneven(mask):
            rows = _seen_rows(list(given), mask, spec.vocab)
        elif kind_of(given) == "list" and mask is None:
            _check_depth(list(given[:1]))
            if given and not isinstance(given[0], list | tuple) and kind_of(given[0]) is None:
                given = [given]
            rows = _flat_rows(given, spec.vocab)
            if rows is None:
                rows = [check_ids(x, f"inputs[{i}]", spec.vocab)[0] for i, x in enumerate(given)]
        else:
            padded = check_ids(given, "input_ids", spec.vocab)
            visible = check_mask(mask, (padded.shape[0], padded.shape[1]))
            rows = (
                list(padded)
                if visible is None
                else [row[keep] for row, keep in zip(padded, visible, strict=True)]
            )
        for i, row in enumerate(rows):
            if not len(row):
                raise ArgumentError(f"Text {i} is empty: every token of it is masked.")
            way = _CUT if spec.most else "Cut it, or pass texts, which are cut for you."
            check_length(spec, len(row), f"Text {i} has {len(row)} tokens", way)
        return rows

    def _passes(
        self,
        ids: Sequence[np.ndarray],
        weights: Sequence[np.ndarray],
        batch_size: int | None,
        largest: bool,
    ) -> Iterator[tuple[Pass, np.ndarray]]:
        """Each pass with its vectors [R, M, E], some passes enqueued ahead."""
        device = self.device
        kind = getattr(device, "platform", getattr(device, "type", "cpu"))
        tokens = _TOKENS_ON_HOST if kind == "cpu" else _TOKENS
        lengths, spec = [len(row) for row in ids], self._spec
        waiting: deque[tuple[Pass, Callable[[], np.ndarray]]] = deque()
        for one in make_passes(lengths, tokens, batch_size, spec.can_pack):
            inputs = make_inputs(spec, ids, weights, one, largest, kind != "cpu")
            result = self._profiler.run(self.runner.forward, inputs)["embeddings"]
            waiting.append((one, on_its_way(result)))
            if len(waiting) > _AHEAD:
                first, vectors = waiting.popleft()
                yield first, vectors()
        for first, vectors in waiting:
            yield first, vectors()


def _gathered(parts: Iterator[tuple[Pass, np.ndarray]], count: int) -> np.ndarray:
    """float32 [N, E]: each text's vector in the texts' own order."""
    vectors = np.zeros((0, 0), np.float32)
    for one, part in parts:
        if not vectors.size:
            vectors = np.empty((count, part.shape[-1]), np.float32)
        for r, row in enumerate(one.rows):
            vectors[row] = part[r, : len(row)]
    return vectors


def _check_depth(given: list[Any]) -> None:
    """Raise ArgumentError where texts lie deeper than in one list, or are none."""
    for one in given:
        inner = next(iter(one), None) if isinstance(one, list | tuple) else None
        if one is None or isinstance(inner, str):
            what = "None" if one is None else "a list of texts"
            raise ArgumentError(
                f"inputs[0] is {what}; expected a text or token ids. Pass texts in one list; a "
                "pair of texts has a score of a classifier, not a vector."
            )


def _flat_rows(given: Any, vocab: int) -> list[np.ndarray] | None:
    """int32 ids of lists of ints, read at once as that is quicker; None if they are not that."""
    if not all(type(row) is list and row for row in given):
        return None
    flat = list(chain.from_iterable(given))
    if set(map(type, flat)) != {int}:
        return None
    try:
        ids = np.frombuffer(array("q", flat), np.int64)  # three times as quick as NumPy's own
    except OverflowError:
        return None
    if ids.min() < 0 or ids.max() >= vocab:
        return None
    ids, ends = ids.astype(np.int32), list(accumulate(map(len, given)))
    return [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _listed(given: Any) -> Any:
    """Texts as a list, where they came as an array or a column of a table; else `given`."""
    if isinstance(given, np.ndarray) and given.dtype.kind in "UO":
        return given.tolist()
    is_column = kind_of(given) is None and not isinstance(given, str | bytes | Mapping)
    if is_column and hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return list(given)
    return given


def _is_uneven(rows: Any) -> bool:
    """True for lists of several lengths, as a tokenizer gives them without padding."""
    is_nested = isinstance(rows, list | tuple) and all(isinstance(x, list | tuple) for x in rows)
    return is_nested and len({len(row) for row in rows}) > 1


def _seen_rows(rows: Any, masks: Any, vocab: int) -> list[np.ndarray]:
    """int32 ids of each row that its own mask lets through."""
    if len(masks) != len(rows):
        raise ArgumentError(f"attention_mask has {len(masks)} rows; expected {len(rows)}.")
    ids = [check_ids(row, f"input_ids[{i}]", vocab)[0] for i, row in enumerate(rows)]
    seen = [check_mask([mask], (1, len(row))) for mask, row in zip(masks, ids, strict=True)]
    return [row if keep is None else row[keep[0]] for row, keep in zip(ids, seen, strict=True)]


def _is_text(given: Any) -> bool:
    """True for a str, and for a sequence of some."""
    if isinstance(given, str):
        return True
    return isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], str)


def _encode(
    tokenizer: Any, texts: Sequence[Any], prompt: str, most: int, lower: bool
) -> list[np.ndarray]:
    """int32 ids of texts behind their prompt, cut to `most` with what stands around them."""
    for text in texts:
        if not isinstance(text, str):
            raise ArgumentError(f"A text is {a_type(text)}; expected a str.")
    whole = ((prompt + text).lower() if lower else prompt + text for text in texts)
    return [np.asarray(ids, np.int32) for ids in ids_of_each(tokenizer, whole, most, "text")]


def _length_of_prompt(tokenizer: Any, prompt: str) -> int:
    """Tokens that a prompt takes in front, without what stands at its end alone."""
    if not prompt:
        return 0
    *ids, last = ids_of(tokenizer, prompt) or [None]
    return len(ids) + (last not in (None, *getattr(tokenizer, "all_special_ids", ())))
