"""What Triton's GPU dialect shows of products: those that are transposed, and those that change their layout.

Triton from 3.4.0 until before 3.7.1 miscompiles ``tl.dot(tl.trans(x), ...)`` on Hopper if x is a result of wgmma
(https://github.com/fla-org/flash-linear-attention/issues/640): the sum is wrong without any message. Only loaded tiles
may be transposed.

A softmax in the layout of loads, instead of that of products, shuffles each row through a warp: docs/decisions/0044.
"""

from __future__ import annotations

import re

VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
LOC = re.compile(r"\s*loc\(.*\)$")
REARRANGED = re.compile(r"ttg\.convert_layout .* : tensor<\d+x\d+xf32, #mma\d*> -> tensor<.*, #blocked\d*>")
PRODUCTS = ("ttng.warp_group_dot", "tt.dot")
TRANSPOSES = ("ttg.memdesc_trans", "tt.trans")


# The origin of a value: neither of the others, a product, or a transposed product.
OTHER, PRODUCT, TRANSPOSED = range(3)


def transposed_products(ttgir: str) -> int:
    """The number of products with an operand that is computed from a product and transposed."""
    lines = _lines(ttgir)
    carried: dict[int, dict[int, int]] = {}  # line of a loop -> origins of the values that it carries around
    while True:
        found, now = _walk(lines, carried)
        if now == carried:
            return found
        carried = now


def rearranged_products(ttgir: str) -> int:
    """The number of tiles of float32 that loops bring from the layout of a product into one of loads."""
    found = 0
    regions: list[bool] = []  # open braces: whether a loop opened them
    for line in _lines(ttgir):
        is_loop = "scf.for" in line or "scf.while" in line
        if line.startswith("}"):
            is_loop |= regions.pop()
        if line.endswith("{"):  # "} do {" and "} else {" too
            regions.append(is_loop)
        found += any(regions) and REARRANGED.search(line) is not None
    return found


def _lines(ttgir: str) -> list[str]:
    return [LOC.sub("", line).strip() for line in ttgir.splitlines()]


def _walk(lines: list[str], carried: dict[int, dict[int, int]]) -> tuple[int, dict[int, dict[int, int]]]:
    """One pass in program order. Values that a loop carries are known after the pass, so for the next pass."""
    origins: dict[str, int] = {}
    buffers: dict[str, str] = {}  # view of shared memory -> the memory
    regions: list[tuple[int, str]] = []  # open braces: line, name of the results
    now = {number: dict(values) for number, values in carried.items()}
    found = 0

    for number, line in enumerate(lines):
        if line.startswith("}") and regions:
            opened = regions.pop()
            if line.endswith("{"):  # "} else {": the results belong to the whole statement
                regions.append(opened)
                continue
        result, _, operation = line.partition(" = ") if line.startswith("%") else ("", "", line)
        name, _, count = result.partition(":")
        opcode = operation.split(" ", 1)[0]
        operands = VALUE.findall(_without_types(operation))
        given = [max(origins.get(x, OTHER), origins.get(buffers.get(x, x), OTHER)) for x in operands]
        if opcode == "scf.for":
            origins[operands[0]] = OTHER  # names are reused, here for the counter of the loop
            arguments = re.findall(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)", operation.partition("iter_args")[2])
            for index, (argument, start) in enumerate(arguments):
                origins[argument] = max(origins.get(start, OTHER), carried.get(number, {}).get(index, OTHER))
        elif opcode == "scf.yield" and regions:
            opened_at, results = regions[-1]
            values = now.setdefault(opened_at, {})
            for index, origin in enumerate(given):
                values[index] = max(origin, values.get(index, OTHER))
                origins[f"{results}#{index}" if len(operands) > 1 else results] = values[index]
        elif opcode == "ttng.warp_group_dot_wait" and count:  # hands its operands on
            for index, origin in enumerate(given):
                origins[f"{name}#{index}"] = origin
                buffers[f"{name}#{index}"] = buffers.get(operands[index], operands[index])
        elif opcode == "ttg.local_store":
            origins[buffers.get(operands[1], operands[1])] = given[0]
        elif name:
            origin = PRODUCT if opcode in PRODUCTS else max(given, default=OTHER)
            if opcode in TRANSPOSES and origin != OTHER:
                origin = TRANSPOSED
            for index in range(int(count or 1)):
                origins[f"{name}#{index}" if count else name] = origin
            if opcode.startswith("ttg.memdesc") and operands:
                buffers[name] = buffers.get(operands[0], operands[0])
        found += opcode in PRODUCTS and TRANSPOSED in given[:2]
        if line.endswith("{"):
            regions.append((number, name))
    return found, now


def _without_types(operation: str) -> str:
    return operation.split(" : ")[0]
