"""``python -m shadowrun``."""

from __future__ import annotations

import sys

from shadowrun.cli.main import main

sys.exit(main())
