"""The program: ``dmlkit``, ``python -m dmlkit`` and ``torchrun -m dmlkit``."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C also ends its imports without a traceback, before it can take signals itself."""
    try:
        from dmlkit.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("stopped; run the same command again", file=sys.stderr)  # noqa: T201 - as `say_stopped` prints it
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
