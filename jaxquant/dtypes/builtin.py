"""The built-in descriptors, put into the namespace of `DType`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxquant.dtypes.block_scaled import BlockScaledDType, Level
from jaxquant.dtypes.extents import Whole
from jaxquant.dtypes.kinds import DType, DTypeCategory, SimpleDType

DType.Any = DTypeCategory("Any", opaque_storage=True)
DType.Floating = DTypeCategory("Floating", supertype=DType.Any, opaque_storage=True)
DType.Integer = DTypeCategory("Integer", supertype=DType.Any)

DType.Bool = SimpleDType("Bool", bits=8, supertype=DType.Any, scalar_type=np.bool_)
DType.Int8 = SimpleDType("Int8", bits=8, supertype=DType.Integer, scalar_type=np.int8)
DType.Int32 = SimpleDType("Int32", bits=32, supertype=DType.Integer, scalar_type=np.int32)
DType.Float32 = SimpleDType("Float32", bits=32, supertype=DType.Floating, scalar_type=np.float32)
DType.Float64 = SimpleDType("Float64", bits=64, supertype=DType.Floating, scalar_type=np.float64)
DType.E8M0 = SimpleDType("E8M0", bits=8, supertype=DType.Floating, scalar_type=ml_dtypes.float8_e8m0fnu)
DType.E5M2 = SimpleDType("E5M2", bits=8, supertype=DType.Floating, scalar_type=ml_dtypes.float8_e5m2)
DType.E4M3 = SimpleDType("E4M3", bits=8, supertype=DType.Floating, scalar_type=ml_dtypes.float8_e4m3fn)
DType.E3M2 = SimpleDType("E3M2", bits=6, supertype=DType.Floating, scalar_type=ml_dtypes.float6_e3m2fn)
DType.E2M3 = SimpleDType("E2M3", bits=6, supertype=DType.Floating, scalar_type=ml_dtypes.float6_e2m3fn)
DType.E2M1 = SimpleDType("E2M1", bits=4, supertype=DType.Floating, scalar_type=ml_dtypes.float4_e2m1fn)

_MX = [Level(DType.E8M0, 32)]
DType.MXFP8_E4M3 = BlockScaledDType("MXFP8_E4M3", element=DType.E4M3, levels=_MX)
DType.MXFP8_E5M2 = BlockScaledDType("MXFP8_E5M2", element=DType.E5M2, levels=_MX)
DType.MXFP6_E3M2 = BlockScaledDType("MXFP6_E3M2", element=DType.E3M2, levels=_MX)
DType.MXFP6_E2M3 = BlockScaledDType("MXFP6_E2M3", element=DType.E2M3, levels=_MX)
DType.MXFP4 = BlockScaledDType("MXFP4", element=DType.E2M1, levels=_MX)
DType.MXINT8 = BlockScaledDType("MXINT8", element=DType.Int8, levels=_MX)
DType.NVFP4 = BlockScaledDType(
    "NVFP4", element=DType.E2M1, levels=[Level(DType.E4M3, 16), Level(DType.Float32, Whole)]
)
