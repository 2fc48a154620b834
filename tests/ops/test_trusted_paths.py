"""Code is loaded only from where nobody but this user and root can have put it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_llm.ops.trusted_paths import check_trusted, make_directory

OTHER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """``base/cache/kernels/a.so``, as a user with the umask 022 makes them."""
    cache = tmp_path / "base" / "cache"
    (cache / "kernels").mkdir(parents=True)
    (cache / "kernels" / "a.so").write_text("code")
    for path in (cache.parent, cache, cache / "kernels", cache / "kernels" / "a.so"):
        path.chmod(0o755)
    return cache


def test_the_usual_is_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trusted(cache)
    check_trusted(cache / "kernels" / "a.so")
    monkeypatch.chdir(cache)
    check_trusted(Path("kernels"))
    check_trusted(Path("../cache/kernels"))
    cache.parent.chmod(0o1777)  # like /tmp
    check_trusted(cache)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o720, 0o702])
@pytest.mark.parametrize("place", ["..", ".", "kernels", "kernels/a.so"])
def test_what_others_may_write_to_is_refused(place: str, mode: int, cache: Path) -> None:
    changed = (cache / place).resolve()
    changed.chmod(mode)
    said = rf"code is not loaded from {cache}: others than its owner may write to {changed} \(mode {mode:o}\)\. "
    remedy = f"chmod go-w {changed}" if place == ".." else f"chmod -R go-w {cache}"
    said += rf"If nobody did, {remedy}, or set COMPILED_LLM_CACHE to a directory of your own"
    with pytest.raises(ValueError, match=said):
        check_trusted(cache)


def test_what_lies_in_a_directory_is_left_out_where_nothing_of_it_is_read(cache: Path) -> None:
    (cache / "kernels").chmod(0o777)
    check_trusted(cache, below=False)
    cache.chmod(0o777)
    with pytest.raises(ValueError, match=r"may write to .*cache \(mode 777\)"):
        check_trusted(cache, below=False)


def test_a_sticky_directory_is_only_trusted_on_the_way(cache: Path) -> None:
    cache.chmod(0o1777)
    with pytest.raises(ValueError, match=r"may write to .*cache \(mode 1777\)"):
        check_trusted(cache)


def test_what_others_cannot_reach_they_cannot_write_to(cache: Path) -> None:
    """As torch makes files for a user with the umask 002, below a directory that this program made."""
    cache.chmod(0o700)
    (cache / "kernels").chmod(0o775)
    (cache / "kernels" / "a.so").chmod(0o775)
    check_trusted(cache)
    with pytest.raises(ValueError, match=r"may write to .*kernels"):  # when asked about alone
        check_trusted(cache / "kernels")
    cache.chmod(0o755)
    (cache / "kernels").chmod(0o700)
    check_trusted(cache)
    (cache / "more").mkdir()
    (cache / "more").chmod(0o775)
    with pytest.raises(ValueError, match=r"may write to .*more"):
        check_trusted(cache)


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
@pytest.mark.parametrize("place", ["..", ".", "kernels", "kernels/a.so"])
def test_what_belongs_to_another_user_is_refused(place: str, mode: int, cache: Path) -> None:
    changed = (cache / place).resolve()
    changed.chmod(mode)
    os.chown(changed, OTHER, OTHER)
    with pytest.raises(ValueError, match=rf"{changed} belongs to user {OTHER}, not to you \(user 0\) or root"):
        check_trusted(cache)


@as_root
def test_to_an_ordinary_user_root_is_trusted_and_others_are_not(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    check_trusted(cache)
    os.chown(cache, OTHER, OTHER)
    check_trusted(cache)
    os.chown(cache / "kernels", OTHER + 1, OTHER)
    with pytest.raises(ValueError, match=r"kernels belongs to user 4322, not to you \(user 4321\) or root"):
        check_trusted(cache)


LINKS: dict[str, Callable[[Path, Path], Path]] = {
    # Each makes a way to ``target`` out of links and returns it.
    "at the end": lambda base, target: link(base / "link", target),
    "on the way": lambda base, target: link(base / "link", target.parent) / target.name,
    "relative": lambda base, target: link(base / "link", Path("elsewhere") / "target"),
    "relative, upwards": lambda base, target: link(base / "cache" / "link", Path("../elsewhere/../elsewhere/target")),
    "of links": lambda base, target: link(base / "second", link(base / "first", target)),
    "below": lambda base, target: link(base / "cache" / "kernels" / "link", target).parents[1],
}


def link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


@pytest.mark.parametrize("kind", LINKS)
def test_links_are_followed_to_what_counts(kind: str, cache: Path) -> None:
    target = cache.parent / "elsewhere" / "target"
    make_directory(target)
    target.parent.chmod(0o755)
    way = LINKS[kind](cache.parent, target)
    check_trusted(way)
    for changed in (target, target.parent):
        changed.chmod(0o777)
        with pytest.raises(ValueError, match=f"may write to {changed} "):
            check_trusted(way)
        changed.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(target, OTHER, OTHER)
        with pytest.raises(ValueError, match=f"{target} belongs to user {OTHER}"):
            check_trusted(way)


@as_root
def test_a_link_of_another_user_is_refused_wherever_it_leads(cache: Path) -> None:
    cache.parent.chmod(0o1777)
    os.lchown(link(cache.parent / "link", cache), OTHER, OTHER)
    with pytest.raises(ValueError, match=f"link belongs to user {OTHER}"):
        check_trusted(cache.parent / "link")
    os.lchown(link(cache / "kernels" / "b.so", cache / "kernels" / "a.so"), OTHER, OTHER)
    with pytest.raises(ValueError, match=f"b.so belongs to user {OTHER}"):
        check_trusted(cache)


def test_links_in_a_circle_end(cache: Path) -> None:
    link(cache / "kernels" / "up", cache)
    check_trusted(cache)
    link(cache.parent / "circle", cache.parent / "circle")
    with pytest.raises(ValueError, match="more than 40 links"):
        check_trusted(cache.parent / "circle")
    link(cache / "gone", cache / "nowhere")
    check_trusted(cache)


def test_what_is_no_file_is_refused(cache: Path) -> None:
    os.mkfifo(cache / "fifo", 0o600)
    with pytest.raises(ValueError, match="fifo is neither a file nor a directory"):
        check_trusted(cache / "fifo")
    with pytest.raises(FileNotFoundError):
        check_trusted(cache / "missing")


def test_directories_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_directory(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")} == {0o700}
    make_directory(tmp_path / "a" / "b" / "c")
    check_trusted(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) < 100, "descriptors are closed"
