"""Builds a place in which PyTorch's CUDA build believes that it has a card: `python tests/card/build.py .card VERSION`.

About 700 MB are downloaded (PyTorch's CUDA wheel and the Triton that it asks for) and 1.8 GB kept. The libraries of
CUDA are not: stubs stand in their place, by a C++ compiler. DIR/run starts the interpreter that ran this file there.
docs/card.md says what is real there and what is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Symbols without a version say by their first letters whose they are; one library calls its version otherwise.
BY_PREFIX = {"nccl": "libnccl", "cuFile": "libcufile", "cusparseLt": "libcusparseLt", "cu[A-Z]": "libcuda"}
VERSIONS = {"libnvshmem_host": "NVSHMEM"}
COMPILER = ["g++", "-O1", "-w", "-shared", "-fPIC", "-std=c++17"]
RUN = """#!/bin/bash
# inductor's own launcher and its workers would call the driver that is not there; cuDNN's attention cannot be called;
# what ptxas optimises is never run
export TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER=0 TORCHINDUCTOR_USE_STATIC_TRITON_LAUNCHER=0
export TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 TORCH_CUDNN_SDPA_DEPRIORITIZED=1
export DISABLE_PTXAS_OPT=1 TRITON_DISABLE_LINE_INFO=1
export TORCHINDUCTOR_CACHE_DIR={place}/cache/inductor-${{FAKE_SM:-90}} TRITON_CACHE_DIR={place}/cache/triton
export LD_LIBRARY_PATH={place}/lib PYTHONPATH={here}:{support}:{place}/site:$PYTHONPATH
exec {python} "$@"
"""


def download(place: Path, version: str) -> Path:
    """The packages, unpacked. Three equal signs mean the build with CUDA, which "==" passes over for one without."""
    site, wheels = place / "site", place / "wheels"
    if not (site / "torch").exists():
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.check_call([*get, "torch===" + version])
        wanted = zipfile.ZipFile(next(wheels.glob("torch-*.whl")))
        metadata = wanted.read(next(name for name in wanted.namelist() if name.endswith("METADATA"))).decode()
        runtime = "nvidia-cuda-runtime==13.*"  # of which its headers: Triton 3.6 brings those of CUDA 12
        subprocess.check_call([*get, re.search(r"triton[=~]=[\d.]+", metadata).group(), runtime])
        for wheel in map(zipfile.ZipFile, wheels.glob("*.whl")):
            names = wheel.namelist()
            wheel.extractall(site, [name for name in names if not name.startswith("nvidia/cu13/lib/")])
        for program in [*site.glob("triton/backends/*/bin/*"), *site.glob("torch/bin/*")]:
            program.chmod(0o755)
        shutil.rmtree(wheels)
    return site


def wanted(site: Path) -> dict[str, list[str]]:
    """The libraries of CUDA that PyTorch is linked with, and the functions that it wants of each."""
    libraries, symbols = set(), set()
    for library in (site / "torch/lib").glob("*.so"):
        linked = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        libraries |= set(re.findall(r"\[(lib(?:cu|nv|nccl)\w*\.so\.\d+)\]", linked))
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        symbols |= {line.split()[-1] for line in listed.stdout.splitlines()}
    found: dict[str, list[str]] = {}
    for library in sorted(libraries):
        stem = library.split(".")[0]
        tag = VERSIONS.get(stem, library)
        own = [name.split("@")[0] for name in symbols if name.endswith("@" + tag)]
        prefix = next((start for start, of in BY_PREFIX.items() if of == stem), None)
        own += [name for name in symbols if "@" not in name and prefix and re.match(prefix, name)]
        found[library] = sorted(own)
    return found


def build(place: Path, version: str) -> None:
    site, lib = download(place, version), place / "lib"
    lib.mkdir(parents=True, exist_ok=True)
    # the runtime first: the others write their events into it
    for library, names in sorted(wanted(site).items(), key=lambda item: "cudart" not in item[0]):
        tag, path = VERSIONS.get(library.split(".")[0], library), lib / library
        stub = 'extern "C" void card_event(const char*);\n#define WEAK extern "C" __attribute__((weak))\n'
        for name in names:
            if re.search(r"Error(String|Name)|Status(String|Name)|LastError$", name) and not name.startswith("cuda"):
                stub += f'WEAK const char* {name}(...) {{ return "no card"; }}\n'
            else:
                seen = f'card_event("kernel {name}"); ' if re.search(r"[Gg]emm|Matmul$|[Gg]emv", name) else ""
                stub += f"WEAK long {name}(...) {{ {seen}return 0; }}\n"
        path.with_suffix(".cpp").write_text(stub)
        path.with_suffix(".map").write_text(f"{tag} {{ global: *; }};\n")
        runtime = "cudart" in library
        sources = [path.with_suffix(".cpp"), HERE / ("runtime.cpp" if runtime else "vendors.cpp")]
        headers = [f"-I{site}/nvidia/cu13/include", f"-I{site}/triton/backends/nvidia/include"]
        linked = headers if runtime else [f"-L{lib}", "-l:libcudart.so.13"]
        linked.append(f"-Wl,-soname,{library},--version-script={path.with_suffix('.map')}")
        subprocess.check_call([*COMPILER, "-o", path, *sources, *linked])
    run = place / "run"
    run.write_text(RUN.format(place=place, here=HERE, support=HERE.parent / "support", python=sys.executable))
    run.chmod(0o755)


if __name__ == "__main__":
    if not (shutil.which("g++") and shutil.which("readelf")):
        sys.exit("error: make card needs g++ and binutils; on Debian: apt-get install g++ binutils")
    os.umask(0o022)
    build(Path(sys.argv[1]).resolve(), sys.argv[2])
