"""What the documents tell a user to type exists, and the documents keep to what the project promises."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import tomllib

from sglang_ext import __version__, cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SHIPPED_CARDS = sorted(ROOT.glob("sglang_ext/assets/*/README.md"))


def commands(text: str) -> list[str]:
    """Shell commands of the fenced blocks, continuation lines joined, prompts and comments removed."""
    found = []
    inside: str | None = None
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            inside = line.removeprefix("```").strip() if inside is None else None
        elif inside in ("", "bash", "sh", "console"):
            command = line.strip().removeprefix("$ ")
            if command and not command.startswith("#"):
                found.append(command)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_sglang_ext_command_parses(document: Path) -> None:
    parser = cli.build_parser()
    for command in commands(document.read_text(encoding="utf-8")):
        if not command.startswith("sglang-ext "):
            continue
        words = shlex.split(command, comments=True)
        if not {"...", "|", ">"} & set(words):
            args, rest = parser.parse_known_args(words[1:])
            assert not rest or args.command == "serve", f"{document.name}: {command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_linked_file_and_named_script_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text)]
    missing = [name for name in targets if name and not (document.parent / name).exists()]
    scripts = re.findall(r"\b(scripts/[\w./-]+\.(?:sh|py|txt))", text)
    missing += [name for name in scripts if not (ROOT / name).exists()]
    assert not missing, f"{document.name} names {missing}"


@pytest.mark.parametrize("document", [*DOCUMENTS, *SHIPPED_CARDS], ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_no_machine_and_no_placeholder(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    machine = [rf"/{folder}/" for folder in ("home", "root", "work", "opt", "tmp")]
    for pattern in (*machine, r"\bTODO\b", r"\bTBD\b", r"\bFIXME\b"):
        assert not re.search(pattern, text), f"{document.name} holds {pattern}"


def test_readme_starts_with_the_two_commands() -> None:
    listed = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "bash scripts/quickstart.sh" in listed
    assert "bash scripts/test.sh" in listed
    assert any("sglang.launch_server" in command and "flexdraft" in command for command in listed)


def test_changelog_has_this_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_scripts_are_valid_shell_and_explain_themselves() -> None:
    for script in [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)
    run = subprocess.run(["bash", str(ROOT / "scripts/quickstart.sh"), "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert "--port" in run.stdout
    run = subprocess.run(["bash", str(ROOT / "scripts/quickstart.sh"), "--prt"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "error: unknown argument --prt" in run.stderr


def test_constraints_pin_one_version_of_each_package_the_project_asks_for() -> None:
    pins = {}
    for line in (ROOT / "scripts" / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            key = re.sub(r"[-_.]+", "-", name).lower()
            assert version, line
            assert key not in pins, line
            pins[key] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in asked:
        name, exact = re.fullmatch(r"([\w-]+)(?:==([\d.]+)|>=[\d.]+)?", requirement).groups()
        pinned = pins[re.sub(r"[-_.]+", "-", name).lower()]
        assert exact in (None, pinned), requirement
