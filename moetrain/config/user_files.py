"""Runs Python files of a user: families of models (``--import``), rewards, environments."""

import sys
from pathlib import Path
from types import ModuleType

from moetrain.config.sources import ConfigError, shortened


def run_file(path: Path, field: str, name: str) -> ModuleType:
    """Run a Python file and return its module.

    Args:
        path: the file.
        field: the setting or option that names it, for errors.
        name: what that setting says, for errors.

    Raises:
        ConfigError: it is no Python file, or raises.
    """
    if path.suffix != ".py":
        raise ConfigError(field, f"{str(path)!r} is not a Python file; its name must end in .py")
    module = ModuleType(f"moetrain_user_{path.stem.replace('.', '_')}")
    module.__file__ = str(path.resolve())  # it may start a process of its own elsewhere
    sys.modules[module.__name__] = module  # dataclasses and pickle look it up
    try:
        # Python's own loader takes the byte code of a file that was edited within the same second.
        code = compile(path.read_bytes(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:  # a user's file, whatever it raises
        problem = f"cannot load {name!r}: {type(error).__name__}: {shortened(str(error))}"
        raise ConfigError(field, problem) from error
    return module
