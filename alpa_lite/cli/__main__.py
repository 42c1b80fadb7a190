"""Run `alpa-lite` as `python -m alpa_lite.cli`."""

from alpa_lite.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
