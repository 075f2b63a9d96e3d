"""Seeded damage to files: bytes and values as an SQLite client could change them."""

from __future__ import annotations

import contextlib
import json
import lzma
import random
import re
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4096
VALUES = (
    None, 0, 1, -1, 2, 7, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 0.5, -0.0, 1e300, -1e308, float("inf"),
    float("-inf"), "", "nan", "inf", "x", "1", "-1", "[]", "[1, 2]", "[0]", "[-3]", "[1e9]", "[[1]]", "{}", "null",
    "[" * 5000, '{"a": ' * 3000, "1" * 5000, "match", "mismatch", "skipped", "backward", "pass", "rounding",
    "compiled::graph 0", "aten::mm", "../../x.pt", "=1+1", "a\x00b", "\x1b[31m\nred", "\u202egnp.exe", "\ud7ff\ue000",
    b"", b"\xff\xfe", b"\x80" * 100, b"not text", "é" * 3000, "cpu", "cuda:999999999999999",
    "[" + "1, " * 2000 + "1]",
)  # fmt: skip
JSON = (
    "null", "[]", "{}", "1", '"x"', "[", "{", "NaN", '{"target": 1, "ref": 2}', '{"target": "a"}',
    '{"target": "npu", "ref": "cpu", "rank": %s}', '{"target": "npu", "ref": "cpu", "world_size": 1e30}',
    '{"target": "npu", "ref": "cpu", "world_size": 999999999999999}', '{"target": "npu", "ref": "cpu", "wall_s": "x"}',
    '{"target": "npu", "ref": "cpu", "wall_s": 1, "budget": {"ratio": "x"}}',
    '{"target": "npu", "ref": "cpu", "wall_s": 1, "budget": {"ratio": 1}}',
    '{"target": "npu", "ref": "cpu", "config": {"slow_ratio": "fast"}}',
    '{"target": "npu", "ref": "cpu", "config": [1]}', '{"target": "npu", "ref": "cpu", "argv": "abc"}',
    '{"target": "npu", "ref": "cpu", "notes": [1, null]}',
    '{"target": "npu", "ref": "cpu", "versions": {"torch": [1]}}',
    '{"target": "npu", "ref": "cpu", "versions": null}', '{"target": "npu", "ref": "cpu", "target_fingerprint": "x"}',
    '{"target": "npu", "ref": "cpu", "complete": "yes", "started": 5}', '{"target": "", "ref": ""}',
    '{"target": "npu", "ref": "cpu", "wall_s": Infinity, "own_s": NaN}', '{"a":' * 900 + "1" + "}" * 900,
)  # fmt: skip


def of_bytes(path: Path, seed: int) -> None:
    """Damage a file as a disk, a transfer or a fuzzer does."""
    chance = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 1, 3, 10))):
        if not data:
            break
        at = chance.randrange(len(data))
        page = at // PAGE * PAGE
        # A short file, such as a compressed one, has no pages.
        match chance.randrange(8) if len(data) > 2 * PAGE else chance.choice((0, 1, 3, 6)):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at] = chance.randrange(256)
            case 2:  # where pages have their numbers
                at = page + chance.randrange(min(120, len(data) - page))
                data[at] = chance.choice((0, 1, 2, 5, 10, 13, 127, 255))
            case 3:
                end = min(len(data), at + chance.randrange(1, 64))
                data[at:end] = chance.randbytes(end - at)
            case 4:  # one page in the place of another
                other = chance.randrange(len(data) // PAGE) * PAGE
                data[page : page + PAGE] = data[other : other + PAGE]
            case 5:
                data[page : page + PAGE] = bytes(min(PAGE, len(data) - page))
            case 6:
                del data[at:]
            case 7:
                at = chance.randrange(100)
                data[at] = chance.randrange(256)
    path.write_bytes(data)


def of_values(path: Path, seed: int) -> None:
    """Change values of a file as an SQLite client could: it stays valid, with other values."""
    chance = random.Random(seed)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma ignore_check_constraints = on")
    try:
        for _ in range(chance.choice((1, 1, 2, 5))):
            with contextlib.suppress(sqlite3.Error):
                _change(connection, chance)
    finally:
        connection.close()


def _change(connection: sqlite3.Connection, chance: random.Random) -> None:
    run = connection.execute
    tables = [row[0] for row in run("select name from sqlite_master where type = 'table' order by name")]
    table = chance.choice(tables)
    columns = [row[1] for row in run(f"pragma table_info({table})")]
    column, value = chance.choice(columns), chance.choice(VALUES)
    some = f"abs(random()) % {chance.choice((1, 2, 9))} = 0" if chance.random() < 0.5 else "1"
    match chance.randrange(12):
        case 0 | 1 | 2 | 3:
            run(f"update or replace {table} set {column} = ? where {some}", (value,))
        case 4:
            other = chance.choice(columns)
            run(f"update or replace {table} set {column} = {other}")
        case 5:
            run(f"delete from {table} where {some}")
        case 6:
            row = [chance.choice(VALUES) for _ in columns]
            run(f"insert or replace into {table} values ({', '.join('?' * len(columns))})", row)
        case 7:
            _change_schema(connection, chance, table, column)
        case 8 | 9:
            info = chance.choice(JSON).replace("%s", str(chance.choice((-1, 5, 2**70, '"x"'))))
            run("update meta set value = ?", (info,))
            if "source" in tables and chance.random() < 0.5:
                run("insert or replace into source values (?, 'a.shadowrun', ?, ?)", (
                    chance.choice((0, 1, 2, -1)), info, chance.choice((0, 1, 1000, -5, 2**62)),
                ))  # fmt: skip
        case 10:
            run(f"update {table} set {column} = {column} * {chance.choice(('-1', '1e300', '1000000007', 'null'))}")
        case 11:
            # What NOT NULL and the types of a schema forbid, SQLite reads all the same.
            run("pragma writable_schema = on")
            run("update sqlite_master set sql = replace(sql, ' not null', '') where name = ?", (table,))
            run("pragma writable_schema = reset")
            run(f"update {table} set {column} = ?", (value,))


def _change_schema(connection: sqlite3.Connection, chance: random.Random, table: str, column: str) -> None:
    run = connection.execute
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select i"
    columns = [row[1] for row in run(f"pragma table_info({table})")]
    match chance.randrange(9):
        case 0:
            run(f"drop table {table}")
        case 1:
            run(f"alter table {table} rename to was_{table}")
            run(f"create view {table} as {endless} as {', i as '.join(columns)} from n")
        case 2:
            run(f"alter table {table} rename column {column} to other")
        case 3:
            run(f"alter table {table} add column more as ((select 1))")
        case 4:
            run(f"create trigger t after update on {table} begin delete from {table}; end")
        case 5:
            run(f"create index i on {table} (abs({column}))")
        case 6:
            run(f"pragma user_version = {chance.choice((0, 1, 2, 3, 4, 6, -1, 2**31 - 1))}")
        case 7:
            run(f"alter table {table} rename to was_{table}")
            run(f"create table {table} as select * from was_{table}")
            run(f"drop table was_{table}")
        case 8:
            run("create virtual table v using fts5 (a)")


def of_json(path: Path, seed: int) -> None:
    """Change values in a file of JSON lines, which may be compressed."""
    chance = random.Random(seed)
    packed = path.read_bytes()
    is_packed = packed.startswith(b"\xfd7zXZ")
    lines = (lzma.decompress(packed) if is_packed else packed).decode().splitlines()
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        with contextlib.suppress(ValueError, RecursionError):
            lines[at] = json.dumps(other_value(json.loads(lines[at]), chance), separators=(",", ":"))
    if not chance.randrange(8):
        lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    path.write_bytes(lzma.compress(data) if is_packed else data)


def other_value(value: object, chance: random.Random, depth: int = 0) -> object:
    """A value with one part changed."""
    if isinstance(value, (list, dict)) and value and chance.random() < 0.97 - 0.02 * depth:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(keys)
        kind = chance.randrange(12)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, list):
            value.insert(key, value[key])
        else:
            value[key] = other_value(value[key], chance, depth + 1)
        return value
    found = chance.choice((*VALUES, value, [value], {"ref": value}, {"ref": [0, 0]}, {"tuple": [value]}, [[]] * 3))
    return found if not isinstance(found, bytes) else found.hex()


_TOKEN = re.compile(r"\w+(\.\w+)*|[^\w\s]|\d+")
_TOKENS = (
    "self",
    "torch",
    "torch.load",
    "torch.ops.aten.from_file.default",
    "open",
    "__import__",
    "L_x_",
    "l_x_",
    "()",
    "[0]",
    "1e999",
    "9" * 5000,
    "-1",
    "2 ** 10 ** 10",
    "None",
    "...",
    "*",
    "**",
    "lambda: 0",
    "'" + "x" * 5000 + "'",
    "(" * 300,
    "[" * 3000,
    "\n",
    "\t",
    ";",
    "=",
    "\ufeff",
    "\x00",
    "torch.lstm",
    "torch.float32",
    "inf",
    "slice(1)",
    "yield",
    "\u202e",
    "\x1b[31m",
    "{1: 2}",
    "-" * 3000,
    "not ",
    "float('nan')",
    "data = [" + "1, " * 3000 + "]",
    "shape = [9999999999]",
)


def of_source(path: Path, seed: int) -> None:
    """Change words of a text: Python, TOML."""
    chance = random.Random(seed)
    text = path.read_text()
    for _ in range(chance.choice((1, 1, 2, 5))):
        found = list(_TOKEN.finditer(text))
        if not found:
            break
        one = chance.choice(found)
        new = chance.choice((*_TOKENS, chance.choice(found)[0], chance.choice(found)[0], ""))
        text = text[: one.start()] + new + text[one.end() :]
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
