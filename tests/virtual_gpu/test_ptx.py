"""The parser: statements, blocks of inline assembly, labels, places, and everything that it does not know."""

from __future__ import annotations

import pytest
import torch

from fusedattn.virtual_gpu.errors import UnknownPTXError
from fusedattn.virtual_gpu.machine import PARAMETER_WINDOW
from fusedattn.virtual_gpu.ptx import Address, Instruction, Kernel, Parameter, access_of, parse
from tests.helpers.ptx_kernels import launch, module, run
from tests.helpers.ptx_values import evaluate


def parsed(body: str) -> Kernel:
    return parse(module(body))


def first(body: str) -> Instruction:
    return parsed(body).instructions[0]


def test_operands() -> None:
    assert first("ret;") == Instruction("ret", ())
    assert first("add.s32 \t%r1,%r2 , -3;") == Instruction("add.s32", ("%r1", "%r2", "-3"))
    x = first("@!%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0x10 ];")
    assert x == Instruction("ld.global.v2.b32", (("%r1", "%r2"), Address("%rd1", 16)), "%p1", True)
    assert x.names == ("%p1", "%r1", "%r2", "%rd1")
    assert first("ld.shared.b32 %r1, [%r2+-8];").operands[1] == Address("%r2", -8)
    assert first("ld.shared.b32 %r1, [%r2];").operands[1] == Address("%r2")
    assert first("elect.sync %r1|%p2, -1;").operands == (("%r1", "%p2"), "-1")
    box = first("cp.x [%r1], [%rd1, {%r2, %r3, 0}], [%r4];").operands[1]
    assert box == Address("%rd1", 0, ("%r2", "%r3", "0"))


def test_a_statement_may_span_lines_and_lines_may_have_several() -> None:
    kernel = parsed("add.s32 %r1,\n  %r2,  // the first\n 4; mov.b64 {%r1,\n %r2}, %rd1; { ret; }")
    assert [x.opcode for x in kernel.instructions] == ["add.s32", "mov.b64", "ret", "ret"]
    assert kernel.instructions[0].operands == ("%r1", "%r2", "4")
    assert kernel.instructions[1].operands == (("%r1", "%r2"), "%rd1")


def test_parameters_and_threads() -> None:
    text = (
        "// a comment\n.visible .entry k(\n .param .u64 .ptr .global .align 1 k_0,\n .param .f32 k_1,\n"
        " .param .align 64 .b8 k_2[128],\n .param .u16 k_3\n)\n.reqntid 64, 1, 1\n.maxnreg 255\n{\n ret;\n}\n"
        ".section x { }"
    )
    kernel = parse(text)
    assert (kernel.name, kernel.n_threads) == ("k", 64)
    assert kernel.parameters == [
        Parameter("k_0", 8),
        Parameter("k_1", 4),
        Parameter("k_2", 128, opaque=True),
        Parameter("k_3", 2),
    ]


def test_registers() -> None:
    kernel = parse(module("ret;", registers=".reg .pred %p<2>; .reg .b16 a, b; .reg .f64 %x;"))
    assert kernel.registers == {"%p0": 1, "%p1": 1, "a": 16, "b": 16, "%x": 64}


def test_blocks_have_names_of_their_own() -> None:
    """A block's registers and labels hide those outside; blocks inside and beside it have others."""
    code = """
    .reg .b32 t;
    mov.b32 t, 1;
    { .reg .b32 t; mov.b32 t, 2; { .reg .b32 t; mov.b32 t, 4; } .reg .b32 u<2>; mov.b32 u1, t; add.s32 %d, %d, u1; }
    { .reg .b32 t; mov.b32 t, 8; add.s32 %d, %d, t; }
    add.s32 %d, %d, t;
    """
    assert evaluate(code, 32, d=(32, [16])) == [16 + 8 + 2 + 1]


def test_a_register_declared_after_a_block_inside() -> None:
    code = "{ { .reg .b32 t; mov.b32 t, 5; } .reg .b32 t; mov.b32 t, 1; { mov.b32 %d, t; } }"
    names = [x.operands[0] for x in parsed(code).instructions[:2]]
    assert names[0] != names[1]
    assert evaluate(code, 32, d=(32, [0])) == [1]


def test_labels_of_blocks() -> None:
    """Two blocks have the same label; branches may precede theirs, and may leave the block."""
    code = """
    { .reg .pred more; again: sub.s32 %d, %d, 1; setp.gt.s32 more, %d, 10; @more bra again; @!more bra done;
      mov.b32 %d, 77;
      done: }
    { .reg .pred more;
    again:
      add.s32 %d, %d, 3; setp.lt.s32 more, %d, 20; @more bra.uni again; bra out; mov.b32 %d, 99; }
    mov.b32 %d, 88;
    out: add.s32 %d, %d, 100;
    """
    assert evaluate(code, 32, d=(32, [11, 15, 30, 0])) == [122, 122, 122, 120]


def test_places_name_the_chain_of_calls() -> None:
    text = module(
        "\n.loc 1 5 0 // kernel.py:5:0\nmov.b32 %r1, 0;\n"
        ".loc\t2 7 3                          // softmax.py:7:3 @[ weights.py:98:2 @[ kernel.py:6:1 @[ a.py:1:1 ] ] ]\n"
        "mov.b32 %r2, 0;\n"
        ".loc 2 9 1, function_name $L__info_string0, inlined_at 1 8 1\nmov.b32 %r3, 0; mov.b32 %r4,\n.loc 1 1 1\n 0;\n"
    )
    kernel = parse(text.replace(".visible", '.file 1 "/src/kernel.py"\n.file 2 "/src/softmax.py"\n.visible'))
    assert [x.place for x in kernel.instructions[:4]] == [
        "kernel.py:5",
        "softmax.py:7, called at weights.py:98, called at kernel.py:6",
        "softmax.py:9",
        "kernel.py:1",
    ]


def test_accesses() -> None:
    assert access_of(Instruction("ld.shared.b32", ())) == ("b32", 4, 1)
    assert access_of(Instruction("st.global.v4.u8", ())) == ("u8", 1, 4)
    for opcode in ("ld.shared.v3.b32", "ld.shared.b128", "ld.shared.volatile.b32", "ld.shared", "ld.shared.b32.x"):
        with pytest.raises(UnknownPTXError, match=opcode):
            access_of(Instruction(opcode, ()))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".shared .align 4 .b8 buffer[16];", "buffer"),
        (".reg .b128 %q;", "b128"),
        (".reg .v2 .b32 %q;", "v2"),
        (".branchtargets a, b;", "branchtargets"),
        ("frobnicate.b32 %r1, %r2;", "frobnicate.b32"),
        ("add.s32.x %r1, %r2, %r3;", "add.s32.x"),
        ("and.b32.x %r1, %r2, %r3;", "and.b32.x"),
        ("mul.wide.s64 %rd1, %rd2, %rd3;", "mul.wide.s64"),
        ("add.s32 %r1, %r2, %undeclared;", "%undeclared"),
        ("add.s32 %undeclared, %r2, 1;", "add.s32"),
        ("@%undeclared add.s32 %r1, %r2, 1;", "add.s32"),
        ("add.s32 %r1, %r2;", "add.s32"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("mov.b32 %r1, 0b101;", "0b101"),
        ("mov.b32 %r1, 017;", "mov.b32"),
        ("mov.b32.x %r1, %r2;", "mov.b32.x"),
        ("selp.b8 %r1, %r2, %r3, %p1;", "selp.b8"),
        ("selp.b32.x %r1, %r2, %r3, %p1;", "selp.b32.x"),
        ("and.pred %p1, !%p2, %p3;", "!%p2"),
        ("add.s64 %r1, %r2, %r3;", "read as 64"),
        ("bra nowhere;", "nowhere"),
        ("brx.idx %r1, table;", "brx.idx"),
        ("ret.uni;", "ret.uni"),
        ("bar.arrive 1, 64;", "bar.arrive"),
        ("trap;", "trap"),
        ("call foo;", "call"),
        ("ld.local.b32 %r1, [%r2];", "ld.local.b32"),
        ("ld.volatile.global.b32 %r1, [%rd1];", "ld.volatile"),
        ("shf.l.wrap.b32.x %r1, %r2, %r3, 1;", "shf.l.wrap.b32.x"),
        ("lop3.b32.x %r1, %r2, %r3, %r4, 1;", "lop3.b32.x"),
        ("prmt.b32.f4e %r1, %r2, %r3, %r4;", "prmt.b32.f4e"),
        ("bfe.u16 %rs1, %rs2, 1, 1;", "bfe.u16"),
        ("bfi.s32 %r1, %r2, %r3, 1, 1;", "bfi.s32"),
        ("cvta.shared.u64 %rd1, %rd2;", "cvta.shared.u64"),
        ("add.u32 %r1, %r2, %r2, %r3;", "got 4 operands; no use is known of %r3"),
        ("max.f32 %r1, %r2, %r2, %r3;", "got 4 operands; no use is known of %r3"),
        ("setp.lt.s32 %p1, %r2, %r2, %p3;", "got 4 operands; no use is known of %p3"),
        ("fma.rn.f32 %r1, %r2, %r2, %r3, %r4;", "got 5 operands; no use is known of %r4"),
        ("mov.b32 %r1, %r2, %r3;", "got 3 operands; no use is known of %r3"),
        ("selp.b32 %r1, %r2, %r3, %p1, %p2;", "got 5 operands"),
        ("cvt.rn.f16.f32 %rs1, %r1, %r2;", "got 3 operands"),
        ("cvt.rn.f16x2.f32 %r1, %r1, %r2, %r3;", "got 4 operands"),
        ("shfl.sync.idx.b32 %r1, %r2, 0, 31, -1, 0;", "got 6 operands"),
        ("ld.shared.b32 %r1, [%r2], %rd1;", "got 3 operands"),
        ("ld.global.b32 %r1, [%rd2], %rd1;", "got 3 operands"),
        ("st.global.b32 [%rd2], %r1, %rd1;", "got 3 operands"),
        ("atom.global.add.u32 %r1, [%rd2], %r2, %r3;", "got 4 operands"),
        ("cp.async.wait_all 0;", "got 1 operands"),
        ("cp.async.commit_group %r1;", "got 1 operands"),
        ("fence.proxy.async %r1;", "got 1 operands"),
        ("bar.sync 0, 128, 1;", "got 3 operands; allowed are 2"),
        ("bra end, end; end:", "got 2 operands; allowed are 1"),
        ("ret %r1;", "got 1 operands; allowed are 0"),
        ("add.u32 %r1, , %r2, %r3;", "an empty operand"),
        (".foo 3;", ".foo"),
        ("/* a comment */ mov.b32 %r1, 0;", r"/\*"),
    ],
)
def test_nothing_is_skipped(body: str, message: str) -> None:
    with pytest.raises(UnknownPTXError, match=message):
        run(body)


@pytest.mark.parametrize(
    "text",
    [
        "",
        module("ret;") * 2,
        module("ret;").replace(".reqntid 128", ""),
        module("ret;").replace(".reqntid 128", ".reqntid 16, 8"),
        module("ret;").replace(".reqntid 128", ".reqntid 100"),
        module("ret;", ["p0"]).replace(".u64 p0", ".bf16 p0"),
        module("ret;")[:-2],
        module("ret;").replace(".reqntid 128", ".reqntid 128\n.foo 3"),
        module("ret;").replace(".reqntid 128", ".reqntid 128\n.explicitcluster .reqnctapercluster 2"),
        module("ret;").replace(".reqntid 128", ".reqntid 128 foo"),
        module("ret;").replace(".reqntid 128", ".reqntid 128\n.maxntid 64, 2"),
        ".foo 3\n" + module("ret;"),
        ".func f() { ret; }\n" + module("ret;"),
        ".address_size 32\n" + module("ret;"),
        ".const .align 4 .b8 table[4];\n" + module("ret;"),
        ".visible\n.version 8.7\n" + module("ret;"),
        module("ret;") + ".foo 3\n",
        module("ret;") + ".func f() { ret; }\n",
        module("ret;") + "}\n",
        module("").replace("ret;", "mov.b32 %r1, 0;"),
        module("").replace("ret;", "bra end; end:"),
        module("").replace("ret;", "@%p1 ret;"),
        module(".loc x").replace("ret;", ""),
    ],
)
def test_modules_that_are_not_known(text: str) -> None:
    with pytest.raises(UnknownPTXError):
        parse(text).block_starts()


def test_what_stands_around_a_kernel_of_triton() -> None:
    """And changes nothing in it; but an instruction that asks for data of the module is not known."""
    text = (
        "//\n// Generated by LLVM\n//\n.version 8.7\n.target sm_90a, debug\n.address_size 64\n\n\t// .globl\tkernel\n"
        ".global .align 1 .b8 _$_str[11] = {95, 95, 67, 85, 68, 65, 95, 70, 84, 90};\n"
        + module("mov.b32 %r1, 0;").replace(".reqntid 128", "// @kernel\n.reqntid 128\n.maxnreg 255\n.minnctapersm 1")
        + '\t.file 2 "/a//b/kernel.py"\n\t.section\t.debug_abbrev\n\t{\n.b8 1 // Abbreviation\n\t}\n'
    )
    assert len(parse(text).instructions) == 2
    with pytest.raises(UnknownPTXError, match="_str"):
        launch(parse(text.replace("%r1, 0;", "%r1, _$_str;")), {})


def test_local_memory_may_be_declared_and_not_used() -> None:
    assert parsed(".local .align 1 .b8 __local_depot0[2]; mov.b32 %r1, 0;").instructions[0].opcode == "mov.b32"
    with pytest.raises(UnknownPTXError, match="__local_depot0"):
        run(".local .align 1 .b8 __local_depot0[2]; mov.b64 %rd1, __local_depot0;")


def test_hints_change_nothing() -> None:
    assert parsed('.pragma "nounroll"; mov.b32 %r1, 0;').instructions[0].opcode == "mov.b32"


def test_addresses_of_parameters() -> None:
    """They have a space of their own, of 32 bits, which generic addresses reach by cvta."""
    out = torch.zeros(3, dtype=torch.int64)
    body = """
    mov.b64 %rd1, p1; cvta.param.u64 %rd2, %rd1; mov.b32 %r1, p1; cvt.u64.u32 %rd3, %r1; cvta.param.u64 %rd4, %rd3;
    mov.b64 %rd5, p0; ld.param.b64 %rd6, [p0]; cvta.to.global.u64 %rd6, %rd6;
    st.global.b64 [%rd6], %rd2; st.global.b64 [%rd6+8], %rd4; st.global.b64 [%rd6+16], %rd5;
    """
    machine = run(body, out, torch.zeros(1), n_threads=32)
    addresses = machine.parameter_addresses
    assert out.tolist() == [PARAMETER_WINDOW + addresses["p1"]] * 2 + [addresses["p0"]]
    assert 0 < addresses["p0"] < addresses["p1"] < 2**32


def test_parameters_of_other_widths() -> None:
    """Narrow parameters are extended, by their sign if the load has one."""
    out = torch.zeros(4, dtype=torch.int64)
    body = """
    ld.param.b64 %rd1, [p0]; ld.param.s32 %rd2, [p1]; ld.param.b32 %r1, [p1]; ld.param.u8 %rs1, [p1];
    cvt.u64.u32 %rd3, %r1; cvt.u64.u16 %rd4, %rs1;
    st.global.b64 [%rd1], %rd2; st.global.b64 [%rd1+8], %rd3; st.global.b64 [%rd1+16], %rd4;
    """
    scratch = torch.zeros(1)
    run(body, out, scratch, n_threads=32)
    low = scratch.data_ptr() % 2**32
    assert out.tolist() == [low - 2**32 if low >> 31 else low, low, low % 256, 0]
    for body in ("ld.param.b64 %rd1, [p9];", "ld.param.b32 %r1, [p0+4];", "ld.param.v2.b32 {%r1, %r2}, [p0];"):
        with pytest.raises(UnknownPTXError, match=body.split()[0]):
            run(body, out)
