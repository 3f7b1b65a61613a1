"""Dtype descriptors: what a plane stores, how planes make a value, and which formats there are."""

from jaxquant.dtypes import builtin as _builtin
from jaxquant.dtypes import model as _model
from jaxquant.dtypes.block_scaled import BlockScaledDType, Level, SymbolicBits
from jaxquant.dtypes.extents import Whole, WholeExtent
from jaxquant.dtypes.facts import FloatFacts
from jaxquant.dtypes.kinds import CompoundDType, DType, DTypeCategory, SimpleDType
from jaxquant.dtypes.rules import LevelExtent, RepresentationRule, RepresentationValidationContext
from jaxquant.dtypes.structure import Structure

__all__ = [
    "BlockScaledDType",
    "CompoundDType",
    "DType",
    "DTypeCategory",
    "FloatFacts",
    "Level",
    "LevelExtent",
    "RepresentationRule",
    "RepresentationValidationContext",
    "SimpleDType",
    "Structure",
    "SymbolicBits",
    "Whole",
    "WholeExtent",
]

_model.close_model()
del _builtin, _model
