"""Products that are transposed on their way into another product.

Triton from 3.4.0 until before 3.7.1 miscompiles ``tl.dot(tl.trans(x), ...)`` on Hopper where x comes out of wgmma
(https://github.com/fla-org/flash-linear-attention/issues/640): the sum is wrong without any message. Only tiles that
were loaded may be transposed. In Triton's GPU dialect this can be seen whatever the source looks like.
"""

from __future__ import annotations

import re

VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
PRODUCTS = ("ttng.warp_group_dot", "tt.dot")
TRANSPOSES = ("ttg.memdesc_trans", "tt.trans")


def transposed_products(ttgir: str) -> int:
    """How many transposes are applied to what was computed from a product."""
    lines = [re.sub(r"\s*loc\(.*\)$", "", line).strip() for line in ttgir.splitlines()]
    carried: dict[int, frozenset[int]] = {}  # line of a loop -> which of its values come from a product
    while True:
        found, now = _walk(lines, carried)
        if now == carried:
            return found
        carried = now


def _walk(lines: list[str], carried: dict[int, frozenset[int]]) -> tuple[int, dict[int, frozenset[int]]]:
    """One pass in program order. What a loop carries around is known after the pass, hence for the next one."""
    tainted: set[str] = set()  # values computed from a product
    buffers: dict[str, str] = {}  # view of shared memory -> the memory
    regions: list[tuple[int, str]] = []  # open braces: line, name of the results
    now = dict(carried)
    found = 0

    def mark(name: str, is_tainted: bool) -> None:
        (tainted.add if is_tainted else tainted.discard)(name)

    for number, line in enumerate(lines):
        if line.startswith("}") and regions:
            opened = regions.pop()
            if line.endswith("{"):  # "} else {": the results are those of the whole
                regions.append(opened)
                continue
        result, _, operation = line.partition(" = ") if line.startswith("%") else ("", "", line)
        name, _, count = result.partition(":")
        opcode = operation.split(" ", 1)[0]
        operands = VALUE.findall(_without_types(operation))
        is_tainted = [x in tainted or buffers.get(x) in tainted for x in operands]
        if opcode == "scf.for":
            mark(operands[0], False)  # names are used again elsewhere, here for the counter of the loop
            arguments = re.findall(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)", operation.partition("iter_args")[2])
            for index, (argument, start) in enumerate(arguments):
                mark(argument, start in tainted or index in carried.get(number, ()))
        elif opcode == "scf.yield" and regions:
            opened_at, results = regions[-1]
            now[opened_at] = now.get(opened_at, frozenset()) | {i for i, x in enumerate(is_tainted) if x}
            for index in range(len(operands)):
                mark(f"{results}#{index}" if len(operands) > 1 else results, index in now[opened_at])
        elif opcode == "ttng.warp_group_dot_wait" and count:  # hands its operands on
            for index, x in enumerate(is_tainted):
                mark(f"{name}#{index}", x)
                buffers[f"{name}#{index}"] = buffers.get(operands[index], operands[index])
        elif opcode == "ttg.local_store":
            mark(buffers.get(operands[1], operands[1]), is_tainted[0])
        elif name:
            for index in range(int(count or 1)):
                mark(f"{name}#{index}" if count else name, opcode in PRODUCTS or any(is_tainted))
            if opcode.startswith("ttg.memdesc") and operands:
                buffers[name] = buffers.get(operands[0], operands[0])
        found += opcode in TRANSPOSES and is_tainted[0]
        if line.endswith("{"):
            regions.append((number, name))
    return found, now


def _without_types(operation: str) -> str:
    return operation.split(" : ")[0]
