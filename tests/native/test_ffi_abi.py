"""Our declarations of XLA's FFI structures against the headers of jaxlib, by the compiler: the installed one, and the
oldest and newest that pyproject.toml allows; and what handlers say to an XLA that speaks another version of it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import jaxlib
import pytest
from packaging.requirements import Requirement

from jserve.native.compile import FOLDER, find_compiler
from jserve.native.library import HANDLERS, Library

INCLUDE = Path(jaxlib.__file__).parent / "include"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
HEADER = "xla/ffi/api/c_api.h"
STRUCTS: dict[str, tuple[str, dict[str, str]]] = {
    "FfiExtension": (
        "XLA_FFI_Extension_Base",
        {"struct_size": "struct_size", "type": "type", "next": "next"},
    ),
    "FfiVersion": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "FfiErrorCreate": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "FfiErrorDestroy": ("XLA_FFI_Error_Destroy_Args", {"error": "error"}),
    "FfiBuffer": (
        "XLA_FFI_Buffer",
        {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"},
    ),
    "FfiSpan": ("XLA_FFI_ByteSpan", {"text": "ptr", "len": "len"}),
    "FfiScalar": ("XLA_FFI_Scalar", {"dtype": "dtype", "value": "value"}),
    "FfiList": ("XLA_FFI_Args", {"size": "size", "types": "types", "items": "args"}),
    "FfiAttrs": (
        "XLA_FFI_Attrs",
        {"size": "size", "types": "types", "names": "names", "items": "attrs"},
    ),
    "FfiSchedule": (
        "XLA_FFI_ThreadPool_Schedule_Args",
        {"ctx": "ctx", "task": "task", "data": "data"},
    ),
    "FfiNumThreads": (
        "XLA_FFI_ThreadPool_NumThreads_Args",
        {"ctx": "ctx", "num_threads": "num_threads"},
    ),
    "FfiCall": (
        "XLA_FFI_CallFrame",
        {
            "api": "api",
            "ctx": "ctx",
            "stage": "stage",
            "args": "args",
            "rets": "rets",
            "attrs": "attrs",
        },
    ),
    "FfiMetadata": ("XLA_FFI_Metadata", {"version": "api_version", "traits": "traits"}),
    "FfiMetadataExtension": (
        "XLA_FFI_Metadata_Extension",
        {"base": "extension_base", "metadata": "metadata"},
    ),
    "FfiApi": (
        "XLA_FFI_Api",
        {
            "version": "api_version",
            "error_create": "XLA_FFI_Error_Create",
            "error_destroy": "XLA_FFI_Error_Destroy",
            "schedule": "XLA_FFI_ThreadPool_Schedule",
            "num_threads": "XLA_FFI_ThreadPool_NumThreads",
        },
    ),
}
TYPES = ("S8", "S32", "S64", "U8", "U16", "F32", "BF16", "F8E4M3FN")
CONSTANTS = {
    "FFI_MAJOR": "XLA_FFI_API_MAJOR",
    "FFI_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "FFI_STAGE_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "FFI_ATTR_SCALAR": "XLA_FFI_AttrType_SCALAR",
    "FFI_ERROR_INVALID_ARGUMENT": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "FFI_ERROR_FAILED_PRECONDITION": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    **{f"FFI_{name}": f"XLA_FFI_DataType_{name}" for name in TYPES},
}
RENAMED = {"XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension"}
"""Structures that jaxlib 0.12 calls otherwise."""
SIZED = {"FfiVersion", "FfiErrorCreate", "FfiErrorDestroy", "FfiSchedule", "FfiNumThreads"}
"""Structures that the kernels fill, whose size they name by the last field."""


def assertions(structs: dict[str, tuple[str, dict[str, str]]]) -> str:
    lines = [f'#include "{HEADER}"', '#include "ffi_abi.h"']
    lines += [f"_Static_assert({a} == {b}, {q(a)});" for a, b in CONSTANTS.items()]
    lines.append('_Static_assert(FFI_MINOR <= XLA_FFI_API_MINOR, "older");')
    for ours, (theirs, fields) in structs.items():
        for a, b in fields.items():
            text = q(f"{ours}.{a}")
            lines.append(
                f"_Static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), {text});"
            )
            sizes = f"sizeof((({ours} *)0)->{a}) == sizeof((({theirs} *)0)->{b})"
            lines.append(f"_Static_assert({sizes}, {text});")
        if ours in SIZED:
            size = f"FFI_SIZE({ours}, {list(fields)[-1]}) <= {theirs}_STRUCT_SIZE"
            lines.append(f"_Static_assert({size}, {q(ours)});")
    return "\n".join(lines) + "\n"


def q(text: str) -> str:
    return f'"{text}"'


def compiled(text: str, folder: Path, include: Path = INCLUDE) -> subprocess.CompletedProcess[str]:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    if not (include / HEADER).exists():
        pytest.skip(f"this jaxlib has no {HEADER}")
    header = (include / HEADER).read_text()
    for before, after in RENAMED.items():
        text = text if before in header else text.replace(before, after)
    source = folder / "abi.c"
    source.write_text(text)
    command = [*compiler, "-std=gnu11", "-fsyntax-only", f"-I{include}", f"-I{FOLDER}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def allowed(end: str) -> str:
    """What pip calls the oldest or newest jaxlib of pyproject.toml's bounds on jax."""
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    [bounds] = [r.specifier for r in map(Requirement, dependencies) if r.name == "jax"]
    if end == "newest":
        return f"jaxlib{bounds}"
    [oldest] = [s.version for s in bounds if s.operator == ">="]
    return f"jaxlib=={oldest}"


def test_sizes_and_offsets_are_those_of_the_installed_jaxlib(tmp_path):
    done = compiled(assertions(STRUCTS), tmp_path)
    assert done.returncode == 0, done.stderr


def test_another_layout_is_noticed(tmp_path):
    name, fields = STRUCTS["FfiBuffer"]
    done = compiled(assertions({"FfiBuffer": (name, fields | {"data": "rank"})}), tmp_path)
    assert done.returncode != 0
    assert "FfiBuffer.data" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_sizes_and_offsets_are_those_of_every_jaxlib_that_is_allowed(end, tmp_path):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", "3.12", "-d", str(tmp_path), allowed(end)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{allowed(end)} cannot be downloaded")
    [wheel] = tmp_path.glob("jaxlib-*.whl")
    with zipfile.ZipFile(wheel) as z:
        z.extract(f"jaxlib/include/{HEADER}", tmp_path)
    done = compiled(assertions(STRUCTS), tmp_path, tmp_path / "jaxlib/include")
    assert done.returncode == 0, f"{wheel.name}: {done.stderr}"


# --- the question for the version, as XLA asks it, without XLA


class Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


class Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", Version),
        ("traits", ctypes.c_uint32),
    )


class MetadataExtension(ctypes.Structure):
    _fields_ = (("base", Extension), ("metadata", ctypes.POINTER(Metadata)))


class ErrorCreate(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorCreate))


class Api(ctypes.Structure):
    """Up to the last function that the kernels call."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("version", Version),
        ("internal", ctypes.c_void_p),
        ("error_create", CreateError),
        ("other", ctypes.c_void_p * 12),
    )


class Call(ctypes.Structure):
    """What a handler reads before it knows that it is asked for its version."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(MetadataExtension)),
        ("api", ctypes.POINTER(Api)),
        ("rest", ctypes.c_void_p * 32),
    )


class Answer(NamedTuple):
    """``refusals``: code and message of each error that the handler made; ``version``: what it says to be written
    for."""

    refusals: list[tuple[int, bytes]]
    version: tuple[int, int]


METADATA, FAILED_PRECONDITION = 1, 9
ERROR = 0x5AFE
"""Stands for an error of XLA's."""


def asked(
    kernels: Library, function: str, major: int = 0, minor: int = 3, missing: int = 0
) -> Answer:
    """What a handler answers to an XLA of that version, whose table of functions lacks ``missing`` bytes."""
    refusals: list[tuple[int, bytes]] = []

    def create(args) -> int:
        refusals.append((args.contents.code, args.contents.message))
        return ERROR

    said = Metadata(version=Version(major=-1, minor=-1))
    extension = MetadataExtension(base=Extension(type=METADATA), metadata=ctypes.pointer(said))
    version = Version(major=major, minor=minor)
    size = ctypes.sizeof(Api) - missing
    api = Api(struct_size=size, version=version, error_create=CreateError(create))
    call = Call(extension=ctypes.pointer(extension), api=ctypes.pointer(api))
    handler = kernels.function(function)
    handler.restype = ctypes.c_void_p
    error = handler(ctypes.byref(call))
    assert error == (ERROR if refusals else None)
    return Answer(refusals, (said.version.major, said.version.minor))


@pytest.mark.parametrize("function", HANDLERS.values())
def test_a_handler_refuses_another_version_of_the_interface(kernels, function):
    """Another major one, an older minor one, and a table without the functions that it calls."""
    for other in ({"major": 1}, {"minor": 2}, {"missing": 8}):
        answer = asked(kernels, function, **other)
        [(code, message)] = answer.refusals
        assert code == FAILED_PRECONDITION
        assert b"another version of the FFI" in message
        assert answer.version == (-1, -1)
    for minor in (3, 4):
        assert asked(kernels, function, minor=minor) == Answer([], (0, 3)), "a newer one has all"
