"""Block-quantized numbers in JAX, exact to the bit."""

from jaxquant import quant as quant
from jaxquant import records as records
from jaxquant.dtypes import BlockScaledDType as BlockScaledDType
from jaxquant.dtypes import CompoundDType as CompoundDType
from jaxquant.dtypes import DType as DType
from jaxquant.dtypes import DTypeCategory as DTypeCategory
from jaxquant.dtypes import FloatFacts as FloatFacts
from jaxquant.dtypes import Level as Level
from jaxquant.dtypes import LevelExtent as LevelExtent
from jaxquant.dtypes import RepresentationRule as RepresentationRule
from jaxquant.dtypes import RepresentationValidationContext as RepresentationValidationContext
from jaxquant.dtypes import SimpleDType as SimpleDType
from jaxquant.dtypes import SymbolicBits as SymbolicBits
from jaxquant.dtypes import Whole as Whole
from jaxquant.dtypes import WholeExtent as WholeExtent
from jaxquant.layout import Layout as Layout
from jaxquant.nn import quantized_matmul as quantized_matmul
from jaxquant.ops.native import Status as Status
from jaxquant.ops.native import status as status
from jaxquant.ops.native import use_backend as use_backend
from jaxquant.ops.quantize import quantize as quantize
from jaxquant.ops.quantized_dot import quantized_dot as quantized_dot
from jaxquant.records import validate_records as validate_records
from jaxquant.representation import Plane as Plane
from jaxquant.representation import Representation as Representation
