"""``jserve replay``: a journal of a real engine is decided and computed again, and the first difference is named."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from jserve import LLM, SamplingParams, faults
from jserve.cli import app
from jserve.sampling import StructuredOutputs
from jserve.sched.record.journal import Array, Committed, Event
from tests.whole.conftest import SMALL_OPTIONS
from tests.whole.test_weights import drawn, names_of

PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=120, n=2, logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=0.8, top_p=0.9, presence_penalty=0.5, max_tokens=120, ignore_eos=True
    ),
    SamplingParams(
        temperature=1.0, max_tokens=30, structured_outputs=StructuredOutputs(regex="(fox|dog){3,9}")
    ),
]
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
PROMPTS = ["the quick", "fox " * 20, "brown", "a"]


@pytest.fixture(scope="module")
def journal(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of several kinds of requests, with so few pages that some are preempted."""
    return recorded(tiny_dir, tmp_path_factory.mktemp("journal"), PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def scored(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of prompts with log-probabilities too."""
    root, prompts = tmp_path_factory.mktemp("scored"), [*PROMPTS, "lazy dog " * 9]
    return recorded(tiny_dir, root, prompts, [*PARAMS, SCORED], prompt_logprobs=True)


def recorded(
    tiny_dir: Path, root: Path, prompts: list[str], params: list[SamplingParams], **more: Any
) -> Path:
    path, options = root / "run.journal", SMALL_OPTIONS | {"n_pages": 22, "page_size": 8} | more
    with LLM(str(tiny_dir), **options, journal=str(path)) as made:
        made.generate(prompts, params, use_tqdm=False)
        assert made._engine.scheduler.stats().preemptions > 0
    return path


def run(*argv: Any) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, argv)])


def test_every_decision_is_the_same(journal: Path) -> None:
    done = run(journal)
    assert done.exit_code == 0, done.output
    n = len(journal.read_bytes().splitlines())
    assert done.stdout.startswith(f"{n} events, ")
    assert "every decision as recorded" in done.stdout


@pytest.mark.slow
def test_every_token_is_the_same_and_one_that_is_not_is_named(scored: Path, tmp_path: Path) -> None:
    done = run(scored, "--device")
    assert done.exit_code == 0, done.output
    events = [msgspec.json.decode(line, type=Event) for line in scored.read_bytes().splitlines()]
    commits = [(i, e) for i, e in enumerate(events) if isinstance(e, Committed)]
    drawn = [(i, e) for i, e in commits if e.n_ok.numpy().any()]
    n = int(done.stdout.split(" tokens computed again")[0].split()[-1])
    assert n >= 12 + 240 + 120
    index, event = drawn[len(drawn) // 2]
    tokens = event.tokens.numpy().copy()
    tokens[np.flatnonzero(event.n_ok.numpy())[0], 0] += 1
    events[index] = msgspec.structs.replace(event, tokens=Array.of(tokens))
    other = tmp_path / "other.journal"
    other.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in events))
    failed = run(other, "--device")
    assert failed.exit_code == 1
    assert f"line {index + 1}: step {event.step}, request" in failed.stderr.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drafts", "device drafts", "failed step"])
def test_drafts_and_failed_steps_are_computed_again(
    tiny_dir: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "run.journal"
    method = {"drafts": "suffix", "device drafts": "ngram"}.get(kind)
    options = SMALL_OPTIONS | ({"speculative": {"method": method}} if method else {})
    failing = faults.armed("runner.collect", 12) if method is None else contextlib.nullcontext()
    with LLM(str(tiny_dir), **options, journal=str(path)) as made, failing:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = made.generate(["fox " * 20, "lazy dog"], params, use_tqdm=False)
    drawn = sum(len(choice.token_ids) for out in outputs for choice in out.outputs)
    text = path.read_text()
    rows = [row for line in text.splitlines() for row in _rows(json.loads(line))]
    assert ('"type":"recover"' in text) == (method is None)
    assert any(row[8] for row in rows) == (method is not None), "drafts"
    done = run(path, "--device")
    assert done.exit_code == 0, done.output
    assert int(done.stdout.split(" tokens computed again")[0].split()[-1]) >= drawn == 120


def _rows(event: dict[str, Any]) -> list[Any]:
    return (event.get("decision") or {}).get("rows", [])


def test_a_damaged_line_is_named(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[5] = b"nonsense\n"
    other = tmp_path / "other.journal"
    other.write_bytes(b"".join(lines))
    failed = run(other)
    assert failed.exit_code == 2
    assert "line 6" in failed.stderr.replace("\n", " ")


def test_another_decision_is_named(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text().splitlines(keepends=True)
    at = [
        i
        for i, line in enumerate(lines)
        if line.startswith('{"type":"plan"') and '"rows":[[' in line
    ]
    said = json.loads(lines[at[3]])
    said["decision"]["rows"][0][4] += 1
    lines[at[3]] = json.dumps(said) + "\n"
    other = tmp_path / "other.journal"
    other.write_text("".join(lines))
    failed = run(other)
    assert failed.exit_code == 1
    assert f"line {at[3] + 1}" in failed.stderr.replace("\n", " ")


@pytest.mark.slow
def test_weights_of_a_directory_are_computed_with_again(tiny_dir: Path, tmp_path: Path) -> None:
    """By tokens of both; where the directory is gone it ends there, and says so."""
    path, (first, other) = tmp_path / "run.journal", (tmp_path / "first", tmp_path / "other")
    for seed, directory in enumerate((first, other)):
        shutil.copytree(tiny_dir, directory)
        tensors = names_of(drawn(tiny_dir, seed), tiny_dir)
        save_file(tensors, directory / "model.safetensors")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = SMALL_OPTIONS | {"load_format": "auto", "journal": str(path)}
    with LLM(str(first), **options) as made:
        said = [made.generate("the quick", params)[0].outputs[0].token_ids]
        for source in (other, first):
            made.update_weights(source)
            said.append(made.generate("the quick", params)[0].outputs[0].token_ids)
    assert said[0] == said[2] != said[1]
    done = run(path, "--device")
    assert done.exit_code == 0, done.output
    assert " 60 tokens computed again" in done.stdout
    assert "computed up to" not in done.stdout
    shutil.rmtree(other)
    done = run(path, "--device")
    assert done.exit_code == 0, done.output
    assert " 20 tokens computed again" in done.stdout
    assert f"other weights, 1: {other} is no longer there" in done.stdout.replace("\n", " ")


@pytest.mark.slow
def test_a_journal_of_another_layout_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    """Which a mesh of the program's own made, that no option tells."""
    path = tmp_path / "run.journal"
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    with LLM(str(tiny_dir), mesh=mesh, **SMALL_OPTIONS, journal=str(path)) as made:
        made.generate("the quick", SamplingParams(temperature=0, max_tokens=3))
    failed = run(path, "--device")
    assert failed.exit_code == 2
    assert "sharding: tp=2" in failed.stderr
    assert run(path).exit_code == 0


@pytest.mark.slow
def test_an_engine_that_cannot_be_made_again_is_refused(journal: Path, tmp_path: Path) -> None:
    first, *rest = journal.read_text().splitlines(keepends=True)
    for change, field in (({"weights": "another"}, "model"), ({"max_rows": 1}, "max_rows")):
        said = json.loads(first)
        (said if field == "model" else said["limits"]).update(change)
        other = tmp_path / f"{field}.journal"
        other.write_text("".join([json.dumps(said) + "\n", *rest]))
        failed = run(other, "--device")
        assert failed.exit_code == 2
        assert field in failed.stderr
    assert run(tmp_path / "nothing").exit_code == 2
