"""Read the PTX of one kernel: its parameters, registers, instructions and labels.

The grammar is that of NVIDIA's PTX ISA, as far as compilers of kernels use it. Inline assembly may open blocks in
braces, with registers and labels of their own; each name in such a block gets a number that no other block has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fusedattn.virtual_gpu.errors import UnknownPTXError


@dataclass(frozen=True)
class Address:
    """``[base + offset]`` or, for tensors, ``[base, {coordinates}]``; the base is a register or the name of memory."""

    base: str
    offset: int = 0
    coordinates: tuple[str, ...] = ()


INDEXED = "brx.idx"
BRANCHES = ("bra", "bra.uni", INDEXED)
RETURNS = ("ret", "exit")
BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")
# Of blocks, and how many operands they have at most.
ENDS = {"bra": 1, "bra.uni": 1, INDEXED: 2, **dict.fromkeys(RETURNS, 0), **dict.fromkeys(BARRIERS, 2)}

Operand = str | tuple[str, ...] | Address  # a name or number, {a vector}, [memory]


@dataclass(frozen=True)
class Instruction:
    """``@guard opcode operands;``, with its place in the Python source."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str = ""  # a predicate, or "" if every thread takes part
    negated: bool = False  # the threads without the predicate take part
    place: str = ""
    used: set[int] = field(default_factory=set, compare=False, repr=False)  # numbers of operands that were asked for

    def operand(self, i: int) -> Operand:
        """Operand `i`, which counts as used from now on."""
        self.used.add(i)
        return self.operands[i]

    @property
    def names(self) -> tuple[str, ...]:
        """All names and numbers of the operands, in order."""
        found: list[str] = [self.guard] if self.guard else []
        for operand in self.operands:
            if isinstance(operand, Address):
                found += [operand.base, *operand.coordinates]
            else:
                found += [operand] if isinstance(operand, str) else operand
        return tuple(found)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel: a number of `n_bytes`, or an opaque value of so many bytes."""

    name: str
    n_bytes: int
    opaque: bool = False


@dataclass
class Kernel:
    """A kernel. `labels` gives the number of the instruction that follows; `registers` the bits of each name."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    n_threads: int = 0
    registers: dict[str, int] = field(default_factory=dict)  # name -> bits; predicates have one
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of brx.idx: name -> labels

    def block_starts(self) -> list[int]:
        """The numbers of the instructions that follow the end of a block, or that a branch leads to."""
        starts = {0}
        for i, x in enumerate(self.instructions):
            if x.opcode in ENDS:
                starts.add(i + 1)
            if x.opcode in BRANCHES:
                starts.update(self.targets(x))
        return sorted(i for i in starts if i < len(self.instructions))

    def targets(self, x: Instruction) -> list[int]:
        """The numbers of the instructions to which a branch leads; brx.idx has several, by its first operand."""
        labels: Sequence[str] = [name(x, 0)]
        if x.opcode == INDEXED:
            if name(x, 1) not in self.tables:
                raise UnknownPTXError(f"{x.opcode} by {x.operands[1]}, at {x.place}: there is no such .branchtargets")
            labels = self.tables[name(x, 1)]
        found = [self.labels.get(label, len(self.instructions)) for label in labels]
        for label, at in zip(labels, found, strict=True):
            if at == len(self.instructions):
                raise UnknownPTXError(f"{x.opcode} to {label}, at {x.place}: no instruction follows that label")
        return found


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)\s.*?([\w$]+)(?:\[(\d+)\])?$", re.S)
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*1)*\s*(?![\s,\d])")
_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>")
_REGISTER = re.compile(r"\.(?:pred|[bsuf](8|16|32|64))")
_ACCESS = re.compile(r"\w+\.\w+(?:\.v([248]))?\.([bsuf](8|16|32|64))")
_LABEL = re.compile(r"\s*([\w$]+):(?!:)")
_PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*?//\s*(.*))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)".*$', re.M)
# Around the kernel: what changes nothing in it.
_AROUND = re.compile(
    r"""\s+
    | \.version\s+[\d.]+                                              # of the ISA
    | \.target\s+\w+(?:\s*,\s*\w+)*                                   # the architecture, and whether to debug
    | \.address_size\s+64
    | \.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+\w+\[\]\s*;        # shared memory; known is Triton's name for it
    | \.global\s+\.align\s+\d+\s+\.b8\s+[\w$]+\[\d+\](?:\s*=\s*\{[\d,\s]*\})?\s*;  # data that no instruction can use
    | \.(?:visible|weak)(?=\s*$)                                      # linkage of the kernel
    | \.section\s+[.\w$]+\s*\{[^{}]*\}                                # debug data
    """,
    re.X,
)
# Of the kernel: its threads, and hints by how many programs and registers it should be compiled.
_OF_KERNEL = re.compile(
    r"\s+|\.(?:reqntid|maxntid)\s+\d+(?:\s*,\s*1)*(?![\s,]*\d)|\.(?:maxnreg|minnctapersm|maxnctapersm)\s+\d+"
)


def parse(text: str) -> Kernel:
    """The one kernel of a PTX module."""
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise UnknownPTXError(f"a module with {len(entries)} kernels; allowed is one")
    name, parameters, directives = entries[0].groups()
    _refuse_rest(_AROUND, _FILE.sub("", text[: entries[0].start()]))
    _refuse_rest(_OF_KERNEL, directives)
    kernel = Kernel(name)
    for parameter in filter(None, (part.strip() for part in parameters.split(","))):
        found = _PARAMETER.match(parameter)
        if found is None:
            raise UnknownPTXError(f"parameter {parameter}")
        kind, its_name, count = found.groups()
        n_bytes = int(kind[1:]) // 8
        kernel.parameters.append(Parameter(its_name, n_bytes * int(count or 1), opaque=count is not None))
    threads = _THREADS.search(directives)
    if threads is None or int(threads.group(1)) % 32:
        raise UnknownPTXError(
            f"{' '.join(directives.split())!r}; needed is .reqntid or .maxntid, of whole warps in a row"
        )
    kernel.n_threads = int(threads.group(1))
    files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(text)}
    body = _Body(kernel, files)
    body.read(text[entries[0].end() :])
    _refuse_rest(_AROUND, _FILE.sub("", body.after))
    return kernel


def _refuse_rest(known: re.Pattern[str], text: str) -> None:
    """Fail if a text has more than the known directives and comments."""
    text, at = re.sub(r"//.*", "", text), 0
    while at < len(text):
        found = known.match(text, at)
        if found is None:
            raise UnknownPTXError(f"directive {' '.join(text[at:].split(None, 4)[:4])}")
        at = found.end()


class _Body:
    """Statements of a kernel's body, added to it one by one."""

    def __init__(self, kernel: Kernel, files: dict[str, str]) -> None:
        self.kernel, self.files = kernel, files
        self.place = ""
        self.scopes: list[dict[str, str]] = [{}]  # of open blocks: names of the source -> names that are unique
        self.open: list[int] = []  # the numbers of open blocks
        self.n_blocks = 0
        self.after = ""  # the text after the end of the body

    def read(self, body: str) -> None:
        statements = list(self._statements(body))
        labels = _labels_of_blocks(statement for statement, _ in statements)
        label = ""
        for statement, self.place in statements:
            if statement == "{":
                self.n_blocks += 1
                self.open.append(self.n_blocks)
                self.scopes.append({name: f"{name}#{self.n_blocks}" for name in labels[self.n_blocks]})
            elif statement == "}":
                self.scopes.pop()
                self.open.pop()
            elif statement.endswith(":"):
                label = self._unique(statement[:-1])
                self.kernel.labels[label] = len(self.kernel.instructions)
                continue
            elif statement.startswith(".branchtargets") and label:
                names = statement.split(None, 1)[1].split(",")
                self.kernel.tables[label] = tuple(self._unique(name.strip()) for name in names)
            elif statement.startswith("."):
                self._declare(statement)
            else:
                self.kernel.instructions.append(self._instruction(statement))
            label = ""  # the name of a table stands right before it
        last = self.kernel.instructions[-1:]
        if not last or last[0].guard or last[0].opcode not in (*RETURNS, *BRANCHES):
            raise UnknownPTXError("a body without a return at its end")

    def _statements(self, body: str) -> Iterator[tuple[str, str]]:
        """Statements without their semicolons, braces of blocks and labels; each with its place.

        A brace at the beginning of a statement is that of a block, another that of a vector.
        """
        depth, statement = 1, ""
        lines = body.splitlines()
        for i, line in enumerate(lines):
            if line.split()[:1] == [".loc"]:
                self._locate(line.strip())
                continue
            pieces = re.split(r"([{};])", line.split("//")[0])
            for j, piece in enumerate(pieces):
                if piece == ";":
                    yield statement.strip(), self.place
                    statement = ""
                elif piece in ("{", "}") and not statement.strip():
                    depth += 1 if piece == "{" else -1
                    if depth == 0:
                        self.after = "\n".join(["".join(pieces[j + 1 :]), *lines[i + 1 :]])
                        return
                    yield piece, self.place
                else:
                    statement += piece
                    while label := _LABEL.match(statement):
                        yield f"{label.group(1)}:", self.place
                        statement = statement[label.end() :]
            statement += " "
        raise UnknownPTXError(f"a body that does not end; after {statement.strip()!r}")

    def _locate(self, line: str) -> None:
        found = _PLACE.match(line)
        if found is None:
            raise UnknownPTXError(line)
        file, row, _, chain = found.groups()
        if chain:  # "softmax.py:52:9 @[ attention_fwd.py:138:94 @[ ... ] ]"
            calls = re.findall(r"([\w.<>-]+):(\d+):\d+", chain)
            self.place = ", called at ".join(f"{name}:{number}" for name, number in calls[:3])
        else:
            self.place = f"{self.files.get(file, '?')}:{row}"

    def _unique(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _declare(self, statement: str) -> None:
        words = statement.replace(",", " ").split()
        if words[0] == ".reg":
            kind = _REGISTER.fullmatch(words[1])
            if kind is None:
                raise UnknownPTXError(statement)
            for name in _declared(words[2:]):
                if len(self.scopes) > 1:
                    self.scopes[-1][name] = f"{name}#{self.open[-1]}"
                self.kernel.registers[self._unique(name)] = int(kind.group(1) or 1)
        elif words[0] not in (".pragma", ".local"):  # hints, and memory that no instruction can use
            raise UnknownPTXError(statement)

    def _instruction(self, statement: str) -> Instruction:
        guard, negated = "", False
        if statement.startswith("@"):
            word, statement = statement[1:].split(None, 1)
            negated = word.startswith("!")
            guard = self._unique(word.lstrip("!"))
        opcode, *operands = statement.split(None, 1)
        return Instruction(
            opcode, tuple(self._operand(text) for text in _split("".join(operands))), guard, negated, self.place
        )

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return tuple(self._unique(part.strip()) for part in text[1:-1].split(","))
        if text.startswith("["):
            base, *others = _split(text[1:-1])
            coordinates: tuple[str, ...] = ()
            if len(others) > 1 or any(not other.strip().startswith("{") for other in others):
                raise UnknownPTXError(f"operand {text}, at {self.place}")
            if others:
                coordinates = tuple(self._unique(part.strip()) for part in others[0].strip()[1:-1].split(","))
            name, _, offset = base.partition("+")
            return Address(self._unique(name.strip()), int(offset or "0", 0), coordinates)
        if "|" in text:
            return tuple(self._unique(part.strip()) for part in text.split("|"))
        return self._unique(text)


def _declared(names: Iterable[str]) -> Iterator[str]:
    """The registers of a declaration; ``%r<3>`` are %r0, %r1 and %r2."""
    for name in names:
        several = _RANGE.fullmatch(name)
        if several is None:
            yield name
        else:
            yield from (f"{several.group(1)}{i}" for i in range(int(several.group(2))))


def _split(text: str) -> list[str]:
    """The parts between commas that lie outside of braces and brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise UnknownPTXError(f"an empty operand: {text.strip()}")
    return [part for part in parts if part.strip()]


def _labels_of_blocks(statements: Iterable[str]) -> dict[int, list[str]]:
    """The labels inside each block in braces, by the number of the block: a branch may precede its label."""
    labels: dict[int, list[str]] = {}
    open_blocks: list[int] = []
    for statement in statements:
        if statement == "{":
            open_blocks.append(len(labels) + 1)
            labels[open_blocks[-1]] = []
        elif statement == "}":
            open_blocks.pop()
        elif statement.endswith(":") and open_blocks:
            labels[open_blocks[-1]].append(statement[:-1])
    return labels


def access_of(x: Instruction) -> tuple[str, int, int]:
    """The type, its bytes and the number of elements of ``ld.space.v4.b32`` and the like; no other modifiers."""
    found = _ACCESS.fullmatch(x.opcode)
    if found is None:
        raise UnknownPTXError(f"{x.opcode}, at {x.place}")
    n, kind, bits = found.groups()
    return kind, int(bits) // 8, int(n or 1)


def name(x: Instruction, i: int) -> str:
    """Operand `i`, which is a single register or number."""
    operand = x.operand(i)
    if not isinstance(operand, str):
        raise UnknownPTXError(f"{x.opcode}, at {x.place}")
    return operand


def vector(x: Instruction, i: int) -> tuple[str, ...]:
    """Operand `i` as a vector, also of one."""
    operand = x.operand(i)
    if isinstance(operand, Address):
        raise UnknownPTXError(f"{x.opcode}, at {x.place}")
    return (operand,) if isinstance(operand, str) else operand
