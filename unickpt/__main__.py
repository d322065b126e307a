"""`python -m unickpt`, the command line, also where its program is not on the PATH."""

from unickpt.cli.main import main

if __name__ == "__main__":
    main()
