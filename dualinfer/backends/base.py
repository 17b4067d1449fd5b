"""The runner contract: what the neutral engine and loop know of a backend, and nothing more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ..errors import ArgumentError
from ..model.load_plan import LoadPlan, TensorSource
from ..model.spec import ModelSpec
from ..ops.contract import Tokens as Tokens
from ..ops.sampling import TOP as TOP
from .profiling import Profiler, Stopwatch

if TYPE_CHECKING:
    from .blocks import Blocks

NO_TOKEN = -1
NO_LABEL = -100  # HF's, where no loss is asked for
# Of a head for labels: cross-entropy, squared differences, or a yes or no for each label.
LossKind = Literal["classes", "regression", "several"]
MAX_STEPS = 32  # of one `decode` call
GRAIN = 64  # tokens, at whose multiples a cut changes no bit of a recurrence
NO_KERNELS = "no kernels run, plain operations serve: "  # a note that begins so says why


@dataclass(frozen=True)
class ForwardInputs:
    """Whole sequences for one forward pass without a cache, checked, and what is asked of it.

    The `tokens` are int32 and float32, in host memory, and have positions. `labels` int32 [B, K]
    ask for the loss of the logits that are kept, and [B, 2] for that of where answers start and
    end; float32 ones [B, labels] that of a `loss` of numbers; `loss_count` divides its sum, in the
    place of the number of labels. Of a model of two towers the tokens are texts, and their source
    images; images alone are `of_encoder`, and have the outputs of their own tower. Of `choices`
    sequences in a row each, a head's scores are put side by side. With `texts` the result is their
    embeddings alone: so many of each row, as `segments` number them, the sum of tokens times
    `weights`, or the `largest` value of each element. How the heads that are `watched`, pairs of a
    layer and its head, attend to a source is an output too.
    """

    tokens: Tokens
    output_hidden_states: bool = False
    labels: np.ndarray | None = None
    loss_count: float | None = None
    loss: LossKind = "classes"
    choices: int | None = None
    of_encoder: bool = False
    texts: int = 0
    largest: bool = False
    watched: tuple[tuple[int, int], ...] = ()

    def towers(self) -> tuple["ForwardInputs", "ForwardInputs"]:
        """The texts, and the images that are compared with them."""
        assert self.tokens.source is not None
        texts = replace(self, tokens=self.tokens._replace(source=None))
        return texts, replace(self, tokens=self.tokens.source, of_encoder=True)


@dataclass(frozen=True)
class Sampling:
    """The settings that choose one sequence's tokens; HF's names and meanings.

    `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off. Noise is drawn only with
    `do_sample`; its key is (seed, return_index, position), its counter the vocabulary id. The
    presence and frequency penalties and `bias`, pairs of an id and what its logit gets more, are
    those of OpenAI's API.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    return_index: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    @property
    def weighs(self) -> bool:
        """True if logits get more or less before all else."""
        return bool(self.presence_penalty or self.frequency_penalty or self.bias)


@dataclass(frozen=True)
class SamplingFeatures:
    """The parts of sampling that any live sequence needs; a compiled step holds only these."""

    noise: bool = False
    filters: bool = False
    penalty: bool = False
    hold_eos: bool = False
    weighs: bool = False
    tells: bool = False

    @classmethod
    def of(cls, requests: Sequence["Request"]) -> "SamplingFeatures":
        """The union of what `requests` need."""
        drawn = [r.sampling for r in requests if r.sampling.do_sample]
        return cls(
            noise=bool(drawn),
            filters=any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in drawn),
            penalty=any(r.sampling.repetition_penalty != 1 for r in requests),
            hold_eos=any(r.min_new_tokens > 0 and r.eos_ids for r in requests),
            weighs=any(r.sampling.weighs for r in requests),
            tells=any(r.tells for r in requests),
        )


class Progress(Protocol):
    """The state of one sequence in its grammar.

    It `accepts` the new tokens as a whole text, and `is_over` where none may follow.
    """

    accepts: bool
    is_over: bool

    def words(self) -> np.ndarray:
        """The tokens that may come next, as in `Runner.allow`: uint32 [V / 32]."""
        ...

    def take(self, token: int) -> None:
        """Go on by the token that was chosen."""
        ...


class Grammar(Protocol):
    """Says for each sequence which tokens may come next."""

    def begin(self) -> Progress:
        """The state of a new sequence."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to continue: `tokens` int32 [T] without padding, T at least 1.

    With `embeds` float32 [T, W] these are what the layers read, and T is theirs; `tokens` are what
    has been seen, all or none. `source` is what an encoder reads, if there is one: int32 [S], a
    spectrogram float32 [2 S, mel] or, if it `is_encoded`, what the encoder gave float32 [S, E], and
    `encoded` is S. All requests of a prefill have the same kind of source. The loop gives the token
    `first` before all others, and `last` as the last of `max_new_tokens`; where new tokens are
    `done`, which another engine has made, it goes on behind them. Tokens that are `hidden`
    are never chosen, and those `hidden_at_first` not as the first one. The last `generated` of the
    tokens were new ones before, and count for the penalties. One that `tells` wants to know the
    log-probabilities of its tokens. The slot that it gets has the first `kept` tokens of the prompt
    in its cache, fewer than all. With a `grammar`, which the loop follows, the next token is one of
    those `allowed`, as in `Runner.allow`.
    """

    tokens: np.ndarray
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    embeds: np.ndarray | None = None
    source: np.ndarray | None = None
    is_encoded: bool = False
    encoded: int = 0
    first: int | None = None
    last: int | None = None
    done: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    hidden_at_first: tuple[int, ...] = ()
    generated: int = 0
    tells: bool = False
    grammar: "Grammar | None" = None
    allowed: np.ndarray | None = None
    kept: int = 0

    @property
    def prompt(self) -> np.ndarray:
        """The input of the layers: tokens, or embeddings."""
        return self.tokens if self.embeds is None else self.embeds

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values are kept; the last new token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(frozen=True)
class Piece:
    """The tokens `start` to `stop` of a request's prompt, to be read into a slot.

    What lies before them is in the slot: pieces of one prompt come in their order, each in a call
    of its own. The last one `ends` the prompt, and a prompt that is one piece `is_whole`.
    """

    request: Request
    slot: int
    start: int
    stop: int

    @classmethod
    def whole(cls, request: Request, slot: int) -> "Piece":
        """One piece that has all of a request's prompt, but for what the slot has kept."""
        return cls(request, slot, request.kept, len(request.prompt))

    @property
    def is_first(self) -> bool:
        """True where none of the prompt was read into the slot for this request before."""
        return self.start == self.request.kept

    @property
    def ends(self) -> bool:
        """True where no more of the prompt is to come."""
        return self.stop == len(self.request.prompt)

    @property
    def is_whole(self) -> bool:
        """True where it is all of the prompt."""
        return self.start == 0 and self.ends


@dataclass(frozen=True)
class Pool:
    """The room that a runner reserves at once: `slots` sequences of `tokens` cached tokens each.

    Of an encoder-decoder also for what its encoder gives of `encoded` tokens each, 0 for as many as
    `tokens`; an encoder of one length needs none. `eos` ids of a request, and whether some of them
    hide tokens or weigh them, are in the state from the start: the first request that needs more of
    these makes a larger state, and its steps anew. The `spare` slots lie behind the others, in
    caches alone: no request gets one and no step passes over it, so that it keeps what is copied
    there, and the state has no row of it. Where slots are `saved`, to the host's memory, what does
    so is prepared with the rest. With `blocks` these many blocks of GRAIN tokens are all that there
    are, and slots get them as they need them; layers that see a window of a sequence have others,
    of its last tokens (`blocks.lying`).
    """

    slots: int
    tokens: int
    encoded: int = 0
    eos: int = 4
    hides: bool = False
    weighs: bool = False
    spare: int = 0
    saved: bool = False
    blocks: int = 0

    def __post_init__(self) -> None:
        """Raise ArgumentError for what is no room."""
        for name in ("slots", "tokens", "eos"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Pool({name}={getattr(self, name)}): expected 1 or more.")


@dataclass(eq=False)
class Saved:
    """The cached state of a slot's first `tokens`, in `nbytes` of the host's memory.

    Of a pool of blocks perhaps without the first `start`, whole grains. `copies` are the backend's
    own. It `is_stale` once weights or the pool are others.
    """

    tokens: int
    nbytes: int
    copies: Any
    is_stale: bool = False
    start: int = 0


class PendingTokens(Protocol):
    """Tokens that the device may still be computing."""

    def fetch(self) -> np.ndarray:
        """int32 [steps, columns], waiting if need be; NO_TOKEN where a sequence had ended."""
        ...

    def told(self) -> np.ndarray | None:
        """float32 [steps, columns, 1 + 2 K] as `sampling.tell`; None where no request tells.

        By the model's own logits, before all that changes them.
        """
        ...


class Runner(Protocol):
    """One model on one backend. NumPy integers in; arrays of the backend or token ids out.

    `spec` is the model's; on torch, where a rank has a share of it, its heads and its MLP's width
    are the rank's. Where several processes share the model, all of them make every call.
    """

    spec: ModelSpec
    device: Any
    dtype: Any
    is_compiled: bool
    kernels: str  # "Triton" where it serves the ops, else ""
    verifies: bool  # it has a `decode_several`
    lost: str | None  # why other processes that compute with it answer no more; None while they do

    @property
    def blocks(self) -> "Blocks | None":
        """The blocks of its pool, which calls change; None without such."""
        ...

    def forward(self, inputs: ForwardInputs) -> dict[str, Any]:
        """`logits` [B, T, V], or `last_hidden_state` [B, T, E] and `pooler_output` [B, E].

        Of a head for labels, `logits` [B, labels], [B, T, labels] or [B / choices, choices], or
        `start_logits` and `end_logits` [B, T]. Of texts, float32 `embeddings` [B, texts, E].

        `hidden_states`, when asked for, is a tuple of L+1 arrays [B, T, E] as in HF: the
        embedding, each layer's output, the last one after the final norm. With labels there is a
        `loss` as well, float32 []. An encoder-decoder has `encoder_last_hidden_state` [B, S, E],
        and its hidden states as `decoder_hidden_states` and `encoder_hidden_states`. A model of two
        towers has `logits_per_text` [N, M] of texts and images, `logits_per_image`, their vectors,
        and each tower's outputs, `text_model_output` and `vision_model_output`. Of A heads that are
        watched there are `cross_weights`, float32 [B, T, A, S].
        """
        ...

    def open(self, pool: Pool | None, prepare: bool = False) -> None:
        """Reserve the room of a pool, which then neither grows nor shrinks; None for as before.

        Few programs then serve all requests: steps by how many slots and how many tokens they
        reach, in coarse buckets, and panels of pieces by their size alone, where the spec says that
        it `reads_pieces`. With `prepare` they are made now, as far as nothing but the pool says
        what they are. Of a pool of blocks each call takes those that it needs before it does
        anything else, and raises OutOfMemoryError where too few are free: `extend` as many as hold
        the pieces, or of embeddings all that the sequence may come to need, as `prefill_scores`
        does; `decode` as `lacks` counts them. `release` gives them back. Requests go in slots below
        the pool's, with at most its tokens as their `cache_tokens`: LengthError for others.
        OutOfMemoryError where there is no room, and then there is no pool; StepError while
        something is live.
        """
        ...

    def prefill(self, requests: Sequence[Request], slots: Sequence[int]) -> PendingTokens:
        """Fill the cache of `slots` and sample the first token of each; one column a request."""
        ...

    def extend(self, pieces: Sequence[Piece]) -> PendingTokens:
        """As `prefill`, of pieces of prompts; a column for each that ends its prompt, in order.

        A slot is booked by its first piece, and takes no part in `decode` before its last one.
        Where the spec does not say that it `reads_pieces`, all must be whole.
        """
        ...

    def decode(self, steps: int) -> PendingTokens:
        """Up to `steps` (at most MAX_STEPS) tokens for every live slot; a column a slot. No wait.

        Stops early when every sequence has ended, as far as it can tell without waiting.
        """
        ...

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """Bytes of GRAIN tokens in the caches of these numbers, as `ModelSpec` has them."""
        ...

    def lacks(self, steps: int) -> int:
        """The number of blocks that must be free yet for `decode` of so many steps, 0 or more."""
        ...

    def prefill_scores(
        self, requests: Sequence[Sequence[Request]], slots: Sequence[Sequence[int]]
    ) -> list[Any]:
        """Float32 logits [B, V] for each of several calls, behind the prompts of its requests.

        As `prefill` of all of them, for tokens that the callers choose: these slots take no part
        in `decode`.
        """
        ...

    def decode_scores(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> list[Any]:
        """Float32 logits [B, V] for each of several calls, by one step for all of them.

        They are those after the `tokens` [B] chosen for its `slots` of `prefill_scores`.
        """
        ...

    def decode_several(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[np.ndarray]
    ) -> list[Any]:
        """Float32 logits [B, K, V] for each of several calls, by one pass for all of them, or few.

        They are those after each of its `tokens` int [B, K], drafts that may be wrong, which lie
        behind what its `slots` of `prefill_scores` have. B and K are each call's own. None is taken
        before `keep`. Only where `verifies`.
        """
        ...

    def keep(self, slots: Sequence[Sequence[int]], tokens: Sequence[np.ndarray]) -> None:
        """Take each call's `tokens` int [B, K], the first ones that its slots read as drafts."""
        ...

    def choose(self, scores: Any, requests: Sequence[Request], step: int) -> np.ndarray:
        """The best token of scores [B, V] in each row, or one drawn from them; int [B].

        `scores` may be torch's on any backend. The noise is that of each request's new token number
        `step`, so that a seed draws what it draws in `decode`.
        """
        ...

    def hide(self, scores: Any, hidden: np.ndarray, outweigh: int | None = None) -> Any:
        """Scores [B, V] on the device with -inf where bool `hidden` [B, V] says.

        The ids from `outweigh` on are one candidate: where the sum of their probabilities is above
        that of each id before, those before are hidden too.
        """
        ...

    def warm(self, scores: Any, requests: Sequence[Request]) -> Any:
        """Scores [B, V] by the requests' temperature, top-k, top-p and min-p, -inf for the rest."""
        ...

    def weigh(self, scores: Any, requests: Sequence[Request], new: np.ndarray) -> Any:
        """Scores [B, V] with the requests' bias and penalties, after their `new` tokens [B, T]."""
        ...

    def tell(self, scores: Any, tokens: np.ndarray, likely: int = TOP) -> np.ndarray:
        """float32 [B, 1 + 2 K] of `tokens` [B] by scores [B, V]: see `sampling.tell`."""
        ...

    def log_probs(self, scores: Any, tokens: np.ndarray, temperature: float) -> Any:
        """Logs float32 [B] of the probabilities of `tokens` [B], by scores times `temperature`."""
        ...

    def allow(self, slots: Sequence[int], words: np.ndarray) -> None:
        """Let the next tokens of `slots`, whose requests have a grammar, be certain ones alone.

        These are the bits of uint32 `words` [B, V / 32], the lowest one first.
        """
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` cached tokens of one slot of a pool to another, in their order.

        It is done behind all that was asked for before. States of recurrences are copied as they
        stand, which must be at `tokens`. Only where `spec.keeps_beginnings`. In a pool of blocks
        both slots have the same ones then, and `tokens` are whole grains.
        """
        ...

    def save(self, slot: int, tokens: int, start: int = 0) -> Saved:
        """The first `tokens` cached tokens of a slot of a pool, copied to the host's memory.

        As `copy` has them; where the device computes meanwhile, it need not be waited for. In a
        pool of blocks perhaps without the first `start`, whole grains, which others have as well;
        not where layers forget.
        """
        ...

    def restore(self, slot: int, saved: Saved) -> None:
        """Put back what `save` gave, as `copy` does, into any slot that has what lies before it."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """End these slots; their cache may be reused."""
        ...

    def refresh(self, plan: LoadPlan, source: TensorSource) -> None:
        """Read the same weights again, in place and without compiling; nothing is live meanwhile.

        Where it fails, some may be new and others old.
        """
        ...

    def draw_seeds(self, count: int) -> list[int]:
        """Fresh seeds below 2**63 from the backend's customary source of randomness."""
        ...

    def stopwatch(self, use_cuda_events: bool) -> Stopwatch:
        """A running stopwatch: CUDA events, or the clock around completed work."""
        ...

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile forward where that is a choice; UnsupportedError where it cannot be done."""
        ...

    def probe(self) -> None:
        """Raise unless the device computes: after some errors it does so never again."""
        ...

    def saved_bytes(self, tokens: int) -> int:
        """Bytes of the host's memory that `save` of so many tokens takes."""
        ...

    def free_bytes(self) -> int | None:
        """Memory of the device that a cache could take now; None if it is unknown."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache as it is, on one device."""
        ...

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache for `slots` sequences of `tokens` tokens, in the buckets it takes."""
        ...

    def report(self) -> Mapping[str, Any]:
        """The fields of `Report` that a backend knows: device, ops, counts and bytes."""
        ...

    def close(self) -> None:
        """Let go of everything on the device."""
        ...


class ModuleRunner(Protocol):
    """A user's own module on one backend: module mode."""

    module: Any  # cast, placed and in its inference mode
    device: Any
    dtype: Any
    notes: tuple[str, ...]
    is_compiled: bool

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on these arguments, without gradients, and return its result."""
        ...

    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own `generate`; only called where `module` has one."""
        ...

    def refresh(self) -> None:
        """Take the weights that the caller's module has now; nothing to do where they are its own.

        Raises UnsupportedError or ModelError where it cannot be done.
        """
        ...

    def watch(self, profiler: Profiler) -> None:
        """Follow `profiler`: each forward pass is one entry while it is enabled.

        Those that the module's own generate makes count too where they can be seen: on torch. A
        compiled generate on JAX is one entry. Called again after a switch.
        """
        ...

    def stopwatch(self, use_cuda_events: bool) -> Stopwatch:
        """A running stopwatch: CUDA events, or the clock around completed work."""
        ...

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile forward where that is a choice; UnsupportedError where it cannot be done."""
        ...

    def report(self) -> Mapping[str, Any]:
        """As `Runner.report`; `cache_bytes` is 0."""
        ...

    def close(self) -> None:
        """Let go of the module, graphs and executables."""
        ...
