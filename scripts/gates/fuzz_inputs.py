"""Inputs for the fuzzer: mutated valid files, and files that are invalid from the start.

Every choice comes from the given ``random.Random``, so that Hypothesis can shrink a failing input.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from functools import cache
from typing import Any

import numpy as np

Chance = random.Random
HUGE = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Planted:
    """An object whose unpickling creates a folder, the canary."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.canary, 0o777, True)


def damaged(content: bytes, chance: Chance, other: bytes = b"") -> bytes:
    """Return a file with one to three mutations of its bytes."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        at = chance.randrange(min(len(content), 300) + 1) if chance.random() < 0.5 else chance.randrange(len(content) + 1)
        length = chance.choice([1, 2, 4, 8, 16, 100])
        stretch = content[at : at + length]
        match chance.randrange(9):
            case 0:
                content = content[:at] + bytes(b ^ 1 << chance.randrange(8) for b in content[at : at + 1]) + content[at + 1 :]
            case 1:
                content = content[:at]
            case 2:
                content = content[:at] + content[at + length :]
            case 3:
                content = content[:at] + stretch * chance.choice([2, 3, 50]) + content[at + length :]
            case 4:
                size = chance.choice([1, 2, 4, 8])
                value = chance.choice(HUGE) % 2 ** (8 * size)
                new = value.to_bytes(size, chance.choice(["little", "big"]))
                content = content[:at] + new + content[at + size :]
            case 5:
                content = content[:at] + bytes(len(stretch)) + content[at + length :]
            case 6:
                content = content[:at] + other[chance.randrange(len(other) + 1) :]
            case 7:
                content = content + chance.choice([b"\0", b"junk", content])
            case _:
                content = content[:at] + bytes(chance.randrange(256) for _ in range(min(length, 8))) + content[at:]
    return content


# --- .npy and .npz ------------------------------------------------------------------------------------------------------

DESCRIPTIONS = (
    "'<f8'", "'<f4'", "'>f4'", "'|b1'", "'<i2'", "'<f16'", "'<f2'", "'<c16'", "'|O'", "'<U0'", "'<U3'", "'<U1000000000'",
    "'|S0'", "'|V0'", "'|V8'", "'<M8[s]'", "'<m8'", "[('a', '<f4')]", "[('a', '|O')]", "('<f4', (2, 2))", "'<f8' * 9", "8",
    "None", "'f'", "''", "'<f99'", "__import__('os').getcwd()", "'\\x00'", "[]", "{}",
)  # fmt: skip
LENGTHS = (
    "0", "1", "2", "3", "8", "12", "-1", "True", "10**9", "1000000000", "9223372036854775807", "18446744073709551616",
    "'3'", "3.0", "None", "(2,)", "1" * 400,
)  # fmt: skip


def npy_header(chance: Chance) -> str:
    """Return the text of a NumPy header, valid or not."""
    shape = ", ".join(chance.choice(LENGTHS) for _ in range(chance.choice([2, 2, 2, 1, 0, 3, 40])))
    order = chance.choice(["False", "False", "True", "1", "None", "'yes'"])
    text = f"{{'descr': {chance.choice(DESCRIPTIONS)}, 'fortran_order': {order}, 'shape': ({shape},), }}"
    match chance.randrange(12):
        case 0:
            return text.replace("descr", chance.choice(["desc", "shape", "é", "descr\\n"]))
        case 1:
            return text[: chance.randrange(len(text))]
        case 2:
            return chance.choice(["(", "[", "{", "-"]) * chance.choice([1, 90, 5000])
        case 3:
            return text + chance.choice([" ", "\n", "L", "#"]) * chance.choice([1, 9000, 70000])
        case _:
            return text


def npy(chance: Chance, canary: str, valid: bytes) -> bytes:
    """Return a .npy file."""
    kind = chance.randrange(8)
    if kind == 0:
        return valid
    if kind <= 2:
        return damaged(valid, chance, npy_bytes("{'descr': '|O', 'fortran_order': False, 'shape': (2, 2)}", bytes(32)))
    if kind == 3:
        stream = io.BytesIO()
        np.save(stream, np.array([[Planted(canary)] * 2] * 2, dtype=object), allow_pickle=True)
        return stream.getvalue() if chance.random() < 0.5 else damaged(stream.getvalue(), chance, valid)
    if kind == 4:
        return pickle.dumps(Planted(canary), protocol=chance.choice([0, 2, 4, 5]))
    version = chance.choice([b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\0\0", b"\xff\xff"])
    content = bytes(chance.choice([0, 1, 8, 24, 96, 288, 1000])) if chance.random() < 0.7 else valid[128:]
    return npy_bytes(npy_header(chance), content, version, chance.choice([0, 0, 0, 1, -1, 60000]))


def npy_bytes(header: str, content: bytes, version: bytes = b"\1\0", lie: int = 0) -> bytes:
    """Return a custom header followed by some bytes; the header may state a wrong length."""
    text = header.encode("utf-8", "surrogatepass") + b" " * (-(len(header) + 11) % 64) + b"\n"
    width = 2 if version == b"\1\0" else 4
    length = min(max(len(text) + lie, 0), 2 ** (8 * width) - 1)
    return b"\x93NUMPY" + version + length.to_bytes(width, "little") + text + content


def npz(chance: Chance, canary: str, X: bytes, y: bytes) -> bytes:
    """Return a .npz file: valid or invalid members in a valid or invalid archive."""
    if chance.randrange(400) == 333:  # Hypothesis prefers small numbers, and this is slow
        return bomb() if chance.random() < 0.5 else damaged(bomb(), chance, X)
    stream = io.BytesIO()
    compression = chance.choice([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED] * 7 + [zipfile.ZIP_BZIP2])
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, valid in (("X", X), ("y", y)):
            if chance.random() < 0.1:
                continue
            content = valid if chance.random() < 0.6 else npy(chance, canary, valid)
            member = zipfile.ZipInfo(chance.choice([f"{name}.npy"] * 8 + [name, f"../{name}.npy"]))  # without a time stamp
            archive.writestr(member, content, compression)
    content = stream.getvalue()
    match chance.randrange(4):
        case 0:
            return content
        case 1:
            return damaged(content, chance, X)
        case _:
            return _with_directory_lies(bytearray(content), chance)


@cache
def bomb() -> bytes:
    """Return a decompression bomb: an archive whose array is a thousand times as large as the file."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        header = "{'descr': '<f8', 'fortran_order': True, 'shape': (1000000, 8)}"
        archive.writestr("X.npy", npy_bytes(header, bytes(64_000_000)))
    return stream.getvalue()


def _with_directory_lies(content: bytearray, chance: Chance) -> bytes:
    """Change fields of the archive's directory: sizes, offsets, flags, methods, checksums."""
    places = (
        [at for at in range(len(content) - 46) if content[at : at + 4] in (b"PK\1\2", b"PK\3\4")]
        if len(content) < 10_000
        else []
    )
    for at in places:
        if chance.random() < 0.6:
            local = content[at + 2] == 3
            fields = ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)) if local else (
                (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4))  # fmt: skip
            offset, size = chance.choice(fields)
            content[at + offset : at + offset + size] = (chance.choice(HUGE) % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(content)


# --- idx ----------------------------------------------------------------------------------------------------------------


def idx(chance: Chance, valid: bytes) -> tuple[bytes, bool]:
    """Return an idx file, and whether it is compressed."""
    kind = chance.randrange(5)
    if kind == 0:
        content = valid
    elif kind == 1:
        content = damaged(valid, chance)
    else:
        n_axes = chance.choice([0, 1, 2, 3, 4, 5, 255])
        sizes = [chance.choice([0, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**32 - 1]) for _ in range(min(n_axes, 9))]
        head = bytes([0, chance.choice([0, 0, 0, 1]), chance.choice([8, 8, 8, 9, 13, 0]), n_axes])
        content = head + struct.pack(f">{len(sizes)}I", *sizes) + bytes(chance.choice([0, 1, 6, 12, 84, 5000]))
    if chance.random() < 0.5:
        return content, chance.random() < 0.1
    packed = gzip.compress(content, mtime=0)
    if chance.random() < 0.1:
        bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
        packed = (
            bomb.compress(b"\0\0\x08\1" + struct.pack(">I", chance.choice([7, 2**28, 2**32 - 1])) + bytes(2**22)) + bomb.flush()
        )
    return (packed if chance.random() < 0.4 else damaged(packed, chance, valid)), True


# --- .csv ---------------------------------------------------------------------------------------------------------------

CELLS = (
    "", "nan", "inf", "-inf", "1e400", "1e-400", "1_000", "٣", "²", "0x10", "1,5", '"', '""', '"1', "a\nb", "\0", "=1+1",
    "NULL", "1e", "--1", " 1 ", "\ufeff", "9" * 400, "x" * 140_000, "é", "\ud800", "True", "1j", "+1", "0" * 5000, "-0",
    "\u2028",
)  # fmt: skip
TARGETS = (None, None, None, "none", "0", "2", "-1", "²", "٣", "label", "", "9" * 30, "99999", "a", "1.0", "\0")


def csv(chance: Chance) -> bytes:
    """Return a text table with unusual cells, line endings, delimiters and encodings."""
    width, rows = chance.choice([4, 2, 1]), []
    if chance.random() < 0.6:
        rows.append([*"abcdefgh"[: width - 1], "label"])
    for i in range(chance.choice([6, 3, 1, 0])):
        rows.append([*(f"{i}.{j}" for j in range(width - 1)), chance.choice(["x", "y", "1", "2.5"])])
    for _ in range(chance.choice([0, 1, 1, 2])):
        if rows:
            row = chance.choice(rows)
            if row:
                row[chance.randrange(len(row))] = chance.choice(CELLS)
            if chance.random() < 0.2:
                row.extend(["1"] * chance.choice([1, 2, 1000]))
    line, cell = chance.choice(["\n", "\n", "\r\n", "\r", "\n\n"]), chance.choice([",", ",", ",", ",", ";", "\t"])
    text = line.join(cell.join(row) for row in rows)
    encoding = chance.choice(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp500"])
    content = text.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace")
    return content if chance.random() < 0.6 else damaged(content, chance, b'"\xff\xfe,\0')


# --- safetensors --------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, 10**400, 0.0, 0.5, -0.5, 1e308, 1e-320, float("nan"), float("inf"), "",
    "x", "float32", "float64", "object", "classifier", "network", "é\0", "x" * 1000, [], {}, [[]], [1, 2],
    {"array": [1], "dtype": "<f8"}, {"array": [1], "dtype": "object"}, {"array": [[1], [2, 3]], "dtype": "|O"},
    {"array": ["x"], "dtype": "<U1000000000"},
    {"tuple": [1]}, {"items": [[1, 2]]}, {"items": [[[], 2]]}, {"tuple": ["0", "1"], "of": "interval"}, [10**9, 10**9], [0, 0],
)  # fmt: skip


def tree(value: Any, chance: Chance) -> Any:
    """Return JSON with one node replaced, removed, renamed or moved."""
    value = json.loads(json.dumps(value))
    place, parent, key = value, None, None
    while isinstance(place, dict | list) and place and (parent is None or chance.random() < 0.8):
        parent, key = place, chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place = parent[key]
    if parent is None:
        return chance.choice(VALUES)
    match chance.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[chance.choice(["", "x", "W.0", "network", "__metadata__", "callbacks", "_seed", "history_"])] = parent.pop(
                key
            )
        case 2 if isinstance(parent, list):
            parent.append(place)
        case 3 if isinstance(place, int | float) and not isinstance(place, bool):
            parent[key] = chance.choice(
                [place + 1, place - 1, -place, place * 1000, place / 3 if abs(place) < 1e300 else 0.5, str(place)]
            )
        case _:
            parent[key] = chance.choice(VALUES)
    return value


def safetensors(chance: Chance, canary: str, valid: bytes, other: bytes) -> bytes:
    """Return a model or a checkpoint with damaged bytes, or with a rewritten header: the outer one or lrrn's inside it."""
    match chance.randrange(8):
        case 0:
            return valid
        case 1 | 2:
            return damaged(valid, chance, other)
        case 3 if chance.random() < 0.3:
            return pickle.dumps({"state": Planted(canary)}, protocol=chance.choice([0, 2, 5]))
        case 4:
            return _with_strange_numbers(valid, chance)
    length = int.from_bytes(valid[:8], "little")
    header, content = json.loads(valid[8 : 8 + length]), valid[8 + length :]
    if chance.random() < 0.7:
        inner = json.loads(header["__metadata__"]["lrrn"])
        for _ in range(chance.choice([1, 1, 2, 3])):
            inner = tree(inner, chance) if isinstance(inner, dict) else inner
        text = json.dumps(inner)
        if chance.random() < 0.05:
            text = chance.choice(["[" * 100_000, "NaN", '{"kind": ' * 2000, text[:-1], "\ud800"])
        header["__metadata__"]["lrrn"] = text
    else:
        header = tree(header, chance)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    announced = len(text) if chance.random() < 0.95 else chance.choice(HUGE)
    return announced.to_bytes(8, "little") + text + content


def _with_strange_numbers(valid: bytes, chance: Chance) -> bytes:
    """Return a file with valid headers and some invalid or extreme weights."""
    start = 8 + int.from_bytes(valid[:8], "little")
    for _ in range(chance.choice([1, 2, 5])):
        at = start + 4 * chance.randrange((len(valid) - start) // 4)
        number = chance.choice([float("nan"), float("inf"), 3e38, 1e30, -1e30, 1e19, 1e-45])
        valid = valid[:at] + struct.pack("<f", number) + valid[at + 4 :]
    return valid
