"""`python -m decodegap VERB`."""

import sys

try:
    from decodegap.cli import main

    code = main()
except KeyboardInterrupt:  # while its own modules are loaded
    print("decode-gap: stopped before anything was begun", file=sys.stderr)
    code = 130
sys.exit(code)
