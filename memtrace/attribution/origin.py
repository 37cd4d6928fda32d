"""Whose code a frame is: a library's, Python's own or the user's, wherever people keep them.

Tags and rules name libraries' files, and folders can have any name: a clone of peft, an environment called ``torch``.
So paths are brought to one form first: ``torch/nn/functional.py`` for a library, ``python3/threading.py`` for Python's
own, ``own//home/u/train.py`` for the user's; those of C and C++ begin with ``c++/``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Collection

from memtrace.snapshot.stacks import Frame

# Package folder: beginnings of its own files, by which it is known outside site-packages, too.
_LIBRARIES = """
accelerate:accelerator.py,big_modeling.py,hooks.py,optimizer.py,utils/ apex:optimizers/,normalization/
axolotl:cli/,core/,utils/ bitsandbytes:_ops.py,autograd/,backends/,functional.py,nn/,optim/
datasets:arrow_dataset.py,iterable_dataset.py deepspeed:ops/,runtime/ flash_attn:flash_attn_interface.py,layers/,ops/
lightning:fabric/,pytorch/ liger_kernel:ops/,transformers/ llamafactory:train/,model/ memtrace:capture/,record/
peft:mapping.py,peft_model.py,tuners/,utils/ pytorch_lightning:loops/,trainer/ safetensors:torch.py
torch:_compile.py,_dynamo/,_inductor/,_ops.py,autograd/,nn/,optim/,utils/ torchao:dtypes/,optim/,quantization/
torchtune:modules/,training/
transformers:core_model_loading.py,integrations/,modeling_utils.py,models/,trainer.py,utils/ triton:compiler/,runtime/
trl:kernels/,models/,trainer/ unsloth:kernels/,models/ unsloth_zoo:patching_utils.py,loss_utils.py xformers:ops/
"""
LIBRARIES = {name: tuple(own.split(",")) for name, own in (entry.split(":") for entry in _LIBRARIES.split())}

_STANDARD = re.compile(r"(?:.*/)?(?:python3[\d.]*t?|Lib|python3\d+\.zip)/((\w+)(?:\.py$|/).*|\w+\.py)$")
_INSTALLED = re.compile(r"(?:.*/)?(?:(?:site|dist)-packages|__pypackages__/[\d.]+/lib|[^/]+\.(?:whl|egg|pex|zip))/(.+)")
_CHECKOUT = re.compile(rf"(.*/)?({'|'.join(LIBRARIES)})/(.+)")
_CPP_FILE = re.compile(r"(^|\.(cpp|cc|cxx|c|h|hpp|cuh?|so[\d.]*)|\?\?)$")
_CPP_NAME = re.compile(r"::|\(|^_*Py[A-Z_]|^(__clone|_start|__libc_start_\w+|pthread_\w+)$")


def with_origins(frames: tuple[Frame, ...], outermost: Collection[int] = ()) -> tuple[Frame, ...]:
    """The same frames with paths in the form above. ``outermost``: those that stacks begin with; a script among them is
    the user's, and so are the files beside it, whatever its folder is called."""
    scripts = {_folder(frames[i]) for i in outermost if frames[i].name == "<module>"} - {""}
    beside = [_folder(frame) in scripts for frame in frames]
    paths = [_plain(frame, is_own) for frame, is_own in zip(frames, beside, strict=True)]
    installed = {package_of(path) for path in paths}
    # Clones that are in use: at most one of a library, where it isn't installed.
    clones: dict[str, Counter[str]] = {}
    for path, is_own in zip(paths, beside, strict=True):
        found = _CHECKOUT.match(path[4:]) if path.startswith("own/") and not is_own else None
        if found and found[2] not in installed and found[3].startswith(LIBRARIES[found[2]]):
            clones.setdefault(found[2], Counter())[f"own/{found[1] or ''}"] += 1
    roots = [(parent := counts.most_common(1)[0][0], f"{parent}{name}/") for name, counts in clones.items()]
    for parent, root in roots:
        inside = [path.startswith(root) and not is_own for path, is_own in zip(paths, beside, strict=True)]
        paths = [path.removeprefix(parent) if moves else path for path, moves in zip(paths, inside, strict=True)]
    return tuple(frame._replace(filename=path) for frame, path in zip(frames, paths, strict=True))


def _folder(frame: Frame) -> str:
    return frame.filename.replace("\\", "/").rpartition("/")[0]


def _plain(frame: Frame, is_own: bool) -> str:
    path = frame.filename.replace("\\", "/")
    if is_cpp(frame.filename, frame.name):
        return f"c++/{path}"
    standard = _STANDARD.match(path)
    if standard and (standard[2] or standard[1].removesuffix(".py")) in sys.stdlib_module_names:
        return f"python3/{standard[1]}"
    if path.startswith("<frozen") or (path == "<string>" and frame.name.startswith("__")):  # of data classes
        return f"python3/{path}"
    installed = None if is_own else _INSTALLED.match(path)
    return installed[1] if installed else f"own/{path}"


def package_of(path: str) -> str:
    """The library a file (in the form above) belongs to ("torch"), "" for others."""
    package = path.partition("/")[0].removesuffix(".py")
    return "" if package in ("own", "python3", "c++") else package


def is_own_code(path: str) -> bool:
    """Whether a file (in the form above) is the user's."""
    return path.startswith("own/")


def is_cpp(filename: str, name: str) -> bool:
    """Whether a frame is a C or C++ one. PyTorch splices Python frames among them, not always in the right place."""
    return _CPP_FILE.search(filename) is not None or _CPP_NAME.search(name) is not None
