"""CPU implementations, under the file names of `ops/`. Importing this package registers them."""

from vlmfast_kernels.cpu import attention as attention
from vlmfast_kernels.cpu import merge as merge
from vlmfast_kernels.cpu import norm as norm
from vlmfast_kernels.cpu import quant as quant
from vlmfast_kernels.cpu import w8a8 as w8a8
