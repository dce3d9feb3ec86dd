#!/usr/bin/env bash
# Runs the slow tests file by file: many start a service with a Ray of its own, of which a process holds one.
# Options go to pytest; FILES="a.py b.py" runs these only. Ends with a table and fails if any file did.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
FILES=${FILES:-$(grep -rlE 'mark\.slow' tests --include='test_*.py' | sort)}
table=""
failed=0
for file in $FILES; do
  begin=$SECONDS
  "$PYTHON" -m pytest -m 'slow and not gpu' --timeout 1800 "$@" "$file"
  case $? in
    0) outcome=passed ;;
    5) outcome="none selected" ;;
    *) outcome=FAILED failed=1 ;;
  esac
  table+=$(printf '%6d s  %-14s %s' $((SECONDS - begin)) "$outcome" "$file")$'\n'
done
printf '\n%s' "$table"
exit $failed
