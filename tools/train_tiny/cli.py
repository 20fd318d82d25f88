"""What every step's command line shares: help with defaults, checked paths, errors with a name."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


class RecipeError(Exception):
    """An input that a step cannot use; the message names it and says what is expected."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the module's docstring as it is written and adds each default that exists."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def step_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of the step that is run as `python -m train_tiny.<name>`."""
    return argparse.ArgumentParser(
        prog=f"python -m train_tiny.{name}", description=description, formatter_class=_HelpFormatter)


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file; README.md says which step writes it")
    return path


def existing_folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder; README.md says which step writes it")
    return path


def existing_path(text: str) -> Path:
    return existing_folder(text) if Path(text).is_dir() else existing_file(text)


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def number_list(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers separated by commas") from None


def int_list(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def run_step(main: Callable[[], None]) -> None:
    """Run a step and end the process: 0 done, 1 the input cannot be used, 130 interrupted."""
    try:
        main()
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
