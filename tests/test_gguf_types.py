"""Weights kept in their bytes: every decoder against the gguf package's, to the bit, however it is mapped."""

from __future__ import annotations

import doctest

import exact
import gguf as peer
import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant.gguf
from jaxquant import gguf_types
from jaxquant.gguf_types import Blocks

TYPES = {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q5_0": (32, 22), "Q8_0": (32, 34)}
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q5_0": (0,), "Q8_0": (0,)}
# Zeros, ones, the smallest and largest subnormal, the smallest normal, the largest, infinity and NaN
HALF_BITS = [0x0000, 0x8000, 0x3C00, 0xBC00, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]

every_type = pytest.mark.parametrize("type", TYPES)


def random_blocks(rng: np.random.Generator, type: str, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, (*shape, TYPES[type][1]), np.uint8)


def decoded(data: np.ndarray, type: str) -> np.ndarray:
    rows = data.reshape(*data.shape[:-2], -1)
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(rows, peer.GGMLQuantizationType[type])


@every_type
def test_sizes_are_those_of_gguf(type):
    assert TYPES[type] == peer.GGML_QUANT_SIZES[peer.GGMLQuantizationType[type]]


@every_type
def test_random_bytes_decode_as_gguf_says(type, rng):
    data = random_blocks(rng, type, 500, 8)
    assert exact.same_bits(Blocks(data, type).dequantize(), decoded(data, type))


@every_type
def test_every_half_decodes_as_gguf_says(type, rng):
    """All 65536 scales, special ones included, in every place of a scale."""
    bits = np.arange(1 << 16, dtype="<u2")
    data = random_blocks(rng, type, len(bits) // 16, 16)
    for at in HALVES[type]:
        data[..., at : at + 2] = rng.permutation(bits).view(np.uint8).reshape(*data.shape[:-1], 2)
    assert exact.same_bits(Blocks(data, type).dequantize(), decoded(data, type))


@every_type
def test_every_field_value_with_every_kind_of_scale(type):
    """All bytes of a block equal, for all bytes, so that signs, high bits and zeros of all fields occur."""
    data = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], TYPES[type][1], axis=-1)
    data = np.repeat(data, len(HALF_BITS), axis=1)
    for at in HALVES[type]:
        data[..., at : at + 2] = np.array(HALF_BITS, "<u2").view(np.uint8).reshape(-1, 2)
    assert exact.same_bits(Blocks(data, type).dequantize(), decoded(data, type))


@every_type
@pytest.mark.parametrize("how", ["jit", "vmap", "vmap of vmap", "middle axis", "constant"])
def test_transformations_keep_the_bits(type, how, rng):
    data = random_blocks(rng, type, 3, 2, 4)
    want = decoded(data, type)
    blocks = Blocks(jnp.asarray(data), type)
    decode = {
        "jit": jax.jit(Blocks.dequantize),
        "vmap": jax.vmap(Blocks.dequantize),
        "vmap of vmap": jax.jit(jax.vmap(jax.vmap(Blocks.dequantize))),
        "middle axis": jax.vmap(Blocks.dequantize, in_axes=1, out_axes=1),
        "constant": jax.jit(lambda _: Blocks(data, type).dequantize()),
    }[how]
    assert exact.same_bits(decode(blocks), want)


@every_type
def test_rows_are_taken_before_decoding(type, rng):
    data = random_blocks(rng, type, 9, 2)
    rows = jnp.array([4, 0, 4])
    picked = jax.jit(lambda blocks, rows: blocks[rows])(Blocks(jnp.asarray(data), type), rows)
    assert picked.shape == (3, 2 * TYPES[type][0])
    assert exact.same_bits(picked.data, data[[4, 0, 4]])
    assert exact.same_bits(picked.dequantize(), decoded(data, type)[[4, 0, 4]])


@every_type
@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0,)], ids=["no rows", "no blocks", "nothing"])
def test_empty(type, shape):
    blocks = Blocks(np.zeros((*shape, TYPES[type][1]), np.uint8), type)
    assert blocks.nbytes == 0
    assert blocks.dequantize().shape == blocks.shape == (*shape[:-1], shape[-1] * TYPES[type][0])


def test_a_holder_is_a_pytree_of_its_bytes(rng):
    data = random_blocks(rng, "Q6_K", 2, 3)
    held = jax.device_put(Blocks(data, "Q6_K"))
    assert isinstance(held.data, jax.Array)
    assert (held.type, held.shape, held.nbytes) == ("Q6_K", (2, 768), 2 * 3 * 210)
    [(path, leaf)] = jax.tree.leaves_with_path({"w": held})
    assert jax.tree_util.keystr(path) == "['w'].data"
    assert leaf is held.data
    assert repr(held) == "Blocks(Q6_K, shape=(2, 768), 1260 bytes)"


@pytest.mark.parametrize(
    ("data", "type", "error", "message"),
    [
        (np.zeros((2, 34), np.uint8), "Q3_K", ValueError, "no decoder for 'Q3_K', known are Q4_K, Q5_K"),
        (np.zeros((2, 34), np.int8), "Q8_0", TypeError, "data: got dtype int8, want uint8"),
        ([[0] * 34], "Q8_0", TypeError, "data: got list, want a uint8 NumPy or JAX array"),
        (np.zeros((2, 33), np.uint8), "Q8_0", ValueError, r"data: got shape \(2, 33\), want .*34\) for Q8_0"),
        (np.zeros(34, np.uint8), "Q8_0", ValueError, r"data: got shape \(34,\)"),
    ],
    ids=["type", "dtype", "list", "bytes", "axes"],
)
def test_wrong_bytes_are_refused(data, type, error, message):
    with pytest.raises(error, match=message):
        Blocks(data, type)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "types.gguf"
    rng = np.random.default_rng(3)
    writer = peer.GGUFWriter(path, "tiny")
    for name, (block_size, _) in TYPES.items():
        data = random_blocks(rng, name, 2, 3, 512 // block_size).reshape(2, 3, -1)
        writer.add_tensor(name, data, raw_dtype=peer.GGMLQuantizationType[name])
    writer.add_tensor("F32", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with jaxquant.gguf.open(path) as opened:
        yield opened


@every_type
def test_a_file_gives_its_bytes_uncopied(file, type):
    blocks = file.blocks(type)
    assert blocks.type == type
    assert blocks.shape == file.tensors[type].shape == (2, 3, 512)
    assert blocks.nbytes == file.tensors[type].nbytes
    assert np.shares_memory(blocks.data, file.blocks(type).data)
    assert exact.same_bits(blocks.dequantize(), file.array(type))


def test_a_file_refuses_a_type_without_decoder(file):
    with pytest.raises(ValueError, match="no decoder for 'F32'"):
        file.blocks("F32")
    with pytest.raises(KeyError, match="did you mean 'Q8_0'"):
        file.blocks("Q8_1")


def test_doctest():
    result = doctest.testmod(gguf_types)
    assert result.attempted > 0
    assert result.failed == 0
