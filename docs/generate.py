"""The pages that the code writes: options, request fields, metrics; and tables in quantisation.md and models.md.

    python docs/generate.py            # all of them; starts a small server for its metrics, about a minute
    python docs/generate.py --quick    # all but the metrics

``tests/docs`` fails when a committed page is not what this writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from prometheus_client.parser import text_string_to_metric_families

from jserve import cli_options
from jserve.api.http.routes import PUBLIC
from jserve.api.ops.engine_metrics import FLEET_COUNTERS, FLEET_GAUGES
from jserve.api.ops.support import markdown
from jserve.cli import app
from jserve.config import sections
from jserve.model.dot import path_of
from jserve.model.quant import Form
from jserve.option_names import flat_name

ROOT = Path(__file__).parent.parent
FROM = "<!-- Written by docs/generate.py: change the code it reads, then run it. -->"
OPTIONS = f"""{FROM}

# Options

Every option has one name, in four places: a flag (`--max-num-seqs 64`), a variable (`JSERVE_MAX_NUM_SEQS=64`), a key of
the YAML file of `--config` (`max_num_seqs: 64`, alone or under its section), and a keyword of `LLM(...)` and
`EngineConfig.of(...)`. Flags win over variables, variables over the file. A switch has a second flag that turns it off
(`--no-...`). Options of section `speculative` are written `--speculative.method`, `JSERVE_SPECULATIVE_METHOD`, and in
Python and YAML as a mapping `speculative`.

Values are checked at the start: an unknown option, a wrong type or a value out of range is one line of error and exit
code 2.
"""
COMMANDS = """## Commands

What each command takes beside these options.
"""
FIELDS = f"""{FROM}

# Request fields

Every field of every endpoint, made from the declarations that check requests and that make `/openapi.json`.
[HTTP](http.md#what-a-field-does) says what applied, no effect and refused mean; in brackets are the values of a refused
field that ask for nothing. `GET /v1/support` has the same as JSON, and which features go together in one request.

"""
METRICS = f"""{FROM}

# Metrics

`GET /metrics` answers in Prometheus' text format, or in OpenMetrics where that is asked for. Names follow vLLM's under
the prefix `jserve:`; a table has [the names of other servers](http.md#coming-from-vllm-sglang-or-llamacpp). Counters
end in `_total` and run since the start; times are in seconds. No label holds a client's text; nearly all metrics have
the label `model_name`. Those of speculation, experts, host memory, disk and replicas are there while these are in use.

| metric | type | labels | |
|---|---|---|---|
"""
SERVED = {
    "int8 rounded": ("int8", {"rounded": True}),
    "int8": ("int8", {}),
    "int8, groups": ("int8", {"group": 128}),
    "int8 zeros": ("int8", {"zeros": True}),
    "int8 zeros, groups": ("int8", {"zeros": True, "group": 128}),
    "int8 zeros ordered, groups": ("int8", {"zeros": True, "ordered": True, "group": 128}),
    "int8 shifts, groups": ("int8", {"shifts": True, "group": 32}),
    "int8 static": ("int8", {"rounded": True, "static": True}),
    "e4m3 rounded": ("e4m3", {"rounded": True}),
    "e4m3 rounded, groups": ("e4m3", {"rounded": True, "group": 128}),
    "e4m3": ("e4m3", {}),
    "e4m3, groups": ("e4m3", {"group": 32}),
    "e4m3 static": ("e4m3", {"rounded": True, "static": True}),
    "e4m3 bounded": ("e4m3", {"rounded": True, "bound": 1200.0}),
    "int4, groups": ("int4", {"group": 128}),
    "int4 zeros, groups": ("int4", {"group": 128, "zeros": True}),
    "int4 ordered, groups": ("int4", {"group": 128, "ordered": True}),
    "uint4 shifts, groups": ("uint4", {"group": 32, "shifts": True}),
    "e2m1, groups": ("e2m1", {"group": 32}),
}
"""Forms in which checkpoints are served (docs/quantisation.md has which), and what distinguishes them."""
PATHS = "paths"
SUPPORT = "what runs"
PATH_LEVELS = ("avx512_bf16", "avx512f", "avx2", "hopper", "")
PATH_SHAPE = (4096, 4096)
PATH_ROWS = (1, 16, 64, 256)
BOUNDS = {"min": "at least", "max": "at most"}
SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""What makes the shipped model's config.json one of a model that compiles quickly."""
EVERYTHING = {
    "load_format": "dummy",
    "quantization": "int8",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "prompt_logprobs": False,
    "max_logprob_token_ids": 0,
    "structured_outputs": False,
    "expert_load_metrics": True,
    "compile_cache": "",
    "host_memory_gb": 0.01,
    "disk_gb": 0.01,
    "speculative": {"method": "suffix", "num_tokens": 3},
}
"""Options under which all metrics are there, and few programs."""


def options() -> str:
    """docs/options.md."""
    lines = [OPTIONS]
    for section, kind in sections():
        lines += [f"## {section.capitalize()}", "", "| option | default | |", "|---|---|---|"]
        lines += [_option(section, f) for f in dataclasses.fields(kind)]
        lines.append("")
    lines.append(COMMANDS)
    for name, command in _commands():
        lines += [f"### jserve {name}", "", command.help or "", "", *_own(command)]
    return "\n".join(lines).rstrip() + "\n"


def _option(section: str, f: dataclasses.Field[Any]) -> str:
    name = flat_name(section, f)
    flags = ["`MODEL`"] if name == "model" else [f"`--{name.replace('_', '-')}`"]
    flags += [f"`{other.partition('/')[0]}`" for other in cli_options.ALIASES.get(name, ())]
    return f"| {', '.join(flags)} | {_default(f.default)} | {_cell(_what(f))} |"


def _what(f: dataclasses.Field[Any]) -> str:
    """The option's help, its choices with their other spellings, and its range."""
    parts = [f.metadata["help"]]
    choices, aliases = f.metadata.get("choices"), f.metadata.get("aliases", {})
    if choices:
        parts.append("one of " + ", ".join(f"`{c}`" for c in choices))
    if aliases:
        parts.append("also " + ", ".join(f"`{a}` for `{c}`" for a, c in aliases.items()))
    bounds = [f"{word} {f.metadata[key]:,}" for key, word in BOUNDS.items() if f.metadata.get(key)]
    return "; ".join([*parts, *([" and ".join(bounds)] if bounds else [])])


def _default(value: Any) -> str:
    if value in ("", ()):
        return ""
    return "on" if value is True else "off" if value is False else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _commands() -> Iterator[tuple[str, Any]]:
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        if inner is not None:
            yield from ((f"{name} {sub}", made) for sub, made in inner.items())
        elif not command.hidden:
            yield name, command


def _own(command: Any) -> list[str]:
    """The parameters of a command beside the options, which have a panel each in its help."""
    rows = []
    for p in command.params:
        if p.name != "help" and getattr(p, "rich_help_panel", None) is None:
            flags = (*p.opts, *p.secondary_opts)
            names = [p.name.upper()] if p.param_type_name == "argument" else flags
            shown = ", ".join(f"`{name}`" for name in names)
            default = "" if p.default is None or callable(p.default) else _default(p.default)
            rows.append(f"| {shown} | {default} | {_cell(getattr(p, 'help', None) or '')} |")
    return ["| | default | |", "|---|---|---|", *rows, ""] if rows else []


def fields() -> str:
    """docs/http-fields.md."""
    return FIELDS + markdown(PUBLIC)


def metrics(scrape: str) -> str:
    """docs/metrics.md, from what ``GET /metrics`` answered."""
    rows = (
        f"| `{name}` | {kind} | {', '.join(labels)} | {_cell(help)} |\n"
        for name, kind, labels, help in sorted(rows_of(scrape) + fleet_rows())
    )
    return METRICS + "".join(rows)


def quantisation() -> str:
    """docs/quantisation.md with its table of paths."""
    return with_table("quantisation.md", PATHS, paths_table())


def models() -> str:
    """docs/models.md with its table of what runs by architecture."""
    from tests.model.support import table  # needs torch, as few of the pages do

    return with_table("models.md", SUPPORT, table())


def with_table(page: str, name: str, table: str) -> str:
    """``page`` with ``table`` between its marks of this name."""
    first, last = f"<!-- {name}: written by docs/generate.py -->\n", f"<!-- end of {name} -->"
    before, rest = (ROOT / "docs" / page).read_text().split(first)
    return before + first + table + last + rest.split(last)[1]


def paths_table() -> str:
    """Of each form in which a matrix of a bfloat16 model is served, the path of its products: on a CPU by the level of
    its kernels, on an H100 or H200, and where no kernel is."""
    lines = [
        f"| form | rows | {' | '.join(PATH_LEVELS[:-1])} | no kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (kind, how) in SERVED.items():
        form: Form = Form(kind=kind, **how)
        cells: dict[tuple[str, ...], list[str]] = {}
        for n in PATH_ROWS:
            found = tuple(path_of(form, level, n, PATH_SHAPE) for level in PATH_LEVELS)
            cells.setdefault(found, []).append(str(n))
        for found, of in cells.items():
            lines.append(f"| {name} | {', '.join(of)} | {' | '.join(found)} |")
            name = ""
    return "\n".join(lines) + "\n"


def fleet_rows() -> list[tuple[str, str, list[str], str]]:
    """As ``rows_of``, of what there is with replicas only."""
    gauges = [(f"jserve:{name}", "gauge", [], help) for name, help in FLEET_GAUGES.items()]
    counters = [
        (f"jserve:{name}_total", "counter", [], help) for name, help in FLEET_COUNTERS.items()
    ]
    return gauges + counters


def rows_of(scrape: str) -> list[tuple[str, str, list[str], str]]:
    """(name, type, labels, help) of each metric of a scrape, by name; ``model_name`` is a label of nearly all, and not
    among them."""
    found = []
    for family in text_string_to_metric_families(scrape):
        if family.name.startswith("jserve:") and not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {key for sample in family.samples for key in sample.labels}
            shown = sorted(labels - {"model_name", "le"})
            found.append((name, family.type, shown, family.documentation))
    return sorted(found)


@contextlib.contextmanager
def everything() -> Iterator[str]:
    """The address of a server of a small model with all metrics."""
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "options.yaml"
        model = str(small_model(Path(scratch) / "tiny"))
        config.write_text(
            json.dumps(EVERYTHING | {"disk_dir": f"{scratch}/disk", "model": model, "port": 0})
        )
        command = [sys.executable, "-m", "jserve.cli", "serve", "--config", str(config)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert server.stdout is not None
            first = next(line for line in server.stdout if "http://" in line)
            yield re.findall(r"http://[\d.:]+", first)[0]
        finally:
            server.terminate()
            server.wait(60)


def small_model(directory: Path) -> Path:
    """A directory for ``--load-format dummy``: the shipped model's tokenizer, a config.json of one
    small layer."""
    directory.mkdir(parents=True)
    shipped = ROOT / "checkpoints" / "jserve-mini"
    for file in shipped.iterdir():
        if file.suffix in (".json", ".jinja"):
            (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((shipped / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | SMALL))
    return directory


def scraped(url: str) -> str:
    """What ``/metrics`` of the server at ``url`` says behind requests that gave it drafts to count."""
    body = {
        "model": "tiny",
        "prompt": "a b a b a b a b a b a b",
        "max_tokens": 60,
        "temperature": 0,
    }
    head = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    text = ""
    while "accepted_tokens_per_pos" not in text:  # the engine drafts when it thinks that this pays
        urllib.request.urlopen(asked, timeout=120).read()
        text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    return text


def main() -> None:
    docs = ROOT / "docs"
    (docs / "options.md").write_text(options())
    (docs / "http-fields.md").write_text(fields())
    (docs / "quantisation.md").write_text(quantisation())
    (docs / "models.md").write_text(models())
    if "--quick" not in sys.argv[1:]:
        with everything() as url:
            (docs / "metrics.md").write_text(metrics(scraped(url)))


if __name__ == "__main__":
    main()
