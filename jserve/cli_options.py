"""Defines flags, ``JSERVE_*`` variables and YAML keys for all options, and their precedence.

It owns the flags made from ``jserve.config``, so that they cannot drift from it, and the one line that an expected
error becomes. Imports neither jax nor transformers; must not know a command, nor read the environment itself.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from jserve import foreign
from jserve.config import EngineConfig, SpeculativeOptions, sections
from jserve.errors import ConfigError, JserveError
from jserve.option_names import DOTTED, dotted, flat_name

ENV_PREFIX = "JSERVE_"
FAULTS = "JSERVE_FAULTS"
"""For tests of a whole server: fault points to arm, as ``faults.arm_all`` reads them."""
ALIASES = {
    "tensor_parallel_size": ["--tp", "-tp"],
    "expert_parallel_size": ["--ep"],
    "page_size": ["--block-size"],
    "memory_utilization": ["--gpu-memory-utilization"],
    "prefix_caching": ["--enable-prefix-caching/--no-enable-prefix-caching"],
    "max_waiting": ["--max-num-queued-reqs"],
    "keep_alive_s": ["--sse-keep-alive-interval"],
}
"""Names that users of other engines type."""

SEVERAL = ("--served-model-name",)
"""Flags that take all values up to the next flag, as vLLM's do."""

_DOT = "__"


class OptionsCommand(TyperCommand):
    """A command with the options of ``with_options``: flags of other engines are answered all at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for param in self.params for flag in (*param.opts, *param.secondary_opts)}
        message = foreign.message(args, {*known, *ctx.help_option_names})
        if message:
            err.print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


err = Console(stderr=True, highlight=False)


def spread(args: Sequence[str]) -> list[str]:
    """``args`` with a flag of ``SEVERAL`` before each of its values: ``--flag a b`` is ``--flag a --flag b``.

    A directory that comes last, where no model stands before the flag, stays an argument: the model.
    """
    found: list[str] = []
    i = 0
    while i < len(args):
        flag, assigned, _ = args[i].partition("=")
        end = i + 1
        if flag in SEVERAL:
            while end < len(args) and not args[end].startswith("-"):
                end += 1
        values = list(args[i + 1 : end])
        model = values[-1:] if values[not assigned :] and _is_model(args[:i], values[-1]) else []
        names = values[: len(values) - len(model)]
        if assigned or not names:
            found.append(args[i])
        found += [part for name in names for part in (flag, name)] + model
        i = end
    return found


def _is_model(before: Sequence[str], value: str) -> bool:
    """True if the last value of a flag is the model's directory and no name: no argument, the command
    apart, stands before the flag."""
    return Path(value).is_dir() and not [arg for arg in before[1:] if not arg.startswith("-")]


def _option(f: dataclasses.Field[Any], section: str) -> inspect.Parameter:
    kind = type(f.default)
    name = flat_name(section, f)
    flags = [f"--{name.replace('_', '-')}", *ALIASES.get(name, [])]
    if kind is bool:
        flags[0] += f"/--no-{f.name.replace('_', '-')}"
    shown = f.default if f.default not in ("", ()) else None
    choices = " | ".join(map(str, f.metadata.get("choices", ())))
    note = ", ".join(
        part
        for part in (f.metadata["help"], choices, "" if shown is None else f"default {shown}")
        if part
    )
    option = typer.Option(
        *flags, help=note, rich_help_panel=section.capitalize(), show_default=False
    )
    base: Any = list[str] if kind is tuple else kind
    return _parameter(name, base, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """A keyword that is None unless given; dots cannot stand in a Python name."""
    return inspect.Parameter(
        name.replace(".", _DOT),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045  (typer reads the annotation)
    )


_TOGETHER = typer.Option(
    f"--{DOTTED}",
    "--speculative-config",
    help="a method, or JSON: the options of this section together",
    rich_help_panel=DOTTED.capitalize(),
)


def with_options(
    environ: Mapping[str, str], *skip: type, also: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every option of ``EngineConfig`` as flags: of the sections in ``skip`` only those in ``also``.

    The command receives them resolved, as keyword ``config``. ``environ`` is read when the command runs.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name != "config"
        ]
        generated = [
            _option(f, section)
            for section, options in sections()
            for f in dataclasses.fields(options)
            if (options not in skip or f.name in also) and flat_name(section, f) != "model"
        ]
        if SpeculativeOptions not in skip:
            generated.append(_parameter(DOTTED, str, _TOGETHER))
        names = {p.name for p in generated}
        note = "YAML file of options; flags and JSERVE_* variables win"
        file = _parameter("config_file", Path, typer.Option("--config", help=note))

        def run(**given: Any) -> None:
            file_path = given.pop("config_file")
            flags = {
                k.replace(_DOT, "."): v for k, v in given.items() if k in names and v is not None
            }
            if given.get("model"):
                flags["model"] = given["model"]
            rest = {k: v for k, v in given.items() if k not in names and k != "model"}
            with reported():
                command(config=resolve(flags, file_path, environ), **rest)

        run.__signature__ = inspect.Signature([*own, *generated, file])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return wrap


def resolve(
    flags: Mapping[str, Any], file: Path | None, environ: Mapping[str, str]
) -> EngineConfig:
    """Flags over ``JSERVE_*`` over the YAML file over defaults.

    Raises:
        ConfigError: an unknown option or a bad value; says where it stands.
    """
    known = {name.replace(".", "_"): name for name in (*EngineConfig().flat(), DOTTED)}
    variables: dict[str, Any] = {}
    for name, value in environ.items():
        option = name.removeprefix(ENV_PREFIX).lower()
        if name.startswith(ENV_PREFIX) and option in known:
            variables[known[option]] = value
        elif name.startswith(ENV_PREFIX) and name != FAULTS:
            err.print(f"[yellow]warning:[/] {name} is not an option of jserve; ignored")
    layers = (_yaml_options(file) if file else {}, variables, flags)
    return EngineConfig.of(**{k: v for layer in layers for k, v in dotted(layer).items()})


def _yaml_options(file: Path) -> dict[str, Any]:
    """Options of a YAML file, flat or grouped by section, with - or _ in names."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"{file}: {' '.join(str(e).split())[:200]}", field="config") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must hold a mapping of options", field="config")
    names = {section for section, _ in sections()}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        whole = key in names and key != DOTTED and isinstance(value, dict)
        group = value if whole else {key: value}
        flat.update({str(k).replace("-", "_"): v for k, v in group.items()})
    return flat


class reported:
    """Turns expected errors into one line on stderr and an exit code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ConfigError):
            err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(2)
        if isinstance(error, JserveError):
            err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
            raise typer.Exit(1)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130)
