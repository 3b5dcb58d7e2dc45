"""The command line: ``jserve serve | generate | chat | run-batch | convert | quantize | quality | plan | simulate |
replay | kubernetes | compile | manifest | bench | native | env``.

It owns the commands and exit codes; the only file that reads ``os.environ`` and ``sys.argv`` (``xla`` has what is
passed to XLA). Imports neither jax nor transformers at module level: ``--help`` must be quick. Results go to stdout,
everything else to stderr.

Exit codes: 0 done, 1 failed while running, 2 bad usage, config or weights, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from jserve import cli_options
from jserve.cli_options import FAULTS, OptionsCommand, err, reported
from jserve.config import (
    DeviceOptions,
    EngineConfig,
    FleetOptions,
    ModelOptions,
    ServerOptions,
    SpeculativeOptions,
)
from jserve.errors import JserveError

app = typer.Typer(
    name="jserve",
    help="Serve decoder language models with pure JAX programs.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
manifest = typer.Typer(help="Lists of compiled programs.", no_args_is_help=True)
app.add_typer(manifest, name="manifest")
with_options = partial(cli_options.with_options, os.environ)

Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        help="HF or Orbax directory, or hub name; nothing serves the shipped model",
        show_default=False,
    ),
]


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Lets the engine process's malloc ask for huge pages: a step on a CPU walks gigabytes of weights and KV,
and is up to a sixth faster with fewer address translations. Read by glibc when a process starts."""


@app.command(cls=OptionsCommand)
@with_options()
def serve(config: EngineConfig, model: Model = None) -> None:
    """Serve a model over HTTP with the OpenAI API."""
    from jserve import serve_commands

    for name, value in HUGE_PAGES.items():
        os.environ.setdefault(name, value)
    _arm_faults("jserve.api.http.server")
    raise typer.Exit(serve_commands.serve(config, err))


def _arm_faults(module: str) -> None:
    """Arm the points named in the environment that this process has, once ``module`` is loaded."""
    wanted = os.environ.get(FAULTS, "")
    if wanted:
        import importlib

        from jserve import faults

        importlib.import_module(module)
        armed = faults.arm_all(wanted)
        err.print(f"[yellow]warning:[/] fault points are armed: {', '.join(armed) or 'none here'}")


@app.command(cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def generate(
    config: EngineConfig,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="text to continue; - reads stdin")
    ] = "-",
    model: Model = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="apply the chat template")] = True,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate at most", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0.0, max=2.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus mass")] = 1.0,
) -> None:
    """Print one completion to stdout."""
    from jserve import LLM, SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    with LLM(config=config) as llm:
        run = (
            llm.stream_chat([{"role": "user", "content": text}], params)
            if chat
            else llm.stream(text, params)
        )
        for piece in run:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")


@app.command(cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def chat(
    config: EngineConfig,
    model: Model = None,
    system: Annotated[str, typer.Option(help="system message")] = "",
    max_tokens: Annotated[int, typer.Option(help="tokens of one answer at most", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0.0, max=2.0)] = 0.0,
) -> None:
    """Talk to a model in the terminal. /new starts over, /quit (or ctrl-d) ends."""
    from jserve import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with LLM(config=config) as llm:
        err.print(f"[dim]{llm.model_name} — /new starts over, /quit ends[/]")
        while (said := _ask()) not in (None, "/quit"):
            if said == "/new":
                messages = list(opening)
            elif said:
                messages.append({"role": "user", "content": said})
                _answer(llm, messages, params)


def _ask() -> str | None:
    try:
        return err.input("[bold]> [/]").strip()
    except EOFError:
        return None


def _answer(llm: Any, messages: list[dict[str, str]], params: Any) -> None:
    """Stream one answer and append it; an answer that cannot be made leaves the dialogue as it was."""
    pieces: list[str] = []
    try:
        for piece in llm.stream_chat(messages, params):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except JserveError as e:
        err.print(f"[red]error:[/] {e.message}")
        messages.pop()
        return
    sys.stdout.write("\n")
    messages.append({"role": "assistant", "content": "".join(pieces)})


@app.command("run-batch", cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def run_batch(
    config: EngineConfig,
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="OpenAI batch file, JSONL")],
    out: Annotated[Path, typer.Option("--output", "-o", help="answers, JSONL; resumed if there")],
    model: Annotated[str, typer.Option("--model", "-m", help="as of serve")] = "",
    concurrency: Annotated[
        int, typer.Option(help="lines at once; 0 is twice max_num_seqs", min=0, max=4096)
    ] = 0,
) -> None:
    """Answer a file of requests. What the output answers already is not asked again."""
    from jserve import serve_commands

    raise typer.Exit(serve_commands.run_batch(offline(config), source, out, concurrency, err))


def offline(config: EngineConfig) -> EngineConfig:
    """``config`` for requests of the user's own: no key, and bodies as large as may be."""
    own = {"api_key": (), "api_keys_file": "", "max_body_mb": 1024, "ui": False}
    return EngineConfig.of(**{**config.flat(), **own})


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="HF directory or hub name")],
    target: Annotated[Path, typer.Argument(help="directory to write; must not exist")],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32 or float16")] = "auto",
    plugins: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Python files or modules to run first", show_default=False),
    ] = None,
) -> None:
    """Write a model as an Orbax checkpoint, which restores onto any mesh."""
    from jserve import commands

    with reported():
        commands.convert(source, target, dtype, plugins or (), err)
        typer.echo(str(target))


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(help="HF directory or hub name, in 16 or 32 bits")],
    target: Annotated[Path, typer.Argument(help="directory to write; must not exist")],
    scheme: Annotated[str, typer.Option(help="int4, int8, fp8 or int8-weight-only")] = "int4",
    method: Annotated[
        str, typer.Option(help="rtn, mse, hqq, gptq or awq (default mse for int4, rtn for 8 bits)")
    ] = "",
    smooth: Annotated[
        float, typer.Option(help="SmoothQuant: how much moves into the weights, 0 to 1")
    ] = 0.0,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="rotate the residual stream and the values first")
    ] = False,
    calibration: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="texts, JSONL with text, prompt or messages (default what ships)",
            show_default=False,
        ),
    ] = None,
    config: Annotated[str, typer.Option(help="JSON object with ignore and group_size")] = "",
) -> None:
    """Quantise a model a layer at a time, as a compressed-tensors directory. An unfinished job goes on."""
    from jserve import quant_commands
    from jserve.weights.offline.wish import Wish

    with reported():
        wish = Wish(scheme=scheme, method=method, smooth=smooth, rotate=rotate, config=config)
        quant_commands.quantize(source, target, wish, calibration, err)
        typer.echo(str(target))


@app.command(cls=OptionsCommand)
@with_options(ServerOptions)
def quality(
    config: EngineConfig,
    model: Model = None,
    reference: Annotated[
        str, typer.Option(help="model to compare with (default the same without quantisation)")
    ] = "",
    text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="text, or JSONL with text, prompt or messages (default what ships)"),
    ] = None,
    gate: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="JSON file of bounds; exit code 1 if one does not hold"),
    ] = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="file for the report, which serve --quality-gate reads"),
    ] = None,
    questions: Annotated[
        bool, typer.Option("--questions/--no-questions", help="also needles, JSON and skills")
    ] = True,
    drift: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="prompts: share of activations beyond static scales"),
    ] = None,
    references: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="directory where references are kept (default the user's cache)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Judge a quantised model beside its reference, on the engine that serves it."""
    from jserve import quant_commands
    from jserve.quality.run import QualityWish

    asked = QualityWish(
        reference=reference,
        text=text,
        questions=questions,
        drift=drift,
        directory=references or Path.home() / ".cache" / "jserve" / "quality",
    )
    code = quant_commands.quality(config, asked, gate, report, as_json=as_json, console=err)
    raise typer.Exit(code)


@app.command(cls=OptionsCommand)
@with_options(
    ModelOptions, DeviceOptions, SpeculativeOptions, ServerOptions, FleetOptions, also=["plugins"]
)
def simulate(
    config: EngineConfig,
    trace: Annotated[
        str,
        typer.Argument(
            help="trace, journal, .traffic file, or e.g. 'rate=8,n=1000;rate=1,n=9,lane=bulk'"
        ),
    ],
    costs: Annotated[
        Optional[Path], typer.Option(help="step times, measured by jserve bench steps")  # noqa: UP045
    ] = None,
    roofline: Annotated[
        str,
        typer.Option(
            help="instead: a model (as jserve plan takes it) on --gpu, default llama-3.1-8b"
        ),
    ] = "",
    gpu: Annotated[str, typer.Option(help="GPU of the roofline")] = "h200",
    copy_gb_s: Annotated[
        float, typer.Option(help="GB/s to and from host memory; 0: the device's", min=0.0)
    ] = 0.0,
    max_model_len: Annotated[
        int, typer.Option(help="tokens of context; 0: the model's", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="seed of traffic and jitter", min=0)] = 0,
    load: Annotated[float, typer.Option(help="arrivals come this many times as fast")] = 1.0,
    batching: Annotated[str, typer.Option(help="continuous, or static to compare")] = "continuous",
    deadlines: Annotated[
        bool, typer.Option("--deadlines/--hide-deadlines", help="tell the scheduler the deadlines")
    ] = True,
    retries: Annotated[int, typer.Option(help="times a refused client sends again", min=0)] = 0,
    jitter: Annotated[float, typer.Option(help="sigma of a log-normal step time", min=0.0)] = 0.0,
    replicas: Annotated[int, typer.Option(help="engines behind one router", min=1)] = 1,
    max_replicas: Annotated[
        int, typer.Option(help="most engines, started and stopped by the load; 0: fixed", min=0)
    ] = 0,
    start_s: Annotated[
        float, typer.Option(help="seconds until a started engine is ready", min=0.0)
    ] = 60.0,
    router: Annotated[
        str, typer.Option(help="seconds, lmetric, p2c, round_robin or random")
    ] = "seconds",
    roles: Annotated[
        str,
        typer.Option(
            help="engines that compute prompts for the others: prefill=1,decode=3, or auto"
        ),
    ] = "",
    transfer_gb_s: Annotated[
        float, typer.Option(help="GB/s of KV pages between engines with roles; 0: as copies", min=0)
    ] = 0.0,
    faults: Annotated[
        str,
        typer.Option(help="engines that die or hang, at these seconds: death=60,hang=120.5; none"),
    ] = "",
    slo_ttft_ms: Annotated[float, typer.Option(help="good: first token within")] = float("inf"),
    slo_tpot_ms: Annotated[float, typer.Option(help="good: mean token time within")] = float("inf"),
    sweep: Annotated[str, typer.Option(help="option=a,b,c: one run per value")] = "",
    against: Annotated[str, typer.Option(help="second axis of the sweep, likewise")] = "",
    plot: Annotated[Optional[Path], typer.Option(help="SVG file to draw")] = None,  # noqa: UP045
    save_trace: Annotated[Optional[Path], typer.Option(help="file for the trace")] = None,  # noqa: UP045
    verify: Annotated[
        bool, typer.Option("--verify", help="replay a journal: are all decisions the same?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Serve a trace with the real scheduler on a device that only takes time."""
    wish = {k: v for k, v in locals().items() if k not in ("config", "verify", "as_json")}
    from jserve import commands

    replies = commands.verify if verify else commands.simulate
    typer.echo(replies(config, wish, as_json, err), nl=False)


@app.command("replay")
def replay_journal(
    journal: Annotated[Path, typer.Argument(help="a file of serve --journal")],
    device: Annotated[
        bool, typer.Option("--device", help="also compute every step again and compare its tokens")
    ] = False,
) -> None:
    """Replay a journal: is every decision the same, and every token?"""
    from jserve.replay_commands import replay

    with reported():
        typer.echo(replay(journal, device=device, console=err), nl=False)


@app.command(cls=OptionsCommand)
@with_options()
def kubernetes(
    config: EngineConfig,
    model: Model = None,
    image: Annotated[
        str, typer.Option(help="container image with jserve[ray] and the model")
    ] = "jserve",
    name: Annotated[
        str, typer.Option(help="of the RayService; its Service is NAME-front")
    ] = "jserve",
    cpus: Annotated[int, typer.Option(help="processors of a replica's pod", min=1)] = 8,
    memory: Annotated[str, typer.Option(help="of a replica's pod")] = "32Gi",
    gpus: Annotated[int, typer.Option(help="GPUs of a replica's pod; 0 on CPUs", min=0)] = 0,
) -> None:
    """Print the file for KubeRay that serves a model by replicas."""
    from jserve.fleet.kubernetes import Pods, as_yaml

    pods = Pods(image=image, name=name, cpus=cpus, memory=memory, gpus=gpus)
    typer.echo(as_yaml(config, pods), nl=False)


@app.command(cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def plan(
    config: EngineConfig,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="directory, config.json, hub name, or a known shape such as llama-3.1-8b",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="h100, h200, b200 or cpu")] = "h200",
    lengths: Annotated[
        str, typer.Option(help="tokens of a sequence, e.g. 512,2k,8k (default, as far as they fit)")
    ] = "",
    acceptance: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="speculation: chance that the likeliest draft of a position is accepted"
            " (default 0.6, or the first of tree_chances)",
            show_default=False,
        ),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="also compile every step without a GPU (CUDA wheels)"),
    ] = False,
    search: Annotated[
        str,
        typer.Option(
            help="a load, as of jserve simulate: find the layout that serves it on the fewest devices"
        ),
    ] = "",
    devices: Annotated[int, typer.Option(help="search: most devices")] = 8,
    slo_ttft_ms: Annotated[float, typer.Option(help="search: target of first tokens")] = math.inf,
    slo_tpot_ms: Annotated[float, typer.Option(help="search: target per later token")] = math.inf,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="search: file for --sharding to write", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Plan a deployment: what fits on given devices and how fast it can be, or which layout serves a load."""
    if compiled:
        # Or the plugin looks for cuDNN and a driver; read when jax first asks for devices.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jserve import commands

    if search:
        asked = commands.SearchOptions(
            load=search,
            devices=devices,
            slo_ttft_ms=slo_ttft_ms,
            slo_tpot_ms=slo_tpot_ms,
            out=out,
        )
        raise typer.Exit(commands.search(config, device, asked, as_json=as_json, console=err))
    commands.plan(
        config, device, lengths, acceptance, compiled=compiled, as_json=as_json, console=err
    )


@app.command("compile", cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def compile_all(
    config: EngineConfig,
    model: Model = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write")] = Path("manifest.json"),
) -> None:
    """Compile every program of an engine on this CPU, without its weights, and list them with their costs."""
    from jserve import commands

    typer.echo(commands.compile_all(config, out, err), nl=False)


@manifest.command()
def diff(
    old: Annotated[Path, typer.Argument(help="file of jserve compile", show_default=False)],
    new: Annotated[Path, typer.Argument(help="another one", show_default=False)],
) -> None:
    """Say in what two manifests differ; exit code 1 if they do."""
    from jserve import commands

    with reported():
        found = commands.manifest_diff(old, new)
    typer.echo("".join(f"{line}\n" for line in found), nl=False)
    if found:
        raise typer.Exit(1)


@bench.command(cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def steps(
    config: EngineConfig,
    model: Model = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="file to write")] = Path("steps.json"),
    repeats: Annotated[int, typer.Option(help="steps per bucket and context", min=1)] = 9,
) -> None:
    """Measure every step program, as a table for jserve simulate --costs."""
    from jserve import commands

    typer.echo(commands.bench_steps(config, out, repeats, err), nl=False)


@bench.command(cls=OptionsCommand)
@with_options(ServerOptions, FleetOptions)
def shard(
    config: EngineConfig,
    model: Model = None,
    spec: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="a sharding, as of --sharding; two or more", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option(help="whose rates price it: h100, h200, b200, cpu")
    ] = "h200",
    lengths: Annotated[
        str, typer.Option(help="tokens of the sequences that are counted, e.g. 512,2k,8k")
    ] = "",
    compiled: Annotated[
        bool, typer.Option("--compile", help="also compile both steps without a GPU (CUDA wheels)")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="also serve the trace over those prices")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="also run each on the devices of this machine")
    ] = False,
    trace: Annotated[
        str, typer.Option(help="the requests, as of jserve simulate; live: all at once")
    ] = "rate=1000,n=16,prompt=64,output=32",
    hour_usd: Annotated[
        float,
        typer.Option(help="simulate: dollars for a device and hour, for those of a million tokens"),
    ] = 0.0,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="also draw it, as .svg; needs jserve[plot]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Compare shardings of one model: collectives, expected times of steps, a load over these, and what runs here."""
    from jserve.shard_commands import bench_shard

    asked = (config, spec or [], device, trace)
    how: dict[str, Any] = {"compiled": compiled, "simulate": simulate, "live": live}
    how |= {"lengths": lengths, "hour_usd": hour_usd, "plot": plot}
    raise typer.Exit(bench_shard(*asked, **how, as_json=as_json, console=err))


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Versions, devices and directories, for a bug report."""
    from jserve import commands

    facts = commands.environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        typer.echo(f"{key:<{width}}  {value}")


@app.command()
def native() -> None:
    """Build the kernels for CPUs anew, with $CC or a C compiler of this machine, and say which level loads."""
    from jserve import commands

    with reported():
        typer.echo(commands.build_native(os.environ.get("CC", "")))


@app.command(hidden=True)
def engine(fd: Annotated[int, typer.Option(help="socket inherited from the HTTP process")]) -> None:
    """The engine process; started by ``serve``."""
    from jserve import build
    from jserve.engine import process

    _arm_faults("jserve.runner.runner")
    raise typer.Exit(process.main(fd, build.engines))


def main() -> None:
    """Entry point: parse, run, and never show a traceback for a user's mistake."""
    app(args=cli_options.spread(sys.argv[1:]))


if __name__ == "__main__":
    main()
