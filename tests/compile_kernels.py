"""Compiles the attention kernels for a CUDA device that need not be there: ``compute capability``.

In a process of its own, as kernels that Triton's interpreter runs cannot be compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvkeep.models.attention.kernels import _attend, _merge

TYPES = {
    "total": "*fp32", "parts": "*fp32", "totals": "*fp32", "tables": "*i32", "tiles": "*i32",
    "begins": "*i32", "firsts": "*i32", "positions": "*i64", "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
"""Of arguments; those of whole numbers and of constants have none."""


def assemble(kernel: Any, capability: int, types: dict[str, str], **constants: Any) -> str:
    """The kernel in PTX, which ``ptxas`` has accepted. Addresses and strides are aligned."""
    known = TYPES | types
    signature = {
        name: "constexpr" if name in constants else known.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind[0] in "*i"
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "num_stages": 3}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(made.asm["ptx"])


def main(capability: int) -> None:
    sizes = {"PAGE": 64, "GROUP": 4, "DIM": 128, "VALUE_DIM": 128, "D": 128, "V": 128}
    for rows, pool, length in (("bf16", "bf16", 64), ("bf16", "fp8e4nv", 64), ("fp32", "bf16", 32)):
        types = {"out": f"*{rows}", "query": f"*{rows}", "keys": f"*{pool}", "values": f"*{pool}"}
        for tile, product in ((1, 16), (16, 64)):
            for window, softcap in ((0, False), (128, True)):
                code = assemble(
                    _attend, capability, types,
                    **sizes, WINDOW=window, SOFTCAP=softcap, ROWS=tile, M=product, N=length,
                )  # fmt: skip
                assert "cp.async" in code  # keys and values are fetched ahead
    for sinks in ({"SINKS": True}, {"SINKS": False, "sinks": None}):
        types = {"out": "*bf16", "sinks": "*bf16"}
        assemble(_merge, capability, types, SPLITS=16, DIM=128, D=128, **sinks)


if __name__ == "__main__":
    main(int(sys.argv[1]))
