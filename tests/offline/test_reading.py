"""Reading: every row has its place, a bad one its reason; compressed and columnar files give the same rows."""

import datetime
import decimal
import gzip
import io
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compiled_llm.offline import reading
from compiled_llm.offline.reading import RowReader
from compiled_llm.offline.rows import Row, row_to_json


def read(*paths: Path) -> list[Row]:
    return list(RowReader([str(path) for path in paths]))


def test_rows_are_numbered_without_the_blank_lines_and_named_with_them(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a", "priority": 3}\n  \n\n{"prompt_token_ids": [1], "cache_salt": "x"}')
    assert read(path) == [
        Row(0, "row 0 (p.jsonl, line 2)", {"prompt": "a"}, priority=3),
        Row(1, "row 1 (p.jsonl, line 5)", {"prompt_token_ids": [1], "cache_salt": "x"}),
    ]


def test_rows_of_many_files_are_numbered_through(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.jsonl"
    first.write_text("one\ntwo\n")
    second.write_text('{"prompt": "three"}\n')
    assert [row.name for row in read(first, second)] == [
        "row 0 (a.txt, line 1)",
        "row 1 (a.txt, line 2)",
        "row 2 (b.jsonl, line 1)",
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_a_byte_order_mark_and_ends_of_lines_are_no_part_of_a_prompt(tmp_path: Path, start: str, end: str) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_bytes((start + end.join(["ab", "", " c\ufeff", ""])).encode())
    assert [row.prompt for row in read(text)] == [{"prompt": "ab"}, {"prompt": " c\ufeff"}]
    lines.write_bytes((start + end.join(['{"prompt": "a"}', '{"prompt": "b"}'])).encode())
    assert [row.prompt for row in read(lines)] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("content", [b"", b"\n\r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.txt").write_bytes(content)
    assert read(tmp_path / "p.txt") == []


def test_a_byte_that_is_not_utf_8_costs_its_row_alone_and_is_named(tmp_path: Path) -> None:
    for name, line in (("p.txt", b"ab\xffcd"), ("p.jsonl", b'{"\xff')):
        path = tmp_path / name
        good = b'{"prompt": "x"}'
        path.write_bytes(b"\n".join([good, line, good]))
        rows = read(path)
        assert [row.error is None for row in rows] == [True, False, True]
        assert rows[1].name == f"row 1 ({name}, line 2)"
        assert rows[1].error == "not UTF-8: byte 3 of the line is 0xff"


def test_a_line_of_any_length_is_an_error_and_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 100)
    path = tmp_path / "p.txt"
    path.write_bytes(b"a" * 100 + b"\n" + b"b" * 101 + b"\n" + b"c" * 5000 + b"\nd\n" + b"e" * 300)
    rows = read(path)
    assert [row.error for row in rows] == [
        None,
        "the line has more than 100 bytes",
        "the line has more than 100 bytes",
        None,
        "the line has more than 100 bytes",
    ]
    assert [row.prompt and row.prompt["prompt"][0] for row in rows] == ["a", None, None, "d", None]


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        middle = len(content) // 2  # two members, as `cat a.gz b.gz` makes them
        return gzip.compress(content[:middle]) + gzip.compress(content[middle:])
    if suffix == ".zst":
        middle = len(content) // 2
        return zstandard.compress(content[:middle]) + zstandard.compress(content[middle:])
    return content


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300), kind=st.sampled_from([".txt", ".jsonl"]))
@example(content=b"", kind=".txt")
def test_any_bytes_are_rows_and_the_same_when_compressed(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, kind: str
) -> None:
    directory = tmp_path_factory.mktemp("files")
    found = []
    for suffix in ("", ".gz", ".zst"):
        path = directory / f"p{kind}{suffix}"
        path.write_bytes(compressed(content, suffix))
        reader = RowReader([str(path)])
        rows = list(reader)
        assert [row.index for row in rows] == list(range(reader.num_rows))
        assert reader.total_rows() == (len(rows), False)
        assert [reader.has_row(index) for index in range(len(rows) + 2)] == [True] * len(rows) + [False] * 2
        found.append([(row.prompt, row.error) for row in rows])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_off_ends_the_reading(tmp_path: Path, suffix: str) -> None:
    random = Random(0)
    lines = b"".join(b"prompt %d\n" % random.getrandbits(64) for _ in range(30_000))
    path = tmp_path / f"p.txt{suffix}"
    content = gzip.compress(lines) if suffix == ".gz" else zstandard.compress(lines)
    path.write_bytes(content[: len(content) // 2])
    rows = iter(RowReader([str(path)]))
    assert [next(rows).error for _ in range(1000)] == [None] * 1000
    with pytest.raises(OSError, match=rf"--input .*p\.txt{suffix}: it cannot be decompressed"):
        list(rows)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_is_not_compressed_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.txt{suffix}"
    path.write_bytes(b"plain text")
    with pytest.raises(OSError, match=rf"--input .*p\.txt{suffix}"):
        read(path)


@pytest.mark.parametrize("name", ["p.txt.gz", "p.jsonl.zst", "p.parquet"])
def test_a_file_of_a_kind_that_is_never_empty_is_refused_when_it_is(tmp_path: Path, name: str) -> None:
    """As a full disk or a program that was killed leaves it: its rows are not none, they are lost."""
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"--input .*{name} has 0 bytes, .* make it again"):
        RowReader([str(tmp_path / name)])


OBJECTS: list[dict[str, Any]] = [
    {"prompt": "a", "custom_id": "x"},
    {"prompt_token_ids": [1, 2, 3]},
    {"messages": [{"role": "user", "content": "hello"}], "sampling_params": {"max_tokens": 3, "stop": ["a"]}},
    {"prompt": "b", "sampling_params": {"temperature": 0.0}, "priority": 2},
]


def test_parquet_gives_the_rows_that_json_lines_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PARQUET_ROWS", 2)
    table, lines = tmp_path / "p.parquet", tmp_path / "p.jsonl"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(OBJECTS * 3, schema=_schema()), table, row_group_size=5)
    lines.write_text("".join(json.dumps(values) + "\n" for values in OBJECTS * 3))
    rows = read(table)
    assert [row.error for row in rows] == [None] * 12
    assert [row_to_json(row) | {"name": ""} for row in rows] == [row_to_json(row) | {"name": ""} for row in read(lines)]
    assert rows[3].name == "row 3 (p.parquet, row 4)"


def _schema() -> Any:
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    sampling = [("max_tokens", pyarrow.int64()), ("stop", pyarrow.list_(pyarrow.string())), ("temperature", "double")]
    return pyarrow.schema(
        [
            ("prompt", pyarrow.string()),
            ("custom_id", pyarrow.string()),
            ("prompt_token_ids", pyarrow.list_(pyarrow.int64())),
            ("messages", pyarrow.list_(message)),
            ("sampling_params", pyarrow.struct(sampling)),
            ("priority", pyarrow.int64()),
        ]
    )


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(OSError, match=r"--input .*p\.parquet"):
        read(tmp_path / "p.parquet")


def test_standard_input_has_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}')))
    reader = RowReader(["-"])
    rows = iter(reader)
    assert next(rows) == Row(0, "row 0 (standard input, line 1)", {"prompt": "a"})
    assert reader.total_rows() == (None, True)
    assert [row.index for row in rows] == [1]
    assert reader.total_rows() == (2, False)
    with pytest.raises(ValueError, match="may be given once"):
        RowReader(["-", "-"])


def test_the_number_of_rows_is_estimated_from_the_bytes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_BUFFER_BYTES", 100)
    path = tmp_path / "p.txt"
    path.write_bytes(b"prompt\n" * 1000)
    reader = RowReader([str(path)])
    rows = iter(reader)
    assert reader.total_rows() == (None, True)
    for _ in range(500):
        next(rows)
    total, is_estimate = reader.total_rows()
    assert is_estimate
    assert total is not None
    assert 900 < total < 1100


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    (tmp_path / "folder.txt").mkdir()
    for name in ("fifo.jsonl", "endless.txt", "folder.txt"):
        with pytest.raises(ValueError, match=f"must be a regular file, given .*{name}"):
            RowReader([str(tmp_path / name)])
    with pytest.raises(OSError, match=r"--input .*missing\.txt: No such file"):
        RowReader([str(tmp_path / "missing.txt")])
    with pytest.raises(OSError, match="name too long"):
        RowReader(["x" * 300 + ".txt"])
    for name in ("p.csv", "p.json", "p.parquet.gz", "p", "p.gz"):
        with pytest.raises(ValueError, match=r"must end in \.jsonl or \.txt"):
            RowReader([name])


@pytest.mark.parametrize(("name", "extra"), [("p.txt.zst", "zstd"), ("p.parquet", "parquet")])
def test_a_missing_library_is_named_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=rf"needs the extra '{extra}': pip install 'compiled-llm\[{extra}\]'"):
        RowReader([str(tmp_path / name)])


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("a\n")
    reader = RowReader([str(path)])
    list(reader)
    reader.check_unchanged()
    path.write_text("b\nc\n")
    with pytest.raises(OSError, match="was changed while it was read"):
        reader.check_unchanged()


SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("bad", "of", "words"),
    [
        (datetime.datetime(2024, 1, 1), pyarrow.timestamp("us"), "value of JSON (a string, "),
        (10**14, pyarrow.timestamp("s"), "cannot be read as one: "),
        (b"a\xff", pyarrow.binary(), "given bytes: b'a\\xff'"),
        (decimal.Decimal("1.5"), pyarrow.decimal128(9, 2), "given Decimal: Decimal('1.50')"),
        (SECOND, pyarrow.duration("ms"), "given timedelta: "),
        (float("nan"), pyarrow.float64(), "must be a finite number, given nan"),
        ([("a", 1)], pyarrow.map_(pyarrow.string(), pyarrow.int64()), "given tuple: ('a', 1)"),
    ],
    ids=["time", "time that Python has not", "bytes", "decimal", "duration", "NaN", "map"],
)
def test_a_cell_that_is_no_value_of_json_costs_its_row_alone(tmp_path: Path, bad: Any, of: Any, words: str) -> None:
    """Also deep inside a chat, where nothing but the template would look at it."""
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("at", of)])
    chats = [[{"role": "user", "content": "a", "at": at}] for at in (None, bad, None)]
    table = pyarrow.table({"messages": pyarrow.array(chats, pyarrow.list_(message))})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    found = read(tmp_path / "p.parquet")
    assert [row.error is None for row in found] == [True, False, True]
    assert found[0].messages == found[2].messages == [{"role": "user", "content": "a"}]
    assert words in str(found[1].error)
    assert str(found[1].error).startswith("messages")
    assert found[1].name == "row 1 (p.parquet, row 2)"


def test_the_rows_of_tables_count_among_those_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 300}), tmp_path / "b.parquet")
    reader = RowReader([str(tmp_path / "a.txt"), str(tmp_path / "b.parquet"), str(tmp_path / "a.txt")])
    assert len(list(reader)) == 304
    assert [reader.has_row(index) for index in (0, 1, 2, 301, 303, 304, 10**18)] == [True] * 5 + [False] * 2
