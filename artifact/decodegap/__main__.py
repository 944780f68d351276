"""`python -m decodegap VERB`."""

import signal
import sys

said = "stopped before anything was begun"
try:
    from decodegap.cli import main

    said = "stopped; the same command starts again"  # where a verb was stopped at work, `main` says what is kept
    code = main()
except KeyboardInterrupt:
    print(f"decode-gap: {said}", file=sys.stderr)
    code = 130
if code == 130:  # make passes on a signal that its whole group was sent, so another may come while Python ends
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
sys.exit(code)
