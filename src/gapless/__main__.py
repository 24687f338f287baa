"""`python -m gapless`: the command line."""

from gapless.cli import main

if __name__ == "__main__":
    main()
