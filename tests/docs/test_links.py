"""Every link of the documents points to something that is there, and every document is found from the README."""

from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT, anchors, links, name_of


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_point_to_files_and_headings_that_are_there(path: Path) -> None:
    for link in links(path):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{name_of(path)} links to {link}"
        assert target.is_relative_to(ROOT), f"{name_of(path)} links to {link}, outside of the repository"
        if anchor:
            assert anchor in anchors(target), (
                f"{name_of(path)} links to {link}; headings there: {sorted(anchors(target))}"
            )


def test_the_readme_lists_every_document() -> None:
    listed = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert {path for path in DOCUMENTS if path.parent == ROOT / "docs"} <= listed


def test_every_picture_is_shown() -> None:
    shown = {(path.parent / link).resolve() for path in DOCUMENTS for link in links(path)}
    pictures = {path.resolve() for path in (ROOT / "docs" / "pictures").rglob("*.png")}
    assert pictures <= shown, f"nobody shows {sorted(pictures - shown)}"
