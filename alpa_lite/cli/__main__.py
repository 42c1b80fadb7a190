"""`python -m alpa_lite.cli` is `alpa-lite`."""

from alpa_lite.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
