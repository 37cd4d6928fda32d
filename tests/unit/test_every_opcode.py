"""Nothing unchecked reaches CPython's pickle machine: every opcode of its tables, alone and in pairs."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from memtrace.errors import SnapshotError
from memtrace.snapshot.decoder import decode as decoding
from memtrace.snapshot.decoder.decode import decode
from memtrace.snapshot.load import load

HOSTILE = Path(__file__).parents[1] / "hostile"
ARGUMENTS: dict[str, tuple[bytes, ...]] = {
    "uint1": (b"\x00", b"\x04"), "uint2": (b"\x01\x00",), "int4": (b"\x01\x00\x00\x00", b"\xff" * 4),
    "uint4": (b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f"), "uint8": (b"\x01" + bytes(7), b"\xff" * 8),
    "stringnl": (b"'a'\n",), "stringnl_noescape": (b"a\n",), "stringnl_noescape_pair": (b"os\nsystem\n",),
    "decimalnl_short": (b"1\n", b"01\n"), "decimalnl_long": (b"1L\n",), "floatnl": (b"1.5\n",), "float8": (bytes(8),),
    "long1": (b"\x01\x01",), "long4": (b"\x01\x00\x00\x00\x01", b"\xff\xff\xff\xff"), "string1": (b"\x01a",),
    "string4": (b"\x01\x00\x00\x00a",), "bytes1": (b"\x01a",), "bytes4": (b"\x01\x00\x00\x00a",),
    "bytes8": (b"\x01" + bytes(7) + b"a",), "bytearray8": (b"\x01" + bytes(7) + b"a",),
    "unicodestringnl": (b"a\n",), "unicodestring1": (b"\x01a",), "unicodestring4": (b"\x01\x00\x00\x00a",),
    "unicodestring8": (b"\x01" + bytes(7) + b"a",),
}  # fmt: skip
# What PyTorch's dumps hold. All of them build numbers, texts, lists, dictionaries and pairs, and look nothing up.
HARMLESS = {
    "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "TUPLE2", "TUPLE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "PROTO", "FRAME",
}  # fmt: skip
BEFORE = (b"", b"N", b"]", b"}", b"(", b"]K\x00", b"}\x8c\x01aN", b"(K\x01K\x02", b"\x8c\x02os\x8c\x06system", b")\x94")


def written(opcode: pickletools.OpcodeInfo) -> list[bytes]:
    code = opcode.code.encode("latin-1")
    return [code + argument for argument in (ARGUMENTS[opcode.arg.name] if opcode.arg else (b"",))]


class Watch:
    """CPython's machine, which asserts what it is given."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, data: bytes) -> Any:
        self.given += 1
        try:
            names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
        except ValueError as error:  # unsound operands, which CPython's machine refuses as well
            raise pickle.UnpicklingError from error
        assert names <= HARMLESS, sorted(names - HARMLESS)
        return pickle.loads(data)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    fake = type("module", (), {"loads": made})
    monkeypatch.setattr(decoding, "pickle", fake)
    return made


def ends_well(data: bytes) -> bool:
    """Whether a pickle is read; anything but an answer or one line fails."""
    try:
        decode(io.BytesIO(data), data, "x")
    except SnapshotError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_every_opcode_alone_and_in_pairs(protocol: int, watch: Watch) -> None:
    opcodes = [form for opcode in pickletools.opcodes for form in written(opcode)]
    head = b"\x80" + bytes((protocol,)) if protocol else b""
    read = 0
    for first in opcodes:
        for before in BEFORE:
            read += ends_well(head + before + first + b".")
        for second in opcodes:
            read += ends_well(head + first + second + b".")
            read += ends_well(head + b"}(N" + first + second + b".")
    assert read > 100 and (watch.given > 100 or not protocol)


def test_the_tables_are_whole() -> None:
    assert {opcode.arg.name for opcode in pickletools.opcodes if opcode.arg} == set(ARGUMENTS)
    assert {opcode.name for opcode in pickletools.opcodes} >= HARMLESS


@pytest.mark.parametrize("name", ["build_none_hash_bomb.pickle", "readonly_buffer_hash_bomb.pickle"])
@pytest.mark.parametrize("padding", [0, 5 << 20])
def test_opcodes_that_do_nothing_in_cpython_open_no_door(name: str, padding: int, watch: Watch, tmp_path: Path) -> None:
    data = (HOSTILE / name).read_bytes()
    path = tmp_path / "x.pickle"
    text = b"X" + padding.to_bytes(4, "little") + bytes(padding) + b"0" if padding else b""
    path.write_bytes(data[:2] + text + data[2:])
    with pytest.raises(SnapshotError):
        load(path)
    assert watch.given == 0


def test_a_tuple_nested_without_end(watch: Watch) -> None:
    with pytest.raises(SnapshotError):
        load(HOSTILE / "build_none_deep_tuple.pickle.xz")
    assert watch.given == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x80\x04cos\nsystem\n.", "the Python object os.system"),
        (b"\x80\x04\x8c\x05torch\x8c\x06Tensor\x93.", "the Python object torch.Tensor"),
        (b"(ios\nsystem\n.", "the Python object os.system"),
        (b"\x80\x04N)R.", "the Python object of an unknown name"),
        (b"\x80\x04P1\n.", "storage outside the file"),
        (b"\x80\x04NQ.", "storage outside the file"),
    ],
)
def test_what_asks_for_an_object_is_named(data: bytes, says: str) -> None:
    with pytest.raises(SnapshotError) as refused:
        decode(io.BytesIO(data), data, "x")
    assert says in str(refused.value) and "nothing was executed" in str(refused.value)
