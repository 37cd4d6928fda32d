"""File names of frames, cut to what is public: where a path lies in an installed package or the standard library."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from memtrace.scrub.vocabulary import LIBRARIES, PACKAGES

_INSTALLED = re.compile(r"^(?:.*/)?(site-packages|dist-packages)/(.+)$")
_STANDARD = re.compile(r"^(?:.*/)?(lib(?:64)?/(?:python|pypy)\d(?:\.\d+)?t?)/(.+)$")
_STANDARD_WINDOWS = re.compile(r"^[A-Za-z]:/(?:.*/)?Lib/(.+)$", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*")
_SYNTHETIC = re.compile(r"\?\?|<(?:string|stdin|unknown|__array_function__ internals)>|<eval_with_key>\.\d+|")
_FROZEN = re.compile(r"<frozen ([\w.]+)>")
_EXTENSION = re.compile(r"\.(py|pyx|pyi|cpp|cc|cxx|c|h|hpp|cu|cuh|so|dll|dylib|pyd)$|\.so[\d.]+$")
_SYSTEM_LIBRARY = re.compile(
    r"(?:lib(?:c|m|dl|pthread|stdc\+\+|gcc_s|python[\d.]+|cuda\w*|cudart\w*|cublas\w*|cudnn\w*|nccl\w*|torch\w*|c10\w*)"
    r"(?:[-.][\d.]+)?\.so[\d.]*|ld-linux[\w.-]*|python[\d.]*)"
)
_HOMES = re.compile(r"(?:^|/)(?:home|Users|Documents and Settings)/([^/]+)(?=/|$)|torchinductor_(\w+)/")
_EVERYBODY = frozenset({
    "root", "user", "users", "ubuntu", "admin", "runner", "jovyan", "ec2-user", "centos", "debian", "opc",
    "sagemaker-user", "azureuser", "shared", "default", "public", "docker", "vscode", "coder", "gitpod", "kaggle",
    "colab",
})  # fmt: skip
_SHORTEST_NAME = 3
LONGEST_PATH = 4096  # what the system allows; longer ones are nobody's files
WINDOWS = re.compile(r"^[A-Za-z]:[\\/]")


def slashed(filename: str) -> str:
    """The path with ``/`` between its parts."""
    return filename.replace("\\", "/")


def user_names(filenames: Iterable[str]) -> set[str]:
    """Names of the people in whose home folders the paths lie; names that any machine has are left out."""
    found = set()
    for filename in filenames:
        if len(filename) > LONGEST_PATH:
            continue
        for match in _HOMES.finditer(slashed(filename)):
            name = (match[1] or match[2] or "").lower()
            if len(name) >= _SHORTEST_NAME and name not in _EVERYBODY:
                found.add(name)
    return found


def library_roots(filenames: Iterable[str]) -> dict[str, str]:
    """Folder of a library outside ``site-packages`` -> its name, by files that only the library itself has."""
    found = {}
    for filename in filenames:
        parts = slashed(filename).split("/") if len(filename) <= LONGEST_PATH else []
        for i, part in enumerate(parts[:-1]):
            if part in LIBRARIES and "/".join(parts[i + 1 :]).startswith(LIBRARIES[part]):
                found["/".join(parts[: i + 1])] = part
    return found


def public_path(filename: str, roots: dict[str, str]) -> tuple[str, str] | None:
    """(path as it may stay, package or "") of a file that is part of a package or of Python; None for any other.

    ``roots`` comes from :func:`library_roots`. Paths keep their separators, and Windows paths a drive, since findings
    ask which system it was.
    """
    path = slashed(filename)
    if len(path) > LONGEST_PATH:
        return None
    if _SYNTHETIC.fullmatch(path):
        return filename, ""
    frozen = _FROZEN.fullmatch(path)
    if frozen:
        return (filename, "") if _is_standard(frozen[1].replace(".", "/")) else None
    installed = _INSTALLED.match(path)
    if installed:
        if not _is_plain(installed[2]):
            return None
        return _as_written(filename, f"{installed[1]}/{installed[2]}"), installed[2].split("/")[0]
    standard = _STANDARD.match(path)
    if standard and _is_standard(standard[2]):
        return _as_written(filename, f"{standard[1]}/{standard[2]}"), ""
    standard = _STANDARD_WINDOWS.match(path)
    if standard and _is_standard(standard[1]):
        return _as_written(filename, f"Lib/{standard[1]}"), ""
    parts = path.split("/")
    for i in range(len(parts) - 1, 0, -1):
        name = roots.get("/".join(parts[:i]))
        if name is not None and _is_plain("/".join(parts[i:])):
            return _as_written(filename, "/".join((name, *parts[i:]))), name
    if _SYSTEM_LIBRARY.fullmatch(parts[-1]):
        return _as_written(filename, parts[-1]), ""
    return (filename, "") if "/" not in path and _is_standard(path) else None


def _is_plain(path: str) -> bool:
    return _PLAIN.fullmatch(path) is not None and ".." not in path.split("/")


def _is_standard(path: str) -> bool:
    """Whether a path relative to the library folder is a module of Python's own."""
    first = path.split("/")[0]
    return _is_plain(path) and first.removesuffix(".py") in sys.stdlib_module_names


def _as_written(original: str, path: str) -> str:
    """``path`` with the original's separators and, for a Windows path, a drive."""
    if not WINDOWS.match(original):
        return path
    return "C:" + original[2] + path.replace("/", original[2])


def project_path(filename: str, folder: int, stem: str) -> str:
    """A pseudonym that keeps the kind of file: ``project/1/file_2.py``."""
    extension = _EXTENSION.search(slashed(filename))
    return _as_written(filename, f"project/{folder}/{stem}{extension[0] if extension else ''}")


def folder_of(filename: str) -> str:
    """The folder a file lies in."""
    return slashed(filename).rpartition("/")[0]


def basename(filename: str) -> str:
    """The file's own name, without an extension that :func:`project_path` adds again."""
    return _EXTENSION.sub("", slashed(filename).rpartition("/")[2])


def is_widely_known(package: str) -> bool:
    """Whether an installed package says nothing about who uses it."""
    return package in PACKAGES or package.removesuffix(".py") in PACKAGES
