"""Module mode over several processes: live HF models split in place, equal to the whole ones."""

import functools

import numpy as np
import pytest
import torch

import dualinfer
from dualinfer.backends.torch.module.autotp import layouts
from dualinfer.backends.torch.module.autotp.layers import GatheredLinear, RanksSeam
from dualinfer.backends.torch.module.autotp.miniature import make_miniature, pattern, stacks
from dualinfer.backends.torch.module.autotp.plan import describe, make_plan
from dualinfer.backends.torch.module.autotp.surgery import split_module
from dualinfer.backends.torch.parallel import one

from .models import relative_rms
from .ranks import RankError
from .split_models import FFN, LAYERS, MASKED, MODELS, VOCAB, make_model

pytestmark = pytest.mark.xdist_group("ranks")
_NEW = 4


def _split(model, world, **fields):
    tp = {"tp_size": world, **fields.pop("tp", {})}
    return dualinfer.init_inference(model, tensor_parallel=tp, dtype="fp32", **fields)


def _inputs(name):
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if MODELS[name][0] in ("T5", "Bart"):
        inputs["decoder_input_ids"] = ids[:, :3]
    return inputs


def _text(generate, name):
    """Greedy tokens, the end never coming."""
    inputs = {k: v for k, v in _inputs(name).items() if k != "decoder_input_ids"}
    options = dict(max_new_tokens=_NEW, min_new_tokens=_NEW, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        return generate(**inputs, **options).tolist()


def _bytes(model):
    return sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())


def split(names, world):
    """Of each model: logits, the text if it speaks, bytes here, and notes."""
    found = {}
    for name in names:
        part = make_model(name)
        with _split(part, world) as engine:
            logits, text = engine(**_inputs(name)).logits, None
            if MODELS[name][0] not in MASKED:
                text = _text(engine.generate, name)
            found[name] = np.asarray(logits), text, _bytes(part), engine.report().notes
    return found


@functools.cache
def whole(name):
    """As `split` of a single process, by HF alone."""
    model = make_model(name)
    with torch.no_grad():
        logits = model(**_inputs(name)).logits
    text = None if MODELS[name][0] in MASKED else _text(model.generate, name)
    return logits.numpy(), text, _bytes(model)


@pytest.mark.parametrize(
    ("part", "world"),
    # Over three ranks the first quarter of the models shows what an uneven cut is.
    [
        pytest.param(part, world, marks=[pytest.mark.slow] if part and world == 3 else [])
        for part in range(4)
        for world in (2, 3)
    ],
)
def test_split_models_equal_whole_ones(crew, part, world):
    names = list(MODELS)[part::4]
    for rank, found in enumerate(crew.run(split, names, world, world=world)):
        for name, (logits, text, held, notes) in found.items():
            expected, expected_text, all_bytes = whole(name)
            error, share = relative_rms(logits, expected), held / all_bytes
            print(f"{name} {rank}/{world}: error {error:.1e}, {share:.2f} of the bytes")
            assert error < 1e-5, (name, rank, notes)
            assert text == expected_text, (name, rank, notes)
            assert share < 1 / world + 0.2, (name, rank, notes)


def _four_ranks():
    """3 KV heads, 5 heads of a T5, 2 heads that leave ranks without one, and small grains."""
    found = {}
    cases = {
        "llama": ({}, {}),
        "t5": ({}, {"tp_grain_size": 16}),
        "gpt2": ({"n_head": 2}, {"tp_grain_size": 8}),
        "mixtral": ({"num_key_value_heads": 2}, {}),
    }
    for name, (fields, tp) in cases.items():
        whole, part = make_model(name, **fields), make_model(name, **fields)
        with torch.no_grad():
            expected = whole(**_inputs(name)).logits
        with _split(part, 4, tp=tp) as engine:
            error = relative_rms(engine(**_inputs(name)).logits, expected)
            found[name] = error, _text(engine.generate, name) == _text(whole.generate, name)
    return found


def test_more_ranks_than_kv_heads_or_heads(crew):
    for found in crew.run(_four_ranks, world=4):
        for name, (error, same) in found.items():
            assert error < 1e-5 and same, name


def _counted():
    """Collectives of one forward pass: sums and gathers."""
    import torch.distributed as dist

    from dualinfer.backends.torch import parallel

    counts = {}
    for name in ("llama", "gpt2", "mixtral", "qwen2-moe", "bert"):
        with _split(make_model(name), 2) as engine:
            seen = {"sums": 0, "gathers": 0}

            def counting(work, key, seen=seen):
                def call(*args, **kwargs):
                    seen[key] += 1
                    return work(*args, **kwargs)

                return call

            originals = dist.all_reduce, parallel._gather_single
            inputs = _inputs(name)
            try:
                dist.all_reduce = counting(dist.all_reduce, "sums")
                parallel._gather_single = counting(parallel._gather_single, "gathers")
                engine(**inputs)
            finally:
                dist.all_reduce, parallel._gather_single = originals
            counts[name] = seen["sums"], seen["gathers"]
    return counts


def test_collectives_of_a_forward_pass(crew):
    two_a_layer = 2 * LAYERS + 1, 1  # the embedding's, and the logits' gather
    expected = dict.fromkeys(("llama", "gpt2", "mixtral", "bert"), two_a_layer)
    expected["qwen2-moe"] = 3 * LAYERS + 1, 1  # its shared expert stands beside the others
    assert crew.run(_counted) == [expected] * 2


def _life(rank_seeds):
    """What happens around a split module; every rank returns the same."""
    import gc
    import os
    import weakref

    from dualinfer import ClosedError, ModelError

    rank = int(os.environ["RANK"])
    ids = _inputs("llama")["input_ids"]
    sampling = dict(max_new_tokens=6, do_sample=True, top_k=40, pad_token_id=0)
    torch.manual_seed(rank_seeds[0])
    whole = make_model("llama", tie_word_embeddings=True)
    expected = whole.generate(ids, **sampling).tolist()

    torch.manual_seed(rank_seeds[rank])
    part = make_model("llama", tie_word_embeddings=True)
    config = part.config.to_dict()
    old = weakref.ref(part.model.layers[1].mlp.up_proj.weight)
    engine = _split(part, 2, keep_module_on_host=True)
    gc.collect()
    found = {
        "sampled": engine.generate(ids, **sampling).tolist() == expected,
        "freed": old() is None,
        "drawn": (torch.manual_seed(rank), engine.generate(ids, **sampling).tolist())[1],
        "tied": part.lm_head.weight is part.model.embed_tokens.weight,
        "config": part.config.to_dict() == config,
        "ranks": (engine._turns.peers.rank, engine._turns.peers.size) == (rank, 2),
        "static cache": engine.generate(ids, max_new_tokens=3, cache_implementation="static").shape[
            1
        ],
        "notes": engine.report().notes,
    }
    for again in ({"tensor_parallel": {"tp_size": 2}}, {}):
        with pytest.raises(ModelError, match="split over ranks already"):
            dualinfer.init_inference(part, dtype="fp32", **again)
    with pytest.raises(IndexError):  # in every rank, as without a split
        engine(torch.tensor([[VOCAB]]))
    engine.compile(backend="eager")
    with torch.no_grad():
        found["compiled"] = relative_rms(engine(ids).logits, whole(ids).logits) < 1e-5
    engine.close()
    with pytest.raises(ClosedError, match="engine that joined them was closed"):
        part(ids)
    return found


def test_life_of_a_split_module(crew):
    every = crew.run(_life, [5, 6])
    drawn = [found.pop("drawn") for found in every]
    assert drawn[0] == drawn[1]
    for found in every:
        notes = "\n".join(found.pop("notes"))
        assert "over 2 ranks: model.embed_tokens (vocab)" in notes
        assert "model.layers.*.self_attn.o_proj (row)" in notes
        assert found.pop("static cache") == 10
        assert all(found.values()), found


def _filled(folder):
    """Errors of a module that is filled from a checkpoint, of one made of it, and in bfloat16."""
    whole = make_model("phi-3")
    ids = _inputs("phi-3")["input_ids"]
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    with _split(empty, 2, checkpoint=folder) as engine, torch.no_grad():
        filled = relative_rms(engine(ids).logits, whole(ids).logits)
    with _split(folder, 2) as engine, torch.no_grad():
        made = relative_rms(engine(ids).logits, whole(ids).logits)
    tp = {"tp_size": 2}
    with (
        dualinfer.init_inference(make_model("phi-3"), tensor_parallel=tp, dtype="bf16") as engine,
        torch.no_grad(),
    ):
        logits = engine(ids).logits
        low = relative_rms(logits.float(), whole.bfloat16()(ids).logits.float())
    return filled, made, low, str(logits.dtype)


def test_checkpoint_fills_before_the_split(crew, tmp_path):
    make_model("phi-3").save_pretrained(tmp_path)
    for filled, made, low, dtype in crew.run(_filled, str(tmp_path)):
        assert filled < 1e-5 and made < 1e-5
        assert low < 2e-2 and dtype == "torch.bfloat16"


def _different(kind):
    import os

    first = os.environ["RANK"] == "0"
    model = make_model("llama kv 2" if kind == "shapes" and not first else "llama")
    if kind == "values" and not first:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    _split(model, 2)


@pytest.mark.parametrize("kind", ["shapes", "values"])
def test_different_modules_are_refused_in_every_rank(crew, kind):
    with pytest.raises(RankError, match="The modules differ: rank 1 from rank 0") as caught:
        crew.run(_different, kind)
    assert caught.value.kinds == ["DistributedError"] * 2


# ---- what the plan says, in one process


def test_table_says_what_each_layer_becomes():
    lines = {line.path: line for line in describe(make_model("phi-3"), 3).lines}
    qkv = lines["model.layers.*.self_attn.qkv_proj"]
    assert (qkv.kind, qkv.becomes, qkv.layers) == ("Linear", "column", LAYERS)
    assert qkv.whole == (96, 48) and qkv.shapes == ((32, 48),) * 3  # 6 heads, 3 KV heads of 8
    assert qkv.reason == "6 heads, 3 KV heads"
    down = lines["model.layers.*.mlp.down_proj"]
    assert down.becomes == "row" and sum(shape[1] for shape in down.shapes) == FFN
    assert lines["lm_head"].becomes == "gathered"
    assert lines["model.embed_tokens"].shapes == ((44, 48), (44, 48), (43, 48))
    t5 = {line.path: line for line in describe(make_model("t5"), 3).lines}
    table = t5["encoder.block.*.layer.*.SelfAttention.relative_attention_bias"]
    assert table.becomes == "table" and [shape[1] for shape in table.shapes] == [2, 2, 1]


def test_table_of_a_module_without_values_is_the_same():
    whole = make_model("mixtral")
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    assert describe(empty, 2) == describe(whole, 2)


_BECOMES = {  # transformers' styles; what it gathers is split here where its layout is known
    **dict.fromkeys(("colwise", "packed_colwise"), "column"),
    **dict.fromkeys(("rowwise", "packed_rowwise", "rowwise_split_input"), "row"),
    **{
        "colwise_gather_output": "gathered or column",
        "replicated_with_grad_allreduce": "replicated",
    },
    **{"embedding_rowwise": "vocab", "moe_tp_experts": "experts"},
}


@pytest.mark.parametrize("name", MODELS)
def test_plan_agrees_with_hugging_face(name):
    model = make_model(name)
    plan, notes = make_plan(model, 2, 64, {})
    ours = {pattern(change.path): change.becomes for change in plan.changes}
    parts = {pattern(path) for path, _ in model.named_modules()}
    said = {path: style for path, style in (model._tp_plan or {}).items() if path in parts}
    found = {p: (s, ours.get(p, "replicated")) for p, s in said.items()}
    assert not [own for own in found.items() if own[1][1] not in _BECOMES[own[1][0]]]
    by_plan = any("as transformers' own tp_plan says" in note for note in notes)
    assert by_plan == any(style == "colwise" for style in said.values())


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt-bigcode", "t5"])
def test_one_layer_of_each_kind_is_tried_out(name):
    """Gemma's activations are partial functions, one a layer; T5's first layers have a table."""
    for path, stack in stacks(make_miniature(make_model(name))):
        assert len(stack) == (2 if name == "t5" else 1), path


def test_a_plan_of_transformers_that_gives_other_values_gives_way_to_names():
    model = make_model("llama")
    model._tp_plan["model.layers.*.mlp.gate_proj"] = "replicate"
    plan, notes = make_plan(model, 2, 64, {})
    changed = {change.path: change.becomes for change in plan.changes}
    assert changed["model.layers.1.mlp.gate_proj"] == "column"
    assert any("own tp_plan says gave other values" in note for note in notes)


def test_latent_attention_is_split_by_heads_also_inside_of_a_module_of_ones_own():
    import transformers

    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, vocab_size=VOCAB)
    latent = dict(q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4)
    config = transformers.DeepseekV2Config(
        **sizes, **latent, v_head_dim=10, intermediate_size=40, first_k_dense_replace=2
    )

    class Reward(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.DeepseekV2Model(config)
            self.head = torch.nn.Linear(48, 1)

        def forward(self, input_ids, attention_mask):
            return self.head(self.model(input_ids, attention_mask).last_hidden_state)

    plan, notes = make_plan(Reward().eval(), 3, 64, {})
    changes = {change.path: change for change in plan.changes}
    attention = "model.layers.1.self_attn"
    ranks = [layouts.extent(runs) for runs in changes[f"{attention}.kv_b_proj"].by_rank]
    assert ranks == [2 * (8 + 10)] * 3
    assert changes[f"{attention}.q_b_proj"].becomes == "column"
    assert changes[f"{attention}.o_proj"].becomes == "row"
    assert changes["model.layers.1.mlp.down_proj"].becomes == "row"
    assert not any("could not" in note or "other values" in note for note in notes), notes


class _Reader(torch.nn.Module):
    """Whose head is the embedding's weight, read past its forward."""

    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(VOCAB, 48)
        self.layers = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(48, 6, FFN)] * 2)
        self.lm_head = torch.nn.Linear(48, VOCAB, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.wte.weight.T


def test_weights_read_elsewhere_are_replicated():
    lines = {line.path: line for line in describe(_Reader(), 2).lines}
    assert lines["wte"].becomes == "replicated" and "read elsewhere" in lines["wte"].reason
    assert lines["layers.*.self_attn.out_proj"].becomes == "replicated"


def test_layers_with_hooks_or_forwards_of_their_own_are_not_split():
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.up_proj.register_forward_hook(lambda module, args, output: 2 * output)
    plan, _ = make_plan(model, 2, 64, {})
    changed = {change.path: change.becomes for change in plan.changes}
    assert "model.layers.1.mlp.up_proj" not in changed
    assert changed["model.layers.1.mlp.down_proj"] == "gathered"
    assert changed["model.layers.0.mlp.down_proj"] == "row"


def test_layers_that_parts_share_are_split_by_themselves():
    model = make_model("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    first.down_proj = second.down_proj
    plan, _ = make_plan(model, 2, 64, {})
    changed = {change.path: change.becomes for change in plan.changes}
    assert changed["model.layers.0.mlp.down_proj"] == "gathered"
    assert changed["model.layers.1.self_attn.o_proj"] == "row"
    split_module(model, plan.changes, 1, RanksSeam(one(torch.device("cpu"))))
    assert isinstance(first.down_proj, GatheredLinear) and first.down_proj is second.down_proj


_MORE = {  # beyond the inventory: architecture, its config, fields
    "gpt-oss": ("GptOssForCausalLM", "GptOss", dict(num_local_experts=4, intermediate_size=40)),
    "llama-4": ("Llama4ForCausalLM", "Llama4Text", dict(num_local_experts=4)),
    "persimmon": ("PersimmonForCausalLM", "Persimmon", {}),
    "vit": ("ViTModel", "ViT", dict(image_size=16, patch_size=8)),
    "whisper": (
        "WhisperModel",
        "Whisper",
        dict(
            d_model=48,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
            max_source_positions=10,
        ),
    ),
}


@pytest.mark.parametrize("name", _MORE)
def test_other_models_are_tried_out_and_split_in_units(name):
    import transformers

    architecture, config, own = _MORE[name]
    fields = dict(
        hidden_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=40,
        vocab_size=VOCAB,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    )
    made = getattr(transformers, f"{config}Config")(**(fields | own))
    model = getattr(transformers, architecture)(made).eval()
    plan, notes = make_plan(model, 3, 64, {})
    changed = {change.becomes for change in plan.changes if "layers" in change.path}
    assert {"column", "row"} <= changed and "gathered" not in changed, notes
    assert not any("could not" in note or "other values" in note for note in notes), notes


def test_wrong_layout_is_noticed(monkeypatch):
    monkeypatch.setitem(layouts._BY_CLASS, "BloomAttention", layouts.blocks)
    plan, notes = make_plan(make_model("bloom"), 2, 64, {})
    changed = {change.path: change.becomes for change in plan.changes}
    assert changed["transformer.h.1.self_attention.query_key_value"] == "gathered"
    assert changed["transformer.h.1.mlp.dense_4h_to_h"] == "row"
    assert any("attention, mlp, experts split as units gave other values" in n for n in notes)


def test_one_device_leaves_the_module_as_it_is():
    model = make_model("llama")
    kinds = [type(part) for part in model.modules()]
    with dualinfer.init_inference(model, dtype="fp32") as engine:
        assert [type(part) for part in model.modules()] == kinds
        assert engine._turns.peers.size == 1
