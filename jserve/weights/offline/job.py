"""The whole of ``jserve quantize``: reads a model, writes another one, and goes on where it was ended.

It owns the directories. A layer is a file; files of an unfinished job lie in ``OUT.partial`` beside a note of what they
are, and the stream of the texts comes from them again::

    OUT.partial/job.json                              what is asked for, and of which weights
               /config.json                           with quantization_config
               /model-00001-of-00006.safetensors      layer 0
               /...                                   the last one: embedding, last norm, head
    OUT                                               the same directory, when it is whole
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.layer_pass import check_dense
from jserve.model.param_spec import Part, spelled
from jserve.model.quant import Form
from jserve.model.quant_specs import EXPERTS, MULTIPLIED, WEIGHT, stem
from jserve.weights.hf import INDEX, Tensors, dtype_name
from jserve.weights.loader import load_part
from jserve.weights.offline.calibration import LayerStream
from jserve.weights.offline.export import config_of, tensors_of
from jserve.weights.offline.folds import Turn, check_rotates
from jserve.weights.offline.layer import LayerQuantiser
from jserve.weights.offline.wish import Wish
from jserve.weights.orbax import copy_beside
from jserve.weights.place import bad_values
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.safetensors import SafetensorsFile, broken
from jserve.weights.safetensors_writer import write_safetensors
from jserve.weights.source import Source, resolve

NOTE = "job.json"
HEAD = "lm_head"
Told = Callable[[str, int, int], None]
"""(stage, done, total)."""


def check_source(src: str, wish: Wish) -> Source:
    """The model that is to be quantised.

    Raises:
        ConfigError: it is not found, not supported, quantised already, or an Orbax directory; it has experts or
            latents, and the wish needs more than rounding; its files can have no experts one by one.
    """
    source = resolve(src)
    if source.format != "safetensors":
        raise ConfigError(f"{src}: jserve quantize reads safetensors alone", field="source")
    scheme = scheme_of(source.config, jnp.dtype(dtype_name(source.config)))
    if scheme is not None:
        raise ConfigError(f"{src} is quantised already ({scheme.name})", field="source")
    family = family_for(source.config)
    arch = family.arch(source.config)
    if not wish.only_rounds:
        check_dense(arch, "jserve quantize by more than rounding")
    check_one_by_one(family.specs(arch, 1)["layers"])
    return source


def check_one_by_one(layers: Any) -> None:
    """Refuse experts that no checkpoint has as matrices, which compressed-tensors' are. ``layers``: their specs."""
    for layer in layers:
        for part in (part for name in EXPERTS if name in layer for part in layer[name].parts):
            if len(part.shape) != 2:
                why = f"experts are all in one tensor ({part.name}), jserve quantize writes them one by one"
                raise ConfigError(f"{why}; --quantization rounds them on load", field="source")


def quantize(
    src: str, out: Path, wish: Wish, texts: Sequence[Sequence[int]], told: Told = lambda *_: None
) -> Path:
    """Write ``src``, quantised as ``wish`` says, to the directory ``out``.

    Holds one layer in float32, the stream of the texts, and what calibration keeps of one layer.

    Args:
        texts: token ids for calibration; not looked at where the wish needs none.

    Raises:
        ConfigError: as ``check_source``; ``out`` is not empty; an unfinished job there is another one.
        WeightsError: a tensor of ``src`` is broken.
    """
    job = _QuantizeJob(check_source(src, wish), out, wish, texts if wish.needs_texts else ())
    job.begin()
    job.run(told)
    return job.finish()


class _QuantizeJob:
    def __init__(
        self, source: Source, out: Path, wish: Wish, texts: Sequence[Sequence[int]]
    ) -> None:
        self._source, self._out, self._wish = source, out, wish
        self._dir = out.with_name(out.name + ".partial")
        self._dtype = jnp.dtype(dtype_name(source.config))
        self._family = family_for(source.config)
        self._arch = self._family.arch(source.config)
        self._modules = wish.modules(self._dtype.name)
        self._tensors = Tensors(source.weights)
        self._specs = self._written_specs()
        if wish.needs_texts and not texts:
            raise ConfigError("calibration: there is no text", field="calibration")
        if wish.rotate:
            check_rotates(self._arch, self._specs["layers"])
        self._turn = Turn(self._arch) if wish.rotate else None
        self._stream = LayerStream(self._arch, texts) if texts else None
        self._texts = texts
        self._maker = LayerQuantiser(self._arch, wish, self._modules, self._dtype)

    def begin(self) -> None:
        """Make the directory, or check that the one that is there belongs to this job."""
        if self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir())):
            raise ConfigError(f"{self._out} is not empty", field=str(self._out))
        note, path = self._note(), self._dir / NOTE
        if not path.exists():
            self._dir.mkdir(parents=True, exist_ok=True)
            copy_beside(self._source.directory, self._dir)
            (self._dir / "config.json").write_text(json.dumps(self._config(), indent=2) + "\n")
            path.write_text(note)
        elif path.read_text() != note:
            why = "holds another, unfinished job; delete it or name another directory"
            raise ConfigError(f"{self._dir} {why}", field=str(self._dir))

    def run(self, told: Told) -> None:
        if self._stream is not None:
            self._stream.enter(jnp.asarray(self._embedding(), self._dtype))
        told("quantize", 0, self._arch.L)
        for i in range(self._arch.L):
            path = self._file(i)
            if not path.exists():
                write_safetensors(path, self._layer(i))
            if self._stream is not None:
                self._stream.pass_layer(i, self._written(i))
            told("quantize", i + 1, self._arch.L)
        if not self._file(self._arch.L).exists():
            write_safetensors(self._file(self._arch.L), self._rest())

    def finish(self) -> Path:
        """Write the index and give the directory its name."""
        files = [self._file(i) for i in range(self._arch.L + 1)]
        places = {name: path.name for path in files for name in _names(path)}
        size = sum(path.stat().st_size for path in files)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (self._dir / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (self._dir / NOTE).unlink()
        if self._out.exists():
            self._out.rmdir()
        self._dir.rename(self._out)
        return self._out

    def _file(self, i: int) -> Path:
        return self._dir / f"model-{i + 1:05}-of-{self._arch.L + 1:05}.safetensors"

    def _note(self) -> str:
        digest = hashlib.sha256()
        for ids in self._texts:
            digest.update(np.asarray([len(ids), *ids], np.int32).tobytes())
        about = {"weights": self._source.stamp, "texts": digest.hexdigest(), **asdict(self._wish)}
        return json.dumps(about, indent=1) + "\n"

    def _config(self) -> dict[str, Any]:
        forms = self._forms()
        if not any(forms.values()):
            raise ConfigError("config.ignore leaves nothing to quantise", field="config.ignore")
        made = {**self._source.config, "quantization_config": config_of(forms)}
        return {**made, "tie_word_embeddings": False} if self._turn is not None else made

    def _forms(self) -> dict[str, Form | None]:
        found = {}
        for name, part in self._matrices():
            module = stem(part.name)
            rounds = name in MULTIPLIED
            found[module] = self._modules.form_of(module, part.shape[-1]) if rounds else None
        # A tied head is named too: other readers take it for one of the matrices.
        tied = self._arch.tied and self._turn is None
        found[HEAD] = None if tied else self._modules.form_of(HEAD, self._arch.D)
        return found

    def _written_specs(self) -> Any:
        """As the files of ``source`` spell them, but experts one by one."""
        whole = self._family.specs(self._arch, 1)
        found = spelled(whole, self._tensors.has)
        for layer, plain in zip(found["layers"], whole["layers"], strict=True):
            layer |= {name: replace(plain[name], spellings=()) for name in EXPERTS if name in plain}
        return found

    def _matrices(self) -> Iterator[tuple[str, Part]]:
        """(parameter, tensor) of all in the layers that are matrices of a checkpoint."""
        for layer in self._specs["layers"]:
            for name, spec in layer.items():
                for part in spec.parts:
                    if part.name.endswith(WEIGHT) and len(part.shape) == 2:
                        yield name, part

    def _loaded(self, of: Callable[[Any], Any], source: Source, **how: Any) -> Any:
        """Parameters in float32; of ``source``, which may be what was written."""
        family = quantised(self._family, how.get("scheme"))
        return load_part(family, self._arch, of, source, jnp.float32, **how)

    def _layer(self, i: int) -> dict[str, np.ndarray]:
        """The tensors of layer ``i``."""
        if self._wish.only_rounds:
            return self._rounded_layer(i)
        wide = self._loaded(lambda specs: specs["layers"][i], self._source, scan_nan="full")
        p = {name: np.asarray(x) for name, x in wide.items()}
        if self._turn is not None:
            p = self._turn.layer(self._arch.layers[i], p)
        stats = {} if self._stream is None else self._stream.stats(i, _on_device(p))
        return self._maker.tensors(i, self._specs["layers"][i], p, stats)

    def _rounded_layer(self, i: int) -> dict[str, np.ndarray]:
        """The same where rows of a matrix are rounded each by itself: tensors are taken as the files have them."""
        found: dict[str, np.ndarray] = {}
        for name, spec in self._specs["layers"][i].items():
            if name in EXPERTS:
                whole = self._loaded(_picked(i, name), self._source, scan_nan="full")
                tensors = tensors_of(spec, np.asarray(whole))
            else:
                tensors = {part.name: self._read(part) for part in spec.parts}
            for tensor, x in tensors.items():
                found |= self._maker.matrix(tensor, x) if name in MULTIPLIED else {tensor: x}
        return found

    def _read(self, part: Part) -> np.ndarray:
        """A tensor of the source.

        Raises:
            WeightsError: it has values that are not finite.
        """
        x = np.asarray(self._tensors.get(part.name, part.shape))
        if why := bad_values(x, "full"):
            raise broken(self._tensors.path(part.name), why, part.name)
        return x

    def _written(self, i: int) -> Any:
        """Layer ``i`` as its file has it."""
        config = json.loads((self._dir / "config.json").read_text())
        source = Source(
            name=self._source.name,
            directory=self._dir,
            format="safetensors",
            weights=self._dir,
            config=config,
            generation={},
        )
        scheme = scheme_of(config, jnp.float32)
        return self._loaded(lambda specs: specs["layers"][i], source, scheme=scheme)

    def _embedding(self) -> np.ndarray:
        found = self._top("embed")
        return found if self._turn is None else self._turn.inputs(found, None)

    def _top(self, name: str) -> np.ndarray:
        of = self._loaded(lambda specs: {name: specs[name]}, self._source, scan_nan="full")
        return np.asarray(of[name])

    def _rest(self) -> dict[str, np.ndarray]:
        """The tensors outside the layers."""
        found = {"embed": self._embedding(), "final_norm": self._top("final_norm")}
        head = "embed" if self._arch.tied else "unembed"
        if not self._arch.tied:
            found["unembed"] = self._top("unembed")
        if self._turn is not None:
            found["unembed"] = self._turn.inputs(self._top(head), found["final_norm"])
            found["final_norm"] = self._turn.flat(found["final_norm"])
        tensors: dict[str, np.ndarray] = {}
        for name, x in found.items():
            spec = self._specs.get(name)
            made = {f"{HEAD}.weight": x} if spec is None else tensors_of(spec, x)
            for tensor, a in made.items():
                quantised = stem(tensor) == HEAD
                tensors |= (
                    self._maker.matrix(tensor, a) if quantised else {tensor: a.astype(self._dtype)}
                )
        return tensors


def _picked(i: int, name: str) -> Callable[[Any], Any]:
    return lambda specs: specs["layers"][i][name]


def _on_device(p: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in p.items()}


def _names(path: Path) -> list[str]:
    return [*SafetensorsFile(path).tensors]
