"""offline_input: every row has its place, a bad one its reason, and no kind of file is read without end."""

import importlib
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("offline_input")


def test_rows_are_numbered_without_the_blank_lines_and_named_with_them(module: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a", "priority": 3}\n  \n\n{"prompt_token_ids": [1], "cache_salt": "x"}')
    first, second = module.read_rows(path)
    assert (first.index, first.name, first.prompt, first.priority) == (0, "row 0 (p.jsonl, line 2)", {"prompt": "a"}, 3)
    assert (second.index, second.name) == (1, "row 1 (p.jsonl, line 5)")
    assert second.prompt == {"prompt_token_ids": [1], "cache_salt": "x"}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_a_byte_order_mark_and_ends_of_lines_are_no_part_of_a_prompt(
    module: ModuleType, tmp_path: Path, start: str, end: str
) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_bytes((start + end.join(["ab", "", " c\ufeff", ""])).encode())
    assert [row.prompt["prompt"] for row in module.read_rows(text)] == ["ab", " c\ufeff"]
    lines.write_bytes((start + end.join(['{"prompt": "a"}', '{"prompt": "b"}'])).encode())
    assert [row.prompt for row in module.read_rows(lines)] == [{"prompt": "a"}, {"prompt": "b"}]


def test_an_empty_file_has_no_rows(module: ModuleType, tmp_path: Path) -> None:
    for content in (b"", b"\n\r\n", b"\xef\xbb\xbf"):
        (tmp_path / "p.txt").write_bytes(content)
        assert module.read_rows(tmp_path / "p.txt") == []


def test_a_byte_that_is_not_utf_8_costs_its_row_alone_and_is_named(module: ModuleType, tmp_path: Path) -> None:
    for name, line in (("p.txt", b"ab\xffcd"), ("p.jsonl", b'{"\xff')):
        path = tmp_path / name
        good = b'{"prompt": "x"}'
        path.write_bytes(b"\n".join([good, line, good]))
        rows = module.read_rows(path)
        assert [row.error is None for row in rows] == [True, False, True]
        assert rows[1].name == f"row 1 ({name}, line 2)"
        assert rows[1].error == "not UTF-8: byte 3 of the line is 0xff"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"prompt": ' + "1" * 5000 + "}", "not JSON"),
        ("[1]", "must be a JSON object, given [1]"),
        ("null", "must be a JSON object"),
        ('"import os"', "must be a JSON object"),
        ('{"prompt": "a", "colour": 1, "temperature": 0}', "unknown key: colour, temperature; known are"),
        ("{}", "either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt": "a", "priority": true}', "priority must be an integer"),
        ('{"prompt": "a", "priority": NaN}', "priority must be an integer"),
        (json.dumps({"x" * 10**6: 1}), "unknown key"),
    ],
)
def test_a_bad_row_has_a_short_reason(module: ModuleType, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{line}\n{{"prompt": "a"}}\n')
    bad, good = module.read_rows(path)
    assert words in bad.error
    assert len(bad.error) < 400
    assert bad.prompt == {}
    assert good.error is None


def test_only_regular_files_are_read(module: ModuleType, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jsonl")
    (tmp_path / "endless.txt").symlink_to("/dev/zero")
    (tmp_path / "folder.txt").mkdir()
    for name in ("fifo.jsonl", "endless.txt", "folder.txt"):
        with pytest.raises(ValueError, match=f"must be a regular file, given .*{name}"):
            module.read_rows(tmp_path / name)
    with pytest.raises(OSError, match=r"--input .*missing\.txt: No such file"):
        module.read_rows(tmp_path / "missing.txt")
    with pytest.raises(OSError, match="name too long"):
        module.read_rows(tmp_path / ("x" * 300 + ".txt"))
