#!/usr/bin/env bash
# Sets up .venv in the repository with every locked package; does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
# PyTorch's own index of CPU wheels: asked only when the configured package index has no CPU build of torch.
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
LOCK=requirements/cpu.lock

stamp="$VENV/.lookonce-$(cat "$LOCK" pyproject.toml scripts/setup.sh scripts/mend_torchvision.py | sha256sum | cut -c1-16)"
[ -f "$stamp" ] && exit 0

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "lookonce needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
  exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

echo "Installing the locked packages into $VENV (about 3 GB with the engine; once)"
pip install --quiet --upgrade 'pip>=24' 'setuptools>=77,<81'
torch_pins=$(grep -E '^(torch|torchvision)==' "$LOCK")
# shellcheck disable=SC2086  # one word per pin is meant
pip install --quiet --no-deps $torch_pins 2>/dev/null || {
  echo "The package index has no CPU build of torch; taking it from PyTorch's own index"
  # shellcheck disable=SC2086
  pip install --quiet --no-deps --index-url "$TORCH_CPU_INDEX" $torch_pins
}
pip install --quiet --no-deps --requirement <(grep -vE '^(torch|torchvision)==' "$LOCK")
pip install --quiet --no-deps --no-build-isolation --editable .
"$VENV/bin/python" scripts/mend_torchvision.py
rm -f "$VENV"/.lookonce-*
touch "$stamp"
