"""Encoders of images, CLIP and SigLIP, against HF's own classes, on both backends."""

import numpy as np
import pytest
import torch
import transformers as hf

import dualinfer
from dualinfer.errors import ArgumentError, UnsupportedError

from .cases import make_model
from .cases.covering import each
from .cases.images import CASES, inputs_of
from .models import BACKENDS, relative_rms

LIMIT = 1e-5
HOW = {"dtype": "fp32", "replace_with_kernel_inject": True}


def of_hf(model, given, **more):
    with torch.no_grad():
        return model(**{k: torch.tensor(v) for k, v in given.items()}, **more)


def compare(ours, theirs, mask=None):
    """Every output in HF's order, at the real tokens where it has one for each."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, hf.utils.ModelOutput):
            compare(ours[name], value, None if name == "vision_model_output" else mask)
            continue
        real = ... if mask is None else mask == 1
        several = isinstance(value, tuple)
        for one, other in zip(ours[name], value, strict=True) if several else [(ours[name], value)]:
            one, other = np.asarray(one), np.asarray(other)
            at = real if other.ndim == 3 else ...
            assert one.shape == other.shape and relative_rms(one[at], other[at]) < LIMIT, name


@pytest.mark.parametrize(("case", "backend"), each(CASES))
def test_an_encoder_gives_what_hf_gives_live_and_from_its_folder(case, backend, tmp_path):
    model, given = make_model(case), inputs_of(case)
    expected = of_hf(model, given, output_hidden_states=True)
    mask = given.get("attention_mask")
    engine = dualinfer.init_inference(model, backend=backend, **HOW)
    compare(engine(**given, output_hidden_states=True), expected, mask)
    model.save_pretrained(tmp_path / "hf")
    engine = dualinfer.init_inference(tmp_path / "hf", backend=backend, dtype="fp32")
    compare(engine(**given, output_hidden_states=True), expected, mask)
    engine.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    compare(of_hf(again, given, output_hidden_states=True), expected, mask)


# Of the files of google/vit-base-patch16-224, in the place of transformers 5's.
OLD = {
    **{".attention.q_proj": ".attention.attention.query", "vit.layers": "vit.encoder.layer"},
    **{".attention.k_proj": ".attention.attention.key", ".mlp.fc1": ".intermediate.dense"},
    **{".attention.v_proj": ".attention.attention.value", ".mlp.fc2": ".output.dense"},
    ".attention.o_proj": ".attention.output.dense",
}


def test_names_of_older_files_are_read(tmp_path):
    from safetensors.torch import save_file

    model, given = make_model("vit-labels"), inputs_of("vit-labels")
    tensors = {}
    for name, value in model.state_dict().items():
        for new, old in OLD.items():
            name = name.replace(new, old)
        tensors[name] = value
    model.config.architectures = ["ViTForImageClassification"]
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    engine = dualinfer.init_inference(tmp_path, dtype="fp32")
    compare(engine(**given), of_hf(model, given))


def test_labels_give_the_loss_and_images_may_be_the_first_argument():
    model, given = make_model("vit-labels"), inputs_of("vit-labels")
    pixels = torch.tensor(given["pixel_values"])
    engine = dualinfer.init_inference(model, **HOW)
    found = engine(pixels, labels=[0, 2])
    assert relative_rms(found.loss, of_hf(model, given, labels=torch.tensor([0, 2])).loss) < LIMIT
    assert isinstance(found.logits, torch.Tensor)


def test_what_does_not_fit_is_refused():
    images, texts = inputs_of("clip-image"), inputs_of("clip-text")
    eye = dualinfer.init_inference(make_model("clip-image"), **HOW)
    text = dualinfer.init_inference(make_model("clip-text"), **HOW)
    with pytest.raises(
        ArgumentError, match=r"\(2, 3, 15, 14\); expected \[batch, 3, 15, 15\].*interpolate"
    ):
        eye(pixel_values=images["pixel_values"][..., :-1])
    with pytest.raises(ArgumentError, match="reads pixel_values alone; attention_mask was given"):
        eye(**images, attention_mask=np.ones((3, 10)))
    with pytest.raises(ArgumentError, match="pixel_values is missing"):
        eye()
    with pytest.raises(ArgumentError, match="interpolate_pos_encoding='yes'; expected True"):
        eye(**images, interpolate_pos_encoding="yes")
    with pytest.raises(ArgumentError, match="interpolate_pos_encoding is of models that read im"):
        text(**texts, interpolate_pos_encoding=True)
    with pytest.raises(UnsupportedError, match="CLIPTextModel is not one: call the engine itself"):
        text.get_text_features(**texts)
    with pytest.raises(ArgumentError, match="pixel_values: CLIPTextModel reads input_ids"):
        text(**texts, **images)
    with pytest.raises(UnsupportedError, match="reads images, and embed\\(\\) texts"):
        eye.embed([[3, 4]])
    assert text.embed([[3, 4, 7]]).shape == (1, 36)


def test_a_model_of_both_gives_the_vectors_of_each_alone():
    model, given = make_model("clip"), inputs_of("clip")
    pixels = given.pop("pixel_values")
    engine = dualinfer.init_inference(model, **HOW)
    with torch.no_grad():
        texts = model.get_text_features(**{k: torch.tensor(v) for k, v in given.items()})
        images = model.get_image_features(torch.tensor(pixels))
    compare(engine.get_text_features(**given), texts, given["attention_mask"])
    compare(engine.get_image_features(pixels), images)
    with pytest.raises(ArgumentError, match=r"pixel_values is missing: .*get_text_features"):
        engine(**given)
    with pytest.raises(ArgumentError, match="labels: CLIPModel has none"):
        engine(**given, pixel_values=pixels, labels=[0])
    with pytest.raises(ArgumentError, match="does not support return_loss"):
        engine(**given, pixel_values=pixels, return_loss=True)
    with pytest.raises(UnsupportedError, match=r"engine\.get_text_features"):
        engine.embed([[3, 4]])


ANY_SIZE = [("clip", "torch"), ("deit", "jax"), ("siglip-image", "torch"), ("dinov2", "torch")]
ANY_SIZE += [("registers", "torch"), ("ijepa-labels", "jax"), ("dinov2-labels", "jax")]


@pytest.mark.parametrize(
    ("case", "backend"),
    [(*ANY_SIZE[0],)]
    + [pytest.param(case, name, marks=[pytest.mark.slow]) for case, name in ANY_SIZE[1:]],
)
def test_images_of_another_size_have_positions_as_hf_interpolates_them(case, backend):
    square = {"image_size": 16} if case in ("deit", "ijepa-labels") else {}
    model, given = make_model(case, **square), inputs_of(case)
    channels = given["pixel_values"].shape[1]
    random = np.random.default_rng(5)  # smaller than the model's own one way, larger the other
    given["pixel_values"] = random.standard_normal((2, channels, 12, 41)).astype(np.float32)
    how = (
        {}
        if case in ("dinov2", "registers", "dinov2-labels")
        else {"interpolate_pos_encoding": True}
    )
    expected = of_hf(model, given, output_hidden_states=True, **how)
    engine = dualinfer.init_inference(model, backend=backend, **HOW)
    found = engine(**given, output_hidden_states=True, **how)
    compare(found, expected, given.get("attention_mask"))
    if backend == "jax":
        compare(engine.apply(engine.params, **given, output_hidden_states=True, **how), expected)


def test_a_pure_function_says_what_does_not_fit():
    import jax

    patches, images = inputs_of("siglip2-image"), inputs_of("vit")
    with (
        dualinfer.init_inference(make_model("siglip2-image"), backend="jax", **HOW) as flexible,
        dualinfer.init_inference(make_model("vit"), backend="jax", **HOW) as square,
    ):
        for engine, given, changes, match in (
            (flexible, patches, {"spatial_shapes": None}, "spatial_shapes is missing"),
            (flexible, patches, {}, "spatial_shapes .* is traced here.* closes over"),
            (square, images, patches, "pixel_attention_mask: .* reads pixel_values, interpolate"),
            (square, images, {"interpolate_pos_encoding": True}, "pos_encoding .* static_argnames"),
            (
                square,
                images,
                {"pixel_values": images["pixel_values"][..., :-1]},
                r"shape \(2, 2, 12, 15\).*expected floats \[batch, 2, 12, 16\], or of another",
            ),
        ):
            with pytest.raises(ArgumentError, match=match):
                jax.eval_shape(engine.apply, engine.params, **{**given, **changes})


def test_patches_that_do_not_fit_are_refused():
    given = inputs_of("siglip2-image")
    with dualinfer.init_inference(make_model("siglip2-image"), **HOW) as engine:
        for changes, match in (
            ({"spatial_shapes": None}, "spatial_shapes is missing"),
            ({"spatial_shapes": [[2, 3], [4, 6]]}, r"4, 6.*at most 20 patches"),
            ({"pixel_values": given["pixel_values"][..., :-1]}, r"expected \[batch, patches, 75\]"),
            ({"pixel_attention_mask": np.ones((2, 3))}, "pixel_attention_mask has shape"),
            ({"interpolate_pos_encoding": True}, "given as patches"),
        ):
            with pytest.raises(ArgumentError, match=match):
                engine(**{**given, **changes})
    engine = dualinfer.init_inference(make_model("vit"), **HOW)
    with pytest.raises(ArgumentError, match="spatial_shapes"):
        engine(**inputs_of("vit"), spatial_shapes=[[2, 3]])


def on_devices(case, backend, devices):
    how = {**HOW, "backend": backend, "tensor_parallel": {"tp_size": devices}}
    with dualinfer.init_inference(make_model(case), **how) as engine:
        return np.asarray(engine(**inputs_of(case))[0])


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        *("vit", "clip-image-projected", "clip-text-projected", "siglip", "siglip2-labels"),
        "registers-labels",
    ],
)
def test_two_devices_give_what_one_gives(case, backend, crew):
    if backend == "torch":
        found = crew.run(on_devices, case, backend, 2, world=2)
    else:
        found = [on_devices(case, backend, 2)]
    expected = on_devices(case, "torch", 1)  # which gives what JAX gives, and compiles nothing
    assert all(relative_rms(own, expected) < LIMIT for own in found)
