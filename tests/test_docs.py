"""What the documents say is true: their code runs, their tables match the code, their links lead
somewhere."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import example_pages
import pytest

from stillframe.config import JobConfig, job_config, job_option_names

ROOT = Path(__file__).parents[1]
README, README_ZH = ROOT / "README.md", ROOT / "README.zh.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WITHOUT_DEFAULT = {
    "checkpointLocation": "none",
    "checkpointInterval": "off",
    "parallelism": "by the cores",
    "restartStrategy": "by the checkpoints",
    "restoreFrom": "the newest",
    "acceptMissingOutput": "none",
    "discardPrepared": "none",
    "requireGuarantee": "none",
    "watermarkIdleTimeout": "never",
    "refreshInterval": "never",
    "stateDirectory": "Spark's own",
}
"""What the table says where the code has None, or an empty set."""


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of this language, each with the line its code begins on."""
    found, block, opened = [], [], None
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if opened is None and line.startswith("```"):
            opened, block = (line.removeprefix("```").strip(), number + 1), []
        elif opened is not None and line.startswith("```"):
            if opened[0] == language:
                found.append((opened[1], "\n".join(block)))
            opened = None
        else:
            block.append(line)
    assert opened is None, f"a block of {name_of(document)} is never closed"
    return found


def rows(document: Path, heading: str) -> list[list[str]]:
    """The rows of the table under the heading that begins with this cell."""
    lines = iter(document.read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            break
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    assert found, f"{name_of(document)} has no table that begins with {heading!r}"
    return found


# --- the code ------------------------------------------------------------------------------------


@pytest.fixture
def working_directory(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty directory in which relative paths mean the same to us and to Spark."""
    hadoop = spark._jvm.org.apache.hadoop.fs
    system = hadoop.FileSystem.get(spark._jsc.hadoopConfiguration())
    before = system.getWorkingDirectory()
    monkeypatch.chdir(tmp_path)
    system.setWorkingDirectory(hadoop.Path(str(tmp_path)))
    yield tmp_path
    system.setWorkingDirectory(before)


KAFKA = ROOT / "docs/connectors/kafka.md"


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> str:
    """A broker with the topics of the page about it."""
    broker = request.getfixturevalue("kafka")
    broker.create("page-views", 2)
    broker.create("counts")
    broker.send("page-views", [b'{"app":"app1","user":7}'] * 10)
    return str(broker.address)


@pytest.mark.spark
@pytest.mark.kafka
def test_every_python_block_about_kafka_runs(spark, working_directory, servers, kafka):
    run_blocks(KAFKA, spark, servers=servers)

    assert b"10" in kafka.values("counts")


DATABASES = ROOT / "docs/connectors/databases.md"


@pytest.mark.spark
@pytest.mark.database
def test_every_python_block_about_databases_runs(spark, working_directory, postgres, monkeypatch):
    from database_servers import PASSWORD

    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    run_blocks(DATABASES, spark, url=postgres.url)

    assert postgres.execute("select sum(count) from counts") == [(10_000,)]
    assert postgres.execute("select count(distinct id), count(*) from clicks") == [(10_000,) * 2]


@pytest.mark.spark
@pytest.mark.parametrize(
    "document",
    [page for page in DOCUMENTS if page not in (KAFKA, DATABASES) and blocks(page, "python")],
    ids=name_of,
)
def test_every_python_block_of_a_document_runs(document, spark, working_directory):
    run_blocks(document, spark)


def run_blocks(document: Path, spark: Any, **known: Any) -> None:
    import stillframe

    known |= {"spark": spark, "still": stillframe.on(spark)}
    for line, code in blocks(document, "python"):
        if is_the_example(code):
            continue  # it never ends; tests/cli/test_readme.py runs it by its commands
        # Lines are those of the document, so that a failure points into it.
        exec(compile("\n" * (line - 1) + code, str(document), "exec"), known)
        query = known.get("query")
        # One that reads what is there has stopped, and may go on when more has come.
        over = "stopped" if query is not None and query.config.available_now else "finished"
        assert query is None or query.summary.outcome == over, f"{document}, line {line}"


def without_remarks(code: str) -> str:
    return "\n".join(re.sub(r"\s+# .*", "", line) for line in code.splitlines())


def is_the_example(code: str) -> bool:
    tree = ast.parse((ROOT / "examples/page_views.py").read_text())
    job = ast.Module(tree.body[1:], [])  # without its docstring
    return ast.dump(ast.parse(code)) == ast.dump(job)


def test_the_job_of_the_readme_is_the_one_in_the_examples():
    _, shown = blocks(README, "python")[0]

    assert is_the_example(shown)


@pytest.mark.parametrize(
    ("twins", "language"),
    [
        ((README, README_ZH), "sh"),
        ((README, README_ZH), "python"),
        (example_pages.PAGES, "sh"),
        (example_pages.PAGES, "console"),
    ],
)
def test_both_languages_give_the_same_commands_and_code(twins, language):
    english, chinese = (
        [without_remarks(code) for _, code in blocks(page, language)] for page in twins
    )

    assert english == chinese
    assert english


@pytest.mark.parametrize("twins", [(README, README_ZH), example_pages.PAGES])
def test_both_languages_have_the_same_parts(twins):
    def parts(page: Path) -> list[str]:
        return re.findall(r"^(#+ |\|---|```\w*|!\[)", page.read_text(), re.MULTILINE)

    english, chinese = twins
    assert parts(english) == parts(chinese)


def test_both_readmes_show_the_same_transcript_and_it_passes():
    (_, english), (_, chinese) = (blocks(page, "")[0] for page in (README, README_ZH))

    assert english == chinese
    assert "exactly-once: PASS" in english.splitlines()[-1]


# --- the drawings --------------------------------------------------------------------------------


def test_the_drawings_are_those_that_the_numbers_of_the_examples_make():
    drawings = ROOT / "docs/drawings"
    made = runpy.run_path(str(drawings / "draw.py"))["all_drawings"]()

    assert {file.name: file.read_text() for file in drawings.glob("*.svg")} == made


# --- the tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "heading"), [(README, "option"), (README_ZH, "选项")])
def test_the_options_of_the_readme_are_those_of_the_code_with_their_defaults(page, heading):
    table = {cells[0].strip("`"): cells[1] for cells in rows(page, heading)}

    assert list(table) == job_option_names()
    for option, default in table.items():
        if option in WITHOUT_DEFAULT:
            assert default == WITHOUT_DEFAULT[option]
        else:
            # An option of a restart strategy also chooses it.
            config = replace(job_config({option: default}), restart_strategy=None)
            assert config == JobConfig(), f"{option} is not {default}"
    nothing = (None, frozenset())
    unset = [field for field in fields(JobConfig) if getattr(JobConfig(), field.name) in nothing]
    assert len(unset) == len(WITHOUT_DEFAULT)


def spoken() -> str:
    """Every text in the code, with a `…` for what is put in."""
    texts = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.JoinedStr(values):
                    parts = (p.value if isinstance(p, ast.Constant) else "…" for p in values)
                    texts.append("".join(map(str, parts)))
                case ast.Constant(str(text)):
                    texts.append(text)
    return "\n".join(texts)


@pytest.mark.parametrize(("page", "heading"), [(README, "it says"), (README_ZH, "看到的话")])
def test_every_sentence_of_the_troubleshooting_table_is_one_the_code_says(page, heading):
    said = spoken()
    for cells in rows(page, heading):
        for sentence in re.findall(r"`([^`]+)`", cells[0]):
            # Numbers are examples, and … is whatever is put in.
            pieces = [piece.strip(" (:;),") for piece in re.split(r"…|\b\d+\b", sentence)]
            for piece in pieces:
                words = [part for part in piece.split(": ") if len(part) > 7]
                assert all(part in said for part in words), f"nobody says {piece!r}"


# --- the links -----------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """What headings can be linked to by: lower case, spaces to hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{name_of(document)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(document)} links to {link}"


def test_every_file_the_architecture_names_exists():
    text = (ROOT / "docs/architecture.md").read_text()
    text += "".join(page.read_text() for page in (ROOT / "docs/decisions").glob("*.md"))
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text))
    package = ROOT / "src/stillframe"
    anywhere = {file.name for file in package.rglob("*.py")}

    missing = [
        name
        for name in named
        if not (package / name).exists() and not (ROOT / name).exists() and name not in anywhere
    ]

    assert len(named) > 20
    assert not missing
