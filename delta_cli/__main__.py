"""``python -m delta_cli`` is ``delta``."""

from delta_cli.cli import main

if __name__ == "__main__":
    main()
