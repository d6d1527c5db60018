"""`python -m fedpriv` is the command `fedpriv`."""

from fedpriv.cli import main

if __name__ == "__main__":
    main()
