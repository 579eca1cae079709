"""Looks at a model's files before anything is loaded, and without torch: what cannot be trained is refused with its file's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo2.base.errors import ConfigError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin")
_FETCHED, _POINTER = (*_WEIGHTS, ".json", ".model"), b"version https://git-lfs."
_FLOATS = {"F64", "F32", "F16", "BF16"}  # others are numbers of a quantised model, or no weights
_ORIGINAL = "expected weights of 16 or 32 bits, got {}: name the model that it was made from"  # of packed ones
TOLD_MAX = 1000  # letters of an error: a dozen lines
_HEADER_BYTES_MAX = 100_000_000  # as the format's own library has it


@contextmanager
def naming(path: str, wanted: str = "cannot be loaded as a causal LM") -> Iterator[None]:
    """Whatever transformers raises for a model's files becomes a `ConfigError` that names the model."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - anything, by what a file holds
        raise ConfigError(f"model {path}: {wanted}: {told(error)}") from None


def told(error: Exception) -> str:
    """What an error says; of a long text, as a list of all that transformers knows, the first line."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    return text if len(text) <= TOLD_MAX else text.splitlines()[0]


def checked_path(path: str, *, has_weights: bool = False) -> str:
    """The folder of a model, whose files are checked, or its hub id. `has_weights`: its weights are all wanted, as for training.
    Raises `ConfigError`, naming the file."""
    local = Path(path).expanduser()
    if (local / "adapter_config.json").is_file():
        raise ConfigError(
            f"model {path}: expected a whole model, found an adapter (adapter_config.json): merge it into its base first"
        )
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not (local / "config.json").is_file():
        raise ConfigError(f"model {path}: expected a folder with config.json, found none from {Path.cwd()}")
    if not local.is_dir():
        return path
    contents = {
        file.name: _checked(file) for file in sorted(local.iterdir()) if file.suffix in _FETCHED and file.is_file()
    }
    config = contents.get("config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"model file {local / 'config.json'}: expected a model's config, got {type(config).__name__}")
    refuse_quantised(path, config.get("quantization_config"))
    if has_weights and INDEX in contents and ONE_FILE not in contents:  # else transformers reads that one
        _check_index(local / INDEX, contents[INDEX])
    if has_weights and not any(name.endswith(_WEIGHTS) for name in contents):
        raise ConfigError(f"model {path}: expected its weights, found neither *.safetensors nor *.bin there")
    return str(local)


def refuse_quantised(path: str, quantised: object) -> None:
    if quantised:
        how = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise ConfigError(f"model {path}: {_ORIGINAL.format(f'quantised ones ({how})')}")


def _checked(file: Path) -> object:
    """What a JSON file holds; None for other files."""
    with file.open("rb") as content:
        if content.read(len(_POINTER)) == _POINTER:
            raise ConfigError(
                f"model file {file}: expected its content, got the pointer that Git LFS leaves in its place; run "
                "`git lfs pull` in that folder, or download the model again"
            )
    kinds: dict[str, str] = {}
    try:
        if file.suffix == ".json":
            return json.loads(file.read_bytes())
        if file.suffix == ".safetensors":
            kinds = _kinds_of(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model file {file}: expected whole {file.suffix[1:]}, got something else ({error}); download it again"
        ) from None
    if odd := sorted(name for name, kind in kinds.items() if name.endswith("weight") and kind not in _FLOATS):
        raise ConfigError(f"model file {file}: {_ORIGINAL.format(f'{odd[0]} as {kinds[odd[0]]}')}")
    return None


def _kinds_of(file: Path) -> dict[str, str]:
    """The dtype of each tensor, by a safetensors file's header: its length in 8 bytes, then JSON. Raises `ValueError` unless the
    file is as long as that says."""
    with file.open("rb") as content:
        header_bytes = int.from_bytes(content.read(8), "little")
        if header_bytes > _HEADER_BYTES_MAX:
            raise ValueError(f"a header of {header_bytes} bytes")
        tensors = json.loads(content.read(header_bytes))
    tensors.pop("__metadata__", None)
    expected = 8 + header_bytes + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    size = file.stat().st_size
    if expected != size:
        raise ValueError(f"{size} bytes instead of {expected}")
    return {name: str(tensor["dtype"]) for name, tensor in tensors.items()}


def _check_index(file: Path, index: object) -> None:
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict):
        raise ConfigError(f"model file {file}: expected a weight_map, found none; download it again")
    names = sorted({str(name) for name in listed.values()})
    if lacking := [name for name in names if not (file.parent / name).is_file()]:
        raise ConfigError(
            f"model file {file}: expected the {len(names)} files that it lists, {len(lacking)} are missing, first "
            f"{lacking[0]}: an unfinished download"
        )
