"""A build that cannot work ends in one line; an installation is complete."""

import ast
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def build(monkeypatch):
    """The names of `setup.py`, which is read and not run."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))


def program(folder: Path, name: str, prints: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '{prints}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("cxx", "line"),
    [
        (None, "no C\\+\\+ compiler: install"),
        ("no-such-c++ -O2", r"no C\+\+ compiler \(CXX=no-such-c\+\+\)"),
    ],
)
def test_a_missing_compiler(build, monkeypatch, tmp_path, cxx, line):
    if cxx is None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", cxx)
    with pytest.raises(SystemExit, match=line):
        build["check_compiler"]()


@pytest.mark.parametrize("version", ["3.25.1", None])
def test_an_old_or_missing_cmake(build, monkeypatch, tmp_path, version):
    if version:
        program(tmp_path, "cmake", f"cmake version {version}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if version else str(tmp_path))
    have = "3.25" if version else "none"
    with pytest.raises(SystemExit, match=f"needs CMake 3.26 or newer, found {have}: pip install"):
        build["check_cmake"]()


@pytest.mark.parametrize("archs", ["91-real", "sm_90", "80-real;", "9x"])
def test_a_wrong_arch(build, monkeypatch, tmp_path, archs):
    nvcc = program(tmp_path, "nvcc", "compute_80\\ncompute_90\\ncompute_100\\n")
    monkeypatch.setenv("TLT_CUDA_ARCHS", archs)
    with pytest.raises(SystemExit, match="is not an architecture of .*it knows 80, 90, 100"):
        build["cuda_archs"](nvcc)
    monkeypatch.setenv("TLT_CUDA_ARCHS", "80-real;90a-real;90-virtual")
    assert build["cuda_archs"](nvcc) == "80-real;90a-real;90-virtual"


def test_a_wrong_mode_and_cuda_without_nvcc(build, monkeypatch, tmp_path):
    monkeypatch.setenv("TLT_CUDA", "yes")
    with pytest.raises(SystemExit, match="TLT_CUDA must be auto, 0 or 1, got 'yes'"):
        build["wanted_nvcc"]()
    monkeypatch.setenv("TLT_CUDA", "1")
    monkeypatch.setitem(build["wanted_nvcc"].__globals__, "find_nvcc", lambda: None)
    with pytest.raises(SystemExit, match="TLT_CUDA=1 but no nvcc"):
        build["wanted_nvcc"]()
    monkeypatch.setenv("TLT_CUDA", "auto")
    assert build["wanted_nvcc"]() is None


def test_a_cuda_home_without_nvcc_is_named(build, monkeypatch, tmp_path, capfd):
    (tmp_path / "other" / "bin").mkdir(parents=True)
    nvcc = program(tmp_path / "other" / "bin", "nvcc", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "other"))
    assert build["find_nvcc"]() == nvcc
    line = f"tlt-ext: CUDA_HOME={tmp_path} has no bin/nvcc; looking elsewhere\n"
    assert capfd.readouterr().err == line


def test_the_log_keeps_the_report_of_ptxas_and_the_terminal_does_not(build, tmp_path, capfd):
    lines = "[1/1] Building CUDA object x.cu.o\nptxas info    : 0 bytes gmem\nx.cu(1): error"
    command = [program(tmp_path, "ninja", lines.replace("\n", "\\n"))]
    assert build["run_logged"](command, tmp_path / "build.log") == 0
    assert (tmp_path / "build.log").read_text() == lines
    shown = capfd.readouterr().out
    assert "ptxas" not in shown and "x.cu(1): error" in shown


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_an_installation_has_every_package_and_data_file():
    tool = PROJECT["tool"]["setuptools"]
    packages = {
        "tlt_ext." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for path in ROOT.glob("driver/**/__init__.py")
    }
    assert set(tool["packages"]) == packages | {"tlt_ext", "tlt_ext.driver.presets"}
    shipped = {
        path
        for package, patterns in tool["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.removeprefix("tlt_ext.").replace(".", "/")).glob(pattern)
    }
    data = {path for path in ROOT.glob("driver/**/*") if path.is_file() and path.suffix != ".pyc"}
    assert {path for path in data if path.suffix != ".py"} <= shipped


def imported_names(path):
    """Modules that a file imports by their full names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_driver_imports_itself_by_relative_names():
    """It is `driver` in the checkout and `tlt_ext.driver` in an installation."""
    sources = list(ROOT.glob("driver/**/*.py"))
    names = [(path.name, name) for path in sources for name in imported_names(path)]
    assert ("cli.py", "signal") in names
    wrong = ("driver", "profiling", "tests")
    assert [pair for pair in names if pair[1].partition(".")[0] in wrong] == []


def test_a_folder_without_the_core_is_named(tmp_path):
    """The source folder of an installation that is not editable."""
    shutil.copytree(ROOT / "tlt_ext", tmp_path / "tlt_ext", ignore=shutil.ignore_patterns("_C*"))
    for path in ("driver/cli.py", "driver/common", "driver/config", "driver/presets"):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (tmp_path / path).parent.mkdir(exist_ok=True)
        copy(ROOT / path, tmp_path / path)
    (tmp_path / "driver" / "train.py").write_text("import tlt_ext\n")
    start = "import sys; sys.argv = ['tlt', 'train']; from driver.cli import main; main()"
    # Without `site`, whose finder of an editable installation would supply a core.
    env = {"PYTHONPATH": str(Path(yaml.__file__).parents[1])}
    for code in ("import tlt_ext", start):
        command = [sys.executable, "-S", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        last = done.stderr.splitlines()[-1]
        assert done.returncode and "circular" not in done.stderr
        assert f"{tmp_path}/tlt_ext has no native core: build it there" in last
    assert done.stderr.startswith("error: tlt_ext: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("MAX_DEPTH", "importlib.reload(tlt_ext.limits)"),
        ("set_num_threads", "tlt_ext.set_num_threads(1)"),
    ],
)
def test_a_core_of_older_sources_is_named(name, use):
    """As after `git pull` without a new build: at import, and when an op is called."""
    code = f"""if True:
        import importlib, tlt_ext
        delattr(tlt_ext._C, "{name}")
        assert not hasattr(tlt_ext._C, "torch")  # torch.compile asks every module
        try:
            {use}
        except AttributeError as error:
            assert error.obj is tlt_ext._C  # `driver.cli` prints the message of these alone
            raise
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert f"has no {name}, it was built from older sources: run `pip install -e .`" in last
