"""What the pages name exists, what the code writes is what they hold, and the README is short."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from docs import generate
from jserve.api.http.auth import load_tenants
from jserve.sharding import Sharding
from tests.docs.pages import PAGES, ROOT, WRITTEN, Block, blocks

README_BYTES = 8000
FOLDERS = "jserve|pallas_kernels|checkpoints|tests|bench|docs|examples|\\.ci"
_PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)(?:::\w+)?`")
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)")
IDS = {"ids": lambda p: p.name}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


@pytest.mark.parametrize("page", PAGES, **IDS)
def test_every_path_exists(page: Path) -> None:
    named = _PATH.findall(page.read_text())
    gone = [path for path in named if not (ROOT / path).exists()]
    assert not gone, f"{page.name} names what is not there: {gone}"


@pytest.mark.parametrize("page", PAGES, **IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        file = page.parent / target
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor[1:] in anchors(file), f"{page.name} links to {target}{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_site() -> None:
    nav = yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text())["nav"]
    parts = [page for entry in nav for value in entry.values() for page in listed(value)]
    assert sorted(parts) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))


def listed(value: str | list[dict[str, str]]) -> list[str]:
    return [value] if isinstance(value, str) else [p for item in value for p in item.values()]


@pytest.mark.parametrize("write", [generate.options, generate.fields])
def test_written_pages_are_what_the_code_writes(write) -> None:
    name = {"options": "options.md", "fields": "http-fields.md"}[write.__name__]
    assert name in WRITTEN
    assert (ROOT / "docs" / name).read_text() == write(), "run python docs/generate.py --quick"


def test_every_form_that_is_served_has_its_paths_on_the_page() -> None:
    """Its table of formats (``tests/weights`` loads each) names the forms, its table of paths has them all."""
    page = (ROOT / "docs" / "quantisation.md").read_text()
    assert page == generate.quantisation(), "run python docs/generate.py --quick"
    formats = [line.split("|") for line in page.splitlines() if line.count("|") == 5]
    served = {name for row in formats[2:] for name in re.findall("`(.+?)`", row[3])} - {"wide"}
    assert served == {name.removesuffix(", groups") for name in generate.SERVED}


def test_a_servers_metrics_are_on_the_page(url: str) -> None:
    text = generate.urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, kind, _, help in generate.rows_of(text):
        row = rf"\| `{name}` \| {kind} \| [\w, ]* \| {re.escape(help)} \|"
        assert re.search(row, page), (
            f"{name} is not on docs/metrics.md: run python docs/generate.py"
        )


def test_metrics_that_pages_name_are_on_their_page() -> None:
    known = set(
        re.findall(r"^\| `(jserve:\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    )
    for page in PAGES:
        named = set(re.findall(r"`(jserve:\w+)", page.read_text()))
        assert named <= known, page.name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_of_metrics_is_what_a_server_says() -> None:
    with generate.everything() as url:
        written = generate.metrics(generate.scraped(url))
    assert (ROOT / "docs" / "metrics.md").read_text() == written


def yaml_of(page: str) -> list[Block]:
    return [block for block in blocks("yaml") if block.page.name == page]


def test_every_piece_of_yaml_is_read_by_a_test() -> None:
    assert {b.page.name for b in blocks("yaml")} == {"security.md", "sharding.md"}


def test_shardings_on_the_page_are_ones() -> None:
    made = [Sharding.of(yaml.safe_load(block.text)) for block in yaml_of("sharding.md")]
    assert {sharding.mode for sharding in made} == {"manual", "auto"}


def test_the_file_of_tenants_is_one(tmp_path: Path) -> None:
    [block] = yaml_of("security.md")
    file = tmp_path / "tenants.yaml"
    file.write_text(block.text)
    assert {tenant.name for _, tenant in load_tenants(str(file))} == {"team-a", "operators"}


def test_the_version_is_said_once() -> None:
    import jserve

    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert f"## {jserve.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_a_pin_for_ci() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(r) for r in (*project["dependencies"], *extras["dev"], *extras["docs"])]
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    for r in wanted:
        pin = pins.get(r.name.replace("_", "-")) or pins.get(r.name.replace("-", "_"))
        assert pin, f"{r.name} is not in constraints.txt"
        assert r.specifier.contains(pin), f"{r} is pinned to {pin}"


def test_the_site_builds() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", ".ci/mkdocs.yml"]
    subprocess.run([*command, "-d", "build/site"], cwd=ROOT, check=True, timeout=120)


def test_the_table_of_models_has_every_architecture() -> None:
    from jserve.model.families import ARCHITECTURES

    page = (ROOT / "docs" / "models.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(ARCHITECTURES)
