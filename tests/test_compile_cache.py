"""CompileCache: what is stored is found again, what is damaged is not, and a miss says which field is another."""

import functools
from pathlib import Path

import torch

from compiled_llm.compile_cache import CompileCache, Entry, differences, machine_fields

FIELDS = {"torch": "2", "block_size": 16, "eos": (1, 2)}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def closing_over(number: int):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * number

    return function


def test_what_is_stored_is_found_by_another_cache_of_the_same_fields(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, FIELDS)
    key = cache.key_of("double", double, (torch.zeros(3),))
    assert cache.find(key) == "nothing of that name is stored"
    cache.store(key, b"code", {"graphs": 1})
    other = CompileCache(tmp_path, FIELDS)
    found = other.find(other.key_of("double", double, (torch.ones(3),)))
    assert isinstance(found, Entry)
    assert (found.payload, found.facts) == (b"code", {"graphs": 1})
    assert sorted(file.suffix for file in other.used) == [".bin", ".json"]


def test_a_miss_says_what_differs_from_the_nearest_entry(tmp_path: Path) -> None:
    args = (torch.zeros(3),)
    for fields in (FIELDS | {"torch": "1", "block_size": 8}, FIELDS):
        cache = CompileCache(tmp_path, fields)
        cache.store(cache.key_of("double", double, args), b"", {})
    find = functools.partial(_find, tmp_path)
    assert find(FIELDS | {"block_size": 32}, double, args) == "block_size is 32 and was 16"
    assert find(FIELDS | {"new": 1}, double, args) == "new is 1 and was None"
    # Digests are named only where nothing readable differs.
    assert "arguments is" in find(FIELDS, double, (torch.zeros(4),))
    assert find(FIELDS | {"block_size": 32}, double, (torch.zeros(4),)) == "block_size is 32 and was 16"


def _find(directory: Path, fields: dict, function, args: tuple):
    cache = CompileCache(directory, fields)
    return cache.find(cache.key_of("double", function, args))


def test_a_function_of_other_code_or_another_closure_is_another_key() -> None:
    cache, args = CompileCache(Path(), FIELDS), (torch.zeros(3),)
    keys = [cache.key_of("f", function, args) for function in (double, closing_over(2), closing_over(3))]
    assert keys[0] != keys[1] != keys[2]
    assert keys[1] == cache.key_of("f", closing_over(2), args)
    with_a_function = [cache.key_of("f", closing_over(function), args) for function in (double, double)]
    assert with_a_function[0] == with_a_function[1]


def test_a_damaged_entry_is_a_miss(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, FIELDS)
    key = cache.key_of("double", double, (torch.zeros(3),))
    cache.store(key, b"code", {})
    (payload,) = tmp_path.glob("*.bin")
    payload.write_bytes(b"cod")
    assert cache.find(key) == "the stored file is damaged"
    payload.unlink()
    assert cache.find(key) == "the stored file is gone"


def test_the_machine_is_described_the_same_each_time_and_threads_count() -> None:
    fields = machine_fields()
    assert machine_fields() == fields
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert differences(fields, machine_fields()) == [f"threads is {threads + 1} and was {threads}"]
    finally:
        torch.set_num_threads(threads)
