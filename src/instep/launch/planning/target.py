"""What shall run as ``__main__``: a script, a folder or zip file with a ``__main__``, or a module.

Looked at in the launcher, so that a mistake is one error instead of one per rank, and nothing is started for it.
"""

from __future__ import annotations

import errno
import sys
import warnings
import zipimport
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from instep.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["script", "folder", "module"]


@dataclass(frozen=True)
class Target:
    """A program.

    Attributes:
        kind: how python starts it; "folder" is a zip file, too.
        name: the path or module as typed.
        arguments: what follows it.

    """

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """What follows ``python`` on a command line that does the same."""
        return (*(("-m",) if self.kind == "module" else ()), self.name, *self.arguments)

    @property
    def stem(self) -> str:
        """A short name for the run."""
        if self.kind == "module":
            return self.name.removesuffix(".__main__").rpartition(".")[2]
        path = Path(self.name)
        return path.stem or path.resolve().name


def find_target(words: Sequence[str], *, is_module: bool) -> Target:
    """Look for the program that these words name, and compile it, without running anything.

    Raises:
        RunError: it is missing, is not Python, or has a syntax error.

    """
    if not words or not words[0]:
        what, example = ("module", "-m package.train") if is_module else ("script", "train.py")
        raise RunError(f"no {what} to run", cure=f"name it:  instep run --nproc 2 {example}")
    name, *arguments = words
    if is_module:
        _check_module(name)
        return Target("module", name, tuple(arguments))
    return Target(_check_path(Path(name), name), name, tuple(arguments))


def _check_path(path: Path, name: str) -> Kind:
    if path.is_dir():
        main = path / "__main__.py"
        if not main.is_file():
            raise RunError(
                f"the folder {name} cannot be run",
                evidence=[f"there is no {main}"],
                cure="name the script inside, or start a package by its name:  instep run -m PACKAGE",
            )
        _check_source(main)
        return "folder"
    if not path.is_file():
        raise RunError(
            f"no such script: {name}",
            evidence=[f"looked for {path.absolute()}"],
            cure=_advice(path),
        )
    try:
        archive = zipimport.zipimporter(name)
    except zipimport.ZipImportError:
        _check_source(path)
        return "script"
    if archive.find_spec("__main__") is None:
        raise RunError(f"the zip file {name} cannot be run", evidence=["there is no __main__.py in it"])
    return "folder"


def _advice(path: Path) -> str:
    """Near misses: an option behind the script's place, the suffix forgotten, the folder wrong."""
    if path.name.startswith("-"):
        return "instep's own options come before the script, the script's behind it"
    if path.with_name(path.name + ".py").is_file():
        return f"did you mean {path}.py?"
    try:
        here = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".py")
    except OSError:
        return f"the folder {path.parent} cannot be read; paths are relative to {Path.cwd()}"
    listed = ", ".join(here[:8]) + (", ..." if len(here) > 8 else "")
    return f"in {path.parent.absolute()} there are: {listed}" if here else "check the path"


def _check_source(path: Path) -> None:
    """Compile the file."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RunError(f"the script {path} cannot be read", evidence=[str(error)]) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will say them
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise RunError(f"syntax error in {path}, line {error.lineno}: {error.msg}", evidence=_pointed(error)) from error
    except ValueError as error:
        raise RunError(f"{path} is not a Python script", evidence=[str(error)]) from error


def _pointed(error: SyntaxError) -> list[str]:
    """The line of source with a caret below the place."""
    if not error.text:
        return []
    line = error.text.rstrip("\n")
    bare = line.lstrip()
    if not error.offset:
        return [bare]
    return [bare, " " * max(0, error.offset - 1 - (len(line) - len(bare))) + "^"]


def source_of(target: Target, folder: Path) -> Path:
    """The file that starting the target in this folder would run first.

    Raises:
        FileNotFoundError: there is none.

    """
    if target.kind == "module":
        spec = _find_main(target.name, folder)
        if spec is None or not spec.origin:
            raise FileNotFoundError(errno.ENOENT, "no such module", target.name)
        return Path(spec.origin)
    path = folder / target.name
    if target.kind == "folder" and path.is_dir():
        path /= "__main__.py"
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "missing", str(path))
    return path


def _find_main(name: str, folder: Path) -> ModuleSpec | None:
    """Find the module's file as ``python -m`` would, but without importing its parent packages."""
    spec = _find_spec(name, folder)
    if spec is not None and spec.submodule_search_locations is not None:
        return _find_spec(f"{name}.__main__", folder)
    return spec


def _check_module(name: str) -> None:
    spec = _find_main(name, Path.cwd())
    if spec is None:
        name += ".__main__" if _find_spec(name, Path.cwd()) else ""
        raise RunError(
            f"no module named {name}",
            evidence=[f"looked in {Path.cwd()} and in the packages of {sys.executable}"],
            cure="start from the folder that holds the package, or install it into this environment",
        )
    if spec.origin and spec.origin.endswith(".py"):
        _check_source(Path(spec.origin))


def _find_spec(name: str, folder: Path) -> ModuleSpec | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    # As in a rank: the working folder takes the place of the folder of the `instep` command.
    path: Sequence[str] = [str(folder), *sys.path[1:]]
    spec: ModuleSpec | None = None
    parents = ""
    for part in name.split("."):
        spec = _ask_finders(parents, part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
        parents += f"{part}."
    return spec


def _ask_finders(parents: str, part: str, path: Sequence[str]) -> ModuleSpec | None:
    """What the import system would find, with the finders of editable installs, but parents need not be imported."""
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(part, path)
        else:
            spec = finder.find_spec(parents + part, path if parents else None)
        if spec is not None:
            return spec
    return None
