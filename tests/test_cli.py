"""inspect, convert and bench: what they print and write, what they exit with, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import gguf as peer
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import __main__, cli_bench, cli_convert, cli_files, cli_inspect, io
from jaxquant.__main__ import main
from jaxquant.records import dequantize

FLOATS = ("F32", "F16", "BF16")
Q4_K = peer.GGMLQuantizationType.Q4_K


def bits(array):
    """Every byte of an array of any kind."""
    return {plane: np.asarray(values).tobytes() for plane, values in io.to_state(array).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``model.gguf`` and ``model.safetensors``, small and of several types, which no test changes."""
    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(3)
    q4_k = rng.integers(0, 256, (4, 2, 144), np.uint8)
    q4_k[..., :4] = rng.uniform(0.01, 0.02, (4, 2, 2)).astype("<f2").view(np.uint8)
    writer = peer.GGUFWriter(folder / "model.gguf", "tiny")
    writer.add_string("general.name", "a \x1b[31mtiny\nmodel")
    writer.add_tensor("w.q4_k", q4_k.reshape(4, 288), raw_dtype=Q4_K)
    bad = q4_k.copy()
    bad[2, 1, :2] = 0xFF, 0x7F
    writer.add_tensor("w.bad", bad.reshape(4, 288), raw_dtype=Q4_K)
    q8_0 = rng.integers(0, 256, (2, 64 // 32, 34), np.uint8)
    q8_0[..., :2] = np.full((2, 2, 1), 0.5, "<f2").view(np.uint8)
    writer.add_tensor("w.q8_0", q8_0.reshape(2, 68), raw_dtype=peer.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", rng.standard_normal(32).astype(np.float32))
    writer.add_tensor("none", np.zeros((0, 288), np.uint8), raw_dtype=Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    x = rng.standard_normal((6, 96)).astype(np.float32)
    arrays = {
        "F32": x,
        "F16": x.astype(np.float16),
        "BF16": x.astype(ml_dtypes.bfloat16),
        "ints": np.arange(64, dtype=np.int32).reshape(2, 32),
        "odd": x[:, :33].copy(),
        "norm": x[0],
        "blocks": jq.quantize_blocks(x, jq.DType.MXFP8_E4M3),
        "zeros": np.zeros((0, 32), np.float32),
    }
    io.save(folder / "model.safetensors", arrays, metadata={"format": "pt"})
    return folder


def json_of(capsys, *arguments, code=0):
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """The one line that a command says before it exits with 2."""
    assert main([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.strip()


# inspect


def test_inspect_gguf(folder, capsys):
    report = json_of(capsys, "inspect", folder / "model.gguf", code=1)
    tensors = {tensor.pop("name"): tensor for tensor in report["tensors"]}
    assert list(tensors) == ["w.q4_k", "w.bad", "w.q8_0", "norm", "none"]
    expected = {"shape": [4, 512], "elements": 2048, "bytes": 1152, "bits_per_element": 4.5}
    assert tensors["w.q4_k"] == {"type": "Q4_K", **expected, "problem": None}
    assert tensors["w.bad"] == {"type": "Q4_K", **expected, "problem": "record [2, 1]: d is nan, not finite"}
    assert report["totals"] == {
        "Q4_K": {"tensors": 3, "elements": 4096, "bytes": 2304, "bits_per_element": 4.5},
        "Q8_0": {"tensors": 1, "elements": 128, "bytes": 136, "bits_per_element": 8.5},
        "F32": {"tensors": 1, "elements": 32, "bytes": 128, "bits_per_element": 32.0},
    }
    assert (report["kind"], report["problems"]) == ("GGUF", 1)
    assert report["bytes"] == (folder / "model.gguf").stat().st_size
    assert report["about"]["general.name"] == "a \x1b[31mtiny\nmodel"


def test_inspect_prints_a_table_that_cannot_write_to_the_terminal(folder, capsys):
    assert main(["inspect", str(folder / "model.gguf")]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split() for line in out.splitlines()]
    assert ["w.q4_k", "Q4_K", "4", "x", "512", "4.5", "1.125", "KiB"] in lines
    assert ["all", "5", "4,256", "4.827", "2.508", "KiB"] in lines
    assert "general.name: a \\x1b[31mtiny\\nmodel\n" in out
    assert out.endswith("PROBLEM  w.bad: record [2, 1]: d is nan, not finite\n1 tensors are illegal\n")


def test_inspect_safetensors(folder, capsys):
    report = json_of(capsys, "inspect", folder / "model.safetensors")
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    found = {
        name: (tensor["type"], tensor["shape"], tensor["bits_per_element"])
        for name, tensor in tensors.items()
    }
    assert found == {
        "F32": ("F32", [6, 96], 32),
        "F16": ("F16", [6, 96], 16),
        "BF16": ("BF16", [6, 96], 16),
        "ints": ("I32", [2, 32], 32),
        "odd": ("F32", [6, 33], 32),
        "norm": ("F32", [96], 32),
        "blocks": ("MXFP8_E4M3", [6, 96], 8.25),
        "zeros": ("F32", [0, 32], None),
    }
    assert report["about"] == {"format": "pt"}
    assert report["problems"] == 0


def test_inspect_counts_nan_blocks(tmp_path, capsys):
    x = np.ones((2, 64), np.float32)
    x[1, 40] = np.nan
    io.save(tmp_path / "w.safetensors", {"w": jq.quantize_blocks(x, jq.DType.NVFP4)})
    report = json_of(capsys, "inspect", tmp_path / "w.safetensors", code=1)
    assert report["tensors"][0]["problem"] == "1 of 8 blocks are NaN"


def test_inspect_names_planes_that_do_not_fit_their_description(tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    io.save(path, {"w": jq.quantize_blocks(np.ones((2, 64), np.float32), jq.DType.MXFP4), "x": np.ones(2)})
    path.write_bytes(path.read_bytes().replace(b"MXFP4", b"MXFP9"))
    report = json_of(capsys, "inspect", path, code=1)
    problems = {tensor["name"]: tensor["problem"] for tensor in report["tensors"]}
    assert problems["x"] is None
    assert "MXFP9" in problems["w"]


@pytest.mark.parametrize("most", [cli_inspect._MOST_BARS, 2], ids=["each", "layers together"])
def test_inspect_draws_the_error_of_each_format(most, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_inspect, "_MOST_BARS", most)
    drawn = []
    figure = cli_inspect._figure
    monkeypatch.setattr(cli_inspect, "_figure", lambda *a: drawn.append(figure(*a)) or drawn[0])
    picture = tmp_path / "errors.png"
    report = json_of(capsys, "inspect", folder / "model.safetensors", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    errors = {t["name"]: t.get("relative_error") for t in report["tensors"]}
    assert {name for name, error in errors.items() if error} == {*FLOATS, "odd", "blocks"}
    # Independently: the whole matrix is within the sample.
    x = io.load(folder / "model.safetensors")["F16"].astype(np.float64)
    y = np.asarray(jq.quantize_blocks(x.astype(np.float32), jq.DType.NVFP4)).astype(np.float64)
    each = np.linalg.norm(x - y, axis=1) / np.linalg.norm(x, axis=1)
    whole = np.linalg.norm(x - y) / np.linalg.norm(x)
    found = errors["F16"]["NVFP4"]
    assert found == pytest.approx({"all": whole, "best_row": each.min(), "worst_row": each.max()}, rel=1e-6)
    labels = [tick.get_text() for tick in drawn[0].axes[0].get_yticklabels()]
    assert sorted(labels) == (["F* (2)", "odd"] if most == 2 else ["BF16", "F16", "F32", "blocks", "odd"])
    assert drawn[0].get_suptitle() == (
        "model.safetensors, 2 of 4 groups" if most == 2 else "model.safetensors"
    )
    assert main(["inspect", str(folder / "model.safetensors"), "--plot", str(picture)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("F16 "))
    assert row.endswith(f"{whole:.2%}")


def test_inspect_takes_rows_evenly_spread(folder):
    file = cli_files.open_weights(folder / "model.gguf")
    entry = file.entries[0]
    whole = file.values(entry)
    assert np.array_equal(whole, jq.gguf.open(folder / "model.gguf").array("w.q4_k"))
    assert np.array_equal(file.values(entry, 1024), whole[[0, 3]])
    assert np.array_equal(file.values(entry, 1), whole[[0]])
    q8_0 = file.entries[2]
    assert np.array_equal(file.values(q8_0, 64), file.values(q8_0)[[0]])


# convert


@pytest.mark.parametrize("format", ["MXFP4", "NVFP4", "MXFP8_E4M3", "MXINT8"])
def test_convert_safetensors_as_quantize_blocks_does(format, folder, tmp_path, capsys):
    source, target = folder / "model.safetensors", tmp_path / "out.safetensors"
    report = json_of(capsys, "convert", source, target, "--to", format.lower())
    before, after = io.load(source), io.load(target)
    assert set(after) == set(before)
    dtype = jq.DType.from_name(format)
    for name in FLOATS:
        assert after[name].format is dtype
        assert bits(after[name]) == bits(jq.quantize_blocks(before[name], dtype))
    for name in set(before) - set(FLOATS):
        assert bits(after[name]) == bits(before[name])
    with io.open(target) as file:
        assert dict(file.metadata) == {"format": "pt"}
    rows = {row["name"]: row for row in report["tensors"]}
    assert {name: rows[name]["note"] for name in before if name not in FLOATS} == {
        "ints": "not float16, bfloat16 or float32",
        "odd": f"rows of 33, no multiple of {16 if format == 'NVFP4' else 32}",
        "norm": "not a matrix",
        "blocks": "block-scaled already",
        "zeros": "not a matrix",
    }
    x = before["F32"].astype(np.float64)
    noise = np.asarray(after["F32"]).astype(np.float64) - x
    assert rows["F32"]["sqnr_db"] == pytest.approx(10 * np.log10((x**2).sum() / (noise**2).sum()), rel=1e-9)
    assert rows["F32"]["bytes"] == after["F32"].nbytes
    assert report["bytes"] == target.stat().st_size
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_convert_a_q4_k_tensor(folder, tmp_path, capsys):
    target = tmp_path / "out.safetensors"
    assert (
        main(["convert", str(folder / "model.gguf"), str(target), "--to", "MXFP4", "--tensor", "w.q4_k"]) == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    with jq.gguf.open(folder / "model.gguf") as file:
        values = dequantize(file.records("w.q4_k"), jq.quant.q4_k).reshape(4, 512)
    after = io.load(target)
    assert list(after) == ["w.q4_k"]
    assert bits(after["w.q4_k"]) == bits(jq.quantize_blocks(values, jq.DType.MXFP4))
    assert (
        f"1 of 1 tensors are MXFP4 now: 1.125 KiB became {cli_files.size_of(target.stat().st_size)}\n" in out
    )


def test_convert_a_gguf_file_and_say_what_became_nan(folder, tmp_path, capsys):
    target = tmp_path / "out.safetensors"
    arguments = ["convert", folder / "model.gguf", target, "--to", "MXFP8_E5M2", "--keep", "w.q8*"]
    rows = {row["name"]: row for row in json_of(capsys, *arguments, code=1)["tensors"]}
    assert {name: (row["to"], row["note"]) for name, row in rows.items()} == {
        "w.q4_k": ("MXFP8_E5M2", None),
        "w.bad": ("MXFP8_E5M2", "8 of 64 blocks are NaN"),
        "w.q8_0": ("F32", "as asked"),
        "norm": ("F32", "not a matrix"),
        "none": ("F32", "not a matrix"),
    }
    after = io.load(target)
    with jq.gguf.open(folder / "model.gguf") as file:
        assert np.array_equal(after["w.q8_0"], file.array("w.q8_0"))
        assert np.array_equal(after["norm"], file.array("norm"))
    assert after["none"].shape == (0, 512)


def test_convert_keeps_what_gguf_has_in_blocks(tmp_path, capsys):
    array = jq.quantize_blocks(np.random.default_rng(0).standard_normal((2, 64), np.float32), jq.DType.MXFP4)
    writer = peer.GGUFWriter(tmp_path / "m.gguf", "tiny")
    raw = np.asarray(io.to_gguf_blocks(array)).reshape(2, -1)
    writer.add_tensor("w", raw, raw_dtype=peer.GGMLQuantizationType.MXFP4)
    writer.add_tensor("v", np.ones((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    json_of(capsys, "convert", tmp_path / "m.gguf", tmp_path / "m.safetensors", "--to", "MXFP4")
    assert bits(io.load(tmp_path / "m.safetensors")["w"]) == bits(array)
    only = ["--tensor", "w", "--to", "MXFP4"]
    said = refused(capsys, "convert", tmp_path / "m.gguf", tmp_path / "n.safetensors", *only)
    assert said.endswith("nothing to convert to MXFP4: block-scaled already")
    assert not (tmp_path / "n.safetensors").exists()


@pytest.mark.parametrize("moment", ["quantizing", "writing"])
def test_an_interrupted_conversion_leaves_the_target_as_it_was(moment, folder, tmp_path, capsys, monkeypatch):
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"as it was")

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    where = (cli_convert, "quantize_blocks") if moment == "quantizing" else (os, "replace")
    monkeypatch.setattr(*where, interrupt)
    assert main(["convert", str(folder / "model.safetensors"), str(target), "--to", "MXFP4"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert os.listdir(tmp_path) == ["out.safetensors"]
    assert target.read_bytes() == b"as it was"


# Files and requests that are no good


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_truncated_files_are_refused(command, name, folder, tmp_path, capsys):
    whole = (folder / name).read_bytes()
    path = tmp_path / name
    rest = [tmp_path / "out.safetensors", "--to", "MXFP4"] if command == "convert" else []
    for length in (0, 3, 20, len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:length])
        said = refused(capsys, command, path, *rest)
        assert said.startswith(f"jaxquant {command}: {path}")
    assert "it is truncated" in said
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("none.gguf", "none.gguf: No such file or directory"),
        ("none", "none: No such file or directory"),
        (".", "is a directory"),
        ("pipe", "is no regular file"),
        ("text", "is neither a GGUF nor a safetensors file: it begins with b'hello, w'"),
    ],
)
def test_inspect_refuses(name, wanted, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("hello, world")
    assert refused(capsys, "inspect", tmp_path / name).endswith(wanted)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["model.safetensors", "{tmp}/out.gguf"], "must end in .safetensors"),
        (["model.safetensors", "{tmp}/none/out.safetensors"], "there is no folder"),
        (["model.safetensors", "model.safetensors"], "is the file to convert"),
        (["model.safetensors", "{tmp}/out.safetensors", "--tensor", "x*"], "no tensor is called 'x*'"),
        (["model.safetensors", "{tmp}/out.safetensors", "--tensor", "norm"], "to MXFP4: not a matrix"),
        (["model.safetensors", "{tmp}/folder.safetensors"], "is a directory"),
    ],
    ids=["ending", "folder", "itself", "pattern", "nothing to do", "directory"],
)
def test_convert_refuses(arguments, wanted, folder, tmp_path, capsys):
    (tmp_path / "folder.safetensors").mkdir()
    paths = [a.format(tmp=tmp_path) if "{" in a else a for a in arguments]
    paths[:2] = [str(folder / path) for path in paths[:2]]
    assert wanted in refused(capsys, "convert", *paths, "--to", "MXFP4")
    assert os.listdir(tmp_path) == ["folder.safetensors"]


@pytest.mark.parametrize(
    ("out", "wanted"),
    [("errors.doc", "must end in one of"), ("none/errors.png", "there is no such folder")],
)
def test_plot_refuses_before_it_measures(out, wanted, folder, tmp_path, capsys):
    path = tmp_path / out
    assert wanted in refused(capsys, "inspect", folder / "model.gguf", "--plot", path)


def test_without_matplotlib_plot_says_what_to_install(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    said = refused(capsys, "inspect", folder / "model.gguf", "--plot", tmp_path / "errors.png")
    assert said.endswith("pip install 'jaxquant[plot]'")


def test_an_unknown_format_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["convert", "a", "b", "--to", "MXFP8"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    for name in __main__._FORMATS:
        assert name in err
        assert isinstance(jq.DType.from_name(name), jq.BlockScaledDType)


# What is shared


def test_progress_is_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(cli_files, "EVERY", 0.0)
    assert list(cli_files.progress([7, 8], "inspect")) == [7, 8]
    out, err = capsys.readouterr()
    assert (out, err) == ("", "inspect: 1 of 2 tensors\ninspect: 2 of 2 tensors\n")


@pytest.mark.parametrize("tqdm", [True, False], ids=["tqdm", "none installed"])
def test_progress_is_a_bar_on_a_terminal(tqdm, capsys, monkeypatch):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(cli_files, "EVERY", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(cli_files.progress([7, 8], "inspect")) == [7, 8]
    err = capsys.readouterr().err
    assert ("0/2" in err) is tqdm
    assert ("1 of 2 tensors\n" in err) is not tqdm


def test_printable_shows_what_terminals_obey():
    assert cli_files.printable("a\x1b[2J\u202e\ud800\u00e9") == "a\\x1b[2J\\u202e\\ud800\u00e9"
    assert cli_files.printable("x" * 200) == "x" * 117 + "..."


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1000 * 1024, "0.9766 MiB"), (3 << 40, "3 TiB")],
)
def test_sizes(nbytes, shown):
    assert cli_files.size_of(nbytes) == shown


# bench, and the real process


def test_bench_measures_each_work(capsys, monkeypatch):
    monkeypatch.setattr(cli_bench, "ROWS", 256)
    monkeypatch.setattr(cli_bench, "K", 512)
    monkeypatch.setattr(cli_bench, "COLUMNS", 4)
    monkeypatch.setattr(cli_bench, "_SECONDS", 0.0)
    report = json_of(capsys, "bench")
    assert [(work["work"], work["unit"]) for work in report["works"]] == [
        ("quantized_matmul 256 x 512, 1 column", "GB/s"),
        ("quantized_matmul 256 x 512, 4 columns", "GFLOP/s"),
        ("quantize 0.5 MiB of float32", "GB/s"),
        ("quantize_blocks to MXFP4, 0.5 MiB", "GB/s"),
    ]
    amounts = [work["rate"] * work["microseconds"] * 1e3 for work in report["works"]]
    assert amounts == pytest.approx([256 * 2 * 144, 2 * 256 * 512 * 4, 256 * 512 * 4, 256 * 512 * 4])
    assert report["isa"] == jq.status().isa
    assert main(["bench"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_bench_works_compute_what_they_say(monkeypatch):
    monkeypatch.setattr(cli_bench, "ROWS", 256)
    monkeypatch.setattr(cli_bench, "K", 512)
    monkeypatch.setattr(cli_bench, "COLUMNS", 4)
    one, many, quantize, blocks = (work.call() for work in cli_bench._works())
    assert (one.shape, many.shape) == ((1, 256), (4, 256))
    assert np.isfinite(many).all()
    assert np.array_equal(many[:1], one)
    assert (quantize.shape, quantize.dtype) == ((512, 292), jnp.uint8)
    assert blocks.shape == (256, 512)


def test_a_reader_that_goes_away_ends_it_quietly(folder):
    """As ``inspect | head`` does: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "jaxquant", "inspect", folder / "model.gguf"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=120,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (141, b"")


def test_ctrl_c_during_a_conversion(folder, tmp_path):
    target = tmp_path / "out.safetensors"
    script = (
        "import sys, time; from jaxquant import cli_convert; from jaxquant.__main__ import main\n"
        "def slow(*_): print('here', flush=True); time.sleep(60)\n"
        "cli_convert.quantize_blocks = slow\n"
        f"sys.exit(main(['convert', {str(folder / 'model.safetensors')!r}, {str(target)!r}, '--to', 'MXFP4']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert os.listdir(tmp_path) == []
