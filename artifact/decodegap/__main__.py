"""`python -m decodegap VERB`."""

import sys

said = "stopped before anything was begun"
try:
    from decodegap.cli import main

    said = "stopped; the same command starts again"  # where a verb was stopped at work, `main` says what is kept
    code = main()
except KeyboardInterrupt:
    print(f"decode-gap: {said}", file=sys.stderr)
    code = 130
sys.exit(code)
