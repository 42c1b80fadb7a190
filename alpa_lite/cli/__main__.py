"""Run `alpa-lite` as `python -m alpa_lite.cli`."""

from alpa_lite.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
