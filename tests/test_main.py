"""The command line and the self-test: what they print, what they exit with, and that they can fail."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
from fractions import Fraction

import exact
import jax
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import selftest
from jaxquant.__main__ import main
from jaxquant.ops import native


def test_info_as_json_holds_what_the_library_says(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["versions"]["ml_dtypes"] == importlib.metadata.version("ml_dtypes")
    assert facts["isa"] == native.status().isa
    assert facts["supported_isas"] == list(native.supported_isas())
    assert facts["library"] == native.status().library
    assert len(facts["devices"]) == len(jax.devices())
    assert facts["threads"] >= 1
    assert set(facts["environment"]) == {"JAXQUANT_BACKEND", "JAXQUANT_ISA"}


@pytest.mark.skipif(native.status().library is None, reason="needs the native library")
def test_info_names_the_lowering_and_why(capsys):
    isa = native.status().isa
    main(["info"])
    assert f"  quantize on cpu: native: the kernels for {isa}\n" in capsys.readouterr().out
    with jq.use_backend("fallback"):
        main(["info"])
    out = capsys.readouterr().out
    assert "  quantize on cpu: fallback: it is the selected backend\n" in out
    assert "  quantized_dot on cpu: fallback: it is the selected backend\n" in out


@pytest.mark.filterwarnings("ignore:jaxquant runs its slow fallback")
def test_a_missing_library_is_said(monkeypatch, capsys):
    monkeypatch.setattr(native, "_load", lambda: native._Library(None, None, "it was not built"))
    monkeypatch.setattr(selftest, "_cases", dict)
    jax.clear_caches()  # lowerings are cached, and this one must be made anew
    try:
        main(["info"])
        assert main(["selftest"]) == 0
    finally:
        jax.clear_caches()
    out = capsys.readouterr().out
    assert "  quantized_dot on cpu: fallback: it was not built\n" in out
    assert "\nlibrary: none\n" in out
    assert "\nisa: none\n" in out
    assert "but the native kernels were not tested: it was not built\n" in out


@pytest.mark.parametrize(
    "arguments", [[], ["unknown"], ["info", "--yaml"]], ids=["none", "command", "option"]
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m jaxquant" in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxquant", "selftest"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("ok    reference"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


# The self-test


def test_selftest_covers_every_implementation(capsys):
    assert main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all bits right"
    checks = [line.split("  ") for line in lines[:-1]]
    names = {check[1] if check[0] else check[2] for check in (list(filter(None, c)) for c in checks)}
    isas = {f"cpu {isa}" for isa in native.supported_isas()}
    assert names >= {"reference", "cpu fallback"} | isas
    assert len(lines) - 2 == 4 * (len(names) - 1)
    assert all(line.startswith("ok ") and line.endswith(" 0 mismatches") for line in lines[:-1])


def _wrong_quantize(values):
    return jq.quantize(values).at[-1, 291].add(np.uint8(1))


@pytest.mark.parametrize("operation", ["dot", "GEMV", "GEMM"])
def test_selftest_finds_wrong_dots(operation, monkeypatch, capsys):
    cases = [case for group in selftest._cases().values() for case in group if case.operation == operation]
    right = selftest._OPERATIONS[operation]
    first = next(selftest._implementations())
    monkeypatch.setattr(selftest, "_implementations", lambda: iter([first]))
    monkeypatch.setitem(selftest._OPERATIONS, operation, lambda w, x: -right(w, x))
    assert main(["selftest"]) == 1
    wrong = sum(int((~np.isnan(case.wanted)).sum()) for case in cases)  # the negative of NaN is NaN
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{wrong} mismatches: ")


def test_selftest_finds_a_wrong_byte(monkeypatch, capsys):
    first = next(selftest._implementations())
    monkeypatch.setattr(selftest, "_implementations", lambda: iter([first]))
    monkeypatch.setitem(selftest._OPERATIONS, "quantize", _wrong_quantize)
    assert main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert f"FAIL  {first.name}" in out
    assert out.splitlines()[-1].startswith("2 mismatches: ")  # one in the vectors, one in the data


def test_selftest_finds_a_wrong_reference(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "_implementations", lambda: iter([]))
    monkeypatch.setattr(selftest, "_DOT_S", [-209781, -132734, 221903])
    assert main(["selftest"]) == 1
    assert capsys.readouterr().out.startswith("FAIL  reference")


@pytest.mark.parametrize("kind", [*exact.KINDS, *exact.POISON_KINDS])
def test_both_references_quantize_alike(kind, rng):
    values = exact.blocks(rng, kind, 100)
    assert exact.same_bits(selftest.exact_quantize(values), exact.quantize(values))


@pytest.mark.parametrize("legal", [True, False], ids=["legal bsum", "random bsum"])
def test_both_references_dot_alike(legal, rng):
    w = exact.random_q4k(rng, (40, 7))
    x = (exact.random_q8k if legal else exact.random_illegal_q8k)(rng, (5, 7))
    wanted = np.array([[exact.dot(a, b) for a in w] for b in x], np.float32)
    assert exact.same_bits(selftest.exact_dot(w, x), wanted)


def test_the_float64_dot_is_the_dot_without_rounding(rng):
    w = exact.random_q4k(rng, (6, 3))
    w[..., :4] = rng.normal(size=(6, 3, 2)).astype("<f2").view(np.uint8)
    x = exact.quantize(exact.blocks(rng, "gaussian", 3))
    a, b = exact.decode_q4k(w), exact.decode_q8k(x)
    for row, got in enumerate(selftest.exact_dot(w, x[None], np.float64)[0]):
        terms = []
        for g in range(3):
            blocks = (a.q[row, g] * b.q[g]).reshape(8, 32).sum(-1)
            S, T = int(a.sc[row, g] @ blocks), int(a.m[row, g] @ b.bsum[g].reshape(8, 2).sum(-1))
            d, dmin, ds = (Fraction(float(f)) for f in (a.d[row, g], a.dmin[row, g], b.ds[g]))
            terms.append(ds * (d * S - dmin * T))
        assert abs(Fraction(float(got)) - sum(terms)) <= 8 * 2.0**-53 * float(sum(map(abs, terms)))


def test_selftest_dots_are_seldom_hidden_by_nan():
    cases = [case for group in selftest._cases().values() for case in group if case.operation != "quantize"]
    assert {"GEMV", "GEMM", "dot"} == {case.operation for case in cases}
    for case in cases:
        assert np.isfinite(case.wanted).mean() > 0.4
    patterns = [
        case.operands[0][..., :4].reshape(-1, 2, 2) for case in cases if case.operands[0].size > 1 << 20
    ]
    assert len(patterns) == 2
    for halves in patterns:
        d, dmin = halves.copy().view(np.uint16)[..., 0].T
        assert len(np.unique(d)) == len(np.unique(dmin)) == 65536


@pytest.mark.parametrize("kind", [name for name, _ in selftest._blocks(np.random.default_rng(0), 1)])
def test_selftest_data_is_what_it_says(kind):
    values = dict(selftest._blocks(np.random.default_rng(1), 50))[kind]
    records = selftest.exact_quantize(values)
    assert values.dtype == np.float32
    assert values.shape == (50, 256)
    ds = exact.decode_q8k(records).ds
    if kind in ("NaN", "infinity", "too small"):
        assert np.isnan(ds).all()
    elif kind == "zeros of both signs":
        assert not ds.any()
    else:
        assert np.isfinite(ds).all()
        assert ds.all()
    if kind == "subnormal ds":
        assert (np.abs(ds) < np.finfo(np.float32).tiny).all()
