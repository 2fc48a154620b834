"""is_whole: a library of the system is; what lacks a piece at its end, or is something else, is not."""

from pathlib import Path

import torch

from compiled_llm.ops.shared_library import is_whole


def test_libraries_are_whole_and_what_is_cut_off_is_not(tmp_path: Path) -> None:
    library = Path(torch.__file__).parent / "lib" / "libshm.so"
    assert is_whole(library)
    content, copy = library.read_bytes(), tmp_path / "copy.so"
    for kept in (0, 1, 63, 64, 1000, len(content) // 2, len(content) - 1):
        copy.write_bytes(content[:kept])
        assert not is_whole(copy), kept
    for other in (b"\0" * len(content), b"#!/bin/sh\n" * 100):
        copy.write_bytes(other)
        assert not is_whole(copy)
    copy.write_bytes(content)
    assert is_whole(copy)
