"""The documents: links lead somewhere, commands exist, and nothing of one machine is committed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpulayer.model.replica import REASON_CODES

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
TOP_LEVEL = {"gpulayer", "tests", "fuzz", "docs", "examples", ".ci", ".gitignore", "pyproject.toml"} | {
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
}
# One letter of each in brackets, so that this file does not find itself.
NOT_TO_BE_COMMITTED = re.compile(
    r"/wo[r]k/(?:main|shared)|/fa[r]m/|/ro[o]t/|py[p]i\.org|python[h]osted|npm[j]s|deb\.deb[i]an"
)


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "fuzz").rglob("*.md"))]


def files_of_the_repository() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git work tree")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_every_link_between_documents_leads_somewhere() -> None:
    broken = []
    for document in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            path = target.partition("#")[0]
            if path and "://" not in path and not (document.parent / path).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert not broken


def test_no_document_is_empty() -> None:
    assert not [document.name for document in documents() if len(document.read_text().split()) < 30]


def commands_in(document: Path) -> set[tuple[str, ...]]:
    """The words after `gpulayer`, in code blocks and code spans."""
    text = document.read_text()
    # Every fence is matched with its end, also those that are passed over.
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if language in ("", "sh")]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    code = re.findall(r"(?:^|[\s/;&|(])gpulayer ([a-z].*)$", "\n".join([*blocks, *spans]), re.MULTILINE)
    return {tuple(re.findall(r"[^\s`]+", words)) for words in code}


def test_every_command_in_the_documents_exists() -> None:
    from gpulayer.cli.app import app

    unknown = []
    for document in documents():
        for words in commands_in(document):
            named, apps, rest = app.parse_commands(list(words))
            # A group (`job`, `token`) does nothing by itself: what follows it must be one of its commands.
            if not named or (apps[-1].default_command is None and rest and re.match(r"[a-z]", rest[0])):
                unknown.append(f"{document.relative_to(ROOT)}: gpulayer {' '.join(words)}")
    assert not unknown


def test_every_reason_code_is_listed_with_its_remedy() -> None:
    services = (ROOT / "docs" / "services.md").read_text()
    listed = set(re.findall(r"^\| `([a-z_]+)` \|[^|]+\|[^|]+\|$", services, re.MULTILINE))
    assert set(REASON_CODES) <= listed, set(REASON_CODES) - listed


def test_decisions_are_numbered_and_listed() -> None:
    records = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    assert [name[:4] for name in records] == [f"{number:04d}" for number in range(1, len(records) + 1)]
    listed = (DECISIONS / "README.md").read_text()
    for name in records:
        assert f"]({name})" in listed, f"{name} is not in docs/decisions/README.md"
        assert (DECISIONS / name).read_text().startswith(f"# {name[:4]} "), f"{name} begins with its number"


def texts() -> list[Path]:
    code = [path for path in files_of_the_repository() if path.suffix in {".py", ".c", ".toml"} or path.name == "run"]
    return [*code, *documents()]


def test_every_document_that_is_named_is_there() -> None:
    """In code by its path, as in docs/operating.md. Sections have no numbers to point at."""
    missing = []
    for path in texts():
        text = path.read_text()
        for name, section in re.findall(r"(?<![\w*./-])([\w./-]+\.md)\b( §)?", text):
            is_there = (ROOT / name).is_file() or (path.suffix == ".md" and (path.parent / name).is_file())
            # A path that is put together (`ROOT / "docs" / "cli.md"`) is opened by whoever does so.
            if section or not (is_there or f'/ "{name}"' in text):
                missing.append(f"{path.relative_to(ROOT)}: {name}{section}")
    assert not missing


def test_no_sentence_leans_on_a_number_that_is_explained_nowhere() -> None:
    """The promises P1, P2, … are explained in docs/architecture.md. Cases of a list elsewhere are told in words."""
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    promises = set(re.findall(r"^- \*\*(P\d+)\*\* ", architecture, re.MULTILINE))
    unknown = []
    for path in texts():
        named = re.findall(r"\b(?:T\d\d+|P\d\d?)\b", path.read_text())
        unknown += [f"{path.relative_to(ROOT)}: {name}" for name in named if name not in promises]
    assert promises
    assert not unknown


def test_words_of_the_glossary_are_in_alphabetical_order_and_once_each() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(set(words), key=lambda word: word.lower().replace("-", ""))


def test_the_top_level_holds_only_what_belongs_there() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in files_of_the_repository()} <= TOP_LEVEL


def test_nothing_of_one_machine_is_committed() -> None:
    found = []
    for path in files_of_the_repository():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if NOT_TO_BE_COMMITTED.search(line)
        ]
    assert not found, "\n".join(found)


def test_no_lock_file_is_committed() -> None:
    locks = re.compile(r"(.*\.lock|requirements.*\.txt|Pipfile\.lock|package-lock\.json)")
    assert not [path.name for path in files_of_the_repository() if locks.fullmatch(path.name)]
