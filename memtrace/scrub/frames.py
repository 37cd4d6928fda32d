"""New names for the files and functions of all frames, chosen so that attribution reads the same out of them.

Attribution looks at frames through :func:`frame_tags` and :func:`is_cpp` and compares functions for being the same one.
A pseudonym is taken only if it gives the same tags; where the tags rest on words in a project's own path (a file in a
folder ``losses``, say) the public pattern's part of the path stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from memtrace.attribution.frame_tags import FRAME_RULES, frame_tags, is_cpp
from memtrace.scrub import files
from memtrace.scrub.ledger import Ledger
from memtrace.scrub.vocabulary import CPP_NAMESPACE, FUNCTIONS

_ORDINARY = re.compile(r"__\w+__|<(?:lambda|listcomp|dictcomp|setcomp|genexpr)>")
_PATH_IN_NAME = re.compile(r"(?:[A-Za-z]:[\\/]|/)(?:[\w.@+ -]+[\\/])+[\w.@+-]+|~/[\w./-]+")
_INDUCTOR = re.compile(r"torchinductor_\w+")
_WORDS = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME = 4000
# Names of functions, to be tried in this order: plain ones, then such as the public patterns of attribution fit.
_PYTHON_FORMS = (
    "function_{}", "function_{}_loss", "cross_entropy_{}", "eval_function_{}", "_backward_function_{}",
    "rotary_function_{}", "sdpa_attention_{}", "eager_attention_{}", "init_function_{}", "initialize_weights_{}",
    "dequantize_{}", "quantize_{}", "int8_function_{}", "_build_function_{}", "rotary_cross_entropy_{}",
    "eval_function_{}_loss",
)  # fmt: skip
_CPP_FORMS = ("project::function_{}()", "project::function_{}Backward0::apply()", "project::rotary_function_{}()")


@dataclass(frozen=True, slots=True)
class Options:
    """``keep_names``: base names of project files stay. ``functions``: names of the project's functions go as well.

    ``hide``: words that no kept name of a file, package or function may contain (compared without case).
    """

    keep_names: bool = False
    functions: bool = False
    hide: tuple[str, ...] = ()


class Frames:
    """Old to new names of files and functions. ``functions`` maps every file to the functions seen in it."""

    def __init__(self, functions: Mapping[str, Collection[str]], options: Options, ledger: Ledger) -> None:
        self._options, self._ledger = options, ledger
        self._hidden = tuple(word.lower() for word in options.hide if word)
        self._people = files.user_names(functions)
        for name in sorted(self._people):
            ledger.remove("user names", name)
        roots = files.library_roots(functions)
        self._file: dict[str, str] = {}
        self._own: set[str] = set()
        for filename in functions:
            self._file[filename] = self._new_file(filename, functions[filename], roots)
        self._name: dict[tuple[str, str], str] = {}
        for filename, names in functions.items():
            for name in names:
                self._name[filename, name] = self._new_name(filename, name)

    def file(self, filename: str) -> str:
        """The new path of a file."""
        return self._file[filename]

    def name(self, filename: str, name: str) -> str:
        """The new name of a function in the file with the old path ``filename``."""
        return self._name[filename, name]

    def is_hidden(self, text: str) -> bool:
        """Whether a text names a person whose home folder was seen, or holds a word that was asked to be hidden."""
        low = text.lower()
        return any(word in low for word in self._hidden) or bool(self._people.intersection(_WORDS.split(low)))

    # -- files ----------------------------------------------------------------------------------------------------

    def _new_file(self, filename: str, names: Collection[str], roots: dict[str, str]) -> str:
        public = files.public_path(filename, roots)
        if public is not None:
            path, package = public
            known = not package or files.is_widely_known(package)
            if known or not self.is_hidden(path):
                if not known:
                    self._ledger.keep("installed packages", package)
                if path != filename:
                    self._ledger.remove("paths", filename)
                if path.startswith("<") and not path.startswith("<frozen "):
                    self._own.add(filename)  # code out of a text; whose, the name of the file doesn't tell
                return path
        if "/" not in files.slashed(filename) and self._is_native_source(filename, names):
            return filename
        self._own.add(filename)
        return self._pseudonym(filename, names)

    def _is_native_source(self, filename: str, names: Collection[str]) -> bool:
        """A bare C++ file name of PyTorch and the like, as symbolised stacks have them."""
        return all(self._is_native(name) and is_cpp(filename, name) for name in names)

    def _is_native(self, name: str) -> bool:
        """Whether a C++ function is of PyTorch, CUDA, Python or the C library, by how its name begins."""
        return CPP_NAMESPACE.match(name) is not None and not any(word in name.lower() for word in self._hidden)

    def _pseudonym(self, filename: str, names: Collection[str]) -> str:
        folder = self._ledger.number("project folders", files.folder_of(filename))
        number = self._ledger.number("project files", filename)
        stem = f"file_{number}"
        if self._options.keep_names and not self.is_hidden(files.basename(filename)):
            stem = files.basename(filename) or stem
            self._ledger.keep("project files", stem)
        wanted = _reading(filename, names)
        candidates = [files.project_path(filename, folder, stem)]
        if _reading(candidates[0], names) != wanted:
            candidates += _telling(filename, names, folder, stem)
        for candidate in candidates:
            if _reading(candidate, names) == wanted:
                if candidate is not candidates[0]:
                    self._ledger.keep("parts of project paths that attribution rests on", candidate)
                return candidate
        self._ledger.keep("frames whose attribution may differ", candidates[0])
        return candidates[0]

    # -- functions ------------------------------------------------------------------------------------------------

    def _new_name(self, filename: str, name: str) -> str:
        text = _PATH_IN_NAME.sub("…", name[:_LONGEST_NAME])
        if text != name:
            self._ledger.remove("paths", name)
        own = filename in self._own or (is_cpp(filename, name) and not self._is_native(name))
        if not own or name in FUNCTIONS or _ORDINARY.fullmatch(name) or not name:
            return text
        if self._options.functions or self.is_hidden(name):
            number, path = self._ledger.number("functions", name), self._file[filename]
            wanted = _reading(path, [name])
            for form in _CPP_FORMS if "::" in name or "(" in name else _PYTHON_FORMS:
                if _reading(path, [form.format(number)]) == wanted:
                    return form.format(number)
        self._ledger.keep("functions", text)
        return text


def _reading(filename: str, names: Iterable[str]) -> list[tuple[int, bool]]:
    """What attribution reads out of a file's frames."""
    return [(int(frame_tags(filename, name)), is_cpp(filename, name)) for name in names]


def _telling(filename: str, names: Collection[str], folder: int, stem: str) -> list[str]:
    """Pseudonyms that keep the parts of the path which the rules of attribution look for, the least telling first."""
    path = files.slashed(filename)
    if len(path) > files.LONGEST_PATH:
        return []
    spans = sorted(
        found.span()
        for rule in FRAME_RULES
        if rule.file is not None and any(rule.name is None or re.search(rule.name, name) for name in names)
        for found in re.finditer(rule.file, path)
    )
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    if not merged:
        return []
    parts = [_INDUCTOR.sub("torchinductor_user", path[start:end]).strip("/") for start, end in merged]
    plain = files.project_path(filename, folder, stem)
    head, _, tail = files.slashed(plain).rpartition("/")
    at_end = merged[-1][1] == len(path)
    folders = [*parts[:-1], parts[-1].rpartition("/")[0] if at_end else parts[-1]]
    inside = "/".join([head, *filter(None, folders), tail])
    whole = "/".join([head, *parts] if at_end else [head, *parts, tail])
    separator = plain[2] if files.WINDOWS.match(plain) else "/"
    return [candidate.replace("/", separator) for candidate in (inside, whole)]  # the first keeps only folders
