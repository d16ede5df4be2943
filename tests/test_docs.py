"""The documentation says the truth: its code runs, prints what it says it prints, and no public name is missing."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

import optax_fp16

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SAID = re.compile(r"^\s*#> ?(.*)$", re.MULTILINE)


def blocks_of(page):
    """(line number, code) of every block of Python on a page."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        indent = len(match[1])
        code = "\n".join(line[indent:] for line in match[2].splitlines())
        yield text[: match.start()].count("\n") + 2, code


def run(page, namespace):
    """Run a page's blocks one after the other; where a block says what it prints (`#> ...`), that is what it must print."""
    for line, code in blocks_of(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # The empty lines make the numbers in a traceback those of the page.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        said = SAID.findall(code)
        if said:
            assert printed.getvalue().rstrip("\n").split("\n") == said, f"{page.name}, the block at line {line}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_the_code_on_the_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run(page, {"__name__": "__docs__"})


def test_a_page_that_prints_something_else_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nprint(1 + 1)\n#> 3\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, the block at line 4"):
        run(page, {})


def test_no_code_on_a_page_is_passed_over():
    for page in PAGES:
        text = page.read_text()
        languages = re.findall(r"^ *```(.*)$", text, re.MULTILINE)[::2]
        assert set(languages) <= {"python", "text", "sh", ""}, f"{page.name}: what runs begins with ```python"
        assert languages.count("python") == len(list(blocks_of(page))), page.name
        if page.name != "migrating.md":
            assert "text" not in languages, f"{page.name}: only other frameworks' code is shown and not run"
        for language, code in re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE):
            assert language or not re.search(r"^(import|from|def|print)\b", code, re.MULTILINE), page.name


def test_every_mistake_has_its_wrong_code_what_it_does_and_what_is_right():
    entries = re.split(r"^### ", (ROOT / "docs" / "faq.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) > 15
    for entry in entries:
        wrong, *rest = re.split(r"^\*\*(?:What it does|Right)\.\*\*", entry, flags=re.MULTILINE)
        assert len(rest) == 2, entry
        assert "**Wrong.**" in wrong, entry
        assert re.search(r"```python\n(?:.*\n)*?#> ", wrong), f"no wrong code that prints something: {entry}"


def test_the_commands_and_files_on_a_page_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        named = re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)
        assert [target for target in named if target not in targets] == [], page.name
        files = re.findall(r"\b(?:examples|benchmarks|tests|docs)/[\w/]+\.(?:py|sh|md|png)", text)
        assert [file for file in files if not (ROOT / file).exists()] == [], page.name


def documented():
    """What docs/api.md has an entry for, by its full name."""
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


def public_names():
    names = [f"optax_fp16.{name}" for name, value in vars(optax_fp16).items() if callable(value) and name[0] != "_"]
    migrate = [f"optax_fp16.migrate.{name}" for name in optax_fp16.migrate.__all__ if name.islower()]
    return [*names, *migrate, "optax_fp16.flax.TrainState", "optax_fp16.plot.exponent_histogram"]


def test_every_public_name_is_in_the_api_page_once():
    assert sorted(documented()) == sorted(public_names())


def test_every_public_name_is_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in public_names() if f"`{name.split('.')[-1]}`" not in changelog] == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if page.name not in navigation] == []


def test_every_metric_has_its_key_on_the_page_about_seeing():
    import jax.numpy as jnp
    import optax

    scale = optax_fp16.dynamic_loss_scale(underflow="total")
    tx = optax_fp16.mixed_precision(optax.sgd(0.1), max_norm=1.0, loss_scale=scale)
    page = (ROOT / "docs" / "seeing.md").read_text()
    assert [key for key in optax_fp16.metrics_of(tx.init(jnp.ones(1))) if f"`{key}`" not in page] == []


def test_every_picture_on_a_page_exists_and_every_link_between_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http", "mailto:")):
                assert (page.parent / target).exists(), f"{page.name} leads to {target}"
