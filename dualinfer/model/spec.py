"""One model architecture as frozen data: what the decoder and the ops read, and nothing else.

A field is here only if it is a fact of the checkpoint that changes the result. Letters, here and
everywhere: B sequences, T tokens, S cache length, L layers, E embed, H query heads, K KV heads,
G = H/K, D head_dim, F ffn, V vocab, X experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"]
Gate = Literal["sigmoid", "softplus"]
Pooling = Literal["first", "real", "last", "final", "mean", "eos", "patches", "beside"]
LAMBDAS = "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"  # of a differential attention
XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # a layer's numbers of the activation xIELU


@dataclass(frozen=True)
class Norm:
    """RMSNorm (`rms`) or LayerNorm (`layer`), with a bias where there is one among the weights.

    With `unit_offset` the factor is 1 + weight, in float32 (Gemma). An `affine` norm is weight and
    bias alone, without any mean or root (MobileBERT).
    """

    kind: Literal["rms", "layer", "affine"]
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first R elements of a head; the rest passes unturned.

    `inv_freq` holds R/2 angular frequencies (radians per position, float32 values); cos and sin
    are multiplied by `scaling` (yarn's attention factor, else 1). Element i turns with i + R/2;
    `interleaved`, 2i turns with 2i + 1 (GPT-J). A sequence of more than `original` tokens, if that
    is not 0, turns by the frequencies `long` (longrope). With `stretch` s frequency i of one of
    L > n = `original` tokens is times (s L / n - s + 1) ** (-2 i / (R - 2)) (dynamic NTK). All of a
    prompt turns by its length, and each later token by the length then; what is cached stays as it
    is, unless a model `rereads` a sequence that has grown past `original` (Phi-3).
    """

    kind: str
    inv_freq: tuple[float, ...]
    scaling: float = 1.0
    interleaved: bool = False
    long: tuple[float, ...] = ()
    original: int = 0
    stretch: float = 0.0
    rereads: bool = False

    @property
    def tables(self) -> tuple[tuple[float, ...], ...] | tuple[float, ...]:
        """`inv_freq`, and `long` behind it where there are two."""
        return (self.inv_freq, self.long) if self.long else self.inv_freq


@dataclass(frozen=True)
class Latent:
    """What latent attention (DeepSeek-V2, arXiv:2405.04434) makes keys and values of.

    A token has one latent vector of `rank` elements, normed by `norm`, and `turning` elements of a
    key that all heads share and that the rotary embedding turns. A head's key is its own projection
    of the latent vector, and the shared elements behind it; a head's value, of `value_dim`
    elements, is another projection. Queries have turning elements at their end likewise. They come
    from a normed projection to `query_rank` elements, or, where that is 0, from the input itself.
    A normed latent vector is times `scale` (LongCat).
    """

    rank: int
    turning: int
    value_dim: int
    norm: Norm
    query_rank: int = 0
    scale: float = 1.0

    @property
    def width(self) -> int:
        """What a token is kept in: the latent vector and the shared part of a key."""
        return self.rank + self.turning


@dataclass(frozen=True)
class RelativeBias:
    """A learned number for each head and bucket of distances, added to scaled scores (T5).

    Distances of `most` tokens and more are alike. One bucket of `buckets` serves each of the first
    distances, and those behind share the rest by their logarithm; with `both_ways` half of them are
    for keys behind the query, else those have the bucket of distance 0.
    """

    buckets: int
    most: int
    both_ways: bool

    @property
    def by_distance(self) -> tuple[int, ...]:
        """The bucket of each key that lies -most to most tokens behind the query.

        HF's `_relative_position_bucket`, in the same float32 arithmetic.
        """
        buckets = self.buckets // 2 if self.both_ways else self.buckets
        exact, found = buckets // 2, []
        steps = np.float32(math.log(self.most / exact))
        for behind in range(-self.most, self.most + 1):
            away = abs(behind) if self.both_ways else max(-behind, 0)
            bucket = away
            if away >= exact:
                part = np.log(np.float32(away) / np.float32(exact)) / steps
                bucket = exact + int(part * np.float32(buckets - exact))
            first = buckets if self.both_ways and behind > 0 else 0
            found.append(first + min(bucket, buckets - 1))
        return tuple(found)


@dataclass(frozen=True)
class Places:
    """Vectors of distances that meet queries and keys (DeBERTa, arXiv:2006.03654).

    All layers share 2 `span` vectors of the embedding's width, after a `norm` if there is one. A
    layer's projection of the vector of a query's distance from a key to a key of its own meets the
    query if `keys`, one to a query meets the key if `queries`; both are added to the product of the
    two, before the scale. If `shared`, the projections are those of tokens. Distances have a vector
    each, or, where `most` is not 0, the near half of `span`, and the others share the rest by their
    logarithm up to `most`.
    """

    span: int
    most: int
    keys: bool
    queries: bool
    shared: bool
    norm: Norm | None = None

    @property
    def farthest(self) -> int:
        """The tokens from which on distances are alike."""
        return self.most or self.span

    @property
    def by_distance(self) -> tuple[int, ...]:
        """The vector of each key that lies -farthest to farthest tokens behind the query.

        HF's `make_log_bucket_position`, in the same float32 arithmetic.
        """
        middle, far = self.span // 2, range(-self.farthest, self.farthest + 1)
        found = np.array(far, np.int64)
        if self.most:
            away = np.maximum(np.abs(found), middle)
            part = np.log(away.astype(np.float32) / np.float32(middle))
            part /= np.log(np.float32((self.most - 1) / middle))
            shared = np.ceil(part * np.float32(middle - 1)).astype(np.int64) + middle
            found = np.where(away == middle, found, np.sign(found) * shared)
        return tuple(np.clip(self.span - found, 0, 2 * self.span - 1).tolist())


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, to its own sequence or across to another one.

    `window` counts the visible tokens, the query's own included. With `chunk` n a token sees those
    before it that are of the same n tokens, counted from the first one that is no padding. Without
    `causal` it counts as many on either side, the query's own in both (ModernBERT). `softcap` c
    makes a scaled score c * tanh(score / c). `alibi` has a slope for each query head: the score of
    a key that lies n tokens before the query falls by n times that. `alibi_rounded`, each of both
    positions, and then a slope times it, is rounded to bfloat16, and the difference scaled as the
    product of query and key is (Falcon). Queries, keys and values lie within `clip` before the norm
    of queries and keys or, with `clip_normed`, behind it. `qk_norm` is over each `head` with
    weights that heads share, over each with its `own`, or over `all` heads as one; before the
    rotation, or with `norm_turned` after it. With `growth` (b, n, a) the query at position p is
    times 1 + b ln(1 + floor((p + a) / n)). `bias` is added to scaled scores. `places` are vectors
    of distances that add to scores. With `latent` each head has a key and a value of its own, made
    of latent vectors; `head_dim` is that of queries and keys. If `gated`, what heads give is times
    a function of a product of their input, the logistic one (Trinity) or softplus (Laguna), of one
    number for each element or for each head. `value_norm` is over each head's value, without
    weights. A head's value may have fewer elements than its key, `value_dim`; it is times
    `value_scale` (MiMo). `difference` l is of differential attention (DiffLlama, arXiv:2410.05258):
    query heads give means of two values each, those of the KV heads j and j + K/2 for j modulo K/2,
    side by side; of these the second half of heads, times exp(q1 k1) - exp(q2 k2) + l of `LAMBDAS`,
    is taken from the first, and what is left is RMS-normed by `difference_eps` and times 1 - l. A
    layer with a `lender` projects to queries alone: its keys and values are those that the layer of
    this number has projected and whose values it has normed.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool = True
    window: int | None = None
    rope: Rope | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "own", "all"] = "head"
    norm_turned: bool = False
    clip: float | None = None
    clip_normed: bool = False
    growth: tuple[float, float, int] | None = None
    alibi: tuple[float, ...] | None = None
    alibi_rounded: bool = False
    softcap: float | None = None
    bias: RelativeBias | None = None
    places: Places | None = None
    latent: Latent | None = None
    chunk: int | None = None
    gated: bool = False
    gate: Gate = "sigmoid"
    value_norm: Norm | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    difference: float | None = None
    difference_eps: float = 0.0
    lender: int | None = None

    @property
    def reach(self) -> int | None:
        """The most tokens that a causal query sees; None for all of the past."""
        return self.chunk if self.window is None else self.window

    @property
    def rope_pairs(self) -> int:
        """Pairs of elements of a head that turn."""
        return len(self.rope.inv_freq) if self.rope else 0

    @property
    def head_widths(self) -> tuple[int, int, int]:
        """Elements of one head in the projections to queries, keys and values, in that order."""
        if self.latent is None:
            return self.head_dim, self.head_dim, self.value_dim or self.head_dim
        return self.head_dim, self.head_dim - self.latent.turning, self.latent.value_dim

    @property
    def widened(self) -> "Attention":
        """This attention as caches and ops have it: values as wide as keys, one for each head."""
        if self.difference is not None:
            both = {"heads": 2 * self.heads, "kv_heads": 2 * self.kv_heads}
            return replace(self, difference=None, **both)
        if self.value_dim is not None:
            return replace(self, value_dim=None, value_scale=1.0)
        return self

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value blocks in projections, in that order."""
        q, k, v = self.head_widths
        return self.heads * q, self.kv_heads * k, self.kv_heads * v


@dataclass(frozen=True)
class Mlp:
    """Feed-forward of one layer; `gated` multiplies activation(gate) with up."""

    ffn: int
    activation: Activation | Literal["xielu"]
    gated: bool


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts and weighs them, by a product with the router's weights.

    Logits are within `softcap` c as c * tanh(logit / c). Scores of them are their `softmax` or
    their `sigmoid`; or the choice is among logits, and of the chosen ones alone it is the softmax
    (`chosen`) or the sigmoid (`gates`), all in float32. A bias for the choice, if there is one
    among the weights, is added for the choice alone. Of equal `groups` of experts those
    `groups_chosen` are open whose best score (`max`), or sum of their `two` best, is the largest.
    `renormalized` weights are over their sum plus `eps`; then they are times `scale`. Of equal
    scores that of the lower number goes first.

    A `sparse` choice (Phi-3.5-MoE, arXiv:2409.12136) is of two logits. The weight of each is its
    softmax among itself m and those below it that are near: (m - logit) / max(abs(logit), m) is at
    most 2 * `jitter`, or is no number. Router biases, groups and renormalization are not for it.
    """

    chosen: int
    score: Literal["softmax", "sigmoid", "chosen", "gates", "sparse"] = "softmax"
    groups: int = 1
    groups_chosen: int = 1
    group_score: Literal["max", "two"] = "max"
    renormalized: bool = False
    eps: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0
    softcap: float | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture in a feed-forward's place: each token's `router.chosen` of `count` experts of ffn.

    An expert's hidden values are activation(gate) * (up + `offset`), or without gates
    activation(up). With `limit` gates are at most that, and ups at most as far from 0 (GPT-OSS).
    `shared` is the ffn of an expert that all tokens have, 0 for none; with `shared_gated` its
    result is times the logistic function of a product of its own (Qwen2-MoE), and it is times
    `shared_scale` (Cohere's mean of the two). Where a mixture
    `weighs_input`, an expert reads its input times its weight, and results are summed as they are
    (Llama 4). With `blended` the last expert is one that the router does not know and all tokens
    have: its weight, and what those of the chosen ones are times, are the softmax of a product of
    their own (DeepSpeed's residual layers, arXiv:2201.05596). Where they are `apart` (Gemma 4), the
    expert that all tokens have, the others and the router each read through a norm of their own.
    Both results are normed before they are added, and the weight of a chosen expert is times a
    learned number. With a `capacity` an expert serves so many tokens of a sequence in one pass, the
    first that choose it; others that do get nothing of it (Switch Transformers). Behind the `count`
    experts the router knows `zeros` more, without weights: such a one gives what it reads. Where
    they are `late` (LongCat, arXiv:2509.01322), the expert that all tokens have is the layer's MLP,
    and what the others give is added behind the next layer.
    """

    count: int
    ffn: int
    activation: Activation
    gated: bool
    router: Router
    shared: int = 0
    shared_gated: bool = False
    shared_scale: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    weighs_input: bool = False
    blended: bool = False
    apart: bool = False
    capacity: int | None = None
    zeros: int = 0
    late: bool = False

    @property
    def choices(self) -> int:
        """Experts that a router tells apart."""
        return self.count - self.blended + self.zeros

    @property
    def per_token(self) -> int:
        """Experts of a token, without the one of width `shared`."""
        return self.router.chosen + self.blended


@dataclass(frozen=True)
class Patches:
    """What an encoder of images reads: a token of each patch, behind `learned` ones.

    Images have `channels` and `grid` rows and columns of patches, each `size` pixels high and wide.
    Of other images positions are interpolated, where a caller asks for it, or without being asked
    in a model for `any_size` (DINOv2). The last `registers` of the learned tokens have no position;
    where there are some, interpolation is antialiased.
    """

    channels: int
    size: tuple[int, int]
    grid: tuple[int, int]
    learned: int = 1
    any_size: bool = False
    registers: int = 0

    @property
    def width(self) -> int:
        """Numbers of one patch."""
        return self.channels * self.size[0] * self.size[1]

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        high, wide = (n * size for n, size in zip(self.grid, self.size, strict=True))
        return self.channels, high, wide

    @property
    def tokens(self) -> int:
        """Tokens of an image."""
        return self.learned + self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Probe:
    """A learned query that pools the tokens of an image (SigLIP): attention, then an MLP of `ffn`.

    The MLP reads the attention's result by the model's `norm`, and adds to it.
    """

    attention: Attention
    ffn: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True)
class Pooled:
    """What a model without a head makes of its last hidden state.

    It is that of the `first` token, of the `final` one, padding too, or of the `end`: the first
    with the id `end_id`, or with the largest id if that is None; or what a `probe` makes of all.
    After a `norm` and a projection, where there are these, it is HF's pooler_output, or the output
    `name`.
    """

    pooling: Literal["first", "final", "end", "all"]
    norm: Norm | None = None
    name: Literal["text_embeds", "image_embeds"] | None = None
    end_id: int | None = None
    probe: Probe | None = None


@dataclass(frozen=True)
class Convolution:
    """What a layer's own input adds to its output, through a norm over the sum (DeBERTa-v2).

    It is the `activation` of a convolution over `taps` tokens, the one in the middle the token
    itself.
    """

    taps: int
    activation: Activation


@dataclass(frozen=True)
class Adapter:
    """Two projections behind a layer's MLP, to `width` elements and back, which add (X-MOD).

    They read the sum so far, through a norm if there is one among the weights; if `normed`, what
    this gives is what they add to, too.
    """

    width: int
    activation: Activation
    normed: bool


@dataclass(frozen=True)
class Bottleneck:
    """A layer within `width` elements (MobileBERT, arXiv:2004.02984).

    Its input is projected to so many, and norms are over the sums of sub-layers and what they read:
    attention, whose queries and keys are of another such projection, and values of the input, and
    `feeds` MLPs. What they give is projected back and added to the input, and normed.
    """

    width: int
    feeds: int


@dataclass(frozen=True)
class Page:
    """A second stream of each token, of where it lies on a page (LiLT, arXiv:2202.13669).

    It has `width` elements behind the token's own, an MLP of `ffn`, and the last `head_dim`
    elements of every query, key and value, so that both streams are attended to by the sum of their
    scores. Norms are over the sums of sub-layers and what they read, of each stream for itself.
    """

    width: int
    ffn: int
    head_dim: int


@dataclass(frozen=True)
class Layer:
    """One block: where its norms stand, what its sub-layers read, and what else some models do.

    - `placement`: norms before each sub-layer (`pre`), after each residual sum (`post`), or, within
      the residual, behind each sub-layer (`behind`) or before and behind it (`around`).
    - `parallel` (always `pre`): the MLP reads the block's input, not the attention's sum; with
      `shared_norm` by one norm.
    - `residual_scale`: a factor of what a sub-layer adds.
    - `cross` (`pre`, `post` or `around`): a second attention stands between the two, whose keys and
      values are of what an encoder gives.
    - `scaled` (always `pre`): what a sub-layer adds is times a learned vector (DINOv2).
    - `bare` (always `pre`): no norm stands before attention (ModernBERT's first block).
    - `mlp_normed` (always `pre`): a norm stands behind the MLP, within the residual (A.X-K1).
    - `reads`: a third sub-layer, normed behind: the MLP's activation of a projection to so many
      elements, times what each token's embedding gives this layer alone, projected back (Gemma 4).
    - `multiplied`: what the block gives is times a learned number (Gemma 4).
    - `convolution` (always `post`) comes last (DeBERTa-v2).
    - `sub_norms` (always `pre`): what heads give and the MLP's hidden values are normed before the
      products back, each as one of so many elements, which devices share (BitNet).
    - `adapter` (`pre` or `post`): two more projections, before the last norm of a `post` block.
    - `bottleneck`: how a `narrow` block is built (MobileBERT).
    - `page`: how a `paged` block is built (LiLT).
    """

    attention: Attention
    mlp: Mlp | Experts
    norm: Norm
    placement: Literal["pre", "post", "around", "behind", "narrow", "paged"]
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    cross: Attention | None = None
    scaled: bool = False
    bare: bool = False
    mlp_normed: bool = False
    reads: int = 0
    multiplied: bool = False
    convolution: Convolution | None = None
    sub_norms: tuple[int, int] | None = None
    adapter: Adapter | None = None
    bottleneck: Bottleneck | None = None
    page: Page | None = None

    @property
    def experts(self) -> int:
        """How many experts a layer has; 0 of one without a mixture."""
        return self.mlp.count if isinstance(self.mlp, Experts) else 0

    @property
    def is_late(self) -> bool:
        """True if a part of what it gives is added behind the next layer."""
        return isinstance(self.mlp, Experts) and self.mlp.late


@dataclass(frozen=True)
class Head:
    """What makes scores of the last hidden state: for the vocabulary, or for `labels`.

    `causal` and `masked` heads project to the vocabulary. One without a projection of its own among
    its weights reads the input embedding as one. A logit is times `scale`; then `softcap` c makes
    it c * tanh(logit / c). A head for labels scores a `sequence` as one, each `token`, a `choice`
    among several sequences (by one label), or the `span` from where to where an answer goes (by
    two); of `replaced` tokens it has one score each. A head with an `activation` has a projection
    before its own, then the activation and the `norm` if any. `pooling` says which hidden state of
    a sequence a head reads: of the `first` token, the first `real` one by the mask, the `last` one
    that is no padding by its id, the `final` one, padding too, or the `mean` of the real ones,
    after the activation if `late`, or of an image's `patches` without the learned tokens, or the
    first and this mean of patches side by side (`beside`); of an encoder-decoder the decoder's at
    the place of the last id `eos` that the encoder reads. `width`
    is that of the projection before the vocabulary where it is neither the embedding's nor the
    layers' (RemBERT).
    """

    kind: Literal["causal", "masked", "sequence", "token", "choice", "span", "replaced"]
    activation: Activation | None = None
    norm: Norm | None = None
    softcap: float | None = None
    scale: float = 1.0
    labels: int = 0
    pooling: Pooling | None = None
    late: bool = False
    eos: int | None = None
    width: int = 0

    @property
    def of_vocab(self) -> bool:
        """True if the scores are logits of the vocabulary."""
        return self.kind in ("causal", "masked")


@dataclass(frozen=True)
class ModelSpec:
    """A whole architecture. `learned_positions` and `token_types` are counts, 0 if none.

    The row of a position in its table is `position_offset` further. `embed_scale` multiplies the
    embedded tokens, rounded to their dtype; with `scales_embeds` also embeddings that a caller
    gives in their place (HF's Granite, not its Gemma). With `positions_from_mask` the positions
    that forward takes by default count real tokens only; with `pad` they count the ids that are not
    it, from `pad` + 1 on, and are `pad` elsewhere (RoBERTa). If a model `packs`, positions that
    start anew separate sequences. `embed_width` is that of the embedding and of the head where a
    projection lies between them and the layers (OPT-350m). In a `factored` model positions, token
    types and the norm of the embedding have it as well, and the projection, perhaps with a bias,
    comes after them (ALBERT, ELECTRA). The norm of the embedding is `normed` over the `sum` with
    positions and types, over that once it is `projected` (DeBERTa-v2), or over the `tokens` alone,
    before positions are added (BlenderbotSmall). With `trigrams` tokens have `embed_width`
    elements, and those of the next one, its own and the one before are projected to the layers'
    width (MobileBERT). `pad_id` is the id by which a head tells padding. With an `encoder` this is
    a decoder that attends across to what that gives of another sequence, and that begins with the
    id `start`, if the model names one; if it `repeats`, it reads the encoder's ids, shifted, where
    it is given none. With `towers` the encoder is one beside this one: neither attends to the
    other, and what they give says how near texts are to images (CLIP). With `patches` it reads
    images in the place of ids, and has no vocabulary. HF's hidden states of a model with
    `raw_states` end before the final norm. `projected` is the width of what `pooled` projects to.
    With `mel` it reads log-mel spectrograms of so many bins in the place of ids, two frames for
    each position, by two convolutions. Where there is no mask, HF hides the id `hides`. The
    embedding of the id `dropped` is zero, and those of a sequence's other tokens are times 0.88
    over the share that these have in it, as dropout in training made them (ESM-2). If a model
    `blanks`, what a mask hides enters the first layer as zeros; if it `masks_labels`, the labels of
    that count in no loss (Qwen2-Audio). Where there are `boxes`, a token has a type and a box on a
    page, of left, upper, right and lower edges below that; rows for these, and for its height and
    width, are added to it (LayoutLM). A layer that `is_late` and the next one are one layer of
    HF's, and have one hidden state.
    """

    family: str
    architecture: str
    vocab: int
    embed: int
    layers: tuple[Layer, ...]
    max_positions: int
    learned_positions: int = 0
    position_offset: int = 0
    positions_from_mask: bool = False
    pad: int | None = None
    hides: int | None = None
    dropped: int | None = None
    blanks: bool = False
    packs: bool = True
    masks_labels: bool = False
    token_types: int = 0
    token_types_from_vocab: bool = False
    boxes: int = 0
    embed_scale: float = 1.0
    scales_embeds: bool = False
    embed_width: int | None = None
    factored: bool = False
    normed: Literal["sum", "projected", "tokens"] = "sum"
    trigrams: bool = False
    pad_id: int | None = None
    embed_norm: Norm | None = None
    final_norm: Norm | None = None
    head: Head | None = None
    encoder: "ModelSpec | None" = None
    start: int | None = None
    repeats: bool = False
    towers: bool = False
    mel: int = 0
    projected: int = 0
    patches: Patches | None = None
    pooled: Pooled | None = None
    raw_states: bool = False

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, then those of the encoder: numbers of layers in the weights are by these."""
        return self.layers + (self.encoder.layers if self.encoder else ())

    def number(self, part: "ModelSpec", index: int) -> int:
        """The number in `all_layers` of a layer of `part`, this model or its encoder."""
        return index + (len(self.layers) if self.encoder and not part.encoder else 0)

    def with_layers(self, layers: Sequence[Layer]) -> "ModelSpec":
        """The same model of other layers, given as `all_layers` has them."""
        own, rest = tuple(layers[: len(self.layers)]), tuple(layers[len(self.layers) :])
        encoder = replace(self.encoder, layers=rest) if self.encoder else None
        return replace(self, layers=own, encoder=encoder)

    def extent(self, axis: str, layer: int | None = None) -> int:
        """Elements of an axis by its name; of a joined one, such as `q+k+v`, of all its parts.

        Axes of heads and of the MLP are those of layer number `layer`. What stands behind a `/`
        says how blocks are interleaved and adds nothing; behind `:` is a number of elements that
        have one here, and behind `=` the extent itself.
        """
        axis, _, literal = axis.partition("=")
        if literal:
            return int(literal)
        axis, _, block = axis.partition(":")
        size = sum(self._extent(part, layer) for part in axis.partition("/")[0].split("+"))
        return -(-size // int(block or 1))

    def _extent(self, axis: str, layer: int | None) -> int:
        if self.encoder and axis.startswith("source_"):
            return self.encoder.extent(axis.removeprefix("source_"))
        if self.encoder and layer is not None and layer >= len(self.layers):
            return self.encoder.extent(axis, layer - len(self.layers))
        outer = {
            "vocab": self.vocab,
            "embed": self.embed,
            "embed_in": self.embed,  # tells the sides of a square matrix apart
            "width": self.embed_width or self.embed,
            "inner": (self.factored and self.embed_width) or self.embed,
            "trigram": 3 * (self.embed_width or 0),
            "rest": self.embed - (self.embed_width or 0),
            "labels": self.head.labels if self.head else 0,
            "scored": self.head.width if self.head else 0,
            "projected": self.projected,
            "positions": self.learned_positions + self.position_offset,
            "types": self.token_types,
            "boxes": self.boxes,
            "pairs": self.layers[0].attention.rope_pairs,
            **{"read": self.layers[0].reads, "reads": self.reads},
            "one": 1,
        }
        if self.patches is not None:
            outer |= dict(zip(("high", "wide"), self.patches.size, strict=True))
            outer |= {"channels": self.patches.channels, "learned": self.patches.learned}
            outer["registers"] = self.patches.registers
        if self.pooled is not None and self.pooled.probe is not None:
            probe = self.pooled.probe
            outer |= {"probe_qkv": sum(probe.attention.qkv_sizes), "probe_ffn": probe.ffn}
        if self.page is not None:
            outer |= {"page": self.page.width, "page_ffn": self.page.ffn, "sixth": self.embed // 6}
        if (places := self.layers[0].attention.places) is not None:
            outer["places"] = 2 * places.span
        if self.encoder:
            outer |= {"mel": self.encoder.mel, "taps": 3}  # of a convolution
        if (convolution := self.layers[0].convolution) is not None:
            outer["taps"] = convolution.taps
        if axis in outer:
            return outer[axis]
        assert layer is not None, f"{axis} is an axis of layers"
        attention, mlp = self.layers[layer].attention, self.layers[layer].mlp
        q, k, v = attention.qkv_sizes
        inner = {
            **{"heads": attention.heads, "kv_heads": attention.kv_heads},
            **{"head_dim": attention.head_dim, "q": q, "k": k, "v": v},
            "given": attention.heads * attention.head_widths[2],  # by heads, to a product
            **dict.fromkeys(("ffn", "gate", "up"), mlp.ffn),
            "buckets": attention.bias.buckets if attention.bias else 0,
            "adapter": own.width if (own := self.layers[layer].adapter) else 0,
            "narrow": own.width if (own := self.layers[layer].bottleneck) else 0,
        }
        if (page := self.layers[layer].page) is not None:
            for name, dim in (
                ("text", attention.head_dim - page.head_dim),
                ("page", page.head_dim),
            ):
                inner |= {f"{name}_{x}": attention.heads * dim for x in "qkv"}
        if (own := attention.latent) is not None:
            inner |= {"latent": own.width, "rank": own.rank, "query_rank": own.query_rank}
        if isinstance(mlp, Experts):
            # What devices share out, what each of them knows of, and what a router tells apart.
            inner |= {"experts": mlp.count, "mixed": mlp.count, "choices": mlp.choices, "sides": 2}
            inner |= dict.fromkeys(("shared", "shared_gate", "shared_up"), mlp.shared)
        return inner[axis]

    @property
    def reads(self) -> int:
        """Elements that a token's embedding gives all layers for themselves; 0 for none."""
        return sum(layer.reads for layer in self.layers)

    @property
    def lenders(self) -> frozenset[int]:
        """The numbers of the layers whose keys and values others have, too."""
        return frozenset(
            a.lender for a in (own.attention for own in self.layers) if a.lender is not None
        )

    @property
    def page(self) -> Page | None:
        """What layers have beside the tokens' stream."""
        return self.layers[0].page

    @property
    def cache_numbers(self) -> tuple[int, ...]:
        """The number of the cache that each layer keeps its keys and values in: a lender's own."""
        owners = [i for i, layer in enumerate(self.layers) if layer.attention.lender is None]
        number = {index: n for n, index in enumerate(owners)}
        lenders = (layer.attention.lender for layer in self.layers)
        return tuple(number[i if own is None else own] for i, own in enumerate(lenders))

    @property
    def adds_tables(self) -> bool:
        """True if an embedded token is a sum of rows: its own, of its type and of its position."""
        return self.embed_width is None and self.normed != "tokens" and not self.boxes

    @property
    def projects(self) -> bool:
        """True if a projection lies between tokens and layers, and another before the head."""
        return self.embed_width is not None and not self.factored and not self.trigrams

    @property
    def crosses(self) -> bool:
        """True if this is a decoder that attends across to what its encoder gives."""
        return self.encoder is not None and not self.towers

    @property
    def frames(self) -> int:
        """Frames of every spectrogram that the model reads; 0 where it reads ids."""
        return 2 * self.learned_positions if self.mel else 0

    @property
    def causal(self) -> bool:
        """True if every layer attends to the past only, so that a cache makes sense."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def alibi(self) -> bool:
        """True if attention measures positions itself, so that they are no input of the model."""
        return any(layer.attention.alibi for layer in self.layers)

    @property
    def original(self) -> int | None:
        """Tokens beyond which a sequence is read again, by other angles; None for never."""
        ropes = [layer.attention.rope for layer in self.layers]
        lengths = [rope.original for rope in ropes if rope and rope.rereads]
        return min(lengths) if lengths else None

    @property
    def turns_by_length(self) -> bool:
        """True if a rotary embedding asks for the length of the sequence that it turns."""
        return any(layer.attention.rope and layer.attention.rope.original for layer in self.layers)

    @property
    def can_generate(self) -> bool:
        """True for a causal model with a vocabulary head."""
        return self.causal and self.head is not None and self.head.kind == "causal"

    @property
    def has_logits(self) -> bool:
        """True if the model scores the vocabulary."""
        return self.head is not None and self.head.of_vocab

    @property
    def tokens(self) -> int:
        """The longest sequence that its table of positions has rows for; 0 without a table."""
        return max(0, self.learned_positions - (0 if self.pad is None else self.pad + 1))

    @property
    def can_pack(self) -> bool:
        """True if several sequences in one row give what each gives by itself."""
        own = [layer.attention for layer in self.layers]
        return not self.turns_by_length and not any(a.alibi_rounded or a.chunk for a in own)

    def most_tokens(self, asked: int | None) -> int:
        """Longest prompt with its new tokens: `asked`, else what fills the model's positions.

        A table of positions always bounds it. The last new token is never fed back, so that it
        takes no position.
        """
        most = asked or self.max_positions + 1
        return min(most, self.learned_positions + 1) if self.learned_positions else most

    def __repr__(self) -> str:
        """A short form: nested layers would fill pages."""
        return (
            f"ModelSpec({self.architecture}, L={len(self.layers)}, E={self.embed}, V={self.vocab})"
        )
