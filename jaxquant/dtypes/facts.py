"""What the built-in floats can hold: the table of the microscaling contract, with float32 and float64
added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import ml_dtypes
import numpy as np

from jaxquant.dtypes.model import ModelMeta
from jaxquant.layout import immutable

NonfiniteBehavior: TypeAlias = Literal["ieee", "nan_only_all_ones", "finite_only"]
OverflowPolicy: TypeAlias = Literal["overflow", "saturate"]


@immutable
@dataclass(frozen=True, slots=True)
class FloatFacts:
    """The bit fields and extreme values of one float format; a value is None where the format has no such
    number."""

    sign_bits: int
    exponent_bits: int
    significand_bits: int
    has_inf: bool
    has_nan: bool
    nonfinite_behavior: NonfiniteBehavior
    overflow_policy: OverflowPolicy
    max_normal: float
    min_normal: float
    max_subnormal: float | None
    min_subnormal: float | None


# fmt: off
FLOAT_FACTS = {
    "Float64": FloatFacts(1, 11, 52, True, True, "ieee", "overflow",
                          1.7976931348623157e308, 2.2250738585072014e-308, 2.225073858507201e-308, 5e-324),
    "Float32": FloatFacts(1, 8, 23, True, True, "ieee", "overflow",
                          3.4028234663852886e38, 1.1754943508222875e-38, 1.1754942106924411e-38,
                          1.401298464324817e-45),
    "E8M0": FloatFacts(0, 8, 0, False, True, "nan_only_all_ones", "overflow",
                       1.7014118346046923e38, 5.877471754111438e-39, None, None),
    "E5M2": FloatFacts(1, 5, 2, True, True, "ieee", "overflow",
                       57344.0, 6.103515625e-5, 4.57763671875e-5, 1.52587890625e-5),
    "E4M3": FloatFacts(1, 4, 3, False, True, "nan_only_all_ones", "overflow",
                       448.0, 0.015625, 0.013671875, 0.001953125),
    "E3M2": FloatFacts(1, 3, 2, False, False, "finite_only", "saturate", 28.0, 0.25, 0.1875, 0.0625),
    "E2M3": FloatFacts(1, 2, 3, False, False, "finite_only", "saturate", 7.5, 1.0, 0.875, 0.125),
    "E2M1": FloatFacts(1, 2, 1, False, False, "finite_only", "saturate", 6.0, 1.0, 0.5, 0.5),
}
# fmt: on


class HasFloatFacts(metaclass=ModelMeta):
    """Float facts as attributes, under the contract's names and those of `jnp.finfo`.

    On a dtype that is no built-in float each of them raises AttributeError.
    """

    __slots__ = ()

    @property
    def float_facts(self) -> FloatFacts:
        """All facts in one record."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """`numpy_dtype`, by its `finfo` name."""
        raise NotImplementedError

    @property
    def sign_bits(self) -> int:
        """Bits of the sign: 1, or 0 for an unsigned format."""
        return self.float_facts.sign_bits

    @property
    def exponent_bits(self) -> int:
        """Bits of the exponent field (`finfo.nexp`)."""
        return self.float_facts.exponent_bits

    @property
    def significand_bits(self) -> int:
        """Stored bits of the significand (`finfo.nmant`)."""
        return self.float_facts.significand_bits

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return self.float_facts.has_inf

    @property
    def has_nan(self) -> bool:
        """Whether some code is a NaN."""
        return self.float_facts.has_nan

    @property
    def nonfinite_behavior(self) -> NonfiniteBehavior:
        """Which codes are not finite: "ieee" (top exponent), "nan_only_all_ones", or "finite_only" (none)."""
        return self.float_facts.nonfinite_behavior

    @property
    def overflow_policy(self) -> OverflowPolicy:
        """What encoding makes of a value out of range: "overflow" to infinity or NaN, or "saturate"."""
        return self.float_facts.overflow_policy

    @property
    def max_normal(self) -> float:
        """The largest finite value (`finfo.max`)."""
        return self.float_facts.max_normal

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value (`finfo.smallest_normal`)."""
        return self.float_facts.min_normal

    @property
    def max_subnormal(self) -> float | None:
        """The largest subnormal value, or None where the format has none."""
        return self.float_facts.max_subnormal

    @property
    def min_subnormal(self) -> float | None:
        """The smallest positive subnormal value (`finfo.smallest_subnormal`), or None where the format has
        none."""
        return self.float_facts.min_subnormal

    @property
    def nexp(self) -> int:
        """`exponent_bits`, by its `finfo` name."""
        return self.float_facts.exponent_bits

    @property
    def nmant(self) -> int:
        """`significand_bits`, by its `finfo` name."""
        return self.float_facts.significand_bits

    @property
    def max(self) -> float:
        """`max_normal`, by its `finfo` name."""
        return self.float_facts.max_normal

    @property
    def min(self) -> float:
        """The least finite value: `-max`, or the smallest positive one of an unsigned format."""
        facts = self.float_facts
        return -facts.max_normal if facts.sign_bits else facts.min_normal

    @property
    def smallest_normal(self) -> float:
        """`min_normal`, by its `finfo` name."""
        return self.float_facts.min_normal

    @property
    def smallest_subnormal(self) -> float | None:
        """`min_subnormal`, by its `finfo` name."""
        return self.float_facts.min_subnormal

    @property
    def eps(self) -> float:
        """The distance from 1.0 to the next value."""
        return 2.0**-self.float_facts.significand_bits

    @property
    def tiny(self) -> float:
        """`min_normal`, by its older `finfo` name."""
        return self.float_facts.min_normal

    @property
    def precision(self) -> int:
        """Decimal digits that the format holds."""
        return int(self.__finfo().precision)

    @property
    def resolution(self) -> float:
        """The decimal resolution as `finfo` gives it, rounded to the format."""
        return float(self.__finfo().resolution)

    @property
    def epsneg(self) -> float:
        """The distance from 1.0 to the value below."""
        return float(self.__finfo().epsneg)

    @property
    def iexp(self) -> int:
        """Bits of the exponent field, as `finfo` gives them."""
        return int(self.__finfo().iexp)

    @property
    def machep(self) -> int:
        """The exponent of `eps`."""
        return int(self.__finfo().machep)

    @property
    def negep(self) -> int:
        """The exponent of `epsneg`, as `finfo` gives it."""
        return int(self.__finfo().negep)

    @property
    def minexp(self) -> int:
        """The exponent of `min_normal`."""
        return int(self.__finfo().minexp)

    @property
    def maxexp(self) -> int:
        """The least exponent too large for the format."""
        return int(self.__finfo().maxexp)

    def __finfo(self) -> Any:
        return cast(Any, ml_dtypes.finfo)(self.dtype)
