"""The numbers of lines that the README gives are those of the code, as rounded there."""

import re
import subprocess

from tests.docs.markdown import ROOT

README = (ROOT / "README.md").read_text()


def num_lines(*paths: str) -> int:
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


def test_the_reading_path() -> None:
    rows = re.findall(r"^\| (.*`.*) \| (\d+) \|", README, re.MULTILINE)
    assert len(rows) > 5
    for links, lines in rows:
        assert abs(num_lines(*re.findall(r"\]\((.*?)\)", links)) - int(lines)) <= 25, links
    total = sum(int(lines) for _, lines in rows)
    assert README.count(f"{round(total, -2):,} lines") == 2


def test_the_size_of_each_part() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    def size(folder: str, *endings: str) -> float:
        return num_lines(*(file for file in files if file.startswith(folder + "/") and file.endswith(endings)))

    counted = [size("compiled_llm", ".py"), size("models", ".py"), size("ops", ".py"), size("ops", ".cpp", ".h")]
    counted += [size("scripts", ".py"), size("tests", ".py")]
    said = README[README.index("About ") : README.index("lines of tests")]
    whole, *parts = (int(number.replace(",", "")) for number in re.findall(r"\d+,\d+", said))
    for lines, counts in zip(parts, counted, strict=True):
        assert abs(lines - counts) <= max(100, 0.05 * counts), (said, counted)
    assert abs(whole - sum(counted[:-1])) <= 0.03 * whole
