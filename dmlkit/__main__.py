"""``python -m dmlkit`` and ``torchrun -m dmlkit``."""

from dmlkit.cli.app import main

if __name__ == "__main__":
    main()
