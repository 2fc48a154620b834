"""Packaging: a wheel carries the C++ libraries of all instruction sets, ready built (ops/kernel_build.py).

An editable install builds none of them, so that it is quick: a start builds those of its own machine. A wheel that is
made without a C++ compiler has none either, and says "any" in its name.
"""

import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def kernel_build() -> ModuleType:
    """The module of that name, without the package around it, which imports torch."""
    path = Path(__file__).resolve().parent / "ops" / "kernel_build.py"
    spec = importlib.util.spec_from_file_location("kernel_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithLibraries(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if COMPILER is None:
            self.warn("no C++ compiler found: the wheel carries no C++ libraries, so those who install it need one")
            return
        directory = Path(self.build_lib) / "compiled_llm" / "ops" / "libraries"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            libraries = kernel_build().shipped()
            list(pool.map(lambda library: library.build(COMPILER, directory, library.file_name()), libraries))
        kernel_build().write_digests(directory)


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether a wheel is for one system."""
        return COMPILER is not None


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The libraries call nothing of Python: any version and any ABI of it will do."""
        python, abi, system = super().get_tag()
        return (python, abi, system) if self.root_is_pure else ("py3", "none", system)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": Wheel})
