"""Errors that the user of a program can put right: one line on stderr, exit status 2."""

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave can't be used; the message says what, and what to do."""


def exit_status(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Run `main(argv)`; an `InputError` ends in one line and status 2, a failing disk in status 1, a Ctrl-C in 130."""
    try:
        return main(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before there was anything to save", file=sys.stderr)
        return 130
