"""Files and functions of stacks: those of Python and of public libraries stay, relative to their package.

Files of the project become ``project/1/word_2.py``, one number a folder and one a name, in which harmless words stay:
``acme_loss.py`` becomes ``word_2_loss.py``, and attribution still sees a loss.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from memtrace.attribution.origin import LIBRARIES, is_cpp
from memtrace.scrub.hiding import Hiding
from memtrace.scrub.words import CPP_NAMESPACE, PACKAGES

_INSTALLED = re.compile(r"(?:.*/)?((?:site|dist)-packages)/(([\w.-]+?)(?:\.py)?(?:/.*)?)")
_STANDARD = re.compile(r"(?:.*/)?(lib(?:64)?/python\d(?:\.\d+)?t?|[A-Za-z]:/.*Lib)/((\w+)(?:\.py)?(?:/.*)?)")
_PLAIN = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*")
_BARE = re.compile(r"\?\?|<(?:string|stdin|unknown|__array_function__ internals)>|<eval_with_key>\.\d+|")
_FROZEN = re.compile(r"<frozen (\w+)[\w.]*>")
_SYSTEM = re.compile(
    r"(?:lib(?:c|m|dl|pthread|stdc\+\+|gcc_s|python[\d.]+|cuda\w*|cudart\w*|cublas\w*|cudnn\w*|nccl\w*|torch\w*|c10\w*)"
    r"(?:[-.][\d.]+)?\.so[\d.]*|ld-linux[\w.-]*|python[\d.]*)"
)
_EXTENSION = re.compile(r"\.(?:py|pyx|pyi|cpp|cc|cxx|c|h|hpp|cu|cuh|so|dll|dylib|pyd)$|\.so[\d.]+$")
_WINDOWS = re.compile(r"[A-Za-z]:([\\/])")
_SCRUBBED = re.compile(r"(?:C:/)?(project/\d+/.+)", re.DOTALL)
_INDUCTOR = re.compile(r"torchinductor_\w+/")
_HOMES = re.compile(r"(?:^|/)(?:home|Users|Documents and Settings)/([^/]+)(?=/|$)|torchinductor_(\w+)/")
_EVERYBODY = frozenset({
    "root", "user", "users", "ubuntu", "admin", "runner", "jovyan", "ec2-user", "centos", "debian", "opc",
    "sagemaker-user", "azureuser", "shared", "default", "public", "docker", "vscode", "coder", "gitpod", "kaggle",
    "colab",
})  # fmt: skip
_SHORTEST_PERSON = 3
_PATH_IN_NAME = re.compile(r"(?:[A-Za-z]:[\\/]|/|\\\\)(?:[\w.@+ -]+[\\/])+[\w.@+-]+|~/[\w./-]+")
_LONGEST = 4096  # of a path, what systems allow


class FrameScrubber:
    """Stacks without personal things. People are known by the home folders in all paths of the snapshot."""

    def __init__(self, raw: Any, hiding: Hiding) -> None:
        self._hiding = hiding
        self._stacks: dict[int, tuple[Any, list[Any]]] = {}  # by id; old lists are held, so that no id is given again
        self._of_object: dict[int, dict[str, Any]] = {}
        self._frames: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._files: dict[str, tuple[str, bool]] = {}
        people = {person for frame in _all_frames(raw) for person in _people(frame.get("filename"))}
        hiding.people = frozenset(people)
        for person in sorted(people):
            hiding.remove("user names", person)

    def stack(self, frames: Any) -> list[dict[str, Any]] | None:
        """A stack; lists that were one object stay one, which says that two events came from one call."""
        if not isinstance(frames, (list, tuple)):
            return None
        known = self._stacks.get(id(frames))
        if known is None:
            made = self._of_object
            new = [made.get(id(frame)) or self._frame(frame) for frame in frames if isinstance(frame, dict)]
            known = self._stacks[id(frames)] = (frames, new)
        return known[1]

    def _frame(self, frame: dict[str, Any]) -> dict[str, Any]:
        filename, name = (part if isinstance(part := frame.get(key), str) else "" for key in ("filename", "name"))
        line, operator = frame.get("line"), frame.get("fx_node_op")
        line = line if type(line) in (int, float) else 0
        operator = operator if isinstance(operator, str) and self._hiding.is_harmless(operator) else None
        known = self._frames.get((filename, name, line, operator))
        if known is None:
            file, is_public = self._file(filename, name)
            known = {"filename": file, "line": line, "name": self._function(filename, name, is_public)}
            known |= {"fx_node_op": operator} if operator is not None else {}
            self._frames[filename, name, line, operator] = known
        self._of_object[id(frame)] = known
        return known

    def _file(self, filename: str, name: str) -> tuple[str, bool]:
        """(the path that stays, whether it is a public library's)."""
        path = filename.replace("\\", "/")
        if "/" not in path and CPP_NAMESPACE.match(name) and is_cpp(filename, name) and not self._hiding.names(path):
            return filename, True  # a bare name of PyTorch's own sources, as symbolised stacks have them
        known = self._files.get(filename)
        if known is None:
            public = _public_path(path) if len(path) <= _LONGEST else None
            is_public = public is not None and not self._hiding.names(public)
            if is_public and public != path:
                self._hiding.remove("paths", filename)
            known = _as_written(filename, public if public and is_public else self._project_path(path)), is_public
            known = self._files[filename] = (filename, is_public) if not path else known
        return known

    def _project_path(self, path: str) -> str:
        done = _SCRUBBED.fullmatch(path)
        if done is not None and self._hiding.is_harmless(done[1]):
            return done[1]
        folder, _, base = path[-_LONGEST:].rpartition("/")
        extension = _EXTENSION.search(base)
        stem = base[: extension.start()] if extension else base
        self._hiding.number("project files", path)
        if self._hiding.options.keep_names and stem and not self._hiding.names(base):
            self._hiding.keep("project files", stem)
        else:
            stem = self._hiding.words(stem) or "file"
        last = folder.rpartition("/")[2]
        inside = f"{last}/" if last.isalpha() and self._hiding.is_harmless(last) else ""
        inside = "torchinductor_user/" if _INDUCTOR.search(path) else inside
        number = self._hiding.number("project folders", folder)
        return f"project/{number}/{inside}{stem}{extension[0] if extension else ''}"

    def _function(self, filename: str, name: str, is_public: bool) -> str:
        hiding, text = self._hiding, _PATH_IN_NAME.sub("…", name[:_LONGEST])
        if text != name:
            hiding.remove("paths", name)
        is_own = not is_public or (_BARE.fullmatch(filename) is not None and filename != "??")
        is_own = not CPP_NAMESPACE.match(name) if is_cpp(filename, name) else is_own
        if hiding.names(text) or (is_own and hiding.options.functions):
            text = hiding.words(text)
        elif is_own and hiding.words(text) != text:
            hiding.keep("functions", text)
        return text


def _public_path(path: str) -> str | None:
    """The part of a path that everybody's snapshots hold; None for a project's own file."""
    frozen = _FROZEN.fullmatch(path)
    if _BARE.fullmatch(path) or (frozen is not None and frozen[1] in sys.stdlib_module_names):
        return path
    installed = _INSTALLED.fullmatch(path)
    if installed is not None:
        return f"{installed[1]}/{installed[2]}" if installed[3] in PACKAGES and _is_plain(installed[2]) else None
    standard = _STANDARD.fullmatch(path)
    if standard is not None and standard[3] in sys.stdlib_module_names and _is_plain(standard[2]):
        return f"{'Lib' if ':' in standard[1] else standard[1]}/{standard[2]}"
    parts = path.split("/")
    for i, part in enumerate(parts[:-1]):
        within = "/".join(parts[i + 1 :])
        if part in LIBRARIES and within.startswith(LIBRARIES[part]) and _is_plain(within):
            return f"{part}/{within}"
    if _SYSTEM.fullmatch(parts[-1]):
        return parts[-1]
    is_module = len(parts) == 1 and path.removesuffix(".py") in sys.stdlib_module_names
    return path if is_module else None


def _is_plain(path: str) -> bool:
    return _PLAIN.fullmatch(path) is not None and ".." not in path.split("/")


def _as_written(original: str, path: str) -> str:
    """``path`` with the original's separators and, for a Windows path, a drive: findings ask which system it was."""
    windows = _WINDOWS.match(original)
    return f"C:{windows[1]}{path.replace('/', windows[1])}" if windows else path


def _people(filename: Any) -> Iterator[str]:
    """Names of people in whose home folders a path lies; names that any machine has are left out."""
    if isinstance(filename, str) and len(filename) <= _LONGEST:
        for match in _HOMES.finditer(filename.replace("\\", "/")):
            name = (match[1] or match[2]).lower()
            if len(name) >= _SHORTEST_PERSON and name not in _EVERYBODY:
                yield name


def _all_frames(raw: Any) -> Iterator[dict[str, Any]]:
    """Every frame, and whatever else is a dictionary with a file name; each container once."""
    seen: set[int] = set()
    waiting = [raw]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                if "filename" in item:
                    yield item
                waiting += [part for part in item.values() if isinstance(part, (dict, list, tuple))]
            else:
                waiting += item
