"""What the machine code of the Triton kernels looks like, without a GPU: ``python -m fastir_kernels.inspect``.

Compiles every kernel and dtype ahead of time (sm_90 unless ``--arch`` says otherwise) and reads registers, spills and
shared memory from the binary, and access widths and counts from the instructions of the streaming loop. The predicted
time, at T = 16384, V = 151936, is the largest of three: bytes over bandwidth, instructions over the issue rate, and
exponentials over the rate of the special-function units. ``--json FILE`` writes the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

WARP = 32
ROWS, COLUMNS = 16384, 151936  # the shape of the predictions
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # datasheet, bytes/s
CYCLES = 132 * 1.755e9  # multiprocessors times a sustained clock, of either
ISSUE, EXPONENTIALS = (
    128,
    16,
)  # thread instructions and exponentials a cycle and multiprocessor
SHAPE = (16384, 3584, 152064)  # of the linear prediction: Qwen2.5-7B
PRODUCTS = 790e12  # FLOP/s that a large bf16 product reaches

_PER_ROW = {
    "target_ptr": "*i64",
    "inverse_temperature_ptr": "*fp32",
    "logprob_ptr": "*fp32",
    "entropy_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "coefficient_ptr": "*fp32",
    "entropy_coefficient_ptr": "*fp32",
    "sqnorm_ptr": "*fp32",
    "row_stride": "i32",
    "out_stride": "i32",
    "rows": "i32",
    "columns": "i32",
}
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def variants() -> list[dict[str, Any]]:
    """Every kernel as the library launches it: name, kernel, element types of its streams, constants."""
    from . import rows_triton as k

    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        stats = {"logits_ptr": "*" + dtype, "out_ptr": "*fp32"}
        found.append({"name": f"stats {dtype}", "kernel": k.stats_kernel, "types": stats, "entropy": None})
        for entropy in (False, True):
            name = f"grad {dtype}" + (" with entropy" if entropy else "")
            grad = {"logits_ptr": "*" + dtype, "out_ptr": "*" + dtype}
            found.append({"name": name, "kernel": k.grad_kernel, "types": grad, "entropy": entropy})
    narrowing = {"logits_ptr": "*fp32", "out_ptr": "*bf16"}  # the linear ops: fp32 logits, bf16 gradient products
    found.append({"name": "grad fp32 to bf16", "kernel": k.grad_kernel, "types": narrowing, "entropy": False})
    return found


def compile_variant(variant: dict[str, Any], arch: int) -> tuple[bytes, int, int, int]:
    """(cubin, bytes of shared memory, threads, block) of one variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from . import rows_triton as k

    block, warps = k.launch_shape(COLUMNS)
    kernel, entropy = variant["kernel"], variant["entropy"]
    types = {**_PER_ROW, **variant["types"]}
    constants: dict[str, Any] = {"mask_ptr": None, "HAS_MASK": False, "BLOCK": block}
    if entropy is not None:
        constants |= {"HAS_LOGPROB": True, "HAS_ENTROPY": entropy}
    if entropy is False:
        constants |= {"sqnorm_ptr": None, "entropy_coefficient_ptr": None}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, n in enumerate(kernel.arg_names) if signature[n] != "constexpr"}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options={"num_warps": warps})
    return compiled.asm["cubin"], compiled.metadata.shared, warps * WARP, block


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def read_machine_code(cubin: bytes) -> dict[str, Any]:
    """Registers, bytes of stack, spill instructions, and the instructions of the streaming loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([_tool("cuobjdump"), flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    code = [(int(a, 16), text) for a, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^/;]+);", sass)]
    # The streaming loop: the longest stretch that a backward branch closes.
    loops = [(int(t, 16), a) for a, text in code for t in re.findall(r"BRA.*?(0x[0-9a-f]+)", text) if int(t, 16) < a]
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    # What a forward branch may skip (the rescaling, the target's column) is not on the common path.
    skips = [
        (a, int(t, 16)) for a, text in code for t in re.findall(r"@.*BRA.*?(0x[0-9a-f]+)", text) if first < a < last
    ]
    rare = [(a, t) for a, t in skips if a < t <= last]
    body = [text for a, text in code if first <= a <= last and not any(s < a < t for s, t in rare)]

    def width(text: str) -> int:
        found = re.search(r"\.(128|64|U?16|U?8)\b", text)
        return int(found[1].lstrip("U")) if found else 32

    return {
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"],
        "spills": sum(bool(re.search(r"\b(LDL|STL)\b", text)) for _, text in code),
        "load_bits": sorted({width(text) for text in body if re.search(r"\bLDG\b", text)}),
        "store_bits": sorted({width(text) for text in body if re.search(r"\bSTG\b", text)}),
        "loop_instructions": len(body),
        "loop_exponentials": sum("MUFU.EX2" in text for text in body),
    }


def inspect(variant: dict[str, Any], arch: int) -> dict[str, Any]:
    """The facts of one variant, and its predicted times."""
    cubin, shared, threads, block = compile_variant(variant, arch)
    facts = read_machine_code(cubin)
    per_thread = block // threads * (4 if variant["entropy"] is None else 1)  # the statistics take four blocks a step
    stored = 0 if variant["entropy"] is None else _BYTES[variant["types"]["out_ptr"][1:]]
    moved = ROWS * COLUMNS * (_BYTES[variant["types"]["logits_ptr"][1:]] + stored)
    steps = ROWS * COLUMNS / per_thread
    issue = 1e3 * steps * facts["loop_instructions"] / (ISSUE * CYCLES)
    special = 1e3 * steps * facts["loop_exponentials"] / (EXPONENTIALS * CYCLES)
    return {
        "kernel": variant["name"],
        "arch": f"sm_{arch}",
        "threads": threads,
        "elements_per_thread_and_step": per_thread,
        "shared_bytes": shared,
        **facts,
        "exponentials_per_element": facts["loop_exponentials"] / per_thread,
        "instructions_per_element": round(facts["loop_instructions"] / per_thread, 1),
        "gigabytes": round(moved / 1e9, 2),
        "issue_ms": round(issue, 2),
        **{
            f"predicted_ms_{chip}": round(max(1e3 * moved / rate, issue, special), 2)
            for chip, rate in BANDWIDTH.items()
        },
    }


def predicted_linear_policy_loss() -> dict[str, dict[str, float]]:
    """Milliseconds: three products (6THV), and the row kernels over fp32 logits (4 + 4 bytes read, 2 written)."""
    t, h, v = SHAPE
    products = round(1e3 * 6 * t * h * v / PRODUCTS, 1)
    return {chip: {"products": products, "rows": round(1e3 * 10 * t * v / rate, 1)} for chip, rate in BANDWIDTH.items()}


def table(results: list[dict[str, Any]]) -> str:
    """The facts as aligned text."""
    columns = {
        "kernel": "kernel",
        "arch": "arch",
        "regs": "registers",
        "spills": "spills",
        "stack": "stack_bytes",
        "shared": "shared_bytes",
        "load bits": "load_bits",
        "store bits": "store_bits",
        "exp/elem": "exponentials_per_element",
        "instr/elem": "instructions_per_element",
        "GB": "gigabytes",
        "issue ms": "issue_ms",
        "H100 ms": "predicted_ms_H100",
        "H200 ms": "predicted_ms_H200",
    }

    def cell(value: Any) -> str:
        return (",".join(map(str, value)) or "-") if isinstance(value, list) else str(value)

    rows = [list(columns), *([cell(r[key]) for key in columns.values()] for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Machine-code facts of the Triton kernels; no GPU is needed.")
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="compute capabilities, such as 80 90 100")
    parser.add_argument("--json", type=Path, help="also write the facts to this file")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    results = [inspect(variant, arch) for arch in options.arch for variant in variants()]
    print(f"Per kernel at T = {ROWS}, V = {COLUMNS}; instructions and exponentials on the common path of the loop.\n")
    print(table(results))
    print(f"\nlinear_policy_loss at T, H, V = {SHAPE}, bf16, products at {PRODUCTS / 1e12:.0f} TFLOP/s:")
    for chip, ms in predicted_linear_policy_loss().items():
        print(f"  {chip}: {ms['products']} ms of products + {ms['rows']} ms of row passes")
    if options.json:
        facts = {"kernels": results, "linear_policy_loss_ms": predicted_linear_policy_loss()}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
