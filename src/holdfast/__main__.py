"""The command `holdfast`. If only the library is installed, it names the missing package."""

import sys


def main() -> None:
    try:
        from holdfast.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"holdfast: the command needs {error.name}, which is not installed: pip install 'holdfast[study]'")
    run()


if __name__ == "__main__":
    main()
