#!/usr/bin/env bash
# A gate for continuous integration: the exit status shows whether the program would run on the device.
set -euo pipefail
program="$(dirname "$0")/train.py"

# A device without flaws: passes.
python -m shadowrun run --target npu --preset clean -o summary.md "$program"

# A device without lerp, which Adam needs: status 1, and a line with the reason.
status=0
python -m shadowrun run --target npu --flaws missing-lerp --fail-on unsupported "$program" || status=$?
if [ "$status" -ne 1 ]; then
  echo "expected the gate to fail with status 1, not $status" >&2
  exit 1
fi

# The same run, but only mismatches matter: passes.
python -m shadowrun run --target npu --flaws missing-lerp --fail-on mismatch "$program"

# A bound on coverage, from the data file of the last run.
python -m shadowrun coverage --fail-under 50
