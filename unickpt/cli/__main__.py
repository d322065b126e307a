"""`python -m unickpt.cli`, for launchers such as torchrun that start modules."""

from unickpt.cli.main import main

if __name__ == "__main__":
    main()
