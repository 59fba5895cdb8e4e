"""Compiling the CPU kernels: flags, cache, lock, failures."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.native import build as build_module
from engine.native import key, machine
from engine.native.build import build, build_into, main
from engine.native.compiler import COMMON_FLAGS, ISA_FLAGS, find_compiler
from engine.native.compiler import Compiler as Found
from engine.native.errors import BuildError, NoCompilerError
from tests.support.native_sources import Compiler, building, needs_compiler

BREAK = 'case "$*" in */kernels.cpp*) echo "kernels.cpp: error: oh dear" >&2; exit 1;; esac'
SLOW = 'case "$*" in */kernels.cpp*) sleep 20;; esac'


def use(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("**/*.so"))


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# What is built


@needs_compiler
def test_a_library_is_built_once(sources: Path, cache: Path, compiler: Compiler) -> None:
    library = build(sources)
    assert libraries(cache) == [library]
    assert torch.__version__ in library.name
    count = len(compiler.calls("-c"))
    assert build(sources) == library
    assert len(compiler.calls("-c")) == count and compiler.links == 1
    assert not list(cache.glob("*.tmp-*")), "work folders are removed"


@needs_compiler
@pytest.mark.usefixtures("all_sets")
def test_each_file_has_its_flags(sources: Path, compiler: Compiler) -> None:
    build(sources)
    (bindings,) = compiler.calls("bindings.cpp")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    assert abi in bindings and "-O2" in bindings and "-mavx2" not in bindings
    assert "-DMANTA_WITHOUT" not in bindings
    for isa in ("avx2", "avx512", "avx512bf16", "amx"):
        (call,) = compiler.calls(f"-DMANTA_ISA={isa} ")
        assert "-O3" in call and ("-mavx512bf16" in call) == (isa in ("avx512bf16", "amx"))
        assert ("-mamx-bf16" in call) == (isa == "amx")
    (link,) = compiler.calls("-shared")
    assert "-fopenmp" not in link and "gomp" not in link


@needs_compiler
def test_the_library_does_not_say_where_it_was_compiled(sources: Path) -> None:
    (sources / "kernels.cpp").write_text(
        "#define JOIN_(a, b) a##b\n#define JOIN(a, b) JOIN_(a, b)\n"
        "const char* JOIN(where_, MANTA_ISA)() { return __FILE__; }\n"
        "int JOIN(threads_, MANTA_ISA)() { return JOIN(where_, MANTA_ISA)()[0]; }\n"
    )
    content = build(sources).read_bytes()
    assert str(sources).encode() not in content and b"csrc/kernels.cpp" in content


@needs_compiler
@pytest.mark.usefixtures("all_sets")
def test_an_old_compiler_leaves_a_set_out(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = 'case "$*" in *-mavx512bf16*) exit 1;; esac'
    old = use(Compiler(tmp_path / "old", refuse), monkeypatch)
    build(sources)
    (bindings,) = old.calls("bindings.cpp")
    assert "-DMANTA_WITHOUT_AVX512BF16" in bindings and "-DMANTA_WITHOUT_AVX512 " not in bindings
    assert not old.calls("-DMANTA_ISA=avx512bf16") and old.calls("-DMANTA_ISA=avx512 ")


@needs_compiler
def test_only_this_processors_sets_are_compiled(
    sources: Path, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shipped has all; the two don't take each other's place."""
    monkeypatch.setattr("engine.native.build.instruction_sets", lambda known: list(known)[:2])
    library = build(sources)
    assert [isa for isa in ISA_FLAGS if compiler.calls(f"-DMANTA_ISA={isa} ")] == [
        "avx2",
        "avx512",
    ]
    (bindings,) = compiler.calls("bindings.cpp")
    assert "-DMANTA_WITHOUT_AVX512BF16" in bindings and "-DMANTA_WITHOUT_AMX" in bindings
    build_into(cache / "shipped", sources)
    assert compiler.calls("-DMANTA_ISA=amx ")
    assert build(sources) == library and len(libraries(cache)) == 3


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("avx2 fma f16c", ["avx2"]),
        ("avx2 avx512f avx512bw avx512vl avx512dq", ["avx2", "avx512"]),
        ("avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16", ["avx2", "avx512", "avx512bf16"]),
        (
            "avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16",
            list(ISA_FLAGS),
        ),
        ("", list(ISA_FLAGS)),  # it doesn't tell
    ],
)
def test_sets_of_a_processor(flags: str, sets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processor_flags", lambda: frozenset(flags.split()))
    assert machine.instruction_sets(ISA_FLAGS) == sets


@needs_compiler
def test_a_compiler_without_the_first_set_is_too_old(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path / "old", 'case "$*" in *-mavx2*) exit 1;; esac'), monkeypatch)
    with pytest.raises(BuildError, match=r"can't compile C\+\+20 for AVX2; install g\+\+ 11"):
        build(sources)


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_instruction_sets_share_no_function(tmp_path: Path) -> None:
    """The linker keeps one of several inline functions of a name, such as std::sort's. If it kept
    that of AVX-512, a processor without it would stop."""
    functions = []
    for isa in ("avx2", "avx512"):
        target = tmp_path / f"{isa}.o"
        # -O1: what is left out of line with -O3 is left out of line here too, and it is quicker.
        flags = [*COMMON_FLAGS, "-O1", *ISA_FLAGS[isa], f"-DMANTA_ISA={isa}", "-o", str(target)]
        source = str(build_module.SOURCE_DIR / "kernels.cpp")
        subprocess.run(["g++", *flags, "-c", source], check=True)
        listed = subprocess.run(["nm", "-C", target], capture_output=True, text=True, check=True)
        functions.append(set(re.findall(r"^\w+ [WTui] (.+)$", listed.stdout, re.M)))
    assert all(functions)
    assert functions[0] & functions[1] == set()


def test_sources_that_are_missing_are_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="sources are not there"):
        build(tmp_path)


# The compiler


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "g++ 12.2"),
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", "g++ 11.4"),
        ("g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-28)", "g++ 8.5"),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 13.3.0", None),
        ("Debian clang version 14.0.6", "clang++ 14.0"),
        ("strange", "strange"),
    ],
)
def test_a_compiler_is_named_shortly(version: str, says: str | None) -> None:
    assert str(Found(("x",), version)) == (says or "x86_64-conda-linux-gnu-c++ 13.3")


def test_no_compiler_is_told(no_compiler: None, sources: Path) -> None:
    with pytest.raises(NoCompilerError, match=r"no C\+\+ compiler; install g\+\+ 11 or newer"):
        build(sources)


def test_a_compiler_that_is_asked_for_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(NoCompilerError, match=r"\$CXX is /nowhere/g\+\+, which doesn't run"):
        find_compiler()


def test_clang_has_another_openmp_than_gcc(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path / "clang", 'echo "clang version 17.0.1"; exit 0'), monkeypatch)
    fake = key.Torch(tmp_path / "torch", "9.9", "")
    monkeypatch.setattr(build_module, "installed_torch", lambda: fake)
    (fake.folder / "lib").mkdir(parents=True)
    (fake.folder / "lib/libgomp.so.1").touch()
    with pytest.raises(BuildError, match=r"clang\+\+ 17.0 compiles for another OpenMP"):
        build(sources)


# Failures


@needs_compiler
def test_a_failed_build_is_remembered_for_a_while(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = use(Compiler(tmp_path / "broken", BREAK), monkeypatch)
    with pytest.raises(
        BuildError, match=r"g\+\+ [\d.]+ failed on kernels\.avx\w+; look into .*log"
    ):
        build(sources)
    assert "oh dear" in (cache / "build.log").read_text()
    assert not libraries(cache)
    count = len(broken.calls("-DMANTA_ISA"))
    with pytest.raises(BuildError, match="failed on kernels"):
        build(sources)
    assert len(broken.calls("-DMANTA_ISA")) == count
    with pytest.raises(BuildError):
        build(sources, retry=True)
    assert len(broken.calls("-DMANTA_ISA")) > count

    count = len(broken.calls("-DMANTA_ISA"))
    (note,) = cache.glob("*.failed")
    hours_ago = time.time() - 3601
    os.utime(note, (hours_ago, hours_ago))
    with pytest.raises(BuildError):
        build(sources)
    assert len(broken.calls("-DMANTA_ISA")) > count


@needs_compiler
def test_another_compiler_is_tried_at_once(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = 'case "$*" in *--version*) echo "g++ (X) 99.1.0"; exit 0;; esac'
    use(Compiler(tmp_path / "broken", BREAK), monkeypatch)
    with pytest.raises(BuildError):
        build(sources)
    use(Compiler(tmp_path / "newer", newer), monkeypatch)
    assert build(sources).is_file()
    assert len(list(cache.glob("*.failed"))) == 1


@needs_compiler
def test_success_ends_the_memory_of_a_failure(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Compiler(tmp_path / "broken", BREAK), monkeypatch)
    with pytest.raises(BuildError):
        build(sources)
    use(Compiler(tmp_path / "sound"), monkeypatch)
    build(sources, retry=True)
    assert not list(cache.glob("*.failed"))


@needs_compiler
def test_a_build_that_takes_too_long_is_killed(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = use(Compiler(tmp_path / "slow", SLOW), monkeypatch)
    monkeypatch.setattr(build_module, "LIMIT_S", 3.0)
    began = time.monotonic()
    with pytest.raises(BuildError, match="took longer than"):
        build(sources)
    assert time.monotonic() - began < 15
    assert has_ended(slow.wait_for("-DMANTA_ISA=avx2"))


@needs_compiler
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_that_cannot_be_written_is_told(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """A file in the folder's place stops root too, which a mode would not."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANTA_CACHE_DIR", str(tmp_path / "file" / below))
    with pytest.raises(BuildError, match=r"can't be written .*; set MANTA_CACHE_DIR"):
        build(sources)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert build_module.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MANTA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_module.cache_folder() == tmp_path / "manta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_module.cache_folder() == tmp_path / ".cache/manta"


# Several processes


@needs_compiler
def test_two_processes_build_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = 'case "$*" in *bindings.cpp*) sleep 3;; esac'
    compiler = use(Compiler(tmp_path / "slow", lag), monkeypatch)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(**building(sources), **pipes) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert compiler.links == 1 and len(compiler.calls("bindings.cpp")) == 1
    (builder,) = [words for _, words in said if "building the CPU kernels with g++" in words]
    count = 1 + len(machine.instruction_sets(ISA_FLAGS))
    assert f"{count} files" in builder and "built the CPU kernels in" in builder
    assert sum("waiting for another process" in words for _, words in said) == 1


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_no_half_library(
    sources: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    slow = use(Compiler(tmp_path / "slow", SLOW), monkeypatch)
    process = subprocess.Popen(**building(sources), stderr=subprocess.DEVNULL)
    compiling = slow.wait_for("-DMANTA_ISA=avx2")
    process.send_signal(number)
    process.wait(30)
    assert not libraries(cache) and not list(cache.glob("*.failed"))
    if number == signal.SIGINT:
        assert has_ended(compiling), "Ctrl-C ends the compilers"
        assert not list(cache.glob("*.tmp-*"))
    for call in slow.calls("-DMANTA_ISA"):
        with suppress(ProcessLookupError):
            os.killpg(int(call.split()[0]), signal.SIGKILL)
    use(Compiler(tmp_path / "quick"), monkeypatch)
    library = build(sources)
    assert libraries(cache) == [library]
    assert not list(cache.glob("*.tmp-*")), "what a killed build has left is removed"


# What a name stands for


def test_the_name_changes_with_what_matters(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_here = key.installed_torch()
    assert torch_here.version == torch.__version__
    names = [key.library_stem(sources, torch_here)]
    assert key.library_stem(sources, torch_here) == names[0]
    names.append(key.library_stem(sources, torch_here._replace(version="9.9")))
    names.append(key.library_stem(sources, torch_here._replace(description="another commit")))
    monkeypatch.setattr(key, "KERNEL_FLAGS", ("-O1",))
    names.append(key.library_stem(sources, torch_here))
    (sources / "more.h").write_text("// a header")
    names.append(key.library_stem(sources, torch_here))
    (sources / "more.h").write_text("// a change")
    names.append(key.library_stem(sources, torch_here))
    assert len(set(names)) == len(names)
    (sources / "README.md").write_text("no source")
    assert key.library_stem(sources, torch_here) == names[-1]
    old, new = (Found(("g++",), f"g++ {number}") for number in (11, 12))
    assert key.tool_key(old, ()) != key.tool_key(new, ())


# The command


@needs_compiler
def test_the_shipped_form_replaces_older_ones(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "manta_cpu_kernels-1.0-old.so").touch()
    shipped = build_into(folder, sources)
    assert list(folder.iterdir()) == [shipped]
    assert shipped.stem == key.library_stem(sources, key.installed_torch())
    assert shipped.read_bytes() == build(sources, for_all=True).read_bytes()


@needs_compiler
def test_the_command_builds(
    sources: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([], sources) == 0
    assert capsys.readouterr().out == f"CPU kernels: {libraries(cache)[0]}\n"
    assert main(["--into", str(tmp_path / "lib")], sources) == 0
    assert len(list((tmp_path / "lib").iterdir())) == 1


def test_the_command_without_a_compiler_tells_the_remedy(
    no_compiler: None,
    sources: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([], sources) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "there is no C++ compiler; install g++ 11 or newer" in line
    assert main(["--into", str(tmp_path / "lib")], sources) == 1


def test_the_command_on_another_platform_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert main(["--into", str(tmp_path / "lib")]) == 0
    assert "x86-64 only" in capsys.readouterr().out
