"""CompileCache: what is stored is found again, what is damaged is not, and a miss says which field is another."""

import errno
import functools
import os
from pathlib import Path

import pytest
import torch

from compiled_llm.compiling.cache import CompileCache, Entry
from compiled_llm.compiling.keys import differences, digest, machine_fields

FIELDS = {"torch": "2", "block_size": 16, "eos": (1, 2)}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def closing_over(number: int):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * number

    return function


def test_what_is_stored_is_found_by_another_cache_of_the_same_fields(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, FIELDS)
    key = cache.key_of("double", double, (torch.zeros(3),), {})
    assert cache.find(key) == "nothing of that name is stored"
    cache.store(key, b"code", {"graphs": 1})
    other = CompileCache(tmp_path, FIELDS)
    found = other.find(other.key_of("double", double, (torch.ones(3),), {}))
    assert isinstance(found, Entry)
    assert (found.payload, found.facts) == (b"code", {"graphs": 1})
    assert other.used == list(tmp_path.iterdir())


def test_a_miss_says_what_differs_from_the_nearest_entry(tmp_path: Path) -> None:
    args = (torch.zeros(3),)
    for fields in (FIELDS | {"torch": "1", "block_size": 8}, FIELDS):
        cache = CompileCache(tmp_path, fields)
        cache.store(cache.key_of("double", double, args, {}), b"", {})
    find = functools.partial(_find, tmp_path)
    assert find(FIELDS | {"block_size": 32}, double, args) == "block_size is 32 and was 16"
    assert find(FIELDS | {"new": 1}, double, args) == "new is 1 and was absent"
    # Arguments are named only where nothing that they follow from differs.
    assert find(FIELDS, double, (torch.zeros(4),)).startswith("x is 'float32[4] of strides (1,) on cpu' and was ")
    assert find(FIELDS | {"block_size": 32}, double, (torch.zeros(4),)) == "block_size is 32 and was 16"


def _find(directory: Path, fields: dict, function, args: tuple):
    cache = CompileCache(directory, fields)
    return cache.find(cache.key_of("double", function, args, {}))


def test_a_function_of_other_code_or_another_closure_is_another_key() -> None:
    cache, args = CompileCache(Path(), FIELDS), (torch.zeros(3),)
    keys = [cache.key_of("f", function, args, {}) for function in (double, closing_over(2), closing_over(3))]
    assert keys[0] != keys[1] != keys[2]
    assert keys[1] == cache.key_of("f", closing_over(2), args, {})
    with_a_function = [cache.key_of("f", closing_over(function), args, {}) for function in (double, double)]
    assert with_a_function[0] == with_a_function[1]


def test_a_damaged_entry_is_a_miss(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, FIELDS)
    key = cache.key_of("double", double, (torch.zeros(3),), {})
    cache.store(key, b"code", {})
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole.replace(b"block_size", b"block_sine"), b"", b"[]", b"\xff\n\xff\n"):
        path.write_bytes(damaged)
        assert cache.find(key) == "the stored file is damaged"
    path.write_bytes(whole)
    assert isinstance(cache.find(key), Entry)


def test_a_disk_that_takes_nothing_is_a_warning_and_the_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache = CompileCache(tmp_path, FIELDS)
    key = cache.key_of("double", double, (torch.zeros(3),), {})
    with pytest.warns(UserWarning, match="double is not kept.*No space left"):
        cache.store(key, b"code", {"graphs": 1})
    assert not list(tmp_path.iterdir()), "nothing half-written stays"
    assert cache.find(key) == Entry(key, {"graphs": 1}, b"code")
    assert not cache.used
    assert isinstance(CompileCache(tmp_path, FIELDS).find(key), str)


def test_what_no_start_used_for_a_month_goes_and_a_hit_is_a_use(tmp_path: Path) -> None:
    keys = []
    for size in (16, 32):
        cache = CompileCache(tmp_path, FIELDS | {"block_size": size})
        keys.append(cache.key_of("double", double, (torch.zeros(3),), {}))
        cache.store(keys[-1], b"", {})
    (tmp_path / "tmp1234").write_bytes(b"half")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert isinstance(cache.find(keys[1]), Entry)
    cache.store(cache.key_of("other", double, (), {}), b"", {})
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["double", "other"]
    assert isinstance(cache.find(keys[1]), Entry)


def test_constants_and_defaults_are_part_of_the_code() -> None:
    cache = CompileCache(Path(), FIELDS)

    def twice(x, factor=2):
        return x * factor

    def thrice(x, factor=3):
        return x * factor

    functions = [
        lambda x: x * 2 + 1,
        lambda x: x * 2 + 5,
        lambda x: (lambda y: y + 1)(x),
        lambda x: (lambda y: y + 2)(x),
    ]
    keys = [digest(cache.key_of("f", function, (), {})) for function in (*functions, twice, thrice)]
    assert len(set(keys)) == 6


def test_what_is_set_of_torch_is_in_the_key() -> None:
    fields = machine_fields()
    with torch.autocast("cpu"):
        assert differences(fields, machine_fields()) == ["autocast is 'torch.bfloat16' and was 'off'"]
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert "torch_config._inductor.config.cpp.simdlen is '256'" in str(differences(fields, machine_fields()))
    torch.set_default_dtype(torch.float64)
    try:
        assert "torch.float64" in str(differences(fields, machine_fields()))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert differences(fields, machine_fields()) == ["default device is 'meta' and was 'cpu'"]
    assert machine_fields() == fields


def test_the_machine_is_described_the_same_each_time_and_threads_count() -> None:
    fields = machine_fields()
    assert machine_fields() == fields
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert differences(fields, machine_fields()) == [f"threads is {threads + 1} and was {threads}"]
    finally:
        torch.set_num_threads(threads)
