"""The machine code of a compiled kernel, as NVIDIA's cuobjdump lists it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/ +([^;]*);")  # address and instruction
UNIFORM = re.compile(r"\b(?:UR\d+|UP\d)\b")  # registers and predicates that all threads of a warp share
REGISTER = re.compile(r"U?[RP](?:\d+|Z|T)")
WRITES_UNIFORM = re.compile(r"U|R2UR|S2UR|CS2UR|REDUX|VOTEU")


def dumped(built: Any, what: str) -> str:
    """The output of cuobjdump with this option."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(built: Any) -> dict[str, int]:
    """Registers per thread, bytes of stack (spilled registers) and of shared memory."""
    found = dict(re.findall(r"(REG|STACK):(\d+)", dumped(built, "-res-usage")))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]), "shared": built.metadata.shared}


def instructions(built: Any) -> list[tuple[int, str]]:
    """Address and text of every instruction."""
    return [(int(at, 16), what.strip()) for at, what in LINE.findall(dumped(built, "-sass"))]


def unset_registers(code: list[tuple[int, str]]) -> list[str]:
    """Instructions that read a uniform register before any other writes it, in order of addresses; for GPUs up to
    compute capability 9.0, whose instructions it knows.

    The assembler ptxas 12.8, which Triton 3.6 brings, makes such instructions in rare cases: the addresses of some
    operands of a matrix product start from the wrong register. The kernel is then wrong, or reads other memory.
    """
    written: set[str] = set()
    wrong = []
    for _, instruction in code:
        words = instruction.replace(",", " ").split()
        reads = UNIFORM.findall(words.pop(0)) if instruction.startswith("@") else []
        operation, writes = words.pop(0), []
        if WRITES_UNIFORM.match(operation):
            while words and REGISTER.fullmatch(words[0]) and (not writes or words[0].startswith("UP")):
                writes.append(words.pop(0))
        for word in words:
            names = UNIFORM.findall(word)
            if word.startswith("gdesc"):  # four registers: the descriptors of both matrices, or only of the second
                first = int(names[0][2:])
                both = not REGISTER.fullmatch(words[1])
                names = [f"UR{first + i}" for i in ((0, 1, 2, 3) if both else (2, 3))]
            reads += names
        if not written.issuperset(reads):
            wrong.append(instruction)
        if "64" in operation or "WIDE" in operation:
            writes += [f"UR{int(name[2:]) + 1}" for name in writes if name.startswith("UR") and name != "URZ"]
        written.update(writes)
    return wrong
