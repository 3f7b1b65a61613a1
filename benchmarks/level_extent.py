"""Time of LevelExtent.validate against the number of elements: it must not grow with them.

    python benchmarks/level_extent.py

Beside it, as the machine's measure, counting the preimages of the same edge one by one (where that ends at all).
"""

from __future__ import annotations

import json
import timeit
from collections import Counter
from collections.abc import Callable

from jaxquant.dtypes import DType, LevelExtent, RepresentationValidationContext
from jaxquant.layout import Layout

BLOCK = 10


def context(elements: int) -> RepresentationValidationContext:
    blocks = elements // BLOCK
    edge = Layout((BLOCK, blocks), (0, 1))
    return RepresentationValidationContext(
        logical_dtype=DType.MXFP4,
        storage_dtypes=(DType.E2M1, DType.E8M0),
        placement_layouts=(Layout((BLOCK, blocks), (1, BLOCK)), Layout(blocks, 1)),
        adjacent_layouts=(edge,),
        level_shapes=(edge.shape, blocks),
    )


def count_preimages(facts: RepresentationValidationContext) -> bool:
    (edge,) = facts.adjacent_layouts
    return set(Counter(edge.index(i) for i in range(edge.size)).values()) == {BLOCK}


def seconds(call: Callable[[], object], number: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number


def main() -> None:
    rule = LevelExtent(0, BLOCK)
    rows = []
    for exponent in (2, 4, 6, 9, 12, 15, 18):
        facts = context(10**exponent)
        row = {
            "elements": f"1e{exponent}",
            "validate_us": round(1e6 * seconds(lambda facts=facts: rule.validate(facts), 2000), 2),
        }
        row["enumerate_us"] = (
            round(1e6 * seconds(lambda facts=facts: count_preimages(facts), 1), 1) if exponent <= 4 else None
        )
        rows.append(row)
    print(f"{'elements':>8}  {'validate':>10}  {'one by one':>12}")
    for row in rows:
        slow = "-" if row["enumerate_us"] is None else f"{row['enumerate_us']:.0f} us"
        print(f"{row['elements']:>8}  {row['validate_us']:>7.2f} us  {slow:>12}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
