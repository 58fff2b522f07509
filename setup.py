"""Build script: the five top-level folders become one import package; Cython is compiled beside their callers."""

from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).parent
# `planner/` is imported as `sbp.planner`, and so on: `comm` and `cuda` are other people's top-level names.
FOLDERS = {"sbp": "sbp", "planner": "sbp.planner", "ops": "sbp.ops", "cuda": "sbp.cuda", "comm": "sbp.comm"}


def packages():
    """Every folder below the five that holds Python, by its import name."""
    found = {}
    for top, package in FOLDERS.items():
        for folder in [ROOT / top, *sorted((ROOT / top).rglob("*/"))]:
            if any(folder.glob("*.py")) or any(folder.glob("*.cu")) or any(folder.glob("*.yaml")):
                relative = folder.relative_to(ROOT / top)
                found[".".join((package, *relative.parts))] = str(folder.relative_to(ROOT))
    return found


def extensions():
    """One extension module per .pyx file."""
    built = []
    for top, package in FOLDERS.items():
        for source in sorted((ROOT / top).rglob("*.pyx")):
            relative = source.relative_to(ROOT / top)
            name = ".".join((package, *relative.parent.parts, source.stem))
            built.append(
                Extension(
                    name,
                    [str(source.relative_to(ROOT))],
                    include_dirs=[numpy.get_include()],
                    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
                    extra_compile_args=["-O3"],
                )
            )
    return built


PACKAGES = packages()
setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={"": ["*.cu", "*.yaml", "*.csv", "*.txt", "*.pyx", "py.typed"]},
    ext_modules=cythonize(
        extensions(),
        language_level=3,
        compiler_directives={"boundscheck": False, "wraparound": False, "cdivision": True},
    ),
)
