from __future__ import annotations

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jaxquant import records
from jaxquant.quant import q4_k, q8_k

FORMATS = [pytest.param(q4_k, id="q4_k"), pytest.param(q8_k, id="q8_k")]


def on_host(function, r, fmt):
    return function(r, fmt)


def eager(function, r, fmt):
    return function(jax.tree.map(jnp.asarray, r), fmt)


def jitted(function, r, fmt):
    return jax.jit(function, static_argnums=1)(r, fmt)


def constant(function, r, fmt):
    r = jax.tree.map(jnp.asarray, r)
    return jax.jit(lambda: function(r, fmt))()


def mapped(function, r, fmt):
    return jax.vmap(lambda one: function(one, fmt))(jax.tree.map(jnp.asarray, r))


PATHS = [
    pytest.param(path, id=path.__name__.removeprefix("on_"))
    for path in (on_host, eager, jitted, constant, mapped)
]


def sample(rng, fmt, shape) -> np.ndarray:
    """Random records, all legal and illegal kinds of scales and sums among them."""
    if fmt is q4_k:
        return exact.random_q4k(rng, shape, finite=0)
    halves = exact.random_q8k(rng, shape), exact.random_illegal_q8k(rng, shape)
    return np.where(rng.random((*shape, 1)) < 0.5, *halves)


def decoded(r, fmt):
    """The reference's fields in the dtypes of the format."""
    fields = exact.decode_q4k(r) if fmt is q4_k else exact.decode_q8k(r)
    with np.errstate(invalid="ignore"):
        return [value.astype(field.dtype) for value, field in zip(fields, fmt.fields, strict=True)]


# unpack and pack


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_unpack(rng, fmt, path):
    r = sample(rng, fmt, (64, 5))
    fields = path(records.unpack, r, fmt)
    assert type(fields) is (records.Q4K if fmt is q4_k else records.Q8K)
    for field, value, expected in zip(fmt.fields, fields, decoded(r, fmt), strict=True):
        assert isinstance(value, np.ndarray if path is on_host else jax.Array)
        assert exact.same_bits(value, expected), field.name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_pack_inverts_unpack_to_the_byte(rng, fmt, path):
    r = sample(rng, fmt, (64, 5))
    packed = path(records.pack, records.unpack(r, fmt), fmt)
    assert isinstance(packed, np.ndarray if path is on_host else jax.Array)
    assert exact.same_bits(packed, r)


def test_unpack_keeps_nan_payloads():
    r = np.zeros((1, 292), np.uint8)
    r[0, :4] = 0x34, 0x12, 0x80, 0xFF
    for path in (on_host, eager, jitted):
        ds = np.asarray(path(records.unpack, r, q8_k).ds)
        assert ds.view(np.uint32).tolist() == [0xFF801234]


def test_unpack_of_golden_records():
    golden = exact.load("golden_qk")
    for fmt, prefix in ((q4_k, "q4k"), (q8_k, "q8k")):
        fields = records.unpack(golden[f"{prefix}_rec"], fmt)
        for name, value in fields._asdict().items():
            assert exact.same_bits(value, golden[f"{prefix}_{name}"]), name


def test_unpacked_fields_are_no_views(rng):
    r = exact.random_q8k(rng, (2,))
    before = r.copy()
    fields = records.unpack(r, q8_k)
    fields.q[:] = 0
    fields.ds[:] = 0
    assert exact.same_bits(r, before)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("lead", [(), (0,), (3, 0), (2, 1, 3)], ids=str)
def test_leading_axes(rng, fmt, lead):
    r = sample(rng, fmt, lead)
    for path in (on_host, eager):
        fields = path(records.unpack, r, fmt)
        for field, value, expected in zip(fmt.fields, fields, decoded(r, fmt), strict=True):
            assert exact.same_bits(value, expected), field.name
        assert exact.same_bits(path(records.pack, fields, fmt), r)
        values = path(records.dequantize, r, fmt)
        assert exact.same_bits(values, DEQUANTIZE[fmt](r))


@pytest.mark.parametrize("fmt", FORMATS)
def test_strided_and_transposed_records(rng, fmt):
    r = sample(rng, fmt, (6, 4))
    wide = np.zeros((6, 4, fmt.record_bytes + 3), np.uint8)
    wide[..., 1:-2] = r
    for view in (r[::-2, 1:].transpose(1, 0, 2), wide[..., 1:-2], np.asfortranarray(r)):
        solid = np.ascontiguousarray(view)
        assert exact.same_bits(records.dequantize(view, fmt), DEQUANTIZE[fmt](solid))
        assert exact.same_bits(records.pack(records.unpack(view, fmt), fmt), solid)


def zero_fields(fmt, lead=(2,)):
    cls = records.Q4K if fmt is q4_k else records.Q8K
    return cls(*(np.zeros((*lead, *field.shape), field.dtype) for field in fmt.fields))


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sc", 64, r"fields.sc: got 64 at \[1, 3\], want 0 to 63 \(6 bits\)"),
        ("m", 255, r"fields.m: got 255 at \[1, 3\], want 0 to 63 \(6 bits\)"),
        ("q", 16, r"fields.q: got 16 at \[1, 3\], want 0 to 15 \(4 bits\)"),
    ],
)
def test_pack_refuses_values_that_need_more_bits(name, value, message, convert):
    fields = zero_fields(q4_k)
    getattr(fields, name)[1, 3] = value
    with pytest.raises(ValueError, match=message):
        records.pack(jax.tree.map(convert, fields), q4_k)


def test_pack_of_traced_values_reports_to_checkify_and_keeps_to_the_field():
    fields = zero_fields(q4_k)
    fields.sc[1, 3], fields.m[0, 7], fields.q[1, 200] = 64 + 5, 128 + 3, 16 + 9

    def packed(fields):
        return records.pack(fields, q4_k)

    error, _ = checkify.checkify(jax.jit(packed), errors=checkify.user_checks)(fields)
    assert "fields.sc: a value is above 63 (6 bits)" in error.get()
    error, result = checkify.checkify(jax.jit(packed), errors=checkify.user_checks)(zero_fields(q4_k))
    assert error.get() is None
    assert not result.any()
    kept = exact.decode_q4k(jax.jit(packed)(fields))
    assert (kept.sc.sum(), kept.m.sum(), kept.q.sum()) == (5, 3, 9)
    assert (kept.sc[1, 3], kept.m[0, 7], kept.q[1, 200]) == (5, 3, 9)


@pytest.mark.parametrize(
    ("fmt", "name", "dtype"),
    [
        (q4_k, "d", np.float32),
        (q4_k, "sc", np.int8),
        (q4_k, "q", np.int32),
        (q8_k, "ds", np.float16),
        (q8_k, "q", np.uint8),
        (q8_k, "bsum", np.int32),
        (q8_k, "bsum", np.dtype(">i2")),
    ],
    ids=str,
)
def test_pack_refuses_another_dtype(fmt, name, dtype):
    fields = zero_fields(fmt)
    fields = fields._replace(**{name: getattr(fields, name).astype(dtype)})
    wanted = next(field.dtype for field in fmt.fields if field.name == name)
    message = f"fields.{name}: got dtype {np.dtype(dtype)}, want {wanted.name}"
    with pytest.raises(TypeError, match=message):
        records.pack(fields, fmt)


def test_pack_refuses_lists():
    with pytest.raises(TypeError, match=r"fields.bsum: got list, want a int16 NumPy or JAX array"):
        records.pack(zero_fields(q8_k)._replace(bsum=[0] * 16), q8_k)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (2, 255), r"fields.q: got shape \(2, 255\), want \(2, 256\)"),
        ("bsum", (16,), r"fields.bsum: got shape \(16,\), want \(2, 16\)"),
        ("bsum", (3, 16), r"fields.bsum: got shape \(3, 16\), want \(2, 16\)"),
        ("ds", (1,), r"fields.q: got shape \(2, 256\), want \(1, 256\)"),
        ("ds", (2, 1), r"fields.q: got shape \(2, 256\), want \(2, 1, 256\)"),
    ],
)
def test_pack_refuses_another_shape(name, shape, message):
    fields = zero_fields(q8_k)
    with pytest.raises(ValueError, match=message):
        records.pack(fields._replace(**{name: np.zeros(shape, getattr(fields, name).dtype)}), q8_k)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (zero_fields(q8_k), r"fields: got Q8K, want jaxquant.records.Q4K for format jaxquant.quant.q4_k"),
        (tuple(zero_fields(q4_k)), r"fields: got tuple, want jaxquant.records.Q4K"),
    ],
    ids=["other format", "tuple"],
)
def test_pack_refuses_other_fields(fields, message):
    with pytest.raises(TypeError, match=message):
        records.pack(fields, q4_k)


# dequantize

DEQUANTIZE = {q4_k: exact.dequantize_q4k, q8_k: exact.dequantize_q8k}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize(rng, fmt, path):
    # As a constant it is folded at compile time, by XLA's slow evaluator.
    r = sample(rng, fmt, (10, 2) if path is constant else (400, 5))
    values = path(records.dequantize, r, fmt)
    assert isinstance(values, np.ndarray if path is on_host else jax.Array)
    assert exact.same_bits(values, DEQUANTIZE[fmt](r))


@pytest.mark.parametrize("path", PATHS)
def test_dequantize_equals_ggml(path):
    golden = exact.load("q4k_records")
    assert exact.same_bits(path(records.dequantize, golden["records"], q4_k), golden["dequant_ggml"])


@pytest.mark.parametrize("path", PATHS)
def test_dequantize_keeps_subnormals_and_signed_zeros(rng, path):
    r = exact.quantize(exact.blocks(rng, "subnormal_ds", 20))
    values = np.asarray(path(records.dequantize, r, q8_k))
    assert exact.same_bits(values, exact.dequantize_q8k(r))
    assert ((values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)).any()
    negative = exact.encode_q8k(np.float32(-1), np.zeros((1, 256), np.int64))
    assert np.signbit(np.asarray(path(records.dequantize, negative, q8_k))).all()


def test_dequantize_with_x64():
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        for fmt in (q4_k, q8_k):
            r = sample(rng, fmt, (50,))
            assert exact.same_bits(records.dequantize(jnp.asarray(r), fmt), DEQUANTIZE[fmt](r))


@pytest.mark.exhaustive
@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_every_half_pattern(fmt):
    rng = np.random.default_rng(4)
    for _ in range(32):
        r = sample(rng, fmt, (65536,))
        expected = DEQUANTIZE[fmt](r)
        assert exact.same_bits(records.dequantize(r, fmt), expected)
        assert exact.same_bits(records.dequantize(jnp.asarray(r), fmt), expected)


# validate_records


def q8k_with(**changes) -> np.ndarray:
    """Two by three legal records, of which [1, 0] is then changed."""
    r = exact.encode_q8k(np.full((2, 3), 0.5, np.float32), np.ones((2, 3, 256), np.int64))
    fields = records.unpack(r, q8_k)
    for name, (index, value) in changes.items():
        getattr(fields, name)[1, 0, *index] = value
    return records.pack(fields, q8_k)


ILLEGAL = {
    "bsum": (q8k_with(bsum=((3,), 17)), q8_k, r"^r\[1, 0\]: bsum\[3\] is 17, but q\[48:64\] sums to 16$"),
    "last bsum": (q8k_with(bsum=((15,), -16)), q8_k, r"^r\[1, 0\]: bsum\[15\] is -16, but q\[240:256\] sums"),
    "q": (q8k_with(q=((16,), -128)), q8_k, r"^r\[1, 0\]: bsum\[1\] is 16, but q\[16:32\] sums to -113$"),
    "infinite ds": (q8k_with(ds=((), -np.inf)), q8_k, r"^r\[1, 0\]: ds is -inf, not finite$"),
    "two faults": (q8k_with(ds=((), np.inf), bsum=((0,), 0)), q8_k, r"^r\[1, 0\]: ds is inf, not finite$"),
    "poison": (
        np.stack([np.zeros(292, np.uint8), exact.POISON, exact.POISON]),
        q8_k,
        r"^r\[1\]: ds is nan, not finite \(quantize marks out-of-domain blocks so\)$",
    ),
    "a lone record": (exact.POISON, q8_k, "^r: ds is nan"),
    "earlier bsum": (
        np.stack([exact.encode_q8k(np.float32(1), np.ones(256), np.zeros(16, np.int64)), exact.POISON]),
        q8_k,
        r"^r\[0\]: bsum\[0\] is 0, but q\[0:16\] sums to 16$",
    ),
    "infinite d": (
        np.array([[0] * 144, [0, 0x7C, *[0] * 142]], np.uint8),
        q4_k,
        r"^r\[1\]: d is inf, not finite$",
    ),
    "nan dmin": (
        np.array([[0, 0, 1, 0x7C, *[0] * 140]], np.uint8),
        q4_k,
        r"^r\[0\]: dmin is nan, not finite$",
    ),
    "earlier dmin": (
        np.array([[0, 0, 0, 0xFC, *[0] * 140], [0, 0x7C, *[0] * 142]], np.uint8),
        q4_k,
        r"^r\[0\]: dmin is -inf, not finite$",
    ),
}


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ILLEGAL)
def test_validate_names_the_first_illegal_record(name, convert):
    r, fmt, message = ILLEGAL[name]
    with pytest.raises(ValueError, match=message):
        records.validate_records(convert(r), fmt)


@pytest.mark.parametrize("kind", exact.KINDS)
def test_validate_accepts_what_quantize_makes(rng, kind):
    assert records.validate_records(exact.quantize(exact.blocks(rng, kind, 20)), q8_k) is None


def test_validate_accepts_finite_q4k_of_any_bits(rng):
    r = exact.random_q4k(rng, (200, 2))
    r[..., [1, 3]] &= 0xBF
    assert records.validate_records(r, q4_k) is None


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("lead", [(0,), (3, 0)], ids=str)
def test_validate_accepts_no_records(fmt, lead):
    assert records.validate_records(np.zeros((*lead, fmt.record_bytes), np.uint8), fmt) is None


def test_validate_refuses_traced_records():
    with pytest.raises(TypeError, match="r: got a traced array, want a concrete one"):
        jax.jit(records.validate_records, static_argnums=1)(np.zeros((1, 292), np.uint8), q8_k)


# split


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("shape", [(256,), (512,), (3, 1024), (2, 0, 512), (2, 0)], ids=str)
def test_split(convert, shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    blocks = records.split(convert(x))
    assert type(blocks) is type(convert(x))
    assert blocks.shape == (*shape[:-1], shape[-1] // 256, 256)
    for g in range(shape[-1] // 256):
        assert exact.same_bits(blocks[..., g, :], x[..., 256 * g : 256 * (g + 1)])


def test_split_of_numpy_is_a_view():
    x = np.zeros((4, 1024), np.float32)[::2, :512]
    assert np.shares_memory(records.split(x), x)


@pytest.mark.parametrize("shape", [(255,), (2, 257), (100,)], ids=str)
def test_split_refuses_a_partial_block(shape):
    with pytest.raises(ValueError, match=rf"x: got shape .*, K = {shape[-1]}, want K a multiple of 256"):
        records.split(np.zeros(shape, np.float32))


def test_split_refuses_scalars_and_lists():
    with pytest.raises(ValueError, match=r"x: got shape \(\), want \[..., K\]"):
        records.split(np.zeros((), np.float32))
    with pytest.raises(TypeError, match="x: got list, want a NumPy or JAX array"):
        records.split([0.0] * 256)


# explain


def on_host_explain(w, x):
    return records.explain(w, x)


def eager_explain(w, x):
    return records.explain(jnp.asarray(w), jnp.asarray(x))


def half_eager_explain(w, x):
    return records.explain(w, jnp.asarray(x))


def jitted_explain(w, x):
    return jax.jit(records.explain)(w, x)


def constant_explain(w, x):
    return jax.jit(lambda: records.explain(jnp.asarray(w), jnp.asarray(x)))()


EXPLAIN = [
    pytest.param(path, id=path.__name__.removesuffix("_explain").removeprefix("on_"))
    for path in (on_host_explain, eager_explain, half_eager_explain, jitted_explain, constant_explain)
]


def assert_steps(steps, expected):
    assert type(steps) is records.Statistics
    for name in ("S", "T"):
        assert exact.same_bits(getattr(steps, name), getattr(expected, name).astype(np.int32)), name
    for name in ("p", "n", "v"):
        assert exact.same_bits(getattr(steps, name), getattr(expected, name)), name


@pytest.mark.parametrize("path", EXPLAIN)
@pytest.mark.parametrize("groups", [0, 1, 3, 2000])
def test_explain(rng, path, groups):
    groups = min(groups, 20) if path is constant_explain else groups
    w, x = exact.random_q4k(rng, (groups,)), sample(rng, q8_k, (groups,))
    assert_steps(path(w, x), exact.statistics(w, x))


def test_explain_under_vmap(rng):
    w, x = exact.random_q4k(rng, (4, 3)), exact.random_q8k(rng, (3,))
    steps = jax.vmap(records.explain, (0, None))(w, x)
    assert_steps(steps, exact.statistics(w, x))


@pytest.mark.parametrize("path", EXPLAIN)
def test_explain_extreme_statistics(path):
    w = np.full((2, 144), 0xFF, np.uint8)
    w[:, :4] = 0, 0x3C, 0, 0x3C
    x = exact.encode_q8k(
        np.ones(2, np.float32), np.full((2, 256), -128), np.array([[-2048] * 16, [-32768] * 16])
    )
    steps = path(w, x)
    assert np.asarray(steps.S).tolist() == [-30965760] * 2
    assert np.asarray(steps.T).tolist() == [-2064384, -33030144]
    assert_steps(steps, exact.statistics(w, x))


def test_explain_of_golden_dots():
    golden = exact.load("dots")
    w = exact.load("q4k_records")["records"][golden["w_index"]]
    x = exact.load("q8k_quant")["contract"][golden["x_index"]]
    for steps in (records.explain(w, x), records.explain(jnp.asarray(w), jnp.asarray(x))):
        for name in ("S", "T", "v"):
            assert exact.same_bits(getattr(steps, name), golden[name]), name


@pytest.mark.parametrize(
    ("w_shape", "x_shape", "message"),
    [
        (
            (3, 144),
            (2, 292),
            r"w and x: got shapes \(3, 144\) and \(2, 292\), want \(G, 144\) and \(G, 292\)",
        ),
        ((144,), (2, 292), r"w: got shape \(144,\), want \(G, 144\)"),
        ((2, 144), (5, 2, 292), r"x: got shape \(5, 2, 292\), want \(G, 292\); use jax.vmap"),
        ((2, 292), (2, 144), r"w: got shape \(2, 292\), want \(..., 144\) for q4_k records"),
    ],
)
def test_explain_refuses_other_shapes(w_shape, x_shape, message):
    w, x = np.zeros(w_shape, np.uint8), np.zeros(x_shape, np.uint8)
    for path in (on_host_explain, eager_explain, jitted_explain):
        with pytest.raises(ValueError, match=message):
            path(w, x)


def test_explain_refuses_other_dtypes():
    w, x = np.zeros((2, 144), np.uint8), np.zeros((2, 292), np.int8)
    with pytest.raises(TypeError, match="x: got dtype int8, want uint8"):
        records.explain(w, x)
    with pytest.raises(TypeError, match="w: got list, want a uint8 NumPy or JAX array"):
        records.explain(w.tolist(), x)


# What every function that takes records refuses

TAKERS = [
    pytest.param(function, id=function.__name__)
    for function in (records.unpack, records.dequantize, records.validate_records)
]


@pytest.mark.parametrize("function", TAKERS)
@pytest.mark.parametrize("fmt", ["q4_k", None, np.uint8, object()], ids=["str", "None", "dtype", "object"])
def test_foreign_formats_are_refused(function, fmt):
    message = r"format: got .*, want jaxquant.quant.q4_k or jaxquant.quant.q8_k"
    with pytest.raises(TypeError, match=message):
        function(np.zeros((1, 144), np.uint8), fmt)
    with pytest.raises(TypeError, match=message):
        records.pack(zero_fields(q4_k), fmt)


@pytest.mark.parametrize("function", TAKERS)
@pytest.mark.parametrize("dtype", ["int8", "float32", "uint16", "bool"])
def test_other_dtypes_are_refused(function, dtype):
    r = np.zeros((1, 144), dtype)
    for operand in (r, jnp.asarray(r)):
        with pytest.raises(TypeError, match=f"r: got dtype {dtype}, want uint8"):
            function(operand, q4_k)
    if function is not records.validate_records:
        with pytest.raises(TypeError, match=f"r: got dtype {dtype}, want uint8"):
            jax.jit(function, static_argnums=1)(r, q4_k)


@pytest.mark.parametrize("function", TAKERS)
@pytest.mark.parametrize(
    ("operand", "kind"),
    [([[0] * 144], "list"), (0, "int"), (b"\0" * 144, "bytes"), (np.uint8(0), "uint8")],
    ids=["list", "int", "bytes", "scalar"],
)
def test_other_operands_are_refused(function, operand, kind):
    with pytest.raises(TypeError, match=f"r: got {kind}, want a uint8 NumPy or JAX array"):
        function(operand, q4_k)


@pytest.mark.parametrize("function", TAKERS)
@pytest.mark.parametrize("shape", [(), (143,), (1, 292), (144, 1), (1, 288)], ids=str)
def test_other_extents_are_refused(function, shape):
    r = np.zeros(shape, np.uint8)
    for operand in (r, jnp.asarray(r)):
        with pytest.raises(ValueError, match=r"r: got shape .*, want \(..., 144\) for q4_k records"):
            function(operand, q4_k)
