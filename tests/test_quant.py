from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest

from jaxquant import quant
from jaxquant.quant import Field, RecordFormat, q4_k, q8_k

MEMBERS = [pytest.param(q4_k, id="q4_k"), pytest.param(q8_k, id="q8_k")]


def test_the_set_has_two_members_and_no_more():
    members = [name for name, value in vars(quant).items() if isinstance(value, RecordFormat)]
    assert sorted(members) == ["q4_k", "q8_k"]
    assert q4_k is not q8_k
    assert q4_k != q8_k


@pytest.mark.parametrize(
    ("member", "name", "record_bytes"), [(q4_k, "q4_k", 144), (q8_k, "q8_k", 292)], ids=["q4_k", "q8_k"]
)
def test_attributes(member, name, record_bytes):
    assert (member.name, member.block_size, member.record_bytes) == (name, 256, record_bytes)
    assert repr(member) == f"jaxquant.quant.{name}"


CONTRACT_FIELDS = {
    "q4_k": [
        ("d", 0, 2, 16, "float16", ()),
        ("dmin", 2, 4, 16, "float16", ()),
        ("sc", 4, 16, 6, "uint8", (8,)),
        ("m", 4, 16, 6, "uint8", (8,)),
        ("q", 16, 144, 4, "uint8", (256,)),
    ],
    "q8_k": [
        ("ds", 0, 4, 32, "float32", ()),
        ("q", 4, 260, 8, "int8", (256,)),
        ("bsum", 260, 292, 16, "int16", (16,)),
    ],
}


@pytest.mark.parametrize("member", MEMBERS)
def test_field_table(member):
    table = [(f.name, f.start, f.stop, f.bits, f.dtype.name, f.shape) for f in member.fields]
    assert table == CONTRACT_FIELDS[member.name]


@pytest.mark.parametrize("member", MEMBERS)
def test_fields_cover_the_record_without_gap_or_padding(member):
    bits_per_span: dict[tuple[int, int], int] = {}
    for field in member.fields:
        span = (field.start, field.stop)
        bits_per_span[span] = bits_per_span.get(span, 0) + field.bits * int(np.prod(field.shape))
    assert [bits for _, bits in sorted(bits_per_span.items())] == [
        8 * (stop - start) for start, stop in sorted(bits_per_span)
    ]
    spans = sorted(bits_per_span)
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), member.record_bytes]


@pytest.mark.parametrize("member", MEMBERS)
def test_multibyte_fields_are_little_endian(member):
    for field in member.fields:
        assert field.dtype.newbyteorder("<") == field.dtype


@pytest.mark.parametrize("arguments", [(), ("q4_k",), ("q5_k", 256, 176, ())], ids=["none", "name", "all"])
def test_construction_is_refused(arguments):
    with pytest.raises(TypeError, match=r"closed set: use jaxquant.quant.q4_k or q8_k"):
        RecordFormat(*arguments)


def test_construction_through_a_member_is_refused():
    with pytest.raises(TypeError, match="closed set"):
        type(q4_k)(name="q4_k")


def test_subclassing_is_refused():
    with pytest.raises(TypeError, match="RecordFormat cannot be subclassed"):
        type("Other", (RecordFormat,), {})


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("attribute", ["name", "block_size", "record_bytes", "fields", "extra"])
def test_mutation_is_refused(member, attribute):
    before = getattr(member, attribute, None)
    with pytest.raises(TypeError, match=f"cannot set '{attribute}'"):
        setattr(member, attribute, 1)
    with pytest.raises(TypeError, match=f"cannot delete '{attribute}'"):
        delattr(member, attribute)
    assert getattr(member, attribute, None) is before


@pytest.mark.parametrize("member", MEMBERS)
def test_fields_are_frozen(member):
    assert isinstance(member.fields, tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        member.fields[0].start = 1
    assert member.fields[0] == Field(*dataclasses.astuple(member.fields[0]))


@pytest.mark.parametrize("member", MEMBERS)
def test_copies_are_the_member_itself(member):
    assert copy.copy(member) is member
    assert copy.deepcopy(member) is member
    assert copy.deepcopy({"format": [member]})["format"][0] is member


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("member", MEMBERS)
def test_unpickling_gives_the_member_itself(member, protocol):
    assert pickle.loads(pickle.dumps(member, protocol)) is member


def test_members_are_dictionary_keys_and_static_arguments():
    assert {q4_k: 1, q8_k: 2}[copy.deepcopy(q8_k)] == 2
    traced = []

    def record_bytes(x, member):
        traced.append(member)
        return x + member.record_bytes

    jitted = jax.jit(record_bytes, static_argnums=1)
    assert [int(jitted(0, member)) for member in (q4_k, q8_k, q4_k)] == [144, 292, 144]
    assert traced == [q4_k, q8_k]
