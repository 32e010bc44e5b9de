"""The files in a model's folder: which weights they hold, and their identity as far as the outside tells."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import ConfigError, UsageError

# The files with a model's weights: which of them vLLM loads, and what their headers say. No weight is read.
#
# A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name of a tensor to data
# type, shape and place), and the data: https://huggingface.co/docs/safetensors#format

INDEX = "model.safetensors.index.json"
CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"

_PATTERNS = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt")
"""vLLM loads the files of the first pattern that has any (`DefaultModelLoader._prepare_weights`)."""
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""

_LFS_POINTER = b"version https://git-lfs"

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_PACKED = frozenset({"I64", "I32", "I16", "U8", "F4", "U32"})
"""Types of elements that hold several weights each in quantized models, or that are tables of them."""


@dataclass(frozen=True)
class WeightFacts:
    """Totals of the weight files that vLLM loads. None: the files do not tell."""

    bytes: int
    parameters: int | None = None
    dtype: str | None = None


class TruncatedWeightsError(UsageError):
    """A file with weights is shorter or longer than its header says, or its header cannot be read."""


class Tensor(msgspec.Struct):
    """What the header of a safetensors file says of a tensor. `data_offsets`: first byte and end in the data."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def loaded_files(names: Collection[str], index: Collection[str] | None = None) -> tuple[str, ...]:
    """Of a model's top-level files those that vLLM loads with `load-format: auto`, sorted.

    `index`: the files that the safetensors index names, which leaves the others out.
    """
    for pattern in _PATTERNS:
        chosen = sorted(name for name in names if fnmatchcase(name, pattern) and name not in _TRAINING)
        if chosen:
            listed = [name for name in chosen if name in (index or ())]
            return tuple(listed if index is not None and pattern.endswith("safetensors") else chosen)
    return ()


def index_name(names: Collection[str]) -> str | None:
    """The index that belongs to the files which vLLM loads, if there is one."""
    consolidated = any(fnmatchcase(name, _PATTERNS[0]) for name in names)
    name = CONSOLIDATED_INDEX if consolidated else INDEX
    return name if name in names else None


def indexed_files(index: Path) -> frozenset[str]:
    """The files that a safetensors index names. Raises UsageError if it cannot be read."""
    try:
        return frozenset(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{index} is no index of weights ({error})", "fetch the model again") from error


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files of a model's folder that vLLM loads. Raises UsageError if one that the index names is missing."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    index = index_name(names)
    if index is None:
        return tuple(folder / name for name in loaded_files(names))
    listed = indexed_files(folder / index)
    missing = sorted(listed - names)
    if missing:
        raise UsageError(
            f"{folder}: {shown(missing)} of the {len(listed)} files with weights that {index} names "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            "fetch the model again",
        )
    return tuple(folder / name for name in loaded_files(names, listed))


def shown(names: Sequence[str]) -> str:
    """The names for a message: one, or the first and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def weight_facts(files: Iterable[Path], quantized: bool) -> WeightFacts | None:
    """Totals of the weight files; None if there are none. Raises TruncatedWeightsError, OSError.

    `quantized`: elements of integer types are then several weights each, and the number of weights is unknown.
    """
    files = tuple(files)
    if not files:
        return None
    sizes = [file.stat().st_size for file in files]
    if files[0].suffix != ".safetensors":
        return WeightFacts(sum(sizes))
    elements: Counter[str] = Counter()
    for file in files:
        elements.update(_elements(file))
    packed = quantized and not _PACKED.isdisjoint(elements)
    most = max(elements, key=lambda dtype: elements[dtype], default=None)
    dtype = _DTYPES.get(most) if most else None
    return WeightFacts(sum(sizes), None if packed else sum(elements.values()), dtype)


def read_tensors(file: Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file by name. Raises TruncatedWeightsError if the file is not whole, OSError."""
    size = file.stat().st_size
    tensors, header_bytes = _header(file, size)
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    expected = 8 + header_bytes + end
    if size != expected:
        raise TruncatedWeightsError(
            f"{file} has {size:,} bytes, and its header says {expected:,}: it was not fetched or copied to the end",
            "fetch the file again",
        )
    return tensors


def _elements(file: Path) -> Counter[str]:
    """Number of elements of each data type in a safetensors file."""
    elements: Counter[str] = Counter()
    for tensor in read_tensors(file).values():
        elements[tensor.dtype] += math.prod(tensor.shape)
    return elements


def _header(file: Path, size: int) -> tuple[Mapping[str, Tensor], int]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            stream.seek(0)
            raise _unreadable(file, size, stream.read(len(_LFS_POINTER)))
        raw = stream.read(length)
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {
            name: msgspec.json.decode(entry, type=Tensor) for name, entry in entries.items() if name != "__metadata__"
        }, length
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(file, size, raw) from error


def _unreadable(file: Path, size: int, start: bytes) -> TruncatedWeightsError:
    if start.startswith(_LFS_POINTER):
        return TruncatedWeightsError(
            f"{file} is a pointer of Git LFS, not the weights", "run `git lfs pull` in its folder"
        )
    return TruncatedWeightsError(f"{file} ({size:,} bytes) is no whole safetensors file", "fetch the file again")


# Identity of the files in a model's folder, as far as the outside tells: names, sizes and times.
#
# One machine, one clock, one file system: files that look the same from outside are taken for the same.

MODEL_FILES_ENV = "DYN_MODEL_FILES"
"""Set by the server in a worker of an endpoint: identity of the files that its revision was checked with."""

_READERS = 4


def files_identity(folder: Path | None, *, strictly: bool = False) -> str:
    """Names, sizes and times of the files there. (In a Hugging Face cache they are links to files named by content.)

    `strictly`: with the times at which they were changed here, which no copy takes along: a folder that has been filled
    anew is another one. Raises OSError.
    """
    if folder is None:
        return "unknown"
    found: list[Any] = []
    for path in sorted(folder.iterdir()):
        target = path.resolve()
        if target.is_file():
            status = target.stat()
            changed = (status.st_ino, status.st_ctime_ns) if strictly else ()
            found.append((path.name, target.name, status.st_size, status.st_mtime_ns, *changed))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def contents_identity(folder: Path) -> str:
    """Names and contents of the files there: the same on every machine. Reads all of them. Raises OSError."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_digest, files))
    return hashlib.sha256(
        json.dumps([(path.name, digest) for path, digest in zip(files, digests, strict=True)]).encode()
    ).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_identity(folder: str) -> str:
    """As `files_identity`. Raises ConfigError for a folder that cannot be read."""
    try:
        return files_identity(Path(folder))
    except OSError as error:
        raise ConfigError(
            f"the model's folder {folder} cannot be read: {error.strerror}", "put its files back, or name another model"
        ) from error


def check_model_files(config: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise ConfigError in a worker whose model's files are others than when its endpoint's revision was checked: other
    workers may have loaded the former ones."""
    wanted, folder = environ.get(MODEL_FILES_ENV), config.get("model")
    if wanted is None or not isinstance(folder, str):
        return
    if read_identity(folder) != wanted:
        raise ConfigError(
            f"the model's files in {folder} are others than when its endpoint was updated last",
            "the server makes another revision of the endpoint, with which all workers load the same files",
        )
