"""Both operations over meshes of virtual devices: what each device computes, and that no weight moves."""

from __future__ import annotations

from typing import NamedTuple

import exact
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxquant as jq
from devices import layouts
from devices.layouts import call_shapes, collectives, local, parameters, put
from jaxquant.nn import quantized_linear

P = jax.P
ROWS, COLUMNS, RECORDS, BATCH = 16, 8, 2, 8

gemv = jax.vmap(jq.quantized_dot, (0, None))
gemm = jax.vmap(gemv, (None, 0))  # [N, M]
gemm_rows_first = jax.vmap(jax.vmap(jq.quantized_dot, (None, 0)), (0, None))  # [M, N]
batched_gemm = jax.vmap(gemm)
quantize = jax.vmap(jq.quantize)


class Case(NamedTuple):
    """A function, the leading extents of its operands, and where operands and result lie."""

    function: object
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    specs: tuple[P, P]
    result: P
    want: object


def rows_first(w, x):
    return exact.gemm(w, x)


def columns_first(w, x):
    return exact.gemm(w, x).T


def gemm_case(lhs, rhs):
    return Case(gemm, (ROWS,), (COLUMNS,), (P(lhs), P(rhs)), P(rhs, lhs), columns_first)


ON_ONE_AXIS = {
    "dot per batch": Case(
        jax.vmap(jq.quantized_dot), (BATCH,), (BATCH,), (P("a"), P("a")), P("a"), exact.dots
    ),
    "gemv of rows": Case(gemv, (ROWS,), (), (P("a"), P()), P("a"), lambda w, x: exact.dots(w, x)),
    "gemm of rows": gemm_case("a", None),
    "gemm of columns": gemm_case(None, "a"),
    "gemm of rows, rows first": Case(
        gemm_rows_first, (ROWS,), (COLUMNS,), (P("a"), P()), P("a", None), rows_first
    ),
    "gemm of batches": Case(
        batched_gemm,
        (BATCH, 3),
        (BATCH, 5),
        (P("a"), P("a")),
        P("a"),
        lambda w, x: exact.dots(w[:, None], x[:, :, None]),
    ),
}
ON_TWO_AXES = {
    "gemm of rows and columns": gemm_case("a", "b"),
    "gemm of columns and rows": gemm_case("b", "a"),
    "gemm of rows over both": gemm_case(("a", "b"), None),
    "gemm of columns over both, reversed": gemm_case(None, ("b", "a")),
    "gemm of rows over the minor axis": gemm_case("b", None),
    "gemm of batches and rows": Case(
        batched_gemm,
        (BATCH, 4),
        (BATCH, 5),
        (P("a", "b"), P("a")),
        P("a", None, "b"),
        lambda w, x: exact.dots(w[:, None], x[:, :, None]),
    ),
}
CASES = [
    *((mesh, name) for mesh in ("1", "2", "8") for name in ON_ONE_AXIS),
    *(("4x2", name) for name in ON_TWO_AXES),
    ("2x4", "gemm of rows and columns"),
]
MODES = ["auto", "explicit", "shard_map"]
ALL = ON_ONE_AXIS | ON_TWO_AXES


def mesh_of(name, mode):
    return layouts.mesh(name, AxisType.Explicit if mode == "explicit" else AxisType.Auto)


def run(function, mode, mesh, specs, result, operands):
    """The compiled text of a function on placed operands, and what it returns."""
    if mode == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=result)
    placed = [put(value, mesh, spec) for value, spec in zip(operands, specs, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    return compiled.as_text(), compiled(*placed)


def assert_lies(result, mesh, spec):
    assert result.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), result.ndim), result.sharding


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mesh", "name"), CASES, ids=lambda value: value)
def test_dot_computes_where_its_operands_lie(rng, mesh, name, mode):
    case = ALL[name]
    w, x = exact.random_q4k(rng, (*case.lhs, RECORDS)), exact.random_q8k(rng, (*case.rhs, RECORDS))
    want = case.want(w, x)
    mesh = mesh_of(mesh, mode)
    text, got = run(case.function, mode, mesh, case.specs, case.result, (w, x))
    assert collectives(text) == []
    assert parameters(text) == [local(v.shape, s, mesh) for v, s in zip((w, x), case.specs, strict=True)]
    assert call_shapes(text, hlo.DOT) == [local(want.shape, case.result, mesh)]
    assert hlo.byte_operations(text) <= {"parameter", "bitcast"}
    assert_lies(got, mesh, case.result)
    assert exact.same_bits(np.asarray(got), want)


QUANTIZE_SPECS = {
    "columns": ("8", P("a")),
    "two devices": ("2", P("a")),
    "one device": ("1", P("a")),
    "both axes": ("4x2", P(("a", "b"))),
    "columns and records": ("4x2", P("a", "b")),
    "records": ("2", P(None, "a")),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUANTIZE_SPECS)
def test_quantize_computes_where_its_blocks_lie(rng, name, mode):
    mesh, spec = QUANTIZE_SPECS[name]
    x = exact.blocks(rng, "gaussian", COLUMNS * RECORDS).reshape(COLUMNS, RECORDS, 256)
    mesh = mesh_of(mesh, mode)
    text, got = run(quantize, mode, mesh, (spec,), spec, (x,))
    assert collectives(text) == []
    assert call_shapes(text, hlo.QUANTIZE) == [local(got.shape, spec, mesh)]
    assert_lies(got, mesh, spec)
    np.testing.assert_array_equal(np.asarray(got), exact.quantize(x))


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_from_activations_to_result(rng, mode):
    mesh = mesh_of("4x2", mode)
    w = exact.random_q4k(rng, (ROWS, RECORDS))
    blocks = exact.blocks(rng, "gaussian", COLUMNS * RECORDS).reshape(COLUMNS, RECORDS, 256)
    specs, result = (P("b"), P("a")), P("b", "a")
    text, got = run(jq.quantized_matmul, mode, mesh, specs, result, (blocks.reshape(COLUMNS, -1), w))
    assert collectives(text) == []
    assert call_shapes(text, hlo.QUANTIZE) == [(4, RECORDS, 292)]
    assert call_shapes(text, hlo.DOT) == [(4, 4)]
    assert_lies(got, mesh, result)
    assert exact.same_bits(np.asarray(got), exact.gemm(w, exact.quantize(blocks)).T)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operand", ["lhs", "rhs"])
def test_an_operand_that_is_a_constant(rng, mode, operand):
    mesh = mesh_of("8", mode)
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    if operand == "lhs":
        text, got = run(lambda x: gemm(w, x), mode, mesh, (P("a"),), P("a"), (x,))
    else:
        text, got = run(lambda w: gemm(w, x), mode, mesh, (P("a"),), P(None, "a"), (w,))
    assert collectives(text) == []
    assert exact.same_bits(np.asarray(got), exact.gemm(w, x).T)


def test_fallback_is_split_as_the_kernels_are(rng):
    mesh = layouts.mesh("4x2")
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    values = exact.blocks(rng, "gaussian", COLUMNS * RECORDS).reshape(COLUMNS, RECORDS, 256)
    with jq.use_backend("fallback"):
        text, got = run(gemm, "auto", mesh, (P("a"), P("b")), P("b", "a"), (w, x))
        quantize_text, records = run(quantize, "auto", mesh, (P("b"),), P("b"), (values,))
    assert collectives(text) + collectives(quantize_text) == []
    assert hlo.calls(text) + hlo.calls(quantize_text) == []
    assert_lies(got, mesh, P("b", "a"))
    assert exact.same_bits(np.asarray(got), exact.gemm(w, x).T)
    np.testing.assert_array_equal(np.asarray(records), exact.quantize(values))


def test_result_that_is_asked_elsewhere_is_moved_and_weights_are_not(rng):
    mesh = layouts.mesh("8")
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    placed = put(w, mesh, P("a")), put(x, mesh, P())
    f = jax.jit(gemm, out_shardings=jax.NamedSharding(mesh, P()))
    text = f.lower(*placed).compile().as_text()
    assert call_shapes(text, hlo.DOT) == [(COLUMNS, 2)]
    assert [(kind, made[:3]) for kind, made in collectives(text)] == [("all-gather", "f32")]
    assert exact.same_bits(np.asarray(f(*placed)), exact.gemm(w, x).T)


def test_replicated_weights_of_a_split_result_are_sliced_in_place(rng):
    mesh = layouts.mesh("8")
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    placed = put(w, mesh, P()), put(x, mesh, P())
    f = jax.jit(gemm, out_shardings=jax.NamedSharding(mesh, P(None, "a")))
    text = f.lower(*placed).compile().as_text()
    assert collectives(text) == []
    assert call_shapes(text, hlo.DOT) == [(COLUMNS, 2)]
    assert exact.same_bits(np.asarray(f(*placed)), exact.gemm(w, x).T)


@pytest.mark.parametrize("specs", [("a", "a"), (("a", "b"), "a"), ("a", ("b", "a"))], ids=str)
def test_one_mesh_axis_over_rows_and_columns_moves_activations(rng, specs):
    mesh = layouts.mesh("4x2")
    rows, columns = specs
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    placed = put(w, mesh, P(rows)), put(x, mesh, P(columns))
    compiled = jax.jit(gemm).lower(*placed).compile()
    text = compiled.as_text()
    moved_bytes = [made for _, made in collectives(text) if "u8[" in made]
    assert moved_bytes
    assert all(",292]" in made for made in moved_bytes), moved_bytes
    assert call_shapes(text, hlo.DOT) == [(COLUMNS, local((ROWS,), P(rows), mesh)[0])]
    assert exact.same_bits(np.asarray(compiled(*placed)), exact.gemm(w, x).T)


@pytest.mark.parametrize(
    ("implementation", "spec"),
    [
        ("native", P(None, "a")),
        ("native", P(None, None, "a")),
        ("native", P("b", "a")),
        ("fallback", P(None, "a")),
    ],
    ids=str,
)
def test_records_over_devices_are_gathered_and_never_reduced(rng, spec, implementation):
    mesh = layouts.mesh("4x2")
    w, x = exact.random_q4k(rng, (ROWS, 4)), exact.random_q8k(rng, (COLUMNS, 4))
    placed = put(w, mesh, spec), put(x, mesh, P())
    with jq.use_backend(implementation):
        compiled = jax.jit(lambda w, x: gemm(w, x)).lower(*placed).compile()
    kinds = {kind for kind, _ in collectives(compiled.as_text())}
    assert "all-gather" in kinds
    assert not kinds & {"all-reduce", "reduce-scatter"}
    assert exact.same_bits(np.asarray(compiled(*placed)), exact.gemm(w, x).T)


def test_elements_over_devices_are_gathered(rng):
    mesh = layouts.mesh("8")
    x = exact.blocks(rng, "gaussian", COLUMNS)
    compiled = jax.jit(jq.quantize).lower(put(x, mesh, P(None, "a"))).compile()
    assert {kind for kind, _ in collectives(compiled.as_text())} == {"all-gather"}
    np.testing.assert_array_equal(np.asarray(compiled(put(x, mesh, P(None, "a")))), exact.quantize(x))


@pytest.mark.parametrize("operand", ["lhs", "rhs"])
@pytest.mark.parametrize("spec", [P(None, "a"), P(None, None, "a")], ids=["records", "bytes"])
def test_explicit_axes_refuse_split_records(operand, spec):
    mesh = layouts.mesh("2", AxisType.Explicit)
    w, x = np.zeros((ROWS, 4, 144), np.uint8), np.zeros((COLUMNS, 4, 292), np.uint8)
    specs = (spec, P()) if operand == "lhs" else (P(), spec)
    placed = [put(value, mesh, s) for value, s in zip((w, x), specs, strict=True)]
    message = f"record axis and the bytes of a record may not be sharded over devices, got {operand} uint8"
    with pytest.raises(ValueError, match=message):
        jax.jit(gemm)(*placed)


def test_explicit_axes_refuse_split_blocks():
    mesh = layouts.mesh("2", AxisType.Explicit)
    x = put(np.zeros((4, 256), np.float32), mesh, P(None, "a"))
    with pytest.raises(
        ValueError, match="256 elements of a block may not be sharded over devices, got values"
    ):
        jax.jit(jq.quantize)(x)


def test_rows_that_devices_do_not_divide(rng):
    """Inside a program an axis may be split unevenly; a dot then computes it as a whole."""
    mesh = layouts.mesh("8")
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    got = jax.jit(lambda w, x: gemm(w[:13], x))(put(w, mesh, P("a")), put(x, mesh, P()))
    assert exact.same_bits(np.asarray(got), exact.gemm(w[:13], x).T)


@pytest.mark.parametrize("shape", [(0, 8, 2), (8, 0, 2), (8, 8, 0)], ids=str)
def test_empty(shape):
    mesh = layouts.mesh("8")
    rows, columns, records = shape
    w = put(np.zeros((rows, records, 144), np.uint8), mesh, P("a"))
    x = put(np.zeros((columns, records, 292), np.uint8), mesh, P("a"))
    assert exact.same_bits(np.asarray(jax.jit(gemm)(w, x)), np.zeros((columns, rows), np.float32))


class TestManualAxes:
    """Inside shard_map, with the check of varying axes on."""

    @pytest.fixture
    def operands(self, rng):
        return exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))

    @pytest.mark.parametrize("kind", ["auto", "explicit"])
    def test_scan_over_rows(self, operands, kind):
        w, x = operands
        mesh = mesh_of("4x2", kind)

        def each_row(w, x):
            return lax.scan(lambda carry, row: (carry, jax.vmap(jq.quantized_dot, (None, 0))(row, x)), 0, w)[
                1
            ]

        text, got = run(each_row, "shard_map", mesh, (P("a"), P("b")), P("a", "b"), (w, x))
        assert collectives(text) == []
        assert exact.same_bits(np.asarray(got), exact.gemm(w, x))

    @pytest.mark.parametrize("varying", ["lhs", "rhs"])
    def test_carry_of_a_scan(self, operands, varying):
        """The result varies where either operand does, or the carry would change its type."""
        w, x = operands
        specs = (P("a"), P()) if varying == "lhs" else (P(), P("a"))

        def largest(w, x):
            start = jnp.full((x.shape[0],), -jnp.inf, jnp.float32)
            start = lax.pcast(start, "a", to="varying")
            step = lambda best, row: (jnp.maximum(best, jax.vmap(jq.quantized_dot, (None, 0))(row, x)), None)  # noqa: E731
            return lax.scan(step, start, w)[0]

        f = jax.shard_map(largest, mesh=layouts.mesh("8"), in_specs=specs, out_specs=P("a"))
        w[..., :4] = np.array([0, 60, 0, 56], np.uint8)
        x[..., :4] = np.array([0, 0, 128, 63], np.uint8)
        got = np.asarray(jax.jit(f)(w, x))
        want = exact.gemm(w, x)
        want = want.reshape(8, 2, COLUMNS).max(1).reshape(-1) if varying == "lhs" else want.max(0)
        assert exact.same_bits(got, want)

    def test_wrong_out_specs_of_a_dot_are_refused(self, operands):
        f = jax.shard_map(gemm, mesh=layouts.mesh("8"), in_specs=(P("a"), P()), out_specs=P())
        with pytest.raises(ValueError, match="out_specs"):
            f(*operands)

    def test_wrong_out_specs_of_quantize_are_refused(self):
        f = jax.shard_map(jq.quantize, mesh=layouts.mesh("8"), in_specs=P("a"), out_specs=P())
        with pytest.raises(ValueError, match="out_specs"):
            f(np.zeros((8, 256), np.float32))

    def test_gradient_of_what_surrounds_the_operations(self, operands):
        w, _ = operands
        w[..., :4] = np.array([0, 60, 0, 56], np.uint8)
        values = np.linspace(-1, 1, 8 * 512, dtype=np.float32).reshape(8, 512)
        mesh = layouts.mesh("8")

        def loss(w, values):
            return lax.psum((quantized_linear(values, w) ** 2).sum(), "a")

        f = jax.shard_map(jax.grad(loss, argnums=1), mesh=mesh, in_specs=(P(), P("a")), out_specs=P("a"))
        whole = jax.grad(lambda v: (quantized_linear(v, w) ** 2).sum())(values)
        np.testing.assert_allclose(jax.jit(f)(w, values), whole, rtol=1e-5)

    @pytest.mark.parametrize("axis", ["a", "b"])
    def test_the_other_axis_left_to_the_compiler(self, operands, axis):
        w, x = operands
        mesh = layouts.mesh("4x2")
        specs = (P("a"), P()) if axis == "a" else (P(), P("b"))
        result = P(None, "a") if axis == "a" else P("b")
        f = jax.shard_map(gemm, mesh=mesh, in_specs=specs, out_specs=result, axis_names={axis})
        placed = put(w, mesh, P("a")), put(x, mesh, P("b"))
        compiled = jax.jit(f).lower(*placed).compile()
        assert collectives(compiled.as_text()) == []
        assert call_shapes(compiled.as_text(), hlo.DOT) == [(4, 4)]
        assert exact.same_bits(np.asarray(compiled(*placed)), exact.gemm(w, x).T)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_scan_over_stacked_layers(rng, mode):
    """Weights [L, M, G, 144] stay where they are, one layer after another."""
    mesh = mesh_of("8", mode)
    w, x = exact.random_q4k(rng, (3, ROWS, RECORDS)), exact.random_q8k(rng, (RECORDS,))

    def layers(w, x):
        return lax.scan(lambda carry, layer: (carry, gemv(layer, x)), 0, w)[1]

    text, got = run(layers, mode, mesh, (P(None, "a"), P()), P(None, "a"), (w, x))
    assert collectives(text) == []
    assert call_shapes(text, hlo.DOT) == [(ROWS // 8,)]
    assert exact.same_bits(np.asarray(got), exact.dots(w, x))


def test_eager_calls_keep_the_sharding(rng):
    mesh = layouts.mesh("4x2")
    w, x = exact.random_q4k(rng, (ROWS, RECORDS)), exact.random_q8k(rng, (COLUMNS, RECORDS))
    got = gemm(put(w, mesh, P("a")), put(x, mesh, P("b")))
    assert_lies(got, mesh, P("b", "a"))
    assert exact.same_bits(np.asarray(got), exact.gemm(w, x).T)


def test_checkpointed_training_through_a_frozen_layer(rng):
    mesh = layouts.mesh("4x2", AxisType.Explicit)
    w = exact.random_q4k(rng, (ROWS, RECORDS))
    w[..., :4] = np.array([0, 20, 0, 20], np.uint8)
    values = rng.standard_normal((COLUMNS, 256 * RECORDS), np.float32)

    def loss(values, w):
        return (jax.checkpoint(quantized_linear)(values, w) ** 2).mean()

    placed = put(values, mesh, P("b")), put(w, mesh, P())
    got = jax.jit(jax.grad(loss))(*placed)
    assert_lies(got, mesh, P("b"))
    np.testing.assert_allclose(got, jax.grad(loss)(values, w), rtol=1e-5, atol=1e-7)


def test_checkify_across_devices(rng):
    from jax.experimental import checkify

    mesh = layouts.mesh("8")
    x = exact.blocks(rng, "gaussian", 16)
    checked = jax.jit(checkify.checkify(jq.quantize, errors=checkify.user_checks))
    error, _ = checked(put(x, mesh, P("a")))
    assert error.get() is None
    x[11, 3] = np.inf
    error, records = checked(put(x, mesh, P("a")))
    assert "quantize: record 11 is poison: its block holds an infinity" in error.get()
    np.testing.assert_array_equal(np.asarray(records), exact.quantize(x))
