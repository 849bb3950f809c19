"""``python -m fastir``."""

from fastir.cli import main

raise SystemExit(main())
