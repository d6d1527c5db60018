"""The command `fedpriv`, which is also `python -m fedpriv`."""

import sys


def main() -> None:
    """Run the command line; an interrupt while it is being imported leaves no traceback."""
    try:
        from fedpriv import cli  # noqa: PLC0415

        cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
