"""The command `fedpriv`, which is also `python -m fedpriv`."""

import gc
import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line; an interrupt while it is being imported leaves no traceback."""
    # Garbage collection over all imported objects, most of them torch's, would take a quarter of
    # the time of a short command. So it runs less often, and not at the end.
    gc.set_threshold(700, 10, 1000)
    # A character that a terminal cannot show must not end a run that has been charged.
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
