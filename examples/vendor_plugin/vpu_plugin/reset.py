"""Brings the device back: ``python -m vpu_plugin.reset``. An exit status other than 0 ends the sweep."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # In your package: the vendor's own command, such as tt-smi -r. The skeleton only notes that it was called.
    if log := os.environ.get("VPU_RESET_LOG"):
        with Path(log).open("a", encoding="utf-8") as file:
            file.write("reset\n")
    sys.exit(0)
