"""The command `fedpriv`, which is also `python -m fedpriv`."""

import gc
import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line; an interrupt while it is being imported leaves no traceback."""
    # To look for garbage among all that is imported, torch above all, takes a quarter of the time
    # in which a command starts and ends. So it is done less often, and not at the end.
    gc.set_threshold(700, 10, 1000)
    # What a terminal cannot show must end no run that has been charged.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from fedpriv import cli  # noqa: PLC0415

        cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
